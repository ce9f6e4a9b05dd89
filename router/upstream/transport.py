"""An HTTP/1.1 client for engines, behind httpx's transport interface.

One ``asyncio.Protocol`` per connection on httptools' parser (llhttp): httpx's own transport and aiohttp's client cost
several times the CPU time for each request and each chunk (``benchmarks/transport.py`` measures all three in one run).

What it leaves out, as engines need none of it: HTTP/2, proxies, redirects, cookies, decompression, uploads that stream.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache, partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn, cast

import httptools
import httpx
from aiohappyeyeballs import start_connection

from router.upstream.errors import EngineBrokeError, EngineStalledError
from router.upstream.resolver import AddressInfo, Resolver
from tiers.errors import TrustError
from tiers.trust import client_context, why_untrusted

# while more than that of an answer waits for its reader, the socket is not read
READ_BUFFER_BYTES = 1 << 15
# for an answer's status line and headers, informational ones included
MAX_HEAD_BYTES = 1 << 16
# A connection that was idle for longer is not used again. vLLM closes idle connections after 5 s (uvicorn's default,
# VLLM_HTTP_TIMEOUT_KEEP_ALIVE); a request that meets the close is sent again, once, if nothing of an answer has come.
KEEP_ALIVE_S = 4.0
# a name's next address is tried as well after that time (RFC 8305, section 5)
NEXT_ADDRESS_S = 0.25
# a connection is closed if the end of a body does not follow a stream's last event within that time
LAST_CHUNK_S = 1.0
# a body of a request with more bytes is not copied to stand behind the head
LARGE_CONTENT_BYTES = 1 << 16
_SWITCHING_PROTOCOLS = 101
_OK = 200

Origin = tuple[str, str, int]  # scheme, host, port
Headers = Sequence[tuple[bytes, bytes]]
# a request as it is sent: its head and its body in one, or the body by itself where copying it would take time
Message = Sequence[bytes]
# takes a part of a body as it comes; tells whether it takes more now
Sink = Callable[[bytes], bool]


class ConnectionState(Enum):
    IDLE = "idle"  # waits for a request
    ACTIVE = "active"  # an answer is coming
    ENDING = "ending"  # the answer was read, the end of its body is to come
    CLOSED = "closed"


# Compared for each token: to look a member up in its class costs as much as two calls (Python 3.11).
_ENDING = ConnectionState.ENDING


class Body(httpx.AsyncByteStream):
    """One answer as it comes: httptools writes it, its reader takes it. Close it, unless it is read to its end.

    Reading it raises ``httpx.ReadTimeout`` if nothing comes for as long as ``limit_reads`` says, ``httpx.ReadError`` if the
    connection breaks, and ``httpx.RemoteProtocolError`` if it is closed before the end or what comes is no HTTP.

    It is read in one of two ways. A reader that iterates is woken for each part. One that calls ``pump`` is not: while
    ``pump`` waits, ``sink`` is set, and ``Connection.data_received`` calls it with each part. Two clear ``sink`` again:
    ``data_received``, once the sink takes no more, which ``pump`` is woken to see; and ``pump`` itself, whenever its wait
    ends, also by the end of the answer, a fault or a cancellation.

    Attributes:
        parser: httptools' own; None: the request is over.
        status: Status of the answer; 0: its head has not come.
        ends_at_close: Whether the end of the connection is that of the body.
        parts: Parts of the body that have come and were not read; ``on_body`` is httptools' callback for them.
        buffered: Bytes received but not read; until the head is complete, the bytes of the head.
        complete: Whether all has come, at ``ended_at`` (monotonic seconds).
        over: Whether the reader knows that nothing but the end of the body is to come.
        reusable: Whether the connection can carry another request once the answer is complete.
        fault: Why no more comes; what has come can still be read.
        sink: Takes parts as they come; None: they are kept for the reader.
        read_timeout_s: Longest time that one read may wait; None: any.
        patience: Asked when a read has waited that long, with the start of the wait; returns the seconds that it goes on.
        from_sending: Whether that time is counted from when the request was sent, for all reads together.
        waiter: Wakes the reader, while it waits.
        waiting_since: When the present wait began, by the monotonic clock in seconds.
        timer: Ends a wait that takes too long.
    """

    __slots__ = (
        "_connection",
        "_head_only",
        "buffered",
        "complete",
        "ended_at",
        "ends_at_close",
        "fault",
        "from_sending",
        "headers",
        "on_body",
        "over",
        "parser",
        "parts",
        "patience",
        "read_timeout_s",
        "reusable",
        "sink",
        "status",
        "timer",
        "waiter",
        "waiting_since",
    )

    def __init__(
        self, connection: Connection, *, head_only: bool, limit_s: float | None
    ) -> None:
        self._connection: Connection | None = connection
        self._head_only = head_only
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.on_body = self.parts.append
        self.buffered = 0
        self.ends_at_close = False
        self.over = False
        self.complete = False
        self.reusable = False
        self.ended_at = 0.0
        self.fault: httpx.TransportError | None = None
        self.sink: Sink | None = None
        self.patience: Callable[[float], float] | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.read_timeout_s = limit_s
        self.from_sending = limit_s is not None
        self.waiting_since = time.monotonic()
        self.parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(
            self
        )

    async def head(self) -> None:
        """Wait until the head has come."""
        while not self.status:
            if self.fault is not None:
                self._raise_fault()
            await self._wait()

    def header(self, name: bytes) -> str | None:
        """Return the value of a header, by its name in lower case."""
        for header_name, value in self.headers:
            if header_name.lower() == name:
                return value.decode("latin-1")
        return None

    def limit_reads(self, limit_s: float) -> None:
        """Bound each read by itself from now on, in place of the whole answer."""
        self.read_timeout_s = limit_s
        self.from_sending = False
        self.stop_timer()

    def __aiter__(self) -> Body:
        return self

    async def __anext__(self) -> bytes:
        connection = self._connection
        if connection is None:
            raise StopAsyncIteration
        while not self.parts:
            if self.complete:
                await self.aclose()
                raise StopAsyncIteration
            if self.fault is not None:
                self._raise_fault()
            await self._wait()
        part = self._take_parts()
        if connection.paused:
            connection.resume_reading()
        return part

    def _take_parts(self) -> bytes:
        """Return what has come of the body and was not read."""
        part = b"".join(self.parts)
        self.parts.clear()
        self.buffered = 0
        return part

    async def pump(self, sink: Sink) -> bool:
        """Let ``sink`` have what comes, as it comes, waking no task for it; False: it takes no more now, True: the end.

        ``EngineBrokeError``: the connection failed; ``EngineStalledError``: nothing came in time.
        """
        connection = self._connection
        while connection is not None:
            if self.parts:
                part = self._take_parts()
                self.waiting_since = time.monotonic()
                if not sink(part):
                    return False
            if self.complete:
                return True
            if self.fault is not None:
                self._raise_engine_error(self.fault)
            if connection.paused:
                connection.resume_reading()
            if not await self._wait_with_sink(sink):
                return False
        return True

    async def _wait_with_sink(self, sink: Sink) -> bool:
        """Wait until the answer ends, has a fault, or ``sink`` takes no more; tell whether it does take more."""
        self.sink = sink
        try:
            await self._wait()
            # ``Connection.data_received`` clears it when it takes no more
            return self.sink is not None
        finally:
            self.sink = None

    def _raise_engine_error(self, fault: httpx.TransportError) -> NoReturn:
        if isinstance(fault, httpx.ReadTimeout):
            raise EngineStalledError(
                f"the engine sent no token for {self.read_timeout_s:g} s"
            )
        raise EngineBrokeError("the engine's connection broke off") from fault

    async def aclose(self) -> None:
        """Give the connection back, or close it where the answer has not come to its end."""
        connection = self._connection
        self._connection = None
        self.patience = None  # break the reference cycle with the reader
        if connection is not None:
            connection.release(connection)

    async def _wait(self) -> None:
        """Wait until there is something to read: a part, the end or a fault."""
        loop = asyncio.get_running_loop()
        self.waiter = loop.create_future()
        limit_s = self.read_timeout_s
        if limit_s is not None:
            if not self.from_sending:
                self.waiting_since = time.monotonic()
            if self.timer is None:
                self.timer = loop.call_later(limit_s, self.check_wait, limit_s)
        try:
            await self.waiter
        finally:
            self.waiter = None

    def check_wait(self, limit_s: float) -> None:
        """End a wait that takes too long; otherwise check again when it would. One timer serves all waits of an answer."""
        self.timer = None
        if self.waiter is None and not self.from_sending:
            return  # the next wait sets it
        left_s = self.waiting_since + limit_s - time.monotonic()
        if left_s <= 0 and self.patience is not None:
            left_s = self.patience(self.waiting_since)
        if left_s > 0:
            self.timer = asyncio.get_running_loop().call_later(
                left_s, self.check_wait, limit_s
            )
        else:
            self.fail(httpx.ReadTimeout(f"no data for {limit_s:g} s"))

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def wake(self) -> None:
        """End the reader's wait, if it waits."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def fail(self, fault: httpx.TransportError) -> None:
        """Note why no more comes, and let the reader know; a complete answer stays one."""
        if self.fault is None and not self.complete:
            self.fault = fault
        self.reusable = False
        self.wake()

    def drop(self) -> None:
        """Take no more of the answer, and keep nothing of it; a reader that still waits gets an error."""
        self.parser = None
        self.parts.clear()
        self.stop_timer()
        if self.waiter is not None:
            self.fault = httpx.ReadError("the answer was closed")
            self.wake()

    def _raise_fault(self) -> None:
        fault = self.fault
        self.fault = httpx.ReadError("the connection had failed before")
        try:
            assert fault is not None
            raise fault
        finally:
            del fault  # break the reference cycle between the exception and this frame

    # httptools

    def on_message_begin(self) -> None:
        """Refuse a second answer to one request: raising ends the parser."""
        if self.complete:
            self.reusable = False
            raise httpx.RemoteProtocolError("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # otherwise it is a trailer
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self.parser is not None
        status = self.parser.get_status_code()
        if self.status or self.fault is not None:
            # it belongs to something after the answer, or after an informational head that was too long
            return
        if status < _OK and status != _SWITCHING_PROTOCOLS:
            self.headers = []  # an informational head: the answer's own follows
            return
        size = 0
        ends_at_close = True
        for name, value in self.headers:
            size += len(name) + len(value)
            lower_name = name.lower()
            is_chunked = (
                lower_name == b"transfer-encoding" and b"chunked" in value.lower()
            )
            if is_chunked or lower_name == b"content-length":
                ends_at_close = False
        if size > MAX_HEAD_BYTES:
            self.head_too_long()
            return
        self.ends_at_close = ends_at_close
        self.status = status
        self.complete = self._head_only

    def note_head_bytes(self, size: int) -> None:
        """Count bytes of a head that is not complete; refuse one that is too long."""
        self.buffered += size
        if self.buffered > MAX_HEAD_BYTES:
            self.head_too_long()

    def head_too_long(self) -> None:
        self.fail(
            httpx.RemoteProtocolError(
                f"the head of the engine's answer is over {MAX_HEAD_BYTES} bytes"
            )
        )

    def on_message_complete(self) -> None:
        # otherwise an informational answer has ended
        if self.status and not self.complete:
            assert self.parser is not None
            self.complete = True
            self.reusable = self.parser.should_keep_alive()
            # the engine's time runs from here, whenever the answer is read
            self.ended_at = time.monotonic()


class Connection(asyncio.Protocol):
    """One connection to an engine; it carries one request at a time.

    Attributes:
        answer: The answer to the present request.
        idle_since: When the last answer had come, by the monotonic clock in seconds.
        paused: Whether the socket is not read, since nobody reads the answer.
        release: Takes the connection back once its request has ended; with ``ended`` if that was said before.
    """

    __slots__ = (
        "_on_lost",
        "_transport",
        "answer",
        "idle_since",
        "origin",
        "paused",
        "release",
        "state",
    )

    def __init__(
        self,
        origin: Origin,
        on_lost: Callable[[Connection], None],
        release: Callable[..., None],
    ) -> None:
        self.origin = origin
        self.release = release
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self.state = ConnectionState.IDLE
        self.answer: Body | None = None
        self.idle_since = 0.0
        self.paused = False

    def send(
        self, message: Message, *, head_only: bool, limit_s: float | None = None
    ) -> Body:
        """Send a request on an idle connection; ``limit_s`` is for the whole answer, or until ``Body.limit_reads``.

        ``httpx.ReadError``: the engine has closed it.
        """
        # uvloop may tell of it before this runs
        if self.state is not ConnectionState.IDLE or self._transport is None:
            raise httpx.ReadError("the engine closed the connection at once")
        self.state = ConnectionState.ACTIVE
        self.answer = Body(self, head_only=head_only, limit_s=limit_s)
        self._transport.writelines(message)
        return self.answer

    def rest(self) -> bool:
        """End a request; tell whether the connection can carry another one now.

        Otherwise it is closed, unless nothing but the end of the answer is to come: that is waited for.
        """
        answer = self.answer
        if answer is None:
            self.close()
            return False
        state = self.state
        is_end_to_come = answer.over and not answer.complete and answer.fault is None
        if is_end_to_come and state is ConnectionState.ACTIVE:
            self._await_end(answer)
            return False
        self.answer = None
        self.idle_since = answer.ended_at
        answer.drop()
        is_open = state is not ConnectionState.CLOSED
        is_fresh = time.monotonic() - self.idle_since <= KEEP_ALIVE_S
        if answer.complete and answer.reusable and is_fresh and is_open:
            self.state = ConnectionState.IDLE
            if self.paused:
                self.resume_reading()
            return True
        self.close()
        return False

    def _await_end(self, answer: Body) -> None:
        """Wait a short time for the end of a body whose last event was read: then the connection can be used again."""
        answer.stop_timer()
        answer.timer = asyncio.get_running_loop().call_later(LAST_CHUNK_S, self.close)
        self.state = ConnectionState.ENDING
        answer.parts.clear()
        if self.paused:
            self.resume_reading()

    def close(self) -> None:
        self.state = ConnectionState.CLOSED
        if self._transport is not None:
            self._transport.abort()

    def resume_reading(self) -> None:
        self.paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's does not derive from it
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse what came of the answer, and give it to its sink, or keep it and wake its reader.

        It runs for each token, so the usual part, of a body that has a sink, passes through it without further calls.
        """
        answer = self.answer
        if answer is None or answer.parser is None:
            # whatever this is, the next request would take it for its answer
            self.close()
            return
        try:
            answer.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            answer.fail(
                httpx.RemoteProtocolError(
                    f"the engine's answer is no HTTP ({type(error).__name__})"
                )
            )
        if self.state is _ENDING:
            self._note_end(answer)
            return
        if not answer.status:
            answer.note_head_bytes(len(data))
            return
        if answer.parts and answer.sink is not None:
            part = b"".join(answer.parts)
            answer.parts.clear()
            answer.waiting_since = time.monotonic()
            if not answer.sink(part):
                answer.sink = None  # so ``Body.pump`` learns of it
            elif not answer.complete:
                return
        elif answer.parts:
            answer.buffered += len(data)
        self._pause_if_full(answer)
        answer.wake()

    def _note_end(self, answer: Body) -> None:
        """Take the connection back once the end of its body has come, if it has."""
        answer.parts.clear()
        if answer.fault is not None:
            self.close()
        elif answer.complete:
            self.release(self, ended=True)

    def _pause_if_full(self, answer: Body) -> None:
        """Stop reading the socket while too much of an answer waits for its reader."""
        if (
            answer.buffered > READ_BUFFER_BYTES
            and not self.paused
            and self._transport is not None
        ):
            self.paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        if self.answer is not None:
            self.answer.reusable = False
        if self.state is ConnectionState.IDLE:
            self.state = ConnectionState.CLOSED

    def connection_lost(self, exc: Exception | None) -> None:
        self.state = ConnectionState.CLOSED
        answer = self.answer
        if answer is not None and not answer.complete:
            if exc is None and answer.status and answer.ends_at_close:
                answer.complete = True
                answer.wake()
            elif exc is None:
                answer.fail(
                    httpx.RemoteProtocolError(
                        "the engine closed the connection before the end of its answer"
                    )
                )
            else:
                answer.fail(
                    httpx.ReadError(f"the connection broke ({type(exc).__name__})")
                )
        self._transport = None
        self._on_lost(self)


class EngineTransport(httpx.AsyncBaseTransport):
    """Connections to engines, used again one after another.

    Of httpx's times (``request.extensions["timeout"]``, in seconds) ``connect``, ``pool`` and ``read`` are kept. Other than
    in httpx, ``read`` is for the whole answer, unless its reader limits each read (``Body.limit_reads``). Beyond
    ``max_requests`` at once (0: any number) further ones wait for at most the ``pool`` time. ``ca`` names authorities that
    are trusted besides the system's.
    """

    def __init__(
        self,
        max_requests: int = 0,
        *,
        ca: Path | None = None,
        resolver: Resolver | None = None,
    ) -> None:
        self._idle: dict[Origin, deque[Connection]] = {}
        self._connections: set[Connection] = set()
        self._permits = asyncio.Semaphore(max_requests) if max_requests else None
        self._max_requests = max_requests
        self._closed_old_at = 0.0
        self._ca = ca
        self._resolver = Resolver() if resolver is None else resolver
        # family in which the last connection was made
        self._reachable: dict[Origin, socket.AddressFamily] = {}
        self._ssl: ssl.SSLContext | None = None
        self._closed = False

    def alike(self, max_requests: int = 0) -> EngineTransport:
        """Return a transport with connections of its own, which trusts the same authorities and knows the same names."""
        return EngineTransport(max_requests, ca=self._ca, resolver=self._resolver)

    def allow(self, max_requests: int) -> None:
        """Raise the bound on requests at once; a lower one changes nothing."""
        if self._permits is not None:
            for _ in range(max_requests - self._max_requests):
                self._permits.release()
            self._max_requests = max(max_requests, self._max_requests)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request for one of httpx's clients."""
        request_line = b"%b %b HTTP/1.1" % (
            request.method.encode("ascii"),
            request.url.raw_path,
        )
        message = _message(request_line, request.headers.raw, request.read())
        times = request.extensions.get("timeout") or {}
        answer = await self.send(
            _origin(request.url), message, times, head_only=request.method == "HEAD"
        )
        return httpx.Response(answer.status, headers=answer.headers, stream=answer)

    async def send(
        self,
        origin: Origin,
        message: Message,
        times: Mapping[str, float | None],
        *,
        head_only: bool = False,
    ) -> Body:
        """Send a request; return once the head of its answer has come. Close the answer.

        Raises:
            httpx.PoolTimeout: There were as many requests as are allowed, and none ended in time.
            httpx.ConnectTimeout: No connection was made in time.
            httpx.ConnectError: No connection could be made.
            httpx.ReadError: The connection broke.
            httpx.ReadTimeout: The head did not come in time.
            httpx.RemoteProtocolError: The connection was closed before the answer's end, or what came is no HTTP.
        """
        if self._closed:
            raise RuntimeError("the transport is closed")
        permits = self._permits
        if permits is not None:
            if permits.locked():
                await self._wait_for_permit(permits, times.get("pool"))
            else:
                await permits.acquire()
        read_timeout_s = times.get("read")
        connection: Connection | None = None
        try:
            connection = self._take_idle(origin)
            if connection is not None:
                answer = await self._send_on_kept(
                    connection, message, head_only=head_only, limit_s=read_timeout_s
                )
                if answer is not None:
                    return answer
                connection = None
            connection = await self._connect(origin, times.get("connect"))
            answer = connection.send(
                message, head_only=head_only, limit_s=read_timeout_s
            )
            await answer.head()
        except BaseException:
            if connection is not None:
                self._discard(connection)
            if permits is not None:
                permits.release()
            raise
        return answer

    async def _send_on_kept(
        self,
        connection: Connection,
        message: Message,
        *,
        head_only: bool,
        limit_s: float | None,
    ) -> Body | None:
        """Send a request on a connection that was idle; None: the engine had closed it before the request came.

        Then the request can be sent again: nothing of an answer has come.
        """
        answer: Body | None = None
        try:
            answer = connection.send(message, head_only=head_only, limit_s=limit_s)
            await answer.head()
        except (httpx.ReadError, httpx.RemoteProtocolError):
            has_answer_begun = answer is not None and (
                answer.status > 0 or answer.buffered > 0
            )
            if has_answer_begun or self._closed:
                raise
            connection.rest()
            return None
        return answer

    def _discard(self, connection: Connection) -> None:
        """Close a connection whose request failed or was cancelled: its whole answer may have come, and nobody wants it."""
        self._connections.discard(connection)
        connection.rest()
        connection.close()

    async def aclose(self) -> None:
        """Close all connections; requests that are under way fail."""
        self._closed = True
        for connection in list(self._connections):
            connection.close()
        self._idle.clear()

    async def _wait_for_permit(
        self, permits: asyncio.Semaphore, limit_s: float | None
    ) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await permits.acquire()
        except TimeoutError:
            raise httpx.PoolTimeout(
                f"no connection was free within {limit_s:g} s"
            ) from None

    def _take_idle(self, origin: Origin) -> Connection | None:
        """Return the connection that was used last, which the engine is the least likely to have closed by now."""
        idle = self._idle.get(origin)
        if not idle:
            return None
        connection = idle.pop()
        if (
            connection.state is ConnectionState.IDLE
            and time.monotonic() - connection.idle_since <= KEEP_ALIVE_S
        ):
            return connection
        connection.close()
        while idle:  # the ones before it have been idle for longer
            idle.pop().close()
        return None

    async def _connect(self, origin: Origin, limit_s: float | None) -> Connection:
        scheme, host, _ = origin
        options: dict[str, Any] = {}
        if scheme == "https":
            options = {"ssl": self._tls(), "server_hostname": host}
        make_connection = partial(Connection, origin, self._lost, self._release)
        try:
            async with asyncio.timeout(limit_s):
                connection = await self._open(make_connection, origin, options)
        except TimeoutError:
            why = f"no connection within {limit_s:g} s" if limit_s else "no connection"
            raise httpx.ConnectTimeout(why) from None
        except socket.gaierror as error:
            raise httpx.ConnectError("its name cannot be resolved") from error
        except ssl.SSLError as error:
            raise httpx.ConnectError(f"TLS: {why_untrusted(error)}") from error
        except OSError as error:
            raise httpx.ConnectError(_why_unreachable(error, scheme).lower()) from error
        self._connections.add(connection)
        if self._closed:
            connection.close()
            raise httpx.ReadError("the transport was closed")
        return connection

    async def _open(
        self,
        make_connection: Callable[[], Connection],
        origin: Origin,
        options: Mapping[str, Any],
    ) -> Connection:
        """Connect to the first address of a host that answers: they are tried side by side (RFC 8305)."""
        _, host, port = origin
        loop = asyncio.get_running_loop()
        if _is_address(host):
            _, connection = await loop.create_connection(
                make_connection, host, port, **options
            )
            return connection
        addresses = await self._resolver.addresses(host, port)
        # The family that was reached before goes first: otherwise each connection would wait for the other one in vain.
        last_family = self._reachable.get(origin)
        addresses_in_order = sorted(
            addresses, key=lambda address: address[0] != last_family
        )
        sock = await _connect_first(addresses_in_order)
        self._reachable[origin] = socket.AddressFamily(sock.family)
        _, connection = await loop.create_connection(
            make_connection, sock=sock, **options
        )
        return connection

    def _tls(self) -> ssl.SSLContext:
        """Return the TLS context of all connections; ``httpx.ConnectError``: a file of authorities cannot be used."""
        if self._ssl is None:
            try:
                self._ssl = client_context(self._ca)
            except TrustError as error:
                raise httpx.ConnectError(f"TLS: {error}") from error
        return self._ssl

    def _release(self, connection: Connection, *, ended: bool = False) -> None:
        """Keep a connection for further requests, if it can carry them; ``ended``: its permit went back when it was read."""
        if self._permits is not None and not ended:
            self._permits.release()
        if not connection.rest():
            return
        if self._closed:
            connection.close()
            return
        self._idle.setdefault(connection.origin, deque()).append(connection)
        now = time.monotonic()
        if now - self._closed_old_at >= KEEP_ALIVE_S:
            self._close_old(now)

    def _close_old(self, now: float) -> None:
        """Close connections that were idle for too long to be used again; a host that has vanished closes none itself."""
        self._closed_old_at = now
        for origin, idle in list(self._idle.items()):
            while idle and now - idle[0].idle_since > KEEP_ALIVE_S:
                idle.popleft().close()
            if not idle:
                del self._idle[origin]

    def _lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[connection.origin]


def json_post(url: str, headers: Headers, content: bytes) -> tuple[Origin, Message]:
    """Return where a POST request with a JSON body goes, and its bytes; ``httpx.LocalProtocolError``: see ``_message``."""
    origin, target, host = _address(url)
    own_headers = (
        (b"host", host),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(content)),
    )
    return origin, _message(
        b"POST %b HTTP/1.1" % target, (*own_headers, *headers), content
    )


def _why_unreachable(error: OSError, scheme: str) -> str:
    if error.strerror:
        return error.strerror
    if scheme == "https":
        return "TLS: no handshake"
    return str(error)


async def _connect_first(addresses: Sequence[AddressInfo]) -> socket.socket:
    """Return a connection to the first address that answers; ``OSError``: none does, its text names none of them."""
    try:
        return await start_connection(
            addresses, happy_eyeballs_delay=NEXT_ADDRESS_S, interleave=1
        )
    except RuntimeError as error:  # uvloop raises it for a socket that another attempt has closed meanwhile
        raise OSError(str(error)) from error
    except OSError as error:
        if error.errno is None:
            raise OSError(
                errno.EHOSTUNREACH, "none of its addresses takes connections"
            ) from error
        raise OSError(error.errno, os.strerror(error.errno)) from error


@lru_cache(256)
def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


@lru_cache(256)
def _address(url: str) -> tuple[Origin, bytes, bytes]:
    """Return where a URL leads, its path as a request's target, and its host as a header."""
    parsed = httpx.URL(url)
    return _origin(parsed), parsed.raw_path, parsed.netloc


def _origin(url: httpx.URL) -> Origin:
    default_port = 443 if url.scheme == "https" else 80
    return url.scheme, url.host, url.port or default_port


def _message(head: bytes, headers: Headers, content: bytes) -> Message:
    """Return a request as it is sent; ``httpx.LocalProtocolError``: a header holds a line break or a NUL."""
    for header in headers:
        head += b"\r\n%b: %b" % header
    if head.count(b"\n") + head.count(b"\r") != 2 * len(headers) or b"\0" in head:
        raise httpx.LocalProtocolError("a header holds a line break or a NUL")
    if len(content) > LARGE_CONTENT_BYTES:
        return (head + b"\r\n\r\n", content)
    return (b"%b\r\n\r\n%b" % (head, content),)


async def body_of(body: Body, limit: int | None = None) -> bytes:
    """Read an answer's body, and close it; with a limit, no further than the part that exceeds so many bytes."""
    parts: list[bytes] = []
    size = 0
    try:
        async for part in body:
            parts.append(part)
            size += len(part)
            if limit is not None and size > limit:
                break
    finally:
        await body.aclose()
    return b"".join(parts)
