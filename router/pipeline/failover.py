"""Go on with an answer whose engine failed midway, on another replica or tier, from the very tokens that the caller has.

The tiers share one tokenizer, so the ids of the prompt and of what was sent are a prompt for any of them. What the first
engine had computed but not sent (half of a character, or the start of what may become a stop string) is computed again, or
sent first. Tool calls, structured output and the like are not continued: half of them cannot be taken over safely.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from pydantic_core import to_json

from router.upstream.engine_stream import EngineStream
from router.upstream.errors import EngineBroke, EngineStalled, UpstreamError, without_trace
from router.upstream.json_object import read_json
from router.upstream.sse import Chunk
from tiers.spec import ReplicaState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping, Sequence

    from router.pipeline.admission import Admitted
    from router.pipeline.opening import Opener
    from router.policy.decision import Decision
    from router.policy.table import PolicyStore
    from router.telemetry.tracing import Telemetry
    from router.upstream.client import Upstream
    from router.upstream.engine_stream import EngineAnswer, EngineRequest
    from router.upstream.progress import Progress, Resumption
    from tiers.fleet import Fleet, Replica

COMPLETIONS, DETOKENIZE = "/v1/completions", "/detokenize"
BROKEN_CHARACTER = "\ufffd"
CONTEXT = 8  # tokens before those whose text is asked for: what a tokenizer makes of some depends on those before
MOST_DROPPED = 8  # tokens at the end that may have no text yet: more than the bytes of one character
DETOKENIZE_TIMEOUT_S = 5.0
log = logging.getLogger(f"qarr.{__name__}")


@dataclass(frozen=True, slots=True)
class ContinuedRequest:
    """What the next engine is asked: to complete token ids."""

    origin: EngineRequest
    asked: Resumption
    ids: Sequence[int]
    done: int
    left: int
    number: int
    path: str = COMPLETIONS
    operation: str = "text_completion"
    streamed: bool = True
    wants_logprobs: bool = False
    wants_usage: bool = False
    chat: None = None
    resumption: None = None

    @property
    def priority(self) -> int:
        """Return one before that of new requests of its class: its caller is waiting in the midst of an answer."""
        return self.asked.priority - 1

    @property
    def request_id(self) -> str:
        """Return an id of its own."""
        return f"{self.origin.request_id}-c{self.number}"

    @property
    def parameters(self) -> Mapping[str, float]:
        """Return what is told of the request in traces."""
        return {**self.origin.parameters, "qarr.continued_tokens": self.done}

    def body(self, replica: Replica) -> bytes:
        """Return the request's body for one replica."""
        sampling = dict(self.asked.sampling)
        if "min_tokens" in sampling:
            sampling["min_tokens"] = max(self.asked.min_tokens - self.done, 0)
        priority = {"priority": self.priority} if replica.takes_priority else {}
        return to_json(
            {
                **sampling,
                **priority,
                "model": replica.model,
                "prompt": list(self.ids),
                "max_tokens": self.left,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        )


class StopStringJoiner:
    """Watches for stop strings that begin in what one engine computed and end in what the next one did.

    An engine looks for them in its own text only.

    Attributes:
        stopped: The string that ended the answer; None: none has.
        passed_over: What came before holds one already: it spans an earlier seam, or came when it did not count yet.
        end: Where that string ends, in characters from the beginning of what was held.

    Args:
        sent: The answer so far.
        held: What follows it and was computed, but not sent.
        stops: The strings that end the answer.
        include: Whether the string that ends it belongs to it.
    """

    def __init__(self, sent: str, held: str, stops: Sequence[str], *, include: bool) -> None:
        longest = max(map(len, stops), default=0)
        context = sent[-(longest - 1) :] if longest > 1 and include else ""
        self._stops, self._include = stops, include
        self._old, self._new, self._out = context + held, "", len(context)
        self._context = len(context)
        self.passed_over = any(stop in self._old for stop in stops)
        self.stopped: str | None = None
        self.end = 0

    def pass_on(self, text: str, *, last: bool, ended_by: str = "") -> str:
        """Take more text, and return what may go out; ``stopped`` is set once a stop string is complete.

        Args:
            text: What the next engine computed.
            last: Whether that is all.
            ended_by: The stop string that ended it, which is not in the text.
        """
        if not self._old:
            return text
        self._new += text
        whole = self._old + self._new
        seen, starts = whole + ended_by, range(len(self._old))
        found = [
            (start + len(stop), number, start)
            for number, stop in enumerate(self._stops)
            for start in starts
            if seen.startswith(stop, start)
        ]
        # The one that is complete first, of those complete at once the one that was named first, as vLLM has it.
        own = (len(seen), self._stops.index(ended_by)) if ended_by in self._stops else (len(seen) + 1, 0)
        if found and min(found)[:2] < own:
            end, number, start = min(found)
            self.stopped, self.end = self._stops[number], end - self._context
            return whole[self._out : end if self._include else start]
        begun = (start for start in starts if any(stop.startswith(whole[start:]) for stop in self._stops))
        safe = None if last else next(begun, None)
        if safe is None:
            self._old = ""
        end = len(whole) if self._include or safe is None else safe
        out, self._out = whole[self._out : end], end
        return out


@dataclass(frozen=True, slots=True)
class Failover:
    """Opens answers that go on elsewhere.

    Attributes:
        attempts: Times that one answer is gone on with.
    """

    opener: Opener
    fleet: Fleet
    policy: PolicyStore
    upstream: Upstream
    telemetry: Telemetry
    attempts: int
    default_max_tokens: int  # room that a tier's context must leave for a request that gives no limit

    async def open(self, admitted: Admitted, request: EngineRequest, sent_at: float) -> EngineAnswer:
        """Open an answer that goes on elsewhere if its engine fails.

        Raises:
            UpstreamError: As ``Upstream.open``.
        """
        answer = await self.opener.open(admitted, request, sent_at)
        if isinstance(answer, EngineStream) and request.resumption is not None:
            answer.resume = partial(self._rest, admitted.decision, request, request.resumption)
        return answer

    async def _rest(  # noqa: C901  one loop, in the order of what happens
        self,
        decision: Decision,
        request: EngineRequest,
        resumption: Resumption,
        answer: EngineStream,
        broken: EngineBroke,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the rest of an answer.

        Raises:
            EngineBroke: No other engine could go on.
        """
        progress, tried, attempts = answer.progress, set[str](), 0
        assert progress is not None
        failing, sent = answer, progress.told
        while True:
            log.warning("request %s: %s on %s", request.request_id, broken, failing.replica_id)
            await failing.abandon(broken)
            if progress.finish_reason is not None:  # nothing was missing but the end
                return
            attempts += 1
            tried.add(failing.replica_id)
            if attempts > self.attempts:
                raise broken
            joiner = await self._joiner(progress, sent, resumption, failing.replica_id)
            if joiner is None:
                raise broken
            begins = sent
            exclude = self._rounds(tried, failing.replica_id, broken)
            part = await self._next_part(answer, exclude, attempts, decision, request, resumption, broken)
            if part is None:  # every token had come
                yield Chunk(text=joiner.pass_on("", last=True), finish_reason="length")
                progress.finish_reason = "length"
                return
            answer.parts.append(part)
            self.telemetry.record_continuation(failing.replica_id, part.replica_id, len(progress.output_ids), broken)
            failing = part
            try:
                while joiner.stopped is None and (chunks := await part.read()) is not None:
                    for chunk in (chunk for chunk in chunks if chunk.choice is not None):
                        joined = _joined(joiner, chunk, resumption)
                        progress.note(chunk)
                        sent += len(joined.text)
                        if joiner.stopped is not None:
                            progress.stop_at(begins + joiner.end)
                        yield joined
                        if joiner.stopped is not None:
                            break
                await part.aclose()
            except EngineBroke as again:
                broken = without_trace(again)
            else:
                return

    async def _joiner(
        self, progress: Progress, sent: int, resumption: Resumption, failed: str
    ) -> StopStringJoiner | None:
        """Bring an answer to rest, and return what joins the next part to it; None where that cannot be done safely."""
        if not await self._settle(progress, sent, resumption, failed):
            return None
        text = progress.text
        joiner = StopStringJoiner(text[:sent], text[sent:], resumption.stops, include=resumption.includes_stop)
        # Whether a stop string that was passed over counts is not known where some tokens must come first.
        return None if joiner.passed_over and resumption.min_tokens else joiner

    def _rounds(self, tried: Collection[str], failing: str, broken: EngineBroke) -> list[Collection[str]]:
        """Return the replicas that are left out, round by round, so that none is asked twice.

        Those that have not failed this answer come first, then those that did so earlier; last the one that failed it just
        now, for it may be well but for this connection, unless it has stalled: then it would only stall again.
        """
        every = {replica.id for replica in self.fleet.replicas}
        rounds: list[Collection[str]] = [tried, every.difference(tried) | {failing}]
        if not isinstance(broken, EngineStalled):
            rounds.append(every - {failing})
        return rounds

    async def _next_part(  # noqa: PLR0917  called here alone
        self,
        answer: EngineStream,
        exclude: Sequence[Collection[str]],
        number: int,
        decision: Decision,
        request: EngineRequest,
        resumption: Resumption,
        broken: EngineBroke,
    ) -> EngineStream | None:
        """Begin the next part: on the same tier where it has another replica, else where the policy allows it by now.

        Returns:
            None where no token is left to compute.

        Raises:
            EngineBroke: No engine could.
        """
        progress = answer.progress
        assert progress is not None
        done, length = len(progress.output_ids), len(progress.prompt_ids) + len(progress.output_ids)
        left = None if resumption.max_tokens is None else resumption.max_tokens - done
        if left is not None and left <= 0:
            return None
        needed = self.default_max_tokens if left is None else left
        causes: UpstreamError | None = None
        # Each tier's own context is looked at below: one without a limit may use less of it than was asked for.
        targets = self.policy.successors(answer.tier, replace(decision.query, prompt_tokens=length, max_tokens=1))
        for excluded, tier in product(exclude, (answer.tier, *targets)):
            context = self.fleet.spec(tier).max_model_len
            if length + (1 if left is None and tier is answer.tier else needed) > context:
                continue
            ids = [*progress.prompt_ids, *progress.output_ids]
            asked = ContinuedRequest(request, resumption, ids, done, left or context - length, number)
            query = replace(decision.query, prompt_tokens=length, max_tokens=min(asked.left, needed))
            rest = replace(decision, tier=tier, query=query)
            try:
                part = await self.upstream.open(rest, asked, exclude=excluded, over_limit=True, elsewhere=False)
            except UpstreamError as error:
                causes = without_trace(error)
            else:
                assert isinstance(part, EngineStream)
                return part
        raise broken from causes

    async def _settle(self, progress: Progress, sent: int, resumption: Resumption, failed: str) -> bool:
        """Bring an answer to rest where its text is known for certain, and not before what was sent; False: nobody knows.

        Where what came does not tell, engines are asked: first those that are well, last the one that failed, for it may be
        well but for its connection.
        """
        if not progress.resumable or not progress.prompt_ids:
            return False
        if resumption.stops and resumption.min_tokens > len(progress.output_ids):
            return False  # which of the next engine's tokens is the first that may complete a stop string is not known
        replicas = [r for r in self.fleet.replicas if r.state is ReplicaState.READY and r.id != failed]
        replicas += (r for r in self.fleet.replicas if r.id == failed)
        settled = progress.settled
        for replica in replicas if progress.point != progress.begun or not settled else ():
            try:
                async with asyncio.timeout(DETOKENIZE_TIMEOUT_S):
                    found = await (self._parsed(progress, replica) if settled else self._aligned(progress, replica))
            except (UpstreamError, TimeoutError, ValueError, LookupError, TypeError):
                continue
            if found is not None and len(found[1]) >= sent:
                progress.rest_at(*found)
                return True
        if settled:
            tokens, characters = progress.point
            progress.rest_at(tokens, progress.text[:characters])
        return settled

    async def _parsed(self, progress: Progress, replica: Replica) -> tuple[int, str] | None:
        """Return the place of the last text, and the text up to there with what a parser in the engine may have kept back.

        A parser that looks for reasoning keeps a part of a token's text until it knows that no tag begins there.

        Raises:
            UpstreamError: It does not answer. Its answer may also make no sense: ValueError, LookupError or TypeError.
        """
        begun, end = progress.begun, progress.point
        before = progress.output_ids[: begun.tokens][-CONTEXT:]
        ids = [*before, *progress.output_ids[begun.tokens : end.tokens]]
        shown = await self._detokenized(before, replica) if before else ""
        text = await self._detokenized(ids, replica)
        rest = progress.text[begun.characters :]
        whole = next((whole for whole in _readings(text, shown) if whole.startswith(rest)), None)
        if whole is None or whole.endswith(BROKEN_CHARACTER):
            return None
        more = whole[len(rest) :]
        if more and len(more) > len(text) - len(await self._detokenized(ids[:-1], replica)):
            return None  # more than the last token's: it is something else, such as a special token
        return end.tokens, progress.text + more

    async def _aligned(self, progress: Progress, replica: Replica) -> tuple[int, str] | None:
        """Return how many tokens are whole, and their text, of which some was not sent; None where an engine cannot tell.

        Its word is taken where it agrees with what came, and has as many characters more as an engine keeps back.

        Raises:
            UpstreamError: It does not answer. Its answer may also make no sense: ValueError, LookupError or TypeError.
        """
        start, _ = progress.point
        before = progress.output_ids[:start][-CONTEXT:]
        shown = await self._detokenized(before, replica) if before else ""
        found = await self._whole(progress, replica, before, shown, frozenset())
        if found is None and progress.silent:
            found = await self._whole(progress, replica, before, shown, await self._special(progress, replica))
        return found

    async def _whole(
        self, progress: Progress, replica: Replica, before: Sequence[int], shown: str, hidden: Collection[int]
    ) -> tuple[int, str] | None:
        """Do so, given an engine's text of the tokens before, and the tokens of which answers do not show the text."""
        start, characters = progress.point
        known, rest = progress.text[:characters], progress.text[characters:]
        all_ids = progress.output_ids
        for end in range(len(all_ids), max(len(all_ids) - MOST_DROPPED, start), -1):
            ids = [all_ids[number] for number in range(start, end) if number not in hidden]
            text = await self._detokenized([*before, *ids], replica)
            if text.endswith(BROKEN_CHARACTER):
                continue  # within a character, which the next engine computes anew
            for more in _readings(text, shown):
                if more.startswith(rest) and len(more) == len(rest) + progress.held_back:
                    return end, known + more
            return None
        return None

    async def _special(self, progress: Progress, replica: Replica) -> frozenset[int]:
        """Return which tokens are special ones that answers leave out: whole by themselves, and yet they gave no text."""
        found = []
        for number in progress.silent:
            text = await self._detokenized([progress.output_ids[number]], replica)
            if BROKEN_CHARACTER not in text:
                found.append(number)
        return frozenset(found)

    async def _detokenized(self, ids: Sequence[int], replica: Replica) -> str:
        """Return the text of ids by one engine.

        Raises:
            UpstreamError: It does not answer. Its answer may also make no sense: ValueError, LookupError or TypeError.
        """
        body = to_json({"model": replica.model, "tokens": list(ids)})
        _, _, content = await self.upstream.pass_on(replica.url, replica.api_key, DETOKENIZE, body)
        text = read_json(content)["prompt"]
        if not isinstance(text, str):
            raise TypeError("no text")
        return text


def _readings(text: str, shown: str) -> tuple[str, ...]:
    """Return what may be the text of tokens, given an engine's text of them and those before, and of those before alone."""
    if shown:
        return (text.removeprefix(shown),) if text.startswith(shown) else ()
    return text, " " + text  # some tokenizers drop a space where a text begins


def _joined(joiner: StopStringJoiner, chunk: Chunk, resumption: Resumption) -> Chunk:
    """Return what goes out of a chunk of the next engine; with the stop string that it completes, the last chunk."""
    ended_by = chunk.stop_reason if isinstance(chunk.stop_reason, str) and not resumption.includes_stop else ""
    text = joiner.pass_on(chunk.text, last=chunk.finish_reason is not None, ended_by=ended_by)
    finish_reason, stop_reason = chunk.finish_reason, chunk.stop_reason
    if joiner.stopped is not None:
        finish_reason, stop_reason = "stop", joiner.stopped
    return Chunk(text=text, token_ids=chunk.token_ids, finish_reason=finish_reason, stop_reason=stop_reason)
