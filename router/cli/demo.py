"""``qarr demo``: the router in front of engines that are simulated."""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from router.cli.common import err, fail
from router.cli.serve import HostOption, PortOption, router_url, run_router
from router.deployment.layout import make_deployment
from router.deployment.listening import listen, open_keys
from router.deployment.reloading import Asked
from router.settings import load_settings
from router.telemetry.logs import Logging
from tiers.simulated.demo import simulated_engines
from tiers.spec import PRECISIONS, TierName

MODEL = "simulated engines, no model"
MOST_LOAD = 100
SAID = """[bold yellow]simulated[/]: no model runs. Three engines only take the time that Llama 3.1 8B would on a GPU a
quarter as fast as an H100, and answer with filler text. What precisions lose is what is published."""


def demo(
    load: Annotated[str, typer.Option(help="Made-up requests a second; 0: none.", metavar="RATE")] = "2/s",
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Try the router and its page in front of simulated engines: no model, no GPU, no vLLM. Reads no settings file."""
    started, rate = time.monotonic(), _rate(load)
    os.environ.pop("QARR_CONFIG", None)
    with tempfile.TemporaryDirectory(prefix="qarr-demo-") as name:
        folder = Path(name)
        asked = {
            "server": {"host": host, "port": port, "drain_s": 3},
            "model": {"name": MODEL},
            "engine": {"warmup_expected": "simulated"},
            "policy": {"profiles": folder / "profiles"},
            "profile": {"auto": False},
            "auth": {"keys_file": folder / "keys.json"},
            "budgets": {"file": folder / "usage.sqlite"},
        }
        settings = load_settings(None, asked)
        keys, sock, logging = open_keys(settings), listen(settings), Logging(settings.telemetry)
        with simulated_engines(router_url(settings, sock), rate) as urls:
            tiers = {
                n: {"urls": (url,), "precision": f"simulated-{PRECISIONS[TierName(n)]}"} for n, url in urls.items()
            }
            reload = partial(load_settings, None, {**asked, "tiers": tiers})
            settings = reload()
            err.print(SAID.replace("\n", " "))
            err.print(f"load: {rate:g} made-up requests a second" if rate else "load: none")
            deployment = make_deployment(settings, (), start_engines=False)
            run_router(deployment, sock, keys, started, logging, Asked(settings, reload))


def _rate(text: str) -> float:
    try:
        rate = float(text.removesuffix("/s"))
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= MOST_LOAD:
        fail(f"--load {text}: a number of requests a second from 0 to {MOST_LOAD} is allowed, as in 5/s")
    return rate
