"""What an application sends as bytes on the wire, and what happens to a request whose client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.lifecycle import ServerPhase, ServerState
from router.server.responder import CLIENT_GONE, HOLD, Responder
from tests.waiting import within

pytestmark = pytest.mark.anyio
START = "http.response.start"
BODY = "http.response.body"


class Wire:
    """A transport that keeps the pieces that were written, and whether it was closed."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def close(self) -> None:
        self.closed = True

    @property
    def written(self) -> bytes:
        return b"".join(self.pieces)


class Flow:
    """A flow control that a test pauses and drains."""

    def __init__(self) -> None:
        self.write_paused = False
        self.drained = asyncio.Event()

    async def drain(self) -> None:
        await within(self.drained.wait(), "the test to let it drain")


def client_on(
    wire: Wire, *, method: str = "POST", version: str = "1.1", keep_alive: bool = True
) -> Responder:
    cycle = RequestResponseCycle(
        scope={"type": "http", "method": method, "http_version": version},  # type: ignore[arg-type, typeddict-item]
        transport=wire,  # type: ignore[arg-type]
        flow=Flow(),  # type: ignore[arg-type]
        logger=None,  # type: ignore[arg-type]
        access_logger=None,  # type: ignore[arg-type]
        access_log=False,
        default_headers=[(b"date", b"today")],
        message_event=asyncio.Event(),  # type: ignore[arg-type]
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=lambda: None,
    )
    return Responder(cycle)


async def answer(
    client: Responder,
    *bodies: bytes,
    status: int = 200,
    hold: bool = False,
    **headers: str,
) -> None:
    pairs = [
        (name.replace("_", "-").encode(), value.encode())
        for name, value in headers.items()
    ]
    await client.send({"type": START, "status": status, "headers": pairs, HOLD: hold})
    for number, body in enumerate(bodies, 1):
        await client.send(
            {"type": BODY, "body": body, "more_body": number < len(bodies)}
        )


async def test_a_head_with_a_length_goes_out_with_its_body() -> None:
    wire = Wire()
    client = client_on(wire)
    await answer(client, b"hi", content_length="2")
    assert wire.pieces == [
        b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 2\r\n\r\nhi"
    ]
    assert client.cycle.response_complete
    assert not wire.closed


async def test_a_stream_has_chunks_and_its_head_waits_only_where_it_may() -> None:
    wire = Wire()
    client = client_on(wire)
    await client.send({"type": START, "status": 200, "headers": []})
    assert (
        wire.written
        == b"HTTP/1.1 200 OK\r\ndate: today\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    assert client.write([b"hel", b"lo"])
    assert client.write([]), "an empty chunk would end the body"
    await client.send({"type": BODY, "body": b"", "more_body": True})
    await client.send({"type": BODY, "body": b"!" * 16, "more_body": False})
    assert wire.pieces[1:] == [
        b"5\r\nhello\r\n",
        b"10\r\n" + b"!" * 16 + b"\r\n0\r\n\r\n",
    ]
    held = Wire()
    client = client_on(held)
    await client.send({"type": START, "status": 200, "headers": [], HOLD: True})
    assert not held.pieces
    client.write([b"a"])
    assert len(held.pieces) == 1
    assert held.written.endswith(b"\r\n\r\n1\r\na\r\n")


@pytest.mark.parametrize(
    ("method", "version", "status", "headers", "bodies", "sent"),
    [
        (
            *("HEAD", "1.1", 200),
            {"content_length": "2"},
            (b"hi",),
            b"content-length: 2\r\n\r\n",
        ),
        (*("HEAD", "1.1", 200), {}, (b"hi",), b"date: today\r\n\r\n"),
        (*("POST", "1.1", 204), {}, (b"",), b"date: today\r\n\r\n"),
        (
            *("POST", "1.0", 200),
            {},
            (b"a", b"b"),
            b"date: today\r\nconnection: close\r\n\r\nab",
        ),
        (
            *("POST", "1.0", 200),
            {"content_length": "2"},
            (b"hi",),
            b"content-length: 2\r\nconnection: close\r\n\r\nhi",
        ),
        (
            *("POST", "1.1", 503),
            {"connection": "close"},
            (b"",),
            b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
    ],
)
async def test_a_body_is_framed_as_its_request_wants(
    method: str,
    version: str,
    status: int,
    headers: dict[str, str],
    bodies: tuple[bytes, ...],
    sent: bytes,
) -> None:
    wire = Wire()
    client = client_on(
        wire, method=method, version=version, keep_alive=version != "1.0"
    )
    await answer(client, *bodies, status=status, **headers)
    assert wire.written.endswith(sent)
    assert wire.closed is ("close" in headers.get("connection", "") or version == "1.0")


@pytest.mark.parametrize(
    "send",
    [
        lambda client: answer(client, b"", x_a="one\r\ntwo: 2"),
        lambda client: answer(client, b"", x_a="one\ntwo"),
        lambda client: answer(client, b"", x_a="\0"),
        lambda client: answer(client, b"long", content_length="2"),
        lambda client: answer(client, b"s", content_length="2"),
        lambda client: client.send({"type": BODY, "body": b"a"}),
    ],
)
async def test_what_would_be_no_answer_is_not_sent(
    send: Callable[[Responder], Awaitable[None]],
) -> None:
    wire = Wire()
    with pytest.raises(RuntimeError):
        await send(client_on(wire))
    assert not wire.pieces


async def test_an_answer_has_one_head_and_one_end() -> None:
    client = client_on(Wire())
    await answer(client, b"hi", content_length="2")
    for message in ({"type": START, "status": 200}, {"type": BODY, "body": b"a"}):
        with pytest.raises(RuntimeError):
            await client.send(message)


async def test_a_client_that_takes_no_more_is_waited_for() -> None:
    wire = Wire()
    client = client_on(wire)
    await client.send({"type": START, "status": 200})
    client.cycle.flow.write_paused = True
    assert not client.write([b"a"]), "the client is said to take more"
    sending = asyncio.create_task(
        client.send({"type": BODY, "body": b"b", "more_body": True})
    )
    await asyncio.sleep(0)
    assert wire.pieces[1:] == [b"1\r\na\r\n"]
    client.cycle.flow.drained.set()  # type: ignore[attr-defined]
    await sending
    assert wire.pieces[1:] == [b"1\r\na\r\n", b"1\r\nb\r\n"]


async def test_a_client_that_leaves_ends_the_task_that_asked_for_it() -> None:
    wire = Wire()
    client = client_on(wire)
    client.task = serving = asyncio.create_task(asyncio.sleep(60))
    client.leave()
    await asyncio.sleep(0)
    assert not serving.done()
    client.cancels = True
    client.leave()
    await asyncio.wait({serving})
    assert serving.cancelled()
    assert client.cycle.disconnected
    assert not client.write([b"a"])
    await client.send({"type": START, "status": 200})
    assert not wire.pieces
    client.task = None
    client.leave()


@pytest.mark.parametrize(
    ("media_type", "streams"),
    [("text/event-stream", True), ("application/json", False), ("", False)],
)
async def test_a_head_passes_the_layers_around_the_application_and_a_body_does_not(
    media_type: str, *, streams: bool
) -> None:
    wire = Wire()
    seen = list[str]()
    out = client_on(wire)
    assert out.status == CLIENT_GONE
    assert out.begun is False
    assert out.streams is False
    assert out.complete is False

    async def outer(message: Any) -> None:
        seen.append(message["type"])
        await out.send(message)

    out.outer = outer
    out.server_state = ServerState()
    await out.respond(
        {
            "type": START,
            "status": 201,
            "headers": [(b"content-type", media_type.encode())],
        }
    )
    assert out.status == 201
    assert out.begun is True
    assert out.streams == streams
    await out.respond({"type": BODY, "body": b"a", "more_body": True})
    assert not out.complete
    assert out.write([b"b", b"c"])
    await out.drain()
    await out.end([b"d", b"e"])
    assert out.complete is True
    assert seen == [START]
    assert wire.written.endswith(b"1\r\na\r\n2\r\nbc\r\n2\r\nde\r\n0\r\n\r\n")


@pytest.mark.parametrize("phase", ServerPhase)
async def test_clients_of_a_router_that_leaves_are_told_to_close(
    phase: ServerPhase,
) -> None:
    """Their next request then goes to the router that listens by then."""
    wire = Wire()
    out = client_on(wire)
    out.outer = out.send
    out.server_state = ServerState(phase)
    await out.respond({"type": START, "status": 200, "headers": []})
    assert (b"connection: close" in wire.written) is (phase is not ServerPhase.OPEN)
    out.stop_waiting()
