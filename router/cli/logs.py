"""``qarr logs``: the logs of engines and routers, merged by time."""

from __future__ import annotations

import os
import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from router.cli.common import SHORTEST_ID, ConfigOption
from router.cli.log_reader import ROUTER, Filter, Logs, find_files
from router.settings import load_settings
from tiers.errors import OperationError

if TYPE_CHECKING:
    from pathlib import Path

    from router.cli.log_reader import Entry

Level = Literal["debug", "info", "warning", "error", "critical"]
LINES = 100
FOLLOW_S = 0.25
DAY_S = 86_400
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}
SHADES = {"fast": "cyan", "balanced": "blue", "precise": "magenta", ROUTER: "green"}
LEVEL_SHADES = {"warning": "yellow", "error": "red", "critical": "red"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def logs(
    target: Annotated[
        str, typer.Argument(metavar="[TIER|REPLICA|router]", help="Whose lines; by default all.", show_default=False)
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow new lines, also of restarted engines.")
    ] = False,
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", min=0, help=f"Last lines to show; by default {LINES}, with --since all."),
    ] = None,
    since: Annotated[
        str, typer.Option(help="Only later lines: 90s, 10m, 2h, 1d ago, or a time as in 14:30 or 2026-05-01T14:30.")
    ] = "",
    trace: Annotated[str, typer.Option(help="Only lines of traces whose id is this or begins with it.")] = "",
    request: Annotated[str, typer.Option(help="Only lines of requests whose id is this or begins with it.")] = "",
    level: Annotated[Level, typer.Option(help="Only lines of this level and above.")] = "debug",
    config: ConfigOption = None,
) -> None:
    """Show the logs of the router and of engines started here, merged by time. Needs no running router."""
    folder = load_settings(config).engine.log_dir
    _check_target(folder, target, follow=follow)
    for name, value in (("--trace", trace), ("--request", request)):
        if 0 < len(value) < SHORTEST_ID:
            raise OperationError(f"{name} {value!r}: give at least the first {SHORTEST_ID} characters of the id")
    after = _moment(since, time.time()) if since else 0.0
    found = Logs(folder, target, Filter(after, level, trace.lower(), request))
    width = max((len(f.source) for f in find_files(folder, target)), default=10)
    try:
        for entry in found.last(lines if lines is not None or since else LINES):
            _print(entry, width, ids=not (trace or request))
        while follow:
            time.sleep(FOLLOW_S)
            for entry in found.more():
                _print(entry, width, ids=not (trace or request))
    except KeyboardInterrupt:
        pass
    finally:
        found.close()


def _check_target(folder: Path, target: str, *, follow: bool) -> None:
    """Check that there are logs to show; who follows all of them may wait for the first.

    Raises:
        OperationError: There is no such log; the text names those that there are.
    """
    if find_files(folder, target) or (follow and not target):
        return
    if known := sorted({f.source for f in find_files(folder)}):
        raise OperationError(f"there is no log of {target!r} in {folder}: {', '.join(known)}")
    raise OperationError(f"there are no logs in {folder}: engines and routers started here write them (engine.log_dir)")


def _moment(text: str, now: float) -> float:
    """Return the Unix seconds of an age, a time of day or a date.

    Raises:
        OperationError: The text is none of them.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return now - float(match[1]) * UNITS_S[match[2]]
    try:
        if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text):
            today = datetime.fromtimestamp(now).astimezone().date()
            hour, _, rest = text.partition(":")
            moment = datetime.fromisoformat(f"{today}T{hour.zfill(2)}:{rest}").timestamp()
            return moment if moment <= now else moment - DAY_S
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        allowed = "give an age (90s, 10m, 2h, 1d) or a time (14:30, 2026-05-01T14:30)"
        raise OperationError(f"--since {text!r}: {allowed}") from None


def _print(entry: Entry, width: int, *, ids: bool) -> None:
    today = time.time() - entry.at < DAY_S
    clock = time.strftime("%H:%M:%S" if today else "%m-%d %H:%M:%S", time.localtime(entry.at))
    shade = SHADES.get(entry.source.rpartition("-")[0], "yellow")
    text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", entry.text)
    mark = entry.level.upper() if entry.begins else ""
    if entry.level in LEVEL_SHADES:
        mark = typer.style(f"{mark:8}", fg=LEVEL_SHADES[entry.level], bold=True)
        text = typer.style(text, fg=LEVEL_SHADES[entry.level])
    tail = ""
    if ids and (trace := entry.fields.get("trace_id")):
        tail = typer.style(f"  trace={trace}", dim=True)
    typer.echo(
        f"{typer.style(clock, dim=True)} {typer.style(f'{entry.source:{width}}', fg=shade)} {mark:8} {text}{tail}",
        color=False if os.environ.get("NO_COLOR") else None,
    )
