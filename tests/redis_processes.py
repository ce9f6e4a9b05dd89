"""Real Redis servers in arrangements: a cluster, and an address that leads to another server after a failover."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from redis import Redis

from tests.conftest import RedisServer
from tests.ports import reserved_ports
from tests.waiting import wait_until

CLUSTER_TIMEOUT_S = 60


class Relay:
    """An address whose new connections lead to the present target, while open ones stay with theirs."""

    def __init__(self, target: RedisServer) -> None:
        self.target = target
        # The ports that connections were made to, in order.
        self.opened: list[int] = []
        (self.port,) = reserved_ports()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._open: set[asyncio.Task[None]] = set()

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        port = self.target.port
        self.opened.append(port)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_pipe(reader, far_writer), _pipe(far_reader, writer))
        # asyncio's server would report a task that was cancelled.
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._open.discard(task)

    async def aclose(self) -> None:
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


@asynccontextmanager
async def relay_to(target: RedisServer) -> AsyncIterator[Relay]:
    relay = Relay(target)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", relay.port)
    try:
        yield relay
    finally:
        server.close()
        await relay.aclose()
        await server.wait_closed()


@contextmanager
def redis_with(*options: str) -> Iterator[RedisServer]:
    redis = RedisServer(*options)
    try:
        yield redis
    finally:
        redis.kill()


@contextmanager
def redis_cluster(folder: Path, nodes: int = 3) -> Iterator[list[RedisServer]]:
    """Run a Redis Cluster whose nodes share the hash slots."""
    servers: list[RedisServer] = []
    try:
        for number in range(nodes):
            bus = str(reserved_ports()[0])
            place = folder / str(number)
            place.mkdir()
            options = ["--cluster-enabled", "yes", "--cluster-port", bus]
            options += ["--dir", str(place), "--cluster-node-timeout", "2000"]
            servers.append(RedisServer(*options))
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        command = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
        subprocess.run(
            command, check=True, capture_output=True, timeout=CLUSTER_TIMEOUT_S
        )
        wait_until(
            lambda: all(map(_knows_all_slots, servers)), "all nodes to know all slots"
        )
        yield servers
    finally:
        for server in servers:
            with suppress(ProcessLookupError):
                server.stop()


def _knows_all_slots(server: RedisServer) -> bool:
    with Redis.from_url(server.url, decode_responses=True) as redis:
        return bool(redis.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
