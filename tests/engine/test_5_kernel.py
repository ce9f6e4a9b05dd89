"""The 4-bit kernel for CPUs without AVX-512, in the engine's own environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

ENGINE_PYTHON = Path(__file__).resolve().parents[2] / ".venv-engine/bin/python"
SCRIPT = """
import torch
from types import SimpleNamespace
from qarr_vllm_int4 import _kernel_class
from vllm.scalar_type import scalar_types

torch.manual_seed(0)
inputs, outputs, group = 576, 960, 64
codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
zeros = torch.randint(0, 16, (outputs, inputs // group), dtype=torch.int32)
scales = (torch.rand(outputs, inputs // group) * 0.02 + 0.001).bfloat16()

def pack(values, dim):
    shape = list(values.shape)
    shape[dim : dim + 1] = [shape[dim] // 8, 8]
    shifts = torch.arange(0, 32, 4, dtype=torch.int32).view([-1] + [1] * (values.dim() - dim - 1))
    return (values.view(shape) << shifts).sum(dim + 1, dtype=torch.int32)

kernel_class = _kernel_class()
for zero_points in (True, False):
    config = SimpleNamespace(
        full_weight_shape=(inputs, outputs), partition_weight_shape=(inputs, outputs), group_size=group,
        weight_type=scalar_types.uint4 if zero_points else scalar_types.uint4b8, act_type=torch.bfloat16, zero_points=zero_points,
    )
    assert kernel_class.can_implement(config) == (True, None)
    layer = torch.nn.Module()
    layer.w = torch.nn.Parameter(pack(codes, 1), requires_grad=False)
    layer.s = torch.nn.Parameter(scales.clone(), requires_grad=False)
    layer.z = torch.nn.Parameter(pack(zeros, 0), requires_grad=False) if zero_points else None
    kernel = kernel_class(config, "w", "s", "z")
    kernel.process_weights_after_loading(layer)
    middle = zeros.float() if zero_points else torch.full_like(zeros, 8).float()
    weight = ((codes.view(outputs, -1, group) - middle[..., None]) * scales.float()[..., None]).view(outputs, inputs)
    for rows in (1, 3, 64):
        x, bias = torch.randn(2, rows, inputs).bfloat16(), torch.randn(outputs).bfloat16()
        got = kernel.apply_weights(layer, x, bias).float()
        want = x.float() @ weight.T + bias.float()
        error = ((got - want).norm() / want.norm()).item()
        assert got.shape == want.shape and error < 0.01, (zero_points, rows, error)
bad = SimpleNamespace(**{**vars(config), "partition_weight_shape": (inputs, 20)})
assert not kernel_class.can_implement(bad)[0]
print("kernel agrees")
"""


def test_kernel_computes_what_the_packed_weights_say() -> None:
    """Packed as compressed-tensors packs, with and without zero points, the product is that of the dequantized weights."""
    done = subprocess.run([ENGINE_PYTHON, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "kernel agrees" in done.stdout
