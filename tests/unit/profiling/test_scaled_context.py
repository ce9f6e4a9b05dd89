"""Tasks as long as a context: their length, that they are the same each time, and that their answers stand in them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from classifier import PromptClass
from router.profiling.model_answer import ModelAnswer
from router.profiling.scaled_context import (
    CHARS_PER_TOKEN,
    LARGEST_CONTEXT,
    SHARES,
    scaled_tasks,
)
from router.profiling.tasks import Task

CONTEXTS = (2048, 8192, 40_000)
FORMS = {"needle", "needles", "order", "count", "not-mentioned", "copy"}


def form_of(task: Task) -> str:
    return task.id.removeprefix("scaled-").rpartition("-")[0]


def of_form(form: str, context: int) -> list[Task]:
    return [task for task in scaled_tasks(context) if form_of(task) == form]


def passes(task: Task, answer: str) -> bool:
    return task.check.passes(ModelAnswer(text=answer))


@pytest.mark.parametrize("context", CONTEXTS)
def test_prompts_and_answers_fit_the_context_and_fill_its_shares(context: int) -> None:
    tasks = scaled_tasks(context)
    lengths = [len(task.prompt) / CHARS_PER_TOKEN + task.max_tokens for task in tasks]
    assert max(lengths) <= context * SHARES[-1]
    assert max(lengths) > context * SHARES[-1] * 0.85
    assert {form_of(task) for task in tasks} == FORMS
    assert {task.prompt_class for task in tasks} == {PromptClass.LONG_CONTEXT}


def test_each_form_comes_in_each_share() -> None:
    for form in FORMS:
        lengths = [len(task.prompt) for task in of_form(form, 8192)]
        assert len(lengths) == len(SHARES)
        assert lengths == sorted(lengths)
        assert lengths[-1] > 3 * lengths[0]


def test_a_short_context_leaves_out_shares_and_a_long_one_is_not_filled() -> None:
    assert scaled_tasks(256) == ()
    assert len(scaled_tasks(1024)) < len(scaled_tasks(8192))
    assert scaled_tasks(10 * LARGEST_CONTEXT) == scaled_tasks(LARGEST_CONTEXT)


def test_the_same_context_gives_the_same_tasks() -> None:
    """Journals and saved answers know tasks by their digests."""
    first = [task.digest for task in scaled_tasks(4096)]
    assert first == [task.digest for task in scaled_tasks(4096)]
    assert len(set(first)) == len(first)
    assert first[0] == FIRST_DIGEST


FIRST_DIGEST = "3c7bc9b612ac326e"


@pytest.mark.parametrize("context", CONTEXTS)
def test_no_two_prompts_begin_alike(context: int) -> None:
    """An engine that keeps prefixes has to read each prompt anew."""
    beginnings = {task.prompt[:160] for task in scaled_tasks(context)}
    assert len(beginnings) == len(scaled_tasks(context))


@pytest.mark.parametrize("context", CONTEXTS)
def test_needles_stand_once_in_the_text(context: int) -> None:
    for task in of_form("needle", context):
        number = str(int(task.check.model_dump()["value"]))
        assert len(re.findall(rf"\b{number}\b", task.prompt)) == 1
        assert passes(task, f"Hook {number}.")
        assert not passes(task, "Hook 12.")
    for task in of_form("needles", context):
        numbers = re.findall(r"\d{4}", task.check.model_dump()["pattern"])
        assert len(numbers) == 4
        for number in numbers:
            assert len(re.findall(rf"\b{number}\b", task.prompt)) == 1
        assert passes(task, ", ".join(numbers))
        assert not passes(task, ", ".join(reversed(numbers)))


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_order_is_that_of_the_text(context: int) -> None:
    for task in of_form("order", context):
        bells = re.compile(
            r"great bell was rung by (\w+),|hands of (\w+)\.|turn of (\w+) to ring the great bell"
        )
        names = ["".join(match.groups("")) for match in bells.finditer(task.prompt)]
        assert passes(task, "\n".join(names))
        assert not passes(task, "\n".join([names[1], names[0], *names[2:]]))
        assert not passes(task, "\n".join(names[:-1]))


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_count_is_that_of_the_text(context: int) -> None:
    for task in of_form("count", context):
        stops = re.findall(
            r"ferry stayed at its mooring|ferry did not sail|ferry remained where|there was no crossing",
            task.prompt,
        )
        assert passes(task, str(len(stops)))
        assert not passes(task, str(len(stops) + 1))


@pytest.mark.parametrize("context", CONTEXTS)
def test_what_was_not_mentioned_stands_in_the_question_alone(context: int) -> None:
    for task in of_form("not-mentioned", context):
        check: dict[str, Any] = task.check.model_dump()
        counts = {option: task.prompt.count(option) for option in check["options"]}
        assert counts.pop(check["value"]) == 1
        assert set(counts.values()) == {2}
        assert passes(task, f"The {check['value']}.")
        assert not passes(task, f"The {next(iter(counts))}.")


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_passage_to_copy_stands_in_the_text(context: int) -> None:
    for task in of_form("copy", context):
        lines = task.check.model_dump()["lines"]
        assert "\n".join(lines) in task.prompt
        assert passes(task, "\n".join(lines))
        assert not passes(task, "\n".join(lines[:-1]))
        others = re.findall(r"it said:\n(.*?)\n\n", task.prompt + "\n\n", re.DOTALL)
        assert sum(passes(task, other) for other in others) == 1
