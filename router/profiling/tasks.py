"""Tasks: prompts whose answers can be checked; our own, and those that users write."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from classifier import Complexity, EstimatingCounter, PromptClass, ToolUse, extract
from router.policy.profiles import Frozen, ProfileError
from router.profiling.calls import ExpectedArgument, ExpectedCall
from router.profiling.checks import CallsCheck, Check
from router.profiling.conversation import (
    check_expected_calls,
    check_tools,
    check_turns,
)

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from router.policy.losses import Kind

SUITE = "the built-in suite"
TASKS = Path(__file__).with_name("suite")
DIGEST_FIELDS = {"prompt", "system", "max_tokens", "check"}
# These fields are part of a digest only where a task has them, so that journals of tasks without them stay valid.
OPTIONAL_DIGEST_FIELDS = ("tools", "turns")
DIGEST_LENGTH = 16


class Task(Frozen):
    """A prompt, the longest answer to it, and what tells a right answer.

    Attributes:
        id: Unique in its file.
        prompt_class: What the prompt is about.
        complexity: How much work it asks for.
        prompt: The user's first message.
        system: The system's message before it; empty: there is none.
        tools: The functions that the model may call, in OpenAI's form.
        turns: Further messages after the prompt, in OpenAI's form: a call and its result, for example.
        max_tokens: The longest answer.
        check: What tells a right answer.
    """

    id: Annotated[str, Field(min_length=1)]
    prompt_class: PromptClass = Field(alias="class")
    complexity: Complexity
    prompt: Annotated[str, Field(min_length=1)]
    system: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    turns: tuple[dict[str, Any], ...] = ()
    max_tokens: int = Field(ge=1, le=4096)
    check: Check

    @field_validator("tools")
    @classmethod
    def _are_tools(
        cls, tools: tuple[dict[str, Any], ...]
    ) -> tuple[dict[str, Any], ...]:
        check_tools(tools)
        return tools

    @field_validator("turns")
    @classmethod
    def _are_turns(
        cls, turns: tuple[dict[str, Any], ...]
    ) -> tuple[dict[str, Any], ...]:
        check_turns(turns)
        return turns

    @model_validator(mode="after")
    def _expects_what_it_offers(self) -> Task:
        if isinstance(self.check, CallsCheck):
            check_expected_calls(self.check.calls, self.tools)
        return self

    @cached_property
    def digest(self) -> str:
        """Return a digest of everything that decides how the task is answered and checked."""
        present = {name for name in OPTIONAL_DIGEST_FIELDS if getattr(self, name)}
        fields = self.model_dump(include=DIGEST_FIELDS | present, by_alias=True)
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]

    @property
    def kind(self) -> Kind:
        return self.prompt_class, self.complexity

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the complete chat, in OpenAI's form."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": self.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return messages + list(self.turns)

    @property
    def input_chars(self) -> int:
        """Return about how many characters the model reads; tools and turns count as JSON."""
        chars = len(self.system) + len(self.prompt)
        for part in (self.tools, self.turns):
            if part:
                chars += len(json.dumps(part, ensure_ascii=False))
        return chars


def read_tasks(path: Path) -> tuple[Task, ...]:
    """Read tasks, a JSON object a line, from a file or a folder's ``*.jsonl``.

    Id, class and complexity may be left out: the classifier judges the prompt. ``ProfileError``: the file cannot be read or
    has no tasks, a line is no task, or two have the same id.
    """
    if not path.is_dir():
        return _read_file(path)
    tasks: list[Task] = []
    for file in sorted(path.glob("*.jsonl")):
        tasks += read_tasks(file)
    return tuple(tasks)


def _read_file(path: Path) -> tuple[Task, ...]:
    try:
        # splitlines() would also split at U+2028, which prompts may have.
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"the tasks {path} cannot be read: {error}") from error
    tasks: list[Task] = []
    line_of_id: dict[str, int] = {}
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        task = _read_line(line, line_number, path)
        if task.id in line_of_id:
            raise ProfileError(
                f"{path} line {line_number}: id: {task.id!r} is line {line_of_id[task.id]}'s; ids are unique"
            )
        line_of_id[task.id] = line_number
        tasks.append(task)
    if not tasks:
        raise ProfileError(
            f"{path} has no tasks: a JSON object a line, with prompt, max_tokens and check"
        )
    return tuple(tasks)


def _read_line(line: str, line_number: int, path: Path) -> Task:
    try:
        row = json.loads(line)
        if isinstance(row, dict):
            row = _with_kind({"id": f"line-{line_number}", **row})
        return Task.model_validate(row)
    except ValidationError as error:
        why = _describe_fault(error.errors(include_url=False)[0])
    except RecursionError:
        why = "it is nested too deep"
    except ValueError as error:
        why = f"a task is a JSON object: {error}"
    raise ProfileError(f"{path} line {line_number}: {why}")


def _with_kind(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its class and complexity, those that the classifier gives where it has none."""
    prompt = row.get("prompt")
    has_kind = {"class", "complexity"} <= row.keys()
    if has_kind or not isinstance(prompt, str):
        return {"class": PromptClass.UNKNOWN, "complexity": Complexity.MODERATE, **row}
    features = extract(prompt, EstimatingCounter(), tool_use=_tool_use_of(row))
    return {
        "class": features.prompt_class,
        "complexity": features.complexity or Complexity.MODERATE,
        **row,
    }


def _tool_use_of(row: dict[str, Any]) -> ToolUse | None:
    """Return what a row, which need not be valid, has to do with tools, as is told of requests."""
    match row:
        case {"turns": [*_, {"role": "tool"}]}:
            return ToolUse.RESULT
        case {"tools": [_, *_]}:
            return ToolUse.OFFERED
    return None


def _describe_fault(error: ErrorDetails) -> str:
    """Describe a fault of a task for the person who wrote it."""
    location = error["loc"]
    message = error["msg"].removeprefix("Value error, ").split("\n")[0]
    if error["type"] == "extra_forbidden":
        names = ", ".join(_field_names(location))
        message = f"there is no such field; there are {names}"
    elif error["type"] == "union_tag_not_found":
        message = f"it needs a type, one of {', '.join(_check_types())}"
    return f"{'.'.join(map(str, location)) or 'a task'}: {message}"


def _field_names(location: tuple[int | str, ...]) -> list[str]:
    """Return the fields of what a location is in: a task, its check, or a part of the check."""
    path = location[:-1]
    check_names = [str(part) for part in path if part in _check_types()]
    model: type[Frozen] = Task
    if "arguments" in path:
        model = ExpectedArgument
    elif path[:3] == ("check", "calls", "calls"):
        model = ExpectedCall
    elif check_names:
        # A check may hold another: the last that is named is the innermost.
        model = _check_types()[check_names[-1]]
    return [field.alias or name for name, field in model.model_fields.items()]


def _check_types() -> dict[str, type[Frozen]]:
    """Return the checks by the name of their type."""
    union = get_args(Check)[0]
    checks: dict[str, type[Frozen]] = {}
    for check in get_args(union):
        type_name = get_args(check.model_fields["type"].annotation)[0]
        checks[type_name] = check
    return checks
