"""Numbers by labels, in buckets, that are plain until a scrape: the library's histograms take five times as long for each.

Each request adds to more than a dozen of them, on the event loop, which owns them: they need no lock.
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
# A bound as Prometheus writes it, how many numbers do not exceed it, and perhaps the last number that the bucket got.
Bucket: TypeAlias = "tuple[str, float] | tuple[str, float, Exemplar]"


class NotedTrace(Struct, frozen=True):
    """The trace that a number comes from, and when it was noted, in seconds since 1970."""

    trace_id: str
    at: float


@dataclass(slots=True)
class _Series:
    """Numbers with the same labels.

    Attributes:
        counts: How many are in each bucket; the last bucket has no bound.
        total: Their sum.
        examples: The last number of each bucket whose trace is known, with its trace.
    """

    counts: list[int]
    total: float = 0.0
    examples: dict[int, tuple[float, NotedTrace]] = field(default_factory=dict)


@dataclass(slots=True)
class Distribution:
    """Numbers by labels; ``bounds`` are those of the buckets."""

    bounds: tuple[float, ...]
    series: dict[Values, _Series] = field(default_factory=dict)

    def add(
        self, values: Values, number: float, trace: NotedTrace | None = None
    ) -> None:
        series = self.series.get(values)
        if series is None:
            series = self.begin(values)
        bucket = bisect_left(self.bounds, number)
        series.counts[bucket] += 1
        series.total += number
        if trace is not None:
            series.examples[bucket] = (number, trace)

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
            for number, count in enumerate(accumulate(series.counts)):
                bucket = (bounds[number], float(count))
                if number in series.examples:
                    exemplar = _exemplar(*series.examples[number])
                    buckets.append((*bucket, exemplar))
                else:
                    buckets.append(bucket)
            yield values, buckets, series.total

    def totals(self) -> dict[Values, float]:
        return {values: series.total for values, series in self.series.items()}


def _exemplar(number: float, trace: NotedTrace) -> Exemplar:
    return Exemplar({"trace_id": trace.trace_id}, number, trace.at)
