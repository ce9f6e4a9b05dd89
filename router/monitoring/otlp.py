"""Metrics by OTLP: what ``GET /metrics`` shows, sent to a collector at intervals, as the standard ``OTEL_*`` variables say.

They are sent where ``OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`` is set, or ``OTEL_METRICS_EXPORTER`` is ``otlp``. The general
``OTEL_EXPORTER_OTLP_ENDPOINT`` alone sends traces: it often names a viewer that takes nothing else. QARR's own metrics keep
their names of ``/metrics``, those of the GenAI conventions have the conventions' names and units.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import Metric as Family

from router.monitoring.gen_ai import INSTRUMENTS, label_of
from router.telemetry.tracing import GRPC, protocol_of, resource_of

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, MetricExporter, MetricsData

log = logging.getLogger(f"qarr.{__name__}")
ENDPOINT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
EXPORTER = "OTEL_METRICS_EXPORTER"
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
DEFAULT_INTERVAL_MS = 60_000.0
LAST_EXPORT_S = 5.0  # The end of the router waits no longer for the last figures.
# semantic-conventions-genai v0.1.0 depends on it.
SCHEMA = "https://opentelemetry.io/schemas/1.45.0"
_BY_FAMILY = {instrument.family: instrument for instrument in INSTRUMENTS}
_ATTRIBUTES = {
    label_of(name): name for instrument in INSTRUMENTS for name in instrument.attributes
}


class OtlpMetrics:
    """Sends metrics until it is closed."""

    def __init__(
        self,
        exporter: MetricExporter,
        version: str,
        interval_s: float,
        collect: Callable[[], Iterable[Family]],
    ) -> None:
        self._exporter = exporter
        self._version = version
        self._interval_s = interval_s
        self._collect = collect
        self._resource = resource_of(version)
        self._started_ns = time.time_ns()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._send()

    async def aclose(self) -> None:
        """Send the last figures, for a bounded time."""
        try:
            async with asyncio.timeout(LAST_EXPORT_S):
                await self._send()
        except TimeoutError:
            log.warning("the last metrics are not sent: the collector does not answer")
        finally:
            self._exporter.shutdown(timeout_millis=0)

    async def _send(self) -> None:
        # What is collected belongs to the event loop; sending may wait for the collector.
        data = self._data(list(self._collect()))
        await asyncio.to_thread(self._exporter.export, data)

    def _data(self, families: Iterable[Family]) -> MetricsData:
        from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415
            MetricsData,
            ResourceMetrics,
            ScopeMetrics,
        )
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415

        metrics = list(to_metrics(families, self._started_ns, time.time_ns()))
        scope = InstrumentationScope("qarr", self._version, SCHEMA)
        return MetricsData(
            [
                ResourceMetrics(
                    self._resource, [ScopeMetrics(scope, metrics, SCHEMA)], ""
                )
            ]
        )


def to_metrics(
    families: Iterable[Family], started_ns: int, now_ns: int
) -> Iterator[Metric]:
    """Yield families of Prometheus' client as OpenTelemetry's metrics, with cumulative figures."""
    from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415
        AggregationTemporality,
        Gauge,
        Histogram,
        Metric,
        NumberDataPoint,
        Sum,
    )

    cumulative = AggregationTemporality.CUMULATIVE
    for family in families:
        instrument = _BY_FAMILY.get(family.name)
        name = family.name
        unit = ""
        if instrument is not None:
            name = instrument.name
            unit = instrument.unit
        if family.type == "histogram":
            points = _histogram_points(family, started_ns, now_ns)
            yield Metric(
                name, family.documentation, unit, Histogram(points, cumulative)
            )
            continue
        numbers = [
            NumberDataPoint(
                _attributes(sample.labels), started_ns, now_ns, float(sample.value)
            )
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]
        if family.type == "counter":
            yield Metric(
                name,
                family.documentation,
                unit,
                Sum(numbers, cumulative, is_monotonic=True),
            )
        else:
            yield Metric(name, family.documentation, unit, Gauge(numbers))


def _histogram_points(family: Family, started_ns: int, now_ns: int) -> list[Any]:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint  # noqa: PLC0415

    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        series = tuple(
            sorted(
                (name, value) for name, value in sample.labels.items() if name != "le"
            )
        )
        if sample.name.endswith("_bucket"):
            buckets.setdefault(series, []).append(
                (float(sample.labels["le"]), sample.value)
            )
        elif sample.name.endswith("_sum"):
            sums[series] = sample.value
    points = []
    for series, cumulative in buckets.items():
        before = 0.0
        counts = []
        for _, number in cumulative:
            counts.append(int(number - before))
            before = number
        points.append(
            HistogramDataPoint(
                attributes=_attributes(dict(series)),
                start_time_unix_nano=started_ns,
                time_unix_nano=now_ns,
                count=int(before),
                sum=sums.get(series, 0.0),
                bucket_counts=counts,
                explicit_bounds=[bound for bound, _ in cumulative[:-1]],
                min=None,  # type: ignore[arg-type]  # not known, which the protocol allows
                max=None,  # type: ignore[arg-type]
            )
        )
    return points


def _attributes(labels: Mapping[str, str]) -> dict[str, str]:
    return {
        _ATTRIBUTES.get(name, name): value for name, value in labels.items() if value
    }


def otlp_metrics(
    version: str, collect: Callable[[], Iterable[Family]]
) -> OtlpMetrics | None:
    """Return what sends metrics, as the environment says; None: nothing does, or a variable cannot be used."""
    try:
        if not _is_wanted():
            return None
        interval_s = _interval_s()
        exporter = _exporter()
    except Exception as error:  # noqa: BLE001  exporters raise what they like
        log.warning("no metrics are sent: %s", error)
        return None
    return OtlpMetrics(exporter, version, interval_s, collect)


def _is_wanted() -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    named = os.environ.get(EXPORTER) or ("otlp" if os.environ.get(ENDPOINT) else "none")
    if named not in {"otlp", "none"}:
        raise ValueError(
            f"{EXPORTER} is {named!r}: allowed are otlp and none; Prometheus reads GET /metrics"
        )
    return named == "otlp"


def _interval_s() -> float:
    given = os.environ.get(INTERVAL)
    interval_ms = DEFAULT_INTERVAL_MS
    if given:
        try:
            interval_ms = float(given)
        except ValueError:
            interval_ms = 0.0
        if interval_ms <= 0:
            raise ValueError(
                f"{INTERVAL} is {given!r}: milliseconds above 0 are allowed"
            )
    return interval_ms / 1000


def _exporter() -> MetricExporter:
    # Imported here: the exporters cost 200 ms of start-up, and most routers are scraped.
    if protocol_of("METRICS") == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (  # noqa: PLC0415
            OTLPMetricExporter as Grpc,
        )

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415
        OTLPMetricExporter as Http,
    )

    return Http()
