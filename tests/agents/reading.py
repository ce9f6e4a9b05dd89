"""Read an agent's answer from the events of a stream, as strictly as an SDK would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.agents.errand import Call, Turn


class Event(NamedTuple):
    name: str
    data: Any


class BrokenError(Exception):
    """The stream ended with an error event, which is the exception's text."""


def events_of(text: str) -> Iterator[Event]:
    """Yield a stream's events; comments are none."""
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        fields = dict(line.split(": ", 1) for line in lines)
        data = fields["data"]
        parsed = data if data == "[DONE]" else json.loads(data)
        yield Event(fields.get("event", "message"), parsed)


def read_turn(path: str, text: str) -> Turn:
    """Return what the model wrote in a streamed answer.

    Raises:
        BrokenError: It ends with an error.
    """
    events = list(events_of(text))
    for event in events:
        if event.name == "error" or (
            isinstance(event.data, dict) and event.data.get("error")
        ):
            raise BrokenError(json.dumps(event.data))
    if path.endswith("/messages"):
        return _read_message(events)
    if path.endswith("/responses"):
        return _read_response(events)
    return _read_chat(events)


def _read_chat(events: list[Event]) -> Turn:
    assert events[-1].data == "[DONE]"
    thought = ""
    text = ""
    names: list[str] = []
    ids: list[str] = []
    arguments = ""
    reasons = []
    for event in events[:-1]:
        for choice in event.data["choices"]:
            delta = choice["delta"]
            thought += delta.get("reasoning") or ""
            text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                names += (
                    [call["function"]["name"]] if "name" in call["function"] else []
                )
                ids += [call["id"]] if "id" in call else []
                arguments += call["function"].get("arguments") or ""
            if choice["finish_reason"] is not None:
                reasons.append(choice["finish_reason"])
    assert len(names) == len(ids) <= 1
    assert reasons == ["tool_calls" if names else "stop"]
    assert len({event.data["id"] for event in events[:-1] if event.data["id"]}) == 1
    return _turn(thought, text, names, arguments)


def _read_message(events: list[Event]) -> Turn:
    assert [event.name for event in events] == [event.data["type"] for event in events]
    assert events[0].name == "message_start"
    assert [event.name for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    written: list[str] = []
    is_open = False
    for event in events[1:-2]:
        if event.name == "content_block_start":
            assert not is_open
            assert event.data["index"] == len(blocks)
            blocks.append(event.data["content_block"])
            written.append("")
        assert event.data["index"] == len(blocks) - 1
        if event.name == "content_block_delta":
            delta = event.data["delta"]
            texts = [delta.get(key) for key in ("thinking", "text", "partial_json")]
            written[-1] += "".join(filter(None, texts))
        is_open = event.name != "content_block_stop"
    assert not is_open
    found = {block["type"]: text for block, text in zip(blocks, written, strict=True)}
    assert len(found) == len(blocks)
    names = [block["name"] for block in blocks if block["type"] == "tool_use"]
    reason = events[-2].data["delta"]["stop_reason"]
    assert reason == ("tool_use" if names else "end_turn")
    return _turn(
        found.get("thinking", ""),
        found.get("text", ""),
        names,
        found.get("tool_use", ""),
    )


def _read_response(events: list[Event]) -> Turn:
    assert [event.name for event in events] == [event.data["type"] for event in events]
    numbers = [event.data["sequence_number"] for event in events]
    assert numbers == list(range(len(events)))
    assert events[0].name == "response.created"
    assert events[-1].name == "response.completed"
    written: dict[str, str] = {}
    for event in events:
        if event.name.endswith(".delta"):
            item_id = event.data["item_id"]
            written[item_id] = written.get(item_id, "") + event.data["delta"]
    done = [
        event.data["item"]
        for event in events
        if event.name == "response.output_item.done"
    ]
    response = events[-1].data["response"]
    assert response["id"] == events[0].data["response"]["id"]
    assert response["output"] == done
    parts = {item["type"]: item for item in done}
    assert len(parts) == len(done)
    texts = {item["type"]: written[item["id"]] for item in done}
    call = parts.get("function_call") or parts.get("custom_tool_call")
    arguments = ""
    names = []
    if call is not None:
        names = [call["name"]]
        arguments = call.get("arguments") or call.get("input")
        assert texts[call["type"]] == arguments
    return _turn(texts.get("reasoning", ""), texts.get("message", ""), names, arguments)


def _turn(thought: str, text: str, names: list[str], arguments: str) -> Turn:
    call = Call(names[0], arguments) if names else None
    return Turn(thought, text, call)
