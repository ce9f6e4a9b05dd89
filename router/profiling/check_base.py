"""What all checks of answers share."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field

from router.policy.profiles import Frozen
from router.profiling.model_answer import ModelAnswer

MAX_ANSWER = 20_000  # characters of an answer that are read
REGEX_S = 0.2

Text = Annotated[str, Field(min_length=1)]


def is_same(value: Any, wanted_value: Any) -> bool:
    """Compare a value with one from JSON: tuples are lists, keys are texts, and numbers are equal but for rounding."""
    if isinstance(wanted_value, list):
        return _is_same_list(value, wanted_value)
    if isinstance(wanted_value, dict):
        return _is_same_dict(value, wanted_value)
    if isinstance(wanted_value, bool | str | None) or isinstance(value, bool):
        return type(value) is type(wanted_value) and bool(value == wanted_value)
    if not isinstance(value, int | float):
        return False
    return value == wanted_value or math.isclose(value, wanted_value, rel_tol=1e-9)


def _is_same_list(value: Any, wanted_value: list[Any]) -> bool:
    if not isinstance(value, list | tuple) or len(value) != len(wanted_value):
        return False
    return all(map(is_same, value, wanted_value))


def _is_same_dict(value: Any, wanted_value: dict[str, Any]) -> bool:
    if not isinstance(value, dict):
        return False
    by_name = {str(key): item for key, item in value.items()}
    if by_name.keys() != wanted_value.keys():
        return False
    return all(is_same(item, wanted_value[name]) for name, item in by_name.items())


class AnswerCheck(Frozen):
    """What tells whether an answer to a task is right."""

    def passes(self, answer: ModelAnswer) -> bool:
        """Tell whether an answer is right; one without text is not. Thoughts before the text do not count."""
        text = answer.text[:MAX_ANSWER].strip()
        return bool(text) and self._passes(text)

    def _passes(self, answer: str) -> bool:
        raise NotImplementedError
