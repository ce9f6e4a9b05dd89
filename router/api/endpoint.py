"""How every endpoint answers: parse, decide, take a place, relay. Endpoints differ in what an ``Endpoint`` holds only."""

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

from router.api.asgi import CONTEXT, LARGE_BODY, apart, body_message, cancel_on_disconnect, read_body, start_message
from router.api.bodies import Rules
from router.api.paths import error_form
from router.api.problems import describe
from router.api.resumable import ResumableStream, ResumableStreams, ResumedElsewhereError, StreamGoneError
from router.api.truncation import cutter_for
from router.pipeline.pipeline import Pipeline
from router.pipeline.registry import ActiveRequest
from router.pipeline.request import Call, RequestContext
from router.policy.decision import Decision
from router.server.responder import OUT, Responder
from router.settings import Settings
from router.telemetry.settings import TelemetrySettings
from router.upstream.engine_stream import BufferedAnswer, EngineAnswer, EngineStream
from router.upstream.errors import UpstreamError
from router.upstream.sse import SEPARATOR, Chunk

log = logging.getLogger(f"qarr.{__name__}")
EVENT_STREAM = "text/event-stream; charset=utf-8"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
STREAM_ID = "x-qarr-stream-id"
Receiver = Responder | ResumableStream  # what takes the events of a streamed answer


class Encoder(Protocol):
    """Makes an answer's chunks the events of one endpoint, each with the empty line after it."""

    def feed(self, chunks: Sequence[Chunk]) -> bool:
        """Send the events for what came together, if any of it is shown; tell whether more is taken now."""

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
    encoder: Callable[[Call, ActiveRequest, Receiver], Encoder]  # returns what writes the events of a streamed answer
    # returns an answer that is not streamed, and its media type
    whole: Callable[[Call, ActiveRequest], Awaitable[tuple[bytes, str]]]
    resumes: bool = False  # whether ``Last-Event-ID`` goes on with a stream

    async def read(self, body: bytes, context: RequestContext, service: Service) -> Call:
        size = len(body)
        if size > LARGE_BODY:
            call = await apart(size, self.parse, body, context, service)
        else:
            call = self.parse(body, context, service)
        if call.cut is None or (cutter := await cutter_for(call, service.pipeline, size)) is None:
            return call
        return await apart(size, call.cut, call, cutter)


@dataclass(frozen=True, slots=True)
class Answering:
    """An endpoint as an ASGI application."""

    endpoint: Endpoint
    service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Work stops when the client goes away, unless the stream is resumable."""
        service, endpoint = self.service, self.endpoint
        context: RequestContext = scope[CONTEXT]
        pipeline, server = service.pipeline, service.settings.server
        body = await read_body(scope, receive, server.max_body_bytes)
        cancel_on_disconnect(scope)
        last_event_id = context.sent.get(b"last-event-id")
        if endpoint.resumes and last_event_id:  # the body is sent again as it was
            stream, after = service.streams.find(last_event_id.decode("latin-1"), context.caller.key_id)
            if stream.over and after == stream.newest:
                service.streams.drop(stream)
                await Response(status_code=204, headers=context.headers)(scope, receive, send)
            else:
                await self._read(stream, after, context, send)
            return
        call = await endpoint.read(body, context, service)
        del body  # not to be held for as long as the answer takes
        decision = await pipeline.decide(call)
        out: Responder = scope[OUT]
        if call.streamed and server.silence_s:  # whose head says nothing of who answers
            out.break_silences(server.silence_s, lambda: start_message(context.headers, EVENT_STREAM, STREAM_HEADERS))
        if call.resumable:
            make = partial(self._respond, call, decision)
            if (kept := service.streams.open(context.caller.key_id, make, context.request_id)) is not None:
                await self._read(kept, 0, context, send)
                return
            call = replace(call, resumable=False)
        await self._respond(call, decision, out)

    async def _respond(self, call: Call, decision: Decision, out: Receiver) -> None:
        """Serve an answer: its head, what follows as it comes, then exactly one end or one error."""
        async with self.service.pipeline.serve(call, decision) as active:
            headers, answer = answer_headers(active, self.service.settings.telemetry), active.answer
            if not call.streamed:
                assert not isinstance(out, ResumableStream)
                content, media_type = await self.endpoint.whole(call, active)
                length = {"content-length": str(len(content))}
                await out.respond(start_message({**call.context.headers, **headers}, media_type, length))
                await out.respond(body_message(content, more=False))
                return
            assert isinstance(answer, EngineStream)
            media_type = EVENT_STREAM if self.endpoint.resumes else answer.media_type or EVENT_STREAM
            if isinstance(out, ResumableStream):
                out.begin({**headers, STREAM_ID: out.id})
            else:
                whole_head = {**call.context.headers, **headers}
                await out.respond(start_message(whole_head, media_type, STREAM_HEADERS, hold=True))
            encoder = self.endpoint.encoder(call, active, out)
            try:
                await answer.relay(encoder.feed, out.drain)
                end = encoder.end()
            except UpstreamError as error:
                answer.error = error
                log.warning("request %s: %s on %s", call.context.request_id, error, answer.replica_id)
                end = encoder.failure(error)
            await out.end(end)

    async def _read(self, stream: ResumableStream, after: int, context: RequestContext, send: Send) -> None:
        started = False

        async def start(headers: Mapping[str, str]) -> None:
            nonlocal started
            started = True
            await send(start_message({**headers, **context.headers}, EVENT_STREAM, STREAM_HEADERS))

        try:
            await self.service.streams.read(stream, after, start, send)
        except (ResumedElsewhereError, StreamGoneError) as error:
            if not started:
                raise
            event = describe(error).event(error_form(self.endpoint.path), context.ids)
            await send(body_message(event + SEPARATOR, more=False))


def answer_headers(active: ActiveRequest, settings: TelemetrySettings) -> dict[str, str]:
    answer, decision, queued = active.answer, active.decision, active.slot or active.diverted
    assert answer is not None
    if answer.overflow is not None:  # no tier answers
        headers = {"x-qarr-overflow": answer.overflow}
    else:
        headers = {"x-qarr-tier": answer.tier, "x-qarr-precision": answer.spec.precision}
    headers["x-qarr-reason"] = reason_of(decision, answer)
    if queued is not None and queued.waited_ms:
        headers["x-qarr-queue-ms"] = f"{queued.waited_ms:.0f}"
    if decision.degraded:
        headers["x-qarr-degraded"] = ", ".join(decision.degraded)
    if settings.trace_url and (address := settings.trace_address(active.context.trace_id)):
        headers["x-qarr-trace-url"] = address
    if answer.ignored:
        headers["x-qarr-ignored"] = ", ".join(answer.ignored)
    if decision.query.truncated:
        headers["x-qarr-truncated"] = decision.query.truncated
    if checkpoint := answer.attempt.hop.checkpoint:
        headers["x-qarr-checkpoint"] = checkpoint
    return headers


def reason_of(decision: Decision, answer: EngineAnswer) -> str:
    if answer.tier is decision.tier or answer.overflow is not None:
        return decision.reason
    return f"{decision.reason}; {decision.tier} failed before the first token, so {answer.tier} took over"


def report_on(call: Call, active: ActiveRequest) -> dict[str, Any] | None:
    """Return who serves an answer and why, for its body; None: its caller did not ask."""
    answer, decision = active.answer, active.decision
    if not call.report or answer is None:
        return None
    outside = answer.overflow is not None
    return {
        "tier": None if outside else answer.tier,
        "precision": answer.spec.precision,
        "checkpoint": answer.spec.checkpoint_id,
        **({"overflow": answer.overflow} if outside else {}),
        "reason": reason_of(decision, answer),
        "class": decision.query.features.prompt_class.value,
    }


async def as_it_came(call: Call, active: ActiveRequest) -> tuple[bytes, str]:
    answer, report = active.answer, report_on(call, active)
    assert isinstance(answer, BufferedAnswer)
    content = with_member(answer.content, "qarr", report) if report else answer.content
    return content, answer.media_type or "application/json"


def with_member(content: bytes, name: str, value: object) -> bytes:
    whole = content.rstrip()
    return whole[:-1] + b"," + to_json(name) + b":" + to_json(value) + b"}"
