"""How far an answer is, by the messages that pass, and what a router that leaves tells its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from router.lifecycle import CLIENT_GONE, ResponseTracker, ServerPhase, ServerState

if TYPE_CHECKING:
    from starlette.types import Message

pytestmark = pytest.mark.anyio


class Wire:
    """Where messages go: heads through every layer, bodies to the server itself."""

    def __init__(self) -> None:
        self.heads: list[Any] = []
        self.bodies: list[Any] = []

    async def head(self, message: Message) -> None:
        """Take a head."""
        self.heads.append(message)

    async def body(self, message: Message) -> None:
        """Take a part of a body."""
        self.bodies.append(message)

    def tracker(self, phase: ServerPhase = ServerPhase.OPEN) -> ResponseTracker:
        """Return a tracker of one answer."""
        return ResponseTracker(self.head, self.body, ServerState(phase))


def start(media_type: str = "application/json", status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", media_type.encode())]}


async def test_an_answer_is_followed_to_its_end() -> None:
    wire = Wire()
    tracker = wire.tracker()
    assert (tracker.status, tracker.begun, tracker.complete) == (CLIENT_GONE, False, False)
    await tracker.send(start(status=201))
    assert (tracker.status, tracker.begun, tracker.streams, tracker.complete) == (201, True, False, False)
    await tracker.send({"type": "http.response.body", "body": b"a", "more_body": True})
    assert not tracker.complete
    await tracker.send({"type": "http.response.body", "body": b"b"})
    assert tracker.complete
    assert [message["type"] for message in wire.heads] == ["http.response.start"]
    assert b"".join(message["body"] for message in wire.bodies) == b"ab"


@pytest.mark.parametrize(
    ("media_type", "streams"),
    [("text/event-stream", True), ("text/event-stream; charset=utf-8", True), ("text/plain", False), ("", False)],
)
async def test_a_stream_is_known_by_its_media_type(media_type: str, streams: bool) -> None:  # noqa: FBT001
    tracker = Wire().tracker()
    await tracker.send(start(media_type))
    assert tracker.streams is streams


async def test_events_go_out_in_one_message() -> None:
    wire = Wire()
    tracker = wire.tracker()
    await tracker.put([b"a", b"b"], last=False)
    assert not tracker.complete
    await tracker.put([], last=True)
    assert tracker.complete
    assert [(message["body"], message["more_body"]) for message in wire.bodies] == [(b"ab", True), (b"", False)]


@pytest.mark.parametrize("phase", ServerPhase)
async def test_a_router_that_leaves_asks_clients_to_connect_anew(phase: ServerPhase) -> None:
    wire = Wire()
    await wire.tracker(phase).send(start())
    assert ((b"connection", b"close") in wire.heads[0]["headers"]) is (phase is not ServerPhase.OPEN)
