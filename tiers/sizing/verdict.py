"""What a plan comes to, in a sentence, and as settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rich.table import Table

from classifier import Complexity
from tiers.sizing.fleet import DailyLoad, EngineType, PlannedFleet
from tiers.spec import PRECISIONS, TierName

if TYPE_CHECKING:
    from classifier import PromptClass

LEAST_SHOWN = 0.005  # of a kind's requests
NAMES = {"awq-int4": "4 bits", "fp8": "FP8", "bf16": "BF16"}


def counted(fleet: PlannedFleet) -> str:
    """Return what a fleet consists of: ``2 x FP8 and 1 x BF16``."""
    found: Counter[str] = Counter()
    for engine, count in fleet.counts:
        found[NAMES[engine.plan.precision]] += count
    return " and ".join(f"{count} x {name}" for name, count in found.items())


def _costs(fleet: PlannedFleet, currency: str | None) -> str:
    if currency is not None:
        return f"{fleet.price:,.2f} {currency} an hour"
    what = "GPU" if fleet.counts[0][0].gpu else "machine"
    return f"{fleet.price:,.0f} {what}{'s' * (fleet.price > 1)}"


def _answers(lost: float) -> str:
    return "none" if lost < 5e-5 else f"{lost * 100:.2g} answers of 100"  # noqa: PLR2004  less is not told


def verdict_on(
    best: PlannedFleet,
    singles: Mapping[TierName, PlannedFleet | None],
    load: DailyLoad,
    currency: str | None,
) -> str:
    """Return the plan in a sentence, beside each precision alone; without a currency GPUs or machines are counted."""
    used = {engine.tier for engine, _ in best.counts}
    if len(used) == 1:
        name = NAMES[best.counts[0][0].plan.precision]
        return (
            f"{name} alone is best here: it costs {_costs(best, currency)} and loses {_answers(best.lost_share)}, within "
            f"the {_answers(load.budget)} allowed; further precisions would not pay."
        )
    said = [
        f"{counted(best)} cost {_costs(best, currency)} and lose {_answers(best.lost_share)}"
    ]
    for tier, fleet in singles.items():
        name = NAMES[str(PRECISIONS[tier])]
        if fleet is None:
            said.append(f"{name} alone does not carry it on these GPUs")
        else:
            same = (
                "the same"
                if abs(fleet.price - best.price) < 0.005  # noqa: PLR2004  a cent's half
                else _costs(fleet, currency)
            )
            over = ", over the budget" if fleet.lost_share > load.budget + 1e-9 else ""
            said.append(
                f"{name} alone costs {same} and loses {_answers(fleet.lost_share)}{over}"
            )
    return "; ".join(said) + "."


def missing_for(
    engines: Sequence[EngineType],
    load: DailyLoad,
    available: Mapping[str, int | None],
    more: PlannedFleet | None,
) -> str:
    """Return what is missing; ``more``: the cheapest fleet of as many GPUs as it takes."""
    if more is None:
        least = min(load.lost_by(tier) for tier in {engine.tier for engine in engines})
        return f"Nothing keeps the budget of {_answers(load.budget)}: at least {_answers(least)} would be lost."
    there = ", ".join(
        f"{count} x {gpu}" for gpu, count in available.items() if count is not None
    )
    needed = ", ".join(f"{count} x {gpu}" for gpu, count in more.gpus.items())
    return (
        f"{load.peak_per_s:g} requests a second at the peak are too many for {there}: the cheapest that would do is "
        f"{needed}."
    )


def tiers_of(fleet: PlannedFleet) -> dict[str, dict[str, int]]:
    """Return the settings of each tier."""
    found: dict[str, dict[str, int]] = {}
    for tier in PRECISIONS:
        mine = [engine for engine, _ in fleet.counts if engine.tier is tier]
        found[tier] = {"replicas": fleet.replicas(tier)}
        if mine:
            batch = min(engine.plan.batch for engine in mine)
            found[tier] |= {
                "tensor_parallel": max(mine[0].plan.gpus_per_replica, 1),
                "max_num_seqs": batch,
            }
            found[tier]["max_in_flight"] = 2 * batch
    return found


@dataclass(frozen=True, slots=True)
class WrittenSettings:
    """What a plan was made for besides the load, and engines need as settings.

    Attributes:
        model: A folder or an id; None: the default model, or not known.
        context: Tokens of the longest request, as asked for; None: the tiers keep theirs.
        kv_cache_dtype: Of the KV cache; None: the engines' own.
    """

    model: str | None = None
    context: int | None = None
    kv_cache_dtype: str | None = None


def settings_for(fleet: PlannedFleet, verdict: str, written: WrittenSettings) -> str:
    """Return the tiers as settings that ``qarr up`` takes, and the loss budget by which the router uses them so."""
    lines = [f"# {verdict}", "[policy]", f"loss_budget = {fleet.loss_budget:g}"]
    if written.model is not None:
        lines += ["[model]", f"name = {json.dumps(written.model, ensure_ascii=False)}"]
    if written.kv_cache_dtype is not None:
        lines += [
            "[engine]",
            f'extra_args = ["--kv-cache-dtype", "{written.kv_cache_dtype}"]',
        ]
    for tier, settings in tiers_of(fleet).items():
        on = ", ".join(
            engine.gpu
            for engine, _ in fleet.counts
            if engine.tier == tier and engine.gpu
        )
        lines += [f"[tiers.{tier}]" + (f"  # on {on}" if on else "")]
        lines += [f"{name} = {value}" for name, value in settings.items()]
        if written.context is not None and settings["replicas"]:
            lines += [f"max_model_len = {written.context}"]
    return "\n".join(lines) + "\n"


def kinds_table(best: PlannedFleet) -> Table:
    """Return which precision the plan has for which prompts."""
    kinds: dict[tuple[PromptClass, Complexity], dict[TierName, float]] = {}
    for (kind, tier), share in best.share_by_flow.items():
        kinds.setdefault(cast("tuple[PromptClass, Complexity]", kind), {})[tier] = share
    table = Table("planned for", *Complexity, box=None)
    for name in dict.fromkeys(prompt_class for prompt_class, _ in kinds):
        cells = []
        for degree in Complexity:
            shares = kinds.get((name, degree), {})
            whole = sum(shares.values())
            parts = {
                tier: share / whole
                for tier, share in shares.items()
                if whole and share / whole > LEAST_SHOWN
            }
            cells.append(
                " ".join(
                    parts
                    if len(parts) == 1
                    else [f"{tier} {part:.0%}" for tier, part in parts.items()]
                )
            )
        table.add_row(name, *cells)
    return table
