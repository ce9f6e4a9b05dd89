"""Make recorded decisions again, and run recorded arrivals through another policy.

Decisions are made again from the log alone; a difference means that the log or the code has changed. Another policy changes
the load that later decisions see, so its effects are simulated: a discrete-event simulation of every replica by the speed
model (``tiers.speed``), in which a prompt is computed alone, then decoded in a batch with the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from router.policy.decide import decide
from router.policy.decision_log import DecisionRecord, OutcomeRecord, PolicyRecord, read_log
from router.policy.profiles import ProfileError, percentile
from tiers.snapshot import FleetSnapshot, ReplicaSnapshot, TierSnapshot
from tiers.spec import ReplicaState, TierName, TierSpec
from tiers.speed import PREFILL_MEMORY_MS, Load, SpeedModel, Trend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from router.policy.decision import PolicyParameters, Query


@dataclass(frozen=True, slots=True)
class Recording:
    """A decision log: parameters by digest, decisions in the order in which they were made, outcomes by request id."""

    tables: Mapping[str, PolicyParameters]
    decisions: tuple[DecisionRecord, ...]
    outcomes: Mapping[str, OutcomeRecord]


@dataclass(frozen=True, slots=True)
class Result:
    """How one request ended. Times in milliseconds; None: it was refused, or it is not known.

    Attributes:
        loss: Expected share of tokens that differ from the highest precision's, 0..1.
        engine_ms: Engine time that it took, by the speed model.
        met: Whether it met its bounds on TTFT and TPOT.
    """

    tier: TierName | None
    ttft_ms: float | None
    tpot_ms: float | None
    loss: float | None
    engine_ms: float | None
    met: bool


_NOT_SERVED = Result(None, None, None, None, None, met=False)


@dataclass(frozen=True, slots=True)
class Summary:
    """How all requests ended. Shares and ``met`` 0..1; times in milliseconds, ``engine_s`` in seconds; None: not known."""

    requests: int
    refused: int
    shares: Mapping[TierName, float]
    met: float
    mean_loss: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    tpot_p95: float | None
    engine_s: float | None


def read_recording(path: Path) -> Recording:
    """Read a decision log.

    Raises:
        ProfileError: It cannot be read, or holds no decisions.
    """
    tables: dict[str, PolicyParameters] = {}
    decisions: list[DecisionRecord] = []
    outcomes: dict[str, OutcomeRecord] = {}
    for record in read_log(path):
        match record:
            case PolicyRecord():
                tables[record.id] = record.table
            case DecisionRecord():
                decisions.append(record)
            case OutcomeRecord():
                outcomes[record.request_id] = record
    if not decisions:
        raise ProfileError(f"{path} holds no decisions")
    return Recording(tables, tuple(decisions), outcomes)


def differing(recording: Recording) -> list[DecisionRecord]:
    """Make every decision again from the log, and return those that differ.

    Raises:
        ProfileError: A decision's policy is not in the log.
    """
    found = []
    for record in recording.decisions:
        table = recording.tables.get(record.policy)
        if table is None:
            raise ProfileError(f"the policy {record.policy} of request {record.request_id} is not in the log")
        again = decide(record.query, record.fleet, table)
        if (again.tier, again.refusal) != (record.tier, record.refusal):
            found.append(record)
    return found


def seen(recording: Recording) -> list[Result]:
    """Return how the recorded requests ended, as far as the log tells."""
    results = []
    for record in recording.decisions:
        outcome = recording.outcomes.get(record.request_id)
        if outcome is None or outcome.error is not None:  # a decision without a tier may be of a request that waited
            results.append(_NOT_SERVED)
            continue
        loss = _mean_loss(recording.tables[record.policy], outcome.tier, record.query)
        ttft_ms, tpot_ms = outcome.ttft_ms, outcome.tpot_ms
        results.append(Result(outcome.tier, ttft_ms, tpot_ms, loss, None, met=_met(record.query, ttft_ms, tpot_ms)))
    return results


def _mean_loss(table: PolicyParameters, tier: TierName, query: Query) -> float | None:
    loss = table.loss(tier, query.features)
    return None if loss is None else loss.mean


def summarise(results: Sequence[Result]) -> Summary:
    """Return shares, means and percentiles of all requests."""
    served = [r for r in results if r.tier is not None]
    ttfts = [r.ttft_ms for r in served if r.ttft_ms is not None]
    tpots = [r.tpot_ms for r in served if r.tpot_ms is not None]
    losses = [r.loss for r in served if r.loss is not None]
    engine = [r.engine_ms for r in served if r.engine_ms is not None]
    return Summary(
        requests=len(results),
        refused=len(results) - len(served),
        shares={tier: sum(r.tier is tier for r in served) / max(len(served), 1) for tier in TierName},
        met=sum(r.met for r in results) / max(len(results), 1),
        mean_loss=fmean(losses) if losses else None,
        ttft_p50=percentile(ttfts, 0.5) if ttfts else None,
        ttft_p95=percentile(ttfts, 0.95) if ttfts else None,
        tpot_p50=percentile(tpots, 0.5) if tpots else None,
        tpot_p95=percentile(tpots, 0.95) if tpots else None,
        engine_s=sum(engine) / 1000 if engine else None,
    )


def _met(query: Query, ttft_ms: float | None, tpot_ms: float | None) -> bool:
    sla = query.sla
    late = sla.ttft_ms is not None and ttft_ms is not None and ttft_ms > sla.ttft_ms
    slow = sla.tpot_ms is not None and tpot_ms is not None and tpot_ms > sla.tpot_ms
    return not late and not slow


def simulate(
    recording: Recording, table: PolicyParameters | None = None, speeds: Mapping[TierName, SpeedModel] | None = None
) -> list[Result]:
    """Run the recorded arrivals through a policy, on replicas that behave as the speed model says.

    Args:
        recording: Gives arrivals, fleet and answer lengths.
        table: The policy's parameters; None: those that each decision was made by.
        speeds: By tier; a tier without one keeps the speed that was recorded.

    Raises:
        ProfileError: No speed is known of a tier that was ready.
    """
    world = _World(recording, speeds)
    results: list[Result | _Job] = []
    for record in recording.decisions:
        world.run_until(record.at * 1000)
        policy = table or recording.tables[record.policy]
        decision = decide(record.query, world.snapshot(record.fleet), policy)
        if decision.tier is None:
            results.append(_NOT_SERVED)
        else:
            results.append(world.take(decision.tier, record, _mean_loss(policy, decision.tier, record.query)))
    world.run_until(math.inf)
    return [r if isinstance(r, Result) else r.result() for r in results]


@dataclass(slots=True, eq=False)
class _Job:
    """One request in the simulation. Times in milliseconds; ``output_tokens`` and ``tokens_left`` are of each sequence."""

    query: Query
    tier: TierName
    output_tokens: float
    loss: float | None
    came: float
    prefill_left: float = 0.0
    tokens_left: float = 0.0
    first: float | None = None
    last: float | None = None
    engine_ms: float = 0.0

    def result(self) -> Result:
        ttft = tpot = None
        if self.first is not None and self.last is not None:
            ttft = self.first - self.came
            tpot = (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None
        return Result(self.tier, ttft, tpot, self.loss, self.engine_ms, met=_met(self.query, ttft, tpot))


@dataclass(slots=True, eq=False)
class _Replica:
    """One replica in the simulation: computes prompts one after the other, and decodes while none is left."""

    spec: TierSpec
    id: str
    speed: SpeedModel
    waiting: list[_Job] = field(default_factory=list)
    prefilling: _Job | None = None
    decoding: list[_Job] = field(default_factory=list)
    prefill_rate: float = 0.0
    prefill_at: float = 0.0

    def rate(self, now: float) -> float:
        """Return the recent arrival rate, in prompt tokens a millisecond."""
        return self.prefill_rate * math.exp((self.prefill_at - now) / PREFILL_MEMORY_MS)

    @property
    def unread(self) -> list[_Job]:
        """Return the jobs whose prompt is not computed yet."""
        return [*self.waiting, *([self.prefilling] if self.prefilling else [])]

    @property
    def sequences(self) -> int:
        return sum(job.query.sequences for job in self.unread) + self.batch

    @property
    def batch(self) -> int:
        """Return the sequences that are being decoded."""
        return sum(job.query.sequences for job in self.decoding)

    @property
    def step_ms(self) -> float:
        """Return the time in which each sequence gets a token; those beyond the largest batch take turns."""
        batch, most = self.batch, self.spec.max_num_seqs
        return self.speed.step_ms(min(batch, most)) * max(batch / most, 1.0)

    def begin(self) -> None:
        """Begin with the next prompt, if a sequence is free."""
        speed, others = self.speed, self.batch
        if self.prefilling is None and self.waiting and others < self.spec.max_num_seqs:
            job = self.prefilling = self.waiting.pop(0)
            job.prefill_left = speed.ttft_base_ms + speed.prefill_ms_per_token * job.query.tokens_to_read
            if others:
                job.prefill_left += speed.ttft_steps * speed.step_ms(others)

    def next_event(self) -> float:
        """Return the milliseconds of computing to the next event."""
        if self.prefilling is not None:
            return self.prefilling.prefill_left
        if self.decoding:
            return min(job.tokens_left for job in self.decoding) * self.step_ms
        return math.inf

    def advance(self, own_ms: float, now: float) -> None:
        """Compute for ``own_ms``; ``now`` is the time at the end."""
        if self.prefilling is not None:
            job = self.prefilling
            job.prefill_left -= own_ms
            job.engine_ms += own_ms
            if job.prefill_left <= 1e-6:  # noqa: PLR2004  rounding
                job.first = job.last = now
                job.tokens_left = job.output_tokens - 1
                self.prefilling = None
                if job.tokens_left > 0:
                    self.decoding.append(job)
        elif self.decoding:
            tokens, batch = own_ms / self.step_ms, self.batch
            for job in self.decoding:
                job.tokens_left -= tokens
                job.engine_ms += own_ms * job.query.sequences / batch
                job.last = now
            self.decoding = [job for job in self.decoding if job.tokens_left > 1e-6]  # noqa: PLR2004
        self.begin()


class _World:
    """All replicas that were ever ready, with their last known speeds, and the simulated time."""

    def __init__(self, recording: Recording, speeds: Mapping[TierName, SpeedModel] | None) -> None:
        self._now = recording.decisions[0].at * 1000
        self._outcomes = recording.outcomes
        known: dict[str, tuple[TierSpec, SpeedModel | None]] = {}
        for record in recording.decisions:
            for tier in record.fleet.tiers:
                for replica in tier.ready:
                    before = known.get(replica.id)
                    speed = (speeds or {}).get(tier.spec.name) or replica.speed or (before[1] if before else None)
                    known[replica.id] = tier.spec, speed
        self.replicas: list[_Replica] = []
        for name, (spec, speed) in known.items():
            if speed is None:
                raise ProfileError(f"no speed of {spec.name} was recorded: give a latency profile")
            self.replicas.append(_Replica(spec, name, speed))

    def run_until(self, end: float) -> None:
        """Let all replicas compute up to a time in milliseconds; those of one machine slow one another."""
        while True:
            slowed = {id(r): 1 + r.speed.contention * self._neighbours(r) for r in self.replicas}
            step = min((r.next_event() * slowed[id(r)] for r in self.replicas), default=math.inf)
            step = min(step, end - self._now)
            if not math.isfinite(step):
                return
            self._now += step
            for replica in self.replicas:
                replica.advance(step / slowed[id(replica)], self._now)
            if self._now >= end:
                return

    def take(self, tier: TierName, record: DecisionRecord, loss: float | None) -> _Job:
        """Give a request to the tier's least loaded replica."""
        outcome, query = self._outcomes.get(record.request_id), record.query
        if outcome is not None and outcome.output_tokens:
            output = outcome.output_tokens / query.sequences
        else:
            output = max(round(query.max_tokens * record.fleet.output_share), 1)
        job = _Job(query, tier, output, loss, self._now)
        replica = min((r for r in self.replicas if r.spec.name is tier), key=lambda r: r.sequences)
        replica.prefill_rate = replica.rate(self._now) + query.tokens_to_read / PREFILL_MEMORY_MS
        replica.prefill_at = self._now
        replica.waiting.append(job)
        replica.begin()
        return job

    def snapshot(self, recorded: FleetSnapshot) -> FleetSnapshot:
        """Return the simulated fleet as a policy sees it."""
        tiers = tuple(
            TierSnapshot(t.spec, tuple(self._replica(r) for r in self.replicas if r.spec.name is t.spec.name))
            for t in recorded.tiers
        )
        return FleetSnapshot(tiers, recorded.template, recorded.output_share)

    def _replica(self, replica: _Replica) -> ReplicaSnapshot:
        speed, decoding, unread = replica.speed, replica.decoding, replica.unread
        prompts = sum(job.query.tokens_to_read for job in unread)
        output = sum(job.query.max_tokens * job.query.sequences for job in unread)
        output += int(sum((j.query.max_tokens - j.output_tokens + j.tokens_left) * j.query.sequences for j in decoding))
        return ReplicaSnapshot(
            id=replica.id,
            url="",
            pid=None,
            state=ReplicaState.READY,
            detail=None,
            in_flight=len(unread) + len(decoding),
            prompt_tokens_outstanding=prompts,
            output_tokens_outstanding=output,
            served=0,
            failed=0,
            load=Load(replica.sequences, prompts, output, self._neighbours(replica), replica.rate(self._now)),
            speed=speed,
            ttft_trend=Trend(0.0, speed.ttft_spread**2, 0.0),
            tpot_trend=Trend(0.0, speed.tpot_spread**2, 0.0),
            places=replica.sequences,
        )

    def _neighbours(self, replica: _Replica) -> float:
        others = len(self.replicas) - 1
        return sum(r.sequences > 0 for r in self.replicas if r is not replica) / others if others else 0.0
