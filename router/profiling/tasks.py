"""Tasks: prompts whose answers can be checked; our own, and those that users write."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import Field, ValidationError

from classifier import Complexity, EstimatingCounter, PromptClass, extract
from router.policy.profiles import Frozen, ProfileError
from router.profiling.checks import Check

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from router.policy.losses import Kind

SUITE = "the built-in suite"
TASKS = Path(__file__).with_name("suite")


class Task(Frozen):
    """A prompt, the longest answer to it, and what tells a right answer."""

    id: Annotated[str, Field(min_length=1)]
    prompt_class: PromptClass = Field(alias="class")
    complexity: Complexity
    prompt: Annotated[str, Field(min_length=1)]
    system: str = ""
    max_tokens: int = Field(ge=1, le=4096)
    check: Check

    @cached_property
    def digest(self) -> str:
        decides = self.model_dump(
            include={"prompt", "system", "max_tokens", "check"}, by_alias=True
        )
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[
            :16
        ]

    @property
    def kind(self) -> Kind:
        return self.prompt_class, self.complexity

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


def read_tasks(path: Path) -> tuple[Task, ...]:
    """Read tasks, a JSON object a line, from a file or a folder's ``*.jsonl``.

    Id, class and complexity may be left out: the classifier judges the prompt. ``ProfileError``: the file cannot be read or
    has no tasks, a line is no task, or two have the same id.
    """
    if path.is_dir():
        return tuple(
            task for file in sorted(path.glob("*.jsonl")) for task in read_tasks(file)
        )
    try:
        # splitlines() would also split at U+2028, which prompts may have
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"the tasks {path} cannot be read: {error}") from error
    found: dict[str, tuple[int, Task]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        task = _read(line, number, path)
        if task.id in found:
            raise ProfileError(
                f"{path} line {number}: id: {task.id!r} is line {found[task.id][0]}'s; ids are unique"
            )
        found[task.id] = number, task
    if not found:
        raise ProfileError(
            f"{path} has no tasks: a JSON object a line, with prompt, max_tokens and check"
        )
    return tuple(task for _, task in found.values())


def _read(line: str, number: int, path: Path) -> Task:
    try:
        row = json.loads(line)
        return Task.model_validate(
            _judged({"id": f"line-{number}", **row}) if isinstance(row, dict) else row
        )
    except ValidationError as error:
        why = _fault(error.errors(include_url=False)[0])
    except RecursionError:
        why = "it is nested too deep"
    except ValueError as error:
        why = f"a task is a JSON object: {error}"
    raise ProfileError(f"{path} line {number}: {why}")


def _judged(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its class and complexity, those that the classifier gives where it has none."""
    prompt = row.get("prompt")
    if {"class", "complexity"} <= row.keys() or not isinstance(prompt, str):
        return {"class": PromptClass.UNKNOWN, "complexity": Complexity.MODERATE, **row}
    features = extract(prompt, EstimatingCounter())
    return {
        "class": features.prompt_class,
        "complexity": features.complexity or Complexity.MODERATE,
        **row,
    }


def _fault(error: ErrorDetails) -> str:
    checks = {
        get_args(each.model_fields["type"].annotation)[0]: each
        for each in get_args(get_args(Check)[0])
    }
    where = error["loc"]
    message = error["msg"].removeprefix("Value error, ").split("\n")[0]
    if error["type"] == "extra_forbidden":
        fields = (Task if len(where) == 1 else checks[where[1]]).model_fields
        message = f"there is no such field; there are {', '.join(f.alias or name for name, f in fields.items())}"
    elif error["type"] == "union_tag_not_found":
        message = f"it needs a type, one of {', '.join(checks)}"
    return f"{'.'.join(map(str, where)) or 'a task'}: {message}"
