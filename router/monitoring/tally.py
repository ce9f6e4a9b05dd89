"""Counters and histograms as plain values: cheap to count in.

prometheus_client's own take a lock, and look their labels up, at each step: 1 to 4 µs each, for a dozen in a request. What
is counted here is rendered by that library's exposition. One thread counts.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from prometheus_client.core import Exemplar, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterator

Labels = tuple[str, ...]


@dataclass(slots=True)
class Count:
    """What a counter has of one set of labels."""

    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Counter:
    """Counts by labels.

    Attributes:
        name: Without the ``_total`` of its samples.
        text: Its help text.
        labels: Their names.
        series: By the labels' values, in the order of the names.
    """

    name: str
    text: str
    labels: Labels
    series: dict[Labels, Count] = field(default_factory=dict)

    def of(self, *labels: str) -> Count:
        """Return the count of some labels, to which its caller adds; it is shown from now on."""
        found = self.series.get(labels)
        if found is None:
            found = self.series[labels] = Count()
        return found

    def metric(self) -> Metric:
        """Return its samples."""
        metric = Metric(self.name, self.text, "counter")
        for labels, count in self.series.items():
            metric.add_sample(f"{self.name}_total", dict(zip(self.labels, labels, strict=True)), count.value)
        return metric


@dataclass(slots=True)
class Buckets:
    """What a histogram has of one set of labels.

    Attributes:
        bounds: The largest value of each bucket, rising; one without a bound follows.
        counts: Of each bucket's values.
        exemplars: Of each bucket the last value that came with a trace: its id, the value, and when, in Unix seconds.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    exemplars: list[tuple[str, float, float] | None]
    sum: float = 0.0

    def observe(self, value: float, trace_id: str = "", now: float = 0.0) -> None:
        """Count a value.

        Args:
            value: In the histogram's unit.
            trace_id: Makes it an exemplar; empty: it is none.
            now: When it was seen, in Unix seconds; of an exemplar.
        """
        place = bisect_left(self.bounds, value)
        self.counts[place] += 1
        self.sum += value
        if trace_id:
            self.exemplars[place] = trace_id, value, now


@dataclass(frozen=True, slots=True)
class Histogram:
    """Values by labels, counted between bounds.

    Attributes:
        series: By the labels' values, in the order of the names.
    """

    name: str
    text: str
    labels: Labels
    bounds: tuple[float, ...]
    series: dict[Labels, Buckets] = field(default_factory=dict)

    def of(self, *labels: str) -> Buckets:
        """Return the buckets of some labels, in which its caller counts; shown from the first value on."""
        found = self.series.get(labels)
        if found is None:
            size = len(self.bounds) + 1
            found = self.series[labels] = Buckets(self.bounds, [0] * size, [None] * size)
        return found

    def metric(self) -> Metric:
        """Return its samples; without labels there are some before the first value."""
        metric, bounds = Metric(self.name, self.text, "histogram"), [_shown(b) for b in (*self.bounds, inf)]
        for values, buckets in self.series.items():
            if values and not any(buckets.counts):
                continue
            labels, count = dict(zip(self.labels, values, strict=True)), 0
            for bound, more, seen in zip(bounds, buckets.counts, buckets.exemplars, strict=True):
                exemplar = Exemplar({"trace_id": seen[0]}, *seen[1:]) if seen is not None else None
                count += more
                metric.add_sample(f"{self.name}_bucket", {**labels, "le": bound}, count, exemplar=exemplar)
            metric.add_sample(f"{self.name}_count", labels, count)
            metric.add_sample(f"{self.name}_sum", labels, buckets.sum)
        return metric


class Tally(Collector):
    """Counters and histograms, in the order in which they are shown."""

    def __init__(self) -> None:
        self._families: dict[str, Counter | Histogram] = {}

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Add a counter."""
        made = self._families[name] = Counter(name, text, labels)
        return made

    def histogram(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        """Add a histogram."""
        made = self._families[name] = Histogram(name, text, labels, bounds)
        return made

    def collect(self) -> Iterator[Metric]:
        """Yield the samples of each."""
        for family in self._families.values():
            yield family.metric()


def _shown(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]
