"""What the router costs: the same streamed answers direct from a stub engine, and through QARR, in one run.

usage: python benchmarks/proxy_overhead.py [--seconds 5] [--json FILE]

The stub and the load run on one core, the router on the other. Trust CPU time a request first; rates depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from measure import ROOT, Result, free_port, load, process, stub, wait_for

if TYPE_CHECKING:
    import psutil

PROMPT = "Can you explain how tides work, and why there are two of them a day?"
DIRECT = {"model": "stub", "messages": [{"role": "user", "content": PROMPT}], "stream": True}
ROUTED = {"prompt": PROMPT, "tier": "fast"}
RELAYED = {**DIRECT, "model": "fast"}


def main() -> None:
    """Run all rows and print them with their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    os.sched_setaffinity(0, {os.cpu_count() - 1 if os.cpu_count() else 0})
    rows: dict[str, dict[str, Result]] = {}
    for name, delay_ms, connections in (
        ("as fast as possible, 16 connections", 0, 16),
        ("5 ms a token, 32 connections", 5, 32),
    ):
        with stub(delay_ms) as (url, engine):
            direct = _best(
                int(url.rsplit(":", 1)[1]), "/v1/chat/completions", DIRECT, engine, connections, args.seconds
            )
            port = free_port()
            argv = [".venv/bin/qarr", "serve", "--fast", url, "--port", str(port)]
            with process(argv, 0) as router:
                wait_for(port, "/readyz")
                routed = _best(port, "/generate", ROUTED, router, connections, args.seconds)
                relayed = _best(port, "/v1/chat/completions", RELAYED, router, connections, args.seconds)
        rows[name] = {"direct": direct, "/generate": routed, "/v1/chat": relayed}
        _show(name, rows[name])
    if args.json:
        args.json.write_text(json.dumps(_record(rows), indent=2) + "\n")


def _best(
    port: int, path: str, body: dict[str, object], watched: psutil.Process, connections: int, seconds: float
) -> Result:
    """Warm up, then return the median of three passes by CPU time."""
    asyncio.run(load(port, path, body, watched, connections=connections, seconds=1))
    passes = [asyncio.run(load(port, path, body, watched, connections=connections, seconds=seconds)) for _ in range(3)]
    return sorted(passes, key=lambda r: r.cpu_us)[1]


def _show(name: str, rows: dict[str, Result]) -> None:
    print(f"\n{name}")
    print("                answers/s   total p50 / p99 ms   first byte p50 ms   CPU-us/answer")
    for row, r in rows.items():
        print(
            f"{row:14} {r.per_second:10.0f} {r.total_p50:12.2f} / {r.total_p99:.2f} {r.first_p50:18.2f} {r.cpu_us:15.0f}"
        )
    direct, *routed = rows.values()
    for row, r in zip(list(rows)[1:], routed, strict=True):
        rate, total = r.per_second / direct.per_second, r.total_p50 / direct.total_p50
        added, cpu = r.first_p50 - direct.first_p50, r.cpu_us / max(direct.cpu_us, 1)
        print(
            f"{row:9} to direct: rate x{rate:.2f}, total x{total:.2f}, first byte +{added:.2f} ms, CPU x{cpu:.1f} the stub's"
        )


def _record(rows: dict[str, dict[str, Result]]) -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "command": "python benchmarks/proxy_overhead.py",
        "commit": commit.stdout.strip(),
        "cores": os.cpu_count(),
        "rows": {name: {k: asdict(v) for k, v in row.items()} for name, row in rows.items()},
    }


if __name__ == "__main__":
    main()
