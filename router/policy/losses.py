"""Expected quality loss: the share of answers that a precision gets wrong and the highest one gets right, minus the reverse.

Published losses (``router/policy/published.py``) are known before anything is measured; measured answers update them. Of
tasks that at least one of both precisions gets right, n in all, let w get worse and b get better. The measured loss and its
variance, with half an answer added to each outcome (Agresti and Min 2005, "Simple improved confidence intervals for
comparing matched proportions"), are

    d = (w - b) / (n + 2)        v = (w + b + 1 - (w - b)^2 / (n + 2)) / (n + 2)^2

A lower precision does not answer better but by chance, so the true loss is at least 0. Before any answer it is
exponentially distributed, with the published loss m as its mean: nine in ten results of studies that the fit of m has not
seen lie in the 90 % interval of that distribution (``benchmarks/results/loss_prior.txt``). Then, by Bayes' rule, it is
normally distributed with mean d - v / m and variance v, cut off below 0. The expected loss is the mean of that distribution.
Where m lies ``CONTRADICTED`` standard deviations from d, the model is unlike those published, and ``UNLIKE`` takes the place
of m. A kind is a class and a complexity. The published loss of a kind is scaled by what all answers of its class say, so
that kinds with few answers follow it (empirical Bayes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, NamedTuple

from classifier import PromptClass
from classifier.kinds import JUDGED, Complexity
from router.policy.profiles import Flips
from router.policy.published import (
    CLASSES,
    TAIL_PROBABILITY,
    published_estimate,
    published_loss,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from router.policy.profiles import AnswerCount

    Kind = tuple[PromptClass, Complexity]
    Losses = Mapping[PromptClass, Mapping[Complexity, "ExpectedLoss"]]

# At 3 deviations one of some 40 kinds and tiers differs by chance in 1 of 10 fleets; at 1.96 two differ in each fleet.
CONTRADICTED = 3.0
# this mean takes the place of a published loss that the answers contradict
UNLIKE = 0.3
MIN_ANSWERS = 10  # fewer answers of a kind hardly count beside what is published
Z90 = NormalDist().inv_cdf(1 - TAIL_PROBABILITY)
# So many standard deviations out, the tail of a normal distribution is taken from its asymptotic series.
FAR_CUT = 6.0
# Answers bear a statement alone if without anything published they allow at most this many times the loss that is stated.
BORNE_WITHIN = 1.25
_STANDARD = NormalDist()
# Classes that may be taken for one another; code is told by its marks, a long context by its length.
DOUBTFUL = tuple(kind for kind in JUDGED if kind is not PromptClass.UNKNOWN)


class LossSource(StrEnum):
    """What an expected loss rests on."""

    PUBLISHED = "published"  # results of this format and class, of models of this size
    ESTIMATED = "estimated"  # losses of larger models, or of models of other sizes
    # this model's own answers, which say the same without anything published
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class ExpectedLoss:
    """Share of answers, 0..1, that get worse than the highest precision's: estimate and 90 % interval.

    Attributes:
        mean: The estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.
        answers: Measured answers that moved it.
        published_for_size: Whether results of this format, of models of this size, are published.
        said: What is published, in words; empty: of several kinds, or nothing.
        measured_high: Upper end of the interval by the measured answers alone; None: there are none.
    """

    mean: float
    low: float
    high: float
    answers: int = 0
    published_for_size: bool = True
    measured_high: float | None = None
    said: str = ""

    @property
    def is_measured(self) -> bool:
        """Tell whether it rests on answers: only if these bear it alone."""
        return (
            self.measured_high is not None
            and self.measured_high <= self.high * BORNE_WITHIN
        )

    @property
    def source(self) -> LossSource:
        """Return what it rests on."""
        if self.is_measured:
            return LossSource.MEASURED
        return LossSource.PUBLISHED if self.published_for_size else LossSource.ESTIMATED

    @property
    def stated_high(self) -> float:
        """Return the largest loss that is stated to people: where it is called measured, what the answers alone allow."""
        if self.measured_high is not None and self.is_measured:
            return max(self.high, self.measured_high)
        return self.high

    @property
    def basis(self) -> str:
        """Return in words what it rests on."""
        if self.is_measured:
            return f"measured on {self.answers} answers"
        origin = self.said or "published for models of this size"
        if not self.published_for_size:
            origin = "estimated from what is published for other models"
        if self.answers:
            return f"{origin}; {self.answers} answers here do not tell more yet"
        return origin


NO_LOSS = ExpectedLoss(0.0, 0.0, 0.0)


def losses(
    precision: str, counts: Iterable[AnswerCount], parameters: float | None
) -> Losses:
    """Return a tier's expected loss of each kind, ``UNKNOWN`` included.

    Args:
        precision: Of the tier, as in ``TierSpec``.
        counts: What was measured of the tier.
        parameters: Of the model; None: not known.
    """
    flips_by_kind = {
        (count.prompt_class, count.complexity): count.flips for count in counts
    }
    expected: dict[PromptClass, dict[Complexity, ExpectedLoss]] = {}
    for prompt_class in CLASSES:
        expected[prompt_class] = _losses_of_class(
            precision, prompt_class, flips_by_kind=flips_by_kind, parameters=parameters
        )
    expected[PromptClass.UNKNOWN] = {}
    for complexity in Complexity:
        doubtful = [expected[prompt_class][complexity] for prompt_class in DOUBTFUL]
        expected[PromptClass.UNKNOWN][complexity] = mean_loss(doubtful)
    return expected


def updated(
    prior: float, flips: Flips, *, published_for_size: bool = True, said: str = ""
) -> ExpectedLoss:
    """Return what measured answers make of a published loss.

    Args:
        prior: The published loss: share of answers, 0..1.
        flips: The measured answers; there may be none.
        published_for_size: Whether results of models of this size are published.
        said: What is published, in words.
    """
    if prior == 0:
        return replace(NO_LOSS, published_for_size=published_for_size, said=said)
    if flips.answers == 0:
        return ExpectedLoss(
            mean=prior,
            low=-prior * math.log(1 - TAIL_PROBABILITY),
            high=min(-prior * math.log(TAIL_PROBABILITY), 1.0),
            published_for_size=published_for_size,
            said=said,
        )
    measured, variance = measured_loss(flips)
    if abs(measured - prior) > CONTRADICTED * math.sqrt(variance + prior**2):
        prior = UNLIKE
    loss = _PositiveNormal(measured - variance / prior, math.sqrt(variance))
    answers_alone = _PositiveNormal(measured, math.sqrt(variance))
    return ExpectedLoss(
        mean=min(loss.mean, 1.0),
        low=loss.quantile(TAIL_PROBABILITY),
        high=min(loss.quantile(1 - TAIL_PROBABILITY), 1.0),
        answers=flips.answers,
        published_for_size=published_for_size,
        said=said,
        measured_high=min(answers_alone.quantile(1 - TAIL_PROBABILITY), 1.0),
    )


class _PositiveNormal(NamedTuple):
    """A normal distribution, cut off below 0."""

    location: float
    deviation: float

    @property
    def mean(self) -> float:
        """Return its mean (Johnson, Kotz and Balakrishnan 1994, "Continuous Univariate Distributions", 13.10)."""
        cut = -self.location / self.deviation
        if cut > FAR_CUT:
            # Further terms of the asymptotic series are below 10 / cut**5.
            return self.deviation * (1 / cut - 2 / cut**3)
        return self.location + self.deviation * _STANDARD.pdf(cut) / (
            1 - _STANDARD.cdf(cut)
        )

    def quantile(self, share: float) -> float:
        """Return the value below which a share of it lies."""
        cut = -self.location / self.deviation
        if cut > FAR_CUT:
            return self.deviation * (math.sqrt(cut**2 - 2 * math.log(1 - share)) - cut)
        below = _STANDARD.cdf(cut)
        return max(
            self.location
            + self.deviation * _STANDARD.inv_cdf(below + share * (1 - below)),
            0.0,
        )


def measured_loss(flips: Flips) -> tuple[float, float]:
    """Return the measured loss and its variance; see the head of this module."""
    net_worse = flips.worse - flips.better
    loss = net_worse / (flips.answers + 2)
    variance = (flips.worse + flips.better + 1 - net_worse * loss) / (
        flips.answers + 2
    ) ** 2
    return loss, variance


def mean_loss(losses: Sequence[ExpectedLoss]) -> ExpectedLoss:
    """Return the loss of prompts that are of each of several kinds equally often."""
    measured_highs = [
        loss.measured_high for loss in losses if loss.measured_high is not None
    ]
    are_all_measured = len(measured_highs) == len(losses)
    return ExpectedLoss(
        mean=fmean(loss.mean for loss in losses),
        low=fmean(loss.low for loss in losses),
        high=fmean(loss.high for loss in losses),
        answers=sum(loss.answers for loss in losses),
        published_for_size=all(loss.published_for_size for loss in losses),
        measured_high=fmean(measured_highs) if are_all_measured else None,
    )


def mixed(first: ExpectedLoss, second: ExpectedLoss, share: float) -> ExpectedLoss:
    """Return the loss of prompts of which a share, 0..1, is of a first kind, and the rest of a second."""
    second_share = 1 - share
    measured_high = None
    if first.measured_high is not None and second.measured_high is not None:
        measured_high = (
            share * first.measured_high + second_share * second.measured_high
        )
    return ExpectedLoss(
        mean=share * first.mean + second_share * second.mean,
        low=share * first.low + second_share * second.low,
        high=share * first.high + second_share * second.high,
        answers=first.answers,
        published_for_size=first.published_for_size,
        said=first.said,
        measured_high=measured_high,
    )


@lru_cache(1024)  # every answer says its reason, and few shares differ
def of_100(share: float) -> str:
    """Return a share of answers for people, as in "2.1 of 100"."""
    answers = share * 100
    if answers == 0:
        return "none of 100"
    if answers < 0.01:  # noqa: PLR2004
        return "under 0.01 of 100"
    if answers < 0.1:  # noqa: PLR2004
        return f"{answers:.2f} of 100"
    if answers < 9.95:  # noqa: PLR2004  it would be rounded to 10.0
        return f"{answers:.1f} of 100"
    return f"{answers:.0f} of 100"


def _losses_of_class(
    precision: str,
    prompt_class: PromptClass,
    flips_by_kind: Mapping[Kind, Flips],
    parameters: float | None,
) -> dict[Complexity, ExpectedLoss]:
    """Return the expected loss by complexity; a more complex prompt loses no less than an easier one."""
    flips_of_class = {
        kind: flips for kind, flips in flips_by_kind.items() if kind[0] is prompt_class
    }
    scale = _scale(precision, flips_of_class, parameters)
    losses_by_complexity: dict[Complexity, ExpectedLoss] = {}
    easier_loss = NO_LOSS
    for complexity in Complexity:
        kind = (prompt_class, complexity)
        published = published_estimate(precision, kind, parameters)
        own_loss = updated(
            min(published.mean * scale, 1.0),
            flips_by_kind.get(kind, Flips(0, 0, 0)),
            published_for_size=published.results > 0,
            said=published.said,
        )
        loss = _at_least(own_loss, easier_loss)
        losses_by_complexity[complexity] = loss
        easier_loss = loss
    return losses_by_complexity


def _scale(
    precision: str, flips_by_kind: Mapping[Kind, Flips], parameters: float | None
) -> float:
    """Return by what the published losses of a class are multiplied for this model, by all of its answers."""
    answers = sum(flips.answers for flips in flips_by_kind.values())
    if answers == 0:
        return 1.0
    prior = 0.0
    for kind, flips in flips_by_kind.items():
        prior += published_loss(precision, kind, parameters) * flips.answers / answers
    if prior == 0:
        return 1.0
    all_flips = Flips(
        answers=answers,
        worse=sum(flips.worse for flips in flips_by_kind.values()),
        better=sum(flips.better for flips in flips_by_kind.values()),
    )
    return updated(prior, all_flips).mean / prior


def _at_least(loss: ExpectedLoss, easier: ExpectedLoss) -> ExpectedLoss:
    """Return a kind's loss, which is no less than that of an easier kind."""
    if loss.mean >= easier.mean:
        return loss
    measured_high = loss.measured_high
    if measured_high is not None and easier.measured_high is not None:
        measured_high = max(measured_high, easier.measured_high)
    return replace(
        loss,
        mean=easier.mean,
        low=max(loss.low, easier.low),
        high=max(loss.high, easier.high),
        measured_high=measured_high,
    )
