"""Where a request's CPU time goes in the router: by room and library, and by cause, for one or more checkouts.

usage: python benchmarks/request_path.py [--seconds 5] [CHECKOUT ...]

Each checkout (default: this one) has its environment in ``.venv``. Its router runs on the first core in front of the stub
engine of this one, three times for each kind of answer:

- as it is, for the CPU time an answer;
- under ``perf record``, for the shares by cause, the kernel's included (left out where ``perf`` is missing);
- under cProfile, for the shares of rooms and libraries. It makes calls dearer than loops, so they are good to a few per
  cent. What a built-in function takes counts for its caller. Work of the start is taken out.

Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import os
import pstats
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from measure import ROOT, free_port, process, tree, wait_for
from proxies import OURS, PROXIES, Place, default_tokenizer
from side_by_side import LOADS, Load, pace
from token_load import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import psutil

OWN = re.compile(r"/((?:router|tiers|classifier)(?:/[a-z_]+(?=/))?)[^/]*")
LIBRARY = re.compile(r".*/(?:site-packages|python3\.\d+)/([A-Za-z_0-9]+)")
SHOWN = ("non-streaming", "saturated", "paced")
PERF_HZ = 1999  # no multiple of any rate at which something else runs
# A line of perf's report: share, shared object, "[.]" or "[k]", symbol.
SAMPLED = re.compile(r"\s*([\d.]+)%\s+(\S+)\s+\[(.)\]\s+(.+?)\s*")
ALLOCATION = re.compile(
    r"\w*([Mm]alloc|[Ff]ree|[Rr]ealloc|dealloc)\w*|\w*_(alloc|GC_\w+|New|NewReference)|gc_\w+|unlink_chunk.*"
)
# They are part of Python's own library, as the interpreter is.
REGULAR_EXPRESSIONS = re.compile(r"sre_\w+|_sre_\w+|pattern_\w+|match_\w+")
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
        if file.endswith("asyncio/runners.py"):
            found["uvloop, and the system"] += own_s
        elif file != "~":
            found[component(file, checkout)] += own_s
        elif "uvloop" in name or "'run'" in name:
            found["uvloop, and the system"] += own_s
        else:
            for (caller, _, _), (*_, by_s, _) in callers.items():
                found["others" if caller == "~" else component(caller, checkout)] += (
                    by_s
                )
    return found


def cause(shared_object: str, mode: str, symbol: str) -> str:
    """Return what a sample of perf's was spent on: the kernel, Python's allocator or interpreter, or a C library."""
    if mode == "k":
        return "kernel"
    name = symbol.partition("@")[0]  # without the version, as in cfree@GLIBC_2.2.5
    if ALLOCATION.fullmatch(name):
        return "allocation"
    if not re.match(r"libpython|python3", shared_object):
        library = re.split(r"[.-]", shared_object)[0]
        names = {"loop": "uvloop", "parser": "httptools", "_core": "msgspec"}
        return f"C: {names.get(library, library)}"
    if REGULAR_EXPRESSIONS.fullmatch(name):
        return "regular expressions"
    return "interpreter"


def causes(report: str) -> dict[str, float]:
    """Return the shares of what perf has sampled, by cause."""
    found: dict[str, float] = defaultdict(float)
    for line in report.splitlines():
        if sample := SAMPLED.fullmatch(line):
            share, shared_object, mode, symbol = sample.groups()
            found[cause(shared_object, mode, symbol)] += float(share)
    return found


@contextmanager
def router(
    checkout: Path,
    stub: tuple[int, ...],
    profile: Path | None,
    *,
    python: Path | None = None,
) -> Iterator[tuple[int, psutil.Process]]:
    """Run a checkout's router on the first core; yield its port and process.

    Args:
        checkout: Its ``.venv`` has the ``qarr`` command.
        stub: Ports of the engines.
        profile: Where cProfile writes; None: it does not run.
        python: Runs the router; None: the checkout's own.
    """
    command = PROXIES[OURS].command
    assert command is not None
    with tempfile.TemporaryDirectory() as folder:
        engines = tuple(f"http://127.0.0.1:{port}" for port in stub)
        place = Place(engines, free_port(), "", Path(folder), default_tokenizer())
        (_, *arguments), env = command(place)
        # not from the working directory
        run = [str(python or checkout / ".venv/bin/python"), "-P"]
        run += ["-m", "cProfile", "-o", str(profile)] if profile is not None else []
        argv = [*run, str(checkout / ".venv/bin/qarr"), *arguments]
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


def sampled(
    port: int, running: psutil.Process, asked: Load, seconds: float
) -> dict[str, float]:
    """Return the shares by cause of a router's CPU time under load; empty: there is no perf."""
    if shutil.which("perf") is None:
        return {}
    pids = ",".join(str(process.pid) for process in tree(running))
    with tempfile.TemporaryDirectory() as folder:
        samples = f"{folder}/perf.data"
        record = ["perf", "record", "-q", "-F", str(PERF_HZ), "-o", samples, "-p", pids]
        with subprocess.Popen([*record, "--", "sleep", str(seconds)]) as recording:
            ask(port, running, asked, seconds + 1)
            recording.wait(60)
        report = ["perf", "report", "-i", samples, "--stdio", "-F", "overhead,dso,sym"]
        said = subprocess.run(
            report, capture_output=True, text=True, check=True, timeout=120
        )
    return causes(said.stdout)


def measured(
    checkout: Path, stub: tuple[int, ...], asked: Load, seconds: float
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Return the CPU time an answer in microseconds, the components' parts of it, and those of its causes."""
    with router(checkout, stub, None) as (port, running):
        ask(port, running, asked, 1.0)
        cpu_us, _ = ask(port, running, asked, seconds)
        by_cause = sampled(port, running, asked, seconds)
    with tempfile.TemporaryDirectory() as folder:
        idle, busy = Path(folder) / "idle", Path(folder) / "busy"
        with router(checkout, stub, idle):
            pass
        with router(checkout, stub, busy) as (port, running):
            ask(port, running, asked, seconds)
        found = shares(busy, checkout)
        found.subtract(shares(idle, checkout))
    found.pop("uvloop, and the system", None)  # the loop's own time holds its waits
    return cpu_us, parts_of(cpu_us, found), parts_of(cpu_us, by_cause)


def parts_of(cpu_us: float, shares: Mapping[str, float]) -> dict[str, float]:
    """Return the microseconds that fall to each share that is not tiny."""
    whole = sum(share for share in shares.values() if share > 0)
    return {
        name: cpu_us * share / whole
        for name, share in shares.items()
        if share > MIN_SHARE * whole
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
        title,
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


def named(checkout: Path) -> str:
    """Return the commit of a checkout and the version of its environment's Python."""

    def said(*command: str) -> str:
        run = subprocess.run(
            command,
            cwd=checkout,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return run.stdout.strip()

    commit = said("git", "rev-parse", "--short", "HEAD")
    return f"{commit} {said('.venv/bin/python', '-V').removeprefix('Python ')}"


def main() -> None:
    """Measure every checkout under every load, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--seconds", type=float, default=5)
    options = parser.parse_args()
    checkouts = {named(folder): folder.resolve() for folder in options.checkouts}
    print(f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC")
    ports = tuple(free_port() for _ in range(3))
    core = max(os.sched_getaffinity(0))
    with process(
        [sys.executable, "benchmarks/token_stub.py", *map(str, ports)], str(core)
    ) as stub:
        wait_for(ports[0], "/health")
        assert tree(stub)
        for name in SHOWN:
            asked = LOADS[name]
            pace(ports[0], asked.pause_us)
            columns = {
                c: measured(folder, ports, asked, options.seconds)
                for c, folder in checkouts.items()
            }
            by_room = {c: (cpu_us, rooms) for c, (cpu_us, rooms, _) in columns.items()}
            by_cause = {
                c: (cpu_us, causes) for c, (cpu_us, _, causes) in columns.items()
            }
            title = f"{asked.title}: CPU-us an answer"
            print("\n" + "\n".join(table(f"{title}, by room", by_room)))
            print("\n" + "\n".join(table(f"{title}, by cause", by_cause)), flush=True)


if __name__ == "__main__":
    main()
