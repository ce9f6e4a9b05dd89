"""Snapshots of the fleet: frozen values that decisions are made from, and that are logged and shown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tiers.breaker import BreakerState
from tiers.preparing import Preparing  # noqa: TC001  pydantic reads these for the decision log
from tiers.spec import ReplicaState, TierName, TierSpec
from tiers.speed import IDLE, STEADY, Load, SpeedModel, Trend


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


def _snapshot_load(replica: ReplicaSnapshot) -> tuple[int, int]:
    return replica.prompt_tokens_outstanding + replica.output_tokens_outstanding, replica.load.sequences
