"""Plain events that pass without a task being woken: the same answer wherever it is split, and nothing passes unseen."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING

import httpx
import pytest

from router.upstream import transport
from router.upstream.errors import EngineBroke, EngineStalled
from router.upstream.progress import Progress
from router.upstream.sse import Chunk, EventSource, parse_event
from router.upstream.transport import Body
from tests.unit.own_engines import until
from tests.unit.upstream.test_transport import connection_with_request

if TYPE_CHECKING:
    from router.upstream.sse import PlainTexts
    from router.upstream.transport import Connection

pytestmark = pytest.mark.anyio
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
OPENED = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":[1,2]}'
)


def chat(text: str, ids: str = "[7]", finish: str = "null") -> bytes:
    return (
        'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
        f'{{"content":"{text}"}},"logprobs":null,"finish_reason":{finish},"token_ids":{ids}}}]}}'
    ).encode()


def completion(text: str, ids: str = "[7]") -> bytes:
    return (
        'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,'
        f'"text":"{text}","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":{ids}}}]}}'
    ).encode()


USAGE = b'data: {"id":"chatcmpl-1","object":"x","created":1,"model":"m","choices":[],"usage":{"completion_tokens":5}}'
ANSWER = [
    OPENED, chat("a\\n"), chat("", "[1]"), chat("h\u00e9 \U0001f600", "[2,3]"), b": a comment", completion(' \\\\t\\"q\\"'),
    chat("tail", "null"), chat("end", "[9]", '"stop"'), USAGE,
]  # fmt: skip


def on_wire(events: list[bytes], *, end: bytes = b"data: [DONE]\n\n") -> bytes:
    """Return a stream as an engine sends it, a chunk of HTTP an event."""
    parts = [event + b"\n\n" for event in events] + ([end] if end else [])
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + (b"0\r\n\r\n" if end else b"")


class Reader:
    """Reads a stream as an answer is relayed: plain events as they come, others one by one."""

    def __init__(self, *, takes: int = 1 << 30) -> None:
        self.connection, _ = connection_with_request()
        self.raw = b""
        self.plain: list[tuple[bytes, bytes]] = []
        self.progress = Progress()
        self.parsed: list[Chunk] = []
        self._takes = takes
        self._source = EventSource(httpx.Response(200, stream=Body(self.connection, lambda _: None)))

    def take(self, events: bytes, texts: PlainTexts) -> bool:
        self.raw += events
        self.plain += texts
        self.progress.keep(texts)
        self._takes -= 1
        return self._takes > 0

    async def read(self) -> None:
        await self.connection.head()
        while True:
            await self._source.pump(self.take)
            chunks = await self._source.next()
            if chunks is None:
                return
            for chunk in chunks:
                self.raw += chunk.raw + b"\n\n"
                self.parsed.append(chunk)
                self.progress.note(chunk)

    def limit(self, limit_s: float) -> None:
        self._source.limit_reads(limit_s)


def expected(events: list[bytes]) -> Progress:
    """Return how far an answer is if each of its events is parsed."""
    progress = Progress()
    for event in events:
        progress.note(parse_event(event))
    return progress


async def feed(connection: Connection, *parts: bytes) -> None:
    for part in parts:
        await asyncio.sleep(0)
        connection.data_received(part)


async def test_an_answer_is_the_same_wherever_it_is_split() -> None:
    """Every byte boundary; and what is kept of it says as much as if each event had been parsed."""
    wire, parsed = on_wire(ANSWER), expected(ANSWER)
    for split in range(len(HEAD), len(wire)):
        reader = Reader()
        reading = asyncio.create_task(reader.read())
        await feed(reader.connection, wire[:split], wire[split:])
        await reading
        assert reader.raw == b"".join(event + b"\n\n" for event in ANSWER)
        assert len(reader.plain) + len(reader.parsed) == len(ANSWER)
        reader.progress.catch_up()
        assert (reader.progress.text, reader.progress.output_ids) == (parsed.text, parsed.output_ids)
        assert (reader.progress.point, reader.progress.settled) == (parsed.point, parsed.settled)
        assert (reader.progress.finish_reason, reader.progress.resumable) == ("stop", parsed.resumable)


async def test_events_that_come_one_by_one_wake_nobody() -> None:
    reader = Reader()
    reading = asyncio.create_task(reader.read())
    await feed(reader.connection, HEAD)
    await asyncio.sleep(0)
    waiter = reader.connection.waiter
    for event in (chat("a"), completion("b"), chat("\\u0000")):
        part = event + b"\n\n"
        reader.connection.data_received(b"%x\r\n%b\r\n" % (len(part), part))
        assert reader.raw.endswith(part)
        await asyncio.sleep(0)
        assert reader.connection.waiter is waiter
        assert waiter is not None
        assert not waiter.done()
    reading.cancel()
    await asyncio.wait({reading})
    assert reader.connection.take is None


@pytest.mark.parametrize(
    "odd",
    [
        chat("a").replace(b'"delta"', b'"delta" '),
        chat("a").replace(b'"logprobs":null', b'"logprobs":{"content":[]}'),
        chat("a").replace(b'"content"', b'"reasoning"'),
        chat("a", "[7]").replace(b"]}]}", b']}],"usage":null}'),
        OPENED,
        USAGE,
    ],
)
async def test_what_is_more_than_text_is_parsed(odd: bytes) -> None:
    reader = Reader()
    reading = asyncio.create_task(reader.read())
    await feed(reader.connection, on_wire([chat("a"), odd, chat("b")]))
    await reading
    assert reader.raw == b"".join(event + b"\n\n" for event in (chat("a"), odd, chat("b")))
    assert odd in [chunk.raw for chunk in reader.parsed]
    assert reader.plain == [(b"a", b"7")], "what came with it is parsed as well"


@pytest.mark.parametrize("text", [b"\xff", b"\\q", b"\\ud800", b"\x01", b"\\"])
async def test_text_that_is_no_json_is_not_passed(text: bytes) -> None:
    reader = Reader()
    reading = asyncio.create_task(reader.read())
    await feed(reader.connection, on_wire([chat("a"), chat("*").replace(b"*", text)]))
    with pytest.raises(EngineBroke, match="not a chunk"):
        await reading
    assert reader.raw == chat("a") + b"\n\n"


async def test_a_taker_that_has_enough_gets_no_more_until_it_asks_again() -> None:
    reader = Reader(takes=1)
    reading = asyncio.create_task(reader.read())
    await feed(reader.connection, HEAD)
    await asyncio.sleep(0)
    events = [chat(str(number)) for number in range(4)]
    for event in events:
        part = event + b"\n\n"
        reader.connection.data_received(b"%x\r\n%b\r\n" % (len(part), part))
    assert reader.raw == events[0] + b"\n\n", "the others wait until they are asked for"
    await feed(reader.connection, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    await reading
    assert reader.raw == b"".join(event + b"\n\n" for event in events)


async def test_a_fault_comes_after_what_came_before_it() -> None:
    reader = Reader()
    reading = asyncio.create_task(reader.read())
    await feed(reader.connection, on_wire([chat("a"), chat("b")], end=b"")[:-30])
    reader.connection.connection_lost(ConnectionResetError())
    with pytest.raises(EngineBroke, match="broke off"):
        await reading
    assert reader.raw == chat("a") + b"\n\n"


async def test_silence_between_plain_events_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: now))
    reader = Reader()
    reader.limit(100)
    reading = asyncio.create_task(reader.read())
    await feed(reader.connection, HEAD)
    part = chat("a") + b"\n\n"
    for _ in range(4):  # together longer than one silence may be
        now += 35
        reader.connection.data_received(b"%x\r\n%b\r\n" % (len(part), part))
        await until(lambda: reader.connection.waiter is not None)
        now += 35
        reader.connection.look(100)
    now += 31
    reader.connection.look(100)
    with pytest.raises(EngineStalled, match="100 s"):
        await reading
    assert len(reader.plain) == 4


def test_ids_that_are_none_end_what_could_be_continued() -> None:
    progress = Progress()
    progress.keep([(b"a", b"1"), (b"b", b"2,,3")])
    progress.catch_up()
    assert (progress.text, progress.output_ids, progress.resumable) == ("ab", [1], False)


def test_what_is_noted_between_plain_events_stays_in_order() -> None:
    progress = Progress()
    for event in (chat("a"), chat("b")):
        progress.note(parse_event(event))
    progress.keep([(b"c", b"7")])
    progress.note(parse_event(chat("d")))
    progress.keep([(b"e", b"7")])
    progress.catch_up()
    assert progress.text == "abcde"
