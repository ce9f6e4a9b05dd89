"""Compares values with JSON's."""

from __future__ import annotations

import math
from typing import Any


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
