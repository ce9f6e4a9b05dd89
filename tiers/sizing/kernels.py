"""How vLLM computes linear layers of a number format on a kind of GPU: with which units, and how much of their peak.

A format whose units a GPU lacks is computed in BF16: kernels unpack its weights. Some formats vLLM does not compute on some
GPUs at all. What is said of vLLM is said of release 0.32.

Shares of the dense peak that are reached:

* BF16 0.6, FP8 0.4, and 0.4 of BF16's where Marlin unpacks weights: near what fits ``benchmarks/roofline.py`` best, which
  has speeds measured on an H200, and published ones. Marlin is 0.6 to 0.7 times as fast as BF16's kernels from 512 tokens a
  step on (vllm-project/vllm, pull request 2497). Machete unpacks at BF16's rate, but with 50 µs more a layer. From 1,024
  tokens on, FP8's kernels reach 0.46 to 0.57 of a B200's peak, and 0.34 to 0.5 together with the activations' quantization
  (pull request 19566).
* FP8 by blocks 0.3. On an H100, CUTLASS reaches 490 of 1,979 TFLOP/s at 7,168 x 2,112 (pull request 23280). On a B200, it
  is 0.6 to 1 times as fast as FP16 (flashinfer-ai/flashinfer, issue 2146), which is up to 0.3 of FP8's peak.
* 4-bit weights with 8-bit activations 0.4: on Hopper they "approach peak FP8 throughput" (pull request 23198).
* INT8 0.4, as FP8: beside BF16 and FP8 in the same engine, published speeds (vLLM 0.7) are as far from it.
* FP4 0.35, and 25 µs a layer in which activations are quantized, however few. So fitted, dense models are within 20 % of
  what is published (vLLM 0.31 on a B200, TensorRT-LLM 1.2 on B200, GB200 and RTX PRO 6000).
* Experts 0.4 of what other layers of their format reach: each has few tokens of a step. So fitted, published throughputs of
  gpt-oss and Qwen3-30B-A3B (TensorRT-LLM 1.2) are missed by 29 % to 78 %, by 9 % in the mean; without it, by 66 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.errors import PlanError
from tiers.formats import FORMATS

if TYPE_CHECKING:
    from tiers.formats import NumberFormat
    from tiers.sizing.hardware import GpuKind

BF16_REACHED = 0.6
FP8_REACHED = 0.4
FP8_BLOCK_REACHED = 0.3
INT8_REACHED = 0.4
W4A8_REACHED = 0.4
FP4_REACHED = 0.35
UNPACKED_REACHED = 0.4  # Marlin unpacks weights, and reaches this share of BF16's peak.
MACHETE_LAYER_MS = 0.05
FP4_LAYER_MS = 0.025
EXPERTS_REACHED = 0.4  # Experts reach this share of what other layers reach.
TERA = 1e12

HOPPER = (9, 0)
BLACKWELL = (10, 0)
# Compute capabilities before it are those of data centers, from it on those of workstations.
BLACKWELL_WORKSTATION = (12, 0)

_SIXTEEN_BITS = {"bf16", "fp16"}
_FP8 = {"fp8", "fp8-block", "mxfp8"}
_FP4 = {"nvfp4", "mxfp4-w4a4"}
_INTEGERS_WITH_FP8 = {"int4-w4a8", "awq-int4-w4a8", "gptq-int4-w4a8"}
# Machete takes whole numbers, with and without a zero point.
_MACHETE = {"int4", "awq-int4", "gptq-int4", "int8", "awq-int8", "gptq-int8"}
# Weights that Marlin unpacks, beside Machete's.
_UNPACKED = {"fp8-w8a16", "nvfp4-w4a16", "mxfp4", "mxfp4-w4a8", "nvfp4"} | _FP8
_NVIDIA_ONLY = {"nvfp4", "nvfp4-w4a16"}
# The formats that engines are planned in, from the fewest bits.
PLANNED_FORMATS: tuple[str, ...] = tuple(
    sorted(
        _SIXTEEN_BITS
        | _FP8
        | _FP4
        | _INTEGERS_WITH_FP8
        | _MACHETE
        | _UNPACKED
        | {"int8-w8a8"},
        key=lambda name: (
            FORMATS[name].weight_bits,
            FORMATS[name].activation_bits,
            name,
        ),
    )
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What computes linear layers.

    Attributes:
        flop_per_s: What one GPU reaches, not its peak.
        layer_ms: The time that each layer takes besides, however many tokens a step has.
        is_native: Whether the GPU has units for the format; False: its weights are unpacked to 16 bits.
    """

    flop_per_s: float
    layer_ms: float = 0.0
    is_native: bool = True


def kernel_for(
    number_format: NumberFormat, gpu: GpuKind, *, has_experts: bool = False
) -> Kernel:
    """Return what computes linear layers of a format on a kind of GPU.

    Args:
        number_format: Of the weights.
        gpu: The kind.
        has_experts: Whether the model has routed experts, whose 4-bit weights vLLM unpacks with Marlin on every GPU.

    Raises:
        PlanError: vLLM does not compute the format there.
    """
    obstacle = obstacle_to(number_format, gpu)
    if obstacle is not None:
        raise PlanError(obstacle)
    native = _native_kernel(number_format.name, gpu)
    if native is not None:
        return native
    bf16_peak = gpu.bf16_tflops * TERA
    if gpu.machete and number_format.name in _MACHETE and not has_experts:
        return Kernel(
            bf16_peak * BF16_REACHED, layer_ms=MACHETE_LAYER_MS, is_native=False
        )
    return Kernel(bf16_peak * UNPACKED_REACHED, is_native=False)


def obstacle_to(number_format: NumberFormat, gpu: GpuKind) -> str | None:
    """Return why a format is not planned on a kind of GPU, and what is; None: it is planned."""
    name = number_format.name
    if name not in PLANNED_FORMATS:
        return f"{name} is not planned: allowed are {', '.join(PLANNED_FORMATS)}"
    capability = capability_of(gpu)
    if name == "int8-w8a8":
        return _obstacle_to_int8(gpu, capability)
    if name in _INTEGERS_WITH_FP8 and capability != HOPPER:
        return (
            f"{gpu.name} does not compute {name}: vLLM computes 4-bit integers with 8-bit activations on GPUs of compute "
            "capability 9.0 (H100, H200) alone; take awq-int4"
        )
    if name == "mxfp4-w4a4" and gpu.fp4_tflops is None:
        return f"{gpu.name} does not compute {name}: it has no FP4 units; take mxfp4, whose weights are unpacked"
    if name in _NVIDIA_ONLY and gpu.is_amd:
        return f"{gpu.name} does not compute {name}: it is for NVIDIA's GPUs; take mxfp4 or awq-int4"
    return None


def capability_of(gpu: GpuKind) -> tuple[int, int] | None:
    """Return a GPU's compute capability, which also follows from Machete; None: not known, or not NVIDIA's."""
    if gpu.compute_capability is None and gpu.machete:
        return HOPPER
    return gpu.compute_capability


def _obstacle_to_int8(gpu: GpuKind, capability: tuple[int, int] | None) -> str | None:
    if capability is not None and capability >= BLACKWELL:
        return (
            f"{gpu.name} does not compute int8-w8a8: vLLM has kernels for it up to compute capability 9.0 "
            "(docs.vllm.ai, INT8 W8A8); take fp8"
        )
    if gpu.int8_tops is None:
        return (
            f"int8-w8a8 is not planned on {gpu.name}: its throughput in INT8 is not known; add int8=600TOPS to --gpus with "
            "the data sheet's figure"
        )
    return None


def _native_kernel(name: str, gpu: GpuKind) -> Kernel | None:
    """Return what computes a format with units of its own; None: the GPU has none, or vLLM does not use them."""
    if name in _SIXTEEN_BITS:
        return Kernel(gpu.bf16_tflops * TERA * BF16_REACHED)
    if name == "int8-w8a8" and gpu.int8_tops is not None:
        return Kernel(gpu.int8_tops * TERA * INT8_REACHED)
    if name in _FP4 and gpu.fp4_tflops is not None:
        return Kernel(gpu.fp4_tflops * TERA * FP4_REACHED, layer_ms=FP4_LAYER_MS)
    share_of_fp8 = _share_of_fp8(name, capability_of(gpu))
    if share_of_fp8 is not None and gpu.fp8_tflops is not None:
        return Kernel(gpu.fp8_tflops * TERA * share_of_fp8)
    return None


def _share_of_fp8(name: str, capability: tuple[int, int] | None) -> float | None:
    """Return the share of FP8's peak that a format reaches; None: it is not computed in FP8."""
    is_blackwell = capability is not None and capability >= BLACKWELL
    if name == "fp8":
        return FP8_REACHED
    if name == "fp8-block":
        return FP8_BLOCK_REACHED
    if name in _INTEGERS_WITH_FP8:
        return W4A8_REACHED
    # Blackwell's units take a scale for each 32 values. For 4-bit weights with 8-bit activations vLLM has kernels for the
    # data centers' GPUs alone.
    if name == "mxfp8" and is_blackwell:
        return FP8_REACHED
    if name == "mxfp4-w4a8" and capability is not None:
        is_for_data_centers = BLACKWELL <= capability < BLACKWELL_WORKSTATION
        return FP8_REACHED if is_for_data_centers else None
    return None
