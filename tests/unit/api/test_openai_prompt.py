"""What routing reads of OpenAI's bodies: the turn to classify, tokens, and parts that are not text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from classifier import Complexity, EstimatingCounter, PromptClass, ToolUse
from router.api.openai_prompt import (
    PART_TOKENS,
    SHORT_CHARS,
    read_chat,
    read_completion,
)
from router.pipeline.request import PromptText
from router.upstream.json_object import JsonObject
from tests.unit.pipeline.calls import asked_for
from tiers.prefix_memory import Prefix, PrefixMemory
from tiers.spec import TemplateTokens

COUNTER = EstimatingCounter()
LONG = (
    "Please explain in detail how a compiler turns source code into machine code, step by step. "
    * 4
)


def chat(*messages: Any, **more: Any) -> PromptText:
    return read_chat(
        JsonObject.parse(json.dumps({"messages": messages, **more}).encode()), COUNTER
    )


def completion(prompt: Any) -> PromptText:
    return read_completion(
        JsonObject.parse(json.dumps({"prompt": prompt}).encode()), COUNTER
    )


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def test_the_last_turn_is_classified_and_all_of_it_is_counted() -> None:
    read = chat(
        {"role": "system", "content": "Be brief."},
        user("Hello"),
        assistant("Hi"),
        user(LONG),
    )
    assert read.text == LONG
    assert read.messages == 4
    assert read.system is True
    assert read.prompt_tokens == sum(
        map(COUNTER.count, ("Be brief.", "Hello", "Hi", LONG))
    )


def test_a_short_turn_is_read_with_the_one_before() -> None:
    """A question such as "and now in Rust?" says nothing alone."""
    first = "Write a function that reverses a linked list."
    assert len(first) < SHORT_CHARS
    assert (
        chat(user(first), assistant("def ..."), user("and now in Rust?")).text
        == f"{first}\n\nand now in Rust?"
    )


def test_messages_of_one_turn_belong_together() -> None:
    assert chat(user("one"), user("two")).text == "one\n\ntwo"
    assert not chat(user("one")).system


def test_a_chat_without_a_user_is_read_by_its_last_message() -> None:
    assert chat({"role": "system", "content": "Say hello."}).text == "Say hello."


def test_parts_that_are_not_text_are_named_and_weighed() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:..."}}
    read = chat(
        user(
            [
                {"type": "text", "text": "What is this?"},
                image,
                {"type": "my secret kind"},
            ]
        )
    )
    assert read.text == "What is this?"
    assert read.other_parts == ("image_url", "other")
    assert read.prompt_tokens == COUNTER.count("What is this?") + 2 * PART_TOKENS


def test_tools_and_calls_count() -> None:
    """The model reads them; they are not what is classified."""
    tools = [{"type": "function", "function": {"name": "weather"}}]
    plain = chat(user("hi"))
    with_tools = chat(user("hi"), tools=tools)
    assert with_tools.text == plain.text
    assert with_tools.prompt_tokens > plain.prompt_tokens


@pytest.mark.parametrize(
    "messages",
    [None, "hi", [1, None], [{"role": "user"}], [{"role": "user", "content": 7}]],
)
def test_what_is_malformed_reads_as_empty(messages: Any) -> None:
    """The engine, which gets the body as it is, says best what is wrong with it."""
    read = read_chat(
        JsonObject.parse(json.dumps({"messages": messages}).encode()), COUNTER
    )
    assert read.text == ""
    assert read.prompt_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "text", "longest", "in_all", "prompts", "parts"),
    [
        ("one two", "one two", 2, 2, 1, ()),
        (["one", "one two"], "one\n\none two", 2, 3, 2, ()),
        ([5, 6, 7], "", 3, 3, 1, ("token ids",)),
        ([[5, 6, 7], [8]], "", 3, 4, 2, ("token ids",)),
        (None, "", 0, 0, 1, ()),
    ],
)
def test_completions(
    prompt: Any,
    text: str,
    longest: int,
    in_all: int,
    prompts: int,
    parts: tuple[str, ...],
) -> None:
    read = completion(prompt)
    assert read.text == text
    assert read.prompts == prompts
    assert read.other_parts == parts
    if parts or not text:
        assert read.prompt_tokens == longest
        assert read.all_tokens == in_all
    else:
        counted = [COUNTER.count(part) for part in text.split("\n\n")]
        assert read.prompt_tokens == max(counted)
        assert read.all_tokens == sum(counted)


def prefix(read: PromptText) -> Prefix | None:
    return (
        asked_for(read)
        .query(read.classify(COUNTER), TemplateTokens(), affinity=True)
        .prefix
    )


def shared(one: PromptText, other: PromptText) -> int:
    first = prefix(one)
    second = prefix(other)
    assert first is not None
    assert second is not None
    memory = PrefixMemory()
    memory.note(first, 0)
    return second.tokens(memory.matching(second))


def test_a_chat_shares_its_earlier_turns() -> None:
    """With tools, calls and roles: another one of any is another prefix. Parts that are text read as text."""
    turns = [user(LONG), assistant(LONG)]
    whole = COUNTER.count(LONG) * 2
    assert shared(chat(*turns), chat(*turns, user("and then?"))) == pytest.approx(
        whole, abs=90
    )
    assert (
        shared(
            chat(*turns), chat(user([{"type": "text", "text": LONG}]), assistant(LONG))
        )
        > whole - 90
    )
    tools: list[Any] = [
        {"type": "function", "function": {"name": name * 40}} for name in "ab"
    ]
    assert shared(chat(*turns, tools=tools[:1]), chat(*turns, tools=tools[1:])) == 0
    assert shared(chat({"role": "system", "content": LONG}), chat(user(LONG))) == 0
    called = {**assistant(LONG), "tool_calls": [{"id": "x" * 300}]}
    last = user(LONG)
    assert shared(chat(user(LONG), called, last), chat(*turns, last)) < shared(
        chat(*turns, last), chat(*turns, last)
    )


def test_what_no_prefix_is_known_of() -> None:
    """Images, several prompts and short ones; token ids are as good as text, and a salt keeps the same text apart."""
    assert (
        prefix(chat(user([{"type": "text", "text": LONG}, {"type": "image_url"}])))
        is None
    )
    assert prefix(completion([LONG, LONG])) is None
    assert prefix(completion("hi")) is None
    ids = list(range(1000, 1400))
    assert 300 < shared(completion(ids), completion([*ids, 7])) <= 400
    assert shared(chat(user(LONG)), chat(user(LONG), cache_salt="mine")) == 0


TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object"}},
    }
]
FUNCTIONS = [{"name": "get_weather", "parameters": {"type": "object"}}]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "a",
            "type": "function",
            "function": {"name": "get_weather", "arguments": "{}"},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "4 degrees"}
NAMED_CHOICE = {"type": "function", "function": {"name": "get_weather"}}


REMINDER = "<system-reminder>\nThe list of things to do is empty. Do not mention it.\n</system-reminder>"


@pytest.mark.parametrize(
    ("added", "read"),
    [
        (user(REMINDER), "Fix the tides"),
        (user(f"{REMINDER}\nAnd the moon\n{REMINDER}"), "Fix the tides\n\nAnd the moon"),
        (user("<environment_context>\n<cwd>/x</cwd>\n</environment_context>"), "Fix the tides"),
        (user(f"{LONG}<environment_details>{LONG}</environment_details>"), LONG.strip()),
        (user("<system-reminder>is never closed"), "Fix the tides\n\n<system-reminder>is never closed"),
        (user("a <b>bold</b> one"), "Fix the tides\n\na <b>bold</b> one"),
    ],
)  # fmt: skip
def test_what_an_agent_adds_for_the_model_is_no_turn_of_the_user(
    added: dict[str, Any], read: str
) -> None:
    """It says nothing of how hard the work is, and is counted as all else."""
    messages = [user("Fix the tides"), CALL, RESULT]
    prompt = chat(*messages, added, tools=TOOLS)
    assert prompt.text == read
    shorter = chat(*messages, tools=TOOLS)
    assert prompt.prompt_tokens is not None
    assert shorter.prompt_tokens is not None
    assert prompt.prompt_tokens - shorter.prompt_tokens == COUNTER.count(
        added["content"]
    )


def test_the_length_of_results_says_nothing_of_the_work() -> None:
    """In a tool loop, the complexity is that of what the user asked for."""
    first = chat(user("Rename the variable x to y."), tools=TOOLS).classify(COUNTER)
    result = {**RESULT, "content": LONG * 100}
    later = chat(user("Rename the variable x to y."), CALL, result, tools=TOOLS)
    features = later.classify(COUNTER)
    assert later.prompt_tokens is not None
    assert later.prompt_tokens > 10_000
    assert features.prompt_class is PromptClass.TOOLS
    assert features.complexity is first.complexity


@pytest.mark.parametrize(
    ("messages", "more", "tool_use"),
    [
        ([user("hi")], {}, None),
        ([user("hi")], {"tools": TOOLS}, ToolUse.OFFERED),
        ([user("hi")], {"tools": TOOLS, "tool_choice": "auto"}, ToolUse.OFFERED),
        ([user("hi")], {"tools": TOOLS, "tool_choice": NAMED_CHOICE}, ToolUse.OFFERED),
        ([user("hi")], {"functions": FUNCTIONS}, ToolUse.OFFERED),
        ([user("hi"), CALL, RESULT], {"tools": TOOLS}, ToolUse.RESULT),
        ([user("hi"), CALL, RESULT], {}, ToolUse.RESULT),
        ([user("hi"), CALL, RESULT], {"tools": TOOLS, "tool_choice": "none"}, ToolUse.RESULT),
        ([user("hi"), {"role": "function", "name": "get_weather", "content": "4"}], {}, ToolUse.RESULT),
        ([user("hi"), CALL, RESULT, assistant("4."), user("thanks")], {"tools": TOOLS}, ToolUse.OFFERED),
        ([user("hi"), CALL, RESULT, assistant("4."), user("thanks")], {}, None),
        ([user("hi")], {"tools": TOOLS, "tool_choice": "none"}, None),
        ([user("hi")], {"functions": FUNCTIONS, "function_call": "none"}, None),
        ([user("hi")], {"tools": []}, None),
        ([user("hi")], {"tools": None}, None),
        ([user("hi")], {"tools": "get_weather"}, None),
        ([], {"tools": TOOLS}, ToolUse.OFFERED),
    ],
)  # fmt: skip
def test_tools_are_told_by_structure(
    messages: list[Any], more: dict[str, Any], tool_use: ToolUse | None
) -> None:
    prompt = chat(*messages, **more)
    assert prompt.tool_use is tool_use
    is_tools = prompt.classify(COUNTER).prompt_class is PromptClass.TOOLS
    assert is_tools is (tool_use is not None)


def test_a_picture_beside_tools_is_hard_work_with_tools() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    features = chat(user([picture]), tools=TOOLS).classify(COUNTER)
    assert features.prompt_class is PromptClass.TOOLS
    assert features.complexity is Complexity.COMPLEX
    assert features.signals == ("part that is not text: image_url", "tools offered")
