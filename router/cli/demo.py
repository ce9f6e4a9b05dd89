"""``qarr demo``: ``qarr serve`` in front of engines that are simulated."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
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

# the speeds are computed as the engines compute theirs
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
    started = time.monotonic()
    rate = rate_of(load)
    left_out = _leave_out_variables()
    with tempfile.TemporaryDirectory(prefix="qarr-demo-") as folder:
        config = _write_settings(Path(folder), rate)
        with listen(load_settings(config, {"server": {"port": port}})) as sock:
            port = sock.getsockname()[1]
        with simulated_engines(
            own_url(load_settings(config, {"server": {"port": port}})), rate
        ) as urls:
            tiers = {tier: {"urls": (url,)} for tier, url in urls.items()}
            _keep_speeds(load_settings(config, {"tiers": tiers}))
            err.print(
                f"[bold yellow]{notice(rate)}[/]\n{WHY_THIS_PLAN} {PLAN}",
                highlight=False,
            )
            if left_out:
                err.print(
                    f"The demo has its own settings; left out: {', '.join(left_out)}"
                )
            load_again = partial(
                load_settings, config, {"server": {"port": port}, "tiers": tiers}
            )
            serve_engines(load_again, started, counts_tokens=False)


def _leave_out_variables() -> list[str]:
    """Keep to the demo's own settings: of the environment only where it listens and logs counts. Return what does not.

    Keys, a certificate, Redis or an overflow of a real router have no place before simulated engines.
    """
    left_out = [
        name for name in os.environ
        if name.startswith(PREFIX) and name not in PLAIN_VARIABLES and not name.startswith(KEPT_VARIABLES)
    ]  # fmt: skip
    for name in left_out:
        del os.environ[name]
    return sorted(left_out)


def _write_settings(folder: Path, rate: float) -> Path:
    """Write the settings of the demo, with what is told on the page."""
    text = Path(__file__).with_name("demo.toml").read_text("utf-8")
    replaced = {"folder": str(folder), "model": MODEL, "notice": notice(rate)}
    replaced |= {tier: simulated_precision(tier) for tier in PRECISIONS}
    for name, value in replaced.items():
        text = text.replace(f"{{{name}}}", value)
    config = folder / "qarr.toml"
    config.write_text(text, "utf-8")
    return config


def _keep_speeds(settings: Settings) -> None:
    """Write the speed profile of the simulated engines, so that the first decision knows what each tier takes."""
    identities: Mapping[TierName, str | None] = {
        tier: settings.tiers.of(tier).urls[0] for tier in PRECISIONS
    }
    fits = []
    for tier, runs_on in demo_hardware().items():
        speed = asdict(roofline_speed(runs_on))
        figures = {
            name: value
            for name, value in speed.items()
            if name not in {"profiled", "learned"}
        }
        fits.append(
            Fit(tier=tier, ttft_error=EXACT, tpot_error=EXACT, samples=0, **figures)
        )
    profile = LatencyProfile(
        created=datetime.now(UTC),
        model=MODEL,
        machine=speed_machine(settings),
        checkpoints=dict(identities),
        fits=tuple(fits),
        samples=(),
    )
    settings.policy.profiles.mkdir(parents=True, exist_ok=True)
    keep_latency(settings.policy.profiles, profile)
