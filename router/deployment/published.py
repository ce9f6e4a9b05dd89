"""Which tiers are served from published checkpoints, which are made, and which are left out: settled before anything starts.

A base that is quantized already is the highest precision as it is published: its loss is 0 by definition, and those of the
other tiers count against it. Nothing lower is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from router.deployment.layout import check_tiers_alike, prepare_options
from router.settings import Settings
from tiers.checkpoints.contents import read_contents
from tiers.checkpoints.hub import checkpoint_folder
from tiers.checkpoints.precision import checkpoint_precision
from tiers.checkpoints.prepare import DEFAULT_MODEL, PrepareOptions, check_model
from tiers.checkpoints.published import CheckpointFetcher, PublishedCheckpoint
from tiers.errors import CheckpointError
from tiers.formats import lowest_format
from tiers.spec import STANDARD_TIERS, UNKNOWN, TierName

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class SettledTiers:
    """What follows from the checkpoints that the settings name.

    Attributes:
        overrides: Settings of tiers that follow: the base as a checkpoint, and tiers that are left out.
        notes: A line for people about each.
        folders: Of the published checkpoints, by tier.
        is_base_quantized: Whether nothing can be made of the base.
    """

    overrides: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    folders: Mapping[TierName, Path] = field(default_factory=dict)
    is_base_quantized: bool = False


def settle_tiers(settings: Settings, progress: Progress) -> SettledTiers:
    """Check and fetch the checkpoints that the settings name for engines here, and settle what the others are served from.

    Args:
        settings: The settings.
        progress: Called at each step with a message, parts done, and parts in total (0 of 0 if they cannot be counted).

    Raises:
        CheckpointError: One cannot be had, they are not one model, or a tier is asked for that nothing can be made for.
    """
    published = _named_checkpoints(settings)
    to_make = _tiers_to_make(settings)
    fetcher = CheckpointFetcher(_fetch_options(settings), progress)
    base = PublishedCheckpoint("model.name", settings.model.name)
    settled = SettledTiers()
    files = {
        tier: fetcher.small_files(checkpoint) for tier, checkpoint in published.items()
    }
    # The built-in model is no folder before it is made. It is compared then.
    if to_make and settings.model.name != DEFAULT_MODEL:
        check_model(prepare_options(settings))
        base_files = fetcher.small_files(base)
        if read_contents(base_files).is_quantized:
            settled = _with_quantized_base(settings, to_make, base_files)
            to_make = [tier for tier in to_make if tier is TierName.PRECISE]
            if to_make:
                published[TierName.PRECISE] = base
        files.update(dict.fromkeys(to_make, base_files))
    if published:
        check_tiers_alike(settings, _in_order(settings, files))
    folders = {
        tier: fetcher.fetch(checkpoint) for tier, checkpoint in published.items()
    }
    notes = [
        f"{tier} serves {checkpoint.name} as published, in {_precision_of(folders[tier])}"
        for tier, checkpoint in published.items()
        if checkpoint is not base
    ]
    notes += _order_notes({**files, **folders})
    return replace(settled, notes=(*settled.notes, *notes), folders=folders)


def with_known_base(settings: Settings) -> Settings:
    """Return the settings as ``qarr up`` settles them for a quantized base on this machine; nothing is fetched."""
    to_make = _tiers_to_make(settings)
    folder = checkpoint_folder(settings.model.name, settings.model.store)
    if not to_make or not read_contents(folder).is_quantized:
        return settings
    try:
        overrides = _with_quantized_base(settings, to_make, folder).overrides
    except CheckpointError:
        # A tier is asked for that nothing can be made for: it stays a tier without a checkpoint.
        return settings
    changed_tiers = {
        name: settings.tiers.of(TierName(name)).model_copy(update=values)
        for name, values in overrides.items()
    }
    tiers = settings.tiers.model_copy(update=changed_tiers)
    return settings.model_copy(update={"tiers": tiers})


def _named_checkpoints(settings: Settings) -> dict[TierName, PublishedCheckpoint]:
    """Return the checkpoints that the settings name for engines here, and for their drafts."""
    drafts = {
        settings.tiers.of(name).draft
        for name in settings.tiers.names
        if settings.tiers.of(name).replicas_here
    }
    published = {}
    for name in settings.tiers.names:
        tier = settings.tiers.of(name)
        if tier.checkpoint is not None and (tier.replicas_here or name in drafts):
            published[name] = PublishedCheckpoint(
                f"tiers.{name}.checkpoint", tier.checkpoint
            )
    return published


def _tiers_to_make(settings: Settings) -> list[TierName]:
    """Return the tiers with engines here whose checkpoints are made of the base."""
    return [
        name
        for name in STANDARD_TIERS
        if settings.tiers.of(name).replicas_here
        and settings.tiers.of(name).checkpoint is None
    ]


def _fetch_options(settings: Settings) -> PrepareOptions:
    """Return what downloads: the quantizer's environment, else that of the engines, which has the hub's library too."""
    options = prepare_options(settings)
    if options.quantizer_python.is_file() or not settings.engine.python.is_file():
        return options
    return replace(options, quantizer_python=settings.engine.python)


def _with_quantized_base(
    settings: Settings, to_make: list[TierName], base_files: Path
) -> SettledTiers:
    """Return what follows from a base that is quantized: it is the highest precision, and nothing is made of it.

    Raises:
        CheckpointError: A tier is asked for that would have to be made of it.
    """
    base = f"{settings.model.name} is published in {_precision_of(base_files)}"
    overrides: dict[str, dict[str, Any]] = {}
    left_out = []
    for tier in to_make:
        if tier is TierName.PRECISE:
            overrides[tier] = {"checkpoint": settings.model.name}
        elif settings.tiers.of(tier).replicas is not None:
            raise CheckpointError(
                f"tiers.{tier}.replicas asks for engines of {tier}, but {base}, and nothing is made of a quantized model: "
                f"name a published checkpoint (--{tier}, or tiers.{tier}.checkpoint), or leave tiers.{tier}.replicas out"
            )
        else:
            overrides[tier] = {"replicas": 0}
            left_out.append(tier)
    return SettledTiers(
        overrides=overrides,
        notes=(_note(base, overrides, left_out),),
        is_base_quantized=True,
    )


def _order_notes(files: Mapping[TierName, Path]) -> list[str]:
    """Say which tiers have more bits a weight than the highest precision, which is the one that is trusted."""
    if TierName.PRECISE not in files:
        return []
    precise = checkpoint_precision(files[TierName.PRECISE])
    highest = lowest_format(precise)
    notes = []
    for tier, folder in files.items():
        precision = checkpoint_precision(folder)
        number_format = lowest_format(precision)
        if highest is None or number_format is None:
            continue
        if number_format.weight_bits > highest.weight_bits:
            notes.append(
                f"{tier} has more bits a weight ({precision}) than {TierName.PRECISE} ({precise}), which losses are "
                f"measured against: if it is the better one, name it with --{TierName.PRECISE}"
            )
    return notes


def _precision_of(folder: Path) -> str:
    """Return a checkpoint's precision, for a sentence's end."""
    precision = checkpoint_precision(folder)
    if precision == UNKNOWN:
        return "a format that QARR does not know"
    return precision


def _note(
    base: str, overrides: Mapping[str, dict[str, Any]], left_out: list[TierName]
) -> str:
    """Say what becomes of a quantized base."""
    if TierName.PRECISE in overrides:
        text = f"{base} and served as it is, as {TierName.PRECISE}: losses count against it"
    else:
        text = (
            f"{base}, but {TierName.PRECISE} has a checkpoint of its own: name it with --fast or --balanced if a tier is to "
            f"serve it"
        )
    if not left_out:
        return text
    options = " or ".join(f"--{tier}" for tier in left_out)
    verb = "is" if len(left_out) == 1 else "are"
    return (
        f"{text}. Nothing lower is made of it: {' and '.join(left_out)} {verb} left out ({options} names a published "
        f"checkpoint)"
    )


def _in_order(
    settings: Settings, files: Mapping[TierName, Path]
) -> dict[TierName, Path]:
    return {name: files[name] for name in settings.tiers.names if name in files}
