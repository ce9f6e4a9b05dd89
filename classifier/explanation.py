"""What weighed most in a prompt: the log-odds of each two words alone, since a text counts as the mean of those."""

from __future__ import annotations

from itertools import pairwise

from classifier.kinds import JUDGED
from classifier.model import ASKS, CLASSES, COMPLEX, CONTAINS, OUTPUTS, SMALL_TALK, line_of, shipped_model

LEAST = 0.05  # log-odds: what is less is not told
WORDS = 200  # of a prompt, that are tried


def explain(text: str, most: int = 5) -> dict[str, list[tuple[str, float]]]:
    """Return the pairs of neighbouring words that weighed most, and their log-odds, the weightiest first.

    Args:
        text: Any string.
        most: Pairs of each output at most; 1 or more.

    Returns:
        By output: ``asks`` and ``contains`` code, ``small talk`` or the likeliest class without code, and ``complex`` work.

    Raises:
        WeightsError: The weights that come with the package cannot be read.
    """
    model, line = shipped_model(), line_of(text)
    whole, nothing = model.read(line, 0)[0], model.read("", 0)[0]
    words = line.split(" ")[:WORDS]
    pairs = [" ".join(pair) for pair in pairwise(words)] or words
    alone = {pair: model.read(pair, 0)[0] for pair in dict.fromkeys(pairs)}
    likeliest = SMALL_TALK if whole[SMALL_TALK] >= 0 else CLASSES + whole[CLASSES:].index(max(whole[CLASSES:]))
    told = {}
    for output in (ASKS, CONTAINS, likeliest, COMPLEX):
        weights = [(pair, round(odds[output] - nothing[output], 2)) for pair, odds in alone.items()]
        ranked = sorted(weights, key=lambda pair: -abs(pair[1]))[:most]
        name = JUDGED[output - CLASSES].value if output >= CLASSES else OUTPUTS[output]
        told[name] = [pair for pair in ranked if abs(pair[1]) >= LEAST]
    return told
