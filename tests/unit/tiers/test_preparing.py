"""What tiers still need before they serve; times left are tested with the first start (tests/unit/deployment)."""

from __future__ import annotations

import pytest

from tiers.preparing import ENGINE_START_S, TYPICAL, WRITING_S, Preparations, Preparing
from tiers.spec import STANDARD_TIERS

FAST, BALANCED, PRECISE = STANDARD_TIERS
GIB = 1 << 30


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_checkpoints_are_made_in_one_order(clock: Clock) -> None:
    """However they are named, and each once: precise, balanced, fast."""
    preparations = Preparations(clock)
    assert preparations.making is False
    assert preparations.coming == ()
    preparations.expect([FAST, PRECISE, FAST], None)
    assert preparations.making is True
    assert preparations.to_make == (PRECISE, FAST)


def test_each_tier_tells_what_it_waits_for(clock: Clock) -> None:
    preparations = Preparations(clock)
    preparations.expect([PRECISE, FAST], None)
    told = [preparations.of(tier) for tier in (PRECISE, FAST, BALANCED)]
    assert told == [
        Preparing("making its checkpoint"),
        Preparing("waits for the checkpoint of precise"),
        None,
    ]
    preparations.made(PRECISE)
    assert preparations.of(PRECISE) == Preparing("waits for the other checkpoints")
    preparations.starting(PRECISE)
    assert preparations.of(PRECISE) == Preparing(
        "its engine starts", remaining_s=ENGINE_START_S
    )
    preparations.starting(BALANCED, None)
    starts = Preparing("its engine starts")
    assert preparations.coming == (PRECISE, BALANCED, FAST)
    assert preparations.of(BALANCED) == starts
    clock.now = ENGINE_START_S + 1
    assert preparations.of(PRECISE) == starts, (
        "longer than typical: the rest is not known"
    )


def test_parts_are_counted_while_their_step_lasts(clock: Clock) -> None:
    """A step without parts has none; the parts of an earlier step are not taken for its own."""
    preparations = Preparations(clock)
    preparations.expect([FAST], None)
    preparations.step("loading", 0, 0)
    assert preparations.of(FAST) == Preparing("loading")
    preparations.step("layers", 3, 31)
    assert preparations.of(FAST) == Preparing("layers", 3, 31), (
        "one part tells no pace yet"
    )
    clock.now = 10.0
    preparations.step("layers", 4, 31)
    assert preparations.of(FAST) == Preparing(
        "layers", 4, total=31, remaining_s=27 * 10 + WRITING_S + ENGINE_START_S
    )
    preparations.step("layers again", 1, 4)
    assert preparations.of(FAST) == Preparing("layers again", 1, 4), (
        "another step begins its own pace"
    )
    preparations.step("writing", 0, 0)
    assert preparations.of(FAST) == Preparing(
        "writing", remaining_s=WRITING_S + ENGINE_START_S
    )


def test_a_part_that_takes_long_is_not_counted_twice(clock: Clock) -> None:
    """The same part told again changes no pace, and time left never falls below what writing takes."""
    preparations = Preparations(clock)
    preparations.expect([FAST], None)
    for done, clock.now in ((1, 0.0), (2, 10.0), (2, 30.0)):
        preparations.step("layers", done, 3)
    left = preparations.of(FAST)
    assert left is not None
    assert left.remaining_s == 0.0 + WRITING_S + ENGINE_START_S


def test_the_next_checkpoint_begins_anew(clock: Clock) -> None:
    """Messages and parts of the one before are gone; the typical time counts from its end."""
    preparations = Preparations(clock)
    preparations.expect([PRECISE, BALANCED], GIB)
    preparations.step("casting", 1, 2)
    clock.now = 100.0
    preparations.made(PRECISE)
    clock.now = 101.0
    assert preparations.of(BALANCED) == Preparing(
        "making its checkpoint", remaining_s=sum(TYPICAL[BALANCED]) - 1 + ENGINE_START_S
    )


def test_a_failure_is_told_of_all_tiers_without_an_engine(clock: Clock) -> None:
    """Made but not started, and not made: both have failed, while one that starts goes on; nothing is made any more."""
    preparations = Preparations(clock)
    preparations.expect(STANDARD_TIERS, None)
    preparations.made(PRECISE)
    preparations.starting(PRECISE)
    preparations.made(BALANCED)
    assert preparations.fail("disk full") == (BALANCED, FAST)
    assert preparations.of(FAST) == Preparing(
        "its checkpoint could not be made", failed="disk full"
    )
    assert preparations.making is False
    assert preparations.coming == (PRECISE,)
    assert preparations.fail("again") == ()


def test_what_was_not_expected_changes_nothing(clock: Clock) -> None:
    """A checkpoint that was there before is handed over as well, and engines settle at every restart."""
    preparations = Preparations(clock)
    preparations.expect([FAST], None)
    preparations.made(PRECISE)
    preparations.settled(BALANCED)
    assert preparations.coming == (FAST,)


@pytest.mark.parametrize(
    ("preparing", "text"),
    [
        (Preparing("its engine starts"), "its engine starts"),
        (Preparing("layers", 3, 31), "layers (3 of 31)"),
        (
            Preparing("layers", 0, total=31, remaining_s=61.0),
            "layers (0 of 31), ready in about 65 s",
        ),
        (Preparing("writing", remaining_s=0.0), "writing, ready in about 5 s"),
    ],
)
def test_people_read_step_parts_and_time(preparing: Preparing, text: str) -> None:
    assert preparing.text == text
