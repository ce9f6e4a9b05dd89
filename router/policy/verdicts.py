"""Whether tiers lose more answers than the loss budget allows, each in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.policy.losses import mean_loss, of_100
from router.policy.profiles import REFERENCE
from router.policy.published import CLASSES
from tiers.verification.findings import Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from classifier import PromptClass
    from router.policy.decision import PolicyParameters
    from router.policy.losses import ExpectedLoss
    from tiers.spec import TierName


HOLD = "quality.gate = hold"
# What follows from a loss that is too large, unless the tier is held.
OTHERS_SERVE = "other tiers get such prompts as long as they can serve them."


@dataclass(frozen=True, slots=True)
class TierVerdict:
    """What is known of a tier's answers beside the highest precision's.

    Attributes:
        verdict: Same: it loses no more than the loss budget allows; worse: it does. None: it is not measured yet.
        sentence: The verdict for people, and what follows from it.
        is_held: Whether it gets only requests that require it by name.
    """

    verdict: Verdict | None
    sentence: str
    is_held: bool = False


def judge_tiers(
    table: PolicyParameters, measured: Collection[TierName], *, holds: bool = False
) -> dict[TierName, TierVerdict]:
    """Return the verdict on each tier but the reference.

    Args:
        table: The expected losses, and the loss budget.
        measured: The tiers whose measurement has ended.
        holds: Whether tiers are held that lose too much, or are not measured yet (``quality.gate = hold``).
    """
    verdicts = {
        tier: _judge(tier, table, is_measured=tier in measured)
        for tier in table.losses
        if tier is not REFERENCE
    }
    if not holds:
        return verdicts
    return {tier: _held(tier, verdict) for tier, verdict in verdicts.items()}


def _held(tier: TierName, verdict: TierVerdict) -> TierVerdict:
    """Return a verdict with what follows from it where tiers are held that are not known to lose little enough."""
    follows = f"it gets only requests that require it by name ({HOLD})"
    if verdict.verdict is None:
        sentence = f"{tier} is not measured yet: until then {follows}."
        return TierVerdict(None, sentence, is_held=True)
    if verdict.verdict is Verdict.WORSE:
        reason = verdict.sentence.removesuffix(OTHERS_SERVE)
        return TierVerdict(Verdict.WORSE, f"{reason}{follows}.", is_held=True)
    return verdict


def _judge(
    tier: TierName, table: PolicyParameters, *, is_measured: bool
) -> TierVerdict:
    """Judge a tier by the intervals of its losses: each on one side of the budget, or across it."""
    if not is_measured:
        sentence = (
            f"{tier} is not measured yet, so what is published of its precision counts."
        )
        return TierVerdict(None, sentence)
    budget = table.budget(tier)
    losses_by_class = _measured_losses(table, tier)
    worse = {
        prompt_class: loss
        for prompt_class, loss in losses_by_class.items()
        if loss.low > budget
    }
    if worse:
        return TierVerdict(Verdict.WORSE, _worse_sentence(tier, worse, budget))
    is_known = all(loss.stated_high <= budget for loss in losses_by_class.values())
    if losses_by_class and is_known:
        sentence = f"{tier} loses no more than the loss budget allows ({of_100(budget)} answers)."
        return TierVerdict(Verdict.SAME, sentence)
    sentence = (
        f"Whether {tier} loses more than the loss budget allows ({of_100(budget)} answers) cannot be told from the tasks "
        "that the model gets right, which is usual for small models."
    )
    return TierVerdict(Verdict.CANNOT_TELL, sentence)


def _measured_losses(
    table: PolicyParameters, tier: TierName
) -> Mapping[PromptClass, ExpectedLoss]:
    """Return the loss of each class of prompts of which answers were judged."""
    losses_by_class = {
        prompt_class: mean_loss(list(table.losses[tier][prompt_class].values()))
        for prompt_class in CLASSES
        if prompt_class in table.losses[tier]
    }
    return {
        prompt_class: loss
        for prompt_class, loss in losses_by_class.items()
        if loss.answers
    }


def _worse_sentence(
    tier: TierName, worse: Mapping[PromptClass, ExpectedLoss], budget: float
) -> str:
    losses = [
        f"{of_100(loss.mean)} on {prompt_class.value.replace('_', ' ')}"
        for prompt_class, loss in worse.items()
    ]
    return (
        f"{tier} loses more answers than the loss budget allows ({', '.join(losses)}; {of_100(budget)} are allowed), so "
        f"{OTHERS_SERVE}"
    )
