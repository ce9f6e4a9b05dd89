"""``qarr doctor``: checks everything that a start needs, and what runs.

A check says what it found, and in one line what to do next. No check changes anything or shows a secret.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from router.cli.client import KeyOption, UrlOption
from router.cli.common import ConfigOption, output, plural
from router.cli.doctor.checks import (
    CHECKS,
    CheckContext,
    Finding,
    Health,
    ok,
    problem,
    warning,
)
from router.section import SettingsError
from router.settings import load_settings

SHADES = {Health.OK: "green", Health.WARNING: "yellow", Health.PROBLEM: "bold red"}
NAME_WIDTH = 22
PIPED_WIDTH = 200


def doctor(
    config: ConfigOption = None,
    url: UrlOption = "",
    key: KeyOption = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON.")
    ] = False,
) -> None:
    """Check machine, settings, files, ports and what runs, and say what to do. Exits with 1 if there is a problem."""
    console, findings, group = output(PIPED_WIDTH), [], ""
    for finding in examine(config, url=url, key=key):
        findings.append(finding)
        if not as_json:
            if finding.group != group:
                console.print(Text(finding.group.capitalize(), style="bold"))
                group = finding.group
            _print(console, finding)
    problems, warnings = (
        sum(f.health is h for f in findings) for h in (Health.PROBLEM, Health.WARNING)
    )
    if as_json:
        checks = [asdict(f) for f in findings]
        typer.echo(
            json.dumps(
                {"problems": problems, "warnings": warnings, "checks": checks}, indent=2
            )
        )
    else:
        worst = (
            Health.PROBLEM if problems else Health.WARNING if warnings else Health.OK
        )
        counted = f"{plural(len(findings), 'check')}: {plural(problems, 'problem')}, {plural(warnings, 'warning')}"
        console.print(Text(counted, style=SHADES[worst]))
    if problems:
        raise typer.Exit(1)


def _print(console: Console, finding: Finding) -> None:
    left = Text.assemble(
        (f"  {finding.health.value:8}", SHADES[finding.health]),
        (f"{finding.check:{NAME_WIDTH}} ", "default"),
    )
    body = Text(finding.found)
    if finding.then:
        body.append(f"\n-> {finding.then}", style="bold")
    lines = body.wrap(console, max(console.width - len(left), 30))
    console.print(left + lines[0])
    for line in lines[1:]:
        console.print(Padding(line, (0, 0, 0, len(left)), expand=False))


def examine(config: Path | None, *, url: str, key: str) -> Iterator[Finding]:
    """Yield the findings of every check, one after another; without ``url`` of the router of the settings."""
    try:
        settings = load_settings(config)
    except SettingsError as error:
        # The first line without the value, which may be a secret.
        text = str(error).splitlines()[0].partition(" (got ")[0]
        found = problem(
            text,
            "'qarr settings' lists every setting; most checks need them",
            "settings",
        )
        yield replace(found, group="settings")
        return
    yield replace(
        ok(f"valid{f', from {config}' if config else ''}", "settings"), group="settings"
    )
    context = CheckContext(settings, url=url.rstrip("/"), key=key)
    for group, name, check in CHECKS:
        try:
            for finding in check(context):
                yield replace(finding, group=group, check=finding.check or name)
        except Exception as error:  # noqa: BLE001  the outermost edge: the other checks still tell something
            text = str(error).splitlines()[0] if str(error) else ""
            failed = warning(
                f"could not be checked: {type(error).__name__} {text}",
                "check it by hand",
            )
            yield replace(failed, group=group, check=name)
