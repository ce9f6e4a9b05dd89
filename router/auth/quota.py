"""Quotas by key: requests and tokens a minute, and requests at once; in this process, or shared over Redis.

The minute is a window that slides in steps of a second, so no 60 seconds, wherever they start, ever hold more than the
quota. A request takes in advance one request, its prompt and highest output tokens, and a place (one of the requests at
once), all or nothing, and gives back what it did not use. While Redis does not answer, this process counts alone and no
request waits; Redis gets back later what it may have counted for these requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from router.aio import Finishing, end_tasks
from router.auth.api_keys import Caller, Quota
from router.redis_link import (
    REDIS_TIMEOUT_S,
    UNAVAILABLE,
    RedisLink,
    RedisState,
    RedisUse,
    Script,
    outage,
)
from tiers.background import Faults

log = logging.getLogger(f"qarr.{__name__}")
WINDOW_S = 60
LEASE_S = 180  # The places of a dead router are free again after this time.
RENEW_S = 60
REDIS_CONNECTIONS = 8
# At this interval refunds are paid, places are renewed where that is due, and a Redis that failed is tried again.
REDIS_RETRY_S = 1
LEDGER_NAME = "qarr:{quotas}:ledger"
LATE = "late"  # Redis answers with it to a request that comes after its deadline.
Resource = Literal["requests", "tokens", "concurrent"]


class ResourceLimit(NamedTuple):
    field: str  # The field of ``Quota``.
    unit: str  # The unit, for people.


_LIMITS: dict[Resource, ResourceLimit] = {
    "requests": ResourceLimit("requests_per_minute", "requests a minute"),
    "tokens": ResourceLimit("tokens_per_minute", "tokens a minute"),
    "concurrent": ResourceLimit("concurrent_requests", "requests at once"),
}


class OverQuotaError(Exception):
    """A key's quota has too little left; ``retry_after_s`` None: the request is larger than the quota itself.

    ``requested_tokens``: tokens that the request may need.
    """

    def __init__(
        self,
        resource: Resource,
        limit: int,
        requested_tokens: int,
        retry_after_s: float | None,
    ) -> None:
        text = f"this key allows {limit} {_LIMITS[resource].unit}"
        if retry_after_s is None:
            text += f"; this request alone needs {requested_tokens}"
        elif resource == "tokens":
            text += f"; this request may need {requested_tokens}, which is more than is left now"
        super().__init__(text)
        self.resource = resource
        self.limit = limit
        self.retry_after_s = retry_after_s


class QuotaState(NamedTuple):
    """What a key has used, and whether one more request is admitted.

    Attributes:
        denied: The limit that the request would break; None if it is admitted.
        requests: Requests in the window.
        tokens: Tokens in the window, taken in advance or used.
        wait_s: Seconds until the denied resource suffices; if the request is admitted, until the window is empty.
        second: The ledger's second in which the request was counted.
    """

    denied: Resource | None
    requests: int
    tokens: int
    wait_s: float
    second: int


class Refund(NamedTuple):
    """What a request took and gives back to a ledger: its place, and of a second's counts what was not used.

    Attributes:
        second: The ledger's second in which it was taken; None if it is not known, because Redis' answer did not come.
        tokens: Below 0 if more were used than taken; these count in the present second.
        due: When it is certain whether Redis took it, by the monotonic clock.
    """

    key_id: str
    second: int | None
    requests: int
    tokens: int
    place: str
    due: float = 0.0


@dataclass(slots=True, eq=False)
class QuotaGrant:
    """What an admitted request has taken. Settle it exactly once, however the request ends."""

    _quotas: Quotas
    _demand: Refund
    _is_in_redis: bool
    _is_settled: bool = False

    async def settle(self, tokens: int | None) -> None:
        """Give back what was not used: with None, because the request failed, all of it; otherwise the unused tokens."""
        if self._is_settled:
            return
        self._is_settled = True
        unused = self._demand
        if tokens is not None:
            unused = unused._replace(requests=0, tokens=unused.tokens - tokens)
        await self._quotas.settle(unused, in_redis=self._is_in_redis)


class Quotas:
    def __init__(
        self, redis_url: str = "", now: Callable[[], float] = time.monotonic
    ) -> None:
        self._local = LocalLedger(now)
        self._shared: RedisQuotaLedger | None = None
        if redis_url:
            self._shared = RedisQuotaLedger(redis_url)
        self._lost = False  # Whether Redis is lost, so that this process counts alone.
        # The name of the ledger in Redis, empty until Redis is asked. If it changes, Redis has lost the ledger.
        self._name = ""
        # The ids of keys, by the places that they hold in Redis.
        self._open: dict[str, str] = {}
        self._refunds: dict[str, Refund] = {}
        self._timeouts: set[asyncio.Timeout] = set()
        self._work = Finishing()
        self._keeper: asyncio.Task[None] | None = None
        self._renew_at = 0.0

    @property
    def redis(self) -> RedisState | None:
        """Return whether Redis counts quotas; None: there is none."""
        if self._shared is None:
            return None
        return self._shared.link.state

    async def enter(
        self, caller: Caller, tokens: int, headers: dict[str, str]
    ) -> QuotaGrant | None:
        """Admit a request, or raise ``OverQuotaError``; None for a caller without limits.

        ``headers`` gets ``x-ratelimit-*``, also when it is denied.
        """
        quota = caller.quota
        if quota is None:
            return None
        limit = quota.tokens_per_minute
        if limit is not None and tokens > limit:
            raise OverQuotaError(
                "tokens", limit, requested_tokens=tokens, retry_after_s=None
            )
        place = secrets.token_hex(8)
        demand = Refund(
            caller.key_id, second=None, requests=1, tokens=tokens, place=place
        )
        quota_state: QuotaState | None = None
        if self._shared is not None and not self._lost:
            taking_in_redis = self._take(self._shared, quota, demand)
            quota_state = await self._work.acquire(
                taking_in_redis, partial(self._undo, self._shared, demand)
            )
        in_redis = quota_state is not None
        if quota_state is None:
            quota_state = self._local.acquire(
                caller.key_id, quota, tokens=tokens, place=place
            )
        headers.update(limit_headers(quota, quota_state))
        if quota_state.denied is not None:
            denied_limit = getattr(quota, _LIMITS[quota_state.denied].field)
            raise OverQuotaError(
                quota_state.denied,
                denied_limit,
                requested_tokens=tokens,
                retry_after_s=quota_state.wait_s,
            )
        if in_redis:
            self._open[place] = caller.key_id
        return QuotaGrant(self, demand._replace(second=quota_state.second), in_redis)

    async def settle(self, unused: Refund, *, in_redis: bool) -> None:
        if not in_redis or self._shared is None:
            self._local.give_back(unused)
            return
        del self._open[unused.place]
        await self._work.finish(self._give_back(self._shared, unused))

    async def aclose(self) -> None:
        await self._work.aclose()
        if self._keeper is not None:
            await end_tasks([self._keeper])
        if self._shared is not None:
            await self._shared.aclose()

    async def _take(
        self, shared: RedisQuotaLedger, quota: Quota, demand: Refund
    ) -> QuotaState | None:
        """Take what a request demands in Redis; None if Redis does not serve, and may have taken it nevertheless."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(shared))
        due = time.monotonic() + REDIS_TIMEOUT_S
        try:
            async with self._bounded_wait():
                if not self._name:
                    self._name, _ = await shared.link.name_of(LEDGER_NAME)
                return await shared.acquire(
                    demand.key_id, quota, tokens=demand.tokens, place=demand.place
                )
        except UNAVAILABLE as error:
            self._refunds[demand.place] = demand._replace(due=due)
            self._lose(shared, error)
            return None

    @asynccontextmanager
    async def _bounded_wait(self) -> AsyncIterator[None]:
        """Limit the time of a request's wait for Redis; it ends at once when another request finds that Redis is lost."""
        async with asyncio.timeout(REDIS_TIMEOUT_S) as timeout:
            self._timeouts.add(timeout)
            try:
                yield
            finally:
                self._timeouts.discard(timeout)

    async def _undo(
        self, shared: RedisQuotaLedger, demand: Refund, state: QuotaState | None
    ) -> None:
        if state is not None and state.denied is None:
            await self._give_back(shared, demand._replace(second=state.second))

    async def _give_back(self, shared: RedisQuotaLedger, unused: Refund) -> None:
        self._refunds[unused.place] = unused
        if not self._lost:
            try:
                await self._refund(shared, unused)
            except UNAVAILABLE as error:
                self._lose(shared, error)

    async def _refund(self, shared: RedisQuotaLedger, unused: Refund) -> None:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            await shared.give_back(unused)
        self._refunds.pop(unused.place, None)

    def _lose(self, shared: RedisQuotaLedger, error: BaseException) -> None:
        """Count alone from now on, and let no request wait for Redis any longer."""
        shared.link.state.fail(error)
        if not self._lost:
            log.warning(
                "Redis does not serve (%s): quotas are counted by this router alone",
                outage(error),
            )
        self._lost = True
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())

    async def _keep(self, shared: RedisQuotaLedger) -> None:
        logged_faults = Faults(repeats=False)
        while True:
            await asyncio.sleep(min(REDIS_RETRY_S, RENEW_S))
            try:
                await self._maintain(shared)
            except UNAVAILABLE as error:
                self._lose(shared, error)
            except Exception as error:  # noqa: BLE001  whatever it is, places must still be renewed
                logged_faults.log(
                    error, "places could not be renewed in Redis; trying again"
                )

    async def _maintain(self, shared: RedisQuotaLedger) -> None:
        """Pay refunds and renew places; if Redis serves again, or has lost its ledger, restore what is open first."""
        name, _ = await shared.link.name_of(LEDGER_NAME)
        if self._name and name != self._name:
            self._lost = True  # Until Redis holds again what is open.
            log.warning("Redis has lost what quotas have used: it begins anew")
        self._name = name
        if self._lost:
            # Nothing is given back there meanwhile, so every place that is restored is still in use.
            await shared.renew(self._open, restore=True)
        # While some are paid, others may become due.
        while due_refunds := [
            unused
            for unused in self._refunds.values()
            if unused.due <= time.monotonic()
        ]:
            for unused in due_refunds:
                await self._refund(shared, unused)
        if self._lost:
            self._lost = False
            self._renew_at = 0.0
            shared.link.state.recover()
            log.info("Redis serves again: quotas are counted there")
        if time.monotonic() >= self._renew_at:
            await shared.renew(self._open)
            self._renew_at = time.monotonic() + RENEW_S


@dataclass(slots=True)
class _Counts:
    """One key's use: [requests, tokens] by second, and the places taken."""

    seconds: dict[int, list[int]] = field(default_factory=dict)
    places: set[str] = field(default_factory=set)

    def add(self, second: int, requests: int, tokens: int) -> None:
        used = self.seconds.setdefault(second, [0, 0])
        used[0] += requests
        used[1] += tokens

    def move_window(self, present: int) -> None:
        """Forget what has left the window; count what is in the future, since the clock was set back, as used now."""
        for second in [
            second for second in self.seconds if second < present - WINDOW_S
        ]:
            del self.seconds[second]
        for second in [second for second in self.seconds if second > present]:
            requests, tokens = self.seconds.pop(second)
            self.add(present, requests, tokens)


class LocalLedger:
    """Counts in this process."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counts_by_key: dict[str, _Counts] = defaultdict(_Counts)

    def acquire(self, key_id: str, quota: Quota, tokens: int, place: str) -> QuotaState:
        now = self._now()
        second = int(now)
        counts = self._counts_by_key[key_id]
        counts.move_window(second)
        state = window_state(
            quota, counts.seconds, places=len(counts.places), tokens=tokens, now=now
        )
        if state.denied is None:
            counts.places.add(place)
            counts.add(second, requests=1, tokens=tokens)
        return state

    def give_back(self, unused: Refund) -> None:
        counts = self._counts_by_key[unused.key_id]
        counts.places.discard(unused.place)
        if unused.tokens < 0:
            counts.add(int(self._now()), requests=0, tokens=-unused.tokens)
        elif unused.second in counts.seconds:
            counts.add(unused.second, requests=-unused.requests, tokens=-unused.tokens)


def window_state(
    quota: Quota,
    seconds: Mapping[int, Sequence[int]],
    places: int,
    tokens: int,
    now: float,
) -> QuotaState:
    """Tell whether one more request is within a quota, and what will be used; ``seconds``: requests and tokens by second."""
    requests_used = sum(used[0] for used in seconds.values())
    tokens_used = sum(used[1] for used in seconds.values())
    max_requests, max_tokens, max_places = quota
    denied: Resource | None = None
    if max_places is not None and places >= max_places:
        denied = "concurrent"
        wait_s = 1.0
    elif max_requests is not None and requests_used >= max_requests:
        denied = "requests"
        wait_s = _seconds_until_free(
            seconds, 0, excess=requests_used + 1 - max_requests, now=now
        )
    elif max_tokens is not None and tokens_used + tokens > max_tokens:
        denied = "tokens"
        wait_s = _seconds_until_free(
            seconds, 1, excess=tokens_used + tokens - max_tokens, now=now
        )
    else:
        wait_s = int(now) + WINDOW_S + 1 - now
        requests_used += 1
        tokens_used += tokens
    return QuotaState(
        denied,
        requests=requests_used,
        tokens=tokens_used,
        wait_s=wait_s,
        second=int(now),
    )


def _seconds_until_free(
    seconds: Mapping[int, Sequence[int]], kind: int, excess: int, now: float
) -> float:
    """Return the seconds until ``excess`` requests (``kind`` is 0) or tokens (1) have left the window."""
    for second, used_amounts in sorted(seconds.items()):
        excess -= used_amounts[kind]
        if excess <= 0:
            return second + WINDOW_S + 1 - now
    return float(WINDOW_S)


class RedisQuotaLedger:
    """Counts in Redis, for several routers at once. Every change is one script, which Redis runs atomically."""

    def __init__(self, url: str) -> None:
        self.link = RedisLink(url, RedisUse.QUOTAS, REDIS_CONNECTIONS)
        self._take = Script.read(__file__, "quota_take.lua")
        self._give_back = Script.read(__file__, "quota_give_back.lua")
        self._renew = Script.read(__file__, "quota_renew.lua")

    async def acquire(
        self, key_id: str, quota: Quota, tokens: int, place: str
    ) -> QuotaState:
        """Take one request, its tokens and a place, all or nothing; ``TimeoutError`` if Redis came to it too late."""
        gives_up_at = time.monotonic() + REDIS_TIMEOUT_S
        names = _names(key_id)
        limits = [_argument_of(limit) for limit in quota]
        # If Redis' clock was set ahead, the second attempt knows its time.
        for _ in range(2):
            deadline = await self.link.time_at(gives_up_at, names[0])
            script_args = [*limits, tokens, place, WINDOW_S, LEASE_S, deadline]
            *values, redis_time = await self.link.run(self._take, names, script_args)
            self.link.learn_time(float(redis_time), names[0])
            if values[0] != LATE:
                return _state_in(values)
        raise TimeoutError

    async def give_back(self, unused: Refund) -> None:
        second: int | str = ""
        if unused.second is not None:
            second = unused.second
        script_args = [
            second,
            unused.requests,
            unused.tokens,
            unused.place,
            WINDOW_S + 2,
            LEASE_S,
        ]
        await self.link.run(self._give_back, _names(unused.key_id), script_args)

    async def renew(self, places: Mapping[str, str], *, restore: bool = False) -> None:
        """Let places (with the ids of their keys) be held for another lease; ``restore``: also those that Redis has lost."""
        places_by_key: dict[str, list[str]] = defaultdict(list)
        for place, key_id in places.items():
            places_by_key[key_id].append(place)
        mode = "restore" if restore else ""
        for key_id, key_places in places_by_key.items():
            _, places_name = _names(key_id)
            await self.link.run(
                self._renew, [places_name], [LEASE_S, mode, *key_places]
            )

    async def aclose(self) -> None:
        await self.link.aclose()


def _argument_of(limit: int | None) -> int:
    """Return a limit as the script takes it, which has -1 for none."""
    if limit is None:
        return -1
    return limit


def _state_in(values: Sequence[Any]) -> QuotaState:
    """Read what the script answers, without the time."""
    denied, used_requests, used_tokens, wait_s, second = values
    return QuotaState(
        denied or None,
        requests=used_requests,
        tokens=used_tokens,
        wait_s=float(wait_s),
        second=second,
    )


def _names(key_id: str) -> list[str]:
    """Return the names of a key's counts and places; the braces keep them on one node of a cluster."""
    return [f"qarr:{{{key_id}}}:counts", f"qarr:{{{key_id}}}:places"]


def limit_headers(quota: Quota, state: QuotaState) -> dict[str, str]:
    """Return the headers that OpenAI's clients know: limit, what is left, and the seconds of ``QuotaState.wait_s``."""
    headers: dict[str, str] = {}
    reset = f"{max(math.ceil(state.wait_s), 0)}s"
    resources = (
        ("requests", quota.requests_per_minute, state.requests),
        ("tokens", quota.tokens_per_minute, state.tokens),
    )
    for name, limit, used in resources:
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(limit - used, 0))
            headers[f"x-ratelimit-reset-{name}"] = reset
    return headers
