"""What became of mirrored requests: metrics, and ``GET /mirror``, which sums them up.

The summary is made of the metrics, which several workers add up already: its medians lie between bounds of buckets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from starlette.routing import Route as Endpoint

from router.api.asgi import context_of
from router.api.bodies import json_response
from router.api.problems import NotAdmin
from router.profiling.mirror_comparison import MirrorOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client.metrics_core import Metric
    from starlette.requests import Request
    from starlette.responses import Response

    from router.monitoring.tally import Tally
    from router.profiling.mirror import Mirror
    from router.profiling.mirror_comparison import MirrorResult

KIND = ("class", "tier")
PREFIX_SHARE = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.9999, 1.0)
RATIO = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
REQUESTS = "qarr_mirror_requests"
OTHER_FINISH, OTHER_TIER = "qarr_mirror_finish_reason_differs", "qarr_mirror_tier_differs"
# Member of the summary → histogram.
MEDIANS = {
    "common_prefix": "qarr_mirror_common_prefix_ratio",
    "length_ratio": "qarr_mirror_length_ratio",
    "ttft_ratio": "qarr_mirror_ttft_ratio",
    "duration_ratio": "qarr_mirror_duration_ratio",
}


class MirrorMetrics:
    """Counts what became of mirrored requests."""

    def __init__(self, tally: Tally) -> None:
        self._requests = tally.counter(REQUESTS, "Mirrored requests by what became of them.", *KIND, "outcome")
        text = "Mirrored requests whose two answers ended for different reasons."
        self._other_finish = tally.counter(OTHER_FINISH, text, *KIND)
        text = "Mirrored requests that a tier of another name served there."
        self._other_tier = tally.counter(OTHER_TIER, text, *KIND)
        prefix, length, ttft, duration = MEDIANS.values()
        text = "Share of the longer of two greedy answers with which both begin."
        self._prefix = tally.histogram(prefix, text, PREFIX_SHARE, *KIND)
        self._length = tally.histogram(length, "Characters of the mirrored answer / of the served one.", RATIO, *KIND)
        self._ttft = tally.histogram(ttft, "Time to the first token there / here.", RATIO, *KIND)
        self._duration = tally.histogram(duration, "Time to the answer's end there / here.", RATIO, *KIND)

    def observe(self, result: MirrorResult) -> None:
        """Count one mirrored request."""
        labels = result.kind.value, result.tier
        self._requests.of(*labels, result.outcome.value).value += 1
        if result.same_finish is False:
            self._other_finish.of(*labels).value += 1
        if result.same_tier is False:
            self._other_tier.of(*labels).value += 1
        for histogram, value in (
            (self._prefix, result.common_prefix),
            (self._length, result.length),
            (self._ttft, result.ttft),
            (self._duration, result.duration),
        ):
            if value is not None:
                histogram.of(*labels).observe(value)


@dataclass(slots=True)
class Row:
    """What became of the mirrored requests of one class that one tier served, or of all.

    Attributes:
        counts: By outcome, and of the other counters by name.
        buckets: By histogram: values at or below each bound.
    """

    counts: Counter[str] = field(default_factory=Counter)
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Add a sample of the metrics of mirrored requests."""
        if name == f"{REQUESTS}_total":
            self.counts[labels["outcome"]] += int(value)
        elif name.endswith("_total"):
            self.counts[name.removesuffix("_total")] += int(value)
        elif name.endswith("_bucket"):
            self.buckets[name.removesuffix("_bucket")][float(labels["le"])] += value

    def render(self) -> dict[str, Any]:
        """Return it as JSON values; what is not known is null."""
        same, differs = self.counts[MirrorOutcome.SAME], self.counts[MirrorOutcome.DIFFERS]
        return {
            **{outcome.value: self.counts[outcome] for outcome in MirrorOutcome},
            "same_share": round(same / (same + differs), 4) if same + differs else None,
            "finish_reason_differs": self.counts[OTHER_FINISH],
            "tier_differs": self.counts[OTHER_TIER],
            **{member: median(self.buckets.get(name, {})) for member, name in MEDIANS.items()},
        }


def median(buckets: Mapping[float, float]) -> float | None:
    """Return the median of a histogram, taken to lie evenly between the bounds of its bucket; None: it is empty.

    Args:
        buckets: Values at or below each bound, the infinite one included.
    """
    half, lower, below = max(buckets.values(), default=0.0) / 2, 0.0, 0.0
    if not half:
        return None
    for bound, count in sorted(buckets.items()):
        if count >= half:
            inside = (half - below) / (count - below)
            return round(lower if bound == inf else lower + (bound - lower) * inside, 3)
        lower, below = bound, count
    return None


def summed_up(families: Iterable[Metric]) -> tuple[Row, dict[tuple[str, str], Row]]:
    """Return the row of all mirrored requests, and those by class and tier, from the router's metrics."""
    total, rows = Row(), defaultdict[tuple[str, str], Row](Row)
    for family in families:
        if family.name.startswith("qarr_mirror_"):
            for sample in family.samples:
                for row in (total, rows[sample.labels["class"], sample.labels["tier"]]):
                    row.add(sample.name, sample.labels, sample.value)
    return total, dict(rows)


class MirrorEndpoint:
    """``GET /mirror``: a summary of what became of mirrored requests, for operators.

    Args:
        collect: Returns the metrics of the whole router.
        mirror: Has the settings.
    """

    def __init__(self, collect: Callable[[], Iterable[Metric]], mirror: Mirror) -> None:
        self._collect, self._mirror = collect, mirror

    def route(self) -> Endpoint:
        """Return its route."""
        return Endpoint("/mirror", self.answer, methods=["GET"])

    async def answer(self, request: Request) -> Response:
        """Answer with the summary.

        Raises:
            NotAdmin: The caller's key is no operator's.
        """
        if not context_of(request.scope).caller.sees_all:
            raise NotAdmin("this key may not see what is mirrored: 'qarr keys add NAME --admin' makes one that may")
        settings, (total, rows) = self._mirror.settings, summed_up(self._collect())
        body = {
            "url": settings.url or None,
            "share": settings.share if settings.url else 0.0,
            "all": total.render(),
            "rows": [{"class": kind, "tier": tier, **row.render()} for (kind, tier), row in sorted(rows.items())],
        }
        return json_response(body, headers={"cache-control": "no-store"})
