"""One request's answer, on its way to the client: what the application sends becomes HTTP/1.1 here.

Other than in uvicorn, a head goes out with the first part of its body, bytes of a body can be written without a message,
and a request that asks for it is cancelled when its client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from router.lifecycle import ServerPhase, ServerState

OUT = "qarr.out"  # in a scope: the request's ``Responder``
HOLD = "qarr.hold"  # in the message that starts an answer: its body follows at once
CLIENT_GONE = 499  # nginx's status for a request whose client closed the connection
_NO_BODY = {204, 304}
# Some clients take an empty line for the end of an event, even after a comment: a comment has one line end.
KEEP_ALIVE = b": waiting\n"


class Responder:
    """One request's answer: how far it is, and what the application sends as HTTP/1.1.

    ``cycle`` is uvicorn's state of the request, kept up to date. The head was sent if it has ``begun``, before it was known
    who answers if ``early``.
    """

    __slots__ = (
        *("_chunked", "_early", "_has_sent", "_head", "_interval_s", "_left", "_timer", "begun", "cancels", "complete"),
        *("cycle", "early", "outer", "server_state", "status", "streams", "task"),
    )

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle
        cycle.scope[OUT] = self  # type: ignore[literal-required]
        cycle.send = self.send  # type: ignore[method-assign]
        self._head = b""  # not written yet
        self._chunked = False
        self._left: int | None = None  # bytes of the body to come; None: its end is told otherwise
        self.task: asyncio.Task[Any] | None = None  # that answers
        self.cancels = False  # cancel it once the client leaves before it has the whole answer
        self._interval_s: float | None = None  # longest silence of a stream; None: any
        self._timer: asyncio.TimerHandle | None = None
        self._has_sent = False  # something of a stream, since the last look at its silence
        self._early: asyncio.Task[None] | None = None
        self.outer: Any = None  # by which heads pass the layers around the application; bodies are of no use to them
        self.server_state: ServerState | None = None
        self.begun = self.streams = self.early = self.complete = False
        self.status = CLIENT_GONE

    def close(self) -> None:
        """Let go of what leads here, or the garbage collector would have to."""
        self._stop_timer()
        self.task = self.outer = None
        del self.cycle.scope[OUT], self.cycle.send  # type: ignore[literal-required]

    def leave(self) -> None:
        self._stop_timer()
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        if self.cancels and self.task is not None:
            self.task.cancel()

    async def respond(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            await self.send(message)
            self.complete = not message.get("more_body", False)
            return
        if message["type"] == "http.response.start":
            if self._timer is not None or self._early is not None:
                self.stop_waiting()
                if self._early is not None:
                    await asyncio.wait({self._early})
                if self.early:
                    self._watch_silence()
                    return
            self.begun, self.status = True, message["status"]
            media_type = dict(message.get("headers", ())).get(b"content-type", b"")
            self.streams = media_type.startswith(b"text/event-stream")
            if self.server_state is not None and self.server_state.state is not ServerPhase.OPEN:
                others = [(name, value) for name, value in message.get("headers", ()) if name != b"connection"]
                message = {**message, "headers": [*others, (b"connection", b"close")]}
        await self.outer(message)
        if self.streams and self._interval_s is not None:
            self._watch_silence()

    def break_silences(self, interval_s: float, head: Callable[[], Any]) -> None:
        """Send comments at this interval while a stream is silent, for proxies cut silent connections.

        If its first event is late, the stream begins with a comment, after ``head`` as made then.
        """
        self._interval_s = interval_s
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._begin_early, interval_s, head)

    def _begin_early(self, interval_s: float, make: Callable[[], Any]) -> None:
        async def keep_alive() -> None:
            head = make()
            await self.outer(head)  # cancelled while the client takes no more, it has sent nothing
            self.begun = self.streams = self.early = True
            self.status = head["status"]
            while True:
                await self.send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                await asyncio.sleep(interval_s)

        if not self.begun:
            self._early = asyncio.create_task(keep_alive())

    def _watch_silence(self) -> None:
        assert self._interval_s is not None
        self._has_sent = False
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._look_at_silence)

    def _look_at_silence(self) -> None:
        """Send a comment if nothing was sent since the last look; between events, for these are written as a whole."""
        cycle, self._timer = self.cycle, None
        if cycle.disconnected or cycle.response_complete:
            return
        if not self._has_sent:
            self.send_comment()
        self._watch_silence()

    def send_comment(self) -> None:
        """Send a comment in a stream that has begun, unless its client takes no more."""
        cycle = self.cycle
        if self.streams and not cycle.flow.write_paused and not cycle.response_complete:
            self.feed((KEEP_ALIVE,))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stop_waiting(self) -> None:
        self._stop_timer()
        if self._early is not None:
            self._early.cancel()

    def feed(self, events: Sequence[bytes]) -> bool:
        """Send events of a stream that has begun, its head with the first; tell whether the client takes more now."""
        cycle = self.cycle
        if cycle.disconnected:
            return False
        data = b"".join(events)
        if data or self._head:
            self._has_sent = True
            if data and self._chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            cycle.transport.write(self._head + data)
            self._head = b""
        return not cycle.flow.write_paused

    async def drain(self) -> None:
        await self.send({"type": "http.response.body", "body": b"", "more_body": True})

    async def end(self, events: Sequence[bytes]) -> None:
        await self.send({"type": "http.response.body", "body": b"".join(events), "more_body": False})
        self.complete = True

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
            self._has_sent = True
            cycle.transport.write(self._head + data)
            self._head = b""
        if not more:
            self._stop_timer()
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                cycle.transport.close()
            cycle.on_response()
