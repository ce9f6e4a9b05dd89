"""How a plan is shown: to people as tables and sentences, to programs as JSON. Both have the same facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from rich.table import Table

from router.cli.common import output, print_table
from router.cli.plan_result import (
    AS_SET,
    DOES_NOT_CARRY,
    PLANNED,
    ROOFLINE,
    FleetPlan,
    PlanReport,
    PromptKind,
    alone_name,
)
from tiers.kv_precision import weights_of
from tiers.plan import machine_name
from tiers.sizing.capacity import MAX_BUSY_SHARE
from tiers.sizing.fleet import DailyLoad, EngineType, PlannedFleet
from tiers.sizing.hardware import GpuKind
from tiers.sizing.largest import shown_load
from tiers.sizing.named_gpus import is_as_built_in
from tiers.sizing.tier_format import format_words
from tiers.sizing.verdict import kinds_table
from tiers.spec import TierName

HOUR_S = 3600
WIDTH = 120
NO_CHANGE = 1.005  # a day has a course if its peak over its mean is more than this


def as_json(report: PlanReport) -> dict[str, Any]:
    """Return a plan for programs."""
    target = report.target
    fleet_plan = report.plan
    facts = {
        "model": target.name,
        "parameters": target.model.parameters,
        "hardware": ", ".join(gpu.name for gpu in fleet_plan.gpus) or machine_name(),
        "gpus": [_gpu_json(gpu, count) for gpu, count in fleet_plan.gpus.items()],
        "formats": {
            tier: tier_format.precision for tier, tier_format in target.formats.items()
        },
        "losses_against": target.reference.precision,
        "speed": target.speed,
        "engines_busy": MAX_BUSY_SHARE,
        "losses": _source_of_losses(report),
        "prices": fleet_plan.prices,
        **asdict(report.demand),
        "engines": [_engine_json(engine) for engine in fleet_plan.engines],
        "notes": list(fleet_plan.notes),
        "ignored_settings": [asdict(ignored) for ignored in fleet_plan.ignored],
        "verdict": fleet_plan.verdict,
    }
    if fleet_plan.largest:
        facts["largest_loads"] = _largest_json(report)
    if fleet_plan.load is not None:
        facts |= _fleets_json(report, fleet_plan.load)
    return facts


def _fleets_json(report: PlanReport, load: DailyLoad) -> dict[str, Any]:
    """Return the load that is planned for, and the fleets for it."""
    fleet_plan = report.plan
    present = None if fleet_plan.as_set is None else fleet_plan.as_set.fleet
    alone = {
        tier: _fleet_json(fleet, load.mean_per_s, report)
        for tier, fleet in fleet_plan.alone.items()
    }
    return {
        "share_of_largest_load": fleet_plan.share,
        "requests_per_s": load.mean_per_s,
        "peak_per_s": load.peak_per_s,
        "course": list(load.course),
        "budget": load.budget,
        "currency": fleet_plan.currency,
        "plan": _fleet_json(fleet_plan.best, load.mean_per_s, report),
        "alone": alone,
        "as_set": _fleet_json(present, load.mean_per_s, report),
        "as_set_obstacle": _as_set_obstacle(fleet_plan),
        "planned_for": _planned_for(fleet_plan.best),
    }


def show(report: PlanReport) -> None:
    """Print a plan for people."""
    fleet_plan = report.plan
    say = output(WIDTH).print
    say(_model_line(report))
    say(f"{_request_line(report)}\n", soft_wrap=False)
    print_table(_engines_table(report))
    if fleet_plan.largest:
        say(
            f"\nThe largest loads{_course_words(fleet_plan.load)}, engines {MAX_BUSY_SHARE:.0%} busy:",
            soft_wrap=False,
        )
        print_table(_largest_table(report))
    if fleet_plan.load is not None:
        share_words = ""
        if fleet_plan.share is not None:
            share_words = f"\n{_share_words(report, fleet_plan.load, fleet_plan.share)}"
        say(share_words, soft_wrap=False)
        print_table(_fleets_table(report, fleet_plan.load))
    if fleet_plan.best is not None and _has_several_tiers(fleet_plan.best):
        say("")
        print_table(kinds_table(fleet_plan.best))
    say("")
    for line in _note_lines(report):
        say(line, soft_wrap=False)
    if fleet_plan.verdict:
        say(f"\n{fleet_plan.verdict}", style="bold", soft_wrap=False)


def _has_several_tiers(fleet: PlannedFleet) -> bool:
    return len({engine.tier for engine, _ in fleet.counts}) > 1


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
    engines = [
        {**_engine_json(engine), "replicas": count} for engine, count in fleet.counts
    ]
    return {
        # Without a currency GPUs, or machines, are counted.
        "cost_per_hour": fleet.price,
        "cost_per_million_tokens": _cost_of_million(fleet, requests_per_s, report),
        "answers_lost": fleet.lost_share,
        "ttft_ms": fleet.ttft_ms,
        "tpot_ms": fleet.tpot_ms,
        # The policy's setting, not the budget of the load.
        "loss_budget": fleet.loss_budget,
        "shares": fleet.shares,
        "gpus": fleet.gpus,
        "engines": engines,
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


def _as_set_obstacle(fleet_plan: FleetPlan) -> str | None:
    if fleet_plan.as_set is None or fleet_plan.as_set.fleet is not None:
        return None
    return fleet_plan.as_set.obstacle


def _planned_for(best: PlannedFleet | None) -> list[dict[str, Any]]:
    """Return which share of all requests is of a kind and goes to a tier."""
    if best is None:
        return []
    flows: list[dict[str, Any]] = []
    for (kind, tier), share in best.share_by_flow.items():
        prompt_class, complexity = cast("PromptKind", kind)
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
    output_tokens_per_s = requests_per_s * report.demand.output_tokens
    return fleet.price / HOUR_S / output_tokens_per_s * 1e6


def _source_of_losses(report: PlanReport) -> str:
    if report.target.answers:
        return "measured"
    return "published"


def _model_line(report: PlanReport) -> str:
    model = report.target.model
    line = f"{report.target.name}: {model.parameters / 1e9:.3g} billion parameters"
    if model.quantizable_parameters == model.active_parameters:
        return line
    return f"{line}, {model.active_parameters / 1e9:.1f} of them a token"


def _request_line(report: PlanReport) -> str:
    fleet_plan = report.plan
    demand = report.demand
    lengths = (
        f"prompts of {demand.prompt_tokens:,} and answers of "
        f"{demand.output_tokens:,} tokens"
    )
    if fleet_plan.load is None or fleet_plan.share is not None:
        return f"{_hardware(report)}; {lengths}"
    return f"{_hardware(report)}; {_rate_words(fleet_plan.load)}, {lengths}"


def _hardware(report: PlanReport) -> str:
    if not report.plan.gpus:
        return machine_name()
    kinds: list[str] = []
    for gpu, count in report.plan.gpus.items():
        kind = f"{count} x {gpu.name}" if count else gpu.name
        kinds.append(kind)
    return ", ".join(kinds)


def _rate_words(load: DailyLoad) -> str:
    if load.peak_per_s > load.mean_per_s * NO_CHANGE:
        return f"{load.mean_per_s:,g} requests/s in the mean and {load.peak_per_s:,.3g} at the peak"
    return f"{load.mean_per_s:,g} requests/s"


def _course_words(load: DailyLoad | None) -> str:
    if load is None or load.peak_per_s <= load.mean_per_s * NO_CHANGE:
        return ""
    return f" in the mean of the day (its peak is {load.peak_per_s / load.mean_per_s:.3g} times as much)"


def _share_words(report: PlanReport, load: DailyLoad, share: float) -> str:
    return (
        f"No --load is given, so the fleets below are planned for {share:.0%} (--share) of the planned one's largest load: "
        f"{_rate_words(load)}. --load {load.mean_per_s:g}/s on {_hardware(report)} plans the same."
    )


def _note_lines(report: PlanReport) -> list[str]:
    """Return what is said below the tables: a line for each note, with lines below it for its details."""
    fleet_plan = report.plan
    lines = [f"- {note}" for note in fleet_plan.notes]
    lines += _ignored_lines(fleet_plan)
    lines.append(f"- speed: {_source_of_speeds(report)}")
    lines.append(f"- losses: {_source_of_losses(report)}")
    if fleet_plan.prices is not None:
        lines.append(f"- prices: {fleet_plan.prices}")
    return lines


def _source_of_speeds(report: PlanReport) -> str:
    speed = report.target.speed
    if speed is None:
        return "not known"
    if speed == ROOFLINE:
        return f"computed (roofline), not measured; engines {MAX_BUSY_SHARE:.0%} busy"
    return f"{speed}; engines {MAX_BUSY_SHARE:.0%} busy"


def _ignored_lines(fleet_plan: FleetPlan) -> list[str]:
    """Return a line for each reason for which settings do not enter."""
    settings_by_reason: dict[str, list[str]] = {}
    for ignored in fleet_plan.ignored:
        settings_by_reason.setdefault(ignored.why, []).append(ignored.setting)
    if not settings_by_reason:
        return []
    lines = ["- settings that the planned fleets leave out:"]
    for reason, names in settings_by_reason.items():
        lines.append(f"  {', '.join(names)}: {reason}")
    return lines


def _engines_table(report: PlanReport) -> Table:
    table = Table("tier", "precision", "one engine on", box=None)
    _add_figures(
        table,
        "weights",
        "KV a token",
        f"at {report.demand.context}",
        "batch",
        "TTFT ms",
        "ms/token",
        "requests/s",
    )
    for engine in _shown_engines(report.plan):
        engine_plan = engine.plan
        hardware = "this CPU"
        if engine.gpu:
            hardware = f"{engine_plan.gpus_per_replica} x {engine.gpu}"
        table.add_row(
            engine_plan.tier,
            engine_plan.precision,
            hardware,
            f"{engine_plan.weights_bytes / 1e9:.1f} GB",
            f"{engine_plan.kv_bytes_per_token / 1024:.4g} KiB",
            f"{engine_plan.max_sequences:,} seqs",
            f"{engine_plan.batch:,}",
            _number(engine_plan.ttft_ms),
            _number(engine_plan.tpot_ms, 1),
            _number(engine_plan.requests_per_s, 1),
        )
    return table


def _add_figures(table: Table, *names: str) -> None:
    """Add columns of figures, which are aligned to the right."""
    for name in names:
        table.add_column(name, justify="right")


def _shown_engines(fleet_plan: FleetPlan) -> list[EngineType]:
    """Return the smallest engine of each precision on each kind of GPU, and those of the fleets that are shown."""
    # Engines are told apart by identity: their measured speeds need not be hashable.
    shown_ids = {id(engine) for engine in _engines_of_fleets(fleet_plan)}
    smallest: dict[tuple[TierName, str], EngineType] = {}
    for engine in fleet_plan.engines:
        smallest.setdefault((engine.tier, engine.gpu), engine)
    shown_ids.update(id(engine) for engine in smallest.values())
    return [engine for engine in fleet_plan.engines if id(engine) in shown_ids]


def _engines_of_fleets(fleet_plan: FleetPlan) -> Iterator[EngineType]:
    largest_fleets = [
        largest.fleet for largest in fleet_plan.largest.values() if largest is not None
    ]
    for fleet in (fleet_plan.best, *fleet_plan.alone.values(), *largest_fleets):
        if fleet is not None:
            for engine, _ in fleet.counts:
                yield engine


def _largest_table(report: PlanReport) -> Table:
    fleet_plan = report.plan
    table = Table("fleet", "engines", box=None)
    _add_figures(
        table,
        "requests/s at most",
        _price_title(fleet_plan),
        "1M tokens",
        "lost of 100",
    )
    for name, largest in fleet_plan.largest.items():
        shown_name = _shown_name(name, report)
        if largest is None:
            reason = _why_no_largest(name, fleet_plan)
            table.add_row(shown_name, reason, style="dim")
            continue
        table.add_row(
            shown_name,
            _engines_of(largest.fleet),
            f"{shown_load(largest.requests_per_s):,g}",
            *_cost_cells(largest.fleet, largest.requests_per_s, report),
            style=_style_of(name),
        )
    return table


def _shown_name(fleet_name: str, report: PlanReport) -> str:
    """Return how a fleet is called in tables: of one tier alone, with its format."""
    for tier, tier_format in report.target.formats.items():
        if fleet_name == alone_name(tier):
            return alone_name(
                f"{tier} ({format_words(weights_of(tier_format.precision))})"
            )
    return fleet_name


def _style_of(fleet_name: str) -> str:
    if fleet_name == PLANNED:
        return "bold"
    return ""


def _cost_cells(
    fleet: PlannedFleet, requests_per_s: float, report: PlanReport
) -> tuple[str, str, str]:
    """Return what a fleet costs an hour and a million tokens, and what it loses."""
    price_digits = 2 if report.plan.currency else 0
    cost_of_million = _cost_of_million(fleet, requests_per_s, report)
    return (
        _number(fleet.price, price_digits),
        _number(cost_of_million, 3),
        f"{fleet.lost_share * 100:.2g}",
    )


def _why_no_largest(name: str, fleet_plan: FleetPlan) -> str:
    if name == PLANNED:
        return "none keeps the loss budget"
    if name == AS_SET and fleet_plan.as_set is not None:
        return fleet_plan.as_set.obstacle
    if fleet_plan.gpus:
        return "does not fit"
    return "its speed is not known"


def _fleets_table(report: PlanReport, load: DailyLoad) -> Table:
    fleet_plan = report.plan
    table = Table("fleet", "engines", box=None)
    _add_figures(
        table,
        "share of requests",
        _price_title(fleet_plan),
        "1M tokens",
        "lost of 100",
        "TTFT ms",
        "ms/token",
    )
    for name, fleet in _fleets(fleet_plan).items():
        shown_name = _shown_name(name, report)
        if fleet is None:
            table.add_row(shown_name, _why_no_fleet(name, fleet_plan), style="dim")
            continue
        shares = [f"{fleet.shares.get(tier, 0):.0%}" for tier in report.target.formats]
        table.add_row(
            shown_name,
            _engines_of(fleet),
            " / ".join(shares),
            *_cost_cells(fleet, load.mean_per_s, report),
            _number(fleet.ttft_ms),
            _number(fleet.tpot_ms, 1),
            style=_style_of(name),
        )
    return table


def _why_no_fleet(name: str, fleet_plan: FleetPlan) -> str | None:
    if name == AS_SET:
        return _as_set_obstacle(fleet_plan)
    return DOES_NOT_CARRY


def _fleets(fleet_plan: FleetPlan) -> Mapping[str, PlannedFleet | None]:
    fleets: dict[str, PlannedFleet | None] = {PLANNED: fleet_plan.best}
    for tier, fleet in fleet_plan.alone.items():
        fleets[alone_name(tier)] = fleet
    if fleet_plan.as_set is not None:
        fleets[AS_SET] = fleet_plan.as_set.fleet
    return fleets


def _price_title(fleet_plan: FleetPlan) -> str:
    if fleet_plan.currency:
        return f"{fleet_plan.currency} an hour"
    if fleet_plan.gpus:
        return "GPUs"
    return "machines"


def _engines_of(fleet: PlannedFleet) -> str:
    words = [_engine_words(engine, count) for engine, count in fleet.counts]
    return ", ".join(words)


def _engine_words(engine: EngineType, count: int) -> str:
    if not engine.gpu:
        return f"{count} {engine.tier}"
    return f"{count} {engine.tier} on {engine.plan.gpus_per_replica} x {engine.gpu}"


def _number(value: float | None, digits: int = 0) -> str:
    if value is None:
        return "-"
    return f"{value:,.{digits}f}"
