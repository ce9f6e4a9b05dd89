"""Events of Anthropic's Messages API and OpenAI's Responses API, as the router reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.upstream.errors import EngineBrokeError
from router.upstream.named_events import (
    read_message,
    read_message_event,
    read_response,
    read_response_event,
)
from tests.fakes.named_events import event

COUNTS = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
SECRET = "what somebody asked"


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (
            {
                "type": "message_start",
                "message": {"usage": {"input_tokens": 10, "output_tokens": 0}},
            },
            ("", False, None),
        ),
        (
            {
                "type": "content_block_start",
                "content_block": {"type": "text", "text": ""},
            },
            ("", False, None),
        ),
        (
            {
                "type": "content_block_start",
                "content_block": {"type": "tool_use", "name": "f"},
            },
            ("", True, None),
        ),
        (
            {
                "type": "content_block_delta",
                "delta": {"type": "text_delta", "text": "a"},
            },
            ("a", False, None),
        ),
        (
            {
                "type": "content_block_delta",
                "delta": {"type": "thinking_delta", "thinking": "a"},
            },
            ("", True, None),
        ),
        (
            {
                "type": "content_block_delta",
                "delta": {"type": "input_json_delta", "partial_json": "{"},
            },
            ("", True, None),
        ),
        (
            {
                "type": "content_block_delta",
                "delta": {"type": "signature_delta", "signature": "a"},
            },
            ("", False, None),
        ),
        ({"type": "content_block_stop", "index": 0}, ("", False, None)),
        (
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
            ("", False, "stop"),
        ),
        (
            {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}},
            ("", False, "length"),
        ),
        (
            {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
            ("", False, "tool_calls"),
        ),
        ({"type": "message_delta", "delta": {"stop_reason": None}}, ("", False, None)),
        ({"type": "ping"}, ("", False, None)),
        ({"type": "from a later release"}, ("", False, None)),
    ],
)
def test_what_is_read_of_a_message(
    data: dict[str, Any], seen: tuple[str, bool, str | None]
) -> None:
    """Text, other output and the end are told apart, under the names that chat completions have for them."""
    chunk = read_message_event(event(data).strip())
    assert (chunk.text, chunk.other, chunk.finish_reason) == seen
    assert not chunk.last


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (
            {
                "type": "response.created",
                "response": {"status": "in_progress", "usage": None},
            },
            ("", False),
        ),
        (
            {"type": "response.output_item.added", "item": {"type": "message"}},
            ("", False),
        ),
        ({"type": "response.output_text.delta", "delta": "a"}, ("a", False)),
        ({"type": "response.function_call_arguments.delta", "delta": "{"}, ("", True)),
        ({"type": "response.reasoning_text.delta", "delta": "a"}, ("", True)),
        ({"type": "response.reasoning_text.delta", "delta": ""}, ("", False)),
        ({"type": "response.output_text.done", "text": "a"}, ("", False)),
    ],
)
def test_what_is_read_of_a_response(
    data: dict[str, Any], seen: tuple[str, bool]
) -> None:
    chunk = read_response_event(event(data).strip())
    assert (chunk.text, chunk.other, chunk.finish_reason, chunk.last) == (
        *seen,
        None,
        False,
    )


@pytest.mark.parametrize(
    ("status", "output", "reason"),
    [
        ("completed", [{"type": "message"}], "stop"),
        ("completed", [{"type": "message"}, {"type": "function_call"}], "tool_calls"),
        ("incomplete", [{"type": "message"}], "length"),
    ],
)
def test_how_a_response_ends(status: str, output: list[Any], reason: str) -> None:
    """vLLM calls the last event of one that was cut ``response.completed`` as well; its status says what it is."""
    usage = {"input_tokens": 10, "output_tokens": 3, "total_tokens": 13}
    response = {"status": status, "output": output, "usage": usage}
    chunk = read_response_event(
        event({"type": "response.completed", "response": response}).strip()
    )
    assert chunk.finish_reason == reason
    assert chunk.usage == COUNTS
    assert chunk.last is True
    assert read_response(json.dumps(response).encode()) == (reason, COUNTS)


def test_tokens_from_a_cache_are_counted() -> None:
    """Anthropic's count of the input leaves them out; the router's has them."""
    usage = {
        "input_tokens": 4,
        "cache_read_input_tokens": 5,
        "cache_creation_input_tokens": 1,
        "output_tokens": 3,
    }
    chunk = read_message_event(
        event({"type": "message_delta", "delta": {}, "usage": usage}).strip()
    )
    details = {"cached_tokens": 5, "created_cache_tokens": 1}
    counts = {**COUNTS, "prompt_tokens_details": details}
    assert chunk.usage == counts
    message = {"content": [], "stop_reason": "stop_sequence", "usage": usage}
    assert read_message(json.dumps(message).encode()) == ("stop", counts)


@pytest.mark.parametrize("read", [read_message_event, read_response_event])
@pytest.mark.parametrize(
    "raw",
    [
        event(
            {"type": "error", "error": {"type": "internal_error", "message": SECRET}}
        ).strip(),
        b"event: x\ndata: {" + SECRET.encode(),
        b'event: x\ndata: {"note": "%b"}' % SECRET.encode(),
        b'event: x\ndata: {"type": 7, "note": "%b"}' % SECRET.encode(),
        b"data: [DONE]",
        b"event: x",
        b"<html>%b" % SECRET.encode(),
    ],
)
def test_what_is_no_event_breaks_the_stream(read: Any, raw: bytes) -> None:
    """As does an error that the engine reports; neither is quoted."""
    with pytest.raises(EngineBrokeError) as broke:
        read(raw)
    assert SECRET not in repr(broke.value)
    assert broke.value.__context__ is None or broke.value.__suppress_context__


@pytest.mark.parametrize("status", ["failed", "cancelled", None])
def test_a_response_that_failed_is_no_answer(status: str | None) -> None:
    """Streamed or not: nobody may take it for one."""
    response = {
        "status": status,
        "output": [],
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    if status is None:
        del response["status"]
    assert read_response(json.dumps(response).encode()) is None
    with pytest.raises(EngineBrokeError):
        read_response_event(
            event({"type": "response.completed", "response": response}).strip()
        )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b'{"choices": []}',
        b'{"usage": {"input_tokens": -1}, "content": []}',
    ],
)
def test_other_answers_are_none(content: bytes) -> None:
    assert read_message(content) is None
    assert read_response(content) is None


def test_comments_are_kept() -> None:
    for read in (read_message_event, read_response_event):
        chunk = read(b": still here")
        assert chunk.raw == b": still here"
        assert chunk.text == ""
