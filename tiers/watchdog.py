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
        self._calm = Counters()
        self._queries = Counters()
        self._best_pace = math.inf
        self._pace = 0.0
        self._rate: float | None = None
        self._had_rate = False
        self._since: float | None = None

    def note(self, now: float, off: float, counters: Counters, *, sequences: int) -> str | None:
        """Take in one reading; return why the engine is to be recycled, or None.

        Args:
            now: When.
            off: Seen over predicted, of TTFT or TPOT, whichever is worse.
            counters: The engine's own.
            sequences: Requests on it.
        """
        self._count(counters, calm=sequences <= CALM_SEQUENCES)
        sign = self._sign(off)
        if sign is None:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        return f"{sign}, for {self._options.slow_s:g} s" if now - self._since >= self._options.slow_s else None

    def _count(self, counters: Counters, *, calm: bool) -> None:
        news = counters.since(self._last) if self._last is not None else Counters()
        self._last = counters
        self._calm = _sum(self._calm, news) if calm else Counters()
        if self._calm.first_tokens >= WINDOW_ANSWERS:
            computed = max(self._calm.prompt_tokens - self._calm.cache_hits, 0.0)
            self._pace = self._calm.ttft_s / (FIXED_TOKENS * self._calm.first_tokens + computed)
            self._best_pace = min(self._best_pace, self._pace)
            self._calm = Counters()
        self._queries = _sum(self._queries, news)
        if self._queries.cache_queries >= WINDOW_QUERIES:
            self._rate = self._queries.cache_hits / self._queries.cache_queries
            self._had_rate = self._had_rate or self._rate >= self._options.min_hit_rate
            self._queries = Counters()

    def _sign(self, off: float) -> str | None:
        factor, least = self._options.slow_factor, self._options.min_hit_rate
        if factor and off > factor:
            return f"answers take {off:.1f} times what is predicted"
        if factor and 0 < self._best_pace < math.inf and self._pace > factor * self._best_pace:
            return f"its own time to first token is {self._pace / self._best_pace:.1f} times its best"
        if least and self._had_rate and self._rate is not None and self._rate < least:
            return f"its prefix cache answers only {self._rate:.0%}"
        return None


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
