"""Joins resumed streams of Anthropic's Messages API to what their callers have.

An answer is a row of blocks (text, thinking, a tool call), numbered from 0 in every stream of it, so events of new blocks
pass as they are; those of blocks that the caller has are dropped, or cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from router.upstream.named_events import (
    MessageBlock,
    MessageDelta,
    MessageEvent,
    read_message_event,
)
from router.upstream.splicing import Sent, SentText, data_of, differs
from router.upstream.sse import Chunk

_TEXT_MEMBERS = ("text", "thinking", "partial_json")


@dataclass(slots=True)
class _SentBlock:
    """A block as its caller knows it."""

    kind: str
    name: str | None
    text: SentText = field(default_factory=SentText)
    has_signature: bool = False
    is_closed: bool = False
    # whether the resumed stream has not begun it yet
    is_awaited: bool = False


class MessageSplicer:
    """Joins resumed streams to a message's stream."""

    def __init__(self) -> None:
        self.can_resume = True
        self._has_start = False
        self._has_end = False  # the event with the stop reason, after all blocks
        self._blocks: dict[int, _SentBlock] = {}

    def note(self, chunk: Chunk) -> None:
        event: MessageEvent | None = chunk.detail
        if event is None:
            return
        match event.type:
            case "content_block_delta":
                self._note_delta(event)
            case "message_start":
                self._has_start = True
            case "content_block_start":
                kind, name = _identity_of(event.content_block)
                self._blocks[event.index or 0] = _SentBlock(kind, name)
            case "content_block_stop":
                self._block_of(event).is_closed = True
            case "message_delta":
                self._has_end = True

    def _note_delta(self, event: MessageEvent) -> None:
        delta = event.delta or MessageDelta()
        block = self._block_of(event)
        _, text = _text_in(delta)
        block.text.append(text)
        if delta.signature is not None:
            block.has_signature = True

    def _block_of(self, event: MessageEvent) -> _SentBlock:
        """Return the block that an event is about; one that was never begun cannot be gone on with."""
        block = self._blocks.get(event.index or 0)
        if block is None:
            self.can_resume = False
            block = _SentBlock("", None)
            self._blocks[event.index or 0] = block
        return block

    def begin(self, sent: Sent) -> None:
        del sent  # the events that were sent have told all of it
        for block in self._blocks.values():
            block.text.begin()
            block.is_awaited = True

    def splice(self, chunk: Chunk) -> Chunk | None:
        event: MessageEvent | None = chunk.detail
        if event is None:
            return chunk
        match event.type:
            case "message_start":
                return None if self._has_start else chunk
            case "content_block_start" | "content_block_delta" | "content_block_stop":
                block = self._blocks.get(event.index or 0)
                if block is None:
                    return chunk
                return self._splice_block(chunk, event, block)
            case "message_delta" | "message_stop":
                self._check_all_is_repeated()
                if event.type == "message_delta" and self._has_end:
                    return None
        return chunk

    def _splice_block(
        self, chunk: Chunk, event: MessageEvent, block: _SentBlock
    ) -> Chunk | None:
        """Return what the caller lacks of an event about a block that it knows."""
        if event.type == "content_block_start":
            if (block.kind, block.name) != _identity_of(event.content_block):
                differs()
            block.is_awaited = False
            return None
        if event.type == "content_block_stop":
            if not block.text.is_repeated:
                differs()
            return None if block.is_closed else chunk
        delta = event.delta or MessageDelta()
        if delta.signature is not None:
            return None if block.has_signature else chunk
        member, text = _text_in(delta)
        rest = block.text.rest_of(text)
        if not rest:
            return None
        if block.is_closed:
            differs()
        if rest == text:
            return chunk
        return _with_text(chunk, member, rest)

    def _check_all_is_repeated(self) -> None:
        """Raise ``SeamError`` if a resumed answer ends before all that was sent, or leaves a block open."""
        for block in self._blocks.values():
            if block.is_awaited or not block.text.is_repeated or not block.is_closed:
                differs()


def _identity_of(block: MessageBlock | None) -> tuple[str, str | None]:
    """Return a block's kind, and the tool's name if it is a call."""
    if block is None:
        return "", None
    return block.type, block.name


def _text_in(delta: MessageDelta) -> tuple[str, str]:
    """Return the text that a delta holds, after the member that it is in."""
    for member in _TEXT_MEMBERS:
        text = getattr(delta, member)
        if text is not None:
            return member, text
    return "", ""


def _with_text(chunk: Chunk, member: str, text: str) -> Chunk:
    """Return a delta's event with another text."""
    event = data_of(chunk.raw)
    event["delta"][member] = text
    head = chunk.raw.partition(b"data:")[0]
    return read_message_event(head + b"data: " + msgspec.json.encode(event))
