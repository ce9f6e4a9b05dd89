"""What several routers in front of the same engines tell one another, over Redis.

Each router writes twice a second what it has on every replica, and which of them it spares; the others add that to their
own. An entry lives for three seconds: a router that dies is forgotten by itself. Without Redis each router goes by its own
view, and by the engines' gauges, as one alone does. Replicas are known by their URL.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from redis.asyncio import Redis

from router.jsontext import read_json
from router.quota import REDIS_TIMEOUT_S, UNAVAILABLE
from tiers.fleet import NO_OTHERS, Others

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiers.fleet import Fleet

log = logging.getLogger("qarr.router")
EVERY_S = 0.5
LIFE_S = 3
ROUTERS = "qarr:{fleet}:routers"


class SharedState:
    """One router's part in it. ``run`` until cancelled, then ``aclose``."""

    def __init__(self, redis_url: str, fleet: Fleet) -> None:
        self._fleet = fleet
        self._id = secrets.token_hex(8)
        self._redis: Any = None
        if redis_url:
            self._redis = Redis.from_url(
                redis_url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
            )
        self._known_at = 0.0
        self._alone = False

    async def run(self) -> None:
        """Tell and listen, until cancelled. Does nothing without Redis."""
        while self._redis is not None:
            try:
                await self._exchange()
            except UNAVAILABLE as error:
                self._lost(error)
            except (ValueError, TypeError) as error:  # a router of another release, say
                log.warning("what another router tells over redis is not understood (%s)", type(error).__name__)
            await asyncio.sleep(EVERY_S)

    async def aclose(self) -> None:
        """Take this router's entry away, and close the connection."""
        if self._redis is None:
            return
        try:
            await self._redis.delete(_name(self._id))
        except UNAVAILABLE:
            log.info("redis does not answer: this router's entry ends by itself")
        await self._redis.aclose()

    async def _exchange(self) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(_name(self._id), to_json(self._own()), ex=LIFE_S)
            pipe.zadd(ROUTERS, {self._id: time.time()})
            pipe.zremrangebyscore(ROUTERS, "-inf", time.time() - 100 * LIFE_S)
            pipe.zrange(ROUTERS, 0, -1)
            *_, routers = await pipe.execute()
        names = [_name(router.decode()) for router in routers if router.decode() != self._id]
        found = await self._redis.mget(names) if names else []
        self._take(read_json(entry) for entry in found if entry is not None)
        self._known_at = time.monotonic()
        if self._alone:
            self._alone = False
            log.info("redis answers again: what other routers do counts again")

    def _own(self) -> dict[str, list[float]]:
        """Return what this router has on every replica: requests, prompt, output and cache tokens, until when it is spared.

        The last as seconds since 1970: what is left of a pause is old once it is read, and routers that told one another
        that would prolong it for ever.
        """
        now, today = time.monotonic(), time.time()
        found = {}
        for replica in self._fleet.replicas:
            wait_s = replica.breaker.wait_s(now)
            held = [replica.places, replica.prompt_tokens, replica.output_tokens, replica.kv_tokens_held]
            found[replica.url] = [*held, today + wait_s if wait_s else 0.0]
        return found

    def _take(self, entries: Iterable[dict[str, list[float]]]) -> None:
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        until: dict[str, float] = defaultdict(float)
        for entry in entries:
            for url, (*counts, spared_until) in entry.items():
                sums[url] = [a + int(b) for a, b in zip(sums[url], counts, strict=True)]
                until[url] = max(until[url], spared_until)
        now, today = time.monotonic(), time.time()
        for replica in self._fleet.replicas:
            replica.others = Others(*sums[replica.url]) if replica.url in sums else NO_OTHERS
            if until[replica.url] > today:
                replica.breaker.adopt(now + until[replica.url] - today)

    def _lost(self, error: Exception) -> None:
        """Forget the others once what is known of them is old."""
        if not self._alone:
            self._alone = True
            log.warning("redis does not answer (%s): each router goes by its own view", type(error).__name__)
        if time.monotonic() - self._known_at > LIFE_S:
            for replica in self._fleet.replicas:
                replica.others = NO_OTHERS


def _name(router: str) -> str:
    return f"qarr:{{fleet}}:router:{router}"
