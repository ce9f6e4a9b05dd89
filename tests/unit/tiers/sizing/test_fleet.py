"""The cheapest fleet: against trying all small fleets, and what must hold."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tiers.sizing.builders import (
    BALANCED,
    FAST,
    PRECISE,
    load_of,
    rated_engine,
    rated_engines,
)
from tiers.sizing.fleet import EngineType, PlannedFleet, alone, cheapest
from tiers.spec import STANDARD_TIERS

ENGINES = rated_engines()


def replicas_of(fleet: PlannedFleet) -> list[int]:
    return [fleet.replicas(tier) for tier in STANDARD_TIERS]


def test_easy_prompts_go_to_the_fast_engine_and_hard_ones_to_the_precise() -> None:
    """20 easy and 10 hard a second fill one engine each; alone, precise takes three."""
    fleet = cheapest(ENGINES, load_of(20, 10, budget=0.0), {"H100": None})
    assert fleet is not None
    assert replicas_of(fleet) == [1, 0, 1]
    assert fleet.price == 2
    assert fleet.lost_share == 0
    assert fleet.shares == pytest.approx({FAST: 2 / 3, BALANCED: 0, PRECISE: 1 / 3})
    singles = alone(ENGINES, load_of(20, 10), {"H100": None})
    prices = {
        tier: single.price if single else None for tier, single in singles.items()
    }
    assert prices == {FAST: 2, BALANCED: 3, PRECISE: 3}


def test_of_fleets_with_one_price_the_one_that_loses_least() -> None:
    fleet = cheapest(ENGINES, load_of(0, 5), {"H100": None})
    assert fleet is not None
    assert fleet.price == 1
    assert fleet.lost_share == 0
    assert fleet.replicas(PRECISE) == 1


def test_what_cannot_be_carried() -> None:
    """Too few GPUs, a budget that nothing keeps, no engine."""
    assert cheapest(ENGINES, load_of(50, 0), {"H100": 2}) is None
    only_fast = ENGINES[:1]
    assert cheapest(only_fast, load_of(0, 5, budget=0.05), {"H100": None}) is None
    assert cheapest([], load_of(1, 1), {}) is None


def test_the_peak_is_served_by_lower_precisions_within_the_days_budget() -> None:
    """Ten hard requests a second in the mean, 25 at the peak: precise serves all but 15 of these."""
    day = (0.25, 0.25, 2.5)
    fast_and_precise = ENGINES[::2]
    loose_load = load_of(0, 10, budget=0.06, course=day)
    loose = cheapest(fast_and_precise, loose_load, {"H100": None})
    assert loose is not None
    assert replicas_of(loose) == [1, 0, 1]
    assert loose.lost_share == pytest.approx(15 * 0.1 / 30)
    strict_load = load_of(0, 10, budget=0.0, course=day)
    strict = cheapest(ENGINES, strict_load, {"H100": None})
    assert strict is not None
    assert strict.price == 3


def test_kinds_of_gpus_are_bounded_each() -> None:
    """A second, cheaper kind is used first, as far as there is any."""
    engines = [*ENGINES, rated_engine(FAST, 10, price=0.2, gpu="L4")]
    load = load_of(30, 10, budget=0.0)
    few_small = cheapest(engines, load, {"H100": None, "L4": 2})
    assert few_small is not None
    assert few_small.gpus == {"H100": 2, "L4": 1}
    many_small = cheapest(engines, load, {"H100": 1, "L4": 9})
    assert many_small is not None
    assert many_small.gpus == {"H100": 1, "L4": 3}


def test_engines_on_a_processor_share_it() -> None:
    """Half of the time each: 10 easy a second by fast, 5 hard by precise, on one machine."""
    engines = [
        rated_engine(FAST, 20, gpu="", gpus=0),
        rated_engine(PRECISE, 10, gpu="", gpus=0),
    ]
    one_machine = cheapest(engines, load_of(10, 5, budget=0.0), {})
    assert one_machine is not None
    assert one_machine.price == 1
    two_machines = cheapest(engines, load_of(12, 5, budget=0.0), {})
    assert two_machines is not None
    assert two_machines.price == 2


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(2, 30), st.integers(1, 9)), min_size=3, max_size=3),
    st.integers(0, 40),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.004, 0.02, 0.1]),
)
def test_no_other_fleet_is_cheaper(
    rates_and_prices: list[tuple[int, int]], easy: int, hard: int, budget: float
) -> None:
    """Against all fleets of up to five engines a tier, whose best flows are found by hand: least loss first."""
    engines = [
        rated_engine(tier, rate, price=price)
        for tier, (rate, price) in zip(STANDARD_TIERS, rates_and_prices, strict=True)
    ]
    fleet = cheapest(engines, load_of(easy, hard, budget), {"H100": None})
    assert fleet is not None
    lowest_price = lowest_price_by_hand(engines, easy, hard, budget=budget)
    assert fleet.price <= lowest_price + 1e-6


def lowest_price_by_hand(
    engines: list[EngineType], easy: int, hard: int, budget: float
) -> float:
    """Return the price of the cheapest fleet of up to five engines a tier; infinite if none keeps the budget."""
    lowest_price = math.inf
    for counts in product(range(6), repeat=3):
        counted_engines = list(zip(counts, engines, strict=True))
        rates = [count * engine.rate for count, engine in counted_engines]
        price = sum(count * engine.price for count, engine in counted_engines)
        if least_loss(rates, easy, hard) <= budget + 1e-9:
            lowest_price = min(lowest_price, price)
    return lowest_price


def least_loss(rates: list[float], easy: float, hard: float) -> float:
    """Return the share of answers lost if hard prompts go as high as there is room; infinite if there is too little."""
    if sum(rates) < easy + hard - 1e-9:
        return math.inf
    precise = min(hard, rates[2])
    balanced = min(hard - precise, rates[1])
    fast = hard - precise - balanced
    return (fast * 0.1 + balanced * 0.01) / (easy + hard)
