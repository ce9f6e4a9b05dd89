"""Tell when an engine is to be started again: how often after it exits, and when it hangs or has become too slow.

Only judges; the supervisor acts. Times are seconds of the monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.errors import TierError
from tiers.probe import COMPLETIONS, Counters

if TYPE_CHECKING:
    from tiers.fleet import Replica
    from tiers.probe import EngineProbe

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0
STEADY_S = 180.0  # ready for so long, an engine starts again at the first backoff
HANG_PROOF_S = 30.0  # in which an engine that seems to hang may prove that it does not
CALM_SEQUENCES = 2  # up to so many requests at a time, an engine's TTFT is its own and not its queue's
WINDOW_ANSWERS = 10  # first tokens in one mean of an engine's own TTFT
WINDOW_QUERIES = 2000  # prompt tokens in one prefix-cache hit rate
FIXED_TOKENS = 64  # a prompt takes as long as its tokens and so many more: TTFT of an empty one is not 0


@dataclass(frozen=True, slots=True)
class WatchdogOptions:
    """When an engine that was started here is started again.

    Attributes:
        max_restarts: Within ``restart_window_s``; one more exit is a crash loop, and the engine stays down. 0: never.
        restart_window_s: See there.
        hang_s: With requests in flight and no progress; then it must answer a request of one token, or is killed.
        unreachable_s: Without an answer to health checks.
        slow_factor: Slower than predicted, or than it was itself, by this factor; 0: not looked at.
        slow_s: For so long on end: then it is recycled.
        min_hit_rate: Of the prefix cache, 0..1; below it for ``slow_s``, having been above: recycled. 0: not looked at.
    """

    max_restarts: int = 5
    restart_window_s: float = 900.0
    hang_s: float = 120.0
    unreachable_s: float = 60.0
    slow_factor: float = 4.0
    slow_s: float = 600.0
    min_hit_rate: float = 0.0


class Restarts:
    """One engine's exits, and how long to wait after each."""

    def __init__(self, options: WatchdogOptions) -> None:
        self._options = options
        self._exits: deque[float] = deque()
        self.count = 0

    def exited(self, now: float, ready_s: float) -> float | None:
        """Note an exit after so many seconds of being ready; return how long to wait, or None for a crash loop.

        The wait doubles from one second to a minute; an engine that was ready for minutes begins anew.
        """
        if ready_s >= STEADY_S:
            self.count = 0
        while self._exits and now - self._exits[0] > self._options.restart_window_s:
            self._exits.popleft()
        if len(self._exits) >= self._options.max_restarts:
            return None
        self._exits.append(now)
        self.count += 1
        return min(float(FIRST_BACKOFF_S * 2 ** (self.count - 1)), LONGEST_BACKOFF_S)

    def forget(self) -> None:
        """Begin anew: a person has started the engine again."""
        self._exits.clear()
        self.count = 0


class Wear:
    """Whether one engine, since it was started, has become so slow for so long that it is to be recycled.

    Three signs. What live answers take against what the speed model predicts for the load they met. The engine's own mean
    TTFT while it has next to no load, for each prompt token that it computes, against the best that it has had. The hit
    rate of its prefix cache, where the settings name one: traffic without common prefixes has none.
    """

    def __init__(self, options: WatchdogOptions) -> None:
        self._options = options
        self._last: Counters | None = None
        self._calm = self._queries = Counters()
        self._best_pace = math.inf
        self._had_rate = False
        self._off, self._own, self._missing = _Spell(), _Spell(), _Spell()

    def note(self, now: float, off: float, counters: Counters, *, sequences: int) -> str | None:
        """Take in one reading; return why the engine is to be recycled, or None.

        Args:
            now: When.
            off: Seen over predicted, of TTFT or TPOT, whichever is worse.
            counters: The engine's own.
            sequences: Requests on it.
        """
        news = counters.since(self._last) if self._last is not None else Counters()
        self._last = counters
        self._calm = _sum(self._calm, news) if sequences <= CALM_SEQUENCES else Counters()
        self._queries = _sum(self._queries, news)
        for sign in (self._slow_answers(now, off), self._slow_itself(now), self._forgetful(now)):
            if sign is not None:
                return f"{sign}, for {self._options.slow_s:g} s"
        return None

    def _slow_answers(self, now: float, off: float) -> str | None:
        factor = self._options.slow_factor
        lasted_s = self._off.note(now, bad=0 < factor < off)
        return f"answers take {off:.1f} times what is predicted" if self._long(lasted_s) else None

    def _slow_itself(self, now: float) -> str | None:
        """Judge the last few calm first tokens, once there are enough; without new ones nothing is known."""
        calm, factor = self._calm, self._options.slow_factor
        if calm.first_tokens < WINDOW_ANSWERS:
            return None
        self._calm = Counters()
        computed = max(calm.prompt_tokens - calm.cache_hits, 0.0)
        pace = calm.ttft_s / (FIXED_TOKENS * calm.first_tokens + computed)
        self._best_pace = min(self._best_pace, pace)
        lasted_s = self._own.note(now, bad=pace > factor * self._best_pace > 0)
        ratio = pace / max(self._best_pace, 1e-9)
        return f"its own time to first token is {ratio:.1f} times its best" if self._long(lasted_s) else None

    def _forgetful(self, now: float) -> str | None:
        """Judge the last prompt tokens that were looked up in the prefix cache, once there are enough."""
        queries, least = self._queries, self._options.min_hit_rate
        if queries.cache_queries < WINDOW_QUERIES:
            return None
        self._queries = Counters()
        rate = queries.cache_hits / queries.cache_queries
        self._had_rate = self._had_rate or rate >= least
        lasted_s = self._missing.note(now, bad=self._had_rate and rate < least)
        return f"its prefix cache answers only {rate:.0%}" if self._long(lasted_s) else None

    def _long(self, lasted_s: float | None) -> bool:
        return lasted_s is not None and lasted_s >= self._options.slow_s


class _Spell:
    """How long something has been bad on end, from the first bad judgement to the last."""

    def __init__(self) -> None:
        self._since: float | None = None

    def note(self, now: float, *, bad: bool) -> float | None:
        """Note a judgement; return how long it has been bad, or None where it is not."""
        if not bad:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        return now - self._since


def _sum(one: Counters, other: Counters) -> Counters:
    return one.since(Counters().since(other))


def off_by(replica: Replica, now: float) -> float:
    """Return what live answers of a replica take against what was predicted: the worse of TTFT and TPOT; 1 where unknown."""
    if replica.speed is None:
        return 1.0
    ttft = replica.ttft_trend.faded(now, replica.speed.ttft_spread).mean
    tpot = replica.tpot_trend.faded(now, replica.speed.tpot_spread).mean
    return math.exp(max(ttft, tpot))


async def hangs(probe: EngineProbe, replica: Replica) -> bool:
    """Tell whether an engine without progress does not even answer a request of one token that goes before all others."""
    body = {"model": replica.model, "prompt": "1", "max_tokens": 1}
    if replica.takes_priority:
        body["priority"] = -(1 << 20)
    try:
        await probe.generate(COMPLETIONS, body, HANG_PROOF_S)
    except TierError:
        return True
    return False
