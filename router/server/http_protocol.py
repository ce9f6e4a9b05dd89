"""The edge towards clients: bounds on what a connection may send, how slowly, and how long its answer may stay unread.

uvicorn has none of these bounds. What goes beyond them is answered in the form that every error has, where that is still
possible, and the connection ends.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import secrets
import socket
from typing import TYPE_CHECKING, Any, ClassVar, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from router.aio import Signal
from router.api.asgi import BodyTooLarge, HeadTooLarge, NotHttp, TooManyConnections, TooSlow
from router.api.paths import speaks_openai
from router.api.problems import describe
from router.pipeline.request import RequestContext

if TYPE_CHECKING:
    import asyncio
    from collections import deque
    from collections.abc import Callable

    from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from router.settings import ServerSettings

log = logging.getLogger(f"qarr.{__name__}")
# What a refused client still sends is taken in, for closing on it would destroy the answer: many clients read it only
# after they have sent everything. It ends with so much silence, after so many bytes, or when a body's time is up.
LINGER_S = 5.0
LINGER_BYTES = 64 << 20
PIPELINED = 16  # requests that may wait on one connection
SPARE_CONNECTIONS = 64  # beyond the bound: these are told why, any more are dropped
FRAMING = 8  # bytes on the wire for each byte of a body: a chunk of one byte takes six
UNSENT_BYTES = 1 << 16  # of an answer that the kernel may hold unsent
FILES_BESIDES = 256  # open files that are no connections


def protocol_for(bounds: ServerSettings) -> type[LimitedHttpProtocol]:
    """Return the protocol class that uvicorn makes one of for each connection."""
    return type("BoundedProtocol", (LimitedHttpProtocol,), {"bounds": bounds})


def bound_unsent(sock: socket.socket) -> None:
    """Let the kernel hold little of each answer, on the connections that a listening socket accepts.

    Otherwise it takes megabytes, and whether a client reads would show only long after its whole answer was made.
    """
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def allow_files(connections: int) -> None:
    """Raise the limit of open files for so many connections, each with one to an engine, or say that it is too low."""
    needed = 2 * connections + FILES_BESIDES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in {soft, hard} and soft == resource.RLIM_INFINITY:
        return
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < needed:
        log.warning(
            "this process may open %d files, and server.max_connections = %d needs %d: raise the limit (ulimit -n) or lower "
            "the setting",
            wanted,
            connections,
            needed,
        )


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection of a client.

    Attributes:
        bounds: What the settings allow.
    """

    bounds: ClassVar[ServerSettings]
    # A head, then a body, then the next head: even numbers are heads.
    _part = 0
    _fed = 0  # bytes of this part that came in pieces which held nothing else
    _crowded = False
    _leaving = False
    _discarded = 0
    _heard = 0.0  # when a refused client last sent something, by the loop's clock
    _fault: Exception | None = None
    _running: RequestResponseCycle | None = None  # the request that is answered; ``cycle`` is the last one read
    _deadline: asyncio.TimerHandle | None = None  # for what the client has to send
    _stalled: asyncio.TimerHandle | None = None  # for what it has to take

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or drop it where there are far too many."""
        super().connection_made(transport)
        self.pipeline = cast("deque[tuple[RequestResponseCycle, ASGI3Application]]", _Line())
        beyond = len(self.connections) - self.bounds.max_connections
        if beyond > SPARE_CONNECTIONS:
            transport.abort()
            return
        self._crowded = beyond > 0
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection; uvicorn tells the last one only."""
        self._abandon()
        self._settle()
        self._unstall()
        super().connection_lost(exc)
        # They refer to this connection: without them its memory is free at once, and not only once the collector comes.
        self._running = self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Read what came, within the bounds."""
        if self._leaving:
            self._discard(len(data))
            return
        part = self._part
        super().data_received(data)
        if self._leaving or self.transport.is_closing():
            return
        self._fed = self._fed + len(data) if part == self._part else 0
        if self._in_body:
            if self._fed <= FRAMING * self.bounds.max_body_bytes + self.bounds.max_header_bytes:
                self._expect()
            elif self.cycle.response_complete:  # it has its answer: a second one would be taken for the next request's
                self._leave(self.bounds.body_timeout_s)
            else:
                self._refuse(BodyTooLarge(self.bounds.max_body_bytes))
        elif self._fed > self.bounds.max_header_bytes:
            self._refuse(HeadTooLarge(self.bounds.max_header_bytes, self.bounds.max_headers))
        elif self.cycle is None or self.cycle.response_complete:
            self._expect()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; what comes after a chunked body as one is left out: nobody reads it."""
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, if it is within the bounds.

        Raises:
            Exception: It is not; ``send_400_response`` then tells why.
        """
        bounds = self.bounds
        self._part += 1
        self._settle()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > bounds.max_header_bytes or len(self.headers) > bounds.max_headers:
            self._fault = HeadTooLarge(bounds.max_header_bytes, bounds.max_headers)
        elif self.parser.get_http_version() not in {"1.0", "1.1"}:
            self._fault = NotHttp("only HTTP/1.0 and HTTP/1.1 are spoken here")
        elif not self._names_one_host():
            self._fault = NotHttp("a request needs one Host header, and not more than one (RFC 9112, section 3.2)")
        elif self._crowded:
            self._fault = TooManyConnections(bounds.max_connections)
        elif len(self.pipeline) >= PIPELINED:
            self._fault = NotHttp(f"more than {PIPELINED} requests wait on one connection")
        if self._fault is not None:
            raise self._fault
        super().on_headers_complete()
        self.cycle.transport = cast("asyncio.Transport", _Exit(self.transport, self._end))
        self.cycle.message_event = cast("asyncio.Event", Signal())
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # nothing after it could be read

    def on_message_complete(self) -> None:
        """Note the end of a request."""
        super().on_message_complete()
        self._part += 1
        self._settle()

    def on_response_complete(self) -> None:
        """Go on with the connection, unless it ends."""
        if self._leaving:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser, or a bound, refused."""
        del msg
        fault, self._fault = self._fault, None
        self._refuse(fault or NotHttp("the request is not valid HTTP/1.1"))

    def pause_writing(self) -> None:
        """Hold the answer back, for a while."""
        super().pause_writing()
        self._stall()

    def resume_writing(self) -> None:
        """Go on with the answer."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._unstall()

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection."""
        if not self.transport.is_closing():
            self._close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, _Unchunked(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: a request to go on in another protocol is answered in this one, as it may be."""

    def _names_one_host(self) -> bool:
        """Tell whether it is clear which host a request is for. One that its path names goes before the header."""
        at = [number for number, (name, _) in enumerate(self.headers) if name == b"host"]
        if len(at) > 1 or (not at and self.parser.get_http_version() == "1.1"):
            return False
        if not self.url.startswith(b"/") and b"://" in self.url:
            authority = self.url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]
            for number in at:
                del self.headers[number]
            self.headers.append((b"host", authority.rpartition(b"@")[2]))
        return True

    @property
    def _in_body(self) -> bool:
        return bool(self._part % 2)

    def _expect(self) -> None:
        """Give the client time for the part that it is sending, from the part's beginning."""
        if self._deadline is None:
            limit_s = self.bounds.body_timeout_s if self._in_body else self.bounds.header_timeout_s
            self._deadline = self.loop.call_later(limit_s, self._too_late)

    def _settle(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        if self._leaving or self.transport.is_closing():
            return
        if self.pipeline:  # reading is held back: it is not the client that is slow
            self._expect()
        elif self._in_body and self.cycle.response_complete:
            self._leave(LINGER_S)
        elif self._in_body:
            self._refuse(TooSlow("body", self.bounds.body_timeout_s))
        elif self._fed:
            self._refuse(TooSlow("head", self.bounds.header_timeout_s))
        else:
            self._close()

    def _refuse(self, error: Exception) -> None:
        """Answer an error, unless another answer has begun, and end the connection."""
        if self._abandon():
            self._close()
            return
        path = getattr(self, "url", b"").partition(b"?")[0].decode("latin-1")
        context = RequestContext(secrets.token_hex(16), secrets.token_hex(16))
        response = describe(error).response(context, openai=speaks_openai(path))
        log.info("request %s: refused: %s", context.request_id, error)
        response.headers["connection"] = "close"
        lines = [name + b": " + value for name, value in [*self.server_state.default_headers, *response.raw_headers]]
        head = STATUS_LINE[response.status_code] + b"\r\n".join(lines) + b"\r\n\r\n"
        self.transport.write(head + bytes(response.body))
        # Who has been slow, or is one too many, gets no further time.
        self._leave(LINGER_S if self._crowded or isinstance(error, TooSlow) else self.bounds.body_timeout_s)

    def _abandon(self) -> bool:
        """Tell every unanswered request that its client is gone; return whether an answer had begun."""
        begun = False
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                begun = begun or cycle.response_started
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        return begun

    def _end(self) -> None:
        """Close as an answer's end asks for it."""
        if self._in_body:
            self._leave(self.bounds.body_timeout_s)
        else:
            self._close()

    def _leave(self, limit_s: float) -> None:
        """End a connection whose client may still be sending: take that in for a while, so that it reads its answer."""
        if self._leaving or self.transport.is_closing():
            return
        self._leaving = True
        self._settle()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        with contextlib.suppress(OSError):  # it is gone already
            self.transport.write_eof()
        self._heard = self.loop.time()
        self._deadline = self.loop.call_later(min(LINGER_S, limit_s), self._linger, self._heard + limit_s)

    def _linger(self, until: float) -> None:
        """Close on a client that has gone silent, or has sent for too long; otherwise look again."""
        end = min(self._heard + LINGER_S, until)
        if self.loop.time() >= end:
            self.transport.abort()
        else:
            self._deadline = self.loop.call_at(end, self._linger, until)

    def _discard(self, size: int) -> None:
        """Take in what a refused client still sends."""
        self._discarded += size
        self._heard = self.loop.time()
        if self._discarded > LINGER_BYTES:
            self.transport.abort()

    def _close(self) -> None:
        """Close, once what is written is taken."""
        left = self.transport.get_write_buffer_size()
        self.transport.close()
        if left:
            self._stall()

    def _stall(self) -> None:
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.bounds.write_timeout_s, self._cut)

    def _unstall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _cut(self) -> None:
        log.info("a client did not take its answer for %g s: cut", self.bounds.write_timeout_s)
        self.transport.abort()


class _Unchunked:
    """An application for one request of HTTP/1.0, which has no chunks: the connection's end is the answer's end."""

    __slots__ = ("_app", "_cycle")

    def __init__(self, app: ASGI3Application, cycle: RequestResponseCycle) -> None:
        self._app, self._cycle = app, cycle

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        cycle, endless = self._cycle, False

        async def plain(message: ASGISendEvent) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                endless = b"content-length" not in names
                if endless:
                    cycle.chunked_encoding = False
            elif message["type"] == "http.response.body" and endless:
                cycle.expected_content_length = len(message.get("body", b""))  # what comes is what is expected
            await send(message)

        await self._app(scope, receive, plain)


class _Line(list[Any]):
    """Requests in line. A list, because an empty deque takes 760 bytes, and few connections ever have one."""

    def appendleft(self, item: Any) -> None:
        """Put a request behind the others; ``pop`` takes from the other end."""
        self.insert(0, item)


class _Exit:
    """The transport as a request sees it: how the connection closes is the protocol's to say."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write: Callable[[Any], None] = transport.write
        self.is_closing: Callable[[], bool] = transport.is_closing
        self.close = close
