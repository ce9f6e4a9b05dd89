"""The fleet's state: replicas, the leases that requests hold on them, and frozen snapshots of it all.

One event loop owns a fleet; nothing here awaits, so every change is whole. A lease is given back exactly once, whichever
way its request ends; the counters it carries are the router's own view of load, which is exact where the engines' gauges
lag by seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from tiers.spec import ReplicaState, TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

SPEED_MEMORY = 0.8  # weight of the past in the moving averages of TTFT and TPOT: about the last five requests


@dataclass(frozen=True, slots=True)
class Gauges:
    """An engine's own gauges, as last read. They lag by seconds under load.

    Attributes:
        running: Requests being computed.
        waiting: Requests queued in the engine.
        kv_cache_usage: Share of the KV cache in use, 0..1.
    """

    running: int
    waiting: int
    kv_cache_usage: float


@dataclass(frozen=True, slots=True)
class Speed:
    """A replica's speed with one request at a time: TTFT = base + slope x prompt tokens. Times in milliseconds."""

    ttft_base_ms: float
    prefill_ms_per_token: float
    tpot_ms: float

    def ttft_ms(self, prompt_tokens: int) -> float:
        """Predict the time to first token of an idle replica."""
        return self.ttft_base_ms + self.prefill_ms_per_token * prompt_tokens

    def after(self, prompt_tokens: int, ttft_ms: float, tpot_ms: float | None) -> Speed:
        """Return the estimate moved towards one more answer's times; TTFT moves as a whole, by its ratio."""
        new = 1 - SPEED_MEMORY
        scale = SPEED_MEMORY + new * ttft_ms / max(self.ttft_ms(prompt_tokens), 1.0)
        return Speed(
            ttft_base_ms=self.ttft_base_ms * scale,
            prefill_ms_per_token=self.prefill_ms_per_token * scale,
            tpot_ms=self.tpot_ms if tpot_ms is None else SPEED_MEMORY * self.tpot_ms + new * tpot_ms,
        )


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One replica at one moment."""

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
    gauges: Gauges | None
    speed: Speed | None
    idle_speed: Speed | None = None


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier at one moment."""

    spec: TierSpec
    replicas: tuple[ReplicaSnapshot, ...]

    @property
    def ready(self) -> tuple[ReplicaSnapshot, ...]:
        """Return the replicas that may get traffic."""
        return tuple(r for r in self.replicas if r.state is ReplicaState.READY)

    @property
    def state(self) -> ReplicaState:
        """Return the state of the tier's best replica."""
        return min((r.state for r in self.replicas), key=_BEST_FIRST.index, default=ReplicaState.STOPPED)

    @property
    def has_room(self) -> bool:
        """Tell whether a ready replica can take one more request."""
        return any(r.in_flight < self.spec.max_in_flight for r in self.ready)

    @property
    def speed(self) -> Speed | None:
        """Return the speed of the fastest ready replica, None before any was measured."""
        return min((r.speed for r in self.ready if r.speed), key=lambda s: s.tpot_ms, default=None)

    @property
    def idle_speed(self) -> Speed | None:
        """Return the same as it was measured when the replica was idle: what it can do, not what it does now."""
        return min((r.idle_speed for r in self.ready if r.idle_speed), key=lambda s: s.tpot_ms, default=None)


_BEST_FIRST = [
    ReplicaState.READY,
    ReplicaState.WARMING,
    ReplicaState.STARTING,
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
    """

    tiers: tuple[TierSnapshot, ...]
    template: TemplateTokens

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
    """The fleet's own record of a replica. Outside ``tiers`` it is only held through a lease."""

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
    prompt_tokens: int = 0
    output_tokens: int = 0
    served: int = 0
    failed: int = 0
    gauges: Gauges | None = None
    speed: Speed | None = None
    idle_speed: Speed | None = None

    def __repr__(self) -> str:
        return f"<Replica {self.id} {self.state.value} in_flight={self.in_flight} {self.url}>"

    def mark(self, state: ReplicaState, detail: str | None = None) -> None:
        """Change the state; ``detail`` says why, for a person."""
        self.state, self.detail = state, detail
        if state is not ReplicaState.READY:
            self.gauges = self.speed = self.idle_speed = None

    def snapshot(self) -> ReplicaSnapshot:
        """Return a frozen copy."""
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
            speed=self.speed,
            idle_speed=self.idle_speed,
        )


@dataclass(slots=True, eq=False)
class Lease:
    """One request's hold on one replica. Use as a context manager, or call ``release`` exactly where it ends."""

    replica: Replica
    _prompt_tokens: int
    _output_tokens: int
    _asked_tokens: int
    _released: bool = False

    def first_token(self) -> None:
        """Note that the prompt is computed: its tokens are no longer outstanding."""
        self.replica.prompt_tokens -= self._prompt_tokens
        self._prompt_tokens = 0

    def produced(self, tokens: int = 1) -> None:
        """Note output tokens that have arrived."""
        tokens = min(tokens, self._output_tokens)
        self.replica.output_tokens -= tokens
        self._output_tokens -= tokens

    def finished(self, ttft_ms: float | None, tpot_ms: float | None) -> None:
        """Note a completed answer and its times.

        Args:
            ttft_ms: None for an answer that was not streamed.
            tpot_ms: None for fewer than two tokens.
        """
        self.replica.served += 1
        if self.replica.speed is not None and ttft_ms is not None:
            self.replica.speed = self.replica.speed.after(self._asked_tokens, ttft_ms, tpot_ms)

    def failed(self) -> None:
        """Note an attempt that the replica failed."""
        self.replica.failed += 1

    def release(self) -> None:
        """Give the place back. Only the first call counts."""
        if self._released:
            return
        self._released = True
        self.replica.in_flight -= 1
        self.replica.prompt_tokens -= self._prompt_tokens
        self.replica.output_tokens -= self._output_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


@dataclass(slots=True)
class Fleet:
    """All replicas of all tiers."""

    specs: tuple[TierSpec, ...]
    replicas: list[Replica] = field(default_factory=list)
    template: TemplateTokens = TemplateTokens()

    def add(self, replica: Replica) -> Replica:
        """Add a replica; it gets traffic once it is marked ready."""
        self.replicas.append(replica)
        return replica

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
        self, tier: TierName, *, prompt_tokens: int, max_tokens: int, exclude: Collection[str] = ()
    ) -> Lease | None:
        """Take a place on the tier's least loaded ready replica, or return None if there is none.

        Args:
            tier: Where.
            prompt_tokens: Prompt length with the chat template, in tokens.
            max_tokens: Output tokens at most.
            exclude: Replica ids that were tried already.
        """
        replica = min(self._open(tier, exclude), key=_load, default=None)
        if replica is None:
            return None
        replica.in_flight += 1
        replica.prompt_tokens += prompt_tokens
        replica.output_tokens += max_tokens
        return Lease(replica, prompt_tokens, max_tokens, prompt_tokens)

    def _open(self, tier: TierName, exclude: Collection[str]) -> Iterable[Replica]:
        return (
            r
            for r in self.replicas
            if r.spec.name is tier
            and r.state is ReplicaState.READY
            and r.in_flight < r.spec.max_in_flight
            and r.id not in exclude
        )

    def note_template(self, template: TemplateTokens) -> None:
        """Note what an engine's chat template adds."""
        self.template = self.template.most(template)

    def snapshot(self) -> FleetSnapshot:
        """Return a frozen copy of the whole fleet."""
        return FleetSnapshot(
            tiers=tuple(
                TierSnapshot(spec, tuple(r.snapshot() for r in self.replicas if r.spec.name is spec.name))
                for spec in self.specs
            ),
            template=self.template,
        )


def _load(replica: Replica) -> tuple[int, int]:
    return replica.prompt_tokens + replica.output_tokens, replica.in_flight
