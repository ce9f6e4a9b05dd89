"""The trained model: fastText with one yes or no for each output (Joulin et al., arXiv 1607.01759).

A text is read as words, marks, digits and line breaks. Each is known by itself, by its runs of characters and by the word
before it; the vectors of all are averaged, and a linear layer gives the probability of each output.
``scripts/train_classifier.py`` writes ``weights.ftz``, which the library reads, and ``weights.json``, which calibrates it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any

import fasttext
from msgspec import Struct

from classifier.errors import WeightsError
from classifier.kinds import JUDGED

WEIGHTS_FILE = Path(__file__).with_name("weights.ftz")
ABOUT_FILE = "weights.json"
HAS, ASKS, CONTAINS, BEYOND_TRIVIAL, COMPLEX, SMALL_TALK = range(6)
CLASSES = SMALL_TALK + 1  # The outputs from here on are the classes in ``JUDGED``.
OUTPUTS = (
    "has code",
    "asks",
    "contains",
    "beyond trivial",
    "complex",
    "small talk",
    *JUDGED,
)
LABEL = "__label__"
LANGUAGE = "__label__language:"
LABELS = {
    f"{LABEL}{output.replace(' ', '-')}": number
    for number, output in enumerate(OUTPUTS)
}
# The beginning and the end of a longer text are read, and nothing between them.
HEAD_CHARS = 950
TAIL_CHARS = 350
MIN_NAMED_PROBABILITY = (
    1e-3  # fastText does not name outputs that are less probable, which saves time.
)
# Probabilities are kept this far from 0 and 1, so that their log-odds are finite.
PROBABILITY_MARGIN = 1e-4
MAX_LOG_ODDS = 30.0  # Log-odds are cut here, so that ``exp`` does not overflow.
# Words with single spaces between them are matched together: ``line_of`` joins parts by spaces, so the line is the same, and
# fewer matches take less time.
_PARTS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*|\d|\n|[^\w\s]+|_+")
# ``_PARTS`` for ASCII, faster
_ASCII_PARTS = re.compile(
    r"[a-z]+(?: [a-z]+)*|[0-9]|\n|[^a-z0-9_\s\x1c-\x1f]+|_+", re.ASCII
)
_EVEN = 0.5
# Certain marks of code: all but the last start a line, and none occurs in prose.
MARKS = {
    "fenced block": "\n```",
    "traceback": "\nTraceback (most recent call last)",
    "shebang": "\n#!/",
    "diff header": "\n@@ -",
    "include": "\n#include",
    "PHP tag": "<?php",
}


class Prediction(Struct, frozen=True):
    """What the model finds in a text. All but the last two are probabilities, 0..1.

    Attributes:
        has_code: The text holds or asks for code.
        asks_for_code: A good answer is mainly code.
        contains_code: The text holds code.
        beyond_trivial: The work is more than trivial.
        complex: The work is complex.
        small_talk: No answer can be right or wrong, as with greetings and thanks.
        classes: One probability for each class in ``JUDGED``, given that there is no code; they add up to 1.
        language: The likeliest programming language; None: there is no code, or its language is left open.
        marks: Names of the certain marks of code in the text.
    """

    has_code: float
    asks_for_code: float
    contains_code: float
    beyond_trivial: float
    complex: float
    small_talk: float
    classes: tuple[float, ...]
    language: str | None
    marks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """The weights, and how their log-odds are calibrated: log-odds times slope plus shift (Platt, 1999).

    Attributes:
        fast: fastText's model.
        slope: One for each output.
        shift: One for each output.
        unnamed_log_odds: Calibrated log-odds of each output where fastText does not name it.
        about: Data and settings of the training.
    """

    fast: Any
    slope: tuple[float, ...]
    shift: tuple[float, ...]
    unnamed_log_odds: tuple[float, ...]
    about: Mapping[str, Any]

    def predict(self, text: str, second: Sequence[float] = ()) -> Prediction:
        """Classify a text.

        Args:
            text: Any string; only its beginning and end are read if it is long.
            second: What a second look adds to the log-odds of each of ``OUTPUTS``; empty: there was none.
        """
        log_odds, language = self.read(line_of(text))
        if second:
            log_odds = [
                first + added for first, added in zip(log_odds, second, strict=True)
            ]
        probabilities = [
            1 / (1 + exp(-max(-MAX_LOG_ODDS, min(value, MAX_LOG_ODDS))))
            for value in log_odds[:CLASSES]
        ]
        has_code = probabilities[HAS]
        if has_code < _EVEN:
            language = None
        return Prediction(
            has_code=has_code,
            asks_for_code=probabilities[ASKS],
            contains_code=probabilities[CONTAINS],
            beyond_trivial=probabilities[BEYOND_TRIVIAL],
            complex=probabilities[COMPLEX],
            small_talk=probabilities[SMALL_TALK],
            classes=softmax(log_odds[CLASSES:]),
            language=language,
            marks=marks_in(text),
        )

    def read(
        self, line: str, threshold: float = MIN_NAMED_PROBABILITY
    ) -> tuple[list[float], str | None]:
        """Return the log-odds of each output for a line, and the likeliest programming language."""
        log_odds = list(self.unnamed_log_odds)
        language = None
        for probability, label in self.fast.f.predict(
            line + "\n", -1, threshold, "strict"
        ):
            number = LABELS.get(label)
            if number is not None:
                uncalibrated = log(
                    max(probability, PROBABILITY_MARGIN)
                    / max(1 - probability, PROBABILITY_MARGIN)
                )
                log_odds[number] = (
                    self.slope[number] * uncalibrated + self.shift[number]
                )
            elif language is None:  # fastText names the likeliest first.
                language = label.removeprefix(LANGUAGE)
        return log_odds, language


def softmax(log_odds: Sequence[float]) -> tuple[float, ...]:
    """Return probabilities that add up to 1."""
    highest = max(log_odds)
    powers = [exp(value - highest) for value in log_odds]
    total = sum(powers)
    return tuple([power / total for power in powers])


def marks_in(text: str) -> tuple[str, ...]:
    """Return the names of certain marks of code at the beginning of a text."""
    # Marks that start a line are found at the very beginning too.
    head = f"\n{text[:HEAD_CHARS]}"
    marks: tuple[str, ...] = ()
    for name, mark in MARKS.items():
        if mark in head:
            marks += (name,)
    return marks


def line_of(text: str) -> str:
    """Return a text's parts, separated by spaces: words in lower case, runs of marks, digits and line breaks."""
    if len(text) > HEAD_CHARS + TAIL_CHARS:
        text = f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"
    if text.isascii():
        parts = _ASCII_PARTS.findall(text.lower())
    else:
        without_surrogates = text.encode("utf-8", "replace").decode()
        parts = _PARTS.findall(without_surrogates.lower())
    return " ".join(parts).replace("\n", "⏎") or "∅"


@cache
def shipped_model() -> Model:
    """Return the model that comes with the package, read once, at the first call.

    Raises:
        WeightsError: A file is missing or does not fit this code.
    """
    return load_model(WEIGHTS_FILE)


def load_model(file: Path) -> Model:
    """Read a weights file and the calibration beside it.

    Raises:
        WeightsError: One cannot be read, they do not belong together, or they have other outputs than this code's.
    """
    beside = file.with_name(ABOUT_FILE)
    try:
        about = json.loads(beside.read_text("utf-8"))
        if about["sha256"] != digest(file):
            raise WeightsError(
                f"{beside} was not written with {file.name}; run scripts/train_classifier.py"
            )
        if tuple(about["outputs"]) != OUTPUTS:
            raise WeightsError(
                f"{file} has other outputs than this code's; run scripts/train_classifier.py"
            )
        return model_of(
            fasttext.load_model(str(file)), about["slope"], about["shift"], about
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"cannot read the classifier's weights {file}: {error!r}"
        ) from error


def model_of(
    fast: Any, slope: Sequence[float], shift: Sequence[float], about: Mapping[str, Any]
) -> Model:
    """Return fastText's model with its calibration."""
    unnamed_log_odds = [
        a * log(MIN_NAMED_PROBABILITY) + b for a, b in zip(slope, shift, strict=True)
    ]
    return Model(
        fast=fast,
        slope=tuple(slope),
        shift=tuple(shift),
        unnamed_log_odds=tuple(unnamed_log_odds),
        about=about,
    )


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
