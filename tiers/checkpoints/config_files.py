"""The small files of a checkpoint: JSON and text, of any size and content, because what an engine names need not be one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_CONFIG_BYTES = 4 << 20


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON object; an empty one if the value is none."""
    return value if isinstance(value, dict) else {}


def as_texts(value: object) -> tuple[str, ...]:
    """Return the texts of a JSON array; none if the value is no array."""
    if not isinstance(value, list):
        return ()
    return tuple(entry for entry in value if isinstance(entry, str))


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object of a file; an empty one if there is none."""
    try:
        return as_mapping(json.loads(read_text(path)))
    except (ValueError, RecursionError):
        return {}


def read_text(path: Path) -> str:
    """Return a file's text; empty if there is no file, or if it is a pipe or a device."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
