"""Quotas by key: requests and tokens a minute, and requests at once; in this process, or shared over Redis.

The minute is a window that slides in steps of a second: what was counted in the present second and the 60 before it is
within the quota, so no 60 seconds, wherever they start, ever hold more. A request takes one request and its prompt and
highest output tokens in advance, all or nothing, and gives back what it did not use.

While Redis does not answer, requests are counted by this process alone, and none of them waits for it: one task tries it
again. Once it answers, it gets back what it may hold of requests that were not counted by it in the end.
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

from router.aio import end_tasks
from router.redis_link import REDIS_TIMEOUT_S, UNAVAILABLE, RedisClock, connect, outage
from tiers.background import Faults

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from router.auth.api_keys import Caller, Quota

log = logging.getLogger(f"qarr.{__name__}")
WINDOW_S = 60
LEASE_S = 180  # a place of a router that died is given back after this
RENEW_S = 60
REDIS_CONNECTIONS = 8
REDIS_RETRY_S = 1  # after a failure, it is tried so often
LATE = "late"  # what Redis answers to a take after its deadline
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
    """Where use is counted. Amounts are integers, times seconds by the ledger's own clock."""

    async def take(self, key_id: str, quota: Quota, tokens: int, place: str) -> Usage:
        """Take a request, tokens and a place, all or nothing."""

    async def give_back(self, key_id: str, second: int, requests: int, tokens: int, place: str) -> None:
        """Give back a place, and of a second's counts what was not used."""


@dataclass(frozen=True, slots=True)
class _Debt:
    """What Redis is to get back once it answers, if it has it.

    Attributes:
        second: In which it was taken; None: not known, for Redis' answer did not come.
        due: From when on it is certain whether it was taken, by the monotonic clock.
    """

    key_id: str
    second: int | None
    requests: int
    tokens: int
    place: str
    due: float = 0.0


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
        await self._quotas.settle(self._ledger, _Debt(self._key_id, self._second, requests, unused, self._place))


class Quotas:
    """Lets requests in as their callers' quotas allow."""

    def __init__(self, redis_url: str = "", now: Callable[[], float] = time.monotonic) -> None:
        self._local = LocalLedger(now)
        self._shared = RedisLedger(redis_url) if redis_url else None
        self._lost = False
        self._places: dict[str, set[str]] = defaultdict(set)
        self._debts: dict[str, _Debt] = {}
        self._patience: set[asyncio.Timeout] = set()
        self._work: set[asyncio.Task[Any]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._renew_at = 0.0

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
        taking = self._start(self._take(caller.key_id, quota, tokens, place))
        try:
            ledger, usage = await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.shield(self._start(self._undo(taking, caller.key_id, tokens, place)))
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
        return Grant(self, ledger, caller.key_id, usage.second, tokens, place)

    async def settle(self, ledger: Ledger, debt: _Debt) -> None:
        """Give back what a grant holds and did not use; to the end, even if the caller is cancelled."""
        self._places[debt.key_id].discard(debt.place)
        if not self._places[debt.key_id]:
            del self._places[debt.key_id]
        await asyncio.shield(self._start(self._give_back(ledger, debt)))

    async def aclose(self) -> None:
        """End the connection to Redis."""
        if self._work:
            await asyncio.wait(self._work)
        if self._keeper is not None:
            await end_tasks([self._keeper])
        if self._shared is not None:
            await self._shared.aclose()

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start what must be done to its end, whoever waits for it."""
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def _take(self, key_id: str, quota: Quota, tokens: int, place: str) -> tuple[Ledger, Usage]:
        if self._shared is not None and self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(self._shared))
        if self._shared is not None and not self._lost:
            due, patience = time.monotonic() + REDIS_TIMEOUT_S, asyncio.timeout(REDIS_TIMEOUT_S)
            try:
                async with patience:
                    self._patience.add(patience)
                    try:
                        return self._shared, await self._shared.take(key_id, quota, tokens, place)
                    finally:
                        self._patience.discard(patience)
            except UNAVAILABLE as error:
                self._debts[place] = _Debt(key_id, None, 1, tokens, place, due)
                self._lose(error)
        return self._local, await self._local.take(key_id, quota, tokens, place)

    async def _undo(self, taking: asyncio.Task[tuple[Ledger, Usage]], key_id: str, tokens: int, place: str) -> None:
        ledger, usage = await taking
        if usage.denied is None:
            await self._give_back(ledger, _Debt(key_id, usage.second, 1, tokens, place))

    async def _give_back(self, ledger: Ledger, debt: _Debt) -> None:
        if ledger is self._local:
            await self._local.give_back(debt.key_id, debt.second or 0, debt.requests, debt.tokens, debt.place)
            return
        assert self._shared is not None
        self._debts[debt.place] = debt
        if not self._lost:
            try:
                await self._pay(self._shared, debt)
            except UNAVAILABLE as error:
                self._lose(error)

    async def _pay(self, shared: RedisLedger, debt: _Debt) -> None:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            await shared.give_back(debt.key_id, debt.second, debt.requests, debt.tokens, debt.place)
        self._debts.pop(debt.place, None)

    def _lose(self, error: BaseException) -> None:
        """Count alone from now on, and let nobody wait for Redis any longer."""
        if not self._lost:
            self._lost = True
            log.warning("Redis does not serve (%s): quotas are counted by this router alone", outage(error))
        for patience in self._patience:
            if not patience.expired():
                patience.reschedule(asyncio.get_running_loop().time())

    async def _keep(self, shared: RedisLedger) -> None:
        """Renew places, and try Redis while it does not answer; until cancelled."""
        faults = Faults(repeats=False)
        while True:
            await asyncio.sleep(min(REDIS_RETRY_S, RENEW_S))
            try:
                await self._look_after(shared)
            except UNAVAILABLE as error:
                self._lose(error)
            except Exception as error:  # noqa: BLE001  whatever it is: places must go on being renewed
                faults.log(error, "keeping places in Redis failed, and goes on")

    async def _look_after(self, shared: RedisLedger) -> None:
        if self._lost:
            await shared.try_out()
        for debt in [debt for debt in self._debts.values() if debt.due <= time.monotonic()]:
            await self._pay(shared, debt)
        if self._lost:
            self._lost, self._renew_at = False, 0.0
            log.info("Redis serves again: quotas are counted there")
        if time.monotonic() >= self._renew_at:
            await shared.renew(self._places)
            self._renew_at = time.monotonic() + RENEW_S


@dataclass(slots=True)
class _Counts:
    """One key's use: (requests, tokens) by second, and the places taken."""

    seconds: dict[int, list[int]] = field(default_factory=dict)
    places: set[str] = field(default_factory=set)


class LocalLedger:
    """Counts in this process. Nothing awaits, so every change is whole."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._keys: dict[str, _Counts] = defaultdict(_Counts)

    async def take(self, key_id: str, quota: Quota, tokens: int, place: str) -> Usage:
        """Take a request, tokens and a place, all or nothing."""
        now = self._now()
        counts = self._keys[key_id]
        for second in [s for s in counts.seconds if s < int(now) - WINDOW_S]:
            del counts.seconds[second]
        for second in [s for s in counts.seconds if s > int(now)]:  # the clock was set back: as if used just now
            present, moved = counts.seconds.setdefault(int(now), [0, 0]), counts.seconds.pop(second)
            present[0], present[1] = present[0] + moved[0], present[1] + moved[1]
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


def judge(quota: Quota, seconds: list[tuple[int, int, int]], places: int, tokens: int, now: float) -> Usage:
    """Tell whether one more request is within a quota, and what will be used.

    Args:
        quota: The limits.
        seconds: (second, requests, tokens) of the window, in order.
        places: Taken.
        tokens: Asked for.
        now: By the ledger's clock.
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


# KEYS: counts, places. ARGV: requests, tokens and concurrent limit (-1: none), tokens asked, place, window, lease, and
# until when whoever asks is waiting for the answer. Answers the parts of Usage, the second, and what Redis' clock shows.
# That clock counts, so that routers whose clocks differ agree. If it was set back, what was counted in seconds that are
# still to come counts as used just now, and a place ends with its lease.
_TAKE = """
local time = redis.call('TIME')
local second, now = tonumber(time[1]), tonumber(time[1]) + tonumber(time[2]) / 1e6
if now > tonumber(ARGV[8]) then return {'late', 0, 0, 0, '0', second, tostring(now)} end
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
    if at > second then
      redis.call('HINCRBY', KEYS[1], second .. kind, amount)
      old[#old + 1], at = flat[i], second
    end
    used[which] = used[which] + amount
    found[#found + 1] = {at, which, amount}
  end
end
if #old > 0 then redis.call('HDEL', KEYS[1], unpack(old)) end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
for _, place in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. now + tonumber(ARGV[7]), 'inf')) do
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[7]), place)
end
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
return {denied, used[1], used[2], places, tostring(wait), second, tostring(now)}
"""
# KEYS: counts, places. ARGV: second ('': when its place was taken), requests, tokens (below 0: used beyond what was
# taken, just now), place, expiry, lease. Whoever asks twice, not knowing whether the first time counted, gives back once.
_GIVE_BACK = """
local expires = redis.call('ZSCORE', KEYS[2], ARGV[4])
if not expires then return end
redis.call('ZREM', KEYS[2], ARGV[4])
local second = ARGV[1] ~= '' and ARGV[1] or string.format('%d', math.floor(tonumber(expires) - tonumber(ARGV[6])))
if tonumber(ARGV[3]) < 0 then
  redis.call('HINCRBY', KEYS[1], redis.call('TIME')[1] .. 't', -tonumber(ARGV[3]))
  redis.call('EXPIRE', KEYS[1], tonumber(ARGV[5]))
  return
end
for kind, amount in pairs({r = ARGV[2], t = ARGV[3]}) do
  if tonumber(amount) ~= 0 and redis.call('HEXISTS', KEYS[1], second .. kind) == 1 then
    redis.call('HINCRBY', KEYS[1], second .. kind, -tonumber(amount))
  end
end
"""


class RedisLedger:
    """Counts in Redis, for several routers at once. Every change is one script, which Redis runs as a whole."""

    def __init__(self, url: str) -> None:
        self._redis = connect(url, REDIS_CONNECTIONS)
        self._clock = RedisClock()
        self._take = self._redis.register_script(_TAKE)
        self._give_back = self._redis.register_script(_GIVE_BACK)

    async def take(self, key_id: str, quota: Quota, tokens: int, place: str) -> Usage:
        """Take a request, tokens and a place, all or nothing; nothing once ``REDIS_TIMEOUT_S`` have passed."""
        due = time.monotonic() + REDIS_TIMEOUT_S
        limits = (quota.requests_per_minute, quota.tokens_per_minute, quota.concurrent_requests)
        numbers = [-1 if limit is None else limit for limit in limits]
        for _ in range(2):  # where Redis' clock was set ahead, the second time knows
            until = await self._clock.when(self._redis, due)
            denied, requests, used, places, wait, second, shown = await self._take(
                keys=_names(key_id), args=[*numbers, tokens, place, WINDOW_S, LEASE_S, until]
            )
            self._clock.learn(float(shown))
            if denied != LATE:
                return Usage(denied or None, requests, used, places, float(wait), second)
        raise TimeoutError

    async def give_back(self, key_id: str, second: int | None, requests: int, tokens: int, place: str) -> None:
        """Give back a place, and of a second's counts what was not used; None: of the second in which it was taken."""
        numbers = ["" if second is None else second, requests, tokens, place, WINDOW_S + 2, LEASE_S]
        await self._give_back(keys=_names(key_id), args=numbers)

    async def renew(self, places: dict[str, set[str]]) -> None:
        """Keep places, by key id, from being taken for those of a dead router."""
        seconds, microseconds = await self._redis.time()
        until = seconds + microseconds / 1e6 + LEASE_S
        async with self._redis.pipeline(transaction=False) as pipe:
            for key_id, held in places.items():
                _, name = _names(key_id)
                pipe.zadd(name, dict.fromkeys(held, until), xx=True)
                pipe.expire(name, LEASE_S)
            await pipe.execute()

    async def try_out(self) -> None:
        """Write something, as counting does: a Redis that only answers is not well."""
        await self._redis.set("qarr:tried", "", px=1000)

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
