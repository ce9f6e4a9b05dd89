"""``qarr plan``: what a model needs, what carries a load, and what it costs, before anything is started."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from router.cli.common import ConfigOption, output, print_table, with_options
from router.deployment.layout import prepare_options, speed_machine
from router.policy.profiles import latency_name, load_latency
from router.settings import load_settings
from tiers.checkpoints.prepare import DEFAULT_MODEL, finished
from tiers.errors import PlanError
from tiers.plan import GIB, held_bytes, machine_name, read_machine
from tiers.sizing.architecture import architecture
from tiers.sizing.capacity import MOST_BUSY, Demand, FleetPlan, TierPlan, plan_on_cpu, plan_on_gpus
from tiers.sizing.find_config import find_config
from tiers.sizing.hardware import PRICES, known_gpus, parse_gpus, read_prices
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.policy.profiles import Fit
    from router.settings import Settings
    from tiers.sizing.architecture import Architecture
    from tiers.sizing.hardware import GpuKind
    from tiers.speed import SpeedModel

ROOFLINE = "roofline"
NOTES_WIDTH = 120
_LOAD = re.compile(r"([\d.]+)\s*/\s*(s|min|h)|([\d.]+)")
MODEL_HELP = "Hugging Face id, model folder or config.json; by default the settings' model."
GPUS_HELP = "Kind of GPU, and how many there are; without a number, as many as needed. By default this machine's."
SHARES_HELP = "Of the requests, by tier, as fast=2,balanced=1,precise=1; by default the same for each."
_PERIODS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class _Target:
    """What is planned: a model, where its engines run, and how fast they are.

    Attributes:
        gpu: None: on this machine's processor.
        speed: Where speeds are from, for people; None: they are not known.
        paces: Measured, by tier.
        weights: Of finished checkpoints as engines hold them, in bytes.
    """

    name: str
    model: Architecture
    gpu: GpuKind | None
    available: int | None
    speed: str | None
    paces: Mapping[TierName, SpeedModel]
    weights: Mapping[TierName, int]


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options."""

    model: Annotated[str | None, typer.Option(help=MODEL_HELP, metavar="MODEL")] = None
    gpus: Annotated[str | None, typer.Option(help=GPUS_HELP, metavar="2xH100")] = None
    load: Annotated[str | None, typer.Option(help="Requests, as 40/s or 100/min.", metavar="RATE")] = None
    prompt: Annotated[int, typer.Option(help="Mean tokens of a prompt.", min=1, metavar="TOKENS")] = 800
    output: Annotated[int, typer.Option(help="Mean tokens of an answer.", min=1, metavar="TOKENS")] = 250
    context: Annotated[
        int | None, typer.Option(help="Longest prompt and answer; by default the means' sum.", min=2, metavar="TOKENS")
    ] = None
    tpot: Annotated[
        float | None, typer.Option(help="Longest time between two tokens, in ms.", min=0.1, metavar="MS")
    ] = None
    shares: Annotated[str | None, typer.Option(help=SHARES_HELP, metavar="SHARES")] = None
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Sequences an engine decodes at once: on GPUs 256, else as set.", min=1, metavar="N"),
    ] = None
    kv_fp8: Annotated[bool, typer.Option("--kv-fp8", help="Keep the KV cache in FP8.")] = False
    prices: Annotated[
        Path, typer.Option(help="Prices of GPUs; see docs/planning.md.", metavar="FILE", show_default="built-in")
    ] = PRICES
    profile: Annotated[
        Path | None,
        typer.Option(help="Latency profile measured on such GPUs, instead of the roofline.", metavar="FILE"),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    config: ConfigOption = None


@with_options
def plan(options: Options) -> None:
    """Tell what a model needs, how many engines carry a load, and what they cost. No weights are read."""
    settings = load_settings(options.config)
    target = _target(settings, options)
    demand = _demand(settings, options, target)
    if target.gpu is None:
        if options.kv_fp8:
            raise PlanError("--kv-fp8 needs --gpus: engines on a CPU keep their KV cache in BF16")
        currency = None
        cache = settings.engine.cpu_kv_cache_gib * GIB
        made = plan_on_cpu(target.model, demand, kv_cache=cache, weights=target.weights, paces=target.paces)
    else:
        known, kv_bytes = read_prices(options.prices), 1 if options.kv_fp8 else 2
        currency = known.currency
        made = plan_on_gpus(
            target.model, target.gpu, target.available, demand, prices=known, kv_bytes=kv_bytes, paces=target.paces
        )
    if options.as_json:
        typer.echo(json.dumps(_json(target, demand, made), indent=2))
    else:
        _show(target, demand, made, currency)


def _demand(settings: Settings, options: Options, target: _Target) -> Demand:
    means, most = options.prompt + options.output, target.model.context
    longest = options.context or means
    if longest > most:
        raise PlanError(f"--context {longest}: {target.name} takes {most} tokens at most")
    if longest < means:
        raise PlanError(f"--context {longest} is shorter than a mean prompt and answer, {means} tokens")
    usual = 256 if target.gpu is not None else settings.tiers.precise.max_num_seqs
    return Demand(
        requests_per_s=None if options.load is None else _rate(options.load),
        prompt_tokens=options.prompt,
        output_tokens=options.output,
        context=longest,
        max_num_seqs=options.max_num_seqs or usual,
        tpot_ms=options.tpot,
        shares=None if options.shares is None else _shares(options.shares),
    )


def _target(settings: Settings, options: Options) -> _Target:
    checkpoints = () if options.model is not None else finished(prepare_options(settings))
    if checkpoints:
        name, folder = checkpoints[-1].manifest.model, str(checkpoints[-1].path)
    else:
        name = folder = options.model or settings.model.name
        if options.model is None and name == DEFAULT_MODEL:
            raise PlanError(f"{name}, the default model, is not made yet: run 'qarr model prepare', or give --model")
    machine, profile = read_machine(), options.profile
    gpu, available = (None, None) if options.gpus is None else parse_gpus(options.gpus)
    if options.gpus is None and machine.gpus:
        gpu, available = _same_kind([each.name for each in machine.gpus])
    if gpu is None and profile is None and checkpoints:  # what was measured on this machine
        digests = {made.tier: made.manifest.weights_digest for made in checkpoints}
        own = settings.policy.profiles / latency_name(digests, speed_machine(settings))
        profile = own if own.is_file() else None
    fits: tuple[Fit, ...] = ()
    speed = None if gpu is None else ROOFLINE
    if profile is not None:
        fits, speed = load_latency(profile).fits, f"measured: {profile}"
    paces = {fit.tier: fit.model for fit in fits}
    weights = {each.tier: held_bytes(each.path, amx=machine.amx) for each in checkpoints} if gpu is None else {}
    return _Target(name, architecture(find_config(folder)), gpu, available, speed, paces, weights)


def _same_kind(names: list[str]) -> tuple[GpuKind, int]:
    for kind in known_gpus():
        if kind.is_called(names[0]):
            return kind, names.count(names[0])
    known = ", ".join(gpu.name for gpu in known_gpus())
    raise PlanError(f"this machine's {names[0]} is not known; give --gpus the most similar of {known}")


def _rate(text: str) -> float:
    found = _LOAD.fullmatch(text.strip())
    try:
        rate = 0.0 if found is None else float(found[1] or found[3]) / _PERIODS[found[2] or "s"]
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise PlanError(f"--load {text}: a rate above 0 is needed, as 40/s, 100/min or 5000/h")
    return rate


def _shares(text: str) -> dict[TierName, float]:
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            tier = STANDARD_TIERS[STANDARD_TIERS.index(TierName(name.strip()))]  # others are not planned
            found[tier] = share = float(value)
        except ValueError:
            raise PlanError(
                f"--shares {text}: {part!r} is not as fast=0.5; tiers are {', '.join(STANDARD_TIERS)}"
            ) from None
        if not 0 <= share < float("inf"):
            raise PlanError(f"--shares {text}: {part!r} must not be negative")
    if not sum(found.values()):
        raise PlanError(f"--shares {text}: one of them must be above 0")
    return {tier: share / sum(found.values()) for tier, share in found.items()}


def _json(target: _Target, demand: Demand, made: FleetPlan) -> dict[str, Any]:
    return {
        "model": target.name,
        "parameters": target.model.parameters,
        "hardware": machine_name() if target.gpu is None else target.gpu.name,
        "speed": target.speed,
        "requests_per_s": demand.requests_per_s,
        "prompt_tokens": demand.prompt_tokens,
        "output_tokens": demand.output_tokens,
        "context": demand.context,
        **made.as_json(),
    }


def _show(target: _Target, demand: Demand, made: FleetPlan, currency: str | None) -> None:
    say = output(140).print
    kind = (
        "" if target.model.quantizable == target.model.active else f", {target.model.active / 1e9:.1f} of them a token"
    )
    say(f"{target.name}: {target.model.parameters / 1e9:.3g} billion parameters{kind}")
    where = machine_name() if target.gpu is None else target.gpu.name
    load = "" if demand.requests_per_s is None else f"{demand.requests_per_s:g} requests/s, "
    say(f"{where}; {load}prompts of {demand.prompt_tokens} and answers of {demand.output_tokens} tokens, in the mean\n")
    columns = ("weights", "KV a token", f"at {demand.context}", "engine on", "batch", "TTFT ms", "ms/token", "tokens/s")
    ends = ("share", "replicas", "an hour", "1M tokens") if currency else ("share", "replicas")
    table = Table("tier", "precision", box=None)
    for name in (*columns, *ends):
        table.add_column(name, justify="right")
    for tier in made.tiers:
        table.add_row(tier.tier, tier.precision, *_cells(tier, currency))
    if made.alone is not None:
        table.add_row("alone", made.alone.precision, *_cells(made.alone, currency), style="dim")
    print_table(table)
    say("")
    for line in _notes(target, demand, made, currency):
        say(textwrap.fill(f"- {line}", NOTES_WIDTH, subsequent_indent="  "))


def _cells(tier: TierPlan, currency: str | None) -> list[str]:
    size, kv = f"{tier.weights_bytes / 1e9:.1f} GB", f"{tier.kv_bytes_per_token / 1024:.4g} KiB"
    if tier.lacks:
        return [size, kv, "0", "does not fit"]
    engine = (
        "this CPU" if not tier.gpus_per_replica else f"{tier.gpus_per_replica} GPU" + "s" * (tier.gpus_per_replica > 1)
    )
    cells = [size, kv, f"{tier.max_sequences:,} seqs", engine, f"{tier.batch:,}"]
    cells += [_number(tier.ttft_ms), _number(tier.tpot_ms, 1), _number(tier.tokens_per_s)]
    cells += [f"{tier.share:.0%}", str(tier.replicas)]
    return [*cells, _number(tier.cost_per_hour, 2), _number(tier.cost_per_million_tokens, 3)] if currency else cells


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _notes(target: _Target, demand: Demand, made: FleetPlan, currency: str | None) -> list[str]:
    found = [tier.lacks for tier in made.tiers if tier.lacks]
    if target.gpu is not None:
        found.append(_needed(target.gpu, demand, made, currency))
    else:
        found.append("the three engines share the processor; 'qarr up' checks its memory")
        if made.tiers[0].replicas > 1:
            found.append(f"the load takes {made.tiers[0].replicas} machines like this one")
    speed = target.speed or "not measured on this machine; 'qarr profile latency' does it, --gpus has a roofline"
    found.append(f"speed: {'computed (roofline), not measured' if speed == ROOFLINE else speed}")
    fitting, saved = [tier for tier in made.tiers if not tier.lacks], made.gpu_seconds_saved
    if saved is not None and len(fitting) > 1:
        change = f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'}"
        found.append(f"these shares take {change} engine time than everything on {fitting[-1].tier}")
    if target.gpu is not None and made.cost_per_hour is None:
        found.append(f"no price of {target.gpu.name} is known: give --prices a file")
    return found


def _needed(gpu: GpuKind, demand: Demand, made: FleetPlan, currency: str | None) -> str:
    text = f"{made.gpus} x {gpu.name}"
    if made.cost_per_hour is not None:
        text += f", {made.cost_per_hour:,.2f} {currency} an hour"
    if made.shared:
        text += ", one engine of each tier on every GPU"
    if made.serves_per_s is not None:
        text += f"; serves {made.serves_per_s:.3g} requests/s, {MOST_BUSY:.0%} busy"
    if made.available is None or made.fits:
        return text
    load = "" if demand.requests_per_s is None else f" for {demand.requests_per_s:g} requests/s"
    return f"there are {made.available} x {gpu.name}; needed{load} are {text}"
