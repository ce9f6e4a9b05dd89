"""Counters and histograms that are made from the records of finished requests.

Exemplars (OpenMetrics) are trace ids.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise, permutations
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.monitoring.distribution import Distribution, NotedTrace, Values
from router.monitoring.families import counter, histogram
from router.pipeline.registry import ENGINE_REFUSED, OVER_BUDGET, OVER_QUOTA
from router.policy.decision import SLA_IMPOSSIBLE, TIER_ABSENT, Refusal
from router.telemetry.record import Outcome, RequestRecord
from tiers.choice import CorrectedTimes
from tiers.spec import OVERFLOW, STANDARD_TIERS, TierName

# Numbers by the values of their labels, plain until a scrape: a counter of the library takes a lock and several calls.
Counts: TypeAlias = "defaultdict[Values, float]"
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
KIND = ("class", "tier")
NO_LABELS: Values = ()
METHODS = {"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"}
REFUSALS = (
    *(refusal.value for refusal in Refusal),
    OVER_QUOTA,
    OVER_BUDGET,
    ENGINE_REFUSED,
    TIER_ABSENT,
    SLA_IMPOSSIBLE,
)
OVERFLOW_OUTCOMES = (
    "ok",
    "error",
    "client_gone",
    "full",
    "paused",
    "unsupported",
    "failed",
    "cancelled",
)


class RequestMetrics(Collector):
    """Counters and histograms of requests that have ended."""

    def __init__(
        self, registry: CollectorRegistry, tiers: Sequence[TierName] = STANDARD_TIERS
    ) -> None:
        self._http_requests: Counts = defaultdict(float)
        self._requests: Counts = defaultdict(float)
        self._decisions: Counts = defaultdict(float)
        self._refusals: Counts = defaultdict(float)
        self._prompt_tokens: Counts = defaultdict(float)
        self._output_tokens: Counts = defaultdict(float)
        self._reasoning_tokens: Counts = defaultdict(float)
        self._cached_tokens: Counts = defaultdict(float)
        self._sla_requests: Counts = defaultdict(float)
        self._continuations: Counts = defaultdict(float)
        self._overflow_requests: Counts = defaultdict(float)
        self._cost: Counts = defaultdict(float)
        self._ttft = Distribution(TTFT_S)
        self._ttfa = Distribution(TTFT_S)
        self._tpot = Distribution(TPOT_S)
        self._duration = Distribution(DURATION_S)
        self._queue_wait = Distribution(QUEUE_S)
        self._overhead = Distribution(OVERHEAD_S)
        self._prediction_error = Distribution(ERROR_RATIO)
        self._begin_at_zero(tiers)
        registry.register(self)

    def _begin_at_zero(self, tiers: Sequence[TierName]) -> None:
        """Show rare events at 0 from the start: a rate cannot see the first event of a new series."""
        for reason in REFUSALS:
            self._refusals[(reason,)] = 0.0
        for outcome in OVERFLOW_OUTCOMES:
            self._overflow_requests[(outcome,)] = 0.0
        for pair in permutations(tiers, 2):
            self._continuations[pair] = 0.0
        self._overhead.begin(NO_LABELS)

    def collect(self) -> Iterable[Metric]:
        """Yield the families in the order in which they are shown."""
        yield from self._request_counters()
        yield from self._token_counters()
        yield from self._event_counters()
        yield from self._histograms()

    def _request_counters(self) -> Iterable[Metric]:
        yield counter(
            "http_requests",
            "Requests by endpoint and status.",
            labels=("route", "method", "code"),
            samples=self._http_requests.items(),
        )
        yield counter(
            "requests",
            "Requests by the tier that served them.",
            labels=(*KIND, "outcome"),
            samples=self._requests.items(),
        )
        yield counter(
            "decisions",
            "Decisions by the rule that decided.",
            labels=(*KIND, "reason"),
            samples=self._decisions.items(),
        )
        yield counter(
            "refusals",
            "Requests that were refused.",
            labels=("reason",),
            samples=self._refusals.items(),
        )

    def _token_counters(self) -> Iterable[Metric]:
        yield counter(
            "prompt_tokens",
            "Tokens of prompts.",
            labels=KIND,
            samples=self._prompt_tokens.items(),
        )
        yield counter(
            "output_tokens",
            "Tokens of answers.",
            labels=KIND,
            samples=self._output_tokens.items(),
        )
        yield counter(
            "reasoning_tokens",
            "Tokens of answers that are the model's reasoning, where they are known.",
            labels=KIND,
            samples=self._reasoning_tokens.items(),
        )
        yield counter(
            "cached_prompt_tokens",
            "Prompt tokens in the engine's prefix cache, as predicted and as the engine reported them.",
            labels=("tier", "source"),
            samples=self._cached_tokens.items(),
        )

    def _event_counters(self) -> Iterable[Metric]:
        yield counter(
            "sla_requests",
            "Requests with bounds on times, by whether they were met.",
            labels=(*KIND, "result"),
            samples=self._sla_requests.items(),
        )
        yield counter(
            "continuations",
            "Answers that another engine continued.",
            labels=("from_tier", "to_tier"),
            samples=self._continuations.items(),
        )
        yield counter(
            "overflow_requests",
            "Requests without a slot that the overflow was considered for, by outcome.",
            labels=("outcome",),
            samples=self._overflow_requests.items(),
        )
        yield counter(
            "cost_engine_seconds",
            "Predicted engine time of requests, by price.",
            labels=KIND,
            samples=self._cost.items(),
        )

    def _histograms(self) -> Iterable[Metric]:
        yield histogram(
            "time_to_first_token_seconds",
            "From a request to its first token.",
            labels=KIND,
            numbers=self._ttft,
        )
        yield histogram(
            "time_to_first_answer_token_seconds",
            "From a request to the first token of the answer itself: its text or a tool call, not reasoning.",
            labels=KIND,
            numbers=self._ttfa,
        )
        yield histogram(
            "time_per_output_token_seconds",
            "Mean time between tokens.",
            labels=KIND,
            numbers=self._tpot,
        )
        yield histogram(
            "request_duration_seconds",
            "From a request to its last byte.",
            labels=KIND,
            numbers=self._duration,
        )
        yield histogram(
            "queue_wait_seconds",
            "Waits for a slot.",
            labels=("priority",),
            numbers=self._queue_wait,
        )
        yield histogram(
            "overhead_seconds",
            "From a request's arrival until it is sent to an engine, without the queue.",
            labels=NO_LABELS,
            numbers=self._overhead,
        )
        yield histogram(
            "prediction_error_ratio",
            "|predicted - seen| / seen, of undisturbed answers.",
            labels=("tier", "kind"),
            numbers=self._prediction_error,
        )

    def answered(self, route: str, method: str, status: int) -> None:
        shown_method = method if method in METHODS else "other"
        self._http_requests[route, shown_method, str(status)] += 1

    def observe(self, record: RequestRecord) -> None:
        decision = record.decision
        served = record.served
        outcome = record.outcome
        prompt_class = decision.query.features.prompt_class
        answering_tier = _answering_tier(record)
        tier = answering_tier or NO_TIER
        decided_tier = decision.tier or NO_TIER
        self._requests[prompt_class, tier, outcome] += 1
        self._decisions[prompt_class, decided_tier, decision.basis] += 1
        if outcome is Outcome.REFUSED:
            self._refusals[(str(record.error),)] += 1
        if served.overflow is not None or served.overflow_failure is not None:
            self._overflow_requests[(served.overflow_failure or outcome,)] += 1
        if record.sla_met is not None:
            self._sla_requests[prompt_class, tier, _sla_result(record)] += 1
        for from_tier, to_tier in pairwise((tier, *served.continued_on)):
            self._continuations[from_tier, to_tier] += 1
        if answering_tier is not None:
            self._count_tokens(record, (prompt_class, tier))
            self._measure_times(record, (prompt_class, tier))
            self._measure_prediction_errors(record, tier)

    def _count_tokens(self, record: RequestRecord, kind: tuple[str, str]) -> None:
        """Count the tokens of an answer, and the engine time that was predicted for it."""
        tokens = record.tokens
        _, tier = kind
        self._prompt_tokens[kind] += tokens.prompt
        self._output_tokens[kind] += tokens.output
        if tokens.reasoning:
            self._reasoning_tokens[kind] += tokens.reasoning
        if tokens.predicted_cached is not None:
            self._cached_tokens[tier, "predicted"] += tokens.predicted_cached
        if tokens.cached is not None:
            self._cached_tokens[tier, "reported"] += tokens.cached
        engine_s = None
        chosen = record.decision.comparison.chosen
        if record.served.tier is not None and chosen is not None:
            engine_s = chosen.cost
        self._cost[kind] += engine_s or 0.0

    def _measure_times(self, record: RequestRecord, kind: tuple[str, str]) -> None:
        """Measure the times of an answer. Only a complete one has a duration."""
        times = record.times
        trace = NotedTrace(record.trace_id, time.time()) if record.trace_id else None
        self._queue_wait.add((record.priority,), times.queue_ms / 1000, trace)
        if times.overhead_ms is not None:
            self._overhead.add(NO_LABELS, times.overhead_ms / 1000, trace)
        if times.ttft_ms is not None:
            self._ttft.add(kind, times.ttft_ms / 1000, trace)
        if times.ttfa_ms is not None:
            self._ttfa.add(kind, times.ttfa_ms / 1000, trace)
        if times.tpot_ms is not None:
            self._tpot.add(kind, times.tpot_ms / 1000, trace)
        if record.outcome is Outcome.OK:
            self._duration.add(kind, times.duration_ms / 1000, trace)

    def _measure_prediction_errors(self, record: RequestRecord, tier: str) -> None:
        """Compare the predicted times of an answer with those seen, unless something disturbed it."""
        expected = _undisturbed_expectation(record)
        if expected is None:
            return
        times = record.times
        # The prediction is of the engine alone.
        first_ms = (times.ttft_ms or 0.0) - times.queue_ms - (times.overhead_ms or 0.0)
        if first_ms > 0:
            error_ratio = abs(expected.ttft_ms - first_ms) / first_ms
            self._prediction_error.add((tier, "ttft"), error_ratio)
        if times.tpot_ms:
            error_ratio = abs(expected.tpot_ms - times.tpot_ms) / times.tpot_ms
            self._prediction_error.add((tier, "tpot"), error_ratio)


def _answering_tier(record: RequestRecord) -> str | None:
    """Return the tier that began the answer, or the overflow as one; None: there is no answer."""
    if record.served.tier:
        return record.served.tier
    return None if record.served.overflow is None else OVERFLOW


def _undisturbed_expectation(record: RequestRecord) -> CorrectedTimes | None:
    """Return what the chosen tier was expected to do; None: unknown, or the answer was broken or moved elsewhere."""
    served = record.served
    chosen = record.decision.comparison.chosen
    if record.outcome is not Outcome.OK or served.tier is None or chosen is None:
        return None
    is_as_decided = served.tier is record.decision.tier
    if not is_as_decided or served.attempts_failed or served.continued_on:
        return None
    return chosen.times


def _sla_result(record: RequestRecord) -> str:
    """Return whether a request's bounds were met; those that no tier meets at any load are not held against the router."""
    if record.sla_met:
        return "met"
    return "impossible" if record.decision.are_times_impossible else "missed"
