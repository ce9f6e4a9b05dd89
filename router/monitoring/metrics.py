"""``GET /metrics``: the router's metrics for Prometheus.

Counters and histograms are made from the records of finished requests; gauges are read at each scrape. Names follow
https://prometheus.io/docs/practices/naming/; a replica's series vanish with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from router.accounting.charging import Charging
from router.accounting.usage_log import UsageLog
from router.api.asgi import context_of
from router.monitoring.families import Sample, counter, gauge, single_counter
from router.monitoring.fleet_metrics import FleetMetrics
from router.monitoring.gen_ai import GenAiMetrics
from router.monitoring.request_metrics import RequestMetrics
from router.monitoring.usage_metrics import Labels, UsageMetrics
from router.pipeline.pipeline import Pipeline
from router.policy.table import PolicyStore
from router.redis_link import CAUSES, RedisState
from tiers.spec import TierName

disable_created_metrics()  # type: ignore[no-untyped-call]


class LossMetrics(Collector):
    """The loss that the policy expects, and the loss that it allows."""

    def __init__(self, policy: PolicyStore) -> None:
        self._policy = policy

    def collect(self) -> Iterable[Metric]:
        yield from self._expected_losses()
        yield gauge(
            "tier_worse",
            "1 for a tier that is known to lose more answers than the loss budget allows, else 0.",
            labels=("tier",),
            samples=[
                ((tier,), float(tier in self._policy.worse))
                for tier in self._policy.verdicts
            ],
        )
        yield from self._loss_tally()

    def _expected_losses(self) -> Iterable[Metric]:
        table = self._policy.table
        means: list[Sample] = []
        answers: list[Sample] = []
        for tier, losses_by_class in table.losses.items():
            for prompt_class, losses_by_complexity in losses_by_class.items():
                for complexity, loss in losses_by_complexity.items():
                    label_values = (prompt_class.value, complexity.value, tier)
                    means.append((label_values, loss.mean))
                    answers.append((label_values, loss.answers))
        yield gauge(
            "expected_loss_ratio",
            "Share of answers that are expected to be worse than the highest precision's.",
            labels=("class", "complexity", "tier"),
            samples=means,
        )
        yield gauge(
            "expected_loss_answers",
            "Measured answers behind the expected loss; 0: published losses only.",
            labels=("class", "complexity", "tier"),
            samples=answers,
        )
        yield gauge(
            "loss_bound_ratio",
            "Cap of the loss of a class.",
            labels=("class",),
            samples=[
                ((prompt_class.value,), bound)
                for prompt_class, bound in table.max_loss.items()
            ],
        )

    def _loss_tally(self) -> Iterable[Metric]:
        tally = self._policy.tally
        yield single_counter(
            "loss_counted_answers",
            "Answers whose tier the policy chose.",
            tally.answers,
        )
        yield single_counter(
            "loss_expected_answers",
            "Answers whose tier the policy chose that are expected to be worse than the highest precision's.",
            tally.lost,
        )
        yield single_counter(
            "loss_allowed_answers",
            "Answers whose tier the policy chose that the loss budget would have allowed to be worse.",
            tally.allowed,
        )


class RedisMetrics(Collector):
    """Whether Redis serves what routers share, and why not."""

    def __init__(
        self, states: Sequence[RedisState], restored: Callable[[], int]
    ) -> None:
        self._states = states
        self._restored = restored

    def collect(self) -> Iterable[Metric]:
        yield gauge(
            "redis_serves",
            "1 while Redis serves a use, 0 while this router goes alone.",
            labels=("use",),
            samples=[((state.use,), float(state.serves)) for state in self._states],
        )
        failures: list[Sample] = [
            ((state.use, cause), state.failures[cause])
            for state, cause in product(self._states, CAUSES)
        ]
        yield counter(
            "redis_failures",
            "Commands that Redis did not serve, by what they were for and why.",
            labels=("use", "cause"),
            samples=failures,
        )
        yield single_counter(
            "redis_budgets_restored",
            "Days and months of keys and teams whose spent budget Redis had lost, and got back.",
            self._restored(),
        )


class Metrics:
    """All metrics of a router. Those of keys are kept apart, since only operators may see them."""

    def __init__(
        self,
        pipeline: Pipeline,
        retries: Mapping[TierName, int],
        about: Mapping[str, str],
    ) -> None:
        self._registry = CollectorRegistry()
        self._key_registry = CollectorRegistry()
        self._tell = pipeline.registry.tell
        tiers = [spec.name for spec in pipeline.fleet.specs]
        requests = RequestMetrics(self._registry, tiers)
        gen_ai = GenAiMetrics(about["model"])
        self.answered = requests.answered
        pipeline.registry.observers += [requests.observe, gen_ai.observe]
        self._registry.register(gen_ai)
        ProcessCollector(registry=self._registry)
        self._registry.register(FleetMetrics(pipeline, retries, about))
        self._registry.register(LossMetrics(pipeline.policy))

    def count_keys(
        self, usage: UsageLog, charging: Charging, labels: Labels
    ) -> UsageMetrics:
        metrics = UsageMetrics(self._key_registry, labels, charging)
        usage.observers.append(metrics.observe)
        self._key_registry.register(metrics)
        return metrics

    def show_redis(
        self, states: Sequence[RedisState], restored: Callable[[], int]
    ) -> None:
        """Show what Redis does, from the start, if there is one."""
        self._registry.register(RedisMetrics(states, restored))

    def show_expiry(self, expires: Callable[[], float]) -> None:
        expiry = Gauge(
            "qarr_tls_expires_timestamp_seconds",
            "When the certificate that the router shows expires, in seconds since 1970.",
            registry=self._registry,
        )
        expiry.set_function(expires)

    def collect(self) -> Iterable[Metric]:
        """Collect all metrics, with those of keys; on the event loop, which owns the state that is read."""
        self._tell()
        yield from self._registry.collect()
        yield from self._key_registry.collect()

    async def answer(self, request: Request) -> Response:
        """Answer a scrape; on the event loop, which owns the state that is read. Only operators see what keys use."""
        self._tell()
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        page = CollectorRegistry()
        page.register(self._registry)
        if context_of(request.scope).caller.sees_all:
            page.register(self._key_registry)
        return Response(encode(page), media_type=media_type)
