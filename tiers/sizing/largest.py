"""The largest load that GPUs carry: by one precision alone, by any mix within the loss budget, or by given engines.

At the peak of the day engines are as busy as planned (``tiers.sizing.capacity.MOST_BUSY_SHARE``), and each keeps the bounds
on TTFT and TPOT.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.sizing.fleet import (
    BISECTIONS,
    DailyLoad,
    EngineType,
    PlannedFleet,
    alone,
    cheapest,
)
from tiers.sizing.operation import Policy, cheapest_in_operation
from tiers.spec import PRECISIONS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tiers.sizing.capacity import ServingDemand

# of the largest load: engines that are busier by a rounding error would not carry it
WITHIN = 1 - 1e-6
ROUNDING = 1e-9  # of a share of answers
DIGITS = 3  # of a load, for people
_OPERATION_BISECTIONS = 6


@dataclass(frozen=True, slots=True)
class LargestLoad:
    """The largest load of a fleet.

    Attributes:
        requests_per_s: In the mean of the day.
        fleet: The cheapest that carries it.
    """

    requests_per_s: float
    fleet: PlannedFleet


def largest_alone(
    engines: Sequence[EngineType], load: DailyLoad, available: Mapping[str, int]
) -> dict[TierName, LargestLoad | None]:
    """Return the largest load that each precision carries alone, whatever it loses; None: it does not fit.

    Args:
        engines: That may be started.
        load: Its kinds and the day's course; how much of it there is, does not count.
        available: GPUs of each kind; none for a processor, of which there is one.
    """
    largest: dict[TierName, LargestLoad | None] = {}
    for tier in PRECISIONS:
        mine = [engine for engine in engines if engine.tier is tier]
        sizes = {engine.plan.gpus_per_replica for engine in mine}
        peak = max(
            (_rate_of_size(mine, size, available) for size in sizes), default=0.0
        )
        rate = WITHIN * peak / max(load.course)
        fleet = alone(mine, load.scaled_to(rate), available).get(tier) if rate else None
        largest[tier] = LargestLoad(rate, fleet) if fleet is not None else None
    return largest


def largest_planned(
    engines: Sequence[EngineType],
    load: DailyLoad,
    available: Mapping[str, int],
    demand: ServingDemand,
    policy: Policy,
) -> LargestLoad | None:
    """Return the largest load that any mix of precisions carries within the loss budget; None: none keeps the budget."""

    def carries(rate: float) -> bool:
        return _is_there(cheapest(engines, load.scaled_to(rate), available))

    def carries_in_operation(rate: float) -> bool:
        return _is_there(
            cheapest_in_operation(
                engines, load.scaled_to(rate), available, demand, policy
            )
        )

    singles = [
        largest
        for largest in largest_alone(engines, load, available).values()
        if largest is not None
    ]
    within = [
        largest.requests_per_s
        for largest in singles
        if largest.fleet.lost_share <= load.budget + ROUNDING
    ]
    single = max(within, default=0.0)
    highest = WITHIN * _most(engines, available) / max(load.course)
    rate = _largest(carries, single, highest, BISECTIONS)
    rate = _largest(carries_in_operation, single, rate, _OPERATION_BISECTIONS)
    if not rate:
        return None
    fleet = cheapest_in_operation(
        engines, load.scaled_to(rate), available, demand, policy
    )
    return LargestLoad(rate, fleet) if fleet is not None else None


def largest_of_engines(
    counts: Iterable[tuple[EngineType, int]], load: DailyLoad
) -> float:
    """Return the largest load that given engines carry together, in requests a second in the mean of the day."""
    rates = [(engine, engine.rate * count) for engine, count in counts]
    if any(not engine.gpu for engine, _ in rates):  # they share one processor
        peak = max(engine.rate for engine, _ in rates)
    else:
        peak = sum(rate for _, rate in rates)
    return peak / max(load.course)


def shown_load(rate: float) -> float:
    """Round a load down to what people read, so that engines that carry it carry the rounded one as well."""
    if rate <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(rate)) - DIGITS + 1)
    return float(f"{math.floor(rate / unit + 1e-9) * unit:.{DIGITS + 9}g}")


def fewest_gpus(engines: Sequence[EngineType]) -> dict[str, int]:
    """Return how many GPUs of each kind hold one engine of each precision that fits on it."""
    smallest: dict[tuple[str, TierName], int] = {}
    for engine in engines:
        key = engine.gpu, engine.tier
        gpus = engine.plan.gpus_per_replica
        smallest[key] = min(gpus, smallest.get(key, gpus))
    fewest: dict[str, int] = {}
    for (gpu, _), gpus in smallest.items():
        fewest[gpu] = fewest.get(gpu, 0) + gpus
    return fewest


def _largest(
    carries: Callable[[float], bool], lowest: float, highest: float, bisections: int
) -> float:
    """Return the largest load from one that is carried to ``highest`` that is carried too, by bisection."""
    if highest <= lowest or carries(highest):
        return max(lowest, highest)
    low = lowest
    high = highest
    for _ in range(bisections):
        middle = (low + high) / 2
        if carries(middle):
            low = middle
        else:
            high = middle
    return low


def _is_there(fleet: PlannedFleet | None) -> bool:
    """Tell whether a fleet was found, and on a processor whether one machine is enough for it."""
    if fleet is None:
        return False
    return bool(fleet.counts[0][0].gpu) or fleet.price <= 1


def _rate_of_size(
    engines: Sequence[EngineType], size: int, available: Mapping[str, int]
) -> float:
    """Return the requests a second of as many engines of a size as there are GPUs for."""
    rates: dict[str, float] = {}
    for engine in engines:
        if engine.plan.gpus_per_replica == size:
            count = available[engine.gpu] // size if engine.gpu else 1
            rates[engine.gpu] = max(rates.get(engine.gpu, 0.0), engine.rate * count)
    return sum(rates.values())


def _most(engines: Sequence[EngineType], available: Mapping[str, int]) -> float:
    """Return a bound on the requests a second of any engines on these GPUs."""
    most: dict[str, float] = {}
    for engine in engines:
        each = engine.rate / max(engine.plan.gpus_per_replica, 1)
        most[engine.gpu] = max(most.get(engine.gpu, 0.0), each)
    return sum(rate * available.get(gpu, 1) for gpu, rate in most.items())
