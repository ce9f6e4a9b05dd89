"""HTTP connections with bounds: on what a client sends, how slowly, and how long an answer may stay unread.

uvicorn has none of these bounds. A client that exceeds one gets an error in the usual form, if its answer has not begun, and
the connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar, cast

import httptools
from starlette.responses import Response
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

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
SPARE_CONNECTIONS = 64  # beyond the bound: these get an error, further ones are dropped
FRAMING = 8  # bytes on the wire for each byte of a body: a chunk of one byte takes six
UNSENT_BYTES = 1 << 16  # of an answer that the kernel may hold unsent
MAX_HEADERS = 100  # of a request
LARGE_ANSWER = 1 << 18  # bytes of an answer that its client leaves untaken
UNTAKEN_BYTES = 1 << 26  # of all such answers together: beyond, whoever has left its longest is cut
FILES_BESIDES = 256  # open files besides connections


def protocol_for(bounds: ServerSettings, refusal: Refusal) -> type[LimitedHttpProtocol]:
    """Return the protocol class that uvicorn instantiates for each connection; ``refusal`` answers what is not served."""
    return type("BoundedProtocol", (LimitedHttpProtocol,), {"bounds": bounds, "refusal": staticmethod(refusal)})


def bound_unsent(sock: socket.socket) -> None:
    """Bound the unsent bytes that the kernel holds for each connection that a listening socket accepts.

    By default it holds megabytes, so a client that does not read is noticed only long after its answer was made.
    """
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def allow_files(connections: int) -> None:
    """Raise the limit of open files for so many connections, each with one to an engine; warn if it stays too low."""
    needed = 2 * connections + FILES_BESIDES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < needed:
        log.warning(
            "this process may open %d files, and server.max_connections = %d needs %d: raise the limit (ulimit -n) or lower "
            "the setting", wanted, connections, needed,
        )  # fmt: skip


class LimitedHttpProtocol(HttpToolsProtocol):
    """A client's connection, with the bounds of the settings."""

    bounds: ClassVar[ServerSettings]
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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        beyond = len(self.connections) - self.bounds.max_connections
        if beyond > SPARE_CONNECTIONS:
            transport.abort()
            return
        self._crowded = beyond > 0
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Disconnect every request of the connection; uvicorn disconnects only the last one."""
        self._abandon()
        self._settle()
        self._unstall()
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
            there = f"{bounds.max_connections} connections are open already"
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

    def send_400_response(self, msg: str) -> None:
        del msg
        fault, self._fault = self._fault, None
        self._refuse(fault or NotHttpError("the request is not valid HTTP/1.1"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall()

    def resume_writing(self) -> None:
        super().resume_writing()
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
