"""How a plan is shown: to people as tables and sentences, to programs as JSON. Both have the same facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from rich.table import Table

from router.cli.common import output, print_table
from router.cli.plan_result import (
    AS_SET,
    DOES_NOT_CARRY,
    PLANNED,
    Kind,
    Plan,
    PlanReport,
    alone_name,
)
from tiers.plan import machine_name
from tiers.sizing.capacity import MOST_BUSY_SHARE
from tiers.sizing.fleet import DailyLoad, EngineType, PlannedFleet
from tiers.sizing.hardware import GpuKind
from tiers.sizing.largest import shown_load
from tiers.sizing.named_gpus import is_as_built_in
from tiers.sizing.verdict import kinds_table
from tiers.spec import PRECISIONS, TierName

ROOFLINE = "roofline"
HOUR_S = 3600
WIDTH = 120
NO_CHANGE = 1.005  # the peak over the mean up to which a day has no course


def as_json(report: PlanReport) -> dict[str, Any]:
    """Return a plan for programs."""
    target, plan = report.target, report.plan
    facts = {
        "model": target.name,
        "parameters": target.model.parameters,
        "hardware": ", ".join(gpu.name for gpu in plan.gpus) or machine_name(),
        "gpus": [_gpu_json(gpu, count) for gpu, count in plan.gpus.items()],
        "speed": target.speed,
        "engines_busy": MOST_BUSY_SHARE,
        "losses": "measured" if target.answers else "published",
        "prices": plan.prices,
        **asdict(report.demand),
        "engines": [_engine_json(engine) for engine in plan.engines],
        "notes": list(plan.notes),
        "ignored_settings": [asdict(each) for each in plan.ignored],
        "verdict": plan.verdict,
    }
    if plan.largest:
        facts["largest_loads"] = _largest_json(report)
    if plan.load is None:
        return facts
    load = plan.load
    return facts | {
        "share_of_largest_load": plan.share,
        "requests_per_s": load.mean_per_s,
        "peak_per_s": load.peak_per_s,
        "course": list(load.course),
        "budget": load.budget,
        "currency": plan.currency,
        "plan": _fleet_json(plan.best, load.mean_per_s, report),
        "alone": {
            tier: _fleet_json(fleet, load.mean_per_s, report)
            for tier, fleet in plan.alone.items()
        },
        "as_set": _fleet_json(plan.as_set.fleet, load.mean_per_s, report)
        if plan.as_set is not None
        else None,
        "as_set_obstacle": _as_set_obstacle(plan),
        "planned_for": _planned_for(plan.best),
    }


def show(report: PlanReport) -> None:
    """Print a plan for people."""
    target, plan = report.target, report.plan
    say = output(WIDTH).print
    say(
        f"{target.name}: {target.model.parameters / 1e9:.3g} billion parameters{_active(report)}"
    )
    say(
        f"{_hardware(report)}; {_load_words(plan)}prompts of {report.demand.prompt_tokens:,} and answers of "
        f"{report.demand.output_tokens:,} tokens\n",
        soft_wrap=False,
    )
    print_table(_engines_table(report))
    if plan.largest:
        say(
            f"\nThe largest loads{_course_words(report)}, engines {MOST_BUSY_SHARE:.0%} busy:",
            soft_wrap=False,
        )
        print_table(_largest_table(report))
    if plan.load is not None:
        if plan.share is not None:
            say(f"\n{_share_words(report, plan.load, plan.share)}", soft_wrap=False)
        else:
            say("")
        print_table(_fleets_table(report, plan.load))
    if (
        plan.best is not None
        and len({engine.tier for engine, _ in plan.best.counts}) > 1
    ):
        say("")
        print_table(kinds_table(plan.best))
    say("")
    for line in _notes(report):
        say(line if line.startswith(" ") else f"- {line}", soft_wrap=False)
    if plan.verdict:
        say(f"\n{plan.verdict}", style="bold", soft_wrap=False)


def _gpu_json(gpu: GpuKind, count: int | None) -> dict[str, Any]:
    return {
        "count": count,
        "as_built_in": is_as_built_in(gpu),
        **gpu.model_dump(exclude={"also", "machete", "price_per_hour"}),
    }


def _engine_json(engine: EngineType) -> dict[str, Any]:
    fields = asdict(replace(engine.plan, pace=None))
    del fields["pace"]
    return {"gpu": engine.gpu or None, "price_per_hour": engine.price, **fields}


def _fleet_json(
    fleet: PlannedFleet | None, requests_per_s: float, report: PlanReport
) -> dict[str, Any] | None:
    if fleet is None:
        return None
    return {
        # or GPUs, or machines, where there is no currency
        "cost_per_hour": fleet.price,
        "cost_per_million_tokens": _cost_of_million(fleet, requests_per_s, report),
        "answers_lost": fleet.lost_share,
        "ttft_ms": fleet.ttft_ms,
        "tpot_ms": fleet.tpot_ms,
        "loss_budget": fleet.loss_budget,  # of the policy
        "shares": fleet.shares,
        "gpus": fleet.gpus,
        "engines": [
            {**_engine_json(engine), "replicas": count}
            for engine, count in fleet.counts
        ],
    }


def _largest_json(report: PlanReport) -> dict[str, Any]:
    loads: dict[str, Any] = {}
    for name, largest in report.plan.largest.items():
        if largest is None:
            loads[name] = None
        else:
            fleet = _fleet_json(largest.fleet, largest.requests_per_s, report)
            loads[name] = {"requests_per_s": largest.requests_per_s, "fleet": fleet}
    return loads


def _as_set_obstacle(plan: Plan) -> str | None:
    if plan.as_set is None or plan.as_set.fleet is not None:
        return None
    return plan.as_set.obstacle


def _planned_for(best: PlannedFleet | None) -> list[dict[str, Any]]:
    """Return which share of all requests is of a kind and goes to a tier."""
    flows: list[dict[str, Any]] = []
    for (kind, tier), share in best.share_by_flow.items() if best is not None else ():
        prompt_class, complexity = cast("Kind", kind)
        flows.append(
            {
                "class": prompt_class,
                "complexity": complexity,
                "tier": tier,
                "share": share,
            }
        )
    return flows


def _cost_of_million(
    fleet: PlannedFleet, requests_per_s: float, report: PlanReport
) -> float | None:
    if report.plan.currency is None:
        return None
    tokens_per_s = requests_per_s * report.demand.output_tokens
    return fleet.price / HOUR_S / tokens_per_s * 1e6


def _active(report: PlanReport) -> str:
    model = report.target.model
    if model.quantizable_parameters == model.active_parameters:
        return ""
    return f", {model.active_parameters / 1e9:.1f} of them a token"


def _hardware(report: PlanReport) -> str:
    if not report.plan.gpus:
        return machine_name()
    kinds = [
        f"{count} x {gpu.name}" if count else gpu.name
        for gpu, count in report.plan.gpus.items()
    ]
    return ", ".join(kinds)


def _load_words(plan: Plan) -> str:
    if plan.load is None or plan.share is not None:
        return ""
    return f"{_rate_words(plan.load)}, "


def _rate_words(load: DailyLoad) -> str:
    if load.peak_per_s > load.mean_per_s * NO_CHANGE:
        return f"{load.mean_per_s:,g} requests/s in the mean and {load.peak_per_s:,.3g} at the peak"
    return f"{load.mean_per_s:,g} requests/s"


def _course_words(report: PlanReport) -> str:
    load = report.plan.load
    if load is None or load.peak_per_s <= load.mean_per_s * NO_CHANGE:
        return ""
    return f" in the mean of the day (its peak is {load.peak_per_s / load.mean_per_s:.3g} times as much)"


def _share_words(report: PlanReport, load: DailyLoad, share: float) -> str:
    return (
        f"No --load is given, so the fleets below are planned for {share:.0%} (--share) of the planned one's largest load: "
        f"{_rate_words(load)}. --load {load.mean_per_s:g}/s on {_hardware(report)} plans the same."
    )


def _notes(report: PlanReport) -> list[str]:
    target, plan = report.target, report.plan
    if target.speed is None:
        speed = "not known"
    elif target.speed == ROOFLINE:
        speed = f"computed (roofline), not measured; engines {MOST_BUSY_SHARE:.0%} busy"
    else:
        speed = f"{target.speed}; engines {MOST_BUSY_SHARE:.0%} busy"
    losses = "measured" if target.answers else "published"
    priced = [] if plan.prices is None else [f"prices: {plan.prices}"]
    return [
        *plan.notes,
        *_ignored_words(plan),
        f"speed: {speed}",
        f"losses: {losses}",
        *priced,
    ]


def _ignored_words(plan: Plan) -> list[str]:
    """Return a line for each reason for which settings do not enter."""
    settings: dict[str, list[str]] = {}
    for each in plan.ignored:
        settings.setdefault(each.why, []).append(each.setting)
    if not settings:
        return []
    lines = [f"  {', '.join(names)}: {why}" for why, names in settings.items()]
    return ["settings that the planned fleets leave out:", *lines]


def _engines_table(report: PlanReport) -> Table:
    plan = report.plan
    table = Table("tier", "precision", "one engine on", box=None)
    columns = (
        "weights",
        "KV a token",
        f"at {report.demand.context}",
        "batch",
        "TTFT ms",
        "ms/token",
        "requests/s",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for engine in _shown_engines(plan):
        each = engine.plan
        table.add_row(
            each.tier,
            each.precision,
            f"{each.gpus_per_replica} x {engine.gpu}" if engine.gpu else "this CPU",
            f"{each.weights_bytes / 1e9:.1f} GB",
            f"{each.kv_bytes_per_token / 1024:.4g} KiB",
            f"{each.max_sequences:,} seqs",
            f"{each.batch:,}",
            _number(each.ttft_ms),
            _number(each.tpot_ms, 1),
            _number(each.requests_per_s, 1),
        )
    return table


def _shown_engines(plan: Plan) -> list[EngineType]:
    """Return the smallest engine of each precision on each kind of GPU, and those of the fleets that are shown."""
    fleets = [
        plan.best,
        *plan.alone.values(),
        *(each.fleet for each in plan.largest.values() if each is not None),
    ]
    used = {
        id(engine)
        for fleet in fleets
        if fleet is not None
        for engine, _ in fleet.counts
    }
    smallest: dict[tuple[TierName, str], EngineType] = {}
    for engine in plan.engines:
        smallest.setdefault((engine.tier, engine.gpu), engine)
    shown = used | {id(engine) for engine in smallest.values()}
    return [engine for engine in plan.engines if id(engine) in shown]


def _largest_table(report: PlanReport) -> Table:
    plan = report.plan
    table = Table("fleet", "engines", box=None)
    for name in ("requests/s at most", _price_title(plan), "1M tokens", "lost of 100"):
        table.add_column(name, justify="right")
    for name, largest in plan.largest.items():
        style = "bold" if name == PLANNED else ""
        if largest is None:
            missing = _without_largest(name, plan)
            table.add_row(name, missing, style="dim")
            continue
        fleet = largest.fleet
        table.add_row(
            name,
            _engines_of(fleet),
            f"{shown_load(largest.requests_per_s):,g}",
            _number(fleet.price, 2 if plan.currency else 0),
            _number(_cost_of_million(fleet, largest.requests_per_s, report), 3),
            f"{fleet.lost_share * 100:.2g}",
            style=style,
        )
    return table


def _without_largest(name: str, plan: Plan) -> str:
    if name == PLANNED:
        return "none keeps the loss budget"
    if name == AS_SET and plan.as_set is not None:
        return plan.as_set.obstacle
    return "does not fit" if plan.gpus else "its speed is not known"


def _fleets_table(report: PlanReport, load: DailyLoad) -> Table:
    plan = report.plan
    table = Table("fleet", "engines", box=None)
    for name in (
        "share of requests",
        _price_title(plan),
        "1M tokens",
        "lost of 100",
        "TTFT ms",
        "ms/token",
    ):
        table.add_column(name, justify="right")
    for name, fleet in _fleets(plan).items():
        if fleet is None:
            why = _as_set_obstacle(plan) if name == AS_SET else DOES_NOT_CARRY
            table.add_row(name, why, style="dim")
            continue
        table.add_row(
            name,
            _engines_of(fleet),
            " / ".join(f"{fleet.shares.get(tier, 0):.0%}" for tier in PRECISIONS),
            _number(fleet.price, 2 if plan.currency else 0),
            _number(_cost_of_million(fleet, load.mean_per_s, report), 3),
            f"{fleet.lost_share * 100:.2g}",
            _number(fleet.ttft_ms),
            _number(fleet.tpot_ms, 1),
            style="bold" if name == PLANNED else "",
        )
    return table


def _fleets(plan: Plan) -> Mapping[str, PlannedFleet | None]:
    fleets: dict[str, PlannedFleet | None] = {PLANNED: plan.best}
    for tier, fleet in plan.alone.items():
        fleets[alone_name(tier)] = fleet
    if plan.as_set is not None:
        fleets[AS_SET] = plan.as_set.fleet
    return fleets


def _price_title(plan: Plan) -> str:
    if plan.currency:
        return f"{plan.currency} an hour"
    return "GPUs" if plan.gpus else "machines"


def _engines_of(fleet: PlannedFleet) -> str:
    named: Sequence[str] = [
        _engine_words(engine, count) for engine, count in fleet.counts
    ]
    return ", ".join(named)


def _engine_words(engine: EngineType, count: int) -> str:
    if not engine.gpu:
        return f"{count} {engine.tier}"
    return f"{count} {engine.tier} on {engine.plan.gpus_per_replica} x {engine.gpu}"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
