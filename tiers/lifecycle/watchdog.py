"""Decide when an engine is restarted, or quarantined: after an exit, when it hangs, or when it has become too slow.

The supervisor acts on it. Times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.errors import TierError
from tiers.probe import COMPLETIONS, Counters

if TYPE_CHECKING:
    from tiers.probe import EngineProbe
    from tiers.replica import Replica

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0
STEADY_S = 180.0  # an engine that was ready this long starts at the first backoff again
HANG_PROOF_S = 30.0  # time for an engine that seems to hang to answer
# up to this many requests, an engine's TTFT does not depend on its queue
CALM_SEQUENCES = 2
WINDOW_ANSWERS = 10  # first tokens per mean of an engine's own TTFT
# added to a prompt's tokens, because the TTFT of an empty prompt is not 0
FIXED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class WatchdogOptions:
    """When an engine is restarted or recycled; one that runs elsewhere is quarantined instead.

    Attributes:
        max_restarts: Restarts within ``restart_window_s``; after one more exit the engine stays down. 0: never.
        restart_window_s: See ``max_restarts``.
        hang_s: Without progress on open requests; then it must answer a request of one token, or is killed.
        unreachable_s: Without an answer to health checks; then it is killed.
        slow_factor: Too slow: by this factor slower than predicted, or than it was itself. 0: not checked.
        slow_s: An engine is recycled after being too slow for this long.
    """

    max_restarts: int = 5
    restart_window_s: float = 900.0
    hang_s: float = 60.0
    unreachable_s: float = 60.0
    slow_factor: float = 4.0
    slow_s: float = 600.0


class Restarts:
    """One engine's exits, and the wait after each."""

    def __init__(self, options: WatchdogOptions) -> None:
        self.options = options
        self._exits: deque[float] = deque()
        self.count = 0

    def exited(self, now: float, ready_s: float) -> float | None:
        """Note an exit after ``ready_s`` ready seconds; return the seconds to wait, or None for a crash loop.

        The wait doubles from one second to a minute. It starts over for an engine that was ready for ``STEADY_S``.
        """
        if ready_s >= STEADY_S:
            self.count = 0
        while self._exits and now - self._exits[0] > self.options.restart_window_s:
            self._exits.popleft()
        if len(self._exits) >= self.options.max_restarts:
            return None
        self._exits.append(now)
        self.count += 1
        return min(float(FIRST_BACKOFF_S * 2 ** (self.count - 1)), LONGEST_BACKOFF_S)

    def forget(self) -> None:
        """Start over: an operator has restarted the engine."""
        self._exits.clear()
        self.count = 0


class Wear:
    """Whether an engine has been so slow for so long since its start that it is to be recycled.

    There are two signs: live answers are slower than the speed model predicts for their load; the engine's own mean TTFT
    per computed prompt token, with next to no load, is worse than its best.
    """

    def __init__(self, options: WatchdogOptions) -> None:
        self._options = options
        self._last: Counters | None = None
        self._calm = Counters()
        self._best_pace = math.inf
        self._slow_answers_spell = _Spell()
        self._slow_itself_spell = _Spell()
        self.found_at = 0.0  # monotonic seconds

    def note(
        self, now: float, off: float, counters: Counters, *, sequences: int
    ) -> str | None:
        """Take in one reading; return why the engine is to be recycled, or None.

        Args:
            now: Time of the reading.
            off: Seen over predicted time, of TTFT or TPOT, whichever is worse.
            counters: The engine's own.
            sequences: Requests on it.
        """
        increase = counters.since(self._last or counters)
        self._last = counters
        if sequences <= CALM_SEQUENCES:
            self._calm = self._calm.plus(increase)
        else:
            self._calm = Counters()
        for sign in (self._slow_answers(now, off), self._slow_itself(now)):
            if sign is not None:
                return f"{sign}, for {self._options.slow_s:g} s"
        return None

    def _slow_answers(self, now: float, off: float) -> str | None:
        factor = self._options.slow_factor
        lasted_s = self._slow_answers_spell.note(now, is_bad=0 < factor < off)
        if not self._is_long(lasted_s):
            return None
        return f"answers take {off:.1f} times what is predicted"

    def _slow_itself(self, now: float) -> str | None:
        """Check the first tokens with next to no load, once there are enough of them."""
        calm = self._calm
        if calm.first_tokens < WINDOW_ANSWERS:
            return None
        self._calm = Counters()
        computed = max(calm.prompt_tokens - calm.cache_hits, 0.0)
        pace = calm.ttft_s / (FIXED_TOKENS * calm.first_tokens + computed)
        self._best_pace = min(self._best_pace, pace)
        is_slow = pace > self._options.slow_factor * self._best_pace > 0
        lasted_s = self._slow_itself_spell.note(now, is_bad=is_slow)
        if not self._is_long(lasted_s):
            return None
        ratio = pace / max(self._best_pace, 1e-9)
        return f"its own time to first token is {ratio:.1f} times its best"

    def _is_long(self, lasted_s: float | None) -> bool:
        return lasted_s is not None and lasted_s >= self._options.slow_s


class _Spell:
    """How long something has been bad without interruption."""

    def __init__(self) -> None:
        self._since: float | None = None

    def note(self, now: float, *, is_bad: bool) -> float | None:
        """Note a finding; return since how many seconds it has been bad, or None if it is not."""
        if not is_bad:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        return now - self._since


def off_by(replica: Replica, now: float) -> float:
    """Return seen over predicted time of a replica's answers: the worse of TTFT and TPOT; 1 while unknown."""
    return math.exp(max(replica.state.trends.means(now, replica.state.speed)))


async def hangs(probe: EngineProbe, replica: Replica) -> bool:
    """Tell whether an engine does not even answer a request of one token with priority over all others."""
    body = {"model": replica.model, "prompt": "1", "max_tokens": 1}
    if replica.takes_priority:
        body["priority"] = -(1 << 20)
    try:
        await probe.generate(COMPLETIONS, body, HANG_PROOF_S)
    except TierError:
        return True
    return False
