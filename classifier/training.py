"""Learn the weights of the class evidence, and calibrate the confidence, from labelled prompts. Not used at run time.

The model is multinomial logistic regression with an L2 penalty on all weights but the biases (Hastie, Tibshirani and
Friedman, The Elements of Statistical Learning, 2nd ed., section 4.4), which pulls each weight to what is assumed before any
data: ``prior`` for the class that a piece of evidence was made for, 0 for others. The loss is minimised by L-BFGS (Nocedal
and Wright, Numerical Optimization, 2nd ed., algorithm 7.5) from there, so that the same prompts give the same weights. The
confidence is calibrated by one temperature on out-of-fold predictions (Guo et al., On Calibration of Modern Neural
Networks, 2017), and that of code by a sigmoid (Platt, Probabilistic Outputs for Support Vector Machines, 1999).
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from dataclasses import asdict, dataclass
from operator import mul
from typing import TYPE_CHECKING, TypeAlias

from classifier.classes import Judgement, judge, judge_code, judge_long, logistic, softmax
from classifier.evidence import EXCLUSIVE, FEATURES, MADE_FOR
from classifier.kinds import PromptClass
from classifier.weights import FORMAT, JUDGED, ClassWeights, class_scores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Objective: TypeAlias = Callable[[list[float]], tuple[float, list[float]]]

DECIMALS = 3  # of a stored weight: what is less changes no decision, and differs between mathematics libraries
_EDGE_WORDS = 8  # at the start or end of a prompt, by which prompts from one template are known


@dataclass(frozen=True, slots=True)
class Example:
    """A labelled prompt, read.

    Attributes:
        label: The class that it is of.
        evidence: What ``find_evidence`` finds in it, by name, 0..1.
        code: Log-odds that it holds or asks for code.
        long: Whether it has more than ``LONG_TOKENS`` tokens.
        group: Number of the group of prompts from one template; these are never trained and scored apart.
    """

    label: PromptClass
    evidence: Mapping[str, float]
    code: float
    long: bool
    group: int

    @property
    def judged(self) -> bool:
        """Tell whether the class is judged by the weights, not settled by code or length."""
        return self.code < 0 and not self.long


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """What training depends on besides the prompts.

    Attributes:
        l2: Penalty on half the sum of the squared distances of the weights from what is assumed, to a loss summed over
            prompts; above 0.
        prior: Weight, log-odds, that evidence is assumed to have for the class that it was made for; of others it is 0.
        folds: Into which prompts are split for calibration; 2 or more.
        iterations: Of L-BFGS at most.
        tolerance: Largest component of the gradient at which it stops.
    """

    l2: float = 2.0
    prior: float = 1.0
    folds: int = 5
    iterations: int = 200
    tolerance: float = 1e-4


def train(examples: Sequence[Example], settings: TrainingSettings, provenance: Mapping[str, object]) -> ClassWeights:
    """Return weights and calibration, learned from examples.

    Args:
        examples: Of at least two of the classes in ``JUDGED``, and of two groups.
        settings: Of the training.
        provenance: What to record of the data besides the settings and the counts by class.

    Raises:
        ValueError: The examples are of fewer than two classes or groups.
    """
    judged = [example for example in examples if example.judged and example.label in JUDGED]
    if len({example.label for example in judged}) < 2 or len({example.group for example in judged}) < 2:  # noqa: PLR2004
        raise ValueError("training takes prompts of at least two classes and two groups")
    bias, weights = _fit(judged, settings)
    scored: list[tuple[list[float], PromptClass]] = []
    for number in range(settings.folds):
        trained_on = [example for example in judged if fold_of(example.group, settings.folds) != number]
        held_out = [example for example in judged if fold_of(example.group, settings.folds) == number]
        if trained_on and held_out:
            fold_bias, fold_weights = _fit(trained_on, settings)
            scored += [(class_scores(e.evidence, fold_bias, fold_weights), e.label) for e in held_out]
    with_code = [example for example in examples if example.code >= 0]
    intercept, slope = _platt([(e.code, e.label is PromptClass.CODE) for e in with_code])
    long = [example.label is PromptClass.LONG_CONTEXT for example in examples if example.long and example.code < 0]
    by_class = Counter(example.label.value for example in examples)
    return ClassWeights(
        bias=tuple(round(value, DECIMALS) for value in bias),
        weights={name: tuple(round(value, DECIMALS) for value in row) for name, row in weights.items()},
        temperature=round(_temperature(scored), DECIMALS),
        code_intercept=round(intercept, DECIMALS),
        code_slope=round(slope, DECIMALS),
        long_confidence=round((sum(long) + 1) / (len(long) + 2), DECIMALS),
        provenance={
            "format": FORMAT,
            **provenance,
            "prompts": dict(sorted(by_class.items())),
            "settings": asdict(settings),
        },
    )


def judge_example(example: Example, weights: ClassWeights) -> Judgement:
    """Return what ``extract`` would judge of an example with these weights, without signals of code."""
    if example.code >= 0:
        return judge_code(example.code, (), weights)
    return judge_long(0, weights) if example.long else judge(example.evidence, weights)


def fold_of(group: int, folds: int) -> int:
    """Return the number of a group's fold, 0 to ``folds`` - 1. Groups are numbered in the order of the data."""
    return group * 7919 % 10_007 % folds  # neighbours in the data, often from one source, are spread


def groups_of(texts: Sequence[str], sources: Sequence[str]) -> list[int]:
    """Return a group's number for each text; texts that share an edge, or a source, are of one group.

    An edge is the first or last eight words, or the first or last line where there are several, in lower case and with
    numbers alike: prompts from one template share one.

    Args:
        texts: The prompts.
        sources: A key for each that prompts share which are translations or parts of one another; empty for none.
    """
    parent = list(range(len(texts)))

    def root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    first_with: dict[str, int] = {}
    for index, (text, source) in enumerate(zip(texts, sources, strict=True)):
        for key in {*_edges(text), *([f"source {source}"] if source else [])}:
            other = root(first_with.setdefault(key, index))
            this = root(index)
            parent[max(this, other)] = min(this, other)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(index), len(numbers)) for index in range(len(texts))]


def _edges(text: str) -> list[str]:
    plain = re.sub(r"\d+", "#", text.lower().strip())
    words = plain.split()
    lines = [line.strip() for line in plain.split("\n") if line.strip()]
    edges = [" ".join(words[:_EDGE_WORDS]), " ".join(words[-_EDGE_WORDS:])]
    if len(lines) > 1:
        edges += [line for line in (lines[0], lines[-1]) if len(line.split()) > 2]  # noqa: PLR2004
    return edges


def _fit(
    examples: Sequence[Example], settings: TrainingSettings
) -> tuple[tuple[float, ...], dict[str, tuple[float, ...]]]:
    """Return the bias by class and the weights by feature and class, in the order of ``JUDGED``."""
    position = {name: number for number, name in enumerate(FEATURES)}
    width, classes = len(FEATURES) + 1, len(JUDGED)  # the last column is the bias
    rows = [[(position[name], value) for name, value in e.evidence.items()] + [(width - 1, 1.0)] for e in examples]
    labels = [JUDGED.index(example.label) for example in examples]

    def objective(point: list[float]) -> tuple[float, list[float]]:
        away = [(value - mean) * held for value, mean, held in zip(point, means, penalised, strict=True)]
        loss = settings.l2 / 2 * _dot(away, away)
        gradient = [settings.l2 * value for value in away]
        for row, label in zip(rows, labels, strict=True):
            scores = [sum(point[base + column] * value for column, value in row) for base in bases]
            shares = softmax(scores)
            loss -= math.log(max(shares[label], 1e-300))
            shares[label] -= 1
            for base, share in zip(bases, shares, strict=True):
                for column, value in row:
                    gradient[base + column] += share * value
        return loss, list(map(mul, gradient, free))

    bases = [number * width for number in range(classes)]
    penalised = [0.0 if column == width - 1 else 1.0 for _ in JUDGED for column in range(width)]
    free = [
        float(name not in EXCLUSIVE or MADE_FOR[name] is prompt_class)
        for prompt_class in JUDGED
        for name in (*FEATURES, "")
    ]
    means = [
        settings.prior if MADE_FOR.get(name) is prompt_class else 0.0
        for prompt_class in JUDGED
        for name in (*FEATURES, "")
    ]
    point = _minimise(objective, means, settings)
    weights = {name: tuple(point[base + column] for base in bases) for name, column in position.items()}
    return tuple(point[base + width - 1] for base in bases), weights


def _minimise(objective: Objective, point: list[float], settings: TrainingSettings) -> list[float]:
    """Return the point at which a smooth convex function is least, by L-BFGS with backtracking."""
    memory: deque[tuple[list[float], list[float], float]] = deque(maxlen=10)
    loss, gradient = objective(point)
    for _ in range(settings.iterations):
        if max(map(abs, gradient)) < settings.tolerance:
            break
        direction = _direction(gradient, memory)
        slope = _dot(gradient, direction)
        step = 1.0 if memory else 1.0 / max(1.0, math.sqrt(_dot(gradient, gradient)))
        while True:
            moved = [at + step * along for at, along in zip(point, direction, strict=True)]
            new_loss, new_gradient = objective(moved)
            if new_loss <= loss + 1e-4 * step * slope or step < 1e-10:  # noqa: PLR2004
                break
            step /= 2
        change = [new - old for new, old in zip(moved, point, strict=True)]
        turn = [new - old for new, old in zip(new_gradient, gradient, strict=True)]
        curvature = _dot(change, turn)
        if curvature > 1e-12:  # noqa: PLR2004
            memory.append((change, turn, 1 / curvature))
        point, loss, gradient = moved, new_loss, new_gradient
    return point


def _direction(gradient: list[float], memory: deque[tuple[list[float], list[float], float]]) -> list[float]:
    """Return the direction of descent: the two-loop recursion."""
    direction = [-value for value in gradient]
    factors: list[float] = []
    for change, turn, rho in reversed(memory):
        factor = rho * _dot(change, direction)
        factors.append(factor)
        direction = [value - factor * other for value, other in zip(direction, turn, strict=True)]
    if memory:
        change, turn, _ = memory[-1]
        scale = _dot(change, turn) / _dot(turn, turn)
        direction = [scale * value for value in direction]
    for (change, turn, rho), factor in zip(memory, reversed(factors), strict=True):
        back = factor - rho * _dot(turn, direction)
        direction = [value + back * other for value, other in zip(direction, change, strict=True)]
    return direction


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return float(sum(map(mul, left, right)))


def _temperature(scored: Sequence[tuple[list[float], PromptClass]]) -> float:
    """Return the temperature, 0.3..3, at which held-out scores have the least log loss, by golden-section search."""

    def loss(temperature: float) -> float:
        return -sum(
            math.log(max(softmax([score / temperature for score in scores])[JUDGED.index(label)], 1e-300))
            for scores, label in scored
        )

    low, high = 0.3, 3.0
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:  # noqa: PLR2004
        left, right = high - golden * (high - low), low + golden * (high - low)
        if loss(left) < loss(right):
            high = right
        else:
            low = left
    return (low + high) / 2


def _platt(pairs: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """Return intercept and slope (0 or more) of the log-odds of being right, from a score.

    Targets are Platt's: (right + 1) / (right + 2) and 1 / (wrong + 2), so that few prompts give no certainty. Where a
    higher score is right less often, the slope is 0 and the confidence the share of right ones.
    """
    right = sum(truth for _, truth in pairs)
    high, low = (right + 1) / (right + 2), 1 / (len(pairs) - right + 2)
    targets = [(score, high if truth else low) for score, truth in pairs]
    mean = sum(target for _, target in targets) / len(targets) if targets else 0.5
    base = math.log(mean / (1 - mean))
    intercept, slope = base, 0.0
    for _ in range(100):  # Newton's method with a little damping, two parameters
        shares = [logistic(intercept + slope * score) for score, _ in targets]
        errors = [share - target for share, (_, target) in zip(shares, targets, strict=True)]
        spread = [share * (1 - share) for share in shares]
        a = sum(spread) + 1e-3
        b = sum(weight * score for weight, (score, _) in zip(spread, targets, strict=True))
        c = sum(weight * score * score for weight, (score, _) in zip(spread, targets, strict=True)) + 1e-3
        first = sum(errors)
        second = sum(error * score for error, (score, _) in zip(errors, targets, strict=True))
        determinant = a * c - b * b
        intercept -= (c * first - b * second) / determinant
        slope -= (a * second - b * first) / determinant
    return (intercept, slope) if slope > 0 else (base, 0.0)
