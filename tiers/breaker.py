"""A circuit breaker for one replica: after failures it gets no requests for a while, then a single one as a probe.

The states are those of Nygard, Release It! (2007): closed, open, half-open. It opens after consecutive failures, or at a
share of failures among the last attempts, as Envoy's outlier detection does (consecutive_5xx, failure_percentage). The
pause grows with each failed probe, as Envoy's base_ejection_time does.

A probe holds other requests back for a bounded time only: a streamed request soon shows whether the replica works, but
one that is not streamed may take ten minutes, and may be the only one. It holds them back for the pause that would
follow its failure; then the next request is sent as a further probe. So a hung replica gets requests no more often than
one that fails at once, and the first answer to any probe closes the breaker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW = 20  # attempts in the share of failures
MIN_ATTEMPTS = 8  # attempts before the share counts
MAX_DOUBLINGS = 60  # a pause doubled more often would leave a float's range


class BreakerState(StrEnum):
    """Whether a replica gets requests."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """When a breaker opens, and for how long.

    Attributes:
        failures: Consecutive failures that open it.
        failure_share: Share of failures among the last attempts, 0..1, that opens it as well.
        pause_s: Until the first probe; doubled with each failed probe.
        longest_pause_s: Upper bound of the pause.
    """

    failures: int = 3
    failure_share: float = 0.5
    pause_s: float = 1.0
    longest_pause_s: float = 30.0


@dataclass(slots=True)
class Breaker:
    """One replica's breaker. Times are monotonic seconds.

    Attributes:
        opened: How often it has opened.
        on_open: Called when it opens.
        open_until: Until when no request is sent, and from when on it is half-open; None: it is closed, and its state does
            not depend on the time.
    """

    options: BreakerOptions = field(default_factory=BreakerOptions)
    opened: int = 0
    on_open: Callable[[], None] = field(default=lambda: None, repr=False)
    open_until: float | None = None
    # a probe without a result holds other requests back until then
    _held_until: float | None = None
    _probe: int = 0  # number of the last probe
    _own_until: float = 0.0  # end of the pause for failures seen by this router
    # since it was closed, hung probes included; the next pause is doubled as often
    _pauses: int = 0
    _failures: int = 0  # consecutive ones
    # Whether each of the last attempts succeeded.
    _successes: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def state(self, now: float) -> BreakerState:
        """Return the state."""
        if self.open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.open_until else BreakerState.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Tell whether a request may be sent: any while closed, one at a time while half-open."""
        if self.open_until is None:
            return True
        return now >= self.open_until and (
            self._held_until is None or now >= self._held_until
        )

    def wait_s(self, now: float) -> float:
        """Return the rest of the pause."""
        if self.open_until is None:
            return 0.0
        return max(self.open_until - now, 0.0)

    def admits_in_s(self, now: float) -> float:
        """Return an upper bound of the time until it admits a request."""
        wait_s = self.wait_s(now)
        if self._held_until is None:
            return wait_s
        return max(wait_s, self._held_until - now)

    def own_wait_s(self, now: float) -> float:
        """Return the rest of a pause for failures seen by this router, which it tells other routers."""
        if self.open_until is None:
            return 0.0
        return max(self._own_until - now, 0.0)

    def begin(self, now: float) -> int:
        """Note that a request is sent; return the number of the probe, or 0 if it is none.

        No timer watches a probe. One that hangs is counted as failed here, when the request after it is sent: ``admits``
        has then held requests back for as long as the pause that would have followed its failure.
        """
        if self.state(now) is not BreakerState.HALF_OPEN:
            return 0
        has_hung_probe = self._held_until is not None
        if has_hung_probe:
            self._pauses += 1
        self._held_until = now + self._pause_s()
        self._probe += 1
        return self._probe

    def succeeded(self, *, probe: int) -> None:
        """Note that a request got its first token. A request sent before the breaker opened does not close it.

        Args:
            probe: Result of ``begin`` for the request.
        """
        self._successes.append(True)
        if self.open_until is None:  # a closed breaker has nothing else to reset
            self._failures = 0
        elif probe:
            self.reset()

    def failed(self, now: float, *, probe: int) -> None:
        """Note that the replica failed a request."""
        self._successes.append(False)
        self._failures += 1
        state = self.state(now)
        if state is BreakerState.CLOSED and self._has_failed_too_often():
            self._open(now)
        # When several probes fail together, the first one opens the breaker, and the others no longer count.
        if state is BreakerState.HALF_OPEN and probe:
            self._open(now)

    def _has_failed_too_often(self) -> bool:
        if self._failures >= self.options.failures:
            return True
        attempts = len(self._successes)
        return (
            attempts >= MIN_ATTEMPTS
            and self._successes.count(False) / attempts >= self.options.failure_share
        )

    def given_up(self, *, probe: int) -> None:
        """Note that a request ended without showing whether the replica works, for example because its client left."""
        if probe and probe == self._probe:
            self._held_until = None

    def adopt(self, now: float, wait_s: float) -> None:
        """Open for ``wait_s``, at most the longest pause: another router has seen the replica fail."""
        until = now + min(wait_s, self.options.longest_pause_s)
        if self.open_until is None:
            self.opened += 1
            self._pauses = max(self._pauses, 1)
            self._successes.clear()
            self.open_until = until
        self.open_until = max(self.open_until, until)
        self.on_open()

    def reset(self) -> None:
        """Close it, and forget consecutive failures: the replica works, or is a new process."""
        self.open_until = None
        self._held_until = None
        self._own_until = 0.0
        self._pauses = 0
        self._failures = 0

    def _open(self, now: float) -> None:
        if self.open_until is None:
            self.opened += 1
            self._successes.clear()
        self._own_until = now + self._pause_s()
        self.open_until = self._own_until
        self._held_until = None
        self._pauses += 1
        self.on_open()

    def _pause_s(self) -> float:
        """Return the length of the pause after a failure now."""
        doublings = min(self._pauses, MAX_DOUBLINGS)
        return min(self.options.pause_s * 2.0**doublings, self.options.longest_pause_s)
