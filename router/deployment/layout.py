"""The layout of the fleet, checked before anything starts."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from classifier import extract
from router.deployment.adapters import adapters_of, check_adapters, named_for, with_adapters
from router.deployment.counters import LateCounter, make_counter, named_counter
from router.deployment.drafts import check_draft, with_drafts
from router.telemetry.tracing import engine_target
from tiers.checkpoints.checkpoint import Checkpoint, check_alike
from tiers.checkpoints.precision import checkpoint_precision, told_precision
from tiers.checkpoints.prepare import PrepareOptions, check_model, slug
from tiers.errors import EngineError, PlanError
from tiers.plan import Plan, machine_name, make_plan, read_machine
from tiers.spec import UNKNOWN, Draft, EngineLaunch, TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from classifier import TokenCounter
    from router.settings import Settings, TierSettings

HOST = "127.0.0.1"


def make_launches(specs: Sequence[TierSpec], plan: Plan, settings: Settings, model: str) -> tuple[EngineLaunch, ...]:
    """Return how the engines are started, tier by tier; they get ports in this order.

    Args:
        specs: All tiers that run here; those that wait for a checkpoint get ports, and no launch.
        plan: How the engines share the machine.
        settings: All settings.
        model: The model's name.
    """
    engines = [(spec, number) for spec in specs for number in range(spec.replicas)]
    return tuple(
        EngineLaunch(
            tier=replace(spec, urls=(), named_by=(), stated_precision=None),
            placement=plan.placement(spec.name, number),
            python=settings.engine.python,
            served_model=model,
            host=HOST,
            port=port,
            api_key=secrets.token_urlsafe(24),
            otlp=engine_target(),
            extra_args=engine_args(settings, spec.name),
            env=getattr(settings.tiers, spec.name.value).env,
            adapters=adapters_of(spec, settings.lora),
        )
        for port, (spec, number) in enumerate(engines, settings.engine.base_port)
        if spec.startable
    )


def engine_args(settings: Settings, tier: TierName) -> tuple[str, ...]:
    """Return the arguments of a tier's engines that a person gave, in their order: the last one counts."""
    own: TierSettings = getattr(settings.tiers, tier.value)
    return (*settings.engine.extra_args, *own.engine_args)


def speed_machine(settings: Settings) -> str:
    """Return what measured speeds belong to: the machine, and how its engines use it apart from their checkpoints."""
    found = []
    for name in TierName:
        tier: TierSettings = getattr(settings.tiers, name.value)
        if not tier.replicas_here:
            continue
        ways = [f"draft {tier.draft} x {tier.draft_tokens}"] if tier.draft else []
        if named_for(name, settings.lora) or settings.lora.at_run_time:
            ways.append("LoRA")
        if (world := tier.tensor_parallel * tier.pipeline_parallel) > 1:
            ways.append(f"{world} GPUs ({tier.tensor_parallel} x {tier.pipeline_parallel})")
        if ways:
            found.append(f"{name}: {', '.join(ways)}")
    return "; ".join([machine_name(), *found])


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything that is started together, checked before anything starts.

    Attributes:
        specs: The tiers, by rising precision.
        launches: Engines to start here at once; none if checkpoints are missing.
        plan: How they share the machine.
        counter: Counts tokens as the engines do, once there is a checkpoint.
        model: The model's name.
        missing: Tiers to run here whose checkpoints must be made first.
        tokenizer: Folder of the model's tokenizer; None: none is known yet.
    """

    settings: Settings
    specs: tuple[TierSpec, ...]
    launches: tuple[EngineLaunch, ...]
    plan: Plan
    counter: TokenCounter
    model: str
    missing: tuple[TierName, ...] = ()
    tokenizer: Path | None = None

    @property
    def local(self) -> frozenset[TierName]:
        """Return the tiers that run here."""
        if self.missing:
            return frozenset(spec.name for spec in self.specs if spec.replicas)
        return frozenset(launch.tier.name for launch in self.launches)


def make_deployment(
    settings: Settings,
    checkpoints: tuple[Checkpoint, ...],
    *,
    start_engines: bool = True,
    tokenizer: Path | None = None,
) -> Deployment:
    """Lay out the fleet: which tiers run here, on what, and with which tokenizer.

    Args:
        settings: All settings.
        checkpoints: Prepared checkpoints, for tiers without URLs or a folder of their own. If one is missing, engines
            start only when the model's size is known.
        start_engines: Start engines here; False leaves tiers without URLs out.
        tokenizer: Model folder to count tokens with; None: a checkpoint's.

    Raises:
        TierError: There is no such model, tiers differ in tokenizer, the machine is too small, or there are no tiers.
        TokenizerError: The tokenizer's folder has none.
    """
    prepared = {c.tier: c for c in checkpoints}
    specs = tuple(
        tier_spec(
            name, getattr(settings.tiers, name.value), prepared, engine_args(settings, name), named_by(settings, name)
        )
        for name in TierName
    )
    if not start_engines:
        specs = tuple(elsewhere(spec) if spec.urls or spec.named_by else replace(spec, replicas=0) for spec in specs)
    if not any(spec.urls or spec.named_by or spec.replicas for spec in specs):
        raise PlanError(
            "every tier is left out: tiers.fast.replicas, balanced and precise are 0, and neither urls, dns nor "
            "discovery.file are given"
        )
    specs = with_adapters(with_drafts(specs, settings, prepared), settings.lora)
    local = tuple(spec for spec in specs if spec.replicas)
    missing = tuple(spec.name for spec in local if spec.checkpoint is None)
    if missing:
        check_model(prepare_options(settings))
    if local and not settings.engine.python.is_file():
        raise EngineError(
            f"there is no engine environment at {settings.engine.python}: run 'make engine-env', or set engine.python to "
            f"an interpreter that has vLLM"
        )
    folders = {spec.name: spec.checkpoint for spec in specs if spec.checkpoint is not None}
    check_alike(folders)
    for spec in local:
        check_draft(spec)
    check_adapters(local, settings.lora)
    folder = next(iter(folders.values()), None) if tokenizer is None else tokenizer
    counter = make_counter(folder) if tokenizer is None else named_counter(tokenizer)
    extract("", counter)  # reads the weights now, not at the first request
    if missing:
        model = slug(settings.model.name)
        return Deployment(settings, specs, (), Plan("", ()), LateCounter(counter), model, missing, folder)
    plan = make_plan(read_machine(), local, kv_cache_gib=settings.engine.cpu_kv_cache_gib) if local else Plan("", ())
    precise = prepared.get(TierName.PRECISE)
    model = precise.manifest.model if precise else settings.model.name
    launches = make_launches(local, plan, settings, model)
    return Deployment(settings, specs, launches, plan, counter, model, tokenizer=folder)


def prepare_options(settings: Settings) -> PrepareOptions:
    """Return how the checkpoints are made."""
    return PrepareOptions(
        model=settings.model.name,
        store=settings.model.store,
        quantizer_python=settings.quantizer.python,
        calibration=settings.model.calibration,
        group_size=settings.model.group_size,
        calibration_samples=settings.model.calibration_samples,
        calibration_tokens=settings.model.calibration_tokens,
    )


def tier_spec(
    name: TierName,
    tier: TierSettings,
    prepared: Mapping[TierName, Checkpoint],
    args: Sequence[str] = (),
    named_by: tuple[str, ...] = (),
) -> TierSpec:
    """Return a tier's layout; its engines here have the checkpoint of the settings, else the prepared one.

    Args:
        name: The tier.
        tier: Its settings.
        prepared: Prepared checkpoints.
        args: vLLM's further arguments, which may change the precision that is served.
        named_by: See ``TierSpec``.
    """
    spec = TierSpec(
        name=name,
        max_model_len=tier.max_model_len,
        max_num_seqs=tier.max_num_seqs,
        max_in_flight=tier.max_in_flight,
        urls=tier.urls,
        named_by=named_by,
        stated_precision=((tier.urls or named_by) and tier.precision) or None,
        replicas=tier.replicas_here,
        gpus=tier.gpus,
        tensor_parallel=tier.tensor_parallel,
        pipeline_parallel=tier.pipeline_parallel,
        max_num_batched_tokens=tier.max_num_batched_tokens,
        draft=Draft(tier.draft, tier.draft_tokens) if tier.draft else None,
    )
    if not spec.replicas:
        return replace(spec, precision=told_precision(UNKNOWN, spec.stated_precision))
    if tier.checkpoint is not None:
        return replace(spec, checkpoint=tier.checkpoint, precision=checkpoint_precision(tier.checkpoint, args))
    return with_checkpoint(spec, prepared[name], args) if name in prepared else spec


def named_by(settings: Settings, tier: TierName) -> tuple[str, ...]:
    """Return what names engines of a tier while the router runs."""
    own: TierSettings = getattr(settings.tiers, tier)
    return tuple(str(each) for each in (own.dns, settings.discovery.file) if each)


def elsewhere(spec: TierSpec) -> TierSpec:
    """Return a tier as its engines given by URL have it, whatever is started here besides."""
    precision = told_precision(UNKNOWN, spec.stated_precision)
    return replace(spec, checkpoint=None, digest=None, replicas=0, draft=None, adapters=(), precision=precision)


def with_checkpoint(spec: TierSpec, made: Checkpoint, args: Sequence[str]) -> TierSpec:
    """Return a tier's layout with a prepared checkpoint."""
    precision = checkpoint_precision(made.path, args)
    return replace(spec, checkpoint=made.path, digest=made.manifest.weights_digest, precision=precision)
