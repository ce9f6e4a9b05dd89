"""Tasks with long answers: a right answer passes; one that is cut, garbled at its end or wrong in its middle does not."""

from __future__ import annotations

import importlib
import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from classifier import PromptClass
from router.profiling.model_answer import ModelAnswer
from router.profiling.tasks import TASKS, Task, read_tasks
from tests.imports import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

CHARS_PER_TOKEN = 4
FEWEST_TOKENS = 300
MOST_TOKENS = 1500
FILE = TASKS / "long_answers.jsonl"


@pytest.fixture(scope="module")
def maker() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("make_long_answers")
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def made_tasks(maker: Any) -> list[Any]:
    tasks: list[Any] = maker.made_tasks()
    return tasks


def passes(made: Any, answer: str) -> bool:
    return Task.model_validate(made.row).check.passes(ModelAnswer(text=answer))


def names(tasks: list[Any]) -> list[str]:
    return [made.row["id"] for made in tasks]


def garbled(answer: str) -> str:
    """Return an answer whose last fifth has its characters in random order."""
    intact = len(answer) * 4 // 5
    characters = list(answer[intact:])
    random.Random(0).shuffle(characters)
    return answer[:intact] + "".join(characters)


def nonsense(answer: str) -> str:
    """Return an answer that goes over into words without sense in its last fifth, line by line."""
    lines = answer.split("\n")
    intact = len(lines) * 4 // 5
    words = ["the", "of", "and", "zab", "quil", "0", "7", "|", "="]
    rng = random.Random(0)
    return "\n".join(
        [*lines[:intact], *(" ".join(rng.sample(words, 6)) for _ in lines[intact:])]
    )


def test_the_suite_has_these_tasks(maker: Any) -> None:
    assert FILE.read_text("utf-8") == maker.suite_text()
    tasks = read_tasks(FILE)
    assert len(tasks) >= 64
    by_class = Counter(task.prompt_class for task in tasks)
    assert min(by_class.values()) >= 10
    assert set(by_class) == {
        PromptClass.CHAT,
        PromptClass.CODE,
        PromptClass.EXTRACTION,
        PromptClass.MATH,
        PromptClass.MULTILINGUAL,
        PromptClass.WRITING,
    }
    assert len({task.prompt for task in tasks}) == len(tasks)


def test_right_answers_pass(made_tasks: list[Any]) -> None:
    refused = [made for made in made_tasks if not passes(made, made.right_answer)]
    assert names(refused) == []


def test_right_answers_are_long_and_fit_their_limit(made_tasks: list[Any]) -> None:
    tokens = {
        made.row["id"]: len(made.right_answer) / CHARS_PER_TOKEN for made in made_tasks
    }
    assert [
        name
        for name, count in tokens.items()
        if not FEWEST_TOKENS <= count <= MOST_TOKENS
    ] == []
    assert [
        made.row["id"]
        for made in made_tasks
        if made.row["max_tokens"] < tokens[made.row["id"]] * 1.3
    ] == []


def test_answers_without_their_end_are_wrong(made_tasks: list[Any]) -> None:
    accepted = [
        made
        for made in made_tasks
        if passes(made, made.right_answer[: len(made.right_answer) * 9 // 10])
    ]
    assert names(accepted) == []


@pytest.mark.parametrize("spoil", [garbled, nonsense])
def test_answers_with_a_garbled_end_are_wrong(
    made_tasks: list[Any], spoil: Any
) -> None:
    accepted = [made for made in made_tasks if passes(made, spoil(made.right_answer))]
    assert names(accepted) == []


def test_answers_with_a_wrong_step_in_their_middle_are_wrong(
    made_tasks: list[Any],
) -> None:
    same = [made for made in made_tasks if made.wrong_step_answer == made.right_answer]
    assert names(same) == []
    accepted = [made for made in made_tasks if passes(made, made.wrong_step_answer)]
    assert names(accepted) == []
