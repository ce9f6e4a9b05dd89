"""A circuit breaker for one replica: after failures it gets no requests for a while, then a single one as a probe.

The states are those of Nygard, Release It! (2007): closed, open, half-open. What opens it are failures in a row and the
share of failures among the last attempts, as in Envoy's outlier detection (consecutive_5xx, failure_percentage). The pause
grows with each probe that fails, as its base_ejection_time does.

A probe holds the others back for a bounded time. Only a streamed request shows soon whether the replica works; one that is
not streamed may take ten minutes, and may be all that comes. So a probe that has not answered by the time at which the next
one would go, had it failed, is waited for no longer: the next request goes as well. A replica that hangs gets requests no
more often than one that fails at once, and the first answer, of whichever probe, closes the breaker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

WINDOW = 20  # attempts that the share of failures is taken of
ENOUGH = 8  # of them, before the share means anything
MOST_DOUBLINGS = 60  # of the pause: beyond any longest pause, and within what a float holds


class BreakerState(StrEnum):
    """Whether a replica gets requests."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """When a breaker opens, and for how long.

    Attributes:
        failures: In a row that open it.
        failure_share: Of the last attempts, 0..1, that opens it as well.
        pause_s: Until the first probe; doubled with each probe that fails.
        longest_pause_s: At most.
    """

    failures: int = 3
    failure_share: float = 0.5
    pause_s: float = 1.0
    longest_pause_s: float = 30.0


@dataclass(slots=True)
class Breaker:
    """One replica's breaker. Times are seconds by the monotonic clock.

    Attributes:
        opened: How often it has opened since the start.
    """

    options: BreakerOptions = field(default_factory=BreakerOptions)
    opened: int = 0
    _open_until: float | None = None
    _held_until: float | None = None  # by a probe
    _probe: int = 0  # the last one's number
    _own_until: float = 0.0  # of the pause, as far as it goes back to failures seen here
    _pauses: int = 0
    _failures: int = 0
    _last: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def state(self, now: float) -> BreakerState:
        """Return the state."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Tell whether a request may be sent: any while closed, one at a time while half-open."""
        if self._open_until is None:
            return True
        return now >= self._open_until and (self._held_until is None or now >= self._held_until)

    def wait_s(self, now: float) -> float:
        """Return what is left of the pause."""
        return 0.0 if self._open_until is None else max(self._open_until - now, 0.0)

    def admits_in_s(self, now: float) -> float:
        """Return the time until it admits a request at the latest."""
        held = 0.0 if self._held_until is None else max(self._held_until - now, 0.0)
        return max(self.wait_s(now), held)

    def own_wait_s(self, now: float) -> float:
        """Return what is left of a pause for failures seen here: what other routers are told."""
        return 0.0 if self._open_until is None else max(self._own_until - now, 0.0)

    def begin(self, now: float) -> int:
        """Note that a request is sent; return its number if it is a probe, else 0."""
        if self.state(now) is not BreakerState.HALF_OPEN:
            return 0
        if self._held_until is not None:  # the probe before has not answered, as if it had failed
            self._pauses += 1
        self._held_until = now + self._pause_s()
        self._probe += 1
        return self._probe

    def succeeded(self, *, probe: int) -> None:
        """Note that a request got its first token. One that was sent before the breaker opened does not close it.

        Args:
            probe: What ``begin`` returned for it.
        """
        self._last.append(True)
        if self._open_until is None or probe:
            self.reset()

    def failed(self, now: float, *, probe: int) -> None:
        """Note that the replica failed a request."""
        self._last.append(False)
        self._failures += 1
        if self._open_until is not None:
            if probe and now >= self._open_until:  # of several probes that fail together, one counts
                self._open(now)
            return
        share = self._last.count(False) / len(self._last)
        if self._failures >= self.options.failures or (
            len(self._last) >= ENOUGH and share >= self.options.failure_share
        ):
            self._open(now)

    def given_up(self, *, probe: int) -> None:
        """Note that a request ended without telling anything about the replica: its client left, say."""
        if probe and probe == self._probe:
            self._held_until = None

    def adopt(self, now: float, wait_s: float) -> None:
        """Stay open for so long, and no longer than a pause may be: another router has seen the replica fail."""
        until = now + min(wait_s, self.options.longest_pause_s)
        if self._open_until is None:
            self.opened += 1
            self._pauses = max(self._pauses, 1)
            self._last.clear()
        self._open_until = max(self._open_until or until, until)

    def reset(self) -> None:
        """Close it, and forget failures in a row: the replica works, or it is a new process."""
        self._open_until, self._held_until, self._pauses, self._failures = None, None, 0, 0
        self._own_until = 0.0

    def _open(self, now: float) -> None:
        if self._open_until is None:
            self.opened += 1
            self._last.clear()
        self._open_until = self._own_until = now + self._pause_s()
        self._held_until = None
        self._pauses += 1

    def _pause_s(self) -> float:
        """Return how long the replica is spared if it fails now."""
        doublings = min(self._pauses, MOST_DOUBLINGS)
        return min(self.options.pause_s * 2.0**doublings, self.options.longest_pause_s)
