"""Comparing answers: counts, when it stops, what counts as not measured, and what is said about it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from classifier import PromptClass
from router.profiling.model_answer import ModelAnswer
from router.profiling.tasks import Task
from router.verification.answers import (
    FAILURES_IN_A_ROW,
    WORSE_ANSWERS_OF_CLASS,
    AnswersOptions,
    AnswersProgress,
    compare_answers,
)
from router.verification.task_order import order_by_cost
from tests.unit.verification.made_tasks import (
    CUT,
    RIGHT,
    WRONG,
    KnownAnswers,
    in_order,
    made_task,
    made_tasks,
)
from tiers.errors import ProbeError, RefusedError
from tiers.verification.findings import Verdict

pytestmark = pytest.mark.anyio
ALL_TASKS = AnswersOptions(stops_early=False, parallel=3)


async def test_each_pair_of_answers_is_counted() -> None:
    tasks = made_tasks(10)
    reference = KnownAnswers(by_id={"task-0": WRONG, "task-1": WRONG, "task-2": WRONG})
    candidate = KnownAnswers(by_id={"task-0": WRONG, "task-3": WRONG, "task-4": CUT})
    finding = await compare_answers(reference, candidate, tasks, ALL_TASKS)
    overall = finding.overall
    assert overall.both_wrong == 1
    assert overall.better == 2
    assert overall.worse == 1
    assert overall.not_measured == 1
    assert overall.both_right == 5
    assert overall.loss == pytest.approx(-1 / 8)
    assert overall.low < -1 / 8 < overall.high
    assert finding.verdict is Verdict.CANNOT_TELL


async def test_it_stops_when_the_loss_is_known() -> None:
    """Where all answers stay right some 250 tasks are enough, whatever the number of tasks under way."""
    tasks = made_tasks(600)
    for parallel in (1, 16):
        candidate = KnownAnswers()
        finding = await compare_answers(
            KnownAnswers(), candidate, tasks, AnswersOptions(parallel=parallel)
        )
        assert finding.verdict is Verdict.SAME
        assert finding.overall.both_right == 251
        assert finding.overall.tasks_needed is None
        assert finding.overall.high < 0.02
        # while an early task is answered, any number of later ones may be
        assert len(candidate.asked) < (253 if parallel == 1 else len(tasks))


async def test_it_goes_on_to_the_last_task_where_that_is_asked_for() -> None:
    tasks = made_tasks(300)
    finding = await compare_answers(KnownAnswers(), KnownAnswers(), tasks, ALL_TASKS)
    assert finding.overall.both_right == 300


async def test_worse_answers_are_known_soon() -> None:
    tasks = made_tasks(600)
    finding = await compare_answers(
        KnownAnswers(), KnownAnswers(usual=WRONG), tasks, AnswersOptions()
    )
    assert finding.verdict is Verdict.WORSE
    assert finding.overall.worse < 15
    assert finding.overall.low > 0.02


async def test_too_few_tasks_leave_it_open_and_say_how_many_are_needed() -> None:
    finding = await compare_answers(
        KnownAnswers(), KnownAnswers(), made_tasks(100), AnswersOptions()
    )
    assert finding.verdict is Verdict.CANNOT_TELL
    assert finding.overall.tasks_needed == 151
    assert finding.overall.high > 0.02


async def test_tasks_count_in_order_whatever_order_they_end_in() -> None:
    """The first task ends last. Nothing counts before it, and it counts although the others alone would have decided."""
    tasks = made_tasks(40)
    first = in_order(tasks)[0]
    others_are_answered = asyncio.Event()

    class SlowAtFirst(KnownAnswers):
        async def answer(self, task: Task) -> ModelAnswer | None:
            answer = await super().answer(task)
            if task is first:
                async with asyncio.timeout(30):
                    await others_are_answered.wait()
            elif len(self.asked) == 30:
                others_are_answered.set()
            return answer

    counted: list[int] = []

    def note_progress(progress: AnswersProgress) -> None:
        if not others_are_answered.is_set():
            counted.append(progress.tasks_done)

    candidate = SlowAtFirst(usual=WRONG, by_id={first.id: RIGHT})
    finding = await compare_answers(
        KnownAnswers(), candidate, tasks, AnswersOptions(parallel=8), note_progress
    )
    assert set(counted) == {0}
    assert finding.overall.both_right == 1
    assert finding.verdict is Verdict.WORSE


async def test_the_order_is_the_same_for_any_order_of_the_tasks() -> None:
    tasks = made_tasks(20)
    forwards = KnownAnswers()
    backwards = KnownAnswers()
    options = AnswersOptions(parallel=1, max_tasks=5)
    await compare_answers(forwards, KnownAnswers(), tasks, options)
    await compare_answers(backwards, KnownAnswers(), tasks[::-1], options)
    assert forwards.asked == [task.id for task in in_order(tasks)[:5]]
    assert backwards.asked == forwards.asked


async def test_classes_are_told_apart_at_a_corrected_confidence() -> None:
    math = made_tasks(12, **{"class": PromptClass.MATH})
    chat = tuple(made_task(number) for number in range(100, 112))
    candidate = KnownAnswers(by_id={task.id: WRONG for task in math})
    finding = await compare_answers(
        KnownAnswers(), candidate, math + chat, AnswersOptions(stops_early=False)
    )
    by_class = {each.prompt_class: each for each in finding.by_class}
    assert set(by_class) == {PromptClass.MATH, PromptClass.CHAT}
    assert by_class[PromptClass.MATH].worse == 12
    assert by_class[PromptClass.MATH].verdict is Verdict.WORSE
    assert by_class[PromptClass.CHAT].both_right == 12
    assert by_class[PromptClass.CHAT].verdict is Verdict.CANNOT_TELL
    alone = await compare_answers(
        KnownAnswers(), candidate, math, AnswersOptions(stops_early=False)
    )
    assert alone.by_class[0].low > by_class[PromptClass.MATH].low


async def test_worse_answers_are_kept_side_by_side() -> None:
    tasks = made_tasks(WORSE_ANSWERS_OF_CLASS + 10)
    finding = await compare_answers(
        KnownAnswers(), KnownAnswers(usual=WRONG), tasks, ALL_TASKS
    )
    assert len(finding.worse_answers) == WORSE_ANSWERS_OF_CLASS
    shown = finding.worse_answers[0]
    assert shown.task == in_order(tasks)[0].id
    assert shown.prompt == in_order(tasks)[0].prompt
    assert shown.wanted == 'a text with "Paris"'
    assert shown.reference == "It is Paris."
    assert shown.candidate == "It is Rome."


async def test_answers_cut_while_thinking_are_not_measured() -> None:
    """They are neither right nor wrong, and the report says what to raise."""
    options = AnswersOptions(stops_early=False, think_tokens=2048)
    finding = await compare_answers(
        KnownAnswers(), KnownAnswers(usual=CUT), made_tasks(12), options
    )
    assert finding.overall.not_measured == 12
    assert finding.overall.decisive == 0
    assert finding.verdict is Verdict.CANNOT_TELL
    cut, more_often, unmeasured = finding.not_measured
    assert "The candidate alone was cut while thinking at 12 tasks" in more_often
    assert "12 answers of the candidate cut while the model was thinking" in cut
    assert "Raise --think-tokens; now it is 2,048" in cut
    assert unmeasured == "No task of the class chat could be measured."


async def test_a_few_cut_answers_more_are_chance() -> None:
    candidate = KnownAnswers(by_id={"task-1": CUT, "task-2": CUT})
    reference = KnownAnswers(by_id={"task-2": CUT})
    finding = await compare_answers(reference, candidate, made_tasks(20), ALL_TASKS)
    assert finding.overall.not_measured == 2
    assert len(finding.not_measured) == 2
    sentences = " ".join(finding.not_measured)
    assert "1 answer of the reference cut" in sentences
    assert "2 answers of the candidate cut" in sentences


async def test_refused_tasks_are_not_measured_and_stop_nothing() -> None:
    tasks = made_tasks(3 * FAILURES_IN_A_ROW)
    refusal = RefusedError("HTTP 400: this model has no tool parser")
    finding = await compare_answers(
        KnownAnswers(), KnownAnswers(usual=refusal), tasks, ALL_TASKS
    )
    assert finding.overall.not_measured == len(tasks)
    assert (
        "15 tasks that the candidate refused. The last refusal: HTTP 400: this model has no tool parser"
        in finding.not_measured[0]
    )


async def test_a_task_at_which_an_engine_fails_is_told_and_the_others_count() -> None:
    error = ProbeError("no complete answer within 900 s")
    reference = KnownAnswers(by_id={"task-3": error})
    finding = await compare_answers(
        reference, KnownAnswers(), made_tasks(20), ALL_TASKS
    )
    assert finding.overall.both_right == 19
    assert finding.overall.not_measured == 1
    assert finding.not_measured == (
        "Not measured: 1 task at which the reference failed. The last failure: no complete answer within 900 s",
    )


async def test_an_engine_that_is_away_from_the_start_is_an_error() -> None:
    candidate = KnownAnswers(usual=ProbeError("ConnectError"))
    with pytest.raises(
        ProbeError,
        match=r"the candidate failed at 5 tasks one after the other.*ConnectError",
    ):
        await compare_answers(
            KnownAnswers(), candidate, made_tasks(100), AnswersOptions(parallel=2)
        )
    assert len(candidate.asked) <= FAILURES_IN_A_ROW + 2


async def test_an_engine_that_goes_away_ends_the_comparison_with_what_is_known() -> (
    None
):
    tasks = made_tasks(100)
    later = in_order(tasks)[40:]
    candidate = KnownAnswers(by_id={task.id: ProbeError("it died") for task in later})
    finding = await compare_answers(
        KnownAnswers(), candidate, tasks, AnswersOptions(parallel=1)
    )
    assert finding.overall.both_right == 40
    assert len(candidate.asked) == 40 + FAILURES_IN_A_ROW
    assert finding.verdict is Verdict.CANNOT_TELL
    assert (
        "The candidate failed at 5 tasks one after the other"
        in (finding.not_measured[0])
    )
    assert "it died" in finding.not_measured[0]


async def test_the_candidate_is_not_asked_what_the_saved_reference_does_not_know() -> (
    None
):
    tasks = made_tasks(10)
    reference = KnownAnswers(by_id={"task-1": None, "task-2": None})
    candidate = KnownAnswers()
    finding = await compare_answers(reference, candidate, tasks, ALL_TASKS)
    assert {"task-1", "task-2"}.isdisjoint(candidate.asked)
    assert finding.overall.not_measured == 2
    assert "The saved reference has no answer to 2 tasks" in finding.not_measured[0]


async def test_the_time_is_limited() -> None:
    """An engine that never answers is left, and the tasks before it count."""
    tasks = made_tasks(30)
    stuck = order_by_cost(tasks)[10]

    class Stuck(KnownAnswers):
        async def answer(self, task: Task) -> ModelAnswer | None:
            if task is stuck:
                await asyncio.Event().wait()
            return await super().answer(task)

    finding = await compare_answers(
        KnownAnswers(), Stuck(), tasks, AnswersOptions(time_limit_s=0.5)
    )
    counted = finding.overall.both_right
    assert counted <= 10
    assert finding.not_measured[0] == (
        f"The time was used up after {counted} of 30 tasks. Raise --minutes to know more."
    )


async def test_with_a_limit_of_time_cheap_tasks_of_each_class_come_first() -> None:
    """The long ones of a class come last, and the report says that they were not reached."""
    long_math = made_task(0, **{"class": PromptClass.MATH, "max_tokens": 900})
    short_math = made_task(1, **{"class": PromptClass.MATH, "max_tokens": 20})
    chat = made_tasks(30)[2:]
    tasks = (long_math, *chat, short_math)

    class StuckAtLongAnswers(KnownAnswers):
        async def answer(self, task: Task) -> ModelAnswer | None:
            answer = await super().answer(task)
            if task is long_math:
                await asyncio.Event().wait()
            return answer

    reference = KnownAnswers()
    options = AnswersOptions(parallel=1, time_limit_s=0.5)
    finding = await compare_answers(reference, StuckAtLongAnswers(), tasks, options)
    # the second round begins with a chat, which is cheaper
    assert reference.asked[1] == short_math.id
    assert reference.asked[3] == long_math.id
    assert finding.overall.both_right == 3
    assert finding.not_measured[1] == (
        "With a limit of time, the shortest tasks of each class come first: the verdict is about answers of up to 20 tokens, "
        "and 1 task with longer ones were not reached."
    )


async def test_a_limit_of_time_does_not_change_which_tasks_are_asked() -> None:
    """A reference that was saved with as many tasks knows all of them."""
    tasks = tuple(made_task(number, max_tokens=100 - number) for number in range(40))
    unlimited = KnownAnswers()
    limited = KnownAnswers()
    await compare_answers(
        unlimited, KnownAnswers(), tasks, AnswersOptions(max_tasks=10, parallel=1)
    )
    options = AnswersOptions(max_tasks=10, parallel=1, time_limit_s=600.0)
    await compare_answers(limited, KnownAnswers(), tasks, options)
    assert sorted(limited.asked) == sorted(unlimited.asked)
    assert limited.asked != unlimited.asked


async def test_the_remaining_time_ends_with_the_limit_of_time() -> None:
    seen: list[AnswersProgress] = []
    options = AnswersOptions(parallel=1, time_limit_s=60.0)
    await compare_answers(
        KnownAnswers(), KnownAnswers(), made_tasks(20), options, seen.append
    )
    remaining = [progress.remaining_s for progress in seen]
    assert len(remaining) == 21
    assert all(left_s is not None and left_s <= 60.0 for left_s in remaining)


async def test_progress_tells_counts_and_what_is_left() -> None:
    seen: list[AnswersProgress] = []
    await compare_answers(
        KnownAnswers(),
        KnownAnswers(),
        made_tasks(600),
        AnswersOptions(parallel=4),
        seen.append,
    )
    assert [progress.tasks_done for progress in seen] == list(range(252))
    assert seen[0].remaining_s is None
    assert seen[0].tasks_expected == 600
    assert seen[100].tasks_expected == 151
    assert seen[100].test.counts.both_right == 100
    assert seen[100].remaining_s is not None
    assert seen[-1].tasks_expected == 0


async def test_programs_are_run_where_somebody_runs_them() -> None:
    runs = made_task(1, check={"type": "runs", "test": "assert f(1) == 2"})
    tasks = (made_task(0), runs)
    without = await compare_answers(KnownAnswers(), KnownAnswers(), tasks, ALL_TASKS)
    assert without.overall.both_right == 1
    assert without.not_measured[0] == (
        "Left out: 1 task with a program as the answer. --run-code runs it in a sandbox."
    )
    ran: list[str] = []

    async def run_code(text: str, test: str) -> bool:
        ran.append(test)
        return text == RIGHT.text

    options = AnswersOptions(stops_early=False, run_code=run_code)
    finding = await compare_answers(KnownAnswers(), KnownAnswers(), tasks, options)
    assert finding.overall.both_right == 2
    assert ran == ["assert f(1) == 2"] * 2


async def test_without_tasks_nothing_is_known() -> None:
    finding = await compare_answers(
        KnownAnswers(), KnownAnswers(), (), AnswersOptions()
    )
    assert finding.verdict is Verdict.CANNOT_TELL
    assert finding.overall.loss is None
    assert finding.by_class == ()


@pytest.mark.parametrize(
    "field", [{"parallel": 0}, {"max_tasks": 0}, {"time_limit_s": 0.0}]
)
async def test_options_out_of_range_are_named(field: dict[str, Any]) -> None:
    name = next(iter(field))
    with pytest.raises(ValueError, match=f"{name} is 0.*it must be"):
        AnswersOptions(**field)
