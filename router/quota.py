"""Quotas by key: requests and tokens a minute, and requests at once; in this process, or shared over Redis.

The minute is a window that slides in steps of a second: what was counted in the present second and the 60 before it is
within the quota, so no 60 seconds, wherever they start, ever hold more. A request takes one request and its prompt and
highest output tokens in advance, all or nothing, and gives back what it did not use.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.keys import Caller, Quota

log = logging.getLogger("qarr.router")
WINDOW_S = 60
LEASE_S = 180  # a place of a router that died is given back after this
RENEW_S = 60
REDIS_TIMEOUT_S = 2.0  # longer than a busy event loop keeps an answer waiting
REDIS_CONNECTIONS = 8
REDIS_RETRY_S = 5  # after a failure, the local view holds for so long
UNAVAILABLE = (RedisConnectionError, RedisTimeoutError, OSError, TimeoutError)  # other errors are faults, not outages
Resource = Literal["requests", "tokens", "concurrent"]


class OverQuota(Exception):
    """A key's quota is used up.

    Attributes:
        resource: Which of its limits.
        limit: How much it allows.
        retry_after_s: When there is room again, in seconds; None for a request that is larger than the quota itself.
    """

    def __init__(self, resource: Resource, limit: int, asked: int, retry_after_s: float | None) -> None:
        unit = {"requests": "requests a minute", "tokens": "tokens a minute", "concurrent": "requests at once"}[
            resource
        ]
        text = f"this key allows {limit} {unit}"
        super().__init__(f"{text}; this request alone needs {asked}" if retry_after_s is None else text)
        self.resource, self.limit, self.retry_after_s = resource, limit, retry_after_s


@dataclass(frozen=True, slots=True)
class Usage:
    """What a key has used of its quota, after the request in question was or was not let in.

    Attributes:
        denied: The limit that the request would break; None: it is let in.
        requests: In the window.
        tokens: In the window, taken in advance or used.
        concurrent: At once.
        wait_s: Until the denied resource has room; until the window is empty where nothing was denied.
        second: In which the request was counted, by the ledger's clock.
    """

    denied: Resource | None
    requests: int
    tokens: int
    concurrent: int
    wait_s: float
    second: int


class Ledger(Protocol):
    """Where use is counted. Amounts are integers, times Unix seconds."""

    async def take(self, key_id: str, quota: Quota, tokens: int, place: str) -> Usage:
        """Take a request, tokens and a place, all or nothing."""

    async def give_back(self, key_id: str, second: int, requests: int, tokens: int, place: str) -> None:
        """Give back a place, and of a second's counts what was not used."""

    async def renew(self, places: dict[str, set[str]]) -> None:
        """Keep places, by key id, from being taken for those of a dead router."""


@dataclass(slots=True, eq=False)
class Grant:
    """What a request was let in with. Settle it exactly once, however the request ends."""

    _quotas: Quotas
    _ledger: Ledger
    _key_id: str
    _second: int
    _tokens: int
    _place: str
    _settled: bool = False

    async def settle(self, tokens: int | None) -> None:
        """Give back what was not used.

        Args:
            tokens: Prompt and output tokens used; None: the request was not served, and does not count.
        """
        if self._settled:
            return
        self._settled = True
        requests, unused = (1, self._tokens) if tokens is None else (0, self._tokens - tokens)
        settling = self._quotas.settle(self._ledger, self._key_id, self._second, requests, unused, self._place)
        await asyncio.shield(asyncio.ensure_future(settling))


class Quotas:
    """Lets requests in as their callers' quotas allow."""

    def __init__(self, redis_url: str = "", now: Callable[[], float] = time.time) -> None:
        self._local = LocalLedger(now)
        self._shared = RedisLedger(redis_url) if redis_url else None
        self._shared_after = 0.0
        self._places: dict[str, set[str]] = defaultdict(set)
        self._renewing: asyncio.Task[None] | None = None

    async def enter(self, caller: Caller, tokens: int, headers: dict[str, str]) -> Grant | None:
        """Let a request in; None for a caller without limits.

        Args:
            caller: Whose quota.
            tokens: Prompt and highest output tokens.
            headers: Gets the ``x-ratelimit-*`` headers, also when the request is denied.

        Raises:
            OverQuota: There is no room.
        """
        quota = caller.quota
        if quota.unlimited:
            return None
        limit = quota.tokens_per_minute
        if limit is not None and tokens > limit:
            raise OverQuota("tokens", limit, tokens, None)
        place = secrets.token_hex(8)
        # A client that leaves meanwhile must not leave its place behind: taken to the end, then given back.
        taking = asyncio.ensure_future(self._take(caller.key_id, quota, tokens, place))
        try:
            ledger, usage = await asyncio.shield(taking)
        except asyncio.CancelledError:
            ledger, usage = await taking
            if usage.denied is None:
                await ledger.give_back(caller.key_id, usage.second, 1, tokens, place)
            raise
        headers.update(limit_headers(quota, usage))
        if usage.denied is not None:
            allowed = {
                "requests": quota.requests_per_minute,
                "tokens": quota.tokens_per_minute,
                "concurrent": quota.concurrent_requests,
            }[usage.denied]
            raise OverQuota(usage.denied, allowed or 0, tokens, usage.wait_s)
        self._places[caller.key_id].add(place)
        if self._shared is not None and self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())
        return Grant(self, ledger, caller.key_id, usage.second, tokens, place)

    async def settle(  # noqa: PLR0917  called by Grant alone
        self, ledger: Ledger, key_id: str, second: int, requests: int, tokens: int, place: str
    ) -> None:
        """Give back what a grant holds and did not use."""
        self._places[key_id].discard(place)
        if not self._places[key_id]:
            del self._places[key_id]
        try:
            await ledger.give_back(key_id, second, requests, tokens, place)
        except UNAVAILABLE as error:
            self._lost(error)

    async def aclose(self) -> None:
        """End the connection to Redis."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        if self._shared is not None:
            await self._shared.aclose()

    async def _take(self, key_id: str, quota: Quota, tokens: int, place: str) -> tuple[Ledger, Usage]:
        if self._shared is not None and time.monotonic() >= self._shared_after:
            try:
                return self._shared, await self._shared.take(key_id, quota, tokens, place)
            except UNAVAILABLE as error:
                self._lost(error)
        return self._local, await self._local.take(key_id, quota, tokens, place)

    def _lost(self, error: BaseException) -> None:
        log.warning("Redis does not answer (%s): quotas are counted by this router alone", type(error).__name__)
        self._shared_after = time.monotonic() + REDIS_RETRY_S

    async def _renew(self) -> None:
        assert self._shared is not None
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._shared.renew(self._places)
            except UNAVAILABLE as error:
                self._lost(error)


@dataclass(slots=True)
class _Counts:
    """One key's use: (requests, tokens) by second, and the places taken."""

    seconds: dict[int, list[int]] = field(default_factory=dict)
    places: set[str] = field(default_factory=set)


class LocalLedger:
    """Counts in this process. Nothing awaits, so every change is whole."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._keys: dict[str, _Counts] = defaultdict(_Counts)

    async def take(self, key_id: str, quota: Quota, tokens: int, place: str) -> Usage:
        """Take a request, tokens and a place, all or nothing."""
        now = self._now()
        counts = self._keys[key_id]
        for second in [s for s in counts.seconds if s < int(now) - WINDOW_S]:
            del counts.seconds[second]
        seconds = sorted((s, r, t) for s, (r, t) in counts.seconds.items())
        usage = judge(quota, seconds, len(counts.places), tokens, now)
        if usage.denied is None:
            counts.places.add(place)
            own = counts.seconds.setdefault(int(now), [0, 0])
            own[0] += 1
            own[1] += tokens
        return usage

    async def give_back(self, key_id: str, second: int, requests: int, tokens: int, place: str) -> None:
        """Give back a place, and of a second's counts what was not used; below 0: count what was used beyond it."""
        counts = self._keys[key_id]
        counts.places.discard(place)
        if tokens < 0:  # more was used than taken: that happened just now
            counts.seconds.setdefault(int(self._now()), [0, 0])[1] -= tokens
        elif second in counts.seconds:
            own = counts.seconds[second]
            own[0], own[1] = own[0] - requests, own[1] - tokens

    async def renew(self, places: dict[str, set[str]]) -> None:
        """Do nothing: this process knows what it holds."""


def judge(quota: Quota, seconds: list[tuple[int, int, int]], places: int, tokens: int, now: float) -> Usage:
    """Tell whether one more request is within a quota, and what will be used.

    Args:
        quota: The limits.
        seconds: (second, requests, tokens) of the window, in order.
        places: Taken.
        tokens: Asked for.
        now: Unix time.
    """
    requests_used = sum(r for _, r, _ in seconds)
    tokens_used = sum(t for _, _, t in seconds)
    clear_s = seconds[-1][0] + WINDOW_S + 1 - now if seconds else 0.0
    over: Resource | None = None
    wait_s = clear_s
    if quota.concurrent_requests is not None and places >= quota.concurrent_requests:
        over, wait_s = "concurrent", 1.0
    elif quota.requests_per_minute is not None and requests_used >= quota.requests_per_minute:
        over = "requests"
        wait_s = _wait([(s, r) for s, r, _ in seconds], requests_used + 1 - quota.requests_per_minute, now)
    elif quota.tokens_per_minute is not None and tokens_used + tokens > quota.tokens_per_minute:
        over = "tokens"
        wait_s = _wait([(s, t) for s, _, t in seconds], tokens_used + tokens - quota.tokens_per_minute, now)
    if over is not None:
        return Usage(over, requests_used, tokens_used, places, wait_s, int(now))
    return Usage(None, requests_used + 1, tokens_used + tokens, places + 1, int(now) + WINDOW_S + 1 - now, int(now))


def _wait(seconds: list[tuple[int, int]], excess: int, now: float) -> float:
    """Return how long until as much as ``excess`` has left the window."""
    for second, amount in seconds:
        excess -= amount
        if excess <= 0:
            return second + WINDOW_S + 1 - now
    return float(WINDOW_S)


# KEYS: counts, places. ARGV: requests, tokens and concurrent limit (-1: none), tokens asked, place, window, lease.
# Redis' own clock counts, so that routers whose clocks differ agree. Answers the parts of Usage, and the second.
_TAKE = """
local time = redis.call('TIME')
local second, now = tonumber(time[1]), tonumber(time[1]) + tonumber(time[2]) / 1e6
local limits = {tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])}
local asked, window = tonumber(ARGV[4]), tonumber(ARGV[6])
local flat = redis.call('HGETALL', KEYS[1])
local found, old, used = {}, {}, {0, 0}
for i = 1, #flat, 2 do
  local at, kind = flat[i]:match('^(%d+)([rt])$')
  at = tonumber(at)
  if at < second - window then
    old[#old + 1] = flat[i]
  else
    local which, amount = kind == 'r' and 1 or 2, tonumber(flat[i + 1])
    used[which] = used[which] + amount
    found[#found + 1] = {at, which, amount}
  end
end
if #old > 0 then redis.call('HDEL', KEYS[1], unpack(old)) end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local places = redis.call('ZCARD', KEYS[2])
local denied, wait = '', second + window + 1 - now
local function wait_for(which, excess)
  table.sort(found, function(a, b) return a[1] < b[1] end)
  for _, entry in ipairs(found) do
    if entry[2] == which then
      excess = excess - entry[3]
      if excess <= 0 then return entry[1] + window + 1 - now end
    end
  end
  return window
end
if limits[3] >= 0 and places >= limits[3] then
  denied, wait = 'concurrent', 1
elseif limits[1] >= 0 and used[1] >= limits[1] then
  denied, wait = 'requests', wait_for(1, used[1] + 1 - limits[1])
elseif limits[2] >= 0 and used[2] + asked > limits[2] then
  denied, wait = 'tokens', wait_for(2, used[2] + asked - limits[2])
else
  redis.call('HINCRBY', KEYS[1], second .. 'r', 1)
  redis.call('HINCRBY', KEYS[1], second .. 't', asked)
  redis.call('EXPIRE', KEYS[1], window + 2)
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[7]), ARGV[5])
  redis.call('EXPIRE', KEYS[2], tonumber(ARGV[7]))
  used, places = {used[1] + 1, used[2] + asked}, places + 1
end
return {denied, used[1], used[2], places, tostring(wait), second}
"""
# KEYS: counts, places. ARGV: second, requests, tokens (below 0: used beyond what was taken, just now), place, expiry.
_GIVE_BACK = """
redis.call('ZREM', KEYS[2], ARGV[4])
if tonumber(ARGV[3]) < 0 then
  redis.call('HINCRBY', KEYS[1], redis.call('TIME')[1] .. 't', -tonumber(ARGV[3]))
  redis.call('EXPIRE', KEYS[1], tonumber(ARGV[5]))
  return
end
for kind, amount in pairs({r = ARGV[2], t = ARGV[3]}) do
  if tonumber(amount) ~= 0 and redis.call('HEXISTS', KEYS[1], ARGV[1] .. kind) == 1 then
    redis.call('HINCRBY', KEYS[1], ARGV[1] .. kind, -tonumber(amount))
  end
end
"""


class RedisLedger:
    """Counts in Redis, for several routers at once. Every change is one script, which Redis runs as a whole."""

    def __init__(self, url: str) -> None:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=REDIS_CONNECTIONS,
            timeout=REDIS_TIMEOUT_S,
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            decode_responses=True,
        )
        self._redis: Any = Redis.from_pool(pool)
        self._take = self._redis.register_script(_TAKE)
        self._give_back = self._redis.register_script(_GIVE_BACK)

    async def take(self, key_id: str, quota: Quota, tokens: int, place: str) -> Usage:
        """Take a request, tokens and a place, all or nothing."""
        limits = (quota.requests_per_minute, quota.tokens_per_minute, quota.concurrent_requests)
        numbers = [-1 if limit is None else limit for limit in limits]
        denied, requests, used, places, wait, second = await self._take(
            keys=_names(key_id), args=[*numbers, tokens, place, WINDOW_S, LEASE_S]
        )
        return Usage(denied or None, requests, used, places, float(wait), second)

    async def give_back(self, key_id: str, second: int, requests: int, tokens: int, place: str) -> None:
        """Give back a place, and of a second's counts what was not used."""
        await self._give_back(keys=_names(key_id), args=[second, requests, tokens, place, WINDOW_S + 2])

    async def renew(self, places: dict[str, set[str]]) -> None:
        """Keep places from being taken for those of a dead router."""
        seconds, microseconds = await self._redis.time()
        until = seconds + microseconds / 1e6 + LEASE_S
        async with self._redis.pipeline(transaction=False) as pipe:
            for key_id, held in places.items():
                _, name = _names(key_id)
                pipe.zadd(name, dict.fromkeys(held, until), xx=True)
                pipe.expire(name, LEASE_S)
            await pipe.execute()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._redis.aclose()


def _names(key_id: str) -> list[str]:
    """Return the names of a key's counts and places; the braces keep them on one node of a cluster."""
    return [f"qarr:{{{key_id}}}:counts", f"qarr:{{{key_id}}}:places"]


def limit_headers(quota: Quota, usage: Usage) -> dict[str, str]:
    """Return the headers that OpenAI's clients know: limit, what is left, and when all of it is back."""
    headers: dict[str, str] = {}
    reset = f"{max(math.ceil(usage.wait_s), 0)}s"
    for name, limit, used in (
        ("requests", quota.requests_per_minute, usage.requests),
        ("tokens", quota.tokens_per_minute, usage.tokens),
    ):
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(limit - used, 0))
            headers[f"x-ratelimit-reset-{name}"] = reset
    return headers
