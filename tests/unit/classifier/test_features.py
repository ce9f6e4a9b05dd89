# ruff: noqa: RUF001  (a full-width question mark)
"""What is read from prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classifier import EstimatingCounter, PromptClass, PromptFeatures, extract
from tests.unit.classifier.cases import ASKS, CONTAINS, CONTAINS_AND_ASKS, NEITHER

COUNTER = EstimatingCounter()
ASKS_SHARE, CONTAINS_SHARE, NEITHER_SHARE, LANGUAGE_SHARE, CLASS_SHARE = 0.9, 0.9, 0.9, 0.75, 0.85
LONG_PROSE = "The committee met again in the spring and spoke about the harbour at length. " * 120


def read(text: str) -> PromptFeatures:
    return extract(text, COUNTER)


def language_fits(expected: str, found: str | None) -> bool:
    return expected == "?" or found == (None if expected == "-" else expected)


# The weights are learned from other prompts than these: of each list nearly all must be right, not each.
@pytest.mark.parametrize(
    ("cases", "expected", "share"),
    [
        (ASKS, (False, True), ASKS_SHARE),
        (CONTAINS, (True, False), CONTAINS_SHARE),
        (CONTAINS_AND_ASKS, (True, True), 0.75),
        (NEITHER, (False, False), NEITHER_SHARE),
    ],
    ids=["asks", "contains", "both", "neither"],
)
def test_code_is_found(cases: tuple[tuple[str, str], ...], expected: tuple[bool, bool], share: float) -> None:
    """Code held and asked for is told apart, in many languages; data, mathematics and talk of programs are neither."""
    found = [(prompt, read(prompt)) for _, prompt in cases]
    wrong = [prompt for prompt, f in found if (f.contains_code, f.asks_for_code) != expected]
    assert len(wrong) <= (1 - share) * len(cases), wrong
    for _, features in found:
        assert features.has_code or features.language is None
        assert features.has_code == (features.prompt_class is PromptClass.CODE)


@pytest.mark.parametrize(
    ("prompt", "contains", "asks"),
    [
        ("```\nx = f(1)\n```\nwhat does it print?", True, False),
        ('Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 1', True, False),
        ("def f(x):\n    return x * 2", True, False),
        ("SELECT name FROM users WHERE age > 30;", True, None),  # pasted alone: nobody can tell what is wanted
        ("Write a Python function that adds two numbers.", False, True),
        ("hi", False, False),
        ("hello", False, False),
        ("good morning!", False, False),
        ("thank you", False, False),
        ("Is Paris the capital of France?", False, False),
    ],
)
def test_certain_cases(prompt: str, contains: bool, asks: bool | None) -> None:  # noqa: FBT001
    """What is plain to anybody is found, each by itself. None: either would do."""
    found = read(prompt)
    assert found.contains_code is contains
    assert asks is None or found.asks_for_code is asks


@pytest.mark.parametrize("prompt", ["hi", "hello", "good morning!", "thank you", "Is Paris the capital of France?"])
def test_small_talk_and_plain_questions_are_chat(prompt: str) -> None:
    """A greeting is no nonsense, and a question that names a country is no mathematics."""
    assert read(prompt).prompt_class is PromptClass.CHAT


def test_languages_are_found() -> None:
    """Of code that is found, the language is the expected one mostly."""
    found = [(language, prompt, read(prompt)) for language, prompt in (*ASKS, *CONTAINS, *CONTAINS_AND_ASKS)]
    with_code = [case for case in found if case[2].has_code]
    wrong = [(prompt, f.language) for language, prompt, f in with_code if not language_fits(language, f.language)]
    assert len(wrong) <= (1 - LANGUAGE_SHARE) * len(with_code), wrong


CLASSES = (
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
)


def test_prompt_classes() -> None:
    """Nearly every class is recognised, and nothing is named of a text that says nothing."""
    found = [(prompt, prompt_class, read(prompt)) for prompt, prompt_class in CLASSES]
    wrong = [(prompt[:50], f.prompt_class) for prompt, prompt_class, f in found if f.prompt_class is not prompt_class]
    assert len(wrong) <= (1 - CLASS_SHARE) * len(found), wrong
    assert all(0 <= features.confidence <= 1 for _, _, features in found)
    for prompt in ("", "....!!"):
        assert read(prompt).prompt_class is PromptClass.UNKNOWN


def test_counts() -> None:
    """Characters, words and tokens are those of the whole prompt."""
    features = read("one two  three\nfour")
    assert (features.chars, features.words, features.tokens_exact) == (19, 4, False)
    assert features.tokens == COUNTER.count("one two  three\nfour")


@given(st.text(" \t\n\x1c\x00a.é\u3000", max_size=40))
def test_words_are_what_stands_between_white_space(text: str) -> None:
    assert read(text).words == len(text.split())


def test_certain_marks_are_named() -> None:
    """What shows code for certain is named in words."""
    assert read("what is this?\n```python\nx = 1\n```").signals == ("fenced block",)
    assert read('Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 1').signals == ("traceback",)
    assert read("What time is dinner?").signals == ()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=400))
def test_any_text_is_read(text: str) -> None:
    """No text raises, and the same text gives the same features."""
    first = read(text)
    assert first == read(text)
    assert 0 <= first.confidence <= 1
    assert len(set(first.signals)) == len(first.signals)


@given(st.text("(){}[]<>=:;.,_`'\"#$%^&*\\|/-+ \n\tabX019", max_size=400))
def test_any_punctuation_is_read(text: str) -> None:
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
