"""Files of lines that grow while the router runs: the standard library's rotating handler, and a thread that writes.

A disk that is full, slow or gone costs lines, and nothing else. The log says when lines begin to be lost, and how many were.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import QueueListener, RotatingFileHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO, cast

from tiers.private_files import (
    OWNER_ONLY,
    ends_within_line,
    make_private_folder,
    open_private,
)

log = logging.getLogger(f"qarr.{__name__}")
# A file counts as mended after this time without a lost line: a disk that is nearly full takes some lines.
CALM_S = 10.0
# Most lines that wait: a request's is kept with its whole record, some 10 kB, until it is written.
QUEUED_LINES = 4_000
# Most lines that are written together.
AT_ONCE = 100
# Lines wait for others this long: each waking of a thread takes the interpreter from the event loop.
GATHERED_S = 0.05
# Longest time for writing what is queued at the end.
LAST_LINES_S = 2.0


def begin_line(stream: TextIO) -> None:
    """Have the next line begin on a line of its own, where a full disk cut off the last one.

    The line's end is buffered: it is written together with the next line, or lost with it.
    """
    if ends_within_line(stream.fileno()):
        stream.write("\n")


class LossCountingHandler(logging.Handler):
    """A handler that counts the lines that it could not write.

    It comes before the handler that writes among the bases of a class. ``what`` names the file in the log.
    """

    what: str
    _lost_lines = 0
    _last_loss_at = 0.0

    def write(self, records: Sequence[logging.LogRecord]) -> None:
        """Write the lines of some records at once: a system call each would take the interpreter from the event loop."""
        formatted_lines = []
        for log_record in records:
            try:
                if log_record.levelno >= self.level and self.filter(log_record):
                    formatted_lines.append(self.format(log_record))
            except Exception:  # noqa: BLE001  as the library does it
                self.handleError(log_record)
        if formatted_lines:
            self.handle(
                made_record(
                    "",
                    logging.CRITICAL,
                    "",
                    whole="\n".join(formatted_lines),
                    lines=len(formatted_lines),
                )
            )

    def format(self, record: logging.LogRecord) -> str:
        formatted_lines: str | None = getattr(record, "whole", None)
        if formatted_lines is not None:
            return formatted_lines
        return super().format(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the library's name
        is_first_loss = not self._lost_lines
        self._last_loss_at = time.monotonic()
        self._lost_lines += getattr(record, "lines", 1)
        if is_first_loss:
            current_error = sys.exception()
            reason_text = getattr(current_error, "strerror", None) or current_error
            log.warning(
                "%s cannot be written (%s): lines are lost until the log says how many",
                self.what,
                reason_text,
            )

    def emit(self, record: logging.LogRecord) -> None:
        lost_before = self._lost_lines
        super().emit(record)
        is_written = lost_before == self._lost_lines
        if (
            lost_before
            and is_written
            and time.monotonic() - self._last_loss_at >= CALM_S
        ):
            self._lost_lines = 0
            log.warning(
                "%s is written again; up to %d lines are lost", self.what, lost_before
            )


class PrivateFile(LossCountingHandler, RotatingFileHandler):
    """A rotated file that only its owner may read; ``OSError`` if it cannot be opened.

    It is opened again if it was moved away or removed, as by another router on the same port during a takeover. Only regular
    files are rotated, and none is if ``max_bytes`` is 0. With ``delay`` it is opened with the first line, since opening some
    files waits. ``what`` names it in the log.
    """

    def __init__(
        self, path: Path, max_bytes: int, kept: int, what: str, *, delay: bool = False
    ) -> None:
        self.what = f"{what} {path}"
        self._path = path
        super().__init__(
            path,
            maxBytes=max_bytes,
            backupCount=kept,
            encoding="utf-8",
            errors="backslashreplace",
            delay=delay,
        )

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the library's name
        super().handleError(record)
        with suppress(OSError):
            self.close()

    def _open(self) -> TextIOWrapper[Any]:
        make_private_folder(self._path.parent)
        open_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        stream = os.fdopen(
            open_private(str(self._path), open_flags),
            "a",
            encoding=self.encoding,
            errors=self.errors,
        )
        begin_line(stream)
        return stream

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802  the library's name
        """Tell whether a line would fill the file; open it again if its name is another file's or nobody's."""
        try:
            file_state = self._path.stat()
            is_own = self.stream is not None and os.path.samestat(
                file_state, os.fstat(self.stream.fileno())
            )
        except OSError:
            is_own = False
        if not is_own:
            self.close()
            self.stream = self._open()
            return False
        would_be_full = (
            self.maxBytes
            and file_state.st_size + len(self.format(record)) > self.maxBytes
        )
        return bool(
            would_be_full and stat.S_ISREG(file_state.st_mode) and file_state.st_size
        )

    def rotate(self, source: str, dest: str) -> None:
        super().rotate(source, dest)
        with suppress(OSError):
            Path(dest).chmod(OWNER_ONLY)


class Writer(QueueListener):
    """Hands log records to handlers in a thread of its own, so that nobody waits for a disk or a terminal.

    ``what`` names the file in the log when lines are left out of it; it is empty for the log itself.
    """

    def __init__(self, *handlers: logging.Handler, what: str = "") -> None:
        self._waiting: SimpleQueue[Any] = SimpleQueue()
        super().__init__(self._waiting, *handlers)
        self._left_out = 0
        self._what = what
        self._gathered: list[logging.LogRecord] = []
        self.start()

    def put(self, item: Any) -> None:
        if self._waiting.qsize() >= QUEUED_LINES:
            self._left_out += 1
            return
        self._report_left_out()
        self._waiting.put(item)

    put_nowait = put  # The library's handler calls it by this name.

    def _report_left_out(self) -> None:
        left_out = self._left_out
        self._left_out = 0
        explanation = (
            "lines are left out here: they came faster than they could be written"
        )
        if left_out and self._what:
            log.warning("%s: %d %s", self._what, left_out, explanation)
        elif left_out:
            self._waiting.put(
                made_record("qarr.router", logging.WARNING, f"{left_out} {explanation}")
            )

    def dequeue(self, block: bool) -> Any:  # noqa: FBT001  the library's signature
        if self._waiting.empty():
            self._write()
            time.sleep(GATHERED_S)
        item = self._waiting.get(block)
        is_end = item is None
        if is_end:
            self._write()
        return item

    def handle(self, record: Any) -> None:
        """Gather a log record, or call a function in its place in the queue."""
        if isinstance(record, logging.LogRecord):
            self._gathered.append(record)
            if len(self._gathered) >= AT_ONCE:
                self._write()
            return
        self._write()
        with suppress(Exception):
            record()

    def _write(self) -> None:
        gathered_records = self._gathered
        self._gathered = []
        if not gathered_records:
            return
        for handler in self.handlers:
            with suppress(Exception):
                cast("LossCountingHandler", handler).write(gathered_records)

    def close(self) -> bool:
        """End the thread once it has written what waits; return whether it has ended within ``LAST_LINES_S``."""
        thread = self._thread
        self._thread = None
        if thread is None:
            return True
        self._report_left_out()
        self._waiting.put(None)  # This ends the library's loop.
        thread.join(LAST_LINES_S)
        return not thread.is_alive()


_RECORD = logging.makeLogRecord({}).__dict__


def made_record(
    name: str, level: int, text: str, **attributes: Any
) -> logging.LogRecord:
    """Return a log record that does not come from a logger."""
    # Its constructor would look for a file, a thread and a process.
    record = logging.LogRecord.__new__(logging.LogRecord)
    now = time.time()
    record.__dict__ = _RECORD | attributes
    record.name = name
    record.levelno = level
    record.levelname = logging.getLevelName(level)
    record.msg = text
    record.created = now
    record.msecs = now * 1000 % 1000
    return record


class _Lines(PrivateFile):
    """A file of lines, each file with its head."""

    _head = ""

    def write(self, records: Sequence[logging.LogRecord]) -> None:
        for record in records:
            self.handle(record)

    def _open(self) -> TextIOWrapper[Any]:
        self._head = ""
        return super()._open()

    def emit(self, record: logging.LogRecord) -> None:
        head = getattr(record, "head", "")
        try:
            if self.shouldRollover(record):
                self.doRollover()
                # The new file is opened with the next line, and needs its head.
                self._head = ""
        except OSError:
            self.handleError(record)
            return
        if head != self._head:
            self._head = head
            record.msg = f"{head}\n{record.msg}"
        super().emit(record)


class LineWriter:
    """A rotated file of lines, written by a thread; each file begins with the head that is given with its first line."""

    def __init__(
        self, path: Path, what: str, max_bytes: int = 0, kept: int = 0
    ) -> None:
        self._file = _Lines(path, max_bytes, kept, what, delay=True)
        self._writer = Writer(self._file, what=self._file.what)

    def put(self, line: bytes, head: bytes = b"") -> None:
        self._writer.put(
            made_record("", logging.INFO, line.decode(), head=head.decode())
        )

    def close(self) -> None:
        if self._writer.close():
            self._file.close()
