"""Files of lines that grow while the router runs: rotated by size, and written by a thread.

A disk that is full, slow or gone costs lines, and nothing else. The log says once that a file cannot be written, and once
that it is written again, with the number of lines lost.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from threading import Lock, Thread

from tiers.private_files import OWNER_ONLY, make_private_folder, open_private

log = logging.getLogger(f"qarr.{__name__}")
CALM_S = 10.0  # without a lost line, until a file counts as mended: a disk that is nearly full takes some lines
QUEUED_LINES = 5_000
GATHERED_S = 0.05  # lines wait for others this long: each waking of a thread takes the interpreter from the event loop
LAST_LINES_S = 2.0  # longest time for writing what is queued at the end


class LostLines:
    """Counts lost lines, and logs twice: at the first one, and when lines are written again. Thread-safe.

    Args:
        what: Loses lines; the subject of the sentences logged.
    """

    def __init__(self, what: str) -> None:
        self._what, self._lost, self._last = what, 0, 0.0
        self._lock = Lock()

    def lost(self, why: str) -> None:
        """Count a line that is lost."""
        with self._lock:
            self._lost, self._last = self._lost + 1, time.monotonic()
            first = self._lost == 1
        if first:  # without the lock: the log itself may lose this line
            log.warning("%s %s: lines are lost until the log says how many", self._what, why)

    def failed(self, error: BaseException | None) -> None:
        """Count a line that is lost to an error."""
        self.lost(f"cannot be written ({getattr(error, 'strerror', None) or error})")

    def written(self) -> None:
        """Note a line that is written."""
        with self._lock:
            if not self._lost or time.monotonic() - self._last < CALM_S:
                return
            lost, self._lost = self._lost, 0
        log.warning("%s is written again; %d lines are lost", self._what, lost)


class LineFile:
    """A file of lines that only its owner may read. A full file is renamed, and a new one begun.

    Another process may append to the same file, and rotate it: each line goes to the file that has the name now.

    Attributes:
        head: First line of each file, which is also written before the next line when it changes; empty: none.
    """

    def __init__(self, path: Path, max_bytes: int = 0, kept: int = 0) -> None:
        """Prepare to write; nothing is opened yet.

        Args:
            path: The file.
            max_bytes: Size at which it is renamed; 0: never.
            kept: Number of old files that are kept.
        """
        self.path, self._max_bytes, self._kept = path, max_bytes, kept
        self.head = self._written_head = b""
        self._descriptor: int | None = None
        self._cut = False

    def open(self) -> None:
        """Open the file if it is closed; make its folder.

        Raises:
            OSError: It cannot be opened.
        """
        if self._descriptor is None:
            make_private_folder(self.path.parent)
            self._descriptor = open_private(str(self.path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._written_head = b""

    def write(self, line: bytes) -> None:
        """Append a line.

        Raises:
            OSError: It is not written, or not all of it.
        """
        descriptor = self._current()
        head = self.head + b"\n" if self.head and self.head != self._written_head else b""
        data = (b"\n" if self._cut else b"") + head + line + b"\n"
        try:
            written = os.write(descriptor, data)
        except OSError:
            self.close()
            raise
        self._cut = written < len(data)
        if self._cut:
            raise OSError(f"{written} of {len(data)} bytes were written")
        self._written_head = self.head

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def _current(self) -> int:
        """Return the descriptor of the file that has the name now; begin a new file where that one is full."""
        if self._descriptor is not None:
            state = os.fstat(self._descriptor)
            if not self._has_the_name(state):
                self.close()
            elif stat.S_ISREG(state.st_mode) and 0 < self._max_bytes <= state.st_size:
                self.close()
                self._rotate()
        self.open()
        assert self._descriptor is not None
        return self._descriptor

    def _has_the_name(self, state: os.stat_result) -> bool:
        try:
            return os.path.samestat(self.path.stat(), state)
        except OSError:
            return False

    def _rotate(self) -> None:
        names = [self.path, *(Path(f"{self.path}.{number}") for number in range(1, self._kept + 1))]
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            with suppress(FileNotFoundError):
                newer.replace(older)
                older.chmod(OWNER_ONLY)


class LineWriter:
    """Writes lines to a file in a thread of its own, so that nobody waits for a disk.

    Args:
        file: The file.
        what: Names it; the subject of the sentences logged.
    """

    def __init__(self, file: LineFile, what: str) -> None:
        self._file = file
        self._queue: Queue[tuple[bytes, bytes] | None] = Queue(QUEUED_LINES)
        self._losses = LostLines(f"{what} {file.path}")
        self._thread: Thread | None = None

    def put(self, line: bytes, head: bytes = b"") -> None:
        """Queue a line, and the file's head if it has another one. If the queue is full, the line is lost."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name=f"writes {self._file.path.name}", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((line, head))
        except Full:
            self._losses.lost("cannot be written as fast as lines come")

    def close(self) -> None:
        """Write what is queued, waiting ``LAST_LINES_S`` at most for the disk; then close the file."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with suppress(Full):
            self._queue.put(None, timeout=LAST_LINES_S)
            thread.join(LAST_LINES_S)
        if not thread.is_alive():
            self._file.close()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            line, head = entry
            self._file.head = head or self._file.head
            try:
                self._file.write(line)
            except OSError as error:
                self._losses.failed(error)
            else:
                self._losses.written()
            if self._queue.empty():
                time.sleep(GATHERED_S)
