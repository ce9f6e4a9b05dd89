"""The queue of one worker, beside those of the others: a slot goes to the most urgent request of all of them.

Each worker shows, for each tier, how many of its requests wait, and the order of the first. A worker passes over its own
requests while another's come first, except those of a worker that seems stuck. Requests of equal order are not swapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from router.pipeline.queue_lines import Entry, Lines
from router.workers.table import WaitingCells

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from router.workers.table import Table
    from tiers.spec import TierName

E = TypeVar("E", bound=Entry)
_NONE = WaitingCells()


class SharedLines(Lines[E]):
    """The lines of one worker. Its length is that of all queues together.

    Args:
        table: The shared memory.
        held: See ``Lines``.
    """

    def __init__(self, table: Table, held: Mapping[str, int]) -> None:
        super().__init__(held)
        self._table = table
        self._shown: tuple[int, tuple[WaitingCells, ...]] = (0, ())

    def __len__(self) -> int:
        return super().__len__() + self._table.waiting_elsewhere()

    def __bool__(self) -> bool:
        return self._count > 0 or self._table.anyone_waits()

    def add(self, entry: E) -> None:
        """See ``Lines``."""
        super().add(entry)
        self._show()

    def remove(self, entry: E) -> None:
        """See ``Lines``. Requests of other workers may come first now."""
        before = super().__len__()
        super().remove(entry)
        if super().__len__() != before:
            self._show()
            for row in self._table.waiting_rows():
                self._table.ring(row)

    def first(self, passed_over: Collection[E]) -> E | None:
        """See ``Lines``; None also if requests of other workers come first."""
        if super().__len__():
            self._show()  # the slots that keys hold, and with them the order, may have changed
        passed = set(passed_over)
        while (entry := super().first(passed)) is not None:
            order = self._order(entry)
            lines = self._table.lines_elsewhere(entry.tiers, stuck=False)
            if not any((cells.rank, cells.held, cells.deadline) < order for _, cells in lines):
                return entry
            passed.add(entry)
        return None

    def oldest(self, tier: TierName) -> E | None:
        """See ``Lines``; None also if an older request waits in another worker."""
        entry = super().oldest(tier)
        if entry is None or any(
            cells.since < entry.since for _, cells in self._table.lines_elsewhere((tier,), stuck=False)
        ):
            return None
        return entry

    def waiting_for(self, tier: TierName) -> int:
        """See ``Lines``; those of other workers count as well."""
        return super().waiting_for(tier) + sum(cells.waiting for _, cells in self._table.lines_elsewhere((tier,)))

    def slots_before(self, entry: E, tiers: Collection[TierName]) -> int:
        """See ``Lines``; each request that waits in another worker for the first of these tiers counts as one slot."""
        elsewhere = max((self.waiting_for(t) - super(SharedLines, self).waiting_for(t) for t in tiers), default=0)
        return super().slots_before(entry, tiers) + elsewhere

    def _show(self) -> None:
        shown = super().__len__(), tuple(self._cells(tier) for tier in self._table.shape.tiers)
        if shown != self._shown:
            self._shown = shown
            self._table.show_waiting(*shown)

    def _cells(self, tier: TierName) -> WaitingCells:
        waiting = super().waiting_for(tier)
        oldest = super().oldest(tier)
        if not waiting or oldest is None:
            return _NONE
        firsts = (group[0] for line in self._for((tier,)) for group in line.groups.values())
        return WaitingCells(waiting, *min(map(self._order, firsts)), oldest.since)
