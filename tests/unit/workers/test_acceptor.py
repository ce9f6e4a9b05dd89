"""Connections on a socket that several acceptors share, here in one process, so that each is woken by each of them."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from router.workers import acceptor
from router.workers.acceptor import Acceptor
from tests.unit.own_engines import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from router.workers.table import Table

pytestmark = pytest.mark.anyio


class Connection(asyncio.Protocol):
    """Adds itself to the open ones."""

    def __init__(self, among: set[asyncio.BaseProtocol]) -> None:
        self.among = among

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.among.add(self)


class Worker:
    """An acceptor with the connections that it has.

    It stands in for ``Table`` too, of which an acceptor uses the numbers of connections only.
    """

    def __init__(self, sock: socket.socket, workers: list[Worker]) -> None:
        self.workers, self.accepts, self.shown = workers, True, 0
        self.open: set[asyncio.BaseProtocol] = set()
        table: Table = self  # type: ignore[assignment]
        self.acceptor = Acceptor(sock, table, self.open, lambda: Connection(self.open))

    @property
    def connections(self) -> int:
        return len(self.open)

    def show_connections(self, count: int, *, accepts: bool) -> None:
        self.shown, self.accepts = count, accepts

    def fewest_connections(self) -> int | None:
        others = (worker.shown for worker in self.workers if worker is not self and worker.accepts)
        return min(others, default=None)


@asynccontextmanager
async def workers(count: int) -> AsyncIterator[tuple[list[Worker], int]]:
    """Give workers that listen on one port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found: list[Worker] = []
        shared = [listening.dup() for _ in range(count)]
        found.extend(Worker(sock, found) for sock in shared)
        try:
            yield found, listening.getsockname()[1]
        finally:
            for worker, sock in zip(found, shared, strict=True):
                worker.acceptor.close()
                await worker.acceptor.wait_closed()
                sock.close()


def connect(port: int, count: int) -> list[socket.socket]:
    """Open connections before any worker accepts one."""
    return [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]


async def accepted(found: list[Worker], count: int) -> None:
    """Wait until all workers together have that many connections, and none leaves one to another any more."""
    await until(lambda: sum(worker.connections for worker in found) == count)
    await asyncio.sleep(2 * acceptor.LEAVE_S)


@pytest.mark.parametrize("count", [2, 3])
async def test_open_connections_are_divided_evenly(count: int) -> None:
    """Those that come one after another and those that come at once."""
    async with workers(count) as (found, port):
        opened = []
        for burst in (1, 1, 1, 1, 1, 1, 6, 12):
            opened += connect(port, burst)
            await accepted(found, len(opened))
        assert [worker.connections for worker in found] == [24 // count] * count
        for connection in opened:
            connection.close()


async def test_one_that_does_not_take_its_turn_is_not_waited_for() -> None:
    """A connection that nobody else takes is accepted by the worker that left it, whatever the others have."""
    async with workers(2) as (found, port):
        found[1].acceptor.close()
        found[1].accepts = True  # as a worker is seen whose loop is busy
        opened = connect(port, 40)
        await accepted(found, 40)
        assert [worker.connections for worker in found] == [40, 0]
        for connection in opened:
            connection.close()


async def test_one_that_closes_leaves_the_rest_to_the_others() -> None:
    """What it has not accepted waits in the kernel's queue."""
    async with workers(2) as (found, port):
        found[0].acceptor.close()
        opened = connect(port, 5)
        await accepted(found, 5)
        assert [worker.connections for worker in found] == [0, 5]
        for connection in opened:
            connection.close()


async def test_without_descriptors_it_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It says so, and accepts what waits as soon as there are some."""
    monkeypatch.setattr(acceptor, "EXHAUSTED_S", 0.01)

    class Exhausted(socket.socket):
        refusals = 2

        def accept(self) -> tuple[socket.socket, object]:
            if self.refusals:
                self.refusals -= 1
                raise OSError(24, "Too many open files")
            return super().accept()

    with socket.create_server(("127.0.0.1", 0)) as listening, Exhausted(fileno=listening.dup().detach()) as sock:
        found: list[Worker] = []
        found.append(Worker(sock, found))
        opened = connect(listening.getsockname()[1], 3)
        await accepted(found, 3)
        assert "no connection can be accepted for now: Too many open files" in caplog.text
        found[0].acceptor.close()
        for connection in opened:
            connection.close()
