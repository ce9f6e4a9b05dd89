"""The number formats that kinds of GPU compute well: those that tiers are planned in where nobody names others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiers.checkpoints.schemes import GpuHardware, scheme_table
from tiers.formats import FORMATS
from tiers.sizing.kernels import capability_of, kernel_for, obstacle_to
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tiers.formats import NumberFormat
    from tiers.sizing.hardware import GpuKind

PRECISE_FORMAT = FORMATS["bf16"]


def formats_for(gpu: GpuKind) -> dict[TierName, NumberFormat]:
    """Return a format for each tier on one kind of GPU: those of the table of schemes, as far as they can be planned.

    A GPU that the table does not know by its compute capability has formats by its figures.
    """
    formats = _formats_by_figures(gpu)
    row = scheme_table().class_of(GpuHardware(capability_of(gpu)))
    if row is not None:
        for tier, scheme in row.schemes.items():
            number_format = FORMATS[scheme.number_format]
            if obstacle_to(number_format, gpu) is None:
                formats[tier] = number_format
    return formats


def _formats_by_figures(gpu: GpuKind) -> dict[TierName, NumberFormat]:
    """Return a format for each tier, by the units that a GPU has: FP4 and FP8, else 4 bits that are unpacked and INT8.

    FP4 of AMD's GPUs is not made here.
    """
    fast = "awq-int4"
    if gpu.fp4_tflops is not None and not gpu.is_amd:
        fast = "nvfp4"
    balanced = "fp8"
    if gpu.fp8_tflops is None and gpu.int8_tops is not None:
        balanced = "int8-w8a8"
    return {
        TierName.FAST: FORMATS[fast],
        TierName.BALANCED: FORMATS[balanced],
        TierName.PRECISE: PRECISE_FORMAT,
    }


def common_formats(gpus: Iterable[GpuKind]) -> dict[TierName, NumberFormat]:
    """Return a format for each tier on several kinds of GPU: a tier has one, wherever its engines run.

    Of the formats that the kinds have for themselves, that one counts which most of them compute, then the one that most of
    them compute with their own units, then that of the first kind.
    """
    kinds = list(gpus)
    by_kind = [formats_for(gpu) for gpu in kinds]
    common: dict[TierName, NumberFormat] = {}
    for tier in STANDARD_TIERS:
        candidates = dict.fromkeys(formats[tier] for formats in by_kind)
        common[tier] = max(
            candidates, key=lambda candidate: _suitability(candidate, kinds)
        )
    return common


def _suitability(
    number_format: NumberFormat, gpus: Iterable[GpuKind]
) -> tuple[int, int]:
    """Return how many kinds of GPU compute a format, and how many of them with their own units."""
    computing = [gpu for gpu in gpus if obstacle_to(number_format, gpu) is None]
    native = [gpu for gpu in computing if kernel_for(number_format, gpu).is_native]
    return len(computing), len(native)


def unpacked_formats(
    formats: Mapping[TierName, NumberFormat], gpu: GpuKind
) -> list[NumberFormat]:
    """Return the formats with activations of fewer than 16 bits that a kind of GPU computes in 16 bits all the same."""
    return [
        number_format
        for number_format in dict.fromkeys(formats.values())
        if number_format.activation_bits < PRECISE_FORMAT.activation_bits
        and obstacle_to(number_format, gpu) is None
        and not kernel_for(number_format, gpu).is_native
    ]
