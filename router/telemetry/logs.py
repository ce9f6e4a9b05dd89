"""The router's own log: lines for a person on standard error, and JSON lines in a file that ``qarr logs`` reads.

Every line of a request carries its ids. No line has prompts, keys, headers or query strings. A thread writes the lines, so
that a stopped terminal or a slow disk delays no request; where more come than can be written, some are left out, and the
log says how many. ``telemetry.request_lines`` says where the line of each inference request goes.
"""

from __future__ import annotations

import atexit
import io
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from logging.handlers import QueueHandler
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, cast
from urllib.parse import quote

from pydantic_core import to_json
from starlette.types import Scope

from router.line_file import (
    LossCountingHandler,
    PrivateFile,
    Writer,
    begin_line,
    made_record,
)
from router.telemetry.record import KeptFor, Outcome, RequestRecord, render_summary
from router.telemetry.settings import TelemetrySettings

ROUTER_FILE = "router-{port}.log"
OLD_FILES = 3
MAX_CHARS = 4_000  # of one message: an engine's error may have any length
PATH_CHARS = 120
# their 503 is no failure, and load balancers ask every second
NOT_LOGGED = {"/health", "/healthz", "/readyz"}
# characters of a path that are not quoted, beside letters and digits
_PLAIN = "/:@{}+,;=~"
# states of replicas: `qarr up` has its own lines for them
SHOWN_BY_THE_COMMAND = "qarr.tiers.lifecycle"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SECONDS = 10_000.0  # times from this many milliseconds on are shown in seconds
SERVER_ERROR, CLIENT_ERROR = 500, 400  # HTTP: the first of each kind

log = logging.getLogger("qarr.request")


# The present request's id, its trace id, and when it arrived, by the monotonic clock.
_REQUEST: ContextVar[tuple[str, str, float] | None] = ContextVar(
    "qarr_request", default=None
)


def begin_request(request_id: str, trace_id: str) -> None:
    """Put a request's ids on every line that this task, and the tasks that it starts, log from now on."""
    _REQUEST.set((request_id, trace_id, time.monotonic()))


def log_request(record: RequestRecord) -> None:
    level = logging.WARNING if record.kept_for is KeptFor.ERROR else logging.INFO
    if log.isEnabledFor(level):
        text, ids = (
            f"POST {record.route} {record.outcome._value_}",
            (record.request_id, record.trace_id),
        )
        made, current = (
            made_record(log.name, level, text, fields=record, ids=ids),
            Logging.current,
        )
        log.handle(made) if current is None else current.put(made)


def log_failure(scope: Scope, status: int) -> None:
    if (ids := _REQUEST.get()) is None or scope["path"] in NOT_LOGGED:
        return
    method, route = scope["method"], quote(scope["path"], safe=_PLAIN)[:PATH_CHARS]
    took_ms = (time.monotonic() - ids[2]) * 1000
    fields = {
        "event": "http",
        "method": method,
        "route": route,
        "status": status,
        "duration_ms": round(took_ms, 1),
    }
    level = logging.WARNING if status >= SERVER_ERROR else logging.INFO
    log.log(
        level,
        "%s %s %d in %s",
        method,
        route,
        status,
        shown_ms(took_ms),
        extra={"fields": fields},
    )


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    # or a request's record, which is rendered in the thread that writes
    fields = getattr(record, "fields", {})
    return (
        fields
        if isinstance(fields, dict)
        else {"event": "request", **render_summary(fields)}
    )


def request_line(record: Mapping[str, Any]) -> str:
    """Return a request, as ``render_summary`` gives it, in one line without its ids; unknown values are left out."""
    served, decided = record["served_by"], record["tier"]
    instead_of = f"(for {decided})" if served and decided not in {served, None} else ""
    times = {
        name: shown_ms(record[f"{name}_ms"]) if record[f"{name}_ms"] else ""
        for name in ("queue", "ttft", "tpot")
    }
    shown = {
        "class": record["class"],
        "tier": f"{served or decided}{instead_of}" if served or decided else "",
        "overflow": record.get("overflow"),
        "overflow_failure": record.get("overflow_failure"),
        **times,
        "tokens": f"{record['prompt_tokens']}+{record['output_tokens']}",
        "total": shown_ms(record["duration_ms"]),
        "overhead": shown_ms(record["overhead_ms"])
        if record["overhead_ms"] is not None
        else "",
        "sla": "missed" if record["sla_met"] is False else "",
        "degraded": ",".join(record["degraded"]),
        "retries": record["attempts_failed"],
        "continued_on": ",".join(record["continued_on"]),
        "key": record["key"],
    }
    error = f" ({record['error']})" if record["error"] else ""
    line = f"POST {record['route']} {record['outcome']}{error} "
    line += " ".join(f"{name}={value}" for name, value in shown.items() if value)
    wrong = record["outcome"] == Outcome.REFUSED or record["outcome"] == Outcome.ERROR
    return f"{line} why: {record['reason']}" if wrong else line


def shown_ms(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    if milliseconds >= _SECONDS:
        return f"{milliseconds / 1000:.1f}s"
    return f"{milliseconds:.0f}ms" if milliseconds >= 100 else f"{milliseconds:.1f}ms"  # noqa: PLR2004


class Logging:
    """The process's logging, to standard error and perhaps a file, until ``stop``."""

    # the one that has taken over the process's log; None: nobody has
    current: ClassVar[Logging | None] = None

    def __init__(self, telemetry: TelemetrySettings) -> None:
        self._telemetry = telemetry
        self._stderr = _Stream(telemetry)
        self._file: _File | None = None
        self._writer = Writer(self._stderr)
        self.put = self._writer.put
        self._handler = _Queued(cast("Any", self._writer))
        # nobody reads them of a record
        logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
        logging.basicConfig(level=logging.WARNING, handlers=[self._handler], force=True)
        logging.captureWarnings(True)
        self.set_level(telemetry)
        self._before = sys.stderr, sys.excepthook, threading.excepthook
        self._only_json = self._stderr.json and not sys.stderr.isatty()
        if self._only_json:
            sys.stderr, sys.excepthook = _Printed(), _log_uncaught
            threading.excepthook = lambda args: _log_uncaught(*args[:3])
        Logging.current = self
        atexit.register(self.stop)

    def also_to_file(self, folder: Path, port: int) -> Path | None:
        """Write to the router's file in ``engine.log_dir`` as well, unless the settings want none or it cannot be opened.

        Return it if the lines of requests that end well go there and not to standard error.
        """
        if not self._telemetry.log_file_mb:
            return None
        path = folder / ROUTER_FILE.format(port=port)
        try:
            self._file = file = _File(
                path, self._telemetry.log_file_mb << 20, OLD_FILES, "the log"
            )
        except OSError as error:
            logging.getLogger("qarr.router").warning(
                "no log is kept in %s: %s", path, error.strerror
            )
            return None
        file.setFormatter(JsonFormatter())
        file.setLevel(min(_level(self._telemetry), logging.INFO))
        wanted, stderr = self._telemetry.request_lines, self._stderr
        file.requests = wanted != "stderr"
        stderr.requests &= wanted != "auto" or stderr.json
        self._writer.handlers = (file, stderr)  # a terminal may be stopped
        self.set_level(self._telemetry)
        return path if file.requests and not stderr.requests else None

    def set_level(self, telemetry: TelemetrySettings) -> None:
        """Take a level over. Lines of requests that end well are not made where neither place is for them."""
        level = _level(telemetry)
        logging.getLogger("qarr").setLevel(min(level, logging.INFO))
        self._stderr.setLevel(level)
        if self._file is not None:
            self._file.setLevel(min(level, logging.INFO))
        wanted = any(
            place is not None and place.requests for place in (self._stderr, self._file)
        )
        log.setLevel(logging.INFO if wanted else logging.WARNING)

    def say(self, write: Callable[[], None]) -> None:
        """Have the thread write something else to standard error, in order; where that makes a log line, make it now."""
        write() if self._only_json else self._writer.put(write)

    def stop(self) -> bool:
        """Write what is queued, and release the log; return False if it cannot be written, as to a stopped terminal."""
        sys.stderr, sys.excepthook, threading.excepthook = self._before
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(self._handler)
        Logging.current = None
        log.setLevel(logging.NOTSET)
        atexit.unregister(self.stop)
        written = self._writer.close()
        if written and self._file is not None:
            self._file.close()
        return written


def _level(telemetry: TelemetrySettings) -> int:
    return logging.getLevelNamesMapping()[telemetry.log_level.upper()]


def _is_request(record: logging.LogRecord) -> bool:
    return (
        record.name == log.name
        and record.levelno < logging.WARNING
        and hasattr(record, "fields")
    )


class _Queued(QueueHandler):
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Format the message now: its arguments may change. The record is not copied: no other handler gets it."""
        text, error = record.getMessage(), (record.exc_info or (None, None, None))[1]
        if error is not None and record.name.startswith("opentelemetry"):
            # as for a variable that is not valid
            record.exc_info, text = None, f"{text} ({error!r})"
        record.msg = (
            text
            if len(text) <= MAX_CHARS
            else f"{text[:MAX_CHARS]}... ({len(text)} characters)"
        )
        record.args = None
        ids = _REQUEST.get()
        record.__dict__["ids"] = ids and ids[:2]
        return record


class _Printed(io.TextIOBase):
    """Standard error while only JSON may go there: what a command or a library prints is logged."""

    def write(self, text: str) -> int:
        if text.strip():
            level = logging.ERROR if text.startswith("error:") else logging.INFO
            logging.getLogger("qarr.command").log(level, "%s", text.strip())
        return len(text)


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    exc_info = (kind, error or kind(), trace)
    logging.getLogger("qarr.command").critical(
        "an error that nobody expected: %r", error, exc_info=exc_info
    )


class _File(PrivateFile):
    """The log file; ``requests``: the lines of requests that ended well are for it."""

    requests = True

    def filter(self, record: logging.LogRecord) -> bool:
        return self.requests or not _is_request(record)


class _Stream(LossCountingHandler, logging.StreamHandler[Any]):
    """Standard error, which may be a file on a full disk, or a pipe that nobody reads any longer."""

    what = "standard error"
    _cut_off = False  # a line was, perhaps midway

    def __init__(self, telemetry: TelemetrySettings) -> None:
        super().__init__(sys.stderr)
        self.json = telemetry.log_format == "json"
        colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self.setFormatter(
            JsonFormatter() if self.json else TextFormatter(colour=colour)
        )
        self.setLevel(_level(telemetry))
        self.requests = telemetry.request_lines != "file" and self.level <= logging.INFO

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the library's name
        super().handleError(record)
        self._cut_off = True

    def emit(self, record: logging.LogRecord) -> None:
        if self._cut_off:
            self._cut_off = False
            # if it still cannot be written, the line itself tells
            with suppress(OSError, ValueError):
                self.stream.flush()
                begin_line(self.stream)
        super().emit(record)

    def filter(self, record: logging.LogRecord) -> bool:
        """Leave out lines that are not for it, and states of replicas, for which the command has lines of its own."""
        if (
            not self.json
            and record.name.startswith(SHOWN_BY_THE_COMMAND)
            and record.levelno < logging.ERROR
        ):
            return False
        return self.requests or not _is_request(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``at`` in Unix seconds, ``level``, ``logger``, ``message``, ids, and a record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.msg,
        }
        if ids := getattr(record, "ids", None):
            line["request_id"], line["trace_id"] = ids
        fields = _fields_of(record)
        line |= fields
        if fields.get("event") == "request":
            line |= {"arrived_at": fields["at"], "at": round(record.created, 3)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return to_json(line, fallback=str, inf_nan_mode="constants").decode()
        except ValueError:  # a lone surrogate, which the file's own encoding escapes
            return json.dumps(
                line, ensure_ascii=False, default=str, separators=(",", ":")
            )


class TextFormatter(logging.Formatter):
    """One line for a person, with the ids at its end."""

    _COLOURS = {"WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}  # noqa: RUF012

    def __init__(self, *, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields_of(record)
        message = (
            request_line(fields)
            if fields.get("event") == "request"
            else str(record.msg)
        )
        request_id, trace_id = getattr(record, "ids", None) or (
            fields.get("request_id"),
            fields.get("trace_id"),
        )
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text, level = escaped(message), record.levelname
        tail = f" trace={trace_id}" if trace_id else ""
        if trace_id and str(request_id) not in text:
            tail += f" request={request_id}"
        if self._colour:
            tail = f"\x1b[2m{tail}\x1b[0m" if tail else ""
            clock, shade = f"\x1b[2m{clock}\x1b[0m", self._COLOURS.get(level)
            level = f"\x1b[{shade}m{level}\x1b[0m" if shade else level
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return f"{clock} {level} {text}{tail}{trace}"


def escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
