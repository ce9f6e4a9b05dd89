"""The fleet's state: replicas, the leases that requests hold on them, and frozen snapshots of both.

One event loop owns a fleet. Nothing here awaits, so every change is atomic. A lease is released exactly once, however its
request ends. Its counters are the router's own view of load: exact, while the engines' gauges lag by seconds.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from tiers.breaker import Breaker, BreakerOptions, BreakerState
from tiers.limit import ConcurrencyLimit
from tiers.preparing import Preparations, Preparing
from tiers.spec import ReplicaState, TierName, TierSpec
from tiers.speed import IDLE, PREFILL_MEMORY_MS, STEADY, Load, Seen, SpeedModel, Times, Trend
from tiers.turnover import Turnover

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

OUTPUT_MEMORY = 0.95  # weight of the past in ``Fleet.output_share``: about the last twenty answers
SHORTEST_HOLD_S = 1e-3  # of a slot
UNKNOWN_RELIEF_S = 1.0  # until a slot of a replica of unknown speed is free
FOREIGN_POLLS = 8  # consecutive readings (4 s) that must show other clients' requests, because gauges lag by seconds
KEPT_ANSWERS = 256  # of each replica, to learn its speed from


@dataclass(frozen=True, slots=True)
class Gauges:
    """An engine's own gauges, as last read. They lag by seconds under load.

    Attributes:
        running: Requests that the engine computes.
        waiting: Requests in the engine's queue.
        kv_cache_usage: Used share of the KV cache, 0..1.
        kv_cache_tokens: Size of the KV cache in tokens; None: not reported.
    """

    running: int
    waiting: int
    kv_cache_usage: float
    kv_cache_tokens: int | None = None


class PeerLoad(NamedTuple):
    """Other routers' load on a replica: slots, prompt tokens to compute, output tokens to come, cache tokens."""

    slots: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv_tokens: int = 0


NO_PEERS = PeerLoad()


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


class Share(NamedTuple):
    """The slots that this router may take of a replica shared with other routers, until a monotonic time.

    Afterwards it may take one: the other routers may no longer count it.
    """

    slots: int
    until: float

    def holds(self, now: float) -> int:
        """Return the slots of the share; 0 once it has expired."""
        return self.slots if now < self.until else 0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """When replicas get fewer requests, or none.

    Attributes:
        breaker: When a replica gets no requests after failures.
        adaptive_limit: Whether the limit on requests in flight follows their TTFT.
        kv_open: KV-cache usage, 0..1, from which a replica gets no long prompts.
        kv_close: Usage below which it gets them again.
        long_prompt_tokens: Prompts above this are long.
    """

    breaker: BreakerOptions = field(default_factory=BreakerOptions)
    adaptive_limit: bool = True
    kv_open: float = 0.88
    kv_close: float = 0.792
    long_prompt_tokens: int = 512


class Expectation(NamedTuple):
    """Predicted times of one answer in milliseconds, and the standard deviations of log(seen / predicted)."""

    ttft_ms: float
    tpot_ms: float
    ttft_spread: float
    tpot_spread: float


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One replica at one moment.

    Attributes:
        in_flight: The router's requests on it.
        places: Slots that those take, one for each sequence; None: one each. The decision log has this name.
    """

    id: str
    url: str
    pid: int | None
    state: ReplicaState
    detail: str | None
    in_flight: int
    prompt_tokens_outstanding: int
    output_tokens_outstanding: int
    served: int
    failed: int
    gauges: Gauges | None = None
    load: Load = IDLE
    speed: SpeedModel | None = None
    ttft_trend: Trend = STEADY
    tpot_trend: Trend = STEADY
    breaker: BreakerState = BreakerState.CLOSED
    admits: bool = True
    admits_in_s: float = 0.0
    limit: int = 1 << 30
    kv_tokens: int = 0
    kv_tokens_held: int = 0
    kv_pressure: bool = False
    places: int | None = None

    @property
    def taken(self) -> int:
        """Return the number of taken slots."""
        return self.in_flight if self.places is None else self.places

    def expect(
        self, prompt_tokens: int, max_num_seqs: int, output_share: float, sequences: int = 1
    ) -> Expectation | None:
        """Predict the times of one more request; None while the speed is unknown."""
        if self.speed is None:
            return None
        times = self.speed.times(prompt_tokens, self.load, max_num_seqs, output_share, sequences)
        return Expectation(
            times.ttft_ms * math.exp(self.ttft_trend.mean),
            times.tpot_ms * math.exp(self.tpot_trend.mean),
            math.sqrt(self.ttft_trend.variance),
            math.sqrt(self.tpot_trend.variance),
        )


def has_slots(sequences: int, taken: int, limit: int) -> bool:
    """Tell whether enough slots are free. A request with more sequences than there are slots needs all of them free."""
    return limit > 0 and taken + min(sequences, limit) <= limit


def fits(tokens: float, held: int, size: int) -> bool:
    """Tell whether a KV cache has space for more tokens. A size of 0 is unknown. A lone request always fits."""
    return not size or not held or held + tokens <= size


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier at one moment.

    Attributes:
        preparing: What the tier needs before it serves for the first time; None: nothing.
    """

    spec: TierSpec
    replicas: tuple[ReplicaSnapshot, ...]
    preparing: Preparing | None = None

    @property
    def ready(self) -> tuple[ReplicaSnapshot, ...]:
        """Return the replicas that may get traffic."""
        return tuple(r for r in self.replicas if r.state is ReplicaState.READY)

    @property
    def state(self) -> ReplicaState:
        """Return the state of the tier's best replica; without replicas, whether one is being prepared."""
        if not self.replicas and self.preparing is not None:
            return ReplicaState.PREPARING if self.preparing.failed is None else ReplicaState.FAILED
        return min((r.state for r in self.replicas), key=_BEST_FIRST.index, default=ReplicaState.STOPPED)

    def next(
        self, prompt_tokens: int, output_tokens: float, long_prompt_tokens: int, sequences: int = 1
    ) -> ReplicaSnapshot | None:
        """Return the replica that would serve a request; None if none takes it now.

        Args:
            prompt_tokens: Of its prompts.
            output_tokens: Expected output of all its sequences.
            long_prompt_tokens: A replica whose KV cache is nearly full takes no prompts above this.
            sequences: Of the request.
        """
        most, tokens, long = self.spec.max_in_flight, prompt_tokens + output_tokens, prompt_tokens > long_prompt_tokens
        free = [
            r
            for r in self.replicas
            if r.state is ReplicaState.READY
            and r.admits
            and has_slots(sequences, r.taken, min(r.limit, most))
            and fits(tokens, r.kv_tokens_held, r.kv_tokens)
            and not (long and r.kv_pressure)
        ]
        return free[0] if len(free) == 1 else min(free, key=_snapshot_load, default=None)


_BEST_FIRST = [
    ReplicaState.READY,
    ReplicaState.WARMING,
    ReplicaState.STARTING,
    ReplicaState.PREPARING,
    ReplicaState.DRAINING,
    ReplicaState.UNREACHABLE,
    ReplicaState.FAILED,
    ReplicaState.STOPPED,
]


@dataclass(frozen=True, slots=True)
class TemplateTokens:
    """Tokens that the chat template adds to the texts of a conversation. All tiers share one template.

    Attributes:
        alone: To a single user message.
        with_system: To a system and a user message.
        further_pair: To each further answer and user message.
    """

    alone: int = 0
    with_system: int = 0
    further_pair: int = 0

    def conversation(self, messages: int, *, system: bool) -> int:
        """Return the tokens added to this many messages, a system message included."""
        added, first = (self.with_system, 2) if system else (self.alone, 1)
        return added + -(-self.further_pair * max(messages - first, 0) // 2)


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The fleet at one moment: the input of a routing decision.

    Attributes:
        tiers: By rising precision.
        template: What the chat template adds to prompts.
        output_share: Recent output tokens over those that requests allowed, 0..1.
        long_prompt_tokens: A replica whose KV cache is nearly full takes no prompts above this.
    """

    tiers: tuple[TierSnapshot, ...]
    template: TemplateTokens
    output_share: float = 1.0
    long_prompt_tokens: int = 512

    @property
    def sequences(self) -> int:
        """Return the router's sequences on all replicas together."""
        return sum(replica.taken for tier in self.tiers for replica in tier.replicas)

    def tier(self, name: TierName) -> TierSnapshot:
        """Return one tier.

        Raises:
            KeyError: The fleet has no such tier.
        """
        for tier in self.tiers:
            if tier.spec.name is name:
                return tier
        raise KeyError(name)


@dataclass(slots=True, eq=False)
class Replica:
    """The fleet's own record of a replica.

    Attributes:
        fingerprint: The engine's own, from its answers.
        in_flight: The router's requests on it.
        slots: Slots that those take: one for each sequence.
        share: This router's share of the slots; None: the replica is not shared.
        generated: Output tokens so far.
        seen: The last answers, to learn the speed from.
        noted: Number of answers that ``seen`` was ever given.
    """

    id: str
    spec: TierSpec
    url: str
    api_key: str
    model: str
    takes_priority: bool = True
    fingerprint: str | None = None
    pid: int | None = None
    state: ReplicaState = ReplicaState.STARTING
    detail: str | None = None
    in_flight: int = 0
    slots: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv_tokens_held: int = 0
    kv_tokens: int = 0
    kv_pressure: bool = False
    share: Share | None = None
    served: int = 0
    failed: int = 0
    generated: int = 0
    gauges: Gauges | None = None
    speed: SpeedModel | None = None
    ttft_trend: Trend = STEADY
    tpot_trend: Trend = STEADY
    options: FleetOptions = field(default_factory=FleetOptions)
    breaker: Breaker = field(init=False)
    limiter: ConcurrencyLimit = field(init=False)
    turnover: Turnover = field(default_factory=Turnover)
    seen: deque[Seen] = field(default_factory=lambda: deque(maxlen=KEPT_ANSWERS))
    noted: int = 0
    _others: PeerLoad = NO_PEERS
    _others_until: float = 0.0  # monotonic; later ``_others`` is out of date
    _prefill_rate: float = 0.0  # prompt tokens per millisecond at ``_prefill_at``
    _prefill_at: float = 0.0
    _surplus: deque[int] = field(default_factory=lambda: deque(maxlen=FOREIGN_POLLS))  # of gauges over known requests
    _foreign: int = 0  # sequences of clients that only the gauges show
    _silence_s: float = 0.0  # with requests but without progress, at ``_silent_from``
    _silent_from: float = 0.0
    _sequence_s: float = 0.0  # sequences, integrated over time, at ``_summed_at``
    _summed_at: float = 0.0
    _prompts_sent: int = 0  # prompt tokens

    def __post_init__(self) -> None:
        self.adopt(self.options)

    def adopt(self, options: FleetOptions) -> None:
        """Take the fleet's options."""
        self.options, self.breaker = options, Breaker(options.breaker)
        self.limiter = ConcurrencyLimit.starting(self.spec.max_num_seqs, self.spec.max_in_flight)

    @property
    def whole_limit(self) -> int:
        """Return the number of slots, for all routers together."""
        adapting = self.options.adaptive_limit and self.speed is not None and self.speed.profiled
        return min(self.limiter.value, self.spec.max_in_flight) if adapting else self.spec.max_in_flight

    @property
    def limit(self) -> int:
        """Return the number of slots that this router may take: its share, but at least one."""
        if self.share is None:
            return self.whole_limit
        return min(self.whole_limit, max(self.share.holds(time.monotonic()), 1))

    @property
    def others(self) -> PeerLoad:
        """Return other routers' load on the replica; nothing once their report is out of date."""
        return self._others if time.monotonic() < self._others_until else NO_PEERS

    def note_others(self, others: PeerLoad, until: float) -> None:
        """Note other routers' load, valid until a monotonic time."""
        self._others, self._others_until = others, until

    def __repr__(self) -> str:
        return f"<Replica {self.id} {self.state.value} in_flight={self.in_flight} {self.url}>"

    def mark(self, state: ReplicaState, detail: str | None = None) -> None:
        """Change the state; ``detail`` gives the reason to people."""
        self.state, self.detail = state, detail
        if state not in {ReplicaState.READY, ReplicaState.DRAINING}:
            self.gauges = self.speed = None
            self.kv_pressure, self._others = False, NO_PEERS
            self.turnover = Turnover()
            self.breaker.reset()
            self._surplus.clear()
            self.seen.clear()
            self._foreign = self.noted = 0

    def silence_s(self, now: float) -> float:
        """Return the seconds without progress; times without requests do not count."""
        return self._silence_s + (now - self._silent_from if self.in_flight else 0.0)

    def progressed(self, now: float) -> None:
        """Note that the engine has made progress."""
        self._silence_s, self._silent_from = 0.0, now

    def took(self, change: int, now: float, slots: int = 1) -> None:
        """Count a request that was sent (1) or has ended (-1), and its slots."""
        self._silence_s, self._silent_from = self.silence_s(now), now
        self._sequence_s, self._summed_at = self.work(now)[0], now
        self.turnover.note(now, self.slots, slots if change < 0 else 0)
        self.in_flight += change
        self.slots += change * slots

    @property
    def learns(self) -> bool:
        """Tell whether the speed is learned from answers, for lack of a profile."""
        return self.speed is None or not self.speed.profiled

    def work(self, now: float) -> tuple[float, int]:
        """Return the work so far: sequences integrated over time, in seconds, and prompt tokens."""
        return self._sequence_s + self.sequences * (now - self._summed_at), self._prompts_sent

    def note_answer(self, seen: Seen) -> None:
        """Note an answer, to learn the speed from."""
        self.seen.append(seen)
        self.noted += 1

    def freed_per_s(self, now: float, neighbours: float, output_share: float) -> float:
        """Predict the slots that become free per second, from past hold times, else from the speed model."""
        load, relief_s = self.load(now, neighbours), 0.0
        if self.speed is not None:
            relief_s = self.speed.relief_ms(load, self.spec.max_num_seqs, output_share) / 1000
        predicted_s = max(load.sequences, 1) * (relief_s or UNKNOWN_RELIEF_S)
        return max(self.slots, 1) / max(self.turnover.hold_s(now, self.slots, predicted_s), SHORTEST_HOLD_S)

    @property
    def sequences(self) -> int:
        """Return the sequences on the replica: the routers' own, and those of clients that only the gauges show."""
        return self.slots + self.others.slots + self._foreign

    def note_gauges(self, gauges: Gauges) -> None:
        """Take in the engine's gauges."""
        self.gauges = gauges
        self.kv_tokens = gauges.kv_cache_tokens or 0
        # Two bounds, so that the pressure does not flap.
        bound = self.options.kv_close if self.kv_pressure else self.options.kv_open
        self.kv_pressure = gauges.kv_cache_usage >= bound
        self._surplus.append(gauges.running + gauges.waiting - self.slots - self.others.slots)
        self._foreign = max(min(self._surplus), 0) if len(self._surplus) == FOREIGN_POLLS else 0

    def measured(self, speed: SpeedModel) -> None:
        """Set the speed, and forget the errors of the last one."""
        self.speed = speed
        self.ttft_trend = Trend(0.0, speed.ttft_spread**2, 0.0)
        self.tpot_trend = Trend(0.0, speed.tpot_spread**2, 0.0)

    def load(self, now: float, neighbours: float) -> Load:
        """Return the replica's load."""
        others = self.others
        return Load(
            self.slots + others.slots + self._foreign,
            self.prompt_tokens + others.prompt_tokens,
            self.output_tokens + others.output_tokens,
            neighbours,
            self._faded_prefill_rate(now),
        )

    def _faded_prefill_rate(self, now: float) -> float:
        return self._prefill_rate * math.exp((self._prefill_at - now) * 1000 / PREFILL_MEMORY_MS)

    def prompt_sent(self, prompt_tokens: int, now: float) -> None:
        """Count a prompt into the rate of prompt tokens, an exponentially weighted mean."""
        self._prefill_rate = self._faded_prefill_rate(now) + prompt_tokens / PREFILL_MEMORY_MS
        self._prefill_at = now
        self._prompts_sent += prompt_tokens

    def snapshot(self, now: float, neighbours: float, *, reserved: bool = False) -> ReplicaSnapshot:
        """Return a frozen copy. A reserved replica has no free slots in it."""
        speed, breaker, limit = self.speed, self.breaker, self.limit
        return ReplicaSnapshot(
            id=self.id,
            url=self.url,
            pid=self.pid,
            state=self.state,
            detail=self.detail,
            in_flight=self.in_flight,
            prompt_tokens_outstanding=self.prompt_tokens,
            output_tokens_outstanding=self.output_tokens,
            served=self.served,
            failed=self.failed,
            gauges=self.gauges,
            load=self.load(now, neighbours),
            speed=speed,
            ttft_trend=self.ttft_trend.faded(now, speed.ttft_spread) if speed else STEADY,
            tpot_trend=self.tpot_trend.faded(now, speed.tpot_spread) if speed else STEADY,
            breaker=breaker.state(now),
            admits=breaker.admits(now),
            admits_in_s=breaker.admits_in_s(now),
            limit=min(limit, self.slots) if reserved else limit,
            kv_tokens=self.kv_tokens,
            kv_tokens_held=self.kv_tokens_held + self.others.kv_tokens,
            kv_pressure=self.kv_pressure,
            places=self.slots,
        )


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
    template: TemplateTokens = TemplateTokens()
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


def _snapshot_load(replica: ReplicaSnapshot) -> tuple[int, int]:
    return replica.prompt_tokens_outstanding + replica.output_tokens_outstanding, replica.load.sequences
