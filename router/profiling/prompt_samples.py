"""Prompts sampled from live traffic for ``qarr profile quality``, where that is switched on."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import TYPE_CHECKING

from router.line_file import LineFile, LineWriter

if TYPE_CHECKING:
    from pathlib import Path

    from classifier import PromptFeatures

MAX_PROMPTS = 2000


class PromptSamples:
    """Writes a share of all prompts to a file that only its owner can read; full, it takes no more."""

    def __init__(self, path: Path, share: float) -> None:
        self._share, self._room = share, MAX_PROMPTS - _count_lines(path)
        self._writer = LineWriter(LineFile(path), "the file of sampled prompts")

    def offer(self, text: str, features: PromptFeatures) -> None:
        """Keep a prompt, by chance."""
        if self._room <= 0 or random.random() >= self._share:  # noqa: S311  no secret
            return
        self._room -= 1
        row = {"class": features.prompt_class.value, "text": text}
        self._writer.put(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))

    def close(self) -> None:
        """Write what is still to be written, and close the file. Waits for seconds at most."""
        self._writer.close()


def _count_lines(path: Path) -> int:
    with suppress(OSError), path.open("rb") as file:
        return sum(1 for _ in file)
    return 0
