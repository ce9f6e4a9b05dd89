"""Whether tiers lose more than the loss budget allows: one sentence each, and what follows with ``quality.gate = hold``."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from classifier.kinds import Complexity
from router.policy.decide import decide
from router.policy.decision import PolicyParameters
from router.policy.losses import ExpectedLoss
from router.policy.published import CLASSES
from router.policy.table import PolicyStore
from router.policy.verdicts import judge_tiers
from tests.unit.policy.fleets import TABLE, fleet, query
from tests.unit.policy.made_profiles import counted, quality
from tests.unit.policy.test_table import MODEL, made_fleet, settings, write
from tiers.lifecycle.gate import GateMode
from tiers.spec import STANDARD_TIERS
from tiers.verification.findings import Verdict

if TYPE_CHECKING:
    from pathlib import Path

FAST, BALANCED, PRECISE = STANDARD_TIERS


def losing(low: float, high: float, **classes: ExpectedLoss) -> PolicyParameters:
    """Return losses of tier fast, measured on 40 answers of each class, against a budget of 2 of 100."""
    usual = ExpectedLoss(
        (low + high) / 2, low, high=high, answers=40, measured_high=high
    )
    losses = {
        prompt_class: dict.fromkeys(Complexity, classes.get(prompt_class.value, usual))
        for prompt_class in CLASSES
    }
    return PolicyParameters({FAST: losses}, loss_budget=0.02)


def test_a_tier_within_the_budget_is_the_same() -> None:
    verdict = judge_tiers(losing(0.0, 0.015), {FAST})[FAST]
    assert verdict.verdict is Verdict.SAME
    assert (
        verdict.sentence
        == "fast loses no more than the loss budget allows (2.0 of 100 answers)."
    )


def test_a_tier_that_surely_loses_more_is_worse_by_kind() -> None:
    """The sentence names the kinds, what they lose and what is allowed; one kind is enough."""
    bad = ExpectedLoss(0.1, 0.06, high=0.14, answers=40, measured_high=0.14)
    verdict = judge_tiers(losing(0.0, 0.015, code=bad), {FAST})[FAST]
    assert verdict.verdict is Verdict.WORSE
    assert "(10 of 100 on code; 2.0 of 100 are allowed)" in verdict.sentence
    assert verdict.sentence.count(". ") == 0


def test_an_interval_across_the_budget_tells_nothing() -> None:
    """It says so kindly: small models get few tasks right."""
    verdict = judge_tiers(losing(0.0, 0.08), {FAST})[FAST]
    assert verdict.verdict is Verdict.CANNOT_TELL
    assert "which is usual for small models" in verdict.sentence


def test_without_a_judged_answer_nothing_can_be_told() -> None:
    """Published losses are no measurement, however small they are."""
    table = PolicyParameters(
        {
            FAST: {
                prompt_class: dict.fromkeys(Complexity, ExpectedLoss(0, 0, high=0))
                for prompt_class in CLASSES
            }
        },
        loss_budget=0.02,
    )
    assert judge_tiers(table, {FAST})[FAST].verdict is Verdict.CANNOT_TELL
    assert judge_tiers(table, set())[FAST].verdict is None


def store(folder: Path, gate: GateMode, **values: Any) -> PolicyStore:
    return PolicyStore(
        settings(folder, loss_budget=0.02, **values), made_fleet(), MODEL, gate=gate
    )


KINDS = [(kind, complexity) for kind in CLASSES for complexity in Complexity]


def measured(*, worse: int) -> Any:
    """Return a finished profile in which tier fast gets some of 400 answers of each kind worse, and balanced none."""
    counts = [counted(FAST, worse, 0, *kind, of=400) for kind in KINDS]
    return quality(*counts, *(counted(BALANCED, 0, 0, *kind, of=400) for kind in KINDS))


def held(policy: PolicyStore) -> set[str]:
    return {spec.name for spec in policy._fleet.specs if spec.held}


def test_hold_waits_for_the_measurement_and_for_losses_within_the_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, both tiers are held; then the one that loses too much, which the log says once."""
    caplog.set_level(logging.INFO)
    policy = store(tmp_path, GateMode.HOLD)
    assert held(policy) == {FAST, BALANCED}
    assert policy.awaited == {FAST, BALANCED}
    (told,) = [r.message for r in caplog.records if r.message.startswith("fast ")]
    assert "it gets only requests that require it by name (quality.gate = hold)" in told
    assert "'qarr profile quality' measures it" in told
    caplog.clear()
    write(tmp_path, measured(worse=80))
    policy.reload()
    assert held(policy) == {FAST}
    assert policy.held == {FAST}
    assert policy.awaited == frozenset()
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    (worse,) = [r.message for r in warnings if "fast loses more answers" in r.message]
    assert "so it gets only requests that require it by name" in worse
    assert "other tiers get such prompts" not in worse
    write(tmp_path, measured(worse=0), at=2.0)
    policy.reload()
    assert held(policy) == set()


def test_hold_does_not_wait_for_a_verdict_that_cannot_be_had(tmp_path: Path) -> None:
    """The small default model gets few tasks right, and serves all the same."""
    policy = store(tmp_path, GateMode.HOLD)
    write(tmp_path, quality(counted(FAST, 1, of=5), counted(BALANCED, 0, of=5)))
    policy.reload()
    assert policy.verdicts[FAST].verdict is Verdict.CANNOT_TELL
    assert held(policy) == set()


@pytest.mark.parametrize("gate", [GateMode.WARN, GateMode.OFF])
def test_otherwise_no_tier_is_held(tmp_path: Path, gate: GateMode) -> None:
    """One that loses too much is named, and gets no such prompts by the policy."""
    policy = store(tmp_path, gate)
    assert held(policy) == set()
    write(tmp_path, measured(worse=80))
    policy.reload()
    assert held(policy) == set()
    assert policy.worse.keys() == {FAST}


def test_a_held_tier_serves_only_requests_that_require_it() -> None:
    """So that it can be measured and verified; others go to other tiers, also after a failure there."""
    snapshot = fleet()
    tiers = [
        structs.replace(tier, spec=replace(tier.spec, held=tier.spec.name is FAST))
        for tier in snapshot.tiers
    ]
    held_fleet = structs.replace(snapshot, tiers=tuple(tiers))
    assert decide(query(), snapshot, TABLE).tier is FAST
    assert decide(query(), held_fleet, TABLE).tier is BALANCED
    hinted = decide(query(hint=FAST), held_fleet, TABLE)
    assert hinted.tier is not FAST
    assert decide(query(hint=FAST, require=True), held_fleet, TABLE).tier is FAST
