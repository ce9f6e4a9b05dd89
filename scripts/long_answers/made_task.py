"""A task that is made, a right answer to it, and how both are put together."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CHARS_PER_TOKEN = 2.0  # of anything but digits, which many tokenizers read one by one
ROOM = 1.35  # for other notations and a sentence before the answer
TOKENS_STEP = 64

Check = dict[str, Any]
Row = Sequence[int | float | str]


@dataclass(frozen=True, slots=True)
class MadeTask:
    """A task and answers to it.

    Attributes:
        row: The task, as a line of the suite.
        right_answer: What its check takes.
        wrong_step_answer: The same, except for one step in its middle.
    """

    row: dict[str, Any]
    right_answer: str
    wrong_step_answer: str


def make_task(
    name: str,
    prompt_class: str,
    prompt: str,
    check: Check,
    right_answer: str,
    *,
    complexity: str = "complex",
    wrong_step_answer: str = "",
) -> MadeTask:
    """Return a task whose limit of tokens leaves room around its right answer."""
    row = {
        "id": f"answer-{name}",
        "class": prompt_class,
        "complexity": complexity,
        "prompt": prompt,
        "max_tokens": token_limit(right_answer),
        "check": check,
    }
    wrong_answer = wrong_step_answer or with_wrong_middle(right_answer)
    return MadeTask(row=row, right_answer=right_answer, wrong_step_answer=wrong_answer)


def token_limit(answer: str) -> int:
    """Return a limit of tokens for an answer, for tokenizers that read digits one by one as well."""
    digits = sum(character.isdigit() for character in answer)
    tokens = digits + (len(answer) - digits) / CHARS_PER_TOKEN
    return math.ceil(tokens * ROOM / TOKENS_STEP) * TOKENS_STEP


def with_wrong_middle(answer: str) -> str:
    """Return an answer with another last digit, or last word, in the first line from its middle on that has one."""
    lines = answer.split("\n")
    for position in range(len(lines) // 2, len(lines)):
        wrong_line = _with_wrong_end(lines[position])
        if wrong_line != lines[position]:
            return "\n".join([*lines[:position], wrong_line, *lines[position + 1 :]])
    raise ValueError("no line from the middle on has a digit or a word")


def _with_wrong_end(line: str) -> str:
    digits = re.search(r"\d(?=\D*$)", line)
    if digits:
        other_digit = str((int(digits[0]) + 1) % 10)
        return line[: digits.start()] + other_digit + line[digits.end() :]
    return re.sub(r"\w+(?=\W*$)", "elsewhere", line)


def table_text(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a Markdown table."""
    lines = [_table_line(columns), _table_line(["---"] * len(columns))]
    lines += [_table_line(row) for row in rows]
    return "\n".join(lines)


def _table_line(cells: Row) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table_check(columns: Sequence[str], rows: Sequence[Row]) -> Check:
    """Return a check of a table's columns and rows."""
    return {
        "type": "table",
        "columns": list(columns),
        "rows": [list(row) for row in rows],
    }


def lines_check(lines: Sequence[str]) -> Check:
    """Return a check of lines; blank ones do not count."""
    return {"type": "lines", "lines": [line for line in lines if line]}


def steps_check(values: Sequence[int | float | str]) -> Check:
    """Return a check of the values in which numbered lines end."""
    return {"type": "steps", "values": list(values)}
