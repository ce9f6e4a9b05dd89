"""Quotas by key: requests and tokens a minute, and requests at once; in this process, or shared over Redis.

The minute is a window that slides in steps of a second, so no 60 seconds, wherever they start, ever hold more than the
quota. A request takes in advance one request, its prompt and highest output tokens, and a slot (one of the requests at
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from router.aio import Finishing, end_tasks
from router.auth.api_keys import Caller, Quota
from router.redis_link import REDIS_TIMEOUT_S, UNAVAILABLE, RedisLink, RedisState, RedisUse, Script, outage
from tiers.background import Faults

log = logging.getLogger(f"qarr.{__name__}")
WINDOW_S = 60
LEASE_S = 180  # after which the slot of a dead router is free again
RENEW_S = 60
REDIS_CONNECTIONS = 8
REDIS_RETRY_S = 1  # between tries after a failure
LEDGER_NAME = "qarr:{quotas}:ledger"
LATE = "late"  # Redis' answer to a take after its deadline
Resource = Literal["requests", "tokens", "concurrent"]
_LIMITS: dict[Resource, tuple[str, str]] = {  # of a quota: the name, and the unit for people
    "requests": ("requests_per_minute", "requests a minute"),
    "tokens": ("tokens_per_minute", "tokens a minute"),
    "concurrent": ("concurrent_requests", "requests at once"),
}


class OverQuotaError(Exception):
    """A key's quota has too little left; ``retry_after_s`` None: the request is larger than the quota itself.

    ``asked``: tokens that the request may need.
    """

    def __init__(self, resource: Resource, limit: int, asked: int, retry_after_s: float | None) -> None:
        text = f"this key allows {limit} {_LIMITS[resource][1]}"
        if retry_after_s is None:
            text += f"; this request alone needs {asked}"
        elif resource == "tokens":
            text += f"; this request may need {asked}, which is more than is left now"
        super().__init__(text)
        self.resource, self.limit, self.retry_after_s = resource, limit, retry_after_s


class QuotaState(NamedTuple):
    denied: Resource | None  # the limit that the request would break; None: it is admitted
    requests: int  # in the window
    tokens: int  # in the window, taken in advance or used
    wait_s: float  # seconds until the denied resource suffices; of an admitted request, until the window is empty
    second: int  # the ledger's second in which the request was counted


class Refund(NamedTuple):
    """What a request took and gives back to a ledger: its slot, and of a second's counts what was not used."""

    key_id: str
    second: int | None  # the ledger's second in which it was taken; None: not known, because Redis' answer did not come
    requests: int
    tokens: int  # below 0: more were used than taken; they count in the present second
    slot: str
    due: float = 0.0  # when it is certain whether Redis took it, by the monotonic clock


@dataclass(slots=True, eq=False)
class QuotaGrant:
    """What an admitted request has taken. Settle it exactly once, however the request ends."""

    _quotas: Quotas
    _taken: Refund
    _in_redis: bool
    _settled: bool = False

    async def settle(self, tokens: int | None) -> None:
        if not self._settled:
            self._settled = True
            taken = self._taken
            unused = taken if tokens is None else taken._replace(requests=0, tokens=taken.tokens - tokens)
            await self._quotas.settle(unused, in_redis=self._in_redis)


class Quotas:
    def __init__(self, redis_url: str = "", now: Callable[[], float] = time.monotonic) -> None:
        self._local = LocalLedger(now)
        self._shared = RedisLedger(redis_url) if redis_url else None
        self._lost = False  # whether this process counts alone
        self._name = ""  # of what is in Redis; another one: Redis has lost it; empty: it was not asked yet
        self._open: dict[str, str] = {}  # key ids, by the slots that they hold in Redis
        self._refunds: dict[str, Refund] = {}
        self._timeouts: set[asyncio.Timeout] = set()
        self._work = Finishing()
        self._keeper: asyncio.Task[None] | None = None
        self._renew_at = 0.0

    @property
    def redis(self) -> RedisState | None:
        """Return whether Redis counts quotas; None: there is none."""
        return None if self._shared is None else self._shared.link.state

    async def enter(self, caller: Caller, tokens: int, headers: dict[str, str]) -> QuotaGrant | None:
        """Admit a request, or raise ``OverQuotaError``; None for a caller without limits.

        ``headers`` gets ``x-ratelimit-*``, also when it is denied.
        """
        quota = caller.quota
        if quota is None:
            return None
        limit = quota.tokens_per_minute
        if limit is not None and tokens > limit:
            raise OverQuotaError("tokens", limit, tokens, None)
        asked, state = Refund(caller.key_id, None, 1, tokens, secrets.token_hex(8)), None
        if self._shared is not None and not self._lost:
            taking = self._take(self._shared, quota, asked)
            state = await self._work.acquire(taking, partial(self._undo, self._shared, asked))
        in_redis = state is not None
        if state is None:
            state = self._local.acquire(caller.key_id, quota, tokens, asked.slot)
        headers.update(limit_headers(quota, state))
        if state.denied is not None:
            raise OverQuotaError(state.denied, getattr(quota, _LIMITS[state.denied][0]), tokens, state.wait_s)
        if in_redis:
            self._open[asked.slot] = caller.key_id
        return QuotaGrant(self, asked._replace(second=state.second), in_redis)

    async def settle(self, unused: Refund, *, in_redis: bool) -> None:
        if not in_redis or self._shared is None:
            self._local.give_back(unused)
            return
        del self._open[unused.slot]
        await self._work.finish(self._give_back(self._shared, unused))

    async def aclose(self) -> None:
        await self._work.aclose()
        if self._keeper is not None:
            await end_tasks([self._keeper])
        if self._shared is not None:
            await self._shared.aclose()

    async def _take(self, shared: RedisLedger, quota: Quota, asked: Refund) -> QuotaState | None:
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(shared))
        due = time.monotonic() + REDIS_TIMEOUT_S
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S) as timeout:
                self._timeouts.add(timeout)
                try:
                    if not self._name:
                        self._name, _ = await shared.link.name_of(LEDGER_NAME)
                    return await shared.acquire(asked.key_id, quota, asked.tokens, asked.slot)
                finally:
                    self._timeouts.discard(timeout)
        except UNAVAILABLE as error:
            self._refunds[asked.slot] = asked._replace(due=due)
            self._lose(shared, error)
            return None

    async def _undo(self, shared: RedisLedger, asked: Refund, state: QuotaState | None) -> None:
        if state is not None and state.denied is None:
            await self._give_back(shared, asked._replace(second=state.second))

    async def _give_back(self, shared: RedisLedger, unused: Refund) -> None:
        self._refunds[unused.slot] = unused
        if not self._lost:
            try:
                await self._refund(shared, unused)
            except UNAVAILABLE as error:
                self._lose(shared, error)

    async def _refund(self, shared: RedisLedger, unused: Refund) -> None:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            await shared.give_back(unused)
        self._refunds.pop(unused.slot, None)

    def _lose(self, shared: RedisLedger, error: BaseException) -> None:
        shared.link.state.fail(error)
        if not self._lost:
            log.warning("Redis does not serve (%s): quotas are counted by this router alone", outage(error))
        self._lost = True
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())

    async def _keep(self, shared: RedisLedger) -> None:
        faults = Faults(repeats=False)
        while True:
            await asyncio.sleep(min(REDIS_RETRY_S, RENEW_S))
            try:
                await self._look_after(shared)
            except UNAVAILABLE as error:
                self._lose(shared, error)
            except Exception as error:  # noqa: BLE001  whatever it is, slots must still be renewed
                faults.log(error, "slots could not be renewed in Redis; trying again")

    async def _look_after(self, shared: RedisLedger) -> None:
        name, _ = await shared.link.name_of(LEDGER_NAME)
        if self._name and name != self._name:
            self._lost = True  # until what is open is held there again
            log.warning("Redis has lost what quotas have used: it begins anew")
        self._name = name
        if self._lost:
            # Nothing is given back there meanwhile, so no slot that is restored is over.
            await shared.renew(self._open, restore=True)
        while due := [unused for unused in self._refunds.values() if unused.due <= time.monotonic()]:
            for unused in due:
                await self._refund(shared, unused)
        if self._lost:
            self._lost, self._renew_at = False, 0.0
            shared.link.state.recover()
            log.info("Redis serves again: quotas are counted there")
        if time.monotonic() >= self._renew_at:
            await shared.renew(self._open)
            self._renew_at = time.monotonic() + RENEW_S


@dataclass(slots=True)
class _Counts:
    """One key's use: [requests, tokens] by second, and the slots taken."""

    seconds: dict[int, list[int]] = field(default_factory=dict)
    slots: set[str] = field(default_factory=set)

    def add(self, second: int, requests: int, tokens: int) -> None:
        used = self.seconds.setdefault(second, [0, 0])
        used[0], used[1] = used[0] + requests, used[1] + tokens


class LocalLedger:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._keys: dict[str, _Counts] = defaultdict(_Counts)

    def acquire(self, key_id: str, quota: Quota, tokens: int, slot: str) -> QuotaState:
        now = self._now()
        second, counts = int(now), self._keys[key_id]
        for old in [s for s in counts.seconds if s < second - WINDOW_S]:
            del counts.seconds[old]
        for future in [s for s in counts.seconds if s > second]:  # the clock was set back: as if used just now
            counts.add(second, *counts.seconds.pop(future))
        state = window_state(quota, counts.seconds, len(counts.slots), tokens, now)
        if state.denied is None:
            counts.slots.add(slot)
            counts.add(second, 1, tokens)
        return state

    def give_back(self, unused: Refund) -> None:
        counts = self._keys[unused.key_id]
        counts.slots.discard(unused.slot)
        if unused.tokens < 0:
            counts.add(int(self._now()), 0, -unused.tokens)
        elif unused.second in counts.seconds:
            counts.add(unused.second, -unused.requests, -unused.tokens)


def window_state(quota: Quota, seconds: Mapping[int, Sequence[int]], slots: int, tokens: int, now: float) -> QuotaState:
    """Tell whether one more request is within a quota, and what will be used; ``seconds``: requests and tokens by second."""
    denied: Resource
    requests_used, tokens_used = (sum(used[i] for used in seconds.values()) for i in (0, 1))
    most_requests, most_tokens, most_slots = quota
    if most_slots is not None and slots >= most_slots:
        denied, wait_s = "concurrent", 1.0
    elif most_requests is not None and requests_used >= most_requests:
        denied, wait_s = "requests", _wait_s(seconds, 0, requests_used + 1 - most_requests, now)
    elif most_tokens is not None and tokens_used + tokens > most_tokens:
        denied, wait_s = "tokens", _wait_s(seconds, 1, tokens_used + tokens - most_tokens, now)
    else:
        clear_s = int(now) + WINDOW_S + 1 - now
        return QuotaState(None, requests_used + 1, tokens_used + tokens, clear_s, int(now))
    return QuotaState(denied, requests_used, tokens_used, wait_s, int(now))


def _wait_s(seconds: Mapping[int, Sequence[int]], which: int, excess: int, now: float) -> float:
    """Return the seconds until ``excess`` requests (``which`` is 0) or tokens (1) have left the window."""
    for second, used in sorted(seconds.items()):
        excess -= used[which]
        if excess <= 0:
            return second + WINDOW_S + 1 - now
    return float(WINDOW_S)


class RedisLedger:
    """Counts in Redis, for several routers at once. Every change is one script, which Redis runs atomically."""

    def __init__(self, url: str) -> None:
        self.link = RedisLink(url, RedisUse.QUOTAS, REDIS_CONNECTIONS)
        self._take, self._give_back, self._renew = (
            Script.read(__file__, f"quota_{name}.lua") for name in ("take", "give_back", "renew")
        )

    async def acquire(self, key_id: str, quota: Quota, tokens: int, slot: str) -> QuotaState:
        due, names = time.monotonic() + REDIS_TIMEOUT_S, _names(key_id)
        numbers = [-1 if limit is None else limit for limit in quota]
        for _ in range(2):  # where Redis' clock was set ahead, the second try knows it
            until = await self.link.time_at(due, names[0])
            args = [*numbers, tokens, slot, WINDOW_S, LEASE_S, until]
            denied, requests, used, wait, second, shown = await self.link.run(self._take, names, args)
            self.link.learn_time(float(shown), names[0])
            if denied != LATE:
                return QuotaState(denied or None, requests, used, float(wait), second)
        raise TimeoutError

    async def give_back(self, unused: Refund) -> None:
        second = "" if unused.second is None else unused.second
        numbers = [second, unused.requests, unused.tokens, unused.slot, WINDOW_S + 2, LEASE_S]
        await self.link.run(self._give_back, _names(unused.key_id), numbers)

    async def renew(self, slots: Mapping[str, str], *, restore: bool = False) -> None:
        """Let slots (with the ids of their keys) be held for another lease; ``restore``: also those that Redis has lost."""
        held: dict[str, list[str]] = defaultdict(list)
        for slot, key_id in slots.items():
            held[key_id].append(slot)
        for key_id, of_key in held.items():
            _, name = _names(key_id)
            await self.link.run(self._renew, [name], [LEASE_S, "restore" if restore else "", *of_key])

    async def aclose(self) -> None:
        await self.link.aclose()


def _names(key_id: str) -> list[str]:
    """Return the names of a key's counts and slots; the braces keep them on one node of a cluster."""
    return [f"qarr:{{{key_id}}}:counts", f"qarr:{{{key_id}}}:places"]


def limit_headers(quota: Quota, state: QuotaState) -> dict[str, str]:
    """Return the headers that OpenAI's clients know: limit, what is left, and the seconds of ``QuotaState.wait_s``."""
    headers: dict[str, str] = {}
    reset = f"{max(math.ceil(state.wait_s), 0)}s"
    limits = {"requests": quota.requests_per_minute, "tokens": quota.tokens_per_minute}
    for (name, limit), used in zip(limits.items(), (state.requests, state.tokens), strict=True):
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(limit - used, 0))
            headers[f"x-ratelimit-reset-{name}"] = reset
    return headers
