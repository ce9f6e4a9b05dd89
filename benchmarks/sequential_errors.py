"""Error rates of the sequential test of answers, and how many tasks it takes, by simulation.

    .venv/bin/python benchmarks/sequential_errors.py [--runs 10000] [--output benchmarks/results/sequential_errors.json]

Each run draws the outcomes of up to ``MAX_TASKS`` tasks from a known truth, and applies the test of
``router/verification/sequential.py`` after each of them, as ``qarr verify`` does by default: 2 of 100 answers are tolerated,
at a confidence of 95 %. The truths differ in the loss, in how many answers change for the better (so many more change for
the worse, beyond the loss), and in how many tasks both engines get wrong. A verdict is wrong if it is "worse" at a true loss
of 2 of 100 or less, or "same" above. Apart from verdicts it is counted how often the interval ever leaves the true loss out.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from measure import ROOT, note

sys.path.insert(0, str(ROOT))

from router.verification.sequential import BETS, Claim, bet_factors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Counted = NDArray[np.float64]

TOLERATED = 0.02
CONFIDENCE = 0.95
LOSSES = (0.0, 0.01, 0.02, 0.05, 0.10)
BETTER_SHARES = (0.0, 0.02, 0.10)
BOTH_WRONG_SHARES = (0.0, 0.5)
MAX_TASKS = 5000
SHORT_RUN_TASKS = 600  # about as many as the built-in suite has
BLOCK_TASKS = 250
NEVER = MAX_TASKS + 1
RESULT = ROOT / "benchmarks/results/sequential_errors.json"


@dataclass(frozen=True)
class Truth:
    """How two simulated engines differ.

    Attributes:
        loss: Net share of answers lost, of the tasks that at least one engine gets right.
        better: Share of these tasks that the candidate alone gets right.
        both_wrong: Share of all tasks that both get wrong.
    """

    loss: float
    better: float
    both_wrong: float


@dataclass(frozen=True)
class Outcomes:
    """How many of a block's tasks had which outcome: arrays of runs x tasks, counted from the run's start."""

    worse: Counted
    both_right: Counted
    better: Counted

    def capital(self, claim: Claim, loss: float) -> Counted:
        """Return the capital won against a claim after each task, runs x tasks."""
        capital = np.zeros_like(self.worse)
        for bet in BETS:
            factors = bet_factors(claim, loss, bet)
            logarithm = self.worse * factors.worse
            logarithm += self.both_right * factors.both_right
            logarithm += self.better * factors.better
            capital += np.exp(logarithm)
        return capital / len(BETS)


@dataclass(frozen=True)
class Row:
    """What became of the runs of one truth, each with ``max_tasks`` tasks at most; shares 0..1."""

    loss: float
    better: float
    both_wrong: float
    max_tasks: int
    wrong: float
    same: float
    worse: float
    cannot_tell: float
    mean_tasks: float


@dataclass(frozen=True)
class IntervalRow:
    """The share of runs whose interval left out the true loss at any of ``MAX_TASKS`` looks."""

    loss: float
    better: float
    excluded: float


def main() -> None:
    """Simulate all truths, print a table and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=59)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    source = np.random.default_rng(options.seed)
    rows: list[Row] = []
    intervals: list[IntervalRow] = []
    for loss, better, both_wrong in product(LOSSES, BETTER_SHARES, BOTH_WRONG_SHARES):
        truth = Truth(loss=loss, better=better, both_wrong=both_wrong)
        note(f"{truth}")
        rows += verdict_rows(truth, options.runs, source)
        if not both_wrong:
            intervals.append(interval_row(truth, options.runs, source))
    document = {
        "command": f"python benchmarks/sequential_errors.py --runs {options.runs} --seed {options.seed}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "tolerated": TOLERATED,
        "confidence": CONFIDENCE,
        "runs": options.runs,
        "bets": BETS,
        "rows": [asdict(row) for row in rows],
        "intervals": [asdict(row) for row in intervals],
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print_tables(rows, intervals)


def verdict_rows(truth: Truth, runs: int, source: np.random.Generator) -> list[Row]:
    """Apply the test to many runs, and return what became of them with few tasks and with many."""
    threshold = 2 / (1 - CONFIDENCE)
    worse_at = np.full(runs, NEVER)
    same_at = np.full(runs, NEVER)
    is_undecided = np.full(runs, fill_value=True)
    for first_task, outcomes in blocks(truth, is_undecided, source):
        undecided = np.flatnonzero(is_undecided)
        for claim, known_at in (
            (Claim.AT_MOST, worse_at),
            (Claim.AT_LEAST, same_at),
        ):
            is_refuted = outcomes.capital(claim, TOLERATED) >= threshold
            known_at[undecided] = first_true(is_refuted, first_task)
        is_undecided[undecided] = (worse_at == NEVER)[undecided] & (same_at == NEVER)[
            undecided
        ]
    return [
        verdict_row(truth, max_tasks, worse_at=worse_at, same_at=same_at)
        for max_tasks in (SHORT_RUN_TASKS, MAX_TASKS)
    ]


def verdict_row(
    truth: Truth,
    max_tasks: int,
    *,
    worse_at: NDArray[np.int64],
    same_at: NDArray[np.int64],
) -> Row:
    """Count the verdicts of runs that end after ``max_tasks`` tasks, given when each claim was refuted."""
    decided_at = np.minimum(worse_at, same_at)
    is_decided = decided_at <= max_tasks
    worse = float(np.mean(is_decided & (worse_at < same_at)))
    same = float(np.mean(is_decided & (same_at < worse_at)))
    return Row(
        loss=truth.loss,
        better=truth.better,
        both_wrong=truth.both_wrong,
        max_tasks=max_tasks,
        wrong=same if truth.loss > TOLERATED else worse,
        same=same,
        worse=worse,
        cannot_tell=float(np.mean(~is_decided)),
        mean_tasks=round(float(np.mean(np.minimum(decided_at, max_tasks))), 1),
    )


def interval_row(truth: Truth, runs: int, source: np.random.Generator) -> IntervalRow:
    """Count the runs whose interval leaves out the true loss after any task: a claim about it is refuted."""
    threshold = 2 / (1 - CONFIDENCE)
    is_held = np.full(runs, fill_value=True)
    for _, outcomes in blocks(truth, is_held, source):
        held = np.flatnonzero(is_held)
        for claim in Claim:
            is_refuted = outcomes.capital(claim, truth.loss) >= threshold
            is_held[held] &= ~is_refuted.any(axis=1)
    return IntervalRow(
        loss=truth.loss, better=truth.better, excluded=float(np.mean(~is_held))
    )


def blocks(
    truth: Truth, is_active: NDArray[np.bool_], source: np.random.Generator
) -> Iterator[tuple[int, Outcomes]]:
    """Yield the outcomes of the active runs, some tasks at a time, with the number of the first task.

    Args:
        truth: What outcomes are drawn from.
        is_active: Which runs go on; the caller ends runs between two blocks.
        source: Random numbers.
    """
    decisive = 1 - truth.both_wrong
    worse_below = (truth.loss + truth.better) * decisive
    better_below = worse_below + truth.better * decisive
    counts = np.zeros((3, is_active.size))
    for first_task in range(1, MAX_TASKS + 1, BLOCK_TASKS):
        active = np.flatnonzero(is_active)
        if not active.size:
            return
        drawn = source.random((active.size, BLOCK_TASKS))
        kinds = (
            drawn < worse_below,
            (drawn >= better_below) & (drawn < decisive),
            (drawn >= worse_below) & (drawn < better_below),
        )
        counted = [
            np.cumsum(kind, axis=1) + counts[number, active, None]
            for number, kind in enumerate(kinds)
        ]
        for number, kind_counts in enumerate(counted):
            counts[number, active] = kind_counts[:, -1]
        yield first_task, Outcomes(*counted)


def first_true(is_true: NDArray[np.bool_], first_task: int) -> NDArray[np.int64]:
    """Return for each run the number of the first task that is marked; ``NEVER``: none is."""
    first = is_true.argmax(axis=1) + first_task
    return np.where(is_true.any(axis=1), first, NEVER)


def print_tables(rows: list[Row], intervals: list[IntervalRow]) -> None:
    """Print what was found, with the tolerance of chance at this number of runs."""
    print(
        f"{'loss':>6}{'better':>8}{'both wrong':>12}{'at most':>9}{'wrong':>8}{'same':>8}{'worse':>8}"
        f"{'cannot tell':>13}{'mean tasks':>12}"
    )
    for row in rows:
        print(
            f"{row.loss:6.0%}{row.better:8.0%}{row.both_wrong:12.0%}{row.max_tasks:9}{row.wrong:8.2%}{row.same:8.1%}"
            f"{row.worse:8.1%}{row.cannot_tell:13.1%}{row.mean_tasks:12.0f}"
        )
    highest_wrong = max(row.wrong for row in rows)
    highest_excluded = max(row.excluded for row in intervals)
    print(
        f"wrong verdicts: at most {highest_wrong:.2%}; intervals that ever leave out the true loss: at most"
        f" {highest_excluded:.2%}; allowed: {1 - CONFIDENCE:.0%}"
    )


if __name__ == "__main__":
    main()
