"""The fleet as the settings have it, beside which ``qarr plan`` shows what it plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from router.cli.plan_engines import engines_with_speed, find_engines
from router.cli.plan_inputs import PlanInputs
from router.cli.plan_result import FleetAsSet
from router.settings import Settings
from tiers.sizing.fleet import DailyLoad, EngineType, as_set
from tiers.sizing.largest import CARRIED_SHARE, LargestLoad, largest_of_engines
from tiers.spec import STANDARD_TIERS, TierName

# A share of what the slowest engine carries that every engine carries.
IDLE_SHARE = 0.01


def names_tiers(settings: Settings) -> bool:
    """Tell whether the settings say anything of tiers."""
    return settings.tiers != Settings().tiers


def engines_as_set(inputs: PlanInputs) -> list[EngineType] | None:
    """Return the engines with the settings' contexts and sequences; None: the settings name no engines.

    On a processor they are the engines that are planned, whose contexts are the settings' own.
    """
    target = inputs.target
    if not target.gpus:
        engines, _ = find_engines(inputs)
        return engines
    if not names_tiers(inputs.settings):
        return None
    engines = []
    unbounded = replace(target, gpus=dict.fromkeys(target.gpus))
    for tier in target.formats:
        tier_settings = inputs.settings.tiers.of(tier)
        demand = replace(
            inputs.demand,
            context=min(tier_settings.max_model_len, target.model.context),
            max_num_seqs=tier_settings.max_num_seqs,
        )
        fitting, _ = find_engines(replace(inputs, target=unbounded, demand=demand))
        for engine in fitting:
            gpus = engine.plan.gpus_per_replica
            if engine.tier is tier and gpus == tier_settings.tensor_parallel:
                engines.append(engine)
    return engines


def fleet_as_set(
    settings: Settings, engines: Sequence[EngineType], load: DailyLoad
) -> FleetAsSet:
    """Return what the engines that the settings name do with a load."""
    started_engines = _started_engines(settings, engines)
    obstacle = _obstacle(settings, started_engines)
    if obstacle is not None:
        return FleetAsSet(fleet=None, obstacle=obstacle)
    usable_engines = engines_with_speed(started_engines)
    if not usable_engines:
        return FleetAsSet(fleet=None)
    replicas_by_tier: dict[TierName, int] = {}
    usable_tiers = {engine.tier for engine in usable_engines}
    for tier in STANDARD_TIERS:
        if tier in usable_tiers:
            replicas_by_tier[tier] = settings.tiers.of(tier).replicas_here
    gpu_names = {engine.gpu for engine in usable_engines}
    return FleetAsSet(
        fleet=as_set(usable_engines, load, gpu_names, replicas=replicas_by_tier)
    )


def _started_engines(
    settings: Settings, engines: Sequence[EngineType]
) -> list[EngineType]:
    """Return the engines of tiers that have replicas on this machine."""
    return [
        engine for engine in engines if settings.tiers.of(engine.tier).replicas_here
    ]


def _obstacle(settings: Settings, engines: Sequence[EngineType]) -> str | None:
    """Return why engines as the settings have them cannot be planned; None: they can."""
    used_tiers = [
        tier for tier in STANDARD_TIERS if settings.tiers.of(tier).replicas_here
    ]
    if not used_tiers:
        return "the settings start no engines here"
    fitting_tiers = {engine.tier for engine in engines}
    for tier in used_tiers:
        tier_settings = settings.tiers.of(tier)
        if tier_settings.pipeline_parallel > 1:
            return f"tiers.{tier}.pipeline_parallel is not planned"
        if tier not in fitting_tiers:
            gpu_count = tier_settings.tensor_parallel
            return f"{tier} does not fit, or is not planned, on {gpu_count} GPUs (tensor_parallel)"
    return None


def largest_as_set(
    settings: Settings, engines: Sequence[EngineType], load: DailyLoad
) -> LargestLoad | None:
    """Return the largest load of the engines that the settings name; None: they cannot be planned."""
    usable_engines = engines_with_speed(engines)
    slowest_rate = min((engine.rate for engine in usable_engines), default=1.0)
    idle_rate = IDLE_SHARE * slowest_rate / max(load.course)
    nearly_idle = fleet_as_set(settings, engines, load.scaled_to(idle_rate))
    if nearly_idle.fleet is None:
        return None
    engine_counts: Sequence[tuple[EngineType, int]] = nearly_idle.fleet.counts
    if nearly_idle.fleet.gpus.keys() == {""}:
        # Engines on a processor share it, so all of them count, not only those that a tiny load needs.
        engine_counts = [
            (engine, 1) for engine in _started_engines(settings, usable_engines)
        ]
    largest_rate = CARRIED_SHARE * largest_of_engines(engine_counts, load)
    full_fleet = fleet_as_set(settings, engines, load.scaled_to(largest_rate))
    if full_fleet.fleet is None:
        return None
    return LargestLoad(largest_rate, full_fleet.fleet)
