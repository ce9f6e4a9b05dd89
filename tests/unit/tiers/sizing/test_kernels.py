"""How vLLM computes number formats: what must hold on every GPU, and what is not computed on some."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.unit.tiers.sizing.published_models import published_model
from tiers.errors import PlanError
from tiers.formats import FORMATS, NumberFormat
from tiers.sizing.architecture import Architecture
from tiers.sizing.hardware import GpuKind, known_gpus
from tiers.sizing.kernels import (
    FP4_REACHED,
    FP8_BLOCK_REACHED,
    FP8_REACHED,
    INT8_REACHED,
    PLANNED_FORMATS,
    kernel_for,
    obstacle_to,
)
from tiers.sizing.roofline import Roofline

MODEL = published_model("llama-3.1-8b")
MODEL_WITH_EXPERTS = published_model("qwen3-30b-a3b")
BLACKWELL = GpuKind(
    name="Blackwell",
    memory_gb=180,
    bandwidth_gb_s=8000,
    bf16_tflops=2250,
    fp8_tflops=4500,
    fp4_tflops=9000,
    int8_tops=4500,
    compute_capability=(10, 0),
)
HOPPER = GpuKind(
    name="Hopper",
    memory_gb=80,
    bandwidth_gb_s=3350,
    bf16_tflops=989,
    fp8_tflops=1979,
    int8_tops=1979,
    compute_capability=(9, 0),
    machete=True,
)
AMPERE = GpuKind(
    name="Ampere",
    memory_gb=80,
    bandwidth_gb_s=2039,
    bf16_tflops=312,
    int8_tops=624,
    compute_capability=(8, 0),
)
AMD = GpuKind(
    name="MI",
    also=("AMD Instinct MI",),
    memory_gb=192,
    bandwidth_gb_s=5300,
    bf16_tflops=1307,
    fp8_tflops=2615,
)
GPUS = (*known_gpus(), BLACKWELL, HOPPER, AMPERE, AMD)
BATCHES = (1, 8, 64, 256, 2048)
COMPUTED = [
    (gpu, name)
    for gpu in GPUS
    for name in PLANNED_FORMATS
    if obstacle_to(FORMATS[name], gpu) is None
]


def roofline(
    gpu: GpuKind, name: str, model: Architecture = MODEL, kv_bytes: int = 2
) -> Roofline:
    return Roofline(
        model=model,
        gpu=gpu,
        number_format=FORMATS[name],
        kv_bytes_per_value=kv_bytes,
    )


def with_more(gpu: GpuKind, field: str) -> GpuKind:
    """Return a GPU with twice as much of something, if it has any."""
    value = getattr(gpu, field)
    return gpu.model_copy(update={field: None if value is None else 2 * value})


@pytest.mark.parametrize(
    "field",
    ["bandwidth_gb_s", "bf16_tflops", "fp8_tflops", "fp4_tflops", "int8_tops"],
)
def test_a_better_gpu_is_never_slower(field: str) -> None:
    """In every format that it computes, at every batch, and for prompts."""
    for gpu, name in COMPUTED:
        better = roofline(with_more(gpu, field), name)
        usual = roofline(gpu, name)
        assert better.prefill_ms_per_token <= usual.prefill_ms_per_token
        for batch in BATCHES:
            assert better.step_ms(batch) <= usual.step_ms(batch), (gpu.name, name)


def test_a_larger_batch_is_never_faster() -> None:
    for gpu, name in COMPUTED:
        steps_ms = [roofline(gpu, name).step_ms(batch) for batch in BATCHES]
        assert all(first <= second for first, second in pairwise(steps_ms))


def test_an_fp8_kv_cache_is_faster_in_every_format() -> None:
    for gpu, name in COMPUTED:
        assert roofline(gpu, name, kv_bytes=1).step_ms(64) < roofline(
            gpu, name
        ).step_ms(64)


@pytest.mark.parametrize("model", [MODEL, MODEL_WITH_EXPERTS])
def test_units_of_its_own_are_never_slower_than_unpacking(model: Architecture) -> None:
    """Where many tokens are computed at once, and for prompts."""
    for gpu, native, unpacked in (
        (BLACKWELL, "nvfp4", "nvfp4-w4a16"),
        (BLACKWELL, "mxfp4-w4a8", "mxfp4"),
        (HOPPER, "fp8", "fp8-w8a16"),
        (HOPPER, "int4-w4a8", "int4"),
        (AMPERE, "int8-w8a8", "int8"),
    ):
        own = roofline(gpu, native, model)
        other = roofline(gpu, unpacked, model)
        assert own.step_ms(2048) <= other.step_ms(2048)
        assert own.prefill_ms_per_token < other.prefill_ms_per_token


def test_fewer_bytes_are_faster_where_memory_bounds() -> None:
    """One sequence reads all weights, so their bytes decide, where no kernel takes a time for each layer."""
    by_bytes = sorted(
        (FORMATS[name] for name in PLANNED_FORMATS),
        key=lambda number_format: number_format.bytes_per_weight,
    )
    steps_ms = [
        roofline(AMPERE, number_format.name).step_ms(1)
        for number_format in by_bytes
        if obstacle_to(number_format, AMPERE) is None
    ]
    assert steps_ms == sorted(steps_ms)


@pytest.mark.parametrize(
    ("gpu", "name", "flop_per_s"),
    [
        (BLACKWELL, "nvfp4", 9000e12 * FP4_REACHED),
        (BLACKWELL, "mxfp4-w4a8", 4500e12 * FP8_REACHED),
        (BLACKWELL, "mxfp8", 4500e12 * FP8_REACHED),
        (BLACKWELL, "fp8-block", 4500e12 * FP8_BLOCK_REACHED),
        (HOPPER, "int4-w4a8", 1979e12 * 0.4),
        (AMPERE, "int8-w8a8", 624e12 * INT8_REACHED),
    ],
)
def test_formats_with_units_of_their_own(
    gpu: GpuKind, name: str, flop_per_s: float
) -> None:
    kernel = kernel_for(FORMATS[name], gpu)
    assert kernel.is_native
    assert kernel.flop_per_s == pytest.approx(flop_per_s)


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        (HOPPER, "nvfp4"),
        (HOPPER, "mxfp8"),
        (HOPPER, "mxfp4-w4a8"),
        (AMPERE, "fp8"),
        (AMPERE, "fp8-block"),
        (BLACKWELL, "awq-int4"),
        (BLACKWELL, "mxfp4"),
        (AMD, "mxfp4"),
        (BLACKWELL.model_copy(update={"compute_capability": (12, 0)}), "mxfp4-w4a8"),
    ],
)
def test_formats_without_units_are_computed_in_16_bits(gpu: GpuKind, name: str) -> None:
    kernel = kernel_for(FORMATS[name], gpu)
    assert not kernel.is_native
    assert kernel.flop_per_s < gpu.bf16_tflops * 1e12


def test_machete_has_whole_numbers_of_dense_models_on_hopper() -> None:
    """The experts' and FP4's weights are unpacked by Marlin there, which is slower."""
    machete = kernel_for(FORMATS["awq-int4"], HOPPER)
    marlin = kernel_for(FORMATS["awq-int4"], HOPPER, has_experts=True)
    assert machete.flop_per_s > marlin.flop_per_s
    assert machete.layer_ms > marlin.layer_ms == 0
    assert kernel_for(FORMATS["nvfp4"], HOPPER) == marlin
    assert kernel_for(FORMATS["awq-int4"], AMPERE).layer_ms == 0


@pytest.mark.parametrize(
    ("gpu", "name", "why"),
    [
        (BLACKWELL, "int8-w8a8", "up to compute capability 9.0"),
        (AMD, "int8-w8a8", "its throughput in INT8 is not known; add int8=600TOPS"),
        (
            AMPERE,
            "int4-w4a8",
            "compute capability 9.0 (H100, H200) alone; take awq-int4",
        ),
        (BLACKWELL, "awq-int4-w4a8", "compute capability 9.0"),
        (HOPPER, "mxfp4-w4a4", "it has no FP4 units; take mxfp4"),
        (AMD, "nvfp4", "it is for NVIDIA's GPUs; take mxfp4"),
        (HOPPER, "fp6", "fp6 is not planned: allowed are "),
    ],
)
def test_what_is_not_computed_says_why_and_what_is(
    gpu: GpuKind, name: str, why: str
) -> None:
    with pytest.raises(PlanError) as error:
        kernel_for(FORMATS[name], gpu)
    assert why in str(error.value)


def test_experts_may_have_fewer_bits_than_the_other_layers() -> None:
    """Their bytes and times lie between those of each format for all layers; on a dense model the experts do not count."""

    def step_ms(dense: NumberFormat | None, experts: NumberFormat, batch: int) -> float:
        pace = Roofline(
            model=MODEL_WITH_EXPERTS,
            gpu=BLACKWELL,
            number_format=experts,
            dense_format=dense,
        )
        return pace.step_ms(batch)

    fp4 = FORMATS["nvfp4"]
    fp8 = FORMATS["fp8"]
    for batch in BATCHES[2:]:  # small ones take longest to quantize for FP4's units
        mixed_ms = step_ms(fp8, fp4, batch)
        assert step_ms(None, fp4, batch) < mixed_ms < step_ms(None, fp8, batch)
    fp4_bytes = MODEL_WITH_EXPERTS.weight_bytes(fp4.bytes_per_weight)
    fp8_bytes = MODEL_WITH_EXPERTS.weight_bytes(fp8.bytes_per_weight)
    mixed_bytes = MODEL_WITH_EXPERTS.weight_bytes(
        fp8.bytes_per_weight, bytes_per_expert_weight=fp4.bytes_per_weight
    )
    assert fp4_bytes < mixed_bytes < fp8_bytes
    assert MODEL.weight_bytes(1.0, bytes_per_expert_weight=0.5) == MODEL.weight_bytes(1)
