"""``qarr up`` and ``qarr serve``."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import uvloop

from router.auth.access import KeyStore
from router.cli.common import (
    CalibrationOption,
    ConfigOption,
    ModelOption,
    clock,
    err,
    fail,
    http_url,
    plain,
    tier_settings,
)
from router.cli.plan import tiers_for_gpus
from router.deployment.layout import (
    Deployment,
    engine_args,
    make_deployment,
    prepare_options,
)
from router.deployment.listening import listen, open_keys
from router.deployment.on_ray import make_ray_deployment
from router.deployment.reloading import SettingsLoader
from router.deployment.run import StartObserver, check_files, run
from router.redis_link import check_redis
from router.section import cache_dir
from router.server.handover import HandoverClient, control_path
from router.settings import Settings, load_settings
from router.telemetry.logs import Logging
from tiers.checkpoints.prepare import finished, servable
from tiers.errors import PlanError
from tiers.fleet import Fleet
from tiers.lifecycle.engine_args import check_engine_args
from tiers.plan import GIB, Plan
from tiers.preparing import about
from tiers.replica import Replica
from tiers.spec import PRECISIONS, ReplicaStatus, TierSpec

ASKING = "asking the installed vLLM about its arguments; this takes some seconds, once"
HostOption = Annotated[str | None, typer.Option(help="Address to listen on.")]
PortOption = Annotated[
    int | None,
    typer.Option(help="Port to listen on; 0 takes a free one, which is printed."),
]


def up(
    config: ConfigOption = None,
    model: ModelOption = None,
    calibration: CalibrationOption = None,
    host: HostOption = None,
    port: PortOption = None,
    on: Annotated[
        Literal["here", "ray"],
        typer.Option(help="Where engines run: on this machine, or on a Ray cluster."),
    ] = "here",
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster: `auto`, or HOST:PORT of its head.", metavar="ADDRESS"
        ),
    ] = None,
) -> None:
    """Make missing checkpoints, start the engines, and serve as soon as one tier is ready. Ctrl-C stops everything."""
    started = time.monotonic()
    asked = {
        "server": {"host": host, "port": port},
        "model": {"name": model, "calibration": calibration},
    }
    asked["ray"] = {"address": ray_address}
    load = partial(load_settings, config, asked)
    settings = load()
    logging = Logging(settings.telemetry)
    check_files(settings)
    _check_redis(settings)
    if on == "here" and (asked_for := _tiers_for_gpus(settings)):
        asked["tiers"] = asked_for
        settings = load()
    keys, sock = open_keys(settings), listen(settings)
    needed = any(
        t.replicas_here and t.checkpoint is None for t in tier_settings(settings)
    )
    # nothing is made, and nothing scored, for a cluster
    usable = finished if on == "ray" else servable
    checkpoints = usable(prepare_options(settings)) if needed else ()
    deployment = (make_ray_deployment if on == "ray" else make_deployment)(
        settings, checkpoints
    )
    given = {
        name: engine_args(settings, name)
        for name in settings.tiers.names
        if settings.tiers.of(name).replicas_here
    }
    python = settings.engine.python if deployment.ray is None else settings.ray.python
    check_engine_args(
        python, given, cache_dir() / "engine-args", lambda: err.print(ASKING)
    )
    if not deployment.missing and deployment.ray is None:
        _show_plan(deployment.model, deployment.plan, deployment.specs)
    _run(deployment, sock, keys, started, logging, SettingsLoader(settings, load))


def _tiers_for_gpus(settings: Settings) -> dict[str, Any]:
    try:
        planned = tiers_for_gpus(settings)
    except PlanError as error:
        err.print(plain(f"no plan for these GPUs, so three tiers share them: {error}"))
        planned = None
    if planned is None:
        return {}
    err.print(
        f"planned for these GPUs: {planned[1]}; 'qarr plan' shows why, and tiers.* in the settings override it"
    )
    return dict(planned[0])


def serve(
    config: ConfigOption = None,
    fast: Annotated[
        list[str] | None, typer.Option(help="URL of an AWQ int4 engine.", metavar="URL")
    ] = None,
    balanced: Annotated[
        list[str] | None, typer.Option(help="URL of an FP8 engine.", metavar="URL")
    ] = None,
    precise: Annotated[
        list[str] | None, typer.Option(help="URL of a BF16 engine.", metavar="URL")
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="Engine of another tier, as in int8=http://10.0.0.5:8000.",
            metavar="NAME=URL",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="The model's folder, for exact token counts.", metavar="DIR"),
    ] = None,
    host: HostOption = None,
    port: PortOption = None,
    takeover: Annotated[
        bool,
        typer.Option(
            "--takeover",
            help="Replace the router that listens on the port; no connection is refused.",
        ),
    ] = False,
) -> None:
    """Serve only the router, in front of running engines. Needs no engine environment."""
    started = time.monotonic()
    urls = {"fast": fast or [], "balanced": balanced or [], "precise": precise or []}
    for named in tier or ():
        name, _, url = named.partition("=")
        if not name or not url:
            fail(
                f"--tier {named}: a tier and the address of an engine are needed, as in int8=http://10.0.0.5:8000"
            )
        urls.setdefault(name, []).append(url)
    tiers = {
        name: {"urls": tuple(given) if given else None} for name, given in urls.items()
    }
    load = partial(
        load_settings, config, {"server": {"host": host, "port": port}, "tiers": tiers}
    )
    serve_engines(load, started, tokenizer=tokenizer, takeover=takeover)


def serve_engines(
    load: Callable[[], Settings],
    started: float,
    *,
    tokenizer: Path | None = None,
    takeover: bool = False,
    counts_tokens: bool = True,
) -> None:
    """Serve in front of running engines until a signal ends it.

    Args:
        load: Reads the settings, now and when they are reloaded.
        started: When the command began, by the monotonic clock.
        tokenizer: The model's folder.
        takeover: Replace the router that listens on the port.
        counts_tokens: Whether engines count tokens, so that it is told where the router only estimates them.
    """
    settings = load()
    logging = Logging(settings.telemetry)
    if settings.discovery.file is None and not any(
        t.urls or t.dns for t in tier_settings(settings)
    ):
        fail(
            "no engine is given: name at least one with --fast, --balanced, --precise or --tier, name them in "
            "tiers.<name>.dns or discovery.file, or use 'qarr up'"
        )
    check_files(settings)
    _check_redis(settings)
    deployment = make_deployment(settings, (), start_engines=False, tokenizer=tokenizer)
    predecessor = None
    if takeover:
        predecessor, sock = HandoverClient.ask(
            control_path(settings.server.runtime_dir, settings.server.port)
        )
        keys = open_keys(settings, sock.getsockname()[0])
    else:
        keys, sock = open_keys(settings), listen(settings)
    if counts_tokens and not deployment.counter.exact:
        err.print(
            "no tokenizer folder is given (--tokenizer DIR): prompt tokens are estimated"
        )
    _run(
        deployment,
        sock,
        keys,
        started,
        logging,
        SettingsLoader(settings, load),
        predecessor,
    )


def _check_redis(settings: Settings) -> None:
    """Refuse a Redis that can never serve. One that only does not serve now keeps no router from starting."""
    if url := settings.state.redis_url.get_secret_value():
        warning = asyncio.run(check_redis(url))
        if warning is not None:
            err.print(plain(warning))


def _show_plan(model: str, plan: Plan, specs: Sequence[TierSpec]) -> None:
    err.print(f"model {model} on {plan.device}")
    width = 9 if len(plan.shares) == len({share.tier for share in plan.shares}) else 12
    for share in plan.shares:
        spec = next(s for s in specs if s.name is share.tier)
        # what is to be made, or is
        precision = spec.precision if spec.checkpoint else PRECISIONS[spec.name]
        weights = (
            f"{'~' if spec.checkpoint is None else ' '}{share.weights / GIB:4.2f} GiB"
        )
        if share.weights != share.on_disk:
            weights += f" ({share.on_disk / GIB:.2f} on disk, repacked for this CPU)"
        name = share.tier if spec.replicas == 1 else f"{share.tier}-{share.number}"
        gpus = share.placement.gpus
        where = (
            f", on GPU{'s' * (len(gpus) > 1)} {', '.join(map(str, gpus))}"
            if gpus
            else ""
        )
        err.print(
            f"  {name:{width}}{precision:9} weights {weights}, KV cache {share.kv_cache / GIB:5.2f} GiB "
            f"({share.kv_tokens} tokens), context {spec.max_model_len}{where}"
        )
    if plan.left_out:
        err.print(f"  left out: {' and '.join(plan.left_out)}. {plan.lacking}")


def _run(
    deployment: Deployment,
    sock: Any,
    keys: KeyStore,
    started: float,
    logging: Logging,
    loader: SettingsLoader,
    predecessor: HandoverClient | None = None,
) -> None:
    host, port = sock.getsockname()[:2]
    request_lines = logging.also_to_file(deployment.settings.engine.log_dir, port)
    url = http_url(
        host,
        port,
        "https" if deployment.settings.tls.certificate is not None else "http",
    )

    def say(text: str) -> None:
        line = f"{clock(started)} {text}"
        # in its thread: a stopped terminal must not block the router
        logging.say(lambda: err.print(line))

    def changed(replica: Replica) -> None:
        detail = f": {replica.state.detail}" if replica.state.detail else ""
        # which has a line of the supervisor's for each
        if deployment.settings.telemetry.log_format != "json":
            say(f"{replica.id:12} {replica.state.status.value}{plain(detail)}")

    def serving(fleet: Fleet) -> None:
        ready = " and ".join(
            t.spec.name
            for t in fleet.snapshot().tiers
            if t.status is ReplicaStatus.READY
        )
        say(f"[bold green]serving[/] on {url} with {ready}; {_to_follow(fleet)}")

    def is_up(fleet: Fleet) -> None:
        lacking = {ReplicaStatus.FAILED, ReplicaStatus.WAITING}
        failed = [
            tier.spec.name for tier in fleet.snapshot().tiers if tier.status in lacking
        ]
        left_out = [
            tier.spec.name
            for tier in fleet.snapshot().tiers
            if tier.status is ReplicaStatus.ABSENT
        ]
        how = (
            f"all tiers ready but {' and '.join(failed)}"
            if failed
            else "all tiers ready"
        )
        how += f" ({' and '.join(left_out)} left out)" if left_out else ""
        say(f"[bold green]up[/]: listening on {url}, {how}. Ctrl-C stops.")

    def planned(plan: Plan, specs: Sequence[TierSpec]) -> None:
        logging.say(lambda: _show_plan(deployment.model, plan, specs))

    observer = StartObserver(
        changed, is_up, serving, planned, lambda line: say(plain(line))
    )
    say(f"listening on {url}; requests are served as soon as a tier is ready")
    if request_lines is not None:
        say(
            plain(
                f"each request has a line in {request_lines}: 'qarr logs -f' shows them"
            )
        )
    uvloop.run(
        run(
            deployment,
            sock,
            observer,
            keys=keys,
            loader=loader,
            predecessor=predecessor,
        )
    )
    say("stopped")
    if not logging.stop():
        # everything has ended, but Python would wait for a reader of standard error
        os._exit(0)


def _to_follow(fleet: Fleet) -> str:
    parts = []
    for tier in fleet.preparations.coming:
        left = fleet.preparations.of(tier)
        parts.append(
            f"{tier} in {about(left.remaining_s)}"
            if left and left.remaining_s is not None
            else str(tier)
        )
    return f"to follow: {', '.join(parts)}"
