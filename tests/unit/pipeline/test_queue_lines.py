"""Who stands first, who is the oldest, what is wanted before one."""

from __future__ import annotations

from collections import Counter

from router.pipeline.queue_lines import Entry, Lines
from tiers.spec import STANDARD_TIERS, TierName

FAST, BALANCED, PRECISE = STANDARD_TIERS


def entry(
    *tiers: TierName, key: str = "a", rank: int = 1, since: float = 0.0, due: float = 9.0, slots: int = 1
) -> Entry:
    return Entry(key, rank, since, since + due, frozenset(tiers), slots, long=False)


def test_order_is_class_then_places_held_then_deadline() -> None:
    """Over all lines, and as the counts of the keys are now."""
    held = Counter(a=2, b=1)
    lines: Lines[Entry] = Lines(held)
    much, little, soon = entry(FAST, key="a", due=1), entry(FAST, key="b", due=5), entry(PRECISE, key="b", due=4)
    urgent = entry(FAST, key="a", rank=0, due=8)
    for each in (much, little, soon, urgent):
        lines.add(each)
    order = []
    while (first := lines.first(())) is not None:
        order.append(first)
        lines.remove(first)
    assert order == [urgent, soon, little, much]
    for each in (much, little):
        lines.add(each)
    assert lines.first(()) is little
    assert lines.last() is much
    held["b"] = 3
    assert lines.first(()) is much
    assert lines.last() is little


def test_who_is_passed_over_hides_only_its_own_line() -> None:
    """Those that wait for something else are still looked at, however many stand behind it."""
    lines: Lines[Entry] = Lines({})
    waiting = [entry(FAST, rank=0, due=n) for n in range(50)]
    other, several = entry(PRECISE), entry(FAST, rank=0, due=99, slots=4)
    for each in (*waiting, other, several):
        lines.add(each)
    assert lines.first({waiting[0]}) is several
    assert lines.first({waiting[0], several}) is other
    assert lines.first({waiting[0], several, other}) is None


def test_the_oldest_of_a_tier() -> None:
    """Whatever its class, and in whichever line it stands."""
    lines: Lines[Entry] = Lines({})
    both, fast, precise = entry(FAST, PRECISE, since=2), entry(FAST, since=3, rank=0), entry(PRECISE, since=1)
    for each in (fast, both, precise):
        lines.add(each)
    assert (lines.oldest(FAST), lines.oldest(PRECISE), lines.oldest(BALANCED)) == (both, precise, None)
    assert [lines.waiting_for(tier) for tier in STANDARD_TIERS] == [2, 0, 2]


def test_places_that_are_wanted_before() -> None:
    """Its own and those of whom comes first on the same tiers, by what each takes."""
    lines: Lines[Entry] = Lines({"busy": 1})
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
        lines.add(each)
    assert lines.slots_before(own, (FAST,)) == 2 + 3 + 1
    assert lines.slots_before(own, (PRECISE,)) == 2 + 1
    assert lines.slots_before(own, (FAST, PRECISE)) == 2 + 3 + 1 + 1


def test_who_leaves_leaves_nothing() -> None:
    lines: Lines[Entry] = Lines({})
    waiting = [entry(FAST, key=str(n % 3), due=n % 5, slots=n + 1) for n in range(20)]
    for each in waiting:
        lines.add(each)
    for each in waiting + waiting:
        lines.remove(each)
    assert (lines.count, lines.first(()), lines.waiting_for(FAST)) == (0, None, 0)
