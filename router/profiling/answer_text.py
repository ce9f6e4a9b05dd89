# ruff: noqa: RUF001  signs that answers have
"""Reads the text of answers: normal forms, complete words, numbers, JSON, sentences. Nothing here hangs on any text."""

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

_PLAIN_SIGNS = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛", "'"),
        **dict.fromkeys("“”„«»‹›「」『』", '"'),
        **dict.fromkeys("−–", "-"),
    }
)
_EMPHASIS = regex.compile(r"(?<!\w)[*_`]+|[*_`]+(?!\w)")
# Words are made of these, in scripts that put spaces between words.
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
_NUMBER_WORDS = (
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

BULLET = regex.compile(r"^[ \t]*(?:[-*•+]|\d{1,3}[.)])[ \t]+", regex.MULTILINE)
_ABBREVIATION = regex.compile(
    r"\b(?:(?:Mrs?|Ms|Dr|Prof|St)\.(?=\s)|(?:etc|vs|e\.g|i\.e|[ap]\.m|[A-Z]\.[A-Z])\.(?=\s+\p{Ll}))"
)
_SENTENCE_END = regex.compile(r"(?<=[.!?…]['\")\]*]?)\s+|(?<=[。！？])|\n+")


def plain_signs(text: str) -> str:
    """Return a text with plain quotes and minus signs."""
    return text.translate(_PLAIN_SIGNS)


def normal(text: str) -> str:
    """Return a text's normal form: NFKC, plain signs, no case, single blanks."""
    composed = unicodedata.normalize("NFKC", text)
    return " ".join(plain_signs(composed).casefold().split())


def bare(text: str) -> str:
    """Return a text's normal form without emphasis, quotes around it and closing punctuation."""
    unmarked = _EMPHASIS.sub("", normal(text))
    return unmarked.lstrip(EDGES).rstrip(EDGES + CLOSING) or text


def word_pattern(text: str) -> str:
    """Return a pattern that finds a text where it is no part of a longer word."""
    pattern = regex.escape(text)
    if _is_letter(text[:1]):
        pattern = f"(?<!{_LETTER}){pattern}"
    if _is_letter(text[-1:]):
        pattern = f"{pattern}(?!{_LETTER})"
    return pattern


def _is_letter(character: str) -> bool:
    return regex.match(_LETTER, character, regex.V1) is not None


def has_words(answer: str, text: str) -> bool:
    """Tell whether an answer in normal form has a text in it, as complete words."""
    return regex.search(word_pattern(normal(text)), answer, regex.V1) is not None


def last_number(text: str) -> float:
    """Return the number that a text ends with: in a box, in digits or as a word up to twelve; NaN: there is none."""
    plain_text = _without_latex(plain_signs(text))
    number = None
    for number in _NUMBER.finditer(plain_text):  # noqa: B007  the last one stays
        pass
    if number is None:
        return _last_number_word(plain_text)
    return _value_of(number)


def _without_latex(text: str) -> str:
    """Return a text with fractions and separators of LaTeX as plain text; of a text with boxes, the last box."""
    for pattern, replacement in _LATEX:
        text = regex.sub(pattern, replacement, text)
    boxes = regex.findall(r"\\boxed\s?\{([^{}]*)\}", text)
    return boxes[-1] if boxes else text


def _last_number_word(text: str) -> float:
    number_words = [
        word for word in regex.findall(r"\w+", text.lower()) if word in _NUMBER_WORDS
    ]
    if not number_words:
        return math.nan
    return float(_NUMBER_WORDS.index(number_words[-1]))


def _value_of(number: regex.Match[str]) -> float:
    """Return the value of a match of ``_NUMBER``: a mixed number, a fraction or a power of ten."""
    value = _value_of_digits(number["top"])
    if number["under"]:
        divisor = _value_of_digits(number["under"])
        value = value / divisor if divisor else math.nan
    value += float(number["whole"] or 0)
    value *= _power_of_ten(int(number["power"] or 0))
    is_negative = number["sign"] not in {None, "+"}
    return -value if is_negative else value


def _power_of_ten(exponent: int) -> float:
    """Return 10 to an exponent; infinity beyond the largest float."""
    try:
        return 10.0**exponent
    except OverflowError:
        return math.inf


def _value_of_digits(digits: str) -> float:
    has_decimal_comma = regex.fullmatch(r"[\d.]+,\d{1,2}", digits)
    if has_decimal_comma:
        digits = digits.replace(".", "").replace(",", ".")
    return float(regex.sub(r"[,'\s]", "", digits))


def first_json(text: str) -> Any:
    """Return the first JSON value of a text: all of it, else in a fence, else in prose; ``ValueError``: none."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    block = FENCE.search(text)
    fenced = block[1].strip() if block else ""
    for candidate in (text, fenced):
        try:
            return decoder.decode(candidate)
        except (ValueError, RecursionError):
            continue
    starts = [match.start() for match in regex.finditer(r"[\[{]", text)]
    for start in starts[:MAX_STARTS]:
        try:
            value, _end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        return value
    raise ValueError("no JSON")


def _refuse_constant(constant: str) -> None:
    """Refuse NaN and the like, which are no JSON."""
    raise ValueError(constant)


def count_words(text: str) -> int:
    return sum(1 for word in text.split() if _has_letter_or_digit(word))


def _has_letter_or_digit(word: str) -> bool:
    return any(character.isalnum() for character in word)


def count_sentences(text: str) -> int:
    prose = _ABBREVIATION.sub("", BULLET.sub("", text))
    return sum(1 for part in _SENTENCE_END.split(prose) if count_words(part))


def count_bullets(text: str) -> int:
    return len(BULLET.findall(text))
