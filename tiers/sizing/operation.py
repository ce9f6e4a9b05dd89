"""What a fleet does with its load under the router's policy: random arrivals, simulated.

Requests come as a Poisson process. The n sequences that an engine computes each take ``tokens * between(n)``, the time that
``tiers.sizing.capacity`` plans with, so one of them ends at a rate of n over that: a Markov chain, stepped event by event
(Gillespie, J. Phys. Chem. 81, 1977) from a fixed seed. Each request goes to the tier that the policy chooses at that moment.
Prompts that come together share steps, so each waits for half a step and for the others (M/M/1 queue). Means are within 15
percent of those of simulated engines with vLLM's scheduling (``benchmarks/plans.py``).
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from tiers.sizing.capacity import ServingDemand, mean_tpot_ms
from tiers.sizing.fleet import EngineType, Fleet, Load, cheapest
from tiers.spec import PRECISIONS, TierName
from tiers.speed import Load as Busy
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from tiers.sizing.capacity import Pace


class Policy(NamedTuple):
    """How a tier is chosen.

    Attributes:
        allowed: Returns the largest loss allowed, by the policy's loss budget and the share of the highest precision's slots
            that is taken.
        latest_unnoticed_ms: Returns the latest finish that counts as soon as the soonest one; None: only engine time counts.
    """

    allowed: Callable[[float, float], float]
    latest_unnoticed_ms: Callable[[float], float] | None


ARRIVALS = 4000  # of a part of the day, where tiers share it
TURNS = 4  # of all sequences, until the fleet is as full as it stays
TRIES = 4


@dataclass(slots=True, eq=False)
class _Station:
    """Engines of one type, with their load spread evenly. Times in milliseconds, by an engine's sequences."""

    engine: EngineType
    count: int
    tokens: int
    between: Callable[[int], float]
    step: Callable[[int], float]
    # how many of all its sequences end in a second, on machines of its own
    ends_per_s: Callable[[int], float]
    cost: Callable[[int], float]  # engine time of one more request
    # from its arrival, of a request that makes the sequences so many
    finish_ms: Callable[[int], float]
    now: int = 0  # sequences
    busy: float = 0.0  # sequences * seconds
    admitted: float = 0
    stepped: float = 0.0  # sum of the first steps of those

    @property
    def slots(self) -> int:
        return self.count * self.engine.plan.batch

    @property
    def each(self) -> int:
        """Return the sequences of one engine; not less than one."""
        return max(-(-self.now // self.count), 1)

    @property
    def finish_of_next_ms(self) -> float:
        """Return when one more request would have its whole answer."""
        return self.finish_ms(self.now // self.count + 1)


@dataclass(slots=True)
class _Seen:
    """What became of requests."""

    sent: dict[tuple[Hashable, TierName], float] = field(default_factory=dict)
    ttft: float = 0.0  # sums, in milliseconds
    tpot: float = 0.0


def in_operation(
    fleet: Fleet, load: Load, demand: ServingDemand, policy: Policy
) -> Fleet:
    """Return a fleet with what it loses, its shares and its mean TTFT and TPOT under the router's policy."""
    seen, whole = _Seen(), sum(load.course)
    stations = [_station(engine, count, demand) for engine, count in fleet.counts]
    sent = dict.fromkeys(fleet.sent, 0.0)
    for factor in load.course:
        if factor > 0:
            chain = _Chain(
                fleet, load, [replace(station) for station in stations], policy
            )
            part, weight = _part(chain, load, demand, factor), factor / whole
            seen.ttft += weight * part.ttft
            seen.tpot += weight * part.tpot
            for flow, share in part.sent.items():
                sent[flow] += weight * share
    if len({engine.tier for engine, _ in fleet.counts}) == 1:
        return replace(fleet, ttft_ms=seen.ttft, tpot_ms=seen.tpot)
    lost = sum(share * load.loss[tier][kind] for (kind, tier), share in sent.items())
    return replace(fleet, lost=lost, sent=sent, ttft_ms=seen.ttft, tpot_ms=seen.tpot)


def cheapest_in_operation(
    engines: Sequence[EngineType],
    load: Load,
    available: Mapping[str, int | None],
    demand: ServingDemand,
    policy: Policy,
) -> Fleet | None:
    """Return the cheapest fleet that keeps the budget under the router's policy too; None: there is none."""
    budget, best = load.budget, None
    for _ in range(TRIES):
        best = cheapest(engines, replace(load, budget=budget), available)
        best = best and in_operation(best, load, demand, policy)
        if best is None or best.lost <= load.budget + 1e-9:
            break
        budget *= load.budget / best.lost
    if best is None or best.lost > load.budget + 1e-9:
        singles = [
            cheapest([e for e in engines if e.tier is tier], load, available)
            for tier in PRECISIONS
        ]
        best = min(
            (each for each in singles if each),
            key=lambda each: (each.price, each.lost),
            default=None,
        )
        best = best and in_operation(best, load, demand, policy)
    return best


def _part(chain: _Chain, load: Load, demand: ServingDemand, factor: float) -> _Seen:
    """Return what becomes of requests in a part of the day."""
    source, kinds = random.Random(1), list(load.by_kind)  # noqa: S311  a simulation
    heavy, rate, stations = (
        list(accumulate(load.by_kind.values())),
        load.mean * factor,
        chain.stations,
    )
    if len(stations) == 1:
        return _sums(chain, demand, 1.0, _steady(chain, stations[0], rate))
    counted = (
        ARRIVALS
        if len({station.engine.tier for station in stations}) > 1
        else ARRIVALS // 4
    )
    warm = min(TURNS * chain.fill(rate), counted)
    last, arrived, now, waited = warm + counted, 0, 0.0, 0.0
    while arrived < last:
        ends = chain.ends()
        whole = rate + sum(ends)
        if arrived > warm:
            dt = source.expovariate(whole)
            now += dt
            waited += dt * len(chain.queue)
            for station in stations:
                station.busy += dt * station.now
        nth = source.random() * whole - rate
        if nth < 0:
            arrived += 1
            chain.measured = arrived > warm
            chain.arrive(source.choices(kinds, cum_weights=heavy)[0])
        else:
            chain.end(
                next(
                    (
                        s
                        for s, upto in zip(stations, accumulate(ends), strict=True)
                        if nth < upto
                    ),
                    None,
                )
            )
    return _sums(chain, demand, now, waited)


def _steady(chain: _Chain, station: _Station, rate: float) -> float:
    """Note what engines of one type do in a second, by the chain's stationary distribution; return who waits."""
    logs = [0.0]
    for n in range(1, station.slots + 1):
        station.now = n
        logs.append(logs[-1] + math.log(rate / chain.ends()[0]))
    # of those that wait, each further one is so likely
    more = min(rate / chain.ends()[0], 0.99)
    peak = max(logs)
    weights = [math.exp(each - peak) for each in logs]
    full = weights[-1] / (1 - more)
    whole = sum(weights[:-1]) + full
    for n, weight in enumerate([*weights[:-1], full]):
        station.now = n + (n < station.slots)
        station.busy += n * weight / whole
        station.stepped += (
            rate * weight / whole * station.step(station.each) * (1.5 if n else 1)
        )
    station.admitted = rate
    return full / whole * more / (1 - more)


class _Chain:
    """The state: sequences of each station, and who waits."""

    def __init__(
        self, fleet: Fleet, load: Load, stations: Sequence[_Station], policy: Policy
    ) -> None:
        self.stations, self.queue, self.measured = stations, deque[Hashable](), False
        self.seen = _Seen()
        self._load = load
        self._policy = policy
        self._shared = not stations[0].engine.gpu
        self._tiers = sorted(
            {s.engine.tier for s in stations}, key=tuple(PRECISIONS).index
        )
        self._highest = [s for s in stations if s.engine.tier is self._tiers[-1]]
        self._highest_slots = sum(station.slots for station in self._highest)
        self._most_allowed = policy.allowed(fleet.loss_budget, 1.0)
        self._allowed_when_taken = cache(
            lambda taken: policy.allowed(fleet.loss_budget, taken / self._highest_slots)
        )

    def fill(self, rate: float) -> int:
        """Begin about as full as the fleet will be: the highest precision serves what it can. Return the sequences."""
        for station in sorted(
            self.stations, key=lambda s: -self._tiers.index(s.engine.tier)
        ):
            while station.now < station.slots and sum(self.ends()) < rate:
                station.now += station.count
            station.now = min(station.now, station.slots)
        return sum(station.now for station in self.stations)

    def ends(self) -> list[float]:
        """Return how many sequences of each station end in a second."""
        rates = [station.ends_per_s(station.now) for station in self.stations]
        if not self._shared:
            return rates
        busy = max(sum(station.now > 0 for station in self.stations), 1)
        return [rate / busy for rate in rates]

    def arrive(self, kind: Hashable) -> None:
        """Admit a request, or let it wait."""
        there = sum(station.now for station in self.stations) + 1
        free = dict[TierName, _Station]()
        for station in self.stations:
            other = free.get(station.engine.tier)
            if station.now < station.slots and (
                other is None or station.each < other.each
            ):
                free[station.engine.tier] = station
        if not free:
            self.queue.append(kind)
            return
        station = (
            free[self._choose(kind, free, there)]
            if len(free) > 1
            else next(iter(free.values()))
        )
        station.now += 1
        if self.measured:
            station.admitted += 1
            # it waits for half a step
            station.stepped += station.step(station.each) * (
                1.5 if station.now > 1 else 1
            )
            flow = kind, station.engine.tier
            self.seen.sent[flow] = self.seen.sent.get(flow, 0.0) + 1

    def end(self, station: _Station | None) -> None:
        """Let a sequence end; the first that waits is admitted."""
        if station is not None:
            station.now -= 1
            if self.queue:
                self.arrive(self.queue.popleft())

    def _choose(
        self, kind: Hashable, free: dict[TierName, _Station], there: int
    ) -> TierName:
        """Choose as ``router.policy.decide`` does."""
        loss = {
            tier: self._load.loss[tier][kind] for tier in self._tiers if tier in free
        }
        fit = [tier for tier in loss if loss[tier] <= self._most_allowed]
        if not fit:
            return list(loss)[-1]
        allowed = self._allowed_when_taken(
            sum(station.now for station in self._highest)
        )
        good = [tier for tier in fit if loss[tier] <= allowed] or [
            min(fit, key=lambda tier: loss[tier])
        ]
        if self._policy.latest_unnoticed_ms is not None:
            finish_ms = {tier: free[tier].finish_of_next_ms for tier in good}
            latest_ms = self._policy.latest_unnoticed_ms(min(finish_ms.values()))
            good = [tier for tier in good if finish_ms[tier] <= latest_ms]
        return min(
            good,
            key=lambda tier: free[tier].cost(min(there, free[tier].engine.plan.batch)),
        )


def _station(engine: EngineType, count: int, demand: ServingDemand) -> _Station:
    pace = engine.plan.pace
    assert pace is not None
    prefill, tokens = (
        pace.prefill_ms_per_token * demand.prompt_tokens,
        demand.output_tokens,
    )
    step = cache(pace.step_ms)
    between = cache(lambda n: mean_tpot_ms(pace, demand, n))
    return _Station(
        engine=engine,
        count=count,
        tokens=tokens,
        between=between,
        step=step,
        ends_per_s=cache(
            lambda n: 1000 * n / (tokens * between(max(-(-n // count), 1)))
        ),
        cost=cache(lambda n: prefill + tokens * step(n) / n),
        finish_ms=cache(lambda n: _finish_ms(pace, demand, n)),
    )


def _finish_ms(pace: Pace, demand: ServingDemand, sequences: int) -> float:
    """Return when the router expects a request to have its whole answer, on an engine with so many sequences then."""
    if isinstance(pace, SpeedModel):
        times = pace.times(
            demand.prompt_tokens,
            Busy(sequences - 1),
            demand.max_num_seqs,
            output_share=1.0,
        )
        return times.ttft_ms + (demand.output_tokens - 1) * times.tpot_ms
    return (
        pace.prefill_ms_per_token * demand.prompt_tokens
        + demand.output_tokens * pace.step_ms(sequences)
    )


def _sums(chain: _Chain, demand: ServingDemand, now: float, waited: float) -> _Seen:
    """Return the shares, and the means of TTFT and TPOT (Little's law)."""
    seen, whole = chain.seen, sum(station.admitted for station in chain.stations)
    for station in chain.stations:
        if not station.admitted:
            continue
        pace = station.engine.plan.pace
        assert pace is not None
        prefill = pace.prefill_ms_per_token * demand.prompt_tokens
        busy = min(prefill / 1000 * station.admitted / now / station.count, 0.99)
        ttft = prefill / (1 - busy) + station.stepped / station.admitted
        whole_ms = 1000 * station.busy / station.admitted
        seen.ttft += station.admitted / whole * ttft
        seen.tpot += (
            station.admitted / whole * (whole_ms - prefill) / demand.output_tokens
        )
    seen.ttft += 1000 * waited / whole
    seen.sent = {flow: share / whole for flow, share in seen.sent.items()}
    return seen
