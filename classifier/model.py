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
from typing import Any, NamedTuple

import fasttext

from classifier.errors import WeightsError
from classifier.kinds import JUDGED

WEIGHTS_FILE = Path(__file__).with_name("weights.ftz")
ABOUT_FILE = "weights.json"
HAS, ASKS, CONTAINS, BEYOND_TRIVIAL, COMPLEX, SMALL_TALK = range(6)
CLASSES = SMALL_TALK + 1  # where the outputs of the classes start
OUTPUTS = ("has code", "asks", "contains", "beyond trivial", "complex", "small talk", *JUDGED)
LABEL, LANGUAGE = "__label__", "__label__language:"
LABELS = {f"{LABEL}{output.replace(' ', '-')}": number for number, output in enumerate(OUTPUTS)}
HEAD_CHARS, TAIL_CHARS = 950, 350  # of a text that is longer, what is read
LEAST = 1e-3  # probabilities below it are not told apart: naming them takes time
SMALLEST = 1e-4  # probability
MOST = 30.0  # log-odds
_PARTS = re.compile(r"[^\W\d_]+|\d|\n|[^\w\s]+|_+")
_ASCII_PARTS = re.compile(r"[a-z]+|[0-9]|\n|[^a-z0-9_\s\x1c-\x1f]+|_+", re.ASCII)  # the same, faster
_EVEN = 0.5
# What is certain: each but the last starts a line, and none is found in prose.
MARKS = {
    "fenced block": "\n```",
    "traceback": "\nTraceback (most recent call last)",
    "shebang": "\n#!/",
    "diff header": "\n@@ -",
    "include": "\n#include",
    "PHP tag": "<?php",
}


class Prediction(NamedTuple):
    """What the model finds in a text. All but the last two are probabilities, 0..1."""

    has_code: float  # the text holds or asks for code
    asks_for_code: float
    contains_code: float
    beyond_trivial: float  # the work is more than trivial
    complex: float
    small_talk: float  # no answer to it can be right or wrong: greetings, thanks and the like
    classes: tuple[float, ...]  # of each class in ``JUDGED`` where it has no code; their sum is 1
    language: str | None  # id of the likeliest programming language, if there is code; None where it is left open
    marks: tuple[str, ...]  # certain marks of code that were found


@dataclass(frozen=True, slots=True)
class Model:
    """The weights, and how probabilities become calibrated ones."""

    fast: Any  # fastText's own
    slope: tuple[float, ...]  # of each output's log-odds
    shift: tuple[float, ...]
    least: tuple[float, ...]  # log-odds of an output that fastText does not name
    about: Mapping[str, Any]  # data, code and settings of the training

    def predict(self, text: str, second: Sequence[float] = ()) -> Prediction:
        """Return what is found.

        Args:
            text: Any string; the work is bounded.
            second: What a second look adds to the log-odds of each of ``OUTPUTS``; empty: there was none.
        """
        odds, language = self.read(line_of(text))
        if second:
            odds = [first + added for first, added in zip(odds, second, strict=True)]
        has, asks, contains, more, most, talk = [1 / (1 + exp(-max(-MOST, min(each, MOST)))) for each in odds[:CLASSES]]
        highest = max(odds[CLASSES:])
        powers = [exp(each - highest) for each in odds[CLASSES:]]
        total = sum(powers)
        classes = tuple([power / total for power in powers])
        line = f"\n{text[:HEAD_CHARS]}"
        marks: tuple[str, ...] = ()
        for name, mark in MARKS.items():
            if mark in line:
                marks += (name,)
        return Prediction(has, asks, contains, more, most, talk, classes, language if has >= _EVEN else None, marks)

    def read(self, line: str, least: float = LEAST) -> tuple[list[float], str | None]:
        """Return the log-odds of each output for a line, and the likeliest programming language."""
        odds, language = list(self.least), None
        for probability, label in self.fast.f.predict(line + "\n", -1, least, "strict"):
            number = LABELS.get(label)
            if number is not None:
                own = log(max(probability, SMALLEST) / max(1 - probability, SMALLEST))
                odds[number] = self.slope[number] * own + self.shift[number]
            elif language is None:  # the likeliest come first
                language = label.removeprefix(LANGUAGE)
        return odds, language


def line_of(text: str) -> str:
    """Return what is read of a text: words in lower case, runs of marks, digits and line breaks, with spaces between."""
    if len(text) > HEAD_CHARS + TAIL_CHARS:
        text = f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"
    if text.isascii():
        found = _ASCII_PARTS.findall(text.lower())
    else:
        found = _PARTS.findall(text.encode("utf-8", "replace").decode().lower())
    return " ".join(found).replace("\n", "⏎") or "∅"


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
            raise WeightsError(f"{beside} was not written with {file.name}; run scripts/train_classifier.py")
        if tuple(about["outputs"]) != OUTPUTS:
            raise WeightsError(f"{file} has other outputs than this code's; run scripts/train_classifier.py")
        return model_of(fasttext.load_model(str(file)), about["slope"], about["shift"], about)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"cannot read the classifier's weights {file}: {error!r}") from error


def model_of(fast: Any, slope: Sequence[float], shift: Sequence[float], about: Mapping[str, Any]) -> Model:
    """Return fastText's model with its calibration."""
    least = [a * log(LEAST) + b for a, b in zip(slope, shift, strict=True)]
    return Model(fast, tuple(slope), tuple(shift), tuple(least), about)


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
