"""A thousand streams open at once through one router process on one core: memory of each, and CPU.

usage: python benchmarks/open_streams.py [--streams 1000] [--seconds 10]
       python benchmarks/open_streams.py --ttft [--streams 500] [--pause 200]

The router is alone on core 0; the stub engine and the clients share the other one. Each stream gets a token every two
seconds. Memory is the growth of the router's resident set, from when a few streams had come and gone, over the number of
streams; the stub engine's own is shown beside it. CPU is of the time in which all streams are open.

``--ttft`` measures what the router adds to the TTFT while streams are open: requests to the router and to a stub engine in
turn, each on a new connection and read to its end. An open stream, of another stub, has 32 tokens, ``--pause`` milliseconds
apart; another one follows it at once. The streams begin evenly spread over that time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

import httpx
from measure import free_port, process, stub, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psutil

# between two tokens of a stream; the stub sends 32, so a stream lasts 64 s
PAUSE_MS = 2000
EVERY_S = 0.02  # from one to the next
OPENING = 250  # streams that are being opened at once
WARM = 20  # streams that come and go before anything is measured
END = b"\r\n0\r\n\r\n"  # of an answer in chunks
PROMPT = "Can you explain how tides work, and why there are two of them a day?"
CHAT = {
    "model": "fast",
    "messages": [{"role": "user", "content": PROMPT}],
    "stream": True,
}
ROWS: dict[str, tuple[str, dict[str, object]]] = {
    "/generate": ("/generate", {"prompt": PROMPT, "tier": "fast"}),
    "/generate, resumable": (
        "/generate",
        {"prompt": PROMPT, "tier": "fast", "resumable": True},
    ),
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

    def __init__(
        self, port: int, path: str, body: dict[str, object], *, again: bool = False
    ) -> None:
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(raw)}\r\n\r\n"
        )
        self._port, self._request = port, head.encode() + raw
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.events = 0
        self._again = again

    async def open(self, count: int, within_s: float = 0.0) -> None:
        """Open so many, evenly within a time, and return when each has had its first event."""
        opening = asyncio.Semaphore(OPENING)

        async def one(number: int) -> None:
            await asyncio.sleep(within_s * number / count)
            async with opening:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                self._writers.append(writer)
                await self._ask(reader, writer)
            self._tasks.append(asyncio.create_task(self._read(reader, writer)))

        await asyncio.gather(*map(one, range(count)))

    async def ttft_ms(self) -> float:
        """Return the time from connecting to the first event of one more request."""
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        await self._ask(reader, writer)
        took = time.perf_counter() - began
        await reader.readuntil(END)
        writer.transport.abort()
        return took * 1000

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(self._request)
        head = await reader.readuntil(b"data: ")
        assert b" 200 " in head[:16], head

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        last = b""
        while data := await reader.read(65536):
            self.events += data.count(b"data: ")
            last = last[-len(END) :] + data
            if self._again and last.endswith(END):
                await self._ask(reader, writer)

    async def close(self) -> None:
        """Leave them all."""
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def main() -> None:
    """Run every row, each on a router of its own, and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, help="1000, with --ttft 500")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument(
        "--ttft",
        action="store_true",
        help="what the router adds to the TTFT while streams are open",
    )
    parser.add_argument(
        "--pause",
        type=int,
        default=200,
        help="with --ttft: milliseconds between a stream's tokens",
    )
    parser.add_argument(
        "--probes",
        type=int,
        default=400,
        help="with --ttft: requests whose TTFT is taken, each way",
    )
    args = parser.parse_args()
    os.sched_setaffinity(0, {(os.cpu_count() or 1) - 1})
    args.streams = args.streams or (500 if args.ttft else 1000)
    if args.ttft:
        _ttft(args.streams, args.pause, args.probes)
        return
    rows = {
        name: _row(path, body, args.streams, args.seconds)
        for name, (path, body) in ROWS.items()
    }
    print(
        f"$ python benchmarks/open_streams.py --streams {args.streams} --seconds {args.seconds:g}\n"
    )
    print(
        f"{'':24}KB/stream   stub's own   CPU-us to open   CPU-us/event   streams at 20 tokens/s on one core"
    )
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


@contextmanager
def _router(streams: int, **engines: str) -> Iterator[tuple[int, psutil.Process]]:
    """Run a router in front of engines, given by tier; yield its port and process."""
    settings = {
        "QARR_TIERS__FAST__MAX_IN_FLIGHT": str(streams + 100),
        "QARR_SERVER__MAX_CONNECTIONS": str(streams + 100),
        "QARR_SERVER__RESUME_STREAMS": str(streams + 100),
        "QARR_SERVER__RESUME_S": "1",
    }
    os.environ.update(settings)
    port = free_port()
    tiers = [part for tier, url in engines.items() for part in (f"--{tier}", url)]
    with process(
        [sys.executable, "-m", "router.cli.main", "serve", *tiers, "--port", str(port)],
        0,
    ) as router:
        wait_for(port, "/readyz")
        yield port, router


def _pace(url: str, pause_ms: int) -> None:
    """Set the stub's pace; a router that starts asks for several answers first."""
    httpx.get(f"{url}/pace/{pause_ms}", trust_env=False)


def _row(path: str, body: dict[str, object], streams: int, seconds: float) -> Row:
    with stub() as (url, engine), _router(streams, fast=url) as (port, router):
        _pace(url, PAUSE_MS)
        return asyncio.run(
            _measured(Clients(port, path, body), port, router, engine, streams, seconds)
        )


def _ttft(streams: int, pause_ms: int, probes: int) -> None:
    """Print the TTFT through the router and straight from the stub, without and with open streams."""
    print(
        f"$ python benchmarks/open_streams.py --ttft --streams {streams} --pause {pause_ms}\n"
    )
    print(
        f"{'TTFT in ms':20}{'p50: router':>12}{'stub':>8}{'added':>8}{'p99: router':>15}{'stub':>8}{'added':>8}"
    )
    for count in (0, streams):
        with (
            stub() as (paced, _),
            stub() as (quick, _),
            _router(streams, fast=paced, balanced=quick) as (port, router),
        ):
            _pace(paced, pause_ms)
            pairs, load = asyncio.run(
                _first_tokens(
                    port,
                    int(quick.rsplit(":", 1)[1]),
                    router,
                    count,
                    32 * pause_ms / 1000,
                    probes,
                )
            )
        columns = [*zip(*pairs, strict=True), [one - other for one, other in pairs]]
        figures = [
            quantiles(column, n=100)[share - 1]
            for share in (50, 99)
            for column in columns
        ]
        cells = "".join(
            f"{figure:{width}.2f}"
            for figure, width in zip(figures, (12, 8, 8, 15, 8, 8), strict=True)
        )
        print(f"{f'{count} open streams':20}{cells}   {load}")


async def _first_tokens(
    port: int,
    direct_port: int,
    router: psutil.Process,
    streams: int,
    length_s: float,
    probes: int,
) -> tuple[list[tuple[float, float]], str]:
    """Return TTFTs through the router and from the stub, in turn, and what the router carried meanwhile."""
    path, body = ROWS["/v1/chat/completions"]
    background = Clients(port, path, body, again=True)
    await background.open(streams, length_s)
    await asyncio.sleep(2)
    ours, direct = (
        Clients(p, path, {**body, "model": "balanced"}) for p in (port, direct_port)
    )
    pairs: list[tuple[float, float]] = []
    background.events, cpu, began = 0, _cpu_s(router), time.monotonic()
    for _ in range(probes):
        pairs.append((await ours.ttft_ms(), await direct.ttft_ms()))
        await asyncio.sleep(EVERY_S)
    took = time.monotonic() - began
    load = f"{background.events / took:.0f} events/s, {100 * (_cpu_s(router) - cpu) / took:.0f} % of a core"
    await background.close()
    await _idle(port)
    return pairs, load


async def _measured(
    clients: Clients,
    port: int,
    router: psutil.Process,
    engine: psutil.Process,
    streams: int,
    seconds: float,
) -> Row:
    row = Row()
    await clients.open(WARM)
    await clients.close()
    await _idle(port)
    before, engine_before, cpu = (
        router.memory_info().rss,
        engine.memory_info().rss,
        _cpu_s(router),
    )
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
    deadline = time.monotonic() + 30
    while True:
        async with httpx.AsyncClient(trust_env=False) as client:
            fleet = (await client.get(f"http://127.0.0.1:{port}/tiers")).json()
        if not sum(
            replica["in_flight"]
            for tier in fleet["tiers"]
            for replica in tier["replicas"]
        ):
            return
        assert time.monotonic() < deadline, "leases are still out"
        await asyncio.sleep(0.5)


def _cpu_s(watched: psutil.Process) -> float:
    times = watched.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
