"""Read the log files of engines and routers as one log: parsed, merged by time, filtered and followed.

Engines write ``REPLICA.log`` (vLLM's lines: local time to the second, without a year); ``REPLICA.log.1`` is of the
start before. Routers write JSON lines to ``router-PORT.log``; rotated files are numbered. A line without a time belongs
to the line above it.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import IO, TYPE_CHECKING, Any

from router.telemetry.logs import request_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

ROUTER = "router"
LEVELS = ("debug", "info", "warning", "error", "critical")
NEW_FILE = "--- the engine was started anew: its log begins again ---"
ABOVE_LINES = 400  # more than a traceback has
_BLOCK = 1 << 16
_DAY_S = 86_400
_FILE = re.compile(r"^(?P<source>.+)\.log(?:\.(?P<age>\d+))?$")
_PROCESS = r"^(?:\((?P<process>\S+)(?: pid=\d+)?\) )?"
_VLLM = re.compile(_PROCESS + r"(?P<level>[A-Z]+) (?P<day>\d\d-\d\d) (?P<clock>\d\d:\d\d:\d\d) (?P<text>.*)$")
_UVICORN = re.compile(_PROCESS + r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL): +(?P<text>.*)$")
_BARE = re.compile(_PROCESS + r"(?P<text>.*)$")
_TRACEBACK = "Traceback (most recent call last)"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line.

    Attributes:
        at: Unix seconds; a line without a time has that of the line above.
        source: ``fast-0``, ``router-8080``.
        level: One of ``LEVELS``.
        begins: Whether the line has a level of its own; other lines belong to the line above.
        fields: All fields of a router's line.
    """

    at: float
    source: str
    level: str
    text: str
    begins: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogFile:
    """A log file; ``age`` is the number of newer files of its source."""

    source: str
    age: int
    path: Path


@dataclass(slots=True)
class Filter:
    """Which lines are shown. For one pass: it remembers the lines above, and the requests of the trace.

    Attributes:
        since: Unix seconds.
        level: The lowest level shown.
        trace: Trace id, or its beginning.
        request: Request id, or its beginning.
    """

    since: float = 0.0
    level: str = LEVELS[0]
    trace: str = ""
    request: str = ""
    _requests: set[str] = field(default_factory=set)
    _above: dict[str, bool] = field(default_factory=dict)

    @property
    def everything(self) -> bool:
        """Return whether no line is left out."""
        return not (self.since or self.trace or self.request or self.level != LEVELS[0])

    def shows(self, entry: Entry) -> bool:
        """Return whether a line is shown."""
        if entry.begins:
            self._above[entry.source] = _rank(entry.level) >= _rank(self.level) and self._meant(entry)
        return entry.at >= self.since and self._above.get(entry.source, False)

    def learn(self, entry: Entry) -> None:
        """Note the requests of the wanted trace: engines log request ids, not trace ids."""
        if self.trace and str(entry.fields.get("trace_id", "")).startswith(self.trace):
            self._requests.add(str(entry.fields["request_id"]))

    def _meant(self, entry: Entry) -> bool:
        if not (self.trace or self.request):
            return True
        if entry.fields:
            self.learn(entry)
            trace, request = (str(entry.fields.get(name, "")) for name in ("trace_id", "request_id"))
            return trace.startswith(self.trace) and request.startswith(self.request)
        wanted = {self.request} if self.request else {self.trace, *self._requests}
        return any(each in entry.text for each in wanted)


def find_files(folder: Path, target: str = "") -> tuple[LogFile, ...]:
    """Return a folder's log files, by source, the oldest first.

    Args:
        folder: ``engine.log_dir``.
        target: A replica, a tier, or ``router``; empty: all.
    """
    meant = re.compile(rf"{re.escape(target)}(-\d+)?" if target else ".+")
    try:
        named = [(path, _FILE.match(path.name)) for path in folder.iterdir()]
    except OSError:
        return ()
    found = [LogFile(match["source"], int(match["age"] or 0), path) for path, match in named if match]
    return tuple(sorted((f for f in found if meant.fullmatch(f.source)), key=lambda f: (f.source, -f.age)))


class Parser:
    """Parses one source's lines, in order.

    Args of the constructor:
        source: Whose lines they are.
        at: Unix seconds of lines before the first that has a time.
    """

    def __init__(self, source: str, at: float) -> None:
        self._source, self._at, self._level = source, at, "info"
        self._day, self._midnight = "", 0.0

    def entries(self, lines: Iterable[bytes], written: float) -> Iterator[Entry]:
        """Yield an entry for each line, and for each line of an exception.

        Args:
            lines: Lines of the file.
            written: When the file was last written, in Unix seconds: its lines are not newer.
        """
        is_router = self._source.startswith(f"{ROUTER}-")
        for raw in lines:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            yield from self._router_line(line) if is_router else self._engine_line(line, written)

    def _router_line(self, line: str) -> Iterator[Entry]:
        try:
            fields = json.loads(line)
            self._at = max(self._at, float(fields["at"]))
            self._level = str(fields["level"])
            entry = Entry(self._at, self._source, self._level, _message(fields), fields=fields)
        except (ValueError, KeyError, TypeError):  # incomplete: the router was killed
            entry = Entry(self._at, self._source, self._level, line, begins=False)
        yield entry
        for more in str(entry.fields.get("exception", "")).splitlines():
            yield replace(entry, text=more, begins=False, fields={})

    def _engine_line(self, line: str, written: float) -> Iterator[Entry]:
        line = _COLOURS.sub("", line)
        match = _VLLM.match(line)
        if match is not None:
            self._at = max(self._at, self._time(match["day"], match["clock"], written))
        match = match or _UVICORN.match(line)
        begins = match is not None or _TRACEBACK in line
        if begins:
            self._level = match["level"].lower() if match is not None else "error"
        match = match or _BARE.match(line)
        assert match is not None
        process = f"({match['process']}) " if match["process"] and match["process"] != "APIServer" else ""
        yield Entry(self._at, self._source, self._level, process + match["text"], begins=begins)

    def _time(self, day: str, clock: str, written: float) -> float:
        """Return the Unix seconds of a local time without a year: the last such time before the file's last change."""
        if day != self._day:
            self._day, year = day, time.localtime(written).tm_year
            month, date = int(day[:2]), int(day[3:])
            self._midnight = time.mktime((year, month, date, 0, 0, 0, 0, 0, -1))
            if self._midnight > written + _DAY_S:
                self._midnight = time.mktime((year - 1, month, date, 0, 0, 0, 0, 0, -1))
        return self._midnight + int(clock[:2]) * 3600 + int(clock[3:5]) * 60 + int(clock[6:])


def _message(fields: Mapping[str, Any]) -> str:
    """Return what a router's line says; of a request that has ended, made from its fields."""
    if fields.get("event") == "request":
        with suppress(KeyError, TypeError):  # another release's
            return request_line(fields)
    return str(fields["message"])


class Tail:
    """One source's log: its lines, then those added, across rotation and restarts of the engine.

    Args of the constructor:
        source: Whose log it is.
        files: Its files, the oldest first; the newest is followed.
    """

    def __init__(self, source: str, files: Sequence[LogFile]) -> None:
        self.source, self._older, self._path = source, files[:-1], files[-1].path
        self._file: IO[bytes] | None = self._path.open("rb")
        self._rest = b""
        self._parser: Parser | None = None

    def entries(self, count: int | None) -> Iterator[Entry]:
        """Yield the entries that the files have now.

        Args:
            count: Begin at least this many lines before the end; None: at the beginning.
        """
        assert self._file is not None
        if count is not None:
            count += ABOVE_LINES  # the first lines shown may have their time from a line above
        begin = _go_back(self._file, count)
        older: list[IO[bytes]] = []
        for log_file in reversed(self._older):
            if count is not None and begin >= count:
                break
            with suppress(OSError):
                older.insert(0, log_file.path.open("rb"))
                begin += _go_back(older[0], None if count is None else count - begin)
        for file in older:
            with file:
                yield from self._parsed(file, file.fileno())
        yield from self._parsed(self._complete_lines(), self._file.fileno())

    def more(self) -> Iterator[Entry]:
        """Yield the entries added since."""
        if self._file is not None:
            yield from self._parsed(self._complete_lines(), self._file.fileno())
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return
        if self._file is not None:
            mine = os.fstat(self._file.fileno())
            if os.path.samestat(now, mine) and now.st_size >= self._file.tell():
                return
            yield from self._parsed(self._complete_lines(), self._file.fileno())  # written just before it was renamed
            self._file.close()
        self._file, self._rest = self._path.open("rb"), b""
        if not self.source.startswith(ROUTER):
            self._parser = None
            begins = _first_time(self._file.fileno(), self.source, now.st_mtime)
            yield Entry(begins, self.source, "warning", NEW_FILE)
        yield from self._parsed(self._complete_lines(), self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _parsed(self, lines: Iterable[bytes], number: int) -> Iterator[Entry]:
        written = os.fstat(number).st_mtime
        if self._parser is None:
            self._parser = Parser(self.source, _first_time(number, self.source, written))
        yield from self._parser.entries(lines, written)

    def _complete_lines(self) -> Iterator[bytes]:
        assert self._file is not None
        while block := self._file.read(_BLOCK):
            *lines, self._rest = (self._rest + block).split(b"\n")
            yield from lines


def _go_back(file: IO[bytes], count: int | None) -> int:
    """Move a file's position to the beginning of its last ``count`` lines (None: of all); return how many there are."""
    if count is None:
        file.seek(0)
        return 0
    position, found = file.seek(0, os.SEEK_END), 0
    while position > 0:
        size = min(_BLOCK, position)
        position -= size
        file.seek(position)
        block = file.read(size)
        here = block.count(b"\n")
        if found + here > count:
            surplus = found + here - count
            file.seek(position + size - len(block.split(b"\n", surplus)[-1]))
            return count
        found += here
    file.seek(0)
    return found


def _first_time(number: int, source: str, written: float) -> float:
    """Return the time of a file's first line that has one; without any, the time of its last change."""
    parser = Parser(source, 0.0)
    for entry in parser.entries(os.pread(number, _BLOCK, 0).split(b"\n")[:-1], written):
        if entry.at:
            return entry.at
    return written


class Logs:
    """All sources together.

    Args of the constructor:
        folder: ``engine.log_dir``.
        target: As for ``find_files``.
        wanted: Which lines are shown.
    """

    def __init__(self, folder: Path, target: str, wanted: Filter) -> None:
        self._folder, self._target, self._wanted = folder, target, wanted
        self._tails: dict[str, Tail] = {}
        self._look()

    def last(self, count: int | None) -> list[Entry]:
        """Return the last ``count`` lines shown, by time; None: all."""
        if self._wanted.trace:
            for log_file in find_files(self._folder, ROUTER):
                with log_file.path.open("rb") as file:
                    for entry in Parser(f"{ROUTER}-0", 0.0).entries(file, 0.0):
                        self._wanted.learn(entry)
        each = [tail.entries(count if self._wanted.everything else None) for tail in self._tails.values()]
        merged = heapq.merge(*each, key=lambda entry: entry.at)
        return list(deque((e for e in merged if self._wanted.shows(e)), maxlen=count))

    def more(self) -> list[Entry]:
        """Return the lines added since, by time, also from new files."""
        begun = self._look()
        found = [*(tail.entries(None) for tail in begun), *(t.more() for t in self._tails.values() if t not in begun)]
        return [e for e in sorted(chain(*found), key=lambda entry: entry.at) if self._wanted.shows(e)]

    def close(self) -> None:
        """Close all files."""
        for tail in self._tails.values():
            tail.close()

    def _look(self) -> list[Tail]:
        """Open the logs of new sources; return those."""
        begun = []
        for source, files in groupby(find_files(self._folder, self._target), key=lambda file: file.source):
            mine = tuple(files)
            if source not in self._tails and not mine[-1].age:
                with suppress(OSError):
                    begun.append(Tail(source, mine))
                    self._tails[source] = begun[-1]
        return begun


def _rank(level: str) -> int:
    return LEVELS.index(level if level in LEVELS else "info")
