"""A replica: its state, which snapshots refer to and which is replaced when it changes, and what the state follows from."""

from __future__ import annotations

import math
from collections import deque
from copy import copy
from dataclasses import InitVar, dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from msgspec.structs import replace

from tiers.breaker import Breaker, BreakerOptions
from tiers.limit import ConcurrencyLimit
from tiers.prefix_memory import PrefixMemory
from tiers.snapshot import NO_PAUSE, FleetLoad, Gauges, Pause, ReplicaState, Trends, load_of
from tiers.spec import ReplicaStatus, TierSpec
from tiers.speed import BUSY_MEMORY_S, PREFILL_MEMORY_MS, AnswerSample, Load, SpeedModel, Trend

if TYPE_CHECKING:
    from tiers.prefix_memory import Prefix

SHORTEST_HOLD_S = 1e-3  # of a slot
UNKNOWN_RELIEF_S = 1.0  # until a slot of a replica of unknown speed is free
FOREIGN_POLLS = 8  # consecutive readings (4 s) that must show other clients' requests, because gauges lag by seconds
KV_BLOCK_TOKENS = 16  # of an engine that does not tell: vLLM's default on GPUs
KEPT_ANSWERS = 256  # of each replica, to learn its speed from
HALF_LIFE_S = 60.0  # of observed holds
LEAST_MEMORY = 5.0  # ends in their mean; more on a replica with more slots, about one for each slot


class PeerLoad(NamedTuple):
    """Other routers' load on a replica: slots, prompt tokens to compute, output tokens to come, cache tokens."""

    slots: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv_tokens: int = 0


NO_PEERS = PeerLoad()


class Share(NamedTuple):
    """The slots that this router may take of a replica shared with other routers, until a monotonic time.

    Afterwards it may take one: the other routers may no longer count it.
    """

    slots: int
    until: float

    def holds(self, now: float) -> int:
        """Return the slots of the share; 0 once it has expired."""
        return self.slots if now < self.until else 0


class SentPrompt(NamedTuple):
    """A prompt that was sent to a replica.

    Attributes:
        prefix: Of the prompt.
        cached: Tokens that the replica was likely to hold of it.
        blocks: The same in blocks of the router's memory.
        used: When those were last used, by that memory's clock.
    """

    prefix: Prefix
    cached: int
    blocks: int
    used: int

    @classmethod
    def to(cls, replica: Replica, prefix: Prefix) -> Self:
        """Note that a prompt is sent to a replica."""
        memory = replica.prefixes
        blocks = memory.matching(prefix)
        sent = cls(prefix, replica.cached_tokens(prefix), blocks, memory.last_used(prefix, blocks))
        memory.note(prefix, replica.state.kv.size)
        return sent

    def correct(self, memory: PrefixMemory, cached: int) -> None:
        """Correct a replica's memory by the tokens that the engine found, if those are less than half as many."""
        if 2 * cached < self.cached:
            memory.forget_until(self.used)

    def take_back(self, memory: PrefixMemory) -> None:
        """Forget a prompt that the replica has not computed, as far as it did not hold it before."""
        memory.forget(self.prefix.blocks[self.blocks :])


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """When replicas get fewer requests, or none.

    Attributes:
        breaker: When a replica gets no requests after failures.
        adaptive_limit: Whether the limit on requests in flight follows their TTFT.
        kv_open: KV-cache usage, 0..1, from which a replica gets no long prompts.
        kv_close: Usage below which it gets them again.
        long_prompt_tokens: Prompts above this are long.
        affinity: Whether it is remembered which prompts replicas hold, and counts in choices and predictions.
    """

    breaker: BreakerOptions = field(default_factory=BreakerOptions)
    adaptive_limit: bool = True
    kv_open: float = 0.88
    kv_close: float = 0.792
    long_prompt_tokens: int = 512
    affinity: bool = True


@dataclass(slots=True)
class Turnover:
    """How long a replica's slots are held: the basis for predicting a wait. Times are monotonic seconds.

    The estimate is the recent time for which slots were held over the number of slots freed. Holds that have not ended
    count as well (the maximum-likelihood estimate for exponential times with censoring). Every end counts, whether a
    request waits or not, so the estimate also recovers while all requests that would wait are refused. Old observations
    fade, and the speed model's prediction takes their place.

    Attributes:
        held_s: Slots times seconds.
        freed: Slots.
        at: Time of the last change.
    """

    held_s: float = 0.0
    freed: float = 0.0
    at: float = math.inf

    def note(self, now: float, held: int, freed: int = 0) -> None:
        """Note the slots held since the last call, and how many of them are freed now."""
        past_s = max(now - self.at, 0.0)
        left = 0.5 ** (past_s / HALF_LIFE_S)
        held_s, ended = self.held_s * left + held * past_s, self.freed * left
        if freed:
            memory = max(LEAST_MEMORY, held)
            kept = (1 - 1 / memory) ** freed
            held_s, ended = held_s * kept, ended * kept + (1 - kept) * memory
        self.held_s, self.freed, self.at = held_s, ended, now

    def hold_s(self, now: float, held: int, predicted_s: float) -> float:
        """Return for how long a slot is expected to be held.

        Args:
            now: Present time.
            held: Slots held now.
            predicted_s: The result without observations; it counts less the more there are.
        """
        seen = copy(self)
        seen.note(now, held)
        weight = 1 / (1 + seen.freed)
        return (seen.held_s + weight * predicted_s) / (seen.freed + weight)


@dataclass(slots=True)
class OtherClients:
    """Who else uses a replica's engine.

    Attributes:
        share: This router's share of the slots; None: the replica is not shared with other routers.
        peers: What other routers have on it, until a monotonic time.
        counted: What of that is in the replica's state.
        foreign: Sequences of clients that only the gauges show.
        surplus: Of the last gauges over the known requests.
    """

    share: Share | None = None
    peers: PeerLoad = NO_PEERS
    peers_until: float = 0.0
    counted: PeerLoad = NO_PEERS
    foreign: int = 0
    surplus: deque[int] = field(default_factory=lambda: deque(maxlen=FOREIGN_POLLS))


@dataclass(slots=True)
class Work:
    """What a replica has done, and since when it has not.

    Attributes:
        generated: Output tokens so far.
        prompt_tokens: That were sent to it.
        sequence_s: Sequences, integrated over time, at ``summed_at``.
        silence_s: With requests but without progress, at ``silent_from``.
        generated_at: When the engine's own count of generated tokens was last seen to rise; None: it counts none.
    """

    generated: int = 0
    prompt_tokens: int = 0
    sequence_s: float = 0.0
    summed_at: float = 0.0
    silence_s: float = 0.0
    silent_from: float = 0.0
    generated_at: float | None = None


@dataclass(slots=True)
class Answers:
    """A replica's last answers, to learn its speed from; ``noted``: how many there ever were."""

    last: deque[AnswerSample] = field(default_factory=lambda: deque(maxlen=KEPT_ANSWERS))
    noted: int = 0


@dataclass(slots=True)
class Totals:
    """Sums over a fleet's replicas.

    Attributes:
        busy: Those that have requests.
        contended: Those that are slowed by others.
        until: Monotonic time up to which no replica's state expires.
    """

    busy: int = 0
    contended: int = 0
    until: float = math.inf
    _busy_lately: float = 0.0  # mean of ``busy``, exponentially weighted, at ``_busy_at``
    _busy_at: float = 0.0

    def count(self, replica: Replica, sign: int) -> None:
        """Count a replica that is added, or one that is removed (-1)."""
        self.contended += sign * replica.state.slowed
        self.until = min(self.until, replica.expires_at)
        if replica.state.load.sequences:
            self.note_busy(sign, monotonic())

    def note_busy(self, change: int, now: float) -> None:
        """Note that a replica has its first request (1) or has had its last (-1)."""
        faded = math.exp((self._busy_at - now) / BUSY_MEMORY_S)
        self._busy_lately, self._busy_at = self.busy + (self._busy_lately - self.busy) * faded, now
        self.busy += change

    def busy_lately(self, now: float) -> float:
        """Return the mean number of replicas that have had requests, in about the last ``BUSY_MEMORY_S``."""
        return self.busy + (self._busy_lately - self.busy) * math.exp((self._busy_at - now) / BUSY_MEMORY_S)


@dataclass(slots=True, eq=False)
class Replica:
    """One replica, over all restarts of its engine.

    Attributes:
        status: At first.
        fingerprint: The engine's own, from its answers.
        takes_priority: The engine schedules by priority; others refuse requests that have one.
        takes_thinking: The engine takes a bound on tokens of reasoning; others refuse it.
        source: Who names it; None: it was started here.
        output_tokens: Of the router's requests, to come. They change with every token, so they are not in ``state``.
        state: What is known of it; replaced when something changes, by ``refresh`` where time changes it.
        expires_at: Monotonic time at which a share, a report of other routers or a pause in ``state`` ends.
        prefixes: The prompts that this process has sent to it since its start.
        totals: Of the fleet.
    """

    id: str
    spec: TierSpec
    url: str
    api_key: str
    model: str
    status: InitVar[ReplicaStatus] = ReplicaStatus.STARTING
    takes_priority: bool = True
    takes_thinking: bool = True
    fingerprint: str | None = None
    source: str | None = None
    options: FleetOptions = field(default_factory=FleetOptions)
    output_tokens: int = 0
    state: ReplicaState = field(init=False)
    expires_at: float = math.inf
    others: OtherClients = field(default_factory=OtherClients)
    work: Work = field(default_factory=Work)
    breaker: Breaker = field(init=False)
    limiter: ConcurrencyLimit = field(init=False)
    turnover: Turnover = field(default_factory=Turnover)
    answers: Answers = field(default_factory=Answers)
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self, status: ReplicaStatus) -> None:
        self.state = ReplicaState(self.id, self.url, self.spec.precision, status)
        self.adopt(self.options)

    def adopt(self, options: FleetOptions) -> None:
        """Take the fleet's options, with a new breaker and a new limit."""
        self.limiter = ConcurrencyLimit.starting(self.spec.max_num_seqs, self.spec.max_in_flight)
        self.breaker = Breaker(options.breaker, on_open=self.update)
        self.use(options)

    def use(self, options: FleetOptions) -> None:
        """Take new options, without forgetting anything."""
        self.options = options
        self.breaker.options = options.breaker
        self.update()

    def update(self, **facts: Any) -> None:
        """Replace the state: with new facts, and with what follows from the rest of the replica and from the time."""
        now, before, others, breaker, totals = monotonic(), self.state, self.others, self.breaker, self.totals
        self.state = state = replace(before, **facts)
        share, peers, limit, pause, self.expires_at = others.share, NO_PEERS, self.whole_limit, NO_PAUSE, math.inf
        if share is not None:
            limit = min(limit, max(share.holds(now), 1))
            if now < share.until:
                self.expires_at = share.until
        if now < others.peers_until:
            peers, self.expires_at = others.peers, min(self.expires_at, others.peers_until)
        if breaker.open_until is not None:
            pause = Pause(breaker.state(now), breaker.admits(now), breaker.admits_in_s(now))
            self.expires_at = now
        sequences = state.slots + peers.slots + others.foreign
        self.state = replace(
            state,
            precision=self.spec.precision,
            limit=limit,
            load=Load(
                sequences, state.prompt_tokens + peers.prompt_tokens, peers.output_tokens, 0.0, state.load.prefill_rate
            ),
            kv=replace(state.kv, held=state.kv.held - others.counted.kv_tokens + peers.kv_tokens),
            breaker=pause,
        )
        others.counted, totals.until = peers, min(totals.until, self.expires_at)
        totals.contended += state.slowed - before.slowed
        if (sequences > 0) != (before.load.sequences > 0):
            totals.note_busy(1 if sequences else -1, now)

    @property
    def whole_limit(self) -> int:
        """Return the number of slots, for all routers together."""
        speed, most = self.state.speed, self.spec.max_in_flight
        adapting = self.options.adaptive_limit and speed is not None and speed.profiled
        return min(self.limiter.value, most) if adapting else most

    def note_share(self, share: Share | None) -> None:
        """Note this router's share of the slots; None: all of them are its own."""
        self.others.share = share
        self.update()

    def note_peers(self, peers: PeerLoad, until: float) -> None:
        """Note other routers' load, valid until a monotonic time."""
        self.others.peers, self.others.peers_until = peers, until
        self.update()

    def __repr__(self) -> str:
        return f"<Replica {self.id} {self.state.status.value} in_flight={self.state.in_flight} {self.url}>"

    def mark(self, status: ReplicaStatus, detail: str | None = None) -> None:
        """Change the status; ``detail`` gives the reason to people."""
        facts: dict[str, Any] = {}
        if status not in {ReplicaStatus.READY, ReplicaStatus.DRAINING}:
            facts = {"gauges": None, "speed": None, "kv": replace(self.state.kv, pressure=False)}
            self.others.peers, self.others.foreign = NO_PEERS, 0
            self.others.surplus.clear()
            self.turnover, self.answers = Turnover(), Answers()
            self.work.generated_at = None
            self.breaker.reset()
            self.prefixes.clear()
        self.update(status=status, detail=detail, **facts)

    def cached_tokens(self, prefix: Prefix) -> int:
        """Return the tokens of a prompt that its prefix cache is likely to hold: whole blocks, and never all of them."""
        blocks, gauges = self.prefixes.matching(prefix), self.state.gauges
        if not blocks:
            return 0
        size = (gauges.kv_block_tokens if gauges is not None else None) or KV_BLOCK_TOKENS
        return min(prefix.tokens(blocks), int(prefix.ends[-1][1]) - 1) // size * size

    def silence_s(self, now: float) -> float:
        """Return the seconds without progress; times without requests do not count."""
        return self.work.silence_s + (now - self.work.silent_from if self.state.in_flight else 0.0)

    def may_be_silent_until(self, now: float, limit_s: float, *, is_expected: bool) -> float:
        """Return until when an answer is waited for that is silent, while the engine is seen to compute.

        Args:
            now: Monotonic time.
            limit_s: Longest silence of an engine that does not compute.
            is_expected: The engine may hold this answer back.
        """
        if self.state.status not in {ReplicaStatus.READY, ReplicaStatus.DRAINING}:
            return now
        if self.work.generated_at is not None:
            return self.work.generated_at + limit_s
        # Without a count of tokens, the watchdog finds out whether the engine hangs.
        gauges = self.state.gauges
        is_running = gauges is not None and gauges.running > 0
        return now + limit_s if is_expected or is_running else now

    def progressed(self, now: float) -> None:
        """Note that the engine has made progress."""
        self.work.silence_s, self.work.silent_from = 0.0, now

    def begin(self, prompt_tokens: int, output_tokens: int, kv_tokens: int, sequences: int, now: float) -> None:
        """Count a request that is sent.

        Args:
            prompt_tokens: To be computed.
            output_tokens: Of all its sequences at most.
            kv_tokens: That it is expected to hold.
            sequences: Of the request: the slots that it takes.
            now: Monotonic time.
        """
        state, work = self.state, self.work
        load, kv = state.load, state.kv
        self._integrate(now)
        self.turnover.note(now, state.slots)
        work.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        if not load.sequences:
            self.totals.note_busy(1, now)
        rate = load.prefill_rate * math.exp((state.prefill_at - now) * 1000 / PREFILL_MEMORY_MS)
        self.state = replace(
            state,
            in_flight=state.in_flight + 1,
            slots=state.slots + sequences,
            prompt_tokens=state.prompt_tokens + prompt_tokens,
            load=Load(
                load.sequences + sequences,
                load.prompt_tokens + prompt_tokens,
                load.output_tokens,
                prefill_rate=rate + prompt_tokens / PREFILL_MEMORY_MS,
            ),
            prompts_at=state.prompts_at if load.prompt_tokens else now,
            prefill_at=now,
            kv=replace(kv, held=kv.held + kv_tokens),
        )

    def prompt_computed(self, prompt_tokens: int, now: float) -> None:
        """Note that a prompt is computed, which is progress; the engine has begun the next one."""
        state, load = self.state, self.state.load
        self.work.silence_s, self.work.silent_from = 0.0, now
        self.state = replace(
            state,
            prompt_tokens=state.prompt_tokens - prompt_tokens,
            load=replace(load, prompt_tokens=load.prompt_tokens - prompt_tokens),
            prompts_at=now,
        )

    def end(self, prompt_tokens: int, output_tokens: int, kv_tokens: int, sequences: int, now: float) -> None:
        """Count a request that has ended, with what is left of what ``begin`` counted."""
        state, load, kv = self.state, self.state.load, self.state.kv
        self._integrate(now)
        self.turnover.note(now, state.slots, sequences)
        self.output_tokens -= output_tokens
        there = load.sequences - sequences
        if not there:
            self.totals.note_busy(-1, now)
        self.state = replace(
            state,
            in_flight=state.in_flight - 1,
            slots=state.slots - sequences,
            prompt_tokens=state.prompt_tokens - prompt_tokens,
            load=replace(load, sequences=there, prompt_tokens=load.prompt_tokens - prompt_tokens),
            kv=replace(kv, held=kv.held - kv_tokens),
        )

    def _integrate(self, now: float) -> None:
        """Take the time since the last change into account, before the next."""
        state, work = self.state, self.work
        if state.in_flight:
            work.silence_s += now - work.silent_from
        work.silent_from = now
        work.sequence_s += state.load.sequences * (now - work.summed_at)
        work.summed_at = now

    @property
    def learns(self) -> bool:
        """Tell whether the speed is learned from answers, for lack of a profile."""
        speed = self.state.speed
        return speed is None or not speed.profiled

    def work_at(self, now: float) -> tuple[float, int]:
        """Return the work so far: sequences integrated over time, in seconds, and prompt tokens."""
        work = self.work
        return work.sequence_s + self.state.load.sequences * (now - work.summed_at), work.prompt_tokens

    def freed_per_s(self, fleet: FleetLoad, output_share: float) -> float:
        """Predict the slots that become free per second, from past hold times, else from the speed model."""
        state, relief_s = self.state, 0.0
        load, slots = load_of(state, self.output_tokens, fleet), state.slots
        if state.speed is not None:
            relief_s = state.speed.relief_ms(load, self.spec.max_num_seqs, output_share) / 1000
        predicted_s = max(load.sequences, 1) * (relief_s or UNKNOWN_RELIEF_S)
        return max(slots, 1) / max(self.turnover.hold_s(fleet.now, slots, predicted_s), SHORTEST_HOLD_S)

    def note_gauges(self, gauges: Gauges) -> None:
        """Take in the engine's gauges. Counters that have gone back show that it was started anew."""
        state, others = self.state, self.others
        if state.gauges is not None and gauges.cache_queries < state.gauges.cache_queries:
            self.prefixes.clear()
        # Two bounds, so that the pressure does not flap.
        bound = self.options.kv_close if state.kv.pressure else self.options.kv_open
        pressure = gauges.kv_cache_usage >= bound
        others.surplus.append(gauges.running + gauges.waiting - state.slots - others.counted.slots)
        others.foreign = max(min(others.surplus), 0) if len(others.surplus) == FOREIGN_POLLS else 0
        self.update(gauges=gauges, kv=replace(state.kv, size=gauges.kv_cache_tokens or 0, pressure=pressure))

    def measured(self, speed: SpeedModel) -> None:
        """Set the speed, and forget the errors of the last one."""
        ttft, tpot = (Trend(0.0, spread**2, 0.0) for spread in (speed.ttft_spread, speed.tpot_spread))
        self.update(speed=speed, trends=Trends(ttft, tpot))
