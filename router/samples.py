"""Prompts sampled from live traffic for ``qarr profile quality``, where that is switched on."""

from __future__ import annotations

import json
import logging
import os
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from classifier import PromptFeatures

log = logging.getLogger("qarr.router")
MAX_PROMPTS = 2000


class PromptSamples:
    """Writes a share of all prompts to a file that only its owner can read; full, it takes no more."""

    def __init__(self, path: Path | None, share: float) -> None:
        self._path, self._share = path, share
        self._room = MAX_PROMPTS
        if path is not None and share:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._room -= sum(1 for _ in path.open("rb"))

    def offer(self, text: str, features: PromptFeatures) -> None:
        """Keep a prompt, by chance."""
        if self._path is None or self._room <= 0 or random.random() >= self._share:  # noqa: S311  no secret
            return
        self._room -= 1
        row = {"class": features.prompt_class.value, "text": text}
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
                os.fchmod(descriptor, 0o600)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            log.warning("no prompts are sampled any more: %s: %s", self._path, error.strerror)
            self._room = 0
