"""Compares the answers of two engines to tasks that can be checked, until the loss is known.

Several tasks are under way at a time, and they count in the order in which they are asked, whatever order they end in: else
a run that stops early would have the quick answers alone. The order is fixed before the first answer (``task_order``), so it
is the same in each run.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from classifier import PromptClass
from router.profiling.checks import RunsCheck
from router.profiling.model_answer import ModelAnswer
from router.profiling.tasks import Task
from router.verification.findings import (
    AnswerComparison,
    AnswersFinding,
    WorseAnswer,
)
from router.verification.replies import (
    Obstacle,
    RepliesToTask,
    Reply,
    unmeasured_sentences,
)
from router.verification.sequential import PairCounts, PairOutcome, SequentialTest
from router.verification.task_order import Workload, order_by_cost, order_by_digest
from router.verification.task_texts import answer_text, prompt_text, wanted_text
from router.verification.wording import count_words
from tiers.errors import ProbeError, RefusedError
from tiers.verification.findings import Role, Verdict

# An engine that fails so many tasks without an answer between them is not asked any more.
FAILURES_IN_A_ROW = 5
WORSE_ANSWERS_OF_CLASS = 20


class Answerer(Protocol):
    """Answers tasks: an engine, or answers that were saved."""

    async def answer(self, task: Task) -> ModelAnswer | None:
        """Answer a task; None: there is no saved answer to it.

        Raises:
            RefusedError: The engine does not take this task.
            ProbeError: The engine fails.
        """


@dataclass(frozen=True, slots=True)
class AnswersOptions:
    """How answers are compared.

    Attributes:
        tolerated: The loss that is accepted, a share from 0 to below 1.
        confidence: Of verdicts and intervals, above 0 and below 1.
        parallel: Tasks at a time, 1 or more.
        max_tasks: Largest number of tasks; None: all of them.
        time_limit_s: Longest time, in seconds; None: there is no limit. With one, cheap tasks of each class come first.
        think_tokens: Tokens for thoughts that the answers are asked with, for the report and the remaining time.
        run_code: Runs the code of an answer with a test; None: tasks that need it are left out.
        stops_early: Whether to stop as soon as the verdict over all classes is known, rather than after all tasks.
    """

    tolerated: float = 0.02
    confidence: float = 0.95
    parallel: int = 16
    max_tasks: int | None = None
    time_limit_s: float | None = None
    think_tokens: int = 0
    run_code: Callable[[str, str], Awaitable[bool]] | None = None
    stops_early: bool = True

    def __post_init__(self) -> None:
        if self.parallel < 1:
            raise ValueError(f"parallel is {self.parallel}; it must be 1 or more")
        if self.max_tasks is not None and self.max_tasks < 1:
            raise ValueError(f"max_tasks is {self.max_tasks}; it must be 1 or more")
        if self.time_limit_s is not None and self.time_limit_s <= 0:
            raise ValueError(f"time_limit_s is {self.time_limit_s}; it must be above 0")


@dataclass(frozen=True, slots=True)
class AnswersProgress:
    """How far a comparison is.

    Attributes:
        tasks_done: Tasks that count by now.
        tasks_total: Tasks that are asked at most.
        test: Counts, verdict and interval so far, over all classes.
        tasks_expected: About how many more tasks will be asked.
        remaining_s: About how many seconds that takes, at most those until the limit of time; None: nothing is known yet.
    """

    tasks_done: int
    tasks_total: int
    test: SequentialTest
    tasks_expected: int
    remaining_s: float | None


def ignore_progress(_progress: AnswersProgress) -> None:
    """Take no notice of the progress."""


async def compare_answers(
    reference: Answerer,
    candidate: Answerer,
    tasks: Sequence[Task],
    options: AnswersOptions,
    report_progress: Callable[[AnswersProgress], None] = ignore_progress,
) -> AnswersFinding:
    """Have two engines answer tasks until the verdict over all classes is known, or the tasks or the time are used up.

    Args:
        reference: Answers as they should be.
        candidate: Is compared with the reference.
        tasks: In any order.
        options: How to compare.
        report_progress: Called at the beginning and after each task.

    Raises:
        ProbeError: An engine fails before anything could be compared.
    """
    comparison = _Comparison(reference, candidate, tasks, options, report_progress)
    return await comparison.run()


class _Comparison:
    """One comparison."""

    def __init__(
        self,
        reference: Answerer,
        candidate: Answerer,
        tasks: Sequence[Task],
        options: AnswersOptions,
        report_progress: Callable[[AnswersProgress], None],
    ) -> None:
        self._answerers: dict[Role, Answerer] = {
            "reference": reference,
            "candidate": candidate,
        }
        self._options = options
        self._report_progress = report_progress
        self._needs_run = 0
        self._beyond_max_tasks = 0
        self._tasks = self._tasks_in_order(tasks)
        self._workload = Workload(self._tasks, options.think_tokens)
        self._classes = {task.prompt_class for task in self._tasks}
        self._test = SequentialTest(options.tolerated, options.confidence)
        self._class_counts: defaultdict[PromptClass, PairCounts] = defaultdict(
            PairCounts
        )
        self._counted: list[RepliesToTask] = []
        self._asked = 0
        self._under_way: set[asyncio.Task[None]] = set()
        # Replies to tasks that wait for those of an earlier task, by the task's place in the order.
        self._early: dict[int, RepliesToTask] = {}
        self._failures_in_a_row: Counter[Role] = Counter()
        self._last_failures: dict[Role, str] = {}
        self._has_run_out_of_time = False
        self._began = time.monotonic()

    def _tasks_in_order(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks to be asked, in their order, and count those that need their answer to be run.

        Which ones are asked at most does not depend on the limit of time: a saved reference has answers to the same ones.
        """
        possible: list[Task] = []
        for task in order_by_digest(tasks):
            if isinstance(task.check, RunsCheck) and self._options.run_code is None:
                self._needs_run += 1
            else:
                possible.append(task)
        chosen = possible[: self._options.max_tasks]
        self._beyond_max_tasks = len(possible) - len(chosen)
        if self._options.time_limit_s is None:
            return chosen
        return order_by_cost(chosen)

    async def run(self) -> AnswersFinding:
        """Ask until it is known, and return what was found."""
        self._show()
        try:
            while not self._is_finished():
                self._start_tasks()
                if not self._under_way:
                    break
                await self._wait_for_reply()
        finally:
            await self._cancel_tasks()
        self._check_that_something_was_compared()
        return self._finding()

    def _is_finished(self) -> bool:
        if self._has_run_out_of_time or self._failing_role() is not None:
            return True
        return self._is_known()

    def _is_known(self) -> bool:
        """Tell whether the verdict is known and nothing more is asked for."""
        return (
            self._options.stops_early and self._test.verdict is not Verdict.CANNOT_TELL
        )

    def _start_tasks(self) -> None:
        while len(self._under_way) < self._options.parallel and self._asked < len(
            self._tasks
        ):
            self._under_way.add(asyncio.create_task(self._compare(self._asked)))
            self._asked += 1

    async def _wait_for_reply(self) -> None:
        """Wait until a task is done or the time is used up; raise what the task raised."""
        done, self._under_way = await asyncio.wait(
            self._under_way,
            timeout=self._time_left_s(),
            return_when=asyncio.FIRST_COMPLETED,
        )
        for finished in done:
            finished.result()
        self._has_run_out_of_time = self._time_left_s() == 0

    def _time_left_s(self) -> float | None:
        """Return the time until the limit, 0 or more; None: there is no limit."""
        if self._options.time_limit_s is None:
            return None
        return max(self._options.time_limit_s - self._took_s(), 0)

    async def _cancel_tasks(self) -> None:
        for unfinished in self._under_way:
            unfinished.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _compare(self, place: int) -> None:
        """Have both engines answer the task at a place, and count what can be counted now."""
        task = self._tasks[place]
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(self._ask("candidate", task))
            reference = await self._ask("reference", task)
            if reference.obstacle is Obstacle.NOT_SAVED:
                # The candidate's answer could be compared with nothing.
                asking.cancel()
        candidate = Reply() if asking.cancelled() else asking.result()
        self._early[place] = RepliesToTask(task, reference, candidate)
        self._count_in_order()

    def _count_in_order(self) -> None:
        """Count the tasks whose earlier ones have all been counted, until the verdict is known."""
        while len(self._counted) in self._early and not self._is_known():
            replies = self._early.pop(len(self._counted))
            prompt_class = replies.task.prompt_class
            of_class = self._class_counts[prompt_class]
            self._class_counts[prompt_class] = of_class.after(replies.outcome)
            self._test = self._test.after(replies.outcome)
            self._counted.append(replies)
            self._show()

    async def _ask(self, role: Role, task: Task) -> Reply:
        """Have one engine answer a task, and judge the answer."""
        try:
            answer = await self._answerers[role].answer(task)
        except RefusedError as error:
            return Reply(obstacle=Obstacle.REFUSED, message=str(error))
        except ProbeError as error:
            self._failures_in_a_row[role] += 1
            self._last_failures[role] = str(error)
            return Reply(obstacle=Obstacle.FAILED, message=str(error))
        self._failures_in_a_row[role] = 0
        if answer is None:
            return Reply(obstacle=Obstacle.NOT_SAVED)
        if answer.is_cut_while_thinking:
            return Reply(answer, obstacle=Obstacle.CUT_WHILE_THINKING)
        return Reply(answer, is_right=await self._is_right(task, answer))

    async def _is_right(self, task: Task, answer: ModelAnswer) -> bool:
        run_code = self._options.run_code
        if isinstance(task.check, RunsCheck) and run_code is not None:
            return await run_code(answer.text, task.check.test)
        return await asyncio.to_thread(task.check.passes, answer)

    def _failing_role(self) -> Role | None:
        """Return the engine that fails again and again; None: there is none."""
        for role, failures in self._failures_in_a_row.items():
            if failures >= FAILURES_IN_A_ROW:
                return role
        return None

    def _took_s(self) -> float:
        return time.monotonic() - self._began

    def _show(self) -> None:
        """Report the progress."""
        done = len(self._counted)
        expected = len(self._tasks) - done
        if self._options.stops_early:
            expected = min(expected, self._test.tasks_needed or expected)
            if self._test.verdict is not Verdict.CANNOT_TELL:
                expected = 0
        self._report_progress(
            AnswersProgress(
                tasks_done=done,
                tasks_total=len(self._tasks),
                test=self._test,
                tasks_expected=expected,
                remaining_s=self._remaining_s(done, expected),
            )
        )

    def _remaining_s(self, done: int, expected: int) -> float | None:
        """Return about how long the next tasks take, at most until the limit of time; None: nothing is known yet."""
        remaining_s = self._workload.remaining_s(self._took_s(), done, expected)
        limits = (remaining_s, self._time_left_s())
        return min((limit for limit in limits if limit is not None), default=None)

    def _check_that_something_was_compared(self) -> None:
        """Raise ``ProbeError`` if an engine failed before any task could be compared."""
        role = self._failing_role()
        counts = self._test.counts
        has_compared = counts.tasks > counts.not_measured
        if role is not None and not has_compared:
            raise ProbeError(
                f"the {role} failed at {FAILURES_IN_A_ROW} tasks one after the other, before any answer could be compared: "
                f"{self._last_failures[role]}"
            )

    def _finding(self) -> AnswersFinding:
        return AnswersFinding(
            tolerated=self._options.tolerated,
            confidence=self._options.confidence,
            overall=_comparison_of(None, self._test),
            by_class=tuple(self._by_class()),
            worse_answers=tuple(self._worse_answers()),
            not_measured=(
                *self._interruptions(),
                *unmeasured_sentences(self._counted, self._options.think_tokens),
            ),
            unasked=self._unasked(),
            took_s=self._took_s(),
        )

    def _unasked(self) -> int:
        """Return how many tasks a limit of time or of their number has left out; 0 if an engine failed."""
        if self._failing_role() is not None:
            return 0
        return len(self._tasks) - len(self._counted) + self._beyond_max_tasks

    def _by_class(self) -> list[AnswerComparison]:
        """Return each class that was asked, in the order of ``PromptClass``."""
        return [
            _comparison_of(
                prompt_class,
                self._test.for_class(
                    len(self._classes), self._class_counts[prompt_class]
                ),
            )
            for prompt_class in PromptClass
            if prompt_class in self._class_counts
        ]

    def _worse_answers(self) -> list[WorseAnswer]:
        """Return the answers that got worse, the first ones of each class."""
        worse_answers: list[WorseAnswer] = []
        kept: Counter[PromptClass] = Counter()
        for replies in self._counted:
            prompt_class = replies.task.prompt_class
            is_worse = replies.outcome is PairOutcome.WORSE
            if is_worse and kept[prompt_class] < WORSE_ANSWERS_OF_CLASS:
                kept[prompt_class] += 1
                worse_answers.append(_worse_answer(replies))
        return worse_answers

    def _interruptions(self) -> list[str]:
        """Say why tasks were left out, or were not reached."""
        sentences: list[str] = []
        reached = f"{len(self._counted):,} of {len(self._tasks):,} tasks"
        role = self._failing_role()
        if role is not None:
            sentences.append(
                f"The {role} failed at {FAILURES_IN_A_ROW} tasks one after the other, after {reached}: the rest was not "
                f"asked. Look at its log, and start again. The last failure: {self._last_failures[role]}"
            )
        if self._has_run_out_of_time:
            sentences.append(
                f"The time was used up after {reached}. Raise --minutes to know more."
            )
        unreached_lengths = self._unreached_lengths()
        if unreached_lengths is not None:
            sentences.append(unreached_lengths)
        if self._needs_run:
            sentences.append(
                f"Left out: {count_words(self._needs_run, 'task')} with a program as the answer. --run-code runs it in a "
                "sandbox."
            )
        return sentences

    def _unreached_lengths(self) -> str | None:
        """Say that nothing is known of long answers, where a limit of time put them last; None: they were reached."""
        if self._options.time_limit_s is None or not self._counted:
            return None
        longest = max(replies.task.max_tokens for replies in self._counted)
        unreached = self._tasks[len(self._counted) :]
        longer = sum(task.max_tokens > longest for task in unreached)
        if not longer:
            return None
        return (
            "With a limit of time, the shortest tasks of each class come first: the verdict is about answers of up to "
            f"{longest:,} tokens, and {count_words(longer, 'task')} with longer ones were not reached."
        )


def _comparison_of(
    prompt_class: PromptClass | None, test: SequentialTest
) -> AnswerComparison:
    interval = test.interval
    return AnswerComparison(
        prompt_class=prompt_class,
        both_right=test.counts.both_right,
        worse=test.counts.worse,
        better=test.counts.better,
        both_wrong=test.counts.both_wrong,
        not_measured=test.counts.not_measured,
        low=interval.low,
        high=interval.high,
        verdict=test.verdict,
        tasks_needed=test.tasks_needed,
    )


def _worse_answer(replies: RepliesToTask) -> WorseAnswer:
    task = replies.task
    reference = replies.reference.answer
    candidate = replies.candidate.answer
    assert reference is not None
    assert candidate is not None
    return WorseAnswer(
        task=task.id,
        prompt_class=task.prompt_class,
        prompt=prompt_text(task),
        wanted=wanted_text(task),
        reference=answer_text(reference),
        candidate=answer_text(candidate),
    )
