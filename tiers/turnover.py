"""How long a replica's slots are held: the basis for predicting a wait.

The estimate is the recent time for which slots were held over the number of slots freed. Holds that have not ended count
as well (the maximum-likelihood estimate for exponential times with censoring). Every end counts, whether a request waits
or not, so the estimate also recovers while all requests that would wait are refused. Old observations fade, and the speed
model's prediction takes their place.
"""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIFE_S = 60.0  # of observations
LEAST_MEMORY = 5.0  # ends in the mean; more on a replica with more slots, about one for each slot


@dataclass(slots=True)
class Turnover:
    """One replica's slot turnover. Times are monotonic seconds."""

    _held_s: float = 0.0  # slots times seconds
    _freed: float = 0.0  # slots
    _at: float | None = None  # of the last change

    def note(self, now: float, held: int, freed: int = 0) -> None:
        """Note the slots held since the last call, and how many of them are freed now."""
        held_s, ended = self._faded(now, held)
        if freed:
            memory = max(LEAST_MEMORY, held)
            kept = (1 - 1 / memory) ** freed
            held_s, ended = held_s * kept, ended * kept + (1 - kept) * memory
        self._held_s, self._freed, self._at = held_s, ended, now

    def hold_s(self, now: float, held: int, predicted_s: float) -> float:
        """Return for how long a slot is expected to be held.

        Args:
            now: Present time.
            held: Slots held now.
            predicted_s: The result without observations; it counts less the more there are.
        """
        held_s, freed = self._faded(now, held)
        weight = 1 / (1 + freed)
        return (held_s + weight * predicted_s) / (freed + weight)

    def _faded(self, now: float, held: int) -> tuple[float, float]:
        past_s = 0.0 if self._at is None else max(now - self._at, 0.0)
        left = 0.5 ** (past_s / HALF_LIFE_S)
        return self._held_s * left + held * past_s, self._freed * left
