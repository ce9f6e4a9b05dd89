"""Read the log files of engines and routers as one: parsed, merged by time, filtered, and followed while they grow.

Engines write ``REPLICA.log`` (vLLM's lines: local time to the second, without a year), and the start before is
``REPLICA.log.1``. Routers write ``router-PORT.log``, JSON lines, with older ones numbered. A line without a time belongs
to the one above it.
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
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

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
        at: Unix seconds; of the line above where it has none itself.
        source: ``fast-0``, ``router-8080``.
        level: One of ``LEVELS``.
        begins: Whether it has a level of its own; others belong to the line above.
        fields: Of a router's line, all that it holds.
    """

    at: float
    source: str
    level: str
    text: str
    begins: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file, and how many newer ones its source has."""

    source: str
    age: int
    path: Path


@dataclass(slots=True)
class Filter:
    """What is shown. Made for one pass: it remembers what the lines above were, and which requests a trace has.

    Attributes:
        since: Unix seconds.
        level: The lowest that is shown.
        trace: Trace id, or how it begins.
        request: Request id, or how it begins.
    """

    since: float = 0.0
    level: str = LEVELS[0]
    trace: str = ""
    request: str = ""
    _requests: set[str] = field(default_factory=set)
    _above: dict[str, bool] = field(default_factory=dict)

    @property
    def everything(self) -> bool:
        """Tell whether no line is left out."""
        return not (self.since or self.trace or self.request or self.level != LEVELS[0])

    def shows(self, entry: Entry) -> bool:
        """Tell whether a line is shown."""
        if entry.begins:
            self._above[entry.source] = _rank(entry.level) >= _rank(self.level) and self._meant(entry)
        return entry.at >= self.since and self._above.get(entry.source, False)

    def learn(self, entry: Entry) -> None:
        """Note the requests of the trace that is looked for: engines know those, not the trace."""
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
    try:
        named = [(path, _FILE.match(path.name)) for path in folder.iterdir()]
    except OSError:
        return ()
    found = [LogFile(match["source"], int(match["age"] or 0), path) for path, match in named if match]
    return tuple(sorted((f for f in found if _is_meant(f.source, target)), key=lambda f: (f.source, -f.age)))


def _is_meant(source: str, target: str) -> bool:
    return target in {"", source} or (source.startswith(f"{target}-") and source[len(target) + 1 :].isdigit())


class Parser:
    """Reads one source's lines, in order."""

    def __init__(self, source: str, at: float) -> None:
        """Begin.

        Args:
            source: Whose lines they are.
            at: Of lines before the first that has a time; the year of all is reckoned from ``now``.
        """
        self._source, self._at, self._level = source, at, "info"
        self._day, self._midnight = "", 0.0

    def entries(self, lines: Iterable[bytes], written: float) -> Iterator[Entry]:
        """Yield what each line says.

        Args:
            lines: Of the file.
            written: When the file was last written, in Unix seconds: its lines are older.
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
            entry = Entry(self._at, self._source, self._level, str(fields["message"]), fields=fields)
        except (ValueError, KeyError, TypeError):  # cut off, when a router was killed
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
        """Return Unix seconds of a local time without a year: the latest that is not after the file's last change."""
        if day != self._day:
            self._day, year = day, time.localtime(written).tm_year
            month, date = int(day[:2]), int(day[3:])
            self._midnight = time.mktime((year, month, date, 0, 0, 0, 0, 0, -1))
            if self._midnight > written + _DAY_S:
                self._midnight = time.mktime((year - 1, month, date, 0, 0, 0, 0, 0, -1))
        return self._midnight + int(clock[:2]) * 3600 + int(clock[3:5]) * 60 + int(clock[6:])


class Tail:
    """One source's log: what is in it, then what is added, also when the file is rotated or the engine started again."""

    def __init__(self, source: str, files: Sequence[LogFile]) -> None:
        """Open a source's newest file.

        Args:
            source: Whose log it is.
            files: Its files, the oldest first; the newest is followed.
        """
        self.source, self._older, self._path = source, files[:-1], files[-1].path
        self._file: IO[bytes] | None = self._path.open("rb")
        self._rest = b""
        self._parser: Parser | None = None

    def entries(self, count: int | None) -> Iterator[Entry]:
        """Yield what is in the files now.

        Args:
            count: Begin at least so many lines before the end; None: at the beginning.
        """
        assert self._file is not None
        if count is not None:
            count += ABOVE_LINES  # so that the first that are shown have their time from a line above
        begin = _go_back(self._file, count)
        older: list[IO[bytes]] = []
        for path in (f.path for f in reversed(self._older)):
            if count is not None and begin >= count:
                break
            with suppress(OSError):
                older.insert(0, path.open("rb"))
                begin += _go_back(older[0], None if count is None else count - begin)
        for file in older:
            with file:
                yield from self._parsed(file, file.fileno())
        yield from self._parsed(self._complete_lines(), self._file.fileno())

    def more(self) -> Iterator[Entry]:
        """Yield what was added since."""
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
    """Move a file's position to the beginning of its last lines; return how many there are, at most."""
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
            index = -1
            for _ in range(surplus):
                index = block.index(b"\n", index + 1)
            file.seek(position + index + 1)
            return count
        found += here
    file.seek(0)
    return found


def _first_time(number: int, source: str, written: float) -> float:
    """Return the time of a file's first line that has one; without any, when the file was written."""
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
        wanted: What is shown.
    """

    def __init__(self, folder: Path, target: str, wanted: Filter) -> None:
        self._folder, self._target, self._wanted = folder, target, wanted
        self._tails: dict[str, Tail] = {}
        self._look()

    def last(self, count: int | None) -> list[Entry]:
        """Return the last lines that are shown, in the order of time; None: all."""
        if self._wanted.trace:
            for path in (f.path for f in find_files(self._folder, ROUTER)):
                with path.open("rb") as file:
                    for entry in Parser(f"{ROUTER}-0", 0.0).entries(file, 0.0):
                        self._wanted.learn(entry)
        each = [tail.entries(count if self._wanted.everything else None) for tail in self._tails.values()]
        merged = heapq.merge(*each, key=lambda entry: entry.at)
        return list(deque((e for e in merged if self._wanted.shows(e)), maxlen=count))

    def more(self) -> list[Entry]:
        """Return what was added since, in the order of time, from new files as well."""
        begun = self._look()
        found = [*(tail.entries(None) for tail in begun), *(t.more() for t in self._tails.values() if t not in begun)]
        return [e for e in sorted(chain(*found), key=lambda entry: entry.at) if self._wanted.shows(e)]

    def close(self) -> None:
        """Close all files."""
        for tail in self._tails.values():
            tail.close()

    def _look(self) -> list[Tail]:
        """Open the files of sources that are not open yet; return those."""
        begun = []
        files = find_files(self._folder, self._target)
        for source in dict.fromkeys(f.source for f in files):
            mine = [f for f in files if f.source == source]
            if source not in self._tails and not mine[-1].age:
                with suppress(OSError):
                    begun.append(Tail(source, mine))
                    self._tails[source] = begun[-1]
        return begun


def _rank(level: str) -> int:
    return LEVELS.index(level) if level in LEVELS else LEVELS.index("info")
