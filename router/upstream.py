"""Send a request to a replica and read its answer: attempts, timeouts, retries before the first byte.

UpstreamError
├── EngineUnreachable   no connection, or no first token in time     tried elsewhere
├── EngineFailed        an answer of 5xx, or one that makes no sense  tried elsewhere
├── EngineRefused       the request itself is at fault               not tried elsewhere
├── EngineBroke         failed after the first token                 told to the caller
├── NoPlace             every place was taken since the decision
└── NoEngineAnswered    every attempt failed
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from httpx_aiohttp import AiohttpTransport
from pydantic_core import from_json, to_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from opentelemetry.trace import Span

    from router.policy import Decision
    from router.settings import UpstreamSettings
    from router.telemetry import Telemetry
    from tiers.fleet import Fleet, Lease
    from tiers.spec import TierName

CHAT_PATH = "/v1/chat/completions"
DATA = b"data:"
DONE = b"[DONE]"


class UpstreamError(Exception):
    """Base of what can go wrong between the router and an engine."""


class EngineUnreachable(UpstreamError):
    """No connection, or no first token in time."""


class EngineFailed(UpstreamError):
    """The engine answered with an error of its own."""


class EngineRefused(UpstreamError):
    """The engine says that the request is wrong."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class EngineBroke(UpstreamError):
    """The engine failed after the first token."""


class NoPlace(UpstreamError):
    """Every place was taken between the decision and the attempt."""


class NoEngineAnswered(UpstreamError):
    """Every attempt failed before the first token."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of an answer. ``usage`` comes once, with the last piece."""

    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What is asked of an engine, apart from its name for the model."""

    messages: tuple[Mapping[str, str], ...]
    max_tokens: int
    temperature: float
    priority: int
    request_id: str

    def body(self, model: str, *, with_priority: bool) -> bytes:
        """Return the engine's request body. Answers are always streamed, so that a stalled engine is noticed."""
        return to_json(
            {
                "model": model,
                "messages": self.messages,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "priority": self.priority if with_priority else 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


def make_transport(max_connections: int) -> httpx.AsyncBaseTransport:
    """Return the pooled transport to the engines.

    httpx's interface over aiohttp's client: httpx's own transport costs several times the CPU time per request, and
    more with every open connection (``benchmarks/transport.py`` measures both in one run).
    """
    limits = httpx.Limits(
        max_connections=max_connections, max_keepalive_connections=max_connections, keepalive_expiry=30.0
    )
    return AiohttpTransport(trust_env=False, limits=limits)


class EngineStream:
    """One streamed answer of an engine, as deltas."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._deltas = self._read()

    async def next(self) -> Delta | None:
        """Return the next delta, or None after the last.

        Raises:
            EngineBroke: The stream ended early or holds an error.
        """
        return await anext(self._deltas, None)

    async def aclose(self) -> None:
        """Close the connection if the answer is not complete: that aborts the request in the engine."""
        await self._response.aclose()

    async def _read(self) -> AsyncIterator[Delta]:
        buffer = b""
        assert isinstance(self._response.stream, httpx.AsyncByteStream)
        try:
            async for chunk in self._response.stream:
                buffer += chunk
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    if not line.startswith(DATA):
                        continue
                    data = line[len(DATA) :].strip()
                    if data == DONE:
                        return
                    yield _delta(data)
        except httpx.HTTPError as error:
            raise EngineBroke(f"the engine's stream broke off ({type(error).__name__})") from error
        raise EngineBroke("the engine's stream ended early")


def _delta(data: bytes) -> Delta:
    try:
        chunk = from_json(data)
        if "error" in chunk:
            raise EngineBroke("the engine reported an error in its stream")
        choices = chunk["choices"]
        if not choices:
            return Delta(usage=chunk.get("usage"))
        choice = choices[0]
        return Delta(choice["delta"].get("content") or "", choice.get("finish_reason"), chunk.get("usage"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineBroke("the engine's stream holds something that is not a chunk") from error


class Answer:
    """An answer that has begun: its first delta is here, the rest can be read. Close it, however it ends."""

    def __init__(self, tier: TierName, lease: Lease, stream: EngineStream, span: Span, token_timeout_s: float) -> None:
        self.tier = tier
        self.ttft_ms = 0.0
        self.usage: dict[str, int] = {}
        self.finish_reason: str | None = None
        self.failed_attempts = 0
        self.error: UpstreamError | None = None
        self._lease, self._stream, self._span, self._timeout_s = lease, stream, span, token_timeout_s
        self._first: Delta | None = None
        self._first_at = self._last_at = 0.0
        self._complete = False

    @property
    def replica_id(self) -> str:
        """Return the id of the replica that serves this answer."""
        return self._lease.replica.id

    @property
    def tpot_ms(self) -> float | None:
        """Return the mean time between tokens so far, from the engine's token count; None below two tokens."""
        tokens = self.usage.get("completion_tokens", 0)
        return (self._last_at - self._first_at) * 1000 / (tokens - 1) if tokens > 1 else None

    async def begin(self, started: float) -> None:
        """Read up to the first delta that has text or ends the answer."""
        while True:
            delta = await self._stream.next()
            if delta is None:
                raise EngineBroke("the engine's answer was empty")
            if delta.text or delta.finish_reason:
                break
        self._first = delta
        self._first_at = self._last_at = time.monotonic()
        self.ttft_ms = (self._first_at - started) * 1000
        self._lease.first_token()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield every delta from the first.

        Raises:
            EngineBroke: The engine failed, or no token came in time.
        """
        delta = self._first
        while delta is not None:
            self._note(delta)
            yield delta
            try:
                async with asyncio.timeout(self._timeout_s):
                    delta = await self._stream.next()
            except TimeoutError as error:
                raise EngineBroke(f"the engine sent no token for {self._timeout_s:g} s") from error
        if self.finish_reason is None:
            raise EngineBroke("the engine's stream ended without a finish reason")
        self._complete = True

    def _note(self, delta: Delta) -> None:
        if delta.text:
            self._last_at = time.monotonic()
            self._lease.produced()
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.usage:
            self.usage = {
                name: int(delta.usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
            }

    async def aclose(self, error: BaseException | None = None) -> None:
        """Give the lease back, close the connection and end the span."""
        if self._complete:
            self._lease.finished(self.ttft_ms, self.tpot_ms)
        elif isinstance(error, UpstreamError):
            self._lease.failed()
        self._lease.release()
        self._span.set_attributes(self._attributes())
        _end_span(self._span, error)
        await self._stream.aclose()

    def _attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {"qarr.ttft_ms": self.ttft_ms}
        if self.finish_reason:
            attributes["gen_ai.response.finish_reasons"] = (self.finish_reason,)
        if self.usage:
            attributes["gen_ai.usage.input_tokens"] = self.usage["prompt_tokens"]
            attributes["gen_ai.usage.output_tokens"] = self.usage["completion_tokens"]
        if (tpot_ms := self.tpot_ms) is not None:
            attributes["qarr.tpot_ms"] = tpot_ms
        return attributes


class Upstream:
    """Opens answers on the fleet's replicas."""

    def __init__(
        self,
        fleet: Fleet,
        transport: httpx.AsyncBaseTransport,
        options: UpstreamSettings,
        telemetry: Telemetry,
    ) -> None:
        self._fleet, self._transport, self._options, self._telemetry = fleet, transport, options, telemetry
        self._timeouts = {"connect": options.connect_timeout_s, "pool": options.connect_timeout_s}

    async def open(self, decision: Decision, request: ChatRequest) -> Answer:
        """Try the chosen tier, then the fallbacks, until a first token arrives.

        Raises:
            EngineRefused: An engine says that the request is wrong.
            NoPlace: No replica had a place any more.
            NoEngineAnswered: All attempts failed.
        """
        assert decision.tier is not None
        tried: dict[str, str] = {}
        for tier in (decision.tier, *decision.fallbacks):
            while len(tried) < self._options.attempts:
                query = decision.query
                lease = self._fleet.lease(
                    tier, prompt_tokens=query.prompt_tokens, max_tokens=query.max_tokens, exclude=tried
                )
                if lease is None:
                    break
                try:
                    return await self._attempt(tier, lease, request, len(tried))
                except (EngineUnreachable, EngineFailed, EngineBroke) as error:
                    tried[lease.replica.id] = str(error)
        if not tried:
            raise NoPlace(f"every place on {', '.join((decision.tier, *decision.fallbacks))} is taken")
        causes = "; ".join(f"{replica}: {cause}" for replica, cause in tried.items())
        raise NoEngineAnswered(causes)

    async def aclose(self) -> None:
        """Close the pooled connections."""
        await self._transport.aclose()

    async def _attempt(self, tier: TierName, lease: Lease, request: ChatRequest, number: int) -> Answer:
        """Make one attempt. The lease, the connection and the span end with it unless an answer is returned."""
        replica = lease.replica
        span = self._telemetry.start_attempt(tier, replica.id, replica.url, replica.model, request, number)
        response: httpx.Response | None = None
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._options.first_token_timeout_s):
                response = await self._transport.handle_async_request(self._http(lease, request, span))
                if response.status_code != httpx.codes.OK:
                    raise _status_error(  # noqa: TRY301  one place ends the attempt
                        response.status_code, await _body_of(response)
                    )
                answer = Answer(tier, lease, EngineStream(response), span, self._options.token_timeout_s)
                answer.failed_attempts = number
                await answer.begin(started)
                return answer
        except BaseException as error:
            failure = self._translate(error)
            if isinstance(failure, UpstreamError) and not isinstance(failure, EngineRefused):
                lease.failed()
            lease.release()
            _end_span(span, failure)
            if response is not None:
                await response.aclose()
            if failure is error:
                raise
            raise failure from error

    def _translate(self, error: BaseException) -> BaseException:
        if isinstance(error, TimeoutError):
            return EngineUnreachable(f"no first token within {self._options.first_token_timeout_s:g} s")
        if isinstance(error, httpx.TransportError):
            return EngineUnreachable(f"no connection ({type(error).__name__})")
        return error

    def _http(self, lease: Lease, request: ChatRequest, span: Span) -> httpx.Request:
        replica = lease.replica
        headers = {"content-type": "application/json", "x-request-id": request.request_id}
        if replica.api_key:
            headers["authorization"] = f"Bearer {replica.api_key}"
        self._telemetry.inject(span, headers)
        return httpx.Request(
            "POST",
            replica.url + CHAT_PATH,
            headers=headers,
            content=request.body(replica.model, with_priority=replica.takes_priority),
            extensions={"timeout": self._timeouts},
        )


async def _body_of(response: httpx.Response) -> bytes:
    body = b""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for chunk in response.stream:
        body += chunk
        if len(body) > 65536:  # noqa: PLR2004  an error text; more of it helps nobody
            break
    return body


def _status_error(status: int, body: bytes) -> UpstreamError:
    """Return the error for an engine's answer that is not 200."""
    if status not in {400, 413, 422}:
        return EngineFailed(f"HTTP {status}")
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    return EngineRefused(str(message)[:300] or f"HTTP {status}")


def _end_span(span: Span, error: BaseException | None) -> None:
    if error is not None:
        span.set_attribute("error.type", type(error).__name__)
        if isinstance(error, Exception):
            span.record_exception(error)
    span.end()
