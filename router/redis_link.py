"""The link to the Redis that routers share: how it is opened, what counts as an outage, and Redis' own clock.

A busy Redis may run a command long after its caller has given up. A command that must not run late therefore carries a
deadline by Redis' own clock, after which it does nothing.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

log = logging.getLogger(f"qarr.{__name__}")
REDIS_TIMEOUT_S = 2.0  # longer than a busy event loop keeps an answer waiting
# Error replies too: a Redis that is READONLY after a failover, OUT OF MEMORY or LOADING does not serve meanwhile.
UNAVAILABLE = (RedisError, OSError, TimeoutError)


def connect(url: str, connections: int) -> Any:
    """Return a client without retries whose every wait ends after ``REDIS_TIMEOUT_S``."""
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


def read_script(module: str, name: str) -> str:
    return Path(module).with_name(name).read_text("utf-8")


def outage(error: BaseException) -> str:
    """Return an outage's cause for the log: the error's type, and its message if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class RedisClock:
    """An estimate of Redis' clock that is never ahead of it, unless that clock is set back."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None

    def learn(self, shown: float) -> None:
        self._ahead_s = shown - time.monotonic()

    async def when(self, redis: Any, moment: float) -> float:
        """Return Redis' time, in Unix seconds, at a moment of the monotonic clock; ask Redis first if none is known."""
        if self._ahead_s is None:
            seconds, microseconds = await redis.time()
            self.learn(seconds + microseconds / 1e6)
        assert self._ahead_s is not None
        return moment + self._ahead_s
