"""The values of a decision: losses at a confidence, tokens of a request, and reports by tier."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError, replace
from statistics import NormalDist

import pytest

from classifier import PromptClass
from router.policy.decide import decide
from router.policy.decision import CHOSEN, NO_LOSS, PRIORITIES, ExpectedLoss, PolicyParameters, Refused
from router.settings import CLASS_FLOOR
from tests.unit.policy.test_decide import TABLE, features, fleet, query
from tiers.spec import STANDARD_TIERS, ReplicaState, TierName

FAST, BALANCED, PRECISE = STANDARD_TIERS
LOSS = ExpectedLoss(0.2, 0.1, 0.3)
WORSE = ExpectedLoss(0.15, 0.1, 0.4)


@pytest.mark.parametrize(
    ("confidence", "expected"), [(0.5, 0.2), (0.975, 0.3), (0.025, 0.1), (0.9, 0.2 + 0.1 * 1.2816 / 1.96)]
)
def test_a_loss_rises_with_the_confidence_asked_for(confidence: float, expected: float) -> None:
    """From the mean at even odds to the interval's end; no more than all tokens can differ."""
    z = NormalDist().inv_cdf(confidence)
    assert LOSS.at(z) == pytest.approx(expected, abs=1e-4)


def test_no_more_than_every_token_differs() -> None:
    """However wide the interval is."""
    assert ExpectedLoss(0.6, 0.1, 0.99).at(NormalDist().inv_cdf(0.9999)) == 1.0


def parameters(**losses: dict[PromptClass, ExpectedLoss]) -> PolicyParameters:
    return PolicyParameters(CLASS_FLOOR, losses={TierName(name): of for name, of in losses.items()})


def test_a_loss_is_that_of_the_class_and_an_uncertain_class_gets_the_worst() -> None:
    """By its upper end, not its mean; so does a class that was not measured."""
    table = parameters(fast={PromptClass.CHAT: LOSS, PromptClass.CODE: WORSE})
    assert table.loss(FAST, features(PromptClass.CHAT, 0.9)) == LOSS
    assert table.loss(FAST, features(PromptClass.CHAT, 0.59)) == WORSE
    assert table.loss(FAST, features(PromptClass.CHAT, 0.6)) == LOSS
    assert table.loss(FAST, features(PromptClass.MATH, 0.9)) == WORSE


def test_what_the_budget_allows_a_prompt() -> None:
    """A number is the same for all; by comparison it is the other tier's loss, if that is measured."""
    table = parameters(fast={PromptClass.CHAT: LOSS})
    assert replace(table, loss_budget=0.07).allowed(features(PromptClass.CHAT, 0.9)) == 0.07
    assert replace(table, loss_budget=FAST).allowed(features(PromptClass.CHAT, 0.9)) == LOSS.mean
    assert table.allowed(features(PromptClass.CHAT, 0.9)) is None


def test_the_reference_loses_nothing_and_an_unmeasured_tier_is_unknown() -> None:
    """Measured or not, certain or not."""
    assert parameters().loss(PRECISE, features(confidence=0.1)) == NO_LOSS
    assert parameters(fast={PromptClass.CHAT: LOSS}).loss(BALANCED, features(confidence=0.1)) is None


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
    """It can be raised, and says why."""
    decision = decide(query(), fleet(dict.fromkeys(STANDARD_TIERS, ReplicaState.FAILED)), TABLE)
    assert decision.chosen is None
    assert len(decision.verdicts) == 3
    assert str(Refused(decision)) == "fast is failed; balanced is failed; precise is failed"


def test_higher_priorities_are_scheduled_first() -> None:
    """By vLLM's rule, in which lower numbers go first, and 0 is what a request without one has."""
    assert sorted(PRIORITIES, key=lambda name: PRIORITIES[name]) == ["interactive", "standard", "batch"]
    assert PRIORITIES["standard"] == 0
