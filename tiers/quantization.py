"""The names that OpenRouter, and whoever follows it, has for precisions."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, get_args

from tiers.kv_precision import weights_of

Quantization = Literal[
    "int4", "int8", "fp4", "fp6", "fp8", "fp16", "bf16", "fp32", "unknown"
]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
_NAME = re.compile(rf"({'|'.join(QUANTIZATIONS[:-1])})(?!\d)")


@lru_cache(64)
def quantizations_of(precision: str) -> frozenset[Quantization]:
    """Return the names of a precision as ``TierSpec`` has it: several where replicas differ.

    What is stated counts as that: ``fp8 (stated; its checkpoint is bf16)`` is ``fp8``. The KV cache does not count.
    """
    return frozenset(map(_name_of, weights_of(precision).split(", ")))


def shown_quantization(precision: str) -> Quantization:
    """Return the one name of a precision; ``unknown`` where replicas differ."""
    names = quantizations_of(precision)
    return next(iter(names)) if len(names) == 1 else "unknown"


def _name_of(precision: str) -> Quantization:
    found = _NAME.search(precision.partition(" (")[0].lower())
    return next(
        (name for name in QUANTIZATIONS if found is not None and name == found[1]),
        "unknown",
    )
