"""Spans of requests, for exporters. The page needs none: its traces are made from records.

Exporting is configured by the standard ``OTEL_*`` variables.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision as Sampling
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from starlette.types import ASGIApp, Receive, Scope, Send

from router.telemetry.otel_environment import (
    make_span_exporter,
    resource_of,
    set_variables,
)
from router.telemetry.record import (
    JOURNEY,
    Event,
    Hop,
    Outcome,
    RequestRecord,
    error_name,
    first_answer_token_at,
)
from router.telemetry.request_trace import (
    KEY_ID,
    hop_attributes,
    spans_of,
    without_unknown,
)
from router.telemetry.settings import TelemetrySettings
from router.telemetry.trace_context import (
    TRACEPARENT,
    CallersTrace,
    Headers,
    random_hex,
    trace_id_of,
)

log = logging.getLogger(f"qarr.{__name__}")
# Paths without spans: /route serves nothing, and the page asks it while somebody types.
UNTRACED = {"/route"}
# The key of a scope, once it is answered, for the endpoint's path, the status and the key's id.
ANSWERED = "qarr.answered"
MAX_REQUEST_ID_BYTES = 128
# The headers that a request without spans passes on to engines, traceparent first; None: it has spans.
_PASSED_HEADERS: ContextVar[Headers | None] = ContextVar("qarr_passed", default=None)
# The context of a request whose caller sends no trace.
_NO_PARENT = Context()
# The id of the next root span, for which the sampler was asked beforehand; None: it has not been chosen.
_CHOSEN_TRACE_ID: ContextVar[int | None] = ContextVar("qarr_trace_id", default=None)


class _ChosenIds(RandomIdGenerator):
    """Makes ids, except a trace id that was chosen beforehand."""

    def generate_trace_id(self) -> int:
        chosen_trace_id = _CHOSEN_TRACE_ID.get()
        if chosen_trace_id is None:
            return super().generate_trace_id()
        _CHOSEN_TRACE_ID.set(None)
        return chosen_trace_id


class Telemetry:
    """The router's tracer. Made once. Without a provider there are no spans."""

    def __init__(
        self, provider: TracerProvider | None, *, record_prompts: bool = False
    ) -> None:
        self.record_prompts = record_prompts
        self.exports = provider is not None
        self._provider = provider
        self._tracer: Tracer
        if provider is None:
            self._tracer = trace.NoOpTracerProvider().get_tracer("qarr")
        else:
            provider.id_generator = _ChosenIds()
            self._tracer = provider.get_tracer("qarr")

    def instrument(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application so that each POST request that the sampler chooses has a server span.

        Other methods only poll. A request without a span passes its caller's trace on to engines, or a new one.
        OpenTelemetry's middleware gets the chosen requests alone: it costs as much as a fifth of a request.
        """
        provider = self._provider
        app_with_span = app if provider is None else _with_server_span(app, provider)

        async def instrumented(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            callers_trace = CallersTrace.of(scope)
            is_dropped = False
            if provider is not None and _may_have_span(scope):
                if _is_sampled(provider, callers_trace, scope["method"]):
                    # The middleware asks the sampler again, which must see the same id.
                    _CHOSEN_TRACE_ID.set(int(callers_trace.trace_id, 16))
                    # The request before on this connection may have left some.
                    _PASSED_HEADERS.set(None)
                    await app_with_span(scope, receive, send)
                    return
                is_dropped = True
            _PASSED_HEADERS.set(callers_trace.headers_to_engines(is_dropped=is_dropped))
            await app(scope, receive, send)

        return instrumented

    def request_ids(self, headers: Mapping[bytes, bytes]) -> tuple[str, str]:
        """Return the request's id and its trace id: the caller's where valid, else new ones."""
        return _request_id(headers), _trace_id(headers)

    def record_outcome(self, record: RequestRecord) -> None:
        """Put a request's outcome on its server span, and make the spans of its steps; its record loses the prompt."""
        span = server_span()
        prompt = _take_prompt(record)
        if span is None:
            return
        server, *steps = spans_of(record)
        span.set_attributes(server["attributes"])
        for event in server["events"]:
            at_ns = _unix_ns(record, event["at_ms"])
            span.add_event(event["name"], event["attributes"], at_ns)
        if record.outcome is Outcome.ERROR:
            span.set_status(Status(StatusCode.ERROR, record.error))
        for step in steps:
            # Attempts have spans already, which engines continue.
            if step["kind"] == "internal":
                self._make_step_span(record, step, prompt)

    def _make_step_span(
        self, record: RequestRecord, step: Mapping[str, Any], prompt: str
    ) -> None:
        start_ms = step["start_ms"]
        span = self._tracer.start_span(
            step["name"],
            attributes=step["attributes"],
            start_time=_unix_ns(record, start_ms),
        )
        if prompt and step["name"] == "classify":
            span.set_attribute("gen_ai.input.messages", _messages_of(prompt))
        span.end(_unix_ns(record, start_ms + step["duration_ms"]))

    def record_failed_attempt(self, replica_id: str, error: Exception) -> None:
        attributes = {"qarr.replica": replica_id, "error.type": error_name(error)}
        _note("qarr.attempt_failed", attributes)

    def record_continuation(
        self, failed_replica_id: str, replica_id: str, tokens: int, error: Exception
    ) -> None:
        attributes = {
            "qarr.replica": failed_replica_id,
            "qarr.continued_on": replica_id,
            "qarr.continued_tokens": tokens,
            "error.type": error_name(error),
        }
        _note("qarr.continuation", attributes)

    def start(self, hop: Hop, parameters: Callable[[], Mapping[str, float]]) -> None:
        """Note a request to an engine (GenAI semantic conventions), and start its span if it is traced, with ``parameters``.

        A server span that has ended counts too: a resumable stream may go on after it.
        """
        journey = JOURNEY.get()
        if journey is not None:
            journey.hops.append(hop)
        passed_headers = _PASSED_HEADERS.get()
        if passed_headers is not None:
            hop.headers = passed_headers
            return
        if not isinstance(trace.get_current_span(), trace.NonRecordingSpan):
            hop.span = self._tracer.start_span(
                f"{hop.operation} {hop.model}",
                kind=trace.SpanKind.CLIENT,
                attributes={**hop_attributes(hop), **parameters()},
            )
        hop.headers = self.context_headers(hop.span)

    def context_headers(
        self, span: Span | None = None
    ) -> Sequence[tuple[bytes, bytes]]:
        """Return the headers that carry W3C trace context and baggage to an engine: of a span (None: the present one).

        A request without spans passes on its caller's.
        """
        passed_headers = _PASSED_HEADERS.get()
        if passed_headers is not None:
            return passed_headers
        span = span or trace.get_current_span()
        if not span.get_span_context().is_valid:
            return []
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span))
        return [
            (name.encode("ascii"), value.encode("latin-1"))
            for name, value in carrier.items()
        ]

    def shutdown(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()


def make_telemetry(version: str, settings: TelemetrySettings) -> Telemetry:
    """Set up tracing as the environment and the settings say; with a variable that cannot be used there are no spans."""
    try:
        exporter = make_span_exporter()
        if exporter is None:
            return Telemetry(None)
        provider = TracerProvider(resource=resource_of(version))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        _middleware(None, provider)
    except Exception as error:  # noqa: BLE001  exporters, samplers and plugins raise what they like
        variables = ", ".join(_suspected_variables(error))
        log.warning("no spans are made: %s (%s)", error, variables)
        return Telemetry(None)
    return Telemetry(provider, record_prompts=settings.record_prompts)


def _suspected_variables(error: Exception) -> list[str]:
    """Return the names of the variables whose values an error quotes, or else of all that are set."""
    variables = set_variables()
    text = str(error).lower()
    quoted = [name for name, value in variables.items() if value.lower() in text]
    return quoted or sorted(variables)


def _with_server_span(app: ASGIApp, provider: TracerProvider) -> ASGIApp:
    """Wrap an application in OpenTelemetry's middleware, and complete its span once the application has answered."""

    async def completing(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            _complete_server_span(scope)

    return _middleware(completing, provider)


def _middleware(app: Any, provider: TracerProvider) -> ASGIApp:
    """Return OpenTelemetry's middleware without its metrics, and without a span for each chunk of a stream."""
    return OpenTelemetryMiddleware(
        app,
        tracer_provider=provider,
        meter_provider=NoOpMeterProvider(),
        exclude_spans=["receive", "send"],
    )


def _may_have_span(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"] not in UNTRACED


def _is_sampled(
    provider: TracerProvider, callers_trace: CallersTrace, span_name: str
) -> bool:
    """Ask the sampler whether a request is to have a server span."""
    parent_context = _NO_PARENT
    if callers_trace.parent is not None:
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in callers_trace.carried.items()
        }
        parent_context = propagate.extract(carrier)
    trace_id = int(callers_trace.trace_id, 16)
    sampling = provider.sampler.should_sample(
        parent_context, trace_id, span_name, trace.SpanKind.SERVER
    )
    return sampling.decision is not Sampling.DROP


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """Return a request's id: the caller's if it is short and harmless wherever it is written, else a new one."""
    callers_id = headers.get(b"x-request-id", b"")
    is_short = 0 < len(callers_id) <= MAX_REQUEST_ID_BYTES
    if is_short and callers_id.replace(b"-", b"").replace(b"_", b"").isalnum():
        return callers_id.decode()
    return random_hex(32)


def _trace_id(headers: Mapping[bytes, bytes]) -> str:
    """Return the trace id of the present request: the one that engines get, else the caller's, else a new one."""
    passed_headers = _PASSED_HEADERS.get()
    if passed_headers is not None:
        _, traceparent = passed_headers[0]
        return traceparent[3:35].decode("latin-1")
    span_context = trace.get_current_span().get_span_context()
    if span_context.is_valid:
        return trace.format_trace_id(span_context.trace_id)
    callers_parent = headers.get(TRACEPARENT, b"").decode("latin-1")
    return trace_id_of(callers_parent) or random_hex(32)


def _take_prompt(record: RequestRecord) -> str:
    """Return a request's prompt, and drop it from the record, which is kept; empty: it is not to be on spans."""
    journey = record.journey
    if journey is None:
        return ""
    prompt = journey.prompt
    journey.prompt = ""
    return prompt


def _messages_of(prompt: str) -> str:
    """Return a prompt as the conventions have messages on spans: as JSON of a schema of theirs.

    A lone surrogate, which JSON can escape, would spoil the export of every span beside it.
    """
    text = prompt.encode("utf-8", "replace").decode()
    message = {"role": "user", "parts": [{"type": "text", "content": text}]}
    return json.dumps([message], ensure_ascii=False)


def server_span() -> Span | None:
    """Return the present span if it records; None: the request has no spans."""
    # OpenTelemetry takes longer to answer for a request without spans.
    if _PASSED_HEADERS.get() is not None:
        return None
    span = trace.get_current_span()
    return span if span.is_recording() else None


def _complete_server_span(scope: Scope) -> None:
    """Put on the server span what its middleware cannot know: the route, the status, and the id of the caller's key."""
    span = server_span()
    if span is None or ANSWERED not in scope:
        return
    route, status, key_id = scope[ANSWERED]
    if "endpoint" in scope:
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    is_error = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    if is_error and isinstance(span, ReadableSpan) and span.status.is_unset:
        span.set_status(Status(StatusCode.ERROR))
    if key_id:
        span.set_attribute(KEY_ID, key_id)


def end_span(hop: Hop, span: Span, error: Exception | None) -> None:
    """End the span of a request to an engine.

    Without ``error`` the span has no words of an error: they may quote the prompt.
    """
    hop.span = None
    for name, at in (
        ("qarr.first_token", hop.first_token_at),
        ("qarr.first_answer_token", first_answer_token_at(hop)),
    ):
        if at is not None:
            ago_ns = int((time.monotonic() - at) * 1e9)
            span.add_event(name, timestamp=time.time_ns() - ago_ns)
    span.set_attributes(without_unknown(hop.result))
    if error is not None:
        span.record_exception(error)
    span.end()


def _note(name: str, attributes: dict[str, Any]) -> None:
    """Add an event to the present request's server span."""
    journey = JOURNEY.get()
    if journey is not None:
        journey.events.append(Event(name, time.monotonic(), attributes))


def _unix_ns(record: RequestRecord, after_arrival_ms: float) -> int:
    """Return a time after a request's arrival in nanoseconds since 1970."""
    return int((record.at * 1000 + after_arrival_ms) * 1e6)
