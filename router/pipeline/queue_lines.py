"""Requests that wait, in lines: which stand first, which is the oldest, what is wanted before one.

There is a line for each kind of request: the same tiers could serve them, and they take about as much of a replica. When
the first of a line finds no slot, those behind it would find none either. Within a line, order is by priority class,
then by the slots that the request's key has already, then by deadline.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from tiers.spec import TierName


@dataclass(slots=True, eq=False)
class Entry:
    """One request that waits. Times are seconds by the monotonic clock.

    Attributes:
        key_id: Whose it is.
        rank: Its priority class, lower first.
        since: When it came.
        deadline: When it wants its first token.
        tiers: That could ever serve it.
        slots: That it takes.
        long: Whether its prompt is one that a replica with a full KV cache does not take.
    """

    key_id: str
    rank: int
    since: float
    deadline: float
    tiers: frozenset[TierName]
    slots: int
    long: bool


E = TypeVar("E", bound=Entry)


def _deadline(entry: Entry) -> float:
    return entry.deadline


class _Line(Generic[E]):
    """Requests of one kind: in order of arrival, and for each class and key by deadline."""

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
    """All who wait.

    Args:
        held: Slots that each key has already; what changes there changes the order.
    """

    def __init__(self, held: Mapping[str, int]) -> None:
        self._held = held
        self._lines: dict[tuple[frozenset[TierName], bool, int], _Line[E]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, entry: E) -> None:
        """Put a request into its line."""
        kind = _kind(entry)
        if kind not in self._lines:
            self._lines[kind] = _Line(entry.tiers)
        self._lines[kind].add(entry)
        self._count += 1

    def remove(self, entry: E) -> None:
        """Take a request out; nothing where it is out already."""
        kind = _kind(entry)
        line = self._lines.get(kind)
        if line is None or entry not in line.arrived:
            return
        line.remove(entry)
        self._count -= 1
        if not line.arrived:
            del self._lines[kind]

    def first(self, passed_over: Collection[E]) -> E | None:
        """Return who comes before all others, but for the lines whose first was passed over; None: nobody is left."""
        firsts = (min((group[0] for group in line.groups.values()), key=self._order) for line in self._lines.values())
        return min((entry for entry in firsts if entry not in passed_over), key=self._order, default=None)

    def last(self) -> E:
        """Return who comes after all others.

        Raises:
            ValueError: Nobody waits.
        """
        groups = (group for line in self._lines.values() for group in line.groups.values())
        return max((group[-1] for group in groups), key=self._order)

    def oldest(self, tier: TierName) -> E | None:
        """Return who has waited longest of those that a tier could serve; None: nobody waits for it."""
        return min((next(iter(line.arrived)) for line in self._for((tier,))), key=_since, default=None)

    def waiting_for(self, tier: TierName) -> int:
        """Return how many wait that a tier could serve."""
        return sum(len(line.arrived) for line in self._for((tier,)))

    def slots_before(self, entry: E, tiers: Collection[TierName]) -> int:
        """Return the slots that a request and those before it want which any of several tiers could serve."""
        own = entry.rank, self._held.get(entry.key_id, 0)
        wanted = entry.slots
        for line in self._for(tiers):
            for (rank, key_id), group in line.groups.items():
                standing = rank, self._held.get(key_id, 0)
                before = group if standing < own else group[: _through(group, entry)] if standing == own else ()
                wanted += sum(each.slots for each in before if each is not entry)
        return wanted

    def _for(self, tiers: Collection[TierName]) -> Iterator[_Line[E]]:
        return (line for line in self._lines.values() if not line.tiers.isdisjoint(tiers))

    def _order(self, entry: E) -> tuple[int, int, float]:
        return entry.rank, self._held.get(entry.key_id, 0), entry.deadline


def _kind(entry: Entry) -> tuple[frozenset[TierName], bool, int]:
    """Return which line a request stands in; slots by powers of two, so that there are few."""
    return entry.tiers, entry.long, entry.slots.bit_length()


def _since(entry: Entry) -> float:
    return entry.since


def _through(group: list[E], entry: E) -> int:
    """Return how many of a group are due no later than a request."""
    return bisect_right(group, entry.deadline, key=_deadline)
