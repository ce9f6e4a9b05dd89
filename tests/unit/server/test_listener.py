"""New clients do not wait behind busy ones: all connections that wait are accepted at one turn of the event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from router.api.problems import refusal
from router.lifecycle import ServerState
from router.server.http_protocol import protocol_for
from router.server.listener import ACCEPTED_A_TURN, Listener
from router.server.server import Server
from router.server.settings import ServerSettings, TlsSettings
from router.server.tls import Tls
from tests.unit.certificates import Authority
from tests.unit.own_router import own_router
from tests.waiting import until, within

pytestmark = pytest.mark.anyio
CLIENTS = 64
# The loop sees that the socket is readable, accepts connections and makes their protocols in so many turns.
TURNS = 8


class Counting(asyncio.Protocol):
    """A protocol that counts its connections."""

    def __init__(self, made: list[Counting]) -> None:
        self._made = made

    def connection_made(self, transport: Any) -> None:
        self._made.append(self)
        transport.close()


class Exhausted(socket.socket):
    """A listening socket of a process that may open no more files, for as long as ``error`` is set."""

    error: int | None = errno.EMFILE
    attempts = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.attempts += 1
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return super().accept()


def connected(clients: ExitStack, port: int, count: int) -> list[socket.socket]:
    """Return connections that wait to be accepted; the event loop does not run meanwhile."""
    address = ("127.0.0.1", port)
    return [
        clients.enter_context(socket.create_connection(address, timeout=20))
        for _ in range(count)
    ]


def highest_file(process: int) -> int:
    """Return the highest number of a process's open files."""
    return max(int(file.name) for file in Path(f"/proc/{process}/fd").iterdir())


async def turns(count: int = TURNS) -> None:
    """Let the event loop make so many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def serving(tls: Tls | None = None) -> AsyncIterator[tuple[Server, int]]:
    """Run the router's server with an empty application; yield it with its port."""
    settings = ServerSettings()
    server = Server(
        Starlette(),
        ServerState(),
        settings=settings,
        protocol=protocol_for(settings, refusal),
        tls=tls,
    )
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as sock:
        task = asyncio.create_task(server.serve(sockets=[sock]))
        await until(lambda: server.started)
        try:
            yield server, sock.getsockname()[1]
        finally:
            server.should_exit = True
            await within(task, "the server to end")


async def test_new_clients_do_not_wait_for_one_another() -> None:
    """After a few turns of the event loop all 64 clients that came at once are connected."""
    async with serving() as (server, port):
        with ExitStack() as clients:
            connected(clients, port, CLIENTS)
            await turns()
            assert len(server.server_state.connections) == CLIENTS
        await until(lambda: not server.server_state.connections)


async def test_clients_that_come_at_once_are_served_over_tls(tmp_path: Path) -> None:
    """64 clients are answered over TLS, and one that never ends its handshake does not keep the server from ending."""
    authority = Authority(tmp_path)
    files = authority.issue("server")
    trust = ssl.create_default_context(cafile=authority.ca)

    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trust, server_hostname="localhost"
        )
        writer.write(
            b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
        return answer

    async with serving(
        Tls(TlsSettings(certificate=files.certificate, key=files.key))
    ) as (_, port):
        with ExitStack() as clients:
            connected(clients, port, 1)
            answers = await within(
                asyncio.gather(*(ask(port) for _ in range(CLIENTS))), "all answers"
            )
            assert {answer.split(b"\r\n")[0] for answer in answers} == {
                b"HTTP/1.1 404 Not Found"
            }


async def test_more_than_fit_into_a_turn_are_accepted_in_the_next() -> None:
    """Open streams get their turn between two batches, and no client is forgotten."""
    made: list[Counting] = []
    with (
        socket.create_server(("127.0.0.1", 0), backlog=1024) as sock,
        ExitStack() as clients,
    ):
        listener = Listener(sock, lambda: Counting(made), {})
        connected(clients, sock.getsockname()[1], ACCEPTED_A_TURN + 10)
        listener.start()
        await until(lambda: len(made) == ACCEPTED_A_TURN + 10)
        listener.close()


async def test_who_waits_when_it_closes_is_left_to_the_other_router() -> None:
    """Two routers share the socket: a connection that the first has not accepted is accepted by the second."""
    first: list[Counting] = []
    second: list[Counting] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as sock,
        sock.dup() as shared,
        ExitStack() as clients,
    ):
        old = Listener(sock, lambda: Counting(first), {})
        new = Listener(shared, lambda: Counting(second), {})
        old.start()
        await turns()
        old.close()
        connected(clients, sock.getsockname()[1], 3)
        await turns()
        new.start()
        await until(lambda: len(second) == 3)
        new.close()
        assert first == []


@pytest.mark.parametrize(
    "error", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EPERM]
)
async def test_a_socket_that_cannot_be_accepted_from_is_left_alone_for_a_while(
    error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The socket stays readable, so to try at every turn would use up a core. The log says why once."""
    made: list[Counting] = []
    with Exhausted() as sock, ExitStack() as clients:
        sock.error = error
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        listener = Listener(sock, lambda: Counting(made), {})
        connected(clients, sock.getsockname()[1], 2)
        listener.start()
        await until(lambda: sock.attempts)
        await turns(100)
        attempts = sock.attempts
        # The listener tries again by itself.
        await until(lambda: sock.attempts > attempts)
        assert attempts < 10
        sock.error = None
        await until(lambda: len(made) == 2)
        listener.close()
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING
    ]
    assert len(warnings) == 1
    assert os.strerror(error) in warnings[0]


async def test_a_client_that_has_left_hides_no_other() -> None:
    """Systems report such a client as an error of ``accept``; the next client is accepted all the same."""

    class Aborted(Exhausted):
        def accept(self) -> tuple[socket.socket, Any]:
            try:
                return super().accept()
            finally:
                self.error = None

    made: list[Counting] = []
    with Aborted() as sock, ExitStack() as clients:
        sock.error = errno.ECONNABORTED
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        listener = Listener(sock, lambda: Counting(made), {})
        connected(clients, sock.getsockname()[1], 1)
        listener.start()
        await turns()
        listener.close()
        assert len(made) == 1


async def test_a_router_whose_files_run_out_serves_again_when_it_has_some(
    tmp_path: Path,
) -> None:
    """New clients wait meanwhile, and the log names the limit; what was connected before is served."""
    async with own_router(tmp_path) as router:
        assert await router.status() == 200
        number = router.process.pid
        highest = highest_file(number)
        _, hard = resource.prlimit(number, resource.RLIMIT_NOFILE)
        soft, _ = resource.prlimit(number, resource.RLIMIT_NOFILE, (highest + 1, hard))
        with ExitStack() as clients:
            waiting = connected(clients, router.port, 40)
            await until(lambda: "new connections wait" in router.errors.read_text())
            assert "ulimit -n" in router.errors.read_text()
            resource.prlimit(number, resource.RLIMIT_NOFILE, (soft, hard))
            request = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
            for client in waiting:
                client.sendall(request)
                answer = await asyncio.to_thread(client.recv, 100)
                assert answer.startswith(b"HTTP/1.1 200 OK")
        assert router.errors.read_text().count("new connections wait") == 1
        assert await router.status() == 200
