"""A thousand streams open at once through one router process on one core: memory of each, and CPU.

usage: python benchmarks/open_streams.py [--streams 1000] [--seconds 10]

The router is alone on core 0; the stub engine and the clients share the other one. Each stream gets a token every two
seconds. Memory is the growth of the router's resident set, from when a few streams had come and gone, over the number of
streams; the stub engine's own is shown beside it. CPU is of the time in which all streams are open.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
from measure import free_port, process, stub, wait_for

if TYPE_CHECKING:
    import psutil

PAUSE_MS = 2000  # between two tokens of a stream; the stub sends 32, so a stream lasts 64 s
OPENING = 250  # streams that are being opened at once
WARM = 20  # streams that come and go before anything is measured
PROMPT = "Can you explain how tides work, and why there are two of them a day?"
CHAT = {"model": "fast", "messages": [{"role": "user", "content": PROMPT}], "stream": True}
ROWS: dict[str, tuple[str, dict[str, object]]] = {
    "/generate": ("/generate", {"prompt": PROMPT, "tier": "fast"}),
    "/generate, resumable": ("/generate", {"prompt": PROMPT, "tier": "fast", "resumable": True}),
    "/v1/chat/completions": ("/v1/chat/completions", CHAT),
}


@dataclass(slots=True)
class Row:
    """What one kind of stream costs.

    Attributes:
        kb: Growth of the router's resident set for each stream.
        engine_kb: The same of the stub engine.
        opening_us: CPU time of the router to open one.
        event_us: CPU time of the router for each event that it passed on.
        events: Passed on in the time that was measured.
    """

    kb: float = 0.0
    engine_kb: float = 0.0
    opening_us: float = 0.0
    event_us: float = 0.0
    events: int = 0


class Clients:
    """Open streams, all read as they come."""

    def __init__(self, port: int, path: str, body: dict[str, object]) -> None:
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(raw)}\r\n\r\n"
        )
        self._port, self._request = port, head.encode() + raw
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.events = 0

    async def open(self, count: int) -> None:
        """Open so many, and return when each has had its first event."""
        opening = asyncio.Semaphore(OPENING)

        async def one() -> None:
            async with opening:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                self._writers.append(writer)
                writer.write(self._request)
                head = await reader.readuntil(b"data: ")
                assert b" 200 " in head[:16], head
            self._tasks.append(asyncio.create_task(self._read(reader)))

        await asyncio.gather(*(one() for _ in range(count)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            self.events += data.count(b"data: ")

    async def close(self) -> None:
        """Leave them all."""
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def main() -> None:
    """Run every row, each on a router of its own, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    os.sched_setaffinity(0, {(os.cpu_count() or 1) - 1})
    rows = {name: _row(path, body, args.streams, args.seconds) for name, (path, body) in ROWS.items()}
    print(f"$ python benchmarks/open_streams.py --streams {args.streams} --seconds {args.seconds:g}\n")
    print(f"{'':24}KB/stream   stub's own   CPU-us to open   CPU-us/event   streams at 20 tokens/s on one core")
    for name, row in rows.items():
        most = 1e6 / (20 * row.event_us)
        print(
            f"{name:24}{row.kb:9.1f} {row.engine_kb:12.1f} {row.opening_us:16.0f} {row.event_us:14.1f} {most:14.0f}"
            f"   ({row.events} events)"
        )
    first = rows["/generate"]
    for name, row in list(rows.items())[1:]:
        print(
            f"{name} to /generate: memory x{row.kb / first.kb:.2f}, CPU an event x{row.event_us / first.event_us:.2f}"
        )


def _row(path: str, body: dict[str, object], streams: int, seconds: float) -> Row:
    settings = {
        "QARR_TIERS__FAST__MAX_IN_FLIGHT": str(streams + 100),
        "QARR_SERVER__MAX_CONNECTIONS": str(streams + 100),
        "QARR_SERVER__RESUME_STREAMS": str(streams + 100),
        "QARR_SERVER__RESUME_S": "1",
    }
    os.environ.update(settings)
    with stub() as (url, engine):
        port = free_port()
        with process([".venv/bin/qarr", "serve", "--fast", url, "--port", str(port)], 0) as router:
            wait_for(port, "/readyz")
            httpx.get(f"{url}/pace/{PAUSE_MS}", trust_env=False)  # only now: the router's warm-up takes several answers
            return asyncio.run(_measured(Clients(port, path, body), port, router, engine, streams, seconds))


async def _measured(
    clients: Clients, port: int, router: psutil.Process, engine: psutil.Process, streams: int, seconds: float
) -> Row:
    row = Row()
    await clients.open(WARM)
    await clients.close()
    await _idle(port)
    before, engine_before, cpu = router.memory_info().rss, engine.memory_info().rss, _cpu_s(router)
    await clients.open(streams)
    row.opening_us = (_cpu_s(router) - cpu) / streams * 1e6
    clients.events, cpu, began = 0, _cpu_s(router), time.monotonic()
    await asyncio.sleep(seconds)
    assert time.monotonic() - began < 2 * seconds, "the machine is too busy"
    row.events = clients.events
    row.event_us = (_cpu_s(router) - cpu) / max(row.events, 1) * 1e6
    row.kb = (router.memory_info().rss - before) / streams / 1024
    row.engine_kb = (engine.memory_info().rss - engine_before) / streams / 1024
    await clients.close()
    await _idle(port)
    return row


async def _idle(port: int) -> None:
    """Wait until no lease is out."""
    deadline = time.monotonic() + 30
    while True:
        async with httpx.AsyncClient(trust_env=False) as client:
            fleet = (await client.get(f"http://127.0.0.1:{port}/tiers")).json()
        if not sum(replica["in_flight"] for tier in fleet["tiers"] for replica in tier["replicas"]):
            return
        assert time.monotonic() < deadline, "leases are still out"
        await asyncio.sleep(0.5)


def _cpu_s(watched: psutil.Process) -> float:
    times = watched.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
