"""``qarr mirror``: what became of the requests that a running router mirrors to a second fleet."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic_core import to_json
from rich.table import Table

from router.cli.client import URL, KeyOption, RouterApiClient, UrlOption
from router.cli.common import print_table

COUNTS = ("same", "differs", "sampled", "failed", "dropped")
MEDIANS = ("common_prefix", "length_ratio", "ttft_ratio", "duration_ratio")


def mirror(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: UrlOption = URL,
    key: KeyOption = "",
) -> None:
    """Show how a second fleet's answers to mirrored requests compare with those served, by class and tier."""
    found = RouterApiClient(url, key).ask("/mirror")
    if as_json:
        typer.echo(to_json(found, indent=2))
        return
    where = f"{found['share']:.4g} of answers to {found['url']}" if found["url"] else "off: set mirror.url"
    typer.echo(f"mirroring: {where}")
    if found["rows"]:
        table = Table("class", "tier", *COUNTS, "same of greedy", "prefix", "length", "TTFT", "time", box=None)
        for row in (*found["rows"], {"class": "all", "tier": "all", **found["all"]}):
            shares = [_shown(row["same_share"], "{:.1%}"), *(_shown(row[name], "{:.3g}") for name in MEDIANS)]
            table.add_row(row["class"], row["tier"], *(str(row[name]) for name in COUNTS), *shares)
        print_table(table)
        total = found["all"]
        typer.echo(f"{total['finish_reason_differs']} ended otherwise, {total['tier_differs']} on another tier")


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
