# ruff: noqa: RUF001  signs that answers have
"""Reads the text of answers: normal forms, whole words, numbers, JSON, sentences. Nothing here hangs on any text."""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any

import regex

MAX_STARTS = 50  # places where JSON may begin that are tried
FENCE = regex.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", regex.DOTALL)
CLOSING = " .!?,;:。！？…"
EDGES = " \t\r\n*_`\"'"

_SIGNS = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛", "'"),
        **dict.fromkeys("“”„«»‹›「」『』", '"'),
        **dict.fromkeys("−–", "-"),
    }
)
_EMPHASIS = regex.compile(r"(?<!\w)[*_`]+|[*_`]+(?!\w)")
# What words are made of, in scripts that put spaces between words.
_LETTER = r"[[\p{L}\p{M}\p{N}_]--[\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]]"

_LATEX = (
    (r"(?<=\d)\\[dt]?frac", r" \\frac"),
    (r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2"),
    (r"\{,\}", ","),
    (r"\\[,!;: ]|\\(?:text|mathrm)\{[^{}]*\}", " "),
)
_DIGITS = (
    r"(?:\d{1,3}(?:[,' \u00a0\u202f]\d{3})+(?!\d)(?:\.\d+)?|"
    r"(?<!\d,)(?:\d{1,3}(?:\.\d{3})+|\d+),\d{1,2}(?![\d,])|\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3})?"
)
_NUMBER = regex.compile(
    r"(?:(?<![\w)])(?P<sign>[-+]|minus |negative ))?(?:\\?[$€£¥₹] ?)?(?<![\p{Latin}_.\d]|[\p{Latin})]\^\{?)"
    rf"(?:(?P<whole>\d+) (?=\d+/\d))?(?P<top>{_DIGITS})(?:\s?/\s?(?P<under>{_DIGITS}))?"
    r"(?:\s?(?:[×·*]|\\times|\\cdot)\s?10\^\{?(?P<power>[-+]?\d{1,3}))?"
)
_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)

_MARK = regex.compile(r"^[ \t]*(?:[-*•+]|\d{1,3}[.)])[ \t]+", regex.MULTILINE)
_SHORT = regex.compile(
    r"\b(?:(?:Mrs?|Ms|Dr|Prof|St)\.(?=\s)|(?:etc|vs|e\.g|i\.e|[ap]\.m|[A-Z]\.[A-Z])\.(?=\s+\p{Ll}))"
)
_SENTENCE_END = regex.compile(r"(?<=[.!?…]['\")\]*]?)\s+|(?<=[。！？])|\n+")


def signs(text: str) -> str:
    return text.translate(_SIGNS)


def normal(text: str) -> str:
    return " ".join(signs(unicodedata.normalize("NFKC", text)).casefold().split())


def bare(text: str) -> str:
    """Return a text's normal form without emphasis, quotes around it and closing punctuation."""
    return _EMPHASIS.sub("", normal(text)).lstrip(EDGES).rstrip(EDGES + CLOSING) or text


def whole(text: str) -> str:
    before, after = (
        regex.match(_LETTER, edge, regex.V1) is not None
        for edge in (text[:1], text[-1:])
    )
    return (
        (f"(?<!{_LETTER})" if before else "")
        + regex.escape(text)
        + (f"(?!{_LETTER})" if after else "")
    )


def holds(answer: str, text: str) -> bool:
    return regex.search(whole(normal(text)), answer, regex.V1) is not None


def last_number(text: str) -> float:
    text = signs(text)
    for pattern, new in _LATEX:
        text = regex.sub(pattern, new, text)
    if boxes := regex.findall(r"\\boxed\s?\{([^{}]*)\}", text):
        text = boxes[-1]
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007  the last one stays
        pass
    if last is None:
        words = [word for word in regex.findall(r"\w+", text.lower()) if word in _WORDS]
        return float(_WORDS.index(words[-1])) if words else math.nan
    value = _value(last["top"])
    if last["under"]:
        under = _value(last["under"])
        value = value / under if under else math.nan
    value = (value + float(last["whole"] or 0)) * 10.0 ** int(last["power"] or 0)
    return -value if last["sign"] not in {None, "+"} else value


def _value(digits: str) -> float:
    if regex.fullmatch(r"[\d.]+,\d{1,2}", digits):  # a decimal comma
        digits = digits.replace(".", "").replace(",", ".")
    return float(regex.sub(r"[,'\s]", "", digits))


def first_json(text: str) -> Any:
    """Return the first JSON value of a text: all of it, else in a fence, else in prose; ``ValueError``: none."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    block = FENCE.search(text)
    for candidate in (text, block[1].strip() if block else ""):
        try:
            return decoder.decode(candidate)
        except (ValueError, RecursionError):
            continue
    for start in [match.start() for match in regex.finditer(r"[\[{]", text)][
        :MAX_STARTS
    ]:
        try:
            return decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue
    raise ValueError("no JSON")


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and the like


def words(text: str) -> int:
    return sum(1 for word in text.split() if any(map(str.isalnum, word)))


def sentences(text: str) -> int:
    return sum(
        1
        for part in _SENTENCE_END.split(_SHORT.sub("", _MARK.sub("", text)))
        if words(part)
    )


def bullets(text: str) -> int:
    return len(_MARK.findall(text))
