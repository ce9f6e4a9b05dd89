"""The memory that the processes of one router share: a row of numbers for each, and what belongs to all of them.

A process writes its own row only. Whoever wants the whole adds the rows up. What must not go wrong between reading and
writing, as taking the last slot, is done under a lock of the operating system, which ends with its owner.

    row 0         the first process, which supervises engines and serves no requests itself
    rows 1 to N   the workers
    row N + 1     totals of workers that have ended

Every cell has eight bytes and is written at once. Times are of the monotonic clock, which all processes share. A row lists
its last changes by replica, so that a reader takes in what is new only. How many changes each row has had, and how many of
its requests wait, stand side by side before the rows: two short looks tell whether there is anything new.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tiers.spec import STANDARD_TIERS, ReplicaState, TierName

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

CELL = 8
HEADER = 8  # cells: whether engines are measured, the share of output
PROCESS = 8  # cells of a row before its waiting requests, by tier, and then its ring
RING = 64  # last changes of a row
OWN = 12  # cells of a row for each replica: its counts, slots freed so far, and when the engine last made progress
COUNTS, LOAD = 9, 5  # the counts of a replica; those of them that are the present load
COMMON = 24  # cells of a replica that belong to all
LEARNED, COMMON_CHANGED = 1, 2  # what has changed of a replica besides counts: limit and trends; state and breaker
STATES = list(ReplicaState)
FRESH_S = 0.5  # a process whose heartbeat is older counts as stuck, and nobody waits for it
TRIES = 20  # for the lock, before the process sleeps until it is free
NOTHING: tuple[Any, ...] = (*[0] * (COUNTS + 1), 0.0)  # what a process did on a replica that it does not know
_AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB
_OWN = struct.Struct(f"{COUNTS + 1}qd")
_BREAKER = struct.Struct("qddqdqqqq")
_LEARNED = struct.Struct("7d")  # limit, then mean, variance and time of the trends of TTFT and TPOT
_WAITING = struct.Struct("qqqdd")
# Cells of a row.
_HEARTBEAT, _CONNECTIONS, _ACCEPTS = 0, 1, 2
# Common cells of a replica.
_STATE, _LIMIT, _BREAKS = 0, 1, 8
_MEASURING, _OUTPUT_SHARE = 0, 1


class BreakerCells(NamedTuple):
    """A circuit breaker's state; times below 0 are none. ``last`` has a bit for each of the last ``attempts``."""

    opened: int = 0
    open_until: float = -1.0
    held_until: float = -1.0
    probe: int = 0
    own_until: float = 0.0
    pauses: int = 0
    failures: int = 0
    last: int = 0
    attempts: int = 0


class WaitingCells(NamedTuple):
    """A process's requests that wait for a tier: how many, the first one's order, and since when the oldest waits."""

    waiting: int = 0
    rank: int = 0
    held: int = 0
    deadline: float = 0.0
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """How much the table has space for.

    Attributes:
        workers: Processes that serve.
        replicas: At once.
        tiers: That requests wait for.
    """

    workers: int
    replicas: int
    tiers: tuple[TierName, ...] = STANDARD_TIERS

    @property
    def ring(self) -> int:
        """Return the cells of a row before its ring."""
        return PROCESS + len(WaitingCells._fields) * len(self.tiers)

    @property
    def base(self) -> int:
        """Return the row of the totals of workers that have ended."""
        return self.workers + 1

    @property
    def rows(self) -> list[int]:
        """Return where each row begins, and where the last one ends."""
        size, count = self.ring + RING + OWN * self.replicas, self.workers + 2
        return [HEADER + 2 * count + size * number for number in range(count + 1)]

    @property
    def bytes(self) -> int:
        """Return the size of the table."""
        return CELL * (self.rows[-1] + COMMON * self.replicas)


class Lock:
    """A lock between processes, on a file. One thread of each process may take it, also several times."""

    def __init__(self, fd: int) -> None:
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # opened anew: who inherits a descriptor shares its lock
        self._depth = 0

    def __enter__(self) -> Self:
        if not self._depth:
            try:
                fcntl.flock(self._fd, _AT_ONCE)
            except BlockingIOError:
                self._wait()
        self._depth += 1
        return self

    def _wait(self) -> None:
        for _ in range(TRIES):
            with suppress(BlockingIOError):
                fcntl.flock(self._fd, _AT_ONCE)
                return
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_exc: object) -> None:
        self._depth -= 1
        if not self._depth:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def __del__(self) -> None:
        os.close(self._fd)


def shared_file(name: str, size: int) -> int:
    """Return the descriptor of a file in memory, filled with zeros, that lives as long as a process has it open."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


class Table:
    """The table, as one process sees it.

    Args:
        fd: The shared file.
        shape: Its size.
        row: Of this process.
        bells: An ``eventfd`` for each process, by row.

    Attributes:
        lock: Held while slots are taken.
    """

    def __init__(self, fd: int, shape: Shape, row: int, bells: list[int]) -> None:
        self.fd, self.shape, self.row, self.bells = fd, shape, row, bells
        self.lock = Lock(fd)
        self._memory = mmap.mmap(fd, shape.bytes)
        view = memoryview(self._memory)
        self._ints, self._floats = view.cast("q"), view.cast("d")
        count = shape.workers + 2
        *self._rows, self._common = shape.rows
        self._own = self._rows[row]
        self._changes, self._waits = HEADER, HEADER + count  # cells of row 0
        self._changed, self._all_changes = HEADER + row, struct.Struct(f"{count}q")
        self._before_ring = shape.ring
        self._ring = self._own + self._before_ring
        # Bytes: the changes of rows before this one, of those behind it, then the waiting requests of all rows.
        self._before = slice(CELL * HEADER, CELL * self._changed)
        self._behind = slice(CELL * (self._changed + 1), CELL * self._waits)
        self._waiting = slice(CELL * self._waits, CELL * (self._waits + count))
        self._nobody = bytes(CELL * count)
        self.others = [number for number in range(count) if number != row]
        self._peers = [number for number in range(1, shape.workers + 1) if number != row]

    @classmethod
    def make(cls, workers: int, replicas: int, tiers: tuple[TierName, ...] = STANDARD_TIERS) -> Table:
        """Return a new table, as its first process sees it."""
        shape = Shape(workers, replicas, tiers)
        bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(workers + 1)]
        table = cls(shared_file("qarr-workers", shape.bytes), shape, 0, bells)
        table._floats[_OUTPUT_SHARE] = 1.0
        return table

    @property
    def inherited(self) -> tuple[int, ...]:
        """Return the descriptors that another process needs."""
        return (self.fd, *self.bells)

    def ring(self, row: int) -> None:
        """Wake a process: there is something new for it."""
        os.eventfd_write(self.bells[row], 1)

    def ring_all(self) -> None:
        """Wake every other process."""
        for row in range(self.shape.workers + 1):
            if row != self.row:
                self.ring(row)

    # Processes.

    def beat(self) -> None:
        """Note that this process is not stuck."""
        self._floats[self._own + _HEARTBEAT] = time.monotonic()

    def heartbeat(self, row: int) -> float:
        """Return when a process was last known not to be stuck; 0: not yet."""
        return self._floats[self._rows[row] + _HEARTBEAT]

    def _alive(self, row: int, now: float) -> bool:
        return now - self.heartbeat(row) < FRESH_S

    def show_connections(self, open_: int, *, accepts: bool) -> None:
        """Show how many connections this process has, and whether it accepts more."""
        self._ints[self._own + _CONNECTIONS] = open_
        self._ints[self._own + _ACCEPTS] = accepts

    def fewest_connections(self) -> int | None:
        """Return how many connections the other worker with the fewest has, of those that accept; None: there is none."""
        now, ints, rows = time.monotonic(), self._ints, self._rows
        return min(
            (
                ints[rows[row] + _CONNECTIONS]
                for row in self._peers
                if ints[rows[row] + _ACCEPTS] and self._alive(row, now)
            ),
            default=None,
        )

    @property
    def measuring(self) -> bool:
        """Tell whether the first process measures idle engines."""
        return bool(self._ints[_MEASURING])

    @measuring.setter
    def measuring(self, value: bool) -> None:
        self._ints[_MEASURING] = value

    @property
    def output_share(self) -> float:
        """Return the recent output tokens over those that requests allowed."""
        return self._floats[_OUTPUT_SHARE]

    @output_share.setter
    def output_share(self, value: float) -> None:
        self._floats[_OUTPUT_SHARE] = value

    # Waiting requests.

    def show_waiting(self, waiting: int, by_tier: Collection[WaitingCells]) -> None:
        """Show this process's waiting requests.

        Args:
            waiting: All of them.
            by_tier: Those that each tier could serve, in the order of ``Shape.tiers``.
        """
        at = self._own + PROCESS
        for cells in by_tier:
            self._put(at, _WAITING.pack(*cells))
            at += len(cells)
        self._ints[self._waits + self.row] = waiting

    def anyone_waits(self) -> bool:
        """Tell whether a request waits in any worker."""
        return self._memory[self._waiting] != self._nobody

    def waiting_elsewhere(self) -> int:
        """Return the number of requests that wait in other workers."""
        return sum(self._ints[self._waits + row] for row in self._peers)

    def lines_elsewhere(self, tiers: Collection[TierName], *, stuck: bool = True) -> Iterator[tuple[int, WaitingCells]]:
        """Yield the rows of other workers whose requests wait for one of several tiers, and what each shows of it.

        Args:
            tiers: The tiers.
            stuck: Whether those that seem stuck count.
        """
        now = time.monotonic()
        for row in self._peers:
            at = self._rows[row]
            if self._ints[self._waits + row] and (stuck or self._alive(row, now)):
                for number, tier in enumerate(self.shape.tiers):
                    if tier in tiers:
                        start = (at + PROCESS + number * len(WaitingCells._fields)) * CELL
                        cells = WaitingCells._make(_WAITING.unpack_from(self._memory, start))
                        if cells.waiting:
                            yield row, cells

    def waiting_rows(self) -> list[int]:
        """Return the rows of other workers that have waiting requests."""
        return [row for row in self._peers if self._ints[self._waits + row]]

    # Replicas.

    def write(self, index: int, done: tuple[Any, ...]) -> None:
        """Write what this process did on a replica, as ``read`` returns it."""
        start = (self._ring + RING + OWN * index) * CELL
        self._memory[start : start + _OWN.size] = _OWN.pack(*done)
        self.changed(index)

    def changed(self, index: int, what: int = 0) -> None:
        """List a replica among this row's changes.

        Args:
            index: The replica's place.
            what: ``LEARNED`` and ``COMMON_CHANGED`` if that has changed as well.
        """
        ints, at = self._ints, self._changed
        changes = ints[at]
        ints[self._ring + changes % RING] = index << 2 | what
        ints[at] = changes + 1

    def marks(self) -> tuple[bytes, bytes]:
        """Return what is another value as soon as another process has listed a change."""
        memory = self._memory
        return memory[self._before], memory[self._behind]

    def changes(self) -> tuple[int, ...]:
        """Return how many changes each row has had."""
        return self._all_changes.unpack_from(self._memory, CELL * HEADER)

    def news(self, row: int, seen: int, now: int) -> dict[int, int] | None:
        """Return what has changed in a row between two numbers of changes; None: everything may have changed.

        That is, by a replica's index, what ``changed`` was told.
        """
        if now - seen > RING // 2:  # the rest is left to whoever writes meanwhile
            return None
        ints, ring = self._ints, self._rows[row] + self._before_ring
        if now - seen == 1:
            entry = ints[ring + seen % RING]
            return {entry >> 2: entry & 3}
        found: dict[int, int] = {}
        for number in range(seen, now):
            entry = ints[ring + number % RING]
            found[entry >> 2] = found.get(entry >> 2, 0) | entry & 3
        return found

    def read(self, row: int, index: int) -> tuple[Any, ...]:
        """Return what a process did on a replica: counts, slots freed, and when it last saw progress."""
        return _OWN.unpack_from(self._memory, (self._rows[row] + self._before_ring + RING + OWN * index) * CELL)

    def clear(self, row: int) -> None:
        """Clear the row of a worker that has ended; what it has served stays among the totals."""
        base, at = self._rows[self.shape.base], self._rows[row]
        with self.lock:
            for index in range(self.shape.replicas):
                offset = self._before_ring + RING + OWN * index
                done = self.read(row, index)
                if done != NOTHING:
                    *counts, freed, _ = done
                    *past, past_freed, _ = self.read(self.shape.base, index)
                    totals = map(add, past[LOAD:], counts[LOAD:])
                    self._put(base + offset, _OWN.pack(*[0] * LOAD, *totals, past_freed + freed + counts[1], 0.0))
                    self._put(at + offset, _OWN.pack(*NOTHING))
            for cell in (self._waits + row, *range(at, at + self._before_ring)):
                self._ints[cell] = 0
            for number in (row, self.shape.base):
                self._ints[self._changes + number] += RING  # everyone reads everything again
        self.ring_all()

    def claim(self, index: int) -> None:
        """Clear a replica's cells for a new replica."""
        for start in self._rows:
            self._put(start + self._before_ring + RING + OWN * index, _OWN.pack(*NOTHING))
        at = self._common + COMMON * index
        for cell in range(COMMON):
            self._ints[at + cell] = 0
        self.breaker(index, BreakerCells())
        self._floats[at + _LIMIT] = -1.0

    def show_state(self, index: int, state: ReplicaState) -> None:
        """Show whether a replica takes requests: none is sent to another one from now on."""
        with self.lock:
            self._ints[self._common + COMMON * index + _STATE] = STATES.index(state)
            self.changed(index, COMMON_CHANGED)

    def state(self, index: int) -> ReplicaState:
        """Return a replica's state."""
        return STATES[self._ints[self._common + COMMON * index + _STATE]]

    def learned(self, index: int) -> tuple[float, ...]:
        """Return a replica's adaptive limit (below 0: not set yet), then mean, variance and time of its two trends."""
        return _LEARNED.unpack_from(self._memory, (self._common + COMMON * index + _LIMIT) * CELL)

    def learn(self, index: int, learned: tuple[float, ...]) -> None:
        """Replace a replica's limit and trends; see ``learned``."""
        self._put(self._common + COMMON * index + _LIMIT, _LEARNED.pack(*learned))
        self.changed(index, LEARNED)

    def breaker(self, index: int, cells: BreakerCells | None = None) -> BreakerCells:
        """Return a replica's circuit breaker, after setting it if ``cells`` are given."""
        at = self._common + COMMON * index + _BREAKS
        if cells is not None:
            self._put(at, _BREAKER.pack(*cells))
            return cells
        return BreakerCells._make(_BREAKER.unpack_from(self._memory, at * CELL))

    def _put(self, cell: int, data: bytes) -> None:
        """Write cells in one copy, so that readers see the old or the new value of each; ``pack_into`` clears them first."""
        self._memory[cell * CELL : cell * CELL + len(data)] = data
