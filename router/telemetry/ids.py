"""Random ids of requests, traces and spans."""

from __future__ import annotations

import os

BUFFER_BYTES = 4096  # taken from the system at a time: its call costs a twentieth of a request


class _Buffer:
    """Random bytes of the system that are not used yet. One event loop owns it."""

    def __init__(self) -> None:
        self._digits, self._next = "", 0

    def take(self, digits: int) -> str:
        start, end = self._next, self._next + digits
        if end > len(self._digits):
            self._digits, start, end = os.urandom(BUFFER_BYTES).hex(), 0, digits
        self._next = end
        return self._digits[start:end]


random_hex = _Buffer().take
