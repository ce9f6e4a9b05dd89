"""Tells right long answers from wrong ones: every row, step, line or item counts, so a bad end is seen."""

from __future__ import annotations

import ast
import math
from typing import Any, Literal

import regex
from pydantic import Field, field_validator, model_validator

from router.profiling.answer_text import (
    BULLET,
    EDGES,
    FENCE,
    bare,
    has_words,
    last_number,
    normal,
    plain_signs,
)
from router.profiling.check_base import REGEX_S, AnswerCheck, Text
from router.profiling.equality import is_same
from router.profiling.safe_code import compute

MAX_ITEMS = 400  # rows, steps, lines or items of a right answer
MAX_INTRODUCTION_LINES = 2  # before the lines that are asked for
# A star between blanks is no emphasis: it multiplies.
_MARKS = regex.compile(r"[_`#>]+|\*+(?!\s)|(?<!\s)\*+")
_RULE = regex.compile(r"[\s|:\-–—]+")  # noqa: RUF001  the line below a table's head
_STEP = regex.compile(
    r"\s*(?:[-•]\s+)?(?:\p{L}+\s+)?(?P<number>\d{1,4})\s*[.:)\]-]+\s*"
)
_RESULT_SIGN = regex.compile(r"=|->|→|⇒|≈")
_LOOSE = regex.compile(r"[\s\[\](){}]+")
_TIMES = regex.compile(r"[×·]|(?<=\s)\*(?=\s)")  # noqa: RUF001  signs that answers have
_NUMBERED = regex.compile(r"\s*(\d{1,4})[.)]\s")

Cell = float | str


def _is_cell(text: str, wanted: Cell) -> bool:
    """Tell whether a text says a value: a number in any notation, or a text but for case, emphasis and spacing."""
    if isinstance(wanted, str):
        return _loose(text) == _loose(wanted)
    number = last_number(_MARKS.sub("", text))
    return math.isclose(number, wanted, rel_tol=1e-9, abs_tol=1e-9)


def _loose(text: str) -> str:
    """Return a text without spaces, brackets and emphasis, and with one sign for "times"."""
    return _LOOSE.sub("", bare(_TIMES.sub("x", text)))


class TableCheck(AnswerCheck):
    """A Markdown table with these columns, and these rows in this order."""

    type: Literal["table"]
    columns: tuple[Text, ...] = Field(min_length=2)
    rows: tuple[tuple[Cell, ...], ...] = Field(min_length=1, max_length=MAX_ITEMS)

    @model_validator(mode="after")
    def _has_all_cells(self) -> TableCheck:
        for number, row in enumerate(self.rows, 1):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"row {number} has {len(row)} cells; there are {len(self.columns)} columns"
                )
        return self

    def _passes(self, answer: str) -> bool:
        rows = self._rows_below_head(answer)
        if len(rows) != len(self.rows):
            return False
        return all(map(_is_row, rows, self.rows))

    def _rows_below_head(self, answer: str) -> list[list[str]]:
        """Return the rows of the first table that has the columns; none: there is no such table."""
        head = [bare(column) for column in self.columns]
        rows: list[list[str]] = []
        is_in_table = False
        for line in answer.splitlines():
            cells = _cells_of(line)
            if not is_in_table:
                is_in_table = [bare(cell) for cell in cells] == head
            elif not cells:
                break
            elif not _RULE.fullmatch(line):
                rows.append(cells)
        return rows


def _cells_of(line: str) -> list[str]:
    """Return the cells of a line of a table; none: it is no such line."""
    if "|" not in line:
        return []
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip() for cell in inner.split("|")]


def _is_row(cells: list[str], wanted_cells: tuple[Cell, ...]) -> bool:
    if len(cells) != len(wanted_cells):
        return False
    return all(map(_is_cell, cells, wanted_cells))


class StepsCheck(AnswerCheck):
    """Numbered lines from 1 on ("Step 3: 4 x 5 = 20"), each of which ends in its value."""

    type: Literal["steps"]
    values: tuple[Cell, ...] = Field(min_length=2, max_length=MAX_ITEMS)

    def _passes(self, answer: str) -> bool:
        results: list[str] = []
        for line in answer.splitlines():
            plain_line = _MARKS.sub("", plain_signs(line))
            step = _STEP.match(plain_line)
            if step and int(step["number"]) == len(results) + 1:
                results.append(_result_of(plain_line[step.end() :]))
        if len(results) != len(self.values):
            return False
        return all(map(_is_cell, results, self.values))


def _result_of(step: str) -> str:
    """Return what follows the last equals sign or arrow of a step; without one, all of it."""
    return str(_RESULT_SIGN.split(step)[-1])


class LinesCheck(AnswerCheck):
    """These lines and no others, but for blank ones and a short introduction; case and signs count."""

    type: Literal["lines"]
    lines: tuple[Text, ...] = Field(min_length=2, max_length=MAX_ITEMS)

    def _passes(self, answer: str) -> bool:
        block = FENCE.search(answer)
        lines = _plain_lines(block[1] if block else answer)
        wanted_lines = _plain_lines("\n".join(self.lines))
        introduction_length = len(lines) - len(wanted_lines)
        if not 0 <= introduction_length <= MAX_INTRODUCTION_LINES:
            return False
        return lines[introduction_length:] == wanted_lines


def _plain_lines(text: str) -> list[str]:
    """Return the lines that are not blank, with plain signs and single spaces."""
    lines = [" ".join(line.split()) for line in plain_signs(text).splitlines()]
    return [line for line in lines if line]


class ItemsCheck(AnswerCheck):
    """A list in which each item has the required properties; there are many right answers.

    Items are the lines that begin with a bullet or a number, or else all lines.

    Attributes:
        count: Number of items.
        pattern: What an item looks like, whole, without its bullet. Its groups are the arguments of ``where``.
        where: A Python lambda that is true of each item. It is computed, and not run.
        keys: What the pattern's first group says in each item, in order.
        words: A text that each item has, in order.
        order: The order of what the first group says: numbers by size, texts by alphabet.
        is_distinct: Whether no two items may say the same in their first group.
    """

    type: Literal["items"]
    count: int = Field(ge=2, le=MAX_ITEMS)
    pattern: Text
    where: Text | None = None
    keys: tuple[Text, ...] = ()
    words: tuple[Text, ...] = ()
    order: Literal["ascending", "descending"] | None = None
    is_distinct: bool = Field(default=True, alias="distinct")

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, pattern: str) -> str:
        try:
            compiled = regex.compile(pattern)
        except (regex.error, OverflowError, RecursionError) as error:
            raise ValueError(f"no pattern of the library regex: {error}") from None
        if not compiled.groups:
            raise ValueError("the pattern needs a group in parentheses: an item's key")
        return pattern

    @field_validator("where")
    @classmethod
    def _is_lambda(cls, where: str | None) -> str | None:
        if where is None:
            return None
        if not _is_lambda_source(where):
            raise ValueError(
                "it is no Python lambda, such as lambda word: len(word) > 3"
            )
        return where

    @model_validator(mode="after")
    def _fits_count(self) -> ItemsCheck:
        for name, values in (("keys", self.keys), ("words", self.words)):
            if values and len(values) != self.count:
                raise ValueError(
                    f"{name} has {len(values)} texts; count is {self.count}"
                )
        return self

    def _passes(self, answer: str) -> bool:
        items = _items_of(answer)
        if len(items) != self.count:
            return False
        try:
            groups = self._groups_of(items)
        except (TimeoutError, MemoryError):
            return False
        if groups is None:
            return False
        keys = [item_groups[0] for item_groups in groups]
        return (
            self._has_keys(keys) and self._has_words(items) and self._is_true_of(groups)
        )

    def _groups_of(self, items: list[str]) -> list[list[str]] | None:
        """Return what the pattern's groups say in each item; None: one does not match. May raise ``TimeoutError``."""
        groups: list[list[str]] = []
        for item in items:
            match = regex.fullmatch(self.pattern, item, timeout=REGEX_S)
            if match is None:
                return None
            groups.append([text or "" for text in match.groups()])
        return groups

    def _has_keys(self, keys: list[str]) -> bool:
        plain_keys = [_loose(key) for key in keys]
        if self.keys and plain_keys != [_loose(key) for key in self.keys]:
            return False
        if self.is_distinct and len(set(plain_keys)) < len(plain_keys):
            return False
        if self.order is None:
            return True
        return plain_keys == _sorted_keys(plain_keys, self.order)

    def _has_words(self, items: list[str]) -> bool:
        if not self.words:
            return True
        return all(map(has_words, map(normal, items), self.words))

    def _is_true_of(self, groups: list[list[str]]) -> bool:
        if self.where is None:
            return True
        try:
            return all(value is True for value in compute(self.where, None, groups))
        except Exception:  # noqa: BLE001  whatever is wrong with the answer, it is wrong
            return False


def _is_lambda_source(text: str) -> bool:
    try:
        return isinstance(ast.parse(text, mode="eval").body, ast.Lambda)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _items_of(answer: str) -> list[str]:
    """Return a list's items without bullets and emphasis; none: its numbers do not run from 1 on."""
    lines = [line for line in plain_signs(answer).splitlines() if line.strip()]
    marked_lines = [line for line in lines if BULLET.match(line)]
    if not marked_lines:
        return [_plain_item(line) for line in lines]
    numbers = [
        int(match[1]) for line in marked_lines if (match := _NUMBERED.match(line))
    ]
    if numbers and numbers != list(range(1, len(marked_lines) + 1)):
        return []
    return [_plain_item(BULLET.sub("", line, count=1)) for line in marked_lines]


def _plain_item(line: str) -> str:
    return " ".join(_MARKS.sub("", line).split()).strip(EDGES)


def _sorted_keys(
    keys: list[str], order: Literal["ascending", "descending"]
) -> list[str]:
    is_descending = order == "descending"
    numbers = {key: last_number(key) for key in keys}
    if any(math.isnan(number) for number in numbers.values()):
        return sorted(keys, reverse=is_descending)
    return sorted(keys, key=lambda key: numbers[key], reverse=is_descending)


class ProgramCheck(AnswerCheck):
    """Python in which each of several functions computes the expected values; it is read, and not run."""

    type: Literal["program"]
    functions: dict[Text, tuple[tuple[list[Any], Any], ...]] = Field(
        min_length=1, max_length=MAX_ITEMS
    )

    def _passes(self, answer: str) -> bool:
        try:
            return all(
                _computes(answer, name, cases) for name, cases in self.functions.items()
            )
        except Exception:  # noqa: BLE001  whatever is wrong with the answer, it is wrong
            return False


def _computes(
    answer: str, function: str, cases: tuple[tuple[list[Any], Any], ...]
) -> bool:
    """Tell whether a function of an answer computes the values of all cases. It may raise any ``Exception``."""
    arguments = [call_arguments for call_arguments, _ in cases]
    wanted_values = [wanted_value for _, wanted_value in cases]
    values = compute(answer, function, arguments)
    return all(map(is_same, values, wanted_values))
