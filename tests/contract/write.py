"""Write the golden contract anew, after a change that is wanted: ``.venv/bin/python -m tests.contract.write``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.contract.answers import forms

GOLDEN = Path(__file__).with_name("golden.json")


def text(folder: Path) -> str:
    answers = asyncio.run(forms(folder))
    golden = {name: answer.form for name, answer in answers.items()}
    return json.dumps(golden, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        GOLDEN.write_text(text(Path(folder)), "utf-8")
