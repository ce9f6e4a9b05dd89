"""How many engines a load needs, and what they cost.

An engine that decodes ``b`` sequences at once computes each one's prompt once, while the others wait. So an answer of ``n``
tokens takes ``n * step(b) + b * prefill``, and the engine serves ``b`` requests in that time; the time between two tokens is
that divided by ``n``. ``b`` is the largest batch for which there is KV cache, that the settings allow, and that keeps the
bound on the time between tokens. Engines are planned to be busy for ``MOST_BUSY`` of the time: arrivals come in bursts.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from tiers.errors import PlanError
from tiers.plan import GIB, GPU_OVERHEAD_GIB, GPU_RESERVE
from tiers.sizing.roofline import BYTES_PER_WEIGHT, Roofline
from tiers.spec import PRECISIONS, STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiers.sizing.architecture import Architecture
    from tiers.sizing.hardware import GpuKind, Prices

MOST_BUSY = 0.8
MOST_GPUS = 16  # of one engine
HOUR_S = 3600


class Pace(Protocol):
    """An engine's speed: a roofline, or a measured model (``tiers.speed.SpeedModel``). Times in milliseconds."""

    @property
    def prefill_ms_per_token(self) -> float:
        """Return the time of each prompt token."""

    def step_ms(self, sequences: int) -> float:
        """Return the time of one decode step."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of the fleet.

    Attributes:
        requests_per_s: None: not known; then every tier has one replica.
        prompt_tokens: Of a request, in the mean.
        output_tokens: Of an answer, in the mean; at least 1.
        context: Tokens that the longest sequences have.
        max_num_seqs: Sequences that an engine decodes at once.
        tpot_ms: Longest time between two tokens; None: any.
        shares: Of the requests, by tier; they add up to 1.
    """

    requests_per_s: float | None
    prompt_tokens: int
    output_tokens: int
    context: int
    max_num_seqs: int = 256
    tpot_ms: float | None = None
    shares: Mapping[TierName, float] | None = None

    def share(self, tier: TierName) -> float:
        """Return the share of the requests that a tier gets: the same for each, unless it is given."""
        return 1 / len(STANDARD_TIERS) if self.shares is None else self.shares.get(tier, 0.0)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier. Sizes in bytes, of the whole engine, all its GPUs together; None: not known.

    Attributes:
        weights_bytes: Of the checkpoint.
        kv_bytes_per_token: Of all layers; sliding windows hold their last tokens only.
        kv_bytes_per_sequence: Of a sequence as long as the context, its recurrent state included.
        gpus_per_replica: Tensor parallelism; 0: the processor.
        max_sequences: That the KV cache holds at once, each as long as the context.
        batch: Sequences decoded at once.
        ttft_ms: Of the mean prompt, without waiting.
        tpot_ms: At this batch.
        requests_per_s: That one replica can serve.
        tokens_per_s: Of output, likewise.
        gpu_seconds_per_request: Of the engine, times its GPUs.
        share: Of the requests.
        replicas: For that share.
        cost_per_hour: Of all replicas.
        cost_per_million_tokens: Of output, of a replica that is as busy as planned.
        lacks: Why there is no engine of it; then it has no replicas. None: it fits.
    """

    tier: TierName
    precision: str
    weights_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    gpus_per_replica: int
    max_sequences: int
    batch: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    gpu_seconds_per_request: float | None = None
    share: float = 0.0
    replicas: int = 1
    cost_per_hour: float | None = None
    cost_per_million_tokens: float | None = None
    lacks: str | None = None

    @property
    def gpus(self) -> int:
        """Return the GPUs of all replicas."""
        return self.replicas * self.gpus_per_replica


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """All tiers, beside the same load on the highest precision that fits, alone.

    Attributes:
        shared: Whether the tiers' engines share GPUs, one of each tier on every GPU.
        gpus: That are needed.
        available: That there are; None: as many as are needed.
        serves_per_s: Requests that the fleet serves at these shares, as busy as planned.
        gpu_seconds_saved: Share of the GPU time of one precision alone, -inf..1.
        alone: The highest precision that fits, with all requests; None: speed or load is not known.
    """

    tiers: tuple[TierPlan, ...]
    shared: bool
    gpus: int
    available: int | None
    cost_per_hour: float | None
    serves_per_s: float | None = None
    gpu_seconds_saved: float | None = None
    alone: TierPlan | None = None

    @property
    def fits(self) -> bool:
        """Tell whether there are as many GPUs as are needed."""
        return self.available is None or self.gpus <= self.available

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON has them."""
        tiers = [{**asdict(tier), "gpus": tier.gpus} for tier in self.tiers]
        return {**asdict(self), "tiers": tiers, "fits": self.fits}


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


def plan_on_gpus(
    model: Architecture,
    gpu: GpuKind,
    available: int | None,
    demand: Demand,
    *,
    prices: Prices,
    kv_bytes: int = 2,
    paces: Mapping[TierName, Pace] | None = None,
) -> FleetPlan:
    """Plan three tiers on GPUs of one kind.

    Where there are too few GPUs for an engine of each tier, one of each shares every GPU, as ``qarr up`` does.

    Args:
        model: What is served.
        gpu: The kind.
        available: How many there are; None: as many as are needed.
        demand: The load.
        prices: Of GPUs.
        kv_bytes: Of a value in the KV cache: 2 in BF16, 1 in FP8.
        paces: Measured speeds on this kind of GPU, by tier; for others, the roofline.

    Raises:
        PlanError: The model does not fit; the text has the arithmetic.
    """
    site = _Site(model, gpu, demand, kv_bytes, paces or {})
    fitting = {tier: site.engines(tier, available) for tier in PRECISIONS}
    lacking = {tier: site.why_not(tier, available) for tier, found in fitting.items() if not found}
    price = prices.of(gpu)
    own: list[Engine] = []
    for choose in (site.cheapest, _smallest):
        own = [choose(engines) for engines in fitting.values() if engines]
        if own and (available is None or sum(engine.gpus for engine in own) <= available):
            return _fleet(own, model, demand, price, available, lacking=lacking)
    if shared := site.sharing():
        return _fleet(shared, model, demand, price, available, shared=True)
    if not own:
        raise PlanError(next(iter(lacking.values())))
    return _fleet(own, model, demand, price, available, lacking=lacking)


def plan_on_cpu(
    model: Architecture,
    demand: Demand,
    *,
    kv_cache: int,
    weights: Mapping[TierName, int],
    paces: Mapping[TierName, Pace],
) -> FleetPlan:
    """Plan three tiers whose engines share the processor, as ``qarr up`` does.

    Args:
        model: What is served.
        demand: The load.
        kv_cache: Of each engine, in bytes.
        weights: In bytes, by tier; of those left out, as estimated.
        paces: Measured speeds, by tier.
    """
    engines = [
        Engine(
            tier,
            precision,
            weights.get(tier, model.weight_bytes(BYTES_PER_WEIGHT[precision])),
            0,
            kv_cache,
            2,
            paces.get(tier),
        )
        for tier, precision in PRECISIONS.items()
    ]
    return _fleet(engines, model, demand, None, None, shared=True)


@dataclass(frozen=True, slots=True)
class _Site:
    """Where engines are planned: the arguments of ``plan_on_gpus``."""

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

    def sharing(self) -> list[Engine]:
        """Return an engine of each tier, all on one GPU; none if they do not fit."""
        left = self._usable - sum(map(self._weights, PRECISIONS)) - len(PRECISIONS) * int(GPU_OVERHEAD_GIB * GIB)
        kv_cache = left // len(PRECISIONS)
        if kv_cache < self._sequence(1):
            return []
        return [self._engine(tier, self._weights(tier), 1, kv_cache) for tier in PRECISIONS]

    def cheapest(self, engines: Sequence[Engine]) -> Engine:
        """Return the engine that needs the fewest GPUs for its tier's load, and then the least GPU time a request."""

        def cost(engine: Engine) -> tuple[int, float]:
            planned = _tier(engine, self.model, self.demand, self.demand.share(engine.tier))
            return 0 if self.demand.requests_per_s is None else planned.gpus, planned.gpu_seconds_per_request or 0.0

        return min(engines, key=cost)

    def _engine(self, tier: TierName, weights: int, gpus: int, kv_cache: int) -> Engine:
        decoded = self.demand.prompt_tokens + self.demand.output_tokens // 2
        roofline = Roofline(self.model, self.gpu, PRECISIONS[tier], gpus, decoded, self.kv_bytes)
        return Engine(tier, PRECISIONS[tier], weights, gpus, kv_cache, self.kv_bytes, self.paces.get(tier, roofline))

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
        return [n for n in (1, 2, 4, 8, 16) if n <= most and self.model.attention_heads % n == 0]


def _smallest(engines: Sequence[Engine]) -> Engine:
    return engines[0]


def _fleet(
    engines: Sequence[Engine],
    model: Architecture,
    demand: Demand,
    price: float | None,
    available: int | None,
    *,
    shared: bool = False,
    lacking: Mapping[TierName, str] | None = None,
) -> FleetPlan:
    """Return the plan of engines that fit, by rising precision; the shares of those that do not fit go to them."""
    whole = sum(demand.share(engine.tier) for engine in engines)
    tiers = [_tier(e, model, demand, demand.share(e.tier) / whole if whole else 1 / len(engines)) for e in engines]
    alone = _tier(engines[-1], model, demand, 1.0)
    mixed = serves = None
    if alone.gpu_seconds_per_request is not None and all(tier.gpu_seconds_per_request is not None for tier in tiers):
        mixed = sum(tier.share * (tier.gpu_seconds_per_request or 0.0) for tier in tiers)
        if shared:
            count = _count(demand.requests_per_s, MOST_BUSY / mixed)
            tiers, serves = [replace(tier, replicas=count) for tier in tiers], count * MOST_BUSY / mixed
        else:
            serves = min(t.replicas * MOST_BUSY * (t.requests_per_s or 0.0) / t.share for t in tiers if t.share)
    gpus = sum(tier.gpus for tier in tiers) // (len(tiers) if shared else 1)
    rows = {tier.tier: _priced(tier, demand, price, 1 / len(tiers) if shared else 1.0) for tier in tiers}
    rows |= {tier: _absent(model, tier, demand, engines[0].kv_bytes, why) for tier, why in (lacking or {}).items()}
    saved = None if mixed is None or not alone.gpu_seconds_per_request else 1 - mixed / alone.gpu_seconds_per_request
    return FleetPlan(
        tuple(rows[tier] for tier in STANDARD_TIERS if tier in rows),
        shared,
        gpus,
        available,
        None if price is None else gpus * price,
        serves,
        saved,
        None if mixed is None or demand.requests_per_s is None else _priced(alone, demand, price, 1.0),
    )


def _absent(model: Architecture, tier: TierName, demand: Demand, kv_bytes: int, why: str) -> TierPlan:
    """Return the plan of a tier that does not fit."""
    weights = model.weight_bytes(BYTES_PER_WEIGHT[PRECISIONS[tier]])
    each = model.kv_bytes_per_token(kv_bytes), model.sequence_bytes(demand.context, kv_bytes)
    return TierPlan(tier, str(PRECISIONS[tier]), weights, *each, 0, 0, 0, replicas=0, lacks=why)


def _tier(engine: Engine, model: Architecture, demand: Demand, share: float) -> TierPlan:
    gpus = max(engine.gpus, 1)
    each = model.sequence_bytes(demand.context, engine.kv_bytes, gpus)
    most = engine.kv_cache // each
    found = TierPlan(
        engine.tier,
        str(engine.precision),
        engine.weights,
        model.kv_bytes_per_token(engine.kv_bytes),
        model.sequence_bytes(demand.context, engine.kv_bytes),
        engine.gpus,
        most,
        min(most, demand.max_num_seqs),
        share=share,
    )
    if engine.pace is None:
        return found
    prefill, tokens = engine.pace.prefill_ms_per_token * demand.prompt_tokens, demand.output_tokens

    def between(batch: int) -> float:
        assert engine.pace is not None
        return engine.pace.step_ms(batch) + batch * prefill / tokens

    # More sequences fit if they are as long as the mean, not as the longest.
    usual = model.sequence_bytes(demand.prompt_tokens + tokens // 2, engine.kv_bytes, gpus)
    batch = max(min(engine.kv_cache // max(usual, 1), demand.max_num_seqs), 1)
    if demand.tpot_ms is not None:
        bound = demand.tpot_ms
        batch = next((b for b in range(batch, 0, -1) if between(b) <= bound), 0)
        if not batch:
            raise PlanError(
                f"{engine.tier} takes {between(1):.1f} ms a token even for one sequence: --tpot {bound:g} cannot be kept"
            )
    step = between(batch)
    rate = batch / (tokens * step / 1000)
    return replace(
        found,
        batch=batch,
        ttft_ms=prefill + engine.pace.step_ms(batch),
        tpot_ms=step,
        requests_per_s=rate,
        tokens_per_s=rate * tokens,
        gpu_seconds_per_request=gpus / rate,
        replicas=_count(None if demand.requests_per_s is None else demand.requests_per_s * share, MOST_BUSY * rate),
    )


def _priced(tier: TierPlan, demand: Demand, price: float | None, part: float) -> TierPlan:
    """Return a tier with its cost; ``part`` of each GPU is its own."""
    if price is None:
        return tier
    hour = tier.gpus * price * part
    million = None
    if tier.gpu_seconds_per_request is not None:
        million = tier.gpu_seconds_per_request / MOST_BUSY * price / HOUR_S / demand.output_tokens * 1e6
    return replace(tier, cost_per_hour=hour, cost_per_million_tokens=million)


def _count(load: float | None, each: float) -> int:
    """Return the replicas for a load, at least one."""
    return 1 if load is None else max(math.ceil(load / each - 1e-9), 1)
