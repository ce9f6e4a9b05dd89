"""The values of a decision: losses at a confidence, tokens of a request, and reports by tier."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError, replace
from statistics import NormalDist

import pytest

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.decide import decide
from router.policy.decision import CHOSEN, PRIORITIES, PolicyParameters, Refused
from router.policy.losses import NO_LOSS, ExpectedLoss
from tests.unit.policy.test_decide import TABLE, features, fleet, query
from tiers.spec import STANDARD_TIERS, ReplicaState

FAST, BALANCED, PRECISE = STANDARD_TIERS
LOSS = ExpectedLoss(0.2, 0.1, 0.3)


@pytest.mark.parametrize(
    ("confidence", "expected"), [(0.5, 0.2), (0.975, 0.3), (0.025, 0.1), (0.9, 0.2 + 0.1 * 1.2816 / 1.96)]
)
def test_a_loss_rises_with_the_confidence_asked_for(confidence: float, expected: float) -> None:
    """From the mean at even odds to the interval's end; no more than all answers can get worse."""
    z = NormalDist().inv_cdf(confidence)
    assert LOSS.at(z) == pytest.approx(expected, abs=1e-4)


def test_no_more_than_every_answer_gets_worse() -> None:
    assert ExpectedLoss(0.6, 0.1, 0.99).at(NormalDist().inv_cdf(0.9999)) == 1.0


def test_a_loss_is_that_of_the_kind_and_of_others_where_the_class_is_not_sure() -> None:
    """By the confidence; a complexity that was not judged is moderate."""
    kinds = {kind: dict.fromkeys(Complexity, LOSS) for kind in PromptClass}
    kinds[PromptClass.CODE] = {each: ExpectedLoss(n / 10, 0, 1, 5) for n, each in enumerate(Complexity)}
    table = PolicyParameters({FAST: kinds})
    asked = [replace(features(PromptClass.CODE, 0.9), complexity=each) for each in (None, *Complexity)]
    assert [table.loss(FAST, one).mean for one in asked] == [0.1, 0.0, 0.1, 0.2]
    assert table.loss(FAST, features(PromptClass.CODE, 0.6)).mean == 0.1
    assert table.loss(FAST, features(PromptClass.CODE, 0.5)).mean == pytest.approx(0.5 * 0.1 + 0.5 * 0.2)


def test_the_reference_loses_nothing_and_a_tier_that_nothing_is_known_of_everything() -> None:
    assert PolicyParameters().loss(PRECISE, features(confidence=0.1)) == NO_LOSS
    assert PolicyParameters().loss(BALANCED, features(confidence=0.1)).mean == 1


def test_tokens_of_several_prompts_and_answers() -> None:
    """All prompts are read, and every answer may reach its bound; one prompt counts once."""
    one = query(max_tokens=10)
    assert (one.tokens_to_read, one.tokens_in_all) == (20, 30)
    several = query(max_tokens=10, all_prompt_tokens=50, sequences=6)
    assert (several.tokens_to_read, several.tokens_in_all) == (50, 110)


def test_reports_are_found_by_tier() -> None:
    """The chosen one by itself; a tier that the fleet does not have is an error."""
    decision = decide(query(), fleet(), TABLE)
    assert decision.chosen is decision.verdict(FAST)
    assert decision.verdict(FAST).verdict == CHOSEN
    with pytest.raises(KeyError):
        decide(query(), fleet().__class__(fleet().tiers[1:], fleet().template), TABLE).verdict(FAST)


def test_a_decision_is_a_value_although_it_explains_itself_when_asked() -> None:
    """Nothing can be set; copies, changed or not, have all of it; a name that it does not have is an error."""
    decision, again = (decide(query(hint=BALANCED), fleet(), TABLE) for _ in range(2))
    with pytest.raises(FrozenInstanceError):
        decision.reason = ""  # type: ignore[misc]
    assert not hasattr(decision, "excuse")
    moved = replace(decision, tier=PRECISE)
    assert (moved.tier, moved.reason, moved.fallbacks) == (PRECISE, "hint balanced", (PRECISE, FAST))
    assert moved.chosen is decision.verdicts[2]
    assert copy.copy(again) == decision != moved
    assert decision.verdicts is decision.verdicts, "made once"


def test_a_refusal_has_reports_and_no_chosen_one() -> None:
    decision = decide(query(), fleet(dict.fromkeys(STANDARD_TIERS, ReplicaState.FAILED)), TABLE)
    assert decision.chosen is None
    assert len(decision.verdicts) == 3
    assert str(Refused(decision)) == "fast is failed; balanced is failed; precise is failed"


def test_higher_priorities_are_scheduled_first() -> None:
    """By vLLM's rule, in which lower numbers go first, and 0 is what a request without one has."""
    assert sorted(PRIORITIES, key=lambda name: PRIORITIES[name]) == ["interactive", "standard", "batch"]
    assert PRIORITIES["standard"] == 0
