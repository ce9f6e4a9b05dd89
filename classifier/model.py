"""The trained model: two sums over the rows that a text gives, read once from ``weights.npz``.

In the first, each word, pair and run of characters adds log-odds to each output. In the second, each word adds to a few
hidden units, of which those above zero add log-odds. So what each word adds can still be told: the units above zero are
linear in the words. A third table has the scores of programming languages, and is read for prompts with code alone.
``scripts/train_classifier.py`` writes the file; calibration is already in the weights.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from classifier.errors import WeightsError
from classifier.kinds import JUDGED, Complexity
from classifier.reading import (
    END_SCALE,
    LANGUAGE_ROWS,
    ROWS,
    RUN_SCALE,
    RUNS,
    SHAPE_WIDTH,
    VERSION,
    WORD_SCALE,
    Reading,
    language_rows,
    read,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

FORMAT = 3
WEIGHTS_FILE = Path(__file__).with_name("weights.npz")
HAS, ASKS, CONTAINS, BEYOND_TRIVIAL, COMPLEX = range(5)
OUTPUTS = ("has code", "asks", "contains", "beyond trivial", "complex", *JUDGED)
_CLASSES = slice(COMPLEX + 1, len(OUTPUTS))


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model finds in a text.

    Attributes:
        has_code: Probability that the text holds or asks for code, 0..1; so the next two.
        asks_for_code: That it asks for code.
        contains_code: That it holds code.
        classes: Of each class in ``JUDGED`` where it has no code, 0..1 with the sum 1.
        language: Id of the likeliest programming language, if there is code; None where it is left open.
        beyond_trivial: Probability that the work is more than trivial, 0..1.
        complex: Probability that it is complex, 0..1.
        marks: Certain marks of code that were found.
    """

    has_code: float
    asks_for_code: float
    contains_code: float
    classes: tuple[float, ...]
    language: str | None
    beyond_trivial: float
    complex: float
    marks: tuple[str, ...]

    @property
    def complexity(self) -> Complexity:
        """Return the degree that splits the probability most evenly."""
        if self.complex >= 0.5:  # noqa: PLR2004
            return Complexity.COMPLEX
        return Complexity.MODERATE if self.beyond_trivial >= 0.5 else Complexity.TRIVIAL  # noqa: PLR2004


@dataclass(frozen=True, slots=True)
class Model:
    """Weights, ready for use.

    Attributes:
        table: What each row adds to the outputs, in eight bits: a third of the time that four bytes take from memory.
        scale: What these are to be multiplied by, for each output.
        shape: The same for the shape of the text.
        bias: The same of every text.
        hidden_table: What each row of words adds to the hidden units, in eight bits.
        hidden_scale: What these are to be multiplied by, for each unit.
        hidden_bias: What every text adds.
        hidden_outputs: What each unit above zero adds to the outputs.
        language_table: What each row adds to the score of each language, in eight bits.
        language_scale: What these are to be multiplied by.
        language_bias: Their scores in every text.
        languages: Their ids; None for one that is left open or is rare.
        about: Data, code and settings of the training.
    """

    table: NDArray[np.int8]
    scale: Floats
    shape: Floats
    bias: Floats
    hidden_table: NDArray[np.int8]
    hidden_scale: Floats
    hidden_bias: Floats
    hidden_outputs: Floats
    language_table: NDArray[np.int8]
    language_scale: Floats
    language_bias: Floats
    languages: tuple[str | None, ...]
    about: Mapping[str, Any]

    def predict(self, text: str) -> Prediction:
        """Return what is found in a text, any string."""
        reading = read(text)
        units = np.maximum(self.hidden(reading), 0)
        found = row_weights(reading) @ self.table.take(reading.rows, 0)
        sums = self.bias + reading.shape @ self.shape + found * self.scale + units @ self.hidden_outputs
        has, asks, contains, more, most = map(logistic, sums[: COMPLEX + 1].tolist())
        classes = softmax(sums[_CLASSES].tolist())
        language = self._language(reading) if has >= 0.5 else None  # noqa: PLR2004
        return Prediction(has, asks, contains, classes, language, more, most, reading.marks)

    def _language(self, reading: Reading) -> str | None:
        words, runs = language_rows(reading)
        rows = np.concatenate((words, runs))
        sums = weights((len(words), WORD_SCALE), (len(runs), RUN_SCALE)) @ self.language_table.take(rows, 0)
        return self.languages[int((self.language_bias + sums * self.language_scale).argmax())]

    def hidden(self, reading: Reading) -> Floats:
        """Return the hidden units; those above zero count."""
        found = unit_weights(reading) @ self.hidden_table.take(reading.rows[reading.words : reading.runs], 0)
        units: Floats = found * self.hidden_scale + self.hidden_bias
        return units


def row_weights(reading: Reading) -> Floats:
    """Return how much each row of a reading counts for the outputs."""
    ends, runs = reading.ends, reading.runs
    return weights((ends, WORD_SCALE), (runs - ends, END_SCALE), (len(reading.rows) - runs, RUN_SCALE))


def unit_weights(reading: Reading) -> Floats:
    """Return how much each word, first word and last word counts for the hidden units."""
    edge = (reading.runs - reading.ends) // 2
    return weights((len(reading.starts), 1.0), (edge, 1.0), (edge, 1.0))


def weights(*parts: tuple[int, float]) -> Floats:
    """Return a weight for each row of parts of some lengths: each part counts by the root of its length."""
    each = np.array([scale / math.sqrt(count or 1) for count, scale in parts], np.float32)
    return each.repeat([count for count, _ in parts])


def logistic(log_odds: float) -> float:
    """Return the probability, 0..1, for log-odds."""
    return 1 / (1 + math.exp(-max(-30.0, min(log_odds, 30.0))))


def softmax(scores: list[float]) -> tuple[float, ...]:
    """Return probabilities, 0..1 with the sum 1, for scores of any size."""
    highest = max(scores)
    powers = [math.exp(score - highest) for score in scores]
    total = sum(powers)
    return tuple(power / total for power in powers)


@cache
def shipped_model() -> Model:
    """Return the model that comes with the package, read once, at the first call.

    Raises:
        WeightsError: The file is missing or does not fit this code.
    """
    return load_model(WEIGHTS_FILE)


def load_model(file: Path) -> Model:
    """Read a weights file.

    Raises:
        WeightsError: The file cannot be read, is no weights file, or is for other features than this code's.
    """
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as content:
            about = json.loads(content["about"].tobytes())
            if about["format"] != FORMAT or about["features"] != VERSION or tuple(about["outputs"]) != OUTPUTS:
                raise WeightsError(f"{file.name} does not fit this code; run scripts/train_classifier.py")
            arrays = {name: content[name] for name in content.files if name != "about"}
            model = Model(**arrays, languages=tuple(about["languages"]), about=about)
    except (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise WeightsError(f"cannot read the classifier's weights {file}: {error!r}") from error
    shapes = (model.table.shape, model.shape.shape, model.hidden_table.shape[0], model.language_table.shape[0])
    sizes = ((ROWS, len(OUTPUTS)), (SHAPE_WIDTH, len(OUTPUTS)), RUNS, LANGUAGE_ROWS)
    if shapes != sizes or len(model.language_bias) != len(model.languages):
        raise WeightsError(f"{file.name} has tables of other sizes than this code's")
    return model
