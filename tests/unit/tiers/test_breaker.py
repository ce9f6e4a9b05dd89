"""A replica's circuit breaker, by a clock that the tests set."""

from __future__ import annotations

import pytest

from tiers.breaker import MIN_ATTEMPTS, Breaker, BreakerOptions, BreakerState

CLOSED, OPEN, HALF_OPEN = BreakerState
OPTIONS = BreakerOptions(
    failures=3, failure_share=0.5, pause_s=1.0, longest_pause_s=8.0
)


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(OPTIONS)
    for _ in range(OPTIONS.failures):
        breaker.failed(at, probe=breaker.begin(at))
    assert breaker.state(at) is OPEN
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker(OPTIONS)
    for _ in range(2):
        breaker.failed(0, probe=0)
    breaker.succeeded(probe=0)
    for _ in range(2):
        breaker.failed(0, probe=0)
    assert breaker.state(0) is CLOSED, "an answer in between starts the count anew"
    breaker.failed(0, probe=0)
    assert breaker.state(0) == OPEN
    assert breaker.opened == 1
    assert breaker.admits(0) is False


def test_a_share_of_failures_opens_it() -> None:
    """Half of the last attempts, once there are enough of them to mean anything."""
    breaker = Breaker(OPTIONS)
    for number in range(MIN_ATTEMPTS - 1):
        if number % 2:
            breaker.failed(0, probe=0)
        else:
            breaker.succeeded(probe=0)
    assert breaker.state(0) is CLOSED
    breaker.failed(0, probe=0)
    assert breaker.state(0) is OPEN


def test_one_probe_at_a_time_closes_it() -> None:
    breaker = opened()
    assert not breaker.admits(0.9)
    assert breaker.state(1.0) == HALF_OPEN
    assert breaker.admits(1.0) is True
    probe = breaker.begin(1.0)
    assert not breaker.admits(1.0), "others wait for the probe"
    breaker.succeeded(probe=probe)
    assert breaker.state(1.0) == CLOSED
    assert breaker.admits(1.0) is True


def test_the_pause_doubles_up_to_a_bound() -> None:
    breaker = opened()
    now = 0.0
    pauses = []
    for _ in range(6):
        pauses.append(breaker.wait_s(now))
        now += pauses[-1]
        breaker.failed(now, probe=breaker.begin(now))
    assert pauses == [1, 2, 4, 8, 8, 8]


def test_a_probe_that_hangs_is_not_waited_for_for_ever() -> None:
    """The next one goes when it would go, had the first one failed; whichever answers closes the breaker."""
    breaker = opened()
    first = breaker.begin(1.0)
    held = breaker.admits_in_s(1.0)
    assert held == 2.0, "the pause that would follow its failure"
    second = breaker.begin(1.0 + held)
    assert second not in {0, first}
    breaker.succeeded(probe=first)
    assert breaker.state(3.0) is CLOSED


def test_a_probe_whose_client_left_frees_the_way() -> None:
    breaker = opened()
    breaker.given_up(probe=breaker.begin(1.0))
    assert breaker.admits(1.0)


def test_late_answers_do_not_close_it() -> None:
    """A request that was sent before it opened says nothing about now; neither does its failure lengthen the pause."""
    breaker = opened()
    breaker.succeeded(probe=0)
    assert breaker.state(0.5) is OPEN
    breaker.failed(0.5, probe=0)
    assert breaker.wait_s(0.5) == 0.5


def test_what_other_routers_saw_counts_within_the_longest_pause() -> None:
    breaker = Breaker(OPTIONS)
    breaker.adopt(0.0, 1000.0)
    assert breaker.state(0.0) == OPEN
    assert breaker.wait_s(0.0) == 8.0
    assert breaker.own_wait_s(0.0) == 0.0, (
        "it is not told on: they would keep one another open"
    )


@pytest.mark.parametrize("failures", [100, 2000])
def test_hours_of_failing_probes_overflow_nothing(failures: int) -> None:
    breaker = opened()
    now = 0.0
    for _ in range(failures):
        now += breaker.wait_s(now)
        breaker.failed(now, probe=breaker.begin(now))
    assert breaker.wait_s(now) == 8.0


def test_a_replica_whose_probes_all_hang_gets_them_ever_more_rarely() -> None:
    """Each probe without an answer counts as if it had failed, up to the longest pause."""
    breaker = opened()
    now = 1.0
    waits = []
    for _ in range(5):
        assert breaker.admits(now)
        breaker.begin(now)
        waits.append(breaker.admits_in_s(now))
        now += waits[-1]
    assert waits == [2, 4, 8, 8, 8]
    assert breaker.opened == 1


def test_of_probes_that_fail_together_one_counts() -> None:
    """The pause doubles once: they tell of one fault."""
    breaker = opened()
    first = breaker.begin(1.0)
    second = breaker.begin(3.0)
    breaker.failed(3.5, probe=first)
    breaker.failed(3.5, probe=second)
    assert breaker.wait_s(3.5) == 4.0


def test_an_older_probe_that_is_given_up_frees_no_way() -> None:
    breaker = opened()
    first = breaker.begin(1.0)
    breaker.begin(3.0)
    breaker.given_up(probe=first)
    assert not breaker.admits(3.0)


def test_a_new_process_begins_with_a_closed_breaker() -> None:
    breaker = opened()
    breaker.failed(1.0, probe=breaker.begin(1.0))
    breaker.reset()
    assert breaker.state(1.0) == CLOSED
    assert breaker.admits_in_s(1.0) == 0.0
    assert breaker.own_wait_s(1.0) == 0.0
    for _ in range(OPTIONS.failures):
        breaker.failed(2.0, probe=0)
    assert breaker.wait_s(2.0) == OPTIONS.pause_s


def test_a_pause_of_others_does_not_shorten_the_own_one() -> None:
    breaker = Breaker(OPTIONS)
    breaker.adopt(0.0, 5.0)
    breaker.adopt(0.0, 1.0)
    assert breaker.wait_s(0.0) == 5.0
    assert breaker.opened == 1
    own = opened()
    own.adopt(0.0, 6.0)
    assert own.wait_s(0.0) == 6.0
    assert own.own_wait_s(0.0) == 1.0
