"""The layout of a fleet whose engines run on a Ray cluster: what is to be placed, and a router that follows it."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from router.deployment.layout import (
    Deployment,
    adapters_of,
    check_adapters,
    check_draft,
    engine_args,
    make_deployment,
    tier_spec,
    whole_args,
    with_adapters,
    with_drafts,
)
from router.deployment.settings import DiscoverySettings, TierSettings
from router.settings import Settings
from router.telemetry.otel_environment import engine_target
from tiers.checkpoints.checkpoint import Checkpoint, check_alike
from tiers.cluster.job import Job, WantedReplica
from tiers.cluster.runner import RayEngines, RayOptions
from tiers.errors import EngineError, PlanError
from tiers.fleet import Fleet
from tiers.lifecycle.command import engine_options, engine_variables
from tiers.spec import EngineLaunch, EnginePlacement, ReplicaStatus, TierName, TierSpec

# of the memory of a GPU that an engine has for itself, vLLM's own default
GPU_SHARE = 0.9
FOLLOW_S = 0.5  # between two looks at the engines' file
ACROSS_NODES = ("--distributed-executor-backend", "ray")
OF_THE_NODE = {"VLLM_API_KEY", "CUDA_VISIBLE_DEVICES"}  # variables that its actor sets


def make_ray_deployment(
    settings: Settings, checkpoints: Sequence[Checkpoint]
) -> Deployment:
    """Lay out a fleet on a Ray cluster, whose nodes have the checkpoints under the same paths.

    ``TierError``: a checkpoint is missing, tiers differ in tokenizer, or a tier's resources cannot be right.
    """
    if not settings.ray.python.is_file():
        raise EngineError(
            f"there is no Ray environment at {settings.ray.python}: run 'scripts/setup ray', or set ray.python to an "
            f"interpreter that has Ray and vLLM"
        )
    specs = _placed_specs(settings, {c.tier: c for c in checkpoints})
    precise = next((c for c in checkpoints if c.tier is TierName.PRECISE), None)
    model = precise.manifest.model if precise else settings.model.name
    key = settings.engine.api_key or secrets.token_urlsafe(24)
    folder = settings.server.runtime_dir / f"ray-{os.getpid()}"
    file = settings.discovery.file or folder / "engines.json"
    job = Job(
        address=settings.ray.address,
        replicas=tuple(
            wanted
            for spec in specs
            for wanted in wanted_replicas(spec, settings, model)
        ),
        engines_file=str(file.absolute()),
        status_file=str(folder.absolute() / "status.json"),
        log_dir=str(settings.engine.log_dir.absolute()),
        base_port=settings.engine.base_port,
        start_timeout_s=settings.engine.start_timeout_s,
        traced=engine_target() is not None,
    )
    follows = settings.model_copy(
        update={
            "engine": settings.engine.model_copy(update={"api_key": key}),
            "discovery": DiscoverySettings(
                file=file, interval_s=min(settings.discovery.interval_s, FOLLOW_S)
            ),
            # the router finds them at the engines
            "lora": settings.lora.model_copy(update={"adapters": {}}),
        }
    )
    deployment = make_deployment(
        follows, (), start_engines=False, tokenizer=specs[0].checkpoint
    )
    return replace(
        deployment, model=model, ray=RayOptions(settings.ray.python, folder, job, key)
    )


def _placed_specs(
    settings: Settings, prepared: Mapping[TierName, Checkpoint]
) -> tuple[TierSpec, ...]:
    tiers = {name: settings.tiers.of(name) for name in settings.tiers.names}
    specs = tuple(
        tier_spec(name, tier, prepared, engine_args(settings, name))
        for name, tier in tiers.items()
    )
    specs = with_adapters(with_drafts(specs, settings, prepared), settings.lora)
    placed = tuple(spec for spec in specs if spec.replicas)
    if not placed:
        raise PlanError(
            "nothing is to be placed on Ray: tiers.<name>.replicas is 0 for every tier"
        )
    for spec in placed:
        if spec.checkpoint is None:
            raise PlanError(
                f"tier {spec.name} has no checkpoint: run 'qarr model prepare', and have its folder on every node under "
                f"the same path"
            )
        check_draft(spec)
    check_alike(
        {spec.name: spec.checkpoint for spec in placed if spec.checkpoint is not None}
    )
    check_adapters(placed, settings.lora)
    return placed


def wanted_replicas(
    spec: TierSpec, settings: Settings, model: str
) -> list[WantedReplica]:
    """Return a tier's replicas as the placement takes them.

    ``PlanError``: the tier's resources do not fit its engines, or an adapter's folder holds none.
    """
    tier = settings.tiers.of(spec.name)
    resources = replica_resources(spec, tier, settings.ray.resources)
    launch = EngineLaunch(
        tier=replace(spec, urls=(), named_by=(), stated_precision=None),
        placement=_share(spec, resources, settings.engine.cpu_kv_cache_gib or 1),
        python=Path(),
        served_model=model,
        host="",
        port=0,
        api_key="",
        otlp=engine_target(),
        extra_args=(
            *(ACROSS_NODES if tier.across_nodes else ()),
            *whole_args(settings, spec),
        ),
        env=tier.env,
        adapters=adapters_of(spec, settings.lora),
    )
    own = engine_variables(launch)
    dropped = OF_THE_NODE - set(tier.env) if launch.placement.gpus else {"VLLM_API_KEY"}
    if tier.across_nodes:  # vLLM's executor reserves them
        resources.pop("GPU", None)
    return [
        WantedReplica(
            id=f"ray-{spec.name}-{number}",
            tier=str(spec.name),
            checkpoint=str(spec.checkpoint),
            args=tuple(engine_options(launch)),
            env={name: value for name, value in own.items() if name not in dropped},
            resources=resources,
            across_nodes=tier.across_nodes,
        )
        for number in range(spec.replicas)
    ]


def replica_resources(
    spec: TierSpec, tier: TierSettings, usual: Mapping[str, float]
) -> dict[str, float]:
    """Return what Ray reserves for one replica; ``PlanError``: GPUs and parallelism do not fit together."""
    wanted = {
        name: amount
        for name, amount in {**usual, **tier.ray_resources}.items()
        if amount
    }
    gpus, world, key = wanted.get("GPU", 0), spec.world_size, f"tiers.{spec.name}"
    if tier.across_nodes and (world == 1 or not gpus):
        raise PlanError(
            f"{key}.across_nodes is for an engine on several GPUs, as vLLM's Ray executor takes no CPUs: set "
            f"{key}.tensor_parallel or pipeline_parallel, and GPU in {key}.ray_resources"
        )
    if gpus > 1 and not float(gpus).is_integer():
        raise PlanError(
            f"GPU {gpus:g} is no whole number: {key}.ray_resources takes those, or a part of one GPU"
        )
    if gpus and (world > 1 or gpus > 1) and gpus != world:
        raise PlanError(
            f"a replica of {spec.name} gets GPU {gpus:g} of Ray, but its engine takes tensor_parallel x pipeline_parallel "
            f"= {world}: set {key}.ray_resources accordingly"
        )
    return wanted


def _share(
    spec: TierSpec, resources: Mapping[str, float], kv_cache_gib: float
) -> EnginePlacement:
    """Return an engine's share of its node: its GPUs, else as many threads as it has CPUs."""
    gpus = resources.get("GPU", 0)
    if not gpus:
        return EnginePlacement(
            threads=max(int(resources.get("CPU", 1)), 1), kv_cache_gib=kv_cache_gib
        )
    return EnginePlacement(
        gpus=tuple(range(spec.world_size)),
        gpu_memory_fraction=GPU_SHARE * min(gpus, 1.0),
    )


class OnRay:
    """The placement beside a running router; nothing where no engines are on Ray. ``say`` gets a line for each change."""

    def __init__(
        self, options: RayOptions | None, fleet: Fleet, say: Callable[[str], None]
    ) -> None:
        self._engines = RayEngines(options, say) if options is not None else None
        self._fleet, self._count = (
            fleet,
            len(options.job.replicas) if options is not None else 0,
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def settled(self) -> bool:
        ready = sum(
            replica.state.status is ReplicaStatus.READY
            for replica in self._fleet.replicas
        )
        return self._engines is None or (self._engines.settled and ready >= self._count)

    def start(self) -> None:
        if self._engines is not None:
            self._task = asyncio.create_task(self._engines.run(), name="engines on Ray")

    def check(self) -> None:
        """Raise what has ended the placement: a replica did not start, or the cluster cannot be used."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
