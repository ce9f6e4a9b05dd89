"""When in an answer a stream breaks off: which moment of the matrix a byte of a stream belongs to."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from tests.unit.continuation.recording import Recording, Recordings
from tests.unit.continuation.requests import (
    CHOICES,
    END_OF_THOUGHT,
    THINKING_KINDS,
    TOOL_KINDS,
    CellRequest,
)

BEFORE = "before the first token"
IN_THOUGHT = "in the thought"
IN_TEXT = "in the text"
IN_NAME = "in a tool call's name"
IN_ARGUMENTS = "in its arguments"
AT_LAST = "at the last token"
AFTER_FINISH = "after finish_reason"
MOMENTS = (
    BEFORE,
    IN_THOUGHT,
    IN_TEXT,
    IN_NAME,
    IN_ARGUMENTS,
    AT_LAST,
    AFTER_FINISH,
)
_CALL = re.compile(r'\s*<tool_call>.*?"arguments": ', re.DOTALL)
_OUTPUT = ("content", "reasoning", "tool_calls")
_COMMENT = ": qarr-tokens "
# What a break is in before an event with output has come: tokens may have been computed.
_WITHOUT_OUTPUT = {IN_THOUGHT: BEFORE, IN_TEXT: BEFORE, IN_ARGUMENTS: IN_NAME}


@dataclass(frozen=True, slots=True)
class Moments:
    """The moments of one stream.

    Attributes:
        ends: Where each event ends, in bytes of the stream as it is sent.
        moments: The moment of a break before the first end, before the second, and so on.
    """

    ends: list[int]
    moments: list[str]

    def at(self, position: int) -> str:
        """Return the moment of a break after so many bytes."""
        return self.moments[bisect_right(self.ends, position)]


def moments_of(
    request: CellRequest, recordings: Recordings, way: str, *, tells_tokens: bool
) -> Moments:
    """Return the moments of a recorded stream, as it is sent by engines that tell their tokens, or do not."""
    answer = recordings.answers[request.name]
    parts = _part_of_each_token(request, answer, recordings)
    ends = []
    moments = [BEFORE]
    tokens = 0
    choice_events = 0
    position = 0
    has_ended = False
    has_output = False
    for block in answer.streams[way][0].split("\n\n"):
        if block.startswith(_COMMENT):
            tokens += block.count(",") + 1
            if not tells_tokens:
                continue
        elif request.kind == CHOICES and '"role"' not in block:
            choice_events += 1
            tokens = choice_events // 2  # of two choices, which have a token each
        position += len(block.encode()) + 2
        has_ended = has_ended or _tells_finish(block)
        has_output = has_output or has_ended or _holds_output(block)
        ends.append(position)
        if has_ended:
            moments.append(AFTER_FINISH)
            continue
        part = parts[min(tokens, len(parts) - 1)]
        moments.append(part if has_output else _WITHOUT_OUTPUT.get(part, part))
    return Moments(ends, moments)


def _part_of_each_token(
    request: CellRequest, answer: Recording, recordings: Recordings
) -> list[str]:
    """Return the moment at which each token is the next one: a break is in what would have come."""
    parts = [_part_at(text, request) for text in _texts_before(answer, recordings)]
    last = len(answer.output_ids) - 1
    return [*parts[:last], AT_LAST, AT_LAST]


def _texts_before(answer: Recording, recordings: Recordings) -> list[str]:
    written = b""
    texts = []
    for token_id in answer.output_ids:
        texts.append(written.decode("utf-8", "ignore"))
        written += recordings.vocabulary[token_id]
    return texts


def _part_at(text: str, request: CellRequest) -> str:
    """Return the part of an answer that a text ends in."""
    if request.kind in THINKING_KINDS:
        _, end, text = text.partition(END_OF_THOUGHT)
        if not end:
            return IN_THOUGHT
    if request.kind not in TOOL_KINDS or "<" not in text:
        return IN_TEXT
    call = text[
        text.rindex("<tool_call") if "<tool_call" in text else text.rindex("<") :
    ]
    return IN_ARGUMENTS if _CALL.match(call) else IN_NAME


def _holds_output(block: str) -> bool:
    """Tell whether an event has something of what the model writes: a text, a thought, a call."""
    _, _, data = block.partition("data: ")
    if not data.startswith("{"):
        return False
    event: dict[str, Any] = json.loads(data)
    kind = event.get("type", "")
    if kind:
        is_call = (event.get("content_block") or {}).get("type") == "tool_use"
        return kind.endswith((".delta", "_delta")) or is_call
    return any(
        choice.get("text")
        or any((choice.get("delta") or {}).get(name) for name in _OUTPUT)
        for choice in event["choices"]
    )


def _tells_finish(block: str) -> bool:
    """Tell whether an event says why the answer ended."""
    _, _, data = block.partition("data: ")
    if not data.startswith("{"):
        return False
    event: dict[str, Any] = json.loads(data)
    if event.get("type") == "message_delta":
        return True
    choices = event.get("choices") or ()
    return any(choice.get("finish_reason") for choice in choices)
