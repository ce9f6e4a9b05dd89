"""How long places are held: learned from every end, whoever waits; by a clock that the tests set."""

from __future__ import annotations

import pytest

from tiers.replica import HALF_LIFE_S, Turnover


def held(turnover: Turnover, now: float, seconds: float, times: int = 1) -> float:
    """Let one place be held for so long, so many times in a row; return when the last one ended."""
    for _ in range(times):
        turnover.note(now, 0)
        now += seconds
        turnover.note(now, 1, 1)
    return now


def test_without_evidence_the_prediction_counts() -> None:
    """Nothing was held yet: what the speed model says."""
    assert Turnover().hold_s(5.0, 0, 3.0) == 3.0


def test_what_was_held_before_the_first_note_is_not_known() -> None:
    """A replica that has just been marked as failed still has requests: they do not count from the clock's zero."""
    turnover = Turnover()
    assert turnover.hold_s(5000.0, 3, 1.0) == 1.0
    turnover.note(5000.0, 3, 1)
    assert turnover.hold_s(5000.0, 2, 1.0) < 1


def test_slow_moments_are_forgotten_while_nobody_waits() -> None:
    """A few quick ends are enough, though they are seconds apart and no request was ever let in from the queue."""
    turnover = Turnover()
    now = held(turnover, 0.0, 60.0, times=5)
    assert turnover.hold_s(now, 0, 0.4) > 30
    for _ in range(12):
        now = held(turnover, now + 5, 0.4)
    assert turnover.hold_s(now, 0, 0.4) < 6


def test_a_wrong_prediction_does_not_last() -> None:
    """Answers that are much shorter than they might have been soon count for more than what was predicted."""
    turnover = Turnover()
    now = held(turnover, 0.0, 0.4, times=10)
    assert turnover.hold_s(now, 1, 160.0) < 10


def test_what_does_not_end_is_seen() -> None:
    """Places that are held and held: the expected hold grows with them, before any of them ends."""
    turnover = Turnover()
    turnover.note(0.0, 0)
    assert turnover.hold_s(0.0, 4, 0.1) == pytest.approx(0.1)
    assert turnover.hold_s(300.0, 4, 0.1) > 1000
    assert len({turnover.hold_s(30.0, 4, 0.1) for _ in range(2)}) == 1, (
        "asking changes nothing"
    )
    assert 100 < turnover.hold_s(30.0, 4, 0.1) < 200
    turnover.note(30.0, 4)
    now = 30.0
    for _ in range(100):  # and once they end again, that is seen as soon
        now += 0.1
        turnover.note(now, 4, 1)
    assert turnover.hold_s(now, 4, 0.1) < 1


def test_evidence_fades_without_use() -> None:
    """After some half-lives with nothing held, the prediction counts again."""
    turnover = Turnover()
    now = held(turnover, 0.0, 60.0, times=5)
    assert turnover.hold_s(now + 12 * HALF_LIFE_S, 0, 0.5) == pytest.approx(
        0.5, rel=0.3
    )


def test_many_places_average_over_many_ends() -> None:
    """The mean goes over about one end for each place: half of them ending at once says little."""
    turnover = Turnover()
    now = 0.0
    turnover.note(now, 0)
    for _ in range(320):
        now += 0.125  # 32 places, each held for four seconds
        turnover.note(now, 32, 1)
    assert turnover.hold_s(now, 32, 1.0) == pytest.approx(4.0, rel=0.15)
    turnover.note(now, 32, 8)  # a request of eight answers
    assert turnover.hold_s(now, 32, 1.0) > 2
