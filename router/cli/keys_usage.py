"""``qarr keys usage``: how far budgets are used, and what keys used, read from where routers keep it."""

from __future__ import annotations

import asyncio
import csv
import sqlite3
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any

import typer
from pydantic_core import to_json
from rich.table import Table

from router.accounting.database import Database
from router.accounting.ledgers import ledger_of
from router.accounting.usage_log import (
    Row,
    Use,
    day_of,
    read_usage,
    render_row,
    summed,
    used_budgets,
)
from router.auth.api_keys import MICRO, KeyFile, KeysError, read_key_file
from router.cli.common import ConfigOption, JsonOption, print_table, printable
from router.redis_link import UNAVAILABLE, outage
from router.settings import Settings, load_settings

CSV_COLUMNS = tuple(render_row(Row("", "", "", tier=""), Use(), {}, priced=True))
USAGE_COLUMNS = (
    "key",
    "team",
    "requests",
    "prompt",
    "cached",
    "output",
    "engine-s",
    "saved",
)
# Beginnings of a cell that a spreadsheet would compute.
FORMULA_MARKS = ("=", "+", "-", "@")


CsvOption = Annotated[
    bool,
    typer.Option("--csv", help="Print usage by day, key, team and tier as CSV."),
]
FirstDayOption = Annotated[
    str,
    typer.Option(
        "--from", metavar="DAY", help="First UTC day of usage, as in 2027-01-31."
    ),
]
LastDayOption = Annotated[
    str, typer.Option("--to", metavar="DAY", help="Last UTC day of usage.")
]


def keys_usage(
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    first: FirstDayOption = "",
    last: LastDayOption = "",
    config: ConfigOption = None,
) -> None:
    """Show how far budgets are used, when they renew, and what keys used. Running routers write it every second."""
    settings = load_settings(config)
    try:
        first_day = day_of(first) if first else ""
        last_day = day_of(last) if last else ""
    except ValueError:
        raise KeysError(
            f"--from {first[:40]!r}, --to {last[:40]!r}: days as in 2027-01-31 are allowed"
        ) from None
    key_file = read_key_file(settings.auth.keys_file)
    try:
        budgets, rows = asyncio.run(
            _read(settings, key_file, first_day=first_day, last_day=last_day)
        )
    except (*UNAVAILABLE, sqlite3.Error) as error:
        raise KeysError(f"usage cannot be read: {outage(error)}") from error
    key_names = {key.id: key.name for key in key_file.keys}
    has_price = settings.budgets.replica_hour is not None
    usage_rows = [
        render_row(row, use, key_names, priced=has_price) for row, use in rows
    ]
    if as_json:
        typer.echo(to_json({"budgets": budgets, "usage": usage_rows}, indent=2))
    elif as_csv:
        _write_csv(usage_rows)
    else:
        _print_budgets(budgets)
        if rows:
            typer.echo("")
            _print_usage(rows, key_names)


def _write_csv(usage: Iterable[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in usage:
        name = row["name"]
        if name.startswith(FORMULA_MARKS):
            name = f"'{name}"
        writer.writerow({**row, "name": name})


async def _read(
    settings: Settings, key_file: KeyFile, *, first_day: str, last_day: str
) -> tuple[list[dict[str, Any]], list[tuple[Row, Use]]]:
    """Return how far budgets are used, and what keys used from a day to another; an empty day bounds nothing."""
    database = Database(settings.budgets.file)
    ledger = ledger_of(settings, database)
    callers = list(key_file.callers().values())
    try:
        budgets = await used_budgets(ledger, callers, time.time())
        rows = await database.change(partial(read_usage, first_day, last_day))
    finally:
        await ledger.aclose()
        await database.aclose()
    return budgets, rows


def _print_budgets(budgets: list[dict[str, Any]]) -> None:
    if not budgets:
        typer.echo(
            "no key has a budget: see 'qarr keys add --help' and 'qarr keys team --help'"
        )
        return
    table = Table("key", "team", "budget", "used", "of", "share", "renews", box=None)
    for budget in budgets:
        table.add_row(
            printable(budget["name"] or "-"),
            budget["team"] or "-",
            budget["budget"],
            f"{budget['used']:.6g}",
            f"{budget['limit']:.6g}",
            f"{budget['used'] / budget['limit']:.0%}",
            budget["renews"],
        )
    print_table(table)


def _print_usage(rows: list[tuple[Row, Use]], names: Mapping[str, str]) -> None:
    table = Table(*USAGE_COLUMNS, box=None)
    for (key, team), use in summed(rows).items():
        engine_s = use.engine_us / MICRO
        saved_s = (use.highest_engine_us - use.engine_us) / MICRO
        table.add_row(
            printable(names.get(key, key)),
            team or "-",
            str(use.requests),
            str(use.prompt_tokens),
            str(use.cached_tokens),
            str(use.output_tokens),
            f"{engine_s:.6g}",
            f"{saved_s:.6g}",
        )
    print_table(table)
