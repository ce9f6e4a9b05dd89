"""What requests cost: by tokens and tier, in whole millionths, beside the highest tier."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.accounting.charging import FALLBACK, Pricing, pricing_of
from router.policy.decide import decide
from router.telemetry.record import Cost, TierUsage
from tests.unit.policy.fleets import BALANCED, FAST, PRECISE, TABLE, fleet, query
from tiers.spec import TierSpec
from tiers.speed import SpeedModel

QUICK = SpeedModel(10.0, 0.1, step_base_ms=4.0, step_ms_per_sequence=1.0, profiled=True)
SLOW = SpeedModel(10.0, 0.2, step_base_ms=12.0, step_ms_per_sequence=2.0, profiled=True)
SPEEDS = {FAST: QUICK, BALANCED: SLOW, PRECISE: SLOW}
PLAIN = Pricing({}, PRECISE)
DECISION = decide(query(), fleet(speeds=SPEEDS), TABLE)


def test_a_cost_is_what_the_decision_weighs() -> None:
    """For the tokens that were predicted, it is the cost on the decision's report."""
    for tier in (FAST, PRECISE):
        expected = DECISION.estimate(tier).cost
        assert expected is not None
        # The fleet expects answers at full length.
        usage = TierUsage(tier, 20, cached=0, output=100)
        assert abs(PLAIN.cost(DECISION, (usage,)).engine_us / 1e6 - expected) <= 0.0001


def test_cached_tokens_are_free_and_tiers_add_up() -> None:
    """A prompt token costs 0.1 ms on the quick tier and 0.2 ms on the others, an output token 5 ms and 14 ms."""
    quick = TierUsage(FAST, 20, cached=15, output=3)
    slow = TierUsage(PRECISE, 23, cached=0, output=7)
    assert PLAIN.cost(DECISION, (quick,)) == Cost(5 * 100 + 3 * 5000, 0)
    assert PLAIN.cost(DECISION, (quick, slow)) == Cost(
        15_500 + 23 * 200 + 7 * 14_000, 0
    )


def test_without_a_speed_the_fallback_counts() -> None:
    """0.1 ms for a prompt token, 10 ms for an output token."""
    decision = decide(query(), fleet(), TABLE)
    assert decision.rate(FAST) is None
    cost = PLAIN.cost(decision, (TierUsage(FAST, 20, cached=0, output=3),))
    assert cost.engine_us == 20 * FALLBACK.prompt_us + 3 * FALLBACK.output_us


def test_replicas_are_weighed_by_price_or_gpus() -> None:
    """A replica's second weighs by its share of the GPUs, or by its price where one is set; money follows the weight."""
    specs = (
        TierSpec(FAST, 2048, max_num_seqs=16, max_in_flight=32),
        TierSpec(PRECISE, 2048, max_num_seqs=16, max_in_flight=32, tensor_parallel=4),
    )
    usage = TierUsage(FAST, 0, cached=0, output=4)
    assert pricing_of(specs, {}, None).cost(DECISION, (usage,)) == Cost(5000, 0)
    assert pricing_of(specs, {FAST: 0.5}, 7.2).cost(DECISION, (usage,)) == Cost(
        10_000, 20
    )
    absent = (*specs[:1], replace(specs[1], replicas=0))
    assert pricing_of(absent, {}, None).highest is FAST


@given(
    prompt=st.integers(0, 20),
    cached=st.integers(0, 30),
    output=st.integers(0, 100),
    tier=st.sampled_from((FAST, PRECISE)),
)
def test_no_cost_exceeds_the_most(
    prompt: int, cached: int, output: int, tier: str
) -> None:
    """No request costs more than its highest possible cost, whatever part of its tokens it uses, on whichever tier."""
    highest = max(PLAIN.most(DECISION, tier) for tier in (FAST, PRECISE))
    used_tier = PRECISE if tier == PRECISE else FAST
    usage = TierUsage(used_tier, prompt, cached=cached, output=output)
    cost = PLAIN.cost(DECISION, (usage,))
    assert cost.at_most(highest) == cost
