"""Fit a small linear model with non-negative coefficients, minimising relative errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def least_squares(
    rows: Sequence[tuple[float, ...]], targets: Sequence[float]
) -> list[float]:
    """Return the non-negative coefficients that minimise the sum of squared relative errors.

    Args:
        rows: n rows of k values.
        targets: n values above zero.

    Returns:
        k coefficients. One whose column is zero is zero.
    """
    count = len(rows[0])
    active = [i for i in range(count) if any(row[i] for row in rows)]
    while active:
        scaled = [
            [row[i] / y for i in active] for row, y in zip(rows, targets, strict=True)
        ]
        normal = [
            [sum(r[i] * r[j] for r in scaled) for j in range(len(active))]
            for i in range(len(active))
        ]
        found = solve(normal, [sum(r[i] for r in scaled) for i in range(len(active))])
        lowest = min(range(len(active)), key=found.__getitem__)
        if found[lowest] >= 0:
            return [
                found[active.index(i)] if i in active else 0.0 for i in range(count)
            ]
        del active[lowest]
    return [0.0] * count


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric positive system by Gaussian elimination with pivoting; a singular column gives zero."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    tiny = 1e-12 * max(abs(value) for row in matrix for value in row)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) <= tiny:
            rows[column] = [0.0] * column + [1.0] + [0.0] * (size - column)
            continue
        for other in range(size):
            if other != column:
                factor = rows[other][column] / rows[column][column]
                rows[other] = [
                    a - factor * b
                    for a, b in zip(rows[other], rows[column], strict=True)
                ]
    return [rows[i][size] / rows[i][i] for i in range(size)]
