"""Histograms that are plain Python numbers until a scrape.

To observe a value in one of the library's takes five times as long. Each request adds to more than a dozen of them, on the
event loop, which owns them: they need no lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

from msgspec import Struct
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

# The values of a series' labels.
Values: TypeAlias = "tuple[str, ...]"
# A bound as Prometheus writes it, how many values do not exceed it, and perhaps the last value that the bucket got.
Bucket: TypeAlias = "tuple[str, float] | tuple[str, float, Exemplar]"


class NotedTrace(Struct, frozen=True):
    """The trace that a value comes from, and when it was noted, in seconds since 1970."""

    trace_id: str
    at: float


@dataclass(slots=True)
class _Series:
    """Observed values with the same labels.

    Attributes:
        counts: How many are in each bucket; the last bucket has no bound.
        total: Their sum.
        exemplars: The last value of each bucket whose trace is known, with its trace, by the bucket's index.
    """

    counts: list[int]
    total: float = 0.0
    exemplars: dict[int, tuple[float, NotedTrace]] = field(default_factory=dict)


@dataclass(slots=True)
class Distribution:
    """Observed values by labels; ``bounds`` are those of the buckets."""

    bounds: tuple[float, ...]
    series: dict[Values, _Series] = field(default_factory=dict)

    def add(
        self, values: Values, observed: float, trace: NotedTrace | None = None
    ) -> None:
        series = self.series.get(values)
        if series is None:
            series = self.begin(values)
        bucket_index = bisect_left(self.bounds, observed)
        series.counts[bucket_index] += 1
        series.total += observed
        if trace is not None:
            series.exemplars[bucket_index] = (observed, trace)

    def begin(self, values: Values) -> _Series:
        """Begin a series, which is shown from now on."""
        series = _Series([0] * (len(self.bounds) + 1))
        self.series[values] = series
        return series

    def samples(self) -> Iterator[tuple[Values, list[Bucket], float]]:
        """Yield labels, cumulative buckets and the sum of each series."""
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        for values, series in self.series.items():
            buckets: list[Bucket] = []
            for bucket_index, count in enumerate(accumulate(series.counts)):
                bucket = (bounds[bucket_index], float(count))
                if bucket_index in series.exemplars:
                    exemplar = _exemplar(*series.exemplars[bucket_index])
                    buckets.append((*bucket, exemplar))
                else:
                    buckets.append(bucket)
            yield values, buckets, series.total

    def totals(self) -> dict[Values, float]:
        return {values: series.total for values, series in self.series.items()}


def _exemplar(observed: float, trace: NotedTrace) -> Exemplar:
    return Exemplar({"trace_id": trace.trace_id}, observed, trace.at)
