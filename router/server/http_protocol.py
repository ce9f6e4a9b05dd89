"""HTTP connections with bounds: on what a client sends, how slowly, and how long an answer may stay unread.

uvicorn has none of these bounds. A client that exceeds one gets an error in the usual form, if its answer has not begun, and
the connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar, cast

import httptools
from starlette.responses import Response
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from router.server.connection_limit import ConnectionLimit
from router.server.errors import (
    BodyTooLargeError,
    HeadTooLargeError,
    NotHttpError,
    RequestTooSlowError,
    TooManyConnectionsError,
)
from router.server.responder import Responder
from router.server.settings import ServerSettings

Refusal = Callable[[Exception, str], Response]  # of an error and a path

log = logging.getLogger(f"qarr.{__name__}")
# A refused client's further bytes are read and discarded: closing at once would destroy the answer, which many clients
# read only after sending everything. This ends after so much silence, after so many bytes, or when a body's time is up.
LINGER_S = 5.0
LINGER_BYTES = 64 << 20
PIPELINED = 16  # requests that may wait on one connection
FRAMING = 8  # bytes on the wire for each byte of a body: a chunk of one byte takes six
UNSENT_BYTES = 1 << 16  # of an answer that the kernel may hold unsent
MAX_HEADERS = 100  # of a request
LARGE_ANSWER = 1 << 18  # bytes of an answer that its client leaves untaken
UNTAKEN_BYTES = 1 << 26  # of all such answers together: beyond, whoever has left its longest is cut
FIRST_LOOK_S = 0.05  # until a client that has left has answered with a reset; meanwhile nothing is sent to it
LEFT_POLL_S = 0.2  # between two further looks
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def protocol_for(bounds: ServerSettings, refusal: Refusal) -> type[LimitedHttpProtocol]:
    """Return the protocol class that uvicorn instantiates for each connection; ``refusal`` answers what is not served."""
    limit = ConnectionLimit.of_this_process(bounds.max_connections)
    members = {"bounds": bounds, "limit": limit, "refusal": staticmethod(refusal)}
    return type("BoundedProtocol", (LimitedHttpProtocol,), members)


def bound_unsent(sock: socket.socket) -> None:
    """Bound the unsent bytes that the kernel holds for each connection that a listening socket accepts.

    By default it holds megabytes, so a client that does not read is noticed only long after its answer was made.
    """
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class LimitedHttpProtocol(HttpToolsProtocol):
    """A client's connection, with the bounds of the settings."""

    bounds: ClassVar[ServerSettings]
    limit: ClassVar[ConnectionLimit]
    refusal: ClassVar[Refusal]
    untaken: ClassVar[dict[LimitedHttpProtocol, None]] = {}  # with much that was not taken, the longest first
    _part = 0  # number of the head or body that comes
    _in_body = False
    _fed = 0  # bytes of this part, of reads that held nothing else
    _crowded = False  # one connection too many
    _leaving = False  # the rest that the client sends is discarded
    _discarded = 0
    _heard = 0.0  # when a refused client last sent something, by the loop's clock
    _fault: Exception | None = None
    _client: Responder | None = None  # of the request that is answered; ``cycle`` is the last one read
    _deadline: asyncio.TimerHandle | None = None  # for what the client must send
    _stalled: asyncio.TimerHandle | None = None  # for what it must read
    _half_closed = False  # the client sends nothing more: it waits for its answer, or has left
    _left_poll: asyncio.TimerHandle | None = None
    _is_full = False  # the transport holds as much as it may of what was sent

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        beyond = len(self.connections) - self.limit.served
        if beyond > self.limit.spare:
            transport.abort()
            return
        self._crowded = beyond > 0
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Disconnect every request of the connection; uvicorn disconnects only the last one."""
        self._abandon()
        self._settle()
        self._unstall()
        if self._left_poll is not None:
            self._left_poll.cancel()
        super().connection_lost(exc)
        # They refer to this connection: without them its memory is freed without a garbage collection.
        self._client = self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:  # noqa: C901  a branch a bound
        if self._leaving:
            self._discarded += len(data)
            self._heard = self.loop.time()
            if self._discarded > LINGER_BYTES:
                self.transport.abort()
            return
        part = self._part
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        except httptools.HttpParserUpgrade as upgrade:
            if self._upgrades():
                self._ignore_upgrade(data[upgrade.args[0] :])
        if self._leaving or self.transport.is_closing():
            return
        self._fed = self._fed + len(data) if part == self._part else 0
        if self._in_body:
            if self._fed <= FRAMING * self.bounds.max_body_bytes + self.bounds.max_header_bytes:
                self._expect()
            elif self.cycle.response_complete:  # a second answer would be taken for the next request's
                self._leave(self.bounds.body_timeout_s)
            else:
                self._refuse(BodyTooLargeError(self.bounds.max_body_bytes))
        elif self._fed > self.bounds.max_header_bytes:
            self._refuse(HeadTooLargeError(self.bounds.max_header_bytes, MAX_HEADERS))
        elif self.cycle is None or self.cycle.response_complete:
            self._expect()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Let a client that has sent its whole request have its answer (RFC 9112, section 6.3); close otherwise.

        A client that leaves closes its side as well, and the kernel tells no difference before something is sent to it. So a
        word is sent at once: the kernel of a client that has left answers with a reset.
        """
        if self._half_closed:
            return True
        is_owed = self.cycle is not None and not self.cycle.response_complete and not self._in_body
        if not is_owed or self._leaving or not self.transport.can_write_eof():  # TLS has no half-closed connections
            return False
        self._half_closed = True
        if not self.pipeline:
            self.cycle.keep_alive = False
        self._send_probe()
        self.flow.pause_writing()  # what a resumable stream sends now would count as taken
        self._left_poll = self.loop.call_later(FIRST_LOOK_S, self._look_first)
        return True

    def _send_probe(self) -> None:
        """Send what clients ignore: an interim answer before the head, a comment between the events of a stream."""
        client = self._client
        if client is None or self.flow.write_paused:
            return
        if client.cycle.response_started:
            client.send_comment()
        elif client.cycle.scope["http_version"] != "1.0":  # it knows no interim answers
            self.transport.write(CONTINUE)

    def _look_first(self) -> None:
        if not self._look_whether_left() and not self._is_full:
            self.flow.resume_writing()

    def _look_whether_left(self) -> bool:
        """Abort the connection of a client that has left, and tell so; otherwise look again in a while."""
        self._left_poll = None
        if self.transport.is_closing():
            return True
        poller = select.poll()
        poller.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poller.poll(0):  # POLLERR or POLLHUP, which a reset gives
            self.transport.abort()
            return True
        self._left_poll = self.loop.call_later(LEFT_POLL_S, self._look_whether_left)
        return False

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read a request without its wish for an upgrade (RFC 9110, section 7.8), for which the parser skips the body."""
        first = self.parser.get_method(), self.url, self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % first]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _upgrades(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def on_headers_complete(self) -> None:
        """Start the request, if it is within the bounds.

        Raises:
            Exception: It is not; ``send_400_response`` then answers why.
        """
        if self.parser.should_upgrade() and self._upgrades():
            return
        bounds, size, hosts = self.bounds, len(self.url), 0
        self._part += 1
        self._in_body = True
        if self._deadline is not None:
            self._settle()
        for name, value in self.headers:
            size += len(name) + len(value) + 4
            hosts += name == b"host"
        crowded = self._crowded or len(self.pipeline) >= PIPELINED
        plain = hosts == 1 and self.url.startswith(b"/") and self.parser.get_http_version() == "1.1"
        if crowded or not plain or size > bounds.max_header_bytes or len(self.headers) > MAX_HEADERS:
            self._fault = self._unfit(size)
        if self._fault is not None:
            raise self._fault
        super().on_headers_complete()
        self.headers = []  # of a body's trailers, which nobody reads
        # The transport as a request sees it: the protocol decides how the connection closes.
        out = SimpleNamespace(write=self.transport.write, is_closing=self.transport.is_closing, close=self._end)
        self.cycle.transport = cast("asyncio.Transport", out)
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # CONNECT: nothing after it could be read

    def _unfit(self, size: int) -> Exception | None:
        """Return why a request is not served, whose head has so many bytes; None: it is."""
        bounds = self.bounds
        if size > bounds.max_header_bytes or len(self.headers) > MAX_HEADERS:
            return HeadTooLargeError(bounds.max_header_bytes, MAX_HEADERS)
        if self.parser.get_http_version() not in {"1.0", "1.1"}:
            return NotHttpError("only HTTP/1.0 and HTTP/1.1 are spoken here")
        if not self._names_one_host():
            return NotHttpError("a request needs one Host header, and not more than one (RFC 9112, section 3.2)")
        if self._crowded:
            there = f"{self.limit.served} connections are open already"
            return TooManyConnectionsError(f"{there}: try again later, or keep connections and use them again")
        if len(self.pipeline) >= PIPELINED:
            return NotHttpError(f"more than {PIPELINED} requests wait on one connection")
        return None

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._upgrades():
            return
        super().on_message_complete()
        self._part += 1
        self._in_body = False
        if self._deadline is not None:
            self._settle()

    def on_response_complete(self) -> None:
        if self._leaving:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self._half_closed and self.cycle.response_complete and not self.transport.is_closing():
            self._close()

    def send_400_response(self, msg: str) -> None:
        del msg
        fault, self._fault = self._fault, None
        self._refuse(fault or NotHttpError("the request is not valid HTTP/1.1"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_full = True
        self._stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_full = False
        if not self.transport.is_closing():
            self._unstall()

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._client = Responder(cycle)
        super()._start_asgi_task(cycle, app)

    def _names_one_host(self) -> bool:
        """Tell whether a request names exactly one host; a host in its path replaces the header."""
        at = [number for number, (name, _) in enumerate(self.headers) if name == b"host"]
        if len(at) > 1 or (not at and self.parser.get_http_version() == "1.1"):
            return False
        if not self.url.startswith(b"/") and b"://" in self.url:
            authority = self.url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]
            for number in at:
                del self.headers[number]
            self.headers.append((b"host", authority.rpartition(b"@")[2]))
        return True

    def _expect(self) -> None:
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
        if self.pipeline:  # reading is paused: the client is not slow
            self._expect()
        elif self._in_body and self.cycle.response_complete:
            self._leave(LINGER_S)
        elif self._in_body:
            self._refuse(RequestTooSlowError("body", self.bounds.body_timeout_s))
        elif self._fed:
            self._refuse(RequestTooSlowError("head", self.bounds.header_timeout_s))
        else:
            self._close()

    def _refuse(self, error: Exception) -> None:
        """Answer with an error, unless another answer has begun, and end the connection."""
        if self._abandon():
            self._close()
            return
        path = getattr(self, "url", b"").partition(b"?")[0].decode("latin-1")
        response = type(self).refusal(error, path)
        response.headers["connection"] = "close"
        lines = [name + b": " + value for name, value in [*self.server_state.default_headers, *response.raw_headers]]
        head = STATUS_LINE[response.status_code] + b"\r\n".join(lines) + b"\r\n\r\n"
        self.transport.write(head + bytes(response.body))
        # A slow client, or one too many, gets no further time.
        self._leave(LINGER_S if self._crowded or isinstance(error, RequestTooSlowError) else self.bounds.body_timeout_s)

    def _abandon(self) -> bool:
        begun, client = False, self._client
        if client is not None and not client.cycle.response_complete:
            begun = client.cycle.response_started
            client.leave()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
        self.pipeline.clear()
        return begun

    def _end(self) -> None:
        if self._in_body:
            self._leave(self.bounds.body_timeout_s)
        else:
            self._close()

    def _leave(self, limit_s: float) -> None:
        """End a connection whose client may still be sending: discard that for a while, so that it reads its answer."""
        if self._leaving or self.transport.is_closing():
            return
        self._leaving = True
        self._settle()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # TLS has no half-closed connections
            with contextlib.suppress(OSError):  # the client is gone
                self.transport.write_eof()
        self._heard = self.loop.time()
        self._deadline = self.loop.call_later(min(LINGER_S, limit_s), self._linger, self._heard + limit_s)

    def _linger(self, until: float) -> None:
        """Close if the client is silent or has sent for too long; otherwise check again."""
        end = min(self._heard + LINGER_S, until)
        if self.loop.time() >= end:
            self.transport.abort()
        else:
            self._deadline = self.loop.call_at(end, self._linger, until)

    def _close(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self.transport.close()
        if unread:
            self._stall()

    def _stall(self) -> None:
        if self._stalled is None:
            why = f"for {self.bounds.write_timeout_s:g} s"
            self._stalled = self.loop.call_later(self.bounds.write_timeout_s, self.cut, why)
        if self.transport.get_write_buffer_size() > LARGE_ANSWER:
            self.untaken[self] = None
            sizes = {each: each.transport.get_write_buffer_size() for each in self.untaken}
            while len(self.untaken) > 1 and sum(sizes[each] for each in self.untaken) > UNTAKEN_BYTES:
                next(iter(self.untaken)).cut("while others left theirs as well")

    def _unstall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
            self.untaken.pop(self, None)

    def cut(self, why: str) -> None:
        log.info("a client did not take its answer %s: cut", why)
        self.untaken.pop(self, None)
        self.transport.abort()
