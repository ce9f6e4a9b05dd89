"""``qarr demo``: ``qarr serve`` in front of engines that are simulated."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from router.cli.client import own_url
from router.cli.common import err
from router.cli.serve import PortOption, serve
from router.deployment.listening import listen
from router.settings import load_settings
from tiers.simulated.demo import SAID, rate_of, simulated_engines


def demo(
    load: Annotated[str, typer.Option(help="Made-up requests a second; 0: none.", metavar="RATE")] = "2/s",
    port: PortOption = None,
) -> None:
    """Try router and page on simulated engines: no model runs. Ctrl-C stops everything."""
    rate = rate_of(load)
    with tempfile.TemporaryDirectory(prefix="qarr-demo-") as folder:
        config, settings = Path(folder, "qarr.toml"), Path(__file__).with_name("demo.toml").read_text("utf-8")
        config.write_text(settings.replace("{folder}", folder), "utf-8")
        with listen(load_settings(config, {"server": {"port": port}})) as sock:
            port = sock.getsockname()[1]
        with simulated_engines(own_url(load_settings(config, {"server": {"port": port}})), rate) as urls:
            err.print(f"{SAID} Load: {rate:g} made-up requests a second.")
            serve(config, [urls["fast"]], [urls["balanced"]], [urls["precise"]], port=port)
