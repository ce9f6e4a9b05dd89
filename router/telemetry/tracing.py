"""Spans of requests, for exporters. The page needs none: its traces are made from records.

Exporting is configured by the standard variables: ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``…_TRACES_ENDPOINT``),
``OTEL_EXPORTER_OTLP_PROTOCOL`` (or ``…_TRACES_PROTOCOL``: ``http/protobuf`` or ``grpc``), ``OTEL_TRACES_EXPORTER``
(``otlp``, ``console``, ``none``), ``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_SDK_DISABLED``,
``OTEL_TRACES_SAMPLER``.
"""

from __future__ import annotations

import logging
import os
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision as Sampling
from opentelemetry.trace import Status, StatusCode
from starlette.datastructures import Headers

from router.telemetry.journey import JOURNEY, Event, Hop
from router.telemetry.record import Outcome
from router.telemetry.request_trace import KEY_ID, hop_attributes, spans_of
from tiers.spec import OtlpTarget

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from opentelemetry.trace import Span, Tracer
    from starlette.types import ASGIApp, Receive, Scope, Send

    from classifier import PromptClass
    from router.telemetry.record import RequestRecord
    from router.telemetry.settings import TelemetrySettings
    from tiers.replica import Replica
    from tiers.spec import TierName


log = logging.getLogger(f"qarr.{__name__}")
BUFFER_BYTES = 4096  # taken from the system at a time: its call costs a twentieth of a request


class _Buffer:
    """Random bytes of the system that are not used yet. One event loop owns it."""

    def __init__(self) -> None:
        self._digits, self._next = "", 0

    def take(self, digits: int) -> str:
        start, end = self._next, self._next + digits
        if end > len(self._digits):
            self._digits, start, end = os.urandom(BUFFER_BYTES).hex(), 0, digits
        self._next = end
        return self._digits[start:end]


random_hex = _Buffer().take


SERVICE = "qarr-router"
HTTP, GRPC = "http/protobuf", "grpc"
UNTRACED = {"/route"}  # it serves nothing, and the page asks it while somebody types
_PARENT = ContextVar("qarr_parent", default="")  # traceparent for the engines of a request that has no spans
_BESIDE = ContextVar[tuple[tuple[bytes, bytes], ...]](
    "qarr_beside", default=()
)  # tracestate and baggage of such a request
_TRACE_ID = ContextVar("qarr_trace_id", default=0)  # of the next root span, for which the sampler was asked beforehand
DEFAULT_ENDPOINTS = {HTTP: "http://localhost:4318", GRPC: "http://localhost:4317"}


class TracedRequest(Protocol):
    """What a span says of a request to an engine."""

    @property
    def operation(self) -> str:
        """Return GenAI's name of the operation."""

    @property
    def adapter(self) -> str | None:
        """Return the LoRA adapter that answers; None: the model itself."""

    @property
    def parameters(self) -> Mapping[str, float]:
        """Return attributes of the span."""


class _GivenIds(RandomIdGenerator):
    """Makes ids, except a trace id that was chosen beforehand."""

    def generate_trace_id(self) -> int:
        given = _TRACE_ID.get()
        _TRACE_ID.set(0)
        return given or super().generate_trace_id()


class AttemptSpan:
    """A request to an engine: its part of the request's journey, and its span, which records only what is sampled."""

    def __init__(self, span: Span, hop: Hop) -> None:
        self.span, self._hop = span, hop

    def first_token(self) -> None:
        self._hop.first_token_at = time.monotonic()
        self.span.add_event("qarr.first_token")

    def end(self, attributes: dict[str, Any], error: Exception | None) -> None:
        """End it.

        Args:
            attributes: What is known now.
            error: Its words may be shown; None: there are none, or they may quote the prompt.
        """
        hop = self._hop
        hop.ended, hop.result = time.monotonic(), attributes
        if error is not None:
            hop.message = str(error)
        if self.span.is_recording():
            self.span.set_attributes(attributes)
            if error is not None:
                self.span.record_exception(error)
            self.span.end()


class Telemetry:
    """The router's tracer. Made once. Without a provider there are no spans."""

    def __init__(self, provider: TracerProvider | None, *, record_prompts: bool = False) -> None:
        self._provider, self.record_prompts = provider, record_prompts
        if provider is not None:
            provider.id_generator = _GivenIds()
        self._tracer: Tracer = (provider or trace.NoOpTracerProvider()).get_tracer("qarr")

    def instrument(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application so that each POST request that the sampler chooses has a server span.

        Other methods only poll. A request without a span passes its caller's trace on to engines, or a new one. Spans of
        receive and send are excluded, because a stream would make one for each chunk, and so are the middleware's metrics.
        It is not asked for requests that the sampler drops: it costs as much as a fifth of a request.
        """
        provider = self._provider
        wrapped = app if provider is None else _middleware(app, provider)

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            given = next((value for name, value in scope["headers"] if name == b"traceparent"), b"").decode("latin-1")
            given = given if _trace_id_of(given) else ""
            if provider is not None and scope["method"] == "POST" and scope["path"] not in UNTRACED:
                if self._sampled(provider, scope, given):
                    _PARENT.set("")  # the request before on this connection may have left one
                    await wrapped(scope, receive, send)
                    return
                given = f"{given[:-2]}00" if given else ""  # engines that trace keep to the sampler's choice
            passed = {b"tracestate", b"baggage"} if given else {b"baggage"}
            _BESIDE.set(tuple([(name, value) for name, value in scope["headers"] if name in passed]))
            _PARENT.set(given or f"00-{random_hex(32)}-{random_hex(16)}-00")
            await app(scope, receive, send)

        return traced

    @staticmethod
    def _sampled(provider: TracerProvider, scope: Scope, given: str) -> bool:
        """Tell whether the sampler chooses a request; the middleware, which asks it again, gets the same trace id."""
        trace_id = int(_trace_id_of(given) or random_hex(32), 16)
        _TRACE_ID.set(trace_id)
        parent = propagate.extract(Headers(scope=scope)) if given else Context()
        chosen = provider.sampler.should_sample(parent, trace_id, scope["method"], trace.SpanKind.SERVER)
        return chosen.decision is not Sampling.DROP

    def name_server_span(self, scope: Scope, route: str) -> None:
        """Give the server span its route, which the middleware cannot know under Starlette."""
        if span := _recording():
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.route", route)

    def record_status(self, status: int) -> None:
        """Put the answer's status on the server span: its head does not pass the middleware."""
        if span := _recording():
            span.set_attribute("http.response.status_code", status)
            if status >= 500 and isinstance(span, ReadableSpan) and span.status.is_unset:  # noqa: PLR2004
                span.set_status(Status(StatusCode.ERROR))

    @property
    def wants_prompt(self) -> bool:
        """Tell whether the present request's prompt is to be on its spans."""
        return self.record_prompts and _recording() is not None

    def request_ids(self, headers: Mapping[bytes, bytes]) -> tuple[str, str]:
        """Return the request's id and its trace id: the caller's where valid, else new ones."""
        parent = _PARENT.get()
        context = trace.INVALID_SPAN_CONTEXT if parent else trace.get_current_span().get_span_context()
        if context.is_valid:
            trace_id = trace.format_trace_id(context.trace_id)
        else:
            trace_id = _trace_id_of(parent or headers.get(b"traceparent", b"").decode("latin-1")) or random_hex(32)
        asked = headers.get(b"x-request-id", b"")
        usable = 0 < len(asked) <= 128 and asked.replace(b"-", b"").replace(b"_", b"").isalnum()  # noqa: PLR2004
        return asked.decode() if usable else random_hex(32), trace_id

    def record_caller(self, key_id: str) -> None:
        """Put the id of the caller's key, which is no secret, on the server span."""
        if key_id and (span := _recording()):
            span.set_attribute(KEY_ID, key_id)

    def record_outcome(self, record: RequestRecord) -> None:
        """Put on the server span how the request went, and make the spans of the steps below it."""
        span, prompt = _recording(), ""
        if record.journey is not None:
            prompt, record.journey.prompt = record.journey.prompt, ""
        if span is None:
            return
        server, *steps = spans_of(record)
        span.set_attributes(server["attributes"])
        for event in server["events"]:
            span.add_event(event["name"], event["attributes"], _ns(record, event["at_ms"]))
        if record.outcome is Outcome.ERROR:
            span.set_status(Status(StatusCode.ERROR, record.error))
        for step in steps:
            if step["kind"] != "internal":  # attempts have spans already, which engines continue
                continue
            below = self._tracer.start_span(
                step["name"], attributes=step["attributes"], start_time=_ns(record, step["start_ms"])
            )
            if prompt and step["name"] == "classify":
                # A lone surrogate, which JSON can escape, would spoil the export of every span beside it.
                below.set_attribute("gen_ai.input.messages", prompt.encode("utf-8", "replace").decode())
            below.end(_ns(record, step["start_ms"] + step["duration_ms"]))

    def record_failed_attempt(self, replica_id: str, error: Exception) -> None:
        """Note an attempt that failed before its first byte; it may be retried."""
        _note("qarr.attempt_failed", {"qarr.replica": replica_id, "error.type": type(error).__name__})

    def record_continuation(self, broken: str, replica_id: str, tokens: int, error: Exception) -> None:
        """Note that another engine continues the answer, and after how many tokens."""
        went_on = {"qarr.continued_on": replica_id, "qarr.continued_tokens": tokens}
        _note("qarr.continuation", {"qarr.replica": broken, **went_on, "error.type": type(error).__name__})

    def live_check(self, kind: PromptClass, tier: TierName) -> AbstractContextManager[Span]:
        """Span over the scoring of one live prompt; a trace of its own."""
        attributes = {"qarr.class": kind.value, "qarr.tier": tier}
        return self._tracer.start_as_current_span("live check", Context(), attributes=attributes)

    def record_live_check(self, span: Span, regret: float, *, same: bool | None) -> None:
        """Put what became of a live prompt on its check's span; ``same`` None: the answers could not be compared."""
        span.set_attributes({"qarr.regret": regret} | ({} if same is None else {"qarr.same_answer": same}))

    def start_attempt(self, tier: TierName, replica: Replica, request: TracedRequest, number: int) -> AttemptSpan:
        """Start one upstream attempt (GenAI semantic conventions); the caller ends it."""
        hop = Hop(
            operation=request.operation,
            model=request.adapter or replica.model,
            url=replica.url,
            began=time.monotonic(),
            tier=tier,
            replica=replica.id,
            precision=replica.spec.precision,
            checkpoint=replica.spec.checkpoint_id or "",
            number=number,
        )
        return self._start(hop, request)

    def start_overflow(self, name: str, url: str, model: str, request: TracedRequest) -> AttemptSpan:
        return self._start(Hop(request.operation, model, url, time.monotonic(), overflow=name), request)

    def _start(self, hop: Hop, request: TracedRequest) -> AttemptSpan:
        """Note a hop, and start its span.

        Of a request that the sampler left out, the span is the server span, whose end has no effect. A server span that
        has ended is another matter: a resumable stream may go on after it.
        """
        if (journey := JOURNEY.get()) is not None:
            journey.hops.append(hop)
        span = trace.INVALID_SPAN if _PARENT.get() else trace.get_current_span()
        if not isinstance(span, trace.NonRecordingSpan):
            attributes = {**hop_attributes(hop), **request.parameters}
            span = self._tracer.start_span(hop.name, kind=trace.SpanKind.CLIENT, attributes=attributes)
        return AttemptSpan(span, hop)

    def context_headers(self, span: Span | None = None) -> list[tuple[bytes, bytes]]:
        """Return the headers that carry W3C trace context and baggage to an engine: of a span (None: the present one).

        A request without spans passes on its caller's.
        """
        if parent := _PARENT.get():
            return [(b"traceparent", parent.encode("latin-1")), *_BESIDE.get()]
        carrier: dict[str, str] = {}
        span = span or trace.get_current_span()
        if span.get_span_context().is_valid:
            propagate.inject(carrier, trace.set_span_in_context(span))
        return [(name.encode("ascii"), value.encode("latin-1")) for name, value in carrier.items()]

    def shutdown(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()


def make_telemetry(version: str, settings: TelemetrySettings) -> Telemetry:
    """Set up tracing as the environment and the settings say; with a variable that cannot be used there are no spans."""
    try:
        exporter = _exporter()
        if exporter is None:
            return Telemetry(None)
        named = os.environ.get("OTEL_SERVICE_NAME") or SERVICE
        provider = TracerProvider(resource=Resource.create({SERVICE_NAME: named, SERVICE_VERSION: version}))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        _middleware(None, provider)
    except Exception as error:  # noqa: BLE001  exporters, samplers and plugins raise what they like
        given = {name: value for name, value in os.environ.items() if name.startswith("OTEL_") and value}
        guilty = [name for name, value in given.items() if value.lower() in str(error).lower()] or sorted(given)
        log.warning("no spans are made: %s (%s)", error, ", ".join(guilty))
        return Telemetry(None)
    return Telemetry(provider, record_prompts=settings.record_prompts)


def _middleware(app: Any, provider: TracerProvider) -> ASGIApp:
    return OpenTelemetryMiddleware(
        app, tracer_provider=provider, meter_provider=NoOpMeterProvider(), exclude_spans=["receive", "send"]
    )


def engine_target() -> OtlpTarget | None:
    """Return where engines are to send their own spans: where the router's go, if they go anywhere."""
    try:
        if _exporter_name() != "otlp":
            return None
        protocol, endpoint = _protocol(), _endpoint()
    except ValueError:  # the router tells it
        return None
    if protocol == HTTP and not os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return OtlpTarget(endpoint, protocol)


def _exporter_name() -> str:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "none"
    named = os.environ.get("OTEL_TRACES_EXPORTER", "")
    configured = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    name = named or ("otlp" if configured else "none")
    if name not in {"otlp", "console", "none"}:
        raise ValueError(f"OTEL_TRACES_EXPORTER is {name!r}: allowed are otlp, console and none")
    return name


def _exporter() -> SpanExporter | None:
    name = _exporter_name()
    if name != "otlp":
        return ConsoleSpanExporter() if name == "console" else None
    # Imported here: the exporters cost 200 ms of start-up, and most runs export nothing.
    if _protocol() == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc  # noqa: PLC0415

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http  # noqa: PLC0415

    return Http()


def _protocol() -> str:
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or HTTP
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or general
    if protocol not in DEFAULT_ENDPOINTS:
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: allowed are {HTTP} and {GRPC}")
    return protocol


def _endpoint() -> str:
    return (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or DEFAULT_ENDPOINTS[_protocol()]
    )


def _recording() -> Span | None:
    if _PARENT.get():  # it has no spans, which OpenTelemetry takes longer to tell
        return None
    span = trace.get_current_span()
    return span if span.is_recording() else None


def _note(name: str, attributes: dict[str, Any]) -> None:
    if (journey := JOURNEY.get()) is not None:
        journey.events.append(Event(name, time.monotonic(), attributes))


def _ns(record: RequestRecord, ms: float) -> int:
    """Return the time so many milliseconds after a request's arrival, in nanoseconds since 1970."""
    return int((record.at * 1000 + ms) * 1e6)


def _trace_id_of(parent: str) -> str:
    """Return the trace id of a ``traceparent`` header; empty where the header is not valid."""
    parts = parent.split("-")  # version, trace, span, flags
    given = parts[1] if len(parts) == 4 else ""  # noqa: PLR2004
    usable = len(given) == 32 and given != "0" * 32 and all(c in "0123456789abcdef" for c in given)  # noqa: PLR2004
    return given if usable else ""
