"""Families of samples that are read at each scrape, under QARR's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from router.monitoring.distribution import Distribution

# The values of the labels, and the number.
Sample: TypeAlias = "tuple[Sequence[str], float]"


def gauge(
    name: str, text: str, *, labels: Sequence[str], samples: Iterable[Sample]
) -> Metric:
    """Return a gauge with a series for each of the samples."""
    family = GaugeMetricFamily(f"qarr_{name}", text, labels=labels)
    for label_values, number in samples:
        family.add_metric(label_values, number)
    return family


def counter(
    name: str, text: str, *, labels: Sequence[str], samples: Iterable[Sample]
) -> Metric:
    """Return a counter with a series for each of the samples."""
    family = CounterMetricFamily(f"qarr_{name}", text, labels=labels)
    for label_values, number in samples:
        family.add_metric(label_values, number)
    return family


def histogram(
    name: str, text: str, *, labels: Sequence[str], numbers: Distribution
) -> Metric:
    """Return a histogram with the series of a distribution."""
    family = HistogramMetricFamily(f"qarr_{name}", text, labels=labels)
    for label_values, buckets, total in numbers.samples():
        family.add_metric(label_values, buckets, total)
    return family


def single_gauge(name: str, text: str, number: float) -> Metric:
    return GaugeMetricFamily(f"qarr_{name}", text, number)


def single_counter(name: str, text: str, number: float) -> Metric:
    return CounterMetricFamily(f"qarr_{name}", text, number)
