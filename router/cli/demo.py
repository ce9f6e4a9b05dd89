"""``qarr demo``: ``qarr serve`` in front of engines that are simulated."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from router.cli.client import own_url
from router.cli.common import err, fail
from router.cli.serve import PortOption, serve
from router.deployment.listening import listen
from router.settings import load_settings
from tiers.simulated.demo import SAID, SETTINGS, simulated_engines

MOST_LOAD = 100


def demo(
    load: Annotated[str, typer.Option(help="Made-up requests a second; 0: none.", metavar="RATE")] = "2/s",
    port: PortOption = None,
) -> None:
    """Try the router and its page on simulated engines: no model, GPU or vLLM is needed. Ctrl-C stops everything."""
    try:
        rate = float(load.removesuffix("/s"))
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= MOST_LOAD:
        fail(f"--load {load}: 0 to {MOST_LOAD} requests a second are allowed, as in 5/s")
    with tempfile.TemporaryDirectory(prefix="qarr-demo-") as folder:
        config = Path(folder, "qarr.toml")
        config.write_text(SETTINGS.format(folder=folder), "utf-8")
        with listen(load_settings(config, {"server": {"port": port}})) as sock:
            port = sock.getsockname()[1]
        with simulated_engines(own_url(load_settings(config, {"server": {"port": port}})), rate) as urls:
            err.print(f"{SAID} Load: {rate:g} made-up requests a second.")
            serve(config, [urls["fast"]], [urls["balanced"]], [urls["precise"]], port=port)
