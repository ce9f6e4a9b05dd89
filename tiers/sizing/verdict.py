"""What a plan comes to, in a sentence, and as settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from rich.table import Table

from classifier import Complexity
from tiers.checkpoints.schemes import scheme_names
from tiers.sizing.fleet import DailyLoad, EngineType, PlannedFleet
from tiers.sizing.operation import ROUNDING
from tiers.sizing.tier_format import STANDARD_FORMATS, TierFormat, format_words
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from classifier import PromptClass

MIN_SHOWN_SHARE = 0.005  # share of a kind's requests
MIN_SHOWN_LOSS = 5e-5  # share of all answers
_FP8_KV = '["--kv-cache-dtype", "fp8"]'
SAME_PRICE = 0.005  # half a cent: the smallest difference that is shown


def counted(fleet: PlannedFleet) -> str:
    """Return what a fleet consists of: ``2 x FP8 and 1 x BF16``."""
    counts: Counter[str] = Counter()
    for engine, count in fleet.counts:
        counts[format_words(engine.plan.precision)] += count
    return " and ".join(f"{count} x {name}" for name, count in counts.items())


def _cost_words(fleet: PlannedFleet, currency: str | None) -> str:
    if currency is not None:
        return f"{fleet.price:,.2f} {currency} an hour"
    unit = "GPU" if fleet.counts[0][0].gpu else "machine"
    if fleet.price > 1:
        unit += "s"
    return f"{fleet.price:,.0f} {unit}"


def _loss_words(lost_share: float) -> str:
    if lost_share < MIN_SHOWN_LOSS:
        return "none"
    return f"{lost_share * 100:.2g} answers of 100"


def verdict_on(
    best: PlannedFleet,
    singles: Mapping[TierName, PlannedFleet | None],
    load: DailyLoad,
    currency: str | None,
    formats: Mapping[TierName, TierFormat] = STANDARD_FORMATS,
) -> str:
    """Return the plan in a sentence, beside each precision alone.

    Args:
        best: The planned fleet.
        singles: The cheapest fleet of each precision alone; None: it does not carry the load.
        load: What they are planned for.
        currency: That of prices; None: no price is known, so GPUs or machines are counted.
        formats: Of the tiers.
    """
    cost = _cost_words(best, currency)
    loss = _loss_words(best.lost_share)
    tiers = {engine.tier for engine, _ in best.counts}
    if len(tiers) == 1:
        name = format_words(best.counts[0][0].plan.precision)
        return (
            f"{name} alone is best here: it costs {cost} and loses {loss}, within the {_loss_words(load.budget)} allowed; "
            "further precisions would not pay."
        )
    clauses = [f"{counted(best)} cost {cost} and lose {loss}"]
    for tier, fleet in singles.items():
        name = format_words(formats[tier].precision)
        if fleet is None:
            clauses.append(f"{name} alone does not carry it on these GPUs")
        else:
            comparison = _comparison(fleet, best, load, currency=currency)
            clauses.append(f"{name} alone {comparison}")
    return "; ".join(clauses) + "."


def _comparison(
    single: PlannedFleet, best: PlannedFleet, load: DailyLoad, currency: str | None
) -> str:
    """Return what a fleet of one precision costs and loses, beside the best fleet."""
    cost = _cost_words(single, currency)
    if abs(single.price - best.price) < SAME_PRICE:
        cost = "the same"
    comparison = f"costs {cost} and loses {_loss_words(single.lost_share)}"
    if single.lost_share > load.budget + ROUNDING:
        comparison += ", over the budget"
    return comparison


def missing_for(
    engines: Sequence[EngineType],
    load: DailyLoad,
    available: Mapping[str, int | None],
    sufficient: PlannedFleet | None,
) -> str:
    """Return what is missing for a load that no fleet carries.

    Args:
        engines: Those that may be started.
        load: The load.
        available: GPUs of each kind; None: as many as are needed.
        sufficient: The cheapest fleet of as many GPUs as it takes; None: none keeps the loss budget.
    """
    if sufficient is None:
        tiers = {engine.tier for engine in engines}
        least_loss = min(load.lost_by(tier) for tier in tiers)
        return f"Nothing keeps the budget of {_loss_words(load.budget)}: at least {_loss_words(least_loss)} would be lost."
    counts = {gpu: count for gpu, count in available.items() if count is not None}
    return (
        f"{load.peak_per_s:g} requests a second at the peak are too many for {_gpu_words(counts)}: the cheapest that would "
        f"do is {_gpu_words(sufficient.gpus)}."
    )


def _gpu_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {gpu}" for gpu, count in counts.items())


def tiers_of(fleet: PlannedFleet) -> dict[str, dict[str, int]]:
    """Return the settings of each tier."""
    settings: dict[str, dict[str, int]] = {}
    for tier in STANDARD_TIERS:
        settings[tier] = {"replicas": fleet.replicas(tier)}
        plans = [engine.plan for engine, _ in fleet.counts if engine.tier is tier]
        if plans:
            batch = min(plan.batch for plan in plans)
            settings[tier]["tensor_parallel"] = max(plans[0].gpus_per_replica, 1)
            settings[tier]["max_num_seqs"] = batch
            settings[tier]["max_in_flight"] = 2 * batch
    return settings


@dataclass(frozen=True, slots=True)
class WrittenSettings:
    """What a plan was made for besides the load, and engines need as settings.

    Attributes:
        model: A folder or an id; None: the default model, or not known.
        context: Tokens of the longest request, as asked for; None: the tiers keep theirs.
        formats: Of the tiers.
    """

    model: str | None = None
    context: int | None = None
    formats: Mapping[TierName, TierFormat] = field(
        default_factory=lambda: STANDARD_FORMATS
    )


def settings_for(fleet: PlannedFleet, verdict: str, written: WrittenSettings) -> str:
    """Return the tiers as settings that ``qarr up`` takes, and the loss budget by which the router uses them so."""
    lines = [f"# {verdict}", "[policy]", f"loss_budget = {fleet.loss_budget:g}"]
    if written.model is not None:
        name = json.dumps(written.model, ensure_ascii=False)
        lines += ["[model]", f"name = {name}"]
    have_all_fp8_kv = all(
        tier_format.is_kv_fp8 for tier_format in written.formats.values()
    )
    if have_all_fp8_kv:
        lines += ["[engine]", f"extra_args = {_FP8_KV}"]
    for name, settings in tiers_of(fleet).items():
        tier = TierName(name)
        tier_format = written.formats.get(tier)
        lines.append(f"[tiers.{tier}]{_gpu_comment(fleet, tier)}")
        lines += [f"{field} = {value}" for field, value in settings.items()]
        if tier_format is None or not settings["replicas"]:
            continue
        lines += _checkpoint_lines(tier, tier_format)
        if tier_format.is_kv_fp8 and not have_all_fp8_kv:
            lines.append(f"engine_args = {_FP8_KV}")
        if written.context is not None:
            lines.append(f"max_model_len = {written.context}")
    return "\n".join(lines) + "\n"


def _checkpoint_lines(tier: TierName, tier_format: TierFormat) -> list[str]:
    """Return which checkpoint a tier needs; empty: the model's own."""
    if tier is TierName.PRECISE:
        return []
    weights = "+".join(tier_format.names)
    if weights in scheme_names():
        return [f'scheme = "{weights}"']
    return [
        f"# planned in {weights}, which is not made here: name such a folder as tiers.{tier}.checkpoint"
    ]


def _gpu_comment(fleet: PlannedFleet, tier: str) -> str:
    """Return a comment on which GPUs a tier's engines are; empty: they are on none."""
    gpus = [engine.gpu for engine, _ in fleet.counts if engine.tier == tier]
    named_gpus = ", ".join(filter(None, gpus))
    return f"  # on {named_gpus}" if named_gpus else ""


def kinds_table(best: PlannedFleet) -> Table:
    """Return which precision the plan has for which prompts."""
    shares_by_kind = _shares_by_kind(best)
    table = Table("planned for", *Complexity, box=None)
    prompt_classes = dict.fromkeys(prompt_class for prompt_class, _ in shares_by_kind)
    for prompt_class in prompt_classes:
        cells = []
        for complexity in Complexity:
            shares = shares_by_kind.get((prompt_class, complexity), {})
            cells.append(_tiers_cell(shares))
        table.add_row(prompt_class, *cells)
    return table


def _shares_by_kind(
    fleet: PlannedFleet,
) -> dict[tuple[PromptClass, Complexity], dict[TierName, float]]:
    """Return each tier's share of all requests, by their kind."""
    shares_by_kind: dict[tuple[PromptClass, Complexity], dict[TierName, float]] = {}
    for (hashable_kind, tier), share in fleet.share_by_flow.items():
        kind = cast("tuple[PromptClass, Complexity]", hashable_kind)
        shares_by_kind.setdefault(kind, {})[tier] = share
    return shares_by_kind


def _tiers_cell(shares: Mapping[TierName, float]) -> str:
    """Return which tiers a kind of prompt goes to: one tier's name, or several with their parts."""
    sum_of_shares = sum(shares.values())
    if not sum_of_shares:
        return ""
    parts = {tier: share / sum_of_shares for tier, share in shares.items()}
    shown = {tier: part for tier, part in parts.items() if part > MIN_SHOWN_SHARE}
    if len(shown) == 1:
        return " ".join(shown)
    return " ".join(f"{tier} {part:.0%}" for tier, part in shown.items())
