"""Whether the router takes requests, and how far each response is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from router.lifecycle import CLIENT_GONE, ResponseTracker, ServerPhase, ServerState

if TYPE_CHECKING:
    from starlette.types import Message

pytestmark = pytest.mark.anyio


class Wire:
    """What was sent through the middleware, and what directly."""

    def __init__(self, phase: ServerPhase = ServerPhase.OPEN) -> None:
        self.through: list[Message] = []
        self.direct: list[Message] = []
        self.tracker = ResponseTracker(self.send, self.send_body, ServerState(phase))

    async def send(self, message: Message) -> None:
        self.through.append(message)

    async def send_body(self, message: Message) -> None:
        self.direct.append(message)

    async def start(self, status: int = 200, media_type: str = "text/event-stream; charset=utf-8") -> None:
        headers = [(b"content-type", media_type.encode())]
        await self.tracker.send({"type": "http.response.start", "status": status, "headers": headers})


def body(content: bytes, **more: Any) -> Message:
    return {"type": "http.response.body", "body": content, **more}


def test_a_response_that_never_began_is_a_client_that_went_away() -> None:
    tracker = Wire().tracker
    assert (tracker.status, tracker.begun, tracker.streams, tracker.complete) == (CLIENT_GONE, False, False, False)


@pytest.mark.parametrize(
    ("media_type", "streams"), [("text/event-stream", True), ("application/json", False), ("", False)]
)
async def test_a_stream_is_known_by_its_media_type(media_type: str, *, streams: bool) -> None:
    wire = Wire()
    await wire.start(201, media_type)
    assert (wire.tracker.status, wire.tracker.begun, wire.tracker.streams) == (201, True, streams)
    assert [message["type"] for message in wire.through] == ["http.response.start"]


async def test_a_response_is_complete_with_its_last_part() -> None:
    """Bodies go to the server directly: layers around the application have no use for each chunk."""
    wire = Wire()
    await wire.start()
    await wire.tracker.send(body(b"a", more_body=True))
    assert not wire.tracker.complete
    await wire.tracker.send(body(b"b"))
    assert wire.tracker.complete
    assert [message["body"] for message in wire.direct] == [b"a", b"b"]
    assert len(wire.through) == 1


async def test_events_that_come_together_are_one_part() -> None:
    """A server that writes nothing at once has them when it is waited for."""
    wire = Wire()
    await wire.start()
    assert not wire.tracker.feed([b"data: 1\n\n", b"data: 2\n\n"])
    await wire.tracker.drain()
    assert (wire.direct, wire.tracker.complete) == ([body(b"data: 1\n\ndata: 2\n\n", more_body=True)], False)
    wire.tracker.feed([b"data: 3\n\n"])
    await wire.tracker.end([b"data: 4\n\n"])
    assert (wire.direct[1:], wire.tracker.complete) == ([body(b"data: 3\n\ndata: 4\n\n", more_body=False)], True)


@pytest.mark.parametrize("phase", ServerPhase)
async def test_clients_of_a_router_that_leaves_are_told_to_close(phase: ServerPhase) -> None:
    """Their next request then goes to whoever listens by now."""
    wire = Wire(phase)
    await wire.start()
    closing = (b"connection", b"close") in wire.through[0]["headers"]
    assert closing is (phase is not ServerPhase.OPEN)


@pytest.mark.parametrize("phase", ServerPhase)
def test_a_router_is_open_until_it_leaves(phase: ServerPhase) -> None:
    assert ServerState(phase).open is (phase is ServerPhase.OPEN)


async def test_when_the_time_is_over_every_request_ends() -> None:
    """Each learns that it was the router that ended it, not its client."""
    state, seen = ServerState(), list[bool]()

    async def answer() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append(state.deadline_passed)

    state.active_requests |= {asyncio.create_task(answer()) for _ in range(3)}
    await asyncio.sleep(0)
    assert not state.deadline_passed
    state.end_all()
    await asyncio.gather(*state.active_requests)
    assert seen == [True] * 3
