"""``qarr doctor``: checks everything that a start needs, and what runs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  typer reads it
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from router.cli.doctor.checks import examine
from router.cli.doctor.findings import Health

if TYPE_CHECKING:
    from router.cli.doctor.findings import Finding

SHADES = {Health.OK: "green", Health.WARNING: "yellow", Health.PROBLEM: "bold red"}
NAME_WIDTH = 22
PIPED_WIDTH = 200


def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML settings file.", envvar="QARR_CONFIG", metavar="FILE")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running router; by default the one of the settings.", show_default=False)
    ] = None,
    key: Annotated[str, typer.Option(help="A key for the router.", envvar="QARR_KEY")] = "",
    deep: Annotated[bool, typer.Option("--deep", help="Read every checkpoint's weights as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check machine, settings, files, ports and what runs, and say what to do. Exits with 1 if there is a problem."""
    findings = []
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    group = ""
    for finding in examine(config, deep=deep, url=url, key=key):
        findings.append(finding)
        if not as_json:
            if finding.group != group:
                console.print(Text(finding.group.capitalize(), style="bold"))
                group = finding.group
            _print(console, finding)
    problems = sum(f.health is Health.PROBLEM for f in findings)
    warnings = sum(f.health is Health.WARNING for f in findings)
    if as_json:
        typer.echo(
            json.dumps({"problems": problems, "warnings": warnings, "checks": [asdict(f) for f in findings]}, indent=2)
        )
    else:
        counted = f"{len(findings)} checks: {problems} problems, {warnings} warnings"
        console.print(
            Text(counted, style=SHADES[Health.PROBLEM if problems else Health.WARNING if warnings else Health.OK])
        )
    if problems:
        raise typer.Exit(1)


def _print(console: Console, finding: Finding) -> None:
    mark = Text(f"  {finding.health.value:8}", style=SHADES[finding.health])
    body = Text(finding.found)
    if finding.then:
        body.append(f"\n-> {finding.then}", style="bold")
    left = mark.append(f"{finding.check:{NAME_WIDTH}} ", style="default")
    lines = body.wrap(console, max(console.width - len(left), 30))
    console.print(left + lines[0])
    for line in lines[1:]:
        console.print(Padding(line, (0, 0, 0, len(left)), expand=False))
