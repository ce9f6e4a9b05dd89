"""A text as rows of the model's table: hashed words, pairs of words, and runs of four characters; and its shape.

No loop over characters or words: every step is one NumPy operation on the whole text. A word's hash is a polynomial in its
code points modulo 2**64, made from sums between word starts and multiplied by the inverse power of the place where the word
starts (Karp and Rabin, Efficient randomized pattern-matching algorithms, 1987). Rows are the hash's highest bits.
"""

from __future__ import annotations

import sys
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Hashes: TypeAlias = NDArray[np.uint64]

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


@dataclass(frozen=True, slots=True)
class Reading:
    """What the model reads of a text.

    Attributes:
        starts: Place of each word, run of marks or line break in the excerpt.
        rows: Of the pairs of neighbouring words; of the words; of the first words; of the last; of the runs of characters.
        words: Where the rows of words start; those of pairs start at 0.
        ends: Where the rows of the first words start.
        runs: Where the rows of runs start.
        marks: Names of the marks found.
        shape: Square roots of the shares of pairs of neighbouring kinds of characters; marks; length.
    """

    starts: NDArray[np.intp]
    rows: NDArray[np.int64]
    words: int
    ends: int
    runs: int
    marks: tuple[str, ...]
    shape: NDArray[np.float32]


def excerpt(text: str, head: int = HEAD_CHARS, tail: int = TAIL_CHARS) -> str:
    """Return the part of a text that is read: its head and tail, or all of a short one."""
    return text if len(text) <= head + tail else f"{text[:head]}\n{text[-tail:]}"


def read(text: str) -> Reading:
    """Read a text, any string. Pure; the time is bounded by the length of the excerpt."""
    line = f"\n{excerpt(text)}\n"
    starts, folded, pairs = split(line)
    part = folded if len(text) <= HEAD_RUNS + TAIL_RUNS else np.concatenate((folded[:HEAD_RUNS], folded[-TAIL_RUNS:]))
    count = len(starts)
    words, edge = max(count - 1, 0), min(count, EDGE_WORDS)
    ends = words + count
    last, runs = ends + edge, ends + 2 * edge
    rows = np.empty(runs + max(len(part) - _RUN_CHARS + 1, 0), np.uint64)
    if count:
        _hash_words(folded, starts, rows[:ends])
        np.add(rows[words : words + edge], _FIRST, out=rows[ends:last])
        np.add(rows[ends - edge : ends], _LAST, out=rows[last:runs])
    if runs < len(rows):
        _hash_runs(part, rows[runs:])
    marks = tuple(name for name, mark in MARKS.items() if mark in line)
    shape = _shape(pairs, marks, len(text), count)
    return Reading(starts, rows.view(np.int64), words, ends, runs, marks, shape)


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


def _hash_runs(folded: NDArray[Any], rows: Hashes) -> None:
    """Write the rows of the runs of four characters, each of which is one number of 64 bits where they lie in memory."""
    points = np.ascontiguousarray(folded, np.uint16)
    numbers: Hashes = np.ndarray((len(rows),), np.uint64, points.data, 0, (points.itemsize,))
    np.multiply(numbers, _RUN, out=rows)
    rows >>= _RUN_SHIFT
    rows += _RUNS


def _shape(pairs: NDArray[np.uint8], marks: tuple[str, ...], chars: int, words: int) -> NDArray[np.float32]:
    shape = np.empty(SHAPE_WIDTH, np.float32)
    np.sqrt(np.bincount(pairs, minlength=PAIRS) / len(pairs), out=shape[:PAIRS], casting="same_kind")
    shape[PAIRS:-2] = [name in marks for name in MARKS] if marks else 0.0
    shape[-2] = min(chars, 100_000) ** 0.25 / 10
    shape[-1] = words**0.25 / 10
    return shape


def split(line: str) -> tuple[NDArray[np.intp], NDArray[Any], NDArray[np.uint8]]:
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
