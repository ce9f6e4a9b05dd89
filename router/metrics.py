"""``GET /metrics``: what the router knows, for Prometheus. Read when asked for; nothing is counted twice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric
    from starlette.requests import Request

    from router.live_check import LiveCheck

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class LiveLoss(Collector):
    """What the continuous check has found."""

    def __init__(self, check: LiveCheck) -> None:
        self._check = check

    def collect(self) -> Iterable[Metric]:
        """Return the rolling loss and the number of answers by class and tier, and the classes that were promoted."""
        loss = GaugeMetricFamily(
            "qarr_live_loss_ratio",
            "Rolling share of tokens that are not the highest precision's first choice.",
            labels=["class", "tier"],
        )
        checked = CounterMetricFamily(
            "qarr_live_checked_answers", "Live prompts that were answered again and scored.", labels=["class", "tier"]
        )
        promoted = GaugeMetricFamily(
            "qarr_promoted_classes", "1 for a class that gets this tier or higher meanwhile.", labels=["class", "tier"]
        )
        for (kind, tier), rolling in self._check.losses.items():
            loss.add_metric([kind.value, tier.value], rolling.share)
            checked.add_metric([kind.value, tier.value], rolling.checked)
        for kind, tier in self._check.promoted.items():
            promoted.add_metric([kind.value, tier.value], 1)
        return [loss, checked, promoted]


class EventLoop(Collector):
    """What runs in the router; it comes back to where it was when requests have ended."""

    def collect(self) -> Iterable[Metric]:
        """Return the number of tasks."""
        tasks = GaugeMetricFamily("qarr_event_loop_tasks", "Tasks of the router's event loop that are not done.")
        tasks.add_metric([], len(asyncio.all_tasks()))
        return [tasks]


class Metrics:
    """All of the router's metrics."""

    def __init__(self, check: LiveCheck) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(LiveLoss(check))
        self._registry.register(EventLoop())

    async def answer(self, _request: Request) -> Response:
        """Answer with the page that Prometheus reads; on the event loop, which owns what is read."""
        return Response(generate_latest(self._registry), media_type=MEDIA_TYPE)
