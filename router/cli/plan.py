"""``qarr plan``: the fleet that carries a load at least cost, and whether several precisions pay."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from classifier import Complexity, PromptClass
from router.cli.common import ConfigOption, output, print_table, with_options
from router.deployment.layout import prepare_options, speed_machine
from router.policy.decide import scarcity_at
from router.policy.decision_log import DecisionRecord, read_log
from router.policy.losses import losses
from router.policy.profiles import AnswerCount, Fit, latency_name, load_latency, load_profile, profile_name
from router.settings import Settings, load_settings
from tiers.checkpoints.prepare import DEFAULT_MODEL, finished
from tiers.errors import PlanError
from tiers.plan import GIB, held_bytes, machine_name, read_machine, usual_kv_cache_gib
from tiers.sizing.architecture import Architecture, architecture
from tiers.sizing.capacity import MOST_BUSY, Demand, engines_on_cpu, engines_on_gpus
from tiers.sizing.find_config import find_config
from tiers.sizing.fleet import EngineType, Fleet, Load, alone, as_set, fullest, parse_course, parse_rate
from tiers.sizing.hardware import PRICES, GpuKind, Prices, known_gpus, parse_all_gpus, read_prices
from tiers.sizing.operation import Policy, cheapest_in_operation, in_operation
from tiers.sizing.verdict import counted, kinds_table, missing_for, settings_for, tiers_of, verdict_on
from tiers.spec import PRECISIONS, TierName
from tiers.speed import SpeedModel

Kind = tuple[PromptClass, Complexity]
ROOFLINE = "roofline"
HOUR_S = 3600
MIXES: dict[str, tuple[dict[PromptClass, float], list[float]]] = {
    name: ({PromptClass(each): share for each, share in mix["classes"].items()}, mix["complexities"])
    for name, mix in tomllib.loads(Path(__file__).with_name("mixes.toml").read_text("utf-8")).items()
}
PEAK = "0.4,0.6,0.5,2.5"  # the day that is planned for where none is given
MIX_HELP = "What is asked: chat, coding, rag (assumed shares), or the decision log of your own traffic."
DAY_HELP = "The day's course: load of equal parts of the day over the mean, as 0.3,0.5,1.2,2."
LOSS_HELP = "Answers of 100 that may be lost; by default as many as balanced alone loses."
MODEL_HELP = "Hugging Face id, model folder or config.json; by default the settings' model."
GPUS_HELP = "Kinds of GPU, and how many there are; without a number, as many as needed. By default this machine's."


@dataclass(frozen=True, slots=True)
class _Target:
    """What is planned: a model, where its engines run, and how fast and how lossy they are."""

    name: str
    model: Architecture
    gpus: Mapping[GpuKind, int | None]  # empty: this machine's processor
    speed: str | None  # where speeds are from, for people; None: they are not known
    paces: Mapping[TierName, SpeedModel]  # measured
    weights: Mapping[TierName, int]  # of finished checkpoints as engines hold them, in bytes
    answers: Mapping[TierName, Sequence[AnswerCount]]  # measured; empty: losses are published ones


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options."""

    model: Annotated[str | None, typer.Option(help=MODEL_HELP, metavar="MODEL")] = None
    gpus: Annotated[str | None, typer.Option(help=GPUS_HELP, metavar="2xA100,4xL4")] = None
    load: Annotated[str | None, typer.Option(help="Requests, as 40/s or 100/min.", metavar="RATE")] = None
    day: Annotated[str, typer.Option(help=DAY_HELP, metavar="FACTORS")] = "1"
    mix: Annotated[str, typer.Option(help=MIX_HELP, metavar="NAME|FILE")] = "chat"
    loss: Annotated[float | None, typer.Option(help=LOSS_HELP, min=0, max=100, metavar="ANSWERS")] = None
    prompt: Annotated[int, typer.Option(help="Mean tokens of a prompt.", min=1, metavar="TOKENS")] = 800
    output: Annotated[int, typer.Option(help="Mean tokens of an answer.", min=1, metavar="TOKENS")] = 250
    context: Annotated[int | None, typer.Option(help="Longest prompt and answer.", min=2, metavar="TOKENS")] = None
    ttft: Annotated[float | None, typer.Option(help="Longest time to the first token.", min=1, metavar="MS")] = None
    tpot: Annotated[float | None, typer.Option(help="Longest time between tokens, in ms.", min=0.1, metavar="MS")] = (
        None
    )
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences decoded at once.", min=1, metavar="N")] = None
    kv_fp8: Annotated[bool, typer.Option("--kv-fp8", help="Keep the KV cache in FP8.")] = False
    prices: Annotated[Path, typer.Option(help="Prices of GPUs.", metavar="FILE", show_default="built-in")] = PRICES
    profile: Annotated[Path | None, typer.Option(help="Latency profile, not the roofline.", metavar="FILE")] = None
    write: Annotated[Path | None, typer.Option(help="Write the tiers as settings.", metavar="FILE")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    config: ConfigOption = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What was found."""

    engines: Sequence[EngineType]
    lacks: Sequence[str]  # why there is no engine of some precision
    load: Load | None
    currency: str | None = None  # None: GPUs or machines are counted
    best: Fleet | None = None
    alone: Mapping[TierName, Fleet | None] | None = None
    present: Fleet | None = None  # as the settings have it
    verdict: str = ""


@with_options
def plan(options: Options) -> None:
    """Tell which precisions on which GPUs carry a load at least cost, and what is lost. No weights are read."""
    settings = load_settings(options.config)
    target, prices = _target(settings, options), read_prices(options.prices)
    demand = _demand(settings, options, target)
    if not target.gpus and options.kv_fp8:
        raise PlanError("--kv-fp8 needs --gpus: engines on a CPU keep their KV cache in BF16")
    made = _planned(settings, options, target, demand, prices)
    if options.write is not None:
        if made.best is None:
            raise PlanError(f"{options.write} is not written: {made.verdict or 'no --load is given'}")
        options.write.write_text(settings_for(made.best, made.verdict), "utf-8")
    if options.as_json:
        typer.echo(json.dumps(_json(target, demand, made), indent=2))
    else:
        _show(target, demand, made)
    if made.load is not None and made.best is None:
        raise typer.Exit(1)


def tiers_for_gpus(settings: Settings) -> tuple[dict[str, dict[str, int]], str] | None:
    """Return the tiers for this machine's GPUs, and why, where the settings name none; None: there are no GPUs."""
    named = (
        settings.tiers != Settings().tiers or settings.model.name == DEFAULT_MODEL
    )  # whose three tiers are the example
    if named or not read_machine().gpus:
        return None
    target = _target(settings, options := Options(load="1/s", day=PEAK))
    options = replace(options, context=min(settings.tiers.balanced.max_model_len, target.model.context))
    made = _planned(settings, options, target, _demand(settings, options, target), read_prices(options.prices))
    available = {gpu.name: count for gpu, count in target.gpus.items()}
    assert made.load is not None
    best = fullest(made.engines, made.load, available)
    best = best or fullest(made.engines, replace(made.load, budget=1.0), available)  # nothing else fits
    if best is None:
        raise PlanError(made.verdict)
    return tiers_of(best), counted(best)


def _planned(settings: Settings, options: Options, target: _Target, demand: Demand, prices: Prices) -> _Plan:
    engines: list[EngineType] = []
    lacks: list[str] = []
    known = _prices(target.gpus, prices)
    for gpu, count in target.gpus.items():
        kv_bytes, paces = 1 if options.kv_fp8 else 2, target.paces
        plans, missing = engines_on_gpus(target.model, gpu, count, demand, kv_bytes=kv_bytes, paces=paces)
        engines += [EngineType(gpu.name, each, each.gpus_per_replica * (known.get(gpu) or 1.0)) for each in plans]
        lacks += missing.values() if len(target.gpus) == 1 or len(missing) < len(PRECISIONS) else []
    if not target.gpus:
        cache = {tier: _kv_cache(settings, target.model, tier) for tier in PRECISIONS}
        plans = engines_on_cpu(target.model, demand, kv_cache=cache, weights=target.weights, paces=target.paces)
        engines = [EngineType("", each, 1.0) for each in plans]
    if not engines:
        raise PlanError(lacks[0])
    if target.gpus and not known:
        lacks.append("no price of these GPUs is known: they are counted; give --prices a file")
    if options.load is None or not any(engine.rate for engine in engines):
        return _Plan(engines, lacks, None)
    load = _load(options, target)
    available = {gpu.name: count for gpu, count in target.gpus.items()}
    policy = _policy(settings)
    singles = alone(engines, load, available)
    singles = {tier: one and in_operation(one, load, demand, policy) for tier, one in singles.items()}
    if options.loss is None:
        load = replace(load, budget=load.lost_by(TierName.BALANCED))
    best = cheapest_in_operation(engines, load, available, demand, policy)
    currency = prices.currency if known else None
    more = best or cheapest_in_operation(engines, load, dict.fromkeys(available), demand, policy)
    verdict = verdict_on(best, singles, load, currency) if best else missing_for(engines, load, available, more)
    return _Plan(engines, lacks, load, currency, best, singles, _present(settings, engines, load), verdict)


def _policy(settings: Settings) -> Policy:
    objective, least = settings.policy.objective, settings.policy.negligible_loss
    return lambda budget, taken: least + scarcity_at(objective, taken) * max(budget - least, 0.0)


def _present(settings: Settings, engines: Sequence[EngineType], load: Load) -> Fleet | None:
    """Return what the engines that the settings name do; None: they do not fit, or do not carry the load."""
    tiers = {tier: settings.tiers.of(tier) for tier in PRECISIONS}
    mine = [each for each in engines if each.plan.gpus_per_replica in {0, tiers[each.tier].tensor_parallel}]
    replicas = {tier: each.replicas_here for tier, each in tiers.items()}
    return as_set(mine, load, {each.gpu for each in mine}, replicas) if mine else None


def _kv_cache(settings: Settings, model: Architecture, name: TierName) -> int:
    tier, asked = settings.tiers.of(name), settings.engine.cpu_kv_cache_gib
    return int(GIB * (asked or usual_kv_cache_gib(model.kv_bytes_per_token(), tier.max_model_len, tier.max_num_seqs)))


def _prices(gpus: Mapping[GpuKind, int | None], prices: Prices) -> dict[GpuKind, float]:
    """Return the prices of all kinds, or none: GPUs are counted where no price is known."""
    found = {gpu: price for gpu in gpus if (price := prices.of(gpu)) is not None}
    if found and len(found) < len(gpus):
        unknown = ", ".join(gpu.name for gpu in gpus if gpu not in found)
        raise PlanError(
            f"no price of {unknown} is known, and one of the others is: give --prices a file with all of them"
        )
    return found


def _load(options: Options, target: _Target) -> Load:
    assert options.load is not None
    rate, mix = parse_rate(options.load), _mix(options.mix)
    whole = sum(mix.values())
    loss: dict[TierName, dict[Hashable, float]] = {}
    for tier, precision in PRECISIONS.items():
        found = losses(precision, target.answers.get(tier, ()))
        loss[tier] = {(c, x): 0.0 if tier is TierName.PRECISE else found[c][x].mean for c, x in mix}
    budget = 1.0 if options.loss is None else options.loss / 100
    return Load({kind: rate * share / whole for kind, share in mix.items()}, loss, parse_course(options.day), budget)


def _mix(text: str) -> dict[Kind, float]:
    if text in MIXES:
        classes, degrees = MIXES[text]
        return {
            (c, x): share * part for c, share in classes.items() for x, part in zip(Complexity, degrees, strict=True)
        }
    path = Path(text)
    if not path.is_file():
        raise PlanError(f"--mix {text}: neither {', '.join(MIXES)} nor a decision log (telemetry.decision_log)")
    found: Counter[Kind] = Counter()
    for record in read_log(path):
        if isinstance(record, DecisionRecord):
            features = record.query.features
            found[features.prompt_class, features.complexity or Complexity.MODERATE] += 1
    if not found:
        raise PlanError(f"--mix {text}: the decision log has no decisions")
    return dict(found)


def _demand(settings: Settings, options: Options, target: _Target) -> Demand:
    means, most = options.prompt + options.output, target.model.context
    longest = options.context or means
    if longest > most:
        raise PlanError(f"--context {longest}: {target.name} takes {most} tokens at most")
    if longest < means:
        raise PlanError(f"--context {longest} is shorter than a mean prompt and answer, {means} tokens")
    usual = 256 if target.gpus else settings.tiers.precise.max_num_seqs
    return Demand(options.prompt, options.output, longest, options.max_num_seqs or usual, options.ttft, options.tpot)


def _target(settings: Settings, options: Options) -> _Target:
    checkpoints = () if options.model is not None else finished(prepare_options(settings))
    if checkpoints:
        name, folder = checkpoints[-1].manifest.model, str(checkpoints[-1].path)
    else:
        name = folder = options.model or settings.model.name
        if options.model is None and name == DEFAULT_MODEL:
            raise PlanError(f"{name}, the default model, is not made yet: run 'qarr model prepare', or give --model")
    machine, profile = read_machine(), options.profile
    gpus = {} if options.gpus is None else parse_all_gpus(options.gpus)
    if options.gpus is None and machine.gpus:
        gpus = dict([_same_kind([each.name for each in machine.gpus])])
    digests = {made.tier: made.manifest.weights_digest for made in checkpoints}
    if not gpus and profile is None and checkpoints:  # what was measured on this machine
        own = settings.policy.profiles / latency_name(digests, speed_machine(settings))
        profile = own if own.is_file() else None
    fits: tuple[Fit, ...] = ()
    speed = ROOFLINE if gpus else None
    if profile is not None:
        fits, speed = load_latency(profile).fits, f"measured: {profile}"
    paces = {fit.tier: fit.model for fit in fits}
    weights = {} if gpus else {each.tier: held_bytes(each.path, amx=machine.amx) for each in checkpoints}
    quality = settings.policy.profiles / profile_name(digests) if digests else None
    measured = load_profile(quality) if quality is not None and quality.is_file() else None
    answers = {} if measured is None else {tier: measured.of(tier) for tier in PRECISIONS}
    return _Target(name, architecture(find_config(folder)), gpus, speed, paces, weights, answers)


def _same_kind(names: list[str]) -> tuple[GpuKind, int]:
    for kind in known_gpus():
        if kind.is_called(names[0]):
            return kind, names.count(names[0])
    known = ", ".join(gpu.name for gpu in known_gpus())
    raise PlanError(f"this machine's {names[0]} is not known; give --gpus the most similar of {known}")


def _engine_json(engine: EngineType) -> dict[str, Any]:
    told = {name: value for name, value in asdict(replace(engine.plan, pace=None)).items() if name != "pace"}
    return {"gpu": engine.gpu or None, "price_per_hour": engine.price, **told}


def _fleet_json(fleet: Fleet | None, demand: Demand, made: _Plan) -> dict[str, Any] | None:
    if fleet is None or made.load is None:
        return None
    engines = [{**_engine_json(engine), "replicas": count} for engine, count in fleet.counts]
    return {
        "cost_per_hour": fleet.price,  # or GPUs, or machines, where there is no currency
        "cost_per_million_tokens": _million(fleet, demand, made),
        "answers_lost": fleet.lost,
        "ttft_ms": fleet.ttft_ms,
        "tpot_ms": fleet.tpot_ms,
        "loss_budget": fleet.loss_budget,  # of the policy
        "shares": fleet.shares,
        "gpus": fleet.gpus,
        "engines": engines,
    }


def _million(fleet: Fleet, demand: Demand, made: _Plan) -> float | None:
    if made.currency is None or made.load is None:
        return None
    return fleet.price / HOUR_S / (made.load.mean * demand.output_tokens) * 1e6


def _json(target: _Target, demand: Demand, made: _Plan) -> dict[str, Any]:
    found = {
        "model": target.name,
        "parameters": target.model.parameters,
        "hardware": ", ".join(gpu.name for gpu in target.gpus) or machine_name(),
        "speed": target.speed,
        "losses": "measured" if target.answers else "published",
        **asdict(demand),
        "engines": [_engine_json(engine) for engine in made.engines],
        "notes": list(made.lacks),
        "verdict": made.verdict,
    }
    if made.load is None:
        return found
    load, singles = made.load, made.alone or {}
    return found | {
        "requests_per_s": load.mean,
        "peak_per_s": load.peak,
        "budget": load.budget,
        "currency": made.currency,
        "plan": _fleet_json(made.best, demand, made),
        "alone": {tier: _fleet_json(fleet, demand, made) for tier, fleet in singles.items()},
        "as_set": _fleet_json(made.present, demand, made),
    }


def _show(target: _Target, demand: Demand, made: _Plan) -> None:
    say = output(120).print
    active = target.model.active
    kind = "" if target.model.quantizable == active else f", {active / 1e9:.1f} of them a token"
    say(f"{target.name}: {target.model.parameters / 1e9:.3g} billion parameters{kind}")
    where = ", ".join(f"{count} x {gpu.name}" if count else gpu.name for gpu, count in target.gpus.items())
    load = "" if made.load is None else f"{made.load.mean:g} requests/s, "
    if made.load is not None and made.load.peak > made.load.mean:
        load = f"{made.load.mean:g} requests/s in the mean and {made.load.peak:g} at the peak, "
    say(
        f"{where or machine_name()}; {load}prompts of {demand.prompt_tokens} and answers of {demand.output_tokens} tokens\n"
    )
    print_table(_engines_table(demand, made))
    if made.load is not None:
        say("")
        print_table(_fleets_table(target, demand, made))
    if made.best is not None and len({engine.tier for engine, _ in made.best.counts}) > 1:
        say("")
        print_table(kinds_table(made.best))
    say("")
    speed = target.speed or "not measured on this machine; 'qarr profile latency' does it, --gpus has a roofline"
    said = f"computed (roofline), not measured; engines {MOST_BUSY:.0%} busy" if speed == ROOFLINE else speed
    notes = [*made.lacks, f"speed: {said}", f"losses: {'measured' if target.answers else 'published'}"]
    for line in notes:
        say(f"- {line}", soft_wrap=False)
    if made.verdict:
        say(f"\n{made.verdict}", style="bold", soft_wrap=False)


def _engines_table(demand: Demand, made: _Plan) -> Table:
    table = Table("tier", "precision", "one engine on", box=None)
    columns = ("weights", "KV a token", f"at {demand.context}", "batch", "TTFT ms", "ms/token", "requests/s")
    for name in columns:
        table.add_column(name, justify="right")
    used = {id(e) for fleet in (made.best, *(made.alone or {}).values()) if fleet for e, _ in fleet.counts}
    smallest: dict[tuple[TierName, str], EngineType] = {}
    for engine in made.engines:
        smallest.setdefault((engine.tier, engine.gpu), engine)
    for engine in made.engines:
        if id(engine) not in used and engine is not smallest[engine.tier, engine.gpu]:
            continue
        each = engine.plan
        on = f"{each.gpus_per_replica} x {engine.gpu}" if engine.gpu else "this CPU"
        size, kv = f"{each.weights_bytes / 1e9:.1f} GB", f"{each.kv_bytes_per_token / 1024:.4g} KiB"
        times = _number(each.ttft_ms), _number(each.tpot_ms, 1), _number(each.requests_per_s, 1)
        table.add_row(
            each.tier, each.precision, on, size, kv, f"{each.max_sequences:,} seqs", f"{each.batch:,}", *times
        )
    return table


def _fleets_table(target: _Target, demand: Demand, made: _Plan) -> Table:
    assert made.load is not None
    table = Table("fleet", "engines", box=None)
    price = f"{made.currency} an hour" if made.currency else "GPUs" if target.gpus else "machines"
    for name in ("share of requests", price, "1M tokens", "lost of 100", "TTFT ms", "ms/token"):
        table.add_column(name, justify="right")
    rows = {"planned": made.best, **{f"{tier} alone": fleet for tier, fleet in (made.alone or {}).items()}}
    for name, fleet in {**rows, "as set": made.present}.items():
        if fleet is None:
            table.add_row(name, "does not carry it", style="dim")
            continue
        engines = ", ".join(
            f"{count} {e.tier} on {e.plan.gpus_per_replica} x {e.gpu}" if e.gpu else f"{count} {e.tier}"
            for e, count in fleet.counts
        )
        shares = " / ".join(f"{fleet.shares.get(tier, 0):.0%}" for tier in PRECISIONS)
        money = _number(fleet.price, 2 if made.currency else 0), _number(_million(fleet, demand, made), 3)
        told = f"{fleet.lost * 100:.2g}", _number(fleet.ttft_ms), _number(fleet.tpot_ms, 1)
        table.add_row(name, engines, shares, *money, *told, style="bold" if name == "planned" else "")
    return table


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
