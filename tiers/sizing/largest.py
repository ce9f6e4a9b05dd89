"""The largest load that GPUs carry: by one precision alone, by any mix within the loss budget, or by given engines.

At the peak of the day engines are as busy as planned (``tiers.sizing.capacity.MAX_BUSY_SHARE``), and each keeps the bounds
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
from tiers.sizing.operation import ROUNDING, Policy, cheapest_in_operation
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tiers.sizing.capacity import ServingDemand

# This much of the largest load is planned for: engines that are busier by a rounding error would not carry it.
CARRIED_SHARE = 1 - 1e-6
SHOWN_DIGITS = 3
OPERATION_BISECTIONS = 6


@dataclass(frozen=True, slots=True)
class LargestLoad:
    """The largest load of a fleet.

    Attributes:
        requests_per_s: In the mean of the day.
        fleet: The cheapest one that carries it.
    """

    requests_per_s: float
    fleet: PlannedFleet


def largest_alone(
    engines: Sequence[EngineType], load: DailyLoad, available: Mapping[str, int]
) -> dict[TierName, LargestLoad | None]:
    """Return the largest load that each precision carries alone, whatever it loses; None: it does not fit.

    Args:
        engines: Those that may be started.
        load: Its kinds and the day's course; how much of it there is does not count.
        available: GPUs of each kind; none for a processor, of which there is one.
    """
    largest: dict[TierName, LargestLoad | None] = {}
    for tier in STANDARD_TIERS:
        tier_engines = [engine for engine in engines if engine.tier is tier]
        largest[tier] = _largest_of_tier(tier, tier_engines, load, available=available)
    return largest


def _largest_of_tier(
    tier: TierName,
    tier_engines: Sequence[EngineType],
    load: DailyLoad,
    available: Mapping[str, int],
) -> LargestLoad | None:
    engine_sizes = {engine.plan.gpus_per_replica for engine in tier_engines}
    peak_per_s = 0.0
    for size in engine_sizes:
        size_per_s = _per_s_of_size(tier_engines, size, available)
        peak_per_s = max(peak_per_s, size_per_s)
    mean_per_s = CARRIED_SHARE * peak_per_s / max(load.course)
    if not mean_per_s:
        return None
    scaled_load = load.scaled_to(mean_per_s)
    fleet = alone(tier_engines, scaled_load, available).get(tier)
    if fleet is None:
        return None
    return LargestLoad(mean_per_s, fleet)


def largest_planned(
    engines: Sequence[EngineType],
    load: DailyLoad,
    available: Mapping[str, int],
    demand: ServingDemand,
    policy: Policy,
) -> LargestLoad | None:
    """Return the largest load that any mix of precisions carries within the loss budget; None: none keeps the budget.

    The largest load of the optimum is found first. It bounds the load that the router's policy carries, which takes longer
    to compute.
    """

    def fleet_in_operation(mean_per_s: float) -> PlannedFleet | None:
        scaled_load = load.scaled_to(mean_per_s)
        return cheapest_in_operation(
            engines, scaled_load, available, demand=demand, policy=policy
        )

    def optimum_carries(mean_per_s: float) -> bool:
        optimum = cheapest(engines, load.scaled_to(mean_per_s), available)
        return _is_available(optimum)

    def carries_in_operation(mean_per_s: float) -> bool:
        return _is_available(fleet_in_operation(mean_per_s))

    single_per_s = _largest_single_per_s(engines, load, available)
    bound_per_s = CARRIED_SHARE * _bound_per_s(engines, available) / max(load.course)
    optimum_per_s = _bisect(
        optimum_carries, single_per_s, bound_per_s, bisections=BISECTIONS
    )
    largest_per_s = _bisect(
        carries_in_operation,
        single_per_s,
        optimum_per_s,
        bisections=OPERATION_BISECTIONS,
    )
    if not largest_per_s:
        return None
    fleet = fleet_in_operation(largest_per_s)
    if fleet is None:
        return None
    return LargestLoad(largest_per_s, fleet)


def _largest_single_per_s(
    engines: Sequence[EngineType], load: DailyLoad, available: Mapping[str, int]
) -> float:
    """Return the largest load that one precision carries alone within the loss budget; 0: none does."""
    largest_per_s = 0.0
    for largest in largest_alone(engines, load, available).values():
        if largest is not None and largest.fleet.lost_share <= load.budget + ROUNDING:
            largest_per_s = max(largest_per_s, largest.requests_per_s)
    return largest_per_s


def largest_of_engines(
    counts: Iterable[tuple[EngineType, int]], load: DailyLoad
) -> float:
    """Return the largest load that given engines carry together, in requests a second in the mean of the day."""
    fastest_per_s = 0.0
    sum_per_s = 0.0
    shares_processor = False
    for engine, count in counts:
        fastest_per_s = max(fastest_per_s, engine.rate)
        sum_per_s += engine.rate * count
        shares_processor = shares_processor or not engine.gpu
    peak_per_s = fastest_per_s if shares_processor else sum_per_s
    return peak_per_s / max(load.course)


def shown_load(per_s: float) -> float:
    """Round a load down to what people read, so that engines that carry it carry the rounded one as well."""
    if per_s <= 0:
        return 0.0
    magnitude = math.floor(math.log10(per_s))
    unit = 10.0 ** (magnitude - SHOWN_DIGITS + 1)
    units = math.floor(per_s / unit + 1e-9)
    # The product has digits beyond the unit, by rounding errors.
    digits = SHOWN_DIGITS + 9
    return float(f"{units * unit:.{digits}g}")


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


def _bisect(
    carries: Callable[[float], bool],
    lowest_per_s: float,
    highest_per_s: float,
    bisections: int,
) -> float:
    """Return the largest load that is carried, from a lowest one, of which this is known, to a highest one."""
    if highest_per_s <= lowest_per_s or carries(highest_per_s):
        return max(lowest_per_s, highest_per_s)
    carried_per_s = lowest_per_s
    too_much_per_s = highest_per_s
    for _ in range(bisections):
        middle_per_s = (carried_per_s + too_much_per_s) / 2
        if carries(middle_per_s):
            carried_per_s = middle_per_s
        else:
            too_much_per_s = middle_per_s
    return carried_per_s


def _is_available(fleet: PlannedFleet | None) -> bool:
    """Tell whether there is a fleet, and on a processor whether one machine is enough for it."""
    if fleet is None:
        return False
    runs_on_gpus = bool(fleet.counts[0][0].gpu)
    return runs_on_gpus or fleet.price <= 1


def _per_s_of_size(
    engines: Sequence[EngineType], size: int, available: Mapping[str, int]
) -> float:
    """Return the requests a second of as many engines of a size as there are GPUs for."""
    per_s_by_gpu: dict[str, float] = {}
    for engine in engines:
        if engine.plan.gpus_per_replica == size:
            count = available[engine.gpu] // size if engine.gpu else 1
            per_s = engine.rate * count
            per_s_by_gpu[engine.gpu] = max(per_s_by_gpu.get(engine.gpu, 0.0), per_s)
    return sum(per_s_by_gpu.values())


def _bound_per_s(engines: Sequence[EngineType], available: Mapping[str, int]) -> float:
    """Return a bound on the requests a second of any engines on these GPUs."""
    per_s_of_one_gpu: dict[str, float] = {}
    for engine in engines:
        per_s = engine.rate / max(engine.plan.gpus_per_replica, 1)
        highest_per_s = per_s_of_one_gpu.get(engine.gpu, 0.0)
        per_s_of_one_gpu[engine.gpu] = max(highest_per_s, per_s)
    bound_per_s = 0.0
    for gpu, per_s in per_s_of_one_gpu.items():
        bound_per_s += per_s * available.get(gpu, 1)
    return bound_per_s
