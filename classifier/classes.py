"""What kind of work is a prompt? The evidence weighed by learned weights, and an honest "don't know"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from classifier.evidence import SHAPES
from classifier.kinds import PromptClass
from classifier.weights import JUDGED, ClassWeights, class_scores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LONG_TOKENS = 1500
MIN_PROBABILITY = 0.4  # of the likeliest class, below which no class is named
_SIGNAL = 0.25  # log-odds, above which evidence is said to speak for a class
_CODE = JUDGED.index(PromptClass.CODE)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A class, the confidence in it (0..1), and the names of the evidence, the weightiest first."""

    prompt_class: PromptClass
    confidence: float
    signals: tuple[str, ...]


def judge(evidence: Mapping[str, float], weights: ClassWeights) -> Judgement:
    """Return the class of a prompt that neither holds nor asks for code and is not long.

    The confidence is the probability of the class by multinomial logistic regression. ``unknown`` is returned where
    no evidence of what is asked speaks for the likeliest class, or none is likely; its confidence is then the probability
    that the likeliest class would have been wrong.

    Args:
        evidence: Names from ``evidence.FEATURES``, 0..1 each.
        weights: What training learned.
    """
    scores = class_scores(evidence, weights.bias, weights.weights)
    shares = softmax([score / weights.temperature for score in scores])
    best = max((number for number in range(len(JUDGED)) if number != _CODE), key=shares.__getitem__)
    signals = _signals(evidence, best, weights)
    if shares[best] < MIN_PROBABILITY or SHAPES.issuperset(signals):
        return Judgement(PromptClass.UNKNOWN, 1 - shares[best], ())
    return Judgement(JUDGED[best], shares[best], signals)


def judge_code(log_odds: float, signals: tuple[str, ...], weights: ClassWeights) -> Judgement:
    """Return the class code, with the probability that the log-odds of holding or asking for code give."""
    confidence = logistic(weights.code_intercept + weights.code_slope * log_odds)
    return Judgement(PromptClass.CODE, confidence, signals)


def judge_long(tokens: int, weights: ClassWeights) -> Judgement:
    """Return the class of a prompt of more than ``LONG_TOKENS`` tokens."""
    return Judgement(PromptClass.LONG_CONTEXT, weights.long_confidence, (f"{tokens} tokens",))


def softmax(scores: Sequence[float]) -> list[float]:
    """Return probabilities, 0..1 with the sum 1, for scores of any size."""
    highest = max(scores)
    powers = [math.exp(score - highest) for score in scores]
    total = sum(powers)
    return [power / total for power in powers]


def logistic(log_odds: float) -> float:
    """Return the probability, 0..1, for log-odds."""
    return 1 / (1 + math.exp(-max(-30.0, min(log_odds, 30.0))))


def _signals(evidence: Mapping[str, float], best: int, weights: ClassWeights) -> tuple[str, ...]:
    """Return the names of the evidence that speaks for a class, the weightiest first."""
    gains: list[tuple[float, str]] = []
    for name, degree in evidence.items():
        gain = degree * weights.weights[name][best]
        if gain > _SIGNAL:
            gains.append((-gain, name))
    return tuple(name for _, name in sorted(gains))
