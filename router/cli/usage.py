"""``qarr keys usage``: how far budgets are used, and what keys used, read from where routers keep it."""

from __future__ import annotations

import asyncio
import csv
import sqlite3
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer
from pydantic_core import to_json
from rich.table import Table

from router.accounting.database import Database
from router.accounting.ledgers import ledger_of
from router.accounting.usage import (
    Row,
    Use,
    day_of,
    read_usage,
    render_row,
    summed,
    used_budgets,
)
from router.auth.api_keys import MICRO, KeyFile, KeysError, read_key_file
from router.cli.common import ConfigOption, print_table, printable
from router.redis_link import UNAVAILABLE, outage
from router.settings import Settings, load_settings

COLUMNS = tuple(render_row(Row("", "", "", ""), Use(), {}, priced=True))
FORMULA = ("=", "+", "-", "@")  # how a cell begins that a spreadsheet would compute


def keys_usage(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_csv: Annotated[
        bool,
        typer.Option("--csv", help="Print usage by day, key, team and tier as CSV."),
    ] = False,
    first: Annotated[
        str,
        typer.Option(
            "--from", metavar="DAY", help="First UTC day of usage, as in 2027-01-31."
        ),
    ] = "",
    last: Annotated[
        str, typer.Option("--to", metavar="DAY", help="Last UTC day of usage.")
    ] = "",
    config: ConfigOption = None,
) -> None:
    """Show how far budgets are used, when they renew, and what keys used. Running routers write it every second."""
    settings = load_settings(config)
    try:
        days = [day_of(day) if day else "" for day in (first, last)]
    except ValueError:
        raise KeysError(
            f"--from {first[:40]!r}, --to {last[:40]!r}: days as in 2027-01-31 are allowed"
        ) from None
    file = read_key_file(settings.auth.keys_file)
    try:
        budgets, rows = asyncio.run(_read(settings, file, *days))
    except (*UNAVAILABLE, sqlite3.Error) as error:
        raise KeysError(f"usage cannot be read: {outage(error)}") from error
    names = {key.id: key.name for key in file.keys}
    usage = [
        render_row(row, use, names, priced=settings.budgets.replica_hour is not None)
        for row, use in rows
    ]
    if as_json:
        typer.echo(to_json({"budgets": budgets, "usage": usage}, indent=2))
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {
                **row,
                "name": f"'{row['name']}"
                if row["name"].startswith(FORMULA)
                else row["name"],
            }
            for row in usage
        )
    else:
        _print(budgets, rows, names)


async def _read(
    settings: Settings, file: KeyFile, first: str, last: str
) -> tuple[list[dict[str, Any]], list[tuple[Row, Use]]]:
    database = Database(settings.budgets.file)
    ledger = ledger_of(settings, database)
    try:
        budgets = await used_budgets(ledger, list(file.callers().values()), time.time())
        return budgets, await database.change(partial(read_usage, first, last))
    finally:
        await ledger.aclose()
        await database.aclose()


def _print(
    budgets: list[dict[str, Any]], rows: list[tuple[Row, Use]], names: Mapping[str, str]
) -> None:
    table = Table("key", "team", "budget", "used", "of", "share", "renews", box=None)
    for each in budgets:
        share = f"{each['used'] / each['limit']:.0%}"
        whose = printable(each["name"] or "-"), each["team"] or "-"
        table.add_row(
            *whose,
            each["budget"],
            f"{each['used']:.6g}",
            f"{each['limit']:.6g}",
            share,
            each["renews"],
        )
    if budgets:
        print_table(table)
    else:
        typer.echo(
            "no key has a budget: see 'qarr keys add --help' and 'qarr keys team --help'"
        )
    used = Table(
        "key",
        "team",
        "requests",
        "prompt",
        "cached",
        "output",
        "engine-s",
        "saved",
        box=None,
    )
    for (key, team), use in summed(rows).items():
        tokens = use.prompt_tokens, use.cached_tokens, use.output_tokens
        engine, saved = (
            use.engine_us / MICRO,
            (use.highest_engine_us - use.engine_us) / MICRO,
        )
        numbers = map(str, (use.requests, *tokens))
        used.add_row(
            printable(names.get(key, key)),
            team or "-",
            *numbers,
            f"{engine:.6g}",
            f"{saved:.6g}",
        )
    if rows:
        typer.echo("")
        print_table(used)
