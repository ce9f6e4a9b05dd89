"""``qarr doctor``: checks everything that a start needs, and what runs.

A check says what it found, and in one line what to do next. No check changes anything or shows a secret.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from router.cli.client import KeyOption, UrlOption
from router.cli.common import ConfigOption, output, plural
from router.cli.doctor.checks import CHECKS, DoctorCheck
from router.cli.doctor.findings import (
    CheckContext,
    Finding,
    Health,
    ok,
    problem,
    warning,
)
from router.deployment.published import with_known_base
from router.section import SettingsError
from router.settings import load_settings

SHADES = {Health.OK: "green", Health.WARNING: "yellow", Health.PROBLEM: "bold red"}
NAME_WIDTH = 22
PIPED_WIDTH = 200
NARROWEST_TEXT = 30  # columns


def doctor(
    config: ConfigOption = None,
    url: UrlOption = "",
    key: KeyOption = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON.")
    ] = False,
) -> None:
    """Check machine, settings, files, ports and what runs, and say what to do. Exits with 1 if there is a problem."""
    findings = examine(config, url=url, key=key)
    print_findings = _print_json if as_json else _print_text
    counts = print_findings(findings)
    if counts[Health.PROBLEM]:
        raise typer.Exit(1)


def _print_json(findings: Iterator[Finding]) -> Counter[Health]:
    """Print findings for programs, and return how many there are of each health."""
    checks: list[dict[str, str]] = []
    counts: Counter[Health] = Counter()
    for finding in findings:
        counts[finding.health] += 1
        checks.append(
            {
                "group": finding.group,
                "check": finding.check,
                "health": finding.health,
                "found": finding.text,
                "then": finding.remedy,
            }
        )
    report = {
        "problems": counts[Health.PROBLEM],
        "warnings": counts[Health.WARNING],
        "checks": checks,
    }
    typer.echo(json.dumps(report, indent=2))
    return counts


def _print_text(findings: Iterator[Finding]) -> Counter[Health]:
    """Print each finding as soon as it is made, and return how many there are of each health."""
    console = output(PIPED_WIDTH)
    counts: Counter[Health] = Counter()
    group = ""
    for finding in findings:
        counts[finding.health] += 1
        if finding.group != group:
            group = finding.group
            console.print(Text(group.capitalize(), style="bold"))
        _print_finding(console, finding)
    summary = (
        f"{plural(counts.total(), 'check')}: {plural(counts[Health.PROBLEM], 'problem')}, "
        f"{plural(counts[Health.WARNING], 'warning')}"
    )
    console.print(Text(summary, style=SHADES[_worst(counts)]))
    return counts


def _worst(counts: Counter[Health]) -> Health:
    for health in (Health.PROBLEM, Health.WARNING):
        if counts[health]:
            return health
    return Health.OK


def _print_finding(console: Console, finding: Finding) -> None:
    """Print a finding in two columns: its health and name, and beside them its text and what to do."""
    left_column = Text.assemble(
        (f"  {finding.health.value:8}", SHADES[finding.health]),
        (f"{finding.check:{NAME_WIDTH}} ", "default"),
    )
    right_column = Text(finding.text)
    if finding.remedy:
        right_column.append(f"\n-> {finding.remedy}", style="bold")
    right_width = max(console.width - len(left_column), NARROWEST_TEXT)
    right_lines = right_column.wrap(console, right_width)
    console.print(left_column + right_lines[0])
    for line in right_lines[1:]:
        console.print(Padding(line, (0, 0, 0, len(left_column)), expand=False))


def examine(config_path: Path | None, *, url: str, key: str) -> Iterator[Finding]:
    """Yield the findings of every check, one after another; without ``url`` of the router of the settings."""
    try:
        settings = load_settings(config_path)
    except SettingsError as error:
        # The value is left out, since it may be a secret.
        first_line = str(error).splitlines()[0]
        error_text = first_line.partition(" (got ")[0]
        finding = problem(
            error_text,
            "'qarr settings' lists every setting; most checks need them",
            "settings",
        )
        yield replace(finding, group="settings")
        return
    settings_source = f", from {config_path}" if config_path else ""
    yield replace(ok(f"valid{settings_source}", "settings"), group="settings")
    context = CheckContext(with_known_base(settings), url=url.rstrip("/"), key=key)
    for check in CHECKS:
        for finding in _findings_of(check, context):
            name = finding.check or check.name
            yield replace(finding, group=check.group, check=name)


def _findings_of(check: DoctorCheck, context: CheckContext) -> Iterator[Finding]:
    """Yield what a check finds. A check that breaks is a finding too, so that the other checks are made."""
    try:
        yield from check.make(context)
    except Exception as error:  # noqa: BLE001  any check may break on an odd machine
        lines = str(error).splitlines()
        why = lines[0] if lines else ""
        yield warning(
            f"could not be checked: {type(error).__name__} {why}", "check it by hand"
        )
