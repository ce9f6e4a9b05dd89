"""What one Python costs the router over another: CPU time an answer, under the same loads, in turns.

usage: python benchmarks/interpreters.py [--seconds 3] [--passes 5] [--json FILE] NAME=PYTHON...

A name says how the interpreter was built, such as ``Debian=/usr/bin/python3.11``. Each gets an environment with the packages
of requirements/router.txt, kept in QARR_CACHE_DIR. Its router runs on the first core, in front of the stub engine. Ratios
are to the first interpreter in the same pass. Trust only ratios.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from measure import ROOT, free_port, note, process, wait_for
from proxies import commit
from request_path import ask, router
from side_by_side import LOADS, pace

from router.section import cache_dir

SHOWN = ("non-streaming", "saturated", "paced")
REQUIREMENTS = (ROOT / "requirements/router.txt", ROOT / "requirements/build.txt")
WARM_S = 1.0
INSTALL_S = 600


def named(argument: str) -> tuple[str, Path]:
    """Return an interpreter's version with its name, and its path, from an argument of the command line."""
    name, _, path = argument.partition("=")
    python = Path(path).expanduser()
    if not path or not python.exists():
        raise argparse.ArgumentTypeError(f"{argument!r} is not NAME=PYTHON")
    said = subprocess.run(
        [python, "-V"], capture_output=True, text=True, check=True, timeout=60
    )
    return f"{said.stdout.strip()}, {name}", python


def environment(name: str, python: Path) -> Path:
    """Return the Python of an interpreter's environment, which is made where it is missing."""
    content = f"{name} {python} {ROOT}"
    for file in REQUIREMENTS:
        content += file.read_text("utf-8")
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    folder = cache_dir() / "envs" / f"interpreter-{digest}"
    complete = folder / ".complete"
    if not complete.exists():
        note(f"installing the router's packages for {python}")
        uv = [sys.executable, "scripts/uv.py"]
        install = [*uv, "pip", "install", "--python", f"{folder}/bin/python"]
        install.append("--no-deps")
        locked = [f"--requirements={file}" for file in REQUIREMENTS]
        commands = (
            [*uv, "venv", "--allow-existing", "--python", str(python), str(folder)],
            [*install, "--require-hashes", *locked],
            [*install, "--no-build-isolation", "-e", str(ROOT)],
        )
        for command in commands:
            subprocess.run(
                command, cwd=ROOT, check=True, capture_output=True, timeout=INSTALL_S
            )
        complete.touch()
    return folder / "bin/python"


def measured(
    pythons: dict[str, Path], seconds: float, passes: int
) -> dict[str, dict[str, list[float]]]:
    """Return the CPU time an answer in microseconds, by load and interpreter, in the order of the passes."""
    found: dict[str, dict[str, list[float]]] = {
        load: {name: [] for name in pythons} for load in SHOWN
    }
    ports = tuple(free_port() for _ in range(3))
    core = str(max(os.sched_getaffinity(0)))
    stub = [sys.executable, "benchmarks/token_stub.py", *map(str, ports)]
    with ExitStack() as stack:
        stack.enter_context(process(stub, core))
        wait_for(ports[0], "/health")
        running = {
            name: stack.enter_context(
                router(ROOT, ports, None, python=environment(name, python))
            )
            for name, python in pythons.items()
        }
        os.sched_setaffinity(0, {int(core)})
        for number in range(passes + 1):  # the first one warms up
            note(f"pass {number} of {passes}")
            for load in SHOWN:
                asked = LOADS[load]
                pace(ports[0], asked.pause_us)
                for name, (port, router_process) in running.items():
                    cpu_us, _ = ask(
                        port, router_process, asked, seconds if number else WARM_S
                    )
                    if number:
                        found[load][name].append(cpu_us)
    return found


def main() -> None:
    """Measure the interpreters, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="+", type=named, metavar="NAME=PYTHON")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    began = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    passes = f"medians of {options.passes} passes of {options.seconds:g} s, in turns"
    head = [
        f"$ python benchmarks/interpreters.py {shlex.join(sys.argv[1:])}",
        f"commit {commit()}, {began} UTC; {passes}",
        "CPU-us an answer, and the ratio to the first interpreter in the same pass",
    ]
    found = measured(dict(options.pythons), options.seconds, options.passes)
    print("\n".join(head))
    for load, rows in found.items():
        print(f"\n{LOADS[load].title}")
        for name, costs in rows.items():
            ratio = ratio_to_first(rows, name)
            print(f"{name:50} {statistics.median(costs):8.0f}   x{ratio:.2f}")
    if options.json:
        record = {"head": head, "cpu_us": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def ratio_to_first(rows: dict[str, list[float]], name: str) -> float:
    """Return the median over the passes of an interpreter's CPU time to the first one's."""
    first = next(iter(rows.values()))
    return statistics.median(
        cost / base for cost, base in zip(rows[name], first, strict=True)
    )


if __name__ == "__main__":
    main()
