"""The link to the Redis that routers share: how it is opened, what counts as an outage, and Redis' own clock.

Redis runs a command that it received when it gets to it, even when the caller has given up waiting long before. What must
not happen late therefore carries a deadline by Redis' own clock, after which it does nothing.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

log = logging.getLogger(f"qarr.{__name__}")
REDIS_TIMEOUT_S = 2.0  # longer than a busy event loop keeps an answer waiting
# Error replies too: a Redis that is READONLY after a failover, OUT OF MEMORY or LOADING is of no use until that is over.
UNAVAILABLE = (RedisError, OSError, TimeoutError)


def connect(url: str, connections: int) -> Any:
    """Return a client that asks once, and waits no longer than ``REDIS_TIMEOUT_S`` for anything."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=REDIS_TIMEOUT_S,
        socket_timeout=REDIS_TIMEOUT_S,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        decode_responses=True,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)


def outage(error: BaseException) -> str:
    """Return for the log what kind of outage it is: the error, and Redis' own words where there are any."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class RedisClock:
    """Redis' clock as seen from here; never ahead of it, as long as nobody sets it."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None

    def learn(self, shown: float) -> None:
        """Note what it showed a moment ago, in Unix seconds."""
        self._ahead_s = shown - time.monotonic()

    async def when(self, redis: Any, moment: float) -> float:
        """Return what it shows, at the latest, at a moment of the monotonic clock; ask for the time first if need be."""
        if self._ahead_s is None:
            seconds, microseconds = await redis.time()
            self.learn(seconds + microseconds / 1e6)
        assert self._ahead_s is not None
        return moment + self._ahead_s
