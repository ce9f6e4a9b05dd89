"""The order in which tasks are asked, fixed before the first answer.

Without a limit of time, tasks are asked in the order of their digests, which has nothing to do with what a task is about.
The first tasks are then a sample of all of them.

With a limit of time, that order spends it on a few long answers: on two cores, three tasks took two and a half minutes. So
each class has its turn, and its cheapest tasks come first.

Either order is valid for the sequential test, because neither depends on an answer. Of the tasks that tell something, let
m_i be the expected outcome of the i-th, given those before it. A bet against "the loss is at most m" multiplies the capital
by 1 + g (x_i - m). The same factor divided by 1 + g (m_i - m) belongs to a martingale, in any fixed order. If m_1 to m_n are
at most m on average, the product of their n divisors is at most 1, as a geometric mean is at most the arithmetic one. The
capital is then at most that martingale, to which Ville's inequality applies at all n together.

So what is tested is the mean loss over the tasks asked so far. In the order of digests, it is an estimate for all tasks. In
the order of cost, it is about cheap tasks, with each class counted alike, and the verdict on a class is about its cheap
tasks. A loss that only long answers have is then not found; the report says which lengths were not reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.profiling.tasks import Task

CHARS_PER_TOKEN = 4.0
# In a batch of eight on two cores, a token that is read takes about a tenth of the time of one that is written: 1,500 tokens
# of a prompt took 1,010 ms, and eight tokens of answers 62 ms (docs/limits.md, "Processors"). On a GPU, reading takes less.
READING_COST = 0.1


def task_cost(task: Task, think_tokens: int = 0) -> float:
    """Return about how much work a task is, in tokens that are written.

    Args:
        task: The task.
        think_tokens: Tokens for thoughts on top of its own limit.
    """
    prompt_tokens = task.input_chars / CHARS_PER_TOKEN
    return task.max_tokens + think_tokens + READING_COST * prompt_tokens


def order_by_digest(tasks: Iterable[Task]) -> list[Task]:
    """Return tasks in an order that has nothing to do with what they are about."""
    return sorted(tasks, key=lambda task: task.digest)


def order_by_cost(tasks: Iterable[Task]) -> list[Task]:
    """Return tasks in rounds: each has one task of every class that has tasks left. Both begin with the cheapest task."""
    cheapest_first = sorted(tasks, key=lambda task: (task_cost(task), task.digest))
    in_rounds: list[tuple[int, Task]] = []
    rounds_of_class: Counter[str] = Counter()
    for task in cheapest_first:
        in_rounds.append((rounds_of_class[task.prompt_class], task))
        rounds_of_class[task.prompt_class] += 1
    # the sort is stable, so a round stays in the order of cost
    in_rounds.sort(key=lambda place: place[0])
    return [task for _, task in in_rounds]


class Workload:
    """How much work tasks are, to tell how long the rest of them takes: later tasks may be longer than those before.

    Args:
        tasks: In the order in which they are asked.
        think_tokens: Tokens for thoughts on top of each task's own limit.
    """

    def __init__(self, tasks: Iterable[Task], think_tokens: int) -> None:
        costs = (task_cost(task, think_tokens) for task in tasks)
        # The entry at N is the cost of the first N tasks together.
        self._cost_until = list(accumulate(costs, initial=0.0))

    def remaining_s(self, took_s: float, done: int, expected: int) -> float | None:
        """Return about how long the next tasks take; None: none is done yet, so the pace is not known.

        Args:
            took_s: How long the tasks took that are done, in seconds.
            done: Their number.
            expected: Number of the next tasks.
        """
        if not done:
            return None
        cost_done = self._cost_until[done]
        return took_s * (self._cost_until[done + expected] - cost_done) / cost_done
