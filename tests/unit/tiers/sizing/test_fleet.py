"""The cheapest fleet: against trying all small fleets, and what must hold."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.sizing.capacity import MOST_BUSY_SHARE, EnginePlan
from tiers.sizing.fleet import DailyLoad, EngineType, alone, cheapest
from tiers.spec import STANDARD_TIERS, TierName

FAST, BALANCED, PRECISE = STANDARD_TIERS
LOSS = {
    FAST: {"easy": 0.0, "hard": 0.1},
    BALANCED: {"easy": 0.0, "hard": 0.01},
    PRECISE: {"easy": 0.0, "hard": 0.0},
}


def engine(
    tier: TierName, rate: float, price: float, gpu: str = "H100", gpus: int = 1
) -> EngineType:
    """Return an engine that serves ``rate`` requests a second, as busy as planned."""
    return EngineType(
        gpu,
        EnginePlan(
            tier, "p", 1, 1, 1, gpus, 1, 1, 1.0, 1.0, rate / MOST_BUSY_SHARE, 1.0
        ),
        price,
    )


THREE = [engine(FAST, 20, 1), engine(BALANCED, 12, 1), engine(PRECISE, 10, 1)]


def load(
    easy: float, hard: float, budget: float = 1.0, course: tuple[float, ...] = (1.0,)
) -> DailyLoad:
    return DailyLoad({"easy": easy, "hard": hard}, LOSS, course, budget)


def test_easy_prompts_go_to_the_fast_engine_and_hard_ones_to_the_precise() -> None:
    """20 easy and 10 hard a second fill one engine each; alone, precise takes three."""
    found = cheapest(THREE, load(20, 10, budget=0.0), {"H100": None})
    assert found is not None
    assert (
        [found.replicas(tier) for tier in STANDARD_TIERS],
        found.price,
        found.lost_share,
    ) == ([1, 0, 1], 2, 0)
    assert found.shares == pytest.approx({FAST: 2 / 3, BALANCED: 0, PRECISE: 1 / 3})
    singles = alone(THREE, load(20, 10), {"H100": None})
    assert {
        tier: fleet.price if fleet else None for tier, fleet in singles.items()
    } == {
        FAST: 2,
        BALANCED: 3,
        PRECISE: 3,
    }


def test_of_fleets_with_one_price_the_one_that_loses_least() -> None:
    found = cheapest(THREE, load(0, 5), {"H100": None})
    assert found is not None
    assert (found.price, found.lost_share, found.replicas(PRECISE)) == (1, 0, 1)


def test_what_cannot_be_carried() -> None:
    """Too few GPUs, a budget that nothing keeps, no engine."""
    assert cheapest(THREE, load(50, 0), {"H100": 2}) is None
    assert cheapest(THREE[:1], load(0, 5, budget=0.05), {"H100": None}) is None
    assert cheapest([], load(1, 1), {}) is None


def test_the_peak_is_served_by_lower_precisions_within_the_days_budget() -> None:
    """Ten hard requests a second in the mean, 25 at the peak: precise serves all but 15 of these."""
    day = (0.25, 0.25, 2.5)
    found = cheapest(THREE[::2], load(0, 10, budget=0.06, course=day), {"H100": None})
    assert found is not None
    assert [found.replicas(tier) for tier in STANDARD_TIERS] == [1, 0, 1]
    assert found.lost_share == pytest.approx(15 * 0.1 / 30)
    strict = cheapest(THREE, load(0, 10, budget=0.0, course=day), {"H100": None})
    assert strict is not None
    assert strict.price == 3


def test_kinds_of_gpus_are_bounded_each() -> None:
    """A second, cheaper kind is used first, as far as there is any."""
    small = engine(FAST, 10, 0.2, gpu="L4")
    found = cheapest([*THREE, small], load(30, 10, budget=0.0), {"H100": None, "L4": 2})
    assert found is not None
    assert found.gpus == {"H100": 2, "L4": 1}
    assert cheapest(
        [*THREE, small], load(30, 10, budget=0.0), {"H100": 1, "L4": 9}
    ).gpus == {"H100": 1, "L4": 3}  # type: ignore[union-attr]


def test_engines_on_a_processor_share_it() -> None:
    """Half of the time each: 10 easy a second by fast, 5 hard by precise, on one machine."""
    shared = [
        engine(tier, rate, 1, gpu="", gpus=0)
        for tier, rate in ((FAST, 20), (PRECISE, 10))
    ]
    found = cheapest(shared, load(10, 5, budget=0.0), {})
    assert found is not None
    assert found.price == 1
    assert cheapest(shared, load(12, 5, budget=0.0), {}).price == 2  # type: ignore[union-attr]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(2, 30), st.integers(1, 9)), min_size=3, max_size=3),
    st.integers(0, 40),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.004, 0.02, 0.1]),
)
def test_no_other_fleet_is_cheaper(
    rates: list[tuple[int, int]], easy: int, hard: int, budget: float
) -> None:
    """Against all fleets of up to five engines a tier, whose best flows are found by hand: least loss first."""
    engines = [
        engine(tier, *each) for tier, each in zip(STANDARD_TIERS, rates, strict=True)
    ]
    found = cheapest(engines, load(easy, hard, budget), {"H100": None})
    prices = [
        sum(n * each.price for n, each in zip(counts, engines, strict=True))
        for counts in product(range(6), repeat=3)
        if least_loss(
            [n * each.rate for n, each in zip(counts, engines, strict=True)], easy, hard
        )
        <= budget + 1e-9
    ]
    assert found is not None
    if prices:
        assert found.price <= min(prices) + 1e-6


def least_loss(rates: list[float], easy: float, hard: float) -> float:
    """Return the share of answers lost if hard prompts go as high as there is room; infinite if there is too little."""
    if sum(rates) < easy + hard - 1e-9:
        return float("inf")
    precise = min(hard, rates[2])
    balanced = min(hard - precise, rates[1])
    return ((hard - precise - balanced) * 0.1 + balanced * 0.01) / (easy + hard)
