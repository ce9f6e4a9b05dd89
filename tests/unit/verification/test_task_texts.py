"""Tasks and answers as a person reads them."""

from __future__ import annotations

from typing import Any

import pytest

from router.profiling.model_answer import ModelAnswer, ToolCall
from router.profiling.tasks import TASKS, read_tasks
from router.verification.task_texts import (
    ANSWER_CHARS,
    PROMPT_CHARS,
    answer_text,
    prompt_text,
    shortened,
    wanted_text,
)
from tests.unit.verification.made_tasks import made_task

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
        },
    },
}


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ({"type": "number", "value": 7}, "the number 7"),
        (
            {"type": "number", "value": 0.5, "tolerance": 0.1},
            "the number 0.5, or at most 0.1 away from it",
        ),
        (
            {"type": "choice", "value": "B", "options": ["A", "B"]},
            "the option B of A, B",
        ),
        ({"type": "exact", "values": ["Rome"]}, '"Rome" and nothing else'),
        (
            {"type": "exact", "values": ["Rome", "Roma"]},
            'one of "Rome", "Roma" and nothing else',
        ),
        (
            {"type": "contains", "any": ["a", "b"], "none": ["c"]},
            'a text with one of "a", "b"; a text without "c"',
        ),
        (
            {"type": "json", "values": {"/name": "Rosa", "/age": 29}},
            'JSON with /name = "Rosa", /age = 29',
        ),
        (
            {"type": "code", "function": "double", "cases": [[[3], 6]]},
            "Python with double(3) = 6",
        ),
        (
            {"type": "constraints", "sentences": 2, "no_commas": True},
            "constraints: sentences 2, no commas true",
        ),
    ],
)
def test_what_is_wanted_is_said_in_words(check: dict[str, Any], words: str) -> None:
    assert wanted_text(made_task(1, check=check)) == words


def test_every_task_of_the_suite_has_words() -> None:
    for task in read_tasks(TASKS):
        assert wanted_text(task)
        assert prompt_text(task)


def test_a_single_message_stands_alone() -> None:
    assert prompt_text(made_task(5)) == "What is capital number 5?"


def test_other_messages_have_their_role_and_functions_their_parameters() -> None:
    call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
    }
    task = made_task(
        5,
        system="Be brief.",
        tools=[WEATHER],
        turns=[
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call-1", "content": "4 degrees"},
        ],
    )
    assert prompt_text(task).split("\n\n") == [
        "functions: get_weather(city, unit)",
        "system: Be brief.",
        "user: What is capital number 5?",
        'assistant: get_weather({"city": "Oslo"})',
        "tool: 4 degrees",
    ]


def test_an_answer_shows_its_text_and_calls_and_not_its_thoughts() -> None:
    call = ToolCall(name="get_weather", arguments='{"city": "Oslo"}')
    answer = ModelAnswer(text="Let me look.", reasoning="Hm.", tool_calls=(call,))
    assert answer_text(answer) == 'Let me look.\nget_weather({"city": "Oslo"})'


def test_an_answer_says_that_it_is_empty_or_cut() -> None:
    assert answer_text(ModelAnswer(text=" ")) == "(no text)"
    cut = ModelAnswer(text="One, two", finish_reason="length")
    assert answer_text(cut) == "One, two\n(cut at the limit of tokens)"


def test_long_texts_lose_their_middle() -> None:
    text = "a" * 60 + "-" * 1000 + "b" * 40
    assert shortened(text, 100) == (
        f"{'a' * 60}\n… (1,000 characters left out) …\n{'b' * 40}"
    )
    assert shortened(text, len(text)) == text
    long_answer = ModelAnswer(text="word " * 10_000)
    assert len(answer_text(long_answer)) < ANSWER_CHARS + 100
    long_task = made_task(1, prompt="word " * 10_000)
    assert len(prompt_text(long_task)) < PROMPT_CHARS + 100
