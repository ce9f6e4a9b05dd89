"""One answer of an engine, as it comes: streamed, or buffered as a whole."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from router.upstream.errors import (
    EngineBroke,
    EngineFailed,
    EngineRefused,
    UpstreamError,
    without_trace,
)
from router.upstream.progress import Progress
from router.upstream.sse import COMPLETION_FORMAT, USAGE, EventSource, cached_tokens_of
from router.upstream.transport import body_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from router.telemetry.tracing import AttemptSpan
    from router.upstream.engine_request import EngineRequest
    from router.upstream.sse import AnswerFormat, Chunk, PlainTexts, TakePlain
    from tiers.fleet import Lease
    from tiers.replica import Sent
    from tiers.spec import TierName, TierSpec

MAX_ANSWER_BYTES = 1 << 28  # of one that is not streamed: log-probabilities of a long prompt take many


@dataclass(frozen=True, slots=True)
class OverflowServer:
    """What an answer says of the overflow's server, in the place of a replica."""

    id: str
    spec: TierSpec
    fingerprint: None = None


@dataclass(slots=True)
class OverflowHold:
    """A request's hold on one of the places at the overflow, as a ``Lease``. Nothing is learned from its times."""

    replica: OverflowServer
    sequences: int
    free: Callable[[], None]
    sent: Sent | None = None
    _released: bool = False

    def first_token(self, ttft_ms: float | None = None) -> None:
        """Note the first token."""

    def produced(self, tokens: int = 1) -> None:
        """Count output tokens."""

    def finished(self, tpot_ms: float | None, output_tokens: int = 0, cached_tokens: int | None = None) -> None:
        """Note a complete answer."""

    def failed(self, error: str) -> None:
        """Note a failure."""

    def release(self) -> None:
        """Give the place back. Only the first call counts."""
        if not self._released:
            self._released = True
            self.free()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request at one replica that has answered 200.

    Attributes:
        number: Attempts that failed before this one.
        started: When it was sent, by the monotonic clock.
        sent_at: When the request was first sent, to whichever replica.
        token_timeout_s: Longest time between two tokens.
    """

    tier: TierName
    lease: Lease | OverflowHold
    response: httpx.Response
    span: AttemptSpan
    number: int
    started: float
    token_timeout_s: float
    sent_at: float


class EngineAnswer(ABC):
    """A request that an engine answers: its lease, its span, its times and its usage. Close it, however it ends.

    Attributes:
        tier: That began the answer.
        replica_id: The same, of the tier's replicas.
        spec: What that replica serves.
        sent_at: When the request was first sent, to whichever replica, by the monotonic clock in seconds.
        overflow: Name of the server outside of the fleet that answers; None: a tier does.
        parts: What other engines computed of it, in order.
        cached_tokens: Of its prompt, found in the prefix cache; None: the engine did not report them.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.tier = attempt.tier
        self.replica_id, self.spec = attempt.lease.replica.id, attempt.lease.replica.spec
        self.sent_at = attempt.sent_at
        self.failed_attempts = attempt.number
        self.ttft_ms: float | None = None
        self.usage: dict[str, int] = {}
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: UpstreamError | None = None
        self.overflow: str | None = None
        self.parts: list[EngineStream] = []
        self._attempt = attempt
        self._first_at = self._last_at = 0.0
        self._complete = self._closed = False
        self._tokens = 0

    @abstractmethod
    async def begin(self) -> None:
        """Read up to the first token, or the whole of an answer that is not streamed.

        Raises:
            UpstreamError: The engine failed; nothing of its answer has been passed on.
        """

    @property
    def complete(self) -> bool:
        return self._complete

    @property
    def media_type(self) -> str | None:
        raw = self._attempt.response.headers.raw
        return next((value.decode("latin-1") for name, value in raw if name.lower() == b"content-type"), None)

    @property
    def fingerprint(self) -> str | None:
        """Return what the engine calls itself in its answers."""
        return self._attempt.lease.replica.fingerprint

    @property
    def tpot_ms(self) -> float | None:
        """Return the mean time between tokens so far, from the engine's token count; None below two tokens.

        Of several sequences, which an engine computes at the same time, as if they were equally long.
        """
        tokens = self.usage.get("completion_tokens", 0) / self._attempt.lease.sequences
        if self.ttft_ms is None or tokens < 2:  # noqa: PLR2004
            return None
        return (self._last_at - self._first_at) * 1000 / (tokens - 1)

    @property
    def output_tokens(self) -> int:
        """Return the tokens produced so far: the engine's count, or until that comes what its chunks tell."""
        return self.usage.get("completion_tokens", self._tokens)

    @property
    def predicted_cached_tokens(self) -> int | None:
        """Return the tokens of its prompt that the replica was expected to hold; None: not known."""
        sent = self._attempt.lease.sent
        return None if sent is None else sent.cached

    async def aclose(self, error: BaseException | None = None) -> None:
        """End all of it: the lease goes back, the connection is closed, which aborts what is unfinished, the span ends."""
        try:
            for part in self.parts:
                await part.aclose(error)
        finally:  # also when this is cancelled
            await self.abandon(error)

    async def abandon(self, error: BaseException | None) -> None:
        """End this engine's part of it. Only the first call counts."""
        if self._closed:
            return
        self._closed = True
        lease = self._attempt.lease
        if self._complete:
            lease.finished(self.tpot_ms, self.usage.get("completion_tokens", 0), self.cached_tokens)
        elif isinstance(error, UpstreamError):
            lease.failed(type(error).__name__)
        lease.release()
        end_span(self._attempt.span, error, self._attributes())
        await self._disconnect()

    async def _disconnect(self) -> None:
        await self._attempt.response.aclose()

    def _note_usage(self, usage: Mapping[str, Any]) -> None:
        self.usage = {name: int(usage.get(name) or 0) for name in USAGE}
        self.cached_tokens = cached_tokens_of(usage)

    def _attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        if self.ttft_ms is not None:
            attributes["qarr.ttft_ms"] = self.ttft_ms
        if self.finish_reason:
            attributes["gen_ai.response.finish_reasons"] = (self.finish_reason,)
        if self.usage:
            attributes["gen_ai.usage.input_tokens"] = self.usage["prompt_tokens"]
            attributes["gen_ai.usage.output_tokens"] = self.usage["completion_tokens"]
        if self.cached_tokens is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = self.cached_tokens
        if (predicted := self.predicted_cached_tokens) is not None:
            attributes["qarr.cached_prompt_tokens"] = predicted
        if (tpot_ms := self.tpot_ms) is not None:
            attributes["qarr.tpot_ms"] = tpot_ms
        return attributes


class EngineStream(EngineAnswer):
    """A streamed answer. Its chunks up to the first token are here once it has begun, the rest can be read.

    Attributes:
        progress: What its caller has of it, where another engine could go on from there; None: none may.
        resume: Goes on with it elsewhere, where that may be; set before the first read.
    """

    def __init__(self, attempt: Attempt, request: EngineRequest) -> None:
        super().__init__(attempt)
        resumption = request.resumption
        self.progress = Progress(resumption.held_back) if resumption is not None else None
        self.resume: Callable[[EngineStream, EngineBroke], AsyncGenerator[Chunk, None]] | None = None
        self._wants_usage = request.wants_usage
        self._source = EventSource(attempt.response, request.answers)
        self._held: list[Chunk] = []
        self._rest: AsyncGenerator[Chunk, None] | None = None  # from other engines
        self._take: TakePlain | None = None
        self._why: tuple[type[EngineBroke], str] = EngineBroke, ""  # they compute it

    @property
    def failed_over(self) -> bool:
        """Tell whether the first engine did not end the answer."""
        return self._rest is not None

    async def begin(self) -> None:
        """Read up to the first chunk that shows something."""
        while not any(chunk.visible for chunk in self._held):
            chunks = await self._source.next(first=self.progress is not None)
            if chunks is None:
                raise EngineBroke("the engine's answer was empty")
            self._held += chunks
        if self.progress is None or not _continuable(self._held):  # nothing was sent: another can still answer
            self._held += self._source.rest()
            self._source.check()
        self._source.limit_reads(self._attempt.token_timeout_s)
        self._first_at = self._last_at = time.monotonic()
        self._attempt.span.first_token()
        self.ttft_ms = (self._first_at - self.sent_at) * 1000
        self._attempt.lease.first_token((self._first_at - self._attempt.started) * 1000)

    async def read(self) -> Sequence[Chunk] | None:  # noqa: C901  once a chunk: calls would cost more than this
        """Return what came together next, from whichever engine, at least one chunk; None after the last.

        Raises:
            EngineBroke: The engine failed, or no token came in time, and no other could go on.
        """
        if self._rest is not None:
            return await self._read_rest()
        chunks: list[Chunk] | None
        chunks, self._held = self._held, []
        if not chunks:
            try:
                chunks = await self._source.next()
                if chunks is None and self.finish_reason is None:
                    raise EngineBroke("the engine's stream ended without a finish reason")  # noqa: TRY301
            except EngineBroke as error:
                return await self._fail_over(without_trace(error))
        if chunks is None:
            self._complete = True
            return None
        progress, tokens = self.progress, 0
        for chunk in chunks:
            data, choice = chunk.data, chunk.choice
            if data is None:
                continue
            if chunk.usage:
                self._note_usage(chunk.usage)
            if progress is not None and choice is not None:
                if prompt_ids := data.get("prompt_token_ids") or choice.get("prompt_token_ids"):
                    progress.prompt_ids = prompt_ids
                progress.note(chunk)
            tokens += len(chunk.token_ids) or bool(chunk.text or chunk.other or chunk.finish_reason)
            self.finish_reason = chunk.finish_reason or self.finish_reason
        if tokens:
            self._last_at = time.monotonic()
            self._tokens += tokens
            self._attempt.lease.produced(tokens)
        return chunks

    async def pump(self, take: TakePlain) -> None:
        """Let ``take`` have plain events and their texts; return when the answer may, or must, be read."""
        if self._rest is None and not self._held:
            self._take = take
            try:
                await self._source.pump(self._pass_on)
            finally:
                self._take = None  # it leads here

    def _pass_on(self, events: bytes, texts: PlainTexts) -> bool:
        assert self._take is not None
        tokens = len(texts)
        if self.progress is not None:
            self.progress.keep(texts)
            tokens = sum(ids.count(b",") for _, ids in texts) + tokens
        self._tokens += tokens
        self._last_at = time.monotonic()
        self._attempt.lease.produced(tokens)
        return self._take(events, texts)

    async def _fail_over(self, broken: EngineBroke) -> Sequence[Chunk] | None:
        try:
            if self.resume is None or self.progress is None:
                raise broken
            self.progress.catch_up()
            self._why, self._rest = (type(broken), str(broken)), self.resume(self, broken)
        finally:
            del broken  # its trace leads here
        return await self._read_rest()

    async def _read_rest(self) -> Sequence[Chunk] | None:
        assert self._rest is not None
        assert self.progress is not None
        chunk = await anext(self._rest, None)
        if chunk is not None:
            self._last_at = time.monotonic()
            self._tokens += len(chunk.token_ids)
            return (chunk,)
        self.progress.catch_up()
        if self.parts or not self.usage:  # else all of the answer had come, and its counts
            self.usage = self.progress.usage
        self.finish_reason = self.progress.finish_reason
        if self._wants_usage and not self.usage:
            kind, why = self._why
            raise kind(why)  # nobody knows the counts
        self._complete = True
        return None

    async def aclose(self, error: BaseException | None = None) -> None:
        """End all of it, what other engines compute of it as well."""
        try:
            if self._rest is not None:
                await self._rest.aclose()
        finally:
            await super().aclose(error)

    async def _disconnect(self) -> None:
        try:
            await self._source.aclose()
        finally:  # all of it, also when this is cancelled
            await super()._disconnect()


def _continuable(chunks: Sequence[Chunk]) -> bool:
    """Tell whether another engine could go on after an answer's first chunks: the prompt's ids are there, and only text."""
    known = any(
        (chunk.data or {}).get("prompt_token_ids") or (chunk.choice or {}).get("prompt_token_ids") for chunk in chunks
    )
    return known and not any(chunk.other for chunk in chunks)


class BufferedAnswer(EngineAnswer):
    """An answer that is not streamed, read as a whole before any of it is passed on.

    Attributes:
        content: The body.
    """

    def __init__(self, attempt: Attempt, answers: AnswerFormat = COMPLETION_FORMAT) -> None:
        super().__init__(attempt)
        self.content, self._read_whole = b"", answers.read_whole

    async def begin(self) -> None:
        try:
            self.content = await body_of(self._attempt.response, MAX_ANSWER_BYTES)
        except httpx.ReadTimeout:
            raise
        except httpx.HTTPError as error:
            raise EngineBroke(f"the engine's answer broke off ({type(error).__name__})") from error
        if (answer := self._read_whole(self.content)) is None:
            raise EngineFailed("the engine's answer is not a completion")
        self.finish_reason, usage = answer
        self._note_usage(usage)
        self._complete = True


def continued_on(answer: EngineAnswer) -> list[TierName]:
    """Return the tiers that went on with an answer, in order."""
    return [part.tier for part in answer.parts]


def end_span(span: AttemptSpan, error: BaseException | None, attributes: dict[str, Any] | None = None) -> None:
    """End an attempt's span, with its error if it had one; not with an engine's refusal, which may quote the prompt."""
    found = attributes or {}
    if error is not None:
        found["error.type"] = type(error).__name__
    if isinstance(error, EngineRefused):
        found["http.response.status_code"] = error.status
        error = None
    span.end(found, error if isinstance(error, Exception) else None)
