"""The fleet's state: replicas, the leases that requests hold on them, and frozen snapshots of it all.

One event loop owns a fleet; nothing here awaits, so every change is whole. A lease is given back exactly once, whichever
way its request ends; the counters it carries are the router's own view of load, which is exact where the engines' gauges
lag by seconds.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from tiers.breaker import Breaker, BreakerOptions, BreakerState
from tiers.limit import ConcurrencyLimit
from tiers.preparing import Preparations, Preparing
from tiers.spec import ReplicaState, TierName, TierSpec
from tiers.speed import IDLE, PREFILL_MEMORY_MS, STEADY, Load, Seen, SpeedModel, Times, Trend
from tiers.turnover import Turnover

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

OUTPUT_MEMORY = 0.95  # weight of the past in the share of the asked output tokens that come: about the last twenty
SHORTEST_HOLD_S = 1e-3  # of a place
UNKNOWN_RELIEF_S = 1.0  # until a place comes free, of a replica whose speed is not known
FOREIGN_POLLS = 8  # readings in a row, 4 s, that must show requests of others: gauges lag by seconds
KEPT_ANSWERS = 256  # of each replica, that its speed is learned from


@dataclass(frozen=True, slots=True)
class Gauges:
    """An engine's own gauges, as last read. They lag by seconds under load.

    Attributes:
        running: Requests being computed.
        waiting: Requests queued in the engine.
        kv_cache_usage: Share of the KV cache in use, 0..1.
        kv_cache_tokens: Tokens that the KV cache holds; None where the engine does not say.
    """

    running: int
    waiting: int
    kv_cache_usage: float
    kv_cache_tokens: int | None = None


class PeerLoad(NamedTuple):
    """What other routers have on a replica: places, prompt tokens to compute, output tokens to come, cache tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv_tokens: int = 0


NO_PEERS = PeerLoad()


class Demand(NamedTuple):
    """What a request takes of a replica.

    Attributes:
        prompt_tokens: Of all its prompts, with the chat template.
        max_tokens: Output tokens of each sequence at most.
        sequences: Answers that are computed at the same time: prompts times choices. Choices share their prompt.
    """

    prompt_tokens: int
    max_tokens: int
    sequences: int = 1


class Share(NamedTuple):
    """What this router may have on a replica that it shares with others: places, and until when by the monotonic clock.

    After that it may have one: whoever tells the routers apart may think that this one has gone.
    """

    places: int
    until: float

    def holds(self, now: float) -> int:
        """Return the places that it stands for."""
        return self.places if now < self.until else 0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """When replicas are spared.

    Attributes:
        breaker: When a replica gets no requests after failures.
        adaptive_limit: Whether the limit on requests in flight follows the time that they take.
        kv_open: Use of the KV cache, 0..1, from which a replica gets no long prompts.
        kv_close: Use below which it gets them again.
        long_prompt_tokens: What is long.
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
        in_flight: Requests that the router has on it.
        places: That those take, one for each of their sequences; None: as many as they are.
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
        """Return the places that are taken."""
        return self.in_flight if self.places is None else self.places

    def expect(
        self, prompt_tokens: int, max_num_seqs: int, output_share: float, sequences: int = 1
    ) -> Expectation | None:
        """Predict the times of one more request; None before any speed was measured."""
        if self.speed is None:
            return None
        times = self.speed.times(prompt_tokens, self.load, max_num_seqs, output_share, sequences)
        return Expectation(
            times.ttft_ms * math.exp(self.ttft_trend.mean),
            times.tpot_ms * math.exp(self.tpot_trend.mean),
            math.sqrt(self.ttft_trend.variance),
            math.sqrt(self.tpot_trend.variance),
        )


def has_places(sequences: int, taken: int, limit: int) -> bool:
    """Tell whether so many sequences are let in where so many places are taken; more than there are, where none is."""
    return limit > 0 and taken + min(sequences, limit) <= limit


def fits(tokens: float, held: int, size: int) -> bool:
    """Tell whether a KV cache has room for so many tokens more; a size of 0 is not known. A lone request always fits."""
    return not size or not held or held + tokens <= size


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier at one moment.

    Attributes:
        preparing: What it needs before it serves for the first time; None: nothing.
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
        """Return the state of the tier's best replica; without one, whether it is going to have one."""
        if any(r.state is ReplicaState.READY for r in self.replicas):
            return ReplicaState.READY
        if not self.replicas and self.preparing is not None:
            return ReplicaState.PREPARING if self.preparing.failed is None else ReplicaState.FAILED
        return min((r.state for r in self.replicas), key=_BEST_FIRST.index, default=ReplicaState.STOPPED)

    def next(
        self, prompt_tokens: int, output_tokens: float, long_prompt_tokens: int, sequences: int = 1
    ) -> ReplicaSnapshot | None:
        """Return the replica that a request would be leased on; None where none takes it now.

        Args:
            prompt_tokens: Of its prompts.
            output_tokens: That are expected, of all its sequences.
            long_prompt_tokens: What a replica whose KV cache is nearly full does not take.
            sequences: That it is computed as.
        """
        most, tokens, long = self.spec.max_in_flight, prompt_tokens + output_tokens, prompt_tokens > long_prompt_tokens
        free = [
            r
            for r in self.replicas
            if r.state is ReplicaState.READY
            and r.admits
            and has_places(sequences, r.taken, min(r.limit, most))
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
    """Tokens that the chat template adds to the texts of a conversation. The tiers share one template.

    Attributes:
        alone: To a single user message.
        with_system: To a system and a user message.
        further_pair: To each two messages after those: an answer, and what the user says next.
    """

    alone: int = 0
    with_system: int = 0
    further_pair: int = 0

    def conversation(self, messages: int, *, system: bool) -> int:
        """Return what is added to so many messages, the system message among them."""
        added, first = (self.with_system, 2) if system else (self.alone, 1)
        return added + -(-self.further_pair * max(messages - first, 0) // 2)

    def most(self, other: TemplateTokens) -> TemplateTokens:
        """Return the larger of each figure."""
        return TemplateTokens(
            max(self.alone, other.alone),
            max(self.with_system, other.with_system),
            max(self.further_pair, other.further_pair),
        )


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The fleet at one moment: what a routing decision is made from.

    Attributes:
        tiers: By rising precision.
        template: What the chat template adds to prompts.
        output_share: Of the output tokens that requests allow, how many came lately, 0..1.
        long_prompt_tokens: What a replica whose KV cache is nearly full does not take.
    """

    tiers: tuple[TierSnapshot, ...]
    template: TemplateTokens
    output_share: float = 1.0
    long_prompt_tokens: int = 512

    @property
    def sequences(self) -> int:
        """Return the sequences that the router has on all replicas together."""
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
    """The fleet's own record of a replica. Outside ``tiers`` it is only held through a lease.

    Attributes:
        in_flight: Requests that the router has on it.
        places: That those take: one for each sequence, so several for a request of several.
    """

    id: str
    spec: TierSpec
    url: str
    api_key: str
    model: str
    takes_priority: bool = True
    fingerprint: str | None = None  # the engine's own, which it puts into answers
    pid: int | None = None
    state: ReplicaState = ReplicaState.STARTING
    detail: str | None = None
    in_flight: int = 0
    places: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv_tokens_held: int = 0
    kv_tokens: int = 0
    kv_pressure: bool = False
    share: Share | None = None  # None: it is not shared
    served: int = 0
    failed: int = 0
    generated: int = 0  # tokens
    gauges: Gauges | None = None
    speed: SpeedModel | None = None
    ttft_trend: Trend = STEADY
    tpot_trend: Trend = STEADY
    options: FleetOptions = field(default_factory=FleetOptions)
    breaker: Breaker = field(init=False)
    turnover: Turnover = field(default_factory=Turnover)
    _others: PeerLoad = NO_PEERS
    _others_until: float = 0.0  # what they told is old from then on
    _limit: ConcurrencyLimit = field(init=False)
    _prefill_rate: float = 0.0  # prompt tokens a millisecond, as of ``_prefill_at``
    _prefill_at: float = 0.0
    _surplus: deque[int] = field(default_factory=lambda: deque(maxlen=FOREIGN_POLLS))
    _silence_s: float = 0.0  # with requests and without progress, as of ``_silent_from``
    _silent_from: float = 0.0
    seen: deque[Seen] = field(default_factory=lambda: deque(maxlen=KEPT_ANSWERS))
    noted: int = 0  # answers that ``seen`` had ever
    _sequence_s: float = 0.0  # sequences, summed over time, as of ``_summed_at``
    _summed_at: float = 0.0
    _came: int = 0  # prompt tokens

    def __post_init__(self) -> None:
        self.adopt(self.options)

    def adopt(self, options: FleetOptions) -> None:
        """Take the fleet's options."""
        self.options, self.breaker = options, Breaker(options.breaker)
        self._limit = ConcurrencyLimit.starting(self.spec.max_num_seqs, self.spec.max_in_flight)

    @property
    def whole_limit(self) -> int:
        """Return the places that there are, for all routers together."""
        adapting = self.options.adaptive_limit and self.speed is not None and self.speed.profiled
        return min(self._limit.value, self.spec.max_in_flight) if adapting else self.spec.max_in_flight

    @property
    def limit(self) -> int:
        """Return the places that this router may take: its share, but always one."""
        if self.share is None:
            return self.whole_limit
        return min(self.whole_limit, max(self.share.holds(time.monotonic()), 1))

    @property
    def others(self) -> PeerLoad:
        """Return what other routers have on the replica, as long as that is not old."""
        return self._others if time.monotonic() < self._others_until else NO_PEERS

    def note_others(self, others: PeerLoad, until: float) -> None:
        """Note what other routers have, and until when that tells anything, by the monotonic clock."""
        self._others, self._others_until = others, until

    def has_room(self, tokens: int, *, long: bool, sequences: int = 1) -> bool:
        """Tell whether one more request is let in.

        Args:
            tokens: Of its prompts and its expected output.
            long: Whether its prompts are long.
            sequences: That it is computed as; of more than there are places, it is let in while no other is there.
        """
        if not has_places(sequences, self.places, self.limit) or (long and self.kv_pressure):
            return False
        return fits(tokens, self.kv_tokens_held + self.others.kv_tokens, self.kv_tokens)

    def __repr__(self) -> str:
        return f"<Replica {self.id} {self.state.value} in_flight={self.in_flight} {self.url}>"

    def mark(self, state: ReplicaState, detail: str | None = None) -> None:
        """Change the state; ``detail`` says why, for a person."""
        self.state, self.detail = state, detail
        if state not in {ReplicaState.READY, ReplicaState.DRAINING}:
            self.gauges = self.speed = None
            self.kv_pressure, self._others = False, NO_PEERS
            self.turnover = Turnover()
            self.breaker.reset()
            self._surplus.clear()
            self.seen.clear()
            self.noted = 0

    def silence_s(self, now: float) -> float:
        """Return how long there have been requests without any progress, in seconds; times without requests do not count."""
        return self._silence_s + (now - self._silent_from if self.in_flight else 0.0)

    def progressed(self, now: float) -> None:
        """Note that the engine has computed something."""
        self._silence_s, self._silent_from = 0.0, now

    def took(self, change: int, now: float, places: int = 1) -> None:
        """Count a request that came (1) or ended (-1), and the places that it takes."""
        self._silence_s, self._silent_from = self.silence_s(now), now
        self._sequence_s, self._summed_at = self.work(now)[0], now
        self.turnover.note(now, self.places, places if change < 0 else 0)
        self.in_flight += change
        self.places += change * places

    @property
    def learns(self) -> bool:
        """Tell whether its speed is learned from answers: no profile tells it."""
        return self.speed is None or not self.speed.profiled

    def work(self, now: float) -> tuple[float, int]:
        """Return what it has had to do so far: sequences, summed over time in seconds, and prompt tokens."""
        return self._sequence_s + self.sequences * (now - self._summed_at), self._came

    def note_answer(self, seen: Seen) -> None:
        """Note an answer that its speed may be learned from."""
        self.seen.append(seen)
        self.noted += 1

    def freed_per_s(self, now: float, neighbours: float, output_share: float) -> float:
        """Predict how many places come free in a second: by how long they are held, else by the speed model."""
        load, relief_s = self.load(now, neighbours), 0.0
        if self.speed is not None:
            relief_s = self.speed.relief_ms(load, self.spec.max_num_seqs, output_share) / 1000
        predicted_s = max(load.sequences, 1) * (relief_s or UNKNOWN_RELIEF_S)
        return max(self.places, 1) / max(self.turnover.hold_s(now, self.places, predicted_s), SHORTEST_HOLD_S)

    @property
    def sequences(self) -> int:
        """Return the sequences on the replica: the routers' own, exactly, and those that only the gauges tell of."""
        full = len(self._surplus) == FOREIGN_POLLS
        return self.places + self.others.requests + (max(min(self._surplus), 0) if full else 0)

    def note_gauges(self, gauges: Gauges) -> None:
        """Note what the engine says of itself."""
        self.gauges = gauges
        self.kv_tokens = gauges.kv_cache_tokens or 0
        # Apart, so that it does not flutter about one value.
        bound = self.options.kv_close if self.kv_pressure else self.options.kv_open
        self.kv_pressure = gauges.kv_cache_usage >= bound
        self._surplus.append(gauges.running + gauges.waiting - self.places - self.others.requests)

    def measured(self, speed: SpeedModel) -> None:
        """Take a speed, and forget how far the last one was off."""
        self.speed = speed
        self.ttft_trend = Trend(0.0, speed.ttft_spread**2, 0.0)
        self.tpot_trend = Trend(0.0, speed.tpot_spread**2, 0.0)

    def load(self, now: float, neighbours: float) -> Load:
        """Return what the replica has to do."""
        rate = self._prefill_rate * math.exp((self._prefill_at - now) * 1000 / PREFILL_MEMORY_MS)
        prompts, output = self.prompt_tokens + self.others.prompt_tokens, self.output_tokens + self.others.output_tokens
        return Load(self.sequences, prompts, output, neighbours, rate)

    def came(self, prompt_tokens: int, now: float) -> None:
        """Note a prompt: the rate at which they come is an exponentially weighted mean."""
        past = self._prefill_rate * math.exp((self._prefill_at - now) * 1000 / PREFILL_MEMORY_MS)
        self._prefill_rate, self._prefill_at = past + prompt_tokens / PREFILL_MEMORY_MS, now
        self._came += prompt_tokens

    def snapshot(self, now: float, neighbours: float, *, reserved: bool = False) -> ReplicaSnapshot:
        """Return a frozen copy; of a reserved one without free places."""
        speed = self.speed
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
            breaker=self.breaker.state(now),
            admits=self.breaker.admits(now),
            admits_in_s=self.breaker.admits_in_s(now),
            limit=min(self.limit, self.places) if reserved else self.limit,
            kv_tokens=self.kv_tokens,
            kv_tokens_held=self.kv_tokens_held + self.others.kv_tokens,
            kv_pressure=self.kv_pressure,
            places=self.places,
        )

    def learn_limit(self, unqueued_ms: float, ttft_ms: float, in_flight: int) -> None:
        """Learn from one time to the first token how many requests the engine takes up at once."""
        self._limit.sample(unqueued_ms * math.exp(max(self.ttft_trend.mean, 0.0)), ttft_ms, in_flight)

    def back_off(self) -> None:
        """Give it fewer requests at once: it failed one."""
        self._limit.failed()


@dataclass(slots=True, eq=False)
class Lease:
    """One request's hold on one replica. Use as a context manager, or call ``release`` exactly where it ends.

    Attributes:
        predicted: The model's times for it, as things stood when it was taken; None where the speed is not known.
        sequences: That the request is computed as: its places.
    """

    replica: Replica
    predicted: Times | None
    sequences: int
    _fleet: Fleet
    _prompt_tokens: int
    _output_tokens: int
    _asked_tokens: int
    _kv_tokens: int
    _places: int
    _unqueued_ms: float | None
    _probe: int
    _seen: Seen
    _begun: tuple[float, float, int] | None = None  # when its first token came, and the replica's work then
    _judged: bool = False
    _released: bool = False
    _generated: int = 0

    def first_token(self, ttft_ms: float | None = None) -> None:
        """Note that the prompt is computed: its tokens are no longer outstanding.

        Args:
            ttft_ms: When; None leaves what is known of the speed as it is. So does a request of several sequences: its
                first token is the first of any.
        """
        replica, speed = self.replica, self.replica.speed
        replica.progressed(time.monotonic())
        replica.prompt_tokens -= self._prompt_tokens
        self._prompt_tokens = 0
        self._answered()
        if ttft_ms is None or self.sequences > 1:
            return
        if replica.learns:
            now = time.monotonic()
            self._seen, self._begun = self._seen._replace(ttft_ms=ttft_ms), (now, *replica.work(now))
        if self._unqueued_ms is not None:
            replica.learn_limit(self._unqueued_ms, ttft_ms, self._places)
        if self.predicted is not None and speed is not None:
            replica.ttft_trend = replica.ttft_trend.after(
                self.predicted.ttft_ms, ttft_ms, time.monotonic(), speed.ttft_spread
            )

    def produced(self, tokens: int = 1) -> None:
        """Note output tokens that have arrived."""
        if self._released:
            return
        replica = self.replica
        replica._silence_s, replica._silent_from = 0.0, time.monotonic()  # noqa: SLF001  once a token, so no call
        replica.generated += tokens
        self._generated += tokens
        tokens = min(tokens, self._output_tokens)
        replica.output_tokens -= tokens
        self._output_tokens -= tokens

    def finished(self, tpot_ms: float | None, output_tokens: int = 0) -> None:
        """Note a completed answer.

        Args:
            tpot_ms: Mean time between its tokens; None for fewer than two, and for one that was not streamed. Nothing is
                learned from that of several sequences, which end at different times.
            output_tokens: That it has; 0 where the engine did not say.
        """
        replica, speed = self.replica, self.replica.speed
        replica.served += 1
        replica.generated += max(output_tokens - self._generated, 0)  # of an answer that was not streamed
        replica.progressed(time.monotonic())
        self._answered()
        if tpot_ms is not None and self.sequences == 1 and self.predicted is not None and speed is not None:
            replica.tpot_trend = replica.tpot_trend.after(
                self.predicted.tpot_ms, tpot_ms, time.monotonic(), speed.tpot_spread
            )
        self._note(tpot_ms, output_tokens)
        if output_tokens and self._asked_tokens:
            share = min(output_tokens / self._asked_tokens, 1.0)
            self._fleet.output_share += (1 - OUTPUT_MEMORY) * (share - self._fleet.output_share)

    def _note(self, tpot_ms: float | None, output_tokens: int) -> None:
        """Note what a replica whose speed is not profiled had to do for the answer, and how long it took."""
        replica, now = self.replica, time.monotonic()
        if self._begun is None or not replica.learns or self.sequences > 1:
            return
        began, sequence_s, came = self._begun
        if tpot_ms is None or tpot_ms <= 0 or now <= began:
            replica.note_answer(self._seen)
            return
        batch, prefilled = replica.work(now)
        replica.note_answer(
            self._seen._replace(
                batch=max((batch - sequence_s) / (now - began), 1.0),
                prefilled=(prefilled - came) / max(output_tokens - 1, 1),
                tpot_ms=tpot_ms,
            )
        )

    def failed(self, error: str) -> None:
        """Note an attempt that the replica failed, and the kind of error."""
        self.replica.failed += 1
        self._fleet.failures[self.replica.spec.name, error] += 1
        self.replica.back_off()
        self._judged = True
        self.replica.breaker.failed(time.monotonic(), probe=self._probe)

    def _answered(self) -> None:
        if not self._judged:
            self._judged = True
            self.replica.breaker.succeeded(probe=self._probe)

    def release(self) -> None:
        """Give the place back. Only the first call counts."""
        if self._released:
            return
        self._released = True
        self.replica.took(-1, time.monotonic(), self.sequences)
        self.replica.prompt_tokens -= self._prompt_tokens
        self.replica.output_tokens -= self._output_tokens
        self.replica.kv_tokens_held -= self._kv_tokens
        if not self._judged:
            self.replica.breaker.given_up(probe=self._probe)
        self._fleet.on_room()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


@dataclass(slots=True)
class Fleet:
    """All replicas of all tiers.

    Attributes:
        output_share: Of the output tokens that requests allow, how many came lately, 0..1.
        speeds: By tier, where they were profiled under load.
        machine: What the router runs on, and the engines unless they run elsewhere.
        options: When replicas are spared.
        on_room: Called when a lease was given back.
        failures: Attempts that failed, by tier and kind of error.
        restarts: Engines that were started again by themselves, by tier.
        first_share: What this router may have on a replica that is new to it; None: everything.
        measuring: Held by whoever measures speeds: two at once would measure each other.
        preparations: What tiers need before they serve for the first time.
    """

    specs: tuple[TierSpec, ...]
    replicas: list[Replica] = field(default_factory=list)
    template: TemplateTokens = TemplateTokens()
    output_share: float = 1.0
    speeds: Mapping[TierName, SpeedModel] = field(default_factory=dict)
    machine: str = ""
    options: FleetOptions = field(default_factory=FleetOptions)
    on_room: Callable[[], None] = field(default=lambda: None)
    failures: Counter[tuple[TierName, str]] = field(default_factory=Counter)
    restarts: Counter[TierName] = field(default_factory=Counter)
    first_share: Share | None = None
    measuring: asyncio.Lock = field(default_factory=asyncio.Lock)
    preparations: Preparations = field(default_factory=Preparations)

    def add(self, replica: Replica) -> Replica:
        """Add a replica; it gets traffic once it is marked ready."""
        replica.adopt(self.options)
        replica.share = self.first_share
        self.replicas.append(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """Forget a replica. Leases on it still end as usual."""
        self.replicas.remove(replica)

    def configure(self, spec: TierSpec) -> None:
        """Take a tier's configuration anew: its checkpoint has been made."""
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
        """Take the places of a request on the tier's least loaded ready replica, or return None if none has them.

        Args:
            tier: Where.
            prompt_tokens: Length of all its prompts with the chat template, in tokens.
            max_tokens: Output tokens of each sequence at most.
            sequences: Answers that are computed at the same time: prompts times choices. They share their prompt.
            exclude: Replica ids that were tried already.
            over_limit: Take a place beyond what the replica is to have: for a request that was let in before, elsewhere.
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
            taken_up = replace(load, sequences=min(load.sequences, most - 1))
            unqueued_ms = replica.speed.times(prompt_tokens, taken_up, most, self.output_share).ttft_ms
        probe = replica.breaker.begin(now)
        replica.came(prompt_tokens, now)
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
            _places=replica.places + replica.others.requests,
            _unqueued_ms=unqueued_ms,
            _probe=probe,
            _seen=Seen(prompt_tokens, load.sequences, load.prompt_tokens, load.neighbours, 0.0),
        )

    def has_room(self, tiers: Collection[TierName], demand: Demand, exclude: Collection[str] = ()) -> bool:
        """Tell whether a request could be leased on one of several tiers, but for the replicas that are left out."""
        return next(self._able(tiers, demand, exclude, time.monotonic()), None) is not None

    def is_ready(self, tier: TierName) -> bool:
        """Tell whether a tier has a replica that may get requests."""
        return any(r.spec.name is tier and r.state is ReplicaState.READY for r in self.replicas)

    def nearest(self, tiers: Collection[TierName], demand: Demand, exclude: Collection[str] = ()) -> str | None:
        """Return the replica with free places that lacks least of what a request needs; None where there is none."""
        tokens, long = self._kv_tokens(demand), self._is_long(demand)

        def lacking(replica: Replica) -> tuple[int, int]:
            places = replica.places + demand.sequences - replica.limit
            return max(places, 0), replica.kv_tokens_held + replica.others.kv_tokens + tokens - replica.kv_tokens

        partly = (
            r
            for r in self._able(tiers, None, exclude, time.monotonic())
            if r.places < r.limit and not (long and r.kv_pressure)
        )
        found = min(partly, key=lacking, default=None)
        return found.id if found is not None else None

    def _able(
        self, tiers: Collection[TierName], demand: Demand | None, exclude: Collection[str], now: float
    ) -> Iterator[Replica]:
        """Yield the replicas that take a request; None: one that takes no account of their limits."""
        tokens, long, sequences = 0, False, 1
        if demand is not None:
            tokens, long, sequences = self._kv_tokens(demand), self._is_long(demand), demand.sequences
        for r in self.replicas:
            if (
                r.spec.name in tiers
                and r.state is ReplicaState.READY
                and r.breaker.admits(now)
                and r.id not in exclude
                and (demand is None or r.has_room(tokens, long=long, sequences=sequences))
            ):
                yield r

    def _kv_tokens(self, demand: Demand) -> int:
        return demand.prompt_tokens + math.ceil(self.output_share * demand.max_tokens * demand.sequences)

    def _is_long(self, demand: Demand) -> bool:
        return demand.prompt_tokens > self.options.long_prompt_tokens

    def freed_per_s(self, tier: TierName) -> float:
        """Predict how many places of a tier come free in a second; 0 where no replica takes requests."""
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
        """Note what an engine's chat template adds."""
        self.template = self.template.most(template)

    def snapshot(self, reserved: Collection[str] = ()) -> FleetSnapshot:
        """Return a frozen copy of the whole fleet, in which some replicas have no place free: they are kept for others."""
        now = time.monotonic()
        busy = sum(r.sequences > 0 for r in self.replicas)
        others = max(len(self.replicas) - 1, 1)
        return FleetSnapshot(
            tiers=tuple(
                TierSnapshot(
                    spec,
                    tuple(
                        r.snapshot(now, (busy - (r.sequences > 0)) / others, reserved=r.id in reserved)
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
