"""Snapshots of the fleet: frozen values that decisions are made from, and that are logged and shown.

Each replica keeps its view (``KeptReplica``), and replaces it when the replica changes. What changes by itself is not in
it: output tokens to come, with every token; neighbours, with every other replica; and the recent rate of prompts and errors
of predictions, which fade. A snapshot takes the views that are there, notes the rest once for all (``Moment``), and puts
both together where somebody reads a replica. The result is the same as if every replica had been copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from tiers.breaker import BreakerState
from tiers.choice import Ask, Candidate, Warmth, preferred, tell_apart, uncached
from tiers.preparing import Preparing  # noqa: TC001  pydantic reads these for the decision log
from tiers.spec import UNKNOWN, ReplicaStatus, TierName, TierSpec
from tiers.speed import ALWAYS_MS, IDLE, PREFILL_MEMORY_MS, STEADY, Load, SpeedModel, Times, Trend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Gauges:
    """An engine's own gauges, as last read. They lag by seconds under load.

    Attributes:
        running: Requests that the engine computes.
        waiting: Requests in the engine's queue.
        kv_cache_usage: Used share of the KV cache, 0..1.
        kv_cache_tokens: Size of the KV cache in tokens; None: not reported.
        drafted: Tokens that its draft has proposed since it was started; 0: it has none.
        accepted: Those of them that it has accepted.
        kv_block_tokens: Tokens of a block of the KV cache, of which only whole ones are shared; None: not reported.
        cache_queries: Prompt tokens looked up in the prefix cache since it was started.
        cache_hits: Those of them that were found.
    """

    running: int
    waiting: int
    kv_cache_usage: float
    kv_cache_tokens: int | None = None
    drafted: int = 0
    accepted: int = 0
    kv_block_tokens: int | None = None
    cache_queries: int = 0
    cache_hits: int = 0

    @property
    def acceptance(self) -> float | None:
        """Return the share of proposed tokens that were accepted, 0..1; None: none were proposed."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def hit_rate(self) -> float | None:
        """Return the share of prompt tokens that the prefix cache had, 0..1; None: none were looked up."""
        return self.cache_hits / self.cache_queries if self.cache_queries else None


class Expectation(NamedTuple):
    """Predicted times of one answer in milliseconds, and the standard deviations of log(seen / predicted).

    ``drift`` is the recent seen TPOT over the speed model's, by which ``tpot_ms`` is corrected.
    """

    ttft_ms: float
    tpot_ms: float
    ttft_spread: float
    tpot_spread: float
    drift: float = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One replica at one moment.

    Attributes:
        in_flight: The router's requests on it.
        places: Slots that those take, one for each sequence; None: one each. The decision log has this name.
        cached_tokens: Tokens of the request's prompt that its prefix cache is likely to hold; None: not known.
        home: It is the own replica of the request's session, and no replica is known to hold more of the prompt.
    """

    id: str
    url: str
    pid: int | None
    state: ReplicaStatus
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
    precision: str = UNKNOWN
    cached_tokens: int | None = None
    home: bool = False

    @property
    def open(self) -> bool:
        """Tell whether it gets requests."""
        return self.state is ReplicaStatus.READY and self.admits

    @property
    def taken(self) -> int:
        """Return the number of taken slots."""
        return self.in_flight if self.places is None else self.places

    def expect(
        self,
        prompt_tokens: int,
        max_num_seqs: int,
        output_share: float,
        sequences: int = 1,
        *,
        output_tokens: float = 0.0,
    ) -> Expectation | None:
        """Predict the times of one more request, as ``SpeedModel.times``; None while the speed is unknown."""
        if self.speed is None:
            return None
        times = self.speed.times(
            prompt_tokens, self.load, max_num_seqs, output_share, sequences, output_tokens=output_tokens
        )
        ttft, tpot = self.ttft_trend, self.tpot_trend
        return _expectation(times, ttft.mean, ttft.variance, tpot.mean, tpot.variance)


def _expectation(
    times: Times, ttft_mean: float, ttft_variance: float, tpot_mean: float, tpot_variance: float
) -> Expectation:
    """Correct predicted times by the recent errors of predictions: mean and variance of log(seen / predicted)."""
    drift = exp(tpot_mean)
    return Expectation(
        times.ttft_ms * exp(ttft_mean), times.tpot_ms * drift, sqrt(ttft_variance), sqrt(tpot_variance), drift
    )


@dataclass(slots=True)  # never changed
class Moment:
    """What all replicas' views lack.

    Attributes:
        now: Monotonic seconds.
        busy: Number of replicas that have requests.
        others: Number of replicas beside each one, at least 1.
        left_ms: Expected time until each busy replica is idle, by its id; None: no replica slows another.
        left_ms_sum: Of all of them.
        usually: Share of the time that a replica has had requests lately, 0..1.
    """

    now: float
    busy: int
    others: int
    left_ms: Mapping[str, float] | None = None
    left_ms_sum: float = 0.0
    usually: float = 0.0


@dataclass(slots=True, eq=False)  # never changed; freezing would make each ten times as dear to make
class KeptReplica:
    """A replica's view, as ``ReplicaSnapshot``, apart from what changes by itself.

    Attributes:
        prompt_tokens: Of this router's requests, to be computed.
        open: It gets requests.
        sequences: On the replica, those of other routers and clients included.
        prompt_tokens_there: As ``prompt_tokens``, with other routers' requests.
        prompts_at: Monotonic time at which the first of those prompts was begun.
        output_tokens_elsewhere: Output tokens to come of other routers' requests.
        prefill_rate: Prompt tokens per millisecond at ``prefill_at``.
    """

    id: str
    url: str
    pid: int | None
    state: ReplicaStatus
    detail: str | None
    in_flight: int
    prompt_tokens: int
    served: int
    failed: int
    gauges: Gauges | None
    speed: SpeedModel | None
    ttft_trend: Trend
    tpot_trend: Trend
    breaker: BreakerState
    admits: bool
    admits_in_s: float
    limit: int
    kv_tokens: int
    kv_tokens_held: int
    kv_pressure: bool
    taken: int
    open: bool
    sequences: int
    prompt_tokens_there: int
    prompts_at: float
    output_tokens_elsewhere: int
    prefill_rate: float
    prefill_at: float
    precision: str

    @property
    def contended(self) -> bool:
        """Tell whether other replicas slow this one."""
        return self.speed is not None and self.speed.contention > 0

    def load(self, output_tokens: int, moment: Moment) -> Load:
        """Return the load, with this router's output tokens to come."""
        there, rate, now, speed = self.sequences, self.prefill_rate, moment.now, self.speed
        prompts, busy = self.prompt_tokens_there, moment.busy - (there > 0)
        if prompts and speed is not None and speed.prefill_ms_per_token > 0:
            prompts = max(prompts - int((now - self.prompts_at) * 1000 / speed.prefill_ms_per_token), 0)
        left_ms, usually = ALWAYS_MS, 0.0
        left = moment.left_ms
        if left is not None:
            usually = moment.usually
            if busy:
                left_ms = (moment.left_ms_sum - left.get(self.id, 0.0)) / busy
        return Load(
            there,
            prompts,
            output_tokens + self.output_tokens_elsewhere,
            busy / moment.others,
            rate * exp((self.prefill_at - now) * 1000 / PREFILL_MEMORY_MS) if rate else 0.0,
            left_ms,
            usually,
        )

    def trends(self, now: float) -> tuple[float, float]:
        """Return the means of the errors of predictions, of TTFT and of TPOT."""
        if self.speed is None:
            return 0.0, 0.0
        ttft, tpot = self.ttft_trend, self.tpot_trend
        return ttft.at_time(now, self.speed.ttft_spread)[0], tpot.at_time(now, self.speed.tpot_spread)[0]

    def whole(
        self, output_tokens: int, moment: Moment, cached: int | None = None, *, home: bool = False
    ) -> ReplicaSnapshot:
        """Return the replica at one moment."""
        speed, now = self.speed, moment.now
        return ReplicaSnapshot(
            id=self.id,
            url=self.url,
            pid=self.pid,
            state=self.state,
            detail=self.detail,
            in_flight=self.in_flight,
            prompt_tokens_outstanding=self.prompt_tokens,
            output_tokens_outstanding=output_tokens,
            served=self.served,
            failed=self.failed,
            gauges=self.gauges,
            load=self.load(output_tokens, moment),
            speed=speed,
            ttft_trend=self.ttft_trend.faded(now, speed.ttft_spread) if speed else STEADY,
            tpot_trend=self.tpot_trend.faded(now, speed.tpot_spread) if speed else STEADY,
            breaker=self.breaker,
            admits=self.admits,
            admits_in_s=self.admits_in_s,
            limit=self.limit,
            kv_tokens=self.kv_tokens,
            kv_tokens_held=self.kv_tokens_held,
            kv_pressure=self.kv_pressure,
            places=self.taken,
            precision=self.precision,
            cached_tokens=cached,
            home=home,
        )


def faded_rate(rate: float, at: float, now: float) -> float:
    """Return an exponentially weighted rate of prompt tokens, known at one time, at another (monotonic seconds)."""
    return rate * exp((at - now) * 1000 / PREFILL_MEMORY_MS)


# What a tier offers a request: whether a replica takes it now; and, of the replica that would serve it, or if all are full
# of the first ready one, the speed, the predicted times, and the prompt tokens in its prefix cache. None: unknown.
Offer = tuple[bool, SpeedModel | None, Expectation | None, int | None]
NO_OFFER: Offer = (False, None, None, None)


def has_slots(sequences: int, taken: int, limit: int) -> bool:
    """Tell whether enough slots are free. A request with more sequences than there are slots needs all of them free."""
    return limit > 0 and taken + (min(limit, sequences)) <= limit


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
        return tuple(r for r in self.replicas if r.state is ReplicaStatus.READY)

    @property
    def views(self) -> Sequence[ReplicaSnapshot | KeptReplica]:
        """Return what there is of the ready replicas without making them whole."""
        return self.ready

    @property
    def is_ready(self) -> bool:
        """Tell whether a replica may get traffic."""
        return bool(self.ready)

    @property
    def taken(self) -> int:
        """Return the number of taken slots."""
        return sum(r.taken for r in self.replicas)

    @property
    def state(self) -> ReplicaStatus:
        """Return the state of the tier's best replica; without replicas, whether one is being prepared."""
        return _best([replica.state for replica in self.replicas], self.preparing, self.spec)

    def ask(self, prompt_tokens: int, output_tokens: float, sequences: int, fleet: FleetSnapshot) -> Ask:
        """Return what a request needs of a replica.

        Args:
            prompt_tokens: Of its prompts.
            output_tokens: Expected output of all its sequences.
            sequences: Of the request.
            fleet: The fleet at the same moment.
        """
        spec, long = self.spec, prompt_tokens > fleet.long_prompt_tokens
        most, at_once = spec.max_in_flight, spec.max_num_seqs
        return Ask(prompt_tokens, output_tokens, sequences, long, most, at_once, fleet.output_share)

    def next(self, ask: Ask) -> ReplicaSnapshot | None:
        """Return the replica that would serve a request; None if none takes it now."""
        candidates = [_candidate(n, r) for n, r in enumerate(self.replicas) if takes(r, ask)]
        if not candidates:
            return None
        if any(one.home for one in candidates) or tell_apart([one.cached for one in candidates]):
            return self.replicas[preferred(candidates, ask)]
        return self.replicas[min(candidates, key=_load_first).position]

    def offer(self, prompt_tokens: int, output_tokens: float, sequences: int, fleet: FleetSnapshot) -> Offer:
        """Return what the tier offers a request; the arguments are those of ``ask``."""
        found = self.next(self.ask(prompt_tokens, output_tokens, sequences, fleet))
        replica = found or next(iter(self.ready), None)
        if replica is None:
            return NO_OFFER
        each, most, cached = output_tokens / sequences, self.spec.max_num_seqs, replica.cached_tokens
        to_read = uncached(prompt_tokens, cached)
        times = replica.expect(to_read, most, fleet.output_share, sequences, output_tokens=each)
        return found is not None, replica.speed, times, cached


class KeptTier(TierSnapshot):
    """A tier of kept views. Its whole replicas are made when they are read for the first time."""

    __slots__ = ("_kept",)
    _kept: tuple[Sequence[KeptReplica], Sequence[int], int, Moment, Warmth | None]  # as ``__init__`` takes them

    def __init__(
        self,
        spec: TierSpec,
        views: Sequence[KeptReplica],
        outputs: Sequence[int],
        taken: int,
        moment: Moment,
        *,
        warmth: Warmth | None,
        preparing: Preparing | None,
    ) -> None:
        fill = object.__setattr__
        fill(self, "spec", spec)
        fill(self, "preparing", preparing)
        fill(self, "_kept", (views, outputs, taken, moment, warmth))

    if not TYPE_CHECKING:  # a type checker would allow any name

        def __getattr__(self, name: str) -> Any:
            if name != "replicas":
                raise AttributeError(name)
            views, outputs, _, moment, warmth = self._kept
            cached, home = warmth or ((None,) * len(views), -1)
            each = enumerate(zip(views, outputs, cached, strict=True))
            found = tuple(v.whole(o, moment, c, home=n == home) for n, (v, o, c) in each)
            object.__setattr__(self, "replicas", found)
            return found

    @property
    def views(self) -> Sequence[ReplicaSnapshot | KeptReplica]:
        """Return the ready replicas' views."""
        return [view for view in self._kept[0] if view.state is ReplicaStatus.READY]

    @property
    def is_ready(self) -> bool:
        """Tell whether a replica may get traffic."""
        return any(view.state is ReplicaStatus.READY for view in self._kept[0])

    @property
    def taken(self) -> int:
        """Return the number of taken slots."""
        return self._kept[2]

    @property
    def state(self) -> ReplicaStatus:
        """Return the state of the tier's best replica; without replicas, whether one is being prepared."""
        return _best([view.state for view in self._kept[0]], self.preparing, self.spec)

    def next(self, ask: Ask) -> ReplicaSnapshot | None:
        """Return the replica that would serve a request, as ``TierSnapshot.next``."""
        views, outputs, _, moment, warmth = self._kept
        found = choose(views, outputs, ask, warmth, moment)
        return self.replicas[found] if found >= 0 else None

    def offer(self, prompt_tokens: int, output_tokens: float, sequences: int, fleet: FleetSnapshot) -> Offer:
        """Return what the tier offers a request, as ``TierSnapshot.offer``."""
        spec, (views, outputs, _, moment, warmth) = self.spec, self._kept
        found = choose(views, outputs, self.ask(prompt_tokens, output_tokens, sequences, fleet), warmth, moment)
        free = found >= 0
        if not free:
            found = next((n for n, view in enumerate(views) if view.state is ReplicaStatus.READY), -1)
            if found < 0:
                return NO_OFFER
        view, cached = views[found], None if warmth is None else warmth.cached[found]
        speed = view.speed
        if speed is None:
            return free, None, None, cached
        load = view.load(outputs[found], moment)
        each, to_read = output_tokens / sequences, uncached(prompt_tokens, cached)
        times = speed.times(to_read, load, spec.max_num_seqs, fleet.output_share, sequences, output_tokens=each)
        ttft_mean, ttft_variance = view.ttft_trend.at_time(moment.now, speed.ttft_spread)
        tpot_mean, tpot_variance = view.tpot_trend.at_time(moment.now, speed.tpot_spread)
        return free, speed, _expectation(times, ttft_mean, ttft_variance, tpot_mean, tpot_variance), cached


def takes(view: KeptReplica | ReplicaSnapshot, ask: Ask) -> bool:
    """Tell whether a replica takes a request now."""
    return (
        view.open
        and has_slots(ask.sequences, view.taken, min(ask.most, view.limit))
        and fits(ask.prompt_tokens + ask.output_tokens, view.kv_tokens_held, view.kv_tokens)
        and not (ask.long and view.kv_pressure)
    )


def choose(
    views: Sequence[KeptReplica], outputs: Sequence[int], ask: Ask, warmth: Warmth | None, moment: Moment
) -> int:
    """Return the position of the replica that takes a request, as ``tiers.choice`` has it; -1: none takes it.

    Args:
        views: Of the replicas.
        outputs: Their output tokens to come.
        ask: The request.
        warmth: What the replicas hold of its prompt; None: not known.
        moment: Of the choice.
    """
    least = least_loaded(views, outputs, ask)
    if warmth is None or least < 0 or (warmth.home < 0 and not tell_apart(warmth.cached)):
        return least
    candidates = [
        Candidate(
            n,
            view.prompt_tokens + outputs[n],
            view.sequences,
            warmth.cached[n],
            n == warmth.home,
            view.speed,
            view.load(outputs[n], moment),
            view.trends(moment.now),
        )
        for n, view in enumerate(views)
        if takes(view, ask)
    ]
    return preferred(candidates, ask)


def least_loaded(views: Sequence[KeptReplica], outputs: Sequence[int], ask: Ask) -> int:
    """Return the position of the replica that takes a request and has the fewest tokens to compute; -1: none takes it.

    Args:
        views: Of the replicas.
        outputs: Their output tokens to come.
        ask: The request.
    """
    found, least, fewest = -1, inf, 0
    for position, view in enumerate(views):
        load = view.prompt_tokens + outputs[position]
        if load > least or not view.open or (load == least and view.sequences >= fewest):
            continue
        if takes(view, ask):
            found, least, fewest = position, load, view.sequences
    return found


def _best(states: Sequence[ReplicaStatus], preparing: Preparing | None, spec: TierSpec) -> ReplicaStatus:
    if states:
        return min(states, key=_BEST_FIRST.index)
    if preparing is not None:
        return ReplicaStatus.PREPARING if preparing.failed is None else ReplicaStatus.FAILED
    if spec.awaited:
        return ReplicaStatus.WAITING
    return ReplicaStatus.ABSENT if spec.absent else ReplicaStatus.STOPPED


_BEST_FIRST = [
    ReplicaStatus.READY,
    ReplicaStatus.WARMING,
    ReplicaStatus.STARTING,
    ReplicaStatus.PREPARING,
    ReplicaStatus.DRAINING,
    ReplicaStatus.UNREACHABLE,
    ReplicaStatus.FAILED,
    ReplicaStatus.QUARANTINED,
    ReplicaStatus.STOPPED,
    ReplicaStatus.WAITING,
    ReplicaStatus.ABSENT,
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
        return sum([tier.taken for tier in self.tiers])

    @property
    def ranks(self) -> dict[TierName, int]:
        """Return each tier's rank by precision: 0 is the lowest."""
        return {tier.spec.name: rank for rank, tier in enumerate(self.tiers)}

    def tier(self, name: TierName) -> TierSnapshot:
        """Return one tier.

        Raises:
            KeyError: The fleet has no such tier.
        """
        for tier in self.tiers:
            if tier.spec.name is name:
                return tier
        raise KeyError(name)


def _candidate(position: int, replica: ReplicaSnapshot) -> Candidate:
    load, tokens = replica.load, replica.prompt_tokens_outstanding + replica.output_tokens_outstanding
    cached = replica.cached_tokens or 0
    trends = replica.ttft_trend.mean, replica.tpot_trend.mean
    return Candidate(position, tokens, load.sequences, cached, replica.home, replica.speed, load, trends)


def _load_first(one: Candidate) -> tuple[int, int]:
    return one.tokens, one.sequences
