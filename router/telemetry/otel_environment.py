"""What the standard ``OTEL_*`` variables say: where spans and metrics go, and how this router is named in them."""

from __future__ import annotations

import os

from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter

from tiers.spec import OtlpTarget

SERVICE = "qarr-router"
HTTP = "http/protobuf"
GRPC = "grpc"
DEFAULT_ENDPOINTS = {HTTP: "http://localhost:4318", GRPC: "http://localhost:4317"}
EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


def resource_of(version: str) -> Resource:
    """Describe this router in traces and metrics: as the environment names it, and as QARR where it does not.

    ``OTEL_SERVICE_NAME`` goes before a ``service.name`` in ``OTEL_RESOURCE_ATTRIBUTES``.
    """
    named = OTELResourceDetector().detect().attributes
    defaults = {SERVICE_NAME: SERVICE, SERVICE_VERSION: version}
    return Resource.create(
        {key: value for key, value in defaults.items() if not named.get(key)}
    )


def engine_target() -> OtlpTarget | None:
    """Return where engines are to send their own spans: where the router's go, if they go anywhere."""
    try:
        if _traces_exporter() != "otlp":
            return None
        protocol = protocol_of("TRACES")
        endpoint = _traces_endpoint()
    except ValueError:  # the router logs it
        return None
    if protocol == HTTP and not os.environ.get(TRACES_ENDPOINT):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return OtlpTarget(endpoint, protocol)


def make_span_exporter() -> SpanExporter | None:
    """Return what sends the router's spans; None: nothing does. ``ValueError``: a variable cannot be used.

    Exporters raise other errors as well, as they like.
    """
    exporter = _traces_exporter()
    if exporter == "none":
        return None
    if exporter == "console":
        return ConsoleSpanExporter()
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


def set_variables() -> dict[str, str]:
    """Return the variables of OpenTelemetry that are set; an empty one counts as not set."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("OTEL_") and value
    }


def _traces_exporter() -> str:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "none"
    has_endpoint = os.environ.get(ENDPOINT) or os.environ.get(TRACES_ENDPOINT)
    default = "otlp" if has_endpoint else "none"
    exporter = os.environ.get(EXPORTER) or default
    if exporter not in {"otlp", "console", "none"}:
        raise ValueError(
            f"{EXPORTER} is {exporter!r}: allowed are otlp, console and none"
        )
    return exporter


def _traces_endpoint() -> str:
    return (
        os.environ.get(TRACES_ENDPOINT)
        or os.environ.get(ENDPOINT)
        or DEFAULT_ENDPOINTS[protocol_of("TRACES")]
    )
