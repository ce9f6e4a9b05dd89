"""What one Python costs the router over another: CPU time an answer, under the same loads, in turns.

usage: python benchmarks/interpreters.py [--seconds 3] [--passes 5] PYTHON...

Each interpreter gets an environment with the packages of requirements/router.txt, kept in QARR_CACHE_DIR. Its router runs on
the first core, in front of the stub engine. Ratios are to the first interpreter in the same pass. Trust only ratios.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from measure import ROOT, free_port, note, process, wait_for
from request_path import ask, router
from side_by_side import LOADS, pace

from router.section import cache_dir

SHOWN = ("non-streaming", "saturated", "paced")
REQUIREMENTS = (ROOT / "requirements/router.txt", ROOT / "requirements/build.txt")
WARM_S = 1.0
INSTALL_S = 600


def described(python: Path) -> str:
    """Return an interpreter's version, and where it is."""
    said = subprocess.run(
        [python, "-V"], capture_output=True, text=True, check=True, timeout=60
    )
    return f"{said.stdout.strip().removeprefix('Python ')} {at_home(str(python))}"


def at_home(text: str) -> str:
    """Return paths below the home folder as a shell takes them."""
    return text.replace(f"{Path.home()}/", "~/")


def environment(python: Path) -> Path:
    """Return the Python of an interpreter's environment, which is made where it is missing."""
    content = f"{described(python)} {ROOT}"
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
    pythons: list[Path], seconds: float, passes: int
) -> dict[str, dict[Path, list[float]]]:
    """Return the CPU time an answer in microseconds, by load and interpreter, in the order of the passes."""
    found: dict[str, dict[Path, list[float]]] = {
        name: {python: [] for python in pythons} for name in SHOWN
    }
    ports = tuple(free_port() for _ in range(3))
    core = str(max(os.sched_getaffinity(0)))
    stub = [sys.executable, "benchmarks/token_stub.py", *map(str, ports)]
    with ExitStack() as stack:
        stack.enter_context(process(stub, core))
        wait_for(ports[0], "/health")
        running = {
            python: stack.enter_context(
                router(ROOT, ports, None, python=environment(python))
            )
            for python in pythons
        }
        os.sched_setaffinity(0, {int(core)})
        for number in range(passes + 1):  # the first one warms up
            note(f"pass {number} of {passes}")
            for name in SHOWN:
                asked = LOADS[name]
                pace(ports[0], asked.pause_us)
                for python, (port, router_process) in running.items():
                    cpu_us, _ = ask(
                        port, router_process, asked, seconds if number else WARM_S
                    )
                    if number:
                        found[name][python].append(cpu_us)
    return found


def main() -> None:
    """Measure the interpreters, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="+", type=Path, metavar="PYTHON")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    found = measured(options.pythons, options.seconds, options.passes)
    first = options.pythons[0]
    arguments = at_home(" ".join(sys.argv[1:]))
    print(f"$ python benchmarks/interpreters.py {arguments}")
    print(
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC; medians of {options.passes} passes, in turns"
    )
    print("CPU-us an answer, and the ratio to the first interpreter in the same pass")
    for name in SHOWN:
        print(f"\n{LOADS[name].title}")
        for python, costs in found[name].items():
            pairs = zip(costs, found[name][first], strict=True)
            ratio = statistics.median(cost / base for cost, base in pairs)
            print(
                f"{described(python):60} {statistics.median(costs):8.0f}   x{ratio:.2f}"
            )


if __name__ == "__main__":
    main()
