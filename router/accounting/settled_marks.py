"""Marks of settlements, by which a ledger knows one that is repeated."""

from __future__ import annotations

import time
from collections import deque

# A settlement that was repeated may still arrive within this time after its answer.
MARK_S = 10.0
AT_ONCE = 500


class SettledMarks:
    """The settlements that were answered, and whose marks are still there."""

    def __init__(self) -> None:
        self._answered: deque[tuple[float, str]] = deque()

    def add(self, settlement: str) -> None:
        self._answered.append((time.monotonic(), settlement))

    def pop_due(self) -> list[str]:
        """Return some settlements that nobody repeats any more: their marks can go."""
        due: list[str] = []
        due_if_before = time.monotonic() - MARK_S
        while self._answered and len(due) < AT_ONCE:
            answered_at, settlement = self._answered[0]
            if answered_at > due_if_before:
                break
            self._answered.popleft()
            due.append(settlement)
        return due

    def pop_all(self) -> list[str]:
        settlements = [settlement for _, settlement in self._answered]
        self._answered.clear()
        return settlements
