"""Whether the intervals of the expected losses hold: measured on half of the tasks, checked on the other half.

    .venv/bin/qarr profile quality                                # against what 'qarr up' serves
    .venv/bin/python benchmarks/loss_coverage.py JOURNAL [--parameters 135e6] [--splits 10]

JOURNAL is the file of judged answers that the first command keeps beside its profile. The tasks of each kind are split in
halves at random. One half makes the expected loss with its 90 % interval, by tier and kind; the other half shows a net loss.
That loss is of few answers and scatters by its own variance (``router/policy/losses.py``), so the interval is widened by it.
Printed is the share of net losses within their interval, over all splits: of what is expected now, and of what was expected
until November 2026, when the losses of models of 8 billion parameters counted for every model, with a standard deviation of
once their mean.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from measure import ROOT

sys.path.insert(0, str(ROOT))

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.losses import CONTRADICTED, Z90, ExpectedLoss, losses, measured_loss
from router.policy.published import published_loss
from router.profiling.scoring import JudgedAnswer, count_answers
from tiers.spec import PRECISIONS, STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from router.policy.profiles import AnswerCount, Flips

Kind = tuple[PromptClass, Complexity]
LOWER_TIERS = STANDARD_TIERS[:2]
# of a kind in the half that is checked, which at least one of both precisions got right
MIN_ANSWERS = 3
OLD_LEAST = 1e-4  # published losses were at least that
OLD_UNLIKE = 0.3
LARGE = 8e9


@dataclass(slots=True)
class Coverage:
    """How many net losses there were, and how many of them lay within their interval."""

    seen: int = 0
    now: int = 0
    before: int = 0
    widths: list[float] = field(default_factory=list)

    def add(self, *, now: bool, before: bool, width: float) -> None:
        """Count one net loss."""
        self.seen += 1
        self.now += now
        self.before += before
        self.widths.append(width)


def main() -> None:
    """Read the journal, split it and print the coverage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("journal", type=Path)
    parser.add_argument("--parameters", type=float, default=135e6, help="of the model")
    parser.add_argument("--splits", type=int, default=10)
    options = parser.parse_args()
    answers = read_answers(options.journal)
    tasks = sorted({answer.task for answer in answers})
    print(
        f"$ python benchmarks/loss_coverage.py {options.journal.name} --parameters {options.parameters:g}"
    )
    print(
        f"# {len(tasks)} tasks, {options.splits} splits; {MIN_ANSWERS} or more answers of a kind in the checked half"
    )
    by_tier: dict[str, Coverage] = defaultdict(Coverage)
    for seed in range(options.splits):
        measured, checked = halves(answers, seed)
        for tier in LOWER_TIERS:
            check(tier, measured, checked, options.parameters, by_tier)
    print(
        f"{'':20}{'net losses':>11}{'held now':>10}{'before':>9}{'width of 90 % interval, median':>33}"
    )
    for name, coverage in by_tier.items():
        width = sorted(coverage.widths)[len(coverage.widths) // 2]
        print(
            f"{name:20}{coverage.seen:11}{coverage.now / coverage.seen:10.1%}{coverage.before / coverage.seen:9.1%}"
            f"{width:33.3f}"
        )


def read_answers(journal: Path) -> list[JudgedAnswer]:
    """Read the last answer of each tier to each task."""
    answers: dict[tuple[str, TierName], JudgedAnswer] = {}
    for line in journal.read_text("utf-8").splitlines():
        answer = JudgedAnswer.model_validate(json.loads(line)["answer"])
        answers[answer.task, answer.tier] = answer
    return list(answers.values())


def halves(
    answers: Iterable[JudgedAnswer], seed: int
) -> tuple[list[JudgedAnswer], list[JudgedAnswer]]:
    """Split the tasks of each kind in halves at random, with all tiers' answers to them."""
    tasks_by_kind: dict[Kind, set[str]] = defaultdict(set)
    answers = list(answers)
    for answer in answers:
        tasks_by_kind[answer.prompt_class, answer.complexity].add(answer.task)
    source = random.Random(seed)
    first: set[str] = set()
    for tasks in tasks_by_kind.values():
        ordered = sorted(tasks)
        first.update(source.sample(ordered, len(ordered) // 2))
    return [a for a in answers if a.task in first], [
        a for a in answers if a.task not in first
    ]


def check(
    tier: TierName,
    measured: Sequence[JudgedAnswer],
    checked: Sequence[JudgedAnswer],
    parameters: float,
    by_tier: dict[str, Coverage],
) -> None:
    """Count the net losses of the checked half that lie within what the measured half says."""
    counts = of_tier(tier, measured)
    expected = losses(PRECISIONS[tier], counts, parameters)
    flips_by_kind = {
        (each.prompt_class, each.complexity): each.flips for each in counts
    }
    for each in of_tier(tier, checked):
        if each.flips.answers < MIN_ANSWERS:
            continue
        kind = each.prompt_class, each.complexity
        loss = expected[kind[0]][kind[1]]
        known = flips_by_kind.get(kind)
        before = published_as_before(PRECISIONS[tier], kind, known)
        for name in (tier, "all"):
            by_tier[name].add(
                now=holds(loss, each.flips),
                before=holds(before, each.flips),
                width=loss.high - loss.low,
            )


def of_tier(tier: TierName, answers: Iterable[JudgedAnswer]) -> list[AnswerCount]:
    """Return the counts of one tier."""
    return [each for each in count_answers(answers, LOWER_TIERS) if each.tier is tier]


def published_as_before(
    precision: str, kind: Kind, flips: Flips | None
) -> ExpectedLoss:
    """Return what was expected of a kind until November 2026: a normal distribution, here with an interval of 90 %."""
    mean = max(published_loss(precision, kind, LARGE), OLD_LEAST)
    variance = mean**2
    if flips is not None and flips.answers:
        seen, seen_variance = measured_loss(flips)
        if abs(seen - mean) > CONTRADICTED * math.sqrt(seen_variance):
            variance = OLD_UNLIKE**2
        weight = seen_variance / (seen_variance + variance)
        mean, variance = weight * mean + (1 - weight) * seen, weight * variance
    half = Z90 * math.sqrt(variance)
    mean = max(mean, 0.0)
    return ExpectedLoss(mean, max(mean - half, 0.0), mean + half)


def holds(expected: ExpectedLoss, flips: Flips) -> bool:
    """Return whether the net loss of some answers lies within an interval widened by its own variance."""
    seen, variance = measured_loss(flips)
    above = math.hypot(expected.high - expected.mean, Z90 * math.sqrt(variance))
    below = math.hypot(expected.mean - expected.low, Z90 * math.sqrt(variance))
    return expected.mean - below <= seen <= expected.mean + above


if __name__ == "__main__":
    main()
