"""What one engine serves, on each number of GPUs that holds it.

An engine that decodes ``b`` sequences at once computes each one's prompt once, while the others wait. So an answer of ``n``
tokens takes ``n * step(b) + b * prefill``, and the engine serves ``b`` requests in that time; the time between two tokens is
that divided by ``n``. ``b`` is the largest batch for which there is KV cache, that the settings allow, and that keeps the
bounds on TTFT and TPOT. Engines are planned to be busy for ``MAX_BUSY_SHARE`` of the time: arrivals come in bursts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tiers.plan import GIB, GPU_OVERHEAD_GIB, GPU_RESERVE
from tiers.sizing.kernels import obstacle_to
from tiers.sizing.roofline import Roofline
from tiers.sizing.tier_format import STANDARD_FORMATS, TierFormat, format_words
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from tiers.sizing.architecture import Architecture
    from tiers.sizing.hardware import GpuKind

MAX_BUSY_SHARE = 0.8
ENGINE_SIZES = (1, 2, 4, 8, 16)  # GPUs of one engine


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
class ServingDemand:
    """What requests are like, and the bounds on their times.

    Attributes:
        prompt_tokens: Mean length of a prompt.
        output_tokens: Mean length of an answer, at least 1.
        context: Tokens of the longest sequences, prompt and answer together.
        max_num_seqs: Sequences that an engine decodes at once.
        ttft_ms: Longest time to the first token, waiting left out; None: there is no bound.
        tpot_ms: Longest time between two tokens; None: there is no bound.
    """

    prompt_tokens: int
    output_tokens: int
    context: int
    max_num_seqs: int = 256
    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine. Sizes are in bytes, of all its GPUs together. Times and rates are None if its speed is not known.

    Attributes:
        kv_bytes_per_token: In all layers, while every layer's window holds the token.
        kv_bytes_per_sequence: Of a sequence as long as the context, its recurrent state included.
        gpus_per_replica: The GPUs of tensor parallelism; 0: the engine runs on the processor.
        max_sequences: Sequences as long as the context that the KV cache holds at once.
        batch: Sequences decoded at once; 0: not even one keeps the bounds.
        ttft_ms: Of the mean prompt, without waiting.
        tpot_ms: At this batch.
        requests_per_s: The most that the engine can serve.
        tokens_per_s: The most output that the engine can produce.
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
    pace: Pace | None = None


@dataclass(frozen=True, slots=True)
class _EngineSetup:
    """One tier's engine, before its load.

    Attributes:
        weights_bytes: On all GPUs together.
        gpus: The GPUs of tensor parallelism; 0: the engine runs on the processor.
        kv_cache_bytes: On one GPU.
        pace: None: the speed is not known.
    """

    tier: TierName
    tier_format: TierFormat
    weights_bytes: int
    gpus: int
    kv_cache_bytes: int
    pace: Pace | None

    def sequence_bytes(self, model: Architecture, tokens: int) -> int:
        """Return what each GPU, or the processor, keeps of one sequence of so many tokens."""
        return model.sequence_bytes(
            tokens, self.tier_format.kv_bytes_per_value, gpus=max(self.gpus, 1)
        )


def tiers_in_order(tiers: Container[TierName]) -> list[TierName]:
    """Return the standard tiers that are among some tiers, from the lowest precision."""
    return [tier for tier in STANDARD_TIERS if tier in tiers]


def engines_on_gpus(
    model: Architecture,
    gpu: GpuKind,
    available: int | None,
    demand: ServingDemand,
    *,
    formats: Mapping[TierName, TierFormat] = STANDARD_FORMATS,
    paces: Mapping[TierName, Pace] | None = None,
) -> tuple[list[EnginePlan], dict[TierName, str]]:
    """Return the engines that GPUs of a kind hold, and with the arithmetic why there is none of a tier.

    Args:
        model: The model that is served.
        gpu: The kind.
        available: How many there are; None: as many as are needed.
        demand: What requests are like.
        formats: Of the tiers that are planned.
        paces: Measured speeds on this kind of GPU; the speed of other tiers is computed by the roofline.
    """
    site = _GpuSite(
        model=model,
        gpu=gpu,
        available=available,
        demand=demand,
        formats=formats,
        paces=paces or {},
    )
    engines: list[EnginePlan] = []
    obstacles: dict[TierName, str] = {}
    for tier in tiers_in_order(formats):
        words = f"{tier} ({format_words(formats[tier].precision)})"
        not_computed = site.lack_of_kernel(tier)
        if not_computed is not None:
            obstacles[tier] = f"{words} is not planned on {gpu.name}: {not_computed}"
            continue
        setups = site.engine_setups(tier)
        plans = [_plan_engine(setup, model, demand) for setup in setups]
        serving = [plan for plan in plans if plan.batch]
        engines += serving
        if not setups:
            obstacles[tier] = site.lack_of_memory(tier)
        elif not serving:
            obstacles[tier] = (
                f"{words} on {gpu.name} cannot keep the bounds on TTFT and time between tokens for one sequence"
            )
    return engines, obstacles


def engines_on_cpu(
    model: Architecture,
    demand: ServingDemand,
    *,
    kv_cache_bytes: Mapping[TierName, int],
    weights_bytes: Mapping[TierName, int],
    paces: Mapping[TierName, Pace],
    formats: Mapping[TierName, TierFormat] = STANDARD_FORMATS,
) -> list[EnginePlan]:
    """Return the engine of each tier on this processor, which all of them share.

    Args:
        model: The model that is served.
        demand: What requests are like.
        kv_cache_bytes: The KV cache of each tier.
        weights_bytes: The weights of tiers whose checkpoint is there; those of other tiers are estimated.
        paces: Measured speeds.
        formats: Of the tiers that are planned.
    """
    engines = []
    for tier in tiers_in_order(formats):
        tier_format = formats[tier]
        estimated_bytes = tier_format.weight_bytes(model)
        setup = _EngineSetup(
            tier=tier,
            tier_format=tier_format,
            weights_bytes=weights_bytes.get(tier, estimated_bytes),
            gpus=0,
            kv_cache_bytes=kv_cache_bytes[tier],
            pace=paces.get(tier),
        )
        engines.append(_plan_engine(setup, model, demand))
    return engines


@dataclass(frozen=True, slots=True)
class _GpuSite:
    """The GPUs that engines are planned for, and what is planned: the arguments of ``engines_on_gpus``."""

    model: Architecture
    gpu: GpuKind
    available: int | None
    demand: ServingDemand
    formats: Mapping[TierName, TierFormat]
    paces: Mapping[TierName, Pace]

    def lack_of_kernel(self, tier: TierName) -> str | None:
        """Return why GPUs of this kind do not compute a tier's formats; None: they do."""
        tier_format = self.formats[tier]
        for number_format in (tier_format.number_format, tier_format.dense_format):
            if number_format is not None:
                obstacle = obstacle_to(number_format, self.gpu)
                if obstacle is not None:
                    return obstacle
        return None

    def engine_setups(self, tier: TierName) -> list[_EngineSetup]:
        """Return a tier's engine on each number of GPUs that holds it, from the fewest."""
        weights_bytes = self._weights_bytes(tier)
        overhead_bytes = int(GPU_OVERHEAD_GIB * GIB)
        setups = []
        for gpus in self._engine_sizes:
            kv_cache_bytes = self._usable_bytes - overhead_bytes - weights_bytes // gpus
            if kv_cache_bytes >= self._sequence_bytes(tier, gpus):
                setup = _EngineSetup(
                    tier=tier,
                    tier_format=self.formats[tier],
                    weights_bytes=weights_bytes,
                    gpus=gpus,
                    kv_cache_bytes=kv_cache_bytes,
                    pace=self._pace(tier, gpus),
                )
                setups.append(setup)
        return setups

    def lack_of_memory(self, tier: TierName) -> str:
        """Return, with the arithmetic, why a tier's engine fits on none of the numbers of GPUs."""
        gpus = self._engine_sizes[-1]
        weights_gib = self._weights_bytes(tier) / GIB
        free_gib = self._usable_bytes / GIB - GPU_OVERHEAD_GIB
        sequence_gib = self._sequence_bytes(tier, gpus) / GIB
        words = format_words(self.formats[tier].precision)
        return (
            f"{tier} ({words}) does not fit on {gpus} x {self.gpu.name}: its weights take {weights_gib:.1f} GiB, "
            f"{weights_gib / gpus:.1f} a GPU, which has {free_gib:.1f} for them and the KV cache, of which one sequence of "
            f"{self.demand.context} tokens takes {sequence_gib:.2f}. Take larger GPUs, or more"
        )

    def _pace(self, tier: TierName, gpus: int) -> Pace:
        """Return the measured speed of a tier's engine, or else the computed one."""
        measured = self.paces.get(tier)
        if measured is not None:
            return measured
        # While a sequence is decoded, half of its answer is there in the mean.
        context_tokens = self.demand.prompt_tokens + self.demand.output_tokens // 2
        tier_format = self.formats[tier]
        return Roofline(
            model=self.model,
            gpu=self.gpu,
            number_format=tier_format.number_format,
            gpus=gpus,
            context_tokens=context_tokens,
            kv_bytes_per_value=tier_format.kv_bytes_per_value,
            dense_format=tier_format.dense_format,
        )

    def _weights_bytes(self, tier: TierName) -> int:
        return self.formats[tier].weight_bytes(self.model)

    def _sequence_bytes(self, tier: TierName, gpus: int) -> int:
        """Return the KV cache, on each GPU, of one sequence of a tier, as long as the context."""
        return self.model.sequence_bytes(
            self.demand.context, self.formats[tier].kv_bytes_per_value, gpus
        )

    @property
    def _usable_bytes(self) -> int:
        return int(self.gpu.memory_bytes * (1 - GPU_RESERVE))

    @property
    def _engine_sizes(self) -> list[int]:
        """Return the numbers of GPUs that an engine may have: they divide the attention heads."""
        sizes = [
            size for size in ENGINE_SIZES if self.model.attention_heads % size == 0
        ]
        if not self.available:
            return sizes
        return [size for size in sizes if size <= self.available]


@dataclass(frozen=True, slots=True)
class _Timing:
    """The times of an engine's requests without waiting, by the number of sequences that it decodes at once."""

    pace: Pace
    demand: ServingDemand
    prefill_ms: float

    def ttft_ms(self, batch: int) -> float:
        """Return the time to the first token of the mean prompt."""
        return self.prefill_ms + self.pace.step_ms(batch)

    def tpot_ms(self, batch: int) -> float:
        """Return the mean time between two tokens."""
        return mean_tpot_ms(self.pace, self.demand, batch)

    def keeps_bounds(self, batch: int) -> bool:
        """Tell whether TTFT and TPOT are short enough."""
        demand = self.demand
        if demand.tpot_ms is not None and self.tpot_ms(batch) > demand.tpot_ms:
            return False
        return demand.ttft_ms is None or self.ttft_ms(batch) <= demand.ttft_ms

    def largest_batch(self, most: int) -> int:
        """Return the largest batch up to ``most`` that keeps the bounds; 0: not even one sequence does."""
        for batch in range(most, 0, -1):
            if self.keeps_bounds(batch):
                return batch
        return 0


def mean_tpot_ms(pace: Pace, demand: ServingDemand, batch: int) -> float:
    """Return the mean time between two tokens, in milliseconds, of an engine that decodes so many sequences.

    While an answer is decoded, the prompt of each sequence of the batch is computed once.
    """
    prompts_ms = batch * pace.prompt_ms(demand.prompt_tokens, batch)
    return pace.step_ms(batch) + prompts_ms / demand.output_tokens


def _plan_engine(
    setup: _EngineSetup, model: Architecture, demand: ServingDemand
) -> EnginePlan:
    """Find an engine's batch, and how fast it serves with it."""
    longest_bytes = setup.sequence_bytes(model, demand.context)
    max_sequences = setup.kv_cache_bytes // longest_bytes
    kv_bytes_per_value = setup.tier_format.kv_bytes_per_value
    plan = EnginePlan(
        tier=setup.tier,
        precision=setup.tier_format.precision,
        weights_bytes=setup.weights_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token(kv_bytes_per_value),
        kv_bytes_per_sequence=model.sequence_bytes(demand.context, kv_bytes_per_value),
        gpus_per_replica=setup.gpus,
        max_sequences=max_sequences,
        batch=min(max_sequences, demand.max_num_seqs),
        pace=setup.pace,
    )
    pace = setup.pace
    if pace is None:
        return plan
    prefill_ms = pace.prefill_ms_per_token * demand.prompt_tokens
    timing = _Timing(pace, demand, prefill_ms=prefill_ms)
    batch = timing.largest_batch(_most_mean_sequences(setup, model, demand))
    if not batch:
        return replace(plan, batch=0)
    tpot_ms = timing.tpot_ms(batch)
    requests_per_s = batch / (demand.output_tokens * tpot_ms / 1000)
    return replace(
        plan,
        batch=batch,
        ttft_ms=timing.ttft_ms(batch),
        tpot_ms=tpot_ms,
        requests_per_s=requests_per_s,
        tokens_per_s=requests_per_s * demand.output_tokens,
    )


def _most_mean_sequences(
    setup: _EngineSetup, model: Architecture, demand: ServingDemand
) -> int:
    """Return how many sequences of mean length an engine may decode at once, at least one.

    More of them fit into the KV cache than of the longest sequences. At a given moment long answers are computed more often
    than short ones, so the length counts that a mean sequence has at its end.
    """
    mean_tokens = demand.prompt_tokens + demand.output_tokens
    mean_bytes = setup.sequence_bytes(model, mean_tokens)
    fitting = setup.kv_cache_bytes // max(mean_bytes, 1)
    return max(min(fitting, demand.max_num_seqs), 1)
