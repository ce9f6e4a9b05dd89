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
from typing import Any, cast

import httptools
import httpx
from aiohappyeyeballs import start_connection

from router.upstream.errors import EngineBrokeError, EngineStalledError
from router.upstream.resolver import AddressInfo, Resolver
from tiers.errors import TrustError
from tiers.trust import client_context, why_untrusted

READ_BUFFER_BYTES = 1 << 15  # of an answer that nobody has read yet: with more than that, the socket is not read
MAX_HEAD_BYTES = 1 << 16  # of an answer's status line and headers, informational ones included
# A connection that was idle for longer is not used again. vLLM closes idle connections after 5 s (uvicorn's default,
# VLLM_HTTP_TIMEOUT_KEEP_ALIVE); a request that meets the close is sent again, once, if nothing of an answer has come.
KEEP_ALIVE_S = 4.0
NEXT_ADDRESS_S = 0.25  # after which the next address of a name is tried as well (RFC 8305, section 5)
LAST_CHUNK_S = 1.0  # within which the end of a body follows a stream's last event, else its connection is closed
_SWITCHING_PROTOCOLS, _OK = 101, 200

Origin = tuple[str, str, int]  # scheme, host, port
Headers = Sequence[tuple[bytes, bytes]]


class ConnectionState(Enum):
    IDLE = "idle"  # waits for a request
    ACTIVE = "active"  # an answer is coming
    ENDING = "ending"  # the answer was read, the end of its body is to come
    CLOSED = "closed"


class Body(httpx.AsyncByteStream):
    """One answer as it comes: httptools writes it, its reader takes it. Close it, unless it is read to its end.

    Reading it raises ``httpx.ReadTimeout`` if nothing comes for as long as ``limit_reads`` says, ``httpx.ReadError`` if the
    connection breaks, and ``httpx.RemoteProtocolError`` if it is closed before the end or what comes is no HTTP.

    Attributes:
        parser: httptools' own; None: the request is over.
        status: 0: the head has not come.
        ends_at_close: Whether the end of the connection is that of the body.
        parts: Of the body that have come and were not read; ``on_body`` is httptools' callback for them.
        buffered: Bytes that came and were not read; before the head is whole, those of the head.
        complete: Whether all has come, at ``ended_at`` (monotonic seconds). ``over``: nothing but the end is to come.
        reusable: Whether the connection can carry another request then.
        fault: Why no more comes; what has come can still be read.
        sink: Takes parts as they come, in place of a task that would be woken for each; returns whether it takes more.
        read_timeout_s: Longest time that one read may wait; None: any.
        patience: Asked when a read has waited that long, with the start of the wait; returns the seconds that it goes on.
        from_sending: Whether that time is counted from when the request was sent, for all reads together.
        waiting_since: When who waits for more (``waiter``) began to, by the monotonic clock in seconds.
    """

    __slots__ = (
        "_connection", "_head_only", "buffered", "complete", "ended_at", "ends_at_close", "fault", "from_sending",
        "headers", "on_body", "over", "parser", "parts", "patience", "read_timeout_s", "reusable", "sink", "status",
        "timer", "waiter", "waiting_since",
    )  # fmt: skip

    def __init__(self, connection: Connection, *, head_only: bool, limit_s: float | None) -> None:
        self._connection: Connection | None = connection
        self.status, self.buffered = 0, 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.on_body = self.parts.append
        self._head_only = head_only
        self.complete = self.over = self.reusable = self.ends_at_close = False
        self.fault: httpx.TransportError | None = None
        self.sink: Callable[[bytes], bool] | None = None
        self.patience: Callable[[float], float] | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.read_timeout_s, self.from_sending, self.waiting_since = limit_s, limit_s is not None, time.monotonic()
        self.ended_at = 0.0
        self.parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    async def head(self) -> None:
        while not self.status:
            if self.fault is not None:
                self._raise_fault()
            await self._wait()

    def header(self, name: bytes) -> str | None:
        """Return the value of a header, by its name in lower case."""
        return next((value.decode("latin-1") for each, value in self.headers if each.lower() == name), None)

    def limit_reads(self, limit_s: float) -> None:
        self.read_timeout_s, self.from_sending = limit_s, False
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
        part = b"".join(self.parts)
        self.parts.clear()
        self.buffered = 0
        if connection.paused:
            connection.resume_reading()
        return part

    async def pump(self, sink: Callable[[bytes], bool]) -> bool:
        """Let ``sink`` have what comes, as it comes, waking no task for it; False: it takes no more now, True: the end.

        ``EngineBrokeError``: the connection failed; ``EngineStalledError``: nothing came in time.
        """
        connection = self._connection
        while connection is not None:
            if self.parts:
                part = b"".join(self.parts)
                self.parts.clear()
                self.buffered, self.waiting_since = 0, time.monotonic()
                if not sink(part):
                    return False
            if self.complete:
                break
            if isinstance(self.fault, httpx.ReadTimeout):
                raise EngineStalledError(f"the engine sent no token for {self.read_timeout_s:g} s")
            if self.fault is not None:
                raise EngineBrokeError("the engine's connection broke off") from self.fault
            if connection.paused:
                connection.resume_reading()
            self.sink = sink
            try:
                await self._wait()
                if self.sink is None:
                    return False
            finally:
                self.sink = None
        return True

    async def aclose(self) -> None:
        """Give the connection back, or close it where the answer has not come to its end."""
        connection, self._connection = self._connection, None
        self.patience = None  # it leads back to who reads this
        if connection is not None:
            connection.release(connection)

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self.waiter = loop.create_future()
        if (limit_s := self.read_timeout_s) is not None:
            if not self.from_sending:
                self.waiting_since = time.monotonic()
            if self.timer is None:
                self.timer = loop.call_later(limit_s, self.look, limit_s)
        try:
            await self.waiter
        finally:
            self.waiter = None

    def look(self, limit_s: float) -> None:
        """End a wait that takes too long; otherwise look again when it would. One timer serves all waits of an answer."""
        self.timer = None
        if self.waiter is None and not self.from_sending:
            return  # the next wait sets it
        left_s = self.waiting_since + limit_s - time.monotonic()
        if left_s <= 0 and self.patience is not None:
            left_s = self.patience(self.waiting_since)
        if left_s > 0:
            self.timer = asyncio.get_running_loop().call_later(left_s, self.look, limit_s)
        else:
            self.fail(httpx.ReadTimeout(f"no data for {limit_s:g} s"))

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def fail(self, fault: httpx.TransportError) -> None:
        if self.fault is None and not self.complete:
            self.fault = fault
        self.reusable = False
        self.wake()

    def _raise_fault(self) -> None:
        fault, self.fault = self.fault, httpx.ReadError("the connection had failed before")
        try:
            assert fault is not None
            raise fault
        finally:
            del fault  # its trace leads here

    # httptools

    def on_message_begin(self) -> None:
        """Refuse a second answer to one request: raising ends the parser."""
        if self.complete:
            self.reusable = False
            raise httpx.RemoteProtocolError("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self.parser is not None
        status = self.parser.get_status_code()
        if self.status or self.fault is not None:
            return  # of something after the answer, or after an informational head that was too long
        if status < _OK and status != _SWITCHING_PROTOCOLS:
            self.headers = []
            return
        size, ends_at_close = 0, True
        for name, value in self.headers:
            size, lower = size + len(name) + len(value), name.lower()
            if lower == b"content-length" or (lower == b"transfer-encoding" and b"chunked" in value.lower()):
                ends_at_close = False
        if size > MAX_HEAD_BYTES:
            self.head_too_long()
            return
        self.ends_at_close, self.status, self.complete = ends_at_close, status, self._head_only

    def head_too_long(self) -> None:
        self.fail(httpx.RemoteProtocolError(f"the head of the engine's answer is over {MAX_HEAD_BYTES} bytes"))

    def on_message_complete(self) -> None:
        if self.status and not self.complete:  # else an informational answer has ended
            assert self.parser is not None
            self.complete, self.reusable = True, self.parser.should_keep_alive()
            self.ended_at = time.monotonic()  # the engine's time runs from here, whenever the answer is read


class Connection(asyncio.Protocol):
    """One connection to an engine; it carries one request at a time.

    Attributes:
        answer: To the present request.
        idle_since: When the last answer had come, by the monotonic clock in seconds.
        paused: The socket is not read, since nobody reads the answer.
        release: Takes it back once its request has ended; with ``ended`` if that was said before.
    """

    __slots__ = ("_on_lost", "_transport", "answer", "idle_since", "origin", "paused", "release", "state")

    def __init__(self, origin: Origin, on_lost: Callable[[Connection], None], release: Callable[..., None]) -> None:
        self.state, self.origin, self._on_lost, self.release = ConnectionState.IDLE, origin, on_lost, release
        self.idle_since, self.paused = 0.0, False
        self.answer: Body | None = None
        self._transport: asyncio.Transport | None = None

    def send(self, message: bytes, *, head_only: bool, limit_s: float | None = None) -> Body:
        """Send a request on an idle connection; ``limit_s`` is for the whole answer, or until ``Body.limit_reads``.

        ``httpx.ReadError``: the engine has closed it.
        """
        if self.state is not ConnectionState.IDLE or self._transport is None:  # uvloop may tell of it before this runs
            raise httpx.ReadError("the engine closed the connection at once")
        self.state = ConnectionState.ACTIVE
        self.answer = Body(self, head_only=head_only, limit_s=limit_s)
        self._transport.write(message)
        return self.answer

    def rest(self) -> bool:
        """End a request; return whether the connection can carry another one, else it is closed, unless its end follows."""
        answer, state = self.answer, self.state
        if answer is None:
            self.close()
            return False
        if answer.over and not answer.complete and answer.fault is None and state is ConnectionState.ACTIVE:
            answer.stop_timer()
            answer.timer = asyncio.get_running_loop().call_later(LAST_CHUNK_S, self.close)
            self.state = ConnectionState.ENDING
            answer.parts.clear()
            if self.paused:
                self.resume_reading()
            return False
        self.answer, self.idle_since = None, answer.ended_at
        answer.parser = None
        answer.parts.clear()
        answer.stop_timer()
        if answer.waiter is not None:  # somebody still reads
            answer.fault = httpx.ReadError("the answer was closed")
            answer.wake()
        fresh, open_ = time.monotonic() - self.idle_since <= KEEP_ALIVE_S, state is not ConnectionState.CLOSED
        if answer.complete and answer.reusable and fresh and open_:
            self.state = ConnectionState.IDLE
            if self.paused:
                self.resume_reading()
            return True
        self.close()
        return False

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
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:  # noqa: C901, PLR0912  once a token: calls would cost more than this
        answer = self.answer
        if answer is None or answer.parser is None:  # whatever this is, the next answer would not be the next request's
            self.close()
            return
        try:
            answer.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            answer.fail(httpx.RemoteProtocolError(f"the engine's answer is no HTTP ({type(error).__name__})"))
        if self.state is ConnectionState.ENDING:
            answer.parts.clear()
            if answer.fault is not None:
                self.close()
            elif answer.complete:
                self.release(self, ended=True)
            return
        if not answer.status:
            answer.buffered += len(data)
            if answer.buffered > MAX_HEAD_BYTES:
                answer.head_too_long()
            return
        if answer.sink is not None and answer.parts:
            part = b"".join(answer.parts)
            answer.parts.clear()
            answer.waiting_since = time.monotonic()
            if not answer.sink(part):
                answer.sink = None
            elif not answer.complete:
                return
        elif answer.parts:
            answer.buffered += len(data)
        if answer.buffered > READ_BUFFER_BYTES and not self.paused and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()
        if answer.waiter is not None and not answer.waiter.done():
            answer.waiter.set_result(None)

    def eof_received(self) -> None:
        if self.answer is not None:
            self.answer.reusable = False
        if self.state is ConnectionState.IDLE:
            self.state = ConnectionState.CLOSED

    def connection_lost(self, exc: Exception | None) -> None:
        self.state, answer = ConnectionState.CLOSED, self.answer
        if answer is not None and not answer.complete:
            if exc is None and answer.status and answer.ends_at_close:
                answer.complete = True
                answer.wake()
            elif exc is None:
                answer.fail(httpx.RemoteProtocolError("the engine closed the connection before the end of its answer"))
            else:
                answer.fail(httpx.ReadError(f"the connection broke ({type(exc).__name__})"))
        self._transport = None
        self._on_lost(self)


class EngineTransport(httpx.AsyncBaseTransport):
    """Connections to engines, used again one after another.

    Of httpx's times (``request.extensions["timeout"]``, in seconds) ``connect``, ``pool`` and ``read`` are kept. Other than
    there, ``read`` is for the whole answer, unless its reader limits each read (``Body.limit_reads``). Beyond
    ``max_requests`` at once (0: any number) further ones wait for at most the ``pool`` time. ``ca`` names authorities that
    are trusted besides the system's.
    """

    def __init__(self, max_requests: int = 0, *, ca: Path | None = None, resolver: Resolver | None = None) -> None:
        self._idle: dict[Origin, deque[Connection]] = {}
        self._connections: set[Connection] = set()
        self._slots = asyncio.Semaphore(max_requests) if max_requests else None
        self._max_requests = max_requests
        self._closed_old_at = 0.0
        self._ca = ca
        self._resolver = Resolver() if resolver is None else resolver
        self._reachable: dict[Origin, socket.AddressFamily] = {}  # family in which the last connection was made
        self._ssl: ssl.SSLContext | None = None
        self._closed = False

    def alike(self, max_requests: int = 0) -> EngineTransport:
        """Return a transport with connections of its own, which trusts the same authorities and knows the same names."""
        return EngineTransport(max_requests, ca=self._ca, resolver=self._resolver)

    def allow(self, max_requests: int) -> None:
        if self._slots is not None:
            for _ in range(max_requests - self._max_requests):
                self._slots.release()
            self._max_requests = max(max_requests, self._max_requests)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request for one of httpx's clients."""
        url, headers = request.url, request.headers.raw
        message = _message(b"%b %b HTTP/1.1" % (request.method.encode("ascii"), url.raw_path), headers, request.read())
        times = request.extensions.get("timeout") or {}
        answer = await self.send(_origin(url), message, times, head_only=request.method == "HEAD")
        return httpx.Response(answer.status, headers=answer.headers, stream=answer)

    async def send(
        self, origin: Origin, message: bytes, times: Mapping[str, float | None], *, head_only: bool = False
    ) -> Body:
        """Send a request; return once the head of its answer has come. Close the answer.

        Raises:
            httpx.PoolTimeout: As many requests as may be were at work for too long.
            httpx.ConnectTimeout: No connection was made in time.
            httpx.ConnectError: None could be made.
            httpx.ReadError: The connection broke.
            httpx.ReadTimeout: The head did not come in time.
            httpx.RemoteProtocolError: It was closed before the answer's end, or what came is no HTTP.
        """
        if self._closed:
            raise RuntimeError("the transport is closed")
        slots = self._slots
        if slots is not None:
            await (slots.acquire() if not slots.locked() else self._wait_for_slot(slots, times.get("pool")))
        connection: Connection | None = None
        answer: Body | None = None
        try:
            kept = connection = self._take_idle(origin)
            while True:
                connection = connection or await self._connect(origin, times.get("connect"))
                try:
                    answer = connection.send(message, head_only=head_only, limit_s=times.get("read"))
                    await answer.head()
                except (httpx.ReadError, httpx.RemoteProtocolError):
                    heard = answer is not None and (answer.status or answer.buffered)
                    if connection is not kept or heard or self._closed:
                        raise
                    kept.rest()  # it was closed before the request came: any other connection will do
                    connection = answer = None
                else:
                    return answer
        except BaseException:
            if connection is not None:
                self._connections.discard(connection)
                connection.rest()
                connection.close()  # its whole answer may have come, and nobody wants it
            if slots is not None:
                slots.release()
            raise

    async def aclose(self) -> None:
        self._closed = True
        for connection in list(self._connections):
            connection.close()
        self._idle.clear()

    async def _wait_for_slot(self, slots: asyncio.Semaphore, limit_s: float | None) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await slots.acquire()
        except TimeoutError:
            raise httpx.PoolTimeout(f"no connection was free within {limit_s:g} s") from None

    def _take_idle(self, origin: Origin) -> Connection | None:
        """Return the connection that was used last, which the engine is the least likely to have closed by now."""
        idle = self._idle.get(origin)
        if not idle:
            return None
        connection = idle.pop()
        if connection.state is ConnectionState.IDLE and time.monotonic() - connection.idle_since <= KEEP_ALIVE_S:
            return connection
        connection.close()  # and so are all before it
        while idle:
            idle.pop().close()
        return None

    async def _connect(self, origin: Origin, limit_s: float | None) -> Connection:
        scheme, host, _ = origin
        options: dict[str, Any] = {}
        if scheme == "https":
            options = {"ssl": self._tls(), "server_hostname": host}
        make = partial(Connection, origin, self._lost, self._release)
        try:
            async with asyncio.timeout(limit_s):
                connection = await self._open(make, origin, options)
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection within {limit_s:g} s" if limit_s else "no connection") from None
        except socket.gaierror as error:
            raise httpx.ConnectError("its name cannot be resolved") from error
        except ssl.SSLError as error:
            raise httpx.ConnectError(f"TLS: {why_untrusted(error)}") from error
        except OSError as error:
            why = "TLS: no handshake" if scheme == "https" and not error.strerror else error.strerror or str(error)
            raise httpx.ConnectError(why.lower()) from error
        self._connections.add(connection)
        if self._closed:
            connection.close()
            raise httpx.ReadError("the transport was closed")
        return connection

    async def _open(self, make: Callable[[], Connection], origin: Origin, options: Mapping[str, Any]) -> Connection:
        """Connect to the first address of a host that answers: they are tried side by side (RFC 8305)."""
        _, host, port = origin
        loop = asyncio.get_running_loop()
        if _is_address(host):
            _, connection = await loop.create_connection(make, host, port, **options)
            return connection
        addresses = await self._resolver.addresses(host, port)
        # The family that was reached before goes first: otherwise each connection would wait for the other one in vain.
        last = self._reachable.get(origin)
        in_order = sorted(addresses, key=lambda address: address[0] != last)
        sock = await _connect_first(in_order)
        self._reachable[origin] = socket.AddressFamily(sock.family)
        _, connection = await loop.create_connection(make, sock=sock, **options)
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
        """Keep a connection for further requests, if it can carry them; ``ended``: its request was over before."""
        if self._slots is not None and not ended:
            self._slots.release()
        if not connection.rest():
            return
        if self._closed:
            connection.close()
            return
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if (now := time.monotonic()) - self._closed_old_at >= KEEP_ALIVE_S:
            self._close_old(now)

    def _close_old(self, now: float) -> None:
        """Close connections that are not used again; a host that has vanished closes none itself."""
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


def json_post(url: str, headers: Headers, content: bytes) -> tuple[Origin, bytes]:
    """Return where a POST request with a JSON body goes, and its bytes; ``httpx.LocalProtocolError``: see ``_message``."""
    origin, target, host = _address(url)
    usual = (b"host", host), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))
    return origin, _message(b"POST %b HTTP/1.1" % target, (*usual, *headers), content)


async def _connect_first(addresses: Sequence[AddressInfo]) -> socket.socket:
    """Return a connection to the first address that answers; ``OSError``: none does, its text names none of them."""
    try:
        return await start_connection(addresses, happy_eyeballs_delay=NEXT_ADDRESS_S, interleave=1)
    except RuntimeError as error:  # uvloop's, for a socket that another attempt has closed meanwhile
        raise OSError(str(error)) from error
    except OSError as error:
        if error.errno is None:
            raise OSError(errno.EHOSTUNREACH, "none of its addresses takes connections") from error
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
    read = httpx.URL(url)
    return _origin(read), read.raw_path, read.netloc


def _origin(url: httpx.URL) -> Origin:
    return url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80)


def _message(head: bytes, headers: Headers, content: bytes) -> bytes:
    """Return a request as it is sent; ``httpx.LocalProtocolError``: a header holds a line break or a NUL."""
    for header in headers:
        head += b"\r\n%b: %b" % header
    if head.count(b"\n") + head.count(b"\r") != 2 * len(headers) or b"\0" in head:
        raise httpx.LocalProtocolError("a header holds a line break or a NUL")
    return b"%b\r\n\r\n%b" % (head, content)


async def body_of(body: Body, limit: int | None = None) -> bytes:
    found: list[bytes] = []
    size = 0
    try:
        async for part in body:
            found.append(part)
            size += len(part)
            if limit is not None and size > limit:
                break
    finally:
        await body.aclose()
    return b"".join(found)
