"""How many requests a replica is given at once: an adaptive concurrency limit.

The gradient limit of Netflix's concurrency-limits (Gradient2Limit): the limit is multiplied by how the time that a request
should take compares with the time it took, and raised by a small queue that lets it find out whether more is possible. There
the expected time is a long-term average; here it is the predicted TTFT of a request that an engine takes up at once, which
accounts for the prompt's length and the batch. Where the engine lets requests wait, seen times leave that behind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TOLERANCE = 2.0  # seen over expected TTFT that is not yet a queue: predictions scatter by a third
SMOOTHING = 0.2  # weight of one sample, as in Gradient2Limit
FASTEST_FALL = 0.5  # of the limit by one sample


@dataclass(slots=True)
class ConcurrencyLimit:
    """One replica's limit on requests in flight.

    Attributes:
        lowest: Requests that are always let in.
        highest: Requests that are never exceeded.
    """

    lowest: int
    highest: int
    _limit: float

    @classmethod
    def starting(cls, sequences: int, highest: int) -> ConcurrencyLimit:
        """Return a limit that starts at the sequences that the engine runs at once."""
        start = min(sequences, highest)
        return cls(max(min(start // 4, start), 1), highest, float(start))

    @property
    def value(self) -> int:
        """Return the limit."""
        return int(self._limit)

    def sample(self, expected_ms: float, seen_ms: float, in_flight: int) -> None:
        """Learn from one request's time to its first token.

        Args:
            expected_ms: Had the engine taken it up at once.
            seen_ms: What it was.
            in_flight: Requests on the replica when it was sent; a sample says nothing about a limit that was not neared.
        """
        if in_flight * 2 < self._limit:
            return
        gradient = min(max(TOLERANCE * expected_ms / max(seen_ms, 0.1), FASTEST_FALL), 1.0)
        wanted = self._limit * gradient + math.sqrt(self._limit) * (gradient == 1.0)
        self._limit = min(max(self._limit + SMOOTHING * (wanted - self._limit), self.lowest), self.highest)

    def failed(self) -> None:
        """Learn from a request that got no answer: back off as AIMD does (Netflix's AIMDLimit, ratio 0.9)."""
        self._limit = max(self._limit * 0.9, self.lowest)
