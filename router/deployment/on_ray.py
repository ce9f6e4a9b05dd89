"""The layout of a fleet whose engines run on a Ray cluster: what is to be placed, and a router that follows it."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from router.deployment.drafts import check_draft, with_drafts
from router.deployment.layout import (
    Deployment,
    all_engine_args,
    check_tiers_alike,
    checkpoint_folders,
    engine_args,
    make_deployment,
    model_name,
    tier_spec,
)
from router.deployment.lora import adapters_of, check_adapters, with_adapters
from router.deployment.settings import DiscoverySettings, TierSettings
from router.settings import Settings
from router.telemetry.otel_environment import engine_target
from tiers.checkpoints.checkpoint import Checkpoint
from tiers.cluster.job import PlacementJob, WantedReplica
from tiers.cluster.runner import RayEngines, RayOptions
from tiers.errors import EngineError, PlanError
from tiers.fleet import Fleet
from tiers.lifecycle.command import engine_options, engine_variables
from tiers.spec import EngineLaunch, EnginePlacement, ReplicaStatus, TierName, TierSpec

# An engine's share of the memory of a GPU that it has for itself; vLLM's own default.
GPU_SHARE = 0.9
LONGEST_POLL_S = 0.5  # between two looks at the engines' file
ACROSS_NODES = ("--distributed-executor-backend", "ray")
ENGINE_KEY = "VLLM_API_KEY"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def make_ray_deployment(
    settings: Settings, checkpoints: Sequence[Checkpoint]
) -> Deployment:
    """Lay out a fleet on a Ray cluster, whose nodes have the checkpoints under the same paths.

    Raises:
        TierError: A checkpoint is missing, tiers differ in tokenizer, or a tier's resources cannot be right.
    """
    if not settings.ray.python.is_file():
        raise EngineError(
            f"there is no Ray environment at {settings.ray.python}: run 'scripts/setup ray', or set ray.python to an "
            f"interpreter that has Ray and vLLM"
        )
    checkpoints_by_tier = {checkpoint.tier: checkpoint for checkpoint in checkpoints}
    specs = _placed_specs(settings, checkpoints_by_tier)
    model = model_name(settings, checkpoints_by_tier)
    api_key = settings.engine.api_key or secrets.token_urlsafe(24)
    folder = settings.server.runtime_dir / f"ray-{os.getpid()}"
    engines_file = settings.discovery.file or folder / "engines.json"
    job = _job(settings, specs, model, folder=folder, engines_file=engines_file)
    deployment = make_deployment(
        _following(settings, api_key=api_key, engines_file=engines_file),
        checkpoints=(),
        start_engines=False,
        tokenizer=specs[0].checkpoint,
    )
    ray = RayOptions(
        python=settings.ray.python, folder=folder, job=job, api_key=api_key
    )
    return replace(deployment, model=model, ray=ray)


def _placed_specs(
    settings: Settings, checkpoints_by_tier: Mapping[TierName, Checkpoint]
) -> tuple[TierSpec, ...]:
    """Return the tiers that have replicas on the cluster, checked."""
    specs = tuple(
        tier_spec(
            name,
            settings.tiers.of(name),
            checkpoints_by_tier,
            store=settings.model.store,
            args=engine_args(settings, name),
        )
        for name in settings.tiers.names
    )
    specs = with_adapters(
        with_drafts(specs, settings, checkpoints_by_tier), settings.lora
    )
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
    check_tiers_alike(settings, checkpoint_folders(placed))
    check_adapters(placed, settings.lora)
    return placed


def _job(
    settings: Settings,
    specs: Sequence[TierSpec],
    model: str,
    *,
    folder: Path,
    engines_file: Path,
) -> PlacementJob:
    """Return what the placement is to do."""
    replicas = []
    for spec in specs:
        replicas += wanted_replicas(spec, settings, model)
    return PlacementJob(
        address=settings.ray.address,
        replicas=tuple(replicas),
        engines_file=str(engines_file.absolute()),
        status_file=str(folder.absolute() / "status.json"),
        log_dir=str(settings.engine.log_dir.absolute()),
        base_port=settings.engine.base_port,
        start_timeout_s=settings.engine.start_timeout_s,
        traced=engine_target() is not None,
    )


def _following(settings: Settings, *, api_key: str, engines_file: Path) -> Settings:
    """Return the settings of a router that follows the file of engines, and knows their key."""
    discovery = DiscoverySettings(
        file=engines_file,
        interval_s=min(settings.discovery.interval_s, LONGEST_POLL_S),
    )
    return settings.model_copy(
        update={
            "engine": settings.engine.model_copy(update={"api_key": api_key}),
            "discovery": discovery,
            # The router finds adapters at the engines.
            "lora": settings.lora.model_copy(update={"adapters": {}}),
        }
    )


def wanted_replicas(
    spec: TierSpec, settings: Settings, model: str
) -> list[WantedReplica]:
    """Return a tier's replicas as the placement takes them.

    Raises:
        PlanError: The tier's resources do not fit its engines, or an adapter's folder holds none.
    """
    tier = settings.tiers.of(spec.name)
    resources = replica_resources(spec, tier, settings.ray.resources)
    launch = _launch(spec, settings, model, resources=resources)
    # An engine's actor sets these variables on its node.
    nodes_variables = {ENGINE_KEY}
    if launch.placement.gpus and VISIBLE_GPUS not in tier.env:
        nodes_variables.add(VISIBLE_GPUS)
    variables = {
        name: value
        for name, value in engine_variables(launch).items()
        if name not in nodes_variables
    }
    if tier.across_nodes:
        # vLLM's executor reserves them.
        resources.pop("GPU", None)
    return [
        WantedReplica(
            id=f"ray-{spec.name}-{number}",
            tier=str(spec.name),
            checkpoint=str(spec.checkpoint),
            args=tuple(engine_options(launch)),
            env=variables,
            resources=resources,
            across_nodes=tier.across_nodes,
        )
        for number in range(spec.replicas)
    ]


def _launch(
    spec: TierSpec, settings: Settings, model: str, *, resources: Mapping[str, float]
) -> EngineLaunch:
    """Return how a tier's engines are started; their nodes add address, interpreter and key."""
    tier = settings.tiers.of(spec.name)
    args = all_engine_args(settings, spec)
    if tier.across_nodes:
        args = (*ACROSS_NODES, *args)
    return EngineLaunch(
        tier=replace(spec, urls=(), named_by=(), stated_precision=None),
        placement=_placement(spec, resources, settings.engine.cpu_kv_cache_gib or 1),
        python=Path(),
        served_model=model,
        host="",
        port=0,
        api_key="",
        otlp=engine_target(),
        extra_args=args,
        env=tier.env,
        adapters=adapters_of(spec, settings.lora),
    )


def replica_resources(
    spec: TierSpec, tier: TierSettings, usual: Mapping[str, float]
) -> dict[str, float]:
    """Return what Ray reserves for one replica.

    Args:
        spec: The replica's tier.
        tier: The tier's settings.
        usual: What is reserved where the tier's settings say nothing else.

    Raises:
        PlanError: GPUs and parallelism do not fit together.
    """
    amounts = {**usual, **tier.ray_resources}
    wanted = {name: amount for name, amount in amounts.items() if amount}
    gpus = wanted.get("GPU", 0)
    world_size = spec.world_size
    key = f"tiers.{spec.name}"
    if tier.across_nodes and (world_size == 1 or not gpus):
        raise PlanError(
            f"{key}.across_nodes is for an engine on several GPUs, as vLLM's Ray executor takes no CPUs: set "
            f"{key}.tensor_parallel or pipeline_parallel, and GPU in {key}.ray_resources"
        )
    if gpus > 1 and not float(gpus).is_integer():
        raise PlanError(
            f"GPU {gpus:g} is no whole number: {key}.ray_resources takes those, or a part of one GPU"
        )
    if gpus and (world_size > 1 or gpus > 1) and gpus != world_size:
        raise PlanError(
            f"a replica of {spec.name} gets GPU {gpus:g} of Ray, but its engine takes tensor_parallel x pipeline_parallel "
            f"= {world_size}: set {key}.ray_resources accordingly"
        )
    return wanted


def _placement(
    spec: TierSpec, resources: Mapping[str, float], kv_cache_gib: float
) -> EnginePlacement:
    """Return an engine's share of its node: its GPUs, else as many threads as it has CPUs."""
    gpus = resources.get("GPU", 0)
    if not gpus:
        threads = max(int(resources.get("CPU", 1)), 1)
        return EnginePlacement(threads=threads, kv_cache_gib=kv_cache_gib)
    return EnginePlacement(
        gpus=tuple(range(spec.world_size)),
        gpu_memory_fraction=GPU_SHARE * min(gpus, 1.0),
    )


class OnRay:
    """The placement beside a running router; nothing where no engines are on Ray.

    Args:
        options: What is placed; None: nothing.
        fleet: The router's fleet.
        say: Gets a line for each change.
    """

    def __init__(
        self, options: RayOptions | None, fleet: Fleet, say: Callable[[str], None]
    ) -> None:
        self._fleet = fleet
        self._engines: RayEngines | None = None
        self._placed_replicas = 0
        if options is not None:
            self._engines = RayEngines(options, say)
            self._placed_replicas = len(options.job.replicas)
        self._task: asyncio.Task[None] | None = None

    @property
    def settled(self) -> bool:
        """Tell whether every placed replica was ready once, and the router has found as many."""
        if self._engines is None:
            return True
        ready_replicas = sum(
            replica.state.status is ReplicaStatus.READY
            for replica in self._fleet.replicas
        )
        return self._engines.settled and ready_replicas >= self._placed_replicas

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
