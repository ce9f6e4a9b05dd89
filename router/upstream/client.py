"""Send a request to a replica and take its answer: attempts, timeouts, retries before the first byte.

UpstreamError
├── EngineUnreachable   no connection, or no first token in time     tried elsewhere
├── EngineFailed        an answer of 5xx, or one that makes no sense  tried elsewhere
├── EngineRefused       the request itself is at fault               not tried elsewhere
├── EngineTooSlow       no whole answer in time                      not tried elsewhere
├── EngineBroke         failed after the first token                 gone on with elsewhere, else told to the caller
│   └── EngineStalled   by silence
├── NoPlace             every place was taken since the decision
└── NoEngineAnswered    every attempt failed
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast
from weakref import WeakValueDictionary

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from router.upstream.idle_timeout import Patience
from router.upstream.json_object import read_json

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from opentelemetry.trace import Span

    from router.pipeline.failover import Piece, Progress, Resumption
    from router.policy.decision import Decision
    from router.policy.table import LivePolicy
    from router.settings import UpstreamSettings
    from router.telemetry.tracing import Telemetry
    from tiers.fleet import Fleet, Lease, Replica
    from tiers.spec import TierName

USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
PASSED_AT_ONCE = 16  # small requests without a lease, of one pool at one engine
READ_BUFFER_BYTES = 1 << 15  # of each answer: at twice that no more is read until the client has taken some
MAX_ERROR_BYTES = 65536  # of an engine's error that are read; more of it helps nobody
LARGE_BYTES = 1 << 18  # of an answer to a small request, which takes some milliseconds to read
# What reading from an engine raises; httpx-aiohttp leaves aiohttp's word for an answer that is no HTTP as it is.
NO_ANSWER = (httpx.HTTPError, aiohttp.ClientError)
log = logging.getLogger("qarr.router")
# Statuses of an engine that blame the router or the moment, not the request.
_NOT_THE_REQUEST = {401, 403, 408, 425, 429}
NOT_IMPLEMENTED = 501  # vLLM's word for an option that it does not have
# Who sends a small request without a lease: the router itself, or a caller of one of these endpoints.
Pool = Literal["own", "tokens", "embeddings"]


class UpstreamError(Exception):
    """Base of what can go wrong between the router and an engine."""


class EngineUnreachable(UpstreamError):
    """No connection, or no first token in time."""


class EngineFailed(UpstreamError):
    """The engine answered with an error of its own."""


class EngineRefused(UpstreamError):
    """The engine says that the request is wrong.

    Attributes:
        detail: The engine's message.
        status: Its HTTP status.
        body: Its whole answer.
    """

    def __init__(self, detail: str, status: int = 400, body: bytes = b"") -> None:
        super().__init__(detail)
        self.detail, self.status, self.body = detail, status, body


class EngineTooSlow(UpstreamError):
    """The engine did not finish an answer that is not streamed in time."""


class EngineBroke(UpstreamError):
    """The engine failed after the first token."""


class EngineStalled(EngineBroke):
    """The engine sent no further token in time."""


class NoPlace(UpstreamError):
    """Every place was taken between the decision and the attempt."""


class NoEngineAnswered(UpstreamError):
    """Every attempt failed before the first token."""


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


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Fault = TypeVar("Fault", bound=BaseException)


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


@dataclass(slots=True)
class RetryBudget:
    """Bounds what retries add to the load of engines that fail already: each request earns a share of one.

    As Finagle's RetryBudget, and for its reason: a fixed number of attempts multiplies the load when all fail.
    """

    share: float
    reserve: int
    _left: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = float(self.reserve)

    def earn(self) -> None:
        """Note a request."""
        self._left = min(self._left + self.share, float(self.reserve))

    def take(self) -> bool:
        """Take one retry; False: there is none left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


def make_transport(max_connections: int) -> httpx.AsyncBaseTransport:
    """Return a pooled transport to the engines; 0 connections: any number.

    httpx's interface over aiohttp's client: httpx's own transport costs several times the CPU time per request, and
    more with every open connection (``benchmarks/transport.py`` measures both in one run).
    """
    transport = AiohttpTransport(trust_env=False)

    def session() -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=30.0, ssl=transport.ssl_context)
        return aiohttp.ClientSession(
            connector=connector, read_bufsize=READ_BUFFER_BYTES, cookie_jar=aiohttp.DummyCookieJar()
        )

    transport.client = session  # made by the first request, in its event loop
    return transport


class Upstream:
    """Opens answers on the fleet's replicas.

    Attributes:
        retries: Further attempts before the first byte, by the tier that they went to.
    """

    def __init__(
        self,
        fleet: Fleet,
        transport: httpx.AsyncBaseTransport,
        options: UpstreamSettings,
        telemetry: Telemetry,
        policy: LivePolicy,
    ) -> None:
        self._fleet, self._transport, self._options, self._telemetry = fleet, transport, options, telemetry
        # Small requests have connections of their own, bounded by their pools: those that hang take none from others.
        self._passing_transport = make_transport(0)
        self._passing: WeakValueDictionary[tuple[Pool, str], asyncio.Semaphore] = WeakValueDictionary()
        self._policy, self._numbers = policy, count()
        self.retries: Counter[TierName] = Counter()
        self._retries = RetryBudget(options.retry_share, options.retry_reserve)
        self._timeouts = {"connect": options.connect_timeout_s, "pool": options.connect_timeout_s}

    async def open(
        self,
        decision: Decision,
        request: EngineRequest,
        kind: Callable[[Attempt], E],
        opened: float | None = None,
        *,
        lease: Lease | None = None,
        exclude: Collection[str] = (),
        taken: set[str] | None = None,
        over_limit: bool = False,
        elsewhere: bool = True,
    ) -> E:
        """Try the chosen tier, then those that the policy would take instead by now, until an answer has begun.

        Args:
            decision: Where to try.
            request: What to ask.
            kind: Makes the answer, which says how it is read.
            opened: When the request was first sent, by the monotonic clock; None: now.
            lease: A place on the chosen tier; None: one is taken here.
            exclude: Replicas that are not to be tried.
            taken: Replicas that this request has been sent to, which are not tried again; added to here.
            over_limit: Take places beyond what replicas are to have.
            elsewhere: Whether other tiers may be tried.

        Raises:
            EngineRefused: An engine says that the request is wrong.
            EngineTooSlow: An engine did not finish an answer that is not streamed.
            NoPlace: No replica had a place any more.
            NoEngineAnswered: All attempts failed.
        """
        assert decision.tier is not None
        tried: dict[str, str] = {}
        taken = set() if taken is None else taken
        opened = opened or time.monotonic()
        self._retries.earn()
        for tier in self._targets(decision, elsewhere=elsewhere):
            while len(tried) < self._options.attempts:
                lease = lease or self._lease(tier, decision, {*taken, *exclude}, over_limit=over_limit or bool(tried))
                if lease is None:
                    break
                taken.add(lease.replica.id)
                if tried and not self._retries.take():
                    lease.release()
                    raise NoEngineAnswered(f"{_causes(tried)}; no further attempt, since too many fail")
                self.retries[tier] += bool(tried)
                try:
                    return await self._attempt(tier, lease, request, len(tried), kind, opened)
                except (EngineUnreachable, EngineFailed, EngineBroke) as error:
                    tried[lease.replica.id] = str(error)
                    self._telemetry.record_failed_attempt(lease.replica.id, error)
                    lease = None
        if not tried:
            raise NoPlace(f"every place on {', '.join(self._targets(decision, elsewhere=elsewhere))} is taken")
        raise NoEngineAnswered(_causes(tried))

    def _targets(self, decision: Decision, *, elsewhere: bool) -> Iterator[TierName]:
        """Yield the chosen tier, then the others as things stand when it has failed, not when the request was let in."""
        assert decision.tier is not None
        yield decision.tier
        if elsewhere:
            yield from self._policy.successors(decision.tier, decision.query)

    def take_retry(self) -> bool:
        """Take one further attempt from the budget; False: there is none left."""
        return self._retries.take()

    def _lease(self, tier: TierName, decision: Decision, exclude: Collection[str], *, over_limit: bool) -> Lease | None:
        query = decision.query
        return self._fleet.lease(
            tier,
            prompt_tokens=query.tokens_to_read,
            max_tokens=query.max_tokens,
            sequences=query.sequences,
            exclude=exclude,
            over_limit=over_limit,
        )

    async def pass_on(
        self, url: str, api_key: str, path: str, body: bytes, pool: Pool = "own"
    ) -> tuple[int, str, bytes]:
        """Pass a small request on to an engine, without a lease, and return status, media type and body.

        Args:
            url: The engine's address.
            api_key: The engine's key; empty: it has none.
            path: At the engine.
            body: JSON.
            pool: An engine has at most ``PASSED_AT_ONCE`` requests of a pool; further ones wait for those, not for others'.

        Raises:
            NoPlace: The engine has as many of the pool as it may have, and none ended in time.
            EngineUnreachable: There was no whole answer in time.
            EngineFailed: The answer is an error of the engine's own.
        """
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        request = httpx.Request(
            "POST", url + path, headers=headers, content=body, extensions={"timeout": self._timeouts}
        )
        places = self._passing.setdefault((pool, url), asyncio.Semaphore(PASSED_AT_ONCE))
        limit_s, sent = self._options.first_token_timeout_s, False
        try:
            async with asyncio.timeout(limit_s), places:
                sent = True
                response = await self._passing_transport.handle_async_request(request)
                try:
                    content = await body_of(response)
                finally:
                    await response.aclose()
        except (TimeoutError, *NO_ANSWER) as error:
            if not sent:
                raise NoPlace(f"{PASSED_AT_ONCE} such requests had no answer within {limit_s:g} s") from error
            log.warning("%s%s: no answer (%s)", url, path, type(error).__name__)
            raise EngineUnreachable(f"no answer ({type(error).__name__})") from error
        if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR or response.status_code in _NOT_THE_REQUEST:
            log.warning("%s%s: HTTP %d", url, path, response.status_code)
            raise EngineFailed(f"HTTP {response.status_code}")
        if response.status_code == httpx.codes.OK and not _holds_object(content):
            log.warning("%s%s: an answer that is no JSON object", url, path)
            raise EngineFailed("an answer that is no JSON object")
        return response.status_code, response.headers.get("content-type", "application/json"), content

    def passes_at_once(self, url: str, pool: Pool) -> bool:
        """Tell whether an engine takes one more small request of a pool without a wait."""
        places = self._passing.get((pool, url))
        return places is None or not places.locked()

    async def aclose(self) -> None:
        """Close the pooled connections."""
        await self._transport.aclose()
        await self._passing_transport.aclose()

    async def _attempt(  # noqa: PLR0917  called here alone
        self,
        tier: TierName,
        lease: Lease,
        request: EngineRequest,
        number: int,
        kind: Callable[[Attempt], E],
        opened: float,
    ) -> E:
        """Make one attempt. The lease, the connection and the span end with it unless an answer is returned."""
        span = self._telemetry.start_attempt(tier, lease.replica, request, number)
        response: httpx.Response | None = None
        started = time.monotonic()
        options = self._options
        limit_s = options.first_token_timeout_s if request.streamed else options.answer_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._transport.handle_async_request(self._http(lease.replica, request, span))
                if response.status_code != httpx.codes.OK:
                    raise _status_error(  # noqa: TRY301  one place ends the attempt
                        response.status_code, await body_of(response, MAX_ERROR_BYTES)
                    )
                answer = kind(Attempt(tier, lease, response, span, number, started, options.token_timeout_s, opened))
                await answer.begin()
                return answer
        except BaseException as error:  # noqa: BLE001  raised again
            failure = _translate(error, limit_s, streamed=request.streamed)
            try:
                if isinstance(failure, UpstreamError) and not isinstance(failure, EngineRefused):
                    lease.failed(type(failure).__name__)
                lease.release()
                end_span(span, failure)
                if response is not None:
                    await response.aclose()
                if failure is error:
                    raise
                raise failure from without_trace(error)
            finally:
                del failure  # its trace leads here

    def _http(self, replica: Replica, request: EngineRequest, span: Span) -> httpx.Request:
        # An engine mixes up requests of one id, and may still hold an attempt that was given up.
        number = f"{request.request_id}-{next(self._numbers):x}"
        headers = {"content-type": "application/json", "x-request-id": number}
        if replica.api_key:
            headers["authorization"] = f"Bearer {replica.api_key}"
        self._telemetry.inject(span, headers)
        return httpx.Request(
            "POST",
            _address(replica.url + request.path),
            headers=headers,
            content=request.body(replica),
            extensions={"timeout": self._timeouts},
        )


@lru_cache(256)
def _address(url: str) -> httpx.URL:
    """Return an engine's address, read once: they are few."""
    return httpx.URL(url)


def _causes(tried: Mapping[str, str]) -> str:
    return "; ".join(f"{replica}: {cause}" for replica, cause in tried.items())


def chunks_of(response: httpx.Response) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
    """Return a context in which a response's body is read; reading ends with it, and is not left to the collector."""
    return aclosing(parts_of(response))


def parts_of(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Return the parts of a response's body as they come; who reads them closes them."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    return cast("AsyncGenerator[bytes, None]", aiter(response.stream))


async def body_of(response: httpx.Response, limit: int | None = None) -> bytes:
    """Read a response's body, up to about ``limit`` bytes."""
    parts: list[bytes] = []
    size = 0
    async with chunks_of(response) as chunks:
        async for chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if limit is not None and size > limit:
                break
    return b"".join(parts)


def _holds_object(content: bytes) -> bool:
    """Tell whether an answer holds a JSON object; a large one is looked at from outside only, for the sake of others."""
    if len(content) > LARGE_BYTES:
        return content.lstrip()[:1] == b"{" and content.rstrip()[-1:] == b"}"
    try:
        return isinstance(read_json(content), dict)
    except ValueError:
        return False


def end_span(span: Span, error: BaseException | None) -> None:
    """End an attempt's span, with its error if it had one; not with an engine's refusal, which may quote the prompt."""
    if error is not None:
        span.set_attribute("error.type", type(error).__name__)
        if isinstance(error, EngineRefused):
            span.set_attribute("http.response.status_code", error.status)
        elif isinstance(error, Exception):
            span.record_exception(error)
    span.end()


def without_trace(error: Fault) -> Fault:
    """Return an error that is kept, without the trace that it and its causes have.

    A trace leads to where the error is kept, and so keeps all that was at hand there until the collector comes.
    """
    cause: BaseException | None = error
    while cause is not None and cause.__traceback__ is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def _translate(error: BaseException, limit_s: float, *, streamed: bool) -> BaseException:
    if isinstance(error, TimeoutError):
        if streamed:
            return EngineUnreachable(f"no first token within {limit_s:g} s")
        return EngineTooSlow(f"no whole answer within {limit_s:g} s; a streamed one may take longer")
    if isinstance(error, NO_ANSWER):
        return EngineUnreachable(f"no connection ({type(error).__name__})")
    return error


def _status_error(status: int, body: bytes) -> UpstreamError:
    """Return the error for an engine's answer that is not 200."""
    blamed = 400 <= status < 500 and status not in _NOT_THE_REQUEST  # noqa: PLR2004
    if not blamed and status != NOT_IMPLEMENTED:
        return EngineFailed(f"HTTP {status}")
    try:
        message = read_json(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    return EngineRefused(str(message)[:300] or f"HTTP {status}", status, body)
