"""One request's client, as the application sees it: what the application sends becomes HTTP/1.1 here.

uvicorn writes head and body apart, checks each header by two patterns, and tells of a client that leaves only to who waits
for a message. Here a head goes out with the first part of its body, bytes of a body can be written without a message, and a
request that asks for it is cancelled when its client leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, Scope
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

CLIENT = "qarr.client"  # in a scope: the request's ``HttpClient``
HOLD = "qarr.hold"  # in the message that starts an answer: its body follows at once
_NO_BODY = {204, 304}


class HttpClient:
    """An application for one request, around the router's.

    Attributes:
        cycle: uvicorn's state of the request, kept up to date.
    """

    __slots__ = ("_app", "_chunked", "_head", "_left", "_task", "cycle")

    def __init__(self, app: ASGI3Application, cycle: RequestResponseCycle) -> None:
        self._app, self.cycle = app, cycle
        self._head = b""  # not written yet
        self._chunked = False
        self._left: int | None = None  # bytes of the body to come; None: its end is told otherwise
        self._task: asyncio.Task[Any] | None = None

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, _send: ASGISendCallable) -> None:
        """Run the application."""
        scope[CLIENT] = self  # type: ignore[literal-required]
        await self._app(scope, receive, self.send)

    @property
    def disconnected(self) -> bool:
        """Tell whether the client has left before it had the whole answer."""
        return self.cycle.disconnected

    def cancel_on_disconnect(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel a task once the client leaves before it has the whole answer; None: no longer."""
        self._task = task

    def leave(self) -> None:
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        if self._task is not None:
            self._task.cancel()

    def write(self, data: bytes) -> bool:
        """Write a part of the body of an answer that has begun; return whether the client can take more now."""
        cycle = self.cycle
        if cycle.disconnected:
            return False
        if data or self._head:
            if data and self._chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            cycle.transport.write(self._head + data)
            self._head = b""
        return not cycle.flow.write_paused

    async def send(self, message: Any) -> None:
        """Send a message of the application, as ASGI says; wait while the client cannot take more."""
        cycle = self.cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
            if self._left is None and not message.get(HOLD):
                cycle.transport.write(self._head)
                self._head = b""
        elif cycle.response_complete or not cycle.response_started:
            raise RuntimeError(f"{message['type']} after the end of an answer, or before its head")
        else:
            self._body(message.get("body", b""), more=message.get("more_body", False))

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        cycle = self.cycle
        if cycle.response_started:
            raise RuntimeError("an answer has one head")
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        lines, closes = [STATUS_LINE[status]], False
        for name, value in (*cycle.default_headers, *headers):
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection" and b"close" in value.lower():
                closes = True
        if cycle.scope["method"] == "HEAD" or status in _NO_BODY:
            self._left = 0
        elif self._left is None and cycle.scope["http_version"] != "1.0":  # there the connection's end ends the answer
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if closes:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"".join(lines)
        if head.count(b"\n") + head.count(b"\r") != 2 * len(lines) or b"\0" in head:
            raise RuntimeError("a header holds a line break or a NUL")
        self._head = head + b"\r\n"

    def _body(self, data: bytes, *, more: bool) -> None:
        cycle = self.cycle
        if self._left is not None:
            if cycle.scope["method"] == "HEAD":
                data = b""
            self._left -= len(data)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the body is not as long as its head says")
        elif self._chunked:
            data = (b"%x\r\n%b\r\n" % (len(data), data) if data else b"") + (b"" if more else b"0\r\n\r\n")
        if data or self._head:
            cycle.transport.write(self._head + data)
            self._head = b""
        if not more:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                cycle.transport.close()
            cycle.on_response()
