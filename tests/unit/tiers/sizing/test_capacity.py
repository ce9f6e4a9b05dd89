"""What one engine serves: by hand, and what must hold for every model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.unit.tiers.sizing.test_architecture import PUBLISHED, read
from tiers.plan import GIB
from tiers.sizing.architecture import architecture
from tiers.sizing.capacity import (
    EnginePlan,
    ServingDemand,
    engines_on_cpu,
    engines_on_gpus,
)
from tiers.sizing.named_gpus import parse_gpus
from tiers.sizing.roofline import Roofline
from tiers.spec import STANDARD_TIERS, Precision, TierName
from tiers.speed import SpeedModel

FAST, BALANCED, PRECISE = STANDARD_TIERS
DEMAND = ServingDemand(800, 250, 1050)
SMALL = architecture(read("llama-3.1-8b"))


@dataclass(frozen=True)
class Steady:
    """Takes 0.1 ms for each prompt token, and 20 ms for each step."""

    prefill_ms_per_token: float = 0.1

    def step_ms(self, sequences: int) -> float:
        return 20.0

    def prompt_ms(self, tokens: int, _sequences: int, /) -> float:
        return self.prefill_ms_per_token * tokens


def engines(
    name: str, gpus: str, demand: ServingDemand = DEMAND, **options: object
) -> dict[TierName, list[EnginePlan]]:
    """Return the engines of each tier, from the fewest GPUs."""
    kind, count = parse_gpus(gpus)
    found, _ = engines_on_gpus(architecture(read(name)), kind, count, demand, **options)  # type: ignore[arg-type]
    return {
        tier: [each for each in found if each.tier is tier] for tier in STANDARD_TIERS
    }


def engine(
    name: str,
    gpus: str,
    tier: TierName,
    demand: ServingDemand = DEMAND,
    **options: object,
) -> EnginePlan:
    return engines(name, gpus, demand, **options)[tier][0]


def test_by_hand() -> None:
    """50 sequences at once: 250 x 20 ms + 50 x 80 ms of prompts are 9 s, so 5.56 requests a second on one engine."""
    paces = dict.fromkeys(STANDARD_TIERS, Steady())
    found = engine(
        "llama-3.1-8b", "H100", PRECISE, replace(DEMAND, max_num_seqs=50), paces=paces
    )
    assert (found.batch, found.gpus_per_replica) == (50, 1)
    assert found.ttft_ms == pytest.approx(80 + 20)
    assert found.tpot_ms == pytest.approx(9000 / 250)
    assert found.requests_per_s == pytest.approx(50 / 9)
    assert found.tokens_per_s == pytest.approx(250 * 50 / 9)


def test_the_kv_cache_bounds_the_batch() -> None:
    """80e9 bytes less 6 %, 2 GiB and 16.1 GB of weights hold 414 sequences of 1,050 tokens at 128 KiB."""
    found = engine(
        "llama-3.1-8b", "H100", PRECISE, replace(DEMAND, max_num_seqs=10_000)
    )
    free = int(80e9 * 0.94) - 2 * GIB - 2 * 8_030_261_248
    assert found.max_sequences == free // (1050 * 131_072)
    assert found.batch == found.max_sequences
    assert (
        engine("llama-3.1-8b", "H100", PRECISE, kv_bytes_per_value=1).max_sequences
        == 2 * found.max_sequences
    )


def test_bounds_on_times_make_batches_smaller() -> None:
    """One that no engine keeps leaves none, and the reason says so."""
    loose, tight = (
        engines("llama-3.1-8b", "1xH100"),
        engines("llama-3.1-8b", "1xH100", replace(DEMAND, tpot_ms=20.0)),
    )
    for tier in STANDARD_TIERS:
        assert tight[tier][0].batch < loose[tier][0].batch
        assert (tight[tier][0].tpot_ms or 0) <= 20
    prompt = engine("llama-3.1-8b", "H100", PRECISE, replace(DEMAND, ttft_ms=30.0))
    assert (prompt.ttft_ms or 0) <= 30
    kind, _ = parse_gpus("H100")
    found, lacks = engines_on_gpus(SMALL, kind, None, replace(DEMAND, tpot_ms=0.5))
    assert not found
    assert all("cannot keep the bounds" in why for why in lacks.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_fall_with_the_precision(name: str) -> None:
    """And more GPUs hold more sequences."""
    found = [each for each in engines(name, "H200").values() if each]
    weights = [each[0].weights_bytes for each in found]
    assert weights == sorted(weights)
    for each in found:
        assert [one.gpus_per_replica for one in each] == sorted(
            {one.gpus_per_replica for one in each}
        )
        assert [one.max_sequences for one in each] == sorted(
            one.max_sequences for one in each
        )


def test_large_models_take_several_gpus() -> None:
    """70B in BF16 needs two at least; what does not fit on 16 says so, with the arithmetic."""
    assert engine("llama-3.3-70b", "H100", PRECISE).gpus_per_replica == 2
    kind, _ = parse_gpus("H100")
    _, lacks = engines_on_gpus(architecture(read("deepseek-v3")), kind, None, DEMAND)
    assert (
        "precise does not fit on 16 x H100: its weights take 1249.9 GiB"
        in lacks[PRECISE]
    )


def test_on_a_processor_speeds_are_measured_or_unknown() -> None:
    """Memory is what it is told; a tier without a profile has no times."""
    speed = SpeedModel(20.0, 1.0, 30.0, 2.0, profiled=True)
    demand = ServingDemand(100, 50, 150, max_num_seqs=16)
    found = engines_on_cpu(
        SMALL,
        demand,
        kv_cache_bytes=dict.fromkeys(STANDARD_TIERS, GIB),
        weights_bytes={FAST: 123},
        paces={PRECISE: speed},
    )
    assert [each.max_sequences for each in found] == [GIB // (150 * 131_072)] * 3
    assert (found[0].weights_bytes, found[0].tpot_ms, found[0].gpus_per_replica) == (
        123,
        None,
        0,
    )
    assert found[2].tpot_ms == pytest.approx(30 + 2 * 16 + 16 * 100 / 50)


@pytest.mark.parametrize(("gpu", "published"), [("H100", 5777), ("L40S", 1642)])
def test_the_roofline_is_near_published_results(gpu: str, published: float) -> None:
    """FP8 Llama 3.1 8B, summaries of news, tokens/s in MLPerf 5.1; ``benchmarks/roofline.py`` has more."""
    balanced = engine("llama-3.1-8b", gpu, BALANCED, ServingDemand(800, 128, 928))
    assert 0.9 < (balanced.tokens_per_s or 0) / published < 1.25


def test_the_roofline_follows_the_hardware() -> None:
    """Small batches are bound by memory, large ones by computing; without FP8 units, FP8 computes as BF16 does."""
    h100, a100 = parse_gpus("H100")[0], parse_gpus("A100")[0]
    int4, fp8, bf16 = (
        Roofline(SMALL, h100, precision, context_tokens=10) for precision in Precision
    )
    # as measured: benchmarks/results/gpu_speed.jsonl
    assert bf16.step_ms(1) > int4.step_ms(1) > fp8.step_ms(1)
    assert bf16.prefill_ms_per_token > fp8.prefill_ms_per_token
    int4, unpacked, plain = (
        Roofline(SMALL, a100, precision, context_tokens=10) for precision in Precision
    )
    assert unpacked.prefill_ms_per_token >= plain.prefill_ms_per_token
    assert (
        int4.step_ms(1) < plain.step_ms(1),
        int4.step_ms(2000) > plain.step_ms(2000),
    ) == (True, True)
    two = Roofline(SMALL, h100, Precision.BF16, gpus=2, context_tokens=10)
    assert bf16.step_ms(64) / 2 < two.step_ms(64) < bf16.step_ms(64)
