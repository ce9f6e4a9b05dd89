"""The fleet: all replicas, and the leases that requests hold on them.

One event loop owns a fleet. Nothing here awaits, so every change is atomic. A lease is released exactly once, however its
request ends. Its counters are the router's own view of load: exact, while the engines' gauges lag by seconds.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from tiers.preparing import Preparations
from tiers.replica import FleetOptions, Replica, Share
from tiers.snapshot import FleetSnapshot, TemplateTokens, TierSnapshot, fits, has_slots
from tiers.spec import ReplicaState, TierName, TierSpec
from tiers.speed import Seen, SpeedModel, Times

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

OUTPUT_MEMORY = 0.95  # weight of the past in ``Fleet.output_share``: about the last twenty answers


class Demand(NamedTuple):
    """What a request needs of a replica.

    Attributes:
        prompt_tokens: Of all its prompts, with the chat template.
        max_tokens: Most output tokens of each sequence.
        sequences: Answers computed at the same time: prompts times choices. Choices share their prompt.
    """

    prompt_tokens: int
    max_tokens: int
    sequences: int = 1


@dataclass(slots=True, eq=False)
class Lease:
    """One request's hold on one replica. Use it as a context manager, or call ``release`` where the request ends.

    Attributes:
        predicted: Times that the speed model predicted at the start; None: the speed was unknown.
        sequences: Of the request: the slots that it takes.
    """

    replica: Replica
    predicted: Times | None
    sequences: int
    _fleet: Fleet
    _prompt_tokens: int
    _output_tokens: int
    _asked_tokens: int
    _kv_tokens: int
    _slots_taken: int  # on the replica, by all routers
    _unqueued_ms: float | None
    _probe: int
    _seen: Seen
    _begun: tuple[float, float, int] | None = None  # time of the first token, and the replica's work then
    _judged: bool = False
    _released: bool = False
    _generated: int = 0

    def first_token(self, ttft_ms: float | None = None) -> None:
        """Note that the prompt is computed: its tokens are no longer outstanding.

        Args:
            ttft_ms: Time to the first token, to learn from; None: nothing is learned. Nothing is learned from a request
                of several sequences either: its first token is the first of any.
        """
        replica, speed, now = self.replica, self.replica.speed, time.monotonic()
        replica.progressed(now)
        replica.prompt_tokens -= self._prompt_tokens
        self._prompt_tokens = 0
        self._answered()
        if ttft_ms is None or self.sequences > 1:
            return
        if replica.learns:
            self._seen, self._begun = self._seen._replace(ttft_ms=ttft_ms), (now, *replica.work(now))
        if self._unqueued_ms is not None:
            expected_ms = self._unqueued_ms * math.exp(max(replica.ttft_trend.mean, 0.0))
            replica.limiter.sample(expected_ms, ttft_ms, self._slots_taken)
        if self.predicted is not None and speed is not None:
            replica.ttft_trend = replica.ttft_trend.after(self.predicted.ttft_ms, ttft_ms, now, speed.ttft_spread)

    def produced(self, tokens: int = 1) -> None:
        """Count output tokens that have arrived."""
        if self._released:
            return
        replica = self.replica
        replica._silence_s, replica._silent_from = 0.0, time.monotonic()  # noqa: SLF001  once per token, so not a call
        replica.generated += tokens
        self._generated += tokens
        tokens = min(tokens, self._output_tokens)
        replica.output_tokens -= tokens
        self._output_tokens -= tokens

    def finished(self, tpot_ms: float | None, output_tokens: int = 0) -> None:
        """Note a complete answer.

        Args:
            tpot_ms: Mean time between tokens; None for fewer than two tokens and for answers that were not streamed.
                Ignored for several sequences, which end at different times.
            output_tokens: Of the answer; 0: the engine did not report them.
        """
        replica, speed, now = self.replica, self.replica.speed, time.monotonic()
        replica.served += 1
        replica.generated += max(output_tokens - self._generated, 0)  # of an answer that was not streamed
        replica.progressed(now)
        self._answered()
        if tpot_ms is not None and self.sequences == 1 and self.predicted is not None and speed is not None:
            replica.tpot_trend = replica.tpot_trend.after(self.predicted.tpot_ms, tpot_ms, now, speed.tpot_spread)
        self._note(now, tpot_ms, output_tokens)
        if output_tokens and self._asked_tokens:
            share = min(output_tokens / self._asked_tokens, 1.0)
            self._fleet.output_share += (1 - OUTPUT_MEMORY) * (share - self._fleet.output_share)

    def _note(self, now: float, tpot_ms: float | None, output_tokens: int) -> None:
        """Note the answer's times and the replica's work meanwhile, if the replica's speed is learned from answers."""
        replica = self.replica
        if self._begun is None or not replica.learns:  # several sequences never begin
            return
        seen, (began, sequence_s, prompts) = self._seen, self._begun
        if tpot_ms is not None and tpot_ms > 0 and now > began:
            batch, prefilled = replica.work(now)
            seen = seen._replace(
                batch=max((batch - sequence_s) / (now - began), 1.0),
                prefilled=(prefilled - prompts) / max(output_tokens - 1, 1),
                tpot_ms=tpot_ms,
            )
        replica.note_answer(seen)

    def failed(self, error: str) -> None:
        """Count a failed attempt, by its kind of error."""
        self.replica.failed += 1
        self._fleet.failures[self.replica.spec.name, error] += 1
        self.replica.limiter.failed()
        self._judged = True
        self.replica.breaker.failed(time.monotonic(), probe=self._probe)

    def _answered(self) -> None:
        if not self._judged:
            self._judged = True
            self.replica.breaker.succeeded(probe=self._probe)

    def release(self) -> None:
        """Free the slots. Only the first call counts."""
        if self._released:
            return
        self._released = True
        self.replica.took(-1, time.monotonic(), self.sequences)
        self.replica.prompt_tokens -= self._prompt_tokens
        self._prompt_tokens = 0  # a late first token must not count down again
        self.replica.output_tokens -= self._output_tokens
        self.replica.kv_tokens_held -= self._kv_tokens
        if not self._judged:
            self.replica.breaker.given_up(probe=self._probe)
        self._fleet.on_capacity()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


@dataclass(slots=True)
class Fleet:
    """All replicas of all tiers.

    Attributes:
        output_share: Recent output tokens over those that requests allowed, 0..1.
        speeds: By tier, where they were profiled under load.
        machine: Name of the machine that the router, and engines started by it, run on.
        options: When replicas get fewer requests, or none.
        on_capacity: Called when slots may have become free.
        failures: Failed attempts, by tier and kind of error.
        restarts: Automatic restarts of engines, by tier.
        first_share: This router's share of a replica that is added; None: all of it.
        measuring: Lock for speed measurements: two at a time would measure each other.
        preparations: What tiers need before they serve for the first time.
    """

    specs: tuple[TierSpec, ...]
    replicas: list[Replica] = field(default_factory=list)
    template: TemplateTokens = field(default_factory=TemplateTokens)
    output_share: float = 1.0
    speeds: Mapping[TierName, SpeedModel] = field(default_factory=dict)
    machine: str = ""
    options: FleetOptions = field(default_factory=FleetOptions)
    on_capacity: Callable[[], None] = field(default=lambda: None)
    failures: Counter[tuple[TierName, str]] = field(default_factory=Counter)
    restarts: Counter[TierName] = field(default_factory=Counter)
    first_share: Share | None = None
    measuring: asyncio.Lock = field(default_factory=asyncio.Lock)
    preparations: Preparations = field(default_factory=Preparations)

    def add(self, replica: Replica) -> Replica:
        """Add a replica. It gets requests once it is marked ready."""
        replica.adopt(self.options)
        replica.share = self.first_share
        self.replicas.append(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """Remove a replica. Its leases end as usual."""
        self.replicas.remove(replica)

    def configure(self, spec: TierSpec) -> None:
        """Replace a tier's configuration, for example when its checkpoint is finished."""
        self.specs = tuple(spec if each.name is spec.name else each for each in self.specs)

    def spec(self, tier: TierName) -> TierSpec:
        """Return one tier's configuration.

        Raises:
            KeyError: The fleet has no such tier.
        """
        for spec in self.specs:
            if spec.name is tier:
                return spec
        raise KeyError(tier)

    def lease(
        self,
        tier: TierName,
        *,
        prompt_tokens: int,
        max_tokens: int,
        sequences: int = 1,
        exclude: Collection[str] = (),
        over_limit: bool = False,
    ) -> Lease | None:
        """Take a request's slots on the tier's least loaded ready replica; return None if no replica has them.

        Args:
            tier: The tier.
            prompt_tokens: See ``Demand``.
            max_tokens: See ``Demand``.
            sequences: See ``Demand``.
            exclude: Ids of replicas that were tried already.
            over_limit: Ignore the replica's limits: the request was admitted before, on another replica.
        """
        now, output_tokens = time.monotonic(), max_tokens * sequences
        demand = Demand(prompt_tokens, max_tokens, sequences)
        replica = min(self._able((tier,), None if over_limit else demand, exclude, now), key=_load, default=None)
        if replica is None:
            return None
        kv_tokens = self._kv_tokens(demand)
        predicted, unqueued_ms, most = None, None, replica.spec.max_num_seqs
        load = replica.load(now, self._neighbours(replica))
        if replica.speed is not None:
            predicted = replica.speed.times(prompt_tokens, load, most, self.output_share, sequences)
            unqueued_ms = predicted.ttft_ms
            if load.sequences >= most:  # the engine queues the request
                computed = replace(load, sequences=most - 1)
                unqueued_ms = replica.speed.times(prompt_tokens, computed, most, self.output_share).ttft_ms
        probe = replica.breaker.begin(now)
        replica.prompt_sent(prompt_tokens, now)
        replica.took(1, now, sequences)
        replica.prompt_tokens += prompt_tokens
        replica.output_tokens += output_tokens
        replica.kv_tokens_held += kv_tokens
        return Lease(
            replica=replica,
            predicted=predicted,
            sequences=sequences,
            _fleet=self,
            _prompt_tokens=prompt_tokens,
            _output_tokens=output_tokens,
            _asked_tokens=output_tokens,
            _kv_tokens=kv_tokens,
            _slots_taken=replica.slots + replica.others.slots,
            _unqueued_ms=unqueued_ms,
            _probe=probe,
            _seen=Seen(prompt_tokens, load.sequences, load.prompt_tokens, load.neighbours, 0.0),
        )

    def has_capacity(self, tiers: Collection[TierName], demand: Demand, exclude: Collection[str] = ()) -> bool:
        """Tell whether a request could be leased on one of several tiers, apart from the excluded replicas."""
        return next(self._able(tiers, demand, exclude, time.monotonic()), None) is not None

    def is_ready(self, tier: TierName) -> bool:
        """Tell whether a tier has a ready replica."""
        return any(r.spec.name is tier and r.state is ReplicaState.READY for r in self.replicas)

    def nearest(self, tiers: Collection[TierName], demand: Demand, exclude: Collection[str] = ()) -> str | None:
        """Return the id of the replica with free slots that lacks least of what a request needs; None: no replica."""
        tokens, long = self._kv_tokens(demand), self._is_long(demand)

        def lacking(replica: Replica) -> tuple[int, int]:
            slots = replica.slots + demand.sequences - replica.limit
            return max(slots, 0), replica.kv_tokens_held + replica.others.kv_tokens + tokens - replica.kv_tokens

        able = self._able(tiers, None, exclude, time.monotonic())
        partly = [r for r in able if r.slots < r.limit and not (long and r.kv_pressure)]
        return min(partly, key=lacking).id if partly else None

    def _able(
        self, tiers: Collection[TierName], demand: Demand | None, exclude: Collection[str], now: float
    ) -> Iterator[Replica]:
        """Yield the replicas that take a request; without a demand, whatever their limits."""
        for r in self.replicas:
            if r.spec.name not in tiers or r.state is not ReplicaState.READY or r.id in exclude:
                continue
            if r.breaker.admits(now) and (demand is None or self._takes(r, demand)):
                yield r

    def _takes(self, replica: Replica, demand: Demand) -> bool:
        if not has_slots(demand.sequences, replica.slots, replica.limit):
            return False
        if replica.kv_pressure and self._is_long(demand):
            return False
        return fits(self._kv_tokens(demand), replica.kv_tokens_held + replica.others.kv_tokens, replica.kv_tokens)

    def _kv_tokens(self, demand: Demand) -> int:
        return demand.prompt_tokens + math.ceil(self.output_share * demand.max_tokens * demand.sequences)

    def _is_long(self, demand: Demand) -> bool:
        return demand.prompt_tokens > self.options.long_prompt_tokens

    def freed_per_s(self, tier: TierName) -> float:
        """Predict a tier's slots that become free per second; 0 if no replica takes requests."""
        now = time.monotonic()
        return sum(
            r.freed_per_s(now, self._neighbours(r), self.output_share)
            for r in self.replicas
            if r.spec.name is tier and r.state is ReplicaState.READY and r.breaker.admits(now)
        )

    def _neighbours(self, replica: Replica) -> float:
        """Return the share of the other replicas that have requests."""
        others = len(self.replicas) - 1
        return sum(r.sequences > 0 for r in self.replicas if r is not replica) / others if others else 0.0

    def note_template(self, template: TemplateTokens) -> None:
        """Note what an engine's chat template adds to prompts; the larger of each figure counts."""
        self.template = TemplateTokens(*map(max, astuple(self.template), astuple(template)))

    def snapshot(self, reserved: Collection[str] = ()) -> FleetSnapshot:
        """Return a frozen copy of the fleet, in which reserved replicas (by id) have no free slots."""
        now, others = time.monotonic(), max(len(self.replicas) - 1, 1)
        busy = {r.id for r in self.replicas if r.sequences}
        return FleetSnapshot(
            tiers=tuple(
                TierSnapshot(
                    spec,
                    tuple(
                        r.snapshot(now, (len(busy) - (r.id in busy)) / others, reserved=r.id in reserved)
                        for r in self.replicas
                        if r.spec.name is spec.name
                    ),
                    self.preparations.of(spec.name),
                )
                for spec in self.specs
            ),
            template=self.template,
            output_share=self.output_share,
            long_prompt_tokens=self.options.long_prompt_tokens,
        )


def _load(replica: Replica) -> tuple[int, int]:
    return replica.prompt_tokens + replica.output_tokens, replica.sequences
