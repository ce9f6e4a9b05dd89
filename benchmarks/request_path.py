"""Where a request's CPU time goes in the router, by room and library, for one or more checkouts of this project.

usage: python benchmarks/request_path.py [--seconds 5] [CHECKOUT ...]

Each checkout (default: this one) has its environment in ``.venv``. Its router runs on the first core in front of the stub
engine of this one, twice for each kind of answer: as it is, for the CPU time an answer, and under cProfile, for the shares.
A profiler makes calls dearer than loops, so shares are good to a few per cent. What a built-in function takes counts for
its caller. Work of the start is taken out. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import os
import pstats
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from measure import ROOT, free_port, process, tree, wait_for
from proxies import OURS, PROXIES, Place, default_tokenizer
from side_by_side import LOADS, Load
from token_load import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import psutil

OWN = re.compile(r"/((?:router|tiers|classifier)(?:/[a-z_]+(?=/))?)[^/]*")
LIBRARY = re.compile(r".*/(?:site-packages|python3\.\d+)/([A-Za-z_0-9]+)")
SHOWN = ("non-streaming", "saturated")
MIN_SHARE = 0.005  # of what is shown by itself


def component(file: str, checkout: Path) -> str:
    """Return the room or library that a source file belongs to."""
    if file.startswith(str(checkout)) and "site-packages" not in file:
        found = OWN.match(file.removeprefix(str(checkout)))
        return found[1] if found else "others"
    found = LIBRARY.search(file)
    return found[1] if found else "others"


def shares(profile: Path, checkout: Path) -> Counter[str]:
    """Return the seconds that each component took by itself."""
    found: Counter[str] = Counter()
    stats = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    for (file, _, name), (_, _, own_s, _, callers) in stats.items():
        if file != "~":
            found[component(file, checkout)] += own_s
        elif "uvloop" in name or "'run'" in name:
            found["uvloop, and the system"] += own_s
        else:
            for (caller, _, _), (*_, by_s, _) in callers.items():
                found["others" if caller == "~" else component(caller, checkout)] += (
                    by_s
                )
    return found


@contextmanager
def router(
    checkout: Path, stub: tuple[int, ...], profile: Path | None
) -> Iterator[tuple[int, psutil.Process]]:
    """Run a checkout's router on the first core; yield its port and process."""
    command = PROXIES[OURS].command
    assert command is not None
    with tempfile.TemporaryDirectory() as folder:
        engines = tuple(f"http://127.0.0.1:{port}" for port in stub)
        place = Place(engines, free_port(), "", Path(folder), default_tokenizer())
        (_, *arguments), env = command(place)
        # not from the working directory
        python = [str(checkout / ".venv/bin/python"), "-P"]
        python += ["-m", "cProfile", "-o", str(profile)] if profile is not None else []
        argv = [*python, str(checkout / ".venv/bin/qarr"), *arguments]
        core = str(min(os.sched_getaffinity(0)))
        log = Path(folder) / "output.log"
        with process(
            argv, core, env={**env, "PYTHONPATH": str(checkout)}, log=log
        ) as running:
            try:
                wait_for(place.port, "/readyz", 60)
            except TimeoutError:
                sys.exit(
                    f"error: {checkout} does not start: {log.read_text('utf-8', 'replace')[-500:]}"
                )
            yield place.port, running
            if profile is not None:  # it is written when the router ends
                running.terminate()
                running.wait(60)


def ask(
    port: int, running: psutil.Process, asked: Load, seconds: float
) -> tuple[float, int]:
    """Put load on a router; return its CPU time an answer in microseconds, and the answers."""
    sample = uvloop.run(
        load(
            port,
            PROXIES[OURS].question(streamed=asked.streamed),
            running,
            connections=asked.connections,
            seconds=seconds,
            stagger_ms=asked.stagger_ms,
        )
    )
    if sample.errors:
        sys.exit(f"error: {sample.errors} wrong answers, the first: {sample.error!r}")
    return sample.cpu_us, sample.answers


def measured(
    checkout: Path, stub: tuple[int, ...], asked: Load, seconds: float
) -> tuple[float, dict[str, float]]:
    """Return the CPU time an answer in microseconds, and the components' parts of it."""
    with router(checkout, stub, None) as (port, running):
        ask(port, running, asked, 1.0)
        cpu_us, _ = ask(port, running, asked, seconds)
    with tempfile.TemporaryDirectory() as folder:
        idle, busy = Path(folder) / "idle", Path(folder) / "busy"
        with router(checkout, stub, idle):
            pass
        with router(checkout, stub, busy) as (port, running):
            ask(port, running, asked, seconds)
        found = shares(busy, checkout)
        found.subtract(shares(idle, checkout))
    found.pop("uvloop, and the system", None)  # the loop's own time holds its waits
    whole = sum(s for s in found.values() if s > 0)
    return cpu_us, {
        name: cpu_us * s / whole for name, s in found.items() if s > MIN_SHARE * whole
    }


def table(
    title: str, columns: Mapping[str, tuple[float, dict[str, float]]]
) -> list[str]:
    """Return one load's rows: each component's microseconds in each checkout."""
    names = {name for _, parts in columns.values() for name in parts}
    order = sorted(
        names,
        key=lambda name: -max(parts.get(name, 0) for _, parts in columns.values()),
    )
    width = max(12, *(len(column) for column in columns))
    lines = [
        f"{title}: CPU-us an answer",
        f"{'':24}" + "".join(f"{column:>{width + 2}}" for column in columns),
    ]
    lines.append(
        f"{'all':24}"
        + "".join(f"{cpu_us:{width + 2}.0f}" for cpu_us, _ in columns.values())
    )
    for name in order:
        row = "".join(
            f"{parts.get(name, 0):{width + 2}.0f}" for _, parts in columns.values()
        )
        lines.append(f"{name:24}{row}")
    return lines


def main() -> None:
    """Measure every checkout under every load, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--seconds", type=float, default=5)
    options = parser.parse_args()
    checkouts = {}
    for folder in options.checkouts:
        said = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        checkouts[said.stdout.strip() or folder.name] = folder.resolve()
    print(
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, Python {sys.version.split()[0]}"
    )
    ports = tuple(free_port() for _ in range(3))
    core = max(os.sched_getaffinity(0))
    with process(
        [sys.executable, "benchmarks/token_stub.py", *map(str, ports)], str(core)
    ) as stub:
        wait_for(ports[0], "/health")
        assert tree(stub)
        for name in SHOWN:
            asked = LOADS[name]
            columns = {
                c: measured(folder, ports, asked, options.seconds)
                for c, folder in checkouts.items()
            }
            print("\n" + "\n".join(table(asked.title, columns)), flush=True)


if __name__ == "__main__":
    main()
