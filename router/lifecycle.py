"""Whether the router takes requests, and which are active: needed to leave without breaking any answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import Message, Send


CLIENT_GONE = 499  # nginx's status for a request whose client closed the connection


class ServerPhase(Enum):
    """What happens to a new request."""

    OPEN = "open"
    DRAINING = "draining"  # new requests are refused, open ones may finish
    HANDED_OVER = "handed over"  # another router listens; clients still connected here are served, then sent there


@dataclass(slots=True)
class ServerState:
    """Whether one router takes requests, and which are active.

    Attributes:
        active_requests: The tasks that answer requests.
        deadline_passed: Whether the time to finish them is over.
    """

    state: ServerPhase = ServerPhase.OPEN
    active_requests: set[asyncio.Task[None]] = field(default_factory=set)
    deadline_passed: bool = False

    @property
    def open(self) -> bool:
        return self.state is ServerPhase.OPEN

    def end_all(self) -> None:
        """Cancel every active request; each ends its answer with an error."""
        self.deadline_passed = True
        for task in self.active_requests:
            task.cancel()


class ResponseTracker:
    """Tracks how far a response is; once the router is leaving, tells clients to close the connection.

    Attributes:
        begun: Whether its headers were sent.
        complete: Whether all of its body was sent.
        status: The one sent; 499 if the client went away before.
        streams: Whether it is a stream of events.
        early: Whether its head was sent before it was known who answers.

    Args:
        send: Sends through every middleware.
        send_body: Sends to the server directly: middleware has no use for bodies.
        write: Writes a part of the body at once, and tells whether the client can take more; None: the server cannot.
    """

    __slots__ = (
        *("_early", "_send", "_send_body", "_server_state", "_timer", "_unsent", "_write"),
        *("begun", "complete", "early", "status", "streams"),
    )

    def __init__(
        self, send: Send, send_body: Send, server_state: ServerState, write: Callable[[bytes], bool] | None = None
    ) -> None:
        self._send, self._send_body, self._server_state, self._write = send, send_body, server_state, write
        self._unsent = b""
        self.begun = self.streams = self.complete = self.early = False
        self._timer: asyncio.TimerHandle | None = None
        self._early: asyncio.Task[None] | None = None
        self.status = CLIENT_GONE

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            await self._send_body(message)
            self.complete = not message.get("more_body", False)
            return
        if message["type"] == "http.response.start":
            if self._timer is not None:
                await self._stop_waiting()
                if self.early:
                    return
            self.begun, self.status = True, message["status"]
            headers = message.get("headers", ())
            self.streams = any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers)
            if not self._server_state.open:
                MutableHeaders(scope=message)["connection"] = "close"
        await self._send(message)

    def await_first(self, interval_s: float, head: Message) -> None:
        """Send a stream's head if it is late by this, then comments at this interval: proxies cut what is silent."""
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._begin_early, interval_s, head)

    def _begin_early(self, interval_s: float, head: Message) -> None:
        async def keep_alive() -> None:
            await self._send(head)  # cancelled while the client takes no more, it has sent nothing
            self.begun = self.streams = self.early = True
            self.status = head["status"]
            while True:
                await self._send_body({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
                await asyncio.sleep(interval_s)

        if not self.begun:
            self._early = asyncio.create_task(keep_alive())

    async def _stop_waiting(self) -> None:
        self.close()
        if self._early is not None:
            await asyncio.wait({self._early})

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._early is not None:
            self._early.cancel()

    def feed(self, events: Sequence[bytes]) -> bool:
        """Send events of a stream that has begun, its head with the first; tell whether the client takes more now."""
        if self._write is not None:
            return self._write(b"".join(events))
        self._unsent += b"".join(events)
        return False

    async def drain(self) -> None:
        """Wait until the client takes more."""
        unsent, self._unsent = self._unsent, b""
        await self._send_body({"type": "http.response.body", "body": unsent, "more_body": True})

    async def end(self, events: Sequence[bytes]) -> None:
        """Send the last events of a stream that has begun."""
        body = b"".join((self._unsent, *events))
        await self._send_body({"type": "http.response.body", "body": body, "more_body": False})
        self.complete = True
