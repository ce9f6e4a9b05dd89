"""Requests for answers of models that may think, and what is read of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from router.profiling.answering import (
    MOST_THINK_TOKENS,
    PLAIN_ANSWER,
    AnswerLimits,
    answer_body,
    default_think_tokens,
    fitting_think_tokens,
    limits_for,
    most_prompt_tokens,
    read_answer,
)
from router.profiling.model_answer import ModelAnswer
from router.profiling.tasks import Task
from tiers.verification.thinking import (
    NO_THINKING,
    Thinking,
    ThinkingMode,
    ThoughtForm,
)

OFF, ON, DEFAULT = ThinkingMode
SWITCH = Thinking(
    can_switch=True,
    thinks_by_default=True,
    form=ThoughtForm.OPENED_BY_PROMPT,
    opening_modes=(DEFAULT, ON),
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}


def task(**fields: Any) -> Task:
    usual = {
        "id": "capital",
        "class": "chat",
        "complexity": "trivial",
        "prompt": "What is the capital of France?",
        "max_tokens": 10,
        "check": {"type": "contains", "all": ["Paris"]},
    }
    return Task.model_validate({**usual, **fields})


def response(
    finish_reason: str = "stop", usage: dict[str, Any] | None = None, **message: Any
) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", **message}}
    return {"choices": [{**choice, "finish_reason": finish_reason}], "usage": usage}


def thinking_limits(think_tokens: int = 100) -> AnswerLimits:
    return AnswerLimits(think_tokens=think_tokens)


def test_a_plain_request_is_greedy_and_bounded() -> None:
    assert answer_body(task()) == {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 10,
        "temperature": 0,
    }


def test_a_model_that_thinks_gets_tokens_for_it() -> None:
    body = answer_body(task(), AnswerLimits(think_tokens=500, mode=ON))
    assert body["max_tokens"] == 510
    assert body["chat_template_kwargs"]["enable_thinking"] is True


def test_tools_and_turns_go_with_the_request() -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": "{}"},
    }
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "12 degrees"},
    ]
    body = answer_body(task(tools=[WEATHER], turns=turns))
    assert body["tools"] == [WEATHER]
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["user", "assistant", "tool"]


def test_limits_follow_the_context_unless_they_are_given() -> None:
    assert limits_for(SWITCH, DEFAULT, 4096, None).think_tokens == 2048
    assert limits_for(SWITCH, DEFAULT, 10**6, None).think_tokens == MOST_THINK_TOKENS
    assert limits_for(SWITCH, DEFAULT, 4096, 300).think_tokens == 300
    assert limits_for(SWITCH, OFF, 4096, 300).think_tokens == 0
    assert default_think_tokens(2048) == 1024


def test_a_model_that_was_not_seen_to_think_gets_tokens_only_if_they_are_given() -> (
    None
):
    assert limits_for(NO_THINKING, DEFAULT, 4096, None) == PLAIN_ANSWER
    assert limits_for(NO_THINKING, DEFAULT, 4096, 300).think_tokens == 300


def test_limits_know_where_the_text_begins() -> None:
    assert limits_for(SWITCH, DEFAULT, 4096, None).begins_in_thought
    assert not limits_for(SWITCH, OFF, 4096, None).begins_in_thought


def test_thoughts_leave_room_for_prompt_and_answer() -> None:
    limits = thinking_limits(1000)
    assert fitting_think_tokens(task(), limits, 4096, prompt_tokens=30) == 1000
    assert fitting_think_tokens(task(), limits, 900, prompt_tokens=30) == 860
    assert fitting_think_tokens(task(), limits, 32, prompt_tokens=30) == 0


def test_the_estimate_of_a_prompt_counts_all_of_it() -> None:
    long = task(
        prompt="word " * 1000,
        turns=[
            {"role": "assistant", "content": "word " * 1000},
            {"role": "user", "content": "And?"},
        ],
    )
    assert most_prompt_tokens(long) > 2000
    assert most_prompt_tokens(task()) < 200


def test_reasoning_is_read_from_both_fields_and_from_tags() -> None:
    for message in (
        {"reasoning": "It is far.", "content": "Paris"},
        {"reasoning_content": "It is far.", "content": "Paris"},
        {"content": "<think>\nIt is far.\n</think>\n\nParis"},
        {"content": "It is far.\n</think>\n\nParis"},
    ):
        answer = read_answer(response(**message))
        assert answer.text == "Paris"
        assert answer.reasoning == "It is far."
        assert not answer.is_cut_while_thinking


def test_an_answer_without_thoughts_stays_as_it_is() -> None:
    assert read_answer(response(content=" Paris\n")) == ModelAnswer(
        text=" Paris\n", finish_reason="stop"
    )
    assert read_answer(response("length", content="Paris is")) == ModelAnswer(
        text="Paris is", finish_reason="length"
    )


def test_calls_are_read_whatever_form_their_arguments_have() -> None:
    calls = [
        {"type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}},
        {"type": "function", "function": {"name": "now", "arguments": {"b": "ü"}}},
        {"type": "function", "function": {"name": "stop", "arguments": None}},
        {"type": "custom", "custom": {"name": "other"}},
    ]
    answer = read_answer(response("tool_calls", content=None, tool_calls=calls))
    names = [call.name for call in answer.tool_calls]
    arguments = [call.arguments for call in answer.tool_calls]
    assert names == ["weather", "now", "stop"]
    assert arguments == ['{"a": 1}', '{"b": "ü"}', "{}"]
    assert answer.text == ""


@pytest.mark.parametrize(
    "message",
    [
        {"reasoning": "It is", "content": None},
        {"reasoning_content": "It is", "content": ""},
        {"content": "<think>It is"},
        {"content": "<think>It is far.</think>\n"},
        {"content": "<think>"},
    ],
)
def test_an_answer_is_cut_while_thinking(message: dict[str, Any]) -> None:
    """The thought has no end, or nothing follows it; an answer that ends by itself there is no cut one."""
    cut = read_answer(response("length", **message))
    assert cut.is_cut_while_thinking
    assert cut.text == ""
    assert not read_answer(response("stop", **message)).is_cut_while_thinking


def test_a_cut_thought_that_the_prompt_opened_needs_no_tag() -> None:
    limits = AnswerLimits(think_tokens=100, begins_in_thought=True)
    cut = read_answer(response("length", content="Let me see"), limits)
    assert cut.is_cut_while_thinking
    assert cut.reasoning == "Let me see"
    unended = read_answer(response("stop", content="Paris"), limits)
    assert unended.text == "Paris"
    assert not unended.is_cut_while_thinking


def test_a_call_after_the_thought_is_an_answer() -> None:
    calls = [
        {"type": "function", "function": {"name": "weather", "arguments": '{"a": 1'}}
    ]
    usage = {
        "completion_tokens": 50,
        "completion_tokens_details": {"reasoning_tokens": 40},
    }
    answer = read_answer(
        response("length", usage, reasoning="It is far.", tool_calls=calls),
        thinking_limits(),
    )
    assert not answer.is_cut_while_thinking


@pytest.mark.parametrize("reasoning_tokens", [None, 40, 140])
def test_a_thought_beyond_its_limit_has_cut_the_answer(
    reasoning_tokens: int | None,
) -> None:
    """Where the engine does not count reasoning, the shares of characters tell."""
    usage: dict[str, Any] = {"completion_tokens": 150}
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    cut = read_answer(
        response("length", usage, reasoning="far " * 140, content="far " * 10),
        thinking_limits(100),
    )
    assert cut.is_cut_while_thinking is (reasoning_tokens != 40)
    assert cut.text
    whole = read_answer(
        response("stop", usage, reasoning="far " * 140, content="far " * 10),
        thinking_limits(100),
    )
    assert not whole.is_cut_while_thinking
