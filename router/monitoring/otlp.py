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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client.metrics_core import Metric as Family

from router.monitoring.gen_ai import INSTRUMENTS, label_of
from router.telemetry.otel_environment import GRPC, protocol_of, resource_of

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import (
        Gauge,
        Histogram,
        HistogramDataPoint,
        Metric,
        MetricExporter,
        MetricsData,
        Sum,
    )

log = logging.getLogger(f"qarr.{__name__}")
ENDPOINT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
EXPORTER = "OTEL_METRICS_EXPORTER"
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
DEFAULT_INTERVAL_MS = 60_000.0
# The end of the router waits no longer for the last figures.
LAST_EXPORT_S = 5.0
# The schema of the conventions that semantic-conventions-genai v0.1.0 depends on.
SCHEMA = "https://opentelemetry.io/schemas/1.45.0"
_BY_FAMILY = {instrument.family: instrument for instrument in INSTRUMENTS}
_ALL_ATTRIBUTES = chain.from_iterable(map(attrgetter("attributes"), INSTRUMENTS))
_ATTRIBUTE_BY_LABEL = {label_of(attribute): attribute for attribute in _ALL_ATTRIBUTES}
# The labels of a series, sorted by name.
SeriesKey: TypeAlias = "tuple[tuple[str, str], ...]"


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
        scope_metrics = ScopeMetrics(scope, metrics, SCHEMA)
        resource_metrics = ResourceMetrics(
            self._resource, scope_metrics=[scope_metrics], schema_url=""
        )
        return MetricsData([resource_metrics])


def to_metrics(
    families: Iterable[Family], started_ns: int, now_ns: int
) -> Iterator[Metric]:
    """Yield families of Prometheus' client as OpenTelemetry's metrics, with cumulative figures."""
    from opentelemetry.sdk.metrics.export import Metric  # noqa: PLC0415

    for family in families:
        instrument = _BY_FAMILY.get(family.name)
        name = family.name
        unit = ""
        if instrument is not None:
            name = instrument.name
            unit = instrument.unit
        data = _data_of(family, started_ns, now_ns)
        yield Metric(name, family.documentation, unit=unit, data=data)


def _data_of(family: Family, started_ns: int, now_ns: int) -> Histogram | Gauge | Sum:
    if family.type == "histogram":
        return _histogram(family, started_ns, now_ns)
    return _numbers(family, started_ns, now_ns)


def _numbers(family: Family, started_ns: int, now_ns: int) -> Gauge | Sum:
    from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415
        AggregationTemporality,
        Gauge,
        NumberDataPoint,
        Sum,
    )

    points = [
        NumberDataPoint(
            _attributes(sample.labels),
            start_time_unix_nano=started_ns,
            time_unix_nano=now_ns,
            value=float(sample.value),
        )
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    if family.type == "counter":
        return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return Gauge(points)


def _histogram(family: Family, started_ns: int, now_ns: int) -> Histogram:
    from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415
        AggregationTemporality,
        Histogram,
    )

    buckets: dict[SeriesKey, list[tuple[float, float]]] = {}
    sums: dict[SeriesKey, float] = {}
    for sample in family.samples:
        series = _series_of(sample.labels)
        if sample.name.endswith("_bucket"):
            bucket = (float(sample.labels["le"]), sample.value)
            buckets.setdefault(series, []).append(bucket)
        elif sample.name.endswith("_sum"):
            sums[series] = sample.value
    points = []
    for series, series_buckets in buckets.items():
        point = _histogram_point(
            series_buckets,
            total=sums.get(series, 0.0),
            attributes=_attributes(dict(series)),
            started_ns=started_ns,
            now_ns=now_ns,
        )
        points.append(point)
    return Histogram(points, AggregationTemporality.CUMULATIVE)


def _series_of(labels: Mapping[str, str]) -> SeriesKey:
    """Return the labels of a histogram's series, without the label that tells its buckets apart."""
    pairs = [(name, value) for name, value in labels.items() if name != "le"]
    return tuple(sorted(pairs))


def _histogram_point(
    buckets: Sequence[tuple[float, float]],
    *,
    total: float,
    attributes: Mapping[str, str],
    started_ns: int,
    now_ns: int,
) -> HistogramDataPoint:
    """Return a series from its buckets: the bound of each, and how many numbers do not exceed it."""
    from opentelemetry.sdk.metrics.export import HistogramDataPoint  # noqa: PLC0415

    bucket_counts = []
    count_below = 0.0
    for _, cumulative_count in buckets:
        bucket_counts.append(int(cumulative_count - count_below))
        count_below = cumulative_count
    return HistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=started_ns,
        time_unix_nano=now_ns,
        count=int(count_below),
        sum=total,
        bucket_counts=bucket_counts,
        explicit_bounds=[bound for bound, _ in buckets[:-1]],
        min=None,  # type: ignore[arg-type]  # not known, which the protocol allows
        max=None,  # type: ignore[arg-type]
    )


def _attributes(labels: Mapping[str, str]) -> dict[str, str]:
    return {
        _ATTRIBUTE_BY_LABEL.get(label, label): value
        for label, value in labels.items()
        if value
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
    default = "otlp" if os.environ.get(ENDPOINT) else "none"
    exporter = os.environ.get(EXPORTER) or default
    if exporter not in {"otlp", "none"}:
        raise ValueError(
            f"{EXPORTER} is {exporter!r}: allowed are otlp and none; Prometheus reads GET /metrics"
        )
    return exporter == "otlp"


def _interval_s() -> float:
    text = os.environ.get(INTERVAL)
    if not text:
        return DEFAULT_INTERVAL_MS / 1000
    try:
        interval_ms = float(text)
    except ValueError:
        interval_ms = 0.0
    if interval_ms <= 0:
        raise ValueError(f"{INTERVAL} is {text!r}: milliseconds above 0 are allowed")
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
