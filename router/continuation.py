"""Go on with an answer whose engine failed midway, on another replica or tier, from the very tokens that the caller has.

The tiers share one tokenizer, so the ids of the prompt and of what was sent are a prompt for any of them. What the first
engine had computed but not sent (half of a character, or the start of what may become a stop string) is computed again, or
sent first. Tool calls, structured output and the like are not continued: half of them cannot be taken over safely.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from router.event_stream import EventStream, chunk_in
from router.jsontext import read_json
from router.upstream import (
    Attempt,
    EngineBroke,
    EngineStalled,
    Exchange,
    UpstreamError,
    without_trace,
)
from tiers.spec import ReplicaState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

    from router.decision import Decision
    from router.telemetry import Telemetry
    from router.upstream import EngineRequest, Upstream
    from tiers.fleet import Fleet, Replica
    from tiers.spec import TierName

COMPLETIONS, DETOKENIZE = "/v1/completions", "/detokenize"
BROKEN_CHARACTER = "\ufffd"
MOST_DROPPED = 8  # tokens that may be computed again: more than the bytes of one character
DETOKENIZE_TIMEOUT_S = 5.0
log = logging.getLogger("qarr.router")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a continued answer.

    Attributes:
        text: May be empty.
        token_ids: Of the tokens computed for it; their text may come with a later piece.
        finish_reason: With the last piece.
        stop_reason: What stopped it, as the engine says it: a string, a token id or null.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: Any = None


@dataclass(slots=True)
class Progress:
    """How far an answer has come at its caller: what another engine needs to go on from there.

    Attributes:
        prompt_ids: The prompt as the engine read it; empty for as long as it is not known.
        output_ids: Of all tokens that came.
        whole: How many of those had come with the last text.
        finish_reason: Once it is known.
        resumable: Whether what came so far can be continued.
    """

    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    whole: int = 0
    finish_reason: str | None = None
    resumable: bool = True
    _parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return what was sent."""
        return "".join(self._parts)

    def note(self, piece: Piece) -> None:
        """Note one more piece."""
        self.output_ids += piece.token_ids
        if piece.text:
            self._parts.append(piece.text)
            self.whole = len(self.output_ids)
        self.finish_reason = piece.finish_reason or self.finish_reason

    def cut(self, count: int) -> None:
        """Forget all but so many of the output tokens; the text stays."""
        del self.output_ids[count:]
        self.whole = min(self.whole, count)

    @property
    def usage(self) -> dict[str, int]:
        """Return the token counts, as an engine gives them."""
        prompt, output = len(self.prompt_ids), len(self.output_ids)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


@dataclass(frozen=True, slots=True)
class Resumption:
    """What continuing a request's answer needs of the request.

    Attributes:
        max_tokens: Output tokens in all; None: as many as the context leaves.
        sampling: Members of a completion's body that say how tokens are chosen.
        priority: For vLLM's scheduler, lower first.
    """

    max_tokens: int | None
    sampling: Mapping[str, Any]
    priority: int

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the strings that end the answer."""
        given = self.sampling.get("stop") or ()
        return (given,) if isinstance(given, str) else tuple(s for s in given if isinstance(s, str) and s)


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
    judged: bool = False
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
        if isinstance(least := sampling.get("min_tokens"), int):
            sampling["min_tokens"] = max(least - self.done, 0)
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


class Continued(Exchange):
    """A part of an answer, computed by another engine than the part before."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._source = self._stream = EventStream(attempt.response, chunk_in)
        self._first: list[Piece] = []

    async def begin(self) -> None:
        """Read up to the first token."""
        while not self._first:
            chunks = await self._stream.next()
            if chunks is None:
                raise EngineBroke("the engine's answer was empty")
            self._first = self._noted(chunks)
        self._began()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield every piece from the first.

        Raises:
            EngineBroke: The engine failed, or no token came in time.
        """
        for piece in self._first:
            self._produced(len(piece.token_ids))
            yield piece
        chunks = await self._next(self._stream)
        while chunks is not None:
            for piece in self._noted(chunks):
                self._produced(len(piece.token_ids))
                yield piece
            chunks = await self._next(self._stream)
        if self.finish_reason is None:
            raise EngineBroke("the engine's stream ended without a finish reason")
        self._complete = True

    def _noted(self, chunks: Sequence[dict[str, Any]]) -> list[Piece]:
        """Return chunks as pieces, but for those without a choice."""
        return [piece for piece in map(self._piece, chunks) if piece is not None]

    def _piece(self, chunk: dict[str, Any]) -> Piece | None:
        if chunk.get("usage"):
            self._note_usage(chunk["usage"])
        try:
            choice = chunk["choices"][0]
            piece = Piece(
                choice.get("text") or "",
                tuple(choice.get("token_ids") or ()),
                choice.get("finish_reason"),
                choice.get("stop_reason"),
            )
        except (LookupError, TypeError, AttributeError):
            return None
        self.finish_reason = piece.finish_reason or self.finish_reason
        return piece


class Seam:
    """Watches for stop strings that begin in what one engine computed and end in what the next one did.

    An engine looks for them in its own text only.

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
        self.stopped: str | None = None

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
            self.stopped = self._stops[number]
            return whole[self._out : end if self._include else start]
        begun = (start for start in starts if any(stop.startswith(whole[start:]) for stop in self._stops))
        safe = None if last else next(begun, None)
        if safe is None:
            self._old = ""
        end = len(whole) if self._include or safe is None else safe
        out, self._out = whole[self._out : end], end
        return out


@dataclass(frozen=True, slots=True)
class Continuation:
    """Continues answers.

    Attributes:
        attempts: Times that one answer is gone on with.
    """

    fleet: Fleet
    upstream: Upstream
    telemetry: Telemetry
    attempts: int
    default_max_tokens: int  # room that a tier's context must leave for a request that gives no limit

    def resume(
        self, decision: Decision, request: EngineRequest
    ) -> Callable[[Exchange, EngineBroke], AsyncIterator[Piece]] | None:
        """Return what goes on with the request's answer, or None where that must not be."""
        resumption = request.resumption
        if resumption is None:
            return None

        def pieces(answer: Exchange, broken: EngineBroke) -> AsyncIterator[Piece]:
            return self._pieces(answer, broken, decision, request, resumption)

        return pieces

    async def _pieces(
        self, answer: Exchange, broken: EngineBroke, decision: Decision, request: EngineRequest, resumption: Resumption
    ) -> AsyncIterator[Piece]:
        """Yield the rest of an answer.

        Raises:
            EngineBroke: No other engine could go on.
        """
        progress, tried, attempts = answer.progress, set[str](), 0
        assert progress is not None
        failing: Exchange = answer
        while progress.finish_reason is None:
            log.warning("request %s: %s on %s", request.request_id, broken, failing.replica_id)
            attempts += 1
            tried.add(failing.replica_id)
            await failing.abandon(broken)
            if attempts > self.attempts or not progress.resumable or not progress.prompt_ids:
                raise broken
            held = await self._align(progress, failing.replica_id)
            include = bool(resumption.sampling.get("include_stop_str_in_output"))
            seam = Seam(progress.text, held, resumption.stops, include=include)
            exclude = self._rounds(tried, failing.replica_id, broken)
            part = await self._open(progress, exclude, attempts, decision, request, resumption, broken)
            if part is None:  # every token had come
                yield _noted(progress, Piece(seam.pass_on("", last=True), (), "length"))
                return
            answer.parts.append(part)
            self.telemetry.record_continuation(failing.replica_id, part.replica_id, len(progress.output_ids), broken)
            failing = part
            try:
                async for piece in part.pieces():
                    stopped = piece.stop_reason if isinstance(piece.stop_reason, str) and not include else ""
                    text = seam.pass_on(piece.text, last=piece.finish_reason is not None, ended_by=stopped)
                    if seam.stopped is not None:
                        yield _noted(progress, Piece(text, piece.token_ids, "stop", seam.stopped))
                        break
                    yield _noted(progress, replace(piece, text=text))
            except EngineBroke as again:
                broken = without_trace(again)
        await failing.aclose()

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

    async def _open(  # noqa: PLR0917  called here alone
        self,
        progress: Progress,
        exclude: Sequence[Collection[str]],
        number: int,
        decision: Decision,
        request: EngineRequest,
        resumption: Resumption,
        broken: EngineBroke,
    ) -> Continued | None:
        """Begin the next part: on the same tier where it has another replica, else as the decision's fallbacks say.

        Returns:
            None where no token is left to compute.

        Raises:
            EngineBroke: No engine could.
        """
        assert decision.tier is not None
        done, length = len(progress.output_ids), len(progress.prompt_ids) + len(progress.output_ids)
        left = None if resumption.max_tokens is None else resumption.max_tokens - done
        if left is not None and left <= 0:
            return None
        needed = self.default_max_tokens if left is None else left
        causes: UpstreamError | None = None
        for excluded, tier in product(exclude, (decision.tier, *decision.fallbacks)):
            context = self.fleet.spec(tier).max_model_len
            if length + (1 if left is None and tier is decision.tier else needed) > context:
                continue
            ids = [*progress.prompt_ids, *progress.output_ids]
            asked = ContinuedRequest(request, resumption, ids, done, left or context - length, number)
            query = replace(decision.query, prompt_tokens=length, max_tokens=min(asked.left, needed))
            rest = replace(decision, tier=tier, fallbacks=(), query=query)
            try:
                return await self.upstream.open(rest, asked, Continued, exclude=excluded, over_limit=True)
            except UpstreamError as error:
                causes = without_trace(error)
        raise broken from causes

    async def _align(self, progress: Progress, failed: str) -> str:
        """Cut the ids to those whose text was sent, as far as tokens allow; return text beyond that, which was not."""
        sent, ids = progress.text, progress.output_ids
        for count in range(len(ids), max(len(ids) - MOST_DROPPED, 0), -1):
            text = await self._detokenized(ids[:count], failed)
            if text is None:
                break
            if sent.startswith(" ") and not text.startswith(" "):  # some tokenizers drop it where a text begins
                text = " " + text
            if text == sent or (text.startswith(sent) and not text.endswith(BROKEN_CHARACTER)):
                progress.cut(count)
                return text[len(sent) :]
        progress.cut(progress.whole)
        return ""

    async def _detokenized(self, ids: Sequence[int], failed: str) -> str | None:
        """Return the text of ids by the first ready engine that answers; None: there is none."""
        for replica in self.fleet.replicas:
            if replica.state is not ReplicaState.READY or replica.id == failed:
                continue
            body = to_json({"model": replica.model, "tokens": list(ids)})
            try:
                async with asyncio.timeout(DETOKENIZE_TIMEOUT_S):
                    _, _, content = await self.upstream.pass_on(replica.url, replica.api_key, DETOKENIZE, body)
                text = read_json(content)["prompt"]
            except (UpstreamError, TimeoutError, ValueError, LookupError, TypeError):
                continue
            return text if isinstance(text, str) else None
        return None


def _noted(progress: Progress, piece: Piece) -> Piece:
    progress.note(piece)
    return piece


def continued_on(answer: Exchange) -> list[TierName]:
    """Return the tiers that went on with an answer, in order."""
    return [part.tier for part in answer.parts]
