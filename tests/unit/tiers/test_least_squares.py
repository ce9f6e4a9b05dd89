"""Least squares on relative errors, with coefficients that are never negative."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.least_squares import least_squares

POSITIVE = st.floats(0.01, 100)


@given(
    st.tuples(POSITIVE, POSITIVE),
    st.lists(st.floats(0, 50), min_size=3, max_size=20, unique=True),
)
def test_exact_data_give_their_coefficients(
    true: tuple[float, float], values: list[float]
) -> None:
    """Whatever their scales, predictions are those of the line that the data lie on."""
    rows = [(1.0, x) for x in values]
    targets = [true[0] + true[1] * x for x in values]
    found = least_squares(rows, targets)
    for (one, x), target in zip(rows, targets, strict=True):
        assert found[0] * one + found[1] * x == pytest.approx(target, rel=1e-3)


def test_errors_count_in_proportion_to_the_target() -> None:
    """Of two targets for one row, the fit is nearer to the small one than their mean: 2 ms matter more at 1 than at 100."""
    (found,) = least_squares([(1.0,), (1.0,)], [1.0, 100.0])
    assert found == pytest.approx((1 / 1 + 1 / 100) / (1 / 1**2 + 1 / 100**2))


def test_no_coefficient_is_negative() -> None:
    """A falling line is fitted by its constant alone."""
    base, slope = least_squares([(1.0, x) for x in (1.0, 2.0, 3.0)], [3.0, 2.0, 1.0])
    assert slope == 0.0
    assert 1.0 < base < 3.0


def test_a_column_of_zeros_has_no_coefficient() -> None:
    assert least_squares([(1.0, 0.0), (1.0, 0.0)], [5.0, 5.0]) == [
        pytest.approx(5.0),
        0.0,
    ]
    assert least_squares([(0.0,)], [5.0]) == [0.0]


def test_equal_columns_share_what_they_explain() -> None:
    """A singular system has a solution all the same, and it predicts the targets."""
    found = least_squares([(x, x) for x in (1.0, 2.0, 4.0)], [3.0, 6.0, 12.0])
    assert sum(found) == pytest.approx(3.0)
    assert min(found) >= 0.0
