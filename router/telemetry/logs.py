"""The router's own log: lines for a person on standard error, and JSON lines in a file that ``qarr logs`` reads.

Every line of a request carries its ids. No line has prompts, keys, headers or query strings. A thread writes the lines, so
that a stopped terminal or a slow disk delays no request; where more come than can be written, some are left out, and the
log says how many.
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
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from router.line_file import GATHERED_S, LAST_LINES_S, LineFile, LostLines
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
NOT_LOGGED = {"/healthz", "/readyz"}  # their 503 is no failure, and load balancers ask every second
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
    level = logging.WARNING if record.outcome in {Outcome.REFUSED, Outcome.ERROR} else logging.INFO
    if log.isEnabledFor(level):
        fields = render_summary(record)
        fields["arrived_at"] = fields.pop("at")
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
    parts.extend(name for name in ("escalated", "hedged") if record[name])
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


class Logging:
    """The process's logging, to standard error and perhaps a file, until ``stop``."""

    def __init__(self, telemetry: TelemetrySettings) -> None:
        """Take over the process's log."""
        self._telemetry = telemetry
        self._queue: Queue[Any] = Queue(QUEUED_LINES)
        self._writer = _Writer(self._queue, _stderr_handler(telemetry))
        self._handler = _RequestHandler(self._queue)
        logging.basicConfig(level=logging.WARNING, handlers=[self._handler], force=True)
        logging.getLogger("qarr").setLevel(min(_level(telemetry), logging.INFO))
        self._writer.start()
        atexit.register(self.stop)

    def also_to_file(self, folder: Path, port: int) -> None:
        """Write to the router's file as well, unless the settings want none or it cannot be opened.

        Args:
            folder: ``engine.log_dir``.
            port: That the router listens on.
        """
        if not self._telemetry.log_file_mb:
            return
        path = folder / ROUTER_FILE.format(port=port)
        try:
            handler = _File(path, self._telemetry.log_file_mb << 20, self._telemetry.log_files)
        except OSError as error:
            logging.getLogger("qarr.router").warning("no log is kept in %s: %s", path, error.strerror)
            return
        handler.setLevel(min(_level(self._telemetry), logging.INFO))
        handler.setFormatter(JsonFormatter())
        self._writer.handlers = (*self._writer.handlers, handler)

    def say(self, write: Callable[[], None]) -> None:
        """Have the thread write something else to standard error, in order."""
        with suppress(Full):
            self._queue.put_nowait(write)

    def stop(self) -> bool:
        """Write what is queued, and release the log; return False if it cannot be written, as to a stopped terminal."""
        logging.getLogger().removeHandler(self._handler)
        atexit.unregister(self.stop)
        self._writer.stop()
        return not self._writer.stuck


def _level(telemetry: TelemetrySettings) -> int:
    return logging.getLevelNamesMapping()[telemetry.log_level.upper()]


def _stderr_handler(telemetry: TelemetrySettings) -> logging.Handler:
    handler = _Stream()
    handler.setLevel(_level(telemetry))
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    handler.setFormatter(JsonFormatter() if telemetry.log_format == "json" else TextFormatter(colour=colour))
    if telemetry.log_format == "text":
        handler.addFilter(
            lambda record: not record.name.startswith(SHOWN_BY_THE_COMMAND) or record.levelno >= logging.ERROR
        )
    return handler


class _RequestHandler(QueueHandler):
    """Queues lines for the thread that writes them, with the ids of their request."""

    def __init__(self, queue: Queue[Any]) -> None:
        super().__init__(queue)
        self._left_out = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Format the message now: its arguments may change. The record is not copied: no other handler gets it."""
        text = record.getMessage()
        record.msg = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text)} characters)"
        record.args = None
        ids = _REQUEST.get()
        record.__dict__["ids"] = (ids.request_id, ids.trace_id) if ids is not None else None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a line; if the queue is full, count it."""
        try:
            if self._left_out:
                text = f"{self._left_out} lines are left out here: they came faster than they could be written"
                self.queue.put_nowait(self.prepare(logging.makeLogRecord({
                    "name": "qarr.router", "levelno": logging.WARNING, "levelname": "WARNING", "msg": text})))  # fmt: skip
                self._left_out = 0
            self.queue.put_nowait(record)
        except Full:
            self._left_out += 1


class _Writer(QueueListener):
    """The thread that writes."""

    _thread: Any
    stuck = False

    def __init__(self, lines: Queue[Any], handler: logging.Handler) -> None:
        super().__init__(lines, handler, respect_handler_level=True)
        self._lines = lines

    def dequeue(self, block: bool) -> Any:  # noqa: FBT001  the library's
        """Wait for a line, then for others that may follow: each waking takes the interpreter from the event loop."""
        if self._lines.empty():
            time.sleep(GATHERED_S)
        return super().dequeue(block)

    def handle(self, record: Any) -> None:
        """Write a line, or call the function that writes something else."""
        if isinstance(record, logging.LogRecord):
            super().handle(record)
        else:
            with suppress(Exception):  # nobody reads standard error any longer
                record()

    def stop(self) -> None:
        """Write what is queued, waiting ``LAST_LINES_S`` at most: a terminal may be stopped."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self.stuck = True
        with suppress(Full):
            self.enqueue_sentinel()
            thread.join(LAST_LINES_S)
            self.stuck = thread.is_alive()

    def enqueue_sentinel(self) -> None:
        """Ask the thread to end."""
        self.queue.put_nowait(None)


class _File(logging.Handler):
    """A file rotated by size; during a handover another router on the same port may rotate it too."""

    def __init__(self, path: Path, max_bytes: int, kept: int) -> None:
        """Open the file.

        Raises:
            OSError: It cannot be opened.
        """
        super().__init__()
        self._file = LineFile(path, max_bytes, kept)
        self._file.open()
        self._losses = LostLines(f"the log {path}")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; no error stops the thread."""
        try:
            self._file.write(self.format(record).encode("utf-8", "backslashreplace"))
        except Exception as error:  # noqa: BLE001  one line must not end the log
            self._losses.failed(error)
        else:
            self._losses.written()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


class _Stream(logging.StreamHandler[Any]):
    """Standard error, which may be a file on a full disk, or a pipe that nobody reads any longer."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._losses, self._broken = LostLines("standard error"), False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        self._broken = False
        super().emit(record)
        if not self._broken:
            self._losses.written()

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802  the library's name
        """Count the line instead of writing a traceback for each; the log file says how many are lost."""
        self._broken = True
        self._losses.failed(sys.exc_info()[1])


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
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """One line for a person, with the ids at its end."""

    _COLOURS = {"WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}  # noqa: RUF012

    def __init__(self, *, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with control characters escaped."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", record.msg)
        ids = getattr(record, "ids", None)
        fields = getattr(record, "fields", {})
        request_id, trace_id = ids or (fields.get("request_id"), fields.get("trace_id"))
        tail = f" trace={trace_id}" if trace_id else ""
        if trace_id and str(request_id) not in text:
            tail += f" request={request_id}"
        level = record.levelname
        if self._colour:
            tail = f"\x1b[2m{tail}\x1b[0m" if tail else ""
            clock, shade = f"\x1b[2m{clock}\x1b[0m", self._COLOURS.get(level)
            level = f"\x1b[{shade}m{level}\x1b[0m" if shade else level
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return f"{clock} {level} {text}{tail}{trace}"
