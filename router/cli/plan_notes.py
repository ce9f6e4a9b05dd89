"""What ``qarr plan`` says beside its figures: what is assumed, and what does not enter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from classifier import Complexity, PromptClass
from router.cli.plan_inputs import DEFAULTS, PlanInputs, PlanOptions
from router.cli.plan_load import MIXES, budget_tier
from router.cli.plan_result import FleetAsSet, PlanTarget
from router.policy.published import published_loss
from tiers.sizing.capacity import ServingDemand
from tiers.sizing.fleet import DailyLoad
from tiers.sizing.hardware import PRICES, GpuKind, Prices, known_gpus
from tiers.sizing.named_gpus import given_figures, is_as_built_in

# Options that say nothing without a known speed, by their field in ``PlanOptions``.
OPTIONS_FOR_LOADS = {
    "load": "--load",
    "share_percent": "--share",
    "day": "--day",
    "mix": "--mix",
    "lost_of_100": "--loss",
    "ttft_ms": "--ttft",
    "tpot_ms": "--tpot",
}


def notes_on_inputs(
    inputs: PlanInputs, gpu_counts: Mapping[GpuKind, int | None], prices: Prices
) -> list[str]:
    """Return what is assumed of GPUs, and which options do not enter the plan.

    Args:
        inputs: Of the plan.
        gpu_counts: With the numbers that are planned for.
        prices: All that are known.
    """
    options = inputs.options
    is_speed_known = inputs.target.speed is not None
    notes: list[str] = []
    for gpu, gpu_count in gpu_counts.items():
        if not is_as_built_in(gpu):
            notes.append(given_figures(gpu))
        if gpu_count != inputs.target.gpus[gpu]:
            notes.append(
                f"no number of {gpu.name} is given: planned for {gpu_count}, which hold an engine of each "
                "precision that fits"
            )
    if gpu_counts and all(prices.of(gpu) is None for gpu in gpu_counts):
        notes.append(
            "no price of these GPUs is known: they are counted; add price=1.9 in --gpus, or give --prices a file"
        )
    has_bounds = options.ttft_ms is not None or options.tpot_ms is not None
    if is_speed_known and has_bounds:
        notes.append(
            "--ttft and --tpot bound an engine's times without waiting; those of fleets have it in them"
        )
    if options.prices != PRICES:
        notes += _unused_prices(options.prices, gpu_counts, prices)
    notes += _note_on_kv_cache(inputs.target)
    if not is_speed_known:
        notes += _unused_options(options)
    return notes


def _note_on_kv_cache(target: PlanTarget) -> list[str]:
    """Return that the losses of an FP8 KV cache are left out, where nothing is known of them."""
    has_fp8_kv = any(each.is_kv_fp8 for each in target.formats.values())
    kind = PromptClass.MATH, Complexity.COMPLEX
    if not has_fp8_kv or published_loss("bf16+kv-fp8", kind, None) > 0:
        return []
    return [
        "not in the plan: what an FP8 KV cache loses, of which nothing is published here"
    ]


def notes_on_load(
    options: PlanOptions, target: PlanTarget, demand: ServingDemand, load: DailyLoad
) -> list[str]:
    """Return what the plan takes for granted where no option says otherwise, and what a decision log says."""
    is_built_in_mix = options.mix in MIXES
    assumptions: list[str] = []
    if is_built_in_mix:
        assumptions.append(f"prompts of the mix {options.mix} (--mix)")
    if options.day == DEFAULTS.day:
        assumptions.append("an even load (--day)")
    if options.context is None:
        assumptions.append(
            f"requests of at most {demand.context:,} tokens, the mean (--context)"
        )
    if options.lost_of_100 is None:
        assumptions.append(
            f"at most {100 * load.budget:.2g} answers of 100 lost, as many as {budget_tier(target)} alone loses (--loss)"
        )
    notes: list[str] = []
    if assumptions:
        notes.append(f"assumed: {', '.join(assumptions)}")
    if not is_built_in_mix:
        notes.append(
            f"of {options.mix} classes and complexities count; --load, --day, --prompt and --output say the rest"
        )
    return notes


def note_on_shared_gpus(
    present_fleet: FleetAsSet | None, available: Mapping[str, int | None]
) -> list[str]:
    """Return which GPUs the engines of the settings would need besides those that there are."""
    if present_fleet is None or present_fleet.fleet is None:
        return []
    notes: list[str] = []
    for gpu, needed_gpus in present_fleet.fleet.gpus.items():
        gpu_count = available.get(gpu)
        if gpu_count is not None and needed_gpus > gpu_count:
            notes.append(
                f"the engines as set take {needed_gpus} x {gpu}, one GPU or more each, and there are {gpu_count}: engines "
                "that share a GPU are not planned"
            )
    return notes


def source_of_prices(
    options: PlanOptions, price_by_gpu: Mapping[GpuKind, float]
) -> str:
    """Return where the prices are from."""
    sources: list[str] = []
    given_names = [gpu.name for gpu in price_by_gpu if gpu.price_per_hour is not None]
    if given_names:
        sources.append(f"{', '.join(given_names)} as given in --gpus")
    if len(given_names) < len(price_by_gpu):
        sources.append(_source_of_listed_prices(options))
    return "; ".join(sources)


def _source_of_listed_prices(options: PlanOptions) -> str:
    if options.prices != PRICES:
        return str(options.prices)
    return "dated list prices, built in; providers differ by a factor of four (--prices, or price= in --gpus)"


def _unused_prices(
    price_file: Path, gpu_counts: Mapping[GpuKind, int | None], prices: Prices
) -> list[str]:
    if not gpu_counts:
        return [
            f"not in the plan: --prices {price_file}: machines are counted where engines run on a processor"
        ]
    kinds = (*gpu_counts, *known_gpus())
    unused_names = [
        name for name in prices.per_gpu_hour if not _names_one_of(kinds, name)
    ]
    return [
        f"not in the plan: the price of {name} in {price_file}: no GPU here or in the built-in list has this name"
        for name in unused_names
    ]


def _names_one_of(kinds: Iterable[GpuKind], name: str) -> bool:
    return any(gpu.is_called(name) for gpu in kinds)


def _unused_options(options: PlanOptions) -> list[str]:
    """Return the options that were given and do not count where speeds are not known."""
    unused = [
        option
        for field, option in OPTIONS_FOR_LOADS.items()
        if getattr(options, field) != getattr(DEFAULTS, field)
    ]
    if not unused:
        return []
    return [
        f"not in the plan: {', '.join(unused)}: without a known speed no load is planned, and no bound checked"
    ]
