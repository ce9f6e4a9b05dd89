"""``qarr doctor``: checks everything that a start needs, and what runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from router.cli.common import ConfigOption, output
from router.cli.doctor.checks import examine
from router.cli.doctor.findings import Health

if TYPE_CHECKING:
    from rich.console import Console

    from router.cli.doctor.findings import Finding

SHADES = {Health.OK: "green", Health.WARNING: "yellow", Health.PROBLEM: "bold red"}
NAME_WIDTH = 22
PIPED_WIDTH = 200


def doctor(
    config: ConfigOption = None,
    url: Annotated[
        str | None, typer.Option(help="A running router; by default the one of the settings.", show_default=False)
    ] = None,
    key: Annotated[str, typer.Option(help="A key for the router.", envvar="QARR_KEY")] = "",
    deep: Annotated[bool, typer.Option("--deep", help="Read every checkpoint's weights as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check machine, settings, files, ports and what runs, and say what to do. Exits with 1 if there is a problem."""
    console, findings, group = output(PIPED_WIDTH), [], ""
    for finding in examine(config, deep=deep, url=url, key=key):
        findings.append(finding)
        if not as_json:
            if finding.group != group:
                console.print(Text(finding.group.capitalize(), style="bold"))
                group = finding.group
            _print(console, finding)
    problems, warnings = (sum(f.health is h for f in findings) for h in (Health.PROBLEM, Health.WARNING))
    if as_json:
        checks = [asdict(f) for f in findings]
        typer.echo(json.dumps({"problems": problems, "warnings": warnings, "checks": checks}, indent=2))
    else:
        worst = Health.PROBLEM if problems else Health.WARNING if warnings else Health.OK
        counted = f"{len(findings)} checks: {problems} problems, {warnings} warnings"
        console.print(Text(counted, style=SHADES[worst]))
    if problems:
        raise typer.Exit(1)


def _print(console: Console, finding: Finding) -> None:
    left = Text.assemble(
        (f"  {finding.health.value:8}", SHADES[finding.health]), (f"{finding.check:{NAME_WIDTH}} ", "default")
    )
    body = Text(finding.found)
    if finding.then:
        body.append(f"\n-> {finding.then}", style="bold")
    lines = body.wrap(console, max(console.width - len(left), 30))
    console.print(left + lines[0])
    for line in lines[1:]:
        console.print(Padding(line, (0, 0, 0, len(left)), expand=False))
