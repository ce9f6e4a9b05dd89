"""The largest load of a fleet: by hand, and against the fleets that carry it."""

from __future__ import annotations

import pytest

from tests.unit.tiers.sizing.builders import (
    BALANCED,
    FAST,
    FAST_LOSS,
    PRECISE,
    ROUTER_POLICY,
    SHORT_PROMPTS,
    load_of,
    load_of_classes,
    paced_engine,
    paced_engines,
    rated_engine,
    rated_engines,
)
from tiers.sizing.fleet import DailyLoad, EngineType, cheapest
from tiers.sizing.largest import (
    LargestLoad,
    fewest_gpus,
    largest_alone,
    largest_of_engines,
    largest_planned,
    shown_load,
)
from tiers.sizing.operation import cheapest_in_operation

ENGINES = rated_engines()


def largest_mixed(
    engines: list[EngineType], load: DailyLoad, available: dict[str, int]
) -> LargestLoad | None:
    return largest_planned(
        engines, load, available, demand=SHORT_PROMPTS, policy=ROUTER_POLICY
    )


def one_of_each_class(
    budget: float = 1.0, course: tuple[float, ...] = (1.0,)
) -> DailyLoad:
    return load_of_classes(dict.fromkeys(FAST_LOSS, 1.0), budget=budget, course=course)


def test_one_precision_by_hand() -> None:
    """Twenty, twelve and ten requests a second an engine on three GPUs; a peak of twice the mean halves it."""
    even = largest_alone(ENGINES, load_of(20, 10), {"H100": 3})
    rates = {tier: largest.requests_per_s for tier, largest in even.items() if largest}
    assert rates == pytest.approx({FAST: 60, BALANCED: 36, PRECISE: 30}, rel=1e-4)
    day = largest_alone(ENGINES, load_of(20, 10, course=(0.0, 2.0)), {"H100": 3})
    assert day[FAST] is not None
    assert day[FAST].requests_per_s == pytest.approx(30, rel=1e-4)


def test_engines_of_one_precision_have_one_size() -> None:
    """Three GPUs hold one engine of two (25 a second) or three of one (8 each); two kinds of GPU add up."""
    engines = [
        rated_engine(FAST, 8),
        rated_engine(FAST, 25, gpus=2),
        rated_engine(FAST, 4, gpu="L4"),
    ]
    largest = largest_alone(engines, load_of(1, 1), {"H100": 3, "L4": 2})
    assert largest[FAST] is not None
    assert largest[FAST].requests_per_s == pytest.approx(3 * 8 + 2 * 4, rel=1e-4)
    assert largest[PRECISE] is None


def test_given_engines() -> None:
    """Those on GPUs add up; those on a processor take turns on it."""
    fast, _, precise = ENGINES
    day = load_of(1, 1, course=(0.5, 1.5))
    on_gpus = largest_of_engines([(fast, 2), (precise, 1)], day)
    assert on_gpus == pytest.approx(50 / 1.5)
    shared = [
        (rated_engine(FAST, 20, gpu="", gpus=0), 1),
        (rated_engine(PRECISE, 10, gpu="", gpus=0), 1),
    ]
    assert largest_of_engines(shared, load_of(1, 1)) == pytest.approx(20)


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
    engines = paced_engines()
    load = one_of_each_class(budget, course)
    largest = largest_mixed(engines, load, {"H100": gpus})
    assert largest is not None
    assert largest.fleet.lost_share <= budget + 1e-9
    assert sum(largest.fleet.gpus.values()) <= gpus
    rounded = load.scaled_to(shown_load(largest.requests_per_s))
    assert cheapest(engines, rounded, {"H100": gpus}) is not None
    beyond = cheapest_in_operation(
        engines,
        load.scaled_to(largest.requests_per_s * 1.1),
        {"H100": gpus},
        demand=SHORT_PROMPTS,
        policy=ROUTER_POLICY,
    )
    assert beyond is None


def test_a_processor_is_one_machine() -> None:
    engines = paced_engines(gpu="")
    largest = largest_mixed(engines, one_of_each_class(), {})
    assert largest is not None
    assert largest.requests_per_s == pytest.approx(engines[0].rate, rel=1e-3)


def test_a_budget_that_nothing_keeps() -> None:
    load = one_of_each_class(budget=0.0)
    assert largest_mixed([paced_engine(FAST, 10)], load, {"H100": 2}) is None


def test_as_many_gpus_as_an_engine_of_each_precision_takes() -> None:
    engines = [
        *ENGINES[:2],
        rated_engine(PRECISE, 9, price=4, gpus=4),
        rated_engine(PRECISE, 3, price=2, gpus=2),
        rated_engine(FAST, 2, gpu="L4"),
    ]
    assert fewest_gpus(engines) == {"H100": 4, "L4": 1}


@pytest.mark.parametrize(
    ("rate", "shown_rate"),
    [
        (13.3333, 13.3),
        (0.0, 0.0),
        (1234.9, 1230),
        (0.012399, 0.0123),
        (99.99, 99.9),
        (20.0, 20.0),
    ],
)
def test_loads_are_rounded_down(rate: float, shown_rate: float) -> None:
    assert shown_load(rate) == shown_rate
