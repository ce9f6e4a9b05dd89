"""The HTTP client for engines: split anywhere, broken anywhere, cancelled anywhere, and never an answer mixed up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from router.upstream import transport as module
from router.upstream.transport import (
    KEEP_ALIVE_S,
    MAX_HEAD_BYTES,
    READ_BUFFER_BYTES,
    Body,
    Connection,
    ConnectionState,
    EngineTransport,
)
from tests.unit.upstream.connections import Wire, answer_on, connection_with_request
from tests.waiting import until, within

pytestmark = pytest.mark.anyio

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nx-a: b\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3;name=value\r\nhel\r\n2\r\nlo\r\n0\r\ntrailer: says nothing\r\n\r\n"
)
CONTINUED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + PLAIN
)
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\n\r\nhello"
NO_BODY = b"HTTP/1.1 204 No Content\r\nx-a: b\r\n\r\n"


async def body_of(connection: Connection) -> bytes:
    answer = answer_on(connection)
    await answer.head()
    return b"".join([part async for part in answer])


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED, CONTINUED, UNTIL_CLOSED, NO_BODY])
async def test_an_answer_is_the_same_wherever_it_is_split(answer: bytes) -> None:
    for first in range(len(answer) + 1):
        for second in {first, first + 1, (first + len(answer)) // 2}:
            connection, _ = connection_with_request()
            for part in (answer[:first], answer[first:second], answer[second:]):
                if part:
                    connection.data_received(part)
            if answer is UNTIL_CLOSED:
                connection.connection_lost(None)
            came = answer_on(connection)
            assert await body_of(connection) == (b"" if answer is NO_BODY else b"hello")
            assert came.status == (204 if answer is NO_BODY else 200)
            assert connection.rest() is (answer is not UNTIL_CLOSED)
            if answer is CONTINUED:
                assert came.headers == [(b"Content-Length", b"5"), (b"x-a", b"b")], (
                    "informational ones are left out"
                )


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED, CONTINUED])
async def test_an_answer_that_ends_early_is_an_error_after_what_came_of_it(
    answer: bytes,
) -> None:
    for length in range(len(answer)):
        for error, wanted in (
            (None, httpx.RemoteProtocolError),
            (ConnectionResetError(), httpx.ReadError),
        ):
            connection, _ = connection_with_request()
            if length:
                connection.data_received(answer[:length])
            connection.connection_lost(error)
            came = b""
            with pytest.raises(wanted):
                await answer_on(connection).head()
                async for part in answer_on(connection):
                    came += part
                pytest.fail("it seems complete")
            assert b"hello".startswith(came)
            assert not connection.rest()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnot a size\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_an_error(nonsense: bytes) -> None:
    connection, wire = connection_with_request()
    connection.data_received(nonsense)
    with pytest.raises(httpx.RemoteProtocolError):
        await body_of(connection)
    assert not connection.rest()
    assert wire.closed


async def test_a_head_without_end_is_an_error() -> None:
    connection, _ = connection_with_request()
    connection.data_received(b"HTTP/1.1 200 OK\r\n")
    for _ in range(MAX_HEAD_BYTES // 1000 + 1):
        connection.data_received(b"x-a: " + b"b" * 993 + b"\r\n")
    with pytest.raises(httpx.RemoteProtocolError, match="head"):
        await answer_on(connection).head()


async def test_a_head_that_is_too_long_is_an_error_also_where_it_comes_at_once() -> (
    None
):
    connection, _ = connection_with_request()
    connection.data_received(
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx-a: "
        + b"b" * MAX_HEAD_BYTES
        + b"\r\n\r\n"
    )
    with pytest.raises(httpx.RemoteProtocolError, match="head"):
        await answer_on(connection).head()


async def test_informational_answers_without_end_are_an_error() -> None:
    connection, _ = connection_with_request()
    for _ in range(MAX_HEAD_BYTES // 25 + 1):
        connection.data_received(b"HTTP/1.1 100 Continue\r\n\r\n")
    with pytest.raises(httpx.RemoteProtocolError, match="head"):
        await answer_on(connection).head()


@pytest.mark.parametrize("more", [PLAIN, b"garbage\r\n", CHUNKED])
@pytest.mark.parametrize("together", [True, False])
async def test_what_follows_an_answer_is_never_the_next_requests(
    more: bytes, *, together: bool
) -> None:
    connection, wire = connection_with_request()
    if together:
        connection.data_received(PLAIN + more)
        assert await body_of(connection) == b"hello"
        assert not connection.rest()
    else:
        connection.data_received(PLAIN)
        assert await body_of(connection) == b"hello"
        assert connection.rest()
        connection.data_received(more)
        assert connection.state is ConnectionState.CLOSED
    assert wire.closed


@pytest.mark.parametrize("idle", [True, False])
async def test_a_connection_that_the_engine_closes_carries_nothing_more(
    *, idle: bool
) -> None:
    """From the moment that it says so; that the socket is closed is told later."""
    connection, _ = connection_with_request()
    connection.data_received(PLAIN)
    assert await body_of(connection) == b"hello"
    if idle:
        assert connection.rest()
    connection.eof_received()
    if idle:
        assert connection.state is ConnectionState.CLOSED
    else:
        assert not connection.rest()


@pytest.mark.parametrize("more", [b"HTT", PLAIN[:-3], b"x"])
async def test_the_beginning_of_a_second_answer_spoils_the_connection(
    more: bytes,
) -> None:
    connection, wire = connection_with_request()
    connection.data_received(PLAIN + more)
    assert await body_of(connection) == b"hello"
    assert not connection.rest()
    assert wire.closed


async def test_an_answer_in_another_protocol_ends_the_wait() -> None:
    connection, _ = connection_with_request()
    connection.data_received(
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nmore"
    )
    await answer_on(connection).head()
    assert answer_on(connection).status == 101
    assert not connection.rest()


async def test_a_connection_that_was_closed_before_its_request_is_an_error() -> None:
    """uvloop may read the end before whoever made the connection goes on."""
    wire = Wire()
    connection = Connection(
        ("http", "engine", 80), lambda _: None, lambda _, **_known: None
    )
    connection.connection_made(wire)
    connection.connection_lost(None)
    with pytest.raises(httpx.ReadError):
        connection.send((b"GET / HTTP/1.1\r\n\r\n",), head_only=False)


async def test_an_answer_that_was_read_late_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's time runs from the end of its answer."""
    now = [1000.0]
    monkeypatch.setattr("router.upstream.transport.time.monotonic", lambda: now[0])
    connection, _ = connection_with_request()
    connection.data_received(PLAIN)
    now[0] += KEEP_ALIVE_S + 0.1
    assert await body_of(connection) == b"hello"
    assert not connection.rest()


async def test_a_reader_of_an_answer_that_is_closed_does_not_wait_on() -> None:
    connection, _ = connection_with_request()
    connection.data_received(PLAIN[:-5])
    reading = asyncio.create_task(body_of(connection))
    await asyncio.sleep(0)
    connection.rest()
    with pytest.raises(httpx.ReadError):
        await reading


async def test_a_head_alone_is_the_whole_answer_to_head() -> None:
    connection, _ = connection_with_request(head_only=True)
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
    assert await body_of(connection) == b""


async def test_an_engine_is_not_read_while_nobody_takes_its_answer() -> None:
    connection, wire = connection_with_request()
    size = 4 * READ_BUFFER_BYTES
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
    connection.data_received(b"a" * READ_BUFFER_BYTES)
    assert wire.reading
    connection.data_received(b"b")
    assert not wire.reading
    await answer_on(connection).head()
    assert len(await anext(answer_on(connection))) == READ_BUFFER_BYTES + 1
    assert wire.reading


async def test_a_connection_that_was_paused_at_the_end_hears_when_it_is_closed() -> (
    None
):
    connection, wire = connection_with_request()
    size = READ_BUFFER_BYTES + 1
    connection.data_received(
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"a" * size
    )
    assert not wire.reading
    await body_of(connection)
    assert connection.rest()
    assert wire.reading


# With sockets

Answer = "Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]"


class Engine:
    """A server that does with its connections what it is told.

    Attributes:
        url: Its address.
        connections: How many were opened.
        ended: Set once its peer has closed a connection.
        heads: Of the requests that were read.
    """

    def __init__(
        self,
        answer: Callable[
            [Engine, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]
        ],
    ) -> None:
        self.url = ""
        self.connections = 0
        self.ended = asyncio.Event()
        self.heads: list[bytes] = []
        self._answer = answer

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        found = [
            line
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        ]
        return await reader.readexactly(int(found[0].split(b":")[1])) if found else b""

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1
        try:
            await self._answer(self, reader, writer)
            await reader.read()  # until its peer closes
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.ended.set()
            writer.close()


@asynccontextmanager
async def engine_with(answer: Any) -> AsyncIterator[Engine]:
    engine = Engine(answer)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()


def answers(*pieces: bytes, times: int = 100) -> Any:
    async def answer(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        for _ in range(times):
            await engine.request(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        writer.close()

    return answer


def post(url: str, content: bytes = b"{}", **timeout: float) -> httpx.Request:
    return httpx.Request(
        "POST", f"{url}/v1/x?y=z", content=content, extensions={"timeout": timeout}
    )


async def text_of(response: httpx.Response) -> bytes:
    assert isinstance(response.stream, httpx.AsyncByteStream)
    return b"".join([part async for part in response.stream])


@asynccontextmanager
async def transport(max_requests: int = 0) -> AsyncIterator[EngineTransport]:
    made = EngineTransport(max_requests)
    try:
        yield made
        assert all(
            connection.state is not ConnectionState.ACTIVE
            for connection in made._connections
        )
    finally:
        await made.aclose()


async def test_a_request_is_sent_as_it_is() -> None:
    async with engine_with(answers(PLAIN)) as engine, transport() as made:
        response = await made.handle_async_request(post(engine.url, b"body"))
        assert response.status_code == 200
        assert response.headers["X-A"] == "b"
        assert await text_of(response) == b"hello"
    head = engine.heads[0]
    assert head.startswith(b"POST /v1/x?y=z HTTP/1.1\r\n")
    assert b"\r\nContent-Length: 4\r\n" in head
    assert b"\r\nHost: 127.0.0.1:" in head


async def test_a_connection_is_used_again() -> None:
    async with engine_with(answers(CHUNKED)) as engine, transport() as made:
        for _ in range(5):
            assert (
                await text_of(await made.handle_async_request(post(engine.url)))
                == b"hello"
            )
    assert engine.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        PLAIN.replace(b"x-a: b", b"connection: close"),
        PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"),
        PLAIN + b"more",
        PLAIN + PLAIN,
    ],
)
async def test_a_connection_that_ends_is_not_used_again(answer: bytes) -> None:
    async with engine_with(answers(answer)) as engine, transport() as made:
        for _ in range(3):
            assert (
                await text_of(await made.handle_async_request(post(engine.url)))
                == b"hello"
            )
    assert engine.connections == 3


async def test_a_connection_that_the_engine_closed_is_not_used_again() -> None:
    async with engine_with(answers(PLAIN, times=1)) as engine, transport() as made:
        for number in range(3):
            assert (
                await text_of(await made.handle_async_request(post(engine.url)))
                == b"hello"
            )
            await until(lambda: not made._idle, poll_s=0)  # until it hears
            assert engine.connections == number + 1


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 2"])
async def test_a_request_that_meets_the_close_of_its_connection_is_sent_again(
    begun: bytes,
) -> None:
    """Once, on a new connection, if nothing of an answer has come; what fails on a new connection is not."""

    async def once(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.request(reader)
        if engine.connections < 3:
            writer.write(PLAIN)
            await engine.request(reader)
        writer.write(begun)
        writer.close()

    async with engine_with(once) as engine, transport() as made:
        for number in range(3):
            if number == 2 or (number == 1 and begun):
                with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
                    await made.handle_async_request(post(engine.url))
                break
            assert (
                await text_of(await made.handle_async_request(post(engine.url)))
                == b"hello"
            )
        assert engine.connections == (1 if begun else 3)
        assert len(engine.heads) == (2 if begun else 5)


async def test_connections_that_were_idle_for_long_are_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine may close one at any time by then, and nobody could tell whether it read the request."""
    now = [1000.0]
    monkeypatch.setattr("router.upstream.transport.time.monotonic", lambda: now[0])
    async with engine_with(answers(PLAIN)) as engine, transport() as made:
        several = [await made.handle_async_request(post(engine.url)) for _ in range(3)]
        for response in several:
            assert await text_of(response) == b"hello"
        assert engine.connections == 3
        now[0] += KEEP_ALIVE_S + 0.1
        assert (
            await text_of(await made.handle_async_request(post(engine.url))) == b"hello"
        )
        assert engine.connections == 4
        assert sum(map(len, made._idle.values())) == 1


async def test_connections_to_engines_that_have_vanished_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody asks there any more, and a host that is gone closes nothing; later answers of others see to it."""
    now = [1000.0]
    monkeypatch.setattr("router.upstream.transport.time.monotonic", lambda: now[0])
    async with (
        engine_with(answers(PLAIN)) as gone,
        engine_with(answers(PLAIN)) as engine,
        transport() as made,
    ):
        assert (
            await text_of(await made.handle_async_request(post(gone.url))) == b"hello"
        )
        now[0] += KEEP_ALIVE_S + 0.1
        assert (
            await text_of(await made.handle_async_request(post(engine.url))) == b"hello"
        )
        assert [len(idle) for idle in made._idle.values()] == [1]
        await within(gone.ended.wait(), "the engine's connection to end")


async def test_an_answer_that_is_not_read_to_its_end_ends_at_the_engine() -> None:
    async with engine_with(answers(CHUNKED[:-10])) as engine, transport() as made:
        response = await made.handle_async_request(post(engine.url))
        await response.aclose()
        await within(engine.ended.wait(), "the engine's connection to end")


async def test_a_cancelled_request_ends_at_the_engine() -> None:
    """While its head is waited for, and while its body is."""
    asked = asyncio.Event()

    async def never(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.request(reader)
        asked.set()

    async with engine_with(never) as engine, transport(max_requests=1) as made:
        task = asyncio.create_task(made.handle_async_request(post(engine.url)))
        await within(asked.wait(), "the engine to be asked")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await within(engine.ended.wait(), "the engine's connection to end")
        engine.ended.clear()
        engine._answer = answers(CHUNKED[:-10])
        response = await made.handle_async_request(post(engine.url))  # the slot is free
        task = asyncio.create_task(text_of(response))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await response.aclose()
        await within(engine.ended.wait(), "the engine's connection to end")


async def test_more_requests_may_be_allowed_and_never_fewer() -> None:
    """Engines that come need connections; those that go have had theirs."""
    async with engine_with(answers(PLAIN)) as engine, transport(max_requests=1) as made:
        made.allow(2)
        made.allow(1)
        several = [await made.handle_async_request(post(engine.url)) for _ in range(2)]
        with pytest.raises(httpx.PoolTimeout):
            await made.handle_async_request(post(engine.url, pool=0.001))
        for response in several:
            await response.aclose()
        unbounded = type(made)()
        unbounded.allow(1)
        several = [
            await unbounded.handle_async_request(post(engine.url)) for _ in range(3)
        ]
        for response in several:
            await response.aclose()
        await unbounded.aclose()


async def test_slots_are_waited_for_in_order_and_not_for_ever() -> None:
    async with engine_with(answers(PLAIN)) as engine, transport(max_requests=1) as made:
        first = await made.handle_async_request(post(engine.url))
        with pytest.raises(httpx.PoolTimeout):
            await made.handle_async_request(post(engine.url, pool=0.001))
        waiting = asyncio.create_task(
            made.handle_async_request(post(engine.url, pool=60))
        )
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await text_of(first) == b"hello"
        assert await text_of(await waiting) == b"hello"
    assert engine.connections == 1


async def test_no_connection_is_a_connect_error_that_names_the_cause() -> None:
    async with engine_with(answers(PLAIN)) as engine:
        pass

    async def deaf(
        _engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.read(5)
        writer.close()

    async with engine_with(deaf) as plain, transport(max_requests=1) as made:
        for url, cause in (
            (engine.url, "connection refused"),
            ("http://none.invalid:80", "its name cannot be resolved"),
            (plain.url.replace("http:", "https:"), "tls: no handshake"),
        ):
            for _ in range(2):  # and its slot is free again
                with pytest.raises(httpx.ConnectError, match=cause):
                    await made.handle_async_request(post(url))


async def test_a_connection_that_is_not_made_in_time_is_a_connect_timeout() -> None:
    async def silent(
        _engine: Engine, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter
    ) -> None:
        await reader.read()

    async with engine_with(silent) as engine, transport() as made:
        with pytest.raises(httpx.ConnectTimeout):
            await made.handle_async_request(
                post(engine.url.replace("http:", "https:"), connect=0.05)
            )


@pytest.mark.parametrize("value", ["a\r\nx-b: c", "a\nb", "a\rb", "a\0b"])
async def test_a_header_cannot_hold_another(value: str) -> None:
    async with engine_with(answers(PLAIN)) as engine, transport() as made:
        with pytest.raises(httpx.LocalProtocolError):
            await made.handle_async_request(
                httpx.Request("GET", engine.url, headers={"x-a": value})
            )
    assert not engine.heads


async def test_an_engine_waits_for_a_reader_that_is_slow() -> None:
    """No answer is gathered in the router's memory; all of it comes once it is read."""
    size = 1 << 26
    sent = 0

    async def much(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal sent
        await engine.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * (1 << 16))
            await writer.drain()
            sent += 1 << 16

    async with engine_with(much) as engine, transport() as made:
        response = await made.handle_async_request(post(engine.url))
        before = -1
        async with asyncio.timeout(60):
            while sent != before:  # until the sockets are full
                before = sent
                for _ in range(100):
                    await asyncio.sleep(0)
        assert sent < size
        (connection,) = made._connections
        assert answer_on(connection).buffered <= READ_BUFFER_BYTES + (1 << 18), (
            "one read of the socket more, at most"
        )
        assert len(await text_of(response)) == size


async def test_closing_ends_what_is_open() -> None:
    async with engine_with(answers(CHUNKED[:-10])) as engine:
        made = EngineTransport()
        response = await made.handle_async_request(post(engine.url))
        await made.aclose()
        with pytest.raises(httpx.TransportError):
            await text_of(response)
        await response.aclose()
        await within(engine.ended.wait(), "the engine's connection to end")
        with pytest.raises(RuntimeError, match="closed"):
            await made.handle_async_request(post(engine.url))


END = CHUNKED.index(b"0\r\ntrailer")


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ([CHUNKED[END:]], True),
        ([CHUNKED[at : at + 1] for at in range(END, len(CHUNKED))], True),
        ([b"1\r\nx\r\n" + CHUNKED[END:]], True),
        ([CHUNKED[END:] + PLAIN], False),
        ([CHUNKED[END:], PLAIN], False),
        ([b"no chunk"], False),
    ],
)
async def test_a_connection_whose_answer_was_read_is_kept_once_its_end_has_come(
    parts: list[bytes], *, kept: bool
) -> None:
    kept_then = list[bool]()
    connection, wire = connection_with_request(
        lambda it, **_known: kept_then.append(it.rest())
    )
    connection.data_received(CHUNKED[:END])
    answer_on(connection).over = True
    await answer_on(connection).aclose()
    assert kept_then == [False]
    assert wire.closed is False
    assert connection.state == ConnectionState.ENDING
    for part in parts:
        connection.data_received(part)
    assert (kept_then[-1] and not wire.closed) is kept


async def read_stream(made: EngineTransport, url: str) -> None:
    response = await made.handle_async_request(post(url, pool=5.0))
    assert isinstance(response.stream, Body)
    await response.stream.pump(lambda part: not part.endswith(b"lo"))
    response.stream.over = True
    await response.aclose()


async def test_a_connection_whose_end_does_not_come_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LAST_CHUNK_S", 0.01)

    async def silent(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.request(reader)
        writer.write(CHUNKED[:END])

    async with engine_with(silent) as engine, transport(1) as made:
        await read_stream(made, engine.url)
        await read_stream(made, engine.url)
        await within(engine.ended.wait(), "the engine's connection to end")
        assert engine.connections == 2


async def test_streams_one_after_another_have_one_connection() -> None:
    async with (
        engine_with(answers(CHUNKED[:END], CHUNKED[END:])) as engine,
        transport() as made,
    ):
        for _ in range(5):
            await read_stream(made, engine.url)
            await until(lambda: made._idle, poll_s=0)
        assert engine.connections == 1
