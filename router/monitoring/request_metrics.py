"""Counters and histograms that are made from the records of finished requests.

Exemplars (OpenMetrics) are trace ids.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise, permutations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.samples import Exemplar

from router.pipeline.registry import ENGINE_REFUSED, OVER_BUDGET, OVER_QUOTA
from router.policy.decision import SLA_IMPOSSIBLE, TIER_ABSENT, Refusal
from router.telemetry.record import Outcome, RequestRecord
from tiers.choice import CorrectedTimes
from tiers.spec import OVERFLOW, STANDARD_TIERS, TierName

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


class _QuickHistogram(Histogram):
    """A histogram of the library that observes in half the time: each request adds to half a dozen.

    The library tries one bound after the other, and checks the exemplar each time, which is a trace id here.
    """

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._sum.inc(amount)
        bucket = self._buckets[bisect_left(self._upper_bounds, amount)]
        bucket.inc(1)
        if exemplar is not None:
            bucket.set_exemplar(Exemplar(exemplar, amount, time.time()))


class _SeriesMaker:
    """Registers metrics, and returns for each a function from the values of its labels to their series.

    The functions remember their series: the library's own look-up takes a lock, and each request makes a dozen.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(
        self, name: str, text: str, labels: tuple[str, ...]
    ) -> Callable[..., Counter]:
        metric = Counter(f"qarr_{name}", text, labels, registry=self._registry)
        return cache(metric.labels)

    def histogram(
        self, name: str, text: str, *, bounds: tuple[float, ...], labels: Sequence[str]
    ) -> Callable[..., Histogram]:
        metric = _QuickHistogram(
            f"qarr_{name}", text, labels, buckets=bounds, registry=self._registry
        )
        return cache(metric.labels)


class RequestMetrics:
    """Counters and histograms of requests that have ended."""

    def __init__(
        self, registry: CollectorRegistry, tiers: Sequence[TierName] = STANDARD_TIERS
    ) -> None:
        # They are shown in the order in which they are made.
        make = _SeriesMaker(registry)
        self._http_requests = make.counter(
            "http_requests",
            "Requests by endpoint and status.",
            ("route", "method", "code"),
        )
        self._requests = make.counter(
            "requests", "Requests by the tier that served them.", (*KIND, "outcome")
        )
        self._decisions = make.counter(
            "decisions", "Decisions by the rule that decided.", (*KIND, "reason")
        )
        self._refusals = make.counter(
            "refusals", "Requests that were refused.", ("reason",)
        )
        self._prompt_tokens = make.counter("prompt_tokens", "Tokens of prompts.", KIND)
        self._output_tokens = make.counter("output_tokens", "Tokens of answers.", KIND)
        self._reasoning_tokens = make.counter(
            "reasoning_tokens",
            "Tokens of answers that are the model's reasoning, where they are known.",
            KIND,
        )
        self._cached_tokens = make.counter(
            "cached_prompt_tokens",
            "Prompt tokens in the engine's prefix cache, as predicted and as the engine reported them.",
            ("tier", "source"),
        )
        self._sla_requests = make.counter(
            "sla_requests",
            "Requests with bounds on times, by whether they were met.",
            (*KIND, "result"),
        )
        self._continuations = make.counter(
            "continuations",
            "Answers that another engine continued.",
            ("from_tier", "to_tier"),
        )
        self._overflow_requests = make.counter(
            "overflow_requests",
            "Requests without a slot that the overflow was considered for, by outcome.",
            ("outcome",),
        )
        self._cost = make.counter(
            "cost_engine_seconds", "Predicted engine time of requests, by price.", KIND
        )
        self._ttft = make.histogram(
            "time_to_first_token_seconds",
            "From a request to its first token.",
            bounds=TTFT_S,
            labels=KIND,
        )
        self._ttfa = make.histogram(
            "time_to_first_answer_token_seconds",
            "From a request to the first token of the answer itself: its text or a tool call, not reasoning.",
            bounds=TTFT_S,
            labels=KIND,
        )
        self._tpot = make.histogram(
            "time_per_output_token_seconds",
            "Mean time between tokens.",
            bounds=TPOT_S,
            labels=KIND,
        )
        self._duration = make.histogram(
            "request_duration_seconds",
            "From a request to its last byte.",
            bounds=DURATION_S,
            labels=KIND,
        )
        self._queue_wait = make.histogram(
            "queue_wait_seconds",
            "Waits for a slot.",
            bounds=QUEUE_S,
            labels=("priority",),
        )
        self._overhead = _QuickHistogram(
            "qarr_overhead_seconds",
            "From a request's arrival until it is sent to an engine, without the queue.",
            buckets=OVERHEAD_S,
            registry=registry,
        )
        self._prediction_error = make.histogram(
            "prediction_error_ratio",
            "|predicted - seen| / seen, of undisturbed answers.",
            bounds=ERROR_RATIO,
            labels=("tier", "kind"),
        )
        self._begin_at_zero(tiers)

    def _begin_at_zero(self, tiers: Sequence[TierName]) -> None:
        """Show rare events at 0 from the start: a rate cannot see the first event of a new series."""
        for reason in REFUSALS:
            self._refusals(reason)
        for outcome in OVERFLOW_OUTCOMES:
            self._overflow_requests(outcome)
        for from_tier, to_tier in permutations(tiers, 2):
            self._continuations(from_tier, to_tier)

    def answered(self, route: str, method: str, status: int) -> None:
        shown_method = method if method in METHODS else "other"
        self._http_requests(route, shown_method, status).inc()

    def observe(self, record: RequestRecord) -> None:
        decision = record.decision
        served = record.served
        outcome = record.outcome
        prompt_class = decision.query.features.prompt_class
        answering_tier = _answering_tier(record)
        tier = answering_tier or NO_TIER
        self._requests(prompt_class, tier, outcome).inc()
        self._decisions(prompt_class, decision.tier or NO_TIER, decision.basis).inc()
        if outcome is Outcome.REFUSED:
            self._refusals(str(record.error)).inc()
        if served.overflow is not None or served.overflow_failure is not None:
            self._overflow_requests(served.overflow_failure or outcome).inc()
        if record.sla_met is not None:
            self._sla_requests(prompt_class, tier, _sla_result(record)).inc()
        for from_tier, to_tier in pairwise((tier, *served.continued_on)):
            self._continuations(from_tier, to_tier).inc()
        if answering_tier is not None:
            self._count_tokens(record, prompt_class, answering_tier)
            self._measure_times(record, prompt_class, answering_tier)
            self._measure_prediction_errors(record, answering_tier)

    def _count_tokens(
        self, record: RequestRecord, prompt_class: str, tier: str
    ) -> None:
        """Count the tokens of an answer, and the engine time that was predicted for it."""
        tokens = record.tokens
        self._prompt_tokens(prompt_class, tier).inc(tokens.prompt)
        self._output_tokens(prompt_class, tier).inc(tokens.output)
        if tokens.reasoning:
            self._reasoning_tokens(prompt_class, tier).inc(tokens.reasoning)
        if tokens.predicted_cached is not None:
            self._cached_tokens(tier, "predicted").inc(tokens.predicted_cached)
        if tokens.cached is not None:
            self._cached_tokens(tier, "reported").inc(tokens.cached)
        engine_s = None
        chosen = record.decision.comparison.chosen
        if record.served.tier is not None and chosen is not None:
            engine_s = chosen.cost
        self._cost(prompt_class, tier).inc(engine_s or 0.0)

    def _measure_times(
        self, record: RequestRecord, prompt_class: str, tier: str
    ) -> None:
        """Measure the times of an answer. Only a complete one has a duration."""
        times = record.times
        exemplar = {"trace_id": record.trace_id} if record.trace_id else None
        self._queue_wait(record.priority).observe(times.queue_ms / 1000, exemplar)
        if times.overhead_ms is not None:
            self._overhead.observe(times.overhead_ms / 1000, exemplar)
        if times.ttft_ms is not None:
            self._ttft(prompt_class, tier).observe(times.ttft_ms / 1000, exemplar)
        if times.ttfa_ms is not None:
            self._ttfa(prompt_class, tier).observe(times.ttfa_ms / 1000, exemplar)
        if times.tpot_ms is not None:
            self._tpot(prompt_class, tier).observe(times.tpot_ms / 1000, exemplar)
        if record.outcome is Outcome.OK:
            duration_s = times.duration_ms / 1000
            self._duration(prompt_class, tier).observe(duration_s, exemplar)

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
            self._prediction_error(tier, "ttft").observe(error_ratio)
        if times.tpot_ms:
            error_ratio = abs(expected.tpot_ms - times.tpot_ms) / times.tpot_ms
            self._prediction_error(tier, "tpot").observe(error_ratio)


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
