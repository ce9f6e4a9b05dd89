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

LogLevel = Literal["debug", "info", "warning", "error", "critical"]
LEVELS = ("debug", "info", "warning", "error", "critical")
TRACE_ID_DIGITS = 32
HEX_DIGITS = frozenset("0123456789abcdef")
USUAL_LINES = 100
FOLLOW_S = 0.25
DAY_S = 86_400
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}
SOURCE_SHADES = {
    "fast": "cyan",
    "balanced": "blue",
    "precise": "magenta",
    "router": "green",
}
LEVEL_SHADES = {"warning": "yellow", "error": "red", "critical": "red"}
FILE = re.compile(r"(?P<source>.+)\.log(?:\.(?P<age>\d+))?")
ENGINE = re.compile(
    r"(?:\(\S+(?: pid=\d+)?\) )?(?P<level>[A-Z]+) (?P<at>\d\d-\d\d \d\d:\d\d:\d\d) (?P<text>.*)"
)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="[TIER|REPLICA|router]",
        help="Whose lines; by default all.",
        show_default=False,
    ),
]
FollowOption = Annotated[
    bool,
    typer.Option("--follow", "-f", help="Follow new lines, also of restarted engines."),
]
LinesOption = Annotated[
    int | None,
    typer.Option(
        "--lines",
        "-n",
        min=0,
        help=f"Last lines to show; {USUAL_LINES}, with --since all.",
    ),
]
SinceOption = Annotated[
    str,
    typer.Option(help="Only later lines: 90s, 10m, 2h, 1d ago, or 2026-05-01T14:30."),
]
TraceOption = Annotated[
    str, typer.Option(help="Only lines of this trace: its id, or how it begins.")
]
RequestOption = Annotated[
    str, typer.Option(help="Only lines of this request: its id, or how it begins.")
]
LevelOption = Annotated[
    LogLevel, typer.Option(help="Only lines of this level and above.")
]


class LogFiles(NamedTuple):
    """The files of a source, oldest first."""

    source: str
    paths: list[Path]


class LogEntry(NamedTuple):
    """One line of a log; only a router's lines have ids."""

    at: float
    source: str
    level: str
    text: str
    request_id: str = ""
    trace_id: str = ""

    @property
    def ids(self) -> tuple[str, str]:
        return self.request_id, self.trace_id


def logs(
    target: TargetArgument = "",
    follow: FollowOption = False,
    lines: LinesOption = None,
    since: SinceOption = "",
    trace: TraceOption = "",
    request: RequestOption = "",
    level: LevelOption = "debug",
    config: ConfigOption = None,
) -> None:
    """Show the logs of the router and of engines started here, merged by time. Needs no running router."""
    log_folder = load_settings(config).engine.log_dir
    log_files = _log_files(log_folder, target)
    if not log_files and not follow:
        raise _no_log(log_folder, target)
    _check_id("--trace", trace)
    _check_trace_id(trace)
    _check_id("--request", request)
    if trace and request:
        raise OperationError(
            "--trace and --request: give one of them; a trace shows its request's lines, and a request its trace's"
        )
    earliest = _moment(since) if since else 0.0
    entry_filter = EntryFilter(
        since=earliest,
        lowest_level=level,
        id_start=request or trace.lower(),
    )
    source_width = max((len(source) for source, _ in log_files), default=10)
    if lines is None and not since:
        lines = USUAL_LINES
    shown_entries = filter(entry_filter.shows, _merged_entries(log_files))
    for entry in deque(shown_entries, maxlen=lines):
        _print(entry, source_width)
    if not follow:
        return
    with suppress(KeyboardInterrupt):
        for entry in filter(entry_filter.shows, _new_entries(log_folder, target)):
            _print(entry, source_width)


def _no_log(log_folder: Path, target: str) -> OperationError:
    known_sources = [source for source, _ in _log_files(log_folder, "")]
    known = ", ".join(known_sources) or "none at all"
    return OperationError(
        f"there is no log of {target or 'anything'} in {log_folder} (engine.log_dir); known: {known}"
    )


def _check_id(option: str, id_start: str) -> None:
    """Raise ``OperationError`` if the beginning of an id is too short to find one."""
    if 0 < len(id_start) < SHORTEST_ID:
        raise OperationError(
            f"{option} {id_start!r}: give at least the first {SHORTEST_ID} characters of the id"
        )


def _check_trace_id(id_start: str) -> None:
    """Raise ``OperationError`` if no trace id begins so."""
    if len(id_start) > TRACE_ID_DIGITS or not set(id_start.lower()) <= HEX_DIGITS:
        raise OperationError(
            f"--trace {id_start!r}: a trace id has {TRACE_ID_DIGITS} hexadecimal digits"
        )


class EntryFilter:
    """Tells which entries are shown; they are given to it by time.

    Engines log the ids of requests and not those of traces, so the requests of a trace are learned from the router's lines.
    """

    def __init__(self, *, since: float, lowest_level: str, id_start: str) -> None:
        self._since = since
        self._lowest_rank = LEVELS.index(lowest_level)
        self._id_start = id_start
        self._request_ids = {id_start} if id_start else set()

    def shows(self, entry: LogEntry) -> bool:
        if self._id_start and not self._is_of_request(entry):
            return False
        is_late_enough = entry.at >= self._since
        return is_late_enough and LEVELS.index(entry.level) >= self._lowest_rank

    def _is_of_request(self, entry: LogEntry) -> bool:
        """Tell whether an entry is of the request or trace that is looked for, and learn the id of its request."""
        if any(entry_id.startswith(self._id_start) for entry_id in entry.ids):
            self._request_ids.add(entry.request_id)
        return any(
            request_id in entry.text or request_id in entry.ids
            for request_id in self._request_ids
        )


def _log_files(log_folder: Path, target: str) -> list[LogFiles]:
    """Return the log files of a tier, of a replica or of routers, by source."""
    if not log_folder.is_dir():
        return []
    source_pattern = rf"{re.escape(target)}(-\d+)?" if target else ".+"
    wanted = re.compile(source_pattern)
    aged_paths = defaultdict[str, list[tuple[int, Path]]](list)
    for path in log_folder.iterdir():
        match = FILE.fullmatch(path.name)
        if match is not None and wanted.fullmatch(match["source"]):
            age = int(match["age"] or 0)
            aged_paths[match["source"]].append((-age, path))
    files: list[LogFiles] = []
    for source in sorted(aged_paths):
        oldest_first = [path for _, path in sorted(aged_paths[source])]
        files.append(LogFiles(source, oldest_first))
    return files


def _merged_entries(log_files: Iterable[LogFiles]) -> Iterator[LogEntry]:
    """Yield the entries of all files, by time."""
    entry_streams = [_entries(source, _all_lines(paths)) for source, paths in log_files]
    return heapq.merge(*entry_streams, key=lambda entry: entry.at)


def _all_lines(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        with (
            suppress(FileNotFoundError),
            path.open(encoding="utf-8", errors="replace") as file,
        ):
            yield from file


def _entries(source: str, lines: Iterable[str]) -> Iterator[LogEntry]:
    """Yield an entry for each line; its time and level are those of the line above where it has none."""
    reader = EntryReader(source)
    for line in lines:
        yield reader.read(line)


class EntryReader:
    """Makes entries of the lines of one source."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._is_router = source.startswith("router-")
        self._at = 0.0
        self._level = "info"
        self._request_id = ""
        self._trace_id = ""

    def read(self, line: str) -> LogEntry:
        text = COLOURS.sub("", line).rstrip("\r\n")
        is_json = self._is_router and text.startswith("{")
        take_fields = self._take_router_fields if is_json else self._take_engine_fields
        # A line that was cut off cannot be read, and is shown as it is.
        with suppress(ValueError, KeyError, TypeError):
            text = take_fields(text)
        level = self._level if self._level in LEVELS else "info"
        return LogEntry(
            at=self._at,
            source=self._source,
            level=level,
            text=text,
            request_id=self._request_id,
            trace_id=self._trace_id,
        )

    def _take_router_fields(self, line: str) -> str:
        """Take time, level and ids from a line of JSON, and return its text."""
        fields = json.loads(line)
        at = float(fields["at"])
        level = str(fields["level"])
        self._at = at
        self._level = level
        self._request_id = str(fields.get("request_id") or "")
        self._trace_id = str(fields.get("trace_id") or "")
        is_request = fields.get("event") == "request"
        message = request_line(fields) if is_request else fields["message"]
        parts = (str(message), fields.get("exception"))
        return "\n".join(filter(None, parts))

    def _take_engine_fields(self, line: str) -> str:
        """Take time and level from a line in vLLM's form, and return its text; return another line as it is."""
        match = ENGINE.match(line)
        if match is None:
            return line
        self._at = _engine_moment(match["at"])
        self._level = match["level"].lower()
        return match["text"]


def _engine_moment(month_to_second: str) -> float:
    """Return the moment that an engine names without a year: in this year, or in the last one if it is still to come."""
    year = time.localtime().tm_year
    moment = datetime.strptime(  # noqa: DTZ007  engines log local time
        f"{year}-{month_to_second}", "%Y-%m-%d %H:%M:%S"
    ).timestamp()
    if moment < time.time() + DAY_S:
        return moment
    return moment - 365 * DAY_S


def _new_entries(log_folder: Path, target: str) -> Iterator[LogEntry]:
    """Yield what is added to the newest file of each source, also when it is begun anew; for ever."""
    readers = defaultdict[str, AddedLines](AddedLines)
    # Files that are there now are read from their end, later ones from their beginning.
    is_first_look = True
    while True:
        for source, paths in _log_files(log_folder, target):
            # A file may be numbered anew between the listing and the reading.
            with suppress(FileNotFoundError):
                lines = readers[source].read(paths[-1], skip_present=is_first_look)
                for entry in _entries(source, lines):
                    yield entry._replace(at=entry.at or time.time())
        is_first_look = False
        time.sleep(FOLLOW_S)


class AddedLines:
    """Reads the lines that are added to a source's newest file."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._begun_line = ""

    def read(self, path: Path, *, skip_present: bool) -> list[str]:
        """Return the lines that were added since the last call; those of a new file from its beginning.

        Args:
            path: The newest file.
            skip_present: Leave out what a file has that is not open yet.
        """
        file = self._file
        if file is None or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            file = self._switch_to(path, skip_present=skip_present)
        text = self._begun_line + file.read()
        whole_lines, newline, self._begun_line = text.rpartition("\n")
        if not newline:
            return []
        return whole_lines.split("\n")

    def _switch_to(self, path: Path, *, skip_present: bool) -> IO[str]:
        """Open a file, after the rest of the file before it, to which nothing is added any more."""
        previous_file = self._file
        file = path.open(encoding="utf-8", errors="replace")
        self._file = file
        if skip_present:
            file.seek(0, os.SEEK_END)
        if previous_file is not None:
            with previous_file:
                self._begun_line += previous_file.read()
        return file


def _moment(text: str) -> float:
    """Return the moment that ``--since`` names, as an age or as a time."""
    age = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if age is not None:
        return time.time() - float(age[1]) * UNITS_S[age[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise OperationError(
            f"--since {text!r}: give an age (90s, 10m, 2h, 1d) or a time (2026-05-01T14:30)"
        ) from None


def _print(entry: LogEntry, source_width: int) -> None:
    is_today = time.time() - entry.at < DAY_S
    clock_format = "%H:%M:%S" if is_today else "%m-%d %H:%M:%S"
    clock_text = time.strftime(clock_format, time.localtime(entry.at))
    escaped_text = "\n".join(
        escaped(styled_line) for styled_line in entry.text.split("\n")
    )
    level_shade = LEVEL_SHADES.get(entry.level)
    source_kind = entry.source.rpartition("-")[0]
    styled_parts = [
        typer.style(clock_text, dim=True),
        typer.style(
            f"{entry.source:{source_width}}",
            fg=SOURCE_SHADES.get(source_kind, "yellow"),
        ),
        typer.style(
            f"{entry.level.upper():8}", fg=level_shade, bold=level_shade is not None
        ),
        typer.style(escaped_text, fg=level_shade),
    ]
    styled_line = " ".join(styled_parts)
    if entry.trace_id:
        styled_line += typer.style(f"  trace={entry.trace_id}", dim=True)
    color_mode = False if os.environ.get("NO_COLOR") else None
    typer.echo(styled_line, color=color_mode)
