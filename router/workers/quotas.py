"""Quotas of several workers without Redis: counted in shared memory, under a lock.

For each key there are a minute's counts by second, and for each worker the slots that its requests hold: those of a worker
that has ended are free again. A key has a place once it was seen; when all places are taken, one goes to another key that
has used nothing for more than a minute.
"""

from __future__ import annotations

import mmap
import struct
import time
from typing import TYPE_CHECKING

from router.auth.quota import WINDOW_S, LocalLedger, Usage, window_usage
from router.workers.table import CELL, Lock, shared_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.auth.api_keys import Quota
    from router.auth.quota import Refund

KEYS = 16_384  # only those that are used take memory
NAME_BYTES = 64
START = 2 * CELL  # of the first place
SECONDS = 64  # more than the window, and a power of two
_HEAD = struct.Struct(f"{NAME_BYTES}sq")  # the key's id, and the last second in which it was used
_COUNTS = struct.Struct(f"{3 * SECONDS}q")  # second, requests, tokens


class SharedLedger(LocalLedger):
    """Counts in memory that all workers share.

    Args:
        fd: The shared file.
        workers: Number of workers.
        row: Of this process.
        now: A clock that all processes share.
    """

    def __init__(self, fd: int, workers: int, row: int, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(now)
        self.fd, self._row = fd, row
        self._lock = Lock(fd)
        self._slots = struct.Struct(f"{workers + 1}q")
        self._size = _size(workers)
        self._memory = mmap.mmap(fd, START + KEYS * self._size)
        self._cells = memoryview(self._memory).cast("q")  # the first two: places taken, and how often one was again
        self._places: dict[str, int] = {}
        self._known = (0, 0)  # of these cells, when ``_places`` was last brought up to date

    @classmethod
    def make(cls, workers: int, now: Callable[[], float] = time.monotonic) -> SharedLedger:
        """Return a new ledger, as the first process sees it."""
        return cls(shared_file("qarr-quotas", START + KEYS * _size(workers)), workers, 0, now)

    async def take(self, key_id: str, quota: Quota, tokens: int, slot: str) -> Usage:
        """See ``LocalLedger``."""
        del slot
        with self._lock:
            now = self._now()
            second, at = int(now), self._place(key_id, int(now))
            counts = self._read(at, second)
            held = self._slots.unpack_from(self._memory, at + _HEAD.size)
            usage = window_usage(quota, counts, sum(held), tokens, now)
            if usage.denied is None:
                self._hold(at, 1)
                self._count(at, second, 1, tokens)
                _HEAD.pack_into(self._memory, at, _name(key_id), second)
        return usage

    async def give_back(self, unused: Refund) -> None:
        """See ``LocalLedger``."""
        with self._lock:
            second = int(self._now())
            at = self._place(unused.key_id, second)
            self._hold(at, -1)
            if unused.tokens < 0:
                self._count(at, second, 0, -unused.tokens)
            elif unused.second in self._read(at, second):
                self._count(at, unused.second, -unused.requests, -unused.tokens)

    def clear(self, row: int) -> None:
        """Free the slots of a worker that has ended."""
        with self._lock:
            for number in range(self._cells[0]):
                at = START + number * self._size
                held = list(self._slots.unpack_from(self._memory, at + _HEAD.size))
                if held[row]:
                    held[row] = 0
                    self._slots.pack_into(self._memory, at + _HEAD.size, *held)

    def _place(self, key_id: str, second: int) -> int:
        """Return where a key's place begins. Hold the lock."""
        name, known = _name(key_id), (self._cells[0], self._cells[1])
        if known != self._known:  # other workers have taken places
            first = self._known[0] if known[1] == self._known[1] else 0
            for number in range(first, known[0]):
                self._places[self._name_at(number).rstrip(b"\0").decode()] = number
            self._known = known
        number = self._places.get(key_id, -1)
        if number < 0 or self._name_at(number) != name:
            number = self._places[key_id] = self._free(second)
            at = START + number * self._size
            self._memory[at : at + self._size] = _HEAD.pack(name, second).ljust(self._size, b"\0")
        return START + number * self._size

    def _free(self, second: int) -> int:
        """Return a place for a new key.

        Raises:
            RuntimeError: So many keys were used within a minute that there is none.
        """
        used = self._cells[0]
        if used < KEYS:
            self._cells[0] = used + 1
            return used
        for number in range(KEYS):
            at = START + number * self._size
            _, last = _HEAD.unpack_from(self._memory, at)
            if second - last > WINDOW_S and not any(self._slots.unpack_from(self._memory, at + _HEAD.size)):
                self._cells[1] += 1
                return number
        raise RuntimeError(f"more than {KEYS} keys with quotas are in use")

    def _name_at(self, number: int) -> bytes:
        name: bytes = _HEAD.unpack_from(self._memory, START + number * self._size)[0]
        return name

    def _read(self, at: int, second: int) -> dict[int, list[int]]:
        """Return the window's requests and tokens by second."""
        cells = _COUNTS.unpack_from(self._memory, self._counts(at))
        oldest = second - WINDOW_S
        return {cells[i]: [cells[i + 1], cells[i + 2]] for i in range(0, len(cells), 3) if oldest <= cells[i] <= second}

    def _count(self, at: int, second: int, requests: int, tokens: int) -> None:  # type: ignore[override]
        start = self._counts(at) // CELL + second % SECONDS * 3
        if self._cells[start] != second:
            # The counts come first: a process that is killed between the two lines leaves no old ones.
            self._cells[start + 1] = self._cells[start + 2] = 0
            self._cells[start] = second
        self._cells[start + 1] += requests
        self._cells[start + 2] += tokens

    def _hold(self, at: int, change: int) -> None:
        cell = (at + _HEAD.size) // CELL + self._row
        self._cells[cell] = max(self._cells[cell] + change, 0)

    def _counts(self, at: int) -> int:
        return at + _HEAD.size + self._slots.size


def _size(workers: int) -> int:
    return _HEAD.size + CELL * (workers + 1) + _COUNTS.size


def _name(key_id: str) -> bytes:
    return key_id.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
