"""The number formats of weights: their bits, their size, and the names that a precision is made of.

A precision is a text for people and headers. It names the formats of a checkpoint's weights with ``+`` between them, each
with the way it was made and what it computes with where that is not the usual, then the format of the KV cache, then a
remark in brackets: ``awq-int4``, ``fp8+nvfp4+kv-fp8``, ``int8-w8a8 (stated)``. Where the replicas of a tier differ, their
precisions stand beside one another with a comma. The format with the fewest bits decides how good the answers are: filters,
expected losses and the order of tiers all ask ``lowest_format``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from tiers.kv_precision import weights_of

# The names that OpenRouter, and whoever follows it, has for precisions.
Quantization = Literal[
    "int4", "int8", "fp4", "fp6", "fp8", "fp16", "bf16", "fp32", "unknown"
]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
_BITS_OF_BF16 = 16
_SCALE_BITS_OF_INTEGERS = 16
_SCALE_BITS_OF_FLOATS = 8
# The numbers of bits in a name that is not in ``FORMATS``.
_BITS_IN_NAME = re.compile(r"(int|fp|bf|nf)(\d{1,2})(?!\d)")


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How a linear layer holds its weights and computes with them.

    Attributes:
        name: Ours, such as ``nvfp4`` or ``int8-w8a8``.
        quantization: OpenRouter's.
        weight_bits: Of one weight, without its share of a scale.
        activation_bits: Of the values that the weights are multiplied with.
        bytes_per_weight: In memory, scales and zero points included, with the groups that published checkpoints of the
            format have; see ``bytes_with_groups_of`` for others.
    """

    name: str
    quantization: Quantization
    weight_bits: int
    activation_bits: int
    bytes_per_weight: float

    @property
    def is_quantized(self) -> bool:
        """Tell whether a weight has fewer bits than the models are trained in."""
        return self.weight_bits < _BITS_OF_BF16

    def with_groups(self, weights: int, *, has_zero_points: bool = False) -> float:
        """Return the bytes of a weight if so many share a scale.

        Scales of integers have 16 bits; those of floats have 8, as the OCP's microscaling formats and NVFP4 define them.

        Args:
            weights: In one group; 0: one group is a channel or a tensor, so its scale costs next to nothing.
            has_zero_points: Whether each group has a zero point, of as many bits as a weight.
        """
        if not weights:
            return self.weight_bits / 8
        is_integer = self.quantization in {"int4", "int8", "unknown"}
        scale_bits = _SCALE_BITS_OF_INTEGERS if is_integer else _SCALE_BITS_OF_FLOATS
        if has_zero_points:
            scale_bits += self.weight_bits
        return _grouped(self.weight_bits, weights, scale_bits)


def _grouped(weight_bits: int, group: int, scale_bits: int) -> float:
    """Return the bytes of a weight whose group shares a scale (and a zero point) of so many bits."""
    return (weight_bits + scale_bits / group) / 8


# AWQ and GPTQ: Qwen's, Meta's and Red Hat's checkpoints have groups of 128 weights. AWQ has zero points of as many bits as
# the weights; symmetric GPTQ has none in memory (vLLM 0.32, kernels/linear/mixed_precision/marlin.py).
_AWQ_INT4 = _grouped(4, group=128, scale_bits=16 + 4)
_SYMMETRIC_INT4 = _grouped(4, group=128, scale_bits=16)
_SYMMETRIC_INT8 = _grouped(8, group=128, scale_bits=16)
_NVFP4 = _grouped(4, group=16, scale_bits=8)
_MXFP4 = _grouped(4, group=32, scale_bits=8)
_MXFP8 = _grouped(8, group=32, scale_bits=8)
_FP8_BLOCK = _grouped(8, group=128 * 128, scale_bits=32)
_ALL = (
    NumberFormat("fp32", "fp32", 32, 32, 4.0),
    NumberFormat("bf16", "bf16", 16, 16, 2.0),
    NumberFormat("fp16", "fp16", 16, 16, 2.0),
    NumberFormat("fp8", "fp8", 8, 8, 1.0),
    NumberFormat("fp8-w8a16", "fp8", 8, 16, 1.0),
    NumberFormat("fp8-block", "fp8", 8, 8, _FP8_BLOCK),
    NumberFormat("mxfp8", "fp8", 8, 8, _MXFP8),
    NumberFormat("int8", "int8", 8, 16, 1.0),
    NumberFormat("int8-w8a8", "int8", 8, 8, 1.0),
    NumberFormat("awq-int8", "int8", 8, 16, 1.0),
    NumberFormat("gptq-int8", "int8", 8, 16, _SYMMETRIC_INT8),
    NumberFormat("fp6", "fp6", 6, 16, 0.75),
    NumberFormat("int4", "int4", 4, 16, _SYMMETRIC_INT4),
    NumberFormat("awq-int4", "int4", 4, 16, _AWQ_INT4),
    NumberFormat("gptq-int4", "int4", 4, 16, _SYMMETRIC_INT4),
    NumberFormat("int4-w4a8", "int4", 4, 8, _SYMMETRIC_INT4),
    NumberFormat("awq-int4-w4a8", "int4", 4, 8, _AWQ_INT4),
    NumberFormat("gptq-int4-w4a8", "int4", 4, 8, _SYMMETRIC_INT4),
    NumberFormat("fp4", "fp4", 4, 16, _MXFP4),
    # Double quantization: 0.127 bits of scales a weight (Dettmers et al. 2023, arXiv 2305.14314, section 3).
    NumberFormat("nf4", "fp4", 4, 16, (4 + 0.127) / 8),
    NumberFormat("mxfp4", "fp4", 4, 16, _MXFP4),
    NumberFormat("mxfp4-w4a8", "fp4", 4, 8, _MXFP4),
    NumberFormat("mxfp4-w4a4", "fp4", 4, 4, _MXFP4),
    NumberFormat("nvfp4", "fp4", 4, 4, _NVFP4),
    NumberFormat("nvfp4-w4a8", "fp4", 4, 8, _NVFP4),
    NumberFormat("nvfp4-w4a16", "fp4", 4, 16, _NVFP4),
)
FORMATS = {number_format.name: number_format for number_format in _ALL}


def number_format(name: str) -> NumberFormat | None:
    """Return a format by its name; None: the name says nothing of bits.

    Settings may state a name that is not in ``FORMATS``, and checkpoints may have any number of bits: ``gptq-int3`` has 3.
    Words after the name, as in ``fp8 on L4``, do not count.
    """
    first_word = name.partition(" ")[0]
    if first_word in FORMATS:
        return FORMATS[first_word]
    kinds_and_bits = _BITS_IN_NAME.findall(name)
    if not kinds_and_bits:
        return None
    kind, digits = min(kinds_and_bits, key=lambda kind_and_bits: int(kind_and_bits[1]))
    bits = int(digits)
    return NumberFormat(
        name,
        quantization=_quantization_named(f"{kind}{digits}"),
        weight_bits=bits,
        activation_bits=max(bits, _BITS_OF_BF16),
        bytes_per_weight=bits / 8,
    )


def _quantization_named(name: str) -> Quantization:
    return next((known for known in QUANTIZATIONS if known == name), "unknown")


def _names_in(replica_precision: str) -> list[str]:
    """Return the names of formats in the precision of one replica, the KV cache's left out."""
    return weights_of(replica_precision).partition(" (")[0].lower().split("+")


def formats_in(precision: str) -> tuple[NumberFormat, ...]:
    """Return the formats that a precision names, in its order, the KV cache's left out; those not known are left out too.

    What is stated counts as that: ``fp8 (stated; its checkpoint is bf16)`` is ``fp8``.

    Args:
        precision: Of a tier, as ``TierSpec.precision`` has it.
    """
    found_formats = []
    for replica_precision in precision.split(", "):
        found_formats += [number_format(name) for name in _names_in(replica_precision)]
    return tuple(found for found in found_formats if found is not None)


@lru_cache(64)
def lowest_format(precision: str) -> NumberFormat | None:
    """Return the format with the fewest bits a weight, then the fewest bits an activation; None: none is known."""
    return min(
        formats_in(precision),
        key=lambda candidate: (candidate.weight_bits, candidate.activation_bits),
        default=None,
    )


def rank_bits(precision: str) -> int | None:
    """Return the bits by which tiers are ordered, those of a weight in the lowest format; None: none is known."""
    lowest = lowest_format(precision)
    return None if lowest is None else lowest.weight_bits


@lru_cache(64)
def quantizations_of(precision: str) -> frozenset[Quantization]:
    """Return OpenRouter's names of a precision: one for each replica's lowest format, so several where replicas differ.

    A replica of which a format is not known is ``unknown``: that format may be the lowest.
    """
    return frozenset(
        _quantization_of_replica(replica_precision)
        for replica_precision in precision.split(", ")
    )


def _quantization_of_replica(precision: str) -> Quantization:
    if any(number_format(name) is None for name in _names_in(precision)):
        return "unknown"
    lowest = lowest_format(precision)
    return "unknown" if lowest is None else lowest.quantization


def shown_quantization(precision: str) -> Quantization:
    """Return the one name of a precision; ``unknown`` where replicas differ."""
    names = quantizations_of(precision)
    return next(iter(names)) if len(names) == 1 else "unknown"
