"""``qarr logs``: the logs of engines and routers, merged by time. It reads files alone, so nothing has to run.

Engines write ``REPLICA.log`` (vLLM's lines: local time to the second, without a year), routers JSON lines to
``router-PORT.log``; older files are numbered. A line without a time belongs to the line above it.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Annotated, Literal, NamedTuple

import typer

from router.cli.common import SHORTEST_ID, ConfigOption
from router.settings import load_settings
from router.telemetry.log_format import escaped, request_line
from tiers.errors import OperationError

Level = Literal["debug", "info", "warning", "error", "critical"]
LEVELS = ("debug", "info", "warning", "error", "critical")
LINES = 100
FOLLOW_S = 0.25
DAY_S = 86_400
TRACE_ID_DIGITS = 32
HEX_DIGITS = frozenset("0123456789abcdef")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}
SHADES = {"fast": "cyan", "balanced": "blue", "precise": "magenta", "router": "green"}
LEVEL_SHADES = {"warning": "yellow", "error": "red", "critical": "red"}
FILE = re.compile(r"(?P<source>.+)\.log(?:\.(?P<age>\d+))?")
ENGINE = re.compile(
    r"(?:\(\S+(?: pid=\d+)?\) )?(?P<level>[A-Z]+) (?P<at>\d\d-\d\d \d\d:\d\d:\d\d) (?P<text>.*)"
)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Entry(NamedTuple):
    """One line. ``ids``: request and trace, of a router's line."""

    at: float
    source: str
    level: str
    text: str
    ids: tuple[str, str] = ("", "")


def logs(
    target: Annotated[
        str,
        typer.Argument(
            metavar="[TIER|REPLICA|router]",
            help="Whose lines; by default all.",
            show_default=False,
        ),
    ] = "",
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Follow new lines, also of restarted engines."
        ),
    ] = False,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines",
            "-n",
            min=0,
            help=f"Last lines to show; {LINES}, with --since all.",
        ),
    ] = None,
    since: Annotated[
        str,
        typer.Option(
            help="Only later lines: 90s, 10m, 2h, 1d ago, or 2026-05-01T14:30."
        ),
    ] = "",
    trace: Annotated[
        str, typer.Option(help="Only lines of this trace: its id, or how it begins.")
    ] = "",
    request: Annotated[
        str, typer.Option(help="Only lines of this request: its id, or how it begins.")
    ] = "",
    level: Annotated[
        Level, typer.Option(help="Only lines of this level and above.")
    ] = "debug",
    config: ConfigOption = None,
) -> None:
    """Show the logs of the router and of engines started here, merged by time. Needs no running router."""
    folder = load_settings(config).engine.log_dir
    files = _files(folder, target)
    if not files and not follow:
        known = (
            ", ".join(sorted({source for source, _ in _files(folder, "")}))
            or "none at all"
        )
        raise OperationError(
            f"there is no log of {target or 'anything'} in {folder} (engine.log_dir); known: {known}"
        )
    for name, value in (("--trace", trace), ("--request", request)):
        if 0 < len(value) < SHORTEST_ID:
            raise OperationError(
                f"{name} {value!r}: give at least the first {SHORTEST_ID} characters of the id"
            )
    _check_trace_id(trace)
    after, wanted = _moment(since) if since else 0.0, request or trace.lower()
    requests = {wanted} if wanted else set()

    def shows(entry: Entry) -> bool:
        if wanted and any(each.startswith(wanted) for each in entry.ids):
            requests.add(entry.ids[0])  # engines log request ids, not trace ids
        meant = not wanted or any(
            each in entry.text or each in entry.ids for each in requests
        )
        return (
            meant
            and entry.at >= after
            and LEVELS.index(entry.level) >= LEVELS.index(level)
        )

    width = max((len(source) for source, _ in files), default=10)
    merged = heapq.merge(
        *(_entries(source, _all_lines(paths)) for source, paths in files),
        key=lambda entry: entry.at,
    )
    for entry in deque(
        filter(shows, merged),
        maxlen=lines if lines is not None else None if since else LINES,
    ):
        _print(entry, width)
    with suppress(KeyboardInterrupt):
        for entry in _followed(folder, target) if follow else ():
            if shows(entry):
                _print(entry, width)


def _files(folder: Path, target: str) -> list[tuple[str, list[Path]]]:
    meant = re.compile(rf"{re.escape(target)}(-\d+)?" if target else ".+")
    found = defaultdict[str, list[tuple[int, Path]]](list)
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := FILE.fullmatch(path.name)) and meant.fullmatch(match["source"]):
            found[match["source"]].append((-int(match["age"] or 0), path))
    return [
        (source, [path for _, path in sorted(paths)])
        for source, paths in sorted(found.items())
    ]


def _all_lines(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        with (
            suppress(FileNotFoundError),
            path.open(encoding="utf-8", errors="replace") as file,
        ):
            yield from file


def _entries(source: str, lines: Iterable[str]) -> Iterator[Entry]:
    """Yield an entry for each line; its time and level are those of the line above where it has none."""
    at, level, ids = 0.0, "info", ("", "")
    for raw in lines:
        text = COLOURS.sub("", raw).rstrip("\r\n")
        with suppress(ValueError, KeyError, TypeError):  # a line that was cut off
            if source.startswith("router-") and text.startswith("{"):
                fields = json.loads(text)
                at, level = float(fields["at"]), str(fields["level"])
                ids = (
                    str(fields.get("request_id") or ""),
                    str(fields.get("trace_id") or ""),
                )
                said = (
                    request_line(fields)
                    if fields.get("event") == "request"
                    else fields["message"]
                )
                text = "\n".join(filter(None, (str(said), fields.get("exception"))))
            elif match := ENGINE.match(text):
                moment = datetime.strptime(  # noqa: DTZ007
                    f"{time.localtime().tm_year}-{match['at']}", "%Y-%m-%d %H:%M:%S"
                ).timestamp()
                at = moment if moment < time.time() + DAY_S else moment - 365 * DAY_S
                level, text = match["level"].lower(), match["text"]
        yield Entry(at, source, level if level in LEVELS else "info", text, ids)


def _followed(folder: Path, target: str) -> Iterator[Entry]:
    """Yield what is added to the newest file of each source, also when it is begun anew; for ever."""
    opened: dict[str, IO[str]] = {}
    begun = defaultdict[str, str](str)  # the part of a last line that is written so far
    # of the files that are there now; later ones are read from their beginning
    end = os.SEEK_END
    while True:
        for source, paths in _files(folder, target):
            with suppress(FileNotFoundError):
                file = opened.get(source)
                if file is None or not os.path.samestat(
                    paths[-1].stat(), os.fstat(file.fileno())
                ):
                    opened[source], before = (
                        paths[-1].open(encoding="utf-8", errors="replace"),
                        file,
                    )
                    opened[source].seek(0, end)
                    if before is not None:
                        with before:  # nothing is added to it any more
                            begun[source] += before.read()
                whole, newline, begun[source] = (
                    begun[source] + opened[source].read()
                ).rpartition("\n")
                for entry in _entries(source, whole.split("\n") if newline else ()):
                    yield entry._replace(at=entry.at or time.time())
        end = os.SEEK_SET
        time.sleep(FOLLOW_S)


def _check_trace_id(id_start: str) -> None:
    """Raise ``OperationError`` if no trace id begins so."""
    if len(id_start) > TRACE_ID_DIGITS or not set(id_start.lower()) <= HEX_DIGITS:
        raise OperationError(
            f"--trace {id_start!r}: a trace id has {TRACE_ID_DIGITS} hexadecimal digits"
        )


def _moment(text: str) -> float:
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return time.time() - float(match[1]) * UNITS_S[match[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise OperationError(
            f"--since {text!r}: give an age (90s, 10m, 2h, 1d) or a time (2026-05-01T14:30)"
        ) from None


def _print(entry: Entry, width: int) -> None:
    clock = time.strftime(
        "%H:%M:%S" if time.time() - entry.at < DAY_S else "%m-%d %H:%M:%S",
        time.localtime(entry.at),
    )
    text = "\n".join(escaped(line) for line in entry.text.split("\n"))
    shade, mark = LEVEL_SHADES.get(entry.level), f"{entry.level.upper():8}"
    source = typer.style(
        f"{entry.source:{width}}",
        fg=SHADES.get(entry.source.rpartition("-")[0], "yellow"),
    )
    tail = typer.style(f"  trace={entry.ids[1]}", dim=True) if entry.ids[1] else ""
    mark, text = (
        typer.style(mark, fg=shade, bold=bool(shade)),
        typer.style(text, fg=shade),
    )
    plain = False if os.environ.get("NO_COLOR") else None
    typer.echo(
        f"{typer.style(clock, dim=True)} {source} {mark} {text}{tail}", color=plain
    )
