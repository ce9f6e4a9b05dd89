# ruff: noqa: RUF001  signs that answers have
"""Checks of long answers: notations that pass, faults that do not, answers that try to raise or hang, wrong settings."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from router.profiling.checks import Check
from router.profiling.model_answer import ModelAnswer
from tests.unit.profiling.test_checks import NASTY

READ = TypeAdapter[Any](Check)
TABLE = {"type": "table", "columns": ["No", "Name", "€"], "rows": [[1, "Ann Lee", 1200.5], [2, "Bob", -3]]}  # fmt: skip
STEPS = {"type": "steps", "values": [7, 14.5, "2 x 3"]}
LINES = {"type": "lines", "lines": ["a: 1", "B: 2"]}
ITEMS = {
    "type": "items",
    "count": 3,
    "pattern": r"(\w+) \((\d+)\)",
    "where": "lambda word, length: len(word) == int(length)",
    "order": "ascending",
}
PROGRAM = {"type": "program", "functions": {"f": [[[2], 4]], "g": [[["a"], "A"]]}}


def passes(check: dict[str, Any], answer: str) -> bool:
    return bool(READ.validate_python(check).passes(ModelAnswer(text=answer)))


CHECKS: list[tuple[dict[str, Any], dict[str, bool]]] = [
    (TABLE, {
        "| No | Name | € |\n|---|:--|--:|\n| 1 | Ann Lee | 1200.50 |\n| 2 | Bob | -3 |": True,
        "Here:\n\n| **No** | name | € |\n| - | - | - |\n| 1. | **Ann  Lee** | €1,200.50 |\n| 2 | bob | −3 |\n\nDone | ok": True,
        "No | Name | €\n---|---|---\n1 | Ann Lee | 1200.5\n2 | Bob | -3": True,
        "| No | Name | € |\n|---|---|---|\n| 1 | Ann Lee | 1200.5 |": False,
        "| No | Name | € |\n|---|---|---|\n| 1 | Ann Lee | 1200.5 |\n| 2 | Bob | 3 |": False,
        "| No | Name | € |\n|---|---|---|\n| 2 | Bob | -3 |\n| 1 | Ann Lee | 1200.5 |": False,
        "| No | Name | € |\n|---|---|---|\n| 1 | Ann Lee | 1200.5 |\n| 2 | Bob | -3 |\n| 3 | Cy | 4 |": False,
        "| No | Name | € |\n|---|---|---|\n| 1 | Ann Lee | 1200.5 |\n| 2 | Bob | -3": True,
        "| No | Name | € |\n|---|---|---|\n| 1 | Ann Lee | 1200.5 |\n| 2 | Bob |": False,
        "| No | Name |\n|---|---|\n| 1 | Ann Lee |\n| 2 | Bob |": False,
    }),
    (STEPS, {
        "Step 1: 3 + 4 = 7\nStep 2: 29 / 2 = 14.5\nStep 3: 6 = 2 × 3": True,
        "Sure:\n\n**1.** 3+4 = **7**\n\n2) 29 / 2 → 14.50\n- Step 3: [2 * 3]\n\nDone = 9": True,
        "Schritt 1: 7\nSchritt 2: 14,5\nSchritt 3: 2 x 3": True,
        "Step 1: 3 + 4 = 7\nStep 2: 29 / 2 = 14.5": False,
        "Step 1: 3 + 4 = 7\nStep 2: 29 / 2 = 15.5\nStep 3: 2 x 3": False,
        "Step 1: 3 + 4 = 7\nStep 3: 29 / 2 = 14.5\nStep 2: 2 x 3": False,
        "Step 1: 7\nStep 2: 14.5\nStep 3: 2 x 3\nStep 4: 8": False,
    }),
    (LINES, {
        "a: 1\nB: 2": True, "Here you are:\n\n```text\na: 1\n\nB:  2\n```\nThat is all.": True, "Of course!\na: 1\nB: 2\n": True,
        "a: 1": False, "a: 1\nb: 2": False, "a: 1\nB: 2\nC: 3": False, "B: 2\na: 1": False, "1\n2\n3\na: 1\nB: 2": False,
    }),
    (ITEMS, {
        "- bear (4)\n- cat (3)\n- dog (3)": True, "My list:\n1. bear (4)\n2. **cat** (3)\n3. dog (3)\nEnjoy!": True,
        "bear (4)\ncat (3)\ndog (3)": True, "- bear (4)\n- cat (3)": False, "- bear (4)\n- cat (4)\n- dog (3)": False,
        "- cat (3)\n- bear (4)\n- dog (3)": False, "- cat (3)\n- cat (3)\n- dog (3)": False, "- bear 4\n- cat (3)\n- dog (3)": False,
        "1. bear (4)\n3. cat (3)\n4. dog (3)": False,
    }),
    ({"type": "items", "count": 2, "pattern": "(.*)", "order": "descending"}, {"10\n9": True, "9\n10": False, "b\na": True, "a\nb": False}),
    ({"type": "items", "count": 2, "pattern": "(.).*", "keys": ["A", "B"]}, {"Ah, yes\nBut no": True, "But\nAh": False}),
    ({"type": "items", "count": 2, "pattern": "(.*)", "words": ["sun", "rain"]}, {"The sun!\nNo Rain": True, "sunny\nrain": False}),
    (PROGRAM, {
        "```python\ndef f(x):\n    return x + x\n\ndef g(s):\n    return s.upper()\n```": True,
        "def f(x): return x * 2\ng = lambda s: s.upper()": True,
        "def f(x):\n    return x + x": False, "def f(x):\n    return x + x\ndef g(s):\n    return s": False,
        "def f(x):\n    return x + x\ndef g(s:\n": False,
    }),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "cases"), CHECKS, ids=lambda value: value.get("type", "")
)
def test_long_answers_are_judged(check: dict[str, Any], cases: dict[str, bool]) -> None:
    assert {answer: passes(check, answer) for answer in cases} == cases


HUNGRY = {
    "type": "items",
    "count": 2,
    "pattern": "((?:a|aa)+)",
    "where": "lambda text: [n for n in range(4000) for m in range(4000)]",
}


@pytest.mark.parametrize(
    "check",
    [TABLE, STEPS, LINES, ITEMS, HUNGRY, PROGRAM],
    ids=lambda check: check["type"],
)
def test_no_long_answer_raises_or_hangs(check: dict[str, Any]) -> None:
    read = READ.validate_python(check)
    hungry = ["a" * 60 + "!\n" + "a" * 60, "a\naa", "- " * 9_000, "1. a\n" * 4_000]
    assert [
        answer[:20]
        for answer in NASTY + hungry
        if read.passes(ModelAnswer(text=answer))
    ] == []

    @settings(max_examples=60)
    @given(
        st.text(st.characters())
        | st.text("0123456789.,/-+|[]()\\\"'`*_ \nABab:=Step×−", max_size=80)
    )
    def any_text(text: str) -> None:
        assert isinstance(read.passes(ModelAnswer(text=text)), bool)

    any_text()


@pytest.mark.parametrize(
    ("check", "why"),
    [
        ({**TABLE, "rows": [[1, "x"]]}, "row 1 has 2 cells; there are 3 columns"),
        ({**TABLE, "rows": []}, "rows"),
        ({**ITEMS, "pattern": "("}, "no pattern of the library regex"),
        ({**ITEMS, "pattern": "a"}, "the pattern needs a group"),
        ({**ITEMS, "where": "len(word)"}, "no Python lambda"),
        ({**ITEMS, "where": "lambda"}, "no Python lambda"),
        ({**ITEMS, "words": ["a"]}, "words has 1 texts; count is 3"),
        ({**LINES, "lines": ["a"]}, "at least 2"),
        ({**PROGRAM, "functions": {}}, "at least 1"),
    ],
)
def test_a_check_that_cannot_be_met_is_refused(check: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(why)):
        READ.validate_python(check)
