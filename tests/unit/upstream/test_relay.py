"""Events that pass without a task being woken: the same answer wherever it is split, and nothing passes unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import pytest

from router.telemetry.record import Hop
from router.upstream import transport
from router.upstream.engine_request import EngineRequest
from router.upstream.engine_stream import (
    Attempt,
    EngineStream,
    OverflowHold,
    OverflowServer,
)
from router.upstream.errors import EngineBrokeError, EngineStalledError
from router.upstream.progress import AnswerProgress, ContinuationTerms
from router.upstream.sse import Chunk, parse_event
from router.upstream.transport import Connection
from tests.unit.upstream.connections import answer_on, connection_with_request
from tests.waiting import until
from tiers.spec import TierName, TierSpec

pytestmark = pytest.mark.anyio
ASKED = EngineRequest(
    document={"messages": [], "max_tokens": 9},
    request_id="r1",
    continuation_terms=ContinuationTerms(9, {}, 0),
)
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
    return (
        HEAD
        + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        + (b"0\r\n\r\n" if end else b"")
    )


class Reader:
    """An answer that is relayed from a connection, without the head and the parts before."""

    def __init__(self, *, takes: int = 1 << 30) -> None:
        self.connection, _ = connection_with_request()
        self.raw = b""
        self._takes = takes
        spec = TierSpec(
            TierName.FAST,
            4096,
            max_num_seqs=16,
            max_in_flight=1,
            urls=("http://engine",),
            precision="awq",
        )
        hold = OverflowHold(OverflowServer("e", spec), 1, lambda: None)
        hop = Hop("chat", "m", url="http://engine", began=0.0, overflow="e")
        self.answer = EngineStream(
            Attempt(
                TierName.FAST,
                hold,
                body=answer_on(self.connection),
                hop=hop,
                token_timeout_s=100,
                silence_timeout_s=600,
                sent_at=0.0,
            ),
            ASKED,
        )

    @property
    def progress(self) -> AnswerProgress:
        assert self.answer.progress is not None
        return self.answer.progress

    def take(self, chunks: Sequence[Chunk]) -> bool:
        self.raw += b"".join(chunk.raw + b"\n\n" for chunk in chunks)
        self._takes -= 1
        return self._takes > 0

    async def read(self) -> None:
        await answer_on(self.connection).head()
        self.limit(100)
        await self.answer.relay(self.take, partial(asyncio.sleep, 0))

    def limit(self, limit_s: float) -> None:
        answer_on(self.connection).limit_reads(limit_s)


def expected(events: list[bytes]) -> AnswerProgress:
    """Return how far an answer is once each of its events is noted."""
    progress = AnswerProgress()
    for event in events:
        progress.note((parse_event(event),))
    return progress


async def receive(connection: Connection, *parts: bytes) -> None:
    for part in parts:
        await asyncio.sleep(0)
        connection.data_received(part)


async def test_an_answer_is_the_same_wherever_it_is_split() -> None:
    wire = on_wire(ANSWER)
    noted = expected(ANSWER)
    for split in range(len(HEAD), len(wire)):
        reader = Reader()
        reading = asyncio.create_task(reader.read())
        await receive(reader.connection, wire[:split], wire[split:])
        await reading
        assert reader.raw == b"".join(event + b"\n\n" for event in ANSWER)
        found = reader.progress
        assert found.text == noted.text
        assert found.output_ids == noted.output_ids
        assert found.prompt_ids == noted.prompt_ids
        assert found.point == noted.point
        assert found.settled == noted.settled
        assert found.finish_reason == "stop"
        assert found.is_continuable == noted.is_continuable
        assert reader.answer.complete is True


async def test_a_break_at_every_byte_is_told_after_what_came() -> None:
    """Whole events before it are passed on, and no part of one; the answer ends with one error, or is complete.

    It is complete once its finish reason has come; token counts that its caller has not asked for may be missing.
    """
    finished = b"".join(event + b"\n\n" for event in ANSWER[:-1])
    assert ANSWER[-1] is USAGE
    wire = on_wire(ANSWER)
    for end in range(len(HEAD), len(wire)):
        reader = Reader()
        reading = asyncio.create_task(reader.read())
        await receive(reader.connection, wire[:end])
        await asyncio.sleep(0)
        reader.connection.connection_lost(ConnectionResetError())
        await asyncio.wait({reading})
        whole = b"".join(event + b"\n\n" for event in ANSWER)
        assert whole.startswith(reader.raw)
        assert reader.raw == b"" or reader.raw.endswith(b"\n\n")
        assert (
            isinstance(reading.exception(), EngineBrokeError)
            is not reader.answer.complete
        )
        assert not reader.answer.complete or reader.raw.startswith(finished)


async def test_events_that_come_one_by_one_wake_nobody() -> None:
    reader = Reader()
    reading = asyncio.create_task(reader.read())
    await receive(reader.connection, HEAD)
    await asyncio.sleep(0)
    waiter = answer_on(reader.connection).waiter
    for event in (chat("a"), completion("b"), chat("\\u0000")):
        part = event + b"\n\n"
        reader.connection.data_received(b"%x\r\n%b\r\n" % (len(part), part))
        assert reader.raw.endswith(part)
        await asyncio.sleep(0)
        assert answer_on(reader.connection).waiter is waiter
        assert waiter is not None
        assert not waiter.done()
    reading.cancel()
    await asyncio.wait({reading})
    assert answer_on(reader.connection).sink is None


@pytest.mark.parametrize("text", [b"\xff", b"\\q", b"\\ud800", b"\x01", b"\\"])
async def test_text_that_is_no_json_is_not_passed(text: bytes) -> None:
    reader = Reader()
    reading = asyncio.create_task(reader.read())
    await receive(
        reader.connection, on_wire([chat("a"), chat("*").replace(b"*", text)])
    )
    with pytest.raises(EngineBrokeError, match="not a chunk"):
        await reading
    assert reader.raw == chat("a") + b"\n\n"


async def test_a_taker_that_has_enough_gets_no_more_until_it_asks_again() -> None:
    reader = Reader(takes=1)
    reading = asyncio.create_task(reader.read())
    await receive(reader.connection, HEAD)
    await asyncio.sleep(0)
    events = [*(chat(str(number)) for number in range(3)), chat("3", finish='"stop"')]
    for event in events:
        part = event + b"\n\n"
        reader.connection.data_received(b"%x\r\n%b\r\n" % (len(part), part))
    assert reader.raw == events[0] + b"\n\n", "the others wait until they are asked for"
    await receive(reader.connection, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    await reading
    assert reader.raw == b"".join(event + b"\n\n" for event in events)


async def test_silence_between_plain_events_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: now))
    reader = Reader()
    reading = asyncio.create_task(reader.read())
    await receive(reader.connection, HEAD)
    part = chat("a") + b"\n\n"
    for _ in range(4):  # together longer than one silence may be
        now += 35
        reader.connection.data_received(b"%x\r\n%b\r\n" % (len(part), part))
        await until(lambda: answer_on(reader.connection).waiter is not None)
        now += 35
        answer_on(reader.connection).check_wait(100)
    now += 31
    answer_on(reader.connection).check_wait(100)
    with pytest.raises(EngineStalledError, match="100 s"):
        await reading
    assert reader.raw.count(b"data: ") == 4
