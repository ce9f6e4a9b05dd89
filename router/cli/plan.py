"""``qarr plan``: the fleet that carries a load at least cost, and whether several precisions pay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from router.cli.common import ConfigOption, JsonOption, err, plain
from router.cli.plan_as_set import engines_as_set, names_tiers
from router.cli.plan_engines import available_by_name, find_engines, prices_by_gpu
from router.cli.plan_fleets import FleetSearch, router_policy
from router.cli.plan_inputs import DEFAULTS, PlanInputs, PlanOptions
from router.cli.plan_load import demand_of, load_of
from router.cli.plan_notes import notes_on_inputs, notes_on_load, source_of_prices
from router.cli.plan_report import as_json, show
from router.cli.plan_result import FleetPlan, PlanReport, PlanTarget
from router.cli.plan_settings import ignored_settings
from router.cli.plan_target import find_target, first_kind
from router.settings import Settings, load_settings
from tiers.checkpoints.prepare import DEFAULT_MODEL
from tiers.errors import PlanError
from tiers.plan import read_machine
from tiers.sizing.capacity import ServingDemand
from tiers.sizing.fleet import EngineType, fullest, parse_rate
from tiers.sizing.hardware import GpuKind, Prices, read_prices
from tiers.sizing.largest import fewest_gpus
from tiers.sizing.verdict import WrittenSettings, counted, settings_for, tiers_of
from tiers.spec import TierName

PEAK_DAY = "0.4,0.6,0.5,2.5"  # the day that `qarr up` plans for
UNKNOWN_SPEED = (
    "No fleet is planned: how fast this machine's processor computes the model is not known. Run 'qarr up', then 'qarr "
    "profile latency'; or give its result as --profile; or name GPUs with --gpus, whose speed is computed."
)

PlannedModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Hugging Face id, model folder or config.json; by default the settings' model.",
        metavar="MODEL",
    ),
]
GpusOption = Annotated[
    str | None,
    typer.Option(
        help="Kinds of GPU, and how many there are; without a number, as many as needed. One that is not known has the "
        "figures of its data sheet: 2xNAME:96GB,1792GB/s,500TF, and fp8=1000TF, price=1.9. Or a TOML file. By default this "
        "machine's.",
        metavar="2xA100,4xL4|FILE",
    ),
]
LoadOption = Annotated[
    str | None,
    typer.Option(
        help="Requests, as 40/s or 100/min. Without it: the largest load of each fleet, and a fleet for a share of it.",
        metavar="RATE",
    ),
]
ShareOption = Annotated[
    float | None,
    typer.Option(
        help="Without --load: percent of the largest load that the fleets are planned for; 80 by default.",
        min=1,
        max=100,
        metavar="PERCENT",
    ),
]
DayOption = Annotated[
    str,
    typer.Option(
        help="The day's course: load of equal parts of the day over the mean, as 0.3,0.5,1.2,2.",
        metavar="FACTORS",
    ),
]
MixOption = Annotated[
    str,
    typer.Option(
        help="What is asked: chat, coding, agents, rag (assumed shares), or the decision log of your own traffic.",
        metavar="NAME|FILE",
    ),
]
LossOption = Annotated[
    float | None,
    typer.Option(
        help="Answers of 100 that may be lost; by default as many as balanced alone loses.",
        min=0,
        max=100,
        metavar="ANSWERS",
    ),
]
PromptOption = Annotated[
    int, typer.Option(help="Mean tokens of a prompt.", min=1, metavar="TOKENS")
]
OutputOption = Annotated[
    int, typer.Option(help="Mean tokens of an answer.", min=1, metavar="TOKENS")
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt and answer together; by default as long as the mean.",
        min=2,
        metavar="TOKENS",
    ),
]
TtftOption = Annotated[
    float | None,
    typer.Option(help="Longest time to the first token.", min=1, metavar="MS"),
]
TpotOption = Annotated[
    float | None,
    typer.Option(help="Longest time between tokens, in ms.", min=0.1, metavar="MS"),
]
SequencesOption = Annotated[
    int | None, typer.Option(help="Sequences decoded at once.", min=1, metavar="N")
]
FormatsOption = Annotated[
    str | None,
    typer.Option(
        help="Number formats of the tiers: the model's own is precise, lower ones are balanced and fast. Each may end with "
        "+kv-fp8. By default what the GPUs compute well.",
        metavar="nvfp4,fp8,bf16",
    ),
]
KvCacheOption = Annotated[
    str,
    typer.Option(
        "--kv-cache",
        help="The KV cache of all tiers: auto (16 bits), or fp8 (half the bytes).",
        metavar="FORMAT",
    ),
]
PricesOption = Annotated[
    Path,
    typer.Option(help="Prices of GPUs.", metavar="FILE", show_default="built-in"),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(help="Latency profile, not the roofline.", metavar="FILE"),
]
WriteOption = Annotated[
    Path | None, typer.Option(help="Write the tiers as settings.", metavar="FILE")
]


def plan(
    model: PlannedModelOption = DEFAULTS.model,
    gpus: GpusOption = DEFAULTS.gpus,
    load: LoadOption = DEFAULTS.load,
    share: ShareOption = DEFAULTS.share_percent,
    day: DayOption = DEFAULTS.day,
    mix: MixOption = DEFAULTS.mix,
    loss: LossOption = DEFAULTS.lost_of_100,
    prompt: PromptOption = DEFAULTS.prompt_tokens,
    output: OutputOption = DEFAULTS.output_tokens,
    context: ContextOption = DEFAULTS.context,
    ttft: TtftOption = DEFAULTS.ttft_ms,
    tpot: TpotOption = DEFAULTS.tpot_ms,
    max_num_seqs: SequencesOption = DEFAULTS.max_num_seqs,
    formats: FormatsOption = DEFAULTS.formats,
    kv_cache: KvCacheOption = DEFAULTS.kv_cache,
    prices: PricesOption = DEFAULTS.prices,
    profile: ProfileOption = DEFAULTS.profile,
    write: WriteOption = None,
    print_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Tell which precisions on which GPUs carry a load at least cost, and what is lost. No weights are read."""
    options = PlanOptions(
        model=model,
        gpus=gpus,
        load=load,
        share_percent=share,
        day=day,
        mix=mix,
        lost_of_100=loss,
        prompt_tokens=prompt,
        output_tokens=output,
        context=context,
        ttft_ms=ttft,
        tpot_ms=tpot,
        max_num_seqs=max_num_seqs,
        formats=formats,
        kv_cache=kv_cache,
        prices=prices,
        profile=profile,
    )
    _check_options(options, write)
    settings = load_settings(config)
    report = make_report(settings, options)
    if print_json:
        typer.echo(json.dumps(as_json(report), indent=2))
    else:
        show(report)
    if write is not None:
        _write(write, settings, options, report=report)
    is_fleet_expected = load is not None or report.target.speed is not None
    if is_fleet_expected and report.plan.best is None:
        raise typer.Exit(1)


def _check_options(options: PlanOptions, write: Path | None) -> None:
    """Raise ``PlanError`` for options that exclude one another, and for a file that is there already."""
    if options.load is not None and options.share_percent is not None:
        raise PlanError(
            "--share is of the largest load, for plans without --load: give one of the two"
        )
    if write is not None and write.exists():
        raise PlanError(
            f"--write {write}: it is there already, and is left as it is; name another file"
        )


def make_report(settings: Settings, options: PlanOptions) -> PlanReport:
    """Make the plan that the options ask for."""
    target = find_target(settings, options)
    if not target.gpus and options.kv_cache != DEFAULTS.kv_cache:
        raise PlanError(
            f"--kv-cache {options.kv_cache} needs --gpus: engines on a CPU keep their KV cache in BF16"
        )
    demand = demand_of(settings, options, target)
    fleet_plan = _make_plan(settings, options, target, demand=demand)
    return PlanReport(target, demand, plan=fleet_plan)


def tiers_for_gpus(settings: Settings) -> tuple[dict[str, dict[str, int]], str] | None:
    """Return the tiers for this machine's GPUs, and the fleet in words.

    None: there are no GPUs, the settings name tiers, or the model is the default one, which serves as the example of three
    tiers.
    """
    is_example = settings.model.name == DEFAULT_MODEL
    if names_tiers(settings) or is_example or not read_machine().gpus:
        return None
    # The settings cannot say which engines are on which kind of GPU, so those of other kinds are left idle.
    gpus = first_kind(read_machine())
    options = PlanOptions(gpus=gpus, load="1/s", day=PEAK_DAY)
    target = find_target(settings, options)
    if target.reference.number_format.is_quantized:
        # Nothing is made from weights of few bits.
        target = replace(target, formats={TierName.PRECISE: target.reference})
    context = min(settings.tiers.balanced.max_model_len, target.model.context)
    options = replace(options, context=context)
    demand = demand_of(settings, options, target)
    fleet_plan = _make_plan(settings, options, target, demand=demand)
    assert fleet_plan.load is not None
    available_gpus = available_by_name(target.gpus)
    best_fleet = fullest(fleet_plan.engines, fleet_plan.load, available_gpus)
    if best_fleet is None:
        # Nothing that fits keeps the loss budget.
        any_loss = replace(fleet_plan.load, budget=1.0)
        best_fleet = fullest(fleet_plan.engines, any_loss, available_gpus)
    if best_fleet is None:
        raise PlanError(fleet_plan.verdict)
    return tiers_of(best_fleet), counted(best_fleet)


def _make_plan(
    settings: Settings,
    options: PlanOptions,
    target: PlanTarget,
    *,
    demand: ServingDemand,
) -> FleetPlan:
    """Plan for the load that is given, or for a share of the largest one."""
    prices = read_prices(options.prices)
    inputs = PlanInputs(
        settings=settings,
        options=options,
        target=target,
        demand=demand,
        price_by_gpu=prices_by_gpu(target.gpus, prices),
    )
    fleet_plan = _plan_engines(inputs, prices)
    if not any(engine.rate for engine in fleet_plan.engines):
        return replace(fleet_plan, verdict=UNKNOWN_SPEED)
    requests_per_s = 1.0 if options.load is None else parse_rate(options.load)
    load = load_of(options, target, requests_per_s)
    notes = [*fleet_plan.notes, *notes_on_load(options, target, demand, load)]
    fleet_plan = replace(fleet_plan, notes=notes)
    search = FleetSearch(
        inputs, router_policy(settings), set_engines=engines_as_set(inputs)
    )
    if options.load is None:
        return search.for_share(fleet_plan, load)
    return search.for_load(fleet_plan, load)


def _plan_engines(inputs: PlanInputs, prices: Prices) -> FleetPlan:
    """Return a plan that has engines, and no fleets yet; raise ``PlanError`` if no engine fits."""
    target = inputs.target
    gpu_counts = dict(target.gpus)
    engines, why_missing = find_engines(inputs)
    if inputs.options.load is None and None in gpu_counts.values():
        # The largest load needs a number of GPUs.
        gpu_counts = _with_numbers(gpu_counts, engines)
        counted_target = replace(target, gpus=gpu_counts)
        engines, why_missing = find_engines(replace(inputs, target=counted_target))
    if not engines:
        raise PlanError(why_missing[0])
    currency: str | None = None
    price_source: str | None = None
    if inputs.price_by_gpu:
        currency = prices.currency
        price_source = source_of_prices(inputs.options, inputs.price_by_gpu)
    return FleetPlan(
        engines=engines,
        gpus=gpu_counts,
        notes=[
            *why_missing,
            *target.notes,
            *notes_on_inputs(inputs, gpu_counts, prices),
        ],
        ignored=ignored_settings(inputs.settings, on_gpus=bool(gpu_counts)),
        currency=currency,
        prices=price_source,
    )


def _with_numbers(
    gpu_counts: Mapping[GpuKind, int | None], engines: list[EngineType]
) -> dict[GpuKind, int | None]:
    """Return a number for each kind of GPU, by default as many as hold one engine of each precision."""
    fewest = fewest_gpus(engines)
    return {gpu: count or fewest.get(gpu.name, 1) for gpu, count in gpu_counts.items()}


def _write(
    settings_file: Path, settings: Settings, options: PlanOptions, *, report: PlanReport
) -> None:
    """Write the planned tiers as settings, and say what they lack."""
    best_fleet = report.plan.best
    verdict = report.plan.verdict
    if best_fleet is None:
        raise PlanError(
            f"--write {settings_file}: it is not written, for no fleet is planned: {verdict}"
        )
    model_name = options.model or settings.model.name
    is_file = Path(model_name).is_file()
    written_model = None if is_file or model_name == DEFAULT_MODEL else model_name
    written = WrittenSettings(
        model=written_model,
        context=options.context,
        formats=report.target.formats,
    )
    try:
        settings_file.write_text(settings_for(best_fleet, verdict, written), "utf-8")
    except OSError as error:
        raise PlanError(
            f"--write {settings_file}: it cannot be written: {error.strerror}"
        ) from error
    success_text = (
        f"{settings_file} is written: 'qarr up --config {settings_file}' starts the "
        f"planned fleet of {report.target.name}."
    )
    if is_file:
        success_text += (
            f" Set model.name in it: {model_name} is no folder that engines start from."
        )
    kind_count = len(best_fleet.gpus)
    if kind_count > 1:
        success_text += f" It does not say which engines are on which of the {kind_count} kinds of GPU but in comments."
    err.print(plain(success_text))
