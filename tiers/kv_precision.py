"""The KV cache's number format as a part of a precision's name: ``fp8+kv-fp8``.

A KV cache of fewer bits loses answers as weights of fewer bits do. One of the model's own type adds nothing to the name.
"""

from __future__ import annotations

import re

# vLLM's names of caches that hold what the model computes: ``auto`` is the model's own type.
UNQUANTIZED = frozenset({"auto", "half", "float16", "bfloat16", "float", "float32"})
_KV_CACHE = re.compile(r"\+kv-[a-z0-9_.]+")
_NOT_SHOWN = re.compile(r"[^a-z0-9_.]")
LONGEST_NAME = 32
# Two names of one format.
_SHORT_NAMES = {"fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8"}


def is_quantized(kv_cache_dtype: str | None) -> bool:
    """Tell whether a KV cache holds fewer bits than the model computes; False: it does not, or is not known."""
    return kv_cache_dtype is not None and kv_cache_dtype.lower() not in UNQUANTIZED


def with_kv_cache(precision: str, kv_cache_dtype: str | None) -> str:
    """Return a precision with the format of its KV cache, in the place of one that it names already.

    Args:
        precision: Of the weights, as ``TierSpec.precision`` names it; ``fp8 (stated)`` becomes ``fp8+kv-fp8 (stated)``.
        kv_cache_dtype: As vLLM names it; None: not known.
    """
    weights = weights_of(precision)
    if kv_cache_dtype is None or not is_quantized(kv_cache_dtype):
        return weights
    told_name = kv_cache_dtype.lower()
    name = _NOT_SHOWN.sub("_", _SHORT_NAMES.get(told_name, told_name))[:LONGEST_NAME]
    format_name, separator, remark = weights.partition(" (")
    return f"{format_name}+kv-{name}{separator}{remark}"


def weights_of(precision: str) -> str:
    """Return a precision without the formats of KV caches."""
    return _KV_CACHE.sub("", precision)


def kv_cache_of(precision: str) -> str | None:
    """Return the format of the KV cache that a precision names; None: of the model's own type, or not known."""
    named = _KV_CACHE.search(precision)
    return None if named is None else named[0].removeprefix("+kv-")
