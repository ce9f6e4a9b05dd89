"""Joins resumed streams of chats and completions to what their callers have: text, reasoning and tool calls.

Clients put these together apart from one another, so each is compared by itself, however the events spread them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from router.upstream.splicing import Sent, SentText, data_of, differs
from router.upstream.sse import Chunk

# Members that all chunks of a stream share.
_SHARED_MEMBERS = ("id", "object", "created", "model")


@dataclass(slots=True)
class _SentCall:
    """A tool call as its caller knows it."""

    name: str = ""
    arguments: SentText = field(default_factory=SentText)


class ChatSplicer:
    """Joins resumed streams to a chat's stream, or to a completion's.

    The answer's text is noted elsewhere (``AnswerProgress``), so that a plain answer costs nothing here.
    """

    def __init__(self) -> None:
        self.can_resume = True
        self._content = SentText()
        # By the delta's member: reasoning has two names, and engines may send both.
        self._other_texts: dict[str, SentText] = {}
        self._calls: dict[int, _SentCall] = {}
        # The known calls that the resumed stream has not repeated yet.
        self._awaited_calls = set[int]()
        self._shared: Mapping[str, Any] = {}
        self._has_finish_reason = False

    def note(self, chunk: Chunk) -> None:
        """Note the output besides text of an event that the caller was sent."""
        delta = chunk.detail
        if delta is None:
            return
        for name, value in delta.items():
            if not value or name in {"role", "content"}:
                continue
            if name == "tool_calls" and isinstance(value, list):
                self._note_calls(value)
            elif isinstance(value, str):
                self._other_texts.setdefault(name, SentText()).append(value)
            else:
                self.can_resume = False

    def _note_calls(self, deltas: Sequence[Any]) -> None:
        for delta in deltas:
            call_index, name, arguments = _read_call(delta)
            call = self._calls.setdefault(call_index, _SentCall())
            call.name = call.name or name
            call.arguments.append(arguments)

    def begin(self, sent: Sent) -> None:
        first_chunk = data_of(sent.first_event)
        self._has_finish_reason = sent.has_finish_reason
        self._shared = {
            name: first_chunk[name] for name in _SHARED_MEMBERS if name in first_chunk
        }
        self._content = SentText(sent.text)
        for other_text in self._other_texts.values():
            other_text.begin()
        for call in self._calls.values():
            call.arguments.begin()
        self._awaited_calls = set(self._calls)

    def splice(self, chunk: Chunk) -> Chunk | None:
        if not chunk.raw.startswith(b"data:"):
            return chunk
        event = data_of(chunk.raw)
        event.update(self._shared)
        if not chunk.choice:
            return replace(chunk, raw=_encoded(event), without_ids=b"")
        (choice, *_) = event["choices"]
        delta = choice.get("delta")
        rest: dict[str, Any] = {}
        if delta is None:
            text = self._content.rest_of(chunk.text)
            choice["text"] = text
        else:
            rest = self._rest_of_delta(delta)
            text = rest.get("content", "")
            choice["delta"] = rest
        if chunk.finish_reason is not None:
            self._check_all_is_repeated()
            if self._has_finish_reason:
                return None
        elif not text and not rest:
            return None
        has_other_output = any(name != "content" for name in rest)
        return replace(
            chunk,
            raw=_encoded(event),
            without_ids=b"",
            text=text,
            other=has_other_output,
            blank=delta is not None and not rest,
            detail=rest if has_other_output else None,
        )

    def _rest_of_delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        """Return the output of a delta that was not sent before; the role was."""
        rest: dict[str, Any] = {}
        for name, value in delta.items():
            if not value or name == "role":
                continue
            unsent: Any = value
            if name == "content":
                unsent = self._content.rest_of(value)
            elif name == "tool_calls" and isinstance(value, list):
                unsent = self._rest_of_calls(value)
            elif name in self._other_texts:
                unsent = self._other_texts[name].rest_of(value)
            if unsent:
                rest[name] = unsent
        return rest

    def _rest_of_calls(self, deltas: Sequence[Any]) -> list[Any]:
        """Return what of a delta's tool calls was not sent: of a call that was begun, only further arguments."""
        rest = []
        for delta in deltas:
            call_index, name, arguments = _read_call(delta)
            call = self._calls.get(call_index)
            if call is None:
                rest.append(delta)
                continue
            if name and call.name and name != call.name:
                differs()
            self._awaited_calls.discard(call_index)
            unsent: dict[str, str] = {}
            if not call.name and name:
                unsent["name"] = name
            unsent_arguments = call.arguments.rest_of(arguments)
            if unsent_arguments:
                unsent["arguments"] = unsent_arguments
            if unsent:
                rest.append({"index": call_index, "function": unsent})
        return rest

    def _check_all_is_repeated(self) -> None:
        """Raise ``SeamError`` if a resumed answer ends before all that was sent."""
        texts = [self._content, *self._other_texts.values()]
        texts += [call.arguments for call in self._calls.values()]
        if self._awaited_calls or not all(text.is_repeated for text in texts):
            differs()


def _read_call(delta: Any) -> tuple[int, str, str]:
    """Return index, name and arguments of a part of a tool call; the texts are empty where the part has none."""
    function = delta.get("function") if isinstance(delta, dict) else None
    if not isinstance(function, dict):
        function = {}
    call_index = delta.get("index", 0) if isinstance(delta, dict) else 0
    return call_index, function.get("name") or "", function.get("arguments") or ""


def _encoded(event: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event)
