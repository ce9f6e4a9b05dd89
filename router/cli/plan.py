"""``qarr plan``: the fleet that carries a load at least cost, and whether several precisions pay."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from classifier import Complexity, PromptClass
from router.cli.common import ConfigOption, err, plain, with_options
from router.cli.plan_report import ROOFLINE, as_json, show
from router.cli.plan_result import (
    AS_SET,
    PLANNED,
    AsSet,
    Kind,
    Plan,
    PlanReport,
    Target,
    alone_name,
)
from router.cli.plan_settings import ignored_settings
from router.deployment.layout import prepare_options, speed_machine
from router.policy.decide import scarcity_at
from router.policy.decision import latest_unnoticed_ms
from router.policy.decision_log import DecisionRecord, read_log
from router.policy.losses import losses
from router.policy.profiles import (
    latency_name,
    load_latency,
    load_profile,
    profile_name,
)
from router.settings import Settings, load_settings
from tiers.checkpoints.prepare import DEFAULT_MODEL, finished
from tiers.errors import PlanError
from tiers.plan import GIB, held_bytes, read_machine, usual_kv_cache_gib
from tiers.sizing.architecture import Architecture, architecture
from tiers.sizing.capacity import ServingDemand, engines_on_cpu, engines_on_gpus
from tiers.sizing.find_config import find_config
from tiers.sizing.fleet import (
    DailyLoad,
    EngineType,
    PlannedFleet,
    alone,
    as_set,
    fullest,
    parse_course,
    parse_rate,
)
from tiers.sizing.hardware import PRICES, GpuKind, Prices, known_gpus, read_prices
from tiers.sizing.largest import (
    CARRIED_SHARE,
    LargestLoad,
    fewest_gpus,
    largest_alone,
    largest_of_engines,
    largest_planned,
    shown_load,
)
from tiers.sizing.named_gpus import (
    given_figures,
    is_as_built_in,
    parse_all_gpus,
    unknown_gpu,
)
from tiers.sizing.operation import Policy, cheapest_in_operation, in_operation
from tiers.sizing.verdict import (
    WrittenSettings,
    counted,
    missing_for,
    settings_for,
    tiers_of,
    verdict_on,
)
from tiers.spec import PRECISIONS, TierName

SHARE = 80.0  # percent of the largest load, that is planned for where no load is given
IDLE_SHARE = 0.01  # of the load of the slowest engine: any engine carries it
USUAL_SEQUENCES = 256  # decoded at once by an engine on GPUs
MIXES: dict[str, tuple[dict[PromptClass, float], list[float]]] = {
    name: (
        {PromptClass(each): share for each, share in mix["classes"].items()},
        mix["complexities"],
    )
    for name, mix in tomllib.loads(
        Path(__file__).with_name("mixes.toml").read_text("utf-8")
    ).items()
}
PEAK = "0.4,0.6,0.5,2.5"  # the day that is planned for where none is given
LOAD_HELP = "Requests, as 40/s or 100/min. Without it: the largest load of each fleet, and a fleet for a share of it."
SHARE_HELP = "Without --load: percent of the largest load that the fleets are planned for; 80 by default."
MIX_HELP = "What is asked: chat, coding, rag (assumed shares), or the decision log of your own traffic."
DAY_HELP = (
    "The day's course: load of equal parts of the day over the mean, as 0.3,0.5,1.2,2."
)
LOSS_HELP = (
    "Answers of 100 that may be lost; by default as many as balanced alone loses."
)
MODEL_HELP = (
    "Hugging Face id, model folder or config.json; by default the settings' model."
)
CONTEXT_HELP = "Longest prompt and answer together; by default as long as the mean."
GPUS_HELP = (
    "Kinds of GPU, and how many there are; without a number, as many as needed. One that is not known has the figures of "
    "its data sheet: 2xNAME:96GB,1792GB/s,500TF, and fp8=1000TF, price=1.9. Or a TOML file. By default this machine's."
)
UNKNOWN_SPEED = (
    "No fleet is planned: how fast this machine's processor computes the model is not known. Run 'qarr up', then 'qarr "
    "profile latency'; or give its result as --profile; or name GPUs with --gpus, whose speed is computed."
)


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options."""

    model: Annotated[str | None, typer.Option(help=MODEL_HELP, metavar="MODEL")] = None
    gpus: Annotated[
        str | None, typer.Option(help=GPUS_HELP, metavar="2xA100,4xL4|FILE")
    ] = None
    load: Annotated[str | None, typer.Option(help=LOAD_HELP, metavar="RATE")] = None
    share: Annotated[
        float | None, typer.Option(help=SHARE_HELP, min=1, max=100, metavar="PERCENT")
    ] = None
    day: Annotated[str, typer.Option(help=DAY_HELP, metavar="FACTORS")] = "1"
    mix: Annotated[str, typer.Option(help=MIX_HELP, metavar="NAME|FILE")] = "chat"
    loss: Annotated[
        float | None, typer.Option(help=LOSS_HELP, min=0, max=100, metavar="ANSWERS")
    ] = None
    prompt: Annotated[
        int, typer.Option(help="Mean tokens of a prompt.", min=1, metavar="TOKENS")
    ] = 800
    output: Annotated[
        int, typer.Option(help="Mean tokens of an answer.", min=1, metavar="TOKENS")
    ] = 250
    context: Annotated[
        int | None, typer.Option(help=CONTEXT_HELP, min=2, metavar="TOKENS")
    ] = None
    ttft: Annotated[
        float | None,
        typer.Option(help="Longest time to the first token.", min=1, metavar="MS"),
    ] = None
    tpot: Annotated[
        float | None,
        typer.Option(help="Longest time between tokens, in ms.", min=0.1, metavar="MS"),
    ] = None
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences decoded at once.", min=1, metavar="N")
    ] = None
    kv_fp8: Annotated[
        bool, typer.Option("--kv-fp8", help="Keep the KV cache in FP8.")
    ] = False
    prices: Annotated[
        Path,
        typer.Option(help="Prices of GPUs.", metavar="FILE", show_default="built-in"),
    ] = PRICES
    profile: Annotated[
        Path | None,
        typer.Option(help="Latency profile, not the roofline.", metavar="FILE"),
    ] = None
    write: Annotated[
        Path | None, typer.Option(help="Write the tiers as settings.", metavar="FILE")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    config: ConfigOption = None


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What fleets are found from besides engines and load.

    Attributes:
        set_engines: The engines as the settings have them; None: the settings name none for these GPUs.
    """

    settings: Settings
    options: Options
    target: Target
    demand: ServingDemand
    policy: Policy
    set_engines: Sequence[EngineType] | None


@with_options
def plan(options: Options) -> None:
    """Tell which precisions on which GPUs carry a load at least cost, and what is lost. No weights are read."""
    if options.load is not None and options.share is not None:
        raise PlanError(
            "--share is of the largest load, for plans without --load: give one of the two"
        )
    if options.write is not None and options.write.exists():
        raise PlanError(
            f"--write {options.write}: it is there already, and is left as it is; name another file"
        )
    settings = load_settings(options.config)
    target = _target(settings, options)
    if not target.gpus and options.kv_fp8:
        raise PlanError(
            "--kv-fp8 needs --gpus: engines on a CPU keep their KV cache in BF16"
        )
    demand = _demand(settings, options, target)
    made = _planned(settings, options, target, demand, read_prices(options.prices))
    report = PlanReport(target, demand, made)
    if options.as_json:
        typer.echo(json.dumps(as_json(report), indent=2))
    else:
        show(report)
    if options.write is not None:
        _write(options.write, settings, options, made, target)
    wanted = options.load is not None or target.speed is not None
    if wanted and made.best is None:
        raise typer.Exit(1)


def tiers_for_gpus(settings: Settings) -> tuple[dict[str, dict[str, int]], str] | None:
    """Return the tiers for this machine's GPUs, and why, where the settings name none; None: there are no GPUs."""
    # whose three tiers are the example
    is_example = settings.model.name == DEFAULT_MODEL
    if _names_tiers(settings) or is_example or not read_machine().gpus:
        return None
    options = Options(load="1/s", day=PEAK)
    target = _target(settings, options)
    options = replace(
        options,
        context=min(settings.tiers.balanced.max_model_len, target.model.context),
    )
    made = _planned(
        settings,
        options,
        target,
        _demand(settings, options, target),
        read_prices(options.prices),
    )
    available = {gpu.name: count for gpu, count in target.gpus.items()}
    assert made.load is not None
    best = fullest(made.engines, made.load, available)
    if best is None:  # nothing else fits
        best = fullest(made.engines, replace(made.load, budget=1.0), available)
    if best is None:
        raise PlanError(made.verdict)
    return tiers_of(best), counted(best)


def _planned(
    settings: Settings,
    options: Options,
    target: Target,
    demand: ServingDemand,
    prices: Prices,
) -> Plan:
    """Plan for the load that is given, or for a share of the largest one."""
    priced = _priced(target.gpus, prices)
    gpus = dict(target.gpus)
    engines, lacks = _engines(settings, options, target, demand, priced)
    if options.load is None and None in gpus.values():
        fewest = fewest_gpus(engines)
        gpus = {gpu: count or fewest.get(gpu.name, 1) for gpu, count in gpus.items()}
        engines, lacks = _engines(
            settings, options, replace(target, gpus=gpus), demand, priced
        )
    if not engines:
        raise PlanError(lacks[0])
    notes = [*lacks, *target.notes, *_notes(options, target, gpus, prices)]
    found = Plan(
        engines=engines,
        gpus=gpus,
        notes=notes,
        ignored=ignored_settings(settings, on_gpus=bool(gpus)),
        currency=prices.currency if priced else None,
        prices=_prices_words(options, priced) if priced else None,
    )
    if not any(engine.rate for engine in engines):
        return replace(found, verdict=UNKNOWN_SPEED)
    load = _load(
        options, target, 1.0 if options.load is None else parse_rate(options.load)
    )
    found = replace(
        found,
        notes=[*found.notes, *_assumed(options, demand, load), *_log_words(options)],
    )
    inputs = _Inputs(
        settings=settings,
        options=options,
        target=target,
        demand=demand,
        policy=_policy(settings),
        set_engines=_engines_as_set(settings, options, target, demand, priced),
    )
    if options.load is None:
        return _for_share(inputs, found, load)
    return _for_load(inputs, replace(found, load=load))


def _for_load(inputs: _Inputs, found: Plan) -> Plan:
    """Add the fleets for a load."""
    load = found.load
    assert load is not None
    available = {gpu.name: count for gpu, count in found.gpus.items()}
    singles: dict[TierName, PlannedFleet | None] = {}
    for tier, fleet in alone(found.engines, load, available).items():
        singles[tier] = (
            in_operation(fleet, load, inputs.demand, inputs.policy)
            if fleet is not None
            else None
        )
    best = cheapest_in_operation(
        found.engines, load, available, inputs.demand, inputs.policy
    )
    verdict = (
        verdict_on(best, singles, load, found.currency)
        if best
        else _missing(inputs, found, load)
    )
    present = (
        None
        if inputs.set_engines is None
        else _as_set(inputs.settings, inputs.set_engines, load)
    )
    if present is not None and present.fleet is not None:
        present = replace(
            present, fleet=_as_set_in_operation(inputs, present.fleet, load)
        )
    notes = [*found.notes, *_too_many(present, available)]
    return replace(
        found, best=best, alone=singles, as_set=present, notes=notes, verdict=verdict
    )


def _for_share(inputs: _Inputs, found: Plan, load: DailyLoad) -> Plan:
    """Add the largest load of each fleet, and the fleets for a share of the planned one's.

    Args:
        inputs: Of the plan.
        found: What was found so far, with a number of each kind of GPU.
        load: Requests as they are asked for; how many there are does not count.
    """
    available = {
        gpu.name: count for gpu, count in found.gpus.items() if count is not None
    }
    planned = largest_planned(
        found.engines, load, available, inputs.demand, inputs.policy
    )
    largest: dict[str, LargestLoad | None] = {PLANNED: planned}
    for tier, alone_largest in largest_alone(found.engines, load, available).items():
        largest[alone_name(tier)] = alone_largest
    if inputs.set_engines is not None:
        largest[AS_SET] = _largest_as_set(inputs.settings, inputs.set_engines, load)
    found = replace(found, largest=largest)
    if planned is None:
        present = (
            None
            if inputs.set_engines is None
            else _as_set(inputs.settings, inputs.set_engines, load)
        )
        return replace(
            found,
            as_set=present,
            verdict=missing_for(_rated(found.engines), load, available, None),
        )
    options = inputs.options
    share = (SHARE if options.share is None else options.share) / 100
    wanted = _load(options, inputs.target, shown_load(share * planned.requests_per_s))
    return _for_load(inputs, replace(found, load=wanted, share=share))


def _missing(inputs: _Inputs, found: Plan, load: DailyLoad) -> str:
    """Return, for people, why no fleet carries a load, and what would."""
    available = {gpu.name: count for gpu, count in found.gpus.items()}
    unbounded = dict.fromkeys(available)
    enough = cheapest_in_operation(
        found.engines, load, unbounded, inputs.demand, inputs.policy
    )
    verdict = missing_for(_rated(found.engines), load, available, enough)
    counted_gpus = {gpu: count for gpu, count in available.items() if count is not None}
    if enough is None or len(counted_gpus) < len(available):
        return verdict
    largest = largest_planned(
        found.engines, load, counted_gpus, inputs.demand, inputs.policy
    )
    if largest is None:
        return verdict
    peak = shown_load(largest.requests_per_s * load.peak_per_s / load.mean_per_s)
    return f"{verdict} These GPUs carry at most {peak:g} a second at the peak within the loss budget."


def _too_many(present: AsSet | None, available: Mapping[str, int | None]) -> list[str]:
    """Return, for people, which GPUs the engines of the settings would need besides those that there are."""
    if present is None or present.fleet is None:
        return []
    notes: list[str] = []
    for gpu, needed in present.fleet.gpus.items():
        count = available.get(gpu)
        if count is not None and needed > count:
            notes.append(
                f"the engines as set take {needed} x {gpu}, one GPU or more each, and there are {count}: engines that share "
                "a GPU are not planned"
            )
    return notes


def _engines(
    settings: Settings,
    options: Options,
    target: Target,
    demand: ServingDemand,
    priced: Mapping[GpuKind, float],
) -> tuple[list[EngineType], list[str]]:
    """Return the engines that fit, and why there is none of some precision."""
    if not target.gpus:
        cache = {tier: _kv_cache(settings, target.model, tier) for tier in PRECISIONS}
        plans = engines_on_cpu(
            target.model,
            demand,
            kv_cache_bytes=cache,
            weights_bytes=target.weights,
            paces=target.paces,
        )
        return [EngineType(gpu="", plan=plan, price=1.0) for plan in plans], []
    engines: list[EngineType] = []
    lacks: list[str] = []
    kv_bytes = 1 if options.kv_fp8 else 2
    for gpu, count in target.gpus.items():
        plans, missing = engines_on_gpus(
            target.model,
            gpu,
            count,
            demand,
            kv_bytes_per_value=kv_bytes,
            paces=target.paces,
        )
        price = priced.get(gpu) or 1.0
        engines += [
            EngineType(gpu.name, plan, price=plan.gpus_per_replica * price)
            for plan in plans
        ]
        if len(target.gpus) == 1 or len(missing) < len(PRECISIONS):
            lacks += missing.values()
    return engines, lacks


def _engines_as_set(
    settings: Settings,
    options: Options,
    target: Target,
    demand: ServingDemand,
    priced: Mapping[GpuKind, float],
) -> list[EngineType] | None:
    """Return the engines as the settings have them: with their context and sequences; None: the settings name none.

    On a processor the engines are those that are planned: their contexts are the settings' there.
    """
    if not target.gpus:
        return _engines(settings, options, target, demand, priced)[0]
    if not _names_tiers(settings):
        return None
    engines: list[EngineType] = []
    unbounded = replace(target, gpus=dict.fromkeys(target.gpus))
    for tier in PRECISIONS:
        own = settings.tiers.of(tier)
        context = min(own.max_model_len, target.model.context)
        own_demand = replace(demand, context=context, max_num_seqs=own.max_num_seqs)
        fitting, _ = _engines(settings, options, unbounded, own_demand, priced)
        engines += [
            engine for engine in fitting if _is_of(engine, tier, own.tensor_parallel)
        ]
    return engines


def _is_of(engine: EngineType, tier: TierName, gpus: int) -> bool:
    return engine.tier is tier and engine.plan.gpus_per_replica == gpus


def _as_set(
    settings: Settings, engines: Sequence[EngineType], load: DailyLoad
) -> AsSet:
    """Return what the engines that the settings name do."""
    replicas = {tier: settings.tiers.of(tier).replicas_here for tier in PRECISIONS}
    mine = [engine for engine in engines if replicas[engine.tier]]
    obstacle = _as_set_obstacle(settings, mine)
    if obstacle is not None:
        return AsSet(fleet=None, obstacle=obstacle)
    rated = _rated(mine)
    if not rated:
        return AsSet(fleet=None)
    return AsSet(
        fleet=as_set(
            rated, load, {engine.gpu for engine in rated}, _of_engines(replicas, rated)
        )
    )


def _as_set_in_operation(
    inputs: _Inputs, fleet: PlannedFleet, load: DailyLoad
) -> PlannedFleet:
    """Return what the router makes of the engines as set; a loss budget that is a number is the settings' own."""
    budget = inputs.settings.policy.loss_budget
    if isinstance(budget, float):
        fleet = replace(fleet, loss_budget=budget)
    return in_operation(fleet, load, inputs.demand, inputs.policy)


def _largest_as_set(
    settings: Settings, engines: Sequence[EngineType], load: DailyLoad
) -> LargestLoad | None:
    """Return the largest load of the engines that the settings name; None: they cannot be planned."""
    slowest = min((engine.rate for engine in _rated(engines)), default=1.0)
    nearly_idle = _as_set(
        settings, engines, load.scaled_to(IDLE_SHARE * slowest / max(load.course))
    )
    if nearly_idle.fleet is None:
        return None
    mine = [
        engine
        for engine in _rated(engines)
        if settings.tiers.of(engine.tier).replicas_here
    ]
    counts = (
        nearly_idle.fleet.counts
        if nearly_idle.fleet.gpus.keys() != {""}
        else [(engine, 1) for engine in mine]
    )
    rate = CARRIED_SHARE * largest_of_engines(counts, load)
    full = _as_set(settings, engines, load.scaled_to(rate))
    return LargestLoad(rate, full.fleet) if full.fleet is not None else None


def _rated(engines: Sequence[EngineType]) -> list[EngineType]:
    """Return the engines whose speed is known."""
    return [engine for engine in engines if engine.rate]


def _of_engines(
    replicas: Mapping[TierName, int], engines: Sequence[EngineType]
) -> dict[TierName, int]:
    """Return the replicas of the tiers that have engines."""
    tiers = {engine.tier for engine in engines}
    return {tier: count for tier, count in replicas.items() if tier in tiers}


def _as_set_obstacle(settings: Settings, engines: Sequence[EngineType]) -> str | None:
    """Return why engines as the settings have them cannot be planned; None: they can."""
    used = [tier for tier in PRECISIONS if settings.tiers.of(tier).replicas_here]
    if not used:
        return "the settings start no engines here"
    for tier in used:
        own = settings.tiers.of(tier)
        if own.pipeline_parallel > 1:
            return f"tiers.{tier}.pipeline_parallel is not planned"
        if not any(engine.tier is tier for engine in engines):
            return f"{tier} does not fit, or is not planned, on {own.tensor_parallel} GPUs (tensor_parallel)"
    return None


def _names_tiers(settings: Settings) -> bool:
    return settings.tiers != Settings().tiers


def _policy(settings: Settings) -> Policy:
    objective = settings.policy.objective
    least = settings.policy.negligible_loss
    return Policy(
        allowed_loss=lambda budget, taken: (
            least + scarcity_at(objective, taken) * max(budget - least, 0.0)
        ),
        latest_unnoticed_ms=latest_unnoticed_ms if objective == "best" else None,
    )


def _kv_cache(settings: Settings, model: Architecture, name: TierName) -> int:
    tier = settings.tiers.of(name)
    usual = usual_kv_cache_gib(
        model.kv_bytes_per_token(), tier.max_model_len, tier.max_num_seqs
    )
    return int(GIB * (settings.engine.cpu_kv_cache_gib or usual))


def _priced(gpus: Mapping[GpuKind, int | None], prices: Prices) -> dict[GpuKind, float]:
    """Return the prices of all kinds, or none: GPUs are counted where no price is known."""
    known: dict[GpuKind, float] = {}
    for gpu in gpus:
        price = prices.of(gpu)
        if price is not None:
            known[gpu] = price
    if known and len(known) < len(gpus):
        unknown = [gpu.name for gpu in gpus if gpu not in known]
        raise PlanError(
            f"no price of {', '.join(unknown)} is known, and one of the others is: write --gpus {unknown[0]}:price=1.9, or "
            "give --prices a file with all of them"
        )
    return known


def _notes(
    options: Options, target: Target, gpus: Mapping[GpuKind, int | None], prices: Prices
) -> list[str]:
    """Return what is assumed of GPUs, and which options do not enter the plan."""
    notes: list[str] = []
    for gpu, count in gpus.items():
        if not is_as_built_in(gpu):
            notes.append(given_figures(gpu))
        if count != target.gpus[gpu]:
            notes.append(
                f"no number of {gpu.name} is given: planned for {count}, which hold an engine of each precision that fits"
            )
    if gpus and all(prices.of(gpu) is None for gpu in gpus):
        notes.append(
            "no price of these GPUs is known: they are counted; add price=1.9 in --gpus, or give --prices a file"
        )
    if target.speed is not None and (
        options.ttft is not None or options.tpot is not None
    ):
        notes.append(
            "--ttft and --tpot bound an engine's times without waiting; those of fleets have it in them"
        )
    if options.prices != PRICES:
        notes += _unused_prices(options.prices, gpus, prices)
    if target.speed is None:
        notes += _unused_options(options)
    return notes


def _assumed(options: Options, demand: ServingDemand, load: DailyLoad) -> list[str]:
    """Return, for people, what the plan takes for given where no option says otherwise."""
    assumed = (
        [f"prompts of the mix {options.mix} (--mix)"] if options.mix in MIXES else []
    )
    if options.day == Options().day:
        assumed.append("an even load (--day)")
    if options.context is None:
        assumed.append(
            f"requests of at most {demand.context:,} tokens, the mean (--context)"
        )
    if options.loss is None:
        assumed.append(
            f"at most {100 * load.budget:.2g} answers of 100 lost, as many as balanced alone loses (--loss)"
        )
    return [f"assumed: {', '.join(assumed)}"] if assumed else []


def _log_words(options: Options) -> list[str]:
    if options.mix in MIXES:
        return []
    return [
        f"of {options.mix} classes and complexities count; --load, --day, --prompt and --output say the rest"
    ]


def _prices_words(options: Options, priced: Mapping[GpuKind, float]) -> str:
    given = [gpu.name for gpu in priced if gpu.price_per_hour is not None]
    words = [f"{', '.join(given)} as given in --gpus"] if given else []
    if len(given) < len(priced):
        built_in = "dated list prices, built in; providers differ by a factor of four (--prices, or price= in --gpus)"
        words.append(built_in if options.prices == PRICES else str(options.prices))
    return "; ".join(words)


def _unused_prices(
    path: Path, gpus: Mapping[GpuKind, int | None], prices: Prices
) -> list[str]:
    if not gpus:
        return [
            f"not in the plan: --prices {path}: machines are counted where engines run on a processor"
        ]
    kinds = (*gpus, *known_gpus())
    unused = [
        name
        for name in prices.per_gpu_hour
        if not any(gpu.is_called(name) for gpu in kinds)
    ]
    return [
        f"not in the plan: the price of {name} in {path}: no GPU here or in the built-in list has this name"
        for name in unused
    ]


def _unused_options(options: Options) -> list[str]:
    """Return the options that were given and do not count where speeds are not known."""
    defaults = Options()
    names = ("load", "share", "day", "mix", "loss", "ttft", "tpot")
    unused = [
        f"--{name}"
        for name in names
        if getattr(options, name) != getattr(defaults, name)
    ]
    if not unused:
        return []
    return [
        f"not in the plan: {', '.join(unused)}: without a known speed no load is planned, and no bound checked"
    ]


def _load(options: Options, target: Target, rate: float) -> DailyLoad:
    """Return so many requests a second as they are asked for, and how many answers may be lost."""
    mix = _mix(options.mix)
    whole = sum(mix.values())
    loss: dict[TierName, dict[Hashable, float]] = {}
    for tier, precision in PRECISIONS.items():
        expected = losses(
            precision, target.answers.get(tier, ()), target.model.parameters
        )
        loss[tier] = {
            (c, x): 0.0 if tier is TierName.PRECISE else expected[c][x].mean
            for c, x in mix
        }
    by_kind: dict[Hashable, float] = {
        kind: rate * share / whole for kind, share in mix.items()
    }
    load = DailyLoad(by_kind, loss, course=parse_course(options.day))
    budget = (
        load.lost_by(TierName.BALANCED) if options.loss is None else options.loss / 100
    )
    return replace(load, budget=budget)


def _mix(text: str) -> dict[Kind, float]:
    if text in MIXES:
        classes, degrees = MIXES[text]
        return {
            (c, x): share * part
            for c, share in classes.items()
            for x, part in zip(Complexity, degrees, strict=True)
        }
    path = Path(text)
    if not path.is_file():
        raise PlanError(
            f"--mix {text}: neither {', '.join(MIXES)} nor a decision log (telemetry.decision_log)"
        )
    found: Counter[Kind] = Counter()
    for record in read_log(path):
        if isinstance(record, DecisionRecord):
            features = record.query.features
            found[
                features.prompt_class, features.complexity or Complexity.MODERATE
            ] += 1
    if not found:
        raise PlanError(f"--mix {text}: the decision log has no decisions")
    return dict(found)


def _demand(settings: Settings, options: Options, target: Target) -> ServingDemand:
    means = options.prompt + options.output
    most = target.model.context
    longest = options.context or means
    if longest > most:
        option = (
            "--prompt and --output make" if options.context is None else "--context is"
        )
        raise PlanError(
            f"{option} {longest}: {target.name} takes {most} tokens at most"
        )
    if longest < means:
        raise PlanError(
            f"--context {longest} is shorter than a mean prompt and answer, {means} tokens"
        )
    usual = USUAL_SEQUENCES if target.gpus else settings.tiers.precise.max_num_seqs
    return ServingDemand(
        prompt_tokens=options.prompt,
        output_tokens=options.output,
        context=longest,
        max_num_seqs=options.max_num_seqs or usual,
        ttft_ms=options.ttft,
        tpot_ms=options.tpot,
    )


def _target(settings: Settings, options: Options) -> Target:
    checkpoints = (
        () if options.model is not None else finished(prepare_options(settings))
    )
    if checkpoints:
        name = checkpoints[-1].manifest.model
        folder = str(checkpoints[-1].path)
    else:
        name = folder = options.model or settings.model.name
        if options.model is None and name == DEFAULT_MODEL:
            raise PlanError(
                f"{name}, the default model, is not made yet: run 'qarr model prepare', or give --model"
            )
    machine = read_machine()
    gpus = {} if options.gpus is None else parse_all_gpus(options.gpus)
    if options.gpus is None and machine.gpus:
        gpus = dict([_same_kind([each.name for each in machine.gpus])])
    digests = {made.tier: made.manifest.weights_digest for made in checkpoints}
    profile = options.profile
    # what was measured on this machine
    if not gpus and profile is None and checkpoints:
        own = settings.policy.profiles / latency_name(digests, speed_machine(settings))
        profile = own if own.is_file() else None
    quality = settings.policy.profiles / profile_name(digests) if digests else None
    measured = (
        load_profile(quality) if quality is not None and quality.is_file() else None
    )
    config = find_config(folder)
    target = Target(
        name=name,
        model=architecture(config),
        gpus=gpus,
        speed=ROOFLINE if gpus else None,
        paces={},
        weights={}
        if gpus
        else {
            each.tier: held_bytes(each.path, machine.instructions)
            for each in checkpoints
        },
        answers={}
        if measured is None
        else {tier: measured.of(tier) for tier in PRECISIONS},
        notes=_quantized_already(config),
    )
    return target if profile is None else _with_profile(target, profile)


def _with_profile(target: Target, path: Path) -> Target:
    """Return a target with measured speeds, and what is assumed of them."""
    profile = load_latency(path)
    paces = {fit.tier: fit.model for fit in profile.fits}
    notes = list(target.notes)
    if target.gpus:
        notes.append(
            f"the speeds in {path} are of {profile.model} on {profile.machine}: they count here for every kind of GPU, and "
            "for any number of GPUs that an engine has"
        )
    unmeasured = [tier for tier in PRECISIONS if tier not in paces]
    if unmeasured:
        instead = "the roofline counts there" if target.gpus else "no fleet has it"
        notes.append(f"{path} has no speed of {', '.join(unmeasured)}: {instead}")
    unplanned = [tier for tier in paces if tier not in PRECISIONS]
    if unplanned:
        notes.append(
            f"not in the plan: {', '.join(unplanned)} in {path}: only fast, balanced and precise are planned"
        )
    return replace(target, speed=f"measured: {path}", paces=paces, notes=notes)


def _quantized_already(config: Mapping[str, Any]) -> list[str]:
    """Return, for people, that a model is published in few bits already."""
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    quantization = config.get("quantization_config") or inner.get("quantization_config")
    if not isinstance(quantization, dict):
        return []
    method = quantization.get("quant_method", "few bits")
    return [
        f"not in the plan: the model is published in {method} already; each tier is planned as made from BF16 weights"
    ]


def _same_kind(names: list[str]) -> tuple[GpuKind, int]:
    for kind in known_gpus():
        if kind.is_called(names[0]):
            return kind, names.count(names[0])
    raise PlanError(f"this machine's GPU: {unknown_gpu(names[0])}")


def _write(
    path: Path, settings: Settings, options: Options, made: Plan, target: Target
) -> None:
    """Write the planned tiers as settings."""
    if made.best is None:
        raise PlanError(
            f"--write {path}: it is not written, for no fleet is planned: {made.verdict}"
        )
    model = options.model or settings.model.name
    is_file = Path(model).is_file()
    text = settings_for(
        made.best,
        made.verdict,
        WrittenSettings(
            model=None if model == DEFAULT_MODEL or is_file else model,
            context=options.context,
            kv_cache_dtype="fp8" if options.kv_fp8 else None,
        ),
    )
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise PlanError(
            f"--write {path}: it cannot be written: {error.strerror}"
        ) from error
    lacks = (
        f" Set model.name in it: {model} is no folder that engines start from."
        if is_file
        else ""
    )
    kinds = len(made.best.gpus)
    if kinds > 1:
        lacks += f" It does not say which engines are on which of the {kinds} kinds of GPU but in comments."
    err.print(
        plain(
            f"{path} is written: 'qarr up --config {path}' starts the planned fleet of {target.name}.{lacks}"
        )
    )
