"""The ``qarr`` command."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import uvloop
from pydantic_core import to_json
from rich.console import Console

from classifier import TokenizerError, extract
from router.auth.api_keys import KeysError
from router.cli.doctor.command import doctor
from router.cli.keys import keys_app
from router.cli.logs import logs
from router.cli.profile import profile_app
from router.cli.replay import replay
from router.cli.tiers import tiers_app
from router.cli.top.app import top
from router.cli.trace import trace
from router.deployment.counters import make_counter, named_counter
from router.deployment.first_start import Steps
from router.deployment.layout import make_deployment, prepare_options
from router.deployment.run import ListenError, StartError, Told, check_files, listen, open_keys, run
from router.policy.decide import decide
from router.policy.decision import Query
from router.policy.profiles import ProfileError
from router.policy.render import render_features
from router.policy.table import policy_table
from router.server.handover import Baton, TakeoverError, control_path
from router.settings import Settings, SettingsError, load_settings, schema, table
from router.telemetry.logs import start_logging
from router.telemetry.tracing import TelemetryError
from tiers.checkpoints.prepare import find, finished, prepare
from tiers.errors import TierError
from tiers.fleet import FleetSnapshot, ReplicaSnapshot, TemplateTokens, TierSnapshot
from tiers.plan import GIB
from tiers.preparing import about
from tiers.spec import ReplicaState, TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from router.auth.api_keys import KeyStore
    from router.deployment.layout import Deployment
    from router.policy.decision import PolicyTable
    from router.telemetry.logs import Logging
    from tiers.checkpoints.checkpoint import Checkpoint
    from tiers.fleet import Fleet, Replica
    from tiers.plan import Plan

app = typer.Typer(
    help="Serve one language model at three precisions and send each prompt to the cheapest one that is good enough.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(help="Make and inspect the model's three checkpoints.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(keys_app, name="keys")
app.add_typer(profile_app, name="profile")
app.add_typer(tiers_app, name="tiers")

err = Console(stderr=True, highlight=False, soft_wrap=True)
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML settings file.", envvar="QARR_CONFIG", metavar="FILE")
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Hugging Face id, model folder, or the built-in default.", metavar="MODEL"),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option("--calibration", help='Your own prompts for AWQ: JSON lines with a "text" field.', metavar="FILE"),
]


def main() -> None:
    """Run the command; expected errors end it with their text and status 2, not with a traceback."""
    try:
        app()
    except (
        SettingsError,
        TierError,
        TelemetryError,
        TokenizerError,
        ListenError,
        StartError,
        KeysError,
        ProfileError,
        TakeoverError,
    ) as error:
        fail(str(error))


def fail(text: str) -> NoReturn:
    """End the command with an error text."""
    err.print(f"[bold red]error:[/] {_plain(text)}")
    raise SystemExit(2)


def version() -> str:
    """Return the installed version."""
    return distribution_version("qarr")


def _print_version(wanted: bool) -> None:  # noqa: FBT001  typer's callback
    if wanted:
        typer.echo(f"qarr {version()}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def up(
    config: ConfigOption = None,
    model: ModelOption = None,
    calibration: CalibrationOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one, which is printed.")] = None,
) -> None:
    """Make missing checkpoints, start and warm the engines, serve once one tier is ready. Ctrl-C stops everything."""
    started = time.monotonic()
    settings = load_settings(
        config,
        {"server": {"host": host, "port": port}, "model": {"name": model, "calibration": calibration}},
    )
    check_files(settings)
    logging = start_logging(settings.telemetry)
    keys = open_keys(settings)
    sock = listen(settings)
    needed = any(not t.urls and t.checkpoint is None for t in _tier_settings(settings))
    deployment = make_deployment(settings, finished(prepare_options(settings)) if needed else ())
    if not deployment.missing:
        _show_plan(deployment.model, deployment.plan, deployment.specs)
    _run(deployment, sock, keys, started, logging)


@app.command()
def serve(
    config: ConfigOption = None,
    fast: Annotated[list[str] | None, typer.Option(help="URL of an AWQ int4 engine.", metavar="URL")] = None,
    balanced: Annotated[list[str] | None, typer.Option(help="URL of an FP8 engine.", metavar="URL")] = None,
    precise: Annotated[list[str] | None, typer.Option(help="URL of a BF16 engine.", metavar="URL")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The model's folder, for exact token counts.", metavar="DIR")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one, which is printed.")] = None,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Replace the router that listens on the port; no connection is refused.")
    ] = False,
) -> None:
    """Serve the router alone, in front of engines that run already. Needs no engine environment."""
    started = time.monotonic()
    urls = {"fast": fast, "balanced": balanced, "precise": precise}
    overrides: dict[str, Any] = {name: {"urls": tuple(u) if u else None} for name, u in urls.items()}
    settings = load_settings(config, {"server": {"host": host, "port": port}, "tiers": overrides})
    if not any(t.urls for t in _tier_settings(settings)):
        fail("no engine is given: name at least one with --fast, --balanced or --precise URL, or use 'qarr up'")
    check_files(settings)
    deployment = make_deployment(settings, (), start_engines=False, tokenizer=tokenizer)
    logging = start_logging(settings.telemetry)
    baton = None
    if takeover:
        baton, sock = Baton.ask(control_path(settings.server.runtime_dir, settings.server.port))
        keys = open_keys(settings, sock.getsockname()[0])
    else:
        keys = open_keys(settings)
        sock = listen(settings)
    if not deployment.counter.exact:
        err.print("no tokenizer folder is given (--tokenizer DIR): prompt tokens are estimated")
    _run(deployment, sock, keys, started, logging, baton)


app.command("router", hidden=True)(serve)  # what it is called elsewhere


app.command("replay")(replay)
app.command("logs")(logs)
app.command("top")(top)
app.command("trace")(trace)
app.command("doctor")(doctor)


@app.command()
def classify(
    text: Annotated[str | None, typer.Argument(help="The prompt; without it, standard input is read.")] = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help='Read {"text": ...} lines, write one JSON object a line.')
    ] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="Model folder with tokenizer.json.", metavar="DIR")] = None,
    config: ConfigOption = None,
) -> None:
    """Show what the classifier finds in a prompt, and the tier that an idle fleet would serve it with."""
    settings = load_settings(config)
    counter = named_counter(tokenizer) if tokenizer is not None else make_counter(_prepared_folder(settings))
    if not counter.exact:
        err.print("no tokenizer yet ('qarr model prepare' makes one): tokens are estimated")
    fleet, policy = idle_fleet(settings), policy_table(settings.policy)
    if jsonl:
        for prompt in _jsonl_prompts(sys.stdin.buffer):
            typer.echo(to_json(_classified(prompt, counter, fleet, policy, settings)))
        return
    prompt = text if text is not None else sys.stdin.read()
    typer.echo(json.dumps(_classified(prompt, counter, fleet, policy, settings), indent=2, ensure_ascii=False))


@model_app.command("prepare")
def model_prepare(
    config: ConfigOption = None,
    model: ModelOption = None,
    calibration: CalibrationOption = None,
    calibration_samples: Annotated[
        int | None, typer.Option(help="Calibration prompts used, at even distances; 0 uses all.", metavar="N")
    ] = None,
    calibration_tokens: Annotated[
        int | None, typer.Option(help="Tokens used of each calibration prompt, at most.", metavar="N")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="AWQ weights a scale: 32, 64 or 128; 0 chooses.", metavar="N")
    ] = None,
) -> None:
    """Make the BF16, FP8 and AWQ int4 checkpoints of a model; what is finished is kept."""
    started = time.monotonic()
    asked = {
        "name": model,
        "calibration": calibration,
        "calibration_samples": calibration_samples,
        "calibration_tokens": calibration_tokens,
        "group_size": group_size,
    }
    for checkpoint in _prepare(load_settings(config, {"model": asked}), started):
        typer.echo(f"{checkpoint.tier:9} {checkpoint.path}")


@model_app.command("list")
def model_list(config: ConfigOption = None, model: ModelOption = None) -> None:
    """Show the finished checkpoints of the model as JSON, with their manifests."""
    found = find(prepare_options(load_settings(config, {"model": {"name": model}}))) or ()
    rows = [{"tier": c.tier, "path": str(c.path), **c.manifest.model_dump(mode="json")} for c in found]
    typer.echo(json.dumps(rows, indent=2))


@app.command("settings")
def show_settings(
    as_schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema, for editors.")] = False,
    config: ConfigOption = None,
) -> None:
    """List every setting with its default and meaning, after checking the file and the environment."""
    load_settings(config)
    typer.echo(json.dumps(schema(), indent=2) if as_schema else table())


def idle_fleet(settings: Settings) -> FleetSnapshot:
    """Return a fleet with one idle, ready replica a tier and no measurements."""
    replica = ReplicaSnapshot("", "", None, ReplicaState.READY, None, 0, 0, 0, 0, 0)
    specs = [
        TierSpec(name, t.max_model_len, t.max_num_seqs, t.max_in_flight)
        for name, t in zip(TierName, _tier_settings(settings), strict=True)
    ]
    return FleetSnapshot(tuple(TierSnapshot(spec, (replica,)) for spec in specs), TemplateTokens())


def _tier_settings(settings: Settings) -> list[Any]:
    return [getattr(settings.tiers, name.value) for name in TierName]


def _classified(
    prompt: str, counter: Any, fleet: FleetSnapshot, policy: PolicyTable, settings: Settings
) -> dict[str, Any]:
    features = extract(prompt, counter)
    query = Query(features, features.tokens, settings.limits.default_max_tokens)
    decision = decide(query, fleet, policy)
    return {**render_features(features), "tier": decision.tier, "reason": decision.reason}


def _jsonl_prompts(stream: Any) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            fail(f'line {number} of standard input: expected a JSON object with a "text" string')
        yield text


def _prepared_folder(settings: Settings) -> Path | None:
    found = finished(prepare_options(settings))
    return found[0].path if found else None


def _prepare(settings: Settings, started: float) -> tuple[Checkpoint, ...]:
    """Make what is missing, with progress on standard error."""
    options = prepare_options(settings)
    found = find(options)
    if found is not None:
        return found
    return prepare(options, Steps(lambda line: err.print(f"{_clock(started)} {_plain(line)}")))


def _show_plan(model: str, plan: Plan, specs: Sequence[TierSpec]) -> None:
    err.print(f"model {model} on {plan.device}")
    for share in plan.shares:
        spec = next(s for s in specs if s.name is share.tier)
        roughly = " " if spec.checkpoint is not None else "~"
        weights = f"{roughly}{share.weights / GIB:4.2f} GiB"
        if share.weights != share.on_disk:
            weights += f" ({share.on_disk / GIB:.2f} on disk: this CPU has no AMX)"
        err.print(
            f"  {spec.name:9}{spec.precision:9} weights {weights}, KV cache {share.kv_cache / GIB:5.2f} GiB "
            f"({share.kv_tokens} tokens), context {spec.max_model_len}"
        )


def _run(
    deployment: Deployment, sock: Any, keys: KeyStore, started: float, logging: Logging, baton: Baton | None = None
) -> None:
    host, port = sock.getsockname()[:2]
    logging.also_to_file(deployment.settings.engine.log_dir, port)
    shown = f"[{host}]" if ":" in host else host

    def say(text: str) -> None:
        line = f"{_clock(started)} {text}"
        logging.say(lambda: err.print(line))  # not here: a stopped terminal would hold the router up

    def changed(replica: Replica) -> None:
        detail = f": {replica.detail}" if replica.detail else ""
        say(f"{replica.id:12} {replica.state.value}{_plain(detail)}")

    def serving(fleet: Fleet) -> None:
        ready = " and ".join(t.spec.name for t in fleet.snapshot().tiers if t.state is ReplicaState.READY)
        say(f"[bold green]serving[/] on http://{shown}:{port} with {ready}; {_to_follow(fleet)}")

    def is_up(fleet: Fleet) -> None:
        failed = [tier.spec.name for tier in fleet.snapshot().tiers if tier.state is ReplicaState.FAILED]
        how = f"all tiers ready but {' and '.join(failed)}" if failed else "all tiers ready"
        say(f"[bold green]up[/]: listening on http://{shown}:{port}, {how}. Ctrl-C stops.")

    def planned(plan: Plan, specs: Sequence[TierSpec]) -> None:
        logging.say(lambda: _show_plan(deployment.model, plan, specs))

    told = Told(changed, is_up, serving, planned, lambda line: say(_plain(line)))
    say(f"listening on http://{shown}:{port}; requests are served as soon as a tier is ready")
    uvloop.run(run(deployment, sock, version(), told, keys=keys, baton=baton))
    say("stopped")
    if not logging.stop():
        os._exit(0)  # all is ended, but Python would wait for standard error to be taken


def _to_follow(fleet: Fleet) -> str:
    """Return which tiers are not ready yet, and about when they are."""
    coming = [(tier, fleet.preparations.of(tier)) for tier in fleet.preparations.coming]
    times = (f" in {about(p.remaining_s)}" if p is not None and p.remaining_s is not None else "" for _, p in coming)
    return "to follow: " + ", ".join(f"{tier}{time}" for (tier, _), time in zip(coming, times, strict=True))


def _clock(started: float) -> str:
    return f"{time.monotonic() - started:6.1f} s"


def _plain(text: str) -> str:
    """Keep rich from reading brackets as markup."""
    return text.replace("[", "\\[")


if __name__ == "__main__":
    main()
