# ruff: noqa: RUF001  signs that answers have
"""Checks: what passes, what does not, and answers that try to raise, hang or break out."""

from __future__ import annotations

import json
import resource
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from router.profiling.checks import Check, NeedsRunError
from router.profiling.model_answer import ModelAnswer
from tests.imports import ROOT

READ = TypeAdapter[Any](Check)


def passes(check: dict[str, Any], answer: str) -> bool:
    return bool(READ.validate_python(check).passes(ModelAnswer(text=answer)))


NUMBERS = [
    ("42", 42), ("The answer is 42.", 42), ("6 * 7 = **42**", 42), ("$1,234.50", 1234.5), ("-7", -7), ("minus 7", -7), ("−7 °C", -7),
    ("10-5", 5), ("Range 3 - 5", 5), ("- 5 apples", 5), ("$-3$", -3), ("-$5", -5), ("50%", 50), ("3/4", 0.75),
    ("1 3/4 cups", 1.75), (r"\frac{3}{4}", 0.75), (r"So \boxed{42} after 3 steps", 42), (r"\boxed{\frac{1}{2}}", 0.5),
    (r"1{,}234", 1234), ("25 cm^2", 25), ("25 m²", 25), ("5km", 5), ("3,5", 3.5), ("1.234,50 €", 1234.5), ("1,2,3", 3), ("12 345,", 12345),
    ("1\u202f000\u202f000", 1e6), ("1.5e3", 1500), ("3 × 10^8 m/s", 3e8), (".5", 0.5), ("€ 20", 20), ("答案是42。", 42),
    ("There are five.", 5), ("x2 = 9", 9), ("4 eggs, 2/0", float("nan")), ("none", float("nan")), ("9" * 500, float("inf")),
    ("2 × 10^400", float("inf")), ("0 × 10^400", float("nan")),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "number"), NUMBERS)
def test_last_number(answer: str, number: float) -> None:
    is_finite = abs(number) < float("inf")
    value = number if is_finite else 1
    assert passes({"type": "number", "value": value}, answer) is is_finite
    assert not passes({"type": "number", "value": value + 1.25}, answer)


LETTERS = {
    "B": True, "b": True, "B.": True, "(B)": True, "**B**": True, "B) copper": True, "b) copper": True, "B because it is": True,
    "Answer: B": True, "The answer is B, not A.": True, "A or B? The answer is (B).": True, "answer is b.": True,
    "A metal is meant: B": True, r"\boxed{B}": True, r"\boxed{\text{B}}": True, "The correct option is B": True, "'B'": True,
    "A": False, "A is right, not B": False, "The answer is B. No: the answer is C.": False, "Both": False, "": False,
    "Bob said a dog": False, "C": False, "B2B": False, "I don't know": False,
}  # fmt: skip
WORDS = {
    "Positive": True, "It is positive.": True, "very positive": False, "not_positive": False, "neutral, not positive": False,
}  # fmt: skip


CHECKS: list[tuple[dict[str, Any], dict[str, bool]]] = [
    ({"type": "number", "value": 3.14, "tolerance": 0.01}, {"3.1416": True, "3.16": False}),
    ({"type": "choice", "value": "B", "options": ["A", "B", "C", "D"]}, LETTERS),
    ({"type": "choice", "value": "positive", "options": ["positive", "neutral", "very positive"]}, WORDS),
    ({"type": "choice", "value": "是", "options": ["是", "否"]}, {"答：是的": True, "答：否": False}),
    ({"type": "exact", "values": ["Paris"]}, {" **paris**.\n": True, "“Paris”": True, "It is Paris": False, "": False}),
    ({"type": "exact", "values": ["it's"]}, {"It’s!": True, "its": False}),
    ({"type": "exact", "values": ["snake_case", ".5"]}, {"`snake_case`": True, "snakecase": False, ".5": True, "5": False}),
    ({"type": "contains", "any": ["Café", "tea"]}, {"a CAFE\u0301, please": True, "Cafe": False, "steam": False, "Tea?": True}),
    ({"type": "contains", "all": ["red", "blue"], "none": ["green"]}, {"Blue, red": True, "red": False, "red blue green": False, "": False}),
    ({"type": "contains", "all": ["東京"]}, {"それは東京です": True, "京都": False}),
    ({"type": "contains", "all": ["C++", "don't"]}, {"I don’t like\nC++.": True, "C+": False}),
    ({"type": "regex", "pattern": r"^\d{4}-\d\d$"}, {"2024-05": True, "on 2024-05": False}),
    ({"type": "regex", "pattern": "^(?:a|aa)+$"}, {"aaa": True, "a" * 60 + "!": False}),
    ({"type": "code", "cases": [[[], 3]]}, {"sum([1, 2])": True, "x = 3": True, "1 +": False, "print(3)": False}),
    ({"type": "json", "schema": {"type": "object", "required": ["a"]}, "values": {"/a/0/b~1c": 3}},
     {'{"a": [{"b/c": 3}]}': True, 'Here:\n```json\n{"a": [{"b/c": 3.0}]}\n```': True, 'So {"a": [{"b/c": 3}]}, done [1]': True,
      '{"a": [{"b/c": true}]}': False, '{"a": []}': False, '{"a": 1}': False, "[1]": False, "{'a': 1}": False, "no": False}),
    ({"type": "json", "schema": {"type": "number"}}, {"5": True, '"5"': False, "NaN": False, "1e999": False}),
    ({"type": "json", "values": {"": ["é", None]}}, {'["é", null]': True, '["\\u00e9", null]': True, '["e", null]': False}),
    ({"type": "constraints", "min_words": 2, "max_words": 3}, {"one - two": True, "one": False, "a b c d": False}),
    ({"type": "constraints", "sentences": 2}, {"Dr. Lee ran 3.5 km. She won!": True, "One.": False, "A? B. C.": False, "雨です。はい。": True}),
    ({"type": "constraints", "sentences": 1}, {"1. We met at 5 p.m. in the U.S. office.": True, 'He said "no." 🙂': True, "a.\nb": False}),
    ({"type": "constraints", "bullets": 2}, {"- a\n* b": True, "1. a\n2) b": True, "- a": False, "-a\n-b": False}),
    ({"type": "constraints", "lines": 3, "paragraphs": 2}, {"a\n\nb\nc": True, "a\nb\nc": False}),
    ({"type": "constraints", "starts_with": "However", "ends_with": "the end"}, {'"However, it is **The End**."': True, "However the ending": False}),
    ({"type": "constraints", "ends_with": "now?"}, {"What now?*": True, "now": False}), ({"type": "constraints", "include": ["sun"], "exclude": ["rain"]}, {"Sun.": True, "sunny": False, "sun, rain": False}),
    ({"type": "constraints", "lowercase": True, "no_commas": True}, {"all small": True, "No": False, "a, b": False}),
    ({"type": "constraints", "uppercase": True}, {"ALL 3": True, "No": False}),
]  # fmt: skip


@pytest.mark.parametrize(("check", "cases"), CHECKS)
def test_answers_are_judged(check: dict[str, Any], cases: dict[str, bool]) -> None:
    assert {answer: passes(check, answer) for answer in cases} == cases


FACTORIAL = "def f(n):\n    '''Doc.'''\n    if not isinstance(n, int):\n        raise ValueError\n    out = 1\n    for i in range(2, n + 1):\n        out *= i\n    return out"
CODE: list[tuple[str, list[Any], Any, bool]] = [
    (FACTORIAL, [5], 120, True),
    (f"Sure:\n```python\n{FACTORIAL}\nprint(f(3))\n```\nIt works.", [5], 120, True),
    (f"Here it is.\n\n{FACTORIAL}\n\nIt works.", [5], 120, True),
    ("f = lambda n: 1 if n < 2 else n * f(n - 1)", [5], 120, True),
    ("`lambda s: s[::-1].upper()`", ["ab"], "BA", True),
    ("import math\ndef g(x):\n    return math.isqrt(x)\ndef f(x):\n    a, b = g(x), 1\n    return a + b", [10], 4, True),
    ("def f(w):\n    c = {}\n    for x in w:\n        c[x] = c.get(x, 0) + 1\n    return max(c, key=c.get)", ["abb"], "b", True),
    ("def f(n):\n    a, b = 0, 1\n    while n:\n        a, b = b, a + b\n        n -= 1\n    return a", [10], 55, True),
    ("def f(xs):\n    for x in xs:\n        if x < 0:\n            continue\n        if x > 2:\n            break\n    else:\n        return -1\n    return x", [[-1, 3, 4]], 3, True),
    ("def f(xs):\n    xs.reverse()\n    return [(x, f'{x:.1f}') for x in xs if x]", [[0, 1, 2]], [[2, "2.0"], [1, "1.0"]], True),
    ("f = lambda xs: {k: sum(1 for x in xs if x == k) for k in set(xs)}", [[1, 1]], {"1": 2}, True),
    ("def f(a, b=2):\n    return [x * y for x in range(a) for y in range(b)]", [2], [0, 0, 0, 1], True),
    ("f = lambda x: 0.1 + 0.2", [1], 0.3, True), ("f = lambda x: x == 1", [1], 1, False),
    ("def g(x): return x", [1], 1, False), ("def f(x): return x + 1", [1], 1, False),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "args", "expected", "right"), CODE)
def test_code_is_computed_without_running_it(
    answer: str, args: list[Any], expected: Any, *, right: bool
) -> None:
    assert (
        passes(
            {
                "type": "code",
                "function": "f",
                "cases": [[args, expected], [args, expected]],
            },
            answer,
        )
        is right
    )


N = 20_000
LARGE = [
    "10**10**10", "9**9**9**9", "[0]*10**9", "'a'*10**9", "1<<10**9", "pow(3, 10**9)", "pow(3, 10**5000, 7)", "range(10**30)",
    "[x for x in range(5000) for y in range(5000)]", "'%1000000000d' % 1", "'%d' % 1", "f'{1:>1000000000}'", "'a'.ljust(10**9)",
    "'{:>1000000000}'.format(1)", "[*map('a'.ljust, [10**9])]", "'a'.expandtabs(10**9)", "(5).to_bytes(10**9)",
    "math.factorial(10**8)", "math.comb(10**9, 10**8)", "[*map(math.lcm, range(1, 4000))]", "math.prod([2**7900]*1000)",
    "(lambda f: f(f))(lambda f: f(f))", "int('9' * 4500)", "().__class__.__bases__", "''.join.__self__", "f'{1!r:{2}}'",
    "__import__('os').getcwd()", "open('/etc/passwd')", "math.__loader__", "[].__len__()", "eval('1')", "str(len)[0].format",
]  # fmt: skip
ENDLESS = [
    "while True: pass", "f()", "x = 3\n    while x: x *= x", "x = 'a'\n    while x: x += x",
    "a = [1]\n    for x in a: a.append(x)", "a = [1]\n    while a: a[0:0] = a", "a = [0]\n    a.append(a)\n    a",
    "a = [0]\n    [*map(a.extend, [a] * 24)]", "import os\n    os.getcwd()", "a = [1]\n" + "    a = [a, a]\n" * 500,
]  # fmt: skip


@pytest.mark.parametrize(
    "answer", LARGE + [f"def f():\n    {body}" for body in ENDLESS]
)
def test_code_that_is_large_endless_or_reaches_out_is_not_computed(answer: str) -> None:
    """Where it were computed, the whole would be None, as expected; nothing large is made on the way."""
    program = f"[{answer}] and None"
    if answer.startswith("def"):
        program = f"{answer}\n    return None"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not passes({"type": "code", "cases": [[[], None]]}, program)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


EVERY = [
    {"type": "number", "value": -77.25}, {"type": "choice", "value": "Qq", "options": ["Qq", "A", "I"]},
    {"type": "exact", "values": ["Zq"]}, {"type": "contains", "all": ["Zq"], "any": ["b"]}, {"type": "regex", "pattern": "Zq.*Zq"},
    {"type": "json", "schema": {"pattern": "^(a+)+$"}, "values": {"/a/0": "Zq"}},
    {"type": "constraints", "sentences": 777, "starts_with": "Zq", "ends_with": "q", "paragraphs": 1},
    {"type": "code", "function": "zq", "cases": [[[1], 2]]},
]  # fmt: skip
NASTY = [
    *(piece * (N // len(piece)) for piece in (
        "(", "[", "{", '{"a":[', "-", "not ", "1+", "a.", "f(", "lambda:", "1 if 1 else ", " ", "\n", "- ", "1,", "1,111", "1 ", "/",
        "\\frac{", "\\boxed{", "```\n", "`", "*", "a", "answer is ", "A ", ".", ". ", "Dr. ", "\x00", "\ud800", "ﷺ", "e9", "1e", "$ ",
        "'", "\\\n", "@", "if 1:\n ", '"', "«", "\u0301", "1/", "1 1/", "1{,}", "²", "٣", "\u2028", "<", "-1", "\\text{",
    )),
    "[" * 900 + "]" * 900, "(" * 150 + "1" + ")" * 150, "a" * 5000 + "!", '"' + "a" * 5000 + '!"', '{"a": 1e999}', '{"a": ["\\ud800"]}',
    "9" * 5000, "1/" + "9" * 400, "1e999/1e999", "def zq(x):\n    return '\ud800'", "```python\ndef zq(",
]  # fmt: skip


@pytest.mark.parametrize("check", EVERY, ids=lambda check: check["type"])
def test_no_answer_raises_or_hangs(check: dict[str, Any]) -> None:
    read = READ.validate_python(check)
    assert [
        answer[:20] for answer in NASTY if read.passes(ModelAnswer(text=answer))
    ] == []
    assert not read.passes(
        ModelAnswer(text="x" * N + "Zq Qq -77.25")
    )  # more is not read

    @settings(max_examples=60)
    @given(
        st.text(st.characters())
        | st.text("0123456789.,/-+$%{}[]()\\\"'`*_ \nABab:=^e×−", max_size=60)
    )
    def any_text(text: str) -> None:
        assert isinstance(read.passes(ModelAnswer(text=text)), bool)

    any_text()


def test_a_test_is_not_run_here() -> None:
    with pytest.raises(NeedsRunError):
        passes({"type": "runs", "test": "assert f(2) == 4"}, "def f(x): return 2 * x")


BAD = [
    {"type": "number", "value": "Infinity"}, {"type": "choice", "value": "E", "options": ["A", "B"]}, {"type": "exact", "values": []},
    {"type": "contains"}, {"type": "regex", "pattern": "("}, {"type": "json", "schema": {"type": "text"}},
    {"type": "json", "schema": {"$ref": (ROOT / "tiers/sizing/prices.json").as_uri()}}, {"type": "json", "values": {"a": 1}}, {"type": "constraints"},
    {"type": "code", "cases": []}, {"type": "exact", "values": ["a"], "more": 1},
]  # fmt: skip


@pytest.mark.parametrize("check", BAD, ids=json.dumps)
def test_checks_that_could_never_tell_are_refused(check: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        READ.validate_python(check)
