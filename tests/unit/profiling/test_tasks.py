"""Tasks: our own, those of users, and what is said of a wrong line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from classifier import Complexity, PromptClass
from router.policy.profiles import ProfileError
from router.profiling.tasks import TASKS, read_tasks

TASK: dict[str, Any] = {
    "prompt": "Write a poem\u2028",
    "max_tokens": 8,
    "check": {"type": "exact", "values": ["x"]},
}


def read(path: Path, *rows: Any) -> Any:
    lines = []
    for row in rows:
        is_line = isinstance(row, str)
        lines.append(row if is_line else json.dumps(row, ensure_ascii=False))
    path.write_text("\n".join(lines))
    return read_tasks(path)


def test_our_own_tasks_can_be_read() -> None:
    """They are of each class in which an answer can be right or wrong."""
    tasks = read_tasks(TASKS)
    assert {task.prompt_class for task in tasks} == set(PromptClass) - {
        PromptClass.UNKNOWN,
        PromptClass.SMALL_TALK,
    }
    assert len({task.digest for task in tasks}) == len(tasks)


def test_the_classifier_judges_what_a_line_leaves_out(tmp_path: Path) -> None:
    judged = {**TASK, "id": "a", "class": "math", "complexity": "complex"}
    rows = ("", TASK, judged)
    first, second = read(tmp_path / "t", *rows)
    assert first.id == "line-2"
    assert first.prompt_class is PromptClass.WRITING
    assert second.id == "a"
    assert second.prompt_class is PromptClass.MATH
    assert second.complexity is Complexity.COMPLEX


def test_a_digest_changes_with_all_that_decides_the_outcome_and_nothing_else(
    tmp_path: Path,
) -> None:
    checks = (
        {"type": "exact", "values": ["y"]},
        {"type": "json"},
        {"type": "json", "schema": {"type": "null"}},
    )
    changes = [
        ("prompt", "b"),
        ("max_tokens", 9),
        ("system", "s"),
        *(("check", check) for check in checks),
    ]
    changed = [{**TASK, key: value} for key, value in changes]
    rows = [TASK, *changed, {**TASK, "class": "math"}]
    tasks = read(tmp_path / "t", *rows)
    digests = [task.digest for task in tasks]
    assert len(set(digests)) == 7
    assert digests[-1] == digests[0]


# Digests of shipped tasks, one of each check, as journals from before tools and turns have them.
EARLIER_DIGESTS = {
    "chat-t-001": "37799867c4ac6c60",
    "chat-t-006": "6a770d39b1e6c4c0",
    "chat-t-008": "659d89eae1cbc05d",
    "chat-t-013": "70f2063b4afd234b",
    "chat-t-027": "8d06aa16249f1e37",
    "code-t-021": "20e21a8f624d3c62",
    "extraction-m-001": "191548e5387f6321",
    "multilingual-c-021": "2fe672e04f744720",
    "runs-001": "9bb9d95bc18068cb",
}


def test_answers_in_earlier_journals_still_count() -> None:
    tasks = {task.id: task for task in read_tasks(TASKS)}
    digests = {task_id: tasks[task_id].digest for task_id in EARLIER_DIGESTS}
    assert digests == EARLIER_DIGESTS


def tool(name: str = "get_weather") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def calls_check(**argument: Any) -> dict[str, Any]:
    """Return a check that expects one call with the argument city."""
    call = {"name": "get_weather", "arguments": {"city": argument}}
    return {"type": "calls", "calls": [call]}


def earlier_call(arguments: str = '{"city": "Oslo"}') -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(call_id: str = "call_1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "4 °C"}


def test_a_task_may_offer_tools_and_have_turns_after_its_prompt(tmp_path: Path) -> None:
    turns = [earlier_call(), result()]
    row = {**TASK, "system": "Be brief.", "tools": [tool()], "turns": turns}
    plain, with_tools = read(tmp_path / "t", TASK, row)
    roles = [message["role"] for message in with_tools.messages]
    assert roles == ["system", "user", "assistant", "tool"]
    assert with_tools.messages[2] == earlier_call()
    assert with_tools.tools == (tool(),)
    assert with_tools.input_chars > plain.input_chars + len(json.dumps(turns)) - 10


def test_expected_calls_have_what_their_function_requires_as_written(
    tmp_path: Path,
) -> None:
    offered = tool()
    parameters = offered["function"]["parameters"]
    parameters["required"] = ["city"]
    optional = calls_check(values=["Oslo"], optional=True)
    with pytest.raises(ProfileError, match="get_weather requires city"):
        read(tmp_path / "t", {**TASK, "tools": [offered], "check": optional})
    parameters["properties"]["city"]["enum"] = ["Oslo", "Bergen"]
    loose = calls_check(values=["Oslo"])
    with pytest.raises(ProfileError, match="has an enum"):
        read(tmp_path / "t", {**TASK, "tools": [offered], "check": loose})
    exact = calls_check(values=["Oslo"], exact=True)
    (task,) = read(tmp_path / "t", {**TASK, "tools": [offered], "check": exact})
    assert task.check.calls[0].arguments["city"].is_exact


def test_tools_and_turns_are_part_of_the_digest(tmp_path: Path) -> None:
    rows = (
        TASK,
        {**TASK, "tools": [tool()]},
        {**TASK, "tools": [tool("get_weather_2")]},
        {**TASK, "turns": [earlier_call(), result()]},
        {**TASK, "tools": [], "turns": []},
    )
    digests = [task.digest for task in read(tmp_path / "t", *rows)]
    assert len(set(digests)) == 4
    assert digests[-1] == digests[0]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({**TASK, "class": "poem"}, "line 2: class: Input should be 'chat', "),
        ({**TASK, "max_token": 8}, "line 2: max_token: there is no such field; there are id, class, complexity, prompt"),
        ({**TASK, "check": {"type": "exact", "value": "x"}}, "line 2: check.exact.values: Field required"),
        ({**TASK, "check": {"type": "exact", "values": ["x"], "any": 1}}, "check.exact.any: there is no such field; there are type, values"),
        ({**TASK, "check": {"type": "is"}}, "'number', 'choice', 'exact', 'contains'"),
        ({**TASK, "check": {}}, "line 2: check: it needs a type, one of number, choice"),
        ({**TASK, "check": {"type": "regex", "pattern": "("}}, "check.regex.pattern: no pattern of the library regex"),
        ({**TASK, "prompt": 1}, "line 2: prompt: Input should be a valid string"),
        ({**TASK, "id": "line-1"}, "line 2: id: 'line-1' is line 1's; ids are unique"),
        ({**TASK, "tools": [{"type": "function"}]}, "line 2: tools: 0.function: Field required"),
        ({**TASK, "tools": [tool(""), tool()]}, "line 2: tools: 0.function.name: String should match"),
        ({**TASK, "tools": [tool(), tool()]}, "line 2: tools: two functions are named get_weather"),
        ({**TASK, "turns": [earlier_call(), result("call_2")]}, "turns: tool_call_id 'call_2' is the id of no earlier call"),
        ({**TASK, "turns": [earlier_call()]}, "turns: the last message must be the user's or a tool's result"),
        ({**TASK, "turns": [earlier_call("{"), result()]}, "turns: 0.assistant.tool_calls.0.function.arguments: "),
        ({**TASK, "check": calls_check(values=["Oslo"])}, "line 2: a task: the function get_weather is not offered; tools has none"),
        ({**TASK, "tools": [tool()], "check": calls_check(values=[4])}, 'line 2: a task: get_weather.city: 4 is not of type "string"'),
        ({**TASK, "tools": [tool()], "check": calls_check(vals=[4])}, "city.vals: there is no such field; there are values, schema, optional, exact"),
        ({**TASK, "tools": [tool()], "check": {"type": "calls", "calls": [{"name": "get_weather", "args": {}}]}}, "args: there is no such field; there are name, arguments"),
        ({**TASK, "tools": [tool()], "check": {"type": "calls", "calls": [], "text": {"type": "exact", "values": ["a"], "all": "a"}}}, "all: there is no such field; there are type, values"),
        ({**TASK, "tools": [tool()], "check": {"type": "calls", "calls": [{"name": "get_weather", "arguments": {"town": ["Oslo"]}}]}}, "get_weather has no argument town; it has city"),
        ([], "line 2: a task: Input should be a valid dictionary"),
        ("{", "line 2: a task is a JSON object: Expecting"),
        ("[" * 100_000, "line 2: it is nested too deep"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path: Path, row: Any, why: str) -> None:
    with pytest.raises(ProfileError) as error:
        read(tmp_path / "tasks.jsonl", TASK, row)
    assert str(tmp_path / "tasks.jsonl") in str(error.value)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"\n \n", "no tasks"), (b"\xff", "be read"), (None, "be read")],
)
def test_a_file_without_tasks_is_refused(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "tasks.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProfileError, match=why):
        read_tasks(path)


def test_tools_tell_the_class_that_a_line_leaves_out(tmp_path: Path) -> None:
    offers = {**TASK, "prompt": "hello there", "tools": [tool()]}
    has_result = {**TASK, "turns": [earlier_call(), result()]}
    talks_on = {**TASK, "turns": [{"role": "user", "content": "And a title."}]}
    tasks = read(tmp_path / "t", offers, has_result, talks_on)
    classes = [task.prompt_class for task in tasks]
    assert classes == [PromptClass.TOOLS, PromptClass.TOOLS, PromptClass.WRITING]
