"""The router's own log: lines for a person on standard error, and JSON lines in a file that ``qarr logs`` reads.

Every line of a request carries its ids. No line has prompts, keys, headers or query strings. A thread writes the lines, so
that a stopped terminal or a slow disk delays no request; where more come than can be written, some are left out, and the
log says how many. ``telemetry.request_lines`` says where the line of each inference request goes.

The standard library's handlers do the work; subclasses, here and in ``router/line_file.py``, add what these lack: a full
queue that leaves lines out and counts them, an end that waits for a bounded time only, one line about lost lines instead of
a traceback for each, files that only their owner may read and that are begun anew once they are removed, tracebacks as a
field of their own, and lines that are written together, at half the CPU time.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from logging.handlers import QueueHandler
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, cast
from urllib.parse import quote

from msgspec import Struct
from starlette.types import Scope

from router.line_file import (
    LossCountingHandler,
    PrivateFile,
    Writer,
    begin_line,
    made_record,
)
from router.telemetry.log_format import JsonFormatter, TextFormatter, shown_ms
from router.telemetry.record import KeptFor, RequestRecord
from router.telemetry.settings import TelemetrySettings

ROUTER_FILE = "router-{port}.log"
OLD_FILES = 3
# Most characters of a message: an engine's error may have any length.
MAX_CHARS = 4_000
PATH_CHARS = 120
# Paths whose 503 is no failure; load balancers ask every second.
NOT_LOGGED = {"/health", "/healthz", "/readyz"}
# Characters of a path that are not quoted, beside letters and digits.
_PLAIN = "/:@{}+,;=~"
# The first HTTP status of each kind of error.
SERVER_ERROR = 500
CLIENT_ERROR = 400
# The loggers of replicas' states, for which `qarr up` has lines of its own.
SHOWN_BY_THE_COMMAND = "qarr.tiers.lifecycle"

log = logging.getLogger("qarr.request")


class _PresentRequest(Struct, frozen=True):
    """The ids of the request that a task serves, and when it arrived, in seconds by the monotonic clock."""

    request_id: str
    trace_id: str
    arrived: float


_PRESENT_REQUEST: ContextVar[_PresentRequest | None] = ContextVar(
    "qarr_request", default=None
)


def begin_request(request_id: str, trace_id: str) -> None:
    """Put a request's ids on every line that this task, and the tasks that it starts, log from now on."""
    _PRESENT_REQUEST.set(_PresentRequest(request_id, trace_id, time.monotonic()))


def log_request(record: RequestRecord) -> None:
    """Log the line of an inference request that has ended."""
    level = logging.WARNING if record.kept_for is KeptFor.ERROR else logging.INFO
    if not log.isEnabledFor(level):
        return
    text = f"POST {record.route} {record.outcome._value_}"
    ids = (record.request_id, record.trace_id)
    line = made_record(log.name, level, text, fields=record, ids=ids)
    current = Logging.current
    if current is None:
        log.handle(line)
    else:  # The line is complete: on its way to the queue, loggers and handlers would only look at it.
        current.queue(line)


def log_failure(scope: Scope, status: int) -> None:
    """Log a request that no record is made of, and that failed."""
    present_request = _PRESENT_REQUEST.get()
    if present_request is None or scope["path"] in NOT_LOGGED:
        return
    method = scope["method"]
    route = quote(scope["path"], safe=_PLAIN)[:PATH_CHARS]
    duration_ms = (time.monotonic() - present_request.arrived) * 1000
    fields = {
        "event": "http",
        "method": method,
        "route": route,
        "status": status,
        "duration_ms": round(duration_ms, 1),
    }
    level = logging.WARNING if status >= SERVER_ERROR else logging.INFO
    log.log(
        level,
        "%s %s %d in %s",
        method,
        route,
        status,
        shown_ms(duration_ms),
        extra={"fields": fields},
    )


class Logging:
    """The process's logging, to standard error and perhaps a file, until ``stop``."""

    # The one that has taken over the process's log; None: there is none.
    current: ClassVar[Logging | None] = None

    def __init__(self, telemetry: TelemetrySettings) -> None:
        self._telemetry = telemetry
        self._stderr = StderrHandler(telemetry)
        self._file: LogFile | None = None
        self._writer = Writer(self._stderr)
        self.queue = self._writer.put
        self._queue_handler = PreparingHandler(cast("Any", self._writer))
        # Nobody reads thread and process from a record.
        logging.logThreads = False
        logging.logProcesses = False
        logging.logMultiprocessing = False
        logging.basicConfig(
            level=logging.WARNING, handlers=[self._queue_handler], force=True
        )
        logging.captureWarnings(True)
        self.set_level(telemetry)
        self._former_stderr = sys.stderr
        self._former_hook = sys.excepthook
        self._former_thread_hook = threading.excepthook
        self._is_json_only = self._stderr.is_json and not sys.stderr.isatty()
        if self._is_json_only:
            sys.stderr = _LoggedPrints()
            sys.excepthook = _log_uncaught
            threading.excepthook = _log_uncaught_in_thread
        Logging.current = self
        atexit.register(self.stop)

    def also_to_file(self, folder: Path, port: int) -> Path | None:
        """Write to the router's file in ``engine.log_dir`` as well, unless the settings want none or it cannot be opened.

        Return it if the lines of requests that end well go there and not to standard error.
        """
        if not self._telemetry.log_file_mb:
            return None
        path = folder / ROUTER_FILE.format(port=port)
        max_bytes = self._telemetry.log_file_mb << 20
        try:
            file = LogFile(path, max_bytes, kept=OLD_FILES, what="the log")
        except OSError as error:
            logging.getLogger("qarr.router").warning(
                "no log is kept in %s: %s", path, error.strerror
            )
            return None
        file.setFormatter(JsonFormatter())
        file.setLevel(min(_level(self._telemetry), logging.INFO))
        request_lines = self._telemetry.request_lines
        file.has_requests = request_lines != "stderr"
        if request_lines == "auto" and not self._stderr.is_json:
            self._stderr.has_requests = False
        self._file = file
        # The file comes first: a terminal may be stopped.
        self._writer.handlers = (file, self._stderr)
        self.set_level(self._telemetry)
        return path if file.has_requests and not self._stderr.has_requests else None

    def set_level(self, telemetry: TelemetrySettings) -> None:
        """Take a level over. Lines of requests that end well are not made where neither place is for them."""
        level = _level(telemetry)
        level_of_file = min(level, logging.INFO)
        logging.getLogger("qarr").setLevel(level_of_file)
        self._stderr.setLevel(level)
        are_requests_wanted = self._stderr.has_requests
        if self._file is not None:
            self._file.setLevel(level_of_file)
            are_requests_wanted = are_requests_wanted or self._file.has_requests
        log.setLevel(logging.INFO if are_requests_wanted else logging.WARNING)

    def say(self, write: Callable[[], None]) -> None:
        """Have the thread write something else to standard error, in order; where that makes a log line, make it now."""
        if self._is_json_only:
            write()
        else:
            self._writer.put(write)

    def stop(self) -> bool:
        """Write what is queued, and release the log; return False if it cannot be written, as to a stopped terminal."""
        sys.stderr = self._former_stderr
        sys.excepthook = self._former_hook
        threading.excepthook = self._former_thread_hook
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(self._queue_handler)
        Logging.current = None
        log.setLevel(logging.NOTSET)
        atexit.unregister(self.stop)
        is_written = self._writer.close()
        if is_written and self._file is not None:
            self._file.close()
        return is_written


def _level(telemetry: TelemetrySettings) -> int:
    return logging.getLevelNamesMapping()[telemetry.log_level.upper()]


def _is_good_request(record: logging.LogRecord) -> bool:
    """Tell whether a line is that of a request that did not fail by the router's fault."""
    return (
        record.name == log.name
        and record.levelno < logging.WARNING
        and hasattr(record, "fields")
    )


class PreparingHandler(QueueHandler):
    """Queues records as they are, with their messages formatted and their ids."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Format the message now: its arguments may change. The record is not copied: no other handler gets it."""
        text = record.getMessage()
        if record.exc_info and record.name.startswith("opentelemetry"):
            # OpenTelemetry logs a traceback where a line is enough, as for a variable that is not valid.
            _, error, _ = record.exc_info
            if error is not None:
                text = f"{text} ({error!r})"
                record.exc_info = None
        if len(text) > MAX_CHARS:
            text = f"{text[:MAX_CHARS]}... ({len(text)} characters)"
        record.msg = text
        record.args = None
        if not hasattr(record, "ids"):
            record.__dict__["ids"] = _present_ids()
        return record


def _present_ids() -> tuple[str, str] | None:
    present_request = _PRESENT_REQUEST.get()
    if present_request is None:
        return None
    return present_request.request_id, present_request.trace_id


class _LoggedPrints(io.TextIOBase):
    """Standard error while only JSON may go there: what a command or a library prints is logged."""

    def write(self, text: str) -> int:
        line = text.strip()
        if line:
            level = logging.ERROR if text.startswith("error:") else logging.INFO
            logging.getLogger("qarr.command").log(level, "%s", line)
        return len(text)


def _log_uncaught(
    error_class: type[BaseException],
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    exc_info = (error_class, error or error_class(), trace)
    logging.getLogger("qarr.command").critical(
        "an error that nobody expected: %r", error, exc_info=exc_info
    )


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


class LogFile(PrivateFile):
    """The log file; ``has_requests``: the lines of requests that ended well are for it."""

    has_requests = True

    def filter(self, record: logging.LogRecord) -> bool:
        return self.has_requests or not _is_good_request(record)


class StderrHandler(LossCountingHandler, logging.StreamHandler[Any]):
    """Standard error, which may be a file on a full disk, or a pipe that nobody reads any longer.

    ``has_requests``: the lines of requests that ended well are for it.
    """

    what = "standard error"
    _is_line_cut_off = False  # The last line was, perhaps midway.

    def __init__(self, telemetry: TelemetrySettings) -> None:
        super().__init__(sys.stderr)
        self.is_json = telemetry.log_format == "json"
        if self.is_json:
            self.setFormatter(JsonFormatter())
        else:
            has_colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
            self.setFormatter(TextFormatter(colour=has_colour))
        self.setLevel(_level(telemetry))
        self.has_requests = (
            telemetry.request_lines != "file" and self.level <= logging.INFO
        )

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the library's name
        super().handleError(record)
        self._is_line_cut_off = True

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_line_cut_off:
            self._is_line_cut_off = False
            # If it still cannot be written, writing the line itself fails as well.
            with suppress(OSError, ValueError):
                self.stream.flush()
                begin_line(self.stream)
        super().emit(record)

    def filter(self, record: logging.LogRecord) -> bool:
        """Leave out lines that are not for it, and states of replicas, for which the command has lines of its own."""
        is_replica_state = (
            record.name.startswith(SHOWN_BY_THE_COMMAND)
            and record.levelno < logging.ERROR
        )
        if is_replica_state and not self.is_json:
            return False
        return self.has_requests or not _is_good_request(record)
