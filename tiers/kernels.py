"""Which kernel computes a tier's linear layers on a CPU: one of the engine plugin's, or vLLM's own.

The plugin (``tiers/engine_plugin``) chooses in the engine's process, by what torch and vLLM say. This module says beforehand
what it will choose, by what Linux says of the processor: for the memory plan, and for people.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING

from tiers.spec import Precision

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

# torch asks for all four
AVX512_FLAGS = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
WEIGHT_BITS = 4
FLOAT32_OF_FP8 = 4  # times the bytes
# vLLM's 4-bit kernel for AMX adds these bytes to a group of weights: the sum of its codes (4), a scale of 32 instead of 16
# bits (2), and a zero point of 8 instead of 4 bits (0.5).
AMX_GROUP_BYTES = 6.5


class InstructionSet(StrEnum):
    """The widest instructions of an x86 processor that vLLM has kernels for."""

    AVX2 = "AVX2"
    AVX512 = "AVX-512"
    AMX = "AMX"


class Kernel(Enum):
    """What computes a tier's linear layers on a CPU.

    Attributes:
        QARR_INT4: ``AtenInt4LinearKernel`` of the plugin.
        QARR_FP8: ``EmulatedFP8LinearKernel`` of the plugin. A processor whose AMX computes FP8 is not told apart here: vLLM
            has a kernel of its own for that.
        QARR_BF16: The plugin's product in float32, for AVX2, where oneDNN has none for BF16.
        VLLM_INT4: ``CPUWNA16LinearKernel``.
        VLLM_BF16: oneDNN, and with AMX a kernel of its own for layers of up to 1 MiB.
        VLLM_OTHER: What vLLM chooses for a format that the plugin has no kernel for.
    """

    QARR_INT4 = auto()
    QARR_FP8 = auto()
    QARR_BF16 = auto()
    VLLM_INT4 = auto()
    VLLM_BF16 = auto()
    VLLM_OTHER = auto()

    @property
    def is_of_qarr(self) -> bool:
        """Return whether the engine plugin has it."""
        return self in {Kernel.QARR_INT4, Kernel.QARR_FP8, Kernel.QARR_BF16}


def instruction_set(cpu_flags: AbstractSet[str]) -> InstructionSet | None:
    """Return the widest instructions of a processor; None if vLLM's CPU build cannot run on it.

    Args:
        cpu_flags: As Linux names them in ``/proc/cpuinfo``.
    """
    if "amx_tile" in cpu_flags:
        return InstructionSet.AMX
    if cpu_flags >= AVX512_FLAGS:
        return InstructionSet.AVX512
    if "avx2" in cpu_flags:
        return InstructionSet.AVX2
    return None


def choose_kernel(precision: str, instructions: InstructionSet | None) -> Kernel:
    """Return the kernel that will compute a checkpoint's layers.

    Args:
        precision: Of the checkpoint, such as ``awq-int4``.
        instructions: Of the processor.
    """
    if precision == Precision.BF16:
        return (
            Kernel.QARR_BF16
            if instructions is InstructionSet.AVX2
            else Kernel.VLLM_BF16
        )
    if precision == Precision.FP8:
        return Kernel.QARR_FP8
    if precision.rpartition("-")[-1] != "int4":
        return Kernel.VLLM_OTHER
    return Kernel.VLLM_INT4 if instructions is InstructionSet.AMX else Kernel.QARR_INT4


def describe_kernel(precision: str, instructions: InstructionSet | None) -> str:
    """Return in words what will compute a checkpoint's layers, as in "4 bits by QARR's kernel (no AMX)"."""
    kernel = choose_kernel(precision, instructions)
    if kernel is Kernel.QARR_INT4:
        reason = (
            "vLLM has none for AVX2"
            if instructions is InstructionSet.AVX2
            else "no AMX"
        )
        return f"4 bits by QARR's kernel ({reason})"
    if kernel is Kernel.VLLM_INT4:
        return "4 bits by vLLM's kernel (AMX)"
    if kernel is Kernel.QARR_FP8:
        return "FP8 by QARR's kernel"
    if kernel is Kernel.QARR_BF16:
        return "BF16 by QARR's kernel, in float32 (oneDNN has none for AVX2)"
    if kernel is Kernel.VLLM_BF16:
        has_amx = instructions is InstructionSet.AMX
        return (
            "BF16 by vLLM's (oneDNN, small layers by AMX)"
            if has_amx
            else "BF16 by vLLM's (oneDNN)"
        )
    return f"vLLM chooses (format {precision})"


def added_bytes(
    kernel: Kernel, quantized: int, group_size: int, instructions: InstructionSet | None
) -> int:
    """Return how many bytes more a kernel holds of a checkpoint's quantized weights than the checkpoint has.

    QARR's kernels hold them twice: FP8 as BF16, 4 bits in two layouts, one for few rows and one for many. With AVX2 alone
    FP8 is held as float32, in four times its bytes. vLLM's 4-bit kernel for AMX adds ``AMX_GROUP_BYTES`` to each group of
    weights. That is derived from vLLM's source; its conversion (``convert_weight_packed_scale_zp`` of vLLM 0.32), which
    runs without AMX too, gives tensors of this size, but no engine's memory was measured on AMX. What other kernels compute
    counts as held twice, which is more than most take.

    Args:
        kernel: The kernel that computes them.
        quantized: The bytes of the quantized weights, without scales and zero points.
        group_size: How many 4-bit weights share a scale.
        instructions: Of the processor.
    """
    if kernel is Kernel.QARR_FP8 and instructions is InstructionSet.AVX2:
        return FLOAT32_OF_FP8 * quantized - quantized
    if kernel is not Kernel.VLLM_INT4:
        return quantized
    weights = quantized * 8 // WEIGHT_BITS
    return int(weights / group_size * AMX_GROUP_BYTES)
