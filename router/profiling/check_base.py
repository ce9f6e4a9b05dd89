"""What all checks of answers share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.policy.profiles import Frozen
from router.profiling.model_answer import ModelAnswer

MAX_ANSWER = 20_000  # characters of an answer that are read
REGEX_S = 0.2

Text = Annotated[str, Field(min_length=1)]


class AnswerCheck(Frozen):
    """What tells whether an answer to a task is right."""

    def passes(self, answer: ModelAnswer) -> bool:
        """Tell whether an answer is right; one without text is not. Thoughts before the text do not count."""
        text = answer.text[:MAX_ANSWER].strip()
        return bool(text) and self._passes(text)

    def _passes(self, answer: str) -> bool:
        raise NotImplementedError
