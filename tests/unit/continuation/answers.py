"""What a client makes of a stream, read as the SDK of its API reads it, and what is wrong with the stream's events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.unit.continuation.requests import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
)

DONE = "[DONE]"
USAGE = {
    "prompt_tokens": "input_tokens",
    "completion_tokens": "output_tokens",
}


@dataclass(slots=True)
class ToolCall:
    """A call as it came: its id and name once, its arguments in parts."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """A whole answer, or the part of one before its error.

    Attributes:
        texts: The answer's text, by choice.
        thought: What the model thought.
        order: The kinds of the parts, in their order.
        finish_reasons: Why it ended, by choice, in the API's words.
        usage: The counts of prompt tokens and of output tokens.
        details: What else the API tells of the answer, such as the stop string that ended it.
        error: The error event's message; None: there was none.
        is_ended: Whether the event came that ends a stream of this API.
        faults: What breaks the rules of the API's events.
    """

    texts: dict[int, str] = field(default_factory=dict)
    thought: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    is_ended: bool = False
    faults: list[str] = field(default_factory=list)

    def note(self, part: str) -> None:
        """Note of which kind the part is that goes on, or begins."""
        if not self.order or self.order[-1] != part:
            self.order.append(part)

    def add_text(self, text: str, choice: int = 0) -> None:
        if text:
            self.note("text")
            self.texts[choice] = self.texts.get(choice, "") + text

    def add_thought(self, text: str) -> None:
        if text:
            self.note("thought")
            self.thought += text

    def begin_call(self, call_id: str, name: str) -> None:
        self.order.append("call")
        if any(call.id == call_id for call in self.calls):
            self.faults.append(f"the call {call_id} began twice")
        if not call_id or not name:
            self.faults.append("a call without an id or a name")
        self.calls.append(ToolCall(call_id, name))

    def check(self, is_wanted: object, fault: str) -> None:
        """Note a fault unless what is wanted holds."""
        if not is_wanted:
            self.faults.append(fault)

    def close(self) -> None:
        """Check what can be told at the end only."""
        if self.error is not None:
            self.check(not self.is_ended, "an end after an error")
            return
        self.check(self.is_ended, "no event that ends the stream")
        self.check(self.usage is not None, "no token counts")
        self.check(bool(self.finish_reasons), "no finish reason")
        for call in self.calls:
            try:
                is_object = isinstance(json.loads(call.arguments or "{}"), dict)
            except ValueError:
                is_object = False
            self.check(is_object, f"arguments that are no JSON: {call.arguments}")


def _events(stream: str, answer: Answer) -> Iterator[tuple[str, Any]]:
    """Return each event's name and data; note what is no event."""
    whole, _, remainder = stream.rpartition("\n\n")
    answer.check(not remainder.strip(), f"half of an event at the end: {remainder!r}")
    for block in whole.split("\n\n"):
        name = ""
        data_lines = []
        for line in block.split("\n"):
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data_lines.append(line.removeprefix("data: "))
            else:
                is_other = not line or line.startswith((":", "id: "))
                answer.check(is_other, f"a line that is no field: {line!r}")
        if not data_lines:
            continue
        data = "\n".join(data_lines)
        answer.check(
            not answer.is_ended and answer.error is None,
            f"an event after the last one: {data}",
        )
        try:
            yield name, data if data == DONE else json.loads(data)
        except ValueError:
            answer.faults.append(f"data that is no JSON: {data}")


def _generate_answer(stream: str) -> Answer:
    answer = Answer()
    for name, data in _events(stream, answer):
        if name == "done":
            answer.is_ended = True
            answer.finish_reasons[0] = data["finish_reason"]
            answer.usage = _counts(data["usage"])
        elif name == "error":
            answer.error = data["title"] if "title" in data else str(data)
        else:
            answer.check(not name, f"an event named {name}")
            answer.add_text(data["text"])
    return answer


def _openai_answer(stream: str, *, is_chat: bool) -> Answer:
    answer = Answer()
    head: dict[str, Any] | None = None
    for name, data in _events(stream, answer):
        answer.check(not name, f"an event named {name}")
        if data == DONE:
            answer.is_ended = True
            continue
        if "error" in data:
            answer.error = data["error"]["message"]
            continue
        members = {
            member: data.get(member) for member in ("id", "created", "model", "object")
        }
        if head is None:
            head = members
        answer.check(members == head, f"another head than {head}: {members}")
        if not data["choices"]:
            answer.check(answer.usage is None, "token counts twice")
            answer.usage = _counts(data["usage"])
        for choice in data["choices"]:
            _add_choice(choice, answer, is_chat=is_chat)
    return answer


def _add_choice(choice: dict[str, Any], answer: Answer, *, is_chat: bool) -> None:
    index = choice["index"]
    answer.check(
        index not in answer.finish_reasons, f"choice {index} went on after its end"
    )
    answer.check(not choice.get("token_ids"), "token ids that nobody asked for")
    answer.check(not choice.get("prompt_token_ids"), "ids of the prompt")
    if is_chat:
        delta = choice["delta"]
        if "role" in delta:
            roles = answer.details.setdefault("roles", [])
            answer.check(index not in roles, "a role twice")
            roles.append(index)
        answer.check(
            index in answer.details.get("roles", ()), "a choice without a role"
        )
        answer.add_thought(delta.get("reasoning") or "")
        answer.add_text(delta.get("content") or "", index)
        for call in delta.get("tool_calls") or ():
            _add_call(call, answer)
    else:
        answer.add_text(choice["text"], index)
    logprobs = choice.get("logprobs")
    if logprobs:
        tokens = logprobs.get("content") or logprobs.get("tokens") or ()
        answer.details["logprobs"] = answer.details.get("logprobs", 0) + len(tokens)
    if choice["finish_reason"] is not None:
        answer.finish_reasons[index] = choice["finish_reason"]
        if choice.get("stop_reason") is not None:
            answer.details["stop reason"] = choice["stop_reason"]


def _add_call(call: dict[str, Any], answer: Answer) -> None:
    index = call["index"]
    function = call.get("function") or {}
    if index == len(answer.calls):
        answer.begin_call(call.get("id") or "", function.get("name") or "")
        answer.check(call.get("type") == "function", "a call without its type")
    elif index != len(answer.calls) - 1:
        answer.faults.append(f"call {index} after call {len(answer.calls) - 1}")
        return
    else:
        known = answer.calls[index]
        answer.check(call.get("id") in {None, known.id}, "a call's second id")
        answer.check(not function.get("name"), "a call's name twice")
    answer.calls[index].arguments += function.get("arguments") or ""


def _counts(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]


_PARTS = {"text": "text", "thinking": "thought"}
_DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "thinking",
    "input_json_delta": "tool_use",
}


@dataclass(slots=True)
class _MessageReader:
    """Folds the events of one message.

    Attributes:
        block: The block that has begun and not ended.
        blocks: How many have ended.
    """

    answer: Answer
    began: bool = False
    block: dict[str, Any] | None = None
    blocks: int = 0

    def read(self, name: str, data: dict[str, Any]) -> None:
        answer = self.answer
        kind = data["type"]
        answer.check(name == kind, f"an event {kind} named {name}")
        may_come_first = kind in {"message_start", "error", "ping"}
        answer.check(self.began or may_come_first, f"{kind} before the start")
        if "index" in data:
            answer.check(data["index"] == self.blocks, f"{kind} at {data['index']}")
        if kind == "message_start":
            answer.check(not self.began, "a second start")
            self.began = True
        elif kind.startswith("content_block"):
            self._read_block(kind, data)
        elif kind == "error":
            answer.error = data["error"]["message"]
        elif kind == "message_delta":
            self._end(data)
        elif kind == "message_stop":
            answer.check(answer.finish_reasons, "a stop without a reason")
            answer.is_ended = True
        else:
            answer.check(kind == "ping", f"an unknown event {kind}")

    def _read_block(self, kind: str, data: dict[str, Any]) -> None:
        answer = self.answer
        if kind == "content_block_delta":
            _add_delta(data["delta"], self.block, answer)
        elif kind == "content_block_start":
            answer.check(self.block is None, "a block within a block")
            self.block = data["content_block"]
            if self.block["type"] == "tool_use":
                answer.begin_call(self.block["id"], self.block["name"])
            else:
                answer.order.append(_PARTS[self.block["type"]])
        else:
            answer.check(self.block is not None, "the end of no block")
            if self.block is not None and self.block["type"] == "thinking":
                answer.check("signature" in self.block, "a thought without a signature")
            self.block = None
            self.blocks += 1

    def _end(self, data: dict[str, Any]) -> None:
        answer = self.answer
        answer.check(self.block is None, "an end within a block")
        answer.check(not answer.finish_reasons, "a second end")
        answer.finish_reasons[0] = data["delta"]["stop_reason"]
        if data["delta"].get("stop_sequence"):
            answer.details["stop reason"] = data["delta"]["stop_sequence"]
        usage = data["usage"]
        cached = usage.get("cache_read_input_tokens") or 0
        answer.usage = (usage["input_tokens"] + cached, usage["output_tokens"])


def _message_answer(stream: str) -> Answer:
    reader = _MessageReader(Answer())
    for name, data in _events(stream, reader.answer):
        reader.read(name, data)
    return reader.answer


def _add_delta(
    delta: dict[str, Any], block: dict[str, Any] | None, answer: Answer
) -> None:
    kind = delta["type"]
    if block is None or block["type"] != _DELTAS.get(kind):
        answer.faults.append(f"{kind} in {block}")
        return
    if kind == "text_delta":
        answer.add_text(delta["text"])
    elif kind == "thinking_delta":
        answer.check("signature" not in block, "a thought after its signature")
        answer.add_thought(delta["thinking"])
    elif kind == "signature_delta":
        answer.check("signature" not in block, "a second signature")
        block["signature"] = delta["signature"]
    else:
        answer.calls[-1].arguments += delta["partial_json"]


@dataclass(slots=True)
class _ResponseReader:
    """Folds the events of one response."""

    answer: Answer
    response_id: str | None = None
    number: int = 0
    items: list[dict[str, Any]] = field(default_factory=list)
    # the item that has begun and not ended, with the text of its part so far
    item: dict[str, Any] | None = None
    written: str = ""
    part_is_open: bool = False

    def read(self, name: str, data: dict[str, Any]) -> None:
        answer = self.answer
        kind = data["type"]
        answer.check(name == kind, f"an event {kind} named {name}")
        answer.check(
            data.get("sequence_number") == self.number,
            f"{kind} has number {data.get('sequence_number')}, not {self.number}",
        )
        self.number += 1
        self._check_ids(kind, data)
        if kind == "error":
            answer.error = data.get("message") or str(data)
        elif "response" in data:
            self._read_response(kind, data["response"])
        elif kind.startswith("response.output_item"):
            self._read_item(kind, data["item"])
        elif "_part." in kind:
            self._read_part(kind, data["part"])
        elif kind.endswith(".delta"):
            self._add(kind, data)
        else:
            text = data["arguments"] if "arguments" in data else data["text"]
            answer.check(
                text == self.written, f"{kind} says {text!r}, not {self.written!r}"
            )

    def _check_ids(self, kind: str, data: dict[str, Any]) -> None:
        """Check that an event is of the item that has begun."""
        answer = self.answer
        position = data.get("output_index")
        if position is not None:
            answer.check(position == len(self.items), f"{kind} at output {position}")
        if "item_id" in data:
            known_id = None if self.item is None else self.item["id"]
            answer.check(
                data["item_id"] == known_id,
                f"{kind} of item {data['item_id']}, not {known_id}",
            )

    def _read_response(self, kind: str, response: dict[str, Any]) -> None:
        answer = self.answer
        if self.response_id is None:
            self.response_id = response["id"]
            answer.check(kind == "response.created", f"{kind} first")
        else:
            answer.check(kind != "response.created", "a second start")
        answer.check(
            response["id"] == self.response_id,
            f"response {response['id']} after {self.response_id}",
        )
        if kind == "response.failed":
            answer.error = str(response.get("error"))
        elif kind in {"response.completed", "response.incomplete"}:
            self._end(response)
        else:
            answer.check(not self.items and self.item is None, f"{kind} late")

    def _read_item(self, kind: str, item: dict[str, Any]) -> None:
        if kind == "response.output_item.done":
            self._end_item(item)
            return
        answer = self.answer
        answer.check(self.item is None, "an item within an item")
        self.item = item
        self.written = ""
        if item["type"] == "function_call":
            answer.begin_call(item["call_id"], item["name"])
        else:
            part = "thought" if item["type"] == "reasoning" else "text"
            answer.order.append(part)

    def _read_part(self, kind: str, part: dict[str, Any]) -> None:
        answer = self.answer
        if kind.endswith(".added"):
            answer.check(not self.part_is_open, "a part within a part")
            self.part_is_open = True
        else:
            answer.check(self.part_is_open, "the end of no part")
            answer.check(part["text"] == self.written, "a part's other text")
            self.part_is_open = False

    def _add(self, kind: str, data: dict[str, Any]) -> None:
        answer = self.answer
        delta = data["delta"]
        self.written += delta
        if kind == "response.output_text.delta":
            answer.check(self.part_is_open, "text outside of a part")
            answer.add_text(delta)
            count = len(data.get("logprobs") or ())
            if count:
                answer.details["logprobs"] = answer.details.get("logprobs", 0) + count
        elif kind.startswith("response.reasoning"):
            answer.add_thought(delta)
        elif self.item is None or not answer.calls:
            answer.faults.append(f"{kind} outside of an item")
        else:
            answer.calls[-1].arguments += delta

    def _end_item(self, item: dict[str, Any]) -> None:
        answer = self.answer
        known_id = None if self.item is None else self.item["id"]
        answer.check(item["id"] == known_id, f"the end of {item['id']}, not {known_id}")
        answer.check(not self.part_is_open, "an item's end within a part")
        answer.check(_text_of(item) == self.written, f"an item's other text: {item}")
        if item["type"] == "function_call":
            answer.check(
                item["call_id"] == answer.calls[-1].id, "a call's second id at its end"
            )
        self.items.append(item)
        self.item = None

    def _end(self, response: dict[str, Any]) -> None:
        answer = self.answer
        answer.is_ended = True
        answer.check(self.item is None, "an end within an item")
        answer.finish_reasons[0] = response["status"]
        usage = response["usage"]
        answer.usage = (usage["input_tokens"], usage["output_tokens"])
        ended = [(item["id"], _text_of(item)) for item in response["output"]]
        streamed = [(item["id"], _text_of(item)) for item in self.items]
        answer.check(ended == streamed, f"it ends with {ended}, not {streamed}")


def _text_of(item: dict[str, Any]) -> str:
    """Return the text that an item holds, or its arguments."""
    if item["type"] == "function_call":
        arguments: str = item["arguments"]
        return arguments
    return "".join(part["text"] for part in item.get("content") or ())


def _response_answer(stream: str) -> Answer:
    reader = _ResponseReader(Answer())
    for name, data in _events(stream, reader.answer):
        reader.read(name, data)
    return reader.answer


_READERS: dict[str, Callable[[str], Answer]] = {
    GENERATE: _generate_answer,
    COMPLETIONS: lambda stream: _openai_answer(stream, is_chat=False),
    CHAT: lambda stream: _openai_answer(stream, is_chat=True),
    MESSAGES: _message_answer,
    RESPONSES: _response_answer,
}


def read_answer(endpoint: str, stream: str) -> Answer:
    """Read a stream as the clients of an endpoint do."""
    answer = _READERS[endpoint](stream)
    answer.close()
    return answer
