"""Write the generated documentation: settings.md, its schema, cli.md, and figures in README, routing.md, planning.md.

usage: .venv/bin/python scripts/docs.py
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from typer.testing import CliRunner

from router.cli.main import make_app
from router.cli.show_settings import rows
from router.settings import Settings

DOCS = Path(__file__).resolve().parents[1] / "docs"
README = "../README.md"
RESULTS = DOCS / "../benchmarks/results"
FIGURES = RESULTS / "side_by_side.json"
COST = re.compile(r"^- \*\*Cost\.\*\*.*?\n(?=- |\n)", re.MULTILINE | re.DOTALL)  # README's paragraph
ROW = re.compile(r"^(all precise|like balanced) +(.*)$", re.MULTILINE)  # of goodput.txt
FIGURE = re.compile(r"([\d.]+) \(")  # before its interval: answers lost, engine-seconds, ...
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
        README: COST.sub(lambda _: cost(), (DOCS / README).read_text("utf-8"), count=1),
        "routing.md": TABLE.sub(lambda _: predictions(), (DOCS / "routing.md").read_text("utf-8"), count=1),
        "planning.md": PLAN.sub(lambda found: planned(found[1]), (DOCS / "planning.md").read_text("utf-8")),
        "cli.md": "# The command\n\n" + "\n".join(_help(command) for command in COMMANDS),
    }


def settings() -> str:
    """Return the table of settings."""
    lines = [f"| `{name}` | {' | '.join(others)} |" for name, *others in rows()]
    return "\n".join(["| setting | default | reloads | meaning |", "| --- | --- | --- | --- |", *lines])


def cost() -> str:
    """Return README's paragraph on what routing saves and what the router costs, from the benchmarks' figures."""
    loads = (RESULTS / "goodput.txt").read_text("utf-8").split(" of saturation; engine-seconds")[1:]
    rows = [dict(ROW.findall(load)) for load in loads]
    found = [
        (float(lost), 100 - 100 * float(seconds) / float(FIGURE.findall(row["all precise"])[1]))
        for row in rows
        for lost, seconds in [FIGURE.findall(row["like balanced"])[:2]]
    ]
    lost, saved = ([figures[n] for figures in found] for n in (0, 1))
    costs = json.loads(FIGURES.read_text("utf-8"))["rows"]
    ours = [costs[load]["QARR /v1/chat/completions"] for load in ("non-streaming", "saturated", "paced")]
    rates, ratios = [f"{1e6 / row['cpu_us']:,.0f}" for row in ours], [row["ratio"] for row in ours]
    text = (
        f"- **Cost.** On simulated H100s with published losses, requests take {min(saved):.0f} to {max(saved):.0f} % less "
        f"engine time than with everything on `precise`, and {min(lost):.1f} to {max(lost):.1f} answers in 100 get worse "
        "([goodput](benchmarks/results/goodput.txt)). For that, one core of the router is full at "
        f"{rates[0]} whole answers a second, {rates[1]} streams of 64 tokens, or {rates[2]} at 5 ms a token: "
        f"{min(ratios):.1f} to {max(ratios):.1f} times the CPU time of vllm-router, which neither classifies nor predicts "
        "([side by side](benchmarks/results/side_by_side.txt))."
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
