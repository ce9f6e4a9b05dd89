"""The number formats that ``qarr plan`` plans tiers in: those that are named, or those that the GPUs compute well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.settings import Settings
from tiers.checkpoints.contents import CheckpointContents
from tiers.checkpoints.schemes import AUTO, CHOSEN_TIERS, scheme_named
from tiers.errors import PlanError
from tiers.formats import FORMATS, lowest_format
from tiers.kv_precision import weights_of
from tiers.sizing.architecture import Architecture
from tiers.sizing.formats_for import common_formats, formats_for, unpacked_formats
from tiers.sizing.hardware import GpuKind
from tiers.sizing.kernels import PLANNED_FORMATS
from tiers.sizing.tier_format import (
    KV_CACHE_DTYPES,
    STANDARD_FORMATS,
    TierFormat,
    parse_format,
)
from tiers.spec import STANDARD_TIERS, TierName

FOUR_BITS = 4
IN_16_BITS = ("bf16", "fp16")
OPTION = "--formats"


@dataclass(frozen=True, slots=True)
class PlannedFormats:
    """What each tier is planned in.

    Attributes:
        by_tier: From the fewest bits; tiers that are not planned are left out.
        reference: What losses count against: the model as it is published.
        notes: What must be said of them.
    """

    by_tier: Mapping[TierName, TierFormat]
    reference: TierFormat
    notes: Sequence[str] = ()


def choose_formats(
    named: str | None,
    kv_cache: str,
    gpus: Iterable[GpuKind],
    published: TierFormat | None,
    *,
    has_experts: bool,
    schemes: Mapping[TierName, str] | None = None,
) -> PlannedFormats:
    """Return the formats that tiers are planned in.

    Args:
        named: As ``--formats`` has them, with commas between; None: those that the GPUs compute well.
        kv_cache: As ``--kv-cache`` has it: ``fp8`` counts for the formats that name no KV cache of their own.
        gpus: The kinds of GPU; none: engines run on a processor.
        published: The format of a model that is published in few bits; None: in 16 bits.
        has_experts: Whether the model has routed experts, so that they may have a format of their own.
        schemes: Those that the settings name for tiers; ``--formats`` counts before them.

    Raises:
        PlanError: A format is not known, is not planned for this model, or there are too many.
    """
    if kv_cache not in KV_CACHE_DTYPES:
        raise PlanError(
            f"--kv-cache {kv_cache}: {' and '.join(KV_CACHE_DTYPES)} are allowed"
        )
    kinds = list(gpus)
    reference = published or STANDARD_FORMATS[TierName.PRECISE]
    if named is not None:
        if not kinds:
            raise PlanError(
                f"{OPTION} needs --gpus: engines on a CPU are planned with the checkpoints that are made for it"
            )
        by_tier = _named_formats(named, reference)
        if not has_experts:
            _check_no_mixture(named, by_tier)
        notes: list[str] = []
    else:
        usual = _usual_formats(kinds)
        own_schemes = schemes or {}
        for tier, name in own_schemes.items():
            usual[tier] = TierFormat(FORMATS[scheme_named(name, tier).number_format])
        by_tier, notes = _below(usual, published)
        notes += _notes_on_kinds(kinds, by_tier, own_schemes)
    if kv_cache == "fp8":
        by_tier = {
            tier: replace(tier_format, is_kv_fp8=True)
            for tier, tier_format in by_tier.items()
        }
    return PlannedFormats(
        by_tier, reference, notes=[*notes, *_notes_on_units(kinds, by_tier)]
    )


def published_format(
    contents: CheckpointContents, model: Architecture
) -> TierFormat | None:
    """Return the formats that a model is published in, if they have fewer than 16 bits; None: they have not.

    Args:
        contents: What the published checkpoint holds.
        model: Its architecture.

    Raises:
        PlanError: It has a format that is not planned.
    """
    if not contents.is_quantized:
        return None
    tier_format = parse_format(_two_formats(contents), "the model's config.json")
    parameters = contents.parameters or 0
    share_in_16_bits = sum(
        share for name, share in contents.formats.items() if name in IN_16_BITS
    )
    # Embeddings, output layer, norms and routers have 16 bits anyway.
    left_in_16_bits = share_in_16_bits * parameters - model.bf16_parameters
    if model.has_experts and 2 * left_in_16_bits > model.dense_parameters:
        tier_format = replace(tier_format, dense_format=FORMATS["bf16"])
    return replace(tier_format, checkpoint_bytes=contents.weight_bytes)


def _two_formats(contents: CheckpointContents) -> str:
    """Return a precision of at most two formats: the lowest one, and of the others the one that most parameters have."""
    weights = weights_of(contents.precision)
    kv_cache = contents.precision.removeprefix(weights)
    names = weights.split("+")
    lowest = lowest_format(weights)
    if lowest is None or len(names) == 1:
        return contents.precision
    others = [name for name in names if name != lowest.name]
    largest = max(others, key=lambda name: contents.formats[name])
    return f"{lowest.name}+{largest}{kv_cache}"


def named_schemes(settings: Settings) -> dict[TierName, str]:
    """Return the schemes that the settings name."""
    schemes = {tier: settings.tiers.of(tier).scheme for tier in CHOSEN_TIERS}
    return {tier: name for tier, name in schemes.items() if name != AUTO}


def _usual_formats(gpus: Sequence[GpuKind]) -> dict[TierName, TierFormat]:
    """Return the formats that the GPUs compute well."""
    if not gpus:
        return dict(STANDARD_FORMATS)
    return {
        tier: TierFormat(number_format)
        for tier, number_format in common_formats(gpus).items()
    }


def _below(
    formats: Mapping[TierName, TierFormat], published: TierFormat | None
) -> tuple[dict[TierName, TierFormat], list[str]]:
    """Return formats of fewer bits than a published model's, and its own; and which are left out."""
    if published is None:
        return dict(formats), []
    below: dict[TierName, TierFormat] = {}
    left_out: list[str] = []
    for tier in CHOSEN_TIERS:
        if _weight_bits(formats[tier]) < _weight_bits(published):
            below[tier] = formats[tier]
        else:
            left_out.append(f"{tier} ({formats[tier].precision})")
    notes: list[str] = []
    if left_out:
        notes.append(
            f"not in the plan: {', '.join(left_out)}: no fewer bits than the model's own {published.precision}"
        )
    return {**below, TierName.PRECISE: published}, notes


def _named_formats(named: str, reference: TierFormat) -> dict[TierName, TierFormat]:
    """Return the tiers of the formats that ``--formats`` names."""
    where = f"{OPTION} {named}"
    by_tier: dict[TierName, TierFormat] = {}
    lower: list[TierFormat] = []
    formats = [parse_format(text, where) for text in named.split(",")]
    for tier_format in sorted(formats, key=lambda each: each.bits, reverse=True):
        if formats.count(tier_format) > 1:
            raise PlanError(
                f"{where}: {tier_format.precision} is named twice; once is allowed"
            )
        is_reference = _has_same_weights(tier_format, reference)
        if is_reference and TierName.PRECISE not in by_tier:
            # The model's own file says which layers have its format, and how large it is.
            by_tier[TierName.PRECISE] = replace(
                tier_format,
                dense_format=reference.dense_format,
                checkpoint_bytes=reference.checkpoint_bytes,
            )
        elif not is_reference and tier_format.bits >= reference.bits:
            raise _not_below(tier_format, reference, where)
        else:
            lower.append(tier_format)
    if len(lower) > len(STANDARD_TIERS) - 1:
        raise PlanError(
            f"{where}: {', '.join(each.precision for each in lower)} are {len(lower)} formats below "
            f"{reference.precision}; at most two are allowed, for fast and balanced"
        )
    by_tier |= _tiers_of_lower(lower)
    return {tier: by_tier[tier] for tier in STANDARD_TIERS if tier in by_tier}


def _check_no_mixture(named: str, by_tier: Mapping[TierName, TierFormat]) -> None:
    """Raise ``PlanError`` for experts' formats of a model that has no experts; what is published is as it is."""
    for tier, tier_format in by_tier.items():
        if tier in CHOSEN_TIERS and tier_format.dense_format is not None:
            raise PlanError(
                f"{OPTION} {named}: {tier_format.precision}: the lower format of two is that of routed experts, and the "
                "model has none; one format a tier is allowed"
            )


def _tiers_of_lower(formats: Sequence[TierFormat]) -> dict[TierName, TierFormat]:
    """Return the tiers of one or two formats, in descending order, below the model's own.

    One format alone is ``fast`` if its weights have 4 bits or fewer, as usually.
    """
    if len(formats) == 1:
        has_four_bits = _weight_bits(formats[0]) <= FOUR_BITS
        tier = TierName.FAST if has_four_bits else TierName.BALANCED
        return {tier: formats[0]}
    return dict(zip((TierName.BALANCED, TierName.FAST), formats, strict=False))


def _not_below(tier_format: TierFormat, reference: TierFormat, where: str) -> PlanError:
    allowed = [
        name
        for name in PLANNED_FORMATS
        if TierFormat(FORMATS[name]).bits < reference.bits
    ]
    if reference.number_format.is_quantized:
        why = f"the model is published in {reference.precision}, and none of its tiers has more"
    else:
        why = f"a tier has the model's own {reference.precision}"
    return PlanError(
        f"{where}: {tier_format.precision}: {why}; allowed are {reference.precision} and {', '.join(allowed)}"
    )


def _has_same_weights(tier_format: TierFormat, reference: TierFormat) -> bool:
    """Tell whether weights are the model's own; FP16 and BF16 count as one."""
    if not reference.number_format.is_quantized:
        return not tier_format.number_format.is_quantized
    is_whole = tier_format.dense_format in {None, reference.dense_format}
    return is_whole and tier_format.number_format == reference.number_format


def _weight_bits(tier_format: TierFormat) -> int:
    return tier_format.number_format.weight_bits


def _notes_on_kinds(
    gpus: Sequence[GpuKind],
    by_tier: Mapping[TierName, TierFormat],
    schemes: Mapping[TierName, str],
) -> list[str]:
    """Return that kinds of GPU would have different formats, and what is planned on all of them."""
    own_formats = {gpu.name: _words(formats_for(gpu).values()) for gpu in gpus}
    if len(set(own_formats.values())) <= 1 or len(schemes) == len(CHOSEN_TIERS):
        return []
    kinds = "; ".join(f"{name} {words}" for name, words in own_formats.items())
    planned = ", ".join(
        f"{tier} is {tier_format.precision}" for tier, tier_format in by_tier.items()
    )
    note = (
        f"these kinds of GPU compute different formats well ({kinds}), and a tier has one format on all of them: {planned}; "
        f"{OPTION} names others"
    )
    return [note]


def _notes_on_units(
    gpus: Iterable[GpuKind], by_tier: Mapping[TierName, TierFormat]
) -> list[str]:
    """Return which formats are computed in 16 bits for want of units."""
    formats = {tier: each.number_format for tier, each in by_tier.items()}
    notes: list[str] = []
    for gpu in gpus:
        unpacked = unpacked_formats(formats, gpu)
        if unpacked:
            notes.append(
                f"{gpu.name} computes {_words(unpacked)} in 16 bits: it has no units for it that vLLM uses"
            )
    return notes


def _words(formats: Iterable[Any]) -> str:
    return ", ".join(number_format.name for number_format in formats)
