"""One request's answer, on its way to the client: what the application sends becomes HTTP/1.1 here.

Other than in uvicorn, a head goes out with the first part of its body, bytes of a body can be written without a message,
and a request that asks for it is cancelled when its client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from router.lifecycle import ServerPhase, ServerState
from router.server.uvicorn_adapter import STATUS_LINE, RequestCycle

OUT = "qarr.out"  # This key of a scope holds the request's ``Responder``.
# If this key of the message that starts an answer is true, the head is held back, and sent together with the first part
# of the body, which follows at once.
HOLD = "qarr.hold"
CLIENT_GONE = 499  # nginx's status for a request whose client closed the connection.
_STATUSES_WITHOUT_BODY = {204, 304}
# Some clients take an empty line for the end of an event, even after a comment: a comment has one line end.
KEEP_ALIVE = b": waiting\n"


class Responder:
    """One request's answer: how far it is, and what the application sends as HTTP/1.1.

    Attributes:
        cycle: uvicorn's state of the request, which is kept up to date.
        task: The task that answers.
        cancels: Whether that task is cancelled if the client leaves before it has the whole answer.
        outer: By it heads pass the layers around the application; for bodies these layers have no use.
        begun: Whether the head was sent.
        early: Whether it was sent before it was known who answers.
        streams: Whether the answer is a stream of events.
        complete: Whether the whole answer was sent.
    """

    __slots__ = (
        "_comment_interval_s",
        "_early_stream",
        "_has_sent_since_check",
        "_is_chunked",
        "_remaining_bytes",
        "_silence_timer",
        "_unsent_head",
        "begun",
        "cancels",
        "complete",
        "cycle",
        "early",
        "outer",
        "server_state",
        "status",
        "streams",
        "task",
    )

    def __init__(self, cycle: RequestCycle) -> None:
        self.cycle = cycle
        cycle.scope[OUT] = self
        cycle.send = self.send  # type: ignore[method-assign]
        self._unsent_head = b""
        self._is_chunked = False
        # None for a body whose end its head does not say.
        self._remaining_bytes: int | None = None
        self.task: asyncio.Task[Any] | None = None
        self.cancels = False
        # None for a stream that may be silent for any time.
        self._comment_interval_s: float | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        self._has_sent_since_check = False
        self._early_stream: asyncio.Task[None] | None = None
        self.outer: Any = None
        self.server_state: ServerState | None = None
        self.begun = False
        self.streams = False
        self.early = False
        self.complete = False
        self.status = CLIENT_GONE

    def close(self) -> None:
        """Break the reference cycles through this object, or the garbage collector would have to."""
        self._stop_silence_timer()
        self.task = None
        self.outer = None
        del self.cycle.scope[OUT]
        del self.cycle.send

    def leave(self) -> None:
        """Tell the application that its client has left."""
        self._stop_silence_timer()
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        if self.cancels and self.task is not None:
            self.task.cancel()

    async def respond(self, message: Any) -> None:
        """Send a message of the application, a head by way of the layers around it."""
        if message["type"] == "http.response.body":
            await self.send(message)
            self.complete = not message.get("more_body", False)
            return
        if message["type"] == "http.response.start":
            if self._silence_timer is not None or self._early_stream is not None:
                await self._finish_waiting()
            if self.early:
                self._watch_silence()
                return
            message = self._begin(message)
        await self.outer(message)
        if self.streams and self._comment_interval_s is not None:
            self._watch_silence()

    def _begin(self, message: Any) -> Any:
        """Note an answer's head; return it as it is sent: a server that shuts down closes its connections."""
        headers = message.get("headers", ())
        self.begun = True
        self.status = message["status"]
        media_type = dict(headers).get(b"content-type", b"")
        self.streams = media_type.startswith(b"text/event-stream")
        if self.server_state is None or self.server_state.state is ServerPhase.OPEN:
            return message
        kept_headers = [
            (name, value) for name, value in headers if name != b"connection"
        ]
        return {**message, "headers": [*kept_headers, (b"connection", b"close")]}

    def break_silences(self, interval_s: float, head: Callable[[], Any]) -> None:
        """Send comments at this interval while a stream is silent, for proxies cut silent connections.

        If its first event is late, the stream begins with a comment, after ``head`` as made then.
        """
        self._comment_interval_s = interval_s
        loop = asyncio.get_running_loop()
        self._silence_timer = loop.call_later(
            interval_s, self._start_early_stream, interval_s, head
        )

    def _start_early_stream(
        self, interval_s: float, make_head: Callable[[], Any]
    ) -> None:
        if not self.begun:
            self._early_stream = asyncio.create_task(
                self._send_early_stream(interval_s, make_head)
            )

    async def _send_early_stream(
        self, interval_s: float, make_head: Callable[[], Any]
    ) -> None:
        """Send a head and then comments, until cancelled because the first event has come."""
        head = make_head()
        # If cancelled here, because the client takes no more, nothing has been sent.
        await self.outer(head)
        self.begun = True
        self.streams = True
        self.early = True
        self.status = head["status"]
        while True:
            await self.send(
                {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
            )
            await asyncio.sleep(interval_s)

    def _watch_silence(self) -> None:
        assert self._comment_interval_s is not None
        self._has_sent_since_check = False
        loop = asyncio.get_running_loop()
        self._silence_timer = loop.call_later(
            self._comment_interval_s, self._check_silence
        )

    def _check_silence(self) -> None:
        """Send a comment if nothing was sent since the last check; it cannot split an event, which is written at once."""
        self._silence_timer = None
        if self.cycle.disconnected or self.cycle.response_complete:
            return
        if not self._has_sent_since_check:
            self.send_comment()
        self._watch_silence()

    def send_comment(self) -> None:
        """Send a comment in a stream that has begun, unless its client takes no more."""
        cycle = self.cycle
        if self.streams and not cycle.flow.write_paused and not cycle.response_complete:
            self.write((KEEP_ALIVE,))

    def _stop_silence_timer(self) -> None:
        if self._silence_timer is not None:
            self._silence_timer.cancel()
            self._silence_timer = None

    def stop_waiting(self) -> None:
        """Send no more comments in place of an answer that has not begun."""
        self._stop_silence_timer()
        if self._early_stream is not None:
            self._early_stream.cancel()

    async def _finish_waiting(self) -> None:
        self.stop_waiting()
        if self._early_stream is not None:
            await asyncio.wait({self._early_stream})

    def write(self, events: Sequence[bytes]) -> bool:
        """Send events of a stream that has begun, its head with the first; tell whether the client takes more now."""
        cycle = self.cycle
        if cycle.disconnected:
            return False
        data = b"".join(events)
        if data or self._unsent_head:
            self._has_sent_since_check = True
            if data and self._is_chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            cycle.transport.write(self._unsent_head + data)
            self._unsent_head = b""
        return not cycle.flow.write_paused

    async def drain(self) -> None:
        await self.send({"type": "http.response.body", "body": b"", "more_body": True})

    async def end(self, events: Sequence[bytes]) -> None:
        await self.send(
            {"type": "http.response.body", "body": b"".join(events), "more_body": False}
        )
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
            if self._remaining_bytes is None and not message.get(HOLD):
                cycle.transport.write(self._unsent_head)
                self._unsent_head = b""
        elif cycle.response_complete or not cycle.response_started:
            raise RuntimeError(
                f"{message['type']} after the end of an answer, or before its head"
            )
        else:
            self._write_body(
                message.get("body", b""), more=message.get("more_body", False)
            )

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Make the head, which says how long the body is or how its end is known."""
        cycle = self.cycle
        if cycle.response_started:
            raise RuntimeError("an answer has one head")
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        lines = [STATUS_LINE[status]]
        says_close = False
        for name, value in (*cycle.default_headers, *headers):
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"content-length":
                self._remaining_bytes = int(value)
            elif name == b"connection" and b"close" in value.lower():
                says_close = True
        if cycle.scope["method"] == "HEAD" or status in _STATUSES_WITHOUT_BODY:
            self._remaining_bytes = 0
        elif self._remaining_bytes is None and cycle.scope["http_version"] != "1.0":
            # In HTTP/1.0 the end of the connection ends the answer.
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if says_close:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        self._unsent_head = _checked_head(lines) + b"\r\n"

    def _write_body(self, data: bytes, *, more: bool) -> None:
        """Write a part of the body, after the head if that was held back; end the answer with the last part."""
        if self._remaining_bytes is not None:
            if self.cycle.scope["method"] == "HEAD":
                data = b""
            self._remaining_bytes -= len(data)
            if self._remaining_bytes < 0 or (self._remaining_bytes and not more):
                raise RuntimeError("the body is not as long as its head says")
        elif self._is_chunked:
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if not more:
                data += b"0\r\n\r\n"
        if data or self._unsent_head:
            self._has_sent_since_check = True
            self.cycle.transport.write(self._unsent_head + data)
            self._unsent_head = b""
        if not more:
            self._complete()

    def _complete(self) -> None:
        self._stop_silence_timer()
        cycle = self.cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


def _checked_head(lines: Sequence[bytes]) -> bytes:
    """Join the lines of a head, each with its line end; refuse one that a header's value has split in two."""
    head = b"".join(lines)
    if head.count(b"\n") + head.count(b"\r") != 2 * len(lines) or b"\0" in head:
        raise RuntimeError("a header holds a line break or a NUL")
    return head
