"""``GET /metrics``: the router's metrics for Prometheus.

Counters and histograms are made from the records of finished requests; gauges are read at each scrape. Names follow
https://prometheus.io/docs/practices/naming/; a replica's series vanish with it. Exemplars (OpenMetrics) are trace ids.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise, permutations
from typing import TypeAlias

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from router.accounting.charging import Charging
from router.accounting.usage import UsageLog
from router.api.asgi import context_of
from router.monitoring.gen_ai import GenAiMetrics
from router.monitoring.usage import Labels, UsageMetrics
from router.pipeline.pipeline import Pipeline
from router.pipeline.registry import ENGINE_REFUSED, OVER_BUDGET, OVER_QUOTA
from router.policy.decision import SLA_IMPOSSIBLE, TIER_ABSENT, Refusal
from router.policy.table import PolicyStore
from router.profiling.shadow_evaluation import ShadowEvaluation
from router.redis_link import CAUSES, RedisState
from router.telemetry.record import Outcome, RequestRecord
from tiers.breaker import BreakerState
from tiers.choice import Demand, best_candidate
from tiers.spec import OVERFLOW, STANDARD_TIERS, ReplicaStatus, TierName

disable_created_metrics()  # type: ignore[no-untyped-call]
NO_TIER = "none"
# Bounds in seconds: a GPU's first token takes tens of milliseconds, a queue or a CPU's prefill tens of seconds.
TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 40, 80)
TPOT_S = (
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2,
)
DURATION_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
QUEUE_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160)
OVERHEAD_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5)
ERROR_RATIO = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5)
KIND, TIER, REPLICA = ("class", "tier"), ("tier",), ("tier", "replica")
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128  # of the request whose first token is predicted
Sample: TypeAlias = "tuple[Sequence[str], float]"
METHODS = {"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"}


class RequestMetrics:
    """Counters and histograms of requests that have ended, each by a function that returns the series of some labels."""

    def __init__(
        self, registry: CollectorRegistry, tiers: Sequence[TierName] = STANDARD_TIERS
    ) -> None:
        def counter(name: str, text: str, *labels: str) -> Callable[..., Counter]:
            return cache(
                Counter(f"qarr_{name}", text, labels, registry=registry).labels
            )

        def histogram(
            name: str, text: str, bounds: tuple[float, ...], *labels: str
        ) -> Callable[..., Histogram]:
            return cache(
                Histogram(
                    f"qarr_{name}", text, labels, buckets=bounds, registry=registry
                ).labels
            )

        self._http = counter(
            "http_requests",
            "Requests by endpoint and status.",
            "route",
            "method",
            "code",
        )
        self._requests = counter(
            "requests", "Requests by the tier that served them.", *KIND, "outcome"
        )
        self._decisions = counter(
            "decisions", "Decisions by the rule that decided.", *KIND, "reason"
        )
        self._refusals = counter("refusals", "Requests that were refused.", "reason")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.", *KIND)
        self._output_tokens = counter("output_tokens", "Tokens of answers.", *KIND)
        text = "Prompt tokens in the engine's prefix cache, as predicted and as the engine reported them."
        self._cached_tokens = counter("cached_prompt_tokens", text, "tier", "source")
        self._sla = counter(
            "sla_requests",
            "Requests with bounds on times, by whether they were met.",
            *KIND,
            "result",
        )
        special = (OVER_QUOTA, OVER_BUDGET, ENGINE_REFUSED, TIER_ABSENT, SLA_IMPOSSIBLE)
        for reason in (*(refusal.value for refusal in Refusal), *special):
            # at 0 from the start: a rate cannot see the first event of a new series
            self._refusals(reason)
        self._continuations = counter(
            "continuations",
            "Answers that another engine continued.",
            "from_tier",
            "to_tier",
        )
        text = (
            "Requests without a slot that the overflow was considered for, by outcome."
        )
        self._overflow = counter("overflow_requests", text, "outcome")
        for outcome in (
            "ok",
            "error",
            "client_gone",
            "full",
            "paused",
            "unsupported",
            "failed",
            "cancelled",
        ):
            self._overflow(outcome)
        for one, other in permutations(tiers, 2):
            self._continuations(one, other)
        self._cost = counter(
            "cost_engine_seconds", "Predicted engine time of requests, by price.", *KIND
        )
        self._ttft = histogram(
            "time_to_first_token_seconds",
            "From a request to its first token.",
            TTFT_S,
            *KIND,
        )
        self._tpot = histogram(
            "time_per_output_token_seconds", "Mean time between tokens.", TPOT_S, *KIND
        )
        self._duration = histogram(
            "request_duration_seconds",
            "From a request to its last byte.",
            DURATION_S,
            *KIND,
        )
        self._queue = histogram(
            "queue_wait_seconds", "Waits for a slot.", QUEUE_S, "priority"
        )
        text = (
            "From a request's arrival until it is sent to an engine, without the queue."
        )
        self._overhead = Histogram(
            "qarr_overhead_seconds", text, buckets=OVERHEAD_S, registry=registry
        )
        text = "|predicted - seen| / seen, of undisturbed answers."
        self._off = histogram(
            "prediction_error_ratio", text, ERROR_RATIO, "tier", "kind"
        )

    def answered(self, route: str, method: str, status: int) -> None:
        self._http(route, method if method in METHODS else "other", status).inc()

    def observe(self, record: RequestRecord) -> None:
        decision, outcome, served = record.decision, record.outcome, record.served
        began = served.tier or (OVERFLOW if served.overflow is not None else None)
        kind, tier = decision.query.features.prompt_class, began or NO_TIER
        self._requests(kind, tier, outcome).inc()
        self._decisions(kind, decision.tier or NO_TIER, decision.basis).inc()
        if outcome is Outcome.REFUSED:
            self._refusals(str(record.error)).inc()
        if served.overflow is not None or served.overflow_failure is not None:
            self._overflow(served.overflow_failure or outcome).inc()
        if record.sla_met is not None:
            self._sla(kind, tier, _sla_result(record)).inc()
        for before, after in pairwise((tier, *served.continued_on)):
            self._continuations(before, after).inc()
        if began is not None:
            self._measure(record, kind, tier)

    def _measure(self, record: RequestRecord, kind: str, tier: str) -> None:
        """Measure an answer. Predictions are compared with what was seen of those that nothing disturbed."""
        served, tokens, times = record.served, record.tokens, record.times
        chosen = record.decision.comparison.chosen if served.tier is not None else None
        trace, whole = (
            {"trace_id": record.trace_id} if record.trace_id else None,
            record.outcome is Outcome.OK,
        )
        self._prompt_tokens(kind, tier).inc(tokens.prompt)
        self._output_tokens(kind, tier).inc(tokens.output)
        for source, cached in (
            ("predicted", tokens.predicted_cached),
            ("reported", tokens.cached),
        ):
            if cached is not None:
                self._cached_tokens(tier, source).inc(cached)
        self._cost(kind, tier).inc((chosen.cost if chosen else None) or 0.0)
        self._queue(record.priority).observe(times.queue_ms / 1000, trace)
        if times.overhead_ms is not None:
            self._overhead.observe(times.overhead_ms / 1000, trace)
        duration_ms = times.duration_ms if whole else None
        for series, ms in (
            (self._ttft, times.ttft_ms),
            (self._tpot, times.tpot_ms),
            (self._duration, duration_ms),
        ):
            if ms is not None:
                series(kind, tier).observe(ms / 1000, trace)
        moved = (
            served.tier is not record.decision.tier
            or served.attempts_failed
            or served.continued_on
        )
        if not whole or chosen is None or chosen.times is None or moved:
            return
        first_ms = (times.ttft_ms or 0.0) - times.queue_ms - (times.overhead_ms or 0.0)
        if first_ms > 0:
            self._off(tier, "ttft").observe(
                abs(chosen.times.ttft_ms - first_ms) / first_ms
            )
        if times.tpot_ms:
            self._off(tier, "tpot").observe(
                abs(chosen.times.tpot_ms - times.tpot_ms) / times.tpot_ms
            )


def _sla_result(record: RequestRecord) -> str:
    """Return whether a request's bounds were met; those that no tier meets at any load are not held against the router."""
    if record.sla_met:
        return "met"
    return "impossible" if record.decision.are_times_impossible else "missed"


def _gauge(
    name: str, text: str, labels: Sequence[str], samples: Iterable[Sample],
    family: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:  # fmt: skip
    made = family(f"qarr_{name}", text, labels=labels)
    for values, number in samples:
        made.add_metric(values, number)
    return made


_counter = partial(_gauge, family=CounterMetricFamily)


class Losses(Collector):
    def __init__(self, evaluation: ShadowEvaluation, policy: PolicyStore) -> None:
        self._evaluation, self._policy = evaluation, policy

    def collect(self) -> Iterable[Metric]:
        table, tally = self._policy.table, self._policy.tally
        losses = [
            ([kind.value, complexity.value, tier], loss)
            for tier, of_tier in table.losses.items()
            for kind, each in of_tier.items()
            for complexity, loss in each.items()
        ]
        labels = "class", "complexity", "tier"
        text = "Share of answers that are expected to be worse than the highest precision's."
        yield _gauge(
            "expected_loss_ratio",
            text,
            labels,
            [(values, loss.mean) for values, loss in losses],
        )
        text = "Measured answers behind the expected loss; 0: published losses only."
        yield _gauge(
            "expected_loss_answers",
            text,
            labels,
            [(values, loss.answers) for values, loss in losses],
        )
        bounds = [([kind.value], most) for kind, most in table.max_loss.items()]
        yield _gauge(
            "loss_bound_ratio", "Cap of the loss of a class.", ("class",), bounds
        )
        yield CounterMetricFamily(
            "qarr_loss_counted_answers",
            "Answers whose tier the policy chose.",
            tally.answers,
        )
        text = "Answers whose tier the policy chose that are expected to be worse than the highest precision's."
        yield CounterMetricFamily("qarr_loss_expected_answers", text, tally.lost)
        text = "Answers whose tier the policy chose that the loss budget would have allowed to be worse."
        yield CounterMetricFamily("qarr_loss_allowed_answers", text, tally.allowed)
        drifts = [
            ([kind.value, tier], drift)
            for (kind, tier), drift in self._evaluation.drifts.items()
        ]
        text = "Live prompts that a tier and the highest precision answered again."
        yield _counter(
            "live_checked_answers",
            text,
            KIND,
            [(values, drift.checked) for values, drift in drifts],
        )
        text = "Live prompts answered again whose answers could be compared."
        yield _counter(
            "live_compared_answers",
            text,
            KIND,
            [(values, drift.compared) for values, drift in drifts],
        )
        text, known = (
            "Rolling share of compared answers that differ.",
            [(v, d.differing) for v, d in drifts],
        )
        yield _gauge(
            "live_differing_ratio",
            text,
            KIND,
            [(v, share) for v, share in known if share is not None],
        )
        text = "Rolling mean of the log-probability a token that the highest precision gives up."
        yield _gauge(
            "live_regret_nats",
            text,
            KIND,
            [(values, drift.regret) for values, drift in drifts],
        )


class Load(Collector):
    """The router's load, the state of its engines, and each tier as one more request would find it, for autoscalers."""

    def __init__(
        self,
        pipeline: Pipeline,
        retries: Mapping[TierName, int],
        about: Mapping[str, str],
    ) -> None:
        self._pipeline, self._retries, self._about = pipeline, retries, about

    def collect(self) -> Iterable[Metric]:
        pipeline, about = self._pipeline, [self._about["version"], self._about["model"]]
        yield _gauge(
            "build_info",
            "1; labels: version and model.",
            ("version", "model"),
            [(about, 1)],
        )
        waiting = pipeline.admission
        yield GaugeMetricFamily(
            "qarr_waiting_requests", "Requests that wait for a slot.", waiting.waiting
        )
        yield GaugeMetricFamily(
            "qarr_waiting_requests_limit",
            "Requests that may wait.",
            waiting.most_waiting,
        )
        yield GaugeMetricFamily(
            "qarr_open_requests",
            "Requests that are being served.",
            len(pipeline.registry.open),
        )
        yield GaugeMetricFamily(
            "qarr_tasks", "Tasks of the router's event loop.", len(asyncio.all_tasks())
        )
        blocks = sys.getallocatedblocks()
        yield GaugeMetricFamily(
            "qarr_memory_blocks", "Blocks of memory that Python's objects take.", blocks
        )
        yield from self._tiers()
        yield from self._replicas()

    def _tiers(self) -> Iterable[Metric]:
        fleet, snapshot = self._pipeline.fleet, self._pipeline.fleet.snapshot()
        failures = [
            ([tier, error], count) for (tier, error), count in fleet.failures.items()
        ]
        yield _counter(
            "upstream_failures",
            "Attempts that an engine failed.",
            ("tier", "error"),
            failures,
        )
        text, names = (
            "Further attempts before the first byte.",
            [spec.name for spec in fleet.specs],
        )
        yield _counter(
            "retries", text, TIER, [([tier], self._retries[tier]) for tier in names]
        )
        text = "Automatic restarts of engines."
        yield _counter(
            "engine_restarts",
            text,
            TIER,
            [([tier], fleet.restarts[tier]) for tier in names],
        )
        # so that no alert waits for the others
        there = [tier for tier in snapshot.tiers if not tier.spec.absent]
        up = [
            replica.spec.name
            for replica in fleet.replicas
            if replica.state.status is ReplicaStatus.READY
        ]
        ready = [([tier.spec.name], up.count(tier.spec.name)) for tier in there]
        yield _gauge("tier_ready_replicas", "Replicas that get traffic.", TIER, ready)
        text = "Waiting requests that a tier could serve; one that several could serve counts for each."
        waiting = [
            ([tier.spec.name], self._pipeline.admission.waiting_for(tier.spec.name))
            for tier in there
        ]
        yield _gauge("tier_waiting_requests", text, TIER, waiting)
        text = f"Predicted time to the first token of {PROMPT_TOKENS} prompt tokens sent to a tier now."
        demand = Demand(
            PROMPT_TOKENS, OUTPUT_TOKENS, output_share=snapshot.output_share
        )
        times = [
            (tier.spec.name, best_candidate(tier, demand, snapshot.load).times)
            for tier in there
        ]
        predicted = [
            ([tier], expected.ttft_ms / 1000)
            for tier, expected in times
            if expected is not None
        ]
        yield _gauge("predicted_ttft_seconds", text, TIER, predicted)

    def _replicas(self) -> Iterable[Metric]:
        self._pipeline.fleet.refresh(time.monotonic())
        found = [
            ([r.spec.name, r.id], r, r.state) for r in self._pipeline.fleet.replicas
        ]
        told = [
            (values, state.gauges)
            for values, _, state in found
            if state.gauges is not None
        ]
        drafts = [(values, gauges) for values, gauges in told if gauges.drafted]
        states = [([*values, state.status.value], 1) for values, _, state in found]
        yield _gauge(
            "replica_state",
            "1 for a replica's present state.",
            (*REPLICA, "state"),
            states,
        )
        about = [
            ([*values, r.spec.precision, r.spec.checkpoint_id or ""], 1)
            for values, r, _ in found
        ]
        yield _gauge(
            "replica_info",
            "1; labels: what a replica serves.",
            (*REPLICA, "precision", "checkpoint"),
            about,
        )
        text = "Requests on a replica."
        yield _gauge(
            "requests_in_flight",
            text,
            REPLICA,
            [(values, state.in_flight) for values, _, state in found],
        )
        text = "Slots taken: one for each answer of a request."
        yield _gauge(
            "places_taken",
            text,
            REPLICA,
            [(values, state.slots) for values, _, state in found],
        )
        yield _gauge(
            "requests_limit",
            "Slots of a replica.",
            REPLICA,
            [(v, state.limit) for v, _, state in found],
        )
        text = "Times that a replica's breaker has opened."
        yield _counter(
            "breaker_opened",
            text,
            REPLICA,
            [(values, r.breaker.opened) for values, r, _ in found],
        )
        text = "1 while a replica's breaker keeps requests from it."
        is_open = [
            (values, state.breaker.state is not BreakerState.CLOSED)
            for values, _, state in found
        ]
        yield _gauge("breaker_open", text, REPLICA, is_open)
        text = "Share of a replica's KV cache in use."
        yield _gauge(
            "kv_cache_usage_ratio",
            text,
            REPLICA,
            [(values, g.kv_cache_usage) for values, g in told],
        )
        text = "Tokens that a replica's draft has proposed since the engine was started (speculative decoding)."
        yield _counter(
            "draft_tokens", text, REPLICA, [(values, g.drafted) for values, g in drafts]
        )
        text = "Draft tokens that the engine has accepted since it was started."
        yield _counter(
            "draft_tokens_accepted",
            text,
            REPLICA,
            [(values, g.accepted) for values, g in drafts],
        )
        text = "Prompt tokens that a replica's engine looked up in its prefix cache since it was started."
        yield _counter(
            "prefix_cache_queries",
            text,
            REPLICA,
            [(values, g.cache_queries) for values, g in told],
        )
        hits = [(values, g.cache_hits) for values, g in told]
        yield _counter(
            "prefix_cache_hits", "Prompt tokens found cached.", REPLICA, hits
        )


class RedisMetrics(Collector):
    """Whether Redis serves what routers share, and why not."""

    def __init__(
        self, states: Sequence[RedisState], restored: Callable[[], int]
    ) -> None:
        self._states, self._restored = states, restored

    def collect(self) -> Iterable[Metric]:
        serves = [([state.use], float(state.serves)) for state in self._states]
        yield _gauge(
            "redis_serves",
            "1 while Redis serves a use, 0 while this router goes alone.",
            ("use",),
            serves,
        )
        failures = [
            ([state.use, cause], state.failures[cause])
            for state in self._states
            for cause in CAUSES
        ]
        text = "Commands that Redis did not serve, by what they were for and why."
        yield _counter("redis_failures", text, ("use", "cause"), failures)
        text = "Days and months of keys and teams whose spent budget Redis had lost, and got back."
        yield CounterMetricFamily("qarr_redis_budgets_restored", text, self._restored())


class Metrics:
    def __init__(
        self,
        pipeline: Pipeline,
        evaluation: ShadowEvaluation,
        retries: Mapping[TierName, int],
        about: Mapping[str, str],
    ) -> None:
        self._registry, self._of_keys = CollectorRegistry(), CollectorRegistry()
        registry = self._registry
        requests = RequestMetrics(
            registry, [spec.name for spec in pipeline.fleet.specs]
        )
        self.answered = requests.answered
        self._tell = pipeline.registry.tell
        gen_ai = GenAiMetrics(about["model"])
        pipeline.registry.observers += [requests.observe, gen_ai.observe]
        registry.register(gen_ai)
        ProcessCollector(registry=registry)
        registry.register(Load(pipeline, retries, about))
        registry.register(Losses(evaluation, pipeline.policy))

    def count_keys(
        self, usage: UsageLog, charging: Charging, labels: Labels
    ) -> UsageMetrics:
        metrics = UsageMetrics(self._of_keys, labels, charging)
        usage.observers.append(metrics.observe)
        self._of_keys.register(metrics)
        return metrics

    def show_redis(
        self, states: Sequence[RedisState], restored: Callable[[], int]
    ) -> None:
        """Show what Redis does, from the start, if there is one."""
        self._registry.register(RedisMetrics(states, restored))

    def show_expiry(self, expires: Callable[[], float]) -> None:
        text = (
            "When the certificate that the router shows expires, in seconds since 1970."
        )
        Gauge(
            "qarr_tls_expires_timestamp_seconds", text, registry=self._registry
        ).set_function(expires)

    def collect(self) -> Iterable[Metric]:
        """Collect all metrics, with those of keys; on the event loop, which owns the state that is read."""
        self._tell()
        yield from self._registry.collect()
        yield from self._of_keys.collect()

    async def answer(self, request: Request) -> Response:
        """Answer a scrape; on the event loop, which owns the state that is read. Only operators see what keys use."""
        self._tell()
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        page = CollectorRegistry()
        for part in (
            (self._registry, self._of_keys)
            if context_of(request.scope).caller.sees_all
            else (self._registry,)
        ):
            page.register(part)
        return Response(encode(page), media_type=media_type)
