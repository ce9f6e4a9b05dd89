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
from router.upstream.errors import (
    EngineBrokeError,
    EngineFailedError,
    EngineRefusedError,
    UpstreamError,
    without_trace,
)
from router.upstream.progress import AnswerProgress
from router.upstream.sse import (
    COMPLETION_FORMAT,
    USAGE,
    AnswerFormat,
    Chunk,
    EventParser,
)
from router.upstream.token_details import (
    NO_DETAILS,
    ThoughtTokens,
    TokenDetails,
    token_details_of,
)
from router.upstream.transport import Body, Sink, body_of
from tiers.fleet import Lease
from tiers.replica import SentPrompt
from tiers.spec import TierName, TierSpec

# receives events that came together; tells whether it takes more now
ReceiveChunks = Callable[[Sequence[Chunk]], bool]
Drain = Callable[[], Awaitable[None]]  # waits until the receiver takes more

NOTED_EVERY_S = 0.1  # noting each chunk by itself costs twice as much
ENDED_EARLY = "the engine's stream ended early"
# for an answer that is not streamed: log-probabilities of a long prompt take many
MAX_ANSWER_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class OverflowServer:
    """The overflow's server, as an answer shows it in place of a replica."""

    id: str
    spec: TierSpec
    fingerprint: None = None
    resumes: bool = False


@dataclass(slots=True)
class OverflowHold:
    """A request's hold on one of the overflow's places, used like a ``Lease``. Nothing is learned from its times."""

    replica: OverflowServer
    sequences: int
    free: Callable[[], None]
    sent: SentPrompt | None = None
    _released: bool = False

    def note(self, *_: object, **_named: object) -> None:
        """Ignore what a lease would learn from."""

    first_token = produced = finished = failed = note

    def may_be_silent_until(
        self, now: float, limit_s: float, *, is_expected: bool
    ) -> float:
        """Return until when a silent answer is waited for: nobody sees whether a foreign server computes."""
        if is_expected:
            return now + limit_s
        return now

    def release(self) -> None:
        if not self._released:
            self._released = True
            self.free()


class Attempt(Struct, frozen=True):
    """A request that was sent to one engine.

    Attributes:
        token_timeout_s: Longest time between two tokens.
        silence_timeout_s: Longest time without a word from an engine that computes.
        sent_at: When the request was first sent, to whichever replica, by the monotonic clock in seconds.
    """

    tier: TierName
    lease: Lease | OverflowHold
    body: Body
    hop: Hop
    token_timeout_s: float
    silence_timeout_s: float
    sent_at: float


class EngineAnswer(ABC):
    """A request that an engine answers: its lease, its span, its times and its usage. Close it, however it ends.

    Attributes:
        tier: The tier that began the answer, with its replica ``replica_id``.
        predicted_cached_tokens: Tokens of the prompt that the replica was expected to hold; None: not known.
        token_details: What the engine reports of its tokens besides their number.
        is_thinking: Whether the latest output was reasoning, as far as is seen.
        output_tokens: The engine's count, or until that comes what its chunks tell.
        ignored: Members of the caller's body that the engine was not asked.
        overflow: Name of the server outside of the fleet that answers; None: a tier does.
        parts: What other engines computed of the answer, in order.
    """

    def __init__(self, attempt: Attempt) -> None:
        lease = attempt.lease
        replica = lease.replica
        self.attempt = attempt
        self.tier = attempt.tier
        self.sent_at = attempt.sent_at
        self.replica_id = replica.id
        self.spec = replica.spec
        self.fingerprint = replica.fingerprint
        self.predicted_cached_tokens: int | None = None
        if lease.sent is not None:
            self.predicted_cached_tokens = lease.sent.cached
        self.ttft_ms: float | None = None
        self.usage: dict[str, int] = {}
        self.token_details: TokenDetails = NO_DETAILS
        self.is_thinking = False
        self.finish_reason: str | None = None
        self.error: UpstreamError | None = None
        self.ignored: tuple[str, ...] = ()
        self.overflow: str | None = None
        self.parts: list[EngineStream] = []
        self.complete = False
        self.output_tokens = 0
        self._body = attempt.body
        # when the first token and the last one came; 0: none has come
        self._first_at = 0.0
        self._last_at = 0.0
        # Whether nothing came for so long before the first word that its time tells nothing of the engine's speed.
        self._was_silent = False
        self._is_closed = False

    @abstractmethod
    async def begin(self) -> None:
        """Read up to the first token, or the whole of an answer that is not streamed.

        ``UpstreamError``: the engine failed; nothing of its answer has been passed on.
        """

    @property
    def media_type(self) -> str | None:
        return self._body.header(b"content-type")

    @property
    def cached_tokens(self) -> int | None:
        """Return the tokens of the prompt that were in the prefix cache, as the engine reports; None: it did not."""
        return self.token_details.cached

    @property
    def reasoning_tokens(self) -> int | None:
        """Return the tokens of the output that are the model's reasoning; None: nobody knows."""
        return self.token_details.reasoning

    @property
    def ttfa_ms(self) -> float | None:
        """Return the time to the first token of the answer itself, not of reasoning; None: none was seen to come."""
        return None

    @property
    def tpot_ms(self) -> float | None:
        """Return the mean time between tokens so far, from the engine's token count; None below two tokens.

        An engine computes several sequences at the same time: they count as if they were equally long.
        """
        tokens = self.usage.get("completion_tokens", 0) / self.attempt.lease.sequences
        if self.ttft_ms is None or tokens < 2:  # noqa: PLR2004
            return None
        return (self._last_at - self._first_at) * 1000 / (tokens - 1)

    async def aclose(self, error: BaseException | None = None) -> None:
        """End all of it: the lease goes back, the connection is closed, which aborts what is unfinished, the span ends."""
        for part in self.parts:
            await part.aclose(error)  # it waits for nothing, so it is not cancelled
        if self._is_closed:
            return
        self._is_closed = True
        lease = self.attempt.lease
        tpot_ms = self.tpot_ms
        if self.complete:
            tpot_to_learn_ms = None if self._was_silent else tpot_ms
            lease.finished(
                tpot_to_learn_ms,
                self.usage.get("completion_tokens", 0),
                self.cached_tokens,
            )
        elif isinstance(error, UpstreamError):
            lease.failed(error_name(error))
        lease.release()
        end_hop(self.attempt.hop, error, self._span_attributes(tpot_ms))
        await self._body.aclose()

    def _span_attributes(self, tpot_ms: float | None) -> dict[str, Any]:
        finish_reasons = (self.finish_reason,) if self.finish_reason else None
        return {
            "qarr.ttft_ms": self.ttft_ms,
            "qarr.ttfa_ms": self.ttfa_ms,
            "gen_ai.response.finish_reasons": finish_reasons,
            "gen_ai.usage.input_tokens": self.usage.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": self.usage.get("completion_tokens"),
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": self.reasoning_tokens,
            "qarr.cache_written_tokens": self.token_details.cache_written,
            "qarr.tool_tokens": self.token_details.tool,
            "qarr.cached_prompt_tokens": self.predicted_cached_tokens,
            "qarr.tpot_ms": tpot_ms,
        }

    def _note_usage(self, usage: Mapping[str, Any]) -> None:
        self.usage = {name: int(usage.get(name) or 0) for name in USAGE}
        self.output_tokens = self.usage["completion_tokens"]
        self.token_details = token_details_of(usage)


class EngineStream(EngineAnswer):
    """A streamed answer. What came before it began is held back by ``begin``; ``relay`` passes that on, and what follows.

    Attributes:
        may_be_continued: Whether another engine may go on from what the caller has, if it can.
        continuation: What lets another engine go on, set before the answer is relayed.
        thought: Counts the model's reasoning; None: none has come.
        failed_over: Whether the first engine did not end the answer.
        first_event: The first event of the answer, whatever it holds; empty: none has come.
        answer_usage: The engine's token counts as those of the answer: of one that it resumed, the earlier tokens are output
            of the answer, and a part of what this engine has read.
    """

    def __init__(self, attempt: Attempt, request: EngineRequest) -> None:
        super().__init__(attempt)
        replica = attempt.lease.replica
        self.continuation: (
            Callable[
                [EngineStream, EngineBrokeError, ReceiveChunks, Drain], Awaitable[None]
            ]
            | None
        ) = None
        self.failed_over = False
        self._progress = request.progress_on(replica)
        self.may_be_continued = (
            request.continuation_terms is not None or self._progress.splicer is not None
        )
        self._unnoted: list[Chunk] = []  # chunks that are not in ``_progress`` yet
        self._unreported_tokens = 0  # tokens that the lease was not told of yet
        # when both are to be noted next, by the monotonic clock in seconds
        self._note_at = 0.0
        self._wants_usage = request.wants_usage
        self._is_continuation = request.continued_tokens > 0
        self._may_be_silent = request.may_be_silent
        takes_token_notes = request.wants_token_notes(replica)
        self._parser = EventParser(request.answers, takes_token_notes=takes_token_notes)
        # Tokens that an event with output stands for if it tells none: engines that tell none send about one at a time.
        self._untold_tokens = 0 if takes_token_notes else 1
        self._resumed_tokens = 0  # tokens of the answer that others have computed
        if request.resume_point is not None:
            self._resumed_tokens = len(request.resume_point.token_ids)
        self.answer_usage: dict[str, int] = {}
        self._held_chunks: list[Chunk] = []  # chunks that no receiver has got yet
        # the receiver, while the answer is relayed
        self._pass_on: ReceiveChunks | None = None
        self._receiver_errors: list[Exception] = []  # at most one
        self.first_event = b""
        self._has_output = False  # whether an event with output of the model has come
        # Whether the engine tells each token's id. One that does is known not to compute while it sends nothing.
        self._tells_tokens = False
        self._latest_tokens = 0  # so many tokens were told together last
        self.thought: ThoughtTokens | None = None
        # when the answer itself began, after all reasoning; None: it has not
        self._answer_at: float | None = None

    @property
    def reasoning_tokens(self) -> int | None:
        """Return the engine's count, or one of the tokens that it told with its reasoning; None: nobody knows.

        An engine that counts no reasoning beside some that it sent does not count it at all. Of an answer that others have
        continued, only the one that has ended it knows.
        """
        ending = self.parts[-1] if self.parts else self
        reported = ending.token_details.reasoning
        thought = ending.thought
        if reported or thought is None:
            return reported
        # the tokens of several answers come mixed
        if self.parts or self.attempt.lease.sequences > 1:
            return None
        return thought.count

    @property
    def ttfa_ms(self) -> float | None:
        if self._answer_at is None:
            return None
        return (self._answer_at - self.sent_at) * 1000

    def _span_attributes(self, tpot_ms: float | None) -> dict[str, Any]:
        attributes = super()._span_attributes(tpot_ms)
        if self._is_continuation:
            # counted for the whole answer, not for this engine's part of it
            attributes["gen_ai.usage.reasoning.output_tokens"] = None
        return attributes

    @property
    def progress(self) -> AnswerProgress:
        """Return what the caller has, if the answer is ``continuable``."""
        if self._unnoted:
            self._note_progress()
        return self._progress

    def _note_progress(self) -> None:
        self._progress.note(self._unnoted)
        self._unnoted.clear()

    def _report_tokens(self, now: float) -> None:
        """Tell the lease of the tokens that have come since the last report: the replica makes progress."""
        self._note_at = now + NOTED_EVERY_S
        self.attempt.lease.produced(self._unreported_tokens)
        self._unreported_tokens = 0

    async def begin(self) -> None:
        """Hold events back until one has output of the model: with that, the answer has begun.

        Output is text, reasoning, a part of a tool call, or a finish reason. Comments are none, nor are events with the
        prompt's token ids or the assistant's role, which engines send before they compute. A fault that comes with the
        first output is raised by ``flow``, after what came before it, where another engine could go on from there; any
        other fault is raised here, so that another engine can answer instead.
        """
        self._body.patience = self._patience
        await self._pump(self._hold_back)
        if not (self._has_output and self._can_be_continued()):
            self._parser.check()
        if not self._has_output:
            raise EngineBrokeError("the engine's answer was empty")
        self._body.limit_reads(self.attempt.token_timeout_s)
        now = time.monotonic()
        self.attempt.hop.first_token_at = now
        if self._answer_at is not None:
            self._answer_at = now
        self.ttft_ms = (now - self.sent_at) * 1000
        if self._unreported_tokens:
            self._report_tokens(now)
        self._note_at = now + NOTED_EVERY_S

    def _can_be_continued(self) -> bool:
        """Tell whether another engine could go on from what has come: it needs the prompt's ids, and text alone."""
        progress = self.progress
        return (
            self.may_be_continued
            and progress.is_continuable
            and len(progress.prompt_ids) > 0
        )

    async def _pump(self, sink: Sink) -> None:
        """Let ``sink`` have what the engine sends, until it wants no more or the stream has ended."""
        has_body_ended = await self._body.pump(sink)
        if has_body_ended and not self._parser.ended:
            raise EngineBrokeError(ENDED_EARLY)

    def _patience(self, silent_since: float) -> float:
        """Return the seconds for which a silence may go on that has lasted as long as silences may.

        An engine that tells its tokens would have told them. Another one may compute all the time and hold back what it
        computes, as parsers of tool calls do.
        """
        if self._tells_tokens or not self.first_event:
            return 0.0
        attempt = self.attempt
        now = time.monotonic()
        limit_s = self._body.read_timeout_s or attempt.token_timeout_s
        until = attempt.lease.may_be_silent_until(
            now, limit_s, is_expected=self._may_be_silent
        )
        patience_s = min(until, silent_since + attempt.silence_timeout_s) - now
        if patience_s > 0 and not self._has_output:
            self._was_silent = True
        return patience_s

    async def relay(self, receive: ReceiveChunks, drain: Drain) -> None:
        """Let ``receive`` have all of it as it comes, from whichever engine; return after its end.

        ``EngineBrokeError``: the engine failed, or no token came in time, and no other could go on.
        """
        try:
            while not await self.flow(receive):
                await drain()
        except EngineBrokeError as error:
            broken = without_trace(error)
        else:
            return
        try:
            await self._fail_over(broken, receive, drain)
        finally:
            del broken  # break the reference cycle between the exception and this frame

    async def flow(self, receive: ReceiveChunks) -> bool:
        """Let ``receive`` have what this engine sends, as it comes; False: it takes no more now, True: that was the end.

        ``EngineBrokeError``: the engine failed, or no token came in time. What came before was passed on.
        """
        parser = self._parser
        if self._held_chunks:
            chunks = self._held_chunks
            self._held_chunks = []
            if not receive(chunks):
                return False
        if not parser.ended:
            self._pass_on = receive
            try:
                await self._pump(self._relay)
            finally:
                # break the reference cycle: the receiver leads back here
                self._pass_on = None
        if self._receiver_errors:
            raise self._receiver_errors.pop()
        parser.check()
        if not parser.over:
            return False
        if self.finish_reason is None:
            raise EngineBrokeError("the engine's stream ended without a finish reason")
        self._body.over = True  # after the last event, the connection can be used again
        self.complete = True
        return True

    def _note(self, chunks: Sequence[Chunk]) -> int:
        """Note what chunks hold; return the tokens that they stand for."""
        tokens = 0
        for chunk in chunks:
            # one token of plain text holds nothing of what is looked for below
            if chunk.without_ids and self._has_output and not self.is_thinking:
                self._tells_tokens = True
                self._latest_tokens = 1
                tokens += 1
                continue
            if chunk.usage:
                self._note_usage(chunk.usage)
            if chunk.finish_reason:
                self.finish_reason = chunk.finish_reason
            chunk_tokens = len(chunk.token_ids)
            if chunk_tokens:
                self._tells_tokens = True
                self._latest_tokens = chunk_tokens
            if chunk.reasoning or self.is_thinking:
                self._note_thought(chunk)
            if chunk.text or chunk.other or chunk.finish_reason:
                self._has_output = True
                chunk_tokens = chunk_tokens or self._untold_tokens
            tokens += chunk_tokens
        if self.may_be_continued:
            self._unnoted += chunks
        if tokens and not self.usage:
            self.output_tokens += tokens
        return tokens

    def _note_thought(self, chunk: Chunk) -> None:
        """Count an event's tokens, if they are reasoning."""
        if self.thought is None:
            self.thought = ThoughtTokens()
        self.thought.receive(chunk, self._latest_tokens)
        self.is_thinking = self.thought.is_open

    def _look_for_answer(self, chunks: Sequence[Chunk]) -> None:
        """Note when the answer itself begins: its text, or a tool call."""
        for chunk in chunks:
            if chunk.text or (chunk.other and not chunk.reasoning):
                self._answer_at = time.monotonic()
                return

    def _hold_back(self, data: bytes) -> bool:
        """Keep what comes until there is a receiver; tell whether more is wanted before that."""
        chunks = self._parser.parse(data)
        tokens = self._note(chunks)
        if not self.first_event:
            self.first_event = _first_event_in(chunks)
        if tokens:
            self._note_opening_tokens(tokens)
        if self._answer_at is None and not self.is_thinking:
            self._look_for_answer(chunks)
        self._held_chunks += chunks
        return not (self._parser.ended or self._has_output)

    def _note_opening_tokens(self, tokens: int) -> None:
        """Note tokens before the answer has begun: the first one's time, and that the engine computes."""
        now = time.monotonic()
        self._last_at = now
        self._unreported_tokens += tokens
        if not self._first_at:
            self._first_at = now
            time_to_learn_ms = (
                None if self._was_silent else (now - self.attempt.hop.began) * 1000
            )
            self.attempt.lease.first_token(time_to_learn_ms)
        elif now >= self._note_at:
            self._report_tokens(now)

    def _relay(self, data: bytes) -> bool:
        """Pass on what comes to the receiver; tell whether more is wanted now."""
        chunks = self._parser.parse(data)
        if not chunks:
            return not self._parser.ended
        tokens = self._note(chunks)
        if tokens:
            now = time.monotonic()
            self._last_at = now
            self._unreported_tokens += tokens
            if now >= self._note_at:
                self._report_tokens(now)
                self._note_progress()
        if self._answer_at is None and not self.is_thinking:
            self._look_for_answer(chunks)
        assert self._pass_on is not None
        try:
            return self._pass_on(chunks) and not self._parser.ended
        except Exception as error:  # noqa: BLE001  raised in ``flow``: the engine's connection is not to blame
            self._receiver_errors.append(error)
            return False

    async def _fail_over(
        self, broken: EngineBrokeError, receive: ReceiveChunks, drain: Drain
    ) -> None:
        """Let other engines go on with the answer; raise ``broken``, or what broke last, if none can."""
        progress = self.progress
        if self.continuation is None or not self.may_be_continued:
            if not self._lacks_only_its_end():
                raise broken
            await self.aclose(broken)
            self.failed_over = True
            self.complete = True
            return
        self.failed_over = True

        def receive_continued(chunks: Sequence[Chunk]) -> bool:
            self._last_at = time.monotonic()
            if self._answer_at is None:
                self._look_for_answer(chunks)
            self.output_tokens += sum(len(chunk.token_ids) for chunk in chunks)
            return receive(chunks)

        await self.continuation(self, broken, receive_continued, drain)
        has_all_from_first_engine = not self.parts and self.usage
        if not has_all_from_first_engine:
            self.usage = self._usage_of_last_part() or progress.usage
            self.output_tokens = self.usage.get("completion_tokens", self.output_tokens)
        self.finish_reason = progress.finish_reason
        if self._wants_usage and not self.usage:
            # an answer without token counts is not complete
            raise type(broken)(str(broken))
        self.complete = True

    def _lacks_only_its_end(self) -> bool:
        """Tell whether an answer that nobody may go on with has come, but for events that the router writes itself."""
        is_one_answer = self.attempt.lease.sequences == 1
        has_usage = bool(self.usage) or not self._wants_usage
        return self.finish_reason is not None and is_one_answer and has_usage

    def _usage_of_last_part(self) -> dict[str, int]:
        """Return the answer's token counts from the engine that resumed it last; empty: it sent none."""
        if not self.parts:
            return {}
        return self.parts[-1].answer_usage

    def _note_usage(self, usage: Mapping[str, Any]) -> None:
        super()._note_usage(usage)
        if self._resumed_tokens:
            self.answer_usage = self.usage
            self.usage = _usage_after(self.usage, self._resumed_tokens)
            self.output_tokens = self.usage["completion_tokens"]


def _first_event_in(chunks: Sequence[Chunk]) -> bytes:
    """Return the first event that is no comment; empty: there is none."""
    for chunk in chunks:
        if chunk.raw and not chunk.raw.startswith(b":"):
            return chunk.raw
    return b""


def _usage_after(usage: Mapping[str, int], resumed_tokens: int) -> dict[str, int]:
    """Return an engine's own part of an answer's token counts, if so many tokens of the output are others'."""
    return {
        **usage,
        "prompt_tokens": usage["prompt_tokens"] + resumed_tokens,
        "completion_tokens": max(usage["completion_tokens"] - resumed_tokens, 0),
    }


class BufferedAnswer(EngineAnswer):
    """An answer that is not streamed, read as a whole before any of it is passed on."""

    def __init__(
        self, attempt: Attempt, answers: AnswerFormat = COMPLETION_FORMAT
    ) -> None:
        super().__init__(attempt)
        self.content = b""
        self._read_whole = answers.read_whole

    async def begin(self) -> None:
        try:
            self.content = await body_of(self._body, MAX_ANSWER_BYTES)
        except httpx.ReadTimeout:
            raise
        except httpx.HTTPError as error:
            raise EngineBrokeError(
                "the engine's connection broke off: ask again"
            ) from error
        answer = self._read_whole(self.content)
        if answer is None:
            raise EngineFailedError("the engine's answer is not a completion")
        self.finish_reason, usage = answer
        self._note_usage(usage)
        self.complete = True


def end_hop(
    hop: Hop, error: BaseException | None, attributes: dict[str, Any] | None = None
) -> None:
    """End a request to an engine, with its error if it had one; not with a refusal's words, which may quote the prompt."""
    hop.ended = time.monotonic()
    hop.result = attributes or {}
    if hop.streamed and hop.first_token_at is not None:
        hop.result["gen_ai.response.time_to_first_chunk"] = round(
            hop.first_token_at - hop.began, 6
        )
    if error is not None:
        hop.result["error.type"] = error_name(error)
    shown_error: Exception | None = None
    if isinstance(error, EngineRefusedError):
        hop.result["http.response.status_code"] = error.status
    elif isinstance(error, Exception):
        shown_error = error
    hop.message = "" if shown_error is None else str(shown_error)
    if hop.span is not None:
        end_span(hop, hop.span, shown_error)
