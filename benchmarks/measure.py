"""Shared by the benchmarks: processes on one core each, a load generator, and percentiles."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]


def note(text: str) -> None:
    """Show progress on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


_HELD: list[socket.socket] = []


def free_port() -> int:
    """Return a free loopback port, held until this process ends: only who names it, as servers do, can bind there.

    Bound and not listening, Linux gives it to nobody who asks for any. SO_REUSEADDR is set after that, for the server.
    """
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _HELD.append(held)
    return int(held.getsockname()[1])


@contextmanager
def process(
    argv: Sequence[str],
    core: int | str | None,
    *,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[psutil.Process]:
    """Run a process, on one core (or a list, as taskset takes it) where there is more than one; stop its tree at the end."""
    pinned = (
        ["taskset", "-c", str(core), *argv]
        if core is not None and (os.cpu_count() or 1) > 1
        else list(argv)
    )
    with (log or Path(os.devnull)).open("wb") as output:
        running = subprocess.Popen(
            pinned, cwd=ROOT, env=env, stdout=output, stderr=output
        )
    started = psutil.Process(running.pid)
    try:
        yield started
    finally:
        of_tree = tree(started)
        running.terminate()
        try:
            running.wait(20)
        finally:
            for left in of_tree:
                with suppress(psutil.NoSuchProcess):
                    left.kill()


def tree(root: psutil.Process) -> list[psutil.Process]:
    """Return a process and all that it has started, as far as they live."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(root: psutil.Process) -> float:
    """Return the CPU time of a process and of all that it has started, in seconds."""
    found = 0.0
    for process_of_tree in tree(root):
        with suppress(psutil.NoSuchProcess):
            times = process_of_tree.cpu_times()
            found += float(times.user + times.system)
    return found


@contextmanager
def stub(delay_ms: float = 0) -> Iterator[tuple[str, psutil.Process]]:
    """Run the stub engine; yield its URL and process."""
    port = free_port()
    with process(
        [sys.executable, "benchmarks/stub_engine.py", str(port), str(delay_ms)], 1
    ) as running:
        wait_for(port)
        yield f"http://127.0.0.1:{port}", running


def wait_for(
    port: int,
    path: str = "",
    limit_s: float = 60,
    *,
    process: subprocess.Popen[bytes] | None = None,
) -> None:
    """Wait until a port accepts, or until a path on it answers 200, unless the process that should is gone."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as sock:
                if not path:
                    return
                sock.sendall(
                    f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
                )
                if b" 200 " in sock.recv(64):
                    return
        except OSError:
            pass
        if process is not None and process.poll() is not None:
            raise ChildProcessError(
                f"{process.args!r} ended with status {process.returncode}"
            )
        if time.monotonic() > deadline:
            raise TimeoutError(f"port {port} {path}")
        time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Result:
    """One run. Times in milliseconds, CPU in microseconds a request."""

    requests: int
    per_second: float
    total_p50: float
    total_p99: float
    first_p50: float
    cpu_us: float


async def load(
    port: int,
    path: str,
    body: dict[str, object],
    watched: psutil.Process,
    *,
    connections: int,
    seconds: float,
) -> Result:
    """Send requests over kept-alive connections as fast as they are answered; time first body byte and whole answer."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    request = head.encode() + raw
    firsts: list[float] = []
    totals: list[float] = []
    stop = time.perf_counter() + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < stop:
            started = time.perf_counter()
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in answer[:16], answer
            data = await reader.read(65536)
            firsts.append(time.perf_counter() - started)
            while not data.endswith(b"0\r\n\r\n"):
                data = data[-8:] + await reader.read(65536)
            totals.append(time.perf_counter() - started)
        writer.close()

    before, began = cpu_s(watched), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(connections)))
    took, cpu = time.perf_counter() - began, cpu_s(watched) - before
    ordered = sorted(totals)
    return Result(
        requests=len(totals),
        per_second=len(totals) / took,
        total_p50=statistics.median(totals) * 1000,
        total_p99=ordered[int(len(ordered) * 0.99)] * 1000,
        first_p50=statistics.median(firsts) * 1000,
        cpu_us=cpu / len(totals) * 1e6,
    )
