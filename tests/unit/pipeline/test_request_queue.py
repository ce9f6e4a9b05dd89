"""Who stands first, who is the oldest, what is wanted before one."""

from __future__ import annotations

from collections import Counter

from router.pipeline.request_queue import RequestQueue, Waiter
from tiers.spec import STANDARD_TIERS, TierName

FAST, BALANCED, PRECISE = STANDARD_TIERS


def entry(
    *tiers: TierName,
    key: str = "a",
    rank: int = 1,
    since: float = 0.0,
    due: float = 9.0,
    slots: int = 1,
) -> Waiter:
    return Waiter(
        key,
        rank,
        since=since,
        deadline=since + due,
        tiers=frozenset(tiers),
        slots=slots,
        long=False,
    )


def test_order_is_class_then_places_held_then_deadline() -> None:
    """Over all queue, and as the counts of the keys are now."""
    held = Counter(a=2, b=1)
    queue: RequestQueue[Waiter] = RequestQueue(held)
    much = entry(FAST, key="a", due=1)
    little = entry(FAST, key="b", due=5)
    soon = entry(PRECISE, key="b", due=4)
    urgent = entry(FAST, key="a", rank=0, due=8)
    for each in (much, little, soon, urgent):
        queue.add(each)
    order = []
    while (first := queue.first(())) is not None:
        order.append(first)
        queue.remove(first)
    assert order == [urgent, soon, little, much]
    for each in (much, little):
        queue.add(each)
    assert queue.first(()) is little
    assert queue.last() is much
    held["b"] = 3
    assert queue.first(()) is much
    assert queue.last() is little


def test_who_is_passed_over_hides_only_its_own_line() -> None:
    """Those that wait for something else are still looked at, however many stand behind it."""
    queue: RequestQueue[Waiter] = RequestQueue({})
    waiting = [entry(FAST, rank=0, due=n) for n in range(50)]
    other = entry(PRECISE)
    several = entry(FAST, rank=0, due=99, slots=4)
    for each in (*waiting, other, several):
        queue.add(each)
    assert queue.first({waiting[0]}) is several
    assert queue.first({waiting[0], several}) is other
    assert queue.first({waiting[0], several, other}) is None


def test_the_oldest_of_a_tier() -> None:
    """Whatever its class, and in whichever line it stands."""
    queue: RequestQueue[Waiter] = RequestQueue({})
    both = entry(FAST, PRECISE, since=2)
    fast = entry(FAST, since=3, rank=0)
    precise = entry(PRECISE, since=1)
    for each in (fast, both, precise):
        queue.add(each)
    assert queue.oldest(FAST) == both
    assert queue.oldest(PRECISE) == precise
    assert queue.oldest(BALANCED) is None
    assert [queue.waiting_for(tier) for tier in STANDARD_TIERS] == [2, 0, 2]


def test_places_that_are_wanted_before() -> None:
    """Its own and those of whom comes first on the same tiers, by what each takes."""
    queue: RequestQueue[Waiter] = RequestQueue({"busy": 1})
    own = entry(FAST, PRECISE, due=5, slots=2)
    others = (
        entry(FAST, due=4, slots=3),
        entry(FAST, due=6),  # later
        entry(FAST, rank=0, key="busy", due=9),  # of a higher class
        entry(FAST, key="busy", due=1),  # of a key that has a place
        entry(BALANCED, rank=0),  # elsewhere
        entry(PRECISE, key="c", due=5),  # the same order: came before
    )
    for each in (*others, own):
        queue.add(each)
    assert queue.slots_before(own, (FAST,)) == 2 + 3 + 1
    assert queue.slots_before(own, (PRECISE,)) == 2 + 1
    assert queue.slots_before(own, (FAST, PRECISE)) == 2 + 3 + 1 + 1


def test_who_leaves_leaves_nothing() -> None:
    queue: RequestQueue[Waiter] = RequestQueue({})
    waiting = [entry(FAST, key=str(n % 3), due=n % 5, slots=n + 1) for n in range(20)]
    for each in waiting:
        queue.add(each)
    for each in waiting + waiting:
        queue.remove(each)
    assert queue.count == 0
    assert queue.first(()) is None
    assert queue.waiting_for(FAST) == 0
