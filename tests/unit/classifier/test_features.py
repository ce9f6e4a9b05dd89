# ruff: noqa: RUF001  (a full-width question mark)
"""What is read from prompts."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classifier import (
    EstimatingCounter,
    PromptClass,
    PromptFeatures,
    ToolUse,
    extract,
)
from classifier.features import (
    LONG_TOKENS,
    SMALL_TALK_CONTEXT_TOKENS,
    SMALL_TALK_TOKENS,
    known_small_talk,
    words_of,
)
from classifier.kinds import Complexity
from tests.unit.classifier.cases import ASKS, CONTAINS, CONTAINS_AND_ASKS, NEITHER
from tests.unit.classifier.small_talk_cases import NO_SMALL_TALK, SMALL_TALK

COUNTER = EstimatingCounter()
ASKS_SHARE = 0.9
CONTAINS_SHARE = 0.9
NEITHER_SHARE = 0.9
LANGUAGE_SHARE = 0.73
CLASS_SHARE = 0.85
SMALL_TALK_SHARE = 0.55
FALSE_SMALL_TALK = 0.02
SURE = 0.6  # the policy's: below, other classes count too
LONG_PROSE = (
    "The committee met again in the spring and spoke about the harbour at length. "
    * 120
)


def read(text: str) -> PromptFeatures:
    return extract(text, COUNTER)


def letters_of(text: str) -> str:
    return re.sub(r"\W", "", text.lower())


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
def test_code_is_found(
    cases: tuple[tuple[str, str], ...], expected: tuple[bool, bool], share: float
) -> None:
    """Code held and asked for is told apart, in many languages; data, mathematics and talk of programs are neither."""
    found = [(prompt, read(prompt)) for _, prompt in cases]
    wrong = [
        prompt for prompt, f in found if (f.contains_code, f.asks_for_code) != expected
    ]
    assert len(wrong) <= (1 - share) * len(cases), wrong
    for _, features in found:
        assert features.has_code or features.language is None
        assert features.has_code == (features.prompt_class is PromptClass.CODE)


@pytest.mark.parametrize(
    ("prompt", "contains", "asks"),
    [
        ("```\nx = f(1)\n```\nwhat does it print?", True, False),
        (
            'Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 1',
            True,
            False,
        ),
        ("def f(x):\n    return x * 2", True, False),
        # pasted alone: nobody can tell what is wanted
        ("SELECT name FROM users WHERE age > 30;", True, None),
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


def test_a_plain_question_is_chat() -> None:
    """A question that names a country is no mathematics, and no small talk."""
    assert read("Is Paris the capital of France?").prompt_class is PromptClass.CHAT


@pytest.mark.parametrize(
    "prompt",
    ["hi", "Hello!", "good morning!", "thank you", "thanks", "bye", "ok", "lol", "how are you?", "hola", "Danke!", "谢谢",
     "привет"],
)  # fmt: skip
def test_the_commonest_small_talk_is_found(prompt: str) -> None:
    """Each by itself; it asks for no work, and counts as of its class alone."""
    found = read(prompt)
    assert found.prompt_class is PromptClass.SMALL_TALK
    assert found.complexity is Complexity.TRIVIAL
    assert found.confidence >= SURE


@pytest.mark.parametrize(
    "prompt",
    ["What is 15 minus 6?", "What is the capital of Peru?", "how many legs has a spider", "tell me a joke",
     "translate hello", "hi, what is 2+2?", "thanks, and now do it for 2024", "yes please", "continue"],
)  # fmt: skip
def test_simple_questions_and_requests_are_no_small_talk(prompt: str) -> None:
    assert read(prompt).prompt_class is not PromptClass.SMALL_TALK


def test_small_talk_is_told_from_simple_questions() -> None:
    """On prompts that were never trained on: hardly a question is taken for small talk, whose answer would be worse."""
    found = [
        prompt
        for prompt in SMALL_TALK
        if read(prompt).prompt_class is PromptClass.SMALL_TALK
    ]
    wrong = [
        prompt
        for prompt in NO_SMALL_TALK
        if read(prompt).prompt_class is PromptClass.SMALL_TALK
    ]
    missed = set(SMALL_TALK) - set(found)
    assert len(wrong) <= FALSE_SMALL_TALK * len(NO_SMALL_TALK), wrong
    assert len(missed) <= (1 - SMALL_TALK_SHARE) * len(SMALL_TALK), missed


def test_the_cases_of_small_talk_were_not_trained_on() -> None:
    """Letter for letter, apart from marks, spaces and upper case."""
    learned = {
        letters_of(json.loads(line)["text"])
        for file in (Path(__file__).parents[3] / "classifier/data").glob("*.jsonl")
        for line in file.read_text("utf-8").splitlines()
        if line
    }
    assert not [
        prompt
        for prompt in (*SMALL_TALK, *NO_SMALL_TALK)
        if letters_of(prompt) in learned
    ]


def test_a_short_reply_in_a_long_chat_is_no_small_talk() -> None:
    """There "ok" may accept what the last answer offered."""
    tokens = COUNTER.count("ok")
    kinds = [
        extract("ok", COUNTER, tokens + context).prompt_class
        for context in (
            0,
            SMALL_TALK_CONTEXT_TOKENS,
            SMALL_TALK_CONTEXT_TOKENS + 1,
            LONG_TOKENS,
        )
    ]
    assert kinds == [
        PromptClass.SMALL_TALK,
        PromptClass.SMALL_TALK,
        PromptClass.CHAT,
        PromptClass.LONG_CONTEXT,
    ]


@pytest.mark.parametrize(
    "prompt",
    ["yes", "No.", "sure!", "ok", "好的", "What's up?", "BUENOS DÍAS", "arigato!!"],
)
def test_known_small_talk_is_found_whatever_its_case_and_marks(prompt: str) -> None:
    assert read(prompt).prompt_class is PromptClass.SMALL_TALK


@pytest.mark.parametrize(
    "prompt",
    [
        "What's up with the price of eggs?",
        "Good job interview answers",
        "Sure, prove it.",
    ],
)
def test_known_small_talk_within_a_request_is_none(prompt: str) -> None:
    assert read(prompt).prompt_class is not PromptClass.SMALL_TALK


def test_known_small_talk_is_kept_as_it_is_compared() -> None:
    known = known_small_talk()
    assert len(known) > 1500
    assert not [text for text in known if words_of(text) != text]
    assert not [
        prompt for prompt in (*SMALL_TALK, *NO_SMALL_TALK) if words_of(prompt) in known
    ]


def test_a_long_text_is_no_small_talk() -> None:
    """A question may hide between courtesies."""
    courtesies = "hello, how are you? "
    assert read(courtesies).prompt_class is PromptClass.SMALL_TALK
    assert (
        read(courtesies * SMALL_TALK_TOKENS).prompt_class is not PromptClass.SMALL_TALK
    )


def test_languages_are_found() -> None:
    """Of code that is found, the language is the expected one mostly."""
    found = [
        (language, prompt, read(prompt))
        for language, prompt in (*ASKS, *CONTAINS, *CONTAINS_AND_ASKS)
    ]
    with_code = [case for case in found if case[2].has_code]
    wrong = [
        (prompt, f.language)
        for language, prompt, f in with_code
        if not language_fits(language, f.language)
    ]
    assert len(wrong) <= (1 - LANGUAGE_SHARE) * len(with_code), wrong


CLASSES = (
    ("hello there", PromptClass.SMALL_TALK),
    ("thanks a lot!", PromptClass.SMALL_TALK),
    ("Why is the sky blue?", PromptClass.CHAT),
    ("What is the tallest mountain in Africa?", PromptClass.CHAT),
    ("Can you recommend a good book for a long flight?", PromptClass.CHAT),
    (
        "A train covers 240 miles in 4 hours. What is its average speed?",
        PromptClass.MATH,
    ),
    (
        "Solve the equation 3x + 5 = 20 and prove that the solution is unique.",
        PromptClass.MATH,
    ),
    (
        "Prove that the product of two odd integers is odd. Think step by step.",
        PromptClass.MATH,
    ),
    (
        "Extract all the dates from the following text as JSON: on May 3 we met.",
        PromptClass.EXTRACTION,
    ),
    (
        "Classify the sentiment of the feedback below.\n\nThe soup was cold.",
        PromptClass.EXTRACTION,
    ),
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
    wrong = [
        (prompt[:50], f.prompt_class)
        for prompt, prompt_class, f in found
        if f.prompt_class is not prompt_class
    ]
    assert len(wrong) <= (1 - CLASS_SHARE) * len(found), wrong
    assert all(0 <= features.confidence <= 1 for _, _, features in found)
    for prompt in ("", "....!!"):
        assert read(prompt).prompt_class is PromptClass.UNKNOWN


def test_counts() -> None:
    """Characters, words and tokens are those of the whole prompt."""
    features = read("one two  three\nfour")
    assert features.chars == 19
    assert features.words == 4
    assert features.tokens_exact is False
    assert features.tokens == COUNTER.count("one two  three\nfour")


@given(st.text(" \t\n\x1c\x00a.é\u3000", max_size=40))
def test_words_are_what_stands_between_white_space(text: str) -> None:
    assert read(text).words == len(text.split())


def test_certain_marks_are_named() -> None:
    """What shows code for certain is named in words."""
    assert read("what is this?\n```python\nx = 1\n```").signals == ("fenced block",)
    assert read(
        'Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 1'
    ).signals == ("traceback",)
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


@pytest.mark.parametrize("tool_use", ToolUse)
@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "ok",
        "hello there",
        "Write a SQL query for the ten best customers",
        LONG_PROSE,
    ],
    ids=["nothing", "ok", "small talk", "code", "long"],
)
def test_what_has_to_do_with_tools_is_told_by_structure(
    prompt: str, tool_use: ToolUse
) -> None:
    """Neither small talk, code nor length changes the class; what else the words say stays."""
    by_words = read(prompt)
    by_structure = extract(prompt, COUNTER, tool_use=tool_use)
    assert by_structure.prompt_class is PromptClass.TOOLS
    assert by_structure.confidence == 1
    assert not by_structure.doubtful
    assert by_structure.signals == (*by_words.signals, tool_use.value)
    assert by_structure.has_code == by_words.has_code
    assert by_structure.language == by_words.language


def test_the_complexity_of_a_request_with_tools_is_that_of_its_words() -> None:
    simple = "What time is it in Rome?"
    hard = (
        "Plan a three-week trip through Japan for a family of five, book trains, hotels and tables within our budget, compare "
        "the alternatives day by day, explain each trade-off, and then set up reminders for every deadline."
    )
    complexities = [
        extract(prompt, COUNTER, tool_use=ToolUse.OFFERED).complexity
        for prompt in (simple, hard)
    ]
    assert complexities == [read(simple).complexity, read(hard).complexity]
    assert complexities == [Complexity.TRIVIAL, Complexity.COMPLEX]
