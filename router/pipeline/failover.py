"""Failover: if an engine fails within an answer, another replica or tier continues it from the last token sent.

The tiers share one tokenizer, so the ids of the prompt and of what was sent are a prompt for any of them. What the first
engine had computed but not sent (half of a character, or the start of a possible stop string) is computed again, or sent
first. Tool calls, structured output and the like are not continued: half of one cannot be continued safely.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count, product

from msgspec.structs import replace
from pydantic_core import to_json

from router.policy.decision import Decision
from router.policy.table import PolicyStore
from router.telemetry.tracing import Telemetry
from router.upstream.client import Upstream
from router.upstream.engine_request import EngineRequest
from router.upstream.engine_stream import Drain, EngineStream, Feed
from router.upstream.errors import EngineBrokeError, EngineStalledError, UpstreamError, without_trace
from router.upstream.json_object import read_json
from router.upstream.progress import Continuable, Progress
from router.upstream.sse import Chunk
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import ReplicaStatus, TierName

DETOKENIZE = "/detokenize"
BROKEN_CHARACTER = "\ufffd"
CONTEXT = 8  # tokens before those whose text is asked for: a token's text may depend on those before
MOST_DROPPED = 8  # tokens at the end that may have no text yet: more than the bytes of one character
DETOKENIZE_TIMEOUT_S = 5.0
log = logging.getLogger(f"qarr.{__name__}")


class StopStringJoiner:
    """Finds stop strings that begin in one engine's text and end in the next one's; an engine finds them in its own only.

    The first text is what was ``sent``, and what was computed besides and ``held``. With ``include`` the answer includes the
    string that ends it.
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
        """Take more of the next engine's text, and return what may be sent; set ``stopped`` once a stop string is complete.

        ``ended_by`` is the stop string that ended the text and is not in it.
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
        # The first one to be complete counts; of several, the first in the request, as in vLLM.
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


@dataclass(slots=True)
class _Seam:
    """Where one engine's part of an answer is joined to what came before it."""

    joiner: StopStringJoiner
    progress: Progress
    continuable: Continuable
    out: Feed
    begins: int  # characters of the answer before it
    sent: int  # characters of the answer so far

    def feed(self, chunks: Sequence[Chunk]) -> bool:
        """Pass on what the part adds to the answer; tell whether it may send more now."""
        joiner, made = self.joiner, []
        for chunk in (chunk for chunk in chunks if chunk.choice):
            ended_by = chunk.stop_reason if isinstance(chunk.stop_reason, str) else ""
            text = joiner.pass_on(
                chunk.text,
                last=chunk.finish_reason is not None,
                ended_by="" if self.continuable.includes_stop else ended_by,
            )
            self.progress.note((chunk,))
            self.sent += len(text)
            stopped = joiner.stopped
            reasons = (chunk.finish_reason, chunk.stop_reason) if stopped is None else ("stop", stopped)
            made.append(Chunk(text=text, token_ids=chunk.token_ids, finish_reason=reasons[0], stop_reason=reasons[1]))
            if stopped is not None:
                self.progress.stop_at(self.begins + joiner.end)
                break
        return self.out(made) and joiner.stopped is None


@dataclass(frozen=True, slots=True)
class Failover:
    fleet: Fleet
    policy: PolicyStore
    upstream: Upstream
    telemetry: Telemetry
    attempts: int  # most continuations of one answer
    default_max_tokens: int  # what a tier's context must leave for a request without a limit of its own


@dataclass(frozen=True, slots=True)
class Continuation:
    failover: Failover
    decision: Decision
    request: EngineRequest
    continuable: Continuable
    progress: Progress

    async def relay(self, answer: EngineStream, broken: EngineBrokeError, feed: Feed, drain: Drain) -> None:
        """Let ``feed`` have the rest of an answer; raise ``broken``, or what broke last, if nobody can continue it."""
        progress, failing, tried, sent = self.progress, answer, set[str](), self.progress.told
        for number in count(1):
            log.warning("request %s: %s on %s", self.request.request_id, broken, failing.replica_id)
            await failing.aclose(broken)
            if progress.finish_reason is not None:  # only the end of the stream was missing
                return
            tried.add(failing.replica_id)
            joiner = await self._joiner(sent, failing.replica_id) if number <= self.failover.attempts else None
            if joiner is None:
                raise broken
            part = await self._next_part(answer.tier, self._rounds(tried, failing.replica_id, broken), number, broken)
            if part is None:  # every token had come
                progress.finish_reason = "length"
                feed((Chunk(text=joiner.pass_on("", last=True), finish_reason="length"),))
                return
            answer.parts.append(part)
            self.failover.telemetry.record_continuation(
                failing.replica_id, part.replica_id, len(progress.output_ids), broken
            )
            failing, seam = part, _Seam(joiner, progress, self.continuable, feed, sent, sent)
            try:
                while not await part.flow(seam.feed) and joiner.stopped is None:
                    await drain()
                await part.aclose()
            except EngineBrokeError as again:
                broken, sent = without_trace(again), seam.sent
            else:
                return

    async def _joiner(self, sent: int, failed: str) -> StopStringJoiner | None:
        """Settle the answer, and return what joins the next part to it; None if that cannot be done safely."""
        if not await self._settle(sent, failed):
            return None
        text, continuable = self.progress.text, self.continuable
        joiner = StopStringJoiner(text[:sent], text[sent:], continuable.stops, include=continuable.includes_stop)
        # With min_tokens, nobody knows whether a stop string that was passed over counts.
        return None if joiner.passed_over and continuable.min_tokens else joiner

    def _rounds(self, tried: Collection[str], failing: str, broken: EngineBrokeError) -> list[Collection[str]]:
        """Return the replicas to leave out, round by round, so that none is asked twice.

        Those that have not failed this answer come first, then those that failed it earlier. The one that has just failed
        comes last, since only its connection may have failed; not if it stalled, for then it would stall again.
        """
        every = {replica.id for replica in self.failover.fleet.replicas}
        rounds: list[Collection[str]] = [tried, every.difference(tried) | {failing}]
        if not isinstance(broken, EngineStalledError):
            rounds.append(every - {failing})
        return rounds

    async def _next_part(
        self, first: TierName, exclude: Sequence[Collection[str]], number: int, broken: EngineBrokeError
    ) -> EngineStream | None:
        """Begin the next part on the first tier, or on one that the policy allows now; None: no token is left to compute.

        Raise ``broken`` if no engine could.
        """
        progress, decision, failover = self.progress, self.decision, self.failover
        ids = [*progress.prompt_ids, *progress.output_ids]
        done, length, most = len(progress.output_ids), len(ids), self.continuable.max_tokens
        left = None if most is None else most - done
        if left is not None and left <= 0:
            return None
        needed = failover.default_max_tokens if left is None else left
        cause: UpstreamError | None = None
        # Each tier's own context is checked below: a request without a limit may use less of it than was asked for.
        targets = failover.policy.successors(first, replace(decision.query, prompt_tokens=length, max_tokens=1))
        for excluded, tier in product(exclude, (first, *targets)):
            context = failover.fleet.spec(tier).max_model_len
            if length + (1 if left is None and tier is first else needed) > context:
                continue
            most_left = left or context - length
            asked = _request_to_continue(self.request, self.continuable, ids, done=done, left=most_left, number=number)
            query = replace(decision.query, prompt_tokens=length, max_tokens=min(most_left, needed))
            there = replace(decision, tier=tier, query=query)
            try:
                part = await failover.upstream.open(there, asked, exclude=excluded, over_limit=True, elsewhere=False)
            except UpstreamError as error:
                cause = without_trace(error)
            else:
                assert isinstance(part, EngineStream)
                return part
        raise broken from cause

    async def _settle(self, sent: int, failed: str) -> bool:
        """Go to a point of the answer, not before what was sent, where its text is known; False: there is none.

        If the stream does not show such a point, engines are asked for the text: the failed one last, since only its
        connection may have failed.
        """
        progress, continuable = self.progress, self.continuable
        if not progress.continuable or not progress.prompt_ids:
            return False
        if continuable.stops and continuable.min_tokens > len(progress.output_ids):
            return False  # it is unknown which of the next engine's tokens is the first that may complete a stop string
        every, settled = self.failover.fleet.replicas, progress.settled
        replicas = [r for r in every if r.state.status is ReplicaStatus.READY and r.id != failed]
        replicas += (r for r in every if r.id == failed)
        for replica in replicas if progress.point != progress.begun or not settled else ():
            try:
                async with asyncio.timeout(DETOKENIZE_TIMEOUT_S):
                    found = await (self._parsed(replica) if settled else self._aligned(replica))
            except (UpstreamError, TimeoutError, ValueError, LookupError, TypeError):
                continue
            if found is not None and len(found[1]) >= sent:
                progress.rest_at(*found)
                return True
        if settled:
            tokens, characters = progress.point
            progress.rest_at(tokens, progress.text[:characters])
        return settled

    async def _parsed(self, replica: Replica) -> tuple[int, str] | None:
        """Return the tokens of the last known point, and the text there with what a parser in the engine may hold back.

        A parser for reasoning holds back a part of a token's text until it knows that no tag begins there.
        """
        progress = self.progress
        begun, end = progress.begun, progress.point
        before = progress.output_ids[: begun.tokens][-CONTEXT:]
        ids = [*before, *progress.output_ids[begun.tokens : end.tokens]]
        shown = await self._detokenized(before, replica) if before else None
        text = await self._detokenized(ids, replica)
        rest = progress.text[begun.characters :]
        whole = next((whole for whole in _readings(text, shown) if whole.startswith(rest)), None)
        if whole is None or whole.endswith(BROKEN_CHARACTER):
            return None
        more = whole[len(rest) :]
        if more and len(more) > len(text) - len(await self._detokenized(ids[:-1], replica)):
            return None  # longer than the last token: it is something else, such as a special token
        return end.tokens, progress.text + more

    async def _aligned(self, replica: Replica) -> tuple[int, str] | None:
        """Return the tokens that end no character halfway, and their text, sent or not; None if the engine cannot tell.

        Its text is used if it agrees with what came, and has as many more characters as an engine holds back.
        """
        progress = self.progress
        before = progress.output_ids[: progress.point.tokens][-CONTEXT:]
        shown = await self._detokenized(before, replica) if before else None
        found = await self._whole(replica, before, shown, hidden=())
        if found is None and progress.silent:
            ids = progress.output_ids
            # Special tokens, which answers leave out: whole characters, and yet they gave no text.
            special = [n for n in progress.silent if BROKEN_CHARACTER not in await self._detokenized([ids[n]], replica)]
            found = await self._whole(replica, before, shown, special)
        return found

    async def _whole(
        self, replica: Replica, before: Sequence[int], shown: str | None, hidden: Collection[int]
    ) -> tuple[int, str] | None:
        """Do so, given an engine's text of the tokens before, and the numbers of tokens that answers do not show."""
        progress, all_ids = self.progress, self.progress.output_ids
        start, characters = progress.point
        known, rest = progress.text[:characters], progress.text[characters:]
        for end in range(len(all_ids), max(len(all_ids) - MOST_DROPPED, start), -1):
            ids = [all_ids[number] for number in range(start, end) if number not in hidden]
            text = await self._detokenized([*before, *ids], replica)
            if text.endswith(BROKEN_CHARACTER):
                continue  # within a character, which the next engine computes again
            for more in _readings(text, shown):
                if more.startswith(rest) and len(more) == len(rest) + progress.held_back:
                    return end, known + more
            return None
        return None

    async def _detokenized(self, ids: Sequence[int], replica: Replica) -> str:
        if not ids:
            return ""
        body = to_json({"model": replica.model, "tokens": list(ids)})
        _, _, content = await self.failover.upstream.pass_on(replica.url, replica.api_key, DETOKENIZE, body)
        text = read_json(content)["prompt"]
        if not isinstance(text, str):
            raise TypeError("no text")
        return text


def _readings(text: str, shown: str | None) -> tuple[str, ...]:
    """Return what tokens' own text may be, given an engine's text of them with those before, and of those, if any."""
    if shown is not None:
        return (text.removeprefix(shown),) if text.startswith(shown) else ()
    return text, " " + text  # some tokenizers drop a space where a text begins


def _request_to_continue(
    origin: EngineRequest, asked: Continuable, ids: Sequence[int], *, done: int, left: int, number: int
) -> EngineRequest:
    """Return what the next engine is asked: complete the ids of the prompt and of the output so far.

    ``done`` output tokens there are, ``left`` are to come at most. ``number``: of the continuation, from 1.
    """
    sampling = dict(asked.sampling)
    if "min_tokens" in sampling:
        sampling["min_tokens"] = max(asked.min_tokens - done, 0)
    return EngineRequest(
        document={**sampling, "prompt": ids, "max_tokens": left},
        path="/v1/completions",
        operation="text_completion",
        request_id=f"{origin.request_id}-c{number}",
        priority=asked.priority - 1,  # above new requests of its class: its caller waits in the middle of an answer
        asks_token_ids=True,
        adapter=origin.adapter,
        continued_tokens=done,
    )
