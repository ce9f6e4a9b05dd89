"""The fleet's own record of a replica: its state, its load, and what was seen of its speed.

A replica keeps the view of itself that snapshots take (``tiers.snapshot``). Whatever changes the view calls ``changed``;
assigning to an attribute that others may assign to does (``_Shown``).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar

from tiers.breaker import Breaker, BreakerOptions, BreakerState
from tiers.limit import ConcurrencyLimit
from tiers.prefix_memory import PrefixMemory
from tiers.snapshot import Gauges, KeptReplica, Moment, faded_rate
from tiers.spec import ReplicaStatus, TierName, TierSpec
from tiers.speed import BUSY_MEMORY_S, PREFILL_MEMORY_MS, STEADY, Seen, SpeedModel, Trend
from tiers.turnover import Turnover

if TYPE_CHECKING:
    from tiers.prefix_memory import Prefix

SHORTEST_HOLD_S = 1e-3  # of a slot
UNKNOWN_RELIEF_S = 1.0  # until a slot of a replica of unknown speed is free
FOREIGN_POLLS = 8  # consecutive readings (4 s) that must show other clients' requests, because gauges lag by seconds
KV_BLOCK_TOKENS = 16  # of an engine that does not tell: vLLM's default on GPUs
KEPT_ANSWERS = 256  # of each replica, to learn its speed from


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


class Sent(NamedTuple):
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
        memory.note(prefix, replica.kv_tokens)
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


T = TypeVar("T")


class _Shown(Generic[T]):
    """An attribute of a replica that is part of its view: assigning to it outdates the view. Reading it costs no call.

    Args:
        default: The value of a new replica.
    """

    def __init__(self, default: T) -> None:
        self._default, self._name = default, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    if TYPE_CHECKING:

        def __get__(self, replica: Replica | None, owner: type) -> T: ...

    def __set__(self, replica: Replica, value: T | _Shown[T]) -> None:
        given = self._default if isinstance(value, _Shown) else value  # a dataclass takes this object for the default
        replica.__dict__[self._name] = given
        replica.stale_at = 0.0


@dataclass(slots=True)
class Totals:
    """Sums over a fleet's views.

    Attributes:
        busy: Replicas that have requests.
        taken: This router's slots, by tier.
        contended: Replicas that are slowed by others.
    """

    busy: int = 0
    taken: Counter[TierName] = field(default_factory=Counter)
    contended: int = 0
    _busy_lately: float = 0.0  # mean of ``busy``, exponentially weighted, at ``_busy_at``
    _busy_at: float = 0.0

    def count(self, tier: TierName, view: KeptReplica, sign: int = 1) -> None:
        """Add a view of one of a tier's replicas, or take it out (-1)."""
        self._became_busy(sign * (view.sequences > 0))
        self.taken[tier] += sign * view.taken
        self.contended += sign * view.contended

    def replace(self, tier: TierName, before: KeptReplica, view: KeptReplica) -> None:
        """Count a view in the place of an earlier one."""
        if (view.sequences > 0) != (before.sequences > 0):
            self._became_busy(1 if view.sequences else -1)
        self.taken[tier] += view.taken - before.taken
        self.contended += view.contended - before.contended

    def _became_busy(self, change: int) -> None:
        now = monotonic()
        self._busy_lately, self._busy_at = self.busy_lately(now), now
        self.busy += change

    def busy_lately(self, now: float) -> float:
        """Return the mean number of replicas that have had requests, in about the last ``BUSY_MEMORY_S``."""
        return self.busy + (self._busy_lately - self.busy) * math.exp((self._busy_at - now) / BUSY_MEMORY_S)


@dataclass(eq=False)
class Replica:
    """The fleet's own record of a replica.

    Attributes:
        fingerprint: The engine's own, from its answers.
        source: Who names it; None: it was started here.
        in_flight: The router's requests on it.
        slots: Slots that those take: one for each sequence.
        share: This router's share of the slots; None: the replica is not shared.
        generated: Output tokens so far.
        seen: The last answers, to learn the speed from.
        noted: Number of answers that ``seen`` was ever given.
        prefixes: The prompts that this process has sent to it since its start.
        view: As last made.
        stale_at: When it must be made again, in monotonic seconds.
        totals: Of the fleet.
    """

    id: str
    spec: TierSpec
    url: str
    api_key: str
    model: str
    takes_priority: bool = True
    fingerprint: str | None = None
    source: str | None = None
    pid: _Shown[int | None] = _Shown(None)
    state: _Shown[ReplicaStatus] = _Shown(ReplicaStatus.STARTING)
    detail: _Shown[str | None] = _Shown(None)
    in_flight: int = 0
    slots: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv_tokens_held: int = 0
    kv_tokens: int = 0
    kv_pressure: bool = False
    share: _Shown[Share | None] = _Shown(None)
    served: int = 0
    failed: int = 0
    generated: int = 0
    gauges: _Shown[Gauges | None] = _Shown(None)
    speed: _Shown[SpeedModel | None] = _Shown(None)
    ttft_trend: _Shown[Trend] = _Shown(STEADY)
    tpot_trend: _Shown[Trend] = _Shown(STEADY)
    options: FleetOptions = field(default_factory=FleetOptions)
    breaker: Breaker = field(init=False)
    limiter: ConcurrencyLimit = field(init=False)
    turnover: Turnover = field(default_factory=Turnover)
    seen: deque[Seen] = field(default_factory=lambda: deque(maxlen=KEPT_ANSWERS))
    noted: int = 0
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)
    view: KeptReplica = field(init=False)
    stale_at: float = 0.0
    totals: Totals = field(default_factory=Totals)
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
    _prompts_at: float = 0.0  # when the first of the prompts was begun that are not computed yet

    def __post_init__(self) -> None:
        self.adopt(self.options)
        self.view = self._look(0.0)
        self.changed()

    def adopt(self, options: FleetOptions) -> None:
        """Take the fleet's options."""
        self.options, self.breaker = options, Breaker(options.breaker, on_open=self.changed)
        self.limiter = ConcurrencyLimit.starting(self.spec.max_num_seqs, self.spec.max_in_flight)
        self.changed()

    def take(self, options: FleetOptions) -> None:
        """Take new options of the fleet, without forgetting anything."""
        self.options = options
        self.breaker.options = options.breaker
        self.changed()

    def changed(self) -> None:
        """Note that the view has changed."""
        self.stale_at = 0.0

    def keep(self, now: float) -> None:
        """Make the view, and keep it until the replica changes."""
        before = self.view
        self.view = self._look(now)
        self.totals.replace(self.spec.name, before, self.view)

    def _look(self, now: float) -> KeptReplica:
        """Return the view, and note when time ends it: a share or a report of other routers expires, a pause ends."""
        share, breaker, others, slots = self.share, self.breaker, NO_PEERS, self.slots
        limit, self.stale_at = self.whole_limit, math.inf
        if share is not None:
            limit = min(limit, max(share.holds(now), 1))
            if now < share.until:
                self.stale_at = share.until
        if now < self._others_until:
            others, self.stale_at = self._others, min(self.stale_at, self._others_until)
        shown, admits, admits_in_s, state = BreakerState.CLOSED, True, 0.0, self.state
        if not breaker.closed:
            shown, admits, admits_in_s = breaker.state(now), breaker.admits(now), breaker.admits_in_s(now)
            self.stale_at = now
        return KeptReplica(
            self.id,
            self.url,
            self.pid,
            state,
            self.detail,
            self.in_flight,
            self.prompt_tokens,
            self.served,
            self.failed,
            self.gauges,
            self.speed,
            self.ttft_trend,
            self.tpot_trend,
            shown,
            admits,
            admits_in_s,
            limit,
            self.kv_tokens,
            self.kv_tokens_held + others.kv_tokens,
            self.kv_pressure,
            slots,
            state is ReplicaStatus.READY and admits,
            slots + others.slots + self._foreign,
            self.prompt_tokens + others.prompt_tokens,
            self._prompts_at,
            others.output_tokens,
            self._prefill_rate,
            self._prefill_at,
            self.spec.precision,
        )

    @property
    def whole_limit(self) -> int:
        """Return the number of slots, for all routers together."""
        speed, most = self.speed, self.spec.max_in_flight
        adapting = self.options.adaptive_limit and speed is not None and speed.profiled
        return min(self.limiter.value, most) if adapting else most

    @property
    def limit(self) -> int:
        """Return the number of slots that this router may take: its share, but at least one."""
        if self.share is None:
            return self.whole_limit
        return min(self.whole_limit, max(self.share.holds(monotonic()), 1))

    @property
    def others(self) -> PeerLoad:
        """Return other routers' load on the replica; nothing once their report is out of date."""
        return self._others if self._others_until and monotonic() < self._others_until else NO_PEERS

    def note_others(self, others: PeerLoad, until: float) -> None:
        """Note other routers' load, valid until a monotonic time."""
        self._others, self._others_until, self.stale_at = others, until, 0.0

    def __repr__(self) -> str:
        return f"<Replica {self.id} {self.state.value} in_flight={self.in_flight} {self.url}>"

    def mark(self, state: ReplicaStatus, detail: str | None = None) -> None:
        """Change the state; ``detail`` gives the reason to people."""
        self.state, self.detail = state, detail
        if state not in {ReplicaStatus.READY, ReplicaStatus.DRAINING}:
            self.gauges = self.speed = None
            self.kv_pressure, self._others = False, NO_PEERS
            self.turnover = Turnover()
            self.breaker.reset()
            self._surplus.clear()
            self.seen.clear()
            self.prefixes.clear()
            self._foreign = self.noted = 0
        self.changed()

    def cached_tokens(self, prefix: Prefix) -> int:
        """Return the tokens of a prompt that its prefix cache is likely to hold: whole blocks, and never all of them."""
        blocks = self.prefixes.matching(prefix)
        if not blocks:
            return 0
        size = (self.gauges.kv_block_tokens if self.gauges is not None else None) or KV_BLOCK_TOKENS
        return min(prefix.tokens(blocks), int(prefix.ends[-1][1]) - 1) // size * size

    def serving(self, adapter: str | None) -> str:
        """Return the engine's name for the model, with an adapter or without."""
        return adapter or self.model

    def silence_s(self, now: float) -> float:
        """Return the seconds without progress; times without requests do not count."""
        return self._silence_s + (now - self._silent_from if self.in_flight else 0.0)

    def progressed(self, now: float) -> None:
        """Note that the engine has made progress."""
        self._silence_s, self._silent_from = 0.0, now

    def took(self, change: int, now: float, slots: int = 1) -> None:
        """Count a request that was sent (1) or has ended (-1), and its slots."""
        if self.in_flight:
            self._silence_s += now - self._silent_from
        self._silent_from, taken = now, self.slots
        self._sequence_s += (taken + self.others.slots + self._foreign) * (now - self._summed_at)
        self._summed_at = now
        self.turnover.note(now, taken, slots if change < 0 else 0)
        self.in_flight += change
        self.slots = taken + change * slots
        self.stale_at = 0.0

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

    def freed_per_s(self, moment: Moment, output_share: float) -> float:
        """Predict the slots that become free per second, from past hold times, else from the speed model."""
        load, relief_s = self.view.load(self.output_tokens, moment), 0.0
        if self.speed is not None:
            relief_s = self.speed.relief_ms(load, self.spec.max_num_seqs, output_share) / 1000
        predicted_s = max(load.sequences, 1) * (relief_s or UNKNOWN_RELIEF_S)
        return max(self.slots, 1) / max(self.turnover.hold_s(moment.now, self.slots, predicted_s), SHORTEST_HOLD_S)

    @property
    def sequences(self) -> int:
        """Return the sequences on the replica: the routers' own, and those of clients that only the gauges show."""
        return self.slots + self.others.slots + self._foreign

    def note_gauges(self, gauges: Gauges) -> None:
        """Take in the engine's gauges."""
        if _began_anew(self.gauges, gauges):
            self.prefixes.clear()
        self.gauges = gauges
        self.kv_tokens = gauges.kv_cache_tokens or 0
        # Two bounds, so that the pressure does not flap.
        bound = self.options.kv_close if self.kv_pressure else self.options.kv_open
        self.kv_pressure = gauges.kv_cache_usage >= bound
        self._surplus.append(gauges.running + gauges.waiting - self.slots - self.others.slots)
        self._foreign = max(min(self._surplus), 0) if len(self._surplus) == FOREIGN_POLLS else 0
        self.changed()

    def measured(self, speed: SpeedModel) -> None:
        """Set the speed, and forget the errors of the last one."""
        self.speed = speed
        self.ttft_trend = Trend(0.0, speed.ttft_spread**2, 0.0)
        self.tpot_trend = Trend(0.0, speed.tpot_spread**2, 0.0)

    def _faded_prefill_rate(self, now: float) -> float:
        return faded_rate(self._prefill_rate, self._prefill_at, now)

    def prompt_sent(self, prompt_tokens: int, now: float) -> None:
        """Count a prompt into the rate of prompt tokens, an exponentially weighted mean; before it is outstanding."""
        self._prefill_rate = self._faded_prefill_rate(now) + prompt_tokens / PREFILL_MEMORY_MS
        self._prefill_at, self.stale_at = now, 0.0
        self._prompts_sent += prompt_tokens
        if not self.prompt_tokens + self.others.prompt_tokens:
            self._prompts_at = now

    def prompt_computed(self, prompt_tokens: int, now: float) -> None:
        """Note that a prompt is computed; the engine has begun the next one."""
        self.prompt_tokens -= prompt_tokens
        self._prompts_at = now
        self.changed()


def _began_anew(before: Gauges | None, now: Gauges | None) -> bool:
    """Tell whether an engine was started anew between two readings: its counters have gone back."""
    return before is not None and now is not None and now.cache_queries < before.cache_queries
