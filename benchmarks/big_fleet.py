"""What a fleet of a hundred replicas costs its router, beside the same router with three.

usage: python benchmarks/big_fleet.py [--replicas 100] [--seconds 5] [--deaths 5]

Engines are stubs that answer at once, many of them in one process; ``discovery.file`` names them, and the tiers get them in
turn. One more, the victim, has a process of its own, which is killed, or stopped so that its connections stay open.
CPU time of a request is without what the router takes while idle. ``noticed`` is the time until ``GET /tiers`` no longer
shows it as ready, without a request that would have found it out.
The last row kills it while requests are served, and counts those that fail. The router has core 0 to itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import httpx
import uvloop
from measure import cpu_s, free_port, process, wait_for
from stub_engine import Stub

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psutil

TIERS = ("fast", "balanced", "precise")
BODY = {
    "prompt": "Can you explain how tides work, and why there are two of them a day?",
    "stream": False,
}
CONNECTIONS, KILL_CLIENTS = 8, 16
SETTLE_S = 5.0  # after which a router with a new fleet is taken to be idle
LIMIT_S = 120.0


@dataclass(slots=True)
class Row:
    """What a router with one fleet needs. CPU in microseconds a request; memory in MB.

    Attributes:
        ready_s: Until all replicas serve.
        idle: Share of a core while nothing is asked: probes.
        noticed_s: How long each death was not noticed, by its kind.
        served: Requests while a replica was killed; ``failed``: those that were not answered.
    """

    ready_s: float = 0.0
    rss_mb: float = 0.0
    idle: float = 0.0
    per_second: dict[str, float] = field(default_factory=dict)
    cpu_us: dict[str, float] = field(default_factory=dict)
    noticed_s: dict[str, list[float]] = field(default_factory=dict)
    served: int = 0
    failed: int = 0


async def engines(count: int) -> None:
    """Serve so many stubs in this process until it is killed, and print their ports."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Stub, "127.0.0.1", 0) for _ in range(count)]
    print(
        json.dumps([server.sockets[0].getsockname()[1] for server in servers]),
        flush=True,
    )
    await asyncio.gather(*(server.serve_forever() for server in servers))


@contextmanager
def stubs(count: int) -> Iterator[list[str]]:
    """Run so many stubs in a process of their own; yield their URLs."""
    argv = [sys.executable, __file__, "--engines", str(count)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            yield [
                f"http://127.0.0.1:{port}"
                for port in json.loads(running.stdout.readline())
            ]
        finally:
            running.kill()


class Victim:
    """A stub that is killed, stopped and started again on its port."""

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = subprocess.Popen(
            [sys.executable, "benchmarks/stub_engine.py", str(self._port)],
            stdout=subprocess.DEVNULL,
        )
        wait_for(self._port)

    def send(self, number: int) -> None:
        """Send it a signal; wait for the end of one that is killed."""
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()


class Router:
    """A running router, and what is asked of it."""

    def __init__(self, port: int, process_: psutil.Process) -> None:
        self.port, self.process = port, process_
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30
        )

    def states(self) -> dict[str, str]:
        """Return the state of each replica by its URL."""
        tiers = self._client.get("/tiers").json()["tiers"]
        return {
            replica["url"]: replica["state"]
            for tier in tiers
            for replica in tier["replicas"]
        }

    def until(self, url: str, *, ready: bool) -> float:
        """Wait until a replica is ready, or is not; return how long that took."""
        began = time.perf_counter()
        while (self.states().get(url) == "ready") is not ready:
            assert time.perf_counter() - began < LIMIT_S, self.states()
            time.sleep(0.02)
        return time.perf_counter() - began

    def until_all_ready(self, count: int) -> float:
        """Wait until so many replicas are ready; return how long that took."""
        began = time.perf_counter()
        while list(self.states().values()).count("ready") < count:
            assert time.perf_counter() - began < LIMIT_S, self.states()
            time.sleep(0.1)
        return time.perf_counter() - began


@contextmanager
def router(folder: Path, urls: list[str]) -> Iterator[Router]:
    """Run a router on a core of its own in front of engines that a file names."""
    file, port = folder / "fleet.json", free_port()
    file.write_text(
        json.dumps(
            {tier: urls[number :: len(TIERS)] for number, tier in enumerate(TIERS)}
        )
    )
    env = {
        **os.environ,
        "QARR_DISCOVERY__FILE": str(file),
        "QARR_POLICY__PROFILES": str(folder),
        "QARR_ENGINE__LOG_DIR": str(folder),
        "QARR_SERVER__RUNTIME_DIR": str(folder),
        "QARR_ENGINE__CHECK_TOLERANCE": "0",  # stubs have no log-probabilities
    }
    argv = [".venv/bin/qarr", "serve", "--port", str(port)]
    with process(argv, 0, env=env, log=folder / "router.log") as running:
        wait_for(port, "/healthz")
        yield Router(port, running)


async def ask(
    port: int, path: str, seconds: float, connections: int
) -> tuple[int, int]:
    """Ask over kept connections as fast as is answered; return the answers, and those that are not 200."""
    raw = json.dumps(BODY).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    stop, done, failed = time.perf_counter() + seconds, 0, 0

    async def client() -> None:
        nonlocal done, failed
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < stop:
            writer.write(head.encode() + raw)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            at = answer.index(b"content-length:") + 15
            await reader.readexactly(int(answer[at:].split(b"\r\n", 1)[0]))
            done += 1
            failed += b" 200 " not in answer[:16]
        writer.close()

    await asyncio.gather(*(client() for _ in range(connections)))
    return done, failed


def measured(size: int, seconds: float, deaths: int) -> Row:
    """Measure a router with so many replicas."""
    row, victim = Row(), Victim()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            stubs(size - 1) as urls,
            router(Path(folder), [*urls, victim.url]) as running,
        ):
            row.ready_s = running.until_all_ready(size)
            time.sleep(SETTLE_S)
            row.idle = cpu_share(running.process, seconds)
            for path in ("/route", "/generate"):
                before, began = cpu_s(running.process), time.perf_counter()
                done, failed = asyncio.run(
                    ask(running.port, path, seconds, CONNECTIONS)
                )
                assert not failed
                took_s = time.perf_counter() - began
                row.per_second[path] = done / took_s
                row.cpu_us[path] = (
                    (cpu_s(running.process) - before - row.idle * took_s) / done * 1e6
                )
            row.rss_mb = running.process.memory_info().rss / 1e6
            die(running, victim, row, deaths)
    finally:
        victim.send(signal.SIGKILL)
    return row


def cpu_share(watched: psutil.Process, seconds: float) -> float:
    """Return the share of a core that a process takes now."""
    before, began = cpu_s(watched), time.perf_counter()
    time.sleep(seconds)
    return (cpu_s(watched) - before) / (time.perf_counter() - began)


def die(running: Router, victim: Victim, row: Row, deaths: int) -> None:
    """Let a replica die again and again: killed, stopped, and killed while requests are served."""
    row.noticed_s = {"killed": [], "hung": []}
    for _ in range(deaths):
        victim.send(signal.SIGKILL)
        row.noticed_s["killed"].append(running.until(victim.url, ready=False))
        victim.start()
        running.until(victim.url, ready=True)
    for _ in range(max(deaths // 2, 1)):
        victim.send(signal.SIGSTOP)
        row.noticed_s["hung"].append(running.until(victim.url, ready=False))
        victim.send(signal.SIGCONT)
        running.until(victim.url, ready=True)

    async def killed_under_load() -> tuple[int, int]:
        asking = asyncio.create_task(ask(running.port, "/generate", 3.0, KILL_CLIENTS))
        await asyncio.sleep(1)
        victim.send(signal.SIGKILL)
        return await asking

    row.served, row.failed = asyncio.run(killed_under_load())


def main() -> None:
    """Measure both fleets and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--deaths", type=int, default=5)
    parser.add_argument("--engines", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engines is not None:
        uvloop.run(engines(args.engines))
        return
    os.sched_setaffinity(0, {(os.cpu_count() or 1) - 1})
    sizes = (len(TIERS), args.replicas)
    rows = [measured(size, args.seconds, args.deaths) for size in sizes]
    print(f"$ python {' '.join(sys.argv)}\n")
    print(
        f"{'replicas':34}" + "".join(f"{size:10}" for size in sizes) + f"{'ratio':>10}"
    )
    for name, (one, other) in figures(rows).items():
        print(
            f"{name:34}{one:10.2f}{other:10.2f}{f'x{other / one:.2f}' if one else '-':>10}"
        )


def figures(rows: list[Row]) -> dict[str, list[Any]]:
    """Return what is printed, by name."""
    found: dict[str, list[Any]] = {
        "all ready after, s": [row.ready_s for row in rows],
        "resident set, MB": [row.rss_mb for row in rows],
        "idle: share of a core": [row.idle for row in rows],
    }
    for path in rows[0].per_second:
        found[f"{path} a second"] = [row.per_second[path] for row in rows]
        found[f"{path}, CPU-us each"] = [row.cpu_us[path] for row in rows]
    for kind in rows[0].noticed_s:
        found[f"{kind}: noticed after, s (median)"] = [
            median(row.noticed_s[kind]) for row in rows
        ]
        found[f"{kind}: noticed after, s (worst)"] = [
            max(row.noticed_s[kind]) for row in rows
        ]
    found["killed under load: served"] = [float(row.served) for row in rows]
    found["killed under load: failed"] = [float(row.failed) for row in rows]
    return found


if __name__ == "__main__":
    main()
