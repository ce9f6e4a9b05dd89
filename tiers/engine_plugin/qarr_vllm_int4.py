"""Serve 4-bit checkpoints on CPUs without AVX-512.

vLLM's CPU wheel holds two builds of its kernels. The AVX2 build lacks ``cpu_gemm_wna16``, yet vLLM still selects
``CPUWNA16LinearKernel``: such an engine starts, reports itself healthy and fails on its first request. PyTorch has a
grouped int4 kernel of its own with an AVX2 path (``aten::_weight_int4pack_mm_for_cpu``); this plugin puts it in that
place. vLLM loads the plugin in each of its processes through the ``vllm.general_plugins`` entry point. Where vLLM's own
kernel exists, or there is no CPU platform, the plugin does nothing.
"""

from __future__ import annotations

import os

NIBBLES = 8  # 4-bit values in one packed int32
MIDDLE = 8  # the code that ATen's kernel takes for zero
ROWS_ALIGNED = 16  # ATen asks for output widths that are a multiple of this
GROUP_SIZES = (32, 64, 128, 256)


def register() -> None:
    """Register the kernel with vLLM when this machine needs it. vLLM calls it once a process."""
    import torch
    import vllm._custom_ops  # noqa: F401  loads vLLM's compiled operators
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu() or hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return
    from vllm.model_executor.kernels.linear import register_linear_kernel

    # vLLM's processes inherit the variable from one another, the registration they do not.
    disabled = {name for name in os.environ.get("VLLM_DISABLED_KERNELS", "").split(",") if name}
    os.environ["VLLM_DISABLED_KERNELS"] = ",".join(sorted(disabled | {"CPUWNA16LinearKernel"}))
    register_linear_kernel(_kernel_class(), PlatformEnum.CPU, "mp")


def _kernel_class() -> type:
    import torch
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
        MPLinearKernel,
        MPLinearLayerConfig,
    )
    from vllm.scalar_type import scalar_types

    def unpack(packed: torch.Tensor, dim: int) -> torch.Tensor:
        """Unpack int32 words into eight 4-bit codes each, lowest bits first, along ``dim``."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = (packed.unsqueeze(dim + 1) >> shifts.view([-1] + [1] * (packed.dim() - dim - 1))) & 15
        return codes.flatten(dim, dim + 1).contiguous()

    class AtenInt4LinearKernel(MPLinearKernel):
        """Weights int4 in groups, activations BF16, computed by ATen's CPU kernel."""

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
            inputs, outputs = c.partition_weight_shape
            if c.weight_type not in (scalar_types.uint4, scalar_types.uint4b8):
                return False, f"weight type {c.weight_type} is not a 4-bit one"
            if c.act_type != torch.bfloat16:
                return False, f"activation type {c.act_type} is not bfloat16"
            if c.group_size not in GROUP_SIZES or inputs % c.group_size:
                return False, f"group size {c.group_size} with {inputs} inputs"
            if outputs % ROWS_ALIGNED:
                return False, f"{outputs} outputs are not a multiple of {ROWS_ALIGNED}"
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Repack from compressed-tensors' layout: words [out, in/8], scales [out, groups], zeros [out/8, groups]."""
            words, scales, zeros = self._get_weight_params(layer)
            codes = unpack(words.data, dim=1)
            scale = scales.data.float()
            zero = unpack(zeros.data, dim=0).float() if zeros is not None else torch.full_like(scale, MIDDLE)
            scales_and_offsets = torch.stack([scale, (MIDDLE - zero) * scale], dim=-1).transpose(0, 1)
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            parameter = torch.nn.Parameter
            setattr(layer, self.w_q_name, parameter(packed, requires_grad=False))
            setattr(
                layer,
                self.w_s_name,
                parameter(scales_and_offsets.contiguous().to(scales.dtype), requires_grad=False),
            )
            if self.w_zp_name is not None:
                setattr(layer, self.w_zp_name, None)

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            packed, scales_and_offsets, _ = self._get_weight_params(layer)
            rows = x.reshape(-1, x.shape[-1])
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, self.config.group_size, scales_and_offsets)
            if bias is not None:
                out += bias
            return out.view(*x.shape[:-1], out.shape[-1])

    return AtenInt4LinearKernel
