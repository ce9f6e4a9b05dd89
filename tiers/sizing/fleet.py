"""Which fleet carries a load at least cost: how many engines of each precision on each kind of GPU.

Requests of a kind may go to any precision, in parts. With x engines of each type, and f requests a second of each kind to
each precision in each period of the day, wanted is

    least  sum x price    so that    sum f over precisions = load of the kind in the period
                                     sum f over kinds <= sum x rate over the precision's engines, in each period
                                     sum x GPUs <= GPUs of each kind that there are
                                     engines of a precision have one number of GPUs, as its settings do
                                     sum f loss <= budget * sum f, over the day

x are whole numbers. HiGHS solves it exactly (Huangfu and Hall, Math. Prog. Comp. 10, 2018). Of fleets with one
price, that is taken which loses least. So a lower precision serves the prompts that lose least by it, and more of them while
load is high: what the router's policy does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tiers.errors import PlanError
from tiers.sizing.capacity import MOST_BUSY_SHARE, EnginePlan
from tiers.spec import PRECISIONS, TierName

_Row = tuple[dict[int, float], float, float]  # a sum of columns, and its bounds
# of the requests: an engine that shares a machine and gets fewer is not needed
LEAST_SHARE = 1e-6
# of the most that given GPUs carry: what they are planned for where no load is named
KEPT = 0.8
SPARE = 1e-4  # share of the answers: what a GPU is worth that no load needs
BISECTIONS = 12
_RATE = re.compile(
    r"([\d.]+)\s*(?:(?:req(?:uests?)?)?\s*/\s*([a-z]+)|(rp[sm]))?", re.IGNORECASE
)
_SECOND = dict.fromkeys(("s", "sec", "second", "rps"), 1.0)
_MINUTE = dict.fromkeys(("m", "min", "minute", "rpm"), 60.0)
_HOUR = dict.fromkeys(("h", "hour"), 3600.0)
_PERIODS = {**_SECOND, **_MINUTE, **_HOUR, **dict.fromkeys(("d", "day"), 86400.0)}
# of the least price, for losing all answers: it decides between fleets of one price
LOSS_WEIGHT = 0.01


@dataclass(frozen=True, slots=True)
class EngineType:
    """An engine that may be started any number of times."""

    gpu: str  # its kind; empty: the processor, which engines of all precisions share
    plan: EnginePlan  # of one engine
    price: float  # of an hour; 1 for each GPU if no price is known

    @property
    def tier(self) -> TierName:
        """Return its tier."""
        return self.plan.tier

    @property
    def rate(self) -> float:
        """Return the requests a second that one engine serves, as busy as planned."""
        return MOST_BUSY_SHARE * (self.plan.requests_per_s or 0.0)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests a second by kind, the day's course, and what each precision loses."""

    by_kind: Mapping[Hashable, float]  # in the mean of the day
    loss: Mapping[TierName, Mapping[Hashable, float]]  # share of answers, 0..1
    # load of each part of the day over the mean; parts are equally long
    course: tuple[float, ...] = (1.0,)
    budget: float = 1.0  # share of all answers that may be lost

    @property
    def mean(self) -> float:
        """Return all requests a second, in the mean of the day."""
        return sum(self.by_kind.values())

    @property
    def peak(self) -> float:
        """Return all requests a second in the busiest part of the day."""
        return self.mean * max(self.course)

    def scaled_to(self, mean: float) -> Load:
        """Return as many requests of each kind as make this many a second in the mean of the day."""
        return replace(
            self,
            by_kind={
                kind: mean * rate / self.mean for kind, rate in self.by_kind.items()
            },
        )

    def lost_by(self, tier: TierName) -> float:
        """Return the share of all answers that a tier alone would lose."""
        return (
            sum(rate * self.loss[tier][kind] for kind, rate in self.by_kind.items())
            / self.mean
        )


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines, and what they do."""

    counts: tuple[tuple[EngineType, int], ...]  # of the types that there are
    price: float  # of an hour
    lost: float  # share of all answers
    # share of all requests that are of a kind and go to a tier
    sent: Mapping[tuple[Hashable, TierName], float]
    # of the policy: the largest share of answers that a tier loses of a kind it is to serve
    loss_budget: float = 1.0
    # in the mean of the requests, as ``tiers.sizing.operation`` finds it
    ttft_ms: float | None = None
    tpot_ms: float | None = None  # likewise

    @property
    def shares(self) -> dict[TierName, float]:
        """Return each tier's share of all requests."""
        found = dict.fromkeys((tier for _, tier in self.sent), 0.0)
        for (_, tier), share in self.sent.items():
            found[tier] += share
        return found

    @property
    def gpus(self) -> dict[str, int]:
        """Return the GPUs of each kind."""
        found: dict[str, int] = {}
        for engine, count in self.counts:
            found[engine.gpu] = (
                found.get(engine.gpu, 0) + count * engine.plan.gpus_per_replica
            )
        return found

    def replicas(self, tier: TierName) -> int:
        """Return the engines of a tier."""
        return sum(count for engine, count in self.counts if engine.tier is tier)


@dataclass(frozen=True, slots=True)
class _Program:
    """The columns: engines; whether a tier's have so many GPUs; flows of a kind to a tier in a part of the day."""

    engines: Sequence[EngineType]
    load: Load
    tiers: Sequence[TierName]

    @property
    def shared(self) -> bool:
        """Tell whether engines share machines, of which each has one of each precision."""
        return not self.engines[0].gpu

    @property
    def sizes(self) -> dict[tuple[TierName, int], int]:
        """Return the column of each tier's numbers of GPUs."""
        found = dict.fromkeys(
            (engine.tier, engine.plan.gpus_per_replica) for engine in self.engines
        )
        return {size: len(self.engines) + number for number, size in enumerate(found)}

    @property
    def flows(self) -> dict[tuple[Hashable, TierName, int], int]:
        """Return the column of each flow."""
        parts, before = (
            range(len(self.load.course)),
            len(self.engines) + len(self.sizes),
        )
        flows = [
            (kind, tier, part)
            for part in parts
            for kind in self.load.by_kind
            for tier in self.tiers
        ]
        return {flow: before + number for number, flow in enumerate(flows)}

    def carried(self) -> Iterator[_Row]:
        """Yield that all requests are served, and by engines that there are."""
        at, kinds, load = self.flows, self.load.by_kind, self.load
        for part, factor in enumerate(load.course):
            for kind, rate in kinds.items():
                yield (
                    {at[kind, tier, part]: 1.0 for tier in self.tiers},
                    rate * factor,
                    rate * factor,
                )
            if self.shared:
                used = {
                    at[kind, each.tier, part]: 1 / each.rate
                    for each in self.engines
                    for kind in kinds
                }
                yield used | {0: -1.0}, -math.inf, 0.0
                continue
            for tier in self.tiers:
                served = {at[kind, tier, part]: 1.0 for kind in kinds}
                yield (
                    served | {e: -self.engines[e].rate for e in self.of(tier)},
                    -math.inf,
                    0.0,
                )

    def bounded(
        self, available: Mapping[str, int | None], replicas: Mapping[TierName, int]
    ) -> Iterator[_Row]:
        """Yield that GPUs suffice, that the budget is kept, and that tiers have as many engines as given."""
        for gpu, most in available.items():
            if most is not None:
                mine = {
                    e: float(one.plan.gpus_per_replica)
                    for e, one in enumerate(self.engines)
                    if one.gpu == gpu
                }
                yield mine, 0.0, float(most)
        for tier, count in replicas.items():
            yield dict.fromkeys(self.of(tier), 1.0), count, count
        for tier in self.tiers:
            yield (
                {column: 1.0 for (one, _), column in self.sizes.items() if one is tier},
                0.0,
                1.0,
            )
        for (tier, gpus), column in self.sizes.items():
            sized = [
                e
                for e in self.of(tier)
                if self.engines[e].plan.gpus_per_replica == gpus
            ]
            enough = math.ceil(
                self.load.peak / min(self.engines[e].rate for e in sized)
            )
            yield dict.fromkeys(sized, 1.0) | {column: -1.0 - enough}, -math.inf, 0.0
        yield (
            self.lost(),
            0.0,
            self.load.budget * self.load.mean * len(self.load.course),
        )

    def of(self, tier: TierName) -> list[int]:
        """Return the columns of a tier's engines."""
        return [e for e, engine in enumerate(self.engines) if engine.tier is tier]

    def lost(self) -> dict[int, float]:
        """Return what each flow loses, by column."""
        return {
            column: self.load.loss[tier][kind]
            for (kind, tier, _), column in self.flows.items()
        }


def cheapest(
    engines: Sequence[EngineType],
    load: Load,
    available: Mapping[str, int | None],
    replicas: Mapping[TierName, int] | None = None,
) -> Fleet | None:
    """Return the fleet of least cost; None: no number of these engines carries the load within the budget.

    Args:
        engines: That may be started.
        load: What they are to serve.
        available: GPUs of each kind; None: as many as are needed.
        replicas: So many engines of each precision; None: any number. On a processor, that of the machines.
    """
    engines = [engine for engine in engines if engine.rate]
    if not engines:
        return None
    program = _Program(
        engines,
        load,
        sorted({engine.tier for engine in engines}, key=tuple(PRECISIONS).index),
    )
    flows, lost, whole = program.flows, program.lost(), load.mean * len(load.course)
    prices = [engine.price for engine in engines]
    tie = (
        LOSS_WEIGHT
        * min((price for price in prices if price > 0), default=1 / LOSS_WEIGHT)
        / whole
    )
    goal = dict(enumerate(prices)) | dict.fromkeys(program.sizes.values(), 0.0)
    goal |= {column: tie * loss for column, loss in lost.items()}
    whole_numbers = len(engines) + len(program.sizes)
    found = _solved(
        goal,
        [*program.carried(), *program.bounded(available, replicas or {})],
        whole_numbers,
    )
    if found is None:
        return None
    sent = dict.fromkeys(((kind, tier) for kind, tier, _ in flows), 0.0)
    for (kind, tier, _), column in flows.items():
        sent[kind, tier] += found[column] / whole
    machines = round(found[0])
    numbers = [
        round(found[e]) if not program.shared else machines for e in range(len(engines))
    ]
    served = {tier for (_, tier), share in sent.items() if share > LEAST_SHARE}
    used = [
        engine.tier for engine in engines if not program.shared or engine.tier in served
    ]
    counts = tuple(
        (engine, n)
        for engine, n in zip(engines, numbers, strict=True)
        if n and engine.tier in used
    )
    price = (
        float(machines)
        if program.shared
        else sum(engine.price * count for engine, count in counts)
    )
    most = max(
        load.loss[tier][kind]
        for (kind, tier), share in sent.items()
        if share > LEAST_SHARE
    )
    lossy = sum(found[column] * loss for column, loss in lost.items()) / whole
    return Fleet(counts, price, lossy, sent, math.ceil(most * 1e4) / 1e4)


def _solved(
    goal: Mapping[int, float], rows: Sequence[_Row], whole_numbers: int
) -> list[float] | None:
    """Return the columns' values that make the goal least, the first of them whole numbers; None: there are none."""
    from highspy import Highs, HighsModelStatus, HighsVarType  # noqa: PLC0415  needed here alone

    solver = Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 0.0)
    for column in range(len(goal)):
        solver.addCol(goal[column], 0.0, math.inf, 0, [], [])
        if column < whole_numbers:
            solver.changeColIntegrality(column, HighsVarType.kInteger)
    for terms, low, high in rows:
        solver.addRow(low, high, len(terms), list(terms), list(terms.values()))
    solver.run()
    return (
        list(solver.getSolution().col_value)
        if solver.getModelStatus() == HighsModelStatus.kOptimal
        else None
    )


def alone(
    engines: Sequence[EngineType], load: Load, available: Mapping[str, int | None]
) -> dict[TierName, Fleet | None]:
    """Return the cheapest fleet of each precision alone, whatever it loses; None: there are too few GPUs for it."""
    load = replace(load, budget=1.0)
    tiers = [
        tier for tier in PRECISIONS if any(engine.tier is tier for engine in engines)
    ]
    return {
        t: cheapest([engine for engine in engines if engine.tier is t], load, available)
        for t in tiers
    }


def as_set(
    engines: Sequence[EngineType],
    load: Load,
    gpus: Iterable[str],
    replicas: Mapping[TierName, int],
) -> Fleet | None:
    """Return what so many engines of each tier do at least loss; None: they do not carry the load."""
    wanted = replicas if engines[0].gpu else {engines[0].tier: 1}  # one machine
    return cheapest(engines, replace(load, budget=1.0), dict.fromkeys(gpus), wanted)


def fullest(
    engines: Sequence[EngineType], load: Load, available: Mapping[str, int | None]
) -> Fleet | None:
    """Return the fleet of GPUs that are there anyway which carries ``KEPT`` of the most that they can, and loses least.

    Args:
        engines: That may be started.
        load: Its kinds, course and budget; how much of it there is, is found out.
        available: GPUs of each kind; an idle one is worth an engine of the highest precision.
    """
    spare = {tier: -SPARE * (1 + n) for n, tier in enumerate(PRECISIONS)}
    owned = [
        replace(each, price=each.plan.gpus_per_replica * spare[each.tier])
        for each in engines
    ]

    def at(rate: float) -> Fleet | None:
        return cheapest(owned, load.scaled_to(rate), available)

    low, high = (
        0.0,
        sum(
            max(e.rate for e in engines if e.gpu == gpu) * (n or 1)
            for gpu, n in available.items()
        ),
    )
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle) is None else (middle, high)
    return at(KEPT * low) if low else None


def parse_rate(text: str) -> float:
    """Return the requests a second of a rate as ``40/s`` or ``100/min``; without a unit, a second's."""
    match = _RATE.fullmatch(text.strip())
    rate = 0.0
    if match is not None:
        period = _PERIODS.get((match[2] or match[3] or "s").lower())
        with suppress(ValueError):
            rate = float(match[1]) / period if period else 0.0
    if not 0 < rate < math.inf:
        raise PlanError(
            f"--load {text}: a rate above 0 is needed, as 40/s, 100/min, 5000/h or 200000/day"
        )
    return rate


def parse_course(text: str) -> tuple[float, ...]:
    """Return the load of each part of a day over the mean, of factors with commas between."""
    try:
        factors = tuple(float(part) for part in text.split(","))
    except ValueError:
        factors = ()
    if (
        not factors
        or not all(0 <= factor < float("inf") for factor in factors)
        or not sum(factors)
    ):
        raise PlanError(
            f"--day {text}: numbers from 0 with commas between are needed, as 0.3,0.5,1.2,2"
        )
    mean = sum(factors) / len(factors)
    return tuple(factor / mean for factor in factors)
