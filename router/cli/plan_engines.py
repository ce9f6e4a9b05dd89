"""The engines that ``qarr plan`` chooses from, and their prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.cli.plan_inputs import PlanInputs
from router.settings import Settings
from tiers.errors import PlanError
from tiers.plan import GIB, usual_kv_cache_gib
from tiers.sizing.architecture import Architecture
from tiers.sizing.capacity import engines_on_cpu, engines_on_gpus
from tiers.sizing.fleet import EngineType
from tiers.sizing.hardware import GpuKind, Prices
from tiers.spec import TierName


def prices_by_gpu(
    gpus: Mapping[GpuKind, int | None], prices: Prices
) -> dict[GpuKind, float]:
    """Return the price of each kind, or none at all: GPUs are counted if no price is known.

    Raises:
        PlanError: Some prices are known and others are not.
    """
    known_prices: dict[GpuKind, float] = {}
    for gpu in gpus:
        price = prices.of(gpu)
        if price is not None:
            known_prices[gpu] = price
    if known_prices and len(known_prices) < len(gpus):
        unknown = [gpu.name for gpu in gpus if gpu not in known_prices]
        raise PlanError(
            f"no price of {', '.join(unknown)} is known, and one of the others is: write --gpus {unknown[0]}:price=1.9, or "
            "give --prices a file with all of them"
        )
    return known_prices


def find_engines(inputs: PlanInputs) -> tuple[list[EngineType], list[str]]:
    """Return the engines that fit, and why there is none of some tier."""
    if inputs.target.gpus:
        return _engines_on_gpus(inputs)
    return _engines_on_cpu(inputs), []


def _engines_on_cpu(inputs: PlanInputs) -> list[EngineType]:
    target = inputs.target
    kv_cache_bytes = {
        tier: _kv_cache_bytes(inputs.settings, target.model, tier)
        for tier in target.formats
    }
    plans = engines_on_cpu(
        target.model,
        inputs.demand,
        kv_cache_bytes=kv_cache_bytes,
        weights_bytes=target.weights,
        paces=target.paces,
        formats=target.formats,
    )
    return [EngineType(gpu="", plan=plan, price=1.0) for plan in plans]


def _engines_on_gpus(inputs: PlanInputs) -> tuple[list[EngineType], list[str]]:
    target = inputs.target
    engines: list[EngineType] = []
    reasons: list[str] = []
    for gpu, gpu_count in target.gpus.items():
        plans, obstacles = engines_on_gpus(
            target.model,
            gpu,
            gpu_count,
            demand=inputs.demand,
            formats=target.formats,
            paces=target.paces,
        )
        gpu_price = inputs.price_by_gpu.get(gpu) or 1.0
        for plan in plans:
            engine_price = plan.gpus_per_replica * gpu_price
            engines.append(EngineType(gpu.name, plan, price=engine_price))
        # A kind beside others that holds no engine at all needs no word for each tier.
        if len(target.gpus) == 1 or len(obstacles) < len(target.formats):
            reasons += obstacles.values()
    return engines, reasons


def _kv_cache_bytes(settings: Settings, model: Architecture, name: TierName) -> int:
    """Return the size of the KV cache that an engine of a tier has on a processor."""
    tier = settings.tiers.of(name)
    usual_gib = usual_kv_cache_gib(
        model.kv_bytes_per_token(), tier.max_model_len, tier.max_num_seqs
    )
    return int(GIB * (settings.engine.cpu_kv_cache_gib or usual_gib))


def available_by_name(gpus: Mapping[GpuKind, int | None]) -> dict[str, int | None]:
    """Return how many GPUs there are by the name of their kind; None: as many as needed."""
    return {gpu.name: count for gpu, count in gpus.items()}


def engines_with_speed(engines: Sequence[EngineType]) -> list[EngineType]:
    """Return the engines whose speed is known."""
    return [engine for engine in engines if engine.rate]
