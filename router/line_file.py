"""Files of lines that grow while the router runs: rotated by size, and written by a thread, many lines at once.

A disk that is full, slow or gone costs lines, and nothing else. The log says once that a file cannot be written, and once
that it is written again, with the number of lines lost.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Generic, TypeVar

from tiers.private_files import OWNER_ONLY, make_private_folder, open_private

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(f"qarr.{__name__}")
CALM_S = 10.0  # without a lost line, until a file counts as mended: a disk that is nearly full takes some lines
QUEUED_LINES = 5_000
MOST_AT_ONCE = 1_000  # lines of one write
GATHERED_S = 0.05  # lines wait for others this long: each waking of a thread takes the interpreter from the event loop
LAST_LINES_S = 2.0  # longest time for writing what is queued at the end
T = TypeVar("T")


class LinesCut(OSError):
    """Only a part of the data was written.

    Attributes:
        lost: Lines that are not there, or not whole.
    """

    def __init__(self, written: int, data: bytes) -> None:
        super().__init__(f"{written} of {len(data)} bytes were written")
        self.lost = data.count(b"\n", written)


class LostLines:
    """Counts lost lines, and logs twice: at the first one, and when lines are written again. Thread-safe.

    Args:
        what: Loses lines; the subject of the sentences logged.
    """

    def __init__(self, what: str) -> None:
        self._what, self._lost, self._last = what, 0, 0.0
        self._lock = Lock()

    def lost(self, why: str, lines: int = 1) -> None:
        """Count lines that are lost."""
        with self._lock:
            first = not self._lost
            self._lost, self._last = self._lost + lines, time.monotonic()
        if first:  # without the lock: the log itself may lose this line
            log.warning("%s %s: lines are lost until the log says how many", self._what, why)

    def failed(self, error: BaseException, lines: int = 1) -> None:
        """Count lines that are lost to an error; a cut one knows of how many whole ones are there."""
        lost = min(error.lost, lines) if isinstance(error, LinesCut) else lines
        self.lost(f"cannot be written ({getattr(error, 'strerror', None) or error})", lost)

    def written(self) -> None:
        """Note that lines are written."""
        with self._lock:
            if not self._lost or time.monotonic() - self._last < CALM_S:
                return
            lost, self._lost = self._lost, 0
        log.warning("%s is written again; %d lines are lost", self._what, lost)

    def write(self, file: LineFile, lines: list[bytes]) -> None:
        """Append lines to a file, and count those that are lost."""
        while lines:
            try:
                lines = lines[file.write(*lines) :]
            except OSError as error:
                self.failed(error, len(lines))
                return
        self.written()


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

    def write(self, *lines: bytes) -> int:
        """Append lines at once, up to the one that fills the file; return how many.

        Raises:
            LinesCut: A part of them is not written.
            OSError: Nothing is written.
        """
        descriptor = self._current()
        head = self.head + b"\n" if self.head and self.head != self._written_head else b""
        count = self._fitting(descriptor, lines)
        data = (b"\n" if self._cut else b"") + head + b"\n".join(lines[:count]) + b"\n"
        try:
            written = os.write(descriptor, data)
        except OSError:
            self.close()
            raise
        self._cut = written < len(data)
        if self._cut:
            raise LinesCut(written, data)
        self._written_head = self.head
        return count

    def _fitting(self, descriptor: int, lines: Sequence[bytes]) -> int:
        """Return how many lines there are up to the one that fills the file; at least one."""
        if not self._max_bytes:
            return len(lines)
        left = self._max_bytes - os.fstat(descriptor).st_size
        for number, line in enumerate(lines, 1):
            left -= len(line) + 1
            if left <= 0:
                return number
        return len(lines)

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
                self._rotate(self._descriptor)
                self.close()
        self.open()
        assert self._descriptor is not None
        return self._descriptor

    def _has_the_name(self, state: os.stat_result) -> bool:
        try:
            return os.path.samestat(self.path.stat(), state)
        except OSError:
            return False

    def _rotate(self, full: int) -> None:
        """Rename the full file, unless another process does: if both did, an old file would be lost."""
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(full, fcntl.LOCK_EX)
        if not self._has_the_name(os.fstat(full)):
            return
        names = [self.path, *(Path(f"{self.path}.{number}") for number in range(1, self._kept + 1))]
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            with suppress(FileNotFoundError):
                newer.replace(older)
                older.chmod(OWNER_ONLY)


class Batches(Generic[T]):
    """Passes items to a thread, as many at once as there are, so that nobody waits for what it does with them.

    Args:
        name: The thread's.
        write: Called in the thread with the items in their order; raises nothing.
        most: Items that may wait.
    """

    def __init__(self, name: str, write: Callable[[list[T]], None], most: int) -> None:
        self._name, self._write, self._most = name, write, most
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._starting = Lock()

    def put(self, item: T) -> bool:
        """Queue an item; return False, and leave it, if too many wait."""
        if self._queue.qsize() >= self._most:
            return False
        self._queue.put(item)
        if self._thread is None:
            self._start()
        return True

    def close(self) -> bool:
        """Let the thread write what is queued and end; return False if that takes longer than ``LAST_LINES_S``."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._queue.put(None)
        thread.join(LAST_LINES_S)
        return not thread.is_alive()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        ended = False
        while not ended:
            found = [self._queue.get(), *(self._queue.get() for _ in range(min(self._queue.qsize(), MOST_AT_ONCE)))]
            batch = [item for item in found if item is not None]
            ended = len(batch) < len(found)
            self._write(batch)
            if not ended and self._queue.empty():
                time.sleep(GATHERED_S)


class LineWriter:
    """Writes lines to a file in a thread of its own, so that nobody waits for a disk.

    Args:
        file: The file.
        what: Names it; the subject of the sentences logged.
    """

    def __init__(self, file: LineFile, what: str) -> None:
        self._file, self._losses = file, LostLines(f"{what} {file.path}")
        self._batches: Batches[tuple[bytes, bytes]] = Batches(f"writes {file.path.name}", self._write, QUEUED_LINES)

    def put(self, line: bytes, head: bytes = b"") -> None:
        """Queue a line, and the file's head if it has another one. If the queue is full, the line is lost."""
        if not self._batches.put((line, head)):
            self._losses.lost("cannot be written as fast as lines come")

    def close(self) -> None:
        """Write what is queued, waiting ``LAST_LINES_S`` at most for the disk; then close the file."""
        if self._batches.close():
            self._file.close()

    def _write(self, batch: list[tuple[bytes, bytes]]) -> None:
        for head, entries in groupby(batch, itemgetter(1)):
            self._file.head = head or self._file.head
            self._losses.write(self._file, [line for line, _ in entries])
