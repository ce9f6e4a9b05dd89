"""Tasks of any number, and answerers that know which of them they get right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from classifier import PromptClass
from router.profiling.model_answer import ModelAnswer
from router.profiling.tasks import Task
from tiers.errors import ProbeError

RIGHT = ModelAnswer(text="It is Paris.", finish_reason="stop")
WRONG = ModelAnswer(text="It is Rome.", finish_reason="stop")
CUT = ModelAnswer(
    text="", reasoning="Let me", finish_reason="length", is_cut_while_thinking=True
)


def made_task(number: int, **more: Any) -> Task:
    fields: dict[str, Any] = {
        "id": f"task-{number}",
        "class": PromptClass.CHAT,
        "complexity": "trivial",
        "prompt": f"What is capital number {number}?",
        "max_tokens": 8,
        "check": {"type": "contains", "all": ["Paris"]},
        **more,
    }
    return Task.model_validate(fields)


def made_tasks(count: int, **more: Any) -> tuple[Task, ...]:
    return tuple(made_task(number, **more) for number in range(count))


def in_order(tasks: tuple[Task, ...]) -> list[Task]:
    """Return tasks as they are asked."""
    return sorted(tasks, key=lambda task: task.digest)


@dataclass
class KnownAnswers:
    """An answerer that gives the same answer to every task but some.

    Attributes:
        usual: The answer to all other tasks.
        by_id: Answers, or errors that are raised, by the task's id.
        asked: Ids of the tasks that were asked, in order.
    """

    usual: ModelAnswer | ProbeError | None = RIGHT
    by_id: Mapping[str, ModelAnswer | ProbeError | None] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def answer(self, task: Task) -> ModelAnswer | None:
        self.asked.append(task.id)
        answer = self.by_id.get(task.id, self.usual)
        if isinstance(answer, ProbeError):
            raise answer
        return answer
