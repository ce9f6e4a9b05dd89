"""Every span, and every span attribute's name. The last traces are kept in memory; nothing is exported unless configured.

Exporting is configured by the standard variables: ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``…_TRACES_ENDPOINT``),
``OTEL_EXPORTER_OTLP_PROTOCOL`` (or ``…_TRACES_PROTOCOL``: ``http/protobuf`` or ``grpc``), ``OTEL_TRACES_EXPORTER``
(``otlp``, ``console``, ``none``), ``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_SDK_DISABLED``,
``OTEL_TRACES_SAMPLER``. Names are those of OpenTelemetry's semantic conventions where it has one, else ``qarr.*``.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.sdk.trace.sampling import Decision as Sampling
from opentelemetry.trace import Status, StatusCode
from starlette.datastructures import Headers

from router.telemetry.ids import random_hex
from router.telemetry.record import Outcome
from router.telemetry.trace_store import (
    DECIDED,
    KEY_ID,
    Decided,
    DecidedIds,
    KeptFor,
    RecordAll,
    TokenBucket,
    TraceStore,
)
from tiers.spec import OtlpTarget

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from opentelemetry.trace import Span, Tracer
    from starlette.types import ASGIApp, Receive, Scope, Send

    from classifier import PromptClass, PromptFeatures
    from router.policy.decision import Decision, TierReport
    from router.settings import TelemetrySettings
    from router.telemetry.record import RequestRecord
    from tiers.replica import Replica
    from tiers.spec import TierName

SERVICE = "qarr-router"
HTTP, GRPC = "http/protobuf", "grpc"
# Traces recorded for memory alone. Recording costs a third of a request (benchmarks/observing_cost.py), and spans take
# much of the memory of an open stream (benchmarks/open_streams.py).
RECENT_PER_S = 10
MOST_OPEN_FOR_MEMORY = 50
UNTRACED = {"/route"}  # it serves nothing, and the page asks it while somebody types
_PARENT = ContextVar("qarr_parent", default="")  # traceparent for the engines of a request that has no spans
_NO_SPAN = nullcontext(trace.INVALID_SPAN)
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


class TelemetryError(Exception):
    """A standard telemetry variable has a value that is not supported."""


class Telemetry:
    """The router's tracer. Made once.

    Args:
        provider: Makes spans; None: there are none.
        traces: The last traces; None: they are not kept.
        record_prompts: Put prompts on spans.
        allowance: Bounds the requests that have spans at all; None: every request has.
    """

    def __init__(
        self,
        provider: TracerProvider | None,
        *,
        traces: TraceStore | None = None,
        record_prompts: bool = False,
        allowance: TokenBucket | None = None,
    ) -> None:
        self._provider, self.traces, self.record_prompts = provider, traces, record_prompts
        self._allowance = allowance
        if provider is not None:
            provider.sampler, provider.id_generator = Decided(provider.sampler), DecidedIds()
        self._tracer: Tracer = (provider or trace.NoOpTracerProvider()).get_tracer("qarr")

    def instrument(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application so that each POST request has a server span; without a provider, return it unchanged.

        Other methods only poll. Spans of receive and send are excluded, because a stream would make one for each chunk,
        and so are the middleware's metrics: it keeps their per-request state on itself, where concurrent requests
        overwrite it. Bodies bypass the middleware, which would look at every chunk, and end the span with the last byte,
        before it is known how the request ended.
        """
        if self._provider is None:
            return app
        wrapped = OpenTelemetryMiddleware(
            app, tracer_provider=self._provider, meter_provider=NoOpMeterProvider(), exclude_spans=["receive", "send"]
        )

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope.get("method") != "POST" or scope["path"] in UNTRACED:
                await app(scope, receive, send)
                return
            given = next((value for name, value in scope["headers"] if name == b"traceparent"), b"").decode("latin-1")
            trace_id = _trace_id_of(given)
            if self._has_spans(scope, int(trace_id, 16) if trace_id else 0):
                _PARENT.set("")  # the request before on this connection may have left one
                await wrapped(scope, receive, send)
            else:
                parent = given if trace_id else f"00-{random_hex(32)}-{random_hex(16)}-00"
                # Engines that trace keep to the sampler's choice; without a sampler, to the caller's.
                _PARENT.set(parent if self._allowance is not None else f"{parent[:-2]}00")
                await app(scope, receive, send)

        return traced

    def _has_spans(self, scope: Scope, trace_id: int) -> bool:
        """Tell whether a request has spans; the middleware costs too much to ask it of every one.

        Without an exporter it has if enough are not recorded yet. Else the sampler decides, once, for a trace id given here.
        """
        assert self._provider is not None
        if self._allowance is not None:
            open_ = 0 if self.traces is None else self.traces.open
            return open_ < MOST_OPEN_FOR_MEMORY and self._allowance.take()
        parent = propagate.extract(Headers(scope=scope)) if trace_id else Context()
        trace_id = trace_id or self._provider.id_generator.generate_trace_id()
        found = self._provider.sampler.should_sample(parent, trace_id, scope["method"], trace.SpanKind.SERVER)
        if found.decision is Sampling.DROP:
            return False
        DECIDED.set((trace_id, found))
        return True

    def name_server_span(self, scope: Scope, route: str) -> None:
        """Give the server span its route, which the middleware cannot know under Starlette."""
        if span := _recording():
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.route", route)

    @property
    def recording(self) -> bool:
        """Tell whether the present request has spans that record."""
        return _recording() is not None

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
        if key_id:
            trace.get_current_span().set_attribute(KEY_ID, key_id)

    def classify(self) -> AbstractContextManager[Span]:
        """Span over classification."""
        return self._step("classify")

    def route(self) -> AbstractContextManager[Span]:
        """Span over the policy."""
        return self._step("route")

    def admission(self) -> AbstractContextManager[Span]:
        """Span over the wait for a slot."""
        return self._step("admission wait")

    def _step(self, name: str) -> AbstractContextManager[Span]:
        """Span over a step of a request; of one that the sampler left out, none."""
        left_out = isinstance(trace.get_current_span(), trace.NonRecordingSpan)
        return _NO_SPAN if left_out else self._tracer.start_as_current_span(name)

    def record_features(self, span: Span, features: PromptFeatures, prompt: str) -> None:
        """Put the classifier's features on its span; the prompt only where that is switched on."""
        if not span.is_recording():
            return
        span.set_attributes(
            {
                "qarr.class": features.prompt_class.value,
                "qarr.confidence": features.confidence,
                "qarr.contains_code": features.contains_code,
                "qarr.asks_for_code": features.asks_for_code,
                "qarr.prompt.tokens": features.tokens,
                "qarr.signals": list(features.signals),
            }
        )
        if features.language:
            span.set_attribute("qarr.language", features.language)
        if self.record_prompts:
            # A lone surrogate, which JSON can escape, would spoil the export of every span beside it.
            span.set_attribute("gen_ai.input.messages", prompt.encode("utf-8", "replace").decode())

    def record_decision(self, decision: Decision, price: float | None = None) -> None:
        """Put the decision on the current span.

        Args:
            decision: The decision.
            price: Of loss, in engine-seconds a differing token; None: not known yet.
        """
        if span := _recording():
            span.set_attributes(_decision_attributes(decision, price))

    def record_verdicts(self, decision: Decision) -> None:
        """Put the report on each tier on the current span."""
        if span := _recording():
            for verdict in decision.verdicts:
                span.set_attributes(_verdict_attributes(verdict))

    def record_outcome(self, record: RequestRecord) -> None:
        """Put on the server span how the request ended, and keep the trace of one that did not end well."""
        if self._provider is None or _PARENT.get():  # it has no spans
            return
        span = trace.get_current_span()
        worth = _worth(record)
        if self.traces is not None and worth is not KeptFor.RECENT:
            self.traces.judge(span.get_span_context().trace_id, worth)
        if not span.is_recording():
            return
        seen: dict[str, Any] = {
            "qarr.outcome": record.outcome.value,
            "qarr.sla.met": record.sla_met,
            "error.type": record.error,
            "qarr.ttft_ms": record.ttft_ms,
            "qarr.tpot_ms": record.tpot_ms,
            "qarr.queue_ms": record.queue_ms,
            "qarr.overhead_ms": record.overhead_ms,
            "qarr.served.precision": record.precision,
            "qarr.served.checkpoint": record.checkpoint,
            "qarr.overflow": record.overflow,
            "qarr.overflow.failure": record.overflow_failure,
            "qarr.prompt_tokens": record.prompt_tokens,
            "qarr.cached_prompt_tokens": record.predicted_cached_tokens,
            "qarr.reported_cached_tokens": record.cached_prompt_tokens,
            "qarr.output_tokens": record.output_tokens,  # not gen_ai.usage: viewers would add them to the attempts'
        }
        span.set_attributes({name: value for name, value in seen.items() if value is not None})
        if record.outcome is Outcome.CLIENT_GONE:
            span.add_event("qarr.client_gone")
        elif record.outcome is Outcome.ERROR:
            span.set_status(Status(StatusCode.ERROR, record.error))

    def record_served(self, tier: TierName, replica_id: str, attempts_failed: int) -> None:
        """Put who served the request on the server span."""
        if span := _recording():
            span.set_attributes(
                {
                    "qarr.served.tier": tier,
                    "qarr.served.replica": replica_id,
                    "qarr.attempts.failed": attempts_failed,
                }
            )

    def record_failed_attempt(self, replica_id: str, error: Exception) -> None:
        """Put an attempt that failed before its first byte on the server span; it may be retried."""
        if span := _recording():
            span.add_event("qarr.attempt_failed", {"qarr.replica": replica_id, "error.type": type(error).__name__})

    def record_continuation(self, broken: str, replica_id: str, tokens: int, error: Exception) -> None:
        """Put on the server span that another engine continues the answer, and after how many tokens."""
        if span := _recording():
            span.add_event(
                "qarr.continuation",
                {
                    "qarr.replica": broken,
                    "qarr.continued_on": replica_id,
                    "qarr.continued_tokens": tokens,
                    "error.type": type(error).__name__,
                },
            )

    def live_check(self, kind: PromptClass, tier: TierName) -> AbstractContextManager[Span]:
        """Span over the scoring of one live prompt; a trace of its own."""
        attributes = {"qarr.class": kind.value, "qarr.tier": tier}
        return self._tracer.start_as_current_span("live check", Context(), attributes=attributes)

    def record_live_loss(self, span: Span, loss: float, rolling: float) -> None:
        """Put the loss of a live prompt on its check's span."""
        span.set_attributes({"qarr.loss": loss, "qarr.loss.rolling": rolling})

    def record_promotion(self, event: str, kind: PromptClass, tier: TierName, loss: float) -> None:
        """Put a change of a class's lowest tier on the check's span."""
        if span := _recording():
            span.add_event(event, {"qarr.class": kind.value, "qarr.tier": tier, "qarr.loss.rolling": loss})

    def start_attempt(self, tier: TierName, replica: Replica, request: TracedRequest, number: int) -> Span:
        """Start the span of one upstream attempt (GenAI semantic conventions); the caller ends it.

        Of a request that the sampler left out, return the server span, whose end has no effect. A server span that has
        ended is another matter: a resumable stream may go on after it.
        """
        current = trace.INVALID_SPAN if _PARENT.get() else trace.get_current_span()
        if isinstance(current, trace.NonRecordingSpan):
            return current
        where = urlsplit(replica.url)
        return self._tracer.start_span(
            f"{request.operation} {replica.serving(request.adapter)}",
            kind=trace.SpanKind.CLIENT,
            attributes={
                "gen_ai.operation.name": request.operation,
                "gen_ai.provider.name": "vllm",
                "gen_ai.request.model": replica.serving(request.adapter),
                **request.parameters,
                "gen_ai.output.type": "text",
                "server.address": where.hostname or "",
                "server.port": where.port or 80,
                "qarr.tier": tier,
                "qarr.precision": replica.spec.precision,
                "qarr.checkpoint": replica.spec.checkpoint_id or "",
                "qarr.replica": replica.id,
                "qarr.attempt": number,
            },
        )

    def start_overflow(self, name: str, url: str, model: str, request: TracedRequest) -> Span:
        """Start the span of a request to the overflow, as ``start_attempt``."""
        current = trace.INVALID_SPAN if _PARENT.get() else trace.get_current_span()
        if isinstance(current, trace.NonRecordingSpan):
            return current
        where = urlsplit(url)
        return self._tracer.start_span(
            f"{request.operation} {model}",
            kind=trace.SpanKind.CLIENT,
            attributes={
                "gen_ai.operation.name": request.operation,
                "gen_ai.request.model": model,
                **request.parameters,
                "gen_ai.output.type": "text",
                "server.address": where.hostname or "",
                "server.port": where.port or (443 if where.scheme == "https" else 80),
                "qarr.overflow": name,
            },
        )

    def context_headers(self, span: Span) -> list[tuple[bytes, bytes]]:
        """Return the headers that carry the W3C trace context to an engine: the span's, or without one the caller's."""
        if parent := _PARENT.get():
            return [(b"traceparent", parent.encode("latin-1"))]
        carrier: dict[str, str] = {}
        if span.get_span_context().is_valid:
            propagate.inject(carrier, trace.set_span_in_context(span))
        return [(name.encode("ascii"), value.encode("latin-1")) for name, value in carrier.items()]

    def shutdown(self) -> None:
        """Export what is left."""
        if self._provider is not None:
            self._provider.shutdown()


def make_telemetry(version: str, settings: TelemetrySettings) -> Telemetry:
    """Set up tracing as the environment and the settings say.

    Raises:
        TelemetryError: A variable has a value that is not supported.
    """
    exporter = _exporter()
    everything = settings.recent_traces > 0 or (exporter is not None and settings.keep_failures)
    if _disabled() or (exporter is None and not everything):
        return Telemetry(None)
    os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")  # the middleware's stable names
    resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", SERVICE), SERVICE_VERSION: version})
    # Where nothing is exported, engines that trace by themselves get the caller's choice, else "not sampled".
    provider = TracerProvider(resource=resource, sampler=None if exporter is not None else ParentBased(ALWAYS_OFF))
    few = TokenBucket(RECENT_PER_S, max(settings.recent_traces, 1))
    if everything:
        limited = exporter is not None and not settings.keep_failures
        provider.sampler = RecordAll(provider.sampler, few if limited else None)
    batches = BatchSpanProcessor(exporter) if exporter is not None else None
    traces = TraceStore(settings.recent_traces, batches, tail=settings.keep_failures)
    provider.add_span_processor(traces)
    allowance = few if exporter is None else None
    return Telemetry(provider, traces=traces, record_prompts=settings.record_prompts, allowance=allowance)


def engine_target() -> OtlpTarget | None:
    """Return where engines are to send their own spans: where the router's go.

    Raises:
        TelemetryError: A variable has a value that is not supported.
    """
    if _exporter_name() != "otlp":
        return None
    protocol, endpoint = _protocol(), _endpoint()
    if protocol == HTTP and not os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return OtlpTarget(endpoint, protocol)


def exporter_address() -> tuple[str, int] | None:
    """Return the host and port that spans are exported to; None: they are not exported over a network.

    Raises:
        TelemetryError: A variable has a value that is not supported.
    """
    target = engine_target()
    if target is None:
        return None
    endpoint = target.endpoint if "//" in target.endpoint else f"//{target.endpoint}"
    try:
        where = urlsplit(endpoint)
        port = where.port or (443 if where.scheme == "https" else 80)
    except ValueError as error:
        raise TelemetryError(f"the OTLP endpoint is no address: {error}") from error
    return where.hostname or "localhost", port


def _exporter_name() -> str:
    if _disabled():
        return "none"
    named = os.environ.get("OTEL_TRACES_EXPORTER", "")
    configured = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    name = named or ("otlp" if configured else "none")
    if name not in {"otlp", "console", "none"}:
        raise TelemetryError(f"OTEL_TRACES_EXPORTER is {name!r}: allowed are otlp, console and none")
    return name


def _disabled() -> bool:
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


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
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", HTTP
    )
    if protocol not in DEFAULT_ENDPOINTS:
        raise TelemetryError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: allowed are {HTTP} and {GRPC}")
    return protocol


def _endpoint() -> str:
    return (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or DEFAULT_ENDPOINTS[_protocol()]
    )


def _recording() -> Span | None:
    """Return the current span if it records; attributes for others are not computed."""
    if _PARENT.get():  # it has no spans, which OpenTelemetry takes longer to tell
        return None
    span = trace.get_current_span()
    return span if span.is_recording() else None


def _worth(record: RequestRecord) -> KeptFor:
    if record.outcome is Outcome.ERROR or record.outcome is Outcome.REFUSED:
        return KeptFor.ERROR
    return KeptFor.SLA_MISS if record.sla_met is False else KeptFor.RECENT


def _trace_id_of(parent: str) -> str:
    """Return the trace id of a ``traceparent`` header; empty where the header is not valid."""
    parts = parent.split("-")  # version, trace, span, flags
    given = parts[1] if len(parts) == 4 else ""  # noqa: PLR2004
    usable = len(given) == 32 and given != "0" * 32 and all(c in "0123456789abcdef" for c in given)  # noqa: PLR2004
    return given if usable else ""


def _decision_attributes(decision: Decision, price: float | None) -> dict[str, Any]:
    query, chosen = decision.query, decision.chosen
    loss = chosen.expected_loss if chosen is not None else None
    attributes: dict[str, Any] = {
        "qarr.reason": decision.reason,
        "qarr.basis": decision.basis.value,
        "qarr.degraded": list(decision.degraded),
        "qarr.class": query.features.prompt_class.value,
        "qarr.confidence": query.features.confidence,
        "qarr.prompt_tokens": query.prompt_tokens,
        "qarr.max_tokens": query.max_tokens,
        "qarr.fallbacks": list(decision.fallbacks),
    }
    if decision.tier is not None and decision.precision is not None:
        attributes |= {"qarr.tier": decision.tier, "qarr.precision": decision.precision}
    if decision.refusal is not None:
        attributes["qarr.refusal"] = decision.refusal.value
    if query.hint is not None:
        attributes["qarr.hint"] = query.hint
    known = {
        "qarr.sla.ttft_ms": query.sla.ttft_ms,
        "qarr.sla.tpot_ms": query.sla.tpot_ms,
        "qarr.sla.max_quality_loss": query.sla.max_quality_loss,
        "qarr.truncated": query.truncated or None,
        "qarr.loss.price": price,
        "qarr.loss.expected": loss.mean if loss is not None else None,
        "qarr.cost": chosen.cost if chosen is not None else None,
    }
    return attributes | {name: value for name, value in known.items() if value is not None}


def _verdict_attributes(verdict: TierReport) -> dict[str, Any]:
    loss, prefix = verdict.expected_loss, f"qarr.{verdict.tier}."
    found = {
        "verdict": verdict.verdict,
        "state": verdict.state.value,
        "predicted_ttft_ms": verdict.predicted_ttft_ms,
        "predicted_tpot_ms": verdict.predicted_tpot_ms,
        "expected_loss": loss.mean if loss is not None else None,
        "expected_loss_high": loss.high if loss is not None else None,
        "cost": verdict.cost,
        "cached_prompt_tokens": verdict.cached_prompt_tokens,
    }
    return {prefix + name: value for name, value in found.items() if value is not None}
