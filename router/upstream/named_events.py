"""How answers of Anthropic's Messages API and OpenAI's Responses API are read: their events have names, and one is the last.

Only what the router needs is read: text, the end, token counts, and errors. The events themselves are passed on as they are.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct

from router.upstream.errors import EngineBrokeError
from router.upstream.sse import (
    NOT_A_CHUNK,
    AnswerFormat,
    Chunk,
    Count,
    WholeAnswer,
    decoded,
)

# Why an answer ended, in the words of chat completions, which records and traces use.
STOP_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
}
MESSAGE_OVER = "message_stop"
RESPONSE_OVER = ("response.completed", "response.incomplete")
_FAILURES = ("error", "response.failed")


class _InputOutputUsage(Struct):
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None


class MessageDelta(Struct):
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    signature: str | None = None
    stop_reason: str | None = None


class MessageBlock(Struct):
    type: str = ""
    name: str | None = None


class MessageEvent(Struct):
    type: str
    index: int | None = None
    delta: MessageDelta | None = None
    content_block: MessageBlock | None = None
    usage: _InputOutputUsage | None = None


class _WholeMessage(Struct):
    usage: _InputOutputUsage
    content: list[MessageBlock] = []
    stop_reason: str | None = None


class ResponseItem(Struct):
    type: str = ""
    id: str | None = None
    call_id: str | None = None
    name: str | None = None


class ResponseObject(Struct):
    id: str | None = None
    created_at: Any = None
    status: str | None = None
    output: list[ResponseItem] | None = None
    usage: _InputOutputUsage | None = None


class ResponseEvent(Struct):
    type: str
    sequence_number: int | None = None
    output_index: int | None = None
    content_index: int | None = None
    summary_index: int | None = None
    response: ResponseObject | None = None
    item: ResponseItem | None = None
    delta: Any = None


_MESSAGE_EVENT = msgspec.json.Decoder(MessageEvent)
_MESSAGE = msgspec.json.Decoder(_WholeMessage)
_RESPONSE_EVENT = msgspec.json.Decoder(ResponseEvent)
_RESPONSE = msgspec.json.Decoder(ResponseObject)
_NO_DELTA = MessageDelta()


def read_message_event(raw: bytes) -> Chunk:
    """Read one event of a streamed message; ``EngineBrokeError``: it is none, or an error that the engine reports."""
    event = _data_of(raw, _MESSAGE_EVENT)
    if event is None:
        return Chunk(raw)
    kind = event.type
    delta = event.delta or _NO_DELTA
    if kind == "content_block_delta":
        return Chunk(
            raw,
            delta.text or "",
            other=bool(delta.thinking or delta.partial_json),
            detail=event,
        )
    if kind == "content_block_start":
        block = event.content_block
        is_call = block is not None and block.type == "tool_use"
        return Chunk(raw, other=is_call, detail=event)
    if kind == "message_delta":
        usage = None if event.usage is None else _counts(event.usage)
        finish_reason = _finish_reason(delta.stop_reason)
        return Chunk(raw, finish_reason=finish_reason, usage=usage, detail=event)
    return Chunk(raw, last=kind == MESSAGE_OVER, detail=event)


def read_message(content: bytes) -> WholeAnswer | None:
    """Read a message that is not streamed; None: it is none."""
    try:
        message = decoded(_MESSAGE, content)
    except EngineBrokeError:
        return None
    return _finish_reason(message.stop_reason), _counts(message.usage)


def _finish_reason(stop_reason: str | None) -> str | None:
    """Return a message's stop reason in the words of chat completions, where they have one for it."""
    if stop_reason is None:
        return None
    return STOP_REASONS.get(stop_reason, stop_reason)


def read_response_event(raw: bytes) -> Chunk:
    """Read one event of a streamed response.

    ``EngineBrokeError``: it is none, an error that the engine reports, or the end of a response that is neither complete nor
    as long as it may be.
    """
    event = _data_of(raw, _RESPONSE_EVENT)
    if event is None:
        return Chunk(raw)
    if event.type in RESPONSE_OVER:
        answer = _answer_in(event.response or ResponseObject())
        if answer is None:
            raise EngineBrokeError(
                "the engine ended the response before it was complete"
            )
        finish_reason, usage = answer
        return Chunk(
            raw, finish_reason=finish_reason, usage=usage, last=True, detail=event
        )
    if event.type == "response.output_text.delta" and isinstance(event.delta, str):
        return Chunk(raw, event.delta, detail=event)
    has_other_output = event.type.endswith(".delta") and bool(event.delta)
    return Chunk(raw, other=has_other_output, detail=event)


def read_response(content: bytes) -> WholeAnswer | None:
    """Read a response that is not streamed; None: it is none, or it failed."""
    try:
        return _answer_in(decoded(_RESPONSE, content))
    except EngineBrokeError:
        return None


def _data_of(raw: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Return the data of an event, None for a comment; ``EngineBrokeError``: it has none, or tells of an error."""
    if raw.startswith(b":"):
        return None
    head, separator, text = raw.partition(b"data:")
    if not separator or not (head == b"" or head.endswith(b"\n")):
        raise EngineBrokeError(NOT_A_CHUNK)
    event = decoded(decoder, text)
    if event.type in _FAILURES:
        raise EngineBrokeError("the engine reported an error in its stream")
    return event


def _answer_in(response: ResponseObject) -> tuple[str, dict[str, int]] | None:
    """Return why a response ended, and its token counts; None for one that failed, or is none."""
    usage = response.usage
    output = response.output
    if (
        usage is None
        or output is None
        or response.status not in {"completed", "incomplete"}
    ):
        return None
    counts = _counts(usage)
    if response.status == "incomplete":
        return "length", counts
    if any(item.type == "function_call" for item in output):
        return "tool_calls", counts
    return "stop", counts


def _counts(usage: _InputOutputUsage) -> dict[str, int]:
    """Return token counts under OpenAI's older names. Anthropic's count of the input leaves out what the cache had."""
    cached_tokens = (usage.cache_read_input_tokens or 0) + (
        usage.cache_creation_input_tokens or 0
    )
    prompt_tokens = (usage.input_tokens or 0) + cached_tokens
    output_tokens = usage.output_tokens or 0
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


_USUAL = re.compile(rb"event: [^\n]*+\ndata: \{[^\n]*+")
MESSAGE_FORMAT = AnswerFormat(read_message_event, read_message, _USUAL)
RESPONSE_FORMAT = AnswerFormat(read_response_event, read_response, _USUAL)
