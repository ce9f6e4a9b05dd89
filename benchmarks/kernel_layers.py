"""One linear layer after another, in the engine's environment: what the plugin's kernels cost by rows, and where.

    .venv-engine/bin/python -P benchmarks/kernel_layers.py

Of the default model's four kinds of layers, summed, in microseconds on one core: the shortest of several passes, the ways
taking turns. BF16 is the layer as ``precise`` has it, by oneDNN with packed weights. First the 4-bit kernel, both of its
ways, whose crossover is the plugin's ``MAX_ROWS``; then the FP8 kernel, and what its time is made of. (``-P``:
transformers would take ``kernels.py`` in this folder for a package of that name.)
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import qarr_vllm_kernels as plugin
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
    ChannelWiseTorchFP8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
)
from vllm.scalar_type import scalar_types

if TYPE_CHECKING:
    from collections.abc import Callable

# inputs and outputs of qkv, o, gate and up, down
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))
GROUP = 64
INT4_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)
FP8_ROWS = (1, 8, 64, 256, 1024)
NAMES = ("weight", "weight_scale", "input_scale", "input_scale_ub")
PASS_S = 0.25  # about how long each way is tried for, at each shape
MAX_PASSES = 200


def shortest(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return each way's shortest pass, in microseconds."""
    found = dict.fromkeys(ways, float("inf"))
    for way in ways.values():  # the first pass of a shape prepares
        way()
    passes, began = 0, time.perf_counter()
    while passes < 5 or (
        passes < MAX_PASSES and time.perf_counter() - began < PASS_S * len(ways)
    ):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            found[name] = min(found[name], (time.perf_counter() - started) * 1e6)
        passes += 1
    return found


def int4_layer(
    inputs: int, outputs: int
) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Return a 4-bit layer of random weights: input and the most rows for ATen's kernel in, output out."""
    config = SimpleNamespace(
        full_weight_shape=(inputs, outputs), partition_weight_shape=(inputs, outputs), group_size=GROUP, zero_points=True,
        weight_type=scalar_types.uint4, act_type=torch.bfloat16,
    )  # fmt: skip
    layer = torch.nn.Module()
    whole = torch.iinfo(torch.int32)
    for name, shape in (
        ("w", (outputs, inputs // 8)),
        ("z", (outputs // 8, inputs // GROUP)),
    ):
        words = torch.randint(whole.min, whole.max, shape, dtype=torch.int32)
        layer.register_parameter(name, torch.nn.Parameter(words, requires_grad=False))
    layer.s = torch.nn.Parameter(
        torch.rand(outputs, inputs // GROUP).bfloat16(), requires_grad=False
    )
    kernel = plugin.int4_kernel()(config, "w", "s", "z")
    kernel.process_weights_after_loading(layer)

    def apply(x: torch.Tensor, most: int) -> torch.Tensor:
        plugin.MAX_ROWS = most
        return kernel.apply_weights(layer, x)

    return apply


def fp8_layer(
    kernel_class: type, inputs: int, outputs: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an FP8 layer of random weights."""
    config = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=kFp8StaticChannelSym, activation_quant_key=kFp8DynamicTokenSym,
        weight_shape=(outputs, inputs), input_dtype=torch.bfloat16, out_dtype=torch.bfloat16,
    )  # fmt: skip
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(
        torch.randn(outputs, inputs).to(torch.float8_e4m3fn).t(), requires_grad=False
    )
    layer.weight_scale = torch.nn.Parameter(torch.rand(outputs, 1), requires_grad=False)
    layer.input_scale = None
    with set_current_vllm_config(VllmConfig()):
        kernel = kernel_class(config, NAMES)
    kernel.process_weights_after_loading(layer)
    return lambda x: kernel.apply_weights(layer, x)


def fp8_parts(x: torch.Tensor, outputs: int) -> dict[str, Callable[[], object]]:
    """Return the steps of the FP8 kernel, each by itself, on what the one before it would hand it."""
    wide, product = x.float(), torch.randn(x.shape[0], outputs).bfloat16()
    scale, by_channel = torch.rand(x.shape[0], 1), torch.rand(outputs)
    rounding = plugin.e4m3_rounding()
    return {
        "largest of each token": lambda: (
            x.to(torch.float32).abs().amax(dim=-1, keepdim=True)
        ),
        "rounding to e4m3": lambda: rounding(wide * scale),
        "scaling the product": lambda: (
            product.to(torch.float32).mul_(scale).mul_(by_channel).to(torch.bfloat16)
        ),
        "rounding by conversion": lambda: (
            (wide * scale).to(torch.float8_e4m3fn).to(torch.bfloat16)
        ),
    }


def table(
    title: str,
    rows: tuple[int, ...],
    ways_at: Callable[[int, int, int], dict[str, Callable[[], object]]],
) -> None:
    """Print a column for each number of rows, a line for each way: microseconds, summed over the shapes."""
    found: dict[str, list[float]] = {}
    for n, count in enumerate(rows):
        for inputs, outputs in SHAPES:
            for name, us in shortest(ways_at(count, inputs, outputs)).items():
                found.setdefault(name, [0.0] * len(rows))[n] += us
    print(f"{title:34}" + "".join(f"{count:>8}" for count in rows))
    for name, values in found.items():
        print(f"{name:34}" + "".join(f"{value:>8.0f}" for value in values))
    print(flush=True)


def main() -> None:
    """Measure and print."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weights = {shape: torch.randn(shape[1], shape[0]).bfloat16() for shape in SHAPES}
    plain = {shape: plugin.bf16_product(weight) for shape, weight in weights.items()}
    int4 = {shape: int4_layer(*shape) for shape in SHAPES}
    fp8 = {shape: fp8_layer(plugin.fp8_kernel(), *shape) for shape in SHAPES}
    before = {
        shape: fp8_layer(ChannelWiseTorchFP8ScaledMMLinearKernel, *shape)
        for shape in SHAPES
    }

    def int4_ways(
        rows: int, inputs: int, outputs: int
    ) -> dict[str, Callable[[], object]]:
        x, layer = torch.randn(rows, inputs).bfloat16(), int4[inputs, outputs]
        return {
            "BF16": lambda: plain[inputs, outputs](x).to(torch.bfloat16),
            "int4 by ATen": lambda: layer(x, rows),
            "int4 dequantized to BF16": lambda: layer(x, 0),
        }

    def fp8_ways(
        rows: int, inputs: int, outputs: int
    ) -> dict[str, Callable[[], object]]:
        x = torch.randn(rows, inputs).bfloat16()
        ways: dict[str, Callable[[], object]] = {
            "BF16": lambda: plain[inputs, outputs](x).to(torch.bfloat16),
            "BF16 by PyTorch": lambda: torch.nn.functional.linear(
                x, weights[inputs, outputs]
            ),
            "FP8 by the plugin": lambda: fp8[inputs, outputs](x),
        }
        ways |= {f"  {name}": way for name, way in fp8_parts(x, outputs).items()}
        return ways

    def vllm_ways(
        rows: int, inputs: int, outputs: int
    ) -> dict[str, Callable[[], object]]:
        x = torch.randn(rows, inputs).bfloat16()
        return {"FP8 by torch._scaled_mm": lambda: before[inputs, outputs](x)}

    by = "by oneDNN" if plugin.has_onednn_bf16() else "in float32 by the plugin"
    print(
        f"torch {torch.__version__}, BF16 {by}, one core; four layers of {SHAPES}, microseconds\n"
    )
    with torch.inference_mode():
        table("rows", INT4_ROWS, int4_ways)
        table("rows", FP8_ROWS, fp8_ways)
        table("rows", FP8_ROWS, vllm_ways)


if __name__ == "__main__":
    main()
