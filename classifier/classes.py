"""What kind of work is a prompt? A table of evidence for each class, and an honest "don't know"."""

from __future__ import annotations

import math
import re
import string
from dataclasses import dataclass
from enum import StrEnum

from classifier.asks import RolePattern, found_in, role_pattern


class PromptClass(StrEnum):
    """The classes that quality is measured and promised for."""

    CHAT = "chat"
    CODE = "code"
    MATH = "math"
    EXTRACTION = "extraction"
    WRITING = "writing"
    MULTILINGUAL = "multilingual"
    LONG_CONTEXT = "long_context"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A class, the confidence in it (0..1), and the names of the evidence."""

    prompt_class: PromptClass
    confidence: float
    signals: tuple[str, ...]


LONG_TOKENS = 1500
MIN_SCORE = 0.0  # log-odds below which no class is named
_DOUBT = 1.5  # log-odds of code, either side of 0, within which the class is in doubt
_LEAD_WEIGHT = 0.45
_MAX_LEAD = 3.0

_MATH = (
    role_pattern("asks how many", 1.8, "Hm", r"Hy|HX|[XWmv|]_{0,4}m"),
    role_pattern("numbers", 0.8, "#", r"#"),
    role_pattern("several numbers", 1.2, "#", r"#.{1,200}?#.{0,200}?#"),
    role_pattern("mathematical word", 0.9, "m", r"m"),
    role_pattern("mathematical words", 1.3, "m", r"m.{0,40}m"),
    role_pattern("many mathematical words", 0.8, "m", r"m.{0,40}m.{0,40}m"),
)
_EXTRACTION = (
    role_pattern("asks to extract", 2.2, "E", r"(?:^|\|)_{0,5}E|[BMW]_{0,6}E"),
    role_pattern("refers to a given text", 1.6, "T", r"T"),
    role_pattern("given text and what to do with it", 1.0, "T", r"E_{0,12}T|T_{0,12}E|T\|"),
    role_pattern("asks for structured output", 2.2, "J", r"J"),
    role_pattern("question on a given text", 1.0, "T", r"T.{30,}"),
)
_WRITING = (
    role_pattern("asks to compose", 3.6, "a", r"[BMO]_{0,12}a"),
    role_pattern("role-play", 3.0, "R", r"R_{0,3}|u_{0,4}R"),
    role_pattern("style constraint", 1.4, "O", r"O"),
    role_pattern("rephrase", 1.2, "O", r"(?:^|\|)_{0,2}O"),
    role_pattern("starts with a build verb", 1.2, "B", r"^_{0,3}B"),
)
_CHAT = (
    role_pattern("greeting or thanks", 3.2, "g", r"^[g]"),
    role_pattern("question", 2.6, "WHQ", r"(?:^|\|)[g.]?[WHQ]"),
    role_pattern("asks to explain", 2.0, "X", r"(?:^|\|)_{0,3}X|[WHQ]_{0,6}X"),
    role_pattern("asks for advice or help", 1.6, "u", r"u"),
    role_pattern("words of conversation", 0.8, "u", r"u.{0,30}u"),
    role_pattern("imperative", 1.0, "vBM", r"^[vBM]"),
)
_TABLES: tuple[tuple[PromptClass, float, tuple[RolePattern, ...]], ...] = (
    (PromptClass.MATH, -3.6, _MATH),
    (PromptClass.EXTRACTION, -2.9, _EXTRACTION),
    (PromptClass.WRITING, -2.4, _WRITING),
    (PromptClass.CHAT, -1.8, _CHAT),
)
# Marks in the text itself, that words do not show.
_ARITHMETIC = re.compile(
    r"[\d$€£=<>≤≥^∑∫√∞π\\](?:(?<=\d)(?: ?[+*/×÷^] ?\d| - \d| ?%)|(?<=[$€£])\d|(?<=[=<>≤≥^]) ?-?\d|(?<=[∑∫√∞π])"
    r"|(?<=\\)(?:frac|sqrt|sum|int|begin)\b)"
)
_CHOICES = re.compile(r"\n ?\(?[A-Da-d1][.):] ?\S[^\n]*\n ?\(?[B-Eb-e2][.):] ?\S")
_DATA = re.compile(
    r"\n(?:(?:[^,\n]{1,30},){2,10}[^,\n]{0,40}(?=\n|$)|\|.*\||\d{4}-\d\d-\d\d[ T]\d\d:)|\"[\w -]{1,40}\" ?: ?[\"\d\[{tfn]"
)
_REASONING = (
    "step by step",
    "step-by-step",
    "reasoning",
    "yes or no",
    "true or false",
    "what if ",
    "which of the following",
)
_ROLE_PLAY = (
    "act as ",
    "act like ",
    "pretend",
    "role-play",
    "roleplay",
    "you are a",
    "you are now",
    "in the style of",
    "in the voice of",
    "the persona of",
    "take on the role",
    "assume the role",
    "from the perspective of",
    "picture yourself",
    "imagine you",
)


def judge(text: str, roles: str, *, tokens: int, foreign: float, code: float) -> Judgement:
    """Return the class of a prompt that neither holds nor asks for code, or all but.

    The confidence is the logistic of the class's score and its lead over the second, times the logistic of the distance
    from being taken for code, so that a prompt that may be code is in doubt. ``unknown`` has the confidence that nothing
    was recognised.

    Args:
        text: The excerpt of the prompt that is read.
        roles: Of its words.
        tokens: Of the whole prompt.
        foreign: Log-odds that the prose is not English.
        code: Log-odds that the prompt holds or asks for code, below 0.
    """
    scores, evidence = _score(text, roles)
    scores[PromptClass.MULTILINGUAL] = foreign
    evidence[PromptClass.MULTILINGUAL] = ["prose is not English"]
    if tokens > LONG_TOKENS:
        scores[PromptClass.LONG_CONTEXT] = 3.0 + (tokens - LONG_TOKENS) / 1000
        evidence[PromptClass.LONG_CONTEXT] = [f"{tokens} tokens"]
    if foreign > 0 and PromptClass.LONG_CONTEXT not in scores:
        scores = {PromptClass.MULTILINGUAL: foreign}  # the other tables read English best
    best, second = [*sorted(scores, key=scores.__getitem__, reverse=True), PromptClass.UNKNOWN][:2]
    score = scores[best]
    if score <= MIN_SCORE or "." not in roles.translate(_TO_WORDS):
        return Judgement(PromptClass.UNKNOWN, logistic(0.5 - score), ())
    lead = min(score - max(scores.get(second, MIN_SCORE), MIN_SCORE), _MAX_LEAD)
    confidence = logistic(0.2 + 0.4 * score + _LEAD_WEIGHT * lead) * logistic(_DOUBT - 2 * (code + _DOUBT))
    return Judgement(best, confidence, tuple(evidence[best]))


def judge_code(log_odds: float, signals: tuple[str, ...]) -> Judgement:
    """Return the class code, with the confidence that the log-odds of holding or asking for code give."""
    return Judgement(PromptClass.CODE, logistic(0.5 + log_odds), signals)


def logistic(log_odds: float) -> float:
    """Return the probability, 0..1, for log-odds."""
    return 1 / (1 + math.exp(-max(-30.0, min(log_odds, 30.0))))


_TO_WORDS = {ord("|"): None, ord("#"): "."} | {ord(c): "." for c in string.ascii_letters}


def _score(text: str, roles: str) -> tuple[dict[PromptClass, float], dict[PromptClass, list[str]]]:
    scores: dict[PromptClass, float] = {}
    evidence: dict[PromptClass, list[str]] = {}
    for prompt_class, bias, table in _TABLES:
        found = found_in(roles, table)
        scores[prompt_class] = bias + sum(p.weight for p in found)
        evidence[prompt_class] = [p.name for p in found]
    lower = text.lower()
    for prompt_class, name, weight, phrases in _PHRASES:
        if any(phrase in lower for phrase in phrases):
            scores[prompt_class] += weight
            evidence[prompt_class].append(name)
    for prompt_class, name, weight, pattern in _TEXT_MARKS:
        if pattern.search(text):
            scores[prompt_class] += weight
            evidence[prompt_class].append(name)
    return scores, evidence


_PHRASES: tuple[tuple[PromptClass, str, float, tuple[str, ...]], ...] = (
    (PromptClass.MATH, "reasoning", 2.2, _REASONING),
    (PromptClass.WRITING, "role-play", 3.2, _ROLE_PLAY),
)
_TEXT_MARKS: tuple[tuple[PromptClass, str, float, re.Pattern[str]], ...] = (
    (PromptClass.MATH, "arithmetic", 1.8, _ARITHMETIC),
    (PromptClass.MATH, "multiple choice", 2.6, _CHOICES),
    (PromptClass.EXTRACTION, "holds data", 1.8, _DATA),
)
