"""How every endpoint answers: parse, decide, take a slot, relay. Endpoints differ only in what an ``Endpoint`` holds."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.asgi import (
    CONTEXT,
    apart,
    body_message,
    cancel_on_disconnect,
    read_body,
    start_message,
)
from router.api.bodies import Rules
from router.api.paths import error_form
from router.api.problems import describe
from router.api.resumable import (
    ResumableStream,
    ResumableStreams,
    ResumedElsewhereError,
    StreamGoneError,
)
from router.api.truncation import cutter_for
from router.pipeline.pipeline import Pipeline
from router.pipeline.registry import ActiveRequest
from router.pipeline.request import Call, RequestContext
from router.policy.decision import Decision
from router.server.large_bodies import LARGE_BODY_BYTES
from router.server.responder import OUT, Responder
from router.settings import Settings
from router.telemetry.settings import TelemetrySettings
from router.upstream.engine_stream import BufferedAnswer, EngineAnswer, EngineStream
from router.upstream.errors import UpstreamError
from router.upstream.sse import SEPARATOR, Chunk
from tiers.formats import shown_quantization

log = logging.getLogger(f"qarr.{__name__}")
EVENT_STREAM = "text/event-stream; charset=utf-8"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
STREAM_ID = "x-qarr-stream-id"
Receiver = Responder | ResumableStream  # what takes the events of a streamed answer


class Encoder(Protocol):
    """Makes an answer's chunks the events of one endpoint, each with the empty line after it."""

    def encode(self, chunks: Sequence[Chunk]) -> bool:
        """Send the events for chunks that came together; tell whether the client takes more now."""

    def end(self) -> list[bytes]:
        """Return the events that end a complete answer."""

    def failure(self, error: UpstreamError) -> list[bytes]:
        """Return the events that end an answer which could not be completed."""


@dataclass(frozen=True, slots=True)
class Service:
    pipeline: Pipeline
    settings: Settings
    rules: Rules  # what bodies are checked against
    streams: ResumableStreams  # those that outlive their connections


@dataclass(frozen=True, slots=True)
class Endpoint:
    path: str
    # reads a body; raises ``InvalidBodyError``, ``UnknownModelError`` or ``BeyondKeyError``
    parse: Callable[[bytes, RequestContext, Service], Call]
    # returns what writes the events of a streamed answer
    encoder: Callable[[Call, ActiveRequest, Receiver], Encoder]
    # returns the body of an answer that is not streamed, and its media type
    unstreamed: Callable[[Call, ActiveRequest], Awaitable[tuple[bytes, str]]]
    resumes: bool = False  # whether ``Last-Event-ID`` goes on with a stream

    async def read(
        self, body: bytes, context: RequestContext, service: Service
    ) -> Call:
        """Parse a body, and cut its prompt if it fits no context and its caller has asked for that."""
        size = len(body)
        if size > LARGE_BODY_BYTES:
            call = await apart(size, self.parse, body, context, service)
        else:  # saves most requests a coroutine
            call = self.parse(body, context, service)
        if call.cut_prompt is None:
            return call
        cutter = await cutter_for(call, service.pipeline, size)
        if cutter is None:
            return call
        return await apart(size, call.cut_prompt, call, cutter)


@dataclass(frozen=True, slots=True)
class Answering:
    """An endpoint as an ASGI application."""

    endpoint: Endpoint
    service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Work stops when the client goes away, unless the stream is resumable."""
        service = self.service
        endpoint = self.endpoint
        context: RequestContext = scope[CONTEXT]
        server = service.settings.server
        body = await read_body(
            scope,
            receive,
            server.max_body_bytes,
            text_limit=server.max_text_bytes,
        )
        cancel_on_disconnect(scope)
        last_event_id = context.request_headers.get(b"last-event-id")
        # the client has sent the body again, which the stream does not need
        if endpoint.resumes and last_event_id:
            await self._resume(last_event_id, scope, receive, send)
            return
        call = await endpoint.read(body, context, service)
        del body  # or it would be held for as long as the answer takes
        decision = await service.pipeline.decide(call)
        out: Responder = scope[OUT]
        if call.is_streamed and server.silence_s:
            # If the first event is late, the head is sent before it is known which tier answers.
            out.break_silences(
                server.silence_s,
                lambda: start_message(
                    context.response_headers, EVENT_STREAM, STREAM_HEADERS
                ),
            )
        if call.is_resumable:
            stream = service.streams.open(
                context.caller.key_id,
                partial(self._respond, call, decision),
                request_id=context.request_id,
            )
            if stream is not None:
                await self._read(stream, after=0, context=context, send=send)
                return
            call = replace(call, is_resumable=False)
        await self._respond(call, decision, out)

    async def _resume(
        self, last_event_id: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send a stream's events after one that the client has; no content if that was the last."""
        context: RequestContext = scope[CONTEXT]
        streams = self.service.streams
        stream, after = streams.find(
            last_event_id.decode("latin-1"), context.caller.key_id
        )
        if stream.over and after == stream.newest:
            streams.drop(stream)
            await Response(status_code=204, headers=context.response_headers)(
                scope, receive, send
            )
        else:
            await self._read(stream, after, context, send=send)

    async def _respond(self, call: Call, decision: Decision, out: Receiver) -> None:
        """Serve an answer: its head, what follows as it comes, then exactly one end or one error."""
        async with self.service.pipeline.serve(call, decision) as active:
            headers = answer_headers(active, self.service.settings.telemetry)
            if not call.is_streamed:
                assert not isinstance(out, ResumableStream)
                await self._send_unstreamed(call, active, headers, out=out)
                return
            answer = active.answer
            assert isinstance(answer, EngineStream)
            if isinstance(out, ResumableStream):
                out.begin({**headers, STREAM_ID: out.id})
            else:
                media_type = EVENT_STREAM
                if not self.endpoint.resumes:
                    media_type = answer.media_type or EVENT_STREAM
                await out.respond(
                    start_message(
                        {**call.context.response_headers, **headers},
                        media_type,
                        STREAM_HEADERS,
                        hold=True,
                    )
                )
            encoder = self.endpoint.encoder(call, active, out)
            try:
                await answer.relay(encoder.encode, out.drain)
                last_events = encoder.end()
            except UpstreamError as error:
                answer.error = error
                log.warning(
                    "request %s: %s on %s",
                    call.context.request_id,
                    error,
                    answer.replica_id,
                )
                last_events = encoder.failure(error)
            await out.end(last_events)

    async def _send_unstreamed(
        self,
        call: Call,
        active: ActiveRequest,
        headers: Mapping[str, str],
        *,
        out: Responder,
    ) -> None:
        content, media_type = await self.endpoint.unstreamed(call, active)
        length = {"content-length": str(len(content))}
        await out.respond(
            start_message(
                {**call.context.response_headers, **headers}, media_type, length
            )
        )
        await out.respond(body_message(content, more=False))

    async def _read(
        self, stream: ResumableStream, after: int, context: RequestContext, send: Send
    ) -> None:
        """Send a resumable stream's events after number ``after``, and as its last event what ends it early."""
        has_started = False

        async def start(headers: Mapping[str, str]) -> None:
            nonlocal has_started
            has_started = True
            await send(
                start_message(
                    {**headers, **context.response_headers},
                    EVENT_STREAM,
                    STREAM_HEADERS,
                )
            )

        try:
            await self.service.streams.read(stream, after, start=start, send=send)
        except (ResumedElsewhereError, StreamGoneError) as error:
            if not has_started:
                raise
            event = describe(error).event(error_form(self.endpoint.path), context.ids)
            await send(body_message(event + SEPARATOR, more=False))


def answer_headers(
    active: ActiveRequest, settings: TelemetrySettings
) -> dict[str, str]:
    """Return the headers that say who serves an answer, and why."""
    answer = active.answer
    decision = active.decision
    assert answer is not None
    if answer.overflow is not None:  # no tier answers
        headers = {"x-qarr-overflow": answer.overflow}
    else:
        headers = {
            "x-qarr-tier": answer.tier,
            "x-qarr-precision": answer.spec.precision,
            "x-qarr-quantization": shown_quantization(answer.spec.precision),
        }
    headers["x-qarr-reason"] = reason_of(decision, answer)
    waited_for = active.grant or active.diverted
    if waited_for is not None and waited_for.waited_ms:
        headers["x-qarr-queue-ms"] = f"{waited_for.waited_ms:.0f}"
    if decision.degraded:
        headers["x-qarr-degraded"] = ", ".join(decision.degraded)
    if settings.trace_url:
        trace_address = settings.trace_address(active.context.trace_id)
        if trace_address:
            headers["x-qarr-trace-url"] = trace_address
    if answer.ignored:
        headers["x-qarr-ignored"] = ", ".join(answer.ignored)
    if decision.query.truncated:
        headers["x-qarr-truncated"] = decision.query.truncated
    checkpoint = answer.attempt.hop.checkpoint
    if checkpoint:
        headers["x-qarr-checkpoint"] = checkpoint
    return headers


def reason_of(decision: Decision, answer: EngineAnswer) -> str:
    if answer.tier is decision.tier or answer.overflow is not None:
        return decision.reason
    return f"{decision.reason}; {decision.tier} failed before the first token, so {answer.tier} took over"


def report_on(call: Call, active: ActiveRequest) -> dict[str, Any] | None:
    """Return who serves an answer and why, to be added to it; None if its caller did not ask for a report."""
    answer = active.answer
    if not call.wants_report or answer is None:
        return None
    report: dict[str, Any] = {
        "tier": answer.tier,
        "precision": answer.spec.precision,
        "quantization": shown_quantization(answer.spec.precision),
        "checkpoint": answer.spec.checkpoint_id,
    }
    if answer.overflow is not None:
        report["tier"] = None
        report["overflow"] = answer.overflow
    report["reason"] = reason_of(active.decision, answer)
    report["class"] = active.decision.query.features.prompt_class.value
    return report


async def engine_body(call: Call, active: ActiveRequest) -> tuple[bytes, str]:
    """Return the body of an engine's answer as it came, with the report if its caller asked for one, and its media type."""
    answer = active.answer
    assert isinstance(answer, BufferedAnswer)
    content = answer.content
    report = report_on(call, active)
    if report is not None:
        content = with_member(content, "qarr", report)
    return content, answer.media_type or "application/json"


def with_member(content: bytes, name: str, value: object) -> bytes:
    """Return a JSON object with one member more, its other bytes as they are."""
    object_text = content.rstrip()
    return object_text[:-1] + b"," + to_json(name) + b":" + to_json(value) + b"}"
