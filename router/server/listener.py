"""Accept clients' connections: all that wait, at each turn of the event loop.

uvloop's own servers accept one connection a turn. On a busy router a turn takes milliseconds, so that the last of 64 new
clients would wait for 64 turns before its request is even read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

from router.server.connection_limit import files_for_clients

log = logging.getLogger(f"qarr.{__name__}")
ACCEPTED_A_TURN = 256  # At most: open streams wait meanwhile, for some 15 ms.
# Time after a failed attempt, for example while the process may open no more files.
RETRY_S = 0.1
WARNING_INTERVAL_S = 60.0


class Listener:
    """Accepts the connections of one listening socket, from ``start`` to ``close``.

    ``tls_options`` are those of ``loop.connect_accepted_socket``; without any, connections are plain.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls_options: Mapping[str, Any],
    ) -> None:
        self._sock = sock
        self._make_protocol = make_protocol
        self._tls_options = tls_options
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._warned_at: float | None = None
        # Connections that were accepted, and have no protocol yet.
        self.opening: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._sock.setblocking(False)
        self._accept_when_ready()

    def close(self) -> None:
        """Accept no more; connections that wait in the socket's queue are left to whoever shares it."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._loop.remove_reader(self._sock)

    async def finish_opening(self, limit_s: float) -> None:
        """Wait until the accepted connections have their protocols; end those that are still in a TLS handshake then."""
        if not self.opening:
            return
        _, unfinished = await asyncio.wait(self.opening, timeout=limit_s)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)

    def _accept_when_ready(self) -> None:
        self._retry = None
        self._loop.add_reader(self._sock, self._accept_waiting)

    def _accept_waiting(self) -> None:
        max_files = files_for_clients()
        for _ in range(ACCEPTED_A_TURN):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:  # This client has left; others may wait.
                continue
            except OSError as error:
                self._pause(error.strerror or str(error))
                return
            self._start_opening(connection)
            # A new file has the lowest number that is free.
            if connection.fileno() >= max_files:
                self._pause("files run out")
                return

    def _start_opening(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        task = self._loop.create_task(self._open(connection), name="open a connection")
        self.opening.add(task)
        task.add_done_callback(self.opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, connection, **self._tls_options
            )
        except (
            OSError
        ) as error:  # ``ssl.SSLError`` is one. The transport has closed the connection.
            log.debug("a client's connection was not opened: %s", error)

    def _pause(self, why: str) -> None:
        """Leave the connections in the queue for a while: the socket stays readable, and trying on would take a core."""
        self._loop.remove_reader(self._sock)
        self._retry = self._loop.call_later(RETRY_S, self._accept_when_ready)
        now = self._loop.time()
        if self._warned_at is None or now - self._warned_at >= WARNING_INTERVAL_S:
            self._warned_at = now
            log.warning(
                "new connections wait (%s): if there are too few files, raise the limit (ulimit -n) or lower "
                "server.max_connections",
                why,
            )
