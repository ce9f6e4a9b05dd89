"""``qarr up`` and ``qarr serve``."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
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
from router.deployment.first_start import Steps
from router.deployment.layout import (
    Deployment,
    engine_args,
    make_deployment,
    prepare_options,
    scheme_choices,
)
from router.deployment.listening import listen, open_keys
from router.deployment.on_ray import make_ray_deployment
from router.deployment.published import settle_tiers
from router.deployment.reloading import SettingsLoader
from router.deployment.run import StartObserver, check_files, run
from router.redis_link import check_redis
from router.section import cache_dir
from router.server.handover import HandoverClient, control_path
from router.settings import Settings, load_settings
from router.telemetry.logs import Logging
from tiers.checkpoints.checkpoint import Checkpoint
from tiers.checkpoints.prepare import finished, servable
from tiers.errors import PlanError
from tiers.fleet import Fleet
from tiers.lifecycle.engine_args import check_engine_args
from tiers.plan import GIB, EngineShare, MemoryPlan
from tiers.preparing import about
from tiers.replica import Replica
from tiers.spec import PRECISIONS, ReplicaStatus, TierName, TierSpec

ASKING = "asking the installed vLLM about its arguments; this takes some seconds, once"
HostOption = Annotated[str | None, typer.Option(help="Address to listen on.")]
PortOption = Annotated[
    int | None,
    typer.Option(help="Port to listen on; 0 takes a free one, which is printed."),
]
OnOption = Annotated[
    Literal["here", "ray"],
    typer.Option(help="Where engines run: on this machine, or on a Ray cluster."),
]
RayAddressOption = Annotated[
    str | None,
    typer.Option(
        help="The Ray cluster: `auto`, or HOST:PORT of its head.", metavar="ADDRESS"
    ),
]
FastOption = Annotated[
    list[str] | None,
    typer.Option(
        help="URL of an engine of the lowest precision, such as AWQ int4.",
        metavar="URL",
    ),
]
BalancedOption = Annotated[
    list[str] | None,
    typer.Option(
        help="URL of an engine of a precision between, such as FP8.", metavar="URL"
    ),
]
PreciseOption = Annotated[
    list[str] | None,
    typer.Option(
        help="URL of an engine of the highest precision, such as BF16.", metavar="URL"
    ),
]
FastCheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--fast",
        help="Published checkpoint that fast serves as it is: Hugging Face id, or folder.",
        metavar="MODEL",
    ),
]
BalancedCheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--balanced", help="Published checkpoint for balanced.", metavar="MODEL"
    ),
]
PreciseCheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--precise", help="Published checkpoint for precise.", metavar="MODEL"
    ),
]
AllowDifferentOption = Annotated[
    bool | None,
    typer.Option(
        "--allow-different",
        help="Serve checkpoints together that differ in architecture, vocabulary, tokenizer or chat template.",
    ),
]
NamedTierOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Engine of another tier, as in int8=http://10.0.0.5:8000.",
        metavar="NAME=URL",
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(help="The model's folder, for exact token counts.", metavar="DIR"),
]
TakeoverOption = Annotated[
    bool,
    typer.Option(
        "--takeover",
        help="Replace the router that listens on the port; no connection is refused.",
    ),
]


def up(
    config: ConfigOption = None,
    model: ModelOption = None,
    fast: FastCheckpointOption = None,
    balanced: BalancedCheckpointOption = None,
    precise: PreciseCheckpointOption = None,
    allow_different: AllowDifferentOption = None,
    calibration: CalibrationOption = None,
    host: HostOption = None,
    port: PortOption = None,
    on: OnOption = "here",
    ray_address: RayAddressOption = None,
) -> None:
    """Make missing checkpoints, start the engines, and serve as soon as one tier is ready. Ctrl-C stops everything."""
    started_at = time.monotonic()
    tiers: dict[str, dict[str, Any]] = {
        "fast": {"checkpoint": fast},
        "balanced": {"checkpoint": balanced},
        "precise": {"checkpoint": precise},
    }
    overrides: dict[str, Any] = {
        "server": {"host": host, "port": port},
        "model": {
            "name": model,
            "calibration": calibration,
            "allow_different": allow_different,
        },
        "ray": {"address": ray_address},
        "tiers": tiers,
    }
    load = partial(load_settings, config, overrides)
    settings = load()
    logging = Logging(settings.telemetry)
    check_files(settings)
    _check_redis(settings)
    keys = open_keys(settings)
    # A port that is taken is told before anything is downloaded.
    listen(settings).close()
    _add_settings(tiers, _settled_tiers(settings, started_at))
    settings = load()
    if on == "here":
        _add_settings(tiers, _tiers_for_gpus(settings))
        settings = load()
    listening_socket = listen(settings)
    deployment = _lay_out(settings, on_ray=on == "ray")
    _check_engine_args(settings, deployment)
    _say_schemes(settings)
    if not deployment.missing and deployment.ray is None:
        _show_memory_plan(deployment.model, deployment.plan, deployment.specs)
    _run(
        deployment,
        listening_socket,
        keys,
        started_at=started_at,
        logging=logging,
        loader=SettingsLoader(settings, load),
    )


def _settled_tiers(settings: Settings, started_at: float) -> Mapping[str, Any]:
    """Return the tiers' settings that follow from published checkpoints, which are there afterwards."""
    steps = Steps(lambda line: err.print(f"{clock(started_at)} {plain(line)}"))
    settled = settle_tiers(settings, steps)
    for note in settled.notes:
        err.print(plain(note))
    return settled.overrides


def _add_settings(
    tiers: dict[str, dict[str, Any]], more: Mapping[str, dict[str, Any]]
) -> None:
    """Add settings of tiers to those of the command line, which every reload of the settings keeps."""
    for name, values in more.items():
        tiers.setdefault(name, {}).update(values)


def _lay_out(settings: Settings, *, on_ray: bool) -> Deployment:
    """Return the deployment of the engines that the settings start."""
    needs_checkpoints = any(
        tier.replicas_here and tier.checkpoint is None
        for tier in tier_settings(settings)
    )
    checkpoints: tuple[Checkpoint, ...] = ()
    if needs_checkpoints:
        # Checkpoints are neither made nor scored for a cluster.
        find_checkpoints = finished if on_ray else servable
        checkpoints = find_checkpoints(prepare_options(settings))
    if on_ray:
        return make_ray_deployment(settings, checkpoints)
    return make_deployment(settings, checkpoints)


def _say_schemes(settings: Settings) -> None:
    """Say in one line what stands behind the tiers here, and why."""
    choices = scheme_choices(settings).values()
    if choices:
        err.print(plain("; ".join(map(str, choices))))


def _check_engine_args(settings: Settings, deployment: Deployment) -> None:
    """Check the arguments of the engines that start here against what the installed vLLM takes."""
    arguments = {
        name: engine_args(settings, name)
        for name in settings.tiers.names
        if settings.tiers.of(name).replicas_here
    }
    python = settings.engine.python if deployment.ray is None else settings.ray.python
    check_engine_args(
        python,
        arguments,
        cache_dir() / "engine-args",
        asking=lambda: err.print(ASKING),
    )


def _tiers_for_gpus(settings: Settings) -> dict[str, Any]:
    """Return the tiers that are planned for this machine's GPUs; empty: nothing is planned."""
    try:
        planned = tiers_for_gpus(settings)
    except PlanError as error:
        err.print(plain(f"no plan for these GPUs, so three tiers share them: {error}"))
        return {}
    if planned is None:
        return {}
    tiers, fleet_words = planned
    err.print(
        f"planned for these GPUs: {fleet_words}; 'qarr plan' shows why, and tiers.* in the settings override it"
    )
    return dict(tiers)


def serve(
    config: ConfigOption = None,
    fast: FastOption = None,
    balanced: BalancedOption = None,
    precise: PreciseOption = None,
    tier: NamedTierOption = None,
    tokenizer: TokenizerOption = None,
    host: HostOption = None,
    port: PortOption = None,
    takeover: TakeoverOption = False,
) -> None:
    """Serve only the router, in front of running engines. Needs no engine environment."""
    started_at = time.monotonic()
    urls_by_tier = {
        "fast": fast or [],
        "balanced": balanced or [],
        "precise": precise or [],
    }
    for tier_and_url in tier or ():
        name, _, url = tier_and_url.partition("=")
        if not name or not url:
            fail(
                f"--tier {tier_and_url}: a tier and the address of an engine are needed, as in int8=http://10.0.0.5:8000"
            )
        urls_by_tier.setdefault(name, []).append(url)
    tiers: dict[str, Any] = {}
    for name, urls in urls_by_tier.items():
        # None leaves the settings' own addresses.
        tiers[name] = {"urls": tuple(urls) or None}
    overrides = {"server": {"host": host, "port": port}, "tiers": tiers}
    load = partial(load_settings, config, overrides)
    serve_engines(load, started_at, tokenizer=tokenizer, takeover=takeover)


def serve_engines(
    load: Callable[[], Settings],
    started_at: float,
    *,
    tokenizer: Path | None = None,
    takeover: bool = False,
    counts_tokens: bool = True,
) -> None:
    """Serve in front of running engines until a signal ends it.

    Args:
        load: Reads the settings, now and when they are reloaded.
        started_at: When the command began, by the monotonic clock.
        tokenizer: The model's folder.
        takeover: Replace the router that listens on the port.
        counts_tokens: Whether engines count tokens. If they do, it is said that the router only estimates them.
    """
    settings = load()
    logging = Logging(settings.telemetry)
    if not _names_engines(settings):
        fail(
            "no engine is given: name at least one with --fast, --balanced, --precise or --tier, name them in "
            "tiers.<name>.dns or discovery.file, or use 'qarr up'"
        )
    check_files(settings)
    _check_redis(settings)
    deployment = make_deployment(settings, (), start_engines=False, tokenizer=tokenizer)
    predecessor: HandoverClient | None = None
    if takeover:
        predecessor, listening_socket = HandoverClient.ask(
            control_path(settings.server.runtime_dir, settings.server.port)
        )
        keys = open_keys(settings, listening_socket.getsockname()[0])
    else:
        keys = open_keys(settings)
        listening_socket = listen(settings)
    if counts_tokens and not deployment.counter.exact:
        err.print(
            "no tokenizer folder is given (--tokenizer DIR): prompt tokens are estimated"
        )
    _run(
        deployment,
        listening_socket,
        keys,
        started_at=started_at,
        logging=logging,
        loader=SettingsLoader(settings, load),
        predecessor=predecessor,
    )


def _names_engines(settings: Settings) -> bool:
    """Tell whether the settings say where an engine is, or where engines are found."""
    if settings.discovery.file is not None:
        return True
    return any(tier.urls or tier.dns for tier in tier_settings(settings))


def _check_redis(settings: Settings) -> None:
    """Refuse a Redis that can never serve. A Redis that only does not serve now keeps no router from starting."""
    url = settings.state.redis_url.get_secret_value()
    if not url:
        return
    warning = asyncio.run(check_redis(url))
    if warning is not None:
        err.print(plain(warning))


def _show_memory_plan(model: str, plan: MemoryPlan, specs: Sequence[TierSpec]) -> None:
    """Print how the memory of this machine is divided between engines."""
    err.print(f"model {model} on {plan.device}")
    spec_by_tier = {spec.name: spec for spec in specs}
    has_replicas = len(plan.shares) > len({share.tier for share in plan.shares})
    name_width = 12 if has_replicas else 9
    for share in plan.shares:
        line = _share_line(share, spec_by_tier[share.tier], name_width)
        err.print(f"  {line}")
    if plan.left_out:
        err.print(f"  left out: {' and '.join(plan.left_out)}. {plan.lacking}")


def _share_line(share: EngineShare, spec: TierSpec, name_width: int) -> str:
    """Return for people what memory one engine has."""
    is_made = spec.checkpoint is not None
    precision = spec.precision
    if not is_made:
        precision = spec.expected_precision or PRECISIONS[spec.name]
    estimate_mark = " " if is_made else "~"
    weights = f"{estimate_mark}{share.weights / GIB:4.2f} GiB"
    if share.weights != share.on_disk:
        weights += f" ({share.on_disk / GIB:.2f} on disk, repacked for this CPU)"
    name = str(share.tier)
    if spec.replicas != 1:
        name = f"{share.tier}-{share.number}"
    return (
        f"{name:{name_width}}{precision:9} weights {weights}, KV cache {share.kv_cache / GIB:5.2f} GiB "
        f"({share.kv_tokens} tokens), context {spec.max_model_len}{_gpu_words(share.placement.gpus)}"
    )


def _gpu_words(gpus: Sequence[int]) -> str:
    if not gpus:
        return ""
    noun = "GPU" if len(gpus) == 1 else "GPUs"
    return f", on {noun} {', '.join(map(str, gpus))}"


class StartLines:
    """Prints on standard error what happens while engines start."""

    def __init__(
        self, deployment: Deployment, url: str, *, started_at: float, logging: Logging
    ) -> None:
        self._deployment = deployment
        self._url = url
        self._started_at = started_at
        self._logging = logging

    def observer(self) -> StartObserver:
        return StartObserver(
            changed=self._replica_changed,
            up=self._up,
            serving=self._serving,
            planned=self._planned,
            step=lambda line: self.say(plain(line)),
        )

    def say(self, text: str) -> None:
        """Print a line with markup, in the logging thread: a stopped terminal must not block the router."""
        line = f"{clock(self._started_at)} {text}"
        self._logging.say(lambda: err.print(line))

    def _replica_changed(self, replica: Replica) -> None:
        if self._deployment.settings.telemetry.log_format == "json":
            # The supervisor's own log has a line for each change.
            return
        detail = ""
        if replica.state.detail:
            detail = plain(f": {replica.state.detail}")
        self.say(f"{replica.id:12} {replica.state.status.value}{detail}")

    def _serving(self, fleet: Fleet) -> None:
        ready = " and ".join(_tiers_with(fleet, {ReplicaStatus.READY}))
        self.say(
            f"[bold green]serving[/] on {self._url} with {ready}; {_tiers_to_follow(fleet)}"
        )

    def _up(self, fleet: Fleet) -> None:
        failed = _tiers_with(fleet, {ReplicaStatus.FAILED, ReplicaStatus.WAITING})
        left_out = _tiers_with(fleet, {ReplicaStatus.ABSENT})
        ready = "all tiers ready"
        if failed:
            ready += f" but {' and '.join(failed)}"
        if left_out:
            ready += f" ({' and '.join(left_out)} left out)"
        self.say(f"[bold green]up[/]: listening on {self._url}, {ready}. Ctrl-C stops.")

    def _planned(self, plan: MemoryPlan, specs: Sequence[TierSpec]) -> None:
        model = self._deployment.model
        self._logging.say(lambda: _show_memory_plan(model, plan, specs))


def _run(
    deployment: Deployment,
    listening_socket: socket.socket,
    keys: KeyStore,
    *,
    started_at: float,
    logging: Logging,
    loader: SettingsLoader,
    predecessor: HandoverClient | None = None,
) -> None:
    """Run the router until a signal ends it, and say what happens meanwhile."""
    host, port = listening_socket.getsockname()[:2]
    settings = deployment.settings
    request_log = logging.also_to_file(settings.engine.log_dir, port)
    scheme = "http" if settings.tls.certificate is None else "https"
    url = http_url(host, port, scheme)
    lines = StartLines(deployment, url, started_at=started_at, logging=logging)
    lines.say(f"listening on {url}; requests are served as soon as a tier is ready")
    if request_log is not None:
        lines.say(
            plain(
                f"each request has a line in {request_log}: 'qarr logs -f' shows them"
            )
        )
    uvloop.run(
        run(
            deployment,
            listening_socket,
            lines.observer(),
            keys=keys,
            loader=loader,
            predecessor=predecessor,
        )
    )
    lines.say("stopped")
    if not logging.stop():
        # Everything has ended, but Python would wait for a reader of standard error.
        os._exit(0)


def _tiers_with(fleet: Fleet, statuses: set[ReplicaStatus]) -> list[TierName]:
    """Return the tiers that have one of some states."""
    return [
        tier.spec.name for tier in fleet.snapshot().tiers if tier.status in statuses
    ]


def _tiers_to_follow(fleet: Fleet) -> str:
    """Return for people which tiers will be ready later, and when where this is known."""
    tiers: list[str] = []
    for tier in fleet.preparations.coming:
        preparing = fleet.preparations.of(tier)
        if preparing and preparing.remaining_s is not None:
            tiers.append(f"{tier} in {about(preparing.remaining_s)}")
        else:
            tiers.append(str(tier))
    return f"to follow: {', '.join(tiers)}"
