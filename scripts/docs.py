"""Write the generated documentation: settings.md, its schema, cli.md, and figures in README, routing.md, planning.md.

usage: .venv/bin/python scripts/docs.py
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from router.cli.main import make_app
from router.cli.show_settings import rows
from router.settings import Settings
from tiers.sizing.verdict import NAMES
from tiers.spec import PRECISIONS, TierName

DOCS = Path(__file__).resolve().parents[1] / "docs"
README = "../README.md"
RESULTS = DOCS / "../benchmarks/results"
FIGURES = RESULTS / "side_by_side.json"
COST = re.compile(r"^- \*\*Cost\.\*\*.*?\n(?=- |\n)", re.MULTILINE | re.DOTALL)  # README's paragraph
PAYS = re.compile(r"^\| USD a million.*?\n(?!\|)", re.MULTILINE | re.DOTALL)  # README's table of fleets
PLAN = re.compile(r"^```text\n\$ qarr (plan .*)\n(?:.*\n)*?```\n", re.MULTILINE)  # of planning.md
TABLE = re.compile(r"^```text\n.*?^```\n", re.MULTILINE | re.DOTALL)  # of routing.md
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
        "settings.md": f"{SETTINGS_HEAD}\n{settings()}\n",
        "settings.schema.json": portable + "\n",
        README: PAYS.sub(lambda _: pays(), COST.sub(lambda _: cost(), (DOCS / README).read_text("utf-8"))),
        "routing.md": TABLE.sub(lambda _: predictions(), (DOCS / "routing.md").read_text("utf-8"), count=1),
        "planning.md": PLAN.sub(lambda found: planned(found[1]), (DOCS / "planning.md").read_text("utf-8")),
        "cli.md": "# The command\n\n" + "\n".join(_help(command) for command in COMMANDS),
    }


def pays() -> str:
    """Return README's table of what planned fleets cost beside the best of one precision."""
    lines = ["| USD a million tokens, answers lost of 100, TTFT p95 | one precision | planned |", "| --- | --- | --- |"]
    for name, found in json.loads((RESULTS / "plans.json").read_text("utf-8")).items():
        if "planned" in found:
            planned, single = found["planned"], found["single"]
            same = single is not None and single["engines"] == planned["engines"]
            best = "none keeps the budget" if single is None else _outcome(single, found["currency"])
            lines.append(f"| {name} | {best} | {'the same' if same else _outcome(planned, found['currency'])} |")
    return "\n".join(lines) + "\n"


def _outcome(row: dict[str, Any], currency: str | None) -> str:
    names = "+".join(NAMES[PRECISIONS[TierName(tier)]] for tier in re.findall("fast|balanced|precise", row["engines"]))
    price = f"{row['price']:.0f} machines" if currency is None else f"{row['per_million']:.2f}"
    return f"{names}: {price}, {100 * row['lost']:.2g}, {row['ttft_p95']:,.0f} ms"


def settings() -> str:
    """Return the table of settings."""
    lines = [f"| `{name}` | {' | '.join(others)} |" for name, *others in rows()]
    return "\n".join(["| setting | default | reloads | meaning |", "| --- | --- | --- | --- |", *lines])


def cost() -> str:
    """Return README's paragraph on what the router costs, from the benchmarks' figures."""
    costs = json.loads(FIGURES.read_text("utf-8"))["rows"]
    ours = [costs[load]["QARR /v1/chat/completions"] for load in ("non-streaming", "saturated", "paced")]
    rates, ratios = [f"{1e6 / row['cpu_us']:,.0f}" for row in ours], [row["ratio"] for row in ours]
    text = (
        f"- **Cost.** One core is full at {rates[0]} whole answers a second, {rates[1]} streams of 64 tokens, or {rates[2]} "
        f"at 5 ms a token: {min(ratios):.1f} to {max(ratios):.1f} times the CPU time of vllm-router, which neither "
        "classifies nor predicts ([side by side](benchmarks/results/side_by_side.txt))."
    )
    return textwrap.fill(text, 115, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) + "\n"


def predictions() -> str:
    """Return the errors of predictions as they were printed where the router chooses the tiers."""
    run = (RESULTS / "predictions.txt").read_text("utf-8").split("$ ")[-1]
    command, _, printed = run.partition("\n")
    rows = printed[printed.index("round 1: ") :].partition("\n\n")[0].splitlines()
    shown = [row for row in rows[1:] if row.startswith((" ", "all", "fast", "precise", "burst"))]
    return "```text\n" + "\n".join([f"$ {command}", *shown]) + "\n```\n"


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
