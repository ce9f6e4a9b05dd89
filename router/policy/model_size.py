"""How many parameters the served model has: losses of small models are larger than those that are published."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from tiers.errors import PlanError
from tiers.sizing.architecture import architecture

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tiers.spec import TierSpec

_SIZE = re.compile(
    r"(?<![a-z0-9.])(?:(\d{1,3})x)?(\d{1,4}(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE
)
_UNITS = {"b": 1e9, "m": 1e6}


def parameters_of(
    specs: Iterable[TierSpec], model: str, stated: float | None = None
) -> float | None:
    """Return the number of the model's parameters; None if neither a checkpoint nor the model's name tells.

    Args:
        specs: The tiers, which serve the same model. One with a checkpoint on this machine tells exactly.
        model: The model's name, such as ``Llama-3.1-8B-Instruct``.
        stated: What the settings state, which counts before both; None: nothing.
    """
    if stated is not None:
        return stated
    for spec in specs:
        if spec.checkpoint is not None:
            parameters = _parameters_in_folder(spec.checkpoint)
            if parameters is not None:
                return parameters
    return parameters_in_name(model)


def parameters_in_name(name: str) -> float | None:
    """Return the number of parameters that a model's name tells, as "135M", "8B" or "8x7B" do; None if it tells none."""
    sizes = []
    for experts, size, unit in _SIZE.findall(name):
        sizes.append(float(size) * _UNITS[unit.lower()] * int(experts or 1))
    return max(sizes, default=None)


def _parameters_in_folder(folder: Path) -> float | None:
    try:
        return float(
            architecture(
                json.loads((folder / "config.json").read_text("utf-8"))
            ).parameters
        )
    except (OSError, ValueError, PlanError):
        return None
