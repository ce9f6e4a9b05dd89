"""Linear kernels for vLLM on CPUs without AMX.

vLLM's own CPU kernels for quantized weights are made for AMX. Without it, its FP8 path is ``torch._scaled_mm``, which
computes one row in the time of sixty in BF16, and its 4-bit path takes twice BF16's time; the AVX2 build has no 4-bit
kernel at all, and such an engine fails on its first request. This plugin registers two kernels in their place. vLLM loads
it in each of its processes through the ``vllm.general_plugins`` entry point. With AMX, or without a CPU platform, it
registers none, and what its kernels cannot compute goes to vLLM's own. On any CPU it also mends a fault of LoRA.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig

NIBBLES = 8  # 4-bit values in one packed int32
MIDDLE = 8  # the code that ATen's kernel takes for zero
NIBBLES_HELD = 4  # in one int16 of the weights that are dequantized
BF16_128 = 0x4300  # the bits of 128 in BF16, whose seven bits of mantissa are the units: with a 4-bit code, 128 + code
ROWS_ALIGNED = 16  # ATen asks for output widths that are a multiple of this
GROUP_SIZES = (32, 64, 128, 256)
MOST_ROWS = 48  # up to so many rows ATen's int4 kernel is faster than dequantizing: benchmarks/results/kernels.txt
E4M3_LARGEST = 448.0
SMALLEST_NORMAL = 2.0**-6  # of e4m3; numbers below have the spacing of those above
EXPONENT = 0x7F800000  # the bits of a float32's exponent
SHIFT = 1.5 * 2**20  # times a number's power of two: added, it leaves 3 of float32's 23 bits of mantissa, as e4m3 has
PRIMITIVES = 32  # of oneDNN that a layer keeps, one for each number of rows; vLLM's own number
FEW_VALUES = 2048  # up to so many, fewer calls cost less than faster ones
REPLACED = {"CPUWNA16LinearKernel", "ChannelWiseTorchFP8ScaledMMLinearKernel"}
log = logging.getLogger("vllm.qarr_kernels")  # below vLLM's logger, so that it stands in the engine's log


def register() -> None:
    """Register the kernels with vLLM where this machine needs them. vLLM calls it once a process."""
    import torch
    import vllm._custom_ops  # noqa: F401  loads vLLM's compiled operators
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu():
        return
    mend_adapters()
    if torch.cpu._is_amx_tile_supported():
        return
    from vllm.model_executor.kernels.linear import register_linear_kernel

    # vLLM's processes inherit the variable from one another, the registration they do not.
    disabled = {name for name in os.environ.get("VLLM_DISABLED_KERNELS", "").split(",") if name}
    os.environ["VLLM_DISABLED_KERNELS"] = ",".join(sorted(disabled | REPLACED))
    register_linear_kernel(int4_kernel(), PlatformEnum.CPU, "mp")
    register_linear_kernel(fp8_kernel(), PlatformEnum.CPU, "fp8")
    log.info("this CPU has no AMX: 4-bit and FP8 layers are computed by QARR's kernels in place of vLLM's")


def mend_adapters() -> None:
    """Keep an engine with LoRA alive when a request asks for log-probabilities of its prompt.

    vLLM adds what an adapter changes of the output head to one row of logits a sequence. Those of a prompt are many rows,
    and on a CPU (vLLM 0.32) the product then fails and ends the engine. They get no such change here, as on a GPU; it is
    none unless the adapter has weights for the output head.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    whole = PunicaWrapperCPU.add_lora_logits

    def add_lora_logits(self: Any, y: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.view(-1, x.shape[-1]).shape[0] != self.sampler_indices.shape[0]:
            return y
        return whole(self, y, x, *args, **kwargs)

    PunicaWrapperCPU.add_lora_logits = add_lora_logits


def int4_kernel() -> type:
    """Return the class of the 4-bit kernel: weights int4 in groups, activations BF16."""
    import torch
    from torch.nn import Parameter
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.scalar_type import scalar_types

    aten = torch.ops.aten

    def unpack(packed: torch.Tensor, dim: int) -> torch.Tensor:
        """Unpack int32 words into eight 4-bit codes each, lowest bits first, along ``dim``."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = (packed.unsqueeze(dim + 1) >> shifts.view([-1] + [1] * (packed.dim() - dim - 1))) & 15
        return codes.flatten(dim, dim + 1).contiguous()

    def ours(c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        inputs, outputs = c.partition_weight_shape
        if c.weight_type not in (scalar_types.uint4, scalar_types.uint4b8):
            return False, f"weight type {c.weight_type} is not a 4-bit one"
        if c.act_type != torch.bfloat16:
            return False, f"activation type {c.act_type} is not bfloat16"
        if c.group_size not in GROUP_SIZES or inputs % c.group_size:
            return False, f"group size {c.group_size} with {inputs} inputs"
        if outputs % ROWS_ALIGNED:
            return False, f"{outputs} outputs are not a multiple of {ROWS_ALIGNED}"
        return (False, "weights are permuted") if getattr(c, "has_g_idx", False) else (True, None)

    class AtenInt4LinearKernel(CPUWNA16LinearKernel):
        """Few rows by ATen's int4 kernel; many by a product in BF16 with the dequantized weights."""

        @classmethod
        def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
            possible, reason = ours(c)
            if possible or not hasattr(torch.ops._C, "cpu_gemm_wna16"):
                return possible, reason
            return super().can_implement(c)

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Repack from compressed-tensors' layout: words [out, in/8], scales [out, groups], zeros [out/8, groups]."""
            self.own = ours(self.config)[0]
            if not self.own:
                super().process_weights_after_loading(layer)
                return
            words, scales, zeros = self._get_weight_params(layer)
            scale = scales.data.float()
            zero = unpack(zeros.data, dim=0).float() if zeros is not None else torch.full_like(scale, MIDDLE)
            offsets = torch.stack([scale, (MIDDLE - zero) * scale], dim=-1).transpose(0, 1).contiguous()
            codes = unpack(words.data, dim=1)
            # Read again where many rows come: each quarter of the columns is one nibble of the int16 words.
            quarters = codes.view(codes.shape[0], NIBBLES_HELD, -1)
            self.held = sum(quarters[:, n] << 4 * n for n in range(NIBBLES_HELD)).to(torch.int16)
            self.scale, self.zero = (
                scale.to(torch.bfloat16).unsqueeze(-1),
                (zero + 128).to(torch.bfloat16).unsqueeze(-1),
            )
            packed = aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            setattr(layer, self.w_q_name, Parameter(packed, requires_grad=False))
            setattr(layer, self.w_s_name, Parameter(offsets.to(scales.dtype), requires_grad=False))
            if self.w_zp_name is not None:
                setattr(layer, self.w_zp_name, None)

        def dequantized(self) -> torch.Tensor:
            """Return the weights in BF16, [out, in]: (code - zero) is exact, its product with the scale rounded once."""
            rows, words = self.held.shape
            bits = torch.empty(rows, NIBBLES_HELD, words, dtype=torch.int16)
            for n in range(NIBBLES_HELD):
                torch.bitwise_right_shift(self.held, 4 * n, out=bits[:, n])
            bits.bitwise_and_(15).bitwise_or_(BF16_128)
            groups = bits.view(torch.bfloat16).view(*self.scale.shape[:2], self.config.group_size)
            return groups.sub_(self.zero).mul_(self.scale).view(rows, -1)

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            if not self.own:
                return super().apply_weights(layer, x, bias)
            rows = x.reshape(-1, x.shape[-1])
            if rows.shape[0] > MOST_ROWS:
                return torch.nn.functional.linear(x, self.dequantized(), bias)
            packed, offsets, _ = self._get_weight_params(layer)
            out = aten._weight_int4pack_mm_for_cpu(rows, packed, self.config.group_size, offsets)
            if bias is not None:
                out += bias
            return out.view(*x.shape[:-1], out.shape[-1])

    return AtenInt4LinearKernel


def e4m3_rounding() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that rounds float32 of at most 448 to e4m3, ties to even, and gives it as BF16.

    It overwrites its argument. Many values are rounded by float32's own adder: beside a number 2^20 times as large, no more
    bits fit in than e4m3 has. That gives what a conversion to float8 and back gives, whose second half PyTorch computes
    value by value.
    """
    import torch

    def rounded(values: torch.Tensor) -> torch.Tensor:
        if values.numel() <= FEW_VALUES:
            return values.to(torch.float8_e4m3fn).to(torch.bfloat16)
        power = values.view(torch.int32).bitwise_and(EXPONENT).view(torch.float32).clamp_(min=SMALLEST_NORMAL)
        return values.add_(power, alpha=SHIFT).sub_(power, alpha=SHIFT).to(torch.bfloat16)

    return rounded


def fp8_kernel() -> type:
    """Return the class of the FP8 kernel: weights e4m3 by channel, activations e4m3 by token, rounded as they come."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel

    smallest_scale = 1.0 / (E4M3_LARGEST * 512.0)  # as vLLM's QuantFP8

    rounded = e4m3_rounding()

    def ours(c: FP8ScaledMMLinearLayerConfig) -> bool:
        activation, weight = c.activation_quant_key.scale, c.weight_quant_key.scale
        by_token = activation.group_shape.is_per_token() and not activation.static
        return by_token and weight.group_shape.is_per_channel() and c.input_dtype == torch.bfloat16

    class EmulatedFP8LinearKernel(ChannelWiseTorchFP8ScaledMMLinearKernel):
        """The W8A8 product, with both factors in BF16, which holds every e4m3 number exactly.

        Products of two e4m3 numbers have 8 bits of mantissa at most, so that only their sum is rounded: to BF16 once,
        before the scales, which are applied in float32. Takes BF16's memory for its weights.
        """

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Hold the weights, [in, out] in e4m3, in BF16, packed by oneDNN as vLLM packs those of BF16 layers."""
            self.own = ours(self.config)
            if not self.own:
                super().process_weights_after_loading(layer)
                return
            weight, scale, *_ = self._get_layer_params(layer)
            self.weights = ops.create_onednn_mm(weight.data.t().to(torch.bfloat16).contiguous().t(), PRIMITIVES)
            self.weight_scale = scale.data.float().flatten()
            layer.weight = torch.nn.Parameter(weight.data[:0], requires_grad=False)  # its memory is free

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            if not self.own:
                return super().apply_weights(layer, x, bias)
            wide = x.to(torch.float32)
            scale = wide.abs().amax(dim=-1, keepdim=True).div_(E4M3_LARGEST).clamp_(min=smallest_scale)
            activations = rounded(wide.mul_(scale.reciprocal()))
            product = ops.onednn_mm(self.weights, activations, None).to(torch.float32)
            product.mul_(scale).mul_(self.weight_scale)
            if bias is not None:
                product += bias
            return product.to(x.dtype)

    return EmulatedFP8LinearKernel
