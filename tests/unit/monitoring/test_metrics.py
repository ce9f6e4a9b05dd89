"""What /metrics counts of each record, and what it reads of fleet and policy at each scrape."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from classifier import PromptClass
from classifier.kinds import Complexity
from router.monitoring.request_metrics import RequestMetrics
from router.pipeline.registry import ENGINE_REFUSED, OVER_BUDGET, OVER_QUOTA
from router.policy.decision import SLA_IMPOSSIBLE, TIER_ABSENT, Refusal
from router.policy.published import published_loss
from router.telemetry.record import Outcome, RequestRecord
from tests.unit.monitoring.scrapes import families_of, samples_of, scrape
from tests.unit.records import decision, record
from tests.unit.router_stack import router_stack
from tiers.spec import STANDARD_TIERS, ReplicaStatus

FAST, BALANCED, PRECISE = STANDARD_TIERS
CHAT_FAST = {"class": "chat", "tier": "fast"}
OPENMETRICS = "application/openmetrics-text"


# One of each way to end, each class and tier, times at, below and above the bounds of buckets, and none.
RECORDS = [
    record(trace_id="a1", sla_met=True),
    record(
        trace_id="a2",
        sla_met=False,
        ttft_ms=100.0,
        tpot_ms=2.5,
        duration_ms=50.0,
        queue_ms=0.0,
        overhead_ms=0.5,
    ),
    record(
        trace_id="a3",
        ttft_ms=80_000.5,
        tpot_ms=2000.5,
        duration_ms=640_001.0,
        queue_ms=1e6,
        overhead_ms=501.0,
    ),
    record(
        trace_id="b1",
        decision=decision(BALANCED, PromptClass.CODE),
        tier=BALANCED,
        priority="batch",
        ttfa_ms=1500.5,
        reasoning=5,
    ),
    record(
        trace_id="b2",
        decision=decision(PRECISE, PromptClass.MATH),
        tier=PRECISE,
        output=1,
        tpot_ms=None,
    ),
    record(trace_id="c1", tier=PRECISE),
    record(trace_id="c2", tier=BALANCED, priority="interactive"),
    record(trace_id="c3", continued_on=(BALANCED, PRECISE), attempts_failed=1),
    record(trace_id="d1", outcome=Outcome.ERROR, error="EngineBroke", overhead_ms=None),
    record(
        trace_id="d2",
        outcome=Outcome.CLIENT_GONE,
        tier=None,
        ttft_ms=None,
        tpot_ms=None,
    ),
    record(
        trace_id="d3",
        decision=decision(None),
        outcome=Outcome.REFUSED,
        error="too_long",
        tier=None,
        sla_met=False,
    ),
    record(trace_id="d4", outcome=Outcome.REFUSED, error=OVER_QUOTA, tier=None),
    record(trace_id="e1", prompt=10**15, output=0, duration_ms=400.000001),
]
ANSWERS = [("/generate", "POST", 200)] * 2 + [
    ('/a"b\\c', "GET", 404),
    ("unknown", "REPORT", 499),
]


class Counted:
    """The metrics of some records."""

    def __init__(self, *records: RequestRecord) -> None:
        self._registry = CollectorRegistry()
        self._metrics = RequestMetrics(self._registry)
        for observed in records:
            self._metrics.observe(observed)

    def answered(self, *answers: tuple[str, str, int]) -> None:
        for answer in answers:
            self._metrics.answered(*answer)

    def families(self, accept: str) -> list[Metric]:
        """Return the families of the page that is encoded for what a client accepts."""
        encode, _ = choose_encoder(accept)
        return families_of(encode(self._registry).decode())

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"qarr_{name}", labels)

    def total(self, name: str) -> float:
        total = 0.0
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name == f"qarr_{name}":
                    total += sample.value
        return total


@pytest.mark.parametrize(
    ("name", "accept"), [("metrics.txt", ""), ("metrics.openmetrics", OPENMETRICS)]
)
def test_the_page_is_as_it_was(
    name: str, accept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, labels, types, help, buckets, values and exemplars, in their order: dashboards and alerts read them."""
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.25)
    counted = Counted(*RECORDS)
    counted.answered(*ANSWERS)
    expected = families_of(Path(__file__).with_name(name).read_text("utf-8"))
    families = counted.families(accept)
    assert len(families) > 10
    assert [family.name for family in families] == [family.name for family in expected]
    assert families == expected


def test_the_overflow_is_counted_by_what_became_of_requests() -> None:
    """Answers that it began by their end, others by why there is none; its answers' tokens stand under its own tier."""
    without_tier = {"decision": decision(None), "tier": None}
    began = [
        record(**without_tier, overflow="outside", outcome=outcome)
        for outcome in (Outcome.OK, Outcome.OK, Outcome.ERROR)
    ]
    refused = record(
        **without_tier,
        outcome=Outcome.REFUSED,
        error="at_capacity",
        overflow_failure="full",
        ttft_ms=None,
        tpot_ms=None,
    )
    counted = Counted(*began, refused, record())
    counts = {
        outcome: counted.value("overflow_requests_total", outcome=outcome)
        for outcome in ("ok", "error", "full", "failed")
    }
    assert counts == {"ok": 2, "error": 1, "full": 1, "failed": 0}
    labels = {"class": "chat", "tier": "overflow"}
    assert counted.value("output_tokens_total", **labels) == 3 * record().tokens.output
    assert counted.value("requests_total", **labels, outcome="ok") == 2
    assert counted.value("cost_engine_seconds_total", **labels) == 0
    assert counted.value("refusals_total", reason="at_capacity") == 1


REASONS = [
    *(refusal.value for refusal in Refusal),
    OVER_QUOTA,
    OVER_BUDGET,
    ENGINE_REFUSED,
    TIER_ABSENT,
    SLA_IMPOSSIBLE,
]


@pytest.mark.parametrize("reason", REASONS)
def test_refusals_are_there_at_0_before_the_first(reason: str) -> None:
    """The rate of a new series misses its first event."""
    assert Counted().value("refusals_total", reason=reason) == 0
    refused = record(
        decision=decision(None),
        outcome=Outcome.REFUSED,
        error=reason,
        tier=None,
        ttft_ms=None,
    )
    counted = Counted(refused)
    assert counted.value("refusals_total", reason=reason) == 1
    labels = {"class": "chat", "tier": "none"}
    assert counted.value("requests_total", **labels, outcome="refused") == 1
    assert counted.value("decisions_total", **labels, reason="refused") == 1
    assert counted.total("prompt_tokens_total") == 0
    assert counted.total("queue_wait_seconds_count") == 0


def test_only_whole_answers_have_a_duration() -> None:
    """A broken one has tokens and a first token, but neither a duration nor predictions to compare."""
    for outcome in (Outcome.ERROR, Outcome.CLIENT_GONE):
        counted = Counted(record(outcome=outcome, error="EngineBroke"))
        assert counted.value("time_to_first_token_seconds_count", **CHAT_FAST) == 1
        assert counted.total("request_duration_seconds_count") == 0
        assert counted.total("prediction_error_ratio_count") == 0


def test_predictions_are_compared_with_the_engines_own_time() -> None:
    """The prediction knows neither queue nor overhead: 100 ms against 235 - 30 - 5, and 20 ms against 25."""
    counted = Counted(record())
    assert counted.value(
        "prediction_error_ratio_sum", tier="fast", kind="ttft"
    ) == pytest.approx(0.5)
    assert counted.value(
        "prediction_error_ratio_sum", tier="fast", kind="tpot"
    ) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "fields",
    [{"attempts_failed": 1}, {"continued_on": (BALANCED,)}, {"tier": BALANCED}],
)
def test_disturbed_answers_are_not_compared(fields: dict[str, Any]) -> None:
    assert Counted(record(**fields)).total("prediction_error_ratio_count") == 0


@pytest.mark.parametrize(
    "fields", [{"ttft_ms": None, "tpot_ms": None}, {"ttft_ms": 35.0, "tpot_ms": 0.0}]
)
def test_what_took_no_time_is_not_compared(fields: dict[str, Any]) -> None:
    """A ratio to nothing says nothing: no token, one token, or a first token within the router's own time."""
    assert Counted(record(**fields)).total("prediction_error_ratio_count") == 0


@pytest.mark.anyio
async def test_a_scrape_reads_the_fleet_as_it_is(tmp_path: Path) -> None:
    """States, slots, breakers and failures are read at each scrape; a replica's series go with it."""
    async with router_stack(
        tmp_path, {"policy": {"max_loss": {"code": 0.05}}}
    ) as stack:
        first = stack.fleet.replicas[0]
        before = await scrape(stack)
        assert before["qarr_replica_state", first.id, "ready", "fast"] == 1
        assert before["qarr_tier_ready_replicas", "fast"] == 1
        assert before["qarr_places_taken", first.id, "fast"] == 0
        assert before["qarr_open_requests",] == 0
        assert before["qarr_loss_bound_ratio", "code"] == 0.05
        lease = stack.fleet.lease(FAST, prompt_tokens=10, max_tokens=10, sequences=3)
        assert lease is not None
        first.mark(ReplicaStatus.DRAINING)
        stack.fleet.failures[FAST, "EngineBroke"] += 2
        stack.fleet.restarts[FAST] += 1
        during = await scrape(stack)
        assert during["qarr_places_taken", first.id, "fast"] == 3
        assert during["qarr_requests_in_flight", first.id, "fast"] == 1
        assert during["qarr_replica_state", first.id, "draining", "fast"] == 1
        assert during["qarr_tier_ready_replicas", "fast"] == 0
        assert during["qarr_upstream_failures_total", "EngineBroke", "fast"] == 2
        assert during["qarr_engine_restarts_total", "fast"] == 1
        lease.release()
        stack.fleet.remove(first)
        assert not any(first.id in names for names in await scrape(stack))


@pytest.mark.anyio
async def test_what_callers_have_to_end_is_no_error_anywhere(tmp_path: Path) -> None:
    """A value that the engine refuses, bounds that no engine meets, a tier that is not there: refused, and none's fault."""
    async with router_stack(
        tmp_path, {"tiers": {"balanced": {"replicas": 0}}}
    ) as stack:
        engine = stack.engines[FAST]
        engine.status = 400
        refused = await stack.generate(temperature=2, sla={"ttft_ms": 60_000})
        assert refused.status_code == 422
        assert refused.json()["type"] == "urn:qarr:problem:engine-refused"
        engine.status = 200
        absent = await stack.generate(tier="balanced", tier_policy="require")
        assert absent.status_code == 422
        assert absent.json()["type"] == "urn:qarr:problem:not-ready"
        page = samples_by_ending(await stack.client.get(f"{stack.url}/metrics"))
        assert page["qarr_refusals_total", "engine_refused"] == 1
        assert page["qarr_refusals_total", "tier_absent"] == 1
        assert page["qarr_refusals_total", "not_ready"] == 0
        assert page["qarr_requests_total", "refused"] == 2
        assert ("qarr_requests_total", "error") not in page
        assert ("qarr_sla_requests_total", "missed") not in page
        upstream_failures = [
            value
            for (name, _), value in page.items()
            if name == "qarr_upstream_failures_total"
        ]
        assert not any(upstream_failures)
        shown = (await stack.client.get(f"{stack.url}/requests")).json()["requests"]
        assert [request["outcome"] for request in shown] == ["refused", "refused"]
        assert stack.pipeline.registry.totals["error"] == 0
        assert [replica.breaker.opened for replica in stack.fleet.replicas] == [0, 0]


def samples_by_ending(answer: httpx.Response) -> dict[tuple[str, str], float]:
    """Return the samples of a scrape by name and the one label that tells how requests ended, added up."""
    totals: Counter[tuple[str, str]] = Counter()
    for sample in samples_of(answer.text):
        ending_labels = sample.labels.keys() & {"outcome", "reason", "result"}
        ending = ""
        if ending_labels:
            (label,) = ending_labels
            ending = sample.labels[label]
        totals[sample.name, ending] += sample.value
    return totals


@pytest.mark.anyio
async def test_losses_are_counted_in_answers(tmp_path: Path) -> None:
    """Expected by kind and tier with what they rest on, and of answers whose tier the policy chose."""
    async with router_stack(tmp_path) as stack:
        counters = [
            f"qarr_loss_{what}_answers_total"
            for what in ("counted", "expected", "allowed")
        ]
        before = await scrape(stack)
        assert [before[name,] for name in counters] == [0, 0, 0]
        complex_math = (PromptClass.MATH, Complexity.COMPLEX)
        assert before[
            "qarr_expected_loss_ratio", "math", "complex", "fast"
        ] == published_loss("awq-int4", complex_math, None)
        assert before["qarr_expected_loss_answers", "math", "complex", "fast"] == 0
        await stack.generate(prompt="What is the capital of France?")
        await stack.generate(prompt="What is the capital of France?", tier="fast")
        after = await scrape(stack)
        trivial_chat = (PromptClass.CHAT, Complexity.TRIVIAL)
        expected_loss = published_loss("awq-int4", trivial_chat, None)
        assert [after[name,] for name in counters] == pytest.approx(
            [1, expected_loss, 0.005]
        )
