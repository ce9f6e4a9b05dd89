"""Which fleet carries a load at least cost: how many engines of each precision on each kind of GPU.

Requests of a kind may go to any precision, in parts. With x engines of each type, and f requests a second of each kind to
each precision in each period of the day, wanted is

    least  sum x price    so that    sum f over precisions = load of the kind in the period
                                     sum f over kinds <= sum x rate over the precision's engines, in each period
                                     sum x GPUs <= GPUs of each kind that there are
                                     engines of a precision have one number of GPUs, as its settings do
                                     sum f loss <= budget * sum f, over the day

x are whole numbers. HiGHS solves it exactly (Huangfu and Hall, Math. Prog. Comp. 10, 2018). If several fleets have the least
price, the one that loses least is taken. So a lower precision serves the prompts that lose least by it, and more of them
while load is high: what the router's policy does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from tiers.errors import PlanError
from tiers.sizing.capacity import MAX_BUSY_SHARE, EnginePlan
from tiers.spec import STANDARD_TIERS, TierName

# An engine that shares a machine and gets a smaller share of the requests is not needed.
MIN_SHARE = 1e-6
# A fleet for which no load is named is planned for this share of the most that its GPUs carry.
SHARE_OF_LARGEST = 0.8
# What a GPU is worth that no load needs, as a share of the answers.
SPARE_GPU_WORTH = 1e-4
BISECTIONS = 12
_RATE = re.compile(
    r"([\d.]+)\s*(?:(?:req(?:uests?)?)?\s*/\s*([a-z]+)|(rp[sm]))?", re.IGNORECASE
)
_SECOND = dict.fromkeys(("s", "sec", "second", "rps"), 1.0)
_MINUTE = dict.fromkeys(("m", "min", "minute", "rpm"), 60.0)
_HOUR = dict.fromkeys(("h", "hour"), 3600.0)
_DAY = dict.fromkeys(("d", "day"), 86400.0)
_PERIODS_S = {**_SECOND, **_MINUTE, **_HOUR, **_DAY}
# Losing all answers costs this share of the lowest price: enough to decide between fleets of one price.
LOSS_WEIGHT = 0.01


@dataclass(frozen=True, slots=True)
class EngineType:
    """An engine that may be started any number of times.

    Attributes:
        gpu: The kind of its GPUs; empty: it runs on the processor, which engines of all precisions share.
        plan: What one engine serves.
        price: The price of an hour; 1 for each GPU if no price is known.
    """

    gpu: str
    plan: EnginePlan
    price: float

    @property
    def tier(self) -> TierName:
        """Return its tier."""
        return self.plan.tier

    @property
    def rate(self) -> float:
        """Return the requests a second that one engine serves, as busy as planned."""
        return MAX_BUSY_SHARE * (self.plan.requests_per_s or 0.0)


@dataclass(frozen=True, slots=True)
class DailyLoad:
    """Requests by kind over the course of a day, and what each precision loses on them.

    Attributes:
        per_s_by_kind: Requests a second, in the mean of the day.
        loss: The share of the answers to each kind that a tier loses, 0..1.
        course: The load of each part of the day over the mean. Parts are equally long.
        budget: The share of all answers that may be lost.
    """

    per_s_by_kind: Mapping[Hashable, float]
    loss: Mapping[TierName, Mapping[Hashable, float]]
    course: tuple[float, ...] = (1.0,)
    budget: float = 1.0

    @property
    def mean_per_s(self) -> float:
        """Return all requests a second, in the mean of the day."""
        return sum(self.per_s_by_kind.values())

    @property
    def peak_per_s(self) -> float:
        """Return all requests a second in the busiest part of the day."""
        return self.mean_per_s * max(self.course)

    def scaled_to(self, mean_per_s: float) -> DailyLoad:
        """Return a load of the same kinds and course, with so many requests a second in the mean of the day."""
        per_s_by_kind = {
            kind: mean_per_s * per_s / self.mean_per_s
            for kind, per_s in self.per_s_by_kind.items()
        }
        return replace(self, per_s_by_kind=per_s_by_kind)

    def lost_by(self, tier: TierName) -> float:
        """Return the share of all answers that a tier alone would lose."""
        losses = self.loss[tier]
        lost_per_s = sum(
            per_s * losses[kind] for kind, per_s in self.per_s_by_kind.items()
        )
        return lost_per_s / self.mean_per_s


@dataclass(frozen=True, slots=True)
class PlannedFleet:
    """Engines, and what they do.

    Attributes:
        counts: How many engines there are of each type, for the types of which there are any.
        price: The price of an hour; GPUs or machines if no price is known.
        lost_share: The share of all answers that is lost.
        share_by_flow: The share of all requests that are of a kind and go to a tier.
        loss_budget: The policy's: the largest share of answers that a tier loses of a kind it is to serve.
        ttft_ms: Mean of all requests, as ``tiers.sizing.operation`` finds it; None: not known yet.
        tpot_ms: Mean of all requests, as ``tiers.sizing.operation`` finds it; None: not known yet.
    """

    counts: tuple[tuple[EngineType, int], ...]
    price: float
    lost_share: float
    share_by_flow: Mapping[tuple[Hashable, TierName], float]
    loss_budget: float = 1.0
    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def shares(self) -> dict[TierName, float]:
        """Return each tier's share of all requests."""
        shares = dict.fromkeys((tier for _, tier in self.share_by_flow), 0.0)
        for (_, tier), share in self.share_by_flow.items():
            shares[tier] += share
        return shares

    @property
    def gpus(self) -> dict[str, int]:
        """Return the GPUs of each kind."""
        gpus: dict[str, int] = {}
        for engine, count in self.counts:
            engine_gpus = count * engine.plan.gpus_per_replica
            gpus[engine.gpu] = gpus.get(engine.gpu, 0) + engine_gpus
        return gpus

    def replicas(self, tier: TierName) -> int:
        """Return the engines of a tier."""
        return sum(count for engine, count in self.counts if engine.tier is tier)


class _Constraint(NamedTuple):
    """A row of the program: bounds on a weighted sum of columns."""

    weights: dict[int, float]
    lower: float
    upper: float


class _FleetProgram:
    """The program that HiGHS solves.

    Its columns are, in order: how many engines there are of each type; whether the engines of a tier have so many GPUs each;
    and how many requests a second of a kind go to a tier in a part of the day. The former two are whole numbers. Engines on
    a processor share machines, each of which has one engine of each precision. There the first column is the number of
    machines.
    """

    def __init__(self, engines: Sequence[EngineType], load: DailyLoad) -> None:
        self.engines = engines
        self.load = load
        self.shares_machines = not engines[0].gpu
        self.sum_of_flows_per_s = load.mean_per_s * len(load.course)
        tiers = {engine.tier for engine in engines}
        self.tiers = [tier for tier in STANDARD_TIERS if tier in tiers]
        self.columns_of_tier = {tier: self._columns_of(tier) for tier in self.tiers}
        self.size_columns: dict[tuple[TierName, int], int] = {}
        self.flow_columns: dict[tuple[Hashable, TierName, int], int] = {}
        self._number_sizes()
        self._number_flows()
        self.loss_by_column = {
            column: load.loss[tier][kind]
            for (kind, tier, _), column in self.flow_columns.items()
        }

    def _columns_of(self, tier: TierName) -> list[int]:
        return [
            column for column, engine in enumerate(self.engines) if engine.tier is tier
        ]

    def _number_sizes(self) -> None:
        for engine in self.engines:
            size = engine.tier, engine.plan.gpus_per_replica
            next_column = len(self.engines) + len(self.size_columns)
            self.size_columns.setdefault(size, next_column)

    def _number_flows(self) -> None:
        column = self.whole_columns
        for part in range(len(self.load.course)):
            for kind in self.load.per_s_by_kind:
                for tier in self.tiers:
                    self.flow_columns[kind, tier, part] = column
                    column += 1

    @property
    def whole_columns(self) -> int:
        """Return how many columns are whole numbers: the first ones."""
        return len(self.engines) + len(self.size_columns)

    def costs(self) -> list[float]:
        """Return what each column costs: engines their price, and lost answers so little that it decides between fleets."""
        prices = [engine.price for engine in self.engines]
        lowest_price = min(
            (price for price in prices if price > 0), default=1 / LOSS_WEIGHT
        )
        cost_of_loss = LOSS_WEIGHT * lowest_price / self.sum_of_flows_per_s
        size_costs = [0.0] * len(self.size_columns)
        loss_costs = [cost_of_loss * loss for loss in self.loss_by_column.values()]
        return [*prices, *size_costs, *loss_costs]

    def constraints(
        self, available: Mapping[str, int | None], replicas: Mapping[TierName, int]
    ) -> Iterator[_Constraint]:
        """Yield what a fleet must keep.

        Args:
            available: GPUs of each kind; None: as many as are needed.
            replicas: So many engines there must be of each precision that is named.
        """
        for part in range(len(self.load.course)):
            yield from self._all_requests_are_served(part)
            if self.shares_machines:
                yield self._machines_suffice(part)
            else:
                yield from self._engines_suffice(part)
        yield from self._gpus_suffice(available)
        for tier, count in replicas.items():
            engines = dict.fromkeys(self.columns_of_tier.get(tier, ()), 1.0)
            yield _Constraint(engines, lower=count, upper=count)
        yield from self._tiers_have_one_size()
        yield from self._engines_have_their_tiers_size()
        mean_budget_per_s = self.load.budget * self.load.mean_per_s
        day_budget_per_s = mean_budget_per_s * len(self.load.course)
        yield _Constraint(self.loss_by_column, lower=0.0, upper=day_budget_per_s)

    def _all_requests_are_served(self, part: int) -> Iterator[_Constraint]:
        factor = self.load.course[part]
        for kind, mean_per_s in self.load.per_s_by_kind.items():
            flows = {self.flow_columns[kind, tier, part]: 1.0 for tier in self.tiers}
            per_s = mean_per_s * factor
            yield _Constraint(flows, lower=per_s, upper=per_s)

    def _machines_suffice(self, part: int) -> _Constraint:
        """Return that all requests take no more time than the machines have."""
        weights: dict[int, float] = {}
        for engine in self.engines:
            for kind in self.load.per_s_by_kind:
                column = self.flow_columns[kind, engine.tier, part]
                weights[column] = 1 / engine.rate
        weights[0] = -1.0
        return _Constraint(weights, lower=-math.inf, upper=0.0)

    def _engines_suffice(self, part: int) -> Iterator[_Constraint]:
        for tier in self.tiers:
            weights = {
                self.flow_columns[kind, tier, part]: 1.0
                for kind in self.load.per_s_by_kind
            }
            for column in self.columns_of_tier[tier]:
                weights[column] = -self.engines[column].rate
            yield _Constraint(weights, lower=-math.inf, upper=0.0)

    def _gpus_suffice(
        self, available: Mapping[str, int | None]
    ) -> Iterator[_Constraint]:
        for gpu, count in available.items():
            if count is None:
                continue
            gpus_of_engines = {
                column: float(engine.plan.gpus_per_replica)
                for column, engine in enumerate(self.engines)
                if engine.gpu == gpu
            }
            yield _Constraint(gpus_of_engines, lower=0.0, upper=float(count))

    def _tiers_have_one_size(self) -> Iterator[_Constraint]:
        for tier in self.tiers:
            sizes = {
                column: 1.0
                for (sized_tier, _), column in self.size_columns.items()
                if sized_tier is tier
            }
            yield _Constraint(sizes, lower=0.0, upper=1.0)

    def _engines_have_their_tiers_size(self) -> Iterator[_Constraint]:
        """Yield that there are engines of a size only if their tier has this size."""
        for (tier, gpus), size_column in self.size_columns.items():
            columns = [
                column
                for column in self.columns_of_tier[tier]
                if self.engines[column].plan.gpus_per_replica == gpus
            ]
            slowest_rate = min(self.engines[column].rate for column in columns)
            # More engines than carry the peak alone are never needed.
            most_engines = math.ceil(self.load.peak_per_s / slowest_rate) + 1
            weights = dict.fromkeys(columns, 1.0)
            weights[size_column] = -float(most_engines)
            yield _Constraint(weights, lower=-math.inf, upper=0.0)

    def fleet(self, solution: Sequence[float]) -> PlannedFleet:
        """Return the fleet that a solution describes."""
        share_by_flow = self._share_by_flow(solution)
        used_flows = [
            flow for flow, share in share_by_flow.items() if share > MIN_SHARE
        ]
        counts = self._counts(solution, {tier for _, tier in used_flows})
        price = sum(engine.price * count for engine, count in counts)
        if self.shares_machines:
            price = float(round(solution[0]))
        return PlannedFleet(
            counts=counts,
            price=price,
            lost_share=self._lost_share(solution),
            share_by_flow=share_by_flow,
            loss_budget=self._loss_budget(used_flows),
        )

    def _lost_share(self, solution: Sequence[float]) -> float:
        """Return the share of all answers that is lost."""
        lost_per_s = sum(
            solution[column] * loss for column, loss in self.loss_by_column.items()
        )
        return lost_per_s / self.sum_of_flows_per_s

    def _loss_budget(self, used_flows: Iterable[tuple[Hashable, TierName]]) -> float:
        """Return the smallest loss budget with which the policy uses these flows, in hundredths of a percent."""
        highest_loss = max(self.load.loss[tier][kind] for kind, tier in used_flows)
        return math.ceil(highest_loss * 1e4) / 1e4

    def _share_by_flow(
        self, solution: Sequence[float]
    ) -> dict[tuple[Hashable, TierName], float]:
        flows = ((kind, tier) for kind, tier, _ in self.flow_columns)
        share_by_flow = dict.fromkeys(flows, 0.0)
        for (kind, tier, _), column in self.flow_columns.items():
            share_by_flow[kind, tier] += solution[column] / self.sum_of_flows_per_s
        return share_by_flow

    def _counts(
        self, solution: Sequence[float], serving_tiers: set[TierName]
    ) -> tuple[tuple[EngineType, int], ...]:
        """Return how many engines there are of each type; on a machine, one of each tier that serves anything."""
        counts = []
        for column, engine in enumerate(self.engines):
            count = round(solution[column])
            if self.shares_machines:
                count = round(solution[0]) if engine.tier in serving_tiers else 0
            if count:
                counts.append((engine, count))
        return tuple(counts)


def cheapest(
    engines: Sequence[EngineType],
    load: DailyLoad,
    available: Mapping[str, int | None],
    replicas: Mapping[TierName, int] | None = None,
) -> PlannedFleet | None:
    """Return the fleet of least cost; None: no number of these engines carries the load within the budget.

    Args:
        engines: Those that may be started.
        load: What they are to serve.
        available: GPUs of each kind; None: as many as are needed.
        replicas: So many engines of each precision; None: any number. On a processor, the number of machines.
    """
    rated_engines = [engine for engine in engines if engine.rate]
    if not rated_engines:
        return None
    program = _FleetProgram(rated_engines, load)
    constraints = program.constraints(available, replicas or {})
    solution = _solve(program.costs(), constraints, program.whole_columns)
    if solution is None:
        return None
    return program.fleet(solution)


def _solve(
    costs: Sequence[float], constraints: Iterable[_Constraint], whole_columns: int
) -> list[float] | None:
    """Return the columns' values that cost least; None: no values keep all constraints.

    Args:
        costs: Of each column.
        constraints: What the columns must keep.
        whole_columns: So many of the first columns are whole numbers.
    """
    from highspy import Highs, HighsModelStatus, HighsVarType  # noqa: PLC0415  needed here alone

    solver = Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 0.0)
    for column, cost in enumerate(costs):
        solver.addCol(cost, 0.0, math.inf, 0, [], [])
        if column < whole_columns:
            solver.changeColIntegrality(column, HighsVarType.kInteger)
    for weights, lower, upper in constraints:
        columns = list(weights)
        solver.addRow(lower, upper, len(columns), columns, list(weights.values()))
    solver.run()
    if solver.getModelStatus() != HighsModelStatus.kOptimal:
        return None
    return list(solver.getSolution().col_value)


def alone(
    engines: Sequence[EngineType],
    load: DailyLoad,
    available: Mapping[str, int | None],
) -> dict[TierName, PlannedFleet | None]:
    """Return the cheapest fleet of each precision alone, whatever it loses; None: there are too few GPUs for it."""
    unbounded_load = replace(load, budget=1.0)
    fleets: dict[TierName, PlannedFleet | None] = {}
    for tier in STANDARD_TIERS:
        engines_of_tier = [engine for engine in engines if engine.tier is tier]
        if engines_of_tier:
            fleets[tier] = cheapest(engines_of_tier, unbounded_load, available)
    return fleets


def as_set(
    engines: Sequence[EngineType],
    load: DailyLoad,
    gpus: Iterable[str],
    replicas: Mapping[TierName, int],
) -> PlannedFleet | None:
    """Return what so many engines of each tier do at least loss; None: they do not carry the load."""
    if not engines[0].gpu:
        # All engines on a processor are on one machine.
        replicas = {engines[0].tier: 1}
    unbounded_load = replace(load, budget=1.0)
    return cheapest(engines, unbounded_load, dict.fromkeys(gpus), replicas=replicas)


def fullest(
    engines: Sequence[EngineType],
    load: DailyLoad,
    available: Mapping[str, int | None],
) -> PlannedFleet | None:
    """Return the fleet that uses GPUs that are there anyway, and loses least.

    It carries ``SHARE_OF_LARGEST`` of the most that they can.

    Args:
        engines: Those that may be started.
        load: Its kinds, course and budget; how much of it there is, is found out.
        available: GPUs of each kind; an idle one is worth an engine of the highest precision.
    """
    owned_engines = [_as_owned(engine) for engine in engines]

    def fleet_at(per_s: float) -> PlannedFleet | None:
        return cheapest(owned_engines, load.scaled_to(per_s), available)

    carried_per_s = 0.0
    too_much_per_s = 0.0
    for gpu, count in available.items():
        fastest = max(engine.rate for engine in engines if engine.gpu == gpu)
        too_much_per_s += fastest * (count or 1)
    for _ in range(BISECTIONS):
        middle_per_s = (carried_per_s + too_much_per_s) / 2
        if fleet_at(middle_per_s) is None:
            too_much_per_s = middle_per_s
        else:
            carried_per_s = middle_per_s
    if not carried_per_s:
        return None
    return fleet_at(SHARE_OF_LARGEST * carried_per_s)


def _as_owned(engine: EngineType) -> EngineType:
    """Return an engine with a price below 0: its GPUs are paid for anyway, and more so are used by higher precisions."""
    rank = STANDARD_TIERS.index(engine.tier)
    worth_of_gpu = SPARE_GPU_WORTH * (1 + rank)
    return replace(engine, price=engine.plan.gpus_per_replica * -worth_of_gpu)


def parse_rate(text: str) -> float:
    """Return the requests a second of a rate as ``40/s`` or ``100/min``; without a unit, a second's."""
    match = _RATE.fullmatch(text.strip())
    per_s = 0.0
    if match is not None:
        unit = match[2] or match[3] or "s"
        period_s = _PERIODS_S.get(unit.lower())
        with suppress(ValueError):
            per_s = float(match[1]) / period_s if period_s else 0.0
    if not 0 < per_s < math.inf:
        raise PlanError(
            f"--load {text}: a rate above 0 is needed, as 40/s, 100/min, 5000/h or 200000/day"
        )
    return per_s


def parse_course(text: str) -> tuple[float, ...]:
    """Return the load of each part of a day over the mean, of factors with commas between."""
    try:
        factors = tuple(float(part) for part in text.split(","))
    except ValueError:
        factors = ()
    are_loads = all(0 <= factor < math.inf for factor in factors)
    if not are_loads or not sum(factors):
        raise PlanError(
            f"--day {text}: numbers from 0 with commas between are needed, as 0.3,0.5,1.2,2"
        )
    mean = sum(factors) / len(factors)
    return tuple(factor / mean for factor in factors)
