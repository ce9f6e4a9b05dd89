"""The adaptive concurrency limit of a replica."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiers.limit import ConcurrencyLimit


def learned(
    limit: ConcurrencyLimit, *, expected_ms: float, seen_ms: float, times: int
) -> ConcurrencyLimit:
    """Return a limit after some requests that were sent with as many in flight as it allows."""
    for _ in range(times):
        limit.sample(expected_ms, seen_ms, limit.value)
    return limit


def test_it_starts_at_what_the_engine_runs_at_once() -> None:
    assert ConcurrencyLimit.starting(16, 32).value == 16
    assert ConcurrencyLimit.starting(64, 32).value == 32


def test_it_grows_to_the_highest_while_nothing_waits() -> None:
    assert (
        learned(
            ConcurrencyLimit.starting(8, 32), expected_ms=100, seen_ms=110, times=200
        ).value
        == 32
    )


def test_it_falls_to_the_lowest_while_requests_wait_in_the_engine() -> None:
    limit = ConcurrencyLimit.starting(16, 32)
    assert (
        learned(limit, expected_ms=100, seen_ms=5000, times=200).value
        == limit.lowest
        == 4
    )


def test_scatter_is_no_queue() -> None:
    """Predictions scatter; up to twice the expected time tells nothing bad."""
    assert (
        learned(
            ConcurrencyLimit.starting(8, 32), expected_ms=100, seen_ms=199, times=10
        ).value
        >= 8
    )


def test_a_limit_that_was_not_neared_learns_nothing() -> None:
    limit = ConcurrencyLimit.starting(16, 32)
    limit.sample(100, 5000, 3)
    assert limit.value == 16


def test_a_failure_backs_off() -> None:
    limit = ConcurrencyLimit.starting(20, 32)
    limit.failed()
    assert limit.value == 18


@given(
    st.lists(
        st.tuples(st.floats(0.1, 1e5), st.floats(0, 1e6), st.integers(0, 64))
        | st.none(),
        max_size=60,
    )
)
def test_it_stays_within_its_bounds(
    samples: list[tuple[float, float, int] | None],
) -> None:
    limit = ConcurrencyLimit.starting(16, 32)
    for sample in samples:
        if sample is None:
            limit.failed()
        else:
            limit.sample(*sample)
        assert limit.lowest <= limit.value <= limit.highest
