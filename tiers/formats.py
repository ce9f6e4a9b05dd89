"""The number formats of weights: their bits, their size, and the names that a precision is made of.

A precision is a text for people and headers. It names the formats of a checkpoint's weights with ``+`` between them, each
with the way it was made and what it computes with where that is not the usual, then the format of the KV cache, then a
remark in brackets: ``awq-int4``, ``fp8+nvfp4+kv-fp8``, ``int8-w8a8 (stated)``. The format with the fewest bits decides how
good the answers are: filters, expected losses and the order of tiers all ask ``lowest_format``.
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


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How a linear layer holds its weights and computes with them.

    Attributes:
        name: Ours, such as ``nvfp4`` or ``int8-w8a8``.
        quantization: OpenRouter's.
        weight_bits: Of one weight, without its share of a scale.
        activation_bits: Of the values that the weights are multiplied with.
        bytes_per_weight: In memory, scales and zero points included.
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


def _grouped(weight_bits: int, group: int, scale_bits: int) -> float:
    """Return the bytes of a weight whose group shares a scale (and a zero point) of so many bits."""
    return (weight_bits + scale_bits / group) / 8


_AWQ_INT4 = _grouped(4, group=128, scale_bits=16 + 4)
_SYMMETRIC_INT4 = _grouped(4, group=128, scale_bits=16)
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
    NumberFormat("gptq-int8", "int8", 8, 16, 1.0),
    NumberFormat("fp6", "fp6", 6, 16, 0.75),
    NumberFormat("int4", "int4", 4, 16, _SYMMETRIC_INT4),
    NumberFormat("awq-int4", "int4", 4, 16, _AWQ_INT4),
    NumberFormat("gptq-int4", "int4", 4, 16, _SYMMETRIC_INT4),
    NumberFormat("int4-w4a8", "int4", 4, 8, _SYMMETRIC_INT4),
    NumberFormat("awq-int4-w4a8", "int4", 4, 8, _AWQ_INT4),
    NumberFormat("fp4", "fp4", 4, 16, _MXFP4),
    NumberFormat("nf4", "fp4", 4, 16, _grouped(4, group=64, scale_bits=8)),
    NumberFormat("mxfp4", "fp4", 4, 16, _MXFP4),
    NumberFormat("mxfp4-w4a8", "fp4", 4, 8, _MXFP4),
    NumberFormat("mxfp4-w4a4", "fp4", 4, 4, _MXFP4),
    NumberFormat("nvfp4", "fp4", 4, 4, _NVFP4),
    NumberFormat("nvfp4-w4a16", "fp4", 4, 16, _NVFP4),
)
FORMATS = {number_format.name: number_format for number_format in _ALL}


def formats_in(precision: str) -> tuple[NumberFormat, ...]:
    """Return the formats that a precision names, in its order, the KV cache's left out; those not known are left out too.

    What is stated counts as that: ``fp8 (stated; its checkpoint is bf16)`` is ``fp8``.

    Args:
        precision: Of one checkpoint, as ``TierSpec.precision`` has it.
    """
    names = re.split(r"[+,]\s*", weights_of(precision).partition(" (")[0].lower())
    return tuple(FORMATS[name] for name in names if name in FORMATS)


@lru_cache(64)
def lowest_format(precision: str) -> NumberFormat | None:
    """Return the format with the fewest bits a weight, then the fewest bits an activation; None: none is known."""
    return min(
        formats_in(precision),
        key=lambda number_format: (
            number_format.weight_bits,
            number_format.activation_bits,
        ),
        default=None,
    )
