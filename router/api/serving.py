"""What all endpoints that serve an answer do alike: its headers, and the one loop that relays a stream."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from router.api.asgi import body_message, start_message
from router.upstream.engine_stream import EngineStream
from router.upstream.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.types import Send

    from router.api.resumable import ResumableStream
    from router.lifecycle import ResponseTracker
    from router.pipeline.pipeline import Pipeline
    from router.pipeline.registry import ActiveRequest
    from router.pipeline.request import ParsedRequest, RequestContext
    from router.policy.decision import Decision
    from router.telemetry.settings import TelemetrySettings
    from router.upstream.engine_stream import EngineAnswer
    from router.upstream.sse import Chunk

    Sink = ResponseTracker | ResumableStream
    Begin = Callable[[ActiveRequest, EngineStream], Awaitable[tuple["Encoder", Sink]]]

log = logging.getLogger(f"qarr.{__name__}")
EVENT_STREAM = "text/event-stream; charset=utf-8"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Encoder(Protocol):
    """Writes an answer's chunks as the events of one endpoint, each with the empty line after it."""

    def events(self, chunks: Sequence[Chunk]) -> list[bytes]:
        """Return the events for what came together; none where nothing of it is shown."""

    def end(self) -> list[bytes]:
        """Return the events that end a complete answer."""

    def failure(self, error: UpstreamError) -> list[bytes]:
        """Return the events that end an answer which could not be completed."""


async def serve_stream(pipeline: Pipeline, request: ParsedRequest, decision: Decision, begin: Begin) -> None:
    """Serve a streamed answer: its head, events as they come, then exactly one end or one error.

    ``begin`` sends the head; it returns what encodes the chunks, and where the events go.
    """

    async def consume(active: ActiveRequest) -> None:
        stream = active.answer
        assert isinstance(stream, EngineStream)
        encoder, sink = await begin(active, stream)
        try:
            await stream.relay(lambda chunks: sink.feed(encoder.events(chunks)), sink.drain)
            end = encoder.end()
        except UpstreamError as error:
            stream.error = error
            log.warning("request %s: %s on %s", request.context.request_id, error, stream.replica_id)
            end = encoder.failure(error)
        await sink.end(end)

    await pipeline.serve(request, decision, consume)


def await_first(context: RequestContext, tracker: ResponseTracker, silence_s: float) -> None:
    """Keep a stream's connection alive while its first token is awaited; the head says nothing of who answers then."""
    if silence_s:
        tracker.await_first(silence_s, start_message(context.headers, EVENT_STREAM, STREAM_HEADERS))


async def send_whole(content: bytes, media_type: str, headers: Mapping[str, str], send: Send) -> None:
    await send(start_message(headers, media_type, {"content-length": str(len(content))}))
    await send(body_message(content, more=False))


def answer_headers(active: ActiveRequest, settings: TelemetrySettings) -> dict[str, str]:
    """Return the headers that disclose who serves an answer and why."""
    answer, decision, context, admitted = active.answer, active.decision, active.context, active.admitted
    assert answer is not None
    spec = answer.spec
    if answer.overflow is not None:  # no tier answers
        who = {"x-qarr-overflow": answer.overflow}
    else:
        who = {"x-qarr-tier": answer.tier, "x-qarr-precision": spec.precision}
    headers = {**context.headers, **who, "x-qarr-reason": reason_of(decision, answer)}
    queued = admitted or active.diverted
    if queued is not None and queued.waited_ms:
        headers["x-qarr-queue-ms"] = f"{queued.waited_ms:.0f}"
    if decision.degraded:
        headers["x-qarr-degraded"] = ", ".join(decision.degraded)
    if address := settings.trace_address(context.trace_id):
        headers["x-qarr-trace-url"] = address
    if decision.query.truncated:
        headers["x-qarr-truncated"] = decision.query.truncated
    if spec.checkpoint_id:
        headers["x-qarr-checkpoint"] = spec.checkpoint_id
    return headers


def reason_of(decision: Decision, answer: EngineAnswer) -> str:
    """Return why a tier serves an answer, for a person."""
    if answer.tier is decision.tier or answer.overflow is not None:
        return decision.reason
    return f"{decision.reason}; {decision.tier} failed before the first token, so {answer.tier} took over"
