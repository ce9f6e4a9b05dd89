"""Samples prompts from live traffic for ``qarr profile quality``, if a setting enables it."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path

from classifier import PromptFeatures
from router.line_file import LineWriter

MAX_PROMPTS = 2000


class PromptSamples:
    """Writes a share of all prompts to a file that only its owner can read, up to ``MAX_PROMPTS``."""

    def __init__(self, path: Path, share: float) -> None:
        self._share, self._left = share, MAX_PROMPTS
        with suppress(OSError), path.open("rb") as file:
            self._left -= sum(1 for _ in file)
        self._writer = LineWriter(path, "the file of sampled prompts")

    def offer(self, text: str, features: PromptFeatures) -> None:
        if self._left <= 0 or random.random() >= self._share:  # noqa: S311  no secret
            return
        self._left -= 1
        row = {"class": features.prompt_class.value, "text": text}
        self._writer.put(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))

    def close(self) -> None:
        self._writer.close()
