"""``qarr health``: whether the router of the settings answers, for the health checks of containers."""

from __future__ import annotations

from typing import Annotated

import httpx
import typer

from router.cli.client import UrlOption, own_url, unverified
from router.cli.common import ConfigOption
from router.settings import load_settings

TIMEOUT_S = 3.0


def health(
    ready: Annotated[
        bool, typer.Option("--ready", help="Also ask whether a tier serves.")
    ] = False,
    url: UrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Exit with 0 if the router is alive, else with 1. It asks directly, through no proxy, and needs no key."""
    settings = load_settings(config)
    router_url = url.rstrip("/") or own_url(settings)
    path = "/readyz" if ready else "/healthz"
    try:
        answer = httpx.get(
            router_url + path,
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=unverified(settings),
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        text = f"no answer ({type(error).__name__}: {error})"
        is_good = False
    else:
        text = answer.text
        is_good = answer.is_success
    typer.echo(f"{router_url}: {text}", err=not is_good)
    raise typer.Exit(not is_good)
