"""One answer of an engine, as it comes."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from router.upstream.errors import EngineBroke, EngineRefused, EngineStalled, UpstreamError
from router.upstream.idle_timeout import Patience
from router.upstream.json_object import as_boolean, as_integer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    import httpx
    from opentelemetry.trace import Span

    from tiers.fleet import Lease, Replica
    from tiers.spec import TierName


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


class Point(NamedTuple):
    """A place in an answer where its text is known: so many tokens have so many characters, and end no character halfway."""

    tokens: int
    characters: int


BEGINNING = Point(0, 0)


@dataclass(slots=True)
class Progress:
    """How far an answer has come: what another engine needs to go on from there.

    As vLLM's ``v1/engine/detokenizer.py`` works, an engine keeps a fixed number of characters back while they may begin a
    stop string. So each piece of text also tells how long the text of all tokens is by then, and once so many characters
    more have come, that text itself is known. A token that comes alone and with text has ended a character.

    Attributes:
        held_back: Characters that an engine keeps back.
        prompt_ids: The prompt as the engine read it; empty for as long as it is not known.
        output_ids: Of all tokens that came.
        told: Characters that came.
        finish_reason: Once it is known.
        resumable: Whether what came so far can be continued.
        counted: Whether the engine has told the tokens of all that came.
        begun: Where the engine that computes has begun.
        silent: Tokens that came alone and without any text, by their number: parts of characters, and special ones.
    """

    held_back: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    told: int = 0
    finish_reason: str | None = None
    resumable: bool = True
    counted: bool = True
    silent: list[int] = field(default_factory=list)
    begun: Point = BEGINNING
    _parts: list[str] = field(default_factory=list)
    _points: list[Point] = field(default_factory=lambda: [BEGINNING])
    _spoken: bool = False  # the engine that computes has sent text

    @property
    def text(self) -> str:
        """Return what came."""
        return "".join(self._parts)

    @property
    def point(self) -> Point:
        """Return the last place of which all text has come."""
        return next(point for point in reversed(self._points) if point.characters <= self.told)

    @property
    def settled(self) -> bool:
        """Tell whether nothing is kept back at the last such place, and all that came was the text up to there."""
        return self.point.characters == self.told and not (self.held_back and self._spoken)

    def note(self, piece: Piece) -> None:
        """Note one more piece that an engine sent."""
        alone = len(piece.token_ids) == 1
        self.output_ids += piece.token_ids
        self.finish_reason = piece.finish_reason or self.finish_reason
        if piece.text:
            while len(self._points) > 1 and self._points[1].characters <= self.told:
                del self._points[0]
            self._parts.append(piece.text)
            self.told += len(piece.text)
            self._spoken = True
            if alone:
                self._points.append(Point(len(self.output_ids), self.told + self.held_back))
            elif not piece.token_ids:
                self.close(counted=False)
        elif alone and (self._spoken or not self.held_back):
            self.silent.append(len(self.output_ids) - 1)

    def close(self, *, counted: bool) -> None:
        """Note that what came cannot be gone on with: it is no text, or nobody knows of which tokens it is the text.

        Args:
            counted: Whether the engine told its tokens.
        """
        self.resumable, self.counted = False, self.counted and counted

    def rest_at(self, tokens: int, text: str) -> None:
        """Go back, or on, to a place where the text of so many tokens is known; another engine begins there."""
        del self.output_ids[tokens:]
        self._parts, self.told = [text], len(text)
        self.begun = Point(tokens, len(text))
        self._points, self.silent, self._spoken = [self.begun], [], False

    def stop_at(self, characters: int) -> None:
        """End the answer with the token that completed a stop string; those after it were computed for nothing."""
        last = next((point.tokens for point in self._points if point.characters >= characters), len(self.output_ids))
        del self.output_ids[last:]
        self.finish_reason = "stop"

    @property
    def usage(self) -> dict[str, int]:
        """Return the token counts, as an engine gives them; empty where the engine did not tell all of its tokens."""
        prompt, output = len(self.prompt_ids), len(self.output_ids)
        counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return counts if prompt and self.counted else {}


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

    @property
    def includes_stop(self) -> bool:
        """Tell whether the string that ends the answer belongs to it."""
        return as_boolean(self.sampling.get("include_stop_str_in_output"))

    @property
    def held_back(self) -> int:
        """Return the characters that an engine keeps back, as they may begin a stop string."""
        return 0 if self.includes_stop else max(map(len, self.stops), default=1) - 1

    @property
    def min_tokens(self) -> int:
        """Return the tokens before which no stop string counts."""
        return as_integer(self.sampling.get("min_tokens")) or 0


USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")

T = TypeVar("T")

T_co = TypeVar("T_co", covariant=True)


class EngineRequest(Protocol):
    """What is asked of an engine, apart from what differs between replicas."""

    @property
    def path(self) -> str:
        """Return the path at the engine."""

    @property
    def operation(self) -> str:
        """Return the GenAI semantic conventions' name of what is done: ``chat`` or ``text_completion``."""

    @property
    def request_id(self) -> str:
        """Return an id that no two requests share; the engine is given it with the attempt's number."""

    @property
    def streamed(self) -> bool:
        """Tell whether the answer comes as events."""

    @property
    def judged(self) -> bool:
        """Tell whether the cheaper tiers are asked how sure they are of their first tokens."""

    @property
    def priority(self) -> int | None:
        """Return its priority for vLLM's scheduler, lower first; None where it has none of its own."""

    @property
    def chat(self) -> Sequence[Any] | None:
        """Return its messages, where the same could be asked of another tier; None where not."""

    @property
    def resumption(self) -> Resumption | None:
        """Return what another engine needs to go on with a broken answer; None where none may."""

    @property
    def parameters(self) -> Mapping[str, float]:
        """Return what is told of the request in traces, by semantic conventions' names."""

    def body(self, replica: Replica) -> bytes:
        """Return the request's body for one replica."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request at one replica that has answered 200.

    Attributes:
        number: Attempts that failed before this one.
        started: When it was sent, by the monotonic clock.
        opened: When the request was first sent, to whichever replica.
        token_timeout_s: Longest time between two tokens.
    """

    tier: TierName
    lease: Lease
    response: httpx.Response
    span: Span
    number: int
    started: float
    token_timeout_s: float
    opened: float


class Source(Protocol[T_co]):
    """Gives one item after another."""

    async def next(self) -> T_co | None:
        """Return the next one; None after the last."""

    async def aclose(self) -> None:
        """Give no more."""


class Exchange(ABC):
    """A request that an engine answers: its lease, its span, its times and its usage. Close it, however it ends.

    Attributes:
        tier: That began the answer.
        escalation: Why it was begun again at a higher precision; None: it was not.
        hedge: Why another tier was asked as well, and was quicker; None: it was not.
        progress: What its caller has of it, where another engine could go on from there.
        resume: Goes on with it elsewhere, where that may be.
        parts: What other engines computed of it, in order.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.tier = attempt.tier
        self.failed_attempts = attempt.number
        self.ttft_ms: float | None = None
        self.usage: dict[str, int] = {}
        self.finish_reason: str | None = None
        self.error: UpstreamError | None = None
        self.escalation: str | None = None
        self.hedge: str | None = None
        self.progress: Progress | None = None
        self.resume: Callable[[Exchange, EngineBroke], AsyncIterator[Piece]] | None = None
        self.parts: list[Exchange] = []
        self._attempt = attempt
        self._patience = Patience(attempt.token_timeout_s)
        self._pending: asyncio.Future[Any] | None = None
        self._source: Source[Any] | None = None
        self._first_at = self._last_at = 0.0
        self._complete = self._closed = False
        self._tokens = 0

    @abstractmethod
    async def begin(self) -> None:
        """Read up to the first token, or the whole of an answer that is not streamed.

        Raises:
            UpstreamError: The engine failed; nothing of its answer has been passed on.
        """

    async def look_ahead(self, tokens: int, deadline: float) -> float | None:
        """Read so many tokens without passing them on, and tell how sure the engine is of them.

        Args:
            tokens: How many; fewer where the answer ends before.
            deadline: By the monotonic clock; what has come until then must do.

        Returns:
            The mean log-probability of its first choices; None where it is not known.
        """
        del tokens, deadline
        return None

    @property
    def complete(self) -> bool:
        """Tell whether the whole answer has come."""
        return self._complete

    @property
    def opened(self) -> float:
        """Return when the request was first sent, to whichever replica, by the monotonic clock in seconds."""
        return self._attempt.opened

    @property
    def replica_id(self) -> str:
        """Return the id of the replica that serves this answer."""
        return self._attempt.lease.replica.id

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
        """Return the tokens produced so far: the engine's count, or until that comes the number of pieces."""
        return self.usage.get("completion_tokens", self._tokens)

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
        lease, span = self._attempt.lease, self._attempt.span
        if self._complete:
            lease.finished(self.tpot_ms, self.usage.get("completion_tokens", 0))
        elif isinstance(error, UpstreamError):
            lease.failed(type(error).__name__)
        lease.release()
        span.set_attributes(self._attributes())
        end_span(span, error)
        self._patience.close()
        async with AsyncExitStack() as closing:  # all of it, also when this is cancelled
            closing.push_async_callback(self._attempt.response.aclose)
            if self._source is not None:
                closing.push_async_callback(self._source.aclose)
            if self._pending is not None:
                self._pending.cancel()
                await asyncio.gather(self._pending, return_exceptions=True)

    def _began(self) -> None:
        """Note the first token."""
        self._first_at = self._last_at = time.monotonic()
        self._attempt.span.add_event("qarr.first_token")
        self.ttft_ms = (self._first_at - self._attempt.opened) * 1000
        self._attempt.lease.first_token((self._first_at - self._attempt.started) * 1000)

    def let_go(self) -> None:
        """Note that the first token goes out only now."""
        self.ttft_ms = (time.monotonic() - self._attempt.opened) * 1000

    def _produced(self, tokens: int = 1) -> None:
        """Note more tokens."""
        self._last_at = time.monotonic()
        self._tokens += tokens
        self._attempt.lease.produced(tokens)

    async def _resumed(self, broken: EngineBroke) -> AsyncIterator[Piece]:
        """Yield the rest of an answer that broke, from other engines.

        Raises:
            EngineBroke: None could go on, or none may.
        """
        if self.resume is None or self.progress is None:
            raise broken
        async for piece in self.resume(self, broken):
            self._last_at = time.monotonic()
            self._tokens += len(piece.token_ids)
            yield piece
        if self.parts or not self.usage:  # else all of the answer had come, and its counts
            self.usage = self.progress.usage
        self.finish_reason = self.progress.finish_reason

    async def _next(self, source: Source[T]) -> T | None:
        """Read one more item, or None at the end.

        Raises:
            EngineStalled: None came in time.
        """
        try:
            with self._patience:
                if self._pending is None:
                    return await source.next()
                item: T | None = await self._pending
                self._pending = None
                return item
        except TimeoutError as error:
            limit_s = self._attempt.token_timeout_s
            raise EngineStalled(f"the engine sent no token for {limit_s:g} s") from error

    async def _ahead(self, source: Source[T], deadline: float) -> T | None:
        """Read one more item by a deadline on the monotonic clock; one that comes later is left for ``_next``.

        Raises:
            TimeoutError: None came until then.
        """
        if self._pending is None:
            self._pending = asyncio.ensure_future(source.next())
        done, _ = await asyncio.wait({self._pending}, timeout=max(deadline - time.monotonic(), 0))
        if not done:
            raise TimeoutError
        item: T | None = self._pending.result()
        self._pending = None
        return item

    def _note_usage(self, usage: Mapping[str, Any]) -> None:
        self.usage = {name: int(usage.get(name) or 0) for name in USAGE}

    def _attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        if self.ttft_ms is not None:
            attributes["qarr.ttft_ms"] = self.ttft_ms
        if self.finish_reason:
            attributes["gen_ai.response.finish_reasons"] = (self.finish_reason,)
        if self.usage:
            attributes["gen_ai.usage.input_tokens"] = self.usage["prompt_tokens"]
            attributes["gen_ai.usage.output_tokens"] = self.usage["completion_tokens"]
        if (tpot_ms := self.tpot_ms) is not None:
            attributes["qarr.tpot_ms"] = tpot_ms
        return attributes


E = TypeVar("E", bound=Exchange)


def continued_on(answer: Exchange) -> list[TierName]:
    """Return the tiers that went on with an answer, in order."""
    return [part.tier for part in answer.parts]


def end_span(span: Span, error: BaseException | None) -> None:
    """End an attempt's span, with its error if it had one; not with an engine's refusal, which may quote the prompt."""
    if error is not None:
        span.set_attribute("error.type", type(error).__name__)
        if isinstance(error, EngineRefused):
            span.set_attribute("http.response.status_code", error.status)
        elif isinstance(error, Exception):
            span.record_exception(error)
    span.end()
