"""Count how the code is built: circles, floors, lines, and what one streamed request passes.

    .venv/bin/python scripts/structure.py

``circles`` are groups of modules that import one another, annotations and imports inside functions included; ``floors`` is
the longest chain of imports. The figures of a request are those of a streamed ``POST /generate`` to a router in front of a
fake engine: own modules and functions that it passes, own functions that are called for each chunk (from streams of two
lengths; that a coroutine goes on after an ``await`` is no call), and the deepest stack of own functions, for the request
and for a chunk. What runs beside the request is not counted.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from router.settings import Settings, leaves
from router.telemetry.logs import _REQUEST  # set while a request is served
from tests.imports import PACKAGES, ROOT, circles_and_floors, imports, modules
from tests.unit.router_stack import router_stack
from tiers.spec import TierName

if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any

SHORT, LONG = 20, 120  # chunks of the two streams that are compared
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>"}  # calls in Python 3.11 only (PEP 709)
REPEATS = 5  # requests of each length; the fewest calls count, so that work in the background does not


class Calls:
    """Own functions that are called between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.counts: Counter[CodeType] = Counter()
        self.depths: dict[CodeType, int] = {}
        self.depth = 0
        self._own: dict[str, bool] = {}

    def start(self) -> None:
        """Begin to count on this thread."""
        sys.setprofile(self._seen)

    def stop(self) -> None:
        """Count no more."""
        sys.setprofile(None)

    @property
    def modules(self) -> set[str]:
        """Return the files of the functions called."""
        return {code.co_filename for code in self.counts}

    def repeated(self, times: int) -> set[CodeType]:
        """Return the functions that were called so often or more."""
        return {code for code, count in self.counts.items() if count >= times}

    def _seen(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event != "call" or not self._is_own(frame.f_code):
            return
        # A request's tasks have its ids; what reads its bytes has none yet.
        if _REQUEST.get() is None and not frame.f_code.co_filename.startswith(f"{ROOT / 'router/server'}/"):
            return
        if frame.f_code.co_name in COMPREHENSIONS:
            return
        # RESUME's argument: 0 at a call, else after an await or a yield.
        if frame.f_code.co_code[frame.f_lasti + 1] & 3:
            return
        self.counts[frame.f_code] += 1
        depth, outer = 1, frame.f_back
        while outer is not None:
            depth += self._is_own(outer.f_code)
            outer = outer.f_back
        self.depths[frame.f_code] = depth  # of the last call: the first chunk comes deeper, while the answer is opened
        self.depth = max(self.depth, depth)

    def _is_own(self, code: CodeType) -> bool:
        name = code.co_filename
        if name not in self._own:
            self._own[name] = any(name.startswith(f"{ROOT / package}/") for package in PACKAGES)
        return self._own[name]


async def request_figures() -> dict[str, int]:
    """Return the figures of one streamed request."""
    fewest: dict[int, Calls] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with router_stack(Path(folder)) as stack:
            engine = stack.engines[TierName.FAST]
            engine.delay_s = 0.002
            for count in (SHORT, LONG):
                engine.answer = (" word",) * count
                for number in range(REPEATS + 1):
                    counted = Calls()
                    counted.start()
                    try:
                        response = await stack.generate(tier="fast", max_tokens=count + 1)
                        await asyncio.sleep(0)
                    finally:
                        counted.stop()
                    response.raise_for_status()
                    if number and (count not in fewest or counted.counts.total() < fewest[count].counts.total()):
                        fewest[count] = counted
    short, long = fewest[SHORT], fewest[LONG]
    of_chunks = long.repeated(LONG)
    return {
        "modules a streamed request passes": len(short.modules),
        "own functions a streamed request passes": len(short.counts),
        f"calls of own functions in a request of {SHORT} chunks": short.counts.total(),
        "own functions for each chunk": len(of_chunks),
        "calls of own functions for each chunk": round((long.counts.total() - short.counts.total()) / (LONG - SHORT)),
        "deepest stack of own functions": short.depth,
        "deepest stack for a chunk": max(long.depths[code] for code in of_chunks),
    }


def package_graph(known: dict[str, Path]) -> dict[str, set[str]]:
    """Return which packages import which, a module directly in router/ being one."""

    def package(name: str) -> str:
        return ".".join(name.split(".")[:2]) if name.startswith("router.") else name.split(".", maxsplit=1)[0]

    graph: dict[str, set[str]] = {package(name): set() for name in known}
    for name in known:
        graph[package(name)] |= {package(other) for other in imports(name, known)} - {package(name)}
    return graph


def lines(folder: str, suffix: str = "*.py") -> int:
    """Return the lines of all Python files below a folder."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in (ROOT / folder).rglob(suffix))


def words() -> int:
    """Return the words of all documents; the changelog only grows, so it does not count."""
    named = [path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if path.name != "CHANGELOG.md"]
    named += [*(ROOT / "deploy").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    return sum(len(path.read_text("utf-8").split()) for path in named)


def main() -> None:
    """Count and print."""
    known = modules()
    circles, floors = circles_and_floors({name: imports(name, known) for name in known})
    source = sum(lines(package) for package in PACKAGES)
    packages = package_graph(known)
    figures: dict[str, object] = {
        "modules": len(known),
        "circles": len(circles),
        "floors of modules": max(floors.values()),
        "floors of modules, without the classifier's": max(floors.values()) - floors["classifier"],
        "floors of packages": max(circles_and_floors(packages)[1].values()),
        "lines of router": lines("router"),
        "lines of tests": lines("tests"),
        "lines of tests to lines of source": round(lines("tests") / source, 2),
        "words of documents, without the changelog": words(),
        "settings": sum(1 for _ in leaves(Settings)),
        "packages in .venv": len(list((ROOT / ".venv/lib").glob("python*/site-packages/*.dist-info"))),
        **asyncio.run(request_figures()),
    }
    for name, value in figures.items():
        print(f"{name:50}{value:>8}")
    for circle in circles:
        print("circle: " + ", ".join(circle))


if __name__ == "__main__":
    main()
