"""Fit a small linear model with non-negative coefficients, minimising relative errors."""

from __future__ import annotations

from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Below this share of the largest value a pivot counts as zero.
PIVOT_TOLERANCE = 1e-12


def least_squares(
    rows: Sequence[tuple[float, ...]], targets: Sequence[float]
) -> list[float]:
    """Return the non-negative coefficients that minimise the sum of squared relative errors.

    Columns whose coefficient would be negative are left out, the most negative first, until none is left.

    Args:
        rows: n rows of k values.
        targets: n values above zero.

    Returns:
        k coefficients. One whose column is zero is zero.
    """
    coefficients = [0.0] * len(rows[0])
    columns = list(zip(*rows, strict=True))
    active_numbers = [number for number, column in enumerate(columns) if any(column)]
    while active_numbers:
        scaled = [_scaled(columns[number], targets) for number in active_numbers]
        matrix = [_products(column, scaled) for column in scaled]
        solution = solve(matrix, [sum(column) for column in scaled])
        smallest = min(range(len(solution)), key=solution.__getitem__)
        if solution[smallest] >= 0:
            for number, coefficient in zip(active_numbers, solution, strict=True):
                coefficients[number] = coefficient
            return coefficients
        del active_numbers[smallest]
    return coefficients


def _scaled(column: Sequence[float], targets: Sequence[float]) -> list[float]:
    """Return a column divided by the targets: the errors of the scaled system are relative ones."""
    return [value / target for value, target in zip(column, targets, strict=True)]


def _products(
    column: Sequence[float], columns: Sequence[Sequence[float]]
) -> list[float]:
    """Return the inner products of a column with each of several."""
    return [sum(map(mul, column, second)) for second in columns]


def solve(matrix: list[list[float]], right_side: list[float]) -> list[float]:
    """Solve a small symmetric positive system by Gaussian elimination with pivoting; a singular column gives zero."""
    rows = [[*row, value] for row, value in zip(matrix, right_side, strict=True)]
    size = len(rows)
    smallest_pivot = PIVOT_TOLERANCE * max(max(map(abs, row)) for row in matrix)
    for column in range(size):
        _move_pivot(rows, column)
        if abs(rows[column][column]) <= smallest_pivot:
            rows[column] = _row_of_zero(column, size)
            continue
        for number in range(size):
            if number != column:
                rows[number] = _eliminated(rows[number], rows[column], column)
    return [row[size] / row[number] for number, row in enumerate(rows)]


def _move_pivot(rows: list[list[float]], column: int) -> None:
    """Exchange two rows, so that the largest value of a column stands on the diagonal."""
    pivot = max(range(column, len(rows)), key=lambda number: abs(rows[number][column]))
    rows[column], rows[pivot] = rows[pivot], rows[column]


def _row_of_zero(column: int, size: int) -> list[float]:
    """Return the equation that says that one unknown is zero."""
    row = [0.0] * (size + 1)
    row[column] = 1.0
    return row


def _eliminated(
    row: Sequence[float], pivot_row: Sequence[float], column: int
) -> list[float]:
    """Return a row minus the multiple of the pivot's row that makes it zero in a column."""
    factor = row[column] / pivot_row[column]
    return [
        value - factor * pivot_value
        for value, pivot_value in zip(row, pivot_row, strict=True)
    ]
