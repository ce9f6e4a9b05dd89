"""Say which losses could not be measured because answers were cut while the model was thinking, and what to do about it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiers.spec import in_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from classifier import PromptClass
    from router.policy.losses import Kind
    from router.policy.profiles import AnswerCount, QualityProfile
    from tiers.spec import TierName

# The limit that is proposed after one that was too low: twice as many, and no fewer than this.
FEWEST_PROPOSED = 1024


@dataclass(frozen=True, slots=True)
class UnmeasuredKinds:
    """The kinds of prompts of which nothing could be measured on a tier.

    Attributes:
        kinds: The kinds.
        cut: The number of their tasks with an answer that was cut while the model was thinking.
        think_tokens: The tokens that thoughts could have.
    """

    kinds: tuple[Kind, ...]
    cut: int
    think_tokens: int

    @property
    def text(self) -> str:
        """Return what is not measured, and why."""
        tasks = "1 task" if self.cut == 1 else f"{self.cut} tasks"
        return (
            f"not measured: cut while thinking: {_kind_words(self.kinds)}, {tasks}, with "
            f"{limit_words(self.think_tokens)}; published losses count"
        )

    @property
    def remedy(self) -> str:
        return remedy(self.think_tokens)

    def render(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "kinds": [
                {"class": prompt_class.value, "complexity": complexity.value}
                for prompt_class, complexity in self.kinds
            ],
            "cut": self.cut,
            "think_tokens": self.think_tokens,
            "text": self.text,
            "remedy": self.remedy,
        }


def unmeasured_kinds(profile: QualityProfile) -> dict[TierName, UnmeasuredKinds]:
    """Return what could not be measured on each tier; tiers of which every kind has answers are left out."""
    by_tier: defaultdict[TierName, list[AnswerCount]] = defaultdict(list)
    for count in profile.counts:
        if count.is_unmeasured:
            by_tier[count.tier].append(count)
    return {
        tier: UnmeasuredKinds(
            kinds=tuple(
                (count.prompt_class, count.complexity) for count in by_tier[tier]
            ),
            cut=sum(count.cut for count in by_tier[tier]),
            think_tokens=profile.think_tokens,
        )
        for tier in in_order(by_tier)
    }


def cut_sentence(counts: Iterable[AnswerCount], think_tokens: int) -> str | None:
    """Return how many tasks of each tier were cut, and what to raise; None: none was.

    Args:
        counts: What was measured in one mode of thinking.
        think_tokens: The tokens that thoughts could have in it.
    """
    cut: defaultdict[TierName, int] = defaultdict(int)
    asked: defaultdict[TierName, int] = defaultdict(int)
    for count in counts:
        cut[count.tier] += count.cut
        asked[count.tier] += count.answered + count.cut
    shares = [
        f"{cut[tier]} of {asked[tier]} ({tier})" for tier in in_order(cut) if cut[tier]
    ]
    if not shares:
        return None
    return (
        f"Not measured, because an answer was cut while thinking, with {limit_words(think_tokens)}: "
        f"{', '.join(shares)}. They count neither as right nor as wrong. To measure them, {remedy(think_tokens)}."
    )


def limit_words(think_tokens: int) -> str:
    if not think_tokens:
        return "no tokens for thoughts"
    return f"up to {think_tokens:,} tokens for thoughts"


def remedy(think_tokens: int) -> str:
    """Return what to do about a limit that was too low."""
    proposed = max(2 * think_tokens, FEWEST_PROPOSED)
    return (
        f"run 'qarr profile quality --think-tokens {proposed}', or set profile.think_tokens, which asks for the cut answers "
        "again; prompt, thoughts and answer together have to fit tiers.*.max_model_len"
    )


def _kind_words(kinds: Iterable[Kind]) -> str:
    """Return kinds for people, as in "math (moderate, complex), code (complex)"."""
    complexities: defaultdict[PromptClass, list[str]] = defaultdict(list)
    for prompt_class, complexity in kinds:
        complexities[prompt_class].append(complexity.value)
    return ", ".join(
        f"{prompt_class.value.replace('_', ' ')} ({', '.join(names)})"
        for prompt_class, names in complexities.items()
    )


def render_unmeasured(
    unmeasured: Mapping[TierName, UnmeasuredKinds],
) -> dict[str, Any]:
    """Return what could not be measured as JSON values."""
    return {tier: kinds.render() for tier, kinds in unmeasured.items()}
