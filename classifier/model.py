"""The trained model: what it reads of a text, and how it weighs that.

A text gives rows of tables, of hashed words, pairs of words and runs of four characters, and its shape. No loop over
characters or words: every step is one NumPy operation on the whole text. A word's hash is a polynomial in its code points
modulo 2**64, made from sums between word starts and multiplied by the inverse power of the place where the word starts (Karp
and Rabin, Efficient randomized pattern-matching algorithms, 1987). Rows are the hash's highest bits.

The weights are two sums over those rows, read once from ``weights.npz``. In the first, each word, pair and run of characters
adds log-odds to each output. In the second, each word adds to a few hidden units, of which those above zero add log-odds. So
what each word adds can still be told: the units above zero are linear in the words. A third table has the scores of
programming languages, and is read for prompts with code alone. ``scripts/train_classifier.py`` writes the file; calibration
is already in the weights.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from dataclasses import dataclass
from functools import cache
from math import exp, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from zipfile import BadZipFile

import numpy as np

from classifier.errors import WeightsError
from classifier.kinds import JUDGED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float32]
    Hashes: TypeAlias = NDArray[np.uint64]

FORMAT = 3
WEIGHTS_FILE = Path(__file__).with_name("weights.npz")
HAS, ASKS, CONTAINS, BEYOND_TRIVIAL, COMPLEX = range(5)
OUTPUTS = ("has code", "asks", "contains", "beyond trivial", "complex", *JUDGED)
_CLASSES = COMPLEX + 1  # where the outputs of the classes start
VERSION = 2  # of the features: weights are for one version
HEAD_CHARS, TAIL_CHARS = 4000, 2000  # of a text, whose words are read
HEAD_RUNS, TAIL_RUNS = 1000, 500  # characters, of which runs of four are read
EDGE_WORDS = 16  # at either end, which count a second time by the end that they stand at
WORD_BITS, RUN_BITS = 16, 15  # log2 of the rows of words and pairs, of the words of each end too, and of runs
FIRST, LAST = 1 << WORD_BITS, 2 << WORD_BITS  # where the rows of each end start
RUNS = 3 << WORD_BITS
ROWS = RUNS + (1 << RUN_BITS)
LANGUAGE_WORD_BITS, LANGUAGE_RUN_BITS = 14, 13  # of the table of languages, which has words, pairs and runs alone
LANGUAGE_RUNS = 1 << LANGUAGE_WORD_BITS
LANGUAGE_ROWS = LANGUAGE_RUNS + (1 << LANGUAGE_RUN_BITS)
LANGUAGE_WORDS, LANGUAGE_LENGTH = 400, 800  # words, and runs, from the start, that tell the language
WORD_SCALE, END_SCALE, RUN_SCALE = 1.0, 0.7, 0.7  # of each part's sum, divided by the root of the number of its rows
KINDS = 16
PAIRS = KINDS * KINDS
# What is certain: each but the last starts a line, and none is found in prose.
MARKS = {
    "fenced block": "\n```",
    "traceback": "\nTraceback (most recent call last)",
    "shebang": "\n#!/",
    "diff header": "\n@@ -",
    "include": "\n#include",
    "PHP tag": "<?php",
}
SHAPE_WIDTH = PAIRS + len(MARKS) + 2
_SPACE, _LINE, _LOWER, _UPPER, _DIGIT, _OTHER_LETTER, _ALONE, _SYMBOL = 0, 1, 2, 3, 4, 13, 14, 15
_ASCII_KINDS = {
    " \t\r\f\v": _SPACE, "\n": _LINE, "(": 5, ")": 6, "[]{}": 7, "\"'`": 8, ".,!?": 9, ";:": 10, "=<>+*&|%^~-/": 11,
    "#$@\\_": 12,
}  # fmt: skip
# Scripts without spaces, of which each character is a word: Thai, Lao, Burmese, Khmer; Chinese, Japanese, Korean.
_ALONE_RANGES = (
    (0xE00, 0xEFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x2E80, 0xA4CF),
    (0xAC00, 0xD7AF),
    (0xF900, 0xFAFF),
)
_BMP = 0x10000
_PRIME = 0x9E3779B97F4A7C15
_MIX, _TWO, _RUN = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xA24BAED4963EE407), np.uint64(_PRIME)
_FOLD, _WORD_SHIFT, _RUN_SHIFT = np.uint64(29), np.uint64(64 - WORD_BITS), np.uint64(64 - RUN_BITS)
_FIRST, _LAST, _RUNS = np.uint64(FIRST), np.uint64(LAST), np.uint64(RUNS)
_RUN_CHARS = 4  # of 16 bits each: one number of 64


class Reading(NamedTuple):
    """What the model reads of a text.

    Attributes:
        line: The excerpt that is read, the text's head and tail, between line breaks.
        starts: Place of each word, run of marks or line break in the excerpt.
        rows: Of the pairs of neighbouring words; of the words; of the first words; of the last; of the runs of characters.
        words: Where the rows of words start; those of pairs start at 0.
        ends: Where the rows of the first words start.
        runs: Where the rows of runs start.
        weights: How much each row counts for the outputs: each part by the root of its length.
        unit_weights: How much each word, first word and last word counts for the hidden units.
        marks: Names of the marks found.
        shape: Square roots of the shares of pairs of neighbouring kinds of characters; marks; length.
    """

    line: str
    starts: NDArray[np.intp]
    rows: NDArray[np.int64]
    words: int
    ends: int
    runs: int
    weights: Floats
    unit_weights: Floats
    marks: tuple[str, ...]
    shape: Floats


def read(text: str) -> Reading:
    """Read a text, any string. Pure; the time is bounded by the length of the excerpt."""
    long = len(text) > HEAD_CHARS + TAIL_CHARS
    line = f"\n{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}\n" if long else f"\n{text}\n"
    starts, folded, pairs = _split(line)
    part = folded if len(text) <= HEAD_RUNS + TAIL_RUNS else np.concatenate((folded[:HEAD_RUNS], folded[-TAIL_RUNS:]))
    count, of_runs = len(starts), max(len(part) - _RUN_CHARS + 1, 0)
    words, edge = max(count - 1, 0), min(count, EDGE_WORDS)
    ends = words + count
    runs = ends + 2 * edge
    rows = np.empty(runs + of_runs, np.uint64)
    if count:
        _hash_words(folded, starts, rows[:ends])
        np.add(rows[words : words + edge], _FIRST, out=rows[ends : ends + edge])
        np.add(rows[ends - edge : ends], _LAST, out=rows[ends + edge : runs])
    if of_runs:  # each is one number of 64 bits where it lies in memory
        points = np.ascontiguousarray(part, np.uint16)
        numbers: Hashes = np.ndarray((of_runs,), np.uint64, points.data, 0, (points.itemsize,))
        np.multiply(numbers, _RUN, out=rows[runs:])
        rows[runs:] >>= _RUN_SHIFT
        rows[runs:] += _RUNS
    scales = WORD_SCALE / sqrt(ends or 1), END_SCALE / sqrt(2 * edge or 1), RUN_SCALE / sqrt(of_runs or 1)
    weights = np.array(scales, np.float32).repeat((ends, 2 * edge, of_runs))
    unit_weights = np.array((1 / sqrt(count or 1), 1 / sqrt(edge or 1)), np.float32).repeat((count, 2 * edge))
    shape = np.zeros(SHAPE_WIDTH, np.float32)
    np.sqrt(np.bincount(pairs, minlength=PAIRS) / len(pairs), out=shape[:PAIRS], casting="same_kind")
    marks: list[str] = []
    for place, (name, mark) in enumerate(MARKS.items(), PAIRS):
        if mark in line:
            marks.append(name)
            shape[place] = 1.0
    shape[-2] = min(len(text), 100_000) ** 0.25 / 10
    shape[-1] = count**0.25 / 10
    return Reading(line, starts, rows.view(np.int64), words, ends, runs, weights, unit_weights, tuple(marks), shape)


def language_rows(reading: Reading) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of the table of languages, of words and pairs and of runs: the same hashes, with fewer bits."""
    rows = reading.rows[: reading.ends]
    if reading.ends - reading.words > LANGUAGE_WORDS:
        rows = np.concatenate((rows[:LANGUAGE_WORDS], rows[reading.words : reading.words + LANGUAGE_WORDS]))
    of_runs = reading.rows[reading.runs : reading.runs + LANGUAGE_LENGTH] - RUNS
    return (
        rows >> (WORD_BITS - LANGUAGE_WORD_BITS),
        (of_runs >> (RUN_BITS - LANGUAGE_RUN_BITS)) + LANGUAGE_RUNS,
    )


def _split(line: str) -> tuple[NDArray[np.intp], NDArray[Any], NDArray[np.uint8]]:
    """Return where words start, the folded characters, and the pairs of kinds of neighbouring characters.

    Args:
        line: An excerpt after a line break; places are counted without it.
    """
    kinds: NDArray[np.uint8]
    folded: NDArray[Any]
    try:
        data = line.encode("latin-1")
        kind_table, fold_table = _byte_tables()
        kinds = np.frombuffer(data.translate(kind_table), np.uint8)
        folded = np.frombuffer(data.translate(fold_table), np.uint8)
    except UnicodeEncodeError:
        points = np.frombuffer(line.encode(f"utf-32-{sys.byteorder[0]}e", "surrogatepass"), np.uint32)
        points = np.minimum(points, _BMP - 1)
        kind_of, fold_of = _tables()
        kinds, folded = kind_of.take(points), fold_of.take(points)
    pairs = kinds[:-1] * np.uint8(KINDS)
    pairs |= kinds[1:]
    starts = np.frombuffer(pairs.tobytes().translate(_start_table()), np.bool_)
    return starts.nonzero()[0], folded[1:], pairs


def _hash_words(folded: NDArray[Any], starts: NDArray[np.intp], rows: Hashes) -> None:
    gaps = len(starts) - 1
    words = rows[gaps:]
    powers, inverses = _powers()
    np.add.reduceat(folded * powers[: len(folded)], starts, out=words)
    words *= inverses.take(starts)
    words ^= words >> _FOLD
    np.multiply(words[:-1], _TWO, out=rows[:gaps])
    rows[:gaps] += words[1:]
    rows *= _MIX
    rows >>= _WORD_SHIFT


class Prediction(NamedTuple):
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

    def predict(self, text: str, second: Sequence[float] = ()) -> Prediction:
        """Return what is found.

        Args:
            text: Any string.
            second: What a second look adds to the log-odds of each of ``OUTPUTS``; empty: there was none.
        """
        reading = read(text)
        units = np.maximum(self.hidden(reading), 0)
        found = reading.weights @ self.table.take(reading.rows, 0)
        sums = (self.bias + reading.shape @ self.shape + found * self.scale + units @ self.hidden_outputs).tolist()
        if second:
            sums = [first + added for first, added in zip(sums, second, strict=True)]
        # Log-odds of the first, and scores of the classes.
        has, asks, contains, more, most = [1 / (1 + exp(-max(-30.0, min(odds, 30.0)))) for odds in sums[:_CLASSES]]
        highest = max(sums[_CLASSES:])
        powers = [exp(score - highest) for score in sums[_CLASSES:]]
        total = sum(powers)
        classes = tuple([power / total for power in powers])
        language = self._language(reading) if has >= 0.5 else None  # noqa: PLR2004
        return Prediction(has, asks, contains, classes, language, more, most, reading.marks)

    def _language(self, reading: Reading) -> str | None:
        words, runs = language_rows(reading)
        counts = len(words), len(runs)
        scales = WORD_SCALE / sqrt(counts[0] or 1), RUN_SCALE / sqrt(counts[1] or 1)
        table = self.language_table.take(np.concatenate((words, runs)), 0)
        sums = np.array(scales, np.float32).repeat(counts) @ table
        return self.languages[int((self.language_bias + sums * self.language_scale).argmax())]

    def hidden(self, reading: Reading) -> Floats:
        """Return the hidden units; those above zero count."""
        found = reading.unit_weights @ self.hidden_table.take(reading.rows[reading.words : reading.runs], 0)
        units: Floats = found * self.hidden_scale + self.hidden_bias
        return units


@cache
def _powers() -> tuple[Hashes, Hashes]:
    """Return the powers of a prime modulo 2**64 and of its inverse, one for each character of an excerpt."""
    length = HEAD_CHARS + TAIL_CHARS + 2
    inverse = pow(_PRIME, -1, 2**64)
    both = []
    for base in (_PRIME, inverse):
        powers, value = [], 1
        for _ in range(length):
            powers.append(value)
            value = value * base % 2**64
        both.append(np.array(powers, np.uint64))
    return both[0], both[1]


@cache
def _tables() -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """Return the kind and the folded code point of each character of the Basic Multilingual Plane."""
    kinds, folds = np.full(_BMP, _SYMBOL, np.uint8), np.arange(_BMP, dtype=np.uint16)
    for point in range(_BMP):
        char = chr(point)
        if char.isalpha():
            lower = char.lower()
            kinds[point] = _UPPER if lower != char else (_LOWER if char.islower() else _OTHER_LETTER)
            if len(lower) == 1:
                folds[point] = ord(lower)
        elif char.isdecimal():
            kinds[point], folds[point] = _DIGIT, ord("0")
        elif char.isspace():
            kinds[point], folds[point] = _SPACE, 0
        elif unicodedata.category(char) in {"Mn", "Mc", "Me", "Cf"}:
            kinds[point] = _OTHER_LETTER  # marks that join letters
    for chars, kind in _ASCII_KINDS.items():
        for char in chars:
            kinds[ord(char)] = kind
    folds[[ord(char) for char in " \t\r\f\v"]] = 0  # adds nothing to the hash of the word before it
    for first, last in _ALONE_RANGES:
        kinds[first : last + 1] = _ALONE
    return kinds, folds


@cache
def _byte_tables() -> tuple[bytes, bytes]:
    kinds, folds = _tables()
    return kinds[:256].tobytes(), folds[:256].astype(np.uint8).tobytes()


@cache
def _start_table() -> bytes:
    """Return for each pair of kinds whether a word starts between them, 1 or 0."""
    table = ~np.eye(KINDS, dtype=bool)
    table[_ALONE, _ALONE] = True
    table[:, _SPACE] = False
    letters = (_LOWER, _UPPER, _OTHER_LETTER)
    for before in letters:
        for after in letters:
            table[before, after] = (before, after) == (_LOWER, _UPPER)  # getName is two words, Paris is one
    return table.tobytes()


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
