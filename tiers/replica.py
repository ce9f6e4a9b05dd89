"""A replica: its state, which snapshots refer to and which is replaced when it changes, and what the state follows from."""

from __future__ import annotations

import math
from collections import deque
from copy import copy
from dataclasses import InitVar, dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from msgspec import Struct
from msgspec.structs import replace

from tiers.breaker import Breaker, BreakerOptions
from tiers.limit import ConcurrencyLimit
from tiers.prefix_memory import PrefixMemory
from tiers.snapshot import (
    NO_PAUSE,
    FleetLoad,
    Gauges,
    KvCache,
    Pause,
    ReplicaState,
    Trends,
    load_of,
)
from tiers.spec import ReplicaStatus, TierSpec
from tiers.speed import (
    BUSY_MEMORY_S,
    PREFILL_MEMORY_MS,
    AnswerSample,
    ReplicaLoad,
    SpeedModel,
    Trend,
)

if TYPE_CHECKING:
    from tiers.prefix_memory import Prefix

SHORTEST_HOLD_S = 1e-3  # a slot counts as held for at least this long
# assumed time until a slot becomes free, where a replica's speed is not known
UNKNOWN_RELIEF_S = 1.0
# consecutive readings (4 s) that must show other clients' requests, because gauges lag by seconds
FOREIGN_POLLS = 8
# vLLM's default on GPUs, assumed where an engine does not report it
KV_BLOCK_TOKENS = 16
KEPT_ANSWERS = 256  # per replica, to learn its speed from
HALF_LIFE_S = 60.0  # observed holds lose half of their weight in this time
# The mean time for which a slot is held goes back over about this many freed slots, or over as many as are held now if
# that is more.
MIN_MEMORY = 5.0


class PeerLoad(NamedTuple):
    """Other routers' load on a replica: slots, prompt tokens to compute, output tokens to come, cache tokens."""

    slots: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv_tokens: int = 0


NO_PEERS = PeerLoad()


class SlotShare(NamedTuple):
    """The slots that this router may take of a replica shared with other routers, until a monotonic time.

    Afterwards it may take one: the other routers may no longer count it.
    """

    slots: int
    until: float

    def holds(self, now: float) -> int:
        """Return the slots of the share; 0 once it has expired."""
        return self.slots if now < self.until else 0


class SentPrompt(Struct, frozen=True):
    """A prompt that was sent to a replica.

    Attributes:
        prefix: The prompt as prefix caches see it.
        cached: Tokens of it that the replica was likely to hold.
        blocks: Its first blocks that the router remembered to have sent there.
        used: When those blocks were last used, by the clock of that memory.
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
        sent = cls(
            prefix=prefix,
            cached=replica.cached_tokens(prefix),
            blocks=blocks,
            used=memory.last_used(prefix, blocks),
        )
        memory.note(prefix, replica.state.kv.size)
        return sent

    def correct(self, memory: PrefixMemory, cached: int) -> None:
        """Correct a replica's memory where the engine found less than half of the tokens that were expected."""
        if 2 * cached < self.cached:
            memory.forget_until(self.used)

    def take_back(self, memory: PrefixMemory) -> None:
        """Forget the blocks of a prompt that the replica did not compute; what it held before stays."""
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
        held_s: Slots times the seconds for which they were held.
        freed: Slots that were freed.
        at: Time of the last change.
    """

    held_s: float = 0.0
    freed: float = 0.0
    at: float = math.inf

    def note(self, now: float, held: int, freed: int = 0) -> None:
        """Note the slots held since the last call, and how many of them are freed now."""
        past_s = max(now - self.at, 0.0)
        remaining_share = 0.5 ** (past_s / HALF_LIFE_S)
        self.held_s = self.held_s * remaining_share + held * past_s
        self.freed *= remaining_share
        self.at = now
        if freed:
            memory = max(MIN_MEMORY, held)
            kept_share = (1 - 1 / memory) ** freed
            self.held_s *= kept_share
            self.freed = self.freed * kept_share + (1 - kept_share) * memory

    def hold_s(self, now: float, held: int, predicted_s: float) -> float:
        """Return for how long a slot is expected to be held.

        Args:
            now: Present time.
            held: Slots held now.
            predicted_s: The result without observations; it counts less the more there are.
        """
        observed = copy(self)
        observed.note(now, held)
        prediction_weight = 1 / (1 + observed.freed)
        return (observed.held_s + prediction_weight * predicted_s) / (
            observed.freed + prediction_weight
        )


@dataclass(slots=True)
class OtherClients:
    """Who else uses a replica's engine.

    Attributes:
        share: This router's share of the slots; None: the replica is not shared with other routers.
        peers: What other routers have on it.
        peers_until: Monotonic time up to which their report is valid.
        counted: The part of their load that is included in the replica's state.
        foreign: Sequences of clients that only the gauges show.
        surplus: By how many sequences the last gauges exceeded the requests that routers knew of.
    """

    share: SlotShare | None = None
    peers: PeerLoad = NO_PEERS
    peers_until: float = 0.0
    counted: PeerLoad = NO_PEERS
    foreign: int = 0
    surplus: deque[int] = field(default_factory=lambda: deque(maxlen=FOREIGN_POLLS))

    def peers_at(self, now: float) -> PeerLoad:
        """Return other routers' load, as far as their report is still valid."""
        return self.peers if now < self.peers_until else NO_PEERS

    def next_expiry(self, now: float) -> float:
        """Return the monotonic time at which the share or the report ends, whichever is first; infinity: neither does."""
        expires_at = math.inf
        if self.share is not None and now < self.share.until:
            expires_at = self.share.until
        if now < self.peers_until:
            expires_at = min(expires_at, self.peers_until)
        return expires_at


@dataclass(slots=True)
class ReplicaWork:
    """What a replica has done so far, and for how long it has made no progress.

    Attributes:
        generated: Output tokens.
        prompt_tokens: Prompt tokens that were sent to it.
        sequence_s: Sequences, integrated over time up to ``summed_at``.
        silence_s: Seconds with requests but without progress, up to ``silent_from``.
        generated_at: When the engine's own count of generated tokens was last seen to rise; None: it counts none.
    """

    generated: int = 0
    prompt_tokens: int = 0
    sequence_s: float = 0.0
    summed_at: float = 0.0
    silence_s: float = 0.0
    silent_from: float = 0.0
    generated_at: float | None = None


class WorkMark(Struct, frozen=True):
    """How much work a replica had done at one time.

    Attributes:
        at: Monotonic time.
        sequence_s: Sequences, integrated over time.
        prompt_tokens: Prompt tokens that were sent to it.
    """

    at: float
    sequence_s: float
    prompt_tokens: int


@dataclass(slots=True)
class Answers:
    """A replica's last answers, to learn its speed from; ``noted``: how many there ever were."""

    last: deque[AnswerSample] = field(
        default_factory=lambda: deque(maxlen=KEPT_ANSWERS)
    )
    noted: int = 0


@dataclass(slots=True)
class Totals:
    """Sums over a fleet's replicas.

    Attributes:
        busy: Replicas that have requests.
        contended: Replicas that are slowed by others.
        state_expires_at: Monotonic time at which the first state of a replica expires; it may be too early.
    """

    busy: int = 0
    contended: int = 0
    state_expires_at: float = math.inf
    # mean of ``busy``, exponentially weighted, at ``_busy_at``
    _busy_lately: float = 0.0
    _busy_at: float = 0.0

    def count(self, replica: Replica, sign: int) -> None:
        """Count a replica that is added, or one that is removed (-1)."""
        self.contended += sign * replica.state.slowed
        self.state_expires_at = min(self.state_expires_at, replica.state_expires_at)
        if replica.state.load.sequences:
            self.note_busy(sign, monotonic())

    def note_busy(self, change: int, now: float) -> None:
        """Note that a replica has its first request (1) or has had its last (-1)."""
        self._busy_lately = self.busy_lately(now)
        self._busy_at = now
        self.busy += change

    def busy_lately(self, now: float) -> float:
        """Return the mean number of replicas that have had requests, in about the last ``BUSY_MEMORY_S``."""
        remaining_share = math.exp((self._busy_at - now) / BUSY_MEMORY_S)
        return self.busy + (self._busy_lately - self.busy) * remaining_share


@dataclass(slots=True, eq=False)
class Replica:
    """One replica, over all restarts of its engine.

    Attributes:
        status: The status to begin with.
        fingerprint: The engine's own, from its answers.
        takes_priority: The engine schedules by priority; others refuse requests that have one.
        takes_thinking: The engine takes a bound on tokens of reasoning; others refuse it.
        source: Who names it; None: it was started here.
        outstanding_tokens: Tokens of the router's requests that it has still to compute: of prompts, and of outputs. It
            changes with every token, so it is not in ``state``.
        state: What is known of it; replaced when something changes, by ``Fleet.refresh`` where time changes it.
        state_expires_at: Monotonic time at which a share, a report of other routers or a pause in ``state`` ends.
        prefixes: The prompts that this process has sent to it since its start.
        totals: Sums over the fleet that it belongs to.
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
    outstanding_tokens: int = 0
    state: ReplicaState = field(init=False)
    state_expires_at: float = math.inf
    others: OtherClients = field(default_factory=OtherClients)
    work: ReplicaWork = field(default_factory=ReplicaWork)
    breaker: Breaker = field(init=False)
    limiter: ConcurrencyLimit = field(init=False)
    turnover: Turnover = field(default_factory=Turnover)
    answers: Answers = field(default_factory=Answers)
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self, status: ReplicaStatus) -> None:
        self.state = ReplicaState(
            id=self.id, url=self.url, precision=self.spec.precision, status=status
        )
        self.adopt(self.options)

    @property
    def resumes(self) -> bool:
        """Tell whether the engine resumes answers that others have begun."""
        return self.state.resumes

    def adopt(self, options: FleetOptions) -> None:
        """Take the fleet's options, with a new breaker and a new limit."""
        self.limiter = ConcurrencyLimit.starting(
            self.spec.max_num_seqs, self.spec.max_in_flight
        )
        self.breaker = Breaker(options.breaker, on_open=self.update)
        self.use(options)

    def use(self, options: FleetOptions) -> None:
        """Take new options, without forgetting anything."""
        self.options = options
        self.breaker.options = options.breaker
        self.update()

    def update(self, **facts: Any) -> None:
        """Replace the state: with new facts, and with what follows from the rest of the replica and from the time."""
        now = monotonic()
        before = self.state
        self.state = replace(before, **facts)
        peers = self.others.peers_at(now)
        self.state = replace(
            self.state,
            precision=self.spec.precision,
            limit=self._limit_at(now),
            load=self._load_with(peers),
            kv=self._kv_with(peers),
            breaker=self._pause_at(now),
        )
        self.others.counted = peers
        # A pause changes at every moment, so a state with one has always expired.
        self.state_expires_at = (
            self.others.next_expiry(now) if self.breaker.open_until is None else now
        )
        self._update_totals(before, now)

    def _limit_at(self, now: float) -> int:
        """Return the number of slots that this router may take, at least one of a replica that it shares."""
        share = self.others.share
        if share is None:
            return self.whole_limit
        return min(self.whole_limit, max(share.holds(now), 1))

    def _load_with(self, peers: PeerLoad) -> ReplicaLoad:
        """Return the load of all clients, as far as it does not change by itself."""
        state = self.state
        return ReplicaLoad(
            sequences=state.slots + peers.slots + self.others.foreign,
            prompt_tokens=state.prompt_tokens + peers.prompt_tokens,
            output_tokens=peers.output_tokens,
            prefill_rate=state.load.prefill_rate,
        )

    def _kv_with(self, peers: PeerLoad) -> KvCache:
        """Return the KV cache with other routers' present load instead of the one that was counted before."""
        kv = self.state.kv
        return replace(
            kv, held=kv.held - self.others.counted.kv_tokens + peers.kv_tokens
        )

    def _pause_at(self, now: float) -> Pause:
        breaker = self.breaker
        if breaker.open_until is None:
            return NO_PAUSE
        return Pause(breaker.state(now), breaker.admits(now), breaker.admits_in_s(now))

    def _update_totals(self, before: ReplicaState, now: float) -> None:
        """Take the change of the state into the fleet's sums."""
        state = self.state
        totals = self.totals
        totals.state_expires_at = min(totals.state_expires_at, self.state_expires_at)
        totals.contended += state.slowed - before.slowed
        was_busy = before.load.sequences > 0
        is_busy = state.load.sequences > 0
        if is_busy != was_busy:
            totals.note_busy(is_busy - was_busy, now)

    @property
    def output_tokens(self) -> int:
        """Return the output tokens of the router's requests that are still to come."""
        return self.outstanding_tokens - self.state.prompt_tokens

    @property
    def whole_limit(self) -> int:
        """Return the number of slots, for all routers together."""
        highest = self.spec.max_in_flight
        is_adaptive = self.options.adaptive_limit and not self.learns
        if not is_adaptive:
            return highest
        return min(self.limiter.value, highest)

    def note_share(self, share: SlotShare | None) -> None:
        """Note this router's share of the slots; None: all of them are its own."""
        self.others.share = share
        self.update()

    def note_peers(self, peers: PeerLoad, until: float) -> None:
        """Note other routers' load, valid until a monotonic time."""
        self.others.peers = peers
        self.others.peers_until = until
        self.update()

    def __repr__(self) -> str:
        return f"<Replica {self.id} {self.state.status.value} in_flight={self.state.in_flight} {self.url}>"

    def mark(self, status: ReplicaStatus, detail: str | None = None) -> None:
        """Change the status; ``detail`` gives the reason to people."""
        if status in {ReplicaStatus.READY, ReplicaStatus.DRAINING}:
            self.update(status=status, detail=detail)
            return
        self._forget_engine()
        kv = replace(self.state.kv, pressure=False)
        self.update(status=status, detail=detail, gauges=None, speed=None, kv=kv)

    def _forget_engine(self) -> None:
        """Forget what was learned of the engine, because it has stopped: the next one may differ."""
        self.others.peers = NO_PEERS
        self.others.foreign = 0
        self.others.surplus.clear()
        self.turnover = Turnover()
        self.answers = Answers()
        self.work.generated_at = None
        self.breaker.reset()
        self.prefixes.clear()

    def cached_tokens(self, prefix: Prefix) -> int:
        """Return the tokens of a prompt that its prefix cache is likely to hold: whole blocks, and never all of them."""
        remembered_blocks = self.prefixes.matching(prefix)
        if not remembered_blocks:
            return 0
        gauges = self.state.gauges
        block_tokens = KV_BLOCK_TOKENS
        if gauges is not None and gauges.kv_block_tokens:
            block_tokens = gauges.kv_block_tokens
        prompt_tokens = int(prefix.ends[-1][1])
        remembered_tokens = min(prefix.tokens(remembered_blocks), prompt_tokens - 1)
        return remembered_tokens // block_tokens * block_tokens

    def silence_s(self, now: float) -> float:
        """Return the seconds without progress; times without requests do not count."""
        if not self.state.in_flight:
            return self.work.silence_s
        return self.work.silence_s + (now - self.work.silent_from)

    def may_be_silent_until(
        self, now: float, limit_s: float, *, is_expected: bool
    ) -> float:
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
        if is_expected or is_running:
            return now + limit_s
        return now

    def progressed(self, now: float) -> None:
        """Note that the engine has made progress."""
        self.work.silence_s = 0.0
        self.work.silent_from = now

    def begin(
        self,
        prompt_tokens: int,
        output_tokens: int,
        kv_tokens: int,
        sequences: int,
        now: float,
    ) -> None:
        """Count a request that is sent.

        Args:
            prompt_tokens: Prompt tokens to be computed.
            output_tokens: Most output tokens of all its sequences.
            kv_tokens: Tokens of the KV cache that it is expected to hold.
            sequences: Answers of the request, each of which takes a slot.
            now: Monotonic time.
        """
        state = self.state
        load = state.load
        kv = state.kv
        self._integrate(now)
        self.turnover.note(now, state.slots)
        self.work.prompt_tokens += prompt_tokens
        self.outstanding_tokens += prompt_tokens + output_tokens
        if not load.sequences:
            self.totals.note_busy(1, now)
        faded_prefill_rate = load.prefill_rate * math.exp(
            (state.prefill_at - now) * 1000 / PREFILL_MEMORY_MS
        )
        self.state = replace(
            state,
            in_flight=state.in_flight + 1,
            slots=state.slots + sequences,
            prompt_tokens=state.prompt_tokens + prompt_tokens,
            load=ReplicaLoad(
                sequences=load.sequences + sequences,
                prompt_tokens=load.prompt_tokens + prompt_tokens,
                output_tokens=load.output_tokens,
                prefill_rate=faded_prefill_rate + prompt_tokens / PREFILL_MEMORY_MS,
            ),
            prompts_at=state.prompts_at if load.prompt_tokens else now,
            prefill_at=now,
            kv=replace(kv, held=kv.held + kv_tokens),
        )

    def prompt_computed(self, prompt_tokens: int, now: float) -> None:
        """Note that a prompt is computed, which is progress; the engine has begun the next one."""
        state = self.state
        load = state.load
        self.progressed(now)
        self.outstanding_tokens -= prompt_tokens
        self.state = replace(
            state,
            prompt_tokens=state.prompt_tokens - prompt_tokens,
            load=replace(load, prompt_tokens=load.prompt_tokens - prompt_tokens),
            prompts_at=now,
        )

    def end(
        self,
        prompt_tokens: int,
        output_tokens: int,
        kv_tokens: int,
        sequences: int,
        now: float,
    ) -> None:
        """Count a request that has ended, with what is left of what ``begin`` counted."""
        state = self.state
        load = state.load
        kv = state.kv
        self._integrate(now)
        self.turnover.note(now, state.slots, freed=sequences)
        self.outstanding_tokens -= prompt_tokens + output_tokens
        sequences_left = load.sequences - sequences
        if not sequences_left:
            self.totals.note_busy(-1, now)
        self.state = replace(
            state,
            in_flight=state.in_flight - 1,
            slots=state.slots - sequences,
            prompt_tokens=state.prompt_tokens - prompt_tokens,
            load=replace(
                load,
                sequences=sequences_left,
                prompt_tokens=load.prompt_tokens - prompt_tokens,
            ),
            kv=replace(kv, held=kv.held - kv_tokens),
        )

    def _integrate(self, now: float) -> None:
        """Add the time since the last change to the integrals, before the number of requests changes."""
        state = self.state
        work = self.work
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

    def work_at(self, now: float) -> WorkMark:
        """Return the work up to now."""
        work = self.work
        sequence_s = work.sequence_s + self.state.load.sequences * (
            now - work.summed_at
        )
        return WorkMark(now, sequence_s, work.prompt_tokens)

    def freed_per_s(self, fleet: FleetLoad, output_share: float) -> float:
        """Predict the slots that become free per second, from past hold times, else from the speed model."""
        state = self.state
        load = load_of(state, self.output_tokens, fleet)
        relief_s = 0.0
        if state.speed is not None:
            relief_s = (
                state.speed.relief_ms(load, self.spec.max_num_seqs, output_share) / 1000
            )
        predicted_hold_s = max(load.sequences, 1) * (relief_s or UNKNOWN_RELIEF_S)
        hold_s = self.turnover.hold_s(fleet.now, state.slots, predicted_hold_s)
        return max(state.slots, 1) / max(hold_s, SHORTEST_HOLD_S)

    def note_gauges(self, gauges: Gauges) -> None:
        """Take in the engine's gauges. Counters that have gone back show that it was started anew."""
        state = self.state
        if (
            state.gauges is not None
            and gauges.cache_queries < state.gauges.cache_queries
        ):
            self.prefixes.clear()
        # Two bounds, so that the pressure does not flap.
        bound = self.options.kv_close if state.kv.pressure else self.options.kv_open
        is_under_pressure = gauges.kv_cache_usage >= bound
        self._count_foreign(gauges)
        kv = replace(
            state.kv, size=gauges.kv_cache_tokens or 0, pressure=is_under_pressure
        )
        self.update(gauges=gauges, kv=kv)

    def _count_foreign(self, gauges: Gauges) -> None:
        """Count the sequences of clients that no router knows of: those that each of the last readings shows."""
        others = self.others
        known_sequences = self.state.slots + others.counted.slots
        others.surplus.append(gauges.running + gauges.waiting - known_sequences)
        others.foreign = 0
        if len(others.surplus) == FOREIGN_POLLS:
            others.foreign = max(min(others.surplus), 0)

    def measured(self, speed: SpeedModel) -> None:
        """Set the speed, and forget the errors of the last one."""
        ttft_trend = Trend(mean=0.0, variance=speed.ttft_spread**2, at=0.0)
        tpot_trend = Trend(mean=0.0, variance=speed.tpot_spread**2, at=0.0)
        self.update(speed=speed, trends=Trends(ttft_trend, tpot_trend))
