# ruff: noqa: RUF001  (mathematical signs)
"""The evidence by which a prompt's class is judged: patterns over the roles of words, phrases, and marks in the text.

Each piece has a name for people, which is also its key in the weights file. What a piece says about each class is not
written here: ``scripts/train_classifier.py`` learns it from labelled prompts.
"""

from __future__ import annotations

import re

from classifier.asks import RolePattern, found_in, role_pattern
from classifier.kinds import PromptClass

NOT_ENGLISH = "prose is not English"
FOREIGN_DEGREE = "words of another language than English"
CODE_DEGREE = "marks of code"
SHORT = "few words"
SHORT_WORDS = 8  # roles, of which a prompt with fewer is short
_FULL_FOREIGN = 5.0  # log-odds that count as one whole piece of evidence
_FULL_CODE = 3.0  # log-odds above the least that a prompt can have

# By the class that a pattern was made for: training starts from the assumption that it speaks for that class.
_PATTERNS_FOR: tuple[tuple[PromptClass, tuple[RolePattern, ...]], ...] = (
    (
        PromptClass.MATH,
        (
            role_pattern("asks how many", "Hm", r"Hy|HX|[XWmv|]_{0,4}m"),
            role_pattern("numbers", "#", r"#"),
            role_pattern("several numbers", "#", r"#.{1,200}?#.{0,200}?#"),
            role_pattern("mathematical word", "m", r"m"),
            role_pattern("mathematical words", "m", r"m.{0,40}m"),
            role_pattern("many mathematical words", "m", r"m.{0,40}m.{0,40}m"),
        ),
    ),
    (
        PromptClass.EXTRACTION,
        (
            role_pattern("asks to extract", "E", r"(?:^|\|)_{0,5}E|[BMW]_{0,6}E"),
            role_pattern("starts with what to extract", "E", r"^_?E"),
            role_pattern("refers to a given text", "T", r"T"),
            role_pattern("first sentence refers to a given text", "T", r"^_{0,25}T_{0,12}\|."),
            role_pattern("given text and what to do with it", "T", r"E_{0,12}T|T_{0,12}E|T\|"),
            role_pattern("asks for structured output", "J", r"J"),
            role_pattern("question on a given text", "T", r"T.{30,}"),
        ),
    ),
    (
        PromptClass.WRITING,
        (
            role_pattern("asks to compose", "a", r"[BMO]_{0,12}a"),
            role_pattern("first sentence asks to compose", "a", r"^_{0,20}[BMO]_{0,12}a"),
            role_pattern("names a piece of writing", "a", r"a"),
            role_pattern("style constraint", "O", r"O"),
            role_pattern("rephrase", "O", r"(?:^|\|)_{0,2}O"),
            role_pattern("starts with a build verb", "B", r"^_{0,3}B"),
        ),
    ),
    (
        PromptClass.CHAT,
        (
            role_pattern("greeting or thanks", "g", r"^[g]"),
            role_pattern("question", "WHQ", r"(?:^|\|)[g.]?[WHQ]"),
            role_pattern("asks to explain", "X", r"(?:^|\|)_{0,3}X|[WHQ]_{0,6}X"),
            role_pattern("speaks of oneself", "u", r"u"),
            role_pattern("words of conversation", "u", r"u.{0,30}u"),
            role_pattern("takes a role", "R", r"R_{0,3}|u_{0,4}R"),
        ),
    ),
    (
        PromptClass.CODE,
        (
            role_pattern("names what programs are made of", "nNLl", r"[nNLl]"),
            role_pattern("names what programs work on", "c", r"c.{0,60}c"),
        ),
    ),
)
_NEUTRAL_PATTERNS = (
    role_pattern("imperative", "vBM", r"^[vBM]"),
    role_pattern("asks to change something", "M", r"(?:^|\|)_{0,2}M"),
)
PATTERNS = (*(pattern for _, table in _PATTERNS_FOR for pattern in table), *_NEUTRAL_PATTERNS)
# Phrases in lower case; one is enough.
PHRASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "asks for reasoning",
        ("step by step", "step-by-step", "your reasoning", "yes or no", "true or false", "which of the following"),
    ),
    ("supposition", ("what if ", "suppose ", "hypothetical", "had never", "had not ")),
    (
        "role-play",
        (
            "act as ",
            "act like ",
            "pretend",
            "you are a",
            "you are now",
            "in the style of",
            "in the voice of",
            "from the perspective of",
            "picture yourself",
            "imagine you",
        ),
    ),
    (
        "sets up a conversation",
        ("i will provide", "i will give you", "i will type", "i will write", "i will ask", "i will tell", "my first "),
    ),
)
# Marks in the text itself, that words do not show.
MARKS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "arithmetic",
        re.compile(
            r"[\d$€£=<>≤≥^∑∫√∞π\\](?:(?<=\d)(?: ?[+*/×÷^] ?\d| - \d| ?%)|(?<=[$€£])\d|(?<=[=<>≤≥^]) ?-?\d|(?<=[∑∫√∞π])"
            r"|(?<=\\)(?:frac|sqrt|sum|int|begin)\b)"
        ),
    ),
    ("multiple choice", re.compile(r"\n ?\(?[A-Da-d1][.):] ?\S[^\n]*\n ?\(?[B-Eb-e2][.):] ?\S")),
    (
        "holds data",
        re.compile(
            r"\n(?:(?:[^,\n]{1,30},){2,10}[^,\n]{0,40}(?=\n|$)|\|.*\||\d{4}-\d\d-\d\d[ T]\d\d:)"
            r"|\"[\w -]{1,40}\" ?: ?[\"\d\[{tfn]"
        ),
    ),
    ("holds records", re.compile(r": [^;:\n]{1,60}[;\n] ?\w{2,20}: [^;:\n]{1,60}[;\n] ?\w{2,20}: ")),
    ("request, then a text", re.compile(r"\A[^\n]{10,200}\n\n[^\n]{60}")),
    ("request, colon, text", re.compile(r"\A[^\n:]{10,120}: ?\n?[A-Z\"“][^\n]{20}")),
    (
        "yes-or-no question",
        re.compile(
            r"\A(?:Is|Are|Was|Were|Did|Does|Do|Would|Could|Can|Will|Has|Have|Had|Should)\b"
            r"(?! (?:I|you|we|my|your|our|it|there)\b)",
            re.IGNORECASE,
        ),
    ),
    ("somebody has or buys things", re.compile(r"[A-Z][a-z]+ (?:has|had|bought|buys|sells|wants)\b")),
)
FEATURES: tuple[str, ...] = (
    *(pattern.name for pattern in PATTERNS),
    *(name for name, _ in PHRASES),
    *(name for name, _ in MARKS),
    NOT_ENGLISH,
    FOREIGN_DEGREE,
    CODE_DEGREE,
    SHORT,
)
# The class that each piece of evidence was made for, where it was for one.
MADE_FOR: dict[str, PromptClass] = {
    **{pattern.name: prompt_class for prompt_class, table in _PATTERNS_FOR for pattern in table},
    "asks for reasoning": PromptClass.MATH,
    "supposition": PromptClass.MATH,
    "arithmetic": PromptClass.MATH,
    "multiple choice": PromptClass.MATH,
    "yes-or-no question": PromptClass.MATH,
    "somebody has or buys things": PromptClass.MATH,
    "role-play": PromptClass.CHAT,
    "sets up a conversation": PromptClass.CHAT,
    "holds data": PromptClass.EXTRACTION,
    "holds records": PromptClass.EXTRACTION,
    "request, then a text": PromptClass.EXTRACTION,
    "request, colon, text": PromptClass.EXTRACTION,
    NOT_ENGLISH: PromptClass.MULTILINGUAL,
    FOREIGN_DEGREE: PromptClass.MULTILINGUAL,
    CODE_DEGREE: PromptClass.CODE,
}
# These speak for their own class or for none: a prompt with marks of code is never surer of another class for them.
EXCLUSIVE = frozenset({CODE_DEGREE})
# Of these no class can be told alone: they say how a prompt looks, not what is asked.
SHAPES = frozenset({SHORT, CODE_DEGREE})


def find_evidence(text: str, roles: str, *, foreign: float, code: float) -> dict[str, float]:
    """Return what a prompt has of the evidence, by name: 1 for what is there, 0..1 for what has degrees.

    Args:
        text: The excerpt of the prompt that is read.
        roles: Of its words.
        foreign: Log-odds that the prose is not English.
        code: Log-odds that the prompt holds or asks for code.
    """
    found = {pattern.name: 1.0 for pattern in found_in(roles, PATTERNS)}
    lower = text.lower()
    for name, phrases in PHRASES:
        if any(phrase in lower for phrase in phrases):
            found[name] = 1.0
    for name, mark in MARKS:
        if mark.search(text):
            found[name] = 1.0
    if foreign > 0:
        found[NOT_ENGLISH] = 1.0
    for name, degree in (
        (FOREIGN_DEGREE, foreign / _FULL_FOREIGN),
        (CODE_DEGREE, (code + _FULL_CODE) / _FULL_CODE),
    ):
        if degree > 0:
            found[name] = min(degree, 1.0)
    if len(roles) < SHORT_WORDS:
        found[SHORT] = 1.0
    return found
