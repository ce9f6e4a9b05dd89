"""Two fake engines whose models know the answers to made tasks, each wrong at a known rate."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from router.profiling.model_answer import ModelAnswer
from tests.fakes.engine import serving_all
from tests.fakes.model_engine import KnownAnswers, ModelEngine, ThinkingModel

CLASSES = ("chat", "math")
MANY = 400  # tasks: enough for every verdict of these tests


def write_tasks(folder: Path, count: int = MANY) -> Path:
    """Write tasks whose answers are their numbers, and return the file."""
    path = folder / "tasks.jsonl"
    lines = [json.dumps(_task(number)) for number in range(count)]
    path.write_text("\n".join(lines))
    return path


def _task(number: int) -> dict[str, Any]:
    return {
        "id": f"number-{number}",
        "class": CLASSES[number % len(CLASSES)],
        "complexity": "trivial",
        "prompt": _prompt(number),
        "max_tokens": 16,
        "check": {"type": "exact", "values": [_answer(number)]},
    }


def _prompt(number: int) -> str:
    return f"Say the number {number}."


def _answer(number: int) -> str:
    return f"number {number}"


def knowing_engine(
    *, wrong_share: float = 0.0, seed: int = 0, knows: int = MANY, **model: Any
) -> ModelEngine:
    """Return an engine that answers made tasks.

    Args:
        wrong_share: Share of the answers that are wrong, 0..1.
        seed: Another one gets other tasks wrong.
        knows: Number of tasks that it knows; to others its answer is wrong.
        model: Further fields of the model.
    """
    answers = {
        _prompt(number): ModelAnswer(text=_answer(number)) for number in range(knows)
    }
    known = KnownAnswers(answers=answers, wrong_share=wrong_share, seed=seed)
    return ModelEngine(ThinkingModel(answer_to=known, **{"thought": "", **model}))


@asynccontextmanager
async def serving_pair(
    reference: ModelEngine, candidate: ModelEngine
) -> AsyncIterator[list[str]]:
    """Serve both engines, and yield their URLs."""
    async with serving_all(reference.app, candidate.app) as urls:
        yield urls
