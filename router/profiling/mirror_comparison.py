"""What a served answer and that of the second fleet have in common. Values only; their texts go no further than this."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from classifier import PromptClass
    from tiers.spec import TierName


class MirrorOutcome(StrEnum):
    """What became of a mirrored request."""

    SAME = "same"  # a greedy answer, with the same text
    DIFFERS = "differs"  # a greedy answer, with another text
    SAMPLED = "sampled"  # answered; sampled texts cannot be expected to be the same
    FAILED = "failed"  # no whole answer came
    DROPPED = "dropped"  # as many were in flight as may be


@dataclass(frozen=True, slots=True)
class AnswerText:
    """A whole answer, of either side.

    Attributes:
        ttft_s: To its first token; None: not known, as of an answer that was not streamed.
        duration_s: To its end.
        tier: Of QARR that served it, by its name; None: the server is no QARR router.
    """

    text: str
    finish_reason: str | None
    ttft_s: float | None
    duration_s: float
    tier: str | None = None


@dataclass(frozen=True, slots=True)
class MirrorResult:
    """What became of one mirrored request. Ratios are the second fleet's value by the served one; None: not known.

    Attributes:
        kind: The prompt's class.
        tier: That served it here.
        common_prefix: Share of the longer text with which both begin, 0 to 1; of greedy answers only.
        length: Ratio of characters.
        same_finish: Whether both ended for the same reason.
        same_tier: Whether tiers of the same name served both.
    """

    kind: PromptClass
    tier: TierName
    outcome: MirrorOutcome
    common_prefix: float | None = None
    length: float | None = None
    ttft: float | None = None
    duration: float | None = None
    same_finish: bool | None = None
    same_tier: bool | None = None


def compare(kind: PromptClass, tier: TierName, here: AnswerText, there: AnswerText, *, greedy: bool) -> MirrorResult:
    """Compare a served answer with the second fleet's.

    Args:
        kind: The prompt's class.
        tier: That served it here.
        here: As served.
        there: The second fleet's.
        greedy: Whether the same model would give the same text.
    """
    outcome = MirrorOutcome.SAMPLED
    if greedy:
        outcome = MirrorOutcome.SAME if here.text == there.text else MirrorOutcome.DIFFERS
    return MirrorResult(
        kind,
        tier,
        outcome,
        common_prefix=common_prefix(here.text, there.text) if greedy else None,
        length=_ratio(len(there.text), len(here.text)),
        ttft=_ratio(there.ttft_s, here.ttft_s),
        duration=_ratio(there.duration_s, here.duration_s),
        same_finish=here.finish_reason == there.finish_reason,
        same_tier=there.tier == tier if there.tier is not None else None,
    )


def common_prefix(one: str, other: str) -> float:
    """Return the share of the longer text, 0 to 1, with which both begin; of two empty texts all of it."""
    longest = max(len(one), len(other))
    low, high = 0, min(len(one), len(other))
    while low < high:  # what begins alike at a length does so at every shorter one
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low / longest if longest else 1.0


def _ratio(there: float | None, here: float | None) -> float | None:
    return there / here if there is not None and here else None
