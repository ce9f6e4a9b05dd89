"""The router's own log: lines for a person on standard error, and JSON lines in a file that ``qarr logs`` reads.

Every line of a request carries its ids. No line has prompts, keys, headers or query strings. A thread writes the lines, so
that a stopped terminal or a slow disk delays no request; where more come than can be written, some are left out, and the
log says how many.

There is a line for every inference request, so it is made once, for one of the two (``telemetry.request_lines``), and
never is a ``logging.LogRecord``.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import sys
import time
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from logging.handlers import QueueHandler
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import quote

from pydantic_core import to_json

from router.line_file import Batches, LineFile, LostLines
from router.telemetry.record import Outcome, render_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from starlette.types import Scope

    from router.settings import TelemetrySettings
    from router.telemetry.record import RequestRecord

ROUTER_FILE = "router-{port}.log"
QUEUED_LINES = 10_000
MAX_CHARS = 4_000  # of one message: an engine's error may have any length
PATH_CHARS = 120
NOT_LOGGED = {"/health", "/healthz", "/readyz"}  # their 503 is no failure, and load balancers ask every second
_PLAIN = "/:@{}+,;=~"  # characters of a path that are not quoted, beside letters and digits
SHOWN_BY_THE_COMMAND = "qarr.tiers.lifecycle"  # states of replicas: `qarr up` has its own lines for them
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SECONDS = 10_000.0  # times from this many milliseconds on are shown in seconds
_SERVER_ERROR = 500
_CLIENT_ERROR = 400

log = logging.getLogger("qarr.request")


@dataclass(slots=True)
class RequestIds:
    """The request that is being served.

    Attributes:
        began: When it arrived, by the monotonic clock.
        recorded: Whether the line about the whole request was written.
    """

    request_id: str
    trace_id: str
    began: float
    recorded: bool = False


_REQUEST: ContextVar[RequestIds | None] = ContextVar("qarr_request", default=None)


def begin_request(request_id: str, trace_id: str) -> None:
    """Put a request's ids on every line that this task, and the tasks that it starts, log from now on."""
    _REQUEST.set(RequestIds(request_id, trace_id, time.monotonic()))


def log_request(record: RequestRecord) -> None:
    """Log an inference request that has ended."""
    if (ids := _REQUEST.get()) is not None and ids.request_id == record.request_id:
        ids.recorded = True
    outcome = record.outcome
    level = logging.WARNING if outcome is Outcome.REFUSED or outcome is Outcome.ERROR else logging.INFO
    if (current := Logging.current) is not None:
        current.request(record, level)
    elif log.isEnabledFor(level):
        fields = render_summary(record)
        log.log(level, "%s", request_line(fields), extra={"fields": {"event": "request", **fields}})


def log_failure(scope: Scope, status: int) -> None:
    """Log a request that has failed, unless it has a line already.

    Args:
        scope: The request's.
        status: Of its answer; 0: there was no answer.
    """
    ids = _REQUEST.get()
    if status < _CLIENT_ERROR or ids is None or ids.recorded or scope["path"] in NOT_LOGGED:
        return
    method, route = scope["method"], quote(scope["path"], safe=_PLAIN)[:PATH_CHARS]
    took_ms = (time.monotonic() - ids.began) * 1000
    fields = {"event": "http", "method": method, "route": route, "status": status, "duration_ms": round(took_ms, 1)}
    level = logging.WARNING if status >= _SERVER_ERROR else logging.INFO
    log.log(level, "%s %s %d in %s", method, route, status, shown_ms(took_ms), extra={"fields": fields})


def request_line(record: Mapping[str, Any]) -> str:
    """Return a request, as ``render_summary`` gives it, in one line without its ids; unknown values are left out."""
    parts = [f"POST {record['route']} {record['outcome']}"]
    if record["error"]:
        parts.append(f"({record['error']})")
    parts.append(f"class={record['class']}")
    served, decided = record["served_by"], record["tier"]
    if served or decided:
        instead_of = f"(for {decided})" if served and decided not in {served, None} else ""
        parts.append(f"tier={served or decided}{instead_of}")
    parts.extend(f"{name}={record[name]}" for name in ("overflow", "overflow_failure") if record.get(name))
    parts.extend(
        f"{name}={shown_ms(record[key])}"
        for name, key in (("queue", "queue_ms"), ("ttft", "ttft_ms"), ("tpot", "tpot_ms"))
        if record[key]
    )
    parts.append(f"tokens={record['prompt_tokens']}+{record['output_tokens']}")
    parts.append(f"total={shown_ms(record['duration_ms'])}")
    if record["overhead_ms"] is not None:
        parts.append(f"overhead={shown_ms(record['overhead_ms'])}")
    if record["sla_met"] is False:
        parts.append("sla=missed")
    if record["degraded"]:
        parts.append("degraded=" + ",".join(record["degraded"]))
    if record["attempts_failed"]:
        parts.append(f"retries={record['attempts_failed']}")
    if record["continued_on"]:
        parts.append("continued_on=" + ",".join(record["continued_on"]))
    parts += ["mirrored"] if record.get("mirrored") else []
    if record["key"]:
        parts.append(f"key={record['key']}")
    if record["outcome"] == Outcome.REFUSED:
        parts.append(f"why: {record['reason']}")
    return " ".join(parts)


def shown_ms(milliseconds: float | None) -> str:
    """Return a duration in three or four digits."""
    if milliseconds is None:
        return "-"
    if milliseconds >= _SECONDS:
        return f"{milliseconds / 1000:.1f}s"
    return f"{milliseconds:.0f}ms" if milliseconds >= 100 else f"{milliseconds:.1f}ms"  # noqa: PLR2004


class _ShownLine(NamedTuple):
    """A request's line that standard error gets, and perhaps the file as well."""

    text: bytes
    line: bytes | None


class Logging:
    """The process's logging, to standard error and perhaps a file, until ``stop``.

    Attributes:
        current: The one that has taken over the process's log; None: nobody has.
    """

    current: ClassVar[Logging | None] = None

    def __init__(self, telemetry: TelemetrySettings) -> None:
        """Take over the process's log."""
        self._telemetry = telemetry
        self._stderr = _Stream(telemetry)
        self._file: _File | None = None
        self._lines = _Lines("writes the log", self._write, QUEUED_LINES)
        self._handler = _RequestHandler(self._lines)  # type: ignore[arg-type]
        logging.basicConfig(level=logging.WARNING, handlers=[self._handler], force=True)
        logging.getLogger("qarr").setLevel(min(_level(telemetry), logging.INFO))
        Logging.current = self
        atexit.register(self.stop)

    def also_to_file(self, folder: Path, port: int) -> Path | None:
        """Write to the router's file as well, unless the settings want none or it cannot be opened.

        Args:
            folder: ``engine.log_dir``.
            port: That the router listens on.

        Returns:
            The file, if the lines of requests that end well go there and not to standard error.
        """
        if not self._telemetry.log_file_mb:
            return None
        path = folder / ROUTER_FILE.format(port=port)
        try:
            self._file = _File(path, self._telemetry.log_file_mb << 20, self._telemetry.log_files)
        except OSError as error:
            logging.getLogger("qarr.router").warning("no log is kept in %s: %s", path, error.strerror)
            return None
        self._file.setLevel(min(_level(self._telemetry), logging.INFO))
        wanted, stderr = self._telemetry.request_lines, self._stderr
        self._file.requests = wanted != "stderr"
        stderr.requests &= wanted != "auto" or stderr.json
        return path if self._file.requests and not stderr.requests else None

    def set_level(self, telemetry: TelemetrySettings) -> None:
        """Take the level of new settings."""
        level = _level(telemetry)
        logging.getLogger("qarr").setLevel(min(level, logging.INFO))
        self._stderr.setLevel(level)
        if self._file is not None:
            self._file.setLevel(min(level, logging.INFO))

    def request(self, record: RequestRecord, level: int) -> None:
        """Write the line of a request that has ended, to what such lines are for; of one that went wrong, to both."""
        file, stderr, wrong = self._file, self._stderr, level >= logging.WARNING
        in_file = file is not None and (file.requests or wrong)
        shown = stderr.requests or (wrong and level >= stderr.level)
        if not (in_file or shown):
            return
        line = _json_line(record, level) if in_file or stderr.json else None
        if shown:
            text = stderr.text(record, level) if line is None or not stderr.json else line
            self._lines.put(_ShownLine(text, line if in_file else None))
        else:
            self._lines.put(line)

    def say(self, write: Callable[[], None]) -> None:
        """Have the thread write something else to standard error, in order."""
        self._lines.put(write)

    def stop(self) -> bool:
        """Write what is queued, and release the log; return False if it cannot be written, as to a stopped terminal."""
        logging.getLogger().removeHandler(self._handler)
        Logging.current = None
        atexit.unregister(self.stop)
        return self._lines.close()

    def _write(self, batch: list[Any]) -> None:
        """Write lines, and call the functions that write something else; in the thread."""
        file, stderr = self._file, self._stderr
        sinks: list[_Sink] = [stderr] if file is None else [stderr, file]
        for item in batch:
            if isinstance(item, bytes):
                sinks[-1].lines.append(item)
            elif isinstance(item, _ShownLine):
                stderr.lines.append(item.text)
                if item.line is not None:
                    sinks[-1].lines.append(item.line)
            elif isinstance(item, logging.LogRecord):
                for sink in sinks:
                    if item.levelno >= sink.level:
                        sink.handle(item)
            else:
                stderr.flush()
                with suppress(Exception):  # nobody reads standard error any longer
                    item()
        for sink in sinks:
            sink.flush()


def _json_line(record: RequestRecord, level: int) -> bytes:
    """Return a request's line as JSON. Its message is short: ``request_line`` makes the whole one from the same fields."""
    line = render_summary(record)
    line["arrived_at"], line["at"] = line["at"], int(time.time() * 1000) / 1000
    line["level"] = "info" if level == logging.INFO else "warning"
    line["logger"], line["event"] = "qarr.request", "request"
    line["message"] = f"POST {record.route} {line['outcome']}"
    return to_json(line)


def _level(telemetry: TelemetrySettings) -> int:
    return logging.getLevelNamesMapping()[telemetry.log_level.upper()]


class _Lines(Batches[Any]):
    """Log records, request lines and functions for the thread that writes; those that do not fit are counted."""

    _left_out = 0

    def put(self, item: Any) -> bool:
        """Queue a line; if the queue is full, count it."""
        if self._left_out:
            text = f"{self._left_out} lines are left out here: they came faster than they could be written"
            notice = logging.makeLogRecord({
                "name": "qarr.router", "levelno": logging.WARNING, "levelname": "WARNING", "msg": text})  # fmt: skip
            self._left_out = 0 if super().put(notice) else self._left_out
        taken = super().put(item)
        self._left_out += not taken
        return taken


class _RequestHandler(QueueHandler):
    """Queues log records for the thread that writes them, with the ids of their request."""

    queue: Any

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Format the message now: its arguments may change. The record is not copied: no other handler gets it."""
        text = record.getMessage()
        record.msg = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text)} characters)"
        record.args = None
        ids = _REQUEST.get()
        record.__dict__["ids"] = (ids.request_id, ids.trace_id) if ids is not None else None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a line."""
        self.queue.put(record)


class _Sink(logging.Handler):
    """Gathers lines, which ``flush`` writes all at once.

    Attributes:
        lines: Those gathered.
        requests: Whether the lines of requests that ended well are for it.
    """

    def __init__(self, what: str, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[bytes] = []
        self.requests = True
        self._losses = LostLines(what)

    def emit(self, record: logging.LogRecord) -> None:
        """Gather a line; no error stops the thread."""
        try:
            self.lines.append(self.format(record).encode("utf-8", "backslashreplace"))
        except Exception as error:  # noqa: BLE001  one line must not end the log
            self._losses.failed(error)


class _File(_Sink):
    """A file rotated by size; during a handover another router on the same port may rotate it too."""

    def __init__(self, path: Path, max_bytes: int, kept: int) -> None:
        """Open the file.

        Raises:
            OSError: It cannot be opened.
        """
        super().__init__(f"the log {path}", JsonFormatter())
        self._file = LineFile(path, max_bytes, kept)
        self._file.open()

    def flush(self) -> None:
        """Write what is gathered."""
        lines, self.lines = self.lines, []
        if lines:
            self._losses.write(self._file, lines)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


class _Stream(_Sink):
    """Standard error, which may be a file on a full disk, or a pipe that nobody reads any longer.

    Attributes:
        json: Whether its lines are JSON, as the file's are.
    """

    def __init__(self, telemetry: TelemetrySettings) -> None:
        self.json, self._stream = telemetry.log_format == "json", sys.stderr
        self._text = TextFormatter(colour=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
        super().__init__("standard error", JsonFormatter() if self.json else self._text)
        self.setLevel(_level(telemetry))
        self.requests = telemetry.request_lines != "file" and self.level <= logging.INFO
        if not self.json:
            self.addFilter(
                lambda record: not record.name.startswith(SHOWN_BY_THE_COMMAND) or record.levelno >= logging.ERROR
            )

    def text(self, record: RequestRecord, level: int) -> bytes:
        """Return a request's line for a person."""
        text, ids = request_line(render_summary(record)), (record.request_id, record.trace_id)
        return self._text.line(time.time(), logging.getLevelName(level), text, ids).encode("utf-8", "backslashreplace")

    def flush(self) -> None:
        """Write what is gathered; the log file says how many lines are lost."""
        lines, self.lines = self.lines, []
        if not lines:
            return
        try:
            self._stream.write(b"\n".join((*lines, b"")).decode())
            self._stream.flush()
        except Exception as error:  # noqa: BLE001  nobody reads it any longer
            self._losses.failed(error, len(lines))
        else:
            self._losses.written()


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``at`` in Unix seconds, ``level``, ``logger``, ``message``, ids, and a record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.msg,
        }
        if ids := getattr(record, "ids", None):
            line["request_id"], line["trace_id"] = ids
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str, separators=(",", ":"))


class TextFormatter(logging.Formatter):
    """One line for a person, with the ids at its end."""

    _COLOURS = {"WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}  # noqa: RUF012

    def __init__(self, *, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record's line."""
        fields = getattr(record, "fields", {})
        ids = getattr(record, "ids", None) or (fields.get("request_id"), fields.get("trace_id"))
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return self.line(record.created, record.levelname, record.msg, ids) + trace

    def line(self, at: float, level: str, message: str, ids: tuple[str | None, str | None]) -> str:
        """Return a line, with control characters escaped.

        Args:
            at: Unix seconds.
            level: In capitals.
            message: What it says.
            ids: The request's and the trace's, if there are any.
        """
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", message)
        request_id, trace_id = ids
        tail = f" trace={trace_id}" if trace_id else ""
        if trace_id and str(request_id) not in text:
            tail += f" request={request_id}"
        if self._colour:
            tail = f"\x1b[2m{tail}\x1b[0m" if tail else ""
            clock, shade = f"\x1b[2m{clock}\x1b[0m", self._COLOURS.get(level)
            level = f"\x1b[{shade}m{level}\x1b[0m" if shade else level
        return f"{clock} {level} {text}{tail}"
