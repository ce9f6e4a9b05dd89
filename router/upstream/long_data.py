"""Cuts long data, as of images, out of a JSON text and puts it back, so that nobody has to read it to edit the text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import Struct

# Data is looked for in steps of so many bytes: shorter data may be missed, and is read like any text.
STEP_BYTES = 1 << 15
# Shorter texts have no long data, or so little that cutting it saves nothing.
MIN_TEXT_BYTES = 4 * STEP_BYTES
_DATA_URL = b";base64,"
_DATA_URL_HEAD_BYTES = 128  # in which a data URL says that it is one
# How the data of Anthropic's blocks and of OpenAI's audio begins.
_DATA_MEMBERS = (b'"data":"', b'"data": "')
# It stands for data that is cut out. No text has it by chance, and nobody can know it.
_MARK = secrets.token_hex(16).encode()
_NUMBERED_MARK = re.compile(_MARK + rb"(\d+);")


class CutText(Struct, frozen=True):
    """A JSON text without its long data.

    Attributes:
        text: Marks stand in the place of the data.
        data: What was cut out, in its order.
    """

    text: bytes
    data: tuple[memoryview, ...]

    def put_back(self, text: bytes) -> bytes:
        """Return an edited part of the text with the data that belongs into it."""
        if not self.data:
            return text
        # Texts and the numbers of marks by turns.
        pieces: list[bytes | memoryview] = list(_NUMBERED_MARK.split(text))
        for position in range(1, len(pieces), 2):
            pieces[position] = self.data[int(bytes(pieces[position]))]
        return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int


def cut(text: bytes) -> CutText:
    """Cut long data out of a text that is known to be JSON."""
    if len(text) < MIN_TEXT_BYTES:
        return CutText(text, ())
    pieces: list[bytes | memoryview] = []
    data: list[memoryview] = []
    view = memoryview(text)
    end_before = 0
    for span in _data_in(text):
        pieces += [view[end_before : span.start], b"%b%d;" % (_MARK, len(data))]
        data.append(view[span.start : span.end])
        end_before = span.end
    if not data:
        return CutText(text, ())
    pieces.append(view[end_before:])
    return CutText(b"".join(pieces), tuple(data))


def _data_in(text: bytes) -> Iterator[_Span]:
    """Yield where long data stands.

    It is a run without quotes and backslashes, so all of it is in one string or none of it. It is in one if it has a
    semicolon, or if it follows ``"data":"``: JSON has neither outside of strings.
    """
    position = STEP_BYTES
    while position < len(text):
        if text.find(b'"', position, position + STEP_BYTES) < 0:
            start = text.rfind(b'"', 0, position) + 1
            end = text.find(b'"', position)
            if end < 0:
                return
            if _is_data(text, start, end):
                yield _Span(start, end)
            position = end
        position += STEP_BYTES


def _is_data(text: bytes, start: int, end: int) -> bool:
    is_in_string = text.find(_DATA_URL, start, start + _DATA_URL_HEAD_BYTES) >= 0 or (
        text.endswith(_DATA_MEMBERS, 0, start)
    )
    return is_in_string and text.find(b"\\", start, end) < 0
