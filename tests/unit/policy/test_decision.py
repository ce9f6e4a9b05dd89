"""The values of a decision: losses at a confidence, tokens of a request, and reports by tier."""

from __future__ import annotations

import pickle
from typing import get_args

import pytest
from msgspec.structs import replace

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.decide import LIKELIEST_TO_PASS, decide, fallbacks
from router.policy.decision import (
    Obstacle,
    PolicyParameters,
    Refusal,
    RequestRefusedError,
    Sla,
)
from router.policy.explain import CHOSEN, verdict
from router.policy.losses import NO_LOSS, ExpectedLoss
from tests.unit.policy.fleets import (
    MEASURED,
    PROFILED,
    TABLE,
    features,
    fleet,
    query,
    said,
)
from tiers.spec import STANDARD_TIERS, ReplicaStatus

FAST, BALANCED, PRECISE = STANDARD_TIERS
LOSS = ExpectedLoss(0.2, 0.1, 0.3)


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [(0.5, 0.2), (0.95, 0.3), (0.05, 0.1), (0.9, 0.2 + 0.1 * 1.2816 / 1.6449)],
)
def test_a_loss_rises_with_the_confidence_asked_for(
    confidence: float, expected: float
) -> None:
    """From the mean at even odds to the interval's end; no more than all answers can get worse."""
    for loss, asked, worst in (
        (LOSS, confidence, expected),
        (ExpectedLoss(0.6, 0.1, 0.99), 0.9999, 1.0),
    ):
        table = PolicyParameters(
            {FAST: {kind: dict.fromkeys(Complexity, loss) for kind in PromptClass}}
        )
        decision = decide(query(sla=Sla(confidence=asked)), fleet(), table)
        assert decision.estimate(FAST).quality.worst_loss == pytest.approx(
            worst, abs=1e-4
        )


def test_a_loss_is_that_of_the_kind_and_of_others_where_the_class_is_not_sure() -> None:
    """By the confidence; a complexity that was not judged is moderate."""
    kinds = {kind: dict.fromkeys(Complexity, LOSS) for kind in PromptClass}
    kinds[PromptClass.CODE] = {
        each: ExpectedLoss(n / 10, 0, high=1, answers=5)
        for n, each in enumerate(Complexity)
    }
    table = PolicyParameters({FAST: kinds})
    asked = [
        replace(features(PromptClass.CODE, 0.9), complexity=each)
        for each in (None, *Complexity)
    ]
    assert [table.loss(FAST, one).mean for one in asked] == [0.1, 0.0, 0.1, 0.2]
    assert table.loss(FAST, features(PromptClass.CODE, 0.6)).mean == 0.1
    assert table.loss(FAST, features(PromptClass.CODE, 0.5)).mean == pytest.approx(
        0.5 * 0.1 + 0.5 * 0.2
    )


def test_small_talk_does_not_lower_the_budget() -> None:
    """A budget like a tier's is the mean of what can be lost there, and small talk has nothing to lose."""
    lossy = {kind: dict.fromkeys(Complexity, LOSS) for kind in PromptClass}
    table = PolicyParameters(
        {BALANCED: lossy | {PromptClass.SMALL_TALK: dict.fromkeys(Complexity, NO_LOSS)}}
    )
    assert table.budget(FAST) == pytest.approx(LOSS.mean)


def test_the_reference_loses_nothing_and_a_tier_that_nothing_is_known_of_everything() -> (
    None
):
    assert PolicyParameters().loss(PRECISE, features(confidence=0.1)) == NO_LOSS
    assert PolicyParameters().loss(BALANCED, features(confidence=0.1)).mean == 1


def test_tokens_of_several_prompts_and_answers() -> None:
    """All prompts are read, and every answer may reach its bound; one prompt counts once."""
    one = query(max_tokens=10)
    assert one.tokens_to_read == 20
    assert one.tokens_in_all == 30
    several = query(max_tokens=10, all_prompt_tokens=50, sequences=6)
    assert several.tokens_to_read == 50
    assert several.tokens_in_all == 110


def test_reports_are_found_by_tier() -> None:
    """A tier that the fleet does not have is an error."""
    decision = decide(query(), fleet(), TABLE)
    assert decision.chosen is decision.estimate(FAST)
    assert verdict(decision.comparison, decision.estimate(FAST)) == CHOSEN
    with pytest.raises(KeyError):
        decide(
            query(), fleet().__class__(fleet().tiers[1:], fleet().template), TABLE
        ).estimate(FAST)


def test_a_decision_is_plain_data() -> None:
    """Nothing can be set; changed and pickled copies have its reason, reports and rates, and it holds no fleet."""
    decision = decide(query(hint=BALANCED), fleet(speeds=MEASURED), PROFILED)
    with pytest.raises(AttributeError):
        decision.reason = ""  # type: ignore[misc]
    moved, thawed = (
        replace(decision, tier=PRECISE),
        pickle.loads(pickle.dumps(decision)),  # noqa: S301
    )
    assert thawed == decision != moved
    assert moved.tier == PRECISE
    assert moved.reason == decision.reason
    assert fallbacks(moved) == (PRECISE, FAST)
    assert moved.chosen is decision.estimate(PRECISE)
    for copied in (moved, thawed):
        assert said(copied) == said(decision)
        assert [copied.rate(tier) for tier in STANDARD_TIERS] == [
            decision.rate(tier) for tier in STANDARD_TIERS
        ]
        assert copied.rate(FAST) is not None
        assert fallbacks(copied) == fallbacks(decision)
    assert b"Snapshot" not in pickle.dumps(decision)


def test_a_refusal_has_reports_and_no_chosen_one() -> None:
    decision = decide(
        query(), fleet(dict.fromkeys(STANDARD_TIERS, ReplicaStatus.FAILED)), TABLE
    )
    assert decision.chosen is None
    assert len(said(decision)) == 3
    assert (
        str(RequestRefusedError(decision))
        == "fast is failed; balanced is failed; precise is failed"
    )


def test_every_refusal_but_that_of_bounds_is_an_obstacle() -> None:
    """Each obstacle has its place in the order in which they pass."""
    obstacles = set(get_args(Obstacle))
    assert obstacles == set(Refusal) - {Refusal.SLA_UNMET}
    assert obstacles == set(LIKELIEST_TO_PASS)
    assert len(LIKELIEST_TO_PASS) == len(obstacles)
