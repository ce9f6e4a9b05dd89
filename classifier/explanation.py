"""What weighed most in a prompt: the log-odds are a sum over its words, once it is known which hidden units count."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from classifier.kinds import JUDGED
from classifier.model import (
    ASKS,
    COMPLEX,
    CONTAINS,
    HEAD_RUNS,
    MARKS,
    OUTPUTS,
    PAIRS,
    TAIL_RUNS,
    Model,
    Reading,
    read,
    shipped_model,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST = 0.05  # log-odds: what is less is not told


def explain(text: str, most: int = 5) -> dict[str, list[tuple[str, float]]]:
    """Return the words, pairs of words and marks that weighed most, and their log-odds, the weightiest first.

    Args:
        text: Any string.
        most: Pieces of each output at most; 1 or more.

    Returns:
        By output: ``asks`` and ``contains`` code, the likeliest class without code, and ``complex`` work.

    Raises:
        WeightsError: The weights that come with the package cannot be read.
    """
    model = shipped_model()
    classes = model.predict(text).classes
    first_class = COMPLEX + 1
    likeliest = first_class + classes.index(max(classes))
    pieces = _pieces(read(text), model)
    told = {}
    for output in (ASKS, CONTAINS, likeliest, COMPLEX):
        name = JUDGED[output - first_class].value if output >= first_class else OUTPUTS[output]
        ranked = sorted(
            ((piece, float(sums[output])) for piece, sums in pieces.items()), key=lambda pair: -abs(pair[1])
        )
        told[name] = [(piece, round(weight, 2)) for piece, weight in ranked[:most] if abs(weight) >= LEAST]
    return told


def _pieces(reading: Reading, model: Model) -> dict[str, NDArray[np.float32]]:
    """Return what each word, with its place and its letters, each pair of words and each mark adds to the outputs."""
    part = reading.line[1:]
    starts = reading.starts.tolist()
    ends = [*starts, len(part)][1:]
    names = [part[start:end].strip(" \n") or "line break" for start, end in zip(starts, ends, strict=True)]
    names[-1:] = ["end of the prompt"]  # the line break that is added to each prompt
    names += [f"{first} {second}" for first, second in pairwise(names)]
    words, runs = reading.words, reading.runs
    weights = model.table[reading.rows] * (reading.weights[:, None] * model.scale)
    counting = (model.hidden(reading) > 0)[:, None] * model.hidden_outputs
    units = model.hidden_table[reading.rows[words:runs]] * (reading.unit_weights[:, None] * model.hidden_scale)
    weights[words:runs] += units @ counting
    sums: dict[str, NDArray[np.float32]] = {}
    for owner, adds in zip(_owners(reading, len(part)), weights, strict=True):
        sums[names[owner]] = sums.get(names[owner], 0) + adds
    for mark in reading.marks:
        sums[mark] = model.shape[PAIRS + list(MARKS).index(mark)]
    return sums


def _owners(reading: Reading, chars: int) -> list[int]:
    """Return the number of the word, or after those of the pair, that each row comes from."""
    count = len(reading.starts)
    words = list(range(count))
    edge = (reading.runs - reading.ends) // 2
    runs = np.arange(len(reading.rows) - reading.runs)
    if chars > HEAD_RUNS + TAIL_RUNS:
        runs[HEAD_RUNS:] += chars - HEAD_RUNS - TAIL_RUNS
    owners = np.maximum(np.searchsorted(reading.starts, runs, side="right") - 1, 0).tolist()
    pairs = range(count, 2 * count - 1)
    return [*pairs, *words, *words[:edge], *words[count - edge :], *owners]
