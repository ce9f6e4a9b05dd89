# ruff: noqa: RUF001  (a full-width question mark)
"""What is read from prompts."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from classifier import EstimatingCounter, PromptClass, PromptFeatures, extract
from classifier.asks import _ASKS, _ON_CODE
from classifier.evidence import PATTERNS
from tests.unit.classifier.cases import ASKS, CONTAINS, CONTAINS_AND_ASKS, NEITHER

COUNTER = EstimatingCounter()
LONG_PROSE = "The committee met again in the spring and spoke about the harbour at length. " * 120


def read(text: str) -> PromptFeatures:
    """Return the features of a text, its tokens estimated."""
    return extract(text, COUNTER)


def language_fits(expected: str, found: str | None) -> bool:
    """Tell whether a language is the expected one."""
    return expected == "?" or found == (None if expected == "-" else expected)


@pytest.mark.parametrize(("language", "prompt"), ASKS)
def test_requests_for_code(language: str, prompt: str) -> None:
    """A request for code is seen in many languages, without any code in it."""
    features = read(prompt)
    assert (features.contains_code, features.asks_for_code) == (False, True)
    assert language_fits(language, features.language)
    assert features.prompt_class is PromptClass.CODE


@pytest.mark.parametrize(("language", "prompt"), CONTAINS)
def test_questions_about_code(language: str, prompt: str) -> None:
    """Code that is only to be explained is held, not asked for."""
    features = read(prompt)
    assert (features.contains_code, features.asks_for_code) == (True, False)
    assert language_fits(language, features.language)
    assert features.has_code


@pytest.mark.parametrize(("language", "prompt"), CONTAINS_AND_ASKS)
def test_code_to_change(language: str, prompt: str) -> None:
    """Code that is to be changed is held and asked for."""
    features = read(prompt)
    assert (features.contains_code, features.asks_for_code) == (True, True)
    assert language_fits(language, features.language)


@pytest.mark.parametrize(("language", "prompt"), NEITHER)
def test_prompts_without_code(language: str, prompt: str) -> None:
    """Data, mathematics, notation and talk about programming are not code."""
    features = read(prompt)
    assert not features.has_code, features.signals
    assert features.language is None
    assert features.prompt_class is not PromptClass.CODE


@pytest.mark.parametrize(
    ("prompt", "prompt_class"),
    [
        ("hello there", PromptClass.CHAT),
        ("thanks a lot!", PromptClass.CHAT),
        ("Why is the sky blue?", PromptClass.CHAT),
        ("What is the tallest mountain in Africa?", PromptClass.CHAT),
        ("Can you recommend a good book for a long flight?", PromptClass.CHAT),
        ("A train covers 240 miles in 4 hours. What is its average speed?", PromptClass.MATH),
        ("Solve the equation 3x + 5 = 20 and prove that the solution is unique.", PromptClass.MATH),
        ("Prove that the product of two odd integers is odd. Think step by step.", PromptClass.MATH),
        ("Extract all the dates from the following text as JSON: on May 3 we met.", PromptClass.EXTRACTION),
        ("Classify the sentiment of the feedback below.\n\nThe soup was cold.", PromptClass.EXTRACTION),
        ("Write a short story about a lighthouse keeper.", PromptClass.WRITING),
        ("Draft a polite email to my landlord about the heating.", PromptClass.WRITING),
        ("I want you to act as a stand-up comedian.", PromptClass.CHAT),
        ("¿Por qué los gatos ronronean cuando están contentos?", PromptClass.MULTILINGUAL),
        ("Warum ist der Himmel am Abend rot und nicht blau?", PromptClass.MULTILINGUAL),
        ("為什麼天空是藍色的？", PromptClass.MULTILINGUAL),
        ("Почему небо голубое?", PromptClass.MULTILINGUAL),
        (f"Summarise this.\n\n{LONG_PROSE}", PromptClass.LONG_CONTEXT),
        ("Write a Python function that adds two numbers.", PromptClass.CODE),
        ("", PromptClass.UNKNOWN),
        ("?", PromptClass.UNKNOWN),
        ("xkqz vbnm trplw", PromptClass.UNKNOWN),
        ("....!!", PromptClass.UNKNOWN),
    ],
)
def test_prompt_classes(prompt: str, prompt_class: PromptClass) -> None:
    """Each class is recognised by evidence of its own, and nothing is guessed."""
    features = read(prompt)
    assert features.prompt_class is prompt_class, features
    assert 0 <= features.confidence <= 1


def test_counts() -> None:
    """Characters, words and tokens are those of the whole prompt."""
    features = read("one two  three\nfour")
    assert (features.chars, features.words, features.tokens_exact) == (19, 4, False)
    assert features.tokens == COUNTER.count("one two  three\nfour")


def test_evidence_is_named() -> None:
    """The evidence of a decision is given in words."""
    assert "def statement" in read("def f(x):\n    return x\n\nwhat is this?").signals
    assert any(s.startswith("asks:") for s in read("write a python script that renames files").signals)


def test_near_code_is_doubted() -> None:
    """A prompt with some marks of code, though not enough, has less confidence than plain prose."""
    plain = read("What time is dinner?")
    marked = read("What time is dinner(tonight) == early?")
    assert not marked.has_code
    assert marked.confidence < plain.confidence


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=400))
def test_any_text_is_read(text: str) -> None:
    """No text raises, and the same text gives the same features."""
    first = read(text)
    assert first == read(text)
    assert 0 <= first.confidence <= 1
    assert len(set(first.signals)) == len(first.signals)


@settings(deadline=None)
@given(st.text("(){}[]<>=:;.,_`'\"#$%^&*\\|/-+ \n\tabX019", max_size=400))
def test_any_punctuation_is_read(text: str) -> None:
    """No mixture of the marks of code raises."""
    assert read(text) == read(text)


@pytest.mark.parametrize(
    "unit",
    ["(", " ", "a", "{", "`", "7", "\n", "a.", "a_", "a(", "[", "\\", "<a ", "$", "* ", "- ", "def f(\n", "{\n",
     '"a": 1,\n', "x = 1\n",
     "SELECT ", "how many ", "写", "é", "=", "a, ", "|", "```\n", "f(x) "],
)  # fmt: skip
def test_hostile_text_ends(unit: str) -> None:
    """The longest prompts of one repeated mark are read to the end."""
    assert read((unit * 16_000)[:16_000]).chars == 16_000


@given(st.text(alphabet="._|#tnNLlBMPXWHRSQOETJcvimazuygfb", max_size=40))
@example("NtB")
@settings(max_examples=300)
def test_patterns_match_nothing_without_the_roles_that_they_need(roles: str) -> None:
    """What is left out for speed is what cannot match."""
    tables = (_ASKS, _ON_CODE, PATTERNS)
    for pattern in (pattern for table in tables for pattern in table):
        lacking = "".join(role for role in roles if role not in pattern.needs)
        assert pattern.pattern.search(lacking) is None, pattern.name
