"""The queues of two workers: the most urgent request of both comes first, and both count all."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from router.pipeline.queue_lines import Entry
from router.workers import table as tables
from router.workers.queue import SharedLines
from router.workers.table import Table
from tiers.spec import TierName

if TYPE_CHECKING:
    import pytest

FAST, PRECISE = frozenset({TierName.FAST}), frozenset({TierName.PRECISE})


def entry(rank: int, deadline: float, tiers: frozenset[TierName] = FAST, key_id: str = "", since: float = 0.0) -> Entry:
    """Return a waiting request."""
    return Entry(key_id, rank, since, deadline, tiers, 1, long=False)


class Workers:
    """Two workers' queues, over one table."""

    def __init__(self) -> None:
        first = Table.make(2, 4)
        self.tables = [Table(first.fd, first.shape, row, first.bells) for row in (1, 2)]
        for table in self.tables:
            table.beat()
        self.held: list[Counter[str]] = [Counter(), Counter()]
        self.one, self.two = (SharedLines[Entry](t, h) for t, h in zip(self.tables, self.held, strict=True))


def test_both_count_all() -> None:
    """Length, and requests for a tier, are those of both; an entry taken out twice counts once."""
    workers = Workers()
    mine, other = entry(1, 5.0), entry(1, 6.0, PRECISE)
    workers.one.add(mine)
    workers.two.add(other)
    assert [len(lines) for lines in (workers.one, workers.two)] == [2, 2]
    assert [lines.waiting_for(TierName.FAST) for lines in (workers.one, workers.two)] == [1, 1]
    workers.one.remove(mine)
    workers.one.remove(mine)
    assert [len(lines) for lines in (workers.one, workers.two)] == [1, 1]
    assert workers.one.first(()) is None
    assert bool(workers.one)


def test_the_more_urgent_request_comes_first_wherever_it_waits() -> None:
    """By priority class, then by the slots that the key holds, then by deadline."""
    workers = Workers()
    later, sooner = entry(1, 9.0), entry(1, 5.0)
    workers.one.add(later)
    assert workers.one.first(()) is later
    workers.two.add(sooner)
    assert workers.one.first(()) is None
    assert workers.two.first(()) is sooner
    urgent = entry(0, 20.0)
    workers.one.add(urgent)
    assert workers.one.first(()) is urgent
    assert workers.two.first(()) is None
    workers.one.remove(urgent)
    workers.two.remove(sooner)
    assert workers.one.first(()) is later


def test_requests_for_other_tiers_do_not_wait() -> None:
    """Only a request that the same tier could serve comes before."""
    workers = Workers()
    mine = entry(2, 9.0)
    workers.one.add(mine)
    workers.two.add(entry(0, 1.0, PRECISE))
    assert workers.one.first(()) is mine


def test_one_of_two_always_comes_first_though_held_slots_change() -> None:
    """After each has looked, they agree on who is first: two that wait for each other would wait for ever."""
    workers = Workers()
    mine, other = entry(1, 5.0, key_id="a"), entry(1, 6.0, key_id="b")
    workers.one.add(mine)
    workers.two.add(other)
    workers.held[0]["a"] = 5
    workers.held[1]["b"] = 3
    workers.one.first(())
    assert workers.two.first(()) is other
    assert workers.one.first(()) is None


def test_the_oldest_is_the_oldest_of_both() -> None:
    """A request is the oldest only if none in the other worker has waited longer."""
    workers = Workers()
    old, young = entry(1, 5.0, since=1.0), entry(1, 5.0, since=2.0)
    workers.one.add(old)
    workers.two.add(young)
    assert workers.one.oldest(TierName.FAST) is old
    assert workers.two.oldest(TierName.FAST) is None


def test_nobody_waits_for_a_stuck_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without a heartbeat keeps no other from serving."""
    workers = Workers()
    mine = entry(2, 9.0)
    workers.one.add(mine)
    workers.two.add(entry(0, 1.0))
    assert workers.one.first(()) is None
    monkeypatch.setattr(tables, "FRESH_S", 0.0)
    assert workers.one.first(()) is mine


def test_requests_of_other_workers_count_for_the_expected_wait() -> None:
    """Each takes a slot before."""
    workers = Workers()
    mine = entry(1, 9.0)
    workers.one.add(mine)
    for _ in range(3):
        workers.two.add(entry(1, 1.0))
    assert workers.one.slots_before(mine, (TierName.FAST,)) == 4
