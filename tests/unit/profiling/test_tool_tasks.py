"""The suite's tasks with tools: each accepts its right answer, and refuses every spoiled one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema_rs
import pytest

from classifier import Complexity, PromptClass
from router.profiling.calls import ExpectedArgument, ExpectedCall
from router.profiling.checks import CallsCheck
from router.profiling.model_answer import ModelAnswer, ToolCall
from router.profiling.tasks import TASKS, Task, read_tasks

TOOL_TASKS = read_tasks(TASKS / "tools.jsonl")
# Where no call is right: a right text and a wrong one.
TEXTS = {
    "tools-t-023": ("The capital of Italy is Rome.", "The capital of Italy is Milan."),
    "tools-t-024": ("April comes after March.", "May comes after March."),
    "tools-t-025": ("A week has seven days.", "A week has five days."),
    "tools-t-026": ("It is 7 °C in Bergen, and it rains.", "It is 17 °C in Bergen."),
    "tools-t-027": ("Yes, it was shipped on 4 March.", "No, it has not been shipped."),
    "tools-t-028": ("80 US dollars are 73.60 euros.", "80 US dollars are 86.96 euros."),
    "tools-m-023": ("Which order shall I cancel?", "I have cancelled it."),
    "tools-m-024": ("There are 4 letters before it.", "There are 9 letters before it."),
    "tools-m-025": ("kg", "lb"),
    "tools-m-026": ("Rome", "Turin"),
    "tools-m-028": ("The event takes 75 minutes.", "The event takes 45 minutes."),
    "tools-c-022": ("It cannot be returned: it is still in transit.", "I have started the return; it is in transit."),
    "tools-c-028": ("Savings, 213.50 euros", "Checking, 213.50 euros"),
}  # fmt: skip
# Functions that a task offers, with arguments that no task expects.
UNKNOWN_ARGUMENT = "colour_of_the_wish"


def check_of(task: Task) -> CallsCheck:
    assert isinstance(task.check, CallsCheck)
    return task.check


def schemas_of(task: Task) -> dict[str, dict[str, Any]]:
    """Return the schema of each offered function's arguments, by the function's name."""
    functions = [tool["function"] for tool in task.tools]
    return {function["name"]: function["parameters"] for function in functions}


def right_arguments(call: ExpectedCall) -> dict[str, Any]:
    """Return the first right value of each argument that must be there."""
    return {
        name: argument.values[0]
        for name, argument in call.arguments.items()
        if not argument.is_optional
    }


def answer(*calls: tuple[str, Any]) -> ModelAnswer:
    tool_calls = [
        ToolCall(name=name, arguments=json.dumps(arguments))
        for name, arguments in calls
    ]
    return ModelAnswer(text="", tool_calls=tuple(tool_calls))


def right_calls(task: Task) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, right_arguments(call)) for call in check_of(task).calls]


def spoiled_calls(task: Task) -> Iterator[list[tuple[str, Any]]]:
    """Yield lists of calls that are each wrong in one way."""
    calls = right_calls(task)
    yield []
    yield [*calls, calls[0]]
    yield calls[1:]
    for number, (name, arguments) in enumerate(calls):
        for spoiled_call in spoiled_forms(task, name, arguments):
            yield [*calls[:number], spoiled_call, *calls[number + 1 :]]


def spoiled_forms(
    task: Task, name: str, arguments: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield a call with another function, a further argument, one missing, one of another value, and one of another type."""
    for other_name in {*schemas_of(task), f"{name}s"} - {name}:
        yield other_name, arguments
    yield name, {**arguments, UNKNOWN_ARGUMENT: "blue"}
    for argument_name, value in arguments.items():
        yield name, {key: arguments[key] for key in arguments if key != argument_name}
        for spoiled_value in spoiled_values(value):
            yield name, {**arguments, argument_name: spoiled_value}


def spoiled_values(value: Any) -> Iterator[Any]:
    """Yield values of JSON that differ from one."""
    yield None
    if isinstance(value, bool):
        yield not value
        yield str(value).lower()
    elif isinstance(value, int | float):
        yield value + 1
        yield str(value)
    elif isinstance(value, str):
        yield value + "x"
        yield [value]
    elif isinstance(value, list):
        yield value[1:]
        yield [*value, value[0]]
        for spoiled_item in spoiled_values(value[0]):
            yield [spoiled_item, *value[1:]]
    else:
        yield {**value, UNKNOWN_ARGUMENT: 1}
        for name, item in value.items():
            for spoiled_item in spoiled_values(item):
                yield {**value, name: spoiled_item}


WITH_CALLS = [task for task in TOOL_TASKS if check_of(task).calls]
WITH_TEXT = [task for task in TOOL_TASKS if not check_of(task).calls]


def name_of(task: Task) -> str:
    return task.id


def test_the_suite_has_as_many_tasks_with_tools_as_of_other_classes() -> None:
    assert {task.prompt_class for task in TOOL_TASKS} == {PromptClass.TOOLS}
    by_complexity = Counter(task.complexity for task in TOOL_TASKS)
    assert by_complexity == dict.fromkeys(Complexity, 28)
    assert len({task.prompt for task in TOOL_TASKS}) == len(TOOL_TASKS)


def test_the_suite_has_every_sort_of_call() -> None:
    parallel = [task for task in WITH_CALLS if len(check_of(task).calls) > 1]
    after_result = [task for task in TOOL_TASKS if task.turns]
    without_result = [task for task in WITH_TEXT if not task.turns]
    assert len(parallel) >= 8
    assert len(after_result) >= 12
    assert len(without_result) >= 6


@pytest.mark.parametrize("task", TOOL_TASKS, ids=name_of)
def test_ids_of_calls_are_told_apart(task: Task) -> None:
    call_ids = [
        call["id"] for turn in task.turns for call in turn.get("tool_calls", ())
    ]
    assert len(set(call_ids)) == len(call_ids)


@pytest.mark.parametrize("task", WITH_CALLS, ids=name_of)
def test_expected_calls_are_valid_by_their_functions_schemas(task: Task) -> None:
    """Also all values at once: the reader of tasks has checked each alone."""
    schemas = schemas_of(task)
    for name, arguments in right_calls(task):
        jsonschema_rs.validate(schemas[name], arguments)


@pytest.mark.parametrize("task", WITH_CALLS, ids=name_of)
def test_expected_calls_are_accepted_in_any_order(task: Task) -> None:
    calls = right_calls(task)
    assert task.check.passes(answer(*calls))
    assert task.check.passes(answer(*reversed(calls)))


@pytest.mark.parametrize("task", WITH_CALLS, ids=name_of)
def test_optional_arguments_may_be_there(task: Task) -> None:
    calls = []
    for call in check_of(task).calls:
        values = {name: right_value(each) for name, each in call.arguments.items()}
        calls.append((call.name, values))
    assert task.check.passes(answer(*calls))


def right_value(argument: ExpectedArgument) -> Any:
    return argument.values[-1]


@pytest.mark.parametrize("task", WITH_CALLS, ids=name_of)
def test_spoiled_calls_are_refused(task: Task) -> None:
    spoiled = list(spoiled_calls(task))
    accepted = [calls for calls in spoiled if task.check.passes(answer(*calls))]
    assert len(spoiled) > 3
    assert accepted == []
    assert not task.check.passes(ModelAnswer(text="I cannot do that."))


@pytest.mark.parametrize("task", WITH_CALLS, ids=name_of)
def test_calls_that_are_no_json_are_refused(task: Task) -> None:
    cut_calls = [
        ToolCall(name=name, arguments=json.dumps(arguments)[:-1])
        for name, arguments in right_calls(task)
    ]
    assert not task.check.passes(ModelAnswer(text="", tool_calls=tuple(cut_calls)))


@pytest.mark.parametrize("task", WITH_TEXT, ids=name_of)
def test_where_no_call_is_right_the_text_tells(task: Task) -> None:
    right_text, wrong_text = TEXTS[task.id]
    needless_call = ToolCall(name=next(iter(schemas_of(task))), arguments="{}")
    assert task.check.passes(ModelAnswer(text=right_text))
    assert not task.check.passes(ModelAnswer(text=wrong_text))
    assert not task.check.passes(ModelAnswer(text="I do not know."))
    assert not task.check.passes(ModelAnswer(text=""))
    called = ModelAnswer(text=right_text, tool_calls=(needless_call,))
    assert not task.check.passes(called)
