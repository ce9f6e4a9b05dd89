"""Run recorded arrivals through a policy: a discrete-event simulation of the router's queue and of every replica.

A replica computes one prompt at a time, and decodes nothing meanwhile. Then the request waits for its first step, while the
others go on, and decodes in a batch with them. Times are those of the speed model (``tiers.speed``), as far off as the
recording saw at that time; engine time is that of prompts and of decode steps. Whether a replica gets requests, and how many
at once, is as recorded too. A request that finds every tier full waits in the router's queue. One whose replica goes away
continues on the tier that the policy names, where its prompt and what was answered are computed again. Refusals of requests
whose turn is expected too late are not simulated: such a request waits, and is refused when its time is up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs
from recording import NOT_SERVED, Result, is_met, mean_loss

from router.policy.decide import decide, successors
from router.policy.decision import Refusal
from router.policy.profiles import ProfileError
from tiers.choice import Demand, choose_replica
from tiers.snapshot import FleetSnapshot, Pause, ReplicaState, TierSnapshot, Trends
from tiers.spec import ReplicaStatus
from tiers.speed import (
    ALWAYS_MS,
    BUSY_MEMORY_S,
    MAX_BESIDE,
    PREFILL_MEMORY_MS,
    ReplicaLoad,
    Trend,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from recording import Recording

    from router.policy.decision import PolicyParameters, RoutingQuery
    from router.policy.decision_log import DecisionRecord
    from tiers.spec import TierName, TierSpec
    from tiers.speed import SpeedModel

ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Options:
    """How a router is set whose policy is simulated.

    Attributes:
        max_waiting: ``admission.max_waiting``.
        max_wait_s: ``admission.max_wait_s``, by vLLM's number of the priority.
    """

    max_waiting: int = 256
    max_wait_s: Mapping[int, float] = field(
        default_factory=lambda: {-1: 10.0, 0: 30.0, 1: 120.0}
    )


def simulate(
    recording: Recording,
    table: PolicyParameters | None = None,
    speeds: Mapping[TierName, SpeedModel] | None = None,
    options: Options | None = None,
) -> list[Result]:
    """Run the recorded arrivals through a policy.

    Args:
        recording: Gives arrivals, fleet and answer lengths.
        table: The policy's parameters; None: those that each decision was made by.
        speeds: By tier; a tier without one keeps the speed that was recorded.
        options: None: the defaults.

    Raises:
        ProfileError: No speed is known of a tier that was ready.
    """
    simulated = _Router(recording, table, speeds, options or Options())
    for record in recording.decisions:
        simulated.run_until(record.at * 1000)
        simulated.arrive(record)
    simulated.run_until(math.inf)
    return [request.result() for request in simulated.requests]


@dataclass(slots=True, eq=False)
class _Request:
    """One request in the simulation. Times in milliseconds; token counts of each sequence.

    Attributes:
        output_tokens: That it will have in the end.
        until: When it gives up waiting.
        tier: That serves it; None: it waits, or was refused.
        to_read: Tokens to compute before its next token.
        phase_left: Milliseconds until they are computed; then, until the first step with it.
        tokens_left: Output tokens to come, once those are computed.
    """

    record: DecisionRecord
    output_tokens: float
    came: float
    until: float
    tier: TierName | None = None
    loss: float | None = None
    to_read: float = 0.0
    phase_left: float = 0.0
    tokens_left: float = 0.0
    first: float | None = None
    last: float | None = None
    engine_ms: float = 0.0

    @property
    def query(self) -> RoutingQuery:
        return self.record.query

    def result(self) -> Result:
        if self.tier is None:
            return NOT_SERVED
        ttft = tpot = None
        if self.first is not None and self.last is not None:
            ttft = self.first - self.came
            tpot = (
                (self.last - self.first) / (self.output_tokens - 1)
                if self.output_tokens > 1
                else None
            )
        return Result(
            self.tier,
            ttft,
            tpot,
            self.loss,
            self.engine_ms,
            met=is_met(self.query, ttft, tpot),
        )


@dataclass(slots=True, eq=False)
class _Replica:
    """One replica in the simulation.

    Attributes:
        seen: What was last recorded of it; None: it is away.
        trends: Whether it is as far off its speed model as was recorded.
        prefilling: Whose prompt is being computed.
        starting: Those that wait for their first step.
    """

    spec: TierSpec
    id: str
    speed: SpeedModel
    trends: bool
    seen: ReplicaState | None = None
    waiting: list[_Request] = field(default_factory=list)
    prefilling: _Request | None = None
    starting: list[_Request] = field(default_factory=list)
    decoding: list[_Request] = field(default_factory=list)
    prefill_rate: float = 0.0
    prefill_at: float = 0.0

    @property
    def ttft_trend(self) -> Trend:
        return (
            self.seen.trends.ttft
            if self.seen and self.trends
            else Trend(0.0, self.speed.ttft_spread**2, 0.0)
        )

    @property
    def tpot_trend(self) -> Trend:
        return (
            self.seen.trends.tpot
            if self.seen and self.trends
            else Trend(0.0, self.speed.tpot_spread**2, 0.0)
        )

    def rate(self, now: float) -> float:
        """Return the recent arrival rate, in prompt tokens a millisecond."""
        return self.prefill_rate * math.exp((self.prefill_at - now) / PREFILL_MEMORY_MS)

    @property
    def unread(self) -> list[_Request]:
        """Return the requests whose prompt is not computed yet."""
        return [*self.waiting, *([self.prefilling] if self.prefilling else [])]

    @property
    def requests(self) -> list[_Request]:
        return [*self.unread, *self.starting, *self.decoding]

    @property
    def sequences(self) -> int:
        return sum(request.query.sequences for request in self.requests)

    @property
    def batch(self) -> int:
        """Return the sequences that are being decoded."""
        return sum(request.query.sequences for request in self.decoding)

    @property
    def step_ms(self) -> float:
        """Return the time in which each sequence gets a token; those beyond the largest batch take turns."""
        batch, most = self.batch, self.spec.max_num_seqs
        return (
            self.speed.step_ms(min(batch, most))
            * max(batch / most, 1.0)
            * math.exp(self.tpot_trend.mean)
        )

    def take(self, request: _Request, now: float) -> None:
        """Take a request, which waits until its prompt is computed."""
        self.prefill_rate = self.rate(now) + request.to_read / PREFILL_MEMORY_MS
        self.prefill_at = now
        self.waiting.append(request)
        self.begin()

    def begin(self) -> None:
        """Begin with the next prompt, if a sequence is free."""
        taken = self.batch + sum(request.query.sequences for request in self.starting)
        if self.prefilling is None and self.waiting and taken < self.spec.max_num_seqs:
            request = self.prefilling = self.waiting.pop(0)
            request.phase_left = (
                self.speed.prefill_ms_per_token
                * request.to_read
                * math.exp(self.ttft_trend.mean)
            )

    def next_event(self) -> float:
        """Return the milliseconds of computing to the next event."""
        if self.prefilling is not None:
            nearest = self.prefilling.phase_left
        elif self.decoding:
            nearest = (
                min(request.tokens_left for request in self.decoding) * self.step_ms
            )
        else:
            nearest = math.inf
        return min([nearest, *(request.phase_left for request in self.starting)])

    def advance(self, own_ms: float, now: float) -> bool:
        """Compute for ``own_ms``; ``now`` is the time at the end. Tell whether a request has ended."""
        before, read = len(self.requests), self.prefilling
        if read is None:
            self._decode(own_ms, now)
        self._start(own_ms, now)
        if read is not None:
            read.engine_ms += own_ms
            read.phase_left -= own_ms
            if read.phase_left <= ROUNDING:
                self._read(read)
        ended = len(self.requests) < before
        self.begin()
        return ended

    def _decode(self, own_ms: float, now: float) -> None:
        if self.decoding:
            tokens, batch = own_ms / self.step_ms, self.batch
            for request in self.decoding:
                request.tokens_left -= tokens
                request.engine_ms += own_ms * request.query.sequences / batch
                request.last = now
            self.decoding = [
                request for request in self.decoding if request.tokens_left > ROUNDING
            ]

    def _start(self, own_ms: float, now: float) -> None:
        """Let those wait that wait for their first step; who has it goes on to decode."""
        waiting, self.starting = self.starting, []
        for request in waiting:
            request.phase_left -= own_ms
            if request.phase_left > ROUNDING:
                self.starting.append(request)
                continue
            request.first = now if request.first is None else request.first
            request.last = now
            request.tokens_left -= 1
            if request.tokens_left > ROUNDING:
                self.decoding.append(request)

    def _read(self, request: _Request) -> None:
        """Let a request wait for its first step: its prompt is computed."""
        speed, others, self.prefilling = self.speed, self.batch, None
        request.phase_left = speed.ttft_base_ms
        if others:
            request.phase_left += speed.ttft_steps * speed.step_ms(
                min(others, self.spec.max_num_seqs)
            )
        request.phase_left *= math.exp(self.ttft_trend.mean)
        self.starting.append(request)

    def leave(self) -> list[_Request]:
        """Give up all requests; each has to compute what it was answered as well before it goes on."""
        left, self.prefilling = self.requests, None
        self.waiting, self.starting, self.decoding = [], [], []
        for request in left:
            request.to_read = (
                request.query.tokens_to_read
                + request.output_tokens
                - request.tokens_left
            )
        return left

    def load(self, now: float) -> ReplicaLoad:
        """Return the load, without the neighbours'."""
        prompts = sum(round(request.to_read) for request in self.unread)
        output = sum(
            request.query.max_tokens * request.query.sequences
            for request in self.unread
        )
        for request in (*self.starting, *self.decoding):
            to_come = (
                request.query.max_tokens - request.output_tokens + request.tokens_left
            )
            output += int(to_come * request.query.sequences)
        return ReplicaLoad(self.sequences, prompts, output, 0.0, self.rate(now))

    def state(self, load: ReplicaLoad) -> ReplicaState:
        """Return the replica as a policy sees it."""
        return ReplicaState(
            id=self.id,
            url="",
            status=ReplicaStatus.READY,
            in_flight=len(self.requests),
            slots=self.sequences,
            prompt_tokens=load.prompt_tokens,
            load=load,
            speed=self.speed,
            trends=Trends(self.ttft_trend, self.tpot_trend),
            breaker=Pause(admits=self.seen.breaker.admits if self.seen else True),
            limit=self.seen.limit if self.seen else 1 << 30,
        )


class _Router:
    """The router's queue, and all replicas that were ever ready, at one simulated time."""

    def __init__(
        self,
        recording: Recording,
        table: PolicyParameters | None,
        speeds: Mapping[TierName, SpeedModel] | None,
        options: Options,
    ) -> None:
        self._recording, self._table, self._options = recording, table, options
        self._fleet = recording.decisions[0].fleet
        self._now = recording.decisions[0].at * 1000
        self._queue: list[_Request] = []
        self.requests: list[_Request] = []
        self._replicas = _replicas(recording, speeds or {})
        # replicas, in the mean of about the last ``BUSY_MEMORY_S``
        self._busy_lately = 0.0

    def arrive(self, record: DecisionRecord) -> None:
        """Take a request into the queue, and admit whom there is a slot for."""
        self._observe(record.fleet)
        query, outcome = record.query, self._recording.outcomes.get(record.request_id)
        if outcome is not None and outcome.output_tokens:
            output = outcome.output_tokens / query.sequences
        else:
            output = max(round(query.max_tokens * record.fleet.output_share), 1)
        longest = self._options.max_wait_s.get(record.priority, 30.0)
        wait_s = (
            longest
            if query.sla.ttft_ms is None
            else min(query.sla.ttft_ms / 1000, longest)
        )
        request = _Request(record, output, self._now, self._now + wait_s * 1000)
        request.to_read, request.tokens_left = query.tokens_to_read, output
        self.requests.append(request)
        self._queue.append(request)
        self._dispatch()
        if len(self._queue) > self._options.max_waiting:
            self._queue.remove(max(self._queue, key=_order))

    def run_until(self, end: float) -> None:
        """Let all replicas compute up to a time in milliseconds; those of one machine slow one another."""
        while True:
            slowed = [
                1 + r.speed.contention * self._neighbours(r) for r in self._replicas
            ]
            step = min(
                (
                    r.next_event() * s
                    for r, s in zip(self._replicas, slowed, strict=True)
                ),
                default=math.inf,
            )
            given_up = min((request.until for request in self._queue), default=math.inf)
            step = max(min(step, end - self._now, given_up - self._now), 0.0)
            if not math.isfinite(step):
                return
            self._now += step
            busy = sum(r.sequences > 0 for r in self._replicas)
            self._busy_lately = busy + (self._busy_lately - busy) * math.exp(
                -step / 1000 / BUSY_MEMORY_S
            )
            ended = [
                r.advance(step / s, self._now)
                for r, s in zip(self._replicas, slowed, strict=True)
            ]
            self._queue = [
                request for request in self._queue if request.until > self._now
            ]
            if any(ended):
                self._dispatch()
            if self._now >= end:
                return

    def _dispatch(self) -> None:
        """Admit those that there is a slot for, in order; refuse those that no tier can serve."""
        fleet, full = self._snapshot(), set[object]()
        for request in sorted(self._queue, key=_order):
            query = request.query
            alike = (
                query.hint,
                query.require,
                query.sla,
                query.allowed,
                query.precisions,
                query.only,
            )
            if alike in full:
                continue  # none of the tiers that it may take has a slot
            table = self._policy(request.record)
            decision = decide(query, fleet, table)
            if decision.tier is not None:
                self._queue.remove(request)
                request.loss = mean_loss(table, decision.tier, query)
                self._give(request, decision.tier)
                fleet = self._snapshot()
            elif decision.refusal is not Refusal.AT_CAPACITY:
                self._queue.remove(request)
            else:
                full.add(alike)
                if not any(_is_free(tier) for tier in fleet.tiers):
                    return

    def _policy(self, record: DecisionRecord) -> PolicyParameters:
        return (
            self._recording.tables[record.policy]
            if self._table is None
            else self._table
        )

    def _give(self, request: _Request, tier: TierName) -> None:
        """Give a request to the least loaded replica of a tier."""
        request.tier = tier
        there = [
            r for r in self._replicas if r.spec.name is tier and r.seen is not None
        ]
        min(there, key=lambda replica: replica.sequences).take(request, self._now)

    def _observe(self, fleet: FleetSnapshot) -> None:
        """Take in what was recorded of the fleet; requests of replicas that are gone continue elsewhere."""
        self._fleet = fleet
        there = {replica.id: replica for tier in fleet.tiers for replica in tier.ready}
        for replica in self._replicas:
            replica.seen = there.get(replica.id)
        for replica in self._replicas:
            if replica.seen is None:
                self._continue(replica.leave())

    def _continue(self, requests: Iterable[_Request]) -> None:
        for request in requests:
            assert request.tier is not None
            table = self._policy(request.record)
            others = successors(request.tier, request.query, self._snapshot(), table)
            alike = any(
                r.spec.name is request.tier and r.seen is not None
                for r in self._replicas
            )
            if alike or others:
                self._give(request, request.tier if alike else others[0])
            else:
                request.tier = None  # it fails

    def _snapshot(self) -> FleetSnapshot:
        there = self._there()
        tiers = []
        for tier in self._fleet.tiers:
            states = tuple(state for name, state in there if name is tier.spec.name)
            outstanding = tuple(
                state.prompt_tokens + state.load.output_tokens for state in states
            )
            tiers.append(TierSnapshot(tier.spec, states, outstanding, tier.preparing))
        return FleetSnapshot(
            tuple(tiers),
            self._fleet.template,
            self._fleet.output_share,
            self._fleet.long_prompt_tokens,
        )

    def _there(self) -> list[tuple[TierName, ReplicaState]]:
        """Return the replicas that are there, each with what its neighbours have left to do, as ``tiers.fleet`` has it."""
        there = [(r, r.load(self._now)) for r in self._replicas if r.seen is not None]
        others, looked_for = max(len(there) - 1, 1), len(there) <= MAX_BESIDE
        left = {
            r.id: r.speed.left_ms(load, r.spec.max_num_seqs, self._fleet.output_share)
            for r, load in there
            if load.sequences
        }
        found = []
        for replica, load in there:
            busy = len(left) - (replica.id in left)
            left_ms, usually = ALWAYS_MS, 0.0
            if looked_for and replica.speed.contention:
                usually = min(self._busy_lately / len(there), 1.0)
                left_ms = (
                    (sum(left.values()) - left.get(replica.id, 0.0)) / busy
                    if busy
                    else ALWAYS_MS
                )
            beside = structs.replace(
                load,
                neighbours=busy / others,
                neighbours_left_ms=left_ms,
                neighbours_usually=usually,
            )
            found.append((replica.spec.name, replica.state(beside)))
        return found

    def _neighbours(self, replica: _Replica) -> float:
        """Return the share of the other replicas that have requests, 0..1."""
        others = [r for r in self._replicas if r is not replica and r.seen is not None]
        return sum(r.sequences > 0 for r in others) / len(others) if others else 0.0


def _replicas(
    recording: Recording, speeds: Mapping[TierName, SpeedModel]
) -> list[_Replica]:
    """Return all replicas that were ever ready, with their last known speeds."""
    known: dict[str, tuple[TierSpec, SpeedModel | None]] = {}
    for record in recording.decisions:
        for tier in record.fleet.tiers:
            for replica in tier.ready:
                before = known.get(replica.id)
                speed = (
                    speeds.get(tier.spec.name)
                    or replica.speed
                    or (before[1] if before else None)
                )
                known[replica.id] = tier.spec, speed
    found = []
    for name, (spec, speed) in known.items():
        if speed is None:
            raise ProfileError(
                f"no speed of {spec.name} was recorded: give a latency profile"
            )
        found.append(_Replica(spec, name, speed, trends=spec.name not in speeds))
    return found


def _order(request: _Request) -> tuple[int, float]:
    """Return a request's place in the queue: by priority, then by age."""
    return request.record.priority, request.came


def _is_free(tier: TierSnapshot) -> bool:
    return choose_replica(tier, Demand(1, 1), None) is not None
