"""The engine plugin's kernels in the engine's own environment: what they compute, and where vLLM takes them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tiers.plan import cpu_flags

ENGINE_PYTHON = Path(__file__).resolve().parents[2] / ".venv-engine/bin/python"
INT4 = """
import torch
from types import SimpleNamespace
from qarr_vllm_kernels import int4_kernel
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

kernel_class = int4_kernel()
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
    middle = zeros.double() if zero_points else torch.full_like(zeros, 8).double()
    weight = ((codes.view(outputs, -1, group) - middle[..., None]) * scales.double()[..., None]).view(outputs, inputs)
    for rows in (1, 3, 16, 17, 64):  # by one path, and by the other
        x, bias = torch.randn(2, rows, inputs).bfloat16(), torch.randn(outputs).bfloat16()
        got = kernel.apply_weights(layer, x, bias).double()
        want = x.double() @ weight.T + bias.double()
        error = ((got - want).norm() / want.norm()).item()
        assert got.shape == want.shape and error < 0.01, (zero_points, rows, error)
        print(f"int4 zero_points={zero_points} rows={2 * rows}: relative error {error:.5f}")
bad = SimpleNamespace(**{**vars(config), "partition_weight_shape": (inputs, 20)})
assert not kernel_class.can_implement(bad)[0]
"""
FP8 = """
import torch
from qarr_vllm_kernels import fp8_kernel
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticChannelSym

torch.manual_seed(0)
NAMES = ("weight", "weight_scale", "input_scale", "input_scale_ub")
for inputs, outputs in ((576, 960), (576, 576), (576, 3072), (1536, 576)):  # the default model's
    config = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=kFp8StaticChannelSym, activation_quant_key=kFp8DynamicTokenSym,
        weight_shape=(outputs, inputs), input_dtype=torch.bfloat16, out_dtype=torch.bfloat16,
    )
    real = torch.randn(outputs, inputs) * 0.05
    scale = real.abs().amax(dim=1, keepdim=True) / 448
    codes = (real / scale).to(torch.float8_e4m3fn)

    def layer():
        made = torch.nn.Module()
        made.weight = torch.nn.Parameter(codes.clone().t(), requires_grad=False)  # [in, out], as vLLM hands it over
        made.weight_scale = torch.nn.Parameter(scale.clone(), requires_grad=False)
        made.input_scale = None
        return made

    with set_current_vllm_config(VllmConfig()):
        ours, theirs = fp8_kernel()(config, NAMES), ChannelWiseTorchFP8ScaledMMLinearKernel(config, NAMES)
    one, other = layer(), layer()
    ours.process_weights_after_loading(one)
    theirs.process_weights_after_loading(other)
    for rows in (1, 8, 64, 512):
        x, bias = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs).bfloat16()
        x[0, 0] = 40.0  # an outlier, as real activations have
        # By hand: in its build for AVX2, vLLM's own rounding of activations gives other numbers.
        s = x.float().abs().amax(dim=-1, keepdim=True) / 448
        q = (x.float() * s.reciprocal()).to(torch.float8_e4m3fn)
        want = (q.double() * s.double()) @ (codes.double() * scale.double()).T + bias.double()
        found = {}
        for name, kernel, on in (("ours", ours, one), ("theirs", theirs, other)):
            got = kernel.apply_weights(on, x, bias)
            assert got.shape == want.shape and got.dtype == torch.bfloat16
            found[name] = ((got.double() - want).abs().max() / want.abs().max()).item()
        print(f"fp8 {inputs}x{outputs} rows={rows}: largest deviation from float64 "
              f"{found['ours']:.5f}, torch._scaled_mm {found['theirs']:.5f}")
        assert found["ours"] < 0.01, found
"""
ROUNDING = """
import torch
import qarr_vllm_kernels as plugin

torch.manual_seed(0)
fp8, rounding = torch.float8_e4m3fn, plugin.e4m3_rounding()
numbers = torch.arange(256, dtype=torch.uint8).view(fp8).float()
numbers = numbers[~numbers.isnan()].unique()  # every e4m3 number, in order
ties = (numbers[1:] + numbers[:-1]) / 2
edges = [numbers, ties, ties.nextafter(torch.tensor(1e9)), ties.nextafter(torch.tensor(-1e9))]
spread = [torch.randn(1 << 18) * scale for scale in (1e-6, 1e-3, 0.02, 1.0, 30.0, 150.0)]
values = torch.cat([*edges, torch.tensor([448.0001, -448.0001]), *spread]).clamp(-448.001, 448.001)
assert values.numel() > plugin.FEW_VALUES
want = values.to(fp8).to(torch.bfloat16)
assert torch.equal(rounding(values.clone()), want)
few = values[: plugin.FEW_VALUES].clone()
assert torch.equal(rounding(few), want[: plugin.FEW_VALUES])
print(f"rows={values.numel()}: {(want != 0).sum().item()} of them not 0")
"""
# As one of vLLM's processes on a processor: vLLM asks torch what it has, then loads plugins, then selects kernels.
SELECTION = """
import sys
import torch

torch.cpu._is_avx512_supported = lambda: "avx512" in sys.argv
torch.cpu._is_amx_tile_supported = lambda: "amx" in sys.argv
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel, init_fp8_linear_kernel
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym, kFp8StaticChannelSym, kFp8StaticTensorSym,
)
from vllm.plugins import load_general_plugins
from vllm.scalar_type import scalar_types

load_general_plugins()
shape = (576, 960)
config = MPLinearLayerConfig(
    full_weight_shape=shape, partition_weight_shape=shape, weight_type=scalar_types.uint4, act_type=torch.bfloat16,
    group_size=64, zero_points=True,
)
print("4 bits:", choose_mp_linear_kernel(config).__name__)
for name, activations, weights in (
    ("FP8 by channel:", kFp8DynamicTokenSym, kFp8StaticChannelSym), ("FP8 by tensor:", kFp8StaticTensorSym, kFp8StaticTensorSym)
):
    with set_current_vllm_config(VllmConfig()):
        kernel = init_fp8_linear_kernel(
            activation_quant_key=activations, weight_quant_key=weights, weight_shape=shape[::-1],
            input_dtype=torch.bfloat16, out_dtype=torch.bfloat16,
        )
    print(name, type(kernel).__name__)
"""


@pytest.mark.parametrize(
    "script", [INT4, FP8, ROUNDING], ids=["int4", "fp8", "rounding"]
)
def test_kernel_computes_what_the_quantized_weights_say(script: str) -> None:
    """The product is that of the dequantized weights and the rounded activations in float64, by every path, within 1 %.

    Activations are rounded as a conversion to float8 rounds them: every e4m3 number, every tie, and both sides of it.
    """
    done = subprocess.run(
        [ENGINE_PYTHON, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rows=" in done.stdout


@pytest.mark.parametrize(
    ("flags", "int4", "fp8_by_tensor", "log_line"),
    [
        (
            (),
            "AtenInt4LinearKernel",
            "PerTensorTorchFP8ScaledMMLinearKernel",
            "4-bit layers by QARR's kernel (this build of vLLM has none)",
        ),
        (
            ("avx512",),
            "AtenInt4LinearKernel",
            "PerTensorTorchFP8ScaledMMLinearKernel",
            "4-bit layers by QARR's kernel (this CPU has no AMX)",
        ),
        (
            ("avx512", "amx"),
            "CPUWNA16LinearKernel",
            "CPUFp8PerTensorScaledMMLinearKernel",
            "4-bit layers by vLLM's kernel (this CPU has AMX)",
        ),
    ],
    ids=["avx2", "avx512", "amx"],
)
def test_vllm_takes_the_kernels_that_are_faster(
    flags: tuple[str, ...], int4: str, fp8_by_tensor: str, log_line: str
) -> None:
    """FP8 by channel is QARR's on every processor, 4 bits where there is no AMX; the log says which and why.

    What torch says of the processor is made up; the machine needs AVX-512 to load vLLM's build for it.
    """
    if "avx512" in flags and "avx512f" not in cpu_flags():
        pytest.skip("this processor has no AVX-512")
    argv = [ENGINE_PYTHON, "-c", SELECTION, *flags]
    process = subprocess.run(
        argv, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    selected = dict(
        line.split(": ")
        for line in process.stdout.splitlines()
        if line.startswith(("4 bits", "FP8 by"))
    )
    assert selected == {
        "4 bits": int4,
        "FP8 by channel": "EmulatedFP8LinearKernel",
        "FP8 by tensor": fp8_by_tensor,
    }
    assert (process.stdout + process.stderr).count(log_line) == 1
