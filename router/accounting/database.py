"""The SQLite file of charges and usage: several processes write to it, each through one thread.

In write-ahead mode readers do not wait for writers. What is committed survives the end of the process, though the last
moments before a power failure may be lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tiers.private_files import make_private_folder, open_private

T = TypeVar("T")
BUSY_S = 10.0  # A change waits this long for those of other processes.
_TABLES = Path(__file__).with_name("tables.sql")


class Database:
    """The file; opened, and made if it is missing, when it is first used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fault = ""  # Why the last change failed; empty if it did not.
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def change(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what ``work`` returns, run as one transaction in the thread; it runs even if the caller is cancelled.

        If the file cannot be used, ``sqlite3.Error`` or ``OSError`` is raised, and nothing was changed.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "qarr-usage")
        loop = asyncio.get_running_loop()
        return await asyncio.shield(
            loop.run_in_executor(self._thread, self._change, work)
        )

    async def aclose(self) -> None:
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self.close)
            self._thread.shutdown()
            self._thread = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _change(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = self._open()
            with self._turn(), self._connection as transaction:
                transaction.execute("BEGIN IMMEDIATE")
                result = work(transaction)
        except (sqlite3.Error, OSError) as error:
            self.fault = str(error)
            # It is opened again by the next change: a sound file may have replaced it by then.
            self.close()
            raise
        self.fault = ""
        return result

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for the turn among all processes: SQLite itself only tries again and again, so one could wait for ever."""
        assert self._lock is not None
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _open(self) -> sqlite3.Connection:
        make_private_folder(self.path.parent)
        os.close(open_private(str(self.path), os.O_RDWR | os.O_CREAT))
        if self._lock is None:
            self._lock = open_private(
                f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            )
        connection = sqlite3.connect(
            self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            with self._turn():
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.executescript(_TABLES.read_text("utf-8"))
        except BaseException:
            connection.close()
            raise
        return connection
