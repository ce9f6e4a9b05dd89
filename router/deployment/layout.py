"""The layout of the fleet, checked before anything starts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from classifier import (
    EstimatingCounter,
    ModelTokenCounter,
    TokenCounter,
    TokenizerError,
    extract,
)
from router.deployment.settings import LoraSettings, TierSettings
from router.settings import Settings
from router.telemetry.otel_environment import engine_target
from tiers.checkpoints.checkpoint import Checkpoint, check_alike, identity
from tiers.checkpoints.parsers import parser_args
from tiers.checkpoints.precision import checkpoint_precision, told_precision
from tiers.checkpoints.prepare import PrepareOptions, check_model, slug
from tiers.cluster.runner import RayOptions
from tiers.errors import CheckpointError, EngineError, PlanError, TokenizerMismatchError
from tiers.plan import (
    Machine,
    MemoryPlan,
    machine_name,
    make_plan,
    model_config,
    read_machine,
)
from tiers.ranking import rising
from tiers.spec import (
    UNKNOWN,
    Adapter,
    Adapters,
    Draft,
    EngineLaunch,
    TierName,
    TierSpec,
)

HOST = "127.0.0.1"


def make_launches(
    specs: Sequence[TierSpec], plan: MemoryPlan, settings: Settings, model: str
) -> tuple[EngineLaunch, ...]:
    """Return how engines are started, in the order of their ports; those without a checkpoint have only a port."""
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
            extra_args=whole_args(settings, spec),
            env=settings.tiers.of(spec.name).env,
            adapters=adapters_of(spec, settings.lora),
        )
        for port, (spec, number) in enumerate(engines, settings.engine.base_port)
        if spec.startable
    )


def engine_args(settings: Settings, tier: TierName) -> tuple[str, ...]:
    """Return the arguments of a tier's engines that a person gave, in their order: the last one counts."""
    return (*settings.engine.extra_args, *settings.tiers.of(tier).engine_args)


def whole_args(settings: Settings, spec: TierSpec) -> tuple[str, ...]:
    """Return the same after the parsers of the model's family, if its checkpoint is here."""
    given = engine_args(settings, spec.name)
    return (
        (*parser_args(spec.checkpoint, given), *given)
        if spec.checkpoint is not None
        else given
    )


def speed_machine(settings: Settings) -> str:
    """Return what measured speeds belong to: the machine, and how its engines use it apart from their checkpoints."""
    found = []
    for name in settings.tiers.names:
        tier = settings.tiers.of(name)
        if not tier.replicas_here:
            continue
        ways = (
            [f"draft {tier.draft} x {Draft(tier.draft).tokens}"] if tier.draft else []
        )
        if named_for(name, settings.lora) or settings.lora.at_run_time:
            ways.append("LoRA")
        if (world := tier.tensor_parallel * tier.pipeline_parallel) > 1:
            ways.append(
                f"{world} GPUs ({tier.tensor_parallel} x {tier.pipeline_parallel})"
            )
        if ways:
            found.append(f"{name}: {', '.join(ways)}")
    return "; ".join([machine_name(), *found])


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything that is started together, checked before anything starts."""

    settings: Settings
    specs: tuple[TierSpec, ...]  # the tiers, by rising precision
    # engines to start here at once; none if checkpoints are missing
    launches: tuple[EngineLaunch, ...]
    plan: MemoryPlan  # how they share the machine
    counter: TokenCounter  # counts tokens as the engines do, once there is a checkpoint
    model: str  # the model's name
    # tiers to run here whose checkpoints must be made first
    missing: tuple[TierName, ...] = ()
    # folder of the model's tokenizer; None: none is known yet
    tokenizer: Path | None = None
    ray: RayOptions | None = None  # engines to place on a Ray cluster; None: none

    @property
    def local(self) -> frozenset[TierName]:
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

    ``checkpoints`` are for tiers without URLs or a folder of their own; if one is missing, engines start only when the
    model's size is known. Without ``start_engines`` tiers without URLs are left out. ``tokenizer`` is a model folder to
    count tokens with; None: a checkpoint's.

    Raises:
        TierError: There is no such model, tiers differ in tokenizer, the machine is too small, or there are no tiers.
        TokenizerError: The tokenizer's folder has none.
    """
    prepared = {c.tier: c for c in checkpoints}
    tiers = settings.tiers
    specs = tuple(
        tier_spec(
            name,
            tiers.of(name),
            prepared,
            engine_args(settings, name),
            named_by(settings, name),
        )
        for name in tiers.names
    )
    specs = rising(specs, {})
    if not start_engines:
        specs = tuple(
            elsewhere(spec) if spec.urls or spec.named_by else replace(spec, replicas=0)
            for spec in specs
        )
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
    folders = {
        spec.name: spec.checkpoint for spec in specs if spec.checkpoint is not None
    }
    check_alike(folders)
    for spec in local:
        check_draft(spec)
    check_adapters(local, settings.lora)
    folder = next(iter(folders.values()), None) if tokenizer is None else tokenizer
    counter = make_counter(folder) if tokenizer is None else named_counter(tokenizer)
    extract("", counter)  # reads the weights now, not at the first request
    if missing:
        model = slug(settings.model.name)
        return Deployment(
            settings,
            specs,
            (),
            MemoryPlan("", ()),
            LateCounter(counter),
            model,
            missing,
            folder,
        )
    plan = plan_of(settings, read_machine(), local)
    specs, local = without(plan.left_out, specs), without(plan.left_out, local)
    precise = prepared.get(TierName.PRECISE)
    model = precise.manifest.model if precise else settings.model.name
    launches = make_launches(local, plan, settings, model)
    return Deployment(settings, specs, launches, plan, counter, model, tokenizer=folder)


def plan_of(
    settings: Settings,
    machine: Machine,
    local: Sequence[TierSpec],
    base: Path | None = None,
) -> MemoryPlan:
    """Share the machine; where memory does not suffice, tiers for whose engines the settings do not ask are left out."""
    tiers = {name: settings.tiers.of(name) for name in settings.tiers.names}
    drafts = {tier.draft for tier in tiers.values()}
    asked = {
        name
        for name, tier in tiers.items()
        if tier.checkpoint or tier.replicas is not None
    }
    optional = set(tiers) - asked - drafts
    return make_plan(
        machine,
        local,
        kv_cache_gib=settings.engine.cpu_kv_cache_gib,
        base=base,
        optional=optional,
    )


def without(
    left_out: Sequence[TierName], specs: Sequence[TierSpec]
) -> tuple[TierSpec, ...]:
    return tuple(
        replace(spec, replicas=0, checkpoint=None) if spec.name in left_out else spec
        for spec in specs
    )


def prepare_options(settings: Settings) -> PrepareOptions:
    return PrepareOptions(
        model=settings.model.name,
        store=settings.model.store,
        quantizer_python=settings.quantizer.python,
        calibration=settings.model.calibration,
        calibration_samples=settings.model.calibration_samples,
    )


def tier_spec(
    name: TierName,
    tier: TierSettings,
    prepared: Mapping[TierName, Checkpoint],
    args: Sequence[str] = (),
    named_by: tuple[str, ...] = (),
) -> TierSpec:
    """Return a tier's layout; its engines here have the checkpoint of the settings, else the prepared one."""
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
        draft=Draft(tier.draft) if tier.draft else None,
    )
    if not spec.replicas:
        return replace(spec, precision=told_precision(UNKNOWN, spec.stated_precision))
    if tier.checkpoint is not None:
        return replace(
            spec,
            checkpoint=tier.checkpoint,
            precision=checkpoint_precision(tier.checkpoint, args),
        )
    return with_checkpoint(spec, prepared[name], args) if name in prepared else spec


def named_by(settings: Settings, tier: TierName) -> tuple[str, ...]:
    own = settings.tiers.of(tier)
    return tuple(str(each) for each in (own.dns, settings.discovery.file) if each)


def elsewhere(spec: TierSpec) -> TierSpec:
    """Return a tier as its engines given by URL have it, whatever is started here besides."""
    precision = told_precision(UNKNOWN, spec.stated_precision)
    return replace(
        spec,
        checkpoint=None,
        digest=None,
        replicas=0,
        draft=None,
        adapters=(),
        precision=precision,
    )


def with_checkpoint(spec: TierSpec, made: Checkpoint, args: Sequence[str]) -> TierSpec:
    precision = checkpoint_precision(made.path, args)
    return replace(
        spec,
        checkpoint=made.path,
        digest=made.manifest.weights_digest,
        precision=precision,
    )


def named_counter(folder: Path) -> TokenCounter:
    """Return a counter with the tokenizer of a folder that the user has named; ``TokenizerError``: it has none."""
    if not (folder / "tokenizer.json").is_file():
        what = "has no tokenizer.json" if folder.is_dir() else "is no folder"
        raise TokenizerError(
            f"--tokenizer: {folder} {what}: name the model's folder, or leave the option out and tokens are estimated"
        )
    return make_counter(folder)


def make_counter(folder: Path | None) -> TokenCounter:
    """Return a counter with a model folder's tokenizer; without one, an estimating counter."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return EstimatingCounter()
    return ModelTokenCounter.from_file(folder / "tokenizer.json")


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


def with_drafts(
    specs: Sequence[TierSpec],
    settings: Settings,
    prepared: Mapping[TierName, Checkpoint] = MappingProxyType({}),
) -> tuple[TierSpec, ...]:
    """Return the tiers with the folders of their drafts, as far as they are made.

    ``PlanError``: a draft is no lower tier, or its checkpoint is not there, and is not made either.
    """
    here = {spec.name: spec for spec in specs}
    rising = list(here)
    found = []
    for spec in specs:
        draft = spec.draft
        if draft is None or draft.startable or not spec.replicas:
            found.append(replace(spec, draft=draft if spec.replicas else None))
            continue
        if draft.source not in here:
            found.append(
                replace(spec, draft=replace(draft, checkpoint=Path(draft.source)))
            )
            continue
        tier = TierName(draft.source)
        if rising.index(tier) >= rising.index(spec.name):
            raise PlanError(
                f"tiers.{spec.name}.draft is {tier}: ngram, a tier of lower precision or a model folder is allowed"
            )
        made = prepared[tier].path if tier in prepared else None
        own = settings.tiers.of(tier)
        folder = (
            (here[tier].checkpoint if tier in here else None) or own.checkpoint or made
        )
        if folder is None and not own.replicas_here:
            raise PlanError(
                f"tiers.{spec.name}.draft is {tier}, whose checkpoint is not made: run 'qarr model prepare', let its "
                f"engines run here, or name a folder"
            )
        found.append(replace(spec, draft=replace(draft, checkpoint=folder)))
    return tuple(found)


def check_draft(spec: TierSpec) -> None:
    """Check that a tier's draft model reads and writes the same tokens as the tier, else ``TokenizerMismatchError``."""
    draft = None if spec.draft is None else spec.draft.checkpoint
    if draft is None or spec.checkpoint is None:
        return
    own, its = (
        identity(spec.checkpoint).tokenizer_digest,
        identity(draft).tokenizer_digest,
    )
    try:
        size, its_size = (
            model_config(folder).get("vocab_size")
            for folder in (spec.checkpoint, draft)
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"tiers.{spec.name}.draft: {error}: a folder with a config.json is needed"
        ) from error
    if own != its or size != its_size:
        raise TokenizerMismatchError(
            f"tiers.{spec.name}.draft has another vocabulary: {spec.name} ({spec.checkpoint}) has {size} tokens, digest "
            f"{own}; the draft ({draft}) has {its_size}, digest {its}. A draft must share the tier's tokenizer: name a "
            f"lower tier, or a folder with the same tokenizer.json"
        )


CONFIG = "adapter_config.json"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 reserves memory for


def named_for(tier: TierName, lora: LoraSettings) -> tuple[str, ...]:
    return tuple(
        sorted(
            name
            for name, own in lora.adapters.items()
            if not own.tiers or tier in own.tiers
        )
    )


def with_adapters(
    specs: Sequence[TierSpec], lora: LoraSettings
) -> tuple[TierSpec, ...]:
    return tuple(
        replace(spec, adapters=named_for(spec.name, lora)) if spec.replicas else spec
        for spec in specs
    )


def adapters_of(spec: TierSpec, lora: LoraSettings) -> Adapters:
    """Return what a tier's engines are started with for LoRA; ``PlanError``: a folder holds no adapter."""
    named = named_for(spec.name, lora)
    loaded = tuple(
        Adapter(name, str(lora.adapters[name].path.absolute())) for name in named
    )
    ranks = [_rank(name, lora.adapters[name].path) for name in named]
    highest = max([*ranks, lora.max_rank if lora.at_run_time else 1])
    return Adapters(
        loaded, next(rank for rank in RANKS if rank >= highest), lora.at_run_time
    )


def check_adapters(local: Sequence[TierSpec], lora: LoraSettings) -> None:
    """Raise ``PlanError`` if a folder holds no adapter, or one is named for a tier that has no engines here."""
    here = {spec.name for spec in local}
    for name, own in lora.adapters.items():
        missing = [tier for tier in own.tiers if tier not in here]
        if missing:
            raise PlanError(
                f"lora.adapters.{name}.tiers names {missing[0]}, which has no engines here: engines given by URL load "
                f"adapters where they run, and the router finds them"
            )
    for spec in local:
        adapters_of(spec, lora)


def _rank(name: str, folder: Path) -> int:
    where = f"lora.adapters.{name}.path is {folder}"
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind, rank = config["peft_type"], config["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{where}: {error}: a folder of PEFT with an {CONFIG} is needed"
        ) from error
    if kind != "LORA" or not isinstance(rank, int) or not 1 <= rank <= RANKS[-1]:
        raise PlanError(
            f"{where}: it is of kind {kind} and rank {rank}; LORA of rank 1 to {RANKS[-1]} is allowed"
        )
    return rank
