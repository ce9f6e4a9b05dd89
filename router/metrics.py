"""``GET /metrics``: what the router knows, for Prometheus. Read when asked for; nothing is counted twice."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response

from tiers.breaker import BreakerState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric
    from starlette.requests import Request

    from router.admission import Admission
    from router.live_check import LiveCheck
    from tiers.fleet import Fleet

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


class Load(Collector):
    """What the router has to do, and which replicas it spares."""

    def __init__(self, fleet: Fleet, admission: Admission) -> None:
        self._fleet, self._admission = fleet, admission

    def collect(self) -> Iterable[Metric]:
        """Return the queue, the tasks, and each replica's requests, limit, breaker and KV cache."""
        yield GaugeMetricFamily("qarr_waiting_requests", "Requests that wait for a place.", self._admission.waiting)
        yield GaugeMetricFamily("qarr_tasks", "Tasks of the router's event loop.", len(asyncio.all_tasks()))
        labels = ["tier", "replica"]
        in_flight = GaugeMetricFamily("qarr_requests_in_flight", "Requests on a replica.", labels=labels)
        limit = GaugeMetricFamily("qarr_requests_limit", "Requests that a replica is given at once.", labels=labels)
        opened = CounterMetricFamily("qarr_breaker_opened", "Times that a replica's breaker has opened.", labels=labels)
        is_open = GaugeMetricFamily("qarr_breaker_open", "1 while a replica is spared after failures.", labels=labels)
        usage = GaugeMetricFamily("qarr_kv_cache_usage_ratio", "Share of a replica's KV cache in use.", labels=labels)
        now = time.monotonic()
        for replica in self._fleet.replicas:
            values = [replica.spec.name.value, replica.id]
            in_flight.add_metric(values, replica.in_flight)
            limit.add_metric(values, replica.limit)
            opened.add_metric(values, replica.breaker.opened)
            is_open.add_metric(values, replica.breaker.state(now) is not BreakerState.CLOSED)
            if replica.gauges is not None:
                usage.add_metric(values, replica.gauges.kv_cache_usage)
        yield from (in_flight, limit, opened, is_open, usage)


class Metrics:
    """All of the router's metrics."""

    def __init__(self, fleet: Fleet, admission: Admission, check: LiveCheck) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(Load(fleet, admission))
        self._registry.register(LiveLoss(check))

    async def answer(self, _request: Request) -> Response:
        """Answer with the page that Prometheus reads; on the event loop, which owns what is read."""
        return Response(generate_latest(self._registry), media_type=MEDIA_TYPE)
