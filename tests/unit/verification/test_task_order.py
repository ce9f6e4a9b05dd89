"""The order of tasks where time is limited, and what the rest of them takes."""

from __future__ import annotations

import random

import pytest

from classifier import PromptClass
from router.profiling.tasks import SUITE, TASKS, read_tasks
from router.verification.sequential import PairOutcome, SequentialTest
from router.verification.task_order import (
    Workload,
    order_by_cost,
    order_by_digest,
    task_cost,
)
from tests.unit.verification.made_tasks import made_task, made_tasks
from tiers.verification.findings import Verdict

SUITE_TASKS = read_tasks(TASKS)


def test_each_round_has_a_task_of_every_class() -> None:
    classes = {task.prompt_class for task in SUITE_TASKS}
    rounds = 20
    first = order_by_cost(SUITE_TASKS)[: rounds * len(classes)]
    for prompt_class in classes:
        assert sum(task.prompt_class is prompt_class for task in first) == rounds


def test_the_cheapest_task_of_a_class_comes_first() -> None:
    ordered = order_by_cost(SUITE_TASKS)
    assert sorted(task.digest for task in ordered) == [
        task.digest for task in order_by_digest(SUITE_TASKS)
    ]
    for prompt_class in PromptClass:
        costs = [task_cost(t) for t in ordered if t.prompt_class is prompt_class]
        assert costs == sorted(costs), SUITE


def test_the_order_does_not_depend_on_that_of_the_tasks() -> None:
    shuffled = random.Random(59).sample(SUITE_TASKS, len(SUITE_TASKS))
    assert order_by_cost(shuffled) == order_by_cost(SUITE_TASKS)


def test_a_long_prompt_is_work_and_so_are_thoughts() -> None:
    short = made_task(0)
    long = made_task(1, prompt="a word and more " * 1000)
    assert task_cost(long) > 10 * task_cost(short)
    assert task_cost(short, think_tokens=500) == pytest.approx(task_cost(short) + 500)


def test_what_is_left_counts_by_its_work() -> None:
    """The last task is as much work as 20 others, although it is one task."""
    short = made_tasks(20)
    long = made_task(20, max_tokens=4000)
    workload = Workload((*short, long), think_tokens=0)
    assert workload.remaining_s(0.0, done=0, expected=21) is None
    assert workload.remaining_s(20.0, done=20, expected=0) == 0.0
    share = task_cost(long) / sum(task_cost(task) for task in short)
    assert share > 10
    left_s = workload.remaining_s(20.0, done=20, expected=1)
    assert left_s == pytest.approx(20.0 * share)


def test_verdicts_hold_for_tasks_that_become_harder() -> None:
    """In a fixed order whose first tasks lose less, "worse" is wrong while the mean so far is tolerated: at most 2.5 of 100.

    At the end, the mean loss is exactly what is tolerated, which is where most verdicts are wrong.
    """
    generator = random.Random(59)
    probabilities = [0.02] * 100 + [0.08] * 100
    runs = 400
    wrong = 0
    for _ in range(runs):
        test = SequentialTest(tolerated=0.05, confidence=0.95)
        for probability in probabilities:
            is_worse = generator.random() < probability
            test = test.after(PairOutcome.WORSE if is_worse else PairOutcome.BOTH_RIGHT)
            if test.verdict is Verdict.WORSE:
                wrong += 1
                break
    assert 0 < wrong <= 0.025 * runs
