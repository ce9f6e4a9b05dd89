"""Linear kernels for vLLM on CPUs, for layers that vLLM computes slowly or not at all.

vLLM loads this plugin in each of its processes through the ``vllm.general_plugins`` entry point. On a CPU it registers:

- A kernel for FP8 weights with a scale for each output channel, on every processor. vLLM computes them with
  ``torch._scaled_mm``, which takes ten to fifty times as long as BF16 for a token. Its own FP8 kernels need AMX and take
  weights with a scale for each tensor or block.
- A kernel for 4-bit weights, on processors without AMX. vLLM's kernel is made for AMX and takes up to twice BF16's time
  elsewhere, and vLLM's build for AVX2 has none: an engine with 4-bit weights would fail on its first request.
- A product of BF16 matrices in float32, on processors with AVX2 alone. oneDNN has none for BF16 there; vLLM then takes
  PyTorch's, which takes 2.6 times as long for 8 rows and 6.4 times for 64 (benchmarks/results/kernels_avx2.txt).

Layers that these kernels cannot compute go to vLLM's own. The plugin also mends faults of LoRA and of seeds on CPUs.
Without a CPU platform it does nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
        MPLinearLayerConfig,
    )
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
        FP8ScaledMMLinearLayerConfig,
    )

VLLM_INT4_KERNEL = "CPUWNA16LinearKernel"
VLLM_FP8_KERNEL = "ChannelWiseTorchFP8ScaledMMLinearKernel"
# vLLM's variable: names of its kernels that it must not take
DISABLED_KERNELS = "VLLM_DISABLED_KERNELS"

MIDDLE_CODE = 8  # the 4-bit code that ATen's kernel takes for zero
CODES_IN_INT16 = 4
# 128 in BF16. A 4-bit code in the lowest bits of its mantissa makes it 128 + code.
BF16_128 = 0x4300
ROWS_ALIGNED = 16  # ATen's kernel takes output widths that are a multiple of this
GROUP_SIZES = (32, 64, 128, 256)
# up to so many rows ATen's int4 kernel is faster than dequantizing: benchmarks/results/kernels.txt
MAX_ROWS = 48

E4M3_LARGEST = 448.0
E4M3_SMALLEST_NORMAL = 2.0**-6  # smaller e4m3 numbers have the spacing of this one
FLOAT32_EXPONENT = 0x7F800000  # the bits of the exponent
# times a number's power of two: added, it leaves 3 of float32's 23 bits of mantissa, as e4m3 has
SHIFT = 1.5 * 2**20
FEW_VALUES = 2048  # up to so many, fewer calls cost less than faster ones
# a layer keeps so many of oneDNN's, one for each number of rows, as vLLM's BF16 layers do
PRIMITIVES = 32

log = logging.getLogger("vllm.qarr_kernels")


@dataclass(frozen=True)
class KernelChoice:
    """Which kernels the plugin registers. The FP8 kernel is always among them.

    Attributes:
        takes_int4: Whether the 4-bit kernel is registered too.
        takes_bf16: Whether BF16 layers are computed in float32.
        explanation: What computes which layers and why, for the engine's log.
    """

    takes_int4: bool
    takes_bf16: bool
    explanation: str

    @property
    def replaced(self) -> set[str]:
        """Return the names of vLLM's kernels in whose place the plugin's are taken."""
        return (
            {VLLM_FP8_KERNEL, VLLM_INT4_KERNEL}
            if self.takes_int4
            else {VLLM_FP8_KERNEL}
        )


def choose_kernels(
    *, has_amx: bool, has_amx_fp8: bool, has_vllm_int4: bool, has_onednn_bf16: bool
) -> KernelChoice:
    """Choose the kernels for a processor and a build of vLLM.

    ``tiers/kernels.py`` says beforehand what this chooses.

    Args:
        has_amx: Whether the processor has AMX. It makes vLLM's 4-bit kernel the faster one, above all in prefill.
        has_amx_fp8: Whether its AMX computes FP8. vLLM then has a kernel for FP8 weights by channel, and takes it first.
        has_vllm_int4: Whether this build of vLLM has a 4-bit kernel.
        has_onednn_bf16: Whether oneDNN multiplies BF16 matrices on the processor.
    """
    if not has_vllm_int4:
        int4 = "QARR's kernel (this build of vLLM has none)"
    elif has_amx:
        int4 = "vLLM's kernel (this CPU has AMX)"
    else:
        int4 = "QARR's kernel (this CPU has no AMX)"
    if has_amx_fp8:
        fp8 = "vLLM's kernel (this CPU has AMX for FP8), or QARR's for layers that it does not take"
    else:
        fp8 = "QARR's kernel (vLLM has only torch._scaled_mm)"
    explanation = (
        f"4-bit layers by {int4}; FP8 layers with a scale for each channel by {fp8}"
    )
    if not has_onednn_bf16:
        explanation += "; BF16 layers in float32 (oneDNN has no BF16 on this CPU)"
    return KernelChoice(
        takes_int4=not (has_amx and has_vllm_int4),
        takes_bf16=not has_onednn_bf16,
        explanation=explanation,
    )


def register() -> None:
    """Register the kernels with vLLM where this machine needs them. vLLM calls it once a process."""
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm import _custom_ops  # loads vLLM's compiled operators
    from vllm.model_executor.kernels.linear import register_linear_kernel

    mend_adapters()
    mend_seeds()
    choice = choose_kernels(
        has_amx=torch.cpu._is_amx_tile_supported(),
        has_amx_fp8=_custom_ops.cpu_has_amx_fp8(),
        has_vllm_int4=has_vllm_int4_kernel(),
        has_onednn_bf16=has_onednn_bf16(),
    )
    disable_kernels(choice.replaced)
    register_linear_kernel(fp8_kernel(), PlatformEnum.CPU, "fp8")
    if choice.takes_bf16:
        compute_bf16_in_float32()
    if choice.takes_int4:
        register_linear_kernel(int4_kernel(), PlatformEnum.CPU, "mp")
    write_to_engine_log(choice.explanation)


def disable_kernels(names: set[str]) -> None:
    """Keep vLLM from taking some of its kernels, besides those that are disabled already.

    vLLM's processes inherit the variable from one another. The registration of a kernel they do not inherit.
    """
    already = {name for name in os.environ.get(DISABLED_KERNELS, "").split(",") if name}
    os.environ[DISABLED_KERNELS] = ",".join(sorted(already | names))


def write_to_engine_log(text: str) -> None:
    """Write a line into the engine's log.

    vLLM's API server loads plugins before it sets up its loggers, which would drop the line.
    """
    if log.hasHandlers():
        log.info(text)
    else:
        time_of_day = time.strftime("%m-%d %H:%M:%S")  # as in vLLM's own lines
        sys.stderr.write(f"INFO {time_of_day} [qarr_vllm_kernels] {text}\n")


def has_vllm_int4_kernel() -> bool:
    """Tell whether this build of vLLM has a 4-bit kernel for CPUs."""
    import torch

    return hasattr(torch.ops._C, "cpu_gemm_wna16")


@cache
def has_onednn_bf16() -> bool:
    """Tell whether oneDNN multiplies BF16 matrices here: on x86 it needs AVX-512, or AVX2 with conversions of BF16."""
    import torch
    from vllm import _custom_ops as ops

    try:
        ops.create_onednn_mm(torch.zeros(64, 64, dtype=torch.bfloat16).t(), 1)
    except RuntimeError:
        return False
    return True


def bf16_product(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that multiplies rows of BF16 by fixed weights in BF16, [out, in].

    Its sums are rounded at most once, to BF16. Without oneDNN it holds the weights in float32, and its result is float32.
    """
    import torch
    from vllm import _custom_ops as ops

    if has_onednn_bf16():
        packed = ops.create_onednn_mm(weight.contiguous().t(), PRIMITIVES)
        return lambda rows: ops.onednn_mm(packed, rows, None)
    wide = weight.float()
    return lambda rows: torch.nn.functional.linear(rows.float(), wide)


def compute_bf16_in_float32() -> None:
    """Let BF16 layers hold their weights in float32, and multiply in it. Other layers stay with vLLM."""
    import torch
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:  # noqa: FBT001  vLLM's parameters
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.bfloat16:  # noqa: PLR2004  a matrix
            original(layer, remove_weight)
            return
        product = bf16_product(weight.data)

        def linear(
            x: torch.Tensor, _weight: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            result = product(x)
            if bias is not None:
                result += bias
            return result.to(x.dtype)

        layer.cpu_linear = linear
        if remove_weight:
            layer.weight = torch.nn.Parameter(
                weight.data.new_empty(0), requires_grad=False
            )

    utils.dispatch_cpu_unquantized_gemm = dispatch


def mend_adapters() -> None:
    """Keep an engine with LoRA alive when a request asks for log-probabilities of its prompt.

    vLLM adds what an adapter changes of the output head to one row of logits a sequence. Those of a prompt are many rows,
    and on a CPU (vLLM 0.32) the product then fails and ends the engine. They get no such change here, as on a GPU; it is
    none unless the adapter has weights for the output head.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    original = PunicaWrapperCPU.add_lora_logits

    def add_lora_logits(self: Any, y: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.view(-1, x.shape[-1]).shape[0] != self.sampler_indices.shape[0]:
            return y
        return original(self, y, x, *args, **kwargs)

    PunicaWrapperCPU.add_lora_logits = add_lora_logits


def mend_seeds() -> None:
    """Keep an engine alive when the prompt of a request with a seed is computed in several chunks.

    vLLM also draws a token after each chunk but the last, and then sets the request's generator back by what that took. A
    CPU's generator cannot be set back in that way (vLLM 0.32), and the engine ended. Its state is kept and restored here.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original_sample = CPUModelRunner._sample
    original_bookkeeping = CPUModelRunner._bookkeeping_sync

    def discarded_generators(runner: Any) -> dict[int, torch.Generator]:
        """Return the generators of requests whose drawn token is discarded, by the request's index."""
        is_discarded = runner.discard_request_mask.np
        return {
            index: generator
            for index, generator in runner.input_batch.generators.items()
            if is_discarded[index]
        }

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = [
            (generator, generator.get_state())
            for generator in discarded_generators(self).values()
        ]
        output = original_sample(self, *args, **kwargs)
        for generator, state in kept:
            generator.set_state(state)
        return output

    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        discarded = discarded_generators(self)
        for index in discarded:
            del self.input_batch.generators[index]
        try:
            return original_bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(discarded)

    CPUModelRunner._sample = sample
    CPUModelRunner._bookkeeping_sync = bookkeeping


def int4_kernel() -> type:
    """Return the class of the 4-bit kernel: weights int4 in groups, activations BF16."""
    import torch
    from torch.nn import Parameter
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import (
        CPUWNA16LinearKernel,
    )
    from vllm.scalar_type import scalar_types

    aten = torch.ops.aten

    def unpack(packed: torch.Tensor, dim: int) -> torch.Tensor:
        """Unpack int32 words into eight 4-bit codes each, lowest bits first, along ``dim``."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        shifts = shifts.view([-1] + [1] * (packed.dim() - dim - 1))
        codes = (packed.unsqueeze(dim + 1) >> shifts) & 15
        return codes.flatten(dim, dim + 1).contiguous()

    def pack_quarters(codes: torch.Tensor) -> torch.Tensor:
        """Pack codes, [out, in], into int16 words, [out, in/4]: each quarter of the columns is one nibble of the words."""
        quarters = codes.view(codes.shape[0], CODES_IN_INT16, -1)
        words = torch.zeros_like(quarters[:, 0])
        for n in range(CODES_IN_INT16):
            words += quarters[:, n] << 4 * n
        return words.to(torch.int16)

    def find_obstacle(c: MPLinearLayerConfig) -> str | None:
        """Return why this kernel cannot compute a layer; None if it can."""
        inputs, outputs = c.partition_weight_shape
        if c.weight_type not in (scalar_types.uint4, scalar_types.uint4b8):
            return f"weight type {c.weight_type} is not a 4-bit one"
        if c.act_type != torch.bfloat16:
            return f"activation type {c.act_type} is not bfloat16"
        if c.group_size not in GROUP_SIZES or inputs % c.group_size:
            return f"group size {c.group_size} with {inputs} inputs"
        if outputs % ROWS_ALIGNED:
            return f"{outputs} outputs are not a multiple of {ROWS_ALIGNED}"
        if getattr(c, "has_g_idx", False):
            return "weights are permuted"
        return None

    class AtenInt4LinearKernel(CPUWNA16LinearKernel):
        """Few rows by ATen's int4 kernel; many by a product in BF16 with the dequantized weights.

        It holds the weights in two layouts, one for each way. Layers that it cannot compute go to vLLM's kernel.
        """

        @classmethod
        def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
            obstacle = find_obstacle(c)
            if obstacle is None:
                return True, None
            if not has_vllm_int4_kernel():
                return False, obstacle
            return super().can_implement(c)

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Repack from compressed-tensors' layout: words [out, in/8], scales [out, groups], zeros [out/8, groups]."""
            self.is_own = find_obstacle(self.config) is None
            if not self.is_own:
                super().process_weights_after_loading(layer)
                return
            words, scales, zeros = self._get_weight_params(layer)
            codes = unpack(words.data, dim=1)
            scale = scales.data.float()
            zero_code = (
                unpack(zeros.data, dim=0).float()
                if zeros is not None
                else torch.full_like(scale, MIDDLE_CODE)
            )
            self._hold_for_many_rows(codes, scale, zero_code)
            self._hold_for_few_rows(layer, codes, scale, zero_code)

        def _hold_for_many_rows(
            self, codes: torch.Tensor, scale: torch.Tensor, zero_code: torch.Tensor
        ) -> None:
            """Keep what ``dequantized`` reads."""
            self.quarters = pack_quarters(codes)
            self.scale = scale.to(torch.bfloat16).unsqueeze(-1)
            self.zero_number = (zero_code + 128).to(torch.bfloat16).unsqueeze(-1)

        def _hold_for_few_rows(
            self,
            layer: torch.nn.Module,
            codes: torch.Tensor,
            scale: torch.Tensor,
            zero_code: torch.Tensor,
        ) -> None:
            """Replace the layer's parameters by what ATen's kernel reads."""
            packed = aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            offsets = (
                torch.stack([scale, (MIDDLE_CODE - zero_code) * scale], dim=-1)
                .transpose(0, 1)
                .contiguous()
            )
            offsets = offsets.to(getattr(layer, self.w_s_name).dtype)
            setattr(layer, self.w_q_name, Parameter(packed, requires_grad=False))
            setattr(layer, self.w_s_name, Parameter(offsets, requires_grad=False))
            if self.w_zp_name is not None:
                setattr(layer, self.w_zp_name, None)

        def dequantized(self) -> torch.Tensor:
            """Return the weights in BF16, [out, in]: (code - zero) is exact, its product with the scale rounded once."""
            outputs, width = self.quarters.shape
            bits = torch.empty(outputs, CODES_IN_INT16, width, dtype=torch.int16)
            for n in range(CODES_IN_INT16):
                torch.bitwise_right_shift(self.quarters, 4 * n, out=bits[:, n])
            bits.bitwise_and_(15).bitwise_or_(BF16_128)
            groups = bits.view(torch.bfloat16).view(
                *self.scale.shape[:2], self.config.group_size
            )
            return groups.sub_(self.zero_number).mul_(self.scale).view(outputs, -1)

        def apply_weights(
            self,
            layer: torch.nn.Module,
            x: torch.Tensor,
            bias: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if not self.is_own:
                return super().apply_weights(layer, x, bias)
            rows = x.reshape(-1, x.shape[-1])
            if rows.shape[0] > MAX_ROWS:
                return self._multiply_many_rows(x, bias)
            packed, offsets, _ = self._get_weight_params(layer)
            product = aten._weight_int4pack_mm_for_cpu(
                rows, packed, self.config.group_size, offsets
            )
            if bias is not None:
                product += bias
            return product.view(*x.shape[:-1], product.shape[-1])

        def _multiply_many_rows(
            self, x: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            if has_onednn_bf16():
                return torch.nn.functional.linear(x, self.dequantized(), bias)
            wide_bias = bias.float() if bias is not None else None
            return torch.nn.functional.linear(
                x.float(), self.dequantized().float(), wide_bias
            ).to(x.dtype)

    return AtenInt4LinearKernel


def e4m3_rounding() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that rounds float32 of at most 448 to e4m3, ties to even, and gives it as BF16.

    It overwrites its argument. Many values are rounded by float32's own adder: beside a number 2^20 times as large, no more
    bits fit in than e4m3 has. That gives what a conversion to float8 and back gives, whose second half PyTorch computes
    value by value.
    """
    import torch

    def round_to_e4m3(values: torch.Tensor) -> torch.Tensor:
        if values.numel() <= FEW_VALUES:
            return values.to(torch.float8_e4m3fn).to(torch.bfloat16)
        exponents = values.view(torch.int32).bitwise_and(FLOAT32_EXPONENT)
        power = exponents.view(torch.float32).clamp_(min=E4M3_SMALLEST_NORMAL)
        return (
            values.add_(power, alpha=SHIFT).sub_(power, alpha=SHIFT).to(torch.bfloat16)
        )

    return round_to_e4m3


def fp8_kernel() -> type:
    """Return the class of the FP8 kernel: weights e4m3 by channel, activations e4m3 by token, rounded as they come."""
    import torch
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
        ChannelWiseTorchFP8ScaledMMLinearKernel,
    )

    smallest_scale = 1.0 / (E4M3_LARGEST * 512.0)  # as vLLM's QuantFP8
    round_to_e4m3 = e4m3_rounding()

    def can_compute(c: FP8ScaledMMLinearLayerConfig) -> bool:
        activation = c.activation_quant_key.scale
        weight = c.weight_quant_key.scale
        is_by_token = activation.group_shape.is_per_token() and not activation.static
        return (
            is_by_token
            and weight.group_shape.is_per_channel()
            and c.input_dtype == torch.bfloat16
        )

    class EmulatedFP8LinearKernel(ChannelWiseTorchFP8ScaledMMLinearKernel):
        """The W8A8 product, with both factors in BF16, which holds every e4m3 number exactly.

        Products of two e4m3 numbers have 8 bits of mantissa at most, so that only their sum is rounded: to BF16 once,
        before the scales, which are applied in float32. The weights take BF16's memory, or float32's where oneDNN has no
        BF16. Layers that it cannot compute go to ``torch._scaled_mm``, as in vLLM's kernel.
        """

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Hold the weights, [in, out] in e4m3, in BF16, packed by oneDNN as vLLM packs those of BF16 layers."""
            self.is_own = can_compute(self.config)
            if not self.is_own:
                super().process_weights_after_loading(layer)
                return
            weight, scale, *_ = self._get_layer_params(layer)
            self.product = bf16_product(weight.data.t().to(torch.bfloat16))
            self.weight_scale = scale.data.float().flatten()
            # An empty copy: an empty view would keep all of the weight's memory.
            layer.weight = torch.nn.Parameter(
                weight.data[:0].clone(), requires_grad=False
            )

        def apply_weights(
            self,
            layer: torch.nn.Module,
            x: torch.Tensor,
            bias: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if not self.is_own:
                return super().apply_weights(layer, x, bias)
            values = x.to(torch.float32)
            scale = (
                values.abs()
                .amax(dim=-1, keepdim=True)
                .div_(E4M3_LARGEST)
                .clamp_(min=smallest_scale)
            )
            activations = round_to_e4m3(values.mul_(scale.reciprocal()))
            product = self.product(activations).to(torch.float32)
            product.mul_(scale).mul_(self.weight_scale)
            if bias is not None:
                product += bias
            return product.to(x.dtype)

    return EmulatedFP8LinearKernel
