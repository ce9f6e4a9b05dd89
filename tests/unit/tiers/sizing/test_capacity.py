"""What one engine serves: by hand, and what must hold for every model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.tiers.sizing.builders import BALANCED, FAST, PRECISE, SteadyPace
from tests.unit.tiers.sizing.published_models import PUBLISHED, published_model
from tiers.formats import FORMATS
from tiers.plan import GIB
from tiers.sizing.capacity import (
    EnginePlan,
    Pace,
    ServingDemand,
    engines_on_cpu,
    engines_on_gpus,
)
from tiers.sizing.hardware import GpuKind
from tiers.sizing.named_gpus import parse_gpus
from tiers.sizing.roofline import Roofline
from tiers.sizing.tier_format import STANDARD_FORMATS, TierFormat, parse_format
from tiers.spec import STANDARD_TIERS, TierName
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

DEMAND = ServingDemand(prompt_tokens=800, output_tokens=250, context=1050)
SMALL_MODEL = published_model("llama-3.1-8b")


def engines_by_tier(
    name: str,
    gpus: str,
    demand: ServingDemand = DEMAND,
    formats: Mapping[TierName, TierFormat] = STANDARD_FORMATS,
    paces: dict[TierName, Pace] | None = None,
) -> dict[TierName, list[EnginePlan]]:
    """Return the engines of each tier, from the fewest GPUs."""
    kind, count = parse_gpus(gpus)
    plans, _ = engines_on_gpus(
        published_model(name),
        kind,
        count,
        demand=demand,
        formats=formats,
        paces=paces,
    )
    plans_by_tier: dict[TierName, list[EnginePlan]] = {}
    for tier in STANDARD_TIERS:
        plans_by_tier[tier] = [plan for plan in plans if plan.tier is tier]
    return plans_by_tier


def smallest_engine(
    name: str,
    gpus: str,
    tier: TierName,
    demand: ServingDemand = DEMAND,
    formats: Mapping[TierName, TierFormat] = STANDARD_FORMATS,
    paces: dict[TierName, Pace] | None = None,
) -> EnginePlan:
    engines = engines_by_tier(name, gpus, demand, formats=formats, paces=paces)
    return engines[tier][0]


def test_by_hand() -> None:
    """50 sequences at once: 250 x 20 ms + 50 x 80 ms of prompts are 9 s, so 5.56 requests a second on one engine."""
    paces: dict[TierName, Pace] = dict.fromkeys(STANDARD_TIERS, SteadyPace())
    demand = replace(DEMAND, max_num_seqs=50)
    plan = smallest_engine("llama-3.1-8b", "H100", PRECISE, demand=demand, paces=paces)
    assert plan.batch == 50
    assert plan.gpus_per_replica == 1
    assert plan.ttft_ms == pytest.approx(80 + 20)
    assert plan.tpot_ms == pytest.approx(9000 / 250)
    assert plan.requests_per_s == pytest.approx(50 / 9)
    assert plan.tokens_per_s == pytest.approx(250 * 50 / 9)


def test_the_kv_cache_bounds_the_batch() -> None:
    """80e9 bytes less 6 %, 2 GiB and 16.1 GB of weights hold 414 sequences of 1,050 tokens at 128 KiB."""
    demand = replace(DEMAND, max_num_seqs=10_000)
    plan = smallest_engine("llama-3.1-8b", "H100", PRECISE, demand=demand)
    free_bytes = int(80e9 * 0.94) - 2 * GIB - 2 * 8_030_261_248
    assert plan.max_sequences == free_bytes // (1050 * 131_072)
    assert plan.batch == plan.max_sequences
    formats = {PRECISE: parse_format("bf16+kv-fp8", where="a test")}
    in_fp8 = smallest_engine("llama-3.1-8b", "H100", PRECISE, formats=formats)
    assert in_fp8.max_sequences == 2 * plan.max_sequences


@pytest.mark.parametrize("tier", STANDARD_TIERS)
def test_a_bound_on_tpot_makes_batches_smaller(tier: TierName) -> None:
    loose = smallest_engine("llama-3.1-8b", "1xH100", tier)
    strict_demand = replace(DEMAND, tpot_ms=20.0)
    strict = smallest_engine("llama-3.1-8b", "1xH100", tier, demand=strict_demand)
    assert strict.batch < loose.batch
    assert strict.tpot_ms is not None
    assert strict.tpot_ms <= 20


def test_a_bound_on_ttft_is_kept() -> None:
    demand = replace(DEMAND, ttft_ms=30.0)
    plan = smallest_engine("llama-3.1-8b", "H100", PRECISE, demand=demand)
    assert plan.ttft_ms is not None
    assert plan.ttft_ms <= 30


def test_a_bound_that_no_engine_keeps_leaves_none() -> None:
    """The reason says so."""
    kind, _ = parse_gpus("H100")
    demand = replace(DEMAND, tpot_ms=0.5)
    plans, obstacles = engines_on_gpus(SMALL_MODEL, kind, None, demand=demand)
    assert not plans
    assert all("cannot keep the bounds" in why for why in obstacles.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_fall_with_the_precision(name: str) -> None:
    """And more GPUs hold more sequences."""
    plans_by_tier = [plans for plans in engines_by_tier(name, "H200").values() if plans]
    weights = [plans[0].weights_bytes for plans in plans_by_tier]
    assert weights == sorted(weights)
    for plans in plans_by_tier:
        gpus = [plan.gpus_per_replica for plan in plans]
        max_sequences = [plan.max_sequences for plan in plans]
        assert gpus == sorted(set(gpus))
        assert max_sequences == sorted(max_sequences)


def test_large_models_take_several_gpus() -> None:
    """70B in BF16 needs two at least; what does not fit on 16 says so, with the arithmetic."""
    plan = smallest_engine("llama-3.3-70b", "H100", PRECISE)
    assert plan.gpus_per_replica == 2
    kind, _ = parse_gpus("H100")
    model = published_model("deepseek-v3")
    _, obstacles = engines_on_gpus(model, kind, None, demand=DEMAND)
    arithmetic = "precise (BF16) does not fit on 16 x H100: its weights take 1249.9 GiB"
    assert arithmetic in obstacles[PRECISE]


def test_on_a_processor_speeds_are_measured_or_unknown() -> None:
    """Memory is what it is told; a tier without a profile has no times."""
    speed = SpeedModel(
        ttft_base_ms=20.0,
        prefill_ms_per_token=1.0,
        step_base_ms=30.0,
        step_ms_per_sequence=2.0,
        profiled=True,
    )
    demand = ServingDemand(
        prompt_tokens=100, output_tokens=50, context=150, max_num_seqs=16
    )
    plans = engines_on_cpu(
        SMALL_MODEL,
        demand,
        kv_cache_bytes=dict.fromkeys(STANDARD_TIERS, GIB),
        weights_bytes={FAST: 123},
        paces={PRECISE: speed},
    )
    fast, _, precise = plans
    assert [plan.max_sequences for plan in plans] == [GIB // (150 * 131_072)] * 3
    assert fast.weights_bytes == 123
    assert fast.tpot_ms is None
    assert fast.gpus_per_replica == 0
    assert precise.tpot_ms == pytest.approx(30 + 2 * 16 + 16 * 100 / 50)


@pytest.mark.parametrize(("gpu", "published"), [("H100", 5777), ("L40S", 1642)])
def test_the_roofline_is_near_published_results(gpu: str, published: float) -> None:
    """FP8 Llama 3.1 8B, summaries of news, tokens/s in MLPerf 5.1; ``benchmarks/roofline.py`` has more."""
    demand = ServingDemand(prompt_tokens=800, output_tokens=128, context=928)
    balanced = smallest_engine("llama-3.1-8b", gpu, BALANCED, demand=demand)
    assert balanced.tokens_per_s is not None
    assert 0.9 < balanced.tokens_per_s / published < 1.25


def small_roofline(gpu: GpuKind, name: str, gpus: int = 1) -> Roofline:
    return Roofline(
        model=SMALL_MODEL,
        gpu=gpu,
        number_format=FORMATS[name],
        gpus=gpus,
        context_tokens=10,
    )


def test_the_roofline_of_a_gpu_with_fp8_units() -> None:
    """As measured: ``benchmarks/results/gpu_speed.jsonl``."""
    h100, _ = parse_gpus("H100")
    int4 = small_roofline(h100, "awq-int4")
    fp8 = small_roofline(h100, "fp8")
    bf16 = small_roofline(h100, "bf16")
    assert bf16.step_ms(1) > int4.step_ms(1) > fp8.step_ms(1)
    assert bf16.prefill_ms_per_token > fp8.prefill_ms_per_token
    on_two_gpus = small_roofline(h100, "bf16", gpus=2)
    assert bf16.step_ms(64) / 2 < on_two_gpus.step_ms(64) < bf16.step_ms(64)


def test_the_roofline_of_a_gpu_without_fp8_units() -> None:
    """FP8 computes as BF16 does. Small batches are bound by memory, large ones by computing."""
    a100, _ = parse_gpus("A100")
    int4 = small_roofline(a100, "awq-int4")
    fp8 = small_roofline(a100, "fp8")
    bf16 = small_roofline(a100, "bf16")
    assert fp8.prefill_ms_per_token >= bf16.prefill_ms_per_token
    assert int4.step_ms(1) < bf16.step_ms(1)
    assert int4.step_ms(2000) > bf16.step_ms(2000)
