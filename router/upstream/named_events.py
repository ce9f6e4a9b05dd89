"""How answers of Anthropic's Messages API and OpenAI's Responses API are read: events with names, and a last one of each.

Only what the router needs is read: text, the end, token counts, and errors. The events themselves are passed on as they are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from router.upstream.errors import EngineBroke
from router.upstream.sse import NOT_A_CHUNK, AnswerFormat, Chunk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.upstream.sse import WholeAnswer

_READ = ConfigDict(extra="allow", strict=True, cache_strings="keys", hide_input_in_errors=True)
_Count = Annotated[int, Field(ge=0)] | None
_TEXT = rb'"((?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u00[0-9a-fA-F]{2}))*+)"'
# Plain events, as vLLM writes them; the empty group stands for token ids, which they never have.
_PLAIN_MESSAGE = re.compile(
    rb'(?<![^\n])event: content_block_delta\ndata: \{"type":"content_block_delta","delta":\{"type":"text_delta","text":'
    + _TEXT
    + rb'\},"index":\d++\}()\n\n'
)
_PLAIN_RESPONSE = re.compile(
    rb'(?<![^\n])event: response.output_text.delta\ndata: \{"content_index":\d++,"delta":'
    + _TEXT
    + rb',"item_id":"[^"\\]*+","logprobs":\[\],"output_index":\d++,"sequence_number":\d++,'
    rb'"type":"response.output_text.delta"\}()\n\n'
)
_LINES = 3
# Why an answer ended, in the words of chat completions, which records and traces have.
STOP_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
MESSAGE_OVER = "message_stop"
RESPONSE_OVER = ("response.completed", "response.incomplete")
_FAILURES = ("error", "response.failed")


@with_config(_READ)
class _Usage(TypedDict, total=False):
    input_tokens: _Count
    output_tokens: _Count
    cache_read_input_tokens: _Count
    cache_creation_input_tokens: _Count


@with_config(_READ)
class _Delta(TypedDict, total=False):
    text: str | None
    thinking: str | None
    partial_json: str | None
    stop_reason: str | None


@with_config(_READ)
class _Block(TypedDict, total=False):
    type: str


@with_config(_READ)
class _MessageEvent(TypedDict, total=False):
    type: str
    delta: _Delta | None
    content_block: _Block | None
    usage: _Usage | None


@with_config(_READ)
class _Message(TypedDict, total=False):
    content: list[_Block]
    stop_reason: str | None
    usage: _Usage


@with_config(_READ)
class _Response(TypedDict, total=False):
    status: str
    output: list[_Block]
    usage: _Usage | None


@with_config(_READ)
class _ResponseEvent(TypedDict, total=False):
    type: str
    response: _Response
    delta: Any


_MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(_MessageEvent)
_MESSAGE: TypeAdapter[Any] = TypeAdapter(_Message)
_RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(_ResponseEvent)
_RESPONSE: TypeAdapter[Any] = TypeAdapter(_Response)


def read_message_event(raw: bytes) -> Chunk:
    """Read one event of a streamed message.

    Raises:
        EngineBroke: It holds something that is no such event, or an error that the engine reports.
    """
    data = _data_of(raw, _MESSAGE_EVENT)
    if data is None:
        return Chunk(raw)
    kind, delta = data["type"], data.get("delta") or {}
    if kind == "content_block_delta":
        other = bool(delta.get("thinking") or delta.get("partial_json"))
        return Chunk(raw, data, text=delta.get("text") or "", other=other)
    if kind == "content_block_start":
        return Chunk(raw, data, other=(data.get("content_block") or {}).get("type") == "tool_use")
    if kind == "message_delta":
        reason, usage = delta.get("stop_reason"), data.get("usage")
        finish_reason = None if reason is None else STOP_REASONS.get(reason, reason)
        return Chunk(raw, data, finish_reason=finish_reason, usage=_counts(usage) if usage else None)
    return Chunk(raw, data, last=kind == MESSAGE_OVER)


def read_message(content: bytes) -> WholeAnswer | None:
    """Read a message that is not streamed; None where it is none."""
    try:
        message = _MESSAGE.validate_json(content)
        reason = message.get("stop_reason")
        return None if reason is None else STOP_REASONS.get(reason, reason), _counts(message["usage"])
    except (ValidationError, KeyError):
        return None


def read_response_event(raw: bytes) -> Chunk:
    """Read one event of a streamed response.

    Raises:
        EngineBroke: It holds something that is no such event, an error that the engine reports, or the end of a response
            that is neither complete nor as long as it may be.
    """
    data = _data_of(raw, _RESPONSE_EVENT)
    if data is None:
        return Chunk(raw)
    kind, delta = data["type"], data.get("delta")
    if kind in RESPONSE_OVER:
        response = data.get("response") or {}
        if (ended := _ended(response)) is None:
            raise EngineBroke("the engine ended the response before it was complete")
        return Chunk(raw, data, finish_reason=ended[0], usage=ended[1], last=True)
    if kind == "response.output_text.delta" and isinstance(delta, str):
        return Chunk(raw, data, text=delta)
    return Chunk(raw, data, other=kind.endswith(".delta") and bool(delta))


def read_response(content: bytes) -> WholeAnswer | None:
    """Read a response that is not streamed; None where it is none."""
    try:
        return _ended(_RESPONSE.validate_json(content))
    except ValidationError:
        return None


def _data_of(raw: bytes, form: TypeAdapter[Any]) -> Mapping[str, Any] | None:
    """Return the object that an event holds; None for a comment."""
    if raw.startswith(b":"):
        return None
    head, found, text = raw.partition(b"data:")
    if not found or not (head == b"" or head.endswith(b"\n")):
        _no_chunk()
    try:
        data: Mapping[str, Any] = form.validate_json(text)
    except ValidationError:
        _no_chunk()  # pydantic's own text quotes the input
    if "type" not in data:
        _no_chunk()
    if data["type"] in _FAILURES:
        raise EngineBroke("the engine reported an error in its stream")
    return data


def _no_chunk() -> NoReturn:
    raise EngineBroke(NOT_A_CHUNK) from None


def _ended(response: Mapping[str, Any]) -> tuple[str, Mapping[str, int]] | None:
    """Return why a response ended, and its token counts; None for one that failed, or is none."""
    usage, output, status = response.get("usage"), response.get("output"), response.get("status")
    if not usage or output is None or status not in {"completed", "incomplete"}:
        return None
    if status == "incomplete":
        return "length", _counts(usage)
    called = any(item.get("type") == "function_call" for item in output)
    return "tool_calls" if called else "stop", _counts(usage)


def _counts(usage: Mapping[str, Any]) -> dict[str, int]:
    """Return token counts under OpenAI's older names. Anthropic's count of the input leaves out what the cache had."""
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    prompt, output = sum(usage.get(part) or 0 for part in parts), usage.get("output_tokens") or 0
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


MESSAGE_FORMAT = AnswerFormat(read_message_event, read_message, _PLAIN_MESSAGE, _LINES)
RESPONSE_FORMAT = AnswerFormat(read_response_event, read_response, _PLAIN_RESPONSE, _LINES)
