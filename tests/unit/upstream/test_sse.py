"""Engines' events as they come: what came together, faults after good events, and what is closed."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import httpx
import pytest

from router.upstream.errors import EngineBroke
from router.upstream.sse import DONE, MAX_EVENT_BYTES, Chunk, EventSource, parse_event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio


def event(number: int) -> bytes:
    return b'data: {"choices":[],"n":%d}\n\n' % number


def chunk(number: int) -> Chunk:
    return Chunk(event(number).strip(), {"choices": [], "n": number})


class Parts(httpx.AsyncByteStream):
    """A body that comes in parts; knows whether it is being read."""

    def __init__(self, *parts: bytes, breaks: bool = False) -> None:
        self._parts, self._breaks = parts, breaks
        self.reading = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.reading = True
        try:
            for part in self._parts:
                yield part
            if self._breaks:
                raise httpx.ReadError("cut")
        finally:
            self.reading = False


def stream_of(parts: Parts) -> EventSource:
    return EventSource(httpx.Response(200, stream=parts))


async def test_what_came_together_is_returned_together() -> None:
    parts = Parts(event(1) + event(2) + event(3)[:2], event(3)[2:-1], b"\n: ping\n\n", DONE + b"\n\n")
    stream = stream_of(parts)
    assert await stream.next() == [chunk(1), chunk(2)]
    assert await stream.next() == [chunk(3), Chunk(b": ping")]
    assert await stream.next() is None, "the end is no chunk"
    assert not parts.reading
    assert await stream.next() is None


WRITINGS = {
    "no space": b'data:{"choices":[],"n":1}\n\ndata:{"choices":[],"n":2}\n\ndata:[DONE]\n\n',
    "names and ids": b'event: message\nid: 7\ndata: {"choices":[],"n":1}\n\nretry: 5\n'
    b'data: {"choices":[],"n":2}\nevent: x\n\ndata: [DONE]\n\n',
    "comments": b': a\ndata: {"choices":[],"n":1}\n:\n\n:\n\ndata: {"choices":[],"n":2}\n: b\n\ndata: [DONE]\n\n',
    "CRLF": b'data: {"choices":[],"n":1}\r\n\r\n\r\ndata: {"choices":[],"n":2}\r\n\r\ndata: [DONE]\r\n\r\n',
    "CR": b'data: {"choices":[],"n":1}\r\rdata: {"choices":[],"n":2}\r\rdata: [DONE]\r\r',
    "blank lines": b'\n\ndata: {"choices":[],"n":1}\n\n\n\n\ndata: {"choices":[],"n":2}\n\n\ndata: [DONE] \n\n\n',
    "lines of data": b'\xef\xbb\xbfdata: {"choices":\ndata: [],\ndata:"n":1}\n\n'
    b'data: {"choices":[],\ndata:   "n":2}\nunknown\n\ndata\n\ndata:  [DONE]  \n\n',
}


@pytest.mark.parametrize("writing", WRITINGS)
async def test_every_writing_of_events_is_read(writing: str) -> None:
    """As the standard has it, wherever the stream is cut."""
    stream = WRITINGS[writing]
    for cut in range(1, len(stream)):
        source, found = stream_of(Parts(stream[:cut], stream[cut : cut + 1], stream[cut + 1 :])), []
        while (chunks := await source.next()) is not None:
            found += [(given.data, given.raw) for given in chunks if given.data is not None]
        assert [data for data, _ in found] == [{"choices": [], "n": number} for number in (1, 2)], cut
        assert all(raw.startswith(b"data: {") and raw.count(b"\n") == 0 for _, raw in found)


async def test_nothing_after_the_end_is_read() -> None:
    stream = stream_of(Parts(event(1) + DONE + b"\n\ndata: {nonsense\n\n"))
    assert await stream.next() == [chunk(1)]
    assert await stream.next() is None


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        (Parts(event(1) + b'data: {"error":{}}\n\n' + event(2)), "reported an error"),
        (Parts(event(1) + b'data: {"cut\n\n'), "not a chunk"),
        (Parts(event(1)), "ended early"),
        (Parts(event(1), b'data: {"a"'), "ended early"),
        (Parts(event(1), breaks=True), "broke off"),
    ],
)
async def test_what_came_before_a_fault_is_returned_before_it(parts: Parts, fault: str) -> None:
    stream = stream_of(parts)
    assert await stream.next() == [chunk(1)]
    with pytest.raises(EngineBroke, match=fault):
        await stream.next()
    assert not parts.reading
    assert await stream.next() is None, "a fault is raised once"


async def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    """Beyond a bound it is the engine's fault, and no more is read."""
    endless = Parts(event(1), *([b"x" * (1 << 16)] * (MAX_EVENT_BYTES // (1 << 16) + 2)), b"\n\n", event(2))
    stream = stream_of(endless)
    assert await stream.next() == [chunk(1)]
    with pytest.raises(EngineBroke, match="an event of over"):
        await stream.next()
    assert not endless.reading


async def test_an_event_that_comes_in_many_parts_is_whole() -> None:
    """Its end is found wherever the parts were cut."""
    whole = event(1) + event(2) + DONE + b"\n\n"
    stream = stream_of(Parts(*(whole[at : at + 1] for at in range(len(whole)))))
    assert [await stream.next(), await stream.next(), await stream.next()] == [[chunk(1)], [chunk(2)], None]


async def test_a_fault_that_has_come_can_be_asked_for() -> None:
    stream = stream_of(Parts(event(1), event(2) + b'data: {"error":{}}\n\n'))
    await stream.next()
    stream.check()
    await stream.next()
    with pytest.raises(EngineBroke, match="reported an error"):
        stream.check()


async def test_a_fault_leaves_nothing_for_the_collector() -> None:
    parts = Parts(event(1) + b'data: {"error":{}}\n\n')
    stream, held = stream_of(parts), weakref.ref(parts)  # a stream itself takes no weak reference
    gc.disable()
    try:
        await stream.next()
        try:
            await stream.next()
        except EngineBroke:
            del stream, parts
        assert held() is None
    finally:
        gc.enable()


async def test_empty_events_are_none() -> None:
    stream = stream_of(Parts(b"\n\n\n\n" + event(1) + DONE + b"\n\n"))
    assert await stream.next() == [chunk(1)]


def test_a_fault_does_not_quote_the_engine() -> None:
    """Errors end up in spans and logs, and what an engine sends may hold a prompt."""
    with pytest.raises(EngineBroke) as caught:
        parse_event(b'data: {"choices": [{"delta": {"content": 7}}], "secret": "prompt"}')
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "prompt" not in str(caught.value.__context__)


@pytest.mark.parametrize("given", [b'""', b"null"])
def test_an_empty_finish_reason_is_none(given: bytes) -> None:
    """Some engines send an empty string until the answer ends: taken for an end, half an answer would look complete."""
    read = parse_event(b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": %s}]}' % given)
    assert (read.finish_reason, read.text, read.visible) == (None, "a", True)


@pytest.mark.parametrize(
    ("choice", "text", "other"),
    [
        ('{"delta": {"role": "assistant", "content": ""}}', "", False),
        ('{"delta": {"content": "a", "tool_calls": []}}', "a", False),
        ('{"delta": {"reasoning": "so"}}', "", True),
        ('{"delta": {"tool_calls": [{"index": 0}]}}', "", True),
        ('{"text": "a"}', "a", False),
    ],
)
def test_text_is_told_from_all_else(choice: str, text: str, other: bool) -> None:  # noqa: FBT001
    read = parse_event(b'data: {"choices": [%s]}' % choice.encode())
    assert (read.text, read.other) == (text, other)
