"""What it costs a request to be observed: CPU time of the router without and with exported traces.

usage: python benchmarks/observing_cost.py [--seconds 4] [--passes 5] [--connections 8]

One router a row, all in front of one stub engine, measured in turns so that the machine's moods fall on all of them alike.
Metrics and records, of which the page's traces are made, are in every row; the last row has Prometheus' page read every
second and one watcher on the live stream besides. Exported traces go over HTTP to a receiver in the load's process, which
drops them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from measure import free_port, load, process, stub, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psutil

BODY: dict[str, object] = {
    "prompt": "Can you explain how tides work, and why there are two of them a day?",
    "tier": "fast",
}
NOT_EXPORTED = "not exported (the default)"
EXPORTED = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}


def ratio(share: str) -> dict[str, str]:
    """Return the standard variables for a share of traces that is sampled."""
    return {
        **EXPORTED,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": share,
    }


ROWS: dict[str, dict[str, str]] = {
    NOT_EXPORTED: {},
    "exported, all": ratio("1"),
    "exported, 1 %": ratio("0.01"),
}
WATCHED = "not exported, page and metrics watched"


@dataclass(frozen=True, slots=True)
class Router:
    """A running router."""

    port: int
    process: psutil.Process


def main() -> None:
    """Measure every row and print it with its difference to the first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--connections", type=int, default=8)
    options = parser.parse_args()
    print(
        f"$ python benchmarks/observing_cost.py --seconds {options.seconds:g} --passes {options.passes}",
        flush=True,
    )
    os.sched_setaffinity(0, {(os.cpu_count() or 1) - 1})
    with ExitStack() as stack:
        routers = {
            name: stack.enter_context(router(more, stack))
            for name, more in ROWS.items()
        }
        figures: dict[str, list[float]] = {name: [] for name in [*routers, WATCHED]}
        for number in range(options.passes + 1):  # the first one warms up
            for name, found_before in figures.items():
                target = routers.get(name, routers[NOT_EXPORTED])
                found = asyncio.run(measured(target, options, watched=name == WATCHED))
                if number:
                    found_before.append(found)
    show(figures)


@contextmanager
def router(more: dict[str, str], stack: ExitStack) -> Iterator[Router]:
    """Run a router with further variables, in front of a stub of its own."""
    url, _ = stack.enter_context(stub())
    variables = dict(more)
    if "OTEL_EXPORTER_OTLP_PROTOCOL" in variables:
        variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = stack.enter_context(receiver())
    port = free_port()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "qarr.toml").write_text("")
    argv = ["env", *(f"{name}={value}" for name, value in variables.items())]
    argv += [
        ".venv/bin/qarr",
        "serve",
        "--config",
        str(folder / "qarr.toml"),
        "--fast",
        url,
        "--port",
        str(port),
    ]
    with process(argv, 0) as running:
        wait_for(port, "/readyz")
        yield Router(port, running)


@contextmanager
def receiver() -> Iterator[str]:
    """Take OTLP over HTTP and throw it away."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


async def measured(
    target: Router, options: argparse.Namespace, *, watched: bool
) -> float:
    """Return the router's CPU time a request, in microseconds."""
    watching = [asyncio.create_task(watch(target.port))] if watched else []
    result = await load(
        target.port,
        "/generate",
        BODY,
        target.process,
        connections=options.connections,
        seconds=options.seconds,
    )
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    return result.cpu_us


async def watch(port: int) -> None:
    """Read the live stream, and the metrics every second."""
    url = f"http://127.0.0.1:{port}"

    async def scrape(session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get(
                f"{url}/metrics", headers={"accept": "application/openmetrics-text"}
            ) as page:
                await page.read()
            await asyncio.sleep(1)

    async with aiohttp.ClientSession(trust_env=False) as session:
        scraping = asyncio.create_task(scrape(session))
        try:
            async with session.get(f"{url}/live") as live:
                async for _ in live.content.iter_any():
                    pass
        finally:
            scraping.cancel()


def show(figures: dict[str, list[float]]) -> None:
    """Print each row's median, its spread, and what it adds to the first row in the same pass."""
    first = next(iter(figures.values()))
    print(f"{'':38} CPU-us/request (least to most)   more than not exported")
    for name, values in figures.items():
        more = statistics.median(
            value - base for value, base in zip(values, first, strict=True)
        )
        share = statistics.median(
            value / base for value, base in zip(values, first, strict=True)
        )
        spread = f"({min(values):.0f} to {max(values):.0f})"
        print(
            f"{name:38} {statistics.median(values):8.0f} {spread:>16} {more:15.0f}  x{share:.2f}"
        )


if __name__ == "__main__":
    main()
