"""What is expected of each cell of the matrix, in tests/data/continuation/expected.json, which docs/continuation.md shows.

usage: PYTHONPATH=. .venv/bin/python -m tests.unit.continuation.expected

The command breaks streams as the tests do, and writes what came of it: the worst outcome of each cell.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from tests.unit.continuation.matrix import (
    NEVER,
    Matrix,
    Outcome,
    Verdict,
    running_matrix,
)
from tests.unit.continuation.moments import AFTER_FINISH, MOMENTS, Moments
from tests.unit.continuation.recording import load
from tests.unit.continuation.requests import CellRequest, requests

EXPECTED = Path(__file__).resolve().parents[2] / "data/continuation/expected.json"
# Engines with the plugin, and others.
RESUMING = "engines that resume"
STOCK = "other engines"
ENGINES = {RESUMING: True, STOCK: False}
# The worst outcome of a cell's breaks stands for the cell.
RANK = {outcome: rank for rank, outcome in enumerate(Outcome)}
Cells = dict[str, dict[str, str]]


class Break(NamedTuple):
    """A break of one request's stream, and what came of it."""

    request: CellRequest
    position: int
    moment: str
    verdict: Verdict


def positions(request: CellRequest, stream: bytes, moments: Moments) -> list[int]:
    """Return where a test breaks a stream: at the beginning, at each event's end, and once within each event."""
    dice = random.Random(request.name)
    chosen = [0]
    start = 0
    for end in moments.ends:
        if end - start > 1:
            chosen.append(dice.randrange(start + 1, end))
        chosen.append(end)
        start = end
    return [position for position in chosen if position <= len(stream)]


async def breaks_of(matrix: Matrix, request: CellRequest) -> AsyncIterator[Break]:
    """Break one request's stream everywhere that tests do."""
    stream, moments = await matrix.stream_of(request)
    for number, position in enumerate(positions(request, stream, moments)):
        verdict = await matrix.break_at(
            request, [position], is_piecewise=number % 2 == 1
        )
        yield Break(request, position, moments.at(position), verdict)


async def second_breaks_of(
    matrix: Matrix, request: CellRequest
) -> AsyncIterator[Break]:
    """Break a stream in its middle and after its finish reason, and then the one that continues it, after each event."""
    _, moments = await matrix.stream_of(request)
    first_breaks = [moments.ends[len(moments.ends) // 2]]
    if AFTER_FINISH in moments.moments:
        number = moments.moments.index(AFTER_FINISH) - 1
        first_breaks.append(moments.ends[number])
    for first in first_breaks:
        await matrix.break_at(request, [first])
        if len(matrix.stage.sent) == 1:
            continue
        second = matrix.stage.sent[1]
        ends = [match.end() for match in re.finditer(b"\n\n", second)]
        for end in ends:
            verdict = await matrix.break_at(request, [first, end])
            yield Break(request, end, moments.at(first), verdict)


def read_expected() -> dict[str, Cells]:
    """Return the expected outcomes: by engines, request and moment."""
    expected: dict[str, Cells] = json.loads(EXPECTED.read_text("utf-8"))
    return expected


async def observe(*, resumes: bool) -> Cells:
    """Return the worst outcome of each cell; ``SystemExit``: one must never be."""
    cells: dict[str, dict[str, Outcome]] = {}
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        async with running_matrix(Path(folder), load(), resumes=resumes) as matrix:
            for request in requests():
                row = cells.setdefault(request.name, {})
                async for tried in breaks_of(matrix, request):
                    outcome = tried.verdict.outcome
                    if outcome in NEVER:
                        faults.append(tried)
                    known = row.get(tried.moment, outcome)
                    row[tried.moment] = max(known, outcome, key=RANK.__getitem__)
    if faults:
        raise SystemExit("\n".join(map(str, faults)))
    return {
        name: {moment: row[moment].value for moment in MOMENTS if moment in row}
        for name, row in cells.items()
    }


async def main() -> None:
    logging.disable(logging.ERROR)  # the router logs each break
    expected = {
        engines: await observe(resumes=resumes) for engines, resumes in ENGINES.items()
    }
    EXPECTED.write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
