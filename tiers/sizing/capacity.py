"""What one engine serves, on each number of GPUs that holds it.

An engine that decodes ``b`` sequences at once computes each one's prompt once, while the others wait. So an answer of ``n``
tokens takes ``n * step(b) + b * prefill``, and the engine serves ``b`` requests in that time; the time between two tokens is
that divided by ``n``. ``b`` is the largest batch for which there is KV cache, that the settings allow, and that keeps the
bound on the time between tokens. Engines are planned to be busy for ``MOST_BUSY`` of the time: arrivals come in bursts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tiers.plan import GIB, GPU_OVERHEAD_GIB, GPU_RESERVE
from tiers.sizing.roofline import BYTES_PER_WEIGHT, Roofline
from tiers.spec import PRECISIONS, TierName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiers.sizing.architecture import Architecture
    from tiers.sizing.hardware import GpuKind

MOST_BUSY = 0.8
MOST_GPUS = 16  # of one engine


class Pace(Protocol):
    """An engine's speed: a roofline, or a measured model (``tiers.speed.SpeedModel``). Times in milliseconds."""

    @property
    def prefill_ms_per_token(self) -> float:
        """Return the time of each prompt token."""

    def step_ms(self, sequences: int) -> float:
        """Return the time of one decode step."""

    def prompt_ms(self, tokens: int, sequences: int, /) -> float:
        """Return by how much a prompt delays the sequences that are being decoded."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What requests are like, and the bounds on their times."""

    prompt_tokens: int  # of a request, in the mean
    output_tokens: int  # of an answer, in the mean; at least 1
    context: int  # tokens that the longest sequences have
    max_num_seqs: int = 256  # sequences that an engine decodes at once
    # longest time to the first token, waiting left out; None: any
    ttft_ms: float | None = None
    tpot_ms: float | None = None  # longest time between two tokens; None: any


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine. Sizes in bytes, of all its GPUs together; None: its speed is not known."""

    tier: TierName
    precision: str
    weights_bytes: int
    # of all layers; sliding windows hold their last tokens only
    kv_bytes_per_token: int
    # of a sequence as long as the context, its recurrent state included
    kv_bytes_per_sequence: int
    gpus_per_replica: int  # tensor parallelism; 0: the processor
    max_sequences: int  # that the KV cache holds at once, each as long as the context
    batch: int  # sequences decoded at once; 0: a bound cannot be kept even by one
    ttft_ms: float | None = None  # of the mean prompt, without waiting
    tpot_ms: float | None = None  # at this batch
    requests_per_s: float | None = None  # that it can serve
    tokens_per_s: float | None = None  # of output, likewise
    pace: Pace | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """One tier's engine, before its load.

    Attributes:
        weights: In bytes, in all.
        kv_cache: In bytes, of one GPU.
        pace: None: not known.
    """

    tier: TierName
    precision: str
    weights: int
    gpus: int
    kv_cache: int
    kv_bytes: int
    pace: Pace | None


def engines_on_gpus(
    model: Architecture,
    gpu: GpuKind,
    available: int | None,
    demand: Demand,
    *,
    kv_bytes: int = 2,
    paces: Mapping[TierName, Pace] | None = None,
) -> tuple[list[EnginePlan], dict[TierName, str]]:
    """Return the engines that GPUs of a kind hold, and with the arithmetic why there is none of a precision.

    Args:
        model: What is served.
        gpu: The kind.
        available: How many there are; None: as many as are needed.
        demand: What requests are like.
        kv_bytes: Of a value in the KV cache: 2 in BF16, 1 in FP8.
        paces: Measured speeds on this kind of GPU, by tier; for others, the roofline.
    """
    site, found, lacks = _Site(model, gpu, demand, kv_bytes, paces or {}), [], {}
    for tier in PRECISIONS:
        engines = site.engines(tier, available)
        plans = [_tier(engine, model, demand) for engine in engines]
        found += [plan for plan in plans if plan.batch]
        if not engines:
            lacks[tier] = site.why_not(tier, available)
        elif not any(plan.batch for plan in plans):
            lacks[tier] = (
                f"{tier} on {gpu.name} cannot keep the bounds on TTFT and time between tokens for one sequence"
            )
    return found, lacks


def engines_on_cpu(
    model: Architecture,
    demand: Demand,
    *,
    kv_cache: Mapping[TierName, int],
    weights: Mapping[TierName, int],
    paces: Mapping[TierName, Pace],
) -> list[EnginePlan]:
    """Return the engine of each tier on this processor, which all of them share.

    Args:
        model: What is served.
        demand: What requests are like.
        kv_cache: In bytes, by tier.
        weights: In bytes, by tier; of those left out, as estimated.
        paces: Measured speeds, by tier.
    """
    held = {
        tier: model.weight_bytes(BYTES_PER_WEIGHT[precision])
        for tier, precision in PRECISIONS.items()
    }
    held.update(weights)
    return [
        _tier(
            Engine(tier, precision, held[tier], 0, kv_cache[tier], 2, paces.get(tier)),
            model,
            demand,
        )
        for tier, precision in PRECISIONS.items()
    ]


@dataclass(frozen=True, slots=True)
class _Site:
    """Where engines are planned: the arguments of ``engines_on_gpus``."""

    model: Architecture
    gpu: GpuKind
    demand: Demand
    kv_bytes: int
    paces: Mapping[TierName, Pace]

    def engines(self, tier: TierName, available: int | None) -> list[Engine]:
        """Return a tier's engine on each number of GPUs that holds it, from the fewest."""
        weights, found = self._weights(tier), []
        for gpus in self._numbers(available):
            kv_cache = self._usable - int(GPU_OVERHEAD_GIB * GIB) - weights // gpus
            if kv_cache >= self._sequence(gpus):
                found.append(self._engine(tier, weights, gpus, kv_cache))
        return found

    def why_not(self, tier: TierName, available: int | None) -> str:
        """Return, with the arithmetic, why a tier's engine fits on none of these numbers of GPUs."""
        gpus, weights = self._numbers(available)[-1], self._weights(tier) / GIB
        free = self._usable / GIB - GPU_OVERHEAD_GIB
        return (
            f"{tier} does not fit on {gpus} x {self.gpu.name}: its weights take {weights:.1f} GiB, {weights / gpus:.1f} a "
            f"GPU, which has {free:.1f} for them and the KV cache, of which one sequence of {self.demand.context} tokens "
            f"takes {self._sequence(gpus) / GIB:.2f}. Take larger GPUs, or more"
        )

    def _engine(self, tier: TierName, weights: int, gpus: int, kv_cache: int) -> Engine:
        decoded = self.demand.prompt_tokens + self.demand.output_tokens // 2
        roofline = Roofline(
            self.model, self.gpu, PRECISIONS[tier], gpus, decoded, self.kv_bytes
        )
        return Engine(
            tier,
            PRECISIONS[tier],
            weights,
            gpus,
            kv_cache,
            self.kv_bytes,
            self.paces.get(tier, roofline),
        )

    def _weights(self, tier: TierName) -> int:
        return self.model.weight_bytes(BYTES_PER_WEIGHT[PRECISIONS[tier]])

    def _sequence(self, gpus: int) -> int:
        """Return the KV cache, in bytes on each GPU, of one sequence as long as the context."""
        return self.model.sequence_bytes(self.demand.context, self.kv_bytes, gpus)

    @property
    def _usable(self) -> int:
        return int(self.gpu.memory * (1 - GPU_RESERVE))

    def _numbers(self, available: int | None) -> list[int]:
        """Return the numbers of GPUs that an engine may have: powers of two that divide the attention heads."""
        most = min(available or MOST_GPUS, MOST_GPUS)
        return [
            n
            for n in (1, 2, 4, 8, 16)
            if n <= most and self.model.attention_heads % n == 0
        ]


def between_ms(pace: Pace, demand: Demand, batch: int) -> float:
    """Return the mean time between two tokens, in milliseconds, of an engine with so many sequences."""
    delay = batch * pace.prompt_ms(demand.prompt_tokens, batch)
    return pace.step_ms(batch) + delay / demand.output_tokens


def _tier(engine: Engine, model: Architecture, demand: Demand) -> EnginePlan:
    gpus = max(engine.gpus, 1)
    each = model.sequence_bytes(demand.context, engine.kv_bytes, gpus)
    most = engine.kv_cache // each
    found = EnginePlan(
        engine.tier,
        str(engine.precision),
        engine.weights,
        model.kv_bytes_per_token(engine.kv_bytes),
        model.sequence_bytes(demand.context, engine.kv_bytes),
        engine.gpus,
        most,
        min(most, demand.max_num_seqs),
        pace=engine.pace,
    )
    pace = engine.pace
    if pace is None:
        return found
    prefill, tokens = (
        pace.prefill_ms_per_token * demand.prompt_tokens,
        demand.output_tokens,
    )

    def between(batch: int) -> float:
        return between_ms(pace, demand, batch)

    def keeps(batch: int) -> bool:
        slow = demand.tpot_ms is not None and between(batch) > demand.tpot_ms
        return not slow and (
            demand.ttft_ms is None or prefill + pace.step_ms(batch) <= demand.ttft_ms
        )

    # More sequences fit if they are as long as the mean, not as the longest. Long answers stay longer: of those that are
    # computed, the mean is about as long as the mean answer at its end.
    usual = model.sequence_bytes(demand.prompt_tokens + tokens, engine.kv_bytes, gpus)
    largest = max(min(engine.kv_cache // max(usual, 1), demand.max_num_seqs), 1)
    batch = next((b for b in range(largest, 0, -1) if keeps(b)), 0)
    if not batch:
        return replace(found, batch=0)
    step = between(batch)
    rate = batch / (tokens * step / 1000)
    ttft = prefill + pace.step_ms(batch)
    return replace(
        found,
        batch=batch,
        ttft_ms=ttft,
        tpot_ms=step,
        requests_per_s=rate,
        tokens_per_s=rate * tokens,
    )
