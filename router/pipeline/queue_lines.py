"""Waiting requests in lines: which is first, which is the oldest, how many slots are wanted before one.

Requests that the same tiers could serve, and that take about as much of a replica, form one line. If the first of a line
finds no slot, those behind it would find none either. Within a line, order is by priority class, then by the slots that
the request's key holds, then by deadline.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from tiers.spec import TierName


@dataclass(slots=True, eq=False)
class Entry:
    """One waiting request. Times are seconds by the monotonic clock.

    Attributes:
        key_id: Of the caller's key.
        rank: Its priority class, lower first.
        since: When it came.
        deadline: When it wants its first token.
        tiers: That could serve it when ready and free.
        slots: That it takes.
        long: Whether its prompt is too long for a replica with a full KV cache.
    """

    key_id: str
    rank: int
    since: float
    deadline: float
    tiers: frozenset[TierName]
    slots: int
    long: bool


E = TypeVar("E", bound=Entry)
_deadline = attrgetter("deadline")


class _Line(Generic[E]):
    """Requests of one kind: by arrival, and within each class and key by deadline."""

    def __init__(self, tiers: frozenset[TierName]) -> None:
        self.tiers = tiers
        self.arrived: dict[E, None] = {}
        self.groups: dict[tuple[int, str], list[E]] = {}

    def add(self, entry: E) -> None:
        self.arrived[entry] = None
        insort(self.groups.setdefault((entry.rank, entry.key_id), []), entry, key=_deadline)

    def remove(self, entry: E) -> None:
        del self.arrived[entry]
        group = self.groups[entry.rank, entry.key_id]
        group.remove(entry)
        if not group:
            del self.groups[entry.rank, entry.key_id]


class Lines(Generic[E]):
    """All waiting requests. A change of ``held``, the slots that each key holds, changes the order.

    Attributes:
        count: Of all of them.
    """

    def __init__(self, held: Mapping[str, int]) -> None:
        self._held = held
        self._lines: dict[tuple[frozenset[TierName], bool, int], _Line[E]] = {}
        self.count = 0

    def add(self, entry: E) -> None:
        self._lines.setdefault(_kind(entry), _Line(entry.tiers)).add(entry)
        self.count += 1

    def remove(self, entry: E) -> None:
        """Take a request out, unless it is out already."""
        kind = _kind(entry)
        line = self._lines.get(kind)
        if line is None or entry not in line.arrived:
            return
        line.remove(entry)
        self.count -= 1
        if not line.arrived:
            del self._lines[kind]

    def first(self, passed_over: Collection[E]) -> E | None:
        """Return the first request, apart from lines whose first was passed over; None: none is left."""
        firsts = (min((group[0] for group in line.groups.values()), key=self._order) for line in self._lines.values())
        return min((entry for entry in firsts if entry not in passed_over), key=self._order, default=None)

    def last(self) -> E:
        """Return the last request.

        Raises:
            ValueError: None waits.
        """
        groups = (group for line in self._lines.values() for group in line.groups.values())
        return max((group[-1] for group in groups), key=self._order)

    def oldest(self, tier: TierName) -> E | None:
        """Return the request that has waited longest of those that a tier could serve; None: none waits for it."""
        firsts = (next(iter(line.arrived)) for line in self._for((tier,)))
        return min(firsts, key=attrgetter("since"), default=None)

    def waiting_for(self, tier: TierName) -> int:
        """Return the number of requests that a tier could serve."""
        return sum(len(line.arrived) for line in self._for((tier,)))

    def slots_before(self, entry: E, tiers: Collection[TierName]) -> int:
        """Return the slots wanted by a request, and by those before it that any of several tiers could serve."""
        *own, deadline = self._order(entry)
        wanted = entry.slots
        for line in self._for(tiers):
            for (rank, key_id), group in line.groups.items():
                standing = [rank, self._held.get(key_id, 0)]
                if standing <= own:
                    end = len(group) if standing < own else bisect_right(group, deadline, key=_deadline)
                    wanted += sum(each.slots for each in group[:end] if each is not entry)
        return wanted

    def _for(self, tiers: Collection[TierName]) -> Iterator[_Line[E]]:
        return (line for line in self._lines.values() if not line.tiers.isdisjoint(tiers))

    def _order(self, entry: E) -> tuple[int, int, float]:
        return entry.rank, self._held.get(entry.key_id, 0), entry.deadline


def _kind(entry: Entry) -> tuple[frozenset[TierName], bool, int]:
    """Return a request's line; slots count by powers of two, so that there are few lines."""
    return entry.tiers, entry.long, entry.slots.bit_length()
