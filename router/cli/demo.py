"""``qarr demo``: ``qarr serve`` in front of engines that are simulated."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from router.cli.client import own_url
from router.cli.common import err
from router.cli.serve import PortOption, serve_engines
from router.deployment.layout import speed_machine
from router.deployment.listening import listen
from router.policy.profiles import Fit, FitError, LatencyProfile
from router.profiling.profile_files import keep_latency
from router.settings import PLAIN_VARIABLES, PREFIX, Settings, load_settings
from tiers.simulated.demo import (
    LOAD,
    MODEL,
    PLAN,
    demo_hardware,
    notice,
    rate_of,
    roofline_speed,
    simulated_engines,
    simulated_precision,
)
from tiers.spec import PRECISIONS, TierName
from tiers.speed import SpeedModel

# The speeds of the profile are computed as the engines compute theirs, so nothing is off.
EXACT = FitError(median=0, p95=0)
KEPT_VARIABLES = (
    "QARR_SERVER__HOST",
    "QARR_SERVER__PORT",
    "QARR_TELEMETRY__LOG",
    "QARR_ENGINE__LOG_DIR",
)
WHY_THIS_PLAN = "Why these precisions, these GPUs and this load:"


def demo(
    load: Annotated[
        str, typer.Option(help="Made-up requests a second; 0: none.", metavar="RATE")
    ] = f"{LOAD:g}/s",
    port: PortOption = None,
) -> None:
    """Try router and page on simulated engines: no model runs. Ctrl-C stops everything."""
    started_at = time.monotonic()
    request_rate = rate_of(load)
    left_out = _leave_out_variables()
    with tempfile.TemporaryDirectory(prefix="qarr-demo-") as settings_folder:
        config_path = _write_settings(Path(settings_folder), request_rate)
        server_overrides = {"port": _free_port(config_path, port)}
        router_url = own_url(load_settings(config_path, {"server": server_overrides}))
        with simulated_engines(router_url, request_rate) as engine_urls:
            tiers = {tier: {"urls": (url,)} for tier, url in engine_urls.items()}
            _keep_speeds(load_settings(config_path, {"tiers": tiers}))
            err.print(
                f"[bold yellow]{notice(request_rate)}[/]\n{WHY_THIS_PLAN} {PLAN}",
                highlight=False,
            )
            if left_out:
                err.print(
                    f"The demo has its own settings; left out: {', '.join(left_out)}"
                )
            overrides = {"server": server_overrides, "tiers": tiers}
            load_again = partial(load_settings, config_path, overrides)
            serve_engines(load_again, started_at, counts_tokens=False)


def _free_port(config_path: Path, port: int | None) -> int:
    """Return the port that the router will have: the one that is given, or a free one instead of 0."""
    with listen(
        load_settings(config_path, {"server": {"port": port}})
    ) as listening_socket:
        return int(listening_socket.getsockname()[1])


def _leave_out_variables() -> list[str]:
    """Remove variables that set more than where the demo listens and logs. Return their names.

    Keys, a certificate, Redis or an overflow of a real router have no place before simulated engines.
    """
    left_out = sorted(name for name in os.environ if _is_left_out(name))
    for name in left_out:
        del os.environ[name]
    return left_out


def _is_left_out(variable: str) -> bool:
    if not variable.startswith(PREFIX) or variable in PLAIN_VARIABLES:
        return False
    return not variable.startswith(KEPT_VARIABLES)


def _write_settings(settings_folder: Path, rate: float) -> Path:
    """Write the settings of the demo, with what the page says of it."""
    settings_text = Path(__file__).with_name("demo.toml").read_text("utf-8")
    values = {"folder": str(settings_folder), "model": MODEL, "notice": notice(rate)}
    for tier in PRECISIONS:
        values[tier] = simulated_precision(tier)
    for name, value in values.items():
        settings_text = settings_text.replace(f"{{{name}}}", value)
    config_path = settings_folder / "qarr.toml"
    config_path.write_text(settings_text, "utf-8")
    return config_path


def _keep_speeds(settings: Settings) -> None:
    """Write the speed profile of the simulated engines, so that the first decision knows what each tier takes."""
    checkpoints: dict[TierName, str | None] = {}
    for tier in PRECISIONS:
        checkpoints[tier] = settings.tiers.of(tier).urls[0]
    fits = tuple(
        _exact_fit(tier, roofline_speed(hardware))
        for tier, hardware in demo_hardware().items()
    )
    profile = LatencyProfile(
        created=datetime.now(UTC),
        model=MODEL,
        machine=speed_machine(settings),
        checkpoints=checkpoints,
        fits=fits,
        samples=(),
    )
    settings.policy.profiles.mkdir(parents=True, exist_ok=True)
    keep_latency(settings.policy.profiles, profile)


def _exact_fit(tier: TierName, speed: SpeedModel) -> Fit:
    """Return a speed as if it had been measured without an error."""
    figures = asdict(speed)
    del figures["profiled"]
    del figures["learned"]
    return Fit(tier=tier, ttft_error=EXACT, tpot_error=EXACT, samples=0, **figures)
