"""What a fleet does with its load under the router's policy: random arrivals, simulated.

Requests come as a Poisson process. The n sequences that an engine computes each take ``tokens * tpot(n)``, the time that
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
from tiers.sizing.fleet import DailyLoad, EngineType, PlannedFleet, cheapest
from tiers.spec import STANDARD_TIERS, TierName
from tiers.speed import ReplicaLoad, SpeedModel

if TYPE_CHECKING:
    from tiers.sizing.capacity import Pace


class Policy(NamedTuple):
    """How a tier is chosen.

    Attributes:
        allowed_loss: Returns the largest loss allowed, by the policy's loss budget and the share of the highest precision's
            slots that is taken.
        latest_unnoticed_ms: Returns the latest finish that counts as soon as the soonest one; None: only engine time counts.
    """

    allowed_loss: Callable[[float, float], float]
    latest_unnoticed_ms: Callable[[float], float] | None


ARRIVALS = 4000  # counted in each part of the day, where tiers share it
# All sequences are replaced so many times until the fleet is as full as it stays.
WARM_UP_TURNS = 4
TRIES = 4
HIGHEST_UTILIZATION = 0.99  # a queue with more does not settle
ROUNDING = 1e-9  # error of a share of answers
# A new sequence waits for its own first step; beside others it also waits for half of the step that is being computed.
STEPS_ALONE = 1.0
STEPS_BESIDE_OTHERS = 1.5


@dataclass(slots=True, eq=False)
class _Station:
    """Engines of one type, with their load spread evenly.

    Attributes:
        slots: Sequences that they decode at once.
        step_ms: Returns the time of a decode step of an engine with so many sequences.
        ends_per_s: Returns how many sequences end in a second if the engines have so many, on machines of their own.
        engine_ms: Returns the engine time of one more request on an engine with so many sequences.
        finish_ms: Returns the time from arrival to the end of the answer, for the last of so many sequences of an engine.
        sequences: Those that are being computed.
        sequence_s: The sum of their times on the engines so far.
        admitted: Requests so far.
        first_steps_ms: The sum of the times that these took from the computed prompt to the first token.
    """

    engine: EngineType
    count: int
    slots: int
    step_ms: Callable[[int], float]
    ends_per_s: Callable[[int], float]
    engine_ms: Callable[[int], float]
    finish_ms: Callable[[int], float]
    sequences: int = 0
    sequence_s: float = 0.0
    admitted: float = 0
    first_steps_ms: float = 0.0

    @property
    def busiest_sequences(self) -> int:
        """Return the sequences of the busiest engine, at least one."""
        return _busiest_sequences(self.sequences, self.count)

    @property
    def finish_of_next_ms(self) -> float:
        """Return when one more request would have its whole answer."""
        return self.finish_ms(self.sequences // self.count + 1)


def _busiest_sequences(sequences: int, engines: int) -> int:
    return max(-(-sequences // engines), 1)


def _make_station(engine: EngineType, count: int, demand: ServingDemand) -> _Station:
    """Return idle engines of one type. Their times are remembered, for the simulation needs each of them many times."""
    pace = engine.plan.pace
    assert pace is not None
    prefill_ms = pace.prefill_ms_per_token * demand.prompt_tokens
    tokens = demand.output_tokens
    step_ms = cache(pace.step_ms)

    @cache
    def tpot_ms(engine_sequences: int) -> float:
        return mean_tpot_ms(pace, demand, engine_sequences)

    @cache
    def ends_per_s(sequences: int) -> float:
        answer_ms = tokens * tpot_ms(_busiest_sequences(sequences, count))
        return 1000 * sequences / answer_ms

    @cache
    def engine_ms(engine_sequences: int) -> float:
        return prefill_ms + tokens * step_ms(engine_sequences) / engine_sequences

    @cache
    def finish_ms(engine_sequences: int) -> float:
        return _expected_finish_ms(pace, demand, engine_sequences)

    return _Station(
        engine=engine,
        count=count,
        slots=count * engine.plan.batch,
        step_ms=step_ms,
        ends_per_s=ends_per_s,
        engine_ms=engine_ms,
        finish_ms=finish_ms,
    )


def _expected_finish_ms(pace: Pace, demand: ServingDemand, sequences: int) -> float:
    """Return when the router expects a request to have its whole answer, on an engine with so many sequences then."""
    if isinstance(pace, SpeedModel):
        times = pace.times(
            demand.prompt_tokens,
            ReplicaLoad(sequences - 1),
            demand.max_num_seqs,
            output_share=1.0,
        )
        return times.ttft_ms + (demand.output_tokens - 1) * times.tpot_ms
    prefill_ms = pace.prefill_ms_per_token * demand.prompt_tokens
    return prefill_ms + demand.output_tokens * pace.step_ms(sequences)


@dataclass(slots=True)
class _SimulatedOutcome:
    """What became of the requests of a part of the day, or of a whole day.

    Attributes:
        share_by_flow: The share of the requests that are of a kind and went to a tier.
        ttft_ms: Mean of the requests.
        tpot_ms: Mean of the requests.
    """

    share_by_flow: dict[tuple[Hashable, TierName], float] = field(default_factory=dict)
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0

    def add(self, part: _SimulatedOutcome, weight: float) -> None:
        """Add a part of the day to the day's outcome, by its share of the requests."""
        self.ttft_ms += weight * part.ttft_ms
        self.tpot_ms += weight * part.tpot_ms
        for flow, share in part.share_by_flow.items():
            self.share_by_flow[flow] += weight * share


def in_operation(
    fleet: PlannedFleet, load: DailyLoad, demand: ServingDemand, policy: Policy
) -> PlannedFleet:
    """Return a fleet with what it loses, its shares and its mean TTFT and TPOT under the router's policy."""
    day = _simulate_day(fleet, load, demand, policy)
    tiers = {engine.tier for engine, _ in fleet.counts}
    if len(tiers) == 1:
        return replace(fleet, ttft_ms=day.ttft_ms, tpot_ms=day.tpot_ms)
    lost_share = sum(
        share * load.loss[tier][kind]
        for (kind, tier), share in day.share_by_flow.items()
    )
    return replace(
        fleet,
        lost_share=lost_share,
        share_by_flow=day.share_by_flow,
        ttft_ms=day.ttft_ms,
        tpot_ms=day.tpot_ms,
    )


def cheapest_in_operation(
    engines: Sequence[EngineType],
    load: DailyLoad,
    available: Mapping[str, int | None],
    demand: ServingDemand,
    policy: Policy,
) -> PlannedFleet | None:
    """Return the cheapest fleet that keeps the budget under the router's policy too; None: there is none.

    In operation a fleet may lose more than its optimum. Then a fleet is planned for a budget that is smaller by as much.
    """
    planned_budget = load.budget
    for _ in range(TRIES):
        stricter_load = replace(load, budget=planned_budget)
        optimum = cheapest(engines, stricter_load, available)
        if optimum is None:
            break
        fleet = in_operation(optimum, load, demand, policy)
        if fleet.lost_share <= load.budget + ROUNDING:
            return fleet
        planned_budget *= load.budget / fleet.lost_share
    single = _cheapest_single(engines, load, available)
    if single is None:
        return None
    return in_operation(single, load, demand, policy)


def _cheapest_single(
    engines: Sequence[EngineType],
    load: DailyLoad,
    available: Mapping[str, int | None],
) -> PlannedFleet | None:
    """Return the cheapest fleet of one precision that keeps the budget; None: there is none."""
    fleets = []
    for tier in STANDARD_TIERS:
        engines_of_tier = [engine for engine in engines if engine.tier is tier]
        fleet = cheapest(engines_of_tier, load, available)
        if fleet is not None:
            fleets.append(fleet)
    return min(fleets, key=lambda fleet: (fleet.price, fleet.lost_share), default=None)


def _simulate_day(
    fleet: PlannedFleet, load: DailyLoad, demand: ServingDemand, policy: Policy
) -> _SimulatedOutcome:
    """Return what becomes of the requests of a day. Each of its parts begins as full as it stays."""
    idle_stations = [
        _make_station(engine, count, demand) for engine, count in fleet.counts
    ]
    day = _SimulatedOutcome(dict.fromkeys(fleet.share_by_flow, 0.0))
    sum_of_factors = sum(load.course)
    for factor in load.course:
        if factor > 0:
            stations = [replace(station) for station in idle_stations]
            chain = _Chain(fleet.loss_budget, load, stations, policy=policy)
            part = _simulate_part(chain, load, demand, load.mean_per_s * factor)
            day.add(part, weight=factor / sum_of_factors)
    return day


def _simulate_part(
    chain: _Chain, load: DailyLoad, demand: ServingDemand, arrivals_per_s: float
) -> _SimulatedOutcome:
    """Return what becomes of the requests of a part of the day."""
    stations = chain.stations
    if len(stations) == 1:
        chain.settle(arrivals_per_s)
        return _outcome(chain, demand)
    tiers = {station.engine.tier for station in stations}
    # Where the policy has nothing to choose, the means settle sooner.
    counted = ARRIVALS if len(tiers) > 1 else ARRIVALS // 4
    warm_up = min(WARM_UP_TURNS * chain.fill(arrivals_per_s), counted)
    chain.run(
        load.per_s_by_kind,
        arrivals_per_s,
        warm_up_arrivals=warm_up,
        counted_arrivals=counted,
    )
    return _outcome(chain, demand)


class _Chain:
    """The state of the simulation: the sequences of each station, and the requests that wait.

    Attributes:
        queue: The kinds of the requests that wait, the first one first.
        counts_requests: Whether requests count, as they do once the fleet is as full as it stays.
        requests_by_flow: Counted requests of a kind that have gone to a tier.
        duration_s: The time in which requests were counted.
        waited_s: The time that all requests waited for a slot meanwhile, together.
    """

    def __init__(
        self,
        loss_budget: float,
        load: DailyLoad,
        stations: Sequence[_Station],
        policy: Policy,
    ) -> None:
        self.stations = stations
        self.queue = deque[Hashable]()
        self.counts_requests = False
        self.requests_by_flow: dict[tuple[Hashable, TierName], float] = {}
        self.duration_s = 0.0
        self.waited_s = 0.0
        self._loss = load.loss
        self._latest_unnoticed_ms = policy.latest_unnoticed_ms
        self._shares_machines = not stations[0].engine.gpu
        tiers = {station.engine.tier for station in stations}
        self._tiers = [tier for tier in STANDARD_TIERS if tier in tiers]
        self._highest_stations = [
            station for station in stations if station.engine.tier is self._tiers[-1]
        ]
        highest_slots = sum(station.slots for station in self._highest_stations)
        self._most_allowed_loss = policy.allowed_loss(loss_budget, 1.0)

        @cache
        def allowed_loss(taken_slots: int) -> float:
            return policy.allowed_loss(loss_budget, taken_slots / highest_slots)

        self._allowed_loss = allowed_loss

    def fill(self, arrivals_per_s: float) -> int:
        """Begin about as full as the fleet will be: the highest precision serves what it can. Return the sequences."""
        from_highest = sorted(
            self.stations,
            key=lambda station: self._tiers.index(station.engine.tier),
            reverse=True,
        )
        for station in from_highest:
            while (
                station.sequences < station.slots
                and sum(self._ends_per_s()) < arrivals_per_s
            ):
                station.sequences += station.count
            station.sequences = min(station.sequences, station.slots)
        return sum(station.sequences for station in self.stations)

    def settle(self, arrivals_per_s: float) -> None:
        """Note what engines of one type do in a second, by the chain's stationary distribution.

        With one station the chain only goes up by an arrival and down by an end, so the probability of n sequences is that
        of n - 1 times the rate of arrivals over the rate of ends. The requests that wait are a geometric tail of the full
        state.
        """
        [station] = self.stations
        weights = _weights_of_states(station, arrivals_per_s)
        utilization = arrivals_per_s / station.ends_per_s(station.slots)
        utilization = min(utilization, HIGHEST_UTILIZATION)
        weights[-1] /= 1 - utilization
        sum_of_weights = sum(weights)
        for sequences, weight in enumerate(weights):
            self._note_state(
                station,
                sequences,
                arrivals_per_s=arrivals_per_s,
                weight=weight,
                sum_of_weights=sum_of_weights,
            )
        station.admitted = arrivals_per_s
        self.duration_s = 1.0
        full_share = weights[-1] / sum_of_weights
        self.waited_s = full_share * utilization / (1 - utilization)

    @staticmethod
    def _note_state(
        station: _Station,
        sequences: int,
        *,
        arrivals_per_s: float,
        weight: float,
        sum_of_weights: float,
    ) -> None:
        """Add what a station does in a second while it has so many sequences, which is ``weight`` of the time."""
        after_arrival = min(sequences + 1, station.slots)
        step_ms = station.step_ms(_busiest_sequences(after_arrival, station.count))
        steps = STEPS_BESIDE_OTHERS if sequences else STEPS_ALONE
        station.sequence_s += sequences * weight / sum_of_weights
        station.first_steps_ms += (
            arrivals_per_s * weight / sum_of_weights * step_ms * steps
        )

    def run(
        self,
        weights_of_kinds: Mapping[Hashable, float],
        arrivals_per_s: float,
        warm_up_arrivals: int,
        counted_arrivals: int,
    ) -> None:
        """Step from event to event: an arrival, or the end of a sequence.

        This loop takes most of a plan's time. There are nearly a million events in a plan without a load.
        """
        source = random.Random(1)  # noqa: S311  a simulation
        kinds = list(weights_of_kinds)
        cumulative_weights = list(accumulate(weights_of_kinds.values()))
        arrived = 0
        while arrived < warm_up_arrivals + counted_arrivals:
            ends_per_s = self._ends_per_s()
            events_per_s = arrivals_per_s + sum(ends_per_s)
            if arrived > warm_up_arrivals:
                self._pass_time(source.expovariate(events_per_s))
            # Events are drawn by their rates: arrivals below 0, above them the ends of each station.
            position = source.random() * events_per_s - arrivals_per_s
            if position < 0:
                arrived += 1
                self.counts_requests = arrived > warm_up_arrivals
                kind = source.choices(kinds, cum_weights=cumulative_weights)[0]
                self.arrive(kind)
            else:
                self._end_at(position, ends_per_s)

    def _pass_time(self, elapsed_s: float) -> None:
        """Count a time in which the state does not change."""
        self.duration_s += elapsed_s
        self.waited_s += elapsed_s * len(self.queue)
        for station in self.stations:
            station.sequence_s += elapsed_s * station.sequences

    def _ends_per_s(self) -> list[float]:
        """Return how many sequences of each station end in a second."""
        rates = [station.ends_per_s(station.sequences) for station in self.stations]
        if not self._shares_machines:
            return rates
        busy = max(sum(station.sequences > 0 for station in self.stations), 1)
        return [rate / busy for rate in rates]

    def arrive(self, kind: Hashable) -> None:
        """Admit a request, or let it wait."""
        free_stations: dict[TierName, _Station] = {}
        for station in self.stations:
            if station.sequences < station.slots:
                tier = station.engine.tier
                rival = free_stations.get(tier)
                if rival is None or station.busiest_sequences < rival.busiest_sequences:
                    free_stations[tier] = station
        if not free_stations:
            self.queue.append(kind)
        elif len(free_stations) == 1:
            self._admit(kind, *free_stations.values())
        else:
            self._admit(kind, self._choose(kind, free_stations))

    def _admit(self, kind: Hashable, station: _Station) -> None:
        station.sequences += 1
        if not self.counts_requests:
            return
        station.admitted += 1
        steps = STEPS_BESIDE_OTHERS if station.sequences > 1 else STEPS_ALONE
        station.first_steps_ms += station.step_ms(station.busiest_sequences) * steps
        flow = kind, station.engine.tier
        self.requests_by_flow[flow] = self.requests_by_flow.get(flow, 0.0) + 1

    def _end_at(self, position: float, ends_per_s: Sequence[float]) -> None:
        """Let a sequence end; the first request that waits is admitted.

        Args:
            position: Drawn between 0 and the sum of all rates.
            ends_per_s: The rate of each station. If rounding puts the position above their sum, nothing ends.
        """
        upper = 0.0
        for station, rate in zip(self.stations, ends_per_s, strict=True):
            upper += rate
            if position < upper:
                station.sequences -= 1
                if self.queue:
                    self.arrive(self.queue.popleft())
                return

    def _choose(
        self, kind: Hashable, free_stations: Mapping[TierName, _Station]
    ) -> _Station:
        """Choose as ``router.policy.decide`` does."""
        free_tiers = [tier for tier in self._tiers if tier in free_stations]
        losses = {tier: self._loss[tier][kind] for tier in free_tiers}
        acceptable = [
            tier for tier in free_tiers if losses[tier] <= self._most_allowed_loss
        ]
        if not acceptable:
            return free_stations[free_tiers[-1]]
        taken_slots = sum(station.sequences for station in self._highest_stations)
        allowed_loss = self._allowed_loss(taken_slots)
        candidates = [tier for tier in acceptable if losses[tier] <= allowed_loss]
        if not candidates:
            candidates = [min(acceptable, key=losses.__getitem__)]
        stations = [free_stations[tier] for tier in candidates]
        return self._least_engine_time(self._soonest(stations))

    def _soonest(self, stations: Sequence[_Station]) -> Sequence[_Station]:
        """Return the stations that finish so soon that nobody notices a difference, or all if only engine time counts."""
        if self._latest_unnoticed_ms is None:
            return stations
        finishes_ms = [station.finish_of_next_ms for station in stations]
        latest_ms = self._latest_unnoticed_ms(min(finishes_ms))
        with_finishes = zip(stations, finishes_ms, strict=True)
        return [
            station for station, finish_ms in with_finishes if finish_ms <= latest_ms
        ]

    def _least_engine_time(self, stations: Sequence[_Station]) -> _Station:
        """Return the station that needs the least engine time for one more request.

        Like the router it takes all sequences of the fleet, if a batch holds them, for those that share a step.
        """
        sequences = sum(station.sequences for station in self.stations) + 1
        return min(
            stations,
            key=lambda station: station.engine_ms(
                min(sequences, station.engine.plan.batch)
            ),
        )


def _weights_of_states(station: _Station, arrivals_per_s: float) -> list[float]:
    """Return how often a station has each number of sequences up to its slots, if no request waits; the sum is not 1."""
    logs = [0.0]
    for sequences in range(1, station.slots + 1):
        growth = arrivals_per_s / station.ends_per_s(sequences)
        logs.append(logs[-1] + math.log(growth))
    # The exponentials of larger logarithms would overflow.
    largest_log = max(logs)
    return [math.exp(log - largest_log) for log in logs]


def _outcome(chain: _Chain, demand: ServingDemand) -> _SimulatedOutcome:
    """Return the shares, and the means of TTFT and TPOT (Little's law), after all arrivals."""
    admitted = sum(station.admitted for station in chain.stations)
    outcome = _SimulatedOutcome()
    for station in chain.stations:
        if station.admitted:
            pace = station.engine.plan.pace
            assert pace is not None
            prefill_ms = pace.prefill_ms_per_token * demand.prompt_tokens
            engine_ms = 1000 * station.sequence_s / station.admitted
            share = station.admitted / admitted
            outcome.ttft_ms += share * _ttft_ms(station, prefill_ms, chain.duration_s)
            outcome.tpot_ms += share * (engine_ms - prefill_ms) / demand.output_tokens
    outcome.ttft_ms += 1000 * chain.waited_s / admitted
    for flow, requests in chain.requests_by_flow.items():
        outcome.share_by_flow[flow] = requests / admitted
    return outcome


def _ttft_ms(station: _Station, prefill_ms: float, duration_s: float) -> float:
    """Return the mean TTFT of a station's requests from their admission on: prompts wait for one another (M/M/1 queue)."""
    prompts_s = prefill_ms / 1000 * station.admitted
    utilization = prompts_s / duration_s / station.count
    utilization = min(utilization, HIGHEST_UTILIZATION)
    first_step_ms = station.first_steps_ms / station.admitted
    return prefill_ms / (1 - utilization) + first_step_ms
