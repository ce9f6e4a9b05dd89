"""Files of lines that grow for as long as the router runs: rotated by size, and written beside the event loop.

A disk that is full, slow or gone costs lines, and nothing else. The log says once that a file cannot be written, and
once that it can again, with how many lines are lost.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Lock, Thread
from typing import TYPE_CHECKING

from tiers.private_files import OWNER_ONLY, make_private_folder, open_private

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(f"qarr.{__name__}")
CALM_S = 10.0  # without a lost line, until a file counts as mended: a disk that is nearly full takes some lines
QUEUED_LINES = 5_000
GATHERED_S = (
    0.05  # for which lines may wait for others: each waking of a thread takes the interpreter from the event loop
)
LAST_LINES_S = 2.0  # in which what is queued is written at the end


class Losses:
    """Says once that lines are lost, and once that they are no longer, however many there are."""

    def __init__(self, what: str, say: Callable[[str], None] = log.warning) -> None:
        """Prepare to say it.

        Args:
            what: Loses lines, as the subject of a sentence.
            say: Takes the sentence.
        """
        self._what, self._say = what, say
        self._lost, self._last = 0, 0.0

    def lost(self, why: str) -> None:
        """Note a line that is lost."""
        self._lost, self._last = self._lost + 1, time.monotonic()
        if self._lost == 1:
            self._say(f"{self._what} {why}: lines are lost until the log says how many")

    def written(self) -> None:
        """Note a line that is written."""
        if self._lost and time.monotonic() - self._last >= CALM_S:
            lost, self._lost = self._lost, 0
            self._say(f"{self._what} is written again; {lost} lines are lost")


class LineFile:
    """A file of lines that only its owner may read; full, it gets another name, and a new one is begun.

    Another process may append to the same file, and rotate it: each line goes to the file that has the name now.

    Attributes:
        head: A line with which each file begins, and which goes before the next line when it is changed; empty: none.
    """

    def __init__(self, path: Path, max_bytes: int = 0, kept: int = 0) -> None:
        """Prepare to write; nothing is opened yet.

        Args:
            path: The file.
            max_bytes: Size at which it gets another name; 0: never.
            kept: Old ones that are kept.
        """
        self.path, self._max_bytes, self._kept = path, max_bytes, kept
        self._head = b""
        self._descriptor: int | None = None
        self._headed = self._cut = False

    @property
    def head(self) -> bytes:
        """Return the head."""
        return self._head

    @head.setter
    def head(self, line: bytes) -> None:
        self._head, self._headed = line, False

    def open(self) -> None:
        """Open the file, if it is not; its folder is made.

        Raises:
            OSError: It cannot be opened.
        """
        if self._descriptor is None:
            make_private_folder(self.path.parent)
            self._descriptor = open_private(str(self.path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._headed = False

    def write(self, line: bytes) -> None:
        """Append a line.

        Raises:
            OSError: It is not written, or not all of it.
        """
        descriptor = self._current()
        head = b"" if self._headed or not self._head else self._head + b"\n"
        data = (b"\n" if self._cut else b"") + head + line + b"\n"
        try:
            written = os.write(descriptor, data)
        except OSError:
            self.close()
            raise
        self._cut = written < len(data)
        if self._cut:
            raise OSError(f"{written} of {len(data)} bytes were written")
        self._headed = True

    def close(self) -> None:
        """Close the file; a further line opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def _current(self) -> int:
        """Return the descriptor of the file that has the name, after beginning a new one where that is full."""
        if self._descriptor is not None:
            state = os.fstat(self._descriptor)
            full = stat.S_ISREG(state.st_mode) and 0 < self._max_bytes <= state.st_size
            if not self._has_the_name(state):
                self.close()
            elif full:
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
    """Writes lines to a file in a thread of its own, so that nobody waits for a disk."""

    def __init__(self, file: LineFile, what: str) -> None:
        """Prepare to write.

        Args:
            file: Where to.
            what: It is, as the subject of a sentence.
        """
        self._file = file
        self._queue: Queue[tuple[bytes, bytes] | None] = Queue(QUEUED_LINES)
        self._losses = Losses(f"{what} {file.path}")
        self._counting = Lock()
        self._thread: Thread | None = None

    def put(self, line: bytes, head: bytes = b"") -> None:
        """Write a line soon, after a head that the file does not have yet. Where too many lines wait, it is lost."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name=f"writes {self._file.path.name}", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((line, head))
        except Full:
            self._lost("cannot be written as fast as lines come")

    def close(self) -> None:
        """Write what waits, but wait for no disk that does not answer; then close the file."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with suppress(Full):
            self._queue.put(None, timeout=LAST_LINES_S)
            thread.join(LAST_LINES_S)
        if not thread.is_alive():
            self._file.close()

    def _run(self) -> None:
        while True:
            entry = self._queue.get()
            if entry is not None and self._queue.empty():
                time.sleep(GATHERED_S)
            while entry is not None:
                self._write(*entry)
                try:
                    entry = self._queue.get_nowait()
                except Empty:
                    break
            if entry is None:
                return

    def _write(self, line: bytes, head: bytes) -> None:
        try:
            if head and head != self._file.head:
                self._file.head = head
            self._file.write(line)
        except OSError as error:
            self._lost(f"cannot be written ({error.strerror or error})")
        else:
            with self._counting:
                self._losses.written()

    def _lost(self, why: str) -> None:
        with self._counting:
            self._losses.lost(why)
