"""The layout of the fleet, checked before anything starts."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from classifier import (
    EstimatingCounter,
    ModelTokenCounter,
    RememberingCounter,
    TokenCounter,
    TokenizerError,
    extract,
)
from router.deployment.drafts import check_draft, with_drafts
from router.deployment.lora import (
    adapters_of,
    check_adapters,
    named_adapters,
    with_adapters,
)
from router.deployment.settings import TierSettings
from router.settings import Settings
from router.telemetry.otel_environment import engine_target
from tiers.checkpoints.checkpoint import Checkpoint
from tiers.checkpoints.compare import check_alike, prompt_identity, read_files
from tiers.checkpoints.hub import checkpoint_folder
from tiers.checkpoints.parsers import parser_args
from tiers.checkpoints.precision import checkpoint_precision, told_precision
from tiers.checkpoints.prepare import (
    DEFAULT_MODEL,
    PrepareOptions,
    check_model,
    slug,
    usual_calibration,
)
from tiers.checkpoints.schemes import (
    AUTO,
    CHOSEN_TIERS,
    Scheme,
    SchemeChoice,
    choose_schemes,
    scheme_named,
)
from tiers.cluster.runner import RayOptions
from tiers.errors import EngineError, PlanError
from tiers.plan import Machine, MemoryPlan, machine_name, make_plan, read_machine
from tiers.ranking import rising
from tiers.spec import (
    UNKNOWN,
    Draft,
    EngineLaunch,
    EnginePlacement,
    Precision,
    TierName,
    TierSpec,
)
from tiers.this_hardware import read_hardware

HOST = "127.0.0.1"
NO_PLAN = MemoryPlan(device="", shares=())


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything that is started together, checked before anything starts.

    Attributes:
        specs: The tiers, by rising precision.
        launches: Engines to start here at once; none if checkpoints are missing.
        plan: How these share the machine.
        counter: Counts tokens as the engines do, once there is a checkpoint.
        model: The model's name.
        missing: Tiers to run here whose checkpoints must be made first.
        tokenizer: Folder of the model's tokenizer; None: none is known yet.
        ray: Engines to place on a Ray cluster; None: there are none.
    """

    settings: Settings
    specs: tuple[TierSpec, ...]
    launches: tuple[EngineLaunch, ...]
    plan: MemoryPlan
    counter: TokenCounter
    model: str
    missing: tuple[TierName, ...] = ()
    tokenizer: Path | None = None
    ray: RayOptions | None = None

    @property
    def local(self) -> frozenset[TierName]:
        """Return the tiers that have engines here, now or once their checkpoints are made."""
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
        settings: The settings.
        checkpoints: For tiers without URLs or a folder of their own. If one is missing, engines start only when the
            model's size is known.
        start_engines: Without it tiers without URLs are left out.
        tokenizer: A model folder to count tokens with; None: a checkpoint's.

    Raises:
        TierError: There is no such model, tiers differ in tokenizer, the machine is too small, or there are no tiers.
        TokenizerError: The tokenizer's folder has none.
    """
    checkpoints_by_tier = {checkpoint.tier: checkpoint for checkpoint in checkpoints}
    specs = _configured_specs(
        settings, checkpoints_by_tier, start_engines=start_engines
    )
    specs = with_drafts(specs, settings, checkpoints_by_tier)
    specs = with_adapters(specs, settings.lora)
    if any(spec.replicas and spec.checkpoint is None for spec in specs):
        specs = with_expected_precisions(specs, scheme_choices(settings))
    specs = with_prompt_identities(specs, settings)
    local_specs = tuple(spec for spec in specs if spec.replicas)
    missing_tiers = tuple(spec.name for spec in local_specs if spec.checkpoint is None)
    _check_means(settings, local_specs)
    _check_fit(specs, local_specs, settings)
    if tokenizer is None:
        tokenizer = next(iter(checkpoint_folders(specs).values()), None)
        counter = make_counter(tokenizer)
    else:
        counter = named_counter(tokenizer)
    # The classifier's weights are read now, not at the first request.
    extract("", counter)
    if missing_tiers:
        return Deployment(
            settings=settings,
            specs=specs,
            launches=(),
            plan=NO_PLAN,
            counter=LateCounter(counter),
            model=slug(settings.model.name),
            missing=missing_tiers,
            tokenizer=tokenizer,
        )
    plan = plan_of(settings, read_machine(), local_specs)
    model = model_name(settings, checkpoints_by_tier)
    return Deployment(
        settings=settings,
        specs=without(plan.left_out, specs),
        launches=make_launches(
            without(plan.left_out, local_specs), plan, settings, model=model
        ),
        plan=plan,
        counter=counter,
        model=model,
        tokenizer=tokenizer,
    )


def _configured_specs(
    settings: Settings,
    checkpoints_by_tier: Mapping[TierName, Checkpoint],
    *,
    start_engines: bool,
) -> tuple[TierSpec, ...]:
    """Return the tiers of the settings by rising precision, without drafts' folders and adapters.

    Raises:
        PlanError: Every tier is left out.
    """
    configured_specs = [
        tier_spec(
            name,
            settings.tiers.of(name),
            checkpoints_by_tier,
            store=settings.model.store,
            args=engine_args(settings, name),
            named_by=named_by(settings, name),
        )
        for name in settings.tiers.names
    ]
    specs = rising(configured_specs, losses={})
    if not start_engines:
        specs = tuple(_without_engines_here(spec) for spec in specs)
    if not any(spec.urls or spec.named_by or spec.replicas for spec in specs):
        raise PlanError(
            "every tier is left out: tiers.fast.replicas, balanced and precise are 0, and neither urls, dns nor "
            "discovery.file are given"
        )
    return specs


def with_expected_precisions(
    specs: Sequence[TierSpec], choices: Mapping[TierName, SchemeChoice]
) -> tuple[TierSpec, ...]:
    """Return the tiers, those whose checkpoint is still to be made with the format that it will have."""
    with_formats = []
    for spec in specs:
        choice = choices.get(spec.name)
        if choice is None or not spec.replicas or spec.checkpoint is not None:
            with_formats.append(spec)
            continue
        number_format = choice.scheme.number_format
        with_formats.append(replace(spec, expected_precision=number_format))
    return tuple(with_formats)


def _without_engines_here(spec: TierSpec) -> TierSpec:
    if spec.urls or spec.named_by:
        return elsewhere(spec)
    return replace(spec, replicas=0)


def _check_means(settings: Settings, local_specs: Sequence[TierSpec]) -> None:
    """Check that there is what missing checkpoints are made of, and what engines run with."""
    if any(spec.checkpoint is None for spec in local_specs):
        check_model(prepare_options(settings))
    if local_specs and not settings.engine.python.is_file():
        raise EngineError(
            f"there is no engine environment at {settings.engine.python}: run 'make engine-env', or set engine.python to "
            f"an interpreter that has vLLM"
        )


def _check_fit(
    specs: Sequence[TierSpec], local_specs: Sequence[TierSpec], settings: Settings
) -> None:
    """Check that checkpoints, drafts and adapters fit together."""
    check_tiers_alike(settings, checkpoint_folders(specs))
    for spec in local_specs:
        check_draft(spec)
    check_adapters(local_specs, settings.lora)


def check_tiers_alike(settings: Settings, folders: Mapping[TierName, Path]) -> None:
    """Check that the tiers' checkpoints are one model, unless the settings say that they need not be.

    Raises:
        ModelMismatchError: They are not.
        CheckpointError: A folder is no model's.
    """
    if not settings.model.allow_different:
        check_alike(folders)


def with_prompt_identities(
    specs: tuple[TierSpec, ...], settings: Settings
) -> tuple[TierSpec, ...]:
    """Return the tiers with what tells whether they make the same tokens of a request, if they need not be one model."""
    if not settings.model.allow_different:
        return specs
    return tuple(
        spec
        if spec.checkpoint is None
        else replace(spec, prompt_identity=prompt_identity(read_files(spec.checkpoint)))
        for spec in specs
    )


def checkpoint_folders(specs: Sequence[TierSpec]) -> dict[TierName, Path]:
    """Return the checkpoints' folders of those tiers that have one."""
    return {spec.name: spec.checkpoint for spec in specs if spec.checkpoint is not None}


def model_name(
    settings: Settings, checkpoints_by_tier: Mapping[TierName, Checkpoint]
) -> str:
    """Return the model's name, as the checkpoint of the highest precision has it, else as in the settings."""
    name = settings.model.name
    published = settings.tiers.precise.checkpoint
    if published is None and TierName.PRECISE in checkpoints_by_tier:
        return checkpoints_by_tier[TierName.PRECISE].manifest.model
    is_named = name not in {DEFAULT_MODEL, published}
    if published is None or is_named:
        return name
    return slug(published)


# How tiers and their engines are described.


def tier_spec(
    name: TierName,
    tier: TierSettings,
    checkpoints_by_tier: Mapping[TierName, Checkpoint],
    *,
    store: Path,
    args: Sequence[str] = (),
    named_by: tuple[str, ...] = (),
) -> TierSpec:
    """Return a tier's layout; its engines here have the checkpoint of the settings, else the prepared one.

    Args:
        name: Of the tier.
        tier: Its settings.
        checkpoints_by_tier: The prepared ones.
        store: Folder of all checkpoints, which has those of the hub.
        args: The engines' arguments that a person gave: they can change the precision.
        named_by: What names further engines that run elsewhere.
    """
    stated_precision = tier.precision if tier.urls or named_by else None
    spec = TierSpec(
        name=name,
        max_model_len=tier.max_model_len,
        max_num_seqs=tier.max_num_seqs,
        max_in_flight=tier.max_in_flight,
        urls=tier.urls,
        named_by=named_by,
        stated_precision=stated_precision or None,
        replicas=tier.replicas_here,
        gpus=tier.gpus,
        tensor_parallel=tier.tensor_parallel,
        pipeline_parallel=tier.pipeline_parallel,
        draft=Draft(tier.draft) if tier.draft else None,
    )
    if not spec.replicas:
        return replace(spec, precision=told_precision(UNKNOWN, spec.stated_precision))
    if tier.checkpoint is not None:
        folder = checkpoint_folder(tier.checkpoint, store)
        return replace(
            spec, checkpoint=folder, precision=checkpoint_precision(folder, args)
        )
    if name not in checkpoints_by_tier:
        return spec
    return with_checkpoint(spec, checkpoints_by_tier[name], args)


def with_checkpoint(
    spec: TierSpec, checkpoint: Checkpoint, args: Sequence[str]
) -> TierSpec:
    """Return a tier whose engines are started from a prepared checkpoint.

    Args:
        spec: The tier.
        checkpoint: The checkpoint.
        args: The engines' arguments that a person gave: they can change the precision.
    """
    precision = checkpoint_precision(checkpoint.path, args)
    return replace(
        spec,
        checkpoint=checkpoint.path,
        digest=_weights_served(spec.name, checkpoint, precision),
        precision=precision,
    )


def _weights_served(tier: TierName, checkpoint: Checkpoint, precision: str) -> str:
    """Return the digest of the weights that a tier serves.

    Weights that vLLM quantizes while it loads them are others than the checkpoint's, so that what was measured of one does
    not count for the other.
    """
    digest = checkpoint.manifest.weights_digest
    is_base = checkpoint.manifest.precision == Precision.BF16
    if tier is TierName.PRECISE or not is_base:
        return digest
    return hashlib.sha256(f"{digest} {precision}".encode()).hexdigest()


def named_by(settings: Settings, tier: TierName) -> tuple[str, ...]:
    """Return what names engines of a tier that come and go: its DNS name and the file of engines."""
    sources = (settings.tiers.of(tier).dns, settings.discovery.file)
    return tuple(str(source) for source in sources if source)


def elsewhere(spec: TierSpec) -> TierSpec:
    """Return a tier as its engines given by URL have it, whatever is started here besides."""
    return replace(
        spec,
        checkpoint=None,
        digest=None,
        replicas=0,
        draft=None,
        adapters=(),
        precision=told_precision(UNKNOWN, spec.stated_precision),
    )


def make_launches(
    specs: Sequence[TierSpec], plan: MemoryPlan, settings: Settings, model: str
) -> tuple[EngineLaunch, ...]:
    """Return how engines are started, in the order of their ports; those without a checkpoint have only a port."""
    launches = []
    port = settings.engine.base_port
    for spec in specs:
        for number in range(spec.replicas):
            if spec.startable:
                placement = plan.placement(spec.name, number)
                launches.append(
                    _launch(spec, placement, settings, port=port, model=model)
                )
            port += 1
    return tuple(launches)


def _launch(
    spec: TierSpec,
    placement: EnginePlacement,
    settings: Settings,
    *,
    port: int,
    model: str,
) -> EngineLaunch:
    """Return how one engine of a tier is started, with a key of its own."""
    return EngineLaunch(
        tier=replace(spec, urls=(), named_by=(), stated_precision=None),
        placement=placement,
        python=settings.engine.python,
        served_model=model,
        host=HOST,
        port=port,
        api_key=secrets.token_urlsafe(24),
        otlp=engine_target(),
        extra_args=all_engine_args(settings, spec),
        env=settings.tiers.of(spec.name).env,
        adapters=adapters_of(spec, settings.lora),
    )


def engine_args(settings: Settings, tier: TierName) -> tuple[str, ...]:
    """Return the arguments of a tier's engines that the settings give, in their order: the last one counts."""
    tier_settings = settings.tiers.of(tier)
    scheme = _named_scheme(settings, tier)
    return (
        *(scheme.engine_args if scheme is not None else ()),
        *settings.engine.extra_args,
        *tier_settings.engine_args,
    )


def _named_scheme(settings: Settings, tier: TierName) -> Scheme | None:
    """Return the scheme that the settings name for a tier; None: the table chooses, which never quantizes while loading."""
    name = settings.tiers.of(tier).scheme
    return None if name == AUTO else scheme_named(name, tier)


def scheme_choices(settings: Settings) -> dict[TierName, SchemeChoice]:
    """Return what stands behind ``fast`` and ``balanced`` here, where their engines start from made checkpoints."""
    made_tiers = [
        tier
        for tier in CHOSEN_TIERS
        if settings.tiers.of(tier).replicas_here
        and settings.tiers.of(tier).checkpoint is None
    ]
    if not made_tiers:
        return {}
    named = {tier: settings.tiers.of(tier).scheme for tier in CHOSEN_TIERS}
    choices = choose_schemes(read_hardware(), named)
    return {tier: choices[tier] for tier in made_tiers}


def all_engine_args(settings: Settings, spec: TierSpec) -> tuple[str, ...]:
    """Return a person's arguments after those for the parsers of the model's family, if its checkpoint is here."""
    persons_args = engine_args(settings, spec.name)
    if spec.checkpoint is None:
        return persons_args
    return (*parser_args(spec.checkpoint, persons_args), *persons_args)


def prepare_options(settings: Settings) -> PrepareOptions:
    """Return how checkpoints are made."""
    model = settings.model
    calibration, samples, tokens = usual_calibration(
        model.name, has_gpu=bool(read_machine().gpus)
    )
    if model.calibration is not None:
        calibration = model.calibration
    if model.calibration_samples is not None:
        samples = model.calibration_samples
    return PrepareOptions(
        model=model.name,
        store=model.store,
        quantizer_python=settings.quantizer.python,
        calibration=calibration,
        calibration_samples=samples,
        calibration_tokens=tokens,
        schemes={
            tier: choice.scheme.name
            for tier, choice in scheme_choices(settings).items()
            if not choice.is_usual
        },
    )


# How they share the machine.


def plan_of(
    settings: Settings,
    machine: Machine,
    local_specs: Sequence[TierSpec],
    base: Path | None = None,
) -> MemoryPlan:
    """Share the machine; where memory does not suffice, tiers for whose engines the settings do not ask are left out."""
    tiers = {name: settings.tiers.of(name) for name in settings.tiers.names}
    drafts = {tier.draft for tier in tiers.values()}
    optional = set()
    for name, tier in tiers.items():
        is_requested = tier.checkpoint is not None or tier.replicas is not None
        if not is_requested and name not in drafts:
            optional.add(name)
    return make_plan(
        machine,
        local_specs,
        kv_cache_gib=settings.engine.cpu_kv_cache_gib,
        base=base,
        optional=optional,
    )


def without(
    left_out: Sequence[TierName], specs: Sequence[TierSpec]
) -> tuple[TierSpec, ...]:
    """Return the tiers, some of which get no engines here."""
    kept = []
    for spec in specs:
        if spec.name in left_out:
            kept.append(replace(spec, replicas=0, checkpoint=None))
        else:
            kept.append(spec)
    return tuple(kept)


def speed_machine(settings: Settings) -> str:
    """Return what measured speeds belong to: the machine, and how its engines use it apart from their checkpoints."""
    parts = [machine_name()]
    for name in settings.tiers.names:
        features = _speed_features(name, settings)
        if features:
            parts.append(f"{name}: {', '.join(features)}")
    return "; ".join(parts)


def _speed_features(name: TierName, settings: Settings) -> list[str]:
    """Return what changes the speed of a tier's engines here: a draft, adapters, several GPUs."""
    tier = settings.tiers.of(name)
    features: list[str] = []
    if not tier.replicas_here:
        return features
    if tier.draft:
        features.append(f"draft {tier.draft} x {Draft(tier.draft).tokens}")
    if named_adapters(name, settings.lora) or settings.lora.at_run_time:
        features.append("LoRA")
    world_size = tier.tensor_parallel * tier.pipeline_parallel
    if world_size > 1:
        features.append(
            f"{world_size} GPUs ({tier.tensor_parallel} x {tier.pipeline_parallel})"
        )
    return features


# What counts tokens.


def named_counter(folder: Path) -> TokenCounter:
    """Return a counter with the tokenizer of a folder that the user has named.

    Raises:
        TokenizerError: The folder has none.
    """
    if not (folder / "tokenizer.json").is_file():
        fault = "has no tokenizer.json" if folder.is_dir() else "is no folder"
        raise TokenizerError(
            f"--tokenizer: {folder} {fault}: name the model's folder, or leave the option out and tokens are estimated"
        )
    return make_counter(folder)


def make_counter(folder: Path | None) -> TokenCounter:
    """Return a counter with a model folder's tokenizer that counts each text once; without one, an estimating counter."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return EstimatingCounter()
    counter = ModelTokenCounter.from_file(folder / "tokenizer.json")
    return RememberingCounter(counter)


class LateCounter(TokenCounter):
    """Counts with a counter that is replaced when the model's tokenizer is there."""

    __slots__ = ("_counter",)

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter

    def replace(self, counter: TokenCounter) -> None:
        self._counter = counter

    @property
    def exact(self) -> bool:
        return self._counter.exact

    def count(self, text: str) -> int:
        return self._counter.count(text)
