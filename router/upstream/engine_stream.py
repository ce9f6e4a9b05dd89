"""One answer of an engine, as it comes: streamed, or buffered as a whole."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from msgspec import Struct

from router.telemetry.record import Hop, error_name
from router.telemetry.tracing import end_span
from router.upstream.engine_request import EngineRequest
from router.upstream.errors import EngineBrokeError, EngineFailedError, EngineRefusedError, UpstreamError, without_trace
from router.upstream.progress import Progress
from router.upstream.sse import COMPLETION_FORMAT, USAGE, AnswerFormat, Chunk, EventParser, cached_tokens_of
from router.upstream.transport import Body, body_of
from tiers.fleet import Lease
from tiers.replica import SentPrompt
from tiers.spec import TierName, TierSpec

Feed = Callable[[Sequence[Chunk]], bool]  # takes what came together; tells whether it takes more now
Drain = Callable[[], Awaitable[None]]  # waits until it does

NOTED_EVERY_S = 0.1  # noting each chunk by itself costs twice as much
ENDED_EARLY = "the engine's stream ended early"
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
    sent: SentPrompt | None = None
    _released: bool = False

    def note(self, *_: object) -> None:
        """Take what a lease learns from: here nothing does."""

    first_token = produced = finished = failed = note

    def may_be_silent_until(self, now: float, limit_s: float, *, is_expected: bool) -> float:
        """Return until when a silent answer is waited for: nobody sees whether a foreign server computes."""
        return now + limit_s if is_expected else now

    def release(self) -> None:
        if not self._released:
            self._released = True
            self.free()


class Attempt(Struct, frozen=True):
    tier: TierName
    lease: Lease | OverflowHold
    body: Body
    hop: Hop
    token_timeout_s: float  # longest time between two tokens
    silence_timeout_s: float  # longest time without a word from an engine that computes
    sent_at: float  # when the request was first sent, to whichever replica


class EngineAnswer(ABC):
    """A request that an engine answers: its lease, its span, its times and its usage. Close it, however it ends.

    ``tier`` and its replica ``replica_id`` began the answer. ``predicted_cached_tokens`` of the prompt that replica was
    expected to hold; None: not known.
    """

    def __init__(self, attempt: Attempt) -> None:
        lease = attempt.lease
        self.attempt, self.tier, self.sent_at = attempt, attempt.tier, attempt.sent_at
        self.replica_id, self.spec, self.fingerprint = lease.replica.id, lease.replica.spec, lease.replica.fingerprint
        self.predicted_cached_tokens = None if lease.sent is None else lease.sent.cached
        self.ttft_ms: float | None = None
        self.usage: dict[str, int] = {}
        # of the prompt, in the prefix cache, as the engine reports; None: it did not
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: UpstreamError | None = None
        self.ignored: tuple[str, ...] = ()  # members of the caller's body that its engine was not asked
        self.overflow: str | None = None  # name of the server outside of the fleet that answers; None: a tier does
        self.parts: list[EngineStream] = []  # what other engines computed of it, in order
        self.complete = False
        self.output_tokens = 0  # the engine's count, or until that comes what its chunks tell
        self._body = attempt.body
        self._first_at = self._last_at = 0.0
        self._was_silent = False  # nothing came for so long before the first word that its time tells nothing of speed
        self._closed = False

    @abstractmethod
    async def begin(self) -> None:
        """Read up to the first token, or the whole of an answer that is not streamed.

        ``UpstreamError``: the engine failed; nothing of its answer has been passed on.
        """

    @property
    def media_type(self) -> str | None:
        return self._body.header(b"content-type")

    @property
    def tpot_ms(self) -> float | None:
        """Return the mean time between tokens so far, from the engine's token count; None below two tokens.

        Of several sequences, which an engine computes at the same time, as if they were equally long.
        """
        tokens = self.usage.get("completion_tokens", 0) / self.attempt.lease.sequences
        if self.ttft_ms is None or tokens < 2:  # noqa: PLR2004
            return None
        return (self._last_at - self._first_at) * 1000 / (tokens - 1)

    async def aclose(self, error: BaseException | None = None) -> None:
        """End all of it: the lease goes back, the connection is closed, which aborts what is unfinished, the span ends."""
        for part in self.parts:
            await part.aclose(error)  # which waits for nothing, so it is not cancelled
        if self._closed:
            return
        self._closed = True
        lease, usage, tpot_ms = self.attempt.lease, self.usage, self.tpot_ms
        if self.complete:
            lease.finished(None if self._was_silent else tpot_ms, usage.get("completion_tokens", 0), self.cached_tokens)
        elif isinstance(error, UpstreamError):
            lease.failed(error_name(error))
        lease.release()
        found = {
            "qarr.ttft_ms": self.ttft_ms,
            "gen_ai.response.finish_reasons": (self.finish_reason,) if self.finish_reason else None,
            "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
            "qarr.cached_prompt_tokens": self.predicted_cached_tokens,
            "qarr.tpot_ms": tpot_ms,
        }
        end_hop(self.attempt.hop, error, found)
        await self._body.aclose()

    def _note_usage(self, usage: Mapping[str, Any]) -> None:
        self.usage = dict.fromkeys(USAGE, 0)
        for name in USAGE:
            self.usage[name] = int(usage.get(name) or 0)
        self.output_tokens, self.cached_tokens = self.usage["completion_tokens"], cached_tokens_of(usage)


class EngineStream(EngineAnswer):
    """A streamed answer. Its chunks up to the first token are here once it has begun, the rest can be relayed."""

    def __init__(self, attempt: Attempt, request: EngineRequest) -> None:
        super().__init__(attempt)
        self.continuable = request.continuable is not None  # another engine could go on from what the caller has
        self._progress = Progress(request.continuable.held_back if request.continuable is not None else 0)
        self._unnoted: list[Chunk] = []  # chunks that are not in ``_progress``
        self._untold, self._note_at = 0, 0.0  # tokens that the replica was not told of; when that is to be done
        # what lets another engine go on, set before the answer is relayed
        self.continuation: Callable[[EngineStream, EngineBrokeError, Feed, Drain], Awaitable[None]] | None = None
        self.failed_over = False  # the first engine did not end the answer
        self._wants_usage, self._may_be_silent = request.wants_usage, request.may_be_silent
        self._has_events = False  # of the answer, whatever they hold
        self._tells_tokens = False  # the engine tells each token's id, so that its silence is known to be one
        self._parser = EventParser(request.answers)
        self._held: list[Chunk] = []  # nobody has taken them yet
        self._out: Feed | None = None
        self._shown = False  # that the engine computes
        self._failures: list[Exception] = []  # of who takes them

    @property
    def progress(self) -> Progress:
        """Return what the caller has, if the answer is ``continuable``."""
        if self._unnoted:
            self._progress.note(self._unnoted)
            self._unnoted.clear()
        return self._progress

    def _note(self, now: float) -> None:
        self._note_at = now + NOTED_EVERY_S
        self.attempt.lease.produced(self._untold)  # only as tokens come: it counts as progress of the engine
        self._untold = 0
        self._progress.note(self._unnoted)
        self._unnoted.clear()

    async def begin(self) -> None:
        self._body.patience = self._patience
        if await self._body.pump(self.feed) and not self._parser.ended:
            raise EngineBrokeError(ENDED_EARLY)
        progress = self.progress
        # Until something was sent another can answer; afterwards one can go on with text alone, from the prompt's ids.
        if not (self._shown and self.continuable and progress.prompt_ids and progress.continuable):
            self._parser.check()
        if not self._shown:
            raise EngineBrokeError("the engine's answer was empty")
        attempt = self.attempt
        self._body.limit_reads(attempt.token_timeout_s)
        attempt.hop.first_token_at = now = time.monotonic()
        self.ttft_ms = (now - self.sent_at) * 1000
        if self._untold:
            attempt.lease.produced(self._untold)
            self._untold = 0
        self._note_at = now + NOTED_EVERY_S

    def _note_first_tokens(self, tokens: int) -> None:
        """Note tokens before the answer has begun: the first one's time, and that the engine computes."""
        self._last_at = now = time.monotonic()
        self._untold += tokens
        lease = self.attempt.lease
        if not self._first_at:
            self._first_at = now
            lease.first_token(None if self._was_silent else (now - self.attempt.hop.began) * 1000)
        elif now >= self._note_at:
            self._note_at = now + NOTED_EVERY_S
            lease.produced(self._untold)
            self._untold = 0

    def _patience(self, silent_since: float) -> float:
        """Return the seconds for which a silence may go on that has lasted as long as silences may.

        An engine that tells its tokens would have told them. Another one may compute all the time and hold back what it
        computes, as parsers of tool calls do.
        """
        if self._tells_tokens or not self._has_events:
            return 0.0
        attempt, now = self.attempt, time.monotonic()
        limit_s = self._body.read_timeout_s or attempt.token_timeout_s
        until = attempt.lease.may_be_silent_until(now, limit_s, is_expected=self._may_be_silent)
        left_s = min(until, silent_since + attempt.silence_timeout_s) - now
        if left_s > 0 and not self._shown:
            self._was_silent = True
        return left_s

    async def relay(self, feed: Feed, drain: Drain) -> None:
        """Let ``feed`` have all of it as it comes, from whichever engine; return after its end.

        ``EngineBrokeError``: the engine failed, or no token came in time, and no other could go on.
        """
        try:
            while not await self.flow(feed):
                await drain()
        except EngineBrokeError as error:
            broken = without_trace(error)
        else:
            return
        try:
            await self._fail_over(broken, feed, drain)
        finally:
            del broken  # its trace leads here

    async def flow(self, feed: Feed) -> bool:
        """Let ``feed`` have what this engine sends, as it comes; False: it takes no more now, True: that was the end.

        ``EngineBrokeError``: the engine failed, or no token came in time. What came before was passed on.
        """
        parser = self._parser
        if self._held:
            held, self._held = self._held, []
            if not feed(held):
                return False
        if not parser.ended:
            self._out = feed
            try:
                if await self._body.pump(self.feed) and not parser.ended:
                    raise EngineBrokeError(ENDED_EARLY)
            finally:
                self._out = None  # it leads back here
        if self._failures:
            raise self._failures.pop()
        parser.check()
        if not parser.over:
            return False
        if self.finish_reason is None:
            raise EngineBrokeError("the engine's stream ended without a finish reason")
        self._body.over = True  # once the end is there, the connection can be used again
        self.complete = True
        return True

    def feed(self, data: bytes) -> bool:
        """Take a part of the stream: note what it holds, and pass it on; tell whether more is wanted now."""
        parser, tokens = self._parser, 0
        chunks = parser.feed(data)
        for chunk in chunks:
            if chunk.usage:
                self._note_usage(chunk.usage)
            shows = bool(chunk.text or chunk.other or chunk.finish_reason)
            tokens += len(chunk.token_ids) or shows
            self._shown = self._shown or shows
            self.finish_reason = chunk.finish_reason or self.finish_reason
        if self.continuable:
            self._unnoted += chunks
        self._tells_tokens = self._tells_tokens or any(chunk.token_ids for chunk in chunks)
        if tokens and not self.usage:
            self.output_tokens += tokens
        if self._out is None:
            return self._hold(chunks, tokens)
        if not chunks:
            return not parser.ended
        if tokens:
            self._last_at = now = time.monotonic()
            self._untold += tokens
            if now >= self._note_at:
                self._note(now)
        try:
            return self._out(chunks) and not parser.ended
        except Exception as error:  # noqa: BLE001  raised in ``flow``: the engine's connection is not to blame
            self._failures.append(error)
            return False

    def _hold(self, chunks: Sequence[Chunk], tokens: int) -> bool:
        """Keep chunks that nobody takes yet; tell whether more is wanted now."""
        self._has_events = self._has_events or any(not chunk.raw.startswith(b":") for chunk in chunks)
        if tokens and self.ttft_ms is None:
            self._note_first_tokens(tokens)
        self._held += chunks
        return not (self._parser.ended or self._shown)

    async def _fail_over(self, broken: EngineBrokeError, feed: Feed, drain: Drain) -> None:
        progress = self.progress
        if self.continuation is None or not self.continuable:
            raise broken
        self.failed_over = True

        def feed_on(chunks: Sequence[Chunk]) -> bool:
            self._last_at = time.monotonic()
            self.output_tokens += sum(len(chunk.token_ids) for chunk in chunks)
            return feed(chunks)

        await self.continuation(self, broken, feed_on, drain)
        if self.parts or not self.usage:  # else all of the answer had come, and its counts
            self.usage = progress.usage
            self.output_tokens = self.usage.get("completion_tokens", self.output_tokens)
        self.finish_reason = progress.finish_reason
        if self._wants_usage and not self.usage:
            raise type(broken)(str(broken))  # nobody knows the counts
        self.complete = True


class BufferedAnswer(EngineAnswer):
    """An answer that is not streamed, read as a whole before any of it is passed on."""

    def __init__(self, attempt: Attempt, answers: AnswerFormat = COMPLETION_FORMAT) -> None:
        super().__init__(attempt)
        self.content, self._read_whole = b"", answers.read_whole

    async def begin(self) -> None:
        try:
            self.content = await body_of(self._body, MAX_ANSWER_BYTES)
        except httpx.ReadTimeout:
            raise
        except httpx.HTTPError as error:
            raise EngineBrokeError("the engine's connection broke off: ask again") from error
        if (answer := self._read_whole(self.content)) is None:
            raise EngineFailedError("the engine's answer is not a completion")
        self.finish_reason, usage = answer
        self._note_usage(usage)
        self.complete = True


def end_hop(hop: Hop, error: BaseException | None, attributes: dict[str, Any] | None = None) -> None:
    """End a request to an engine, with its error if it had one; not with a refusal's words, which may quote the prompt."""
    hop.ended = time.monotonic()
    hop.result = attributes or {}
    if hop.streamed and hop.first_token_at is not None:
        hop.result["gen_ai.response.time_to_first_chunk"] = round(hop.first_token_at - hop.began, 6)
    if error is not None:
        hop.result["error.type"] = error_name(error)
    if isinstance(error, EngineRefusedError):
        hop.result["http.response.status_code"] = error.status
    told = error if isinstance(error, Exception) and not isinstance(error, EngineRefusedError) else None
    hop.message = "" if told is None else str(told)
    if hop.span is not None:
        end_span(hop, hop.span, told)
