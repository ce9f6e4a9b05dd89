"""How many requests a replica is given at once: an adaptive concurrency limit.

It follows the gradient limit of Netflix's concurrency-limits (Gradient2Limit): the limit is multiplied by expected over
seen time, and raised by a small queue to find out whether more is possible. There the expected time is a long-term
average; here it is the predicted TTFT of a request that the engine does not queue, which accounts for the prompt's length
and the batch. When the engine queues requests, seen times exceed it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# seen over expected TTFT that does not yet mean a queue: predictions scatter by a third
TOLERANCE = 2.0
SMOOTHING = 0.2  # weight of one sample, as in Gradient2Limit
FASTEST_FALL = 0.5  # lowest gradient of one sample


@dataclass(slots=True)
class ConcurrencyLimit:
    """One replica's limit on requests in flight.

    Attributes:
        lowest: The limit never falls below it.
        highest: The limit never exceeds it.
    """

    lowest: int
    highest: int
    _limit: float  # with its fraction

    @classmethod
    def starting(cls, sequences: int, highest: int) -> ConcurrencyLimit:
        """Return a limit that starts at the sequences that the engine runs at once."""
        start = min(sequences, highest)
        lowest = max(min(start // 4, start), 1)
        return cls(lowest, highest, float(start))

    @property
    def value(self) -> int:
        """Return the limit."""
        return int(self._limit)

    def sample(self, expected_ms: float, seen_ms: float, in_flight: int) -> None:
        """Learn from one request's TTFT.

        Args:
            expected_ms: Predicted TTFT if the engine does not queue the request.
            seen_ms: Seen TTFT.
            in_flight: Requests on the replica when it was sent; below half the limit a sample says nothing about it.
        """
        if in_flight * 2 < self._limit:
            return
        gradient = TOLERANCE * expected_ms / max(seen_ms, 0.1)
        gradient = min(max(gradient, FASTEST_FALL), 1.0)
        target = self._limit * gradient
        if gradient == 1.0:  # nothing waits, so find out whether the engine takes more
            target += math.sqrt(self._limit)
        smoothed = self._limit + SMOOTHING * (target - self._limit)
        self._limit = min(max(smoothed, self.lowest), self.highest)

    def failed(self) -> None:
        """Lower the limit after a failed request, as Netflix's AIMDLimit does (ratio 0.9)."""
        self._limit = max(self._limit * 0.9, self.lowest)
