"""Fits how a prompt's loss differs from its class's mean, and rules whether decisions may use that.

Model, of each tier but the reference. y is the share of an answer's tokens that are not the reference's first choice, x are
the ``loss_features`` of its prompt, c is its class, means are weighted by tokens:

    E[y | c, x] = mean_c(y) + beta . (x - mean_c(x)), clipped to 0..1

beta is found by ridge regression of what y and x differ from their classes' means, each feature scaled to a standard
deviation of 1. ``RIDGE`` prompts that show no effect are added: as a prior, a feature explains a tenth of the variance.
The class's means are the profile's, or those of live answers where there are ``MIN_LIVE``.

Rule. The prompts are divided into ``FOLDS``, classes and lengths evenly; each fold is predicted by what was fitted to the
others, and by their classes' means. The regression is used where the mean of (squared error of the class's mean - squared
error of the regression), weighted by tokens, is at least ``NEEDED`` of its standard errors above zero, over at least
``MIN_PROMPTS`` prompts. A one-sided test at 5 % needs 1.64; the rest allows for folds that share most of what they are
fitted to (Nadeau and Bengio, Inference for the Generalization Error, 2003), and for fitting again with live answers.

Interval. Half its width is sqrt(h^2 + (``Z`` s_c)^2), where h is half the width of the class's interval, and s_c the
largest standard error of beta . (x - mean_c(x)) over the class's prompts, by the posterior covariance of beta.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial, reduce
from itertools import groupby
from operator import attrgetter, mul, sub
from statistics import StatisticsError, correlation, fmean, stdev
from typing import TYPE_CHECKING

from router.policy.decision import ClassLine, PromptLoss, loss_features
from router.policy.profiles import MIN_LIVE, REFERENCE
from tiers.least_squares import solve
from tiers.spec import TierName, in_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from classifier import PromptClass
    from router.policy.profiles import Observation, QualityProfile

    Vector = Sequence[float]
    _Moments = dict[PromptClass, list[list[float]]]

RIDGE = 10.0
FOLDS = 10
NEEDED = 2.0
MIN_PROMPTS = 40
Z = 1.96
TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Regression:
    """One tier's regression, and how well it and the class's mean predict prompts that they were not fitted to.

    Attributes:
        prompts: Different ones; those with equal features count as one.
        error: Root of the mean squared error, in shares of tokens, 0..1; ``class_error`` of the class's mean.
        rank_correlation: Spearman's, of predicted and seen shares, -1..1.
        class_rank_correlation: That of the class's mean, over all folds: means without the fold itself would be in the
            opposite order of the folds.
        gain: How much lower the squared error is than that of the class's mean, in standard errors.
    """

    prompts: int
    error: float
    class_error: float
    rank_correlation: float
    class_rank_correlation: float
    gain: float
    model: PromptLoss

    @property
    def used(self) -> bool:
        """Tell whether decisions may use it."""
        return self.gain >= NEEDED

    def __str__(self) -> str:
        return (
            f"{'used' if self.used else 'not used'}: error on {self.prompts} held-out prompts {self.error:.4f}, of the "
            f"class's mean {self.class_error:.4f} (gain {self.gain:.1f} standard errors, {NEEDED:g} needed); "
            f"rank correlation {self.rank_correlation:.2f}, of the class's mean {self.class_rank_correlation:.2f}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """The answers to prompts with the same features; the mean weight of rows is 1."""

    prompt_class: PromptClass
    features: tuple[float, ...]
    weight: float
    share: float


@dataclass(frozen=True, slots=True)
class _Centre:
    """A class's means."""

    share: float
    features: tuple[float, ...]

    def away(self, row: _Row) -> list[float]:
        return [value - mean for value, mean in zip(row.features, self.features, strict=True)]


@dataclass(frozen=True, slots=True)
class _Fit:
    """What was fitted to some rows; ``covariance`` is that of the slopes."""

    centres: Mapping[PromptClass, _Centre]
    slopes: Vector
    covariance: Sequence[Vector]

    def share(self, row: _Row) -> float:
        centre = self.centres[row.prompt_class]
        return min(max(centre.share + _dot(self.slopes, centre.away(row)), 0.0), 1.0)

    def error(self, away: Vector) -> float:
        """Return the standard error of the difference that a prompt's distance from its class's means makes."""
        return math.sqrt(max(_dot(away, [_dot(line, away) for line in self.covariance]), 0.0))


def regressions(profile: QualityProfile, live: Sequence[Observation] = ()) -> dict[TierName, Regression]:
    """Return the regression of each tier that enough was observed of.

    Args:
        profile: Classes with too few prompts for an interval are left out.
        live: Answers that shadow evaluation scored.
    """
    found: dict[TierName, Regression] = {}
    for tier in in_order(loss.tier for loss in profile.losses if loss.tier is not REFERENCE):
        classes = {loss.prompt_class for loss in profile.losses if loss.tier is tier and loss.certain}
        own, lately = (
            [seen for seen in seen_there if seen.tier is tier and seen.prompt_class in classes]
            for seen_there in (profile.observations, live)
        )
        rows = _rows([*own, *lately])
        if len(rows) >= MIN_PROMPTS:
            counts = Counter(seen.prompt_class for seen in lately)
            now = {kind for kind, count in counts.items() if count >= MIN_LIVE}
            levels = [s for s in own if s.prompt_class not in now] + [s for s in lately if s.prompt_class in now]
            found[tier] = _regression(rows, _rows(levels))
    return found


def in_use(found: Mapping[TierName, Regression]) -> dict[TierName, PromptLoss]:
    """Return the models of the regressions that decisions may use."""
    return {tier: regression.model for tier, regression in found.items() if regression.used}


def _rows(observations: Iterable[Observation]) -> list[_Row]:
    """Return one row for all prompts with the same features, sorted by class and features."""
    sums: dict[tuple[PromptClass, tuple[float, ...]], list[int]] = defaultdict(lambda: [0, 0])
    for seen in observations:
        both = sums[seen.prompt_class, loss_features(seen)]
        both[0] += seen.tokens
        both[1] += seen.disagreed
    answered = sorted((key, tokens, disagreed) for key, (tokens, disagreed) in sums.items() if tokens)
    mean = fmean(tokens for _, tokens, _ in answered) if answered else 0.0
    return [_Row(*key, tokens / mean, disagreed / tokens) for key, tokens, disagreed in answered]


def _regression(rows: Sequence[_Row], levels: Sequence[_Row]) -> Regression:
    """Fit to all rows, and compare with the class's mean on rows that were held out."""
    folds = [rows[number::FOLDS] for number in range(FOLDS)]
    moments = [_moments(fold) for fold in folds]
    whole: _Moments = reduce(partial(_plus, sign=1), moments)
    final = _fit(whole)
    found: list[tuple[_Row, float, float]] = []
    for held, own in zip(folds, moments, strict=True):
        fit = _fit(_plus(whole, own, sign=-1))
        found += [
            (row, fit.share(row), fit.centres[row.prompt_class].share)
            for row in held
            if row.prompt_class in fit.centres
        ]
    seen, predicted = [row.share for row, _, _ in found], [p for _, p, _ in found]
    squares = [row.weight * (p - row.share) ** 2 for row, p, _ in found]
    class_squares = [row.weight * (m - row.share) ** 2 for row, _, m in found]
    gains = list(map(sub, class_squares, squares))
    error = stdev(gains) / math.sqrt(len(gains))
    return Regression(
        prompts=len(found),
        error=math.sqrt(fmean(squares)),
        class_error=math.sqrt(fmean(class_squares)),
        rank_correlation=_rank_correlation(predicted, seen),
        class_rank_correlation=_rank_correlation([final.centres[row.prompt_class].share for row, _, _ in found], seen),
        gain=fmean(gains) / error if error else 0.0,
        model=_model(final, rows, levels),
    )


def _moments(rows: Sequence[_Row]) -> _Moments:
    """Return, by class, the sum over rows of weight times z z^T, where z is (1, share, *features)."""
    found: _Moments = {}
    for kind, group in groupby(rows, key=attrgetter("prompt_class")):
        own = list(group)
        columns = [*zip(*((1.0, row.share, *row.features) for row in own), strict=True)]
        weighted = [[row.weight * value for row, value in zip(own, column, strict=True)] for column in columns]
        found[kind] = [[_dot(one, other) for other in columns] for one in weighted]
    return found


def _plus(one: _Moments, other: _Moments, sign: int) -> _Moments:
    """Return the sum of two sets of moments, or their difference; a class without rows is left out."""
    both = dict(one)
    for kind, added in other.items():
        if kind in one:
            both[kind] = [
                [a + sign * b for a, b in zip(*lines, strict=True)] for lines in zip(one[kind], added, strict=True)
            ]
        else:
            both[kind] = added
    return {kind: sums for kind, sums in both.items() if sums[0][0] > TINY}


def _fit(moments: _Moments) -> _Fit:
    """Fit the slopes by ridge regression within classes. A feature that does not vary within any class gets none."""
    size = len(next(iter(moments.values())))
    scatter = [
        [sum(m[i][j] - m[i][0] * m[0][j] / m[0][0] for m in moments.values()) for j in range(1, size)]
        for i in range(1, size)
    ]
    prompts, features = sum(m[0][0] for m in moments.values()), range(size - 2)
    spreads = [math.sqrt(max(scatter[i + 1][i + 1], 0.0) / prompts) for i in features]
    scales = [spread if spread > TINY else math.inf for spread in spreads]
    normal = [[scatter[i + 1][j + 1] / (scales[i] * scales[j]) + RIDGE * (i == j) for j in features] for i in features]
    right = [scatter[i + 1][0] / scales[i] for i in features]
    inverse = [solve(normal, [float(i == j) for j in features]) for i in features]
    slopes = [_dot(line, right) for line in inverse]
    rest = scatter[0][0] - _dot(slopes, right) - RIDGE * _dot(slopes, slopes)
    variance = max(rest, 0.0) / max(prompts - len(moments) - len(features), 1.0)
    return _Fit(
        {kind: _centre(m) for kind, m in moments.items()},
        [slope / scale for slope, scale in zip(slopes, scales, strict=True)],
        [[variance * inverse[i][j] / (scales[i] * scales[j]) for j in features] for i in features],
    )


def _model(fit: _Fit, rows: Sequence[_Row], levels: Sequence[_Row]) -> PromptLoss:
    """Return what was fitted in the form that decisions evaluate.

    Args:
        fit: To all rows.
        rows: In the order of classes.
        levels: The rows that the classes' means are of.
    """
    classes: dict[PromptClass, ClassLine] = {}
    around = {kind: _centre(m) for kind, m in _moments(levels).items()}
    for kind, group in groupby(rows, key=attrgetter("prompt_class")):
        own, centre = list(group), around[kind]
        columns = list(zip(*(row.features for row in own), strict=True))
        lowest, highest = [min(column) for column in columns], [max(column) for column in columns]
        slopes = [slope if low < high else 0.0 for slope, low, high in zip(fit.slopes, lowest, highest, strict=True)]
        a, b, c, code, asked = slopes
        classes[kind] = ClassLine(
            offset=-_dot(slopes, centre.features),
            error=Z * max(fit.error(centre.away(row)) for row in own),
            slopes=(a, b, c, code, asked),
            seen=(lowest[0], highest[0], lowest[1], highest[1], lowest[2], highest[2]),
        )
    return PromptLoss(classes)


def _centre(moments: Sequence[Vector]) -> _Centre:
    weight, share, *features = moments[0]
    return _Centre(share / weight, tuple(value / weight for value in features))


def _dot(one: Vector, other: Vector) -> float:
    return float(sum(map(mul, one, other)))


def _rank_correlation(one: Vector, other: Vector) -> float:
    """Return Spearman's rank correlation; 0 where one side does not vary."""
    try:
        return correlation(_ranks(one), _ranks(other))
    except StatisticsError:
        return 0.0


def _ranks(values: Vector) -> list[float]:
    """Return each value's place in the order, 1..n; equal values share the mean of theirs."""
    ranks: dict[float, float] = {}
    below = 0
    for value, equal in groupby(sorted(values)):
        count = sum(1 for _ in equal)
        ranks[value] = below + (count + 1) / 2
        below += count
    return [ranks[value] for value in values]
