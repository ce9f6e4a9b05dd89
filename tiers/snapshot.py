"""Snapshots of the fleet: what decisions are made from.

A replica's state is a frozen value, replaced whenever something of the replica changes (``tiers.replica``). A snapshot
refers to the states that there are, and copies none. What changes by itself is not in a state: output tokens to come, with
every token; the load of neighbours, with every other replica; and what fades. The snapshot notes those once for all.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  msgspec reads it for the decision log
from dataclasses import dataclass
from math import exp

from msgspec import Struct

from tiers.breaker import BreakerState
from tiers.preparing import Preparing  # noqa: TC001  msgspec reads it for the decision log
from tiers.spec import (
    UNKNOWN,
    EngineBuild,
    ReplicaStatus,
    TemplateTokens,
    TierName,
    TierSpec,
    VerificationState,
)
from tiers.speed import (
    ALWAYS_MS,
    IDLE,
    PREFILL_MEMORY_MS,
    STEADY,
    ReplicaLoad,
    SpeedModel,
    Trend,
)


@dataclass(frozen=True, slots=True)
class Gauges:
    """An engine's own gauges, as last read. They lag by seconds under load.

    Attributes:
        running: Requests that the engine computes.
        waiting: Requests in the engine's queue.
        kv_cache_usage: Used share of the KV cache, 0..1.
        kv_cache_tokens: Size of the KV cache in tokens; None: not reported.
        drafted: Tokens that its draft model has proposed since it was started; 0: it has no draft model.
        accepted: Proposed tokens that it has accepted.
        kv_block_tokens: Tokens of a block of the KV cache, which prompts share as a whole or not at all; None: not reported.
        cache_queries: Prompt tokens looked up in the prefix cache since it was started.
        cache_hits: Prompt tokens found there.
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
        if not self.drafted:
            return None
        return self.accepted / self.drafted

    @property
    def hit_rate(self) -> float | None:
        """Return the share of prompt tokens that the prefix cache had, 0..1; None: none were looked up."""
        if not self.cache_queries:
            return None
        return self.cache_hits / self.cache_queries


class KvCache(Struct, frozen=True):
    """A replica's KV cache, in tokens.

    Attributes:
        size: Tokens that it has room for; 0: not known.
        held: Tokens that the requests of all routers hold.
        pressure: It is so full that it takes no long prompts.
    """

    size: int = 0
    held: int = 0
    pressure: bool = False


class Trends(Struct, frozen=True):
    """Recent errors of a replica's predictions."""

    ttft: Trend = STEADY
    tpot: Trend = STEADY

    def means(self, now: float, speed: SpeedModel | None) -> tuple[float, float]:
        """Return the means of log(seen / predicted), of TTFT and of TPOT; 0 where no speed is known to predict from."""
        if speed is None:
            return 0.0, 0.0
        ttft_mean, _ = self.ttft.at_time(now, speed.ttft_spread)
        tpot_mean, _ = self.tpot.at_time(now, speed.tpot_spread)
        return ttft_mean, tpot_mean

    def faded(self, now: float, speed: SpeedModel | None) -> Trends:
        """Return the trends at a time; without a speed there are none."""
        if speed is None:
            return Trends()
        return Trends(
            self.ttft.faded(now, speed.ttft_spread),
            self.tpot.faded(now, speed.tpot_spread),
        )


class Pause(Struct, frozen=True):
    """What a circuit breaker says: its state, whether it admits a request, and in how many seconds at the latest."""

    state: BreakerState = BreakerState.CLOSED
    admits: bool = True
    admits_in_s: float = 0.0


NO_PAUSE = Pause()


class ReplicaState(Struct, frozen=True):
    """What is known of a replica.

    Attributes:
        in_flight: The router's requests on it.
        slots: Slots that those requests take, one for each sequence.
        limit: Slots that the router may take.
        prompt_tokens: Prompt tokens of this router's requests that are not computed yet.
        load: The load by all clients, as far as it does not change by itself: without this router's output tokens to come
            and the neighbours; the prompts as of ``prompts_at``, their rate as of ``prefill_at``.
        prompts_at: Monotonic time at which the first of those prompts was begun.
        speed: How fast it is; None: not known.
        build: What its engine computes with; None: it was not asked yet.
        resumes: Its engine resumes answers that others have begun, and tells its tokens in comments.
        verification: What is known of what its engine computes; None: it has not started yet.
        verification_detail: How that is known, for people.
    """

    id: str
    url: str
    precision: str = UNKNOWN
    status: ReplicaStatus = ReplicaStatus.STARTING
    detail: str | None = None
    pid: int | None = None
    in_flight: int = 0
    slots: int = 0
    limit: int = 1 << 30
    prompt_tokens: int = 0
    load: ReplicaLoad = IDLE
    prompts_at: float = 0.0
    prefill_at: float = 0.0
    kv: KvCache = KvCache()
    speed: SpeedModel | None = None
    trends: Trends = Trends()
    breaker: Pause = NO_PAUSE
    served: int = 0
    failed: int = 0
    gauges: Gauges | None = None
    build: EngineBuild | None = None
    resumes: bool = False
    verification: VerificationState | None = None
    verification_detail: str = ""

    @property
    def open(self) -> bool:
        """Tell whether it gets requests."""
        return self.status is ReplicaStatus.READY and self.breaker.admits

    @property
    def slowed(self) -> bool:
        """Tell whether other replicas slow this one."""
        return self.speed is not None and self.speed.contention > 0


class FleetLoad(Struct, frozen=True):
    """How busy a fleet is at one time.

    Attributes:
        now: Monotonic seconds.
        busy: Number of replicas that have requests.
        others: Number of replicas beside each one, at least 1.
        left_ms: Expected time until each busy replica is idle, by its id; None: no replica slows another.
        left_ms_sum: The sum of those times.
        usually: Share of the time that a replica has had requests lately, 0..1.
    """

    now: float
    busy: int
    others: int
    left_ms: Mapping[str, float] | None = None
    left_ms_sum: float = 0.0
    usually: float = 0.0


def prompt_tokens_left(replica: ReplicaState, now: float) -> int:
    """Return the prompt tokens of all clients that a replica has still to compute at one time."""
    prompt_tokens = replica.load.prompt_tokens
    speed = replica.speed
    if not prompt_tokens or speed is None or speed.prefill_ms_per_token <= 0:
        return prompt_tokens
    computed_tokens = int(
        (now - replica.prompts_at) * 1000 / speed.prefill_ms_per_token
    )
    return max(prompt_tokens - computed_tokens, 0)


def load_of(
    replica: ReplicaState, output_tokens: int, fleet: FleetLoad | None
) -> ReplicaLoad:
    """Return a replica's load at one time.

    Args:
        replica: Its state.
        output_tokens: Output tokens to come of this router's requests.
        fleet: How busy the fleet is at that time; None: the state has the whole load, as in a decision log.
    """
    load = replica.load
    if fleet is None:
        return load
    prefill_rate = load.prefill_rate
    if prefill_rate:
        prefill_rate *= exp((replica.prefill_at - fleet.now) * 1000 / PREFILL_MEMORY_MS)
    busy_neighbours = fleet.busy
    if load.sequences:
        busy_neighbours -= 1
    neighbours_left_ms = ALWAYS_MS
    if fleet.left_ms is not None and busy_neighbours:
        own_left_ms = fleet.left_ms.get(replica.id, 0.0)
        neighbours_left_ms = (fleet.left_ms_sum - own_left_ms) / busy_neighbours
    return ReplicaLoad(
        load.sequences,
        prompt_tokens_left(replica, fleet.now),
        output_tokens=output_tokens + load.output_tokens,
        neighbours=busy_neighbours / fleet.others,
        prefill_rate=prefill_rate,
        neighbours_left_ms=neighbours_left_ms,
        neighbours_usually=fleet.usually,
    )


class TierSnapshot(Struct, frozen=True):
    """One tier at one time.

    Attributes:
        replicas: States of its replicas.
        outstanding_tokens: Tokens of this router's requests that each replica has still to compute: of prompts, and of
            outputs.
        preparing: What the tier needs before it serves for the first time; None: nothing.
        cached: Tokens of the request's prompt that each replica's prefix cache is likely to hold; None: not known.
        home: Position of the session's own replica, where no replica is known to hold more of the prompt, or none holds its
            conversation; -1: none is.
        conversation_tokens: Cached tokens from which on a replica holds the prompt's conversation; 0: it begins with the
            prompt, or that is not known.
    """

    spec: TierSpec
    replicas: tuple[ReplicaState, ...]
    outstanding_tokens: tuple[int, ...]
    preparing: Preparing | None = None
    cached: tuple[int, ...] | None = None
    home: int = -1
    conversation_tokens: int = 0

    @property
    def output_tokens(self) -> list[int]:
        """Return the output tokens to come on each replica, of this router's requests."""
        return [
            tokens - replica.prompt_tokens
            for replica, tokens in zip(
                self.replicas, self.outstanding_tokens, strict=True
            )
        ]

    def load_at(self, position: int, fleet: FleetLoad | None) -> ReplicaLoad:
        """Return the load of the replica at a position; for ``fleet`` see ``load_of``."""
        replica = self.replicas[position]
        output_tokens = self.outstanding_tokens[position] - replica.prompt_tokens
        return load_of(replica, output_tokens, fleet)

    @property
    def ready(self) -> list[ReplicaState]:
        """Return the replicas that may get traffic."""
        return [
            replica
            for replica in self.replicas
            if replica.status is ReplicaStatus.READY
        ]

    @property
    def status(self) -> ReplicaStatus:
        """Return the status of the tier's best replica; without replicas, say whether one is being prepared."""
        if self.replicas:
            return min(
                [replica.status for replica in self.replicas], key=_BEST_FIRST.index
            )
        if self.preparing is not None:
            is_failed = self.preparing.failed is not None
            return ReplicaStatus.FAILED if is_failed else ReplicaStatus.PREPARING
        if self.spec.awaited:
            return ReplicaStatus.WAITING
        if self.spec.absent:
            return ReplicaStatus.ABSENT
        return ReplicaStatus.STOPPED


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


class FleetSnapshot(Struct, frozen=True):
    """The fleet at one time: the input of a routing decision.

    Attributes:
        tiers: The tiers, by rising precision.
        template: What the chat template adds to prompts.
        output_share: Recent output tokens over those that requests allowed, 0..1.
        long_prompt_tokens: A replica whose KV cache is nearly full takes no prompts above this.
        load: How busy the fleet is; None: the replicas' states have their whole loads, as in a decision log.
        answer_tokens: Mean output tokens of recent answers; None: not known.
    """

    tiers: tuple[TierSnapshot, ...]
    template: TemplateTokens
    output_share: float = 1.0
    long_prompt_tokens: int = 512
    load: FleetLoad | None = None
    answer_tokens: float | None = None

    def tier(self, name: TierName) -> TierSnapshot:
        """Return one tier.

        Raises:
            KeyError: The fleet has no such tier.
        """
        for tier in self.tiers:
            if tier.spec.name is name:
                return tier
        raise KeyError(name)
