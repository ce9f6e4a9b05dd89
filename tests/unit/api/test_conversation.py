"""What routing reads of conversations in Anthropic's and in the Responses API's form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from classifier import EstimatingCounter, PromptClass, ToolUse
from router.api.named_events import Conversation, read_input, read_messages
from router.upstream.json_object import JsonObject

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Write a parser"},
    {"role": "assistant", "content": "Which one?"},
    {"role": "user", "content": "JSON"},
]
TOOL = {"name": "weather", "input_schema": {"type": "object"}}


def document(**body: Any) -> JsonObject:
    return JsonObject.parse(json.dumps(body).encode())


def read(reader: Any, **body: Any) -> Conversation:
    conversation: Conversation = reader(document(**body))
    return conversation


def test_turns_and_system_prompt() -> None:
    """Both APIs' conversations are the same chat, with the system prompt first; a short turn is read with the one before."""
    for conversation in (
        read(read_messages, system="Be brief.", messages=TALK),
        read(
            read_messages, system=[{"type": "text", "text": "Be brief."}], messages=TALK
        ),
        read(read_input, instructions="Be brief.", input=TALK),
        read(
            read_input,
            instructions="Be brief.",
            input=[{"type": "message", **turn} for turn in TALK],
        ),
    ):
        assert conversation.chat == [{"role": "system", "content": "Be brief."}, *TALK]
        prompt = conversation.prompt(EstimatingCounter())
        assert prompt.text == "Write a parser\n\nJSON"
        assert prompt.messages == 4
        assert prompt.system is True
        assert prompt.prompt_tokens == prompt.all_tokens


def test_parts_of_text() -> None:
    """Text in parts is text; an input that is a string is a turn of the user."""
    blocks = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    parts = [
        {"type": "input_text", "text": "Hello"},
        {"type": "input_text", "text": "there"},
    ]
    assert read(read_messages, messages=[{"role": "user", "content": blocks}]).chat == [
        {"role": "user", "content": "Hello\nthere"}
    ]
    assert read(read_input, input=[{"role": "user", "content": parts}]).chat == [
        {"role": "user", "content": "Hello\nthere"}
    ]
    assert read(read_input, input="Hello").chat == [
        {"role": "user", "content": "Hello"}
    ]


def test_what_tools_return_is_no_turn_of_the_user() -> None:
    """The question is classified that a person asked, after any number of calls; calls, results and tools count as tokens."""
    question = {"role": "user", "content": "What is the weather in Paris?"}
    call = {
        "type": "tool_use",
        "id": "t",
        "name": "weather",
        "input": {"city": "Paris"},
    }
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "text", "text": "sunny " * 50}],
    }
    turns = [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    messages = read(
        read_messages, messages=[question, *turns, *turns, *turns], tools=[TOOL]
    )
    called = {
        "type": "function_call",
        "call_id": "t",
        "name": "weather",
        "arguments": '{"city": "Paris"}',
    }
    returned = {"type": "function_call_output", "call_id": "t", "output": "sunny " * 50}
    items = read(
        read_input,
        input=[question, *[called, returned] * 3],
        tools=[{"type": "function", **TOOL}],
    )
    # Custom tools take a text.
    custom_call = {"type": "custom_tool_call", "call_id": "t", "input": "x " * 50}
    custom_output = {"type": "custom_tool_call_output", "output": "sunny " * 50}
    custom_items = read(
        read_input,
        input=[question, *[custom_call, custom_output] * 3],
        tools=[{"type": "custom", "name": "weather"}],
    )
    for conversation in (messages, items, custom_items):
        prompt = conversation.prompt(EstimatingCounter())
        assert prompt.text.strip() == question["content"]
        assert prompt.messages == 7
        assert (prompt.prompt_tokens or 0) > 150
        assert prompt.other_parts == ()
        assert conversation.chat is None


@pytest.mark.parametrize(
    ("reader", "body", "kind"),
    [
        (
            read_messages,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {}}]}
                ]
            },
            "image",
        ),
        (
            read_messages,
            {"messages": [{"role": "user", "content": [{"type": "my secret"}]}]},
            "other",
        ),
        (
            read_messages,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "content": [{"type": "image"}]}
                        ],
                    }
                ]
            },
            "image",
        ),
        (
            read_input,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input_image",
        ),
        (
            read_input,
            {
                "input": [
                    {"type": "function_call_output", "output": [{"type": "input_file"}]}
                ]
            },
            "input_file",
        ),
    ],
)
def test_parts_that_are_not_text(reader: Any, body: dict[str, Any], kind: str) -> None:
    """They are told by their kind, and by no name that a caller made up; such a conversation is not asked again as a chat."""
    conversation = read(reader, **body)
    assert conversation.prompt(EstimatingCounter()).other_parts == (kind,)
    assert conversation.chat is None


def test_reasoning_is_left_out() -> None:
    """Thoughts of the model that come back with a conversation are no parts of another kind."""
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    messages = [
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]}
    ]
    assert read(read_messages, messages=messages).chat == [
        {"role": "assistant", "content": "Yes."}
    ]


@pytest.mark.parametrize("reader", [read_messages, read_input])
@pytest.mark.parametrize(
    "odd",
    [None, 7, [7], [[]], [{}], {"a": 1}, [{"role": [], "content": 3}], [{"type": []}]],
)
def test_malformed_conversations_read_as_empty(reader: Any, odd: Any) -> None:
    """The engine says best what is wrong with them."""
    prompt = read(
        reader, messages=odd, input=odd, system=odd, instructions=odd, tools=odd
    ).prompt(EstimatingCounter())
    assert prompt.text == ""


USE = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
ASKED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [USE]}]
RETURNED = {"type": "tool_result", "tool_use_id": "t", "content": "4 degrees"}
FUNCTION_CALL = {
    "type": "function_call",
    "call_id": "t",
    "name": "weather",
    "arguments": "{}",
}
OUTPUT = {"type": "function_call_output", "call_id": "t", "output": "4 degrees"}
CUSTOM_OUTPUT = {**OUTPUT, "type": "custom_tool_call_output"}


@pytest.mark.parametrize(
    ("reader", "body", "tool_use"),
    [
        (read_messages, {"messages": TALK}, None),
        (read_messages, {"messages": TALK, "tools": [TOOL]}, ToolUse.OFFERED),
        (read_messages, {"messages": TALK, "tools": [TOOL], "tool_choice": {"type": "any"}}, ToolUse.OFFERED),
        (read_messages, {"messages": TALK, "tools": [TOOL], "tool_choice": {"type": "none"}}, None),
        (read_messages, {"messages": [*ASKED, {"role": "user", "content": [RETURNED]}]}, ToolUse.RESULT),
        (read_messages, {"messages": [*ASKED, {"role": "user", "content": [RETURNED, {"type": "text", "text": "so?"}]}]}, ToolUse.RESULT),
        (read_messages, {"messages": [*ASKED, {"role": "user", "content": [RETURNED]}, *TALK[1:]]}, None),
        (read_input, {"input": TALK}, None),
        (read_input, {"input": "hi", "tools": [TOOL]}, ToolUse.OFFERED),
        (read_input, {"input": "hi", "tools": [TOOL], "tool_choice": "none"}, None),
        (read_input, {"input": [TALK[0], FUNCTION_CALL, OUTPUT]}, ToolUse.RESULT),
        (read_input, {"input": [TALK[0], FUNCTION_CALL, OUTPUT, TALK[2]]}, None),
        (read_input, {"input": [OUTPUT]}, ToolUse.RESULT),
        (read_input, {"input": [TALK[0], CUSTOM_OUTPUT]}, ToolUse.RESULT),
    ],
)  # fmt: skip
def test_tools_are_told_by_structure(
    reader: Any, body: dict[str, Any], tool_use: ToolUse | None
) -> None:
    """Also where nothing but a result stands in the conversation."""
    prompt = read(reader, **body).prompt(EstimatingCounter())
    assert prompt.tool_use is tool_use
    is_tools = prompt.classify(EstimatingCounter()).prompt_class is PromptClass.TOOLS
    assert is_tools is (tool_use is not None)


LOOP = {
    read_messages: (
        "messages",
        [
            {"role": "user", "content": "How warm is it in Oslo?"},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "I look."}, USE],
            },
            {"role": "user", "content": [RETURNED]},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [RETURNED, {"type": "text", "text": "so?"}]},
            {"role": "assistant", "content": "4 degrees."},
            {"role": "user", "content": "And in Rome?"},
        ],
    ),
    read_input: (
        "input",
        [
            {"role": "user", "content": "How warm is it in Oslo?"},
            FUNCTION_CALL,
            OUTPUT,
            FUNCTION_CALL,
            OUTPUT,
            {"role": "assistant", "content": "4 degrees."},
            {"role": "user", "content": "And in Rome?"},
        ],
    ),
}


@pytest.mark.parametrize("reader", LOOP, ids=["messages", "input"])
def test_a_longer_conversation_begins_with_the_parts_of_the_shorter(
    reader: Any,
) -> None:
    """Calls and results stand where a model reads them: so a prefix cache has all of the turn before."""
    member, items = LOOP[reader]
    parts: tuple[Any, ...] = ()
    for length in range(1, len(items) + 1):
        body = {member: items[:length], "tools": [TOOL]}
        longer = read(reader, **body).prompt(EstimatingCounter()).parts
        assert longer[: len(parts)] == parts
        assert len(longer) > len(parts)
        parts = longer
    roles = [part.role for part in parts]
    assert roles[0] == "tools"
    assert roles[-1] == "user"
    assert roles.count("tool") >= 2
    assert "assistant" in roles
