"""Whether the router takes requests, and which it has: what it needs to leave without cutting anybody off."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from starlette.types import Message, Send


CLIENT_GONE = 499  # nginx's status for a request that nobody waits for any more


class ServerPhase(Enum):
    """What happens to a request that comes now."""

    OPEN = "open"
    DRAINING = "draining"  # new work is refused, what is open may finish
    HANDED_OVER = "handed over"  # another router listens; who is still connected here is served, then sent there


@dataclass(slots=True)
class ServerState:
    """Whether one router takes requests, and which it has.

    Attributes:
        active_requests: The tasks of requests that are being answered.
        deadline_passed: Whether those are ended now, complete or not.
    """

    state: ServerPhase = ServerPhase.OPEN
    active_requests: set[asyncio.Task[None]] = field(default_factory=set)
    deadline_passed: bool = False

    @property
    def open(self) -> bool:
        """Tell whether the router stays."""
        return self.state is ServerPhase.OPEN

    def end_all(self) -> None:
        """End every request that is being answered; each ends its own answer with an error."""
        self.deadline_passed = True
        for task in self.active_requests:
            task.cancel()


class ResponseTracker:
    """One answer on its way out: how far it is, and once the router is leaving, that clients are to connect anew.

    Attributes:
        status: That was sent; 499 where the client went away before.

    Args:
        send: Through every layer around the application.
        send_body: To the server itself: bodies are nothing to those layers.
    """

    __slots__ = ("_send", "_send_body", "_server_state", "begun", "complete", "status", "streams")

    def __init__(self, send: Send, send_body: Send, server_state: ServerState) -> None:
        self._send, self._send_body, self._server_state = send, send_body, server_state
        self.begun = self.streams = self.complete = False
        self.status = CLIENT_GONE

    async def send(self, message: Message) -> None:
        """Pass on a part of the answer."""
        if message["type"] == "http.response.body":
            await self._send_body(message)
            self.complete = not message.get("more_body", False)
            return
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            self.status = message["status"]
            self.begun, self.streams = True, headers.get("content-type", "").startswith("text/event-stream")
            if not self._server_state.open:
                headers["connection"] = "close"
        await self._send(message)

    async def put(self, events: Sequence[bytes], *, last: bool) -> None:
        """Send events of a stream that has begun.

        Args:
            events: In order.
            last: Whether no more come.
        """
        await self._send_body({"type": "http.response.body", "body": b"".join(events), "more_body": not last})
        self.complete = last
