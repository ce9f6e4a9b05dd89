"""How many engines a load needs: by hand, and what must hold for every model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from tests.unit.tiers.sizing.test_architecture import PUBLISHED, read
from tiers.errors import PlanError
from tiers.plan import GIB
from tiers.sizing.architecture import architecture
from tiers.sizing.capacity import MOST_BUSY, Demand, FleetPlan, TierPlan, plan_on_cpu, plan_on_gpus
from tiers.sizing.hardware import parse_gpus, read_prices
from tiers.sizing.roofline import Roofline
from tiers.spec import STANDARD_TIERS, Precision
from tiers.speed import SpeedModel

FAST, BALANCED, PRECISE = STANDARD_TIERS
DEMAND = Demand(40.0, 800, 250, 1050)
SMALL = architecture(read("llama-3.1-8b"))


@dataclass(frozen=True)
class Steady:
    """Takes 0.1 ms for each prompt token, and 20 ms for each step."""

    prefill_ms_per_token: float = 0.1

    def step_ms(self, sequences: int) -> float:
        return 20.0


def planned(name: str, gpus: str, demand: Demand = DEMAND, **options: object) -> FleetPlan:
    kind, count = parse_gpus(gpus)
    return plan_on_gpus(architecture(read(name)), kind, count, demand, prices=read_prices(), **options)  # type: ignore[arg-type]


def test_by_hand() -> None:
    """50 sequences at once: 250 x 20 ms + 50 x 80 ms of prompts are 9 s, so 5.56 requests a second on one engine."""
    paces = dict.fromkeys(STANDARD_TIERS, Steady())
    found = planned("llama-3.1-8b", "H100", replace(DEMAND, max_num_seqs=50), paces=paces).tiers[2]
    assert (found.batch, found.gpus_per_replica) == (50, 1)
    assert found.tpot_ms == pytest.approx(9000 / 250)
    assert found.requests_per_s == pytest.approx(50 / 9)
    assert found.tokens_per_s == pytest.approx(250 * 50 / 9)
    assert found.replicas == math.ceil(40 / 3 / (MOST_BUSY * 50 / 9))
    assert found.cost_per_hour == pytest.approx(3.99 * found.replicas)
    assert found.cost_per_million_tokens == pytest.approx(3.99 / 3600 / (MOST_BUSY * 250 * 50 / 9) * 1e6)


def test_the_kv_cache_bounds_the_batch() -> None:
    """80e9 bytes less 6 %, 2 GiB and 16.1 GB of weights hold 414 sequences of 1,050 tokens at 128 KiB."""
    found = planned("llama-3.1-8b", "H100", replace(DEMAND, max_num_seqs=10_000)).tiers[2]
    free = int(80e9 * 0.94) - 2 * GIB - 2 * 8_030_261_248
    assert found.max_sequences == free // (1050 * 131_072)
    assert found.batch == free // (925 * 131_072)  # sequences are shorter while they are decoded
    assert planned("llama-3.1-8b", "H100", kv_bytes=1).tiers[2].max_sequences == 2 * found.max_sequences


def test_a_bound_on_the_time_between_tokens_makes_batches_smaller() -> None:
    """And takes more engines; one that no engine keeps is an error."""
    loose, tight = planned("llama-3.1-8b", "H100"), planned("llama-3.1-8b", "H100", replace(DEMAND, tpot_ms=20.0))
    for one, other in zip(loose.tiers, tight.tiers, strict=True):
        assert other.batch < one.batch
        assert (other.tpot_ms or 0) <= 20
        assert other.replicas >= one.replicas
    with pytest.raises(PlanError, match=r"--tpot 2 cannot be kept"):
        planned("llama-3.1-8b", "H100", replace(DEMAND, tpot_ms=2.0))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("gpus", ["H200", "64xH100", "8xB200"])
def test_every_load_is_carried(name: str, gpus: str) -> None:
    """Each tier's replicas carry its share, one less would not; sizes fall with the precision."""
    found = planned(name, gpus)
    fitting = [tier for tier in found.tiers if tier.lacks is None]
    assert fitting
    assert (found.serves_per_s or 0) >= 40 * (1 - 1e-9)
    weights = [tier.weights_bytes for tier in found.tiers]
    assert weights == sorted(weights)
    for tier in fitting:
        load, each = 40 * tier.share, MOST_BUSY * (tier.requests_per_s or 0)
        if not found.shared:
            assert tier.replicas * each >= load * (1 - 1e-9)
            assert tier.replicas == 1 or (tier.replicas - 1) * each < load
    assert sum(tier.share for tier in fitting) == pytest.approx(1)
    assert found.alone is not None
    assert found.alone.tier is fitting[-1].tier


def test_large_models_take_several_gpus() -> None:
    """70B in BF16 needs two at least; what does not fit on 16 says so, and the others carry its share."""
    precise = planned("llama-3.3-70b", "H100").tiers[2]
    assert precise.gpus_per_replica >= 2
    found = planned("deepseek-v3", "H100")
    assert "precise does not fit on 16 x H100: its weights take 1249.9 GiB" in (found.tiers[2].lacks or "")
    assert [tier.share for tier in found.tiers] == [0.5, 0.5, 0.0]
    with pytest.raises(PlanError, match="fast does not fit on 1 x L4"):
        planned("deepseek-v3", "1xL4")


def test_few_gpus_are_shared() -> None:
    """Two H100 hold an engine of each tier of an 8B model on each; one L4 holds only the smaller two."""
    found = planned("llama-3.1-8b", "2xH100", replace(DEMAND, requests_per_s=10.0))
    assert (found.shared, found.gpus, found.fits) == (True, 1, True)
    assert [tier.replicas for tier in found.tiers] == [1, 1, 1]
    assert sum(tier.cost_per_hour or 0 for tier in found.tiers) == pytest.approx(found.cost_per_hour)
    own = planned("llama-3.1-8b", "3xH100")
    assert (own.shared, own.gpus) == (False, 3)
    assert sum(tier.max_sequences for tier in found.tiers) < own.tiers[2].max_sequences


def test_too_few_gpus_for_the_load() -> None:
    found = planned("llama-3.1-8b", "3xH100", replace(DEMAND, requests_per_s=400.0))
    assert not found.fits
    assert found.gpus > 3


def test_shares_and_what_they_save() -> None:
    """Everything on one tier takes its GPU time; FP8 takes less than BF16."""
    found = planned("llama-3.1-8b", "H100", replace(DEMAND, shares={BALANCED: 1.0}))
    by_tier = {tier.tier: tier.gpu_seconds_per_request or 0 for tier in found.tiers}
    assert found.gpu_seconds_saved == pytest.approx(1 - by_tier[BALANCED] / by_tier[PRECISE])
    assert (found.gpu_seconds_saved or 0) > 0
    assert planned("llama-3.1-8b", "H100", replace(DEMAND, shares={PRECISE: 1.0})).gpu_seconds_saved == pytest.approx(0)


def test_without_a_load_there_is_one_engine_of_each() -> None:
    found = planned("llama-3.1-8b", "H100", replace(DEMAND, requests_per_s=None))
    assert [tier.replicas for tier in found.tiers] == [1, 1, 1]
    assert found.alone is None


def test_on_a_processor_speeds_are_measured_or_unknown() -> None:
    """Memory is that of ``engine.cpu_kv_cache_gib``; a tier without a profile has no times."""
    speed = SpeedModel(20.0, 1.0, 30.0, 2.0, profiled=True)
    demand = Demand(None, 100, 50, 150, max_num_seqs=16)
    found = plan_on_cpu(SMALL, demand, kv_cache=GIB, weights={FAST: 123}, paces={PRECISE: speed})
    assert [tier.max_sequences for tier in found.tiers] == [GIB // (150 * 131_072)] * 3
    assert (found.tiers[0].weights_bytes, found.tiers[0].tpot_ms, found.cost_per_hour) == (123, None, None)
    assert found.tiers[2].tpot_ms == pytest.approx(30 + 2 * 16 + 16 * 100 / 50)
    assert found.gpu_seconds_saved is None
    assert [found.gpus, found.tiers[0].gpus_per_replica] == [0, 0]


def test_the_roofline_is_on_the_fast_side_of_a_published_result() -> None:
    """FP8 Llama 3.1 8B on one H100, summaries of news: 5,777 tokens/s in MLPerf 5.1."""
    demand = Demand(None, 800, 128, 928, max_num_seqs=256)
    balanced: TierPlan = planned("llama-3.1-8b", "H100", demand).tiers[1]
    assert 1.0 < (balanced.tokens_per_s or 0) / 5777 < 1.35


def test_the_roofline_follows_the_hardware() -> None:
    """Small batches are bound by memory, large ones by computing; without FP8 units, FP8 computes as BF16 does."""
    h100, a100 = parse_gpus("H100")[0], parse_gpus("A100")[0]
    int4, fp8, bf16 = (Roofline(SMALL, h100, precision, context=10) for precision in Precision)
    assert bf16.step_ms(1) > fp8.step_ms(1) > int4.step_ms(1)
    assert int4.step_ms(2000) > bf16.step_ms(2000)
    assert bf16.prefill_ms_per_token > fp8.prefill_ms_per_token
    unpacked, plain = Roofline(SMALL, a100, Precision.FP8), Roofline(SMALL, a100, Precision.BF16)
    assert unpacked.prefill_ms_per_token >= plain.prefill_ms_per_token
    two = Roofline(SMALL, h100, Precision.BF16, gpus=2, context=10)
    assert bf16.step_ms(64) / 2 < two.step_ms(64) < bf16.step_ms(64)
