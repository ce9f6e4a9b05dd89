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
from router.server.uvicorn_adapter import (
    ASGI3Application,
    RequestResponseCycle,
    UvicornConnection,
    encode_head,
)

# It makes the answer to an error on a path.
Refusal = Callable[[Exception, str], Response]

log = logging.getLogger(f"qarr.{__name__}")
# A refused client's further bytes are read and discarded: closing at once would destroy the answer, which many clients
# read only after sending everything. This ends after so much silence, after so many bytes, or when a body's time is up.
LINGER_S = 5.0
LINGER_BYTES = 64 << 20
# Most requests that may wait on one connection for the answer before theirs.
MAX_PIPELINED_REQUESTS = 16
# Most bytes on the wire for each byte of a body: a chunk of one byte takes six.
MAX_FRAMING_FACTOR = 8
# Most bytes of an answer that the kernel may hold unsent.
UNSENT_BYTES = 1 << 16
MAX_HEADERS = 100
# An answer of which its client leaves more bytes than this unread counts towards the next bound.
LARGE_UNREAD_BYTES = 1 << 18
# Most bytes of all such answers together; beyond it, the client that has left its answer unread for longest is cut.
MAX_UNREAD_BYTES = 1 << 26
# A client that has left answers the probe with a reset within this time; meanwhile nothing else is sent to it.
FIRST_RESET_CHECK_S = 0.05
RESET_POLL_S = 0.2
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


class LimitedHttpProtocol(UvicornConnection):
    """A client's connection, with the bounds of the settings.

    What the client sends comes in parts, the heads and bodies of its requests by turns, and each part has its bounds. A
    refused client is first answered, and then *discarding* begins: its further bytes are read and forgotten.
    """

    bounds: ClassVar[ServerSettings]
    limit: ClassVar[ConnectionLimit]
    refusal: ClassVar[Refusal]
    # Connections with much that their clients have not read, the one that waits longest first.
    unread_connections: ClassVar[dict[LimitedHttpProtocol, None]] = {}
    _part_number = 0  # It counts the heads and bodies that are complete.
    _is_in_body = False
    # It counts only reads that held nothing but bytes of the present part.
    _part_bytes = 0
    _is_one_too_many = False
    # It passes through the parser, on its way to ``send_400_response``.
    _request_fault: Exception | None = None
    # The answer in progress; ``cycle`` is that of the request read last, which may still wait for its turn.
    _responder: Responder | None = None
    # It limits the time for what the client must send.
    _receive_timer: asyncio.TimerHandle | None = None
    # It limits the time for what the client must read.
    _unread_timer: asyncio.TimerHandle | None = None
    _is_transport_full = False
    _is_discarding = False
    _discarded_bytes = 0
    _last_discarded_at = 0.0  # By the loop's clock.
    # The client sends nothing more: either it waits for its answer, or it has left.
    _is_half_closed = False
    _reset_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        excess = len(self.connections) - self.limit.served
        if excess > self.limit.spare:
            transport.abort()
            return
        self._is_one_too_many = excess > 0
        self._expect_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """Disconnect every request of the connection; uvicorn disconnects only the last one."""
        self._disconnect_requests()
        self._stop_receive_timer()
        self._stop_unread_timer()
        if self._reset_timer is not None:
            self._reset_timer.cancel()
        super().connection_lost(exc)
        # They refer to this connection: without them its memory is freed without a garbage collection.
        self._responder = None
        self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._is_discarding:
            self._discard(data)
            return
        part_number = self._part_number
        self._stop_keep_alive_timer()
        self._parse(data)
        if self._is_discarding or self.transport.is_closing():
            return
        if part_number == self._part_number:
            self._part_bytes += len(data)
        else:
            self._part_bytes = 0
        if self._is_in_body:
            self._bound_body()
        else:
            self._bound_head()

    def _discard(self, data: bytes) -> None:
        self._discarded_bytes += len(data)
        self._last_discarded_at = self.loop.time()
        if self._discarded_bytes > LINGER_BYTES:
            self.transport.abort()

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        except httptools.HttpParserUpgrade as upgrade:
            if self._ignores_upgrade():
                unparsed = data[upgrade.args[0] :]
                self._parse_without_upgrade(unparsed)

    def _bound_body(self) -> None:
        if (
            self._part_bytes
            <= MAX_FRAMING_FACTOR * self.bounds.max_body_bytes
            + self.bounds.max_header_bytes
        ):
            self._expect_more()
        elif (
            self.cycle.response_complete
        ):  # A second answer would be taken for that of the next request.
            self._end_and_discard(self.bounds.body_timeout_s)
        else:
            self._refuse(BodyTooLargeError(self.bounds.max_body_bytes))

    def _bound_head(self) -> None:
        if self._part_bytes > self.bounds.max_header_bytes:
            self._refuse(HeadTooLargeError(self.bounds.max_header_bytes, MAX_HEADERS))
        elif not self._is_answering():
            self._expect_more()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Let a client that has sent its whole request have its answer (RFC 9112, section 6.3); close otherwise.

        A client that leaves closes its side as well, and the kernel shows no difference before something is sent to it. So a
        probe is sent at once: the kernel of a client that has left answers it with a reset.
        """
        if self._is_half_closed:
            return True
        owes_answer = self._is_answering() and not self._is_in_body
        # TLS has no half-closed connections.
        can_half_close = self.transport.can_write_eof()
        if not owes_answer or self._is_discarding or not can_half_close:
            return False
        self._is_half_closed = True
        if not self.pipeline:
            self.cycle.keep_alive = False
        self._send_probe()
        # Events that a resumable stream sends now would count as received.
        self.flow.pause_writing()
        self._reset_timer = self.loop.call_later(
            FIRST_RESET_CHECK_S, self._check_first_for_reset
        )
        return True

    def _send_probe(self) -> None:
        """Send what clients ignore: an interim answer before the head, a comment between the events of a stream."""
        responder = self._responder
        if responder is None or self.flow.write_paused:
            return
        if responder.cycle.response_started:
            responder.send_comment()
        elif (
            responder.cycle.scope["http_version"] != "1.0"
        ):  # HTTP/1.0 has no interim answers.
            self.transport.write(CONTINUE)

    def _check_first_for_reset(self) -> None:
        if not self._abort_if_reset() and not self._is_transport_full:
            self.flow.resume_writing()

    def _abort_if_reset(self) -> bool:
        """Abort the connection if the client has left, and return whether it is closed; otherwise check again later."""
        self._reset_timer = None
        if self.transport.is_closing():
            return True
        poller = select.poll()
        poller.register(self.transport.get_extra_info("socket").fileno(), 0)
        # A reset gives POLLERR or POLLHUP, which are always reported.
        if poller.poll(0):
            self.transport.abort()
            return True
        self._reset_timer = self.loop.call_later(RESET_POLL_S, self._abort_if_reset)
        return False

    def _ignores_upgrade(self) -> bool:
        """Tell whether a request asks for an upgrade, which is never granted; ``CONNECT`` is no such request."""
        return (
            bool(self.parser.should_upgrade())
            and self.parser.get_method() != b"CONNECT"
        )

    def _parse_without_upgrade(self, unparsed: bytes) -> None:
        """Read a request without its wish for an upgrade (RFC 9110, section 7.8): with it, the parser skips the body."""
        request_line = b"%b %b HTTP/%b" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        lines = [request_line]
        lines += [
            name + b": " + value for name, value in self.headers if name != b"upgrade"
        ]
        self._replace_parser()
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + unparsed)

    def on_headers_complete(self) -> None:
        """Start the request, if it is within the bounds.

        Raises:
            Exception: It is not; ``send_400_response`` then answers why.
        """
        if self._ignores_upgrade():
            return
        self._part_number += 1
        self._is_in_body = True
        self._stop_receive_timer()
        self._request_fault = self._find_fault()
        if self._request_fault is not None:
            raise self._request_fault
        super().on_headers_complete()
        # Trailers of the body would be added to the request's headers.
        self.headers = []
        self._decide_close_for_cycle()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # Nothing after CONNECT could be read.

    def _decide_close_for_cycle(self) -> None:
        """Give the request a transport whose ``close`` lets this connection decide how it ends."""
        transport = SimpleNamespace(
            write=self.transport.write,
            is_closing=self.transport.is_closing,
            close=self._end_after_answer,
        )
        self.cycle.transport = cast("asyncio.Transport", transport)

    def _find_fault(self) -> Exception | None:
        """Return why a request is not served; None if it is.

        Nearly every head is plain, and its few checks are made first; the others follow only for a head that is not.
        """
        head_bytes = len(self.url)
        host_count = 0
        for name, value in self.headers:
            head_bytes += len(name) + len(value) + 4
            host_count += name == b"host"
        if head_bytes > self.bounds.max_header_bytes or len(self.headers) > MAX_HEADERS:
            return HeadTooLargeError(self.bounds.max_header_bytes, MAX_HEADERS)
        is_plain = (
            host_count == 1
            and self.url.startswith(b"/")
            and self.parser.get_http_version() == "1.1"
        )
        if (
            is_plain
            and not self._is_one_too_many
            and len(self.pipeline) < MAX_PIPELINED_REQUESTS
        ):
            return None
        return self._find_fault_of_unusual_request()

    def _find_fault_of_unusual_request(self) -> Exception | None:
        if self.parser.get_http_version() not in {"1.0", "1.1"}:
            return NotHttpError("only HTTP/1.0 and HTTP/1.1 are spoken here")
        if not self._take_one_host():
            return NotHttpError(
                "a request needs one Host header, and not more than one (RFC 9112, section 3.2)"
            )
        if self._is_one_too_many:
            open_connections = f"{self.limit.served} connections are open already"
            return TooManyConnectionsError(
                f"{open_connections}: try again later, or keep connections and use them again"
            )
        if len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            return NotHttpError(
                f"more than {MAX_PIPELINED_REQUESTS} requests wait on one connection"
            )
        return None

    def _take_one_host(self) -> bool:
        """Put the host of a request's path in place of its header; return whether the request names exactly one host."""
        host_positions = [
            position
            for position, (name, _) in enumerate(self.headers)
            if name == b"host"
        ]
        if len(host_positions) > 1 or (
            not host_positions and self.parser.get_http_version() == "1.1"
        ):
            return False
        if not self.url.startswith(b"/") and b"://" in self.url:
            authority = (
                self.url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]
            )
            if host_positions:
                del self.headers[host_positions[0]]
            self.headers.append((b"host", authority.rpartition(b"@")[2]))
        return True

    def on_message_complete(self) -> None:
        if self._ignores_upgrade():
            return
        super().on_message_complete()
        self._part_number += 1
        self._is_in_body = False
        self._stop_receive_timer()

    def _start_asgi_task(
        self, cycle: RequestResponseCycle, app: ASGI3Application
    ) -> None:
        self._responder = Responder(cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._is_discarding:
            self._count_request()
            return
        super().on_response_complete()
        if (
            self._is_half_closed
            and self.cycle.response_complete
            and not self.transport.is_closing()
        ):
            self._close()

    def send_400_response(self, msg: str) -> None:
        del msg
        fault = self._request_fault
        self._request_fault = None
        self._refuse(fault or NotHttpError("the request is not valid HTTP/1.1"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_transport_full = True
        self._start_unread_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_transport_full = False
        if not self.transport.is_closing():
            self._stop_unread_timer()

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._close()

    def _expect_more(self) -> None:
        """Limit the time for the part that comes next, unless that time runs already."""
        if self._receive_timer is not None:
            return
        limit_s = (
            self.bounds.body_timeout_s
            if self._is_in_body
            else self.bounds.header_timeout_s
        )
        self._receive_timer = self.loop.call_later(limit_s, self._end_slow_client)

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _end_slow_client(self) -> None:
        self._receive_timer = None
        if self._is_discarding or self.transport.is_closing():
            return
        # Reading is paused while requests wait, so the client is not slow.
        if self.pipeline:
            self._expect_more()
        elif self._is_in_body and self.cycle.response_complete:
            self._end_and_discard(LINGER_S)
        elif self._is_in_body:
            self._refuse(RequestTooSlowError("body", self.bounds.body_timeout_s))
        elif self._part_bytes:
            self._refuse(RequestTooSlowError("head", self.bounds.header_timeout_s))
        else:
            self._close()

    def _refuse(self, error: Exception) -> None:
        """Answer with an error, unless another answer has begun, and end the connection."""
        has_answer_begun = self._disconnect_requests()
        if has_answer_begun:
            self._close()
            return
        # Before its first request a connection has none.
        url = getattr(self, "url", b"")
        path = url.partition(b"?")[0].decode("latin-1")
        response = type(self).refusal(error, path)
        response.headers["connection"] = "close"
        head = encode_head(
            response.status_code, [*self._default_headers(), *response.raw_headers]
        )
        self.transport.write(head + bytes(response.body))
        if self._is_one_too_many or isinstance(error, RequestTooSlowError):
            self._end_and_discard(LINGER_S)
        else:
            self._end_and_discard(self.bounds.body_timeout_s)

    def _disconnect_requests(self) -> bool:
        """Tell all requests that their client is gone; return whether one of them has an answer that has begun."""
        has_answer_begun = False
        responder = self._responder
        if responder is not None and not responder.cycle.response_complete:
            has_answer_begun = responder.cycle.response_started
            responder.leave()
        if self._is_answering():
            self.cycle.disconnected = True
        self.pipeline.clear()
        return has_answer_begun

    def _end_after_answer(self) -> None:
        if self._is_in_body:
            self._end_and_discard(self.bounds.body_timeout_s)
        else:
            self._close()

    def _end_and_discard(self, limit_s: float) -> None:
        """End a connection whose client may still be sending: discard that for a while, so that it reads its answer."""
        if self._is_discarding or self.transport.is_closing():
            return
        self._is_discarding = True
        self._stop_receive_timer()
        self._stop_keep_alive_timer()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # TLS has no half-closed connections.
            with contextlib.suppress(OSError):  # The client is gone.
                self.transport.write_eof()
        self._last_discarded_at = self.loop.time()
        closes_at = self._last_discarded_at + limit_s
        self._receive_timer = self.loop.call_later(
            min(LINGER_S, limit_s), self._abort_if_silent, closes_at
        )

    def _abort_if_silent(self, closes_at: float) -> None:
        """Abort the connection if the client is silent or has sent for too long; otherwise check again later."""
        next_check_at = min(self._last_discarded_at + LINGER_S, closes_at)
        if self.loop.time() >= next_check_at:
            self.transport.abort()
        else:
            self._receive_timer = self.loop.call_at(
                next_check_at, self._abort_if_silent, closes_at
            )

    def _close(self) -> None:
        unread_bytes = self.transport.get_write_buffer_size()
        self.transport.close()
        if unread_bytes:
            self._start_unread_timer()

    def _start_unread_timer(self) -> None:
        """Cut the client if it does not read in time, or if all such clients leave too much unread together."""
        if self._unread_timer is None:
            limit_s = self.bounds.write_timeout_s
            self._unread_timer = self.loop.call_later(
                limit_s, self.cut, f"for {limit_s:g} s"
            )
        if self.transport.get_write_buffer_size() > LARGE_UNREAD_BYTES:
            self.unread_connections[self] = None
            self._bound_unread_together()

    def _bound_unread_together(self) -> None:
        connections = self.unread_connections
        unread_bytes = {
            connection: connection.transport.get_write_buffer_size()
            for connection in connections
        }
        while (
            len(connections) > 1
            and sum(unread_bytes[connection] for connection in connections)
            > MAX_UNREAD_BYTES
        ):
            longest_unread = next(iter(connections))
            longest_unread.cut("while others left theirs as well")

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
            self.unread_connections.pop(self, None)

    def cut(self, why: str) -> None:
        log.info("a client did not take its answer %s: cut", why)
        self.unread_connections.pop(self, None)
        self.transport.abort()
