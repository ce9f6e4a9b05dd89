"""What a client has of an answer whose engine breaks off: every byte of every cell of the matrix, and random breaks.

usage: .venv/bin/python benchmarks/continuation_matrix.py LABEL [--engines resuming | stock] [--every N] [--random N]

The router runs in this process, on real sockets, between a client and engines that play recorded streams of vLLM
(tests/unit/continuation). Each break is judged as the tests judge it. A random break picks a cell and a byte, and breaks
one to three of the answer's streams; events come all at once, or each by itself.

Results are in results/continuation_matrix.json, under LABEL, with a table of all labels in continuation_matrix.txt.
``--every`` tries each Nth byte, beginning with a random one of the first N; 0: none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import ROOT, note

sys.path.insert(0, str(ROOT))
from tests.unit.continuation.matrix import NEVER, Matrix, Outcome, running_matrix
from tests.unit.continuation.moments import MOMENTS
from tests.unit.continuation.recording import load
from tests.unit.continuation.requests import CellRequest, requests

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = ROOT / "benchmarks/results"
RANK = {outcome: rank for rank, outcome in enumerate(Outcome)}
MOST_BREAKS = 3
SHOWN_FAULTS = 20


@dataclass(slots=True)
class Run:
    """What came of the breaks under one label.

    Attributes:
        cells: How often each outcome came, by request and moment.
        random: How often each outcome came of random breaks.
        faults: The first breaks whose outcome must never be.
    """

    label: str
    engines: str
    every: int
    random_breaks: int
    seed: int
    commit: str
    date: str
    cells: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    random: dict[str, int] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)

    def note_fault(
        self, request: CellRequest, breaks: Sequence[int], outcome: Outcome, why: str
    ) -> None:
        """Keep a break whose outcome must never be, as long as there are few."""
        if outcome in NEVER and len(self.faults) < SHOWN_FAULTS:
            fault = {"cell": request.name, "breaks": [*breaks], "outcome": outcome}
            self.faults.append({**fault, "why": why[:500]})


async def break_every_byte(matrix: Matrix, run: Run) -> None:
    """Break each stream after every byte, or each Nth."""
    dice = random.Random(run.seed)
    for request in requests():
        stream, moments = await matrix.stream_of(request)
        row: dict[str, Counter[str]] = {}
        first = dice.randrange(run.every)
        for position in range(first, len(stream) + 1, run.every):
            is_piecewise = dice.random() < 0.5
            verdict = await matrix.break_at(
                request, [position], is_piecewise=is_piecewise
            )
            moment = moments.at(position)
            row.setdefault(moment, Counter())[verdict.outcome] += 1
            run.note_fault(request, [position], verdict.outcome, verdict.reason)
        run.cells[request.name] = {
            moment: dict(row[moment]) for moment in MOMENTS if moment in row
        }
        note(f"{request.name}: {len(stream)} bytes")


async def break_at_random(matrix: Matrix, run: Run) -> None:
    """Break one to three streams of an answer after random bytes, for random requests."""
    dice = random.Random(run.seed)
    outcomes: Counter[str] = Counter()
    cells = requests()
    for number in range(run.random_breaks):
        request = dice.choice(cells)
        stream, _ = await matrix.stream_of(request)
        count = dice.randint(1, MOST_BREAKS)
        breaks = [dice.randrange(len(stream)) for _ in range(count)]
        is_piecewise = dice.random() < 0.5
        verdict = await matrix.break_at(request, breaks, is_piecewise=is_piecewise)
        outcomes[verdict.outcome] += 1
        run.note_fault(request, breaks, verdict.outcome, verdict.reason)
        if number % 1000 == 0:
            note(f"{number} random breaks")
    run.random = dict(outcomes)


async def measure(run: Run, *, resumes: bool) -> None:
    """Break streams in both ways, on a router of their own."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_matrix(Path(folder), load(), resumes=resumes) as matrix:
            if run.every:
                await break_every_byte(matrix, run)
            if run.random_breaks:
                await break_at_random(matrix, run)


def save(run: Run) -> None:
    """Put a run in place of the one with its label, and write the table of all."""
    path = RESULTS / "continuation_matrix.json"
    runs = json.loads(path.read_text("utf-8")) if path.exists() else {}
    runs[run.label] = asdict(run)
    path.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n", "utf-8")
    text = "\n".join(table(each) for each in runs.values())
    (RESULTS / "continuation_matrix.txt").write_text(text, "utf-8")


def cell_outcome(counts: dict[str, int]) -> Outcome:
    """Return the worst outcome of a cell's breaks, which stands for it."""
    return max(map(Outcome, counts), key=RANK.__getitem__)


def table(run: dict[str, Any]) -> str:
    """Return a run's figures as text."""
    rows = [
        f"{run['label']}: router of commit {run['commit']}, {run['engines']} engines, {run['date']}",
        command_of(run),
        platform_words(),
        "",
    ]
    if run["cells"]:
        cells = [
            cell_outcome(counts)
            for row in run["cells"].values()
            for counts in row.values()
        ]
        by_outcome = Counter(cells)
        breaks = sum(
            sum(counts.values())
            for row in run["cells"].values()
            for counts in row.values()
        )
        where = "every byte" if run["every"] == 1 else f"one byte in {run['every']}"
        rows.append(
            f"{breaks} breaks, at {where}; {len(cells)} cells by their worst outcome"
        )
        rows += [f"{by_outcome[outcome]:8} {outcome}" for outcome in Outcome]
        rows.append("")
        rows.append(f"{'request':58} " + " ".join(f"{m[:22]:22}" for m in MOMENTS))
        for name, row in run["cells"].items():
            shown = [
                cell_outcome(row[moment]).value if moment in row else "-"
                for moment in MOMENTS
            ]
            rows.append(f"{name:58} " + " ".join(f"{text:22}" for text in shown))
        rows.append("")
    if run["random"]:
        rows.append(f"{sum(run['random'].values())} random breaks")
        rows += [f"{run['random'].get(outcome, 0):8} {outcome}" for outcome in Outcome]
        rows.append("")
    for fault in run["faults"]:
        rows.append(
            f"{fault['outcome']}: {fault['cell']} at {fault['breaks']}: {fault['why']}"
        )
    return "\n".join(row.rstrip() for row in rows) + "\n"


def command_of(run: dict[str, Any]) -> str:
    """Return the command that made a run."""
    return (
        f"$ .venv/bin/python benchmarks/continuation_matrix.py {run['label']} --engines {run['engines']} "
        f"--every {run['every']} --random {run['random_breaks']} --seed {run['seed']}"
    )


def platform_words() -> str:
    """Return what ran the benchmark."""
    return f"{platform.machine()}, Python {platform.python_version()}; other work on the same two cores"


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("label")
    parser.add_argument("--engines", choices=("resuming", "stock"), default="resuming")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--random", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # each break is logged by the router
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    run = Run(
        label=options.label,
        engines=options.engines,
        every=options.every,
        random_breaks=options.random,
        seed=options.seed,
        commit=commit,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
    )
    began = time.monotonic()
    asyncio.run(measure(run, resumes=options.engines == "resuming"))
    save(run)
    note(f"{time.monotonic() - began:.0f} s")
    print(table(asdict(run)))


if __name__ == "__main__":
    main()
