"""Explain a classification: the log-odds of each two words alone, since those of a text are about their mean."""

from __future__ import annotations

from itertools import pairwise

from classifier.kinds import JUDGED
from classifier.model import (
    ASKS,
    CLASSES,
    COMPLEX,
    CONTAINS,
    OUTPUTS,
    SMALL_TALK,
    line_of,
    shipped_model,
)

MIN_LOG_ODDS = 0.05  # Pairs of words that weigh less are left out.
MAX_WORDS = 200  # Only the first words of a prompt are tried.


def explain(text: str, max_pairs: int = 5) -> dict[str, list[tuple[str, float]]]:
    """Return the pairs of neighbouring words that weighed most, and their log-odds, the weightiest first.

    Args:
        text: Any string.
        max_pairs: Pairs of each output at most; 1 or more.

    Returns:
        By output: ``asks`` and ``contains`` code, ``small talk`` or the likeliest class without code, and ``complex`` work.

    Raises:
        WeightsError: The weights that come with the package cannot be read.
    """
    model = shipped_model()
    line = line_of(text)
    log_odds_of_text, _ = model.read(line, 0)
    log_odds_of_nothing, _ = model.read("", 0)
    log_odds_of_pairs = {pair: model.read(pair, 0)[0] for pair in _word_pairs(line)}
    explanation = {}
    for output in (ASKS, CONTAINS, _likeliest_kind(log_odds_of_text), COMPLEX):
        baseline = log_odds_of_nothing[output]
        weights = [
            (pair, round(log_odds[output] - baseline, 2))
            for pair, log_odds in log_odds_of_pairs.items()
        ]
        explanation[_name_of(output)] = _heaviest(weights, max_pairs)
    return explanation


def _word_pairs(line: str) -> list[str]:
    """Return each two neighbouring words once; a lone word stands for itself."""
    words = line.split(" ")[:MAX_WORDS]
    pairs = [" ".join(pair) for pair in pairwise(words)]
    return list(dict.fromkeys(pairs or words))


def _heaviest(
    weights: list[tuple[str, float]], max_pairs: int
) -> list[tuple[str, float]]:
    """Return the pairs that weigh most, the weightiest first, without those that hardly count."""
    heaviest = sorted(weights, key=lambda weight: -abs(weight[1]))[:max_pairs]
    return [weight for weight in heaviest if abs(weight[1]) >= MIN_LOG_ODDS]


def _likeliest_kind(log_odds: list[float]) -> int:
    """Return the output of small talk, if the text is more likely small talk than not, else of its likeliest class."""
    if log_odds[SMALL_TALK] >= 0:
        return SMALL_TALK
    of_classes = log_odds[CLASSES:]
    return CLASSES + of_classes.index(max(of_classes))


def _name_of(output: int) -> str:
    if output >= CLASSES:
        return JUDGED[output - CLASSES].value
    return OUTPUTS[output]
