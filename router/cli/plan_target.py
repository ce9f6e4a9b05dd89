"""What ``qarr plan`` plans: the model, the GPUs, and what is known of speeds and losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from router.cli.plan_formats import choose_formats, named_schemes, published_format
from router.cli.plan_inputs import PlanOptions
from router.cli.plan_result import ROOFLINE, PlanTarget
from router.deployment.layout import prepare_options, speed_machine
from router.policy.profiles import (
    AnswerCount,
    latency_name,
    load_latency,
    load_profile,
    profile_name,
)
from router.settings import Settings
from tiers.checkpoints.checkpoint import Checkpoint
from tiers.checkpoints.contents import contents_of, read_contents
from tiers.checkpoints.prepare import DEFAULT_MODEL, finished
from tiers.errors import PlanError
from tiers.plan import Machine, held_bytes, read_machine
from tiers.sizing.architecture import Architecture, architecture
from tiers.sizing.find_config import find_config
from tiers.sizing.hardware import GpuKind, known_gpus
from tiers.sizing.named_gpus import parse_all_gpus, unknown_gpu
from tiers.sizing.tier_format import TierFormat
from tiers.spec import PRECISIONS, TierName


def find_target(settings: Settings, options: PlanOptions) -> PlanTarget:
    """Return what is planned; raise ``PlanError`` if the options name a model or GPUs that are not known."""
    checkpoints: Sequence[Checkpoint] = ()
    if options.model is None:
        checkpoints = finished(prepare_options(settings))
    if checkpoints:
        model_name = checkpoints[-1].manifest.model
        folder = str(checkpoints[-1].path)
    else:
        model_name = options.model or settings.model.name
        folder = model_name
        if options.model is None and model_name == DEFAULT_MODEL:
            raise PlanError(
                f"{model_name}, the default model, is not made yet: run 'qarr model prepare', or give --model"
            )
    machine = read_machine()
    gpu_counts, left_out = _gpus(options, machine)
    measured_answers = _measured_answers(settings, checkpoints)
    config = find_config(folder)
    model = architecture(config)
    published, notes = _published(folder, config, model)
    formats = choose_formats(
        options.formats,
        options.kv_cache,
        gpu_counts,
        published,
        has_experts=model.has_experts,
        schemes=named_schemes(settings),
    )
    speed: str | None = ROOFLINE
    weights: dict[TierName, int] = {}
    if not gpu_counts:
        speed = None
        for checkpoint in checkpoints:
            weights[checkpoint.tier] = held_bytes(checkpoint.path, machine.instructions)
    target = PlanTarget(
        name=model_name,
        model=model,
        gpus=gpu_counts,
        formats=formats.by_tier,
        reference=formats.reference,
        speed=speed,
        paces={},
        weights=weights,
        answers=measured_answers,
        notes=[*left_out, *notes, *formats.notes],
    )
    profile_path = options.profile
    if profile_path is None and not gpu_counts and checkpoints:
        profile_path = _profile_of_this_machine(settings, checkpoints)
    if profile_path is None:
        return target
    return _with_profile(target, profile_path)


def _gpus(
    options: PlanOptions, machine: Machine
) -> tuple[dict[GpuKind, int | None], list[str]]:
    """Return the GPUs of the option, by default this machine's, and which of the machine's are left out."""
    if options.gpus is not None:
        return parse_all_gpus(options.gpus), []
    counts: dict[GpuKind, int | None] = {}
    left_out: list[str] = []
    for name, count in Counter(gpu.name for gpu in machine.gpus).items():
        kind = next((kind for kind in known_gpus() if kind.is_called(name)), None)
        if kind is None:
            left_out.append(name)
        else:
            counts[kind] = count
    if left_out and not counts:
        raise PlanError(f"this machine's GPU: {unknown_gpu(left_out[0])}")
    return counts, [
        f"not in the plan: {name} of this machine, which is no GPU that is known here; --gpus takes its figures"
        for name in left_out
    ]


def first_kind(machine: Machine) -> str:
    """Return the machine's GPUs of the first one's kind, as ``--gpus`` takes them.

    Raises:
        PlanError: The kind is not known.
    """
    name = machine.gpus[0].name
    for kind in known_gpus():
        if kind.is_called(name):
            count = sum(gpu.name == name for gpu in machine.gpus)
            return f"{count}x{kind.name}"
    raise PlanError(f"this machine's GPU: {unknown_gpu(name)}")


def _measured_answers(
    settings: Settings, checkpoints: Sequence[Checkpoint]
) -> Mapping[TierName, Sequence[AnswerCount]]:
    """Return the answers by which each tier's loss was measured; empty: it was not."""
    if not checkpoints:
        return {}
    profile_path = settings.policy.profiles / profile_name(_digests(checkpoints))
    if not profile_path.is_file():
        return {}
    profile = load_profile(profile_path)
    return {tier: profile.of(tier) for tier in PRECISIONS}


def _profile_of_this_machine(
    settings: Settings, checkpoints: Sequence[Checkpoint]
) -> Path | None:
    """Return the file of the speeds that were measured here; None: there is none."""
    file_name = latency_name(_digests(checkpoints), speed_machine(settings))
    profile_path = settings.policy.profiles / file_name
    return profile_path if profile_path.is_file() else None


def _digests(checkpoints: Sequence[Checkpoint]) -> dict[TierName, str]:
    return {made.tier: made.manifest.weights_digest for made in checkpoints}


def _with_profile(target: PlanTarget, profile_path: Path) -> PlanTarget:
    """Return a target with measured speeds, and what is assumed of them."""
    latency_profile = load_latency(profile_path)
    measured_paces = {fit.tier: fit.model for fit in latency_profile.fits}
    notes = list(target.notes)
    if target.gpus:
        notes.append(
            f"the speeds in {profile_path} are of {latency_profile.model} on {latency_profile.machine}: they count here for "
            "every kind of GPU, and for any number of GPUs that an engine has"
        )
    unmeasured = [tier for tier in PRECISIONS if tier not in measured_paces]
    if unmeasured:
        instead = "the roofline counts there" if target.gpus else "no fleet has it"
        notes.append(
            f"{profile_path} has no speed of {', '.join(unmeasured)}: {instead}"
        )
    unplanned = [tier for tier in measured_paces if tier not in PRECISIONS]
    if unplanned:
        notes.append(
            f"not in the plan: {', '.join(unplanned)} in {profile_path}: only fast, balanced and precise are planned"
        )
    return replace(
        target, speed=f"measured: {profile_path}", paces=measured_paces, notes=notes
    )


def _published(
    folder: str, config: Mapping[str, Any], model: Architecture
) -> tuple[TierFormat | None, list[str]]:
    """Return the formats of a model that is published in few bits, and what must be said of it; None: in 16 bits."""
    is_folder = Path(folder).is_dir()
    contents = read_contents(Path(folder)) if is_folder else contents_of(config)
    try:
        published = published_format(contents, model)
    except PlanError:
        note = f"not in the plan: that the model is published in {contents.precision}; tiers are planned as made from BF16"
        return None, [note]
    if published is None:
        return None, []
    note = f"the model is published in {published.precision}, so precise is that: other formats' losses count against it"
    return published, [note]
