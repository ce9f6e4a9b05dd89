"""The fleet in one of several processes: its counts are of all processes, and slots are taken under a lock.

Before something is read from the fleet, what other processes have done since the last time is added to the replicas'
counts; after a change, this process's own part is written to its row. So limits, loads, predictions and figures are those
of one router, in whichever process they are looked at. Circuit breakers are common to all, and so are, within a tenth of a
second, adaptive limits and trends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add, sub
from time import monotonic
from typing import TYPE_CHECKING, Any

from router.workers.table import COMMON_CHANGED, COUNTS, LEARNED, NOTHING, BreakerCells
from tiers.breaker import WINDOW, Breaker, BreakerOptions
from tiers.errors import NotPossible
from tiers.fleet import Fleet, Lease
from tiers.spec import ReplicaState
from tiers.speed import Trend

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from router.workers.table import Table
    from tiers.fleet import Demand
    from tiers.replica import FleetOptions, Replica, ReplicaReport
    from tiers.snapshot import FleetSnapshot
    from tiers.spec import TierName, TierSpec

NO_REPLICA = 1 << 32  # in a row's changes: something that belongs to no replica
_ALL_GOOD = (1 << WINDOW) - 1


class SharedBreaker(Breaker):
    """A replica's circuit breaker, whose state all processes share.

    Every change is made to the present state, under the lock. What is read is the state when the fleet was last synced.
    """

    __slots__ = ("_cells", "_index", "_table", "_well")

    def __init__(self, options: BreakerOptions, on_open: Callable[[], None], table: Table, index: int) -> None:
        super().__init__(options, on_open=on_open)
        self._table, self._index = table, index
        self._note(BreakerCells())
        self.load()

    def load(self) -> None:
        """Take over the present state; before a change, and when another process has changed it."""
        cells = self._table.breaker(self._index)
        if cells == self._cells:
            return
        self._note(cells)
        self.opened, self._probe, self._own_until = cells.opened, cells.probe, cells.own_until
        self._pauses, self._failures = cells.pauses, cells.failures
        self._open_until = cells.open_until if cells.open_until >= 0 else None
        self._held_until = cells.held_until if cells.held_until >= 0 else None
        self._last.clear()
        self._last.extend(bool(cells.last >> number & 1) for number in reversed(range(cells.attempts)))

    def _note(self, cells: BreakerCells) -> None:
        """Note the present state, and whether one more answer would change nothing of it."""
        self._cells = cells
        self._well = cells.last == _ALL_GOOD and cells.open_until < 0 and not cells.failures

    def _store(self) -> None:
        last = 0
        for good in self._last:
            last = last << 1 | good
        open_until = -1.0 if self._open_until is None else self._open_until
        held_until = -1.0 if self._held_until is None else self._held_until
        cells = BreakerCells(
            self.opened, open_until, held_until, self._probe, self._own_until, self._pauses, self._failures,
            last, len(self._last),
        )  # fmt: skip
        self._note(self._table.breaker(self._index, cells))
        self._table.changed(self._index, COMMON_CHANGED)

    def begin(self, now: float) -> int:
        """See ``Breaker``."""
        if self._open_until is None or now < self._open_until:
            return 0
        with self._table.lock:
            self.load()
            probe = super().begin(now)
            self._store()
        return probe

    def succeeded(self, *, probe: int) -> None:
        """See ``Breaker``."""
        if self._well:
            return
        with self._table.lock:
            self.load()
            super().succeeded(probe=probe)
            self._store()

    def failed(self, now: float, *, probe: int) -> None:
        """See ``Breaker``."""
        with self._table.lock:
            self.load()
            super().failed(now, probe=probe)
            self._store()

    def given_up(self, *, probe: int) -> None:
        """See ``Breaker``."""
        if probe:
            with self._table.lock:
                self.load()
                super().given_up(probe=probe)
                self._store()

    def adopt(self, now: float, wait_s: float) -> None:
        """See ``Breaker``."""
        with self._table.lock:
            self.load()
            super().adopt(now, wait_s)
            self._store()

    def reset(self) -> None:
        """See ``Breaker``. Called by ``succeeded`` with the lock held, and by the process that supervises engines."""
        with self._table.lock:
            super().reset()
            self._store()


NONE: tuple[int, ...] = (0,) * COUNTS
UNKNOWN = (-1.0,)


@dataclass(slots=True, eq=False)
class _Mirror:
    """A replica and its place in the table.

    Attributes:
        rows: What other processes did, as last added to the replica, by row.
        elsewhere: The sum of their counts.
        written: What was last written to the own row.
        freed: Slots that this process has freed.
        learned: Limit and trends, as last read or written.
        trends: The same trends, as the replica has them.
        reported: State that the first process has told, with its reason; the table may be ahead of it.
    """

    replica: Replica
    index: int
    rows: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    elsewhere: tuple[int, ...] = NONE
    written: tuple[Any, ...] = NOTHING
    freed: int = 0
    learned: tuple[float, ...] = UNKNOWN
    trends: tuple[Trend | None, Trend | None] = (None, None)
    reported: ReplicaState = ReplicaState.STARTING


class SharedLease(Lease):
    """A request's hold on a replica that other processes use as well."""

    __slots__ = ()

    def release(self) -> None:
        """See ``Lease``. Other processes learn of it, those with waiting requests at once."""
        if not self._released:
            super().release()
            fleet = self._fleet
            assert isinstance(fleet, SharedFleet)
            fleet.freed(self.replica, self.sequences)


class SharedFleet(Fleet):
    """A fleet in one of several processes.

    Args:
        specs: See ``Fleet``; likewise the others.
        table: The shared memory.
    """

    lease_type = SharedLease
    __slots__ = ("_by_index", "_changes", "_free", "_marks", "_mirrors", "_share", "table")

    def __init__(self, specs: tuple[TierSpec, ...], machine: str, options: FleetOptions, table: Table) -> None:
        self._mirrors: dict[Replica, _Mirror] = {}
        self._by_index: dict[int, _Mirror] = {}
        self._marks = table.marks()
        now = table.changes()
        self._changes = {row: now[row] for row in table.others}
        self._free = list(range(table.shape.replicas))
        self._share = table.output_share
        self.table = table
        super().__init__(specs, machine=machine, options=options)
        self.output_share = self._share

    @property
    def first(self) -> bool:
        """Tell whether this process supervises the engines."""
        return self.table.row == 0

    def add(self, replica: Replica) -> Replica:
        """See ``Fleet``; in the first process.

        Raises:
            NotPossible: There are more replicas than the table has space for.
        """
        if not self._free:
            raise NotPossible(f"several workers share at most {self.table.shape.replicas} replicas")
        index = self._free.pop(0)
        self.table.claim(index)
        self.add_at(replica, index)
        self.table.show_state(index, replica.state)
        return replica

    def add_at(self, replica: Replica, index: int) -> None:
        """Add a replica whose place in the table is known."""
        super().add(replica)
        replica.breaker = SharedBreaker(self.options.breaker, replica.changed, self.table, index)
        mirror = self._mirrors[replica] = self._by_index[index] = _Mirror(replica, index)
        self._take(mirror, self.table.others, LEARNED | COMMON_CHANGED)

    def remove(self, replica: Replica) -> None:
        """See ``Fleet``. Its place is used again as late as possible."""
        super().remove(replica)
        mirror = self._mirrors.pop(replica)
        del self._by_index[mirror.index]
        self._free.append(mirror.index)
        self.table.write(mirror.index, NOTHING)

    def index(self, replica: Replica) -> int:
        """Return a replica's place in the table."""
        return self._mirrors[replica].index

    def freed(self, replica: Replica, slots: int) -> None:
        """Show other processes that slots are free."""
        mirror = self._mirrors.get(replica)
        if mirror is not None:
            mirror.freed += slots
            self._write(mirror)
            if self.table.anyone_waits():
                for row in self.table.waiting_rows():
                    self.table.ring(row)

    def lease(
        self,
        tier: TierName,
        *,
        prompt_tokens: int,
        max_tokens: int,
        sequences: int = 1,
        exclude: Collection[str] = (),
        over_limit: bool = False,
    ) -> Lease | None:
        """See ``Fleet``. No other process takes a slot meanwhile."""
        with self.table.lock:
            self.sync()
            lease = super().lease(
                tier,
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                sequences=sequences,
                exclude=exclude,
                over_limit=over_limit,
            )
            if lease is not None:
                self._write(self._mirrors[lease.replica])
        return lease

    def has_capacity(self, tiers: Collection[TierName], demand: Demand, exclude: Collection[str] = ()) -> bool:
        """See ``Fleet``."""
        self.sync()
        return super().has_capacity(tiers, demand, exclude)

    def nearest(self, tiers: Collection[TierName], demand: Demand, exclude: Collection[str] = ()) -> str | None:
        """See ``Fleet``."""
        self.sync()
        return super().nearest(tiers, demand, exclude)

    def snapshot(self, reserved: Collection[str] = ()) -> FleetSnapshot:
        """See ``Fleet``."""
        self.sync()
        return super().snapshot(reserved)

    def sync(self) -> None:
        """Take in what other processes have done since the last call."""
        marks = self.table.marks()
        if marks != self._marks:
            self._marks = marks
            self._take_in()

    def _take_in(self) -> None:
        table, known, now = self.table, self._changes, self.table.changes()
        for row, seen in known.items():
            if now[row] == seen:
                continue
            found = table.news(row, seen, now[row])
            if found is None:
                self._take_everything()
                break
            known[row] = now[row]
            for index, what in found.items():
                mirror = self._by_index.get(index)
                if mirror is not None:
                    self._take(mirror, (row,), what)
        share = table.output_share
        if share != self._share:
            self.output_share = self._share = share

    def _take_everything(self) -> None:
        """Take in all rows; together, since what a worker that has ended did has gone from one row to another."""
        with self.table.lock:
            now = self.table.changes()
            self._changes = {row: now[row] for row in self.table.others}
            for mirror in self._by_index.values():
                self._take(mirror, self.table.others, LEARNED | COMMON_CHANGED)

    def follow(self, replica: Replica, report: ReplicaReport) -> None:
        """Take over what the first process has found about a replica."""
        mirror = self._mirrors[replica]
        replica.follow(report)
        mirror.reported = report.state
        mirror.learned = UNKNOWN  # of a new speed the trends begin anew, but only once
        self._take_common(mirror)
        self._take_learned(mirror)

    def changed(self, replica: Replica) -> None:
        """Show other processes the state of a replica, in the first one; none of them sends requests to it afterwards."""
        mirror = self._mirrors.get(replica)
        if mirror is not None:
            self.table.show_state(mirror.index, replica.state)
            self.sync()

    def flush(self) -> None:
        """Write what this process did and has not written yet; call it every tenth of a second."""
        self.table.beat()
        for mirror in list(self._by_index.values()):
            self._teach(mirror)
            self._write(mirror)
        if self.output_share != self._share:
            self._share = self.table.output_share = self.output_share
            self.table.changed(NO_REPLICA)

    def busy(self) -> bool:
        """Tell whether other processes have requests, or requests that wait."""
        self.sync()
        return bool(self.table.waiting_elsewhere()) or any(mirror.elsewhere[0] for mirror in self._mirrors.values())

    def bell(self) -> None:
        """Take in what is new, and give free slots to waiting requests."""
        self.sync()
        self.on_capacity()

    def _take(self, mirror: _Mirror, rows: Collection[int], what: int) -> None:
        """Add to a replica what other processes did; ``what`` belongs to all processes, and has changed as well."""
        more: tuple[Any, ...] | None = None
        progressed_at = 0.0
        for row in rows:
            new, old = self.table.read(row, mirror.index), mirror.rows.get(row, NOTHING)
            if new != old:
                mirror.rows[row] = new
                change = tuple(map(sub, new, old))
                more = change if more is None else tuple(map(add, more, change))
                if new[-1] > old[-1]:
                    progressed_at = max(progressed_at, new[-1])
        if more is not None:
            mirror.elsewhere = tuple(map(add, mirror.elsewhere, more))
            mirror.replica.add(more[:COUNTS], more[COUNTS], progressed_at, monotonic())
        if what & COMMON_CHANGED:
            self._take_common(mirror)
        if what & LEARNED:
            self._take_learned(mirror)

    def _take_common(self, mirror: _Mirror) -> None:
        """Take over the present state and circuit breaker of a replica."""
        replica = mirror.replica
        if isinstance(replica.breaker, SharedBreaker):
            replica.breaker.load()
            replica.changed()
        if not self.first and mirror.reported is ReplicaState.READY:
            replica.state = self.table.state(mirror.index)  # if it is another one, the reason follows

    def _take_learned(self, mirror: _Mirror) -> None:
        """Take over the present limit and trends of a replica."""
        replica, learned = mirror.replica, self.table.learned(mirror.index)
        if learned[0] >= 0 and learned != mirror.learned:
            mirror.learned, replica.limiter.exact = learned, learned[0]
            mirror.trends = replica.ttft_trend, replica.tpot_trend = Trend(*learned[1:4]), Trend(*learned[4:])

    def _teach(self, mirror: _Mirror) -> None:
        """Write the limit and the trends of a replica, if they have changed here."""
        replica, (known, *_) = mirror.replica, mirror.learned
        limit, trends = replica.limiter.exact, (replica.ttft_trend, replica.tpot_trend)
        if trends != mirror.trends or limit != known:
            ttft, tpot = mirror.trends = trends
            mirror.learned = limit, ttft.mean, ttft.variance, ttft.at, tpot.mean, tpot.variance, tpot.at
            self.table.learn(mirror.index, mirror.learned)

    def _write(self, mirror: _Mirror) -> None:
        """Write what this process did on a replica, if that has changed."""
        replica, own, before = mirror.replica, mirror.replica.counts, mirror.written
        if mirror.elsewhere != NONE:
            own = tuple(map(sub, own, mirror.elsewhere))
        at = max(replica.progressed_at, before[-1]) if own[0] or before[0] else before[-1]
        done = (*own, mirror.freed, at)
        if done != before:
            mirror.written = done
            self.table.write(mirror.index, done)
