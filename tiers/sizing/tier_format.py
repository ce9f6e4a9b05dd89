"""What a planned tier's engines hold and compute: the number formats of weights and of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.errors import PlanError
from tiers.formats import FORMATS
from tiers.kv_precision import weights_of, with_kv_cache
from tiers.sizing.kernels import PLANNED_FORMATS
from tiers.spec import PRECISIONS, TierName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiers.formats import NumberFormat
    from tiers.sizing.architecture import Architecture

FP8_BYTES = 1
BF16_BYTES = 2
KV_CACHE_DTYPES = ("auto", "fp8")
# How formats are called where people read of them; those not named here are written in capitals.
NAMES = {
    "awq-int4": "4 bits",
    "fp8-block": "block FP8",
    "int8-w8a8": "INT8",
    "int4-w4a8": "W4A8",
    "awq-int4-w4a8": "AWQ W4A8",
    "fp8-w8a16": "FP8 W8A16",
    "nvfp4-w4a16": "NVFP4 W4A16",
    "mxfp4-w4a8": "MXFP4 W4A8",
    "mxfp4-w4a4": "MXFP4 W4A4",
    "gptq-int4": "GPTQ INT4",
    "gptq-int8": "GPTQ INT8",
    "awq-int8": "AWQ INT8",
}


@dataclass(frozen=True, slots=True)
class TierFormat:
    """The number formats of a tier.

    Attributes:
        number_format: Of the linear layers' weights.
        dense_format: Of the linear layers that are not experts; None: they have the same format.
        is_kv_fp8: Whether the KV cache is in FP8; False: in the 16 bits that the model computes.
        checkpoint_bytes: Size of the weights of a checkpoint that is published in these formats; None: they are counted
            by the model's architecture.
    """

    number_format: NumberFormat
    dense_format: NumberFormat | None = None
    is_kv_fp8: bool = False
    checkpoint_bytes: int | None = None

    @property
    def precision(self) -> str:
        """Return it as ``TierSpec.precision`` names it."""
        kv_cache_dtype = "fp8" if self.is_kv_fp8 else None
        return with_kv_cache("+".join(self.names), kv_cache_dtype)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the weights' formats; 16 bits beside fewer are not named."""
        if self.dense_format is None or not self.dense_format.is_quantized:
            return (self.number_format.name,)
        return tuple(sorted({self.dense_format.name, self.number_format.name}))

    @property
    def kv_bytes_per_value(self) -> int:
        """Return the size of a value of the KV cache."""
        return FP8_BYTES if self.is_kv_fp8 else BF16_BYTES

    @property
    def bits(self) -> tuple[int, int, int]:
        """Return the bits of a weight, of an activation and of a value in the KV cache, by which formats are ordered."""
        return (
            self.number_format.weight_bits,
            self.number_format.activation_bits,
            8 * self.kv_bytes_per_value,
        )

    def weight_bytes(self, model: Architecture) -> int:
        """Return the size of a model's weights."""
        if self.checkpoint_bytes is not None:
            return self.checkpoint_bytes
        bytes_per_weight = self.number_format.bytes_per_weight
        if self.dense_format is None:
            return model.weight_bytes(bytes_per_weight)
        return model.weight_bytes(
            self.dense_format.bytes_per_weight,
            bytes_per_expert_weight=bytes_per_weight,
        )


STANDARD_FORMATS: Mapping[TierName, TierFormat] = {
    tier: TierFormat(FORMATS[precision]) for tier, precision in PRECISIONS.items()
}


def parse_format(text: str, where: str) -> TierFormat:
    """Read a tier's format, as in ``nvfp4``, ``fp8+kv-fp8`` or, of experts and other layers, ``fp8+nvfp4``.

    Args:
        text: As a person writes it.
        where: What an error begins with, as ``--formats``.

    Raises:
        PlanError: It names a format that is not planned.
    """
    written = text.strip().lower()
    weights = weights_of(written)
    kv_cache = written.removeprefix(weights).removeprefix("+kv-")
    if kv_cache not in {"", *KV_CACHE_DTYPES}:
        raise PlanError(
            f"{where}: {text.strip()}: the KV cache is planned in 16 bits or in FP8; allowed are {weights} and "
            f"{weights}+kv-fp8"
        )
    names = weights.split("+")
    for name in names:
        if name not in PLANNED_FORMATS:
            raise PlanError(
                f"{where}: {name or 'an empty name'} is no format that is planned; allowed are "
                f"{', '.join(PLANNED_FORMATS)}, each with +kv-fp8 for a KV cache in FP8"
            )
    return _of_names(names, where, is_kv_fp8=kv_cache == "fp8")


def _of_names(names: list[str], where: str, *, is_kv_fp8: bool) -> TierFormat:
    formats = sorted(
        (FORMATS[name] for name in names),
        key=lambda number_format: number_format.bytes_per_weight,
    )
    if len(formats) == 1:
        return TierFormat(formats[0], is_kv_fp8=is_kv_fp8)
    if len(formats) > 2:  # noqa: PLR2004  experts and other layers
        raise PlanError(
            f"{where}: {'+'.join(names)}: at most two formats are allowed, that of the experts and that of the other layers"
        )
    return TierFormat(formats[0], dense_format=formats[1], is_kv_fp8=is_kv_fp8)


def format_words(precision: str) -> str:
    """Return how a precision is called where people read of it: ``NVFP4``, ``4 bits`` or ``FP8 with FP8 KV``."""
    weights = weights_of(precision)
    words = "+".join(NAMES.get(name, name.upper()) for name in weights.split("+"))
    if weights == precision:
        return words
    return f"{words} with FP8 KV"
