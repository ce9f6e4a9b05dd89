"""Write the generated documentation: settings.md, its schema, cli.md, and figures in README, predictions.md, planning.md.

usage: .venv/bin/python scripts/docs.py
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from typer.testing import CliRunner

from router.cli.main import make_app
from router.cli.show_settings import table
from router.settings import Settings

DOCS = Path(__file__).resolve().parents[1] / "docs"
README = "../README.md"
RESULTS = DOCS / "../benchmarks/results"
FIGURES = RESULTS / "side_by_side.json"
COST = re.compile(r"^- \*\*Cost\.\*\*.*?\n(?=- |\n)", re.MULTILINE | re.DOTALL)  # README's paragraph
PLAN = re.compile(r"^```text\n\$ qarr (plan .*)\n(?:.*\n)*?```\n", re.MULTILINE)  # of planning.md
TABLE = re.compile(r"^```text\n.*?^```\n", re.MULTILINE | re.DOTALL)  # of predictions.md
HELP_TITLE = re.compile(r"^╭─ (\w+) ─+╮$")
TYPE = re.compile(r" <(?:bool|str|int|float)> ")  # says nothing that the text does not say
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
    *(("keys", name) for name in ("add", "list", "revoke")),
    ("profile",),
    ("profile", "quality"),
    ("profile", "latency"),
    ("tiers",),
    *(("tiers", name) for name in ("drain", "resume", "restart", "recycle", "record")),
)
SETTINGS_HEAD = """# Settings

`<cache>` is `QARR_CACHE_DIR`, by default `~/.cache/qarr`; `<config>` is `$XDG_CONFIG_HOME/qarr`, by default
`~/.config/qarr`; `<state>` is `$XDG_STATE_HOME/qarr`, by default `~/.local/state/qarr`; `<runtime>` is
`$XDG_RUNTIME_DIR/qarr`, or `<cache>/run` if that is not set; `<project>` is the checkout. For a user without a home
folder `<cache>` takes its place.

A TOML file (`--config` or `QARR_CONFIG`) or the environment sets them, as in `QARR_SERVER__PORT=8081`. The command line
takes precedence over the environment, the environment over the file. A tier of another name, such as `[tiers.int8]`,
has the same settings ([install.md](install.md#more-tiers-and-fewer)).

A running router takes over what *reloads* on `qarr reload` or SIGHUP
([operations.md](operations.md#changing-settings-while-the-router-runs)); the rest needs a restart.
"""
PLAIN = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}


def render() -> dict[str, str]:
    """Return each generated file's name and text."""
    portable = re.sub(
        r'"default": "/[^"]*/(tiers/checkpoints/calibration\.jsonl)"',
        r'"default": "<project>/\1"',
        json.dumps(Settings.model_json_schema(), indent=2),
    )
    return {
        "settings.md": f"{SETTINGS_HEAD}\n{table()}\n",
        "settings.schema.json": portable + "\n",
        README: COST.sub(lambda _: cost(), (DOCS / README).read_text("utf-8"), count=1),
        "predictions.md": TABLE.sub(lambda _: predictions(), (DOCS / "predictions.md").read_text("utf-8"), count=1),
        "planning.md": PLAN.sub(lambda found: planned(found[1]), (DOCS / "planning.md").read_text("utf-8")),
        "cli.md": "# The command\n\n" + "\n".join(_help(command) for command in COMMANDS),
    }


def cost() -> str:
    """Return README's paragraph on what an answer costs, from the side-by-side benchmark's figures."""
    rows = json.loads(FIGURES.read_text("utf-8"))["rows"]
    ours = [rows[load]["QARR /v1/chat/completions"] for load in ("non-streaming", "saturated", "paced")]
    costs, ratios = [f"{row['cpu_us']:,.0f}" for row in ours], [f"{row['ratio']:.1f}" for row in ours]
    text = (
        f"- **Cost.** An unstreamed answer takes {costs[0]} µs of one core, a 64-token stream {costs[1]}, at 5 ms a token "
        f"{costs[2]}: {ratios[0]}, {ratios[1]} and {ratios[2]} times vllm-router's `cache_aware` "
        "([side by side](benchmarks/results/side_by_side.txt))."
    )
    return textwrap.fill(text, 115, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) + "\n"


def predictions() -> str:
    """Return the benchmark of predictions as it was printed where the router chooses the tiers."""
    runs = (RESULTS / "predictions.txt").read_text("utf-8").split("$ ")
    return f"```text\n$ {runs[-1]}```\n"


def planned(command: str) -> str:
    """Return a plan as it is printed in the checkout's folder."""
    args = [str(DOCS.parent / arg) if arg.endswith(".json") else arg for arg in command.split()]
    result = CliRunner().invoke(make_app(), args, env=PLAIN, prog_name="qarr", catch_exceptions=False)
    lines = [line.rstrip().replace(f"{DOCS.parent}/", "") for line in result.output.strip().splitlines()]
    return f"```text\n$ qarr {command}\n" + "\n".join(lines) + "\n```\n"


def _help(command: tuple[str, ...]) -> str:
    """Return a command's help without the frames and without --help, which each has."""
    result = CliRunner().invoke(make_app(), [*command, "--help"], env=PLAIN, prog_name="qarr")
    lines = [HELP_TITLE.sub(r"\n\1:", line).strip("│╰╯─").rstrip() for line in result.output.strip().splitlines()]
    shown = [
        TYPE.sub(lambda found: " " * len(found[0]), line)
        for line in lines
        if line and not line.lstrip().startswith("--help")
    ]
    return f"## qarr {' '.join(command)}".rstrip() + "\n\n```\n" + "\n".join(shown) + "\n```\n"


if __name__ == "__main__":
    for name, text in render().items():
        (DOCS / name).write_text(text, "utf-8")
        print(f"{(DOCS / name).resolve().relative_to(DOCS.parent)}: {len(text)} characters")
