"""Weighted evidence: a named pattern that adds to a score each time it is found, up to a limit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Signal:
    """One kind of evidence.

    Attributes:
        name: For the person who reads why.
        pattern: What to look for. Every repetition in it is bounded, so that no text makes it slow.
        weight: Added to the score for each find, in units of log-odds; negative: evidence against.
        limit: Finds that count.
    """

    name: str
    pattern: re.Pattern[str]
    weight: float
    limit: int = 1

    def score(self, text: str) -> float:
        """Return what this signal adds for a text."""
        if self.limit == 1:
            return self.weight if self.pattern.search(text) else 0.0
        found = 0
        for _ in self.pattern.finditer(text):
            found += 1
            if found == self.limit:
                break
        return self.weight * found


def signal(name: str, pattern: str, weight: float, limit: int = 1, flags: int = re.MULTILINE) -> Signal:
    """Return a signal with its pattern compiled."""
    return Signal(name, re.compile(pattern, flags), weight, limit)


def weigh(signals: Iterable[Signal], text: str) -> tuple[float, list[tuple[float, str]]]:
    """Return the total score of a text, and what contributed to it: (weight, name), in the order of the table."""
    found = [(score, s.name) for s in signals if (score := s.score(text))]
    return sum(score for score, _ in found), found


def probability(log_odds: float) -> float:
    """Return the probability, 0..1, for log-odds."""
    return 1 / (1 + math.exp(-max(min(log_odds, 30.0), -30.0)))
