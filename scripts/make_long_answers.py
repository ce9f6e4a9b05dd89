"""Write the tasks with long answers of the built-in suite.

    .venv/bin/python scripts/make_long_answers.py

Each task comes with a right answer; ``tests/unit/profiling/test_long_answers.py`` tries all of them, cut, garbled and
with a wrong step. The same tasks come out every time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from long_answers.chat_tasks import chat_tasks
from long_answers.code_tasks import code_tasks
from long_answers.extraction_tasks import extraction_tasks
from long_answers.math_tasks import math_tasks
from long_answers.multilingual_tasks import multilingual_tasks
from long_answers.writing_tasks import writing_tasks

if TYPE_CHECKING:
    from long_answers.made_task import MadeTask

ROOT = Path(__file__).resolve().parents[1]
SUITE_FILE = ROOT / "router/profiling/suite/long_answers.jsonl"


def made_tasks() -> list[MadeTask]:
    """Return all tasks with their answers."""
    return [
        *chat_tasks(),
        *code_tasks(),
        *extraction_tasks(),
        *math_tasks(),
        *multilingual_tasks(),
        *writing_tasks(),
    ]


def suite_text() -> str:
    """Return the tasks as the file holds them."""
    rows = [json.dumps(task.row, ensure_ascii=False) for task in made_tasks()]
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write the file."""
    SUITE_FILE.write_text(suite_text(), "utf-8")
    print(f"{SUITE_FILE.relative_to(ROOT)}: {len(made_tasks())} tasks")


if __name__ == "__main__":
    main()
