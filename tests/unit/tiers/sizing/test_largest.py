"""The largest load of a fleet: by hand, and against the fleets that carry it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.tiers.sizing.test_fleet import THREE, load
from tests.unit.tiers.sizing.test_fleet import engine as fleet_engine
from tests.unit.tiers.sizing.test_operation import DEMAND, LOSSES, POLICY, engine
from tiers.sizing.fleet import DailyLoad, cheapest
from tiers.sizing.largest import (
    fewest_gpus,
    largest_alone,
    largest_of_engines,
    largest_planned,
    shown_load,
)
from tiers.sizing.operation import cheapest_in_operation
from tiers.spec import STANDARD_TIERS

FAST, BALANCED, PRECISE = STANDARD_TIERS


def test_one_precision_by_hand() -> None:
    """Twenty, twelve and ten requests a second an engine on three GPUs; a peak of twice the mean halves it."""
    found = largest_alone(THREE, load(20, 10), {"H100": 3})
    rates = {
        tier: largest.requests_per_s if largest else None
        for tier, largest in found.items()
    }
    assert rates == pytest.approx({FAST: 60, BALANCED: 36, PRECISE: 30}, rel=1e-4)
    day = largest_alone(THREE, load(20, 10, course=(0.0, 2.0)), {"H100": 3})
    assert day[FAST] is not None
    assert day[FAST].requests_per_s == pytest.approx(30, rel=1e-4)


def test_engines_of_one_precision_have_one_size() -> None:
    """Three GPUs hold one engine of two (25 a second) or three of one (8 each); two kinds of GPU add up."""
    engines = [
        fleet_engine(FAST, 8, 1),
        fleet_engine(FAST, 25, 2, gpus=2),
        fleet_engine(FAST, 4, 1, gpu="L4"),
    ]
    found = largest_alone(engines, load(1, 1), {"H100": 3, "L4": 2})
    assert found[FAST] is not None
    assert found[FAST].requests_per_s == pytest.approx(3 * 8 + 2 * 4, rel=1e-4)
    assert found[PRECISE] is None


def test_given_engines() -> None:
    """Those on GPUs add up; those on a processor take turns on it."""
    assert largest_of_engines(
        [(THREE[0], 2), (THREE[2], 1)], load(1, 1, course=(0.5, 1.5))
    ) == pytest.approx(50 / 1.5)
    shared = [
        fleet_engine(FAST, 20, 1, gpu="", gpus=0),
        fleet_engine(PRECISE, 10, 1, gpu="", gpus=0),
    ]
    assert largest_of_engines(
        [(one, 1) for one in shared], load(1, 1)
    ) == pytest.approx(20)


@pytest.mark.parametrize(
    ("budget", "gpus", "course"),
    [
        (0.0005, 1, (1.0,)),
        (0.004, 2, (1.0,)),
        (0.02, 6, (1.0,)),
        (0.001, 3, (0.5, 1.5)),
        (0.01, 4, (0.5, 1.5)),
    ],
)
def test_the_largest_is_carried_and_more_is_not(
    budget: float, gpus: int, course: tuple[float, ...]
) -> None:
    engines = [
        engine(tier, step)
        for tier, step in zip(STANDARD_TIERS, (10, 14, 20), strict=True)
    ]
    kinds = list(LOSSES[FAST])
    wanted = DailyLoad(dict.fromkeys(kinds, 1.0), LOSSES, course, budget)
    largest = largest_planned(engines, wanted, {"H100": gpus}, DEMAND, POLICY)
    assert largest is not None
    assert largest.fleet.lost_share <= budget + 1e-9
    assert sum(largest.fleet.gpus.values()) <= gpus
    rounded = wanted.scaled_to(shown_load(largest.requests_per_s))
    assert cheapest(engines, rounded, {"H100": gpus}) is not None
    beyond = cheapest_in_operation(
        engines,
        wanted.scaled_to(largest.requests_per_s * 1.1),
        {"H100": gpus},
        DEMAND,
        POLICY,
    )
    assert beyond is None


def test_a_processor_is_one_machine() -> None:
    shared = [
        replace(engine(tier, step), gpu="")
        for tier, step in zip(STANDARD_TIERS, (10, 14, 20), strict=True)
    ]
    wanted = DailyLoad(dict.fromkeys(LOSSES[FAST], 1.0), LOSSES, budget=1.0)
    largest = largest_planned(shared, wanted, {}, DEMAND, POLICY)
    assert largest is not None
    assert largest.requests_per_s == pytest.approx(shared[0].rate, rel=1e-3)


def test_a_budget_that_nothing_keeps() -> None:
    wanted = DailyLoad(dict.fromkeys(LOSSES[FAST], 1.0), LOSSES, budget=0.0)
    assert (
        largest_planned([engine(FAST, 10)], wanted, {"H100": 2}, DEMAND, POLICY) is None
    )


def test_as_many_gpus_as_an_engine_of_each_precision_takes() -> None:
    engines = [
        *THREE[:2],
        fleet_engine(PRECISE, 9, 4, gpus=4),
        fleet_engine(PRECISE, 3, 2, gpus=2),
    ]
    assert fewest_gpus([*engines, fleet_engine(FAST, 2, 1, gpu="L4")]) == {
        "H100": 4,
        "L4": 1,
    }


@pytest.mark.parametrize(
    ("rate", "shown"),
    [
        (13.3333, 13.3),
        (0.0, 0.0),
        (1234.9, 1230),
        (0.012399, 0.0123),
        (99.99, 99.9),
        (20.0, 20.0),
    ],
)
def test_loads_are_rounded_down(rate: float, shown: float) -> None:
    assert shown_load(rate) == shown
