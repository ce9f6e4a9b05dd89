"""Spans of requests, for exporters. The page needs none: its traces are made from records.

Exporting is configured by the standard ``OTEL_*`` variables.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from random import Random
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
)
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision as Sampling
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from starlette.types import ASGIApp, Receive, Scope, Send

from router.telemetry.record import (
    JOURNEY,
    Event,
    Hop,
    Outcome,
    RequestRecord,
    error_name,
)
from router.telemetry.request_trace import (
    KEY_ID,
    hop_attributes,
    spans_of,
    without_unknown,
)
from router.telemetry.settings import TelemetrySettings
from tiers.spec import OtlpTarget

log = logging.getLogger(f"qarr.{__name__}")
_RANDOM = Random()  # noqa: S311  as OpenTelemetry's own ids: no secrets


def random_hex(digits: int) -> str:
    return f"{_RANDOM.getrandbits(4 * digits):0{digits}x}"


SERVICE = "qarr-router"
HTTP, GRPC = "http/protobuf", "grpc"
UNTRACED = {"/route"}  # it serves nothing, and the page asks it while somebody types
# in a scope, once it is answered: the endpoint's path, the status and the key's id
ANSWERED = "qarr.answered"
_CARRIERS = (b"traceparent", b"tracestate", b"baggage")
# Version, trace id, span id and flags (https://www.w3.org/TR/trace-context/): version ff and ids of zeros are not valid.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
# The headers that a request without spans passes on to engines, traceparent first; empty: it has spans.
_PASSED = ContextVar[tuple[tuple[bytes, bytes], ...]]("qarr_passed", default=())
# of the next root span, for which the sampler was asked beforehand
_TRACE_ID = ContextVar("qarr_trace_id", default=0)
DEFAULT_ENDPOINTS = {HTTP: "http://localhost:4318", GRPC: "http://localhost:4317"}


class _GivenIds(RandomIdGenerator):
    """Makes ids, except a trace id that was chosen beforehand."""

    def generate_trace_id(self) -> int:
        given = _TRACE_ID.get()
        _TRACE_ID.set(0)
        return given or super().generate_trace_id()


class Telemetry:
    """The router's tracer. Made once. Without a provider there are no spans."""

    def __init__(
        self, provider: TracerProvider | None, *, record_prompts: bool = False
    ) -> None:
        self._provider, self.record_prompts, self.exports = (
            provider,
            record_prompts,
            provider is not None,
        )
        if provider is not None:
            provider.id_generator = _GivenIds()
        self._tracer: Tracer = (provider or trace.NoOpTracerProvider()).get_tracer(
            "qarr"
        )

    def instrument(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application so that each POST request that the sampler chooses has a server span.

        Other methods only poll. A request without a span passes its caller's trace on to engines, or a new one. Spans of
        receive and send are excluded, because a stream would make one for each chunk, and so are the middleware's metrics.
        It is not asked for requests that the sampler drops: it costs as much as a fifth of a request.
        """
        provider = self._provider

        async def finished(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            finally:
                _finish_server_span(scope)

        wrapped = app if provider is None else _middleware(finished, provider)

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            carried = _carried_headers(scope)
            parent = carried.get(b"traceparent", b"").decode("latin-1")
            trace_id = _trace_id_of(parent) if parent else ""
            parent, trace_id = parent if trace_id else "", trace_id or random_hex(32)
            if (
                provider is not None
                and scope["method"] == "POST"
                and scope["path"] not in UNTRACED
            ):
                within = Context()
                if parent:
                    within = propagate.extract(
                        {n.decode(): v.decode("latin-1") for n, v in carried.items()}
                    )
                number = int(trace_id, 16)
                chosen = provider.sampler.should_sample(
                    within, number, scope["method"], trace.SpanKind.SERVER
                )
                if chosen.decision is not Sampling.DROP:
                    _TRACE_ID.set(number)  # the middleware asks the sampler again
                    # the request before on this connection may have left some
                    _PASSED.set(())
                    await wrapped(scope, receive, send)
                    return
                # engines that trace keep to the sampler's choice
                parent = parent and f"{parent[:-2]}00"
            told = (parent or f"00-{trace_id}-{random_hex(16)}-00").encode("latin-1")
            names = (b"tracestate", b"baggage") if parent else (b"baggage",)
            beside = [(name, carried[name]) for name in names if name in carried]
            _PASSED.set(((b"traceparent", told), *beside))
            await app(scope, receive, send)

        return traced

    def request_ids(self, headers: Mapping[bytes, bytes]) -> tuple[str, str]:
        """Return the request's id and its trace id: the caller's where valid, else new ones."""
        if passed := _PASSED.get():
            trace_id = passed[0][1][3:35].decode("latin-1")
        elif (context := trace.get_current_span().get_span_context()).is_valid:
            trace_id = trace.format_trace_id(context.trace_id)
        else:
            trace_id = _trace_id_of(
                headers.get(b"traceparent", b"").decode("latin-1")
            ) or random_hex(32)
        asked = headers.get(b"x-request-id", b"")
        usable = (
            0 < len(asked) <= 128  # noqa: PLR2004
            and asked.replace(b"-", b"").replace(b"_", b"").isalnum()
        )
        return asked.decode() if usable else random_hex(32), trace_id

    def record_outcome(self, record: RequestRecord) -> None:
        span, prompt = server_span(), ""
        if record.journey is not None:
            prompt, record.journey.prompt = record.journey.prompt, ""
        if span is None:
            return
        server, *steps = spans_of(record)
        span.set_attributes(server["attributes"])
        for event in server["events"]:
            span.add_event(
                event["name"], event["attributes"], _ns(record, event["at_ms"])
            )
        if record.outcome is Outcome.ERROR:
            span.set_status(Status(StatusCode.ERROR, record.error))
        for step in steps:
            # attempts have spans already, which engines continue
            if step["kind"] != "internal":
                continue
            below = self._tracer.start_span(
                step["name"],
                attributes=step["attributes"],
                start_time=_ns(record, step["start_ms"]),
            )
            if prompt and step["name"] == "classify":
                below.set_attribute("gen_ai.input.messages", _messages_of(prompt))
            below.end(_ns(record, step["start_ms"] + step["duration_ms"]))

    def record_failed_attempt(self, replica_id: str, error: Exception) -> None:
        _note(
            "qarr.attempt_failed",
            {"qarr.replica": replica_id, "error.type": error_name(error)},
        )

    def record_continuation(
        self, broken: str, replica_id: str, tokens: int, error: Exception
    ) -> None:
        went_on = {"qarr.continued_on": replica_id, "qarr.continued_tokens": tokens}
        _note(
            "qarr.continuation",
            {"qarr.replica": broken, **went_on, "error.type": error_name(error)},
        )

    def start(self, hop: Hop, parameters: Callable[[], Mapping[str, float]]) -> None:
        """Note a request to an engine (GenAI semantic conventions), and start its span if it is traced, with ``parameters``.

        A server span that has ended counts too: a resumable stream may go on after it.
        """
        if (journey := JOURNEY.get()) is not None:
            journey.hops.append(hop)
        if passed := _PASSED.get():
            hop.headers = passed
            return
        if not isinstance(trace.get_current_span(), trace.NonRecordingSpan):
            name, attributes = (
                f"{hop.operation} {hop.model}",
                {**hop_attributes(hop), **parameters()},
            )
            hop.span = self._tracer.start_span(
                name, kind=trace.SpanKind.CLIENT, attributes=attributes
            )
        hop.headers = self.context_headers(hop.span)

    def context_headers(
        self, span: Span | None = None
    ) -> Sequence[tuple[bytes, bytes]]:
        """Return the headers that carry W3C trace context and baggage to an engine: of a span (None: the present one).

        A request without spans passes on its caller's.
        """
        if passed := _PASSED.get():
            return passed
        carrier: dict[str, str] = {}
        span = span or trace.get_current_span()
        if span.get_span_context().is_valid:
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
        exporter = _exporter()
        if exporter is None:
            return Telemetry(None)
        provider = TracerProvider(resource=resource_of(version))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        _middleware(None, provider)
    except Exception as error:  # noqa: BLE001  exporters, samplers and plugins raise what they like
        given = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("OTEL_") and value
        }
        guilty = [
            name for name, value in given.items() if value.lower() in str(error).lower()
        ] or sorted(given)
        log.warning("no spans are made: %s (%s)", error, ", ".join(guilty))
        return Telemetry(None)
    return Telemetry(provider, record_prompts=settings.record_prompts)


def _carried_headers(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers of a request's trace context and baggage, by name.

    A client may write a list in several lines, which are one (RFC 9110, 5.3): they are joined, also in the scope, since
    OpenTelemetry reads the first line alone. Two lines of ``traceparent``, which is no list, are no valid trace context.
    """
    lines = [header for header in scope["headers"] if header[0] in _CARRIERS]
    carried: dict[bytes, bytes] = {}
    for name, value in lines:
        carried[name] = carried[name] + b"," + value if name in carried else value
    if len(carried) < len(lines):
        others = [header for header in scope["headers"] if header[0] not in _CARRIERS]
        scope["headers"] = [*others, *carried.items()]
    return carried


def resource_of(version: str) -> Resource:
    """Describe this router in traces and metrics: as the environment names it, and as QARR where it does not.

    ``OTEL_SERVICE_NAME`` goes before a ``service.name`` in ``OTEL_RESOURCE_ATTRIBUTES``.
    """
    named = OTELResourceDetector().detect().attributes
    own = {SERVICE_NAME: SERVICE, SERVICE_VERSION: version}
    return Resource.create(
        {key: value for key, value in own.items() if not named.get(key)}
    )


def _middleware(app: Any, provider: TracerProvider) -> ASGIApp:
    return OpenTelemetryMiddleware(
        app,
        tracer_provider=provider,
        meter_provider=NoOpMeterProvider(),
        exclude_spans=["receive", "send"],
    )


def engine_target() -> OtlpTarget | None:
    """Return where engines are to send their own spans: where the router's go, if they go anywhere."""
    try:
        if _exporter_name() != "otlp":
            return None
        protocol, endpoint = protocol_of("TRACES"), _endpoint()
    except ValueError:  # the router tells it
        return None
    if protocol == HTTP and not os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return OtlpTarget(endpoint, protocol)


def _exporter_name() -> str:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "none"
    named = os.environ.get("OTEL_TRACES_EXPORTER", "")
    configured = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get(
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    )
    name = named or ("otlp" if configured else "none")
    if name not in {"otlp", "console", "none"}:
        raise ValueError(
            f"OTEL_TRACES_EXPORTER is {name!r}: allowed are otlp, console and none"
        )
    return name


def _exporter() -> SpanExporter | None:
    name = _exporter_name()
    if name != "otlp":
        return ConsoleSpanExporter() if name == "console" else None
    # Imported here: the exporters cost 200 ms of start-up, and most runs export nothing.
    if protocol_of("TRACES") == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter as Grpc,
        )

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter as Http,
    )

    return Http()


def protocol_of(signal: str) -> str:
    """Return the protocol by which a signal (``TRACES``, ``METRICS``) is exported; ``ValueError``: there is none like it."""
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or HTTP
    protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or general
    if protocol not in DEFAULT_ENDPOINTS:
        raise ValueError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: allowed are {HTTP} and {GRPC}"
        )
    return protocol


def _endpoint() -> str:
    return (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or DEFAULT_ENDPOINTS[protocol_of("TRACES")]
    )


def _messages_of(prompt: str) -> str:
    """Return a prompt as the conventions have messages on spans: as JSON of a schema of theirs.

    A lone surrogate, which JSON can escape, would spoil the export of every span beside it.
    """
    text = prompt.encode("utf-8", "replace").decode()
    message = {"role": "user", "parts": [{"type": "text", "content": text}]}
    return json.dumps([message], ensure_ascii=False)


def server_span() -> Span | None:
    if _PASSED.get():  # it has no spans, which OpenTelemetry takes longer to tell
        return None
    span = trace.get_current_span()
    return span if span.is_recording() else None


def _finish_server_span(scope: Scope) -> None:
    """Put on the server span what its middleware cannot know: the route, the status, and the id of the caller's key."""
    span = server_span()
    if span is None or ANSWERED not in scope:
        return
    route, status, key_id = scope[ANSWERED]
    if "endpoint" in scope:
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    if status >= 500 and isinstance(span, ReadableSpan) and span.status.is_unset:  # noqa: PLR2004
        span.set_status(Status(StatusCode.ERROR))
    if key_id:
        span.set_attribute(KEY_ID, key_id)


def end_span(hop: Hop, span: Span, error: Exception | None) -> None:
    """End the span of a request to an engine; without an error there are no words of it, or they may quote the prompt."""
    hop.span = None
    if hop.first_token_at is not None:
        ago_ns = int((time.monotonic() - hop.first_token_at) * 1e9)
        span.add_event("qarr.first_token", timestamp=time.time_ns() - ago_ns)
    span.set_attributes(without_unknown(hop.result))
    if error is not None:
        span.record_exception(error)
    span.end()


def _note(name: str, attributes: dict[str, Any]) -> None:
    if (journey := JOURNEY.get()) is not None:
        journey.events.append(Event(name, time.monotonic(), attributes))


def _ns(record: RequestRecord, ms: float) -> int:
    """Return the time so many milliseconds after a request's arrival, in nanoseconds since 1970."""
    return int((record.at * 1000 + ms) * 1e6)


def _trace_id_of(parent: str) -> str:
    """Return the trace id of a ``traceparent`` header; empty where the header is not valid."""
    match = _TRACEPARENT.fullmatch(parent)
    return match[1] if match is not None else ""
