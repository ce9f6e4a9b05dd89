"""Metrics by OTLP: what a collector gets, over HTTP and gRPC, and what the environment says of it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric

from router.monitoring.otlp import otlp_metrics
from tests.unit.router_stack import router_stack
from tests.waiting import until

ENDPOINT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"
EXPORTER = "OTEL_METRICS_EXPORTER"
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
GENERAL = "OTEL_EXPORTER_OTLP_ENDPOINT"


def texts_of(attributes: Iterable[KeyValue]) -> dict[str, str]:
    """Return attributes whose values are texts, by their names."""
    return {attribute.key: attribute.value.string_value for attribute in attributes}


@dataclass
class Collector:
    """Keeps what it is sent; ``status`` is what it answers over HTTP."""

    requests: list[ExportMetricsServiceRequest] = field(default_factory=list)
    url: str = ""
    status: int = 200

    def newest(self) -> dict[str, Metric]:
        """Return the metrics of the last request, by name."""
        (resource,) = self.requests[-1].resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: metric for metric in scope.metrics}

    def resource(self) -> dict[str, str]:
        return texts_of(self.requests[-1].resource_metrics[0].resource.attributes)


@contextmanager
def over_http() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics"
            data = self.rfile.read(int(self.headers["content-length"]))
            collector.requests.append(ExportMetricsServiceRequest.FromString(data))
            self.send_response(collector.status)
            self.end_headers()
            self.wfile.write(ExportMetricsServiceResponse().SerializeToString())

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}/v1/metrics"
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


@contextmanager
def over_grpc() -> Iterator[Collector]:
    collector = Collector()

    class Servicer(MetricsServiceServicer):  # type: ignore[misc]
        def Export(  # noqa: N802
            self, request: ExportMetricsServiceRequest, _context: Any
        ) -> ExportMetricsServiceResponse:
            collector.requests.append(request)
            return ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    add_MetricsServiceServicer_to_server(Servicer(), server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait(60)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        ENDPOINT,
        PROTOCOL,
        EXPORTER,
        INTERVAL,
        GENERAL,
        "OTEL_SDK_DISABLED",
        "OTEL_EXPORTER_OTLP_PROTOCOL",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("protocol", "serve"), [("http/protobuf", over_http), ("grpc", over_grpc)]
)
async def test_a_collector_gets_what_metrics_shows(
    protocol: str, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours under their names, those of the conventions under theirs, with units and attributes; the last figures at the end."""
    with serve() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        monkeypatch.setenv(PROTOCOL, protocol)
        monkeypatch.setenv(INTERVAL, "100")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=qarr-prod")
        async with router_stack(tmp_path) as stack:
            assert (await stack.generate(tier="fast")).status_code == 200
            await until(
                lambda: collector.requests and "qarr_requests" in collector.newest()
            )
            seen = len(collector.requests)
            await until(lambda: len(collector.requests) > seen)
            await stack.generate(tier="fast")
        metrics = collector.newest()
    assert collector.resource()["service.name"] == "qarr-prod"
    assert collector.resource()["service.instance.id"]
    requests = metrics["qarr_requests"].sum
    assert requests.is_monotonic
    assert (
        requests.aggregation_temporality
        == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    )
    assert sum(point.as_double for point in requests.data_points) == 2
    assert texts_of(requests.data_points[0].attributes)["outcome"] == "ok"
    duration = metrics["gen_ai.client.inference.duration"]
    assert duration.unit == "s"
    (point,) = duration.histogram.data_points
    assert point.count == sum(point.bucket_counts) == 2
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert not point.HasField("min")
    assert texts_of(point.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "qarr.tier": "fast",
    }
    assert metrics["gen_ai.client.inference.usage.output_tokens"].unit == "{token}"
    assert metrics["gen_ai.client.inference.usage.output_tokens"].sum.is_monotonic
    assert metrics["qarr_open_requests"].gauge.data_points


@pytest.mark.anyio
async def test_a_collector_that_refuses_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures are cumulative: the next ones have what was refused."""
    with over_http() as collector:
        collector.status = 400
        monkeypatch.setenv(ENDPOINT, collector.url)
        monkeypatch.setenv(INTERVAL, "100")
        async with router_stack(tmp_path) as stack:
            await until(lambda: len(collector.requests) > 1)
            assert (await stack.generate()).status_code == 200
            collector.status = 200

            def is_counted() -> bool:
                points = collector.newest()["qarr_requests"].sum.data_points
                return sum(point.as_double for point in points) == 1

            await until(is_counted)


@pytest.mark.parametrize(
    ("variables", "sent"),
    [
        ({}, False),
        ({GENERAL: "http://127.0.0.1:9"}, False),
        ({ENDPOINT: "http://127.0.0.1:9"}, True),
        ({GENERAL: "http://127.0.0.1:9", EXPORTER: "otlp"}, True),
        ({ENDPOINT: "http://127.0.0.1:9", EXPORTER: "none"}, False),
        ({ENDPOINT: "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}, False),
        ({ENDPOINT: ""}, False),
    ],
)
def test_the_standard_variables_say_whether_metrics_are_sent(
    variables: dict[str, str],
    *,
    sent: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An address for all signals is often that of a viewer of traces: it alone sends no metrics."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (otlp_metrics("0", list) is not None) is sent
    assert not caplog.records


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {EXPORTER: "prometheus"},
            "OTEL_METRICS_EXPORTER is 'prometheus': allowed are otlp and none",
        ),
        (
            {ENDPOINT: "http://h", INTERVAL: "soon"},
            "OTEL_METRIC_EXPORT_INTERVAL is 'soon': milliseconds above 0",
        ),
        ({ENDPOINT: "http://h", INTERVAL: "0"}, "OTEL_METRIC_EXPORT_INTERVAL is '0'"),
        (
            {ENDPOINT: "http://h", PROTOCOL: "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json': allowed are",
        ),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(
    variables: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The router starts all the same, and sends none."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert otlp_metrics("0", list) is None
    (said,) = caplog.records
    assert said.getMessage().startswith("no metrics are sent: ")
    assert says in said.getMessage()
