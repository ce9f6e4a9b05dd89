"""How long a replica's places are held: what a wait for one is predicted from.

Counted are the time for which places have been held lately and the places that came free. Their ratio is the mean
hold; holds that have not ended yet count as well (the maximum-likelihood estimate for exponential times with
censoring). Every end tells, whether anybody waits or not, so the estimate recovers also while all who would wait are
refused. With time, what was seen fades, and the speed model's prediction takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIFE_S = 60.0  # of what was seen
LEAST_MEMORY = 5.0  # ends that the mean goes over; more on a replica with more places: about each place's last one


@dataclass(slots=True)
class Turnover:
    """One replica's. Times are seconds by the monotonic clock."""

    _held_s: float = 0.0  # places times seconds
    _freed: float = 0.0  # places
    _at: float | None = None  # when that was so

    def note(self, now: float, held: int, freed: int = 0) -> None:
        """Note that so many places were held since the last call, and that some of them come free now."""
        self._held_s, self._freed, self._at = *self._faded(now, held), now
        if freed:
            memory = max(LEAST_MEMORY, held)
            kept = (1 - 1 / memory) ** freed
            self._held_s, self._freed = self._held_s * kept, self._freed * kept + (1 - kept) * memory

    def hold_s(self, now: float, held: int, predicted_s: float) -> float:
        """Return for how long a place is expected to be held.

        Args:
            now: When.
            held: Places that are held now.
            predicted_s: What counts where nothing was seen, and the less the more was.
        """
        held_s, freed = self._faded(now, held)
        weight = 1 / (1 + freed)
        return (held_s + weight * predicted_s) / (freed + weight)

    def _faded(self, now: float, held: int) -> tuple[float, float]:
        past_s = 0.0 if self._at is None else max(now - self._at, 0.0)
        left = 0.5 ** (past_s / HALF_LIFE_S)
        return self._held_s * left + held * past_s, self._freed * left
