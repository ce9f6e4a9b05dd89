"""Accepts connections on a socket that several workers share, about as many in each.

All workers are woken by a connection. One with more connections than another leaves it to that one for a moment, and takes
it if it is still there then. What no worker has accepted stays in the kernel's queue, whichever worker ends.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import select
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from router.server.server import Server

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

    from router.workers.table import Table

log = logging.getLogger(f"qarr.{__name__}")
LEAVE_S = 0.001  # for which a connection is left to another worker
ACCEPTED = 16  # connections in a row, before open ones are served
EXHAUSTED_S = 1.0  # without free descriptors, until the next try
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Accepts until it is closed; the part of ``asyncio.Server`` that uvicorn uses.

    Args:
        sock: Listens.
        table: Where this worker shows its connections, and sees the others'.
        connections: The open ones; each adds itself.
        make_protocol: Called for each.
        tls_options: How the event loop is to speak TLS; none: it does not.
    """

    def __init__(
        self,
        sock: socket.socket,
        table: Table,
        connections: AbstractSet[asyncio.BaseProtocol],
        make_protocol: Callable[[], asyncio.BaseProtocol],
        tls_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.sockets, self._tls_options = [sock], tls_options
        self._sock, self._table, self._connections, self._make_protocol = sock, table, connections, make_protocol
        self._loop = asyncio.get_running_loop()
        self._entering: dict[asyncio.Task[None], asyncio.BaseProtocol] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._waiting = select.poll()
        self._waiting.register(sock, select.POLLIN)
        sock.setblocking(False)
        self._loop.add_reader(sock, self._ready)
        self.show()

    def show(self) -> None:
        """Show the present number of connections."""
        self._table.show_connections(self._open, accepts=not self._closed)

    def close(self) -> None:
        """Accept no more; those in the kernel's queue are the other workers'."""
        if self._closed:
            return
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._loop.remove_reader(self._sock)
        self.show()

    async def wait_closed(self) -> None:
        """Wait until every accepted connection has its protocol."""
        await asyncio.gather(*self._entering, return_exceptions=True)

    @property
    def _open(self) -> int:
        entering = sum(protocol not in self._connections for protocol in self._entering.values())
        return len(self._connections) + entering

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._ready)
        self._accept(left=True)
        self.show()

    def _wait(self, pause_s: float) -> None:
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(pause_s, self._listen)

    def _ready(self) -> None:
        self._accept(left=False)

    def _accept(self, *, left: bool) -> None:
        """Accept what waits; leave it to a worker with fewer connections, if it has not been left once already."""
        for _ in range(ACCEPTED):
            if not self._waiting.poll(0):
                return
            fewest = self._table.fewest_connections()
            if not left and fewest is not None and self._open > fewest:
                self._wait(LEAVE_S)
                return
            left = False
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                log.warning("no connection can be accepted for now: %s", error.strerror)
                self._wait(EXHAUSTED_S)
                return
            connection.setblocking(False)
            protocol = self._make_protocol()
            task = self._loop.create_task(self._enter(connection, protocol))
            self._entering[task] = protocol
            task.add_done_callback(self._entering.pop)
            self.show()

    async def _enter(self, connection: socket.socket, protocol: asyncio.BaseProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, **self._tls_options)
        except OSError:  # the client has gone already
            connection.close()


class WorkerServer(Server):
    """A server whose socket other workers share.

    Attributes:
        table: Set before it serves.
    """

    table: Table

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn's."""
        await self.lifespan.startup()
        assert sockets is not None
        connections = self.server_state.connections
        self._acceptors = [Acceptor(s, self.table, connections, self.make_protocol, self.tls_options) for s in sockets]
        self.servers = self._acceptors  # type: ignore[assignment]
        self.started = not self.lifespan.should_exit
        self.should_exit = self.should_exit or self.lifespan.should_exit

    def show(self) -> None:
        """Show the present number of connections."""
        for acceptor in self._acceptors if self.started else ():
            acceptor.show()

    def drain(self) -> None:
        """Finish the open answers, and refuse new ones, as after a first signal."""
        if self._server_state.open:
            self._signalled()

    def end(self) -> None:
        """Stop at once, as after a second signal."""
        self._server_state.end_all()
        self.force_exit = self.should_exit = True
