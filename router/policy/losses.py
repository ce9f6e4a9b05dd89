"""Expected quality loss: the share of answers that a precision gets wrong and the highest one gets right, minus the reverse.

Published losses are known before anything is measured; measured answers update them. Of tasks that at least one of both
precisions gets right, n in all, let w get worse and b get better. The measured loss and its variance, with half an answer
added to each outcome (Agresti and Min 2005, "Simple improved confidence intervals for comparing matched proportions"), are

    d = (w - b) / (n + 2)        v = (w + b + 1 - (w - b)^2 / (n + 2)) / (n + 2)^2

The expected loss is the mean of d and the published loss m, weighted by the inverse of their variances. That of m is m^2:
published losses differ between models by about as much as they are. Where m lies ``CONTRADICTED`` standard deviations from
d, the model is unlike those published, and m hardly counts (``UNLIKE``). A kind is a class and a complexity. The published
loss of a kind is scaled by what all answers of its class say, so that kinds with few answers follow it (empirical Bayes).
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING

from classifier import PromptClass
from classifier.kinds import JUDGED, Complexity
from router.policy.profiles import Flips
from tiers.quantization import quantizations_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from router.policy.profiles import AnswerCount

    Kind = tuple[PromptClass, Complexity]
    Losses = Mapping[PromptClass, Mapping[Complexity, "ExpectedLoss"]]

CONTRADICTED = 3.0  # of some 40 kinds and tiers one differs by chance in 1 of 10 fleets; at 1.96 two do in each
UNLIKE = 0.3  # standard deviation of a published loss that the answers contradict
ENOUGH = 10  # answers of a kind; fewer hardly count beside what is published
LEAST = 1e-4  # published losses below this are not told apart
Z95 = NormalDist().inv_cdf(0.975)

_FILE = tomllib.loads(Path(__file__).with_name("published_losses.toml").read_text("utf-8"))
_PUBLISHED: dict[str, dict[PromptClass, list[float]]] = {
    row: {PromptClass(kind): each for kind, each in kinds.items()} for row, kinds in _FILE["losses"].items()
}  # for trivial, moderate and complex prompts
_LIKE = {name: (str(like["row"]), float(like["factor"])) for name, like in _FILE["like"].items()}
CLASSES = tuple(_PUBLISHED["int4"])
# Classes that may be taken for one another; code is told by its marks, a long context by its length.
DOUBTFUL = tuple(kind for kind in JUDGED if kind is not PromptClass.UNKNOWN)


@dataclass(frozen=True, slots=True)
class ExpectedLoss:
    """Share of answers, 0..1, that get worse than the highest precision's: estimate and 95 % interval."""

    mean: float
    low: float
    high: float
    answers: int = 0  # measured ones that it rests on; 0: it is published

    @property
    def basis(self) -> str:
        few = f"published, and {self.answers} answers measured" if self.answers else "published"
        return f"measured on {self.answers} answers" if self.answers >= ENOUGH else few


NO_LOSS = ExpectedLoss(0.0, 0.0, 0.0)


def published(precision: str, kind: Kind) -> float:
    """Return the published loss of a precision, as ``TierSpec`` has it, on a kind of prompt; of several, the largest."""
    at = tuple(Complexity).index(kind[1])
    rows = [_LIKE[name] for name in quantizations_of(precision)]
    return max(_PUBLISHED[row][kind[0]][at] * factor for row, factor in rows)


def losses(precision: str, counts: Iterable[AnswerCount]) -> Losses:
    """Return a tier's expected loss of each kind, ``UNKNOWN`` included, by its precision and what was measured of it."""
    flips = {(count.prompt_class, count.complexity): count.flips for count in counts}
    found: dict[PromptClass, dict[Complexity, ExpectedLoss]] = {}
    for kind in CLASSES:
        kinds = [(kind, complexity) for complexity in Complexity]
        scale = _scale(precision, {one: flips[one] for one in kinds if one in flips})
        found[kind], easier = {}, NO_LOSS
        for one in kinds:
            loss = updated(published(precision, one) * scale, flips.get(one, Flips(0, 0, 0)))
            easier = found[kind][one[1]] = _at_least(loss, easier)
    found[PromptClass.UNKNOWN] = {each: mean_loss([found[kind][each] for kind in DOUBTFUL]) for each in Complexity}
    return found


def updated(prior: float, flips: Flips) -> ExpectedLoss:
    n, net = flips.answers, flips.worse - flips.better
    if prior < LEAST and not n:
        return NO_LOSS
    prior = max(prior, LEAST)
    mean, variance = prior, prior**2
    if n:
        seen = net / (n + 2)
        seen_variance = (flips.worse + flips.better + 1 - net * seen) / (n + 2) ** 2
        if abs(seen - prior) > CONTRADICTED * math.sqrt(seen_variance):
            variance = UNLIKE**2
        weight = seen_variance / (seen_variance + variance)
        mean, variance = weight * prior + (1 - weight) * seen, weight * variance
    mean, spread = min(max(mean, 0.0), 1.0), Z95 * math.sqrt(variance)
    return ExpectedLoss(mean, max(mean - spread, 0.0), min(mean + spread, 1.0), n)


def mean_loss(losses: Iterable[ExpectedLoss]) -> ExpectedLoss:
    each = list(losses)
    mean, low, high = (fmean(getattr(loss, part) for loss in each) for part in ("mean", "low", "high"))
    return ExpectedLoss(mean, low, high, sum(loss.answers for loss in each))


def mixed(one: ExpectedLoss, other: ExpectedLoss, share: float) -> ExpectedLoss:
    """Return the loss of prompts of which a share is of one kind, and the rest of another."""
    rest = 1 - share
    return ExpectedLoss(
        share * one.mean + rest * other.mean,
        share * one.low + rest * other.low,
        share * one.high + rest * other.high,
        one.answers,
    )


def _scale(precision: str, flips: Mapping[Kind, Flips]) -> float:
    """Return by what the published losses of a class are multiplied for this model, by all of its answers."""
    answers = sum(one.answers for one in flips.values())
    if not answers:
        return 1.0
    prior = max(sum(published(precision, kind) * one.answers for kind, one in flips.items()) / answers, LEAST)
    together = Flips(answers, sum(one.worse for one in flips.values()), sum(one.better for one in flips.values()))
    return updated(prior, together).mean / prior


def _at_least(loss: ExpectedLoss, easier: ExpectedLoss) -> ExpectedLoss:
    if loss.mean >= easier.mean:
        return loss
    return ExpectedLoss(easier.mean, max(loss.low, easier.low), max(loss.high, easier.high), loss.answers)


def one_in(loss: float) -> str:
    if loss < 0.001:  # noqa: PLR2004
        return "fewer than 1 in 1,000"
    if loss > 0.4:  # noqa: PLR2004
        return f"{min(round(loss * 10), 10)} in 10"
    return f"1 in {round(1 / loss):,}"
