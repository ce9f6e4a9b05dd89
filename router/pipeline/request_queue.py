"""Waiting requests in queues: which is first, which is the oldest, how many slots are wanted before one.

Requests that the same tiers could serve, and that take about as much of a replica, form one queue. If the first of a queue
finds no slot, those behind it would find none either. Within a queue, order is by priority class, then by the slots that
the request's key holds, then by deadline.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from tiers.spec import TierName


@dataclass(slots=True, eq=False)
class Waiter:
    """One waiting request. Times are seconds by the monotonic clock."""

    key_id: str  # the caller's key
    rank: int  # the priority class, lower first
    since: float  # when it came
    deadline: float  # when it wants its first token
    tiers: frozenset[TierName]  # the tiers that could serve it when ready and free
    slots: int  # as many as it takes
    long: bool  # whether its prompt is too long for a replica with a full KV cache


E = TypeVar("E", bound=Waiter)
# priority class, slots that the key holds, deadline; the lowest comes first
Order = tuple[int, int, float]
_deadline = attrgetter("deadline")


class _KindQueue(Generic[E]):
    """Requests of one kind: by arrival, and within each class and key by deadline."""

    def __init__(self, tiers: frozenset[TierName]) -> None:
        self.tiers = tiers
        self.arrived: dict[E, None] = {}
        self.groups: dict[tuple[int, str], list[E]] = {}

    def add(self, waiter: E) -> None:
        self.arrived[waiter] = None
        insort(
            self.groups.setdefault((waiter.rank, waiter.key_id), []),
            waiter,
            key=_deadline,
        )

    def remove(self, waiter: E) -> None:
        del self.arrived[waiter]
        group = self.groups[waiter.rank, waiter.key_id]
        group.remove(waiter)
        if not group:
            del self.groups[waiter.rank, waiter.key_id]

    def first(self, order: Callable[[E], Order]) -> E:
        return min([group[0] for group in self.groups.values()], key=order)


class RequestQueue(Generic[E]):
    """All waiting requests. A change of ``held``, the slots that each key holds, changes the order."""

    def __init__(self, held: Mapping[str, int]) -> None:
        self._held = held
        self._queues: dict[tuple[frozenset[TierName], bool, int], _KindQueue[E]] = {}
        self.count = 0  # all waiting requests

    def add(self, waiter: E) -> None:
        self._queues.setdefault(_kind(waiter), _KindQueue(waiter.tiers)).add(waiter)
        self.count += 1

    def remove(self, waiter: E) -> None:
        kind = _kind(waiter)
        queue = self._queues.get(kind)
        if queue is None or waiter not in queue.arrived:
            return
        queue.remove(waiter)
        self.count -= 1
        if not queue.arrived:
            del self._queues[kind]

    def first(self, passed_over: Collection[E]) -> E | None:
        """Return the first request, apart from queues whose first was passed over; None: none is left."""
        firsts = [queue.first(self._order) for queue in self._queues.values()]
        candidates = [waiter for waiter in firsts if waiter not in passed_over]
        return min(candidates, key=self._order, default=None)

    def last(self) -> E:
        lasts: list[E] = []
        for queue in self._queues.values():
            lasts += [group[-1] for group in queue.groups.values()]
        return max(lasts, key=self._order)

    def oldest(self, tier: TierName) -> E | None:
        oldest_by_queue = [next(iter(queue.arrived)) for queue in self._for((tier,))]
        return min(oldest_by_queue, key=attrgetter("since"), default=None)

    def waiting_for(self, tier: TierName) -> int:
        return sum(len(queue.arrived) for queue in self._for((tier,)))

    def slots_before(self, waiter: E, tiers: Collection[TierName]) -> int:
        """Return the slots wanted by a request, and by those before it that any of several tiers could serve."""
        own_rank, own_held, deadline = self._order(waiter)
        slots_wanted = waiter.slots
        for queue in self._for(tiers):
            for (rank, key_id), group in queue.groups.items():
                # A group's requests share rank and key, so they differ in their deadlines only.
                standing = (rank, self._held.get(key_id, 0))
                if standing > (own_rank, own_held):
                    continue
                requests_before = len(group)
                if standing == (own_rank, own_held):
                    requests_before = bisect_right(group, deadline, key=_deadline)
                slots_wanted += sum(
                    queued.slots
                    for queued in group[:requests_before]
                    if queued is not waiter
                )
        return slots_wanted

    def _for(self, tiers: Collection[TierName]) -> Iterator[_KindQueue[E]]:
        return (
            queue
            for queue in self._queues.values()
            if not queue.tiers.isdisjoint(tiers)
        )

    def _order(self, waiter: E) -> Order:
        return waiter.rank, self._held.get(waiter.key_id, 0), waiter.deadline


def _kind(waiter: Waiter) -> tuple[frozenset[TierName], bool, int]:
    """Return the kind that a request is of: its queue. Slots count by powers of two, so that there are few queues."""
    return waiter.tiers, waiter.long, waiter.slots.bit_length()
