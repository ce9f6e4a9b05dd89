"""Every span, and every span attribute's name. Nothing is exported, and next to nothing costs, unless configured.

Configured by the standard variables: ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``…_TRACES_ENDPOINT``),
``OTEL_EXPORTER_OTLP_PROTOCOL`` (or ``…_TRACES_PROTOCOL``: ``http/protobuf`` or ``grpc``), ``OTEL_TRACES_EXPORTER``
(``otlp``, ``console``, ``none``), ``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_SDK_DISABLED``,
``OTEL_TRACES_SAMPLER``.
"""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

from tiers.spec import OtlpTarget

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

    from opentelemetry.trace import Span, Tracer
    from starlette.types import ASGIApp, Scope

    from classifier import PromptClass, PromptFeatures
    from router.decision import Decision
    from router.upstream import EngineRequest
    from tiers.fleet import Replica
    from tiers.spec import TierName

SERVICE = "qarr-router"
HTTP, GRPC = "http/protobuf", "grpc"
DEFAULT_ENDPOINTS = {HTTP: "http://localhost:4318", GRPC: "http://localhost:4317"}


class TelemetryError(Exception):
    """A standard telemetry variable has a value that is not supported."""


class Telemetry:
    """The router's tracer. Made once; ``enabled`` is False where no exporter is configured."""

    def __init__(self, provider: TracerProvider | None, *, record_prompts: bool = False) -> None:
        self._provider, self._record_prompts = provider, record_prompts
        self._tracer: Tracer = (provider or trace.NoOpTracerProvider()).get_tracer("qarr")

    @property
    def enabled(self) -> bool:
        """Tell whether spans go anywhere."""
        return self._provider is not None

    def instrument(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application so that each request has a server span; without an exporter, return it as it is.

        Spans for each receive and send are left out (a stream would make one a chunk), and so are the middleware's
        metrics: it keeps their per-request state on itself, where concurrent requests overwrite it.
        """
        if self._provider is None:
            return app
        wrapped: ASGIApp = OpenTelemetryMiddleware(
            app,
            tracer_provider=self._provider,
            meter_provider=NoOpMeterProvider(),
            exclude_spans=["receive", "send"],
            excluded_urls="healthz,readyz",
        )
        return wrapped

    def name_server_span(self, scope: Scope, route: str) -> None:
        """Give the server span its route, which the middleware cannot know under Starlette."""
        span = trace.get_current_span()
        if span.is_recording():
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.route", route)

    def request_ids(self, headers: Mapping[str, str]) -> tuple[str, str]:
        """Return the request's id and its trace's: the caller's where valid, else new ones."""
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            trace_id = trace.format_trace_id(context.trace_id)
        else:
            parent = headers.get("traceparent", "").split("-")
            given = parent[1] if len(parent) == 4 else ""  # noqa: PLR2004  version-trace-span-flags
            trace_id = given if _is_trace_id(given) else secrets.token_hex(16)
        asked = headers.get("x-request-id", "")
        usable = 0 < len(asked) <= 128 and asked.isascii() and asked.replace("-", "").replace("_", "").isalnum()  # noqa: PLR2004
        return asked if usable else secrets.token_hex(16), trace_id

    def record_caller(self, key_id: str) -> None:
        """Put the id of the caller's key, which is no secret, on the server span."""
        if key_id:
            trace.get_current_span().set_attribute("qarr.key.id", key_id)

    @contextmanager
    def classify(self) -> Iterator[Span]:
        """Span over classification."""
        with self._tracer.start_as_current_span("classify") as span:
            yield span

    @contextmanager
    def route(self) -> Iterator[Span]:
        """Span over the policy."""
        with self._tracer.start_as_current_span("route") as span:
            yield span

    @contextmanager
    def admission(self) -> Iterator[Span]:
        """Span over the wait for a place."""
        with self._tracer.start_as_current_span("admission wait") as span:
            yield span

    def record_features(self, span: Span, features: PromptFeatures, prompt: str) -> None:
        """Put the classifier's findings on its span; the prompt only when that is switched on."""
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
        if self._record_prompts:
            # A lone surrogate, which JSON can escape, would spoil the export of every span beside it.
            span.set_attribute("gen_ai.input.messages", prompt.encode("utf-8", "replace").decode())

    def record_decision(self, decision: Decision) -> None:
        """Put the decision on the current span, with a verdict for each tier."""
        span = trace.get_current_span()
        if span.is_recording():
            verdicts = {f"qarr.verdict.{v.tier}": v.verdict for v in decision.verdicts}
            span.set_attributes({**_decision_attributes(decision), **verdicts})

    def record_served(self, tier: TierName, replica_id: str, attempts_failed: int) -> None:
        """Put who served the request on the server span."""
        span = trace.get_current_span()
        if span.is_recording():
            span.set_attributes(
                {
                    "qarr.served.tier": tier.value,
                    "qarr.served.replica": replica_id,
                    "qarr.attempts.failed": attempts_failed,
                }
            )

    def record_escalation(self, tier: TierName, higher: TierName, sure: float, threshold: float) -> None:
        """Put an escalation on the server span."""
        span = trace.get_current_span()
        if span.is_recording():
            span.add_event(
                "qarr.escalation",
                {
                    "qarr.tier": tier.value,
                    "qarr.escalated_to": higher.value,
                    "qarr.certainty": sure,
                    "qarr.threshold": threshold,
                },
            )

    def record_hedge(self, tier: TierName | None, quicker: TierName) -> None:
        """Put on the server span that a second tier was asked, and was quicker."""
        span = trace.get_current_span()
        if span.is_recording():
            span.add_event("qarr.hedge", {"qarr.tier": str(tier), "qarr.hedged_to": quicker.value})

    def record_continuation(self, broken: str, replica_id: str, tokens: int, error: Exception) -> None:
        """Put on the server span that another engine goes on with the answer, and from where."""
        span = trace.get_current_span()
        if span.is_recording():
            span.add_event(
                "qarr.continuation",
                {
                    "qarr.replica": broken,
                    "qarr.continued_on": replica_id,
                    "qarr.continued_tokens": tokens,
                    "error.type": type(error).__name__,
                },
            )

    @contextmanager
    def live_check(self, kind: PromptClass, tier: TierName) -> Iterator[Span]:
        """Span over the scoring of one live prompt; a trace of its own."""
        attributes = {"qarr.class": kind.value, "qarr.tier": tier.value}
        with self._tracer.start_as_current_span("live check", Context(), attributes=attributes) as span:
            yield span

    def record_live_loss(self, span: Span, loss: float, rolling: float) -> None:
        """Put what a live prompt lost on its check's span."""
        if span.is_recording():
            span.set_attributes({"qarr.loss": loss, "qarr.loss.rolling": rolling})

    def record_promotion(self, event: str, kind: PromptClass, tier: TierName, loss: float) -> None:
        """Put a change of a class's tier on the check's span."""
        span = trace.get_current_span()
        if span.is_recording():
            span.add_event(event, {"qarr.class": kind.value, "qarr.tier": tier.value, "qarr.loss.rolling": loss})

    def start_attempt(self, tier: TierName, replica: Replica, request: EngineRequest, number: int) -> Span:
        """Start the span of one upstream attempt (GenAI semantic conventions); the caller ends it."""
        if self._provider is None:
            return trace.INVALID_SPAN
        where = urlsplit(replica.url)
        return self._tracer.start_span(
            f"{request.operation} {replica.model}",
            kind=trace.SpanKind.CLIENT,
            attributes={
                "gen_ai.operation.name": request.operation,
                "gen_ai.provider.name": "vllm",
                "gen_ai.request.model": replica.model,
                **request.parameters,
                "gen_ai.output.type": "text",
                "server.address": where.hostname or "",
                "server.port": where.port or 80,
                "qarr.tier": tier.value,
                "qarr.replica": replica.id,
                "qarr.attempt": number,
            },
        )

    def inject(self, span: Span, headers: MutableMapping[str, str]) -> None:
        """Add the W3C trace context of a span to an upstream request's headers."""
        if span.get_span_context().is_valid:
            propagate.inject(headers, trace.set_span_in_context(span))

    def shutdown(self) -> None:
        """Export what is left."""
        if self._provider is not None:
            self._provider.shutdown()


def make_telemetry(version: str, *, record_prompts: bool = False) -> Telemetry:
    """Set up tracing as the environment says.

    Raises:
        TelemetryError: A variable has a value that is not supported.
    """
    exporter = _exporter()
    if exporter is None:
        return Telemetry(None)
    resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", SERVICE), SERVICE_VERSION: version})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Telemetry(provider, record_prompts=record_prompts)


def engine_target() -> OtlpTarget | None:
    """Return where engines are to send their own spans: to where the router's go."""
    if _exporter_name() != "otlp":
        return None
    protocol, endpoint = _protocol(), _endpoint()
    if protocol == HTTP and not os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return OtlpTarget(endpoint, protocol)


def _exporter_name() -> str:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return "none"
    named = os.environ.get("OTEL_TRACES_EXPORTER", "")
    configured = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    name = named or ("otlp" if configured else "none")
    if name not in {"otlp", "console", "none"}:
        raise TelemetryError(f"OTEL_TRACES_EXPORTER is {name!r}: allowed are otlp, console and none")
    return name


def _exporter() -> SpanExporter | None:
    name = _exporter_name()
    if name == "none":
        return None
    if name == "console":
        return ConsoleSpanExporter()
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


def _is_trace_id(text: str) -> bool:
    return len(text) == 32 and text != "0" * 32 and all(c in "0123456789abcdef" for c in text)  # noqa: PLR2004


def _decision_attributes(decision: Decision) -> dict[str, Any]:
    query = decision.query
    attributes: dict[str, Any] = {
        "qarr.reason": decision.reason,
        "qarr.class": query.features.prompt_class.value,
        "qarr.confidence": query.features.confidence,
        "qarr.prompt_tokens": query.prompt_tokens,
        "qarr.max_tokens": query.max_tokens,
        "qarr.fallbacks": [tier.value for tier in decision.fallbacks],
    }
    if decision.tier is not None and decision.precision is not None:
        attributes |= {"qarr.tier": decision.tier.value, "qarr.precision": decision.precision.value}
    if decision.refusal is not None:
        attributes["qarr.refusal"] = decision.refusal.value
    if query.hint is not None:
        attributes["qarr.hint"] = query.hint.value
    return attributes
