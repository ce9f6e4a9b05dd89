"""Write the generated documentation: settings.md and its schema, cli.md, continuation.md, and what is generated elsewhere.

That is the plan in planning.md, and the page of runbooks.

usage: .venv/bin/python scripts/docs.py

Figures from result files are written by scripts/figures.py.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from markdown_it import MarkdownIt
from typer.testing import CliRunner

from router.cli.main import make_app
from router.cli.show_settings import rows
from router.settings import Settings
from tests.unit.continuation import document

DOCS = Path(__file__).resolve().parents[1] / "docs"
# of planning.md
PLAN = re.compile(r"^```text\n\$ qarr (plan .*)\n(?:.*\n)*?```\n", re.MULTILINE)
HELP_TITLE = re.compile(r"^╭─ (\w+) ─+╮$")
# says nothing that the text does not say
TYPE = re.compile(r" <(?:bool|str|int|float)> ")
COMMANDS = (
    (),
    ("up",),
    ("serve",),
    ("classify",),
    ("plan",),
    ("model",),
    ("model", "prepare"),
    ("model", "list"),
    ("settings",),
    ("reload",),
    ("top",),
    ("logs",),
    ("doctor",),
    ("health",),
    ("keys",),
    *(("keys", name) for name in ("add", "list", "revoke", "off", "on")),
    ("verify",),
    ("profile",),
    ("profile", "quality"),
    ("profile", "latency"),
    ("tiers",),
    *(("tiers", name) for name in ("drain", "resume", "restart", "recycle", "record")),
)
SETTINGS_HEAD = """# Settings

Paths in the table:

- `<cache>`: `QARR_CACHE_DIR`, by default `~/.cache/qarr`
- `<config>`: `$XDG_CONFIG_HOME/qarr`, by default `~/.config/qarr`
- `<state>`: `$XDG_STATE_HOME/qarr`, by default `~/.local/state/qarr`
- `<runtime>`: `$XDG_RUNTIME_DIR/qarr`, by default `<cache>/run`
- `<project>`: the checkout

For a user without a home folder, `<cache>` replaces `~`.

Settings come from a TOML file (`--config` or `QARR_CONFIG`) or from environment variables, such as
`QARR_SERVER__PORT=8081`. In variables, lists and tables are JSON, as in
`QARR_TIERS__FAST__URLS='["http://10.0.0.5:8000"]'`. The command line takes precedence over the environment, and the
environment over the file. A variable that is set and empty counts as not set. A tier of another name, such as
`[tiers.int8]`, has the same settings ([install.md](install.md#more-tiers-and-fewer)).

On `qarr reload` or SIGHUP, a running router applies changes to the settings that are marked *reloads*
([operations.md](operations.md#changing-settings-while-the-router-runs)). Changes to other settings need a restart.
"""
# served by Prometheus, as a template
RUNBOOKS_PAGE = "../deploy/prometheus/consoles/runbooks.html"
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>QARR runbooks</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ overflow: auto; padding: .6rem .8rem; border: 1px solid #8885; border-radius: 6px; }}
h2:target {{ outline: 3px solid #d80; outline-offset: 4px; }}
</style>
{body}</html>
"""
PLAIN = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}


def render() -> dict[str, str]:
    """Return each generated file's name and text."""
    schema = json.dumps(Settings.model_json_schema(), indent=2)
    return {
        "settings.md": f"{SETTINGS_HEAD}\n{settings()}\n",
        "settings.schema.json": schema + "\n",
        "planning.md": PLAN.sub(
            lambda found: planned(found[1]), (DOCS / "planning.md").read_text("utf-8")
        ),
        RUNBOOKS_PAGE: runbooks((DOCS / "runbooks.md").read_text("utf-8")),
        "continuation.md": document.render(),
        "cli.md": "# The command\n\n"
        + "\n".join(_help(command) for command in COMMANDS),
    }


def settings() -> str:
    """Return the table of settings."""
    lines = [f"| `{name}` | {' | '.join(others)} |" for name, *others in rows()]
    return "\n".join(
        [
            "| setting | default | reloads | meaning |",
            "| --- | --- | --- | --- |",
            *lines,
        ]
    )


def planned(command: str) -> str:
    """Return a plan as it is printed in the checkout's folder."""
    args = [
        str(DOCS.parent / arg) if arg.endswith(".json") else arg
        for arg in command.split()
    ]
    result = CliRunner().invoke(
        make_app(), args, env=PLAIN, prog_name="qarr", catch_exceptions=False
    )
    lines = [
        line.rstrip().replace(f"{DOCS.parent}/", "")
        for line in result.output.strip().splitlines()
    ]
    return f"```text\n$ qarr {command}\n" + "\n".join(lines) + "\n```\n"


def runbooks(text: str) -> str:
    """Return the runbooks as a page that Prometheus serves beside its alerts; other documents are named, not linked."""
    text = re.sub(r"\[([^\]]+)\]\((\w+\.md)(?:#[^)]*)?\)", r"\1 (docs/\2)", text)
    body = re.sub(
        r"<h2>(\w+)</h2>",
        lambda found: f'<h2 id="{found[1].lower()}">{found[1]}</h2>',
        MarkdownIt().render(text),
    )
    if "{{" in body:
        raise SystemExit(
            "docs/runbooks.md has {{, which Prometheus would take for a template"
        )
    return PAGE.format(body=body)


def _help(command: tuple[str, ...]) -> str:
    """Return a command's help without the frames and without --help, which each has."""
    result = CliRunner().invoke(
        make_app(), [*command, "--help"], env=PLAIN, prog_name="qarr"
    )
    lines = [
        HELP_TITLE.sub(r"\n\1:", line).strip("│╰╯─").rstrip()
        for line in result.output.strip().splitlines()
    ]
    shown = [
        TYPE.sub(lambda found: " " * len(found[0]), line)
        for line in lines
        if line and not line.lstrip().startswith("--help")
    ]
    return (
        f"## qarr {' '.join(command)}".rstrip()
        + "\n\n```\n"
        + "\n".join(shown)
        + "\n```\n"
    )


if __name__ == "__main__":
    for name, text in render().items():
        (DOCS / name).write_text(text, "utf-8")
        print(
            f"{(DOCS / name).resolve().relative_to(DOCS.parent)}: {len(text)} characters"
        )
