"""Quotas: exact under concurrency, in one process and over several that share a real Redis."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from router.keys import Caller, Quota
from router.quota import WINDOW_S, Grant, OverQuota, Quotas

if TYPE_CHECKING:
    from tests.conftest import RedisServer

pytestmark = pytest.mark.anyio


def caller(key_id: str, requests: int | None = None, tokens: int | None = None, at_once: int | None = None) -> Caller:
    """Return a caller with quotas."""
    return Caller(key_id, key_id, quota=Quota(requests, tokens, at_once))


async def enters(quotas: Quotas, who: Caller, tokens: int = 1) -> Grant | None:
    """Return the grant, or None if there is no room."""
    try:
        return await quotas.enter(who, tokens, {})
    except OverQuota:
        return None


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 1_000_000.25

    def __call__(self) -> float:
        return self.now


async def test_100_000_requests_with_random_keys() -> None:
    """Of 100,000 concurrent requests over 50 keys exactly each key's quota is let in."""
    source = random.Random(7)
    callers = [caller(f"k{n}", requests=source.randint(1, 3000)) for n in range(50)]
    quotas = Quotas(now=Clock())
    asked = source.choices(callers, k=100_000)
    let_in: Counter[str] = Counter()

    async def send(who: Caller) -> None:
        await asyncio.sleep(0)
        entered = await enters(quotas, who) is not None
        let_in[who.key_id] += entered

    await asyncio.gather(*map(send, asked))
    wanted = Counter(who.key_id for who in asked)
    for who in callers:
        assert let_in[who.key_id] == min(who.quota.requests_per_minute or 0, wanted[who.key_id])
    assert sum(let_in.values()) < 100_000


async def test_no_minute_ever_holds_more() -> None:
    """Whatever the arrivals, no 60 seconds, wherever they start, hold more requests or tokens than the quota."""
    source = random.Random(11)
    clock, who = Clock(), caller("k", requests=20, tokens=300)
    quotas = Quotas(now=clock)
    served: list[tuple[float, int]] = []
    for _ in range(4000):
        clock.now += source.expovariate(2.0)
        tokens = source.randint(1, 40)
        if await enters(quotas, who, tokens):
            served.append((clock.now, tokens))
    assert len(served) > 100
    for start, _ in served:
        within = [tokens for at, tokens in served if start <= at < start + WINDOW_S]
        assert len(within) <= 20
        assert sum(within) <= 300


async def test_room_is_there_when_promised() -> None:
    """After Retry-After's seconds the same request is let in, and not a second earlier than needed."""
    clock, who = Clock(), caller("k", requests=2, tokens=100)
    quotas = Quotas(now=clock)
    for tokens, resource in ((10, "requests"), (45, "tokens")):
        clock.now += 200
        for _ in range(2):
            grant = await quotas.enter(who, tokens, {})
            assert grant is not None
            if resource == "tokens":
                await grant.settle(tokens)
            clock.now += 1
            if resource == "tokens":
                break
        with pytest.raises(OverQuota) as over:
            await quotas.enter(who, 60 if resource == "tokens" else 1, {})
        assert over.value.resource == resource
        assert over.value.retry_after_s is not None
        clock.now += over.value.retry_after_s - 0.3
        assert await enters(quotas, who, 60 if resource == "tokens" else 1) is None
        clock.now += 0.31
        assert await enters(quotas, who, 60 if resource == "tokens" else 1)


async def test_what_is_not_used_comes_back() -> None:
    """A settled grant keeps what was used; one that was not served keeps nothing; settling twice counts once."""
    clock, who = Clock(), caller("k", requests=3, tokens=100, at_once=1)
    quotas = Quotas(now=clock)
    grant = await quotas.enter(who, 90, {})
    assert grant is not None
    assert await enters(quotas, who) is None  # at once
    await grant.settle(30)
    await grant.settle(30)
    again = await quotas.enter(who, 70, {})
    assert again is not None
    await again.settle(None)
    headers: dict[str, str] = {}
    assert await quotas.enter(who, 1, headers)
    assert (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]) == ("1", "69")


async def test_routers_share_redis(redis_server: RedisServer) -> None:
    """Of 100,000 requests through three routers' ledgers on one Redis exactly each key's quota is let in."""
    source = random.Random(13)
    callers = [
        caller(f"s{n}", requests=source.randint(1, 900), tokens=source.randint(500, 9000), at_once=10_000)
        for n in range(40)
    ]
    routers = [Quotas(redis_server.url) for _ in range(3)]
    let_in: Counter[str] = Counter()
    asked = source.choices(callers, k=100_000)
    waiting = iter(asked)
    started = time.monotonic()

    async def send() -> None:
        for who in waiting:
            entered = await enters(source.choice(routers), who, 10) is not None
            let_in[who.key_id] += entered

    try:
        await asyncio.gather(*(send() for _ in range(50)))
    finally:
        for router in routers:
            await router.aclose()
    seconds = time.monotonic() - started
    wanted = Counter(who.key_id for who in asked)
    for who in callers:
        quota = min(who.quota.requests_per_minute or 0, (who.quota.tokens_per_minute or 0) // 10)
        if seconds < WINDOW_S:
            assert let_in[who.key_id] == min(quota, wanted[who.key_id]), who
        assert let_in[who.key_id] <= quota * (1 + int(seconds // WINDOW_S))
    assert sum(let_in.values()) < 100_000


async def test_redis_counts_as_the_local_ledger_does(redis_server: RedisServer) -> None:
    """The same requests are let in and refused, with the same headers, whichever ledger counts."""
    local, shared = Quotas(), Quotas(redis_server.url)
    source = random.Random(17)
    who = caller("same", requests=12, tokens=200, at_once=6)
    grants: list[tuple[Grant, Grant]] = []
    try:
        for _ in range(60):
            if grants and source.random() < 0.4:
                pair = grants.pop(source.randrange(len(grants)))
                used = source.choice([None, 3])
                for grant in pair:
                    await grant.settle(used)
                continue
            tokens = source.randint(1, 50)
            seen = []
            for quotas in (local, shared):
                headers: dict[str, str] = {}
                try:
                    result: object = await quotas.enter(who, tokens, headers)
                except OverQuota as error:
                    result = error.resource
                counts = {k: v for k, v in headers.items() if "reset" not in k}
                seen.append((result, counts))
            (first, counts_a), (second, counts_b) = seen
            assert counts_a == counts_b
            if isinstance(first, Grant) and isinstance(second, Grant):
                grants.append((first, second))
            else:
                assert first == second
    finally:
        await shared.aclose()


async def test_a_router_without_redis_counts_alone(redis_server: RedisServer) -> None:
    """When Redis goes away requests are still let in and still counted; when it is back it counts again."""
    who = caller("away", requests=3)
    quotas = Quotas(redis_server.url)
    try:
        assert await enters(quotas, who)
        redis_server.pause()
        assert [await enters(quotas, who) is not None for _ in range(4)] == [True, True, True, False]
        redis_server.resume()
        quotas._shared_after = 0.0
        # Redis counted the one before its pause, and then the one that came during it.
        assert [await enters(quotas, who) is not None for _ in range(2)] == [True, False]
    finally:
        await quotas.aclose()


async def test_places_of_a_dead_router_come_back(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that dies keeps no place for long; one that lives keeps those of its long requests."""
    monkeypatch.setattr("router.quota.LEASE_S", 3)
    monkeypatch.setattr("router.quota.RENEW_S", 0.3)
    who = caller("dead", at_once=1)
    dead, alive = Quotas(redis_server.url), Quotas(redis_server.url)
    try:
        assert await enters(dead, who)
        await asyncio.sleep(4)
        assert await enters(alive, who) is None  # still renewed
        assert dead._renewing is not None
        dead._renewing.cancel()
        async with asyncio.timeout(10):
            while not await enters(alive, who):
                await asyncio.sleep(0.1)
    finally:
        await alive.aclose()
        assert dead._shared is not None
        await dead._shared.aclose()


@pytest.mark.parametrize("shared", [False, True])
async def test_what_is_used_beyond_counts_when_it_is_used(redis_server: RedisServer, shared: bool) -> None:  # noqa: FBT001
    """An answer that used more than was taken in advance uses up the present minute."""
    quotas = Quotas(redis_server.url if shared else "")
    who = caller(f"beyond-{shared}", tokens=100)
    try:
        grant = await quotas.enter(who, 10, {})
        assert grant is not None
        await grant.settle(95)
        with pytest.raises(OverQuota):
            await quotas.enter(who, 10, {})
        assert await quotas.enter(who, 5, {})
    finally:
        await quotas.aclose()


async def test_a_client_that_leaves_at_the_door_leaves_no_place(redis_server: RedisServer) -> None:
    """Whenever a request is cancelled, its place and its counts are there for the next one."""
    quotas = Quotas(redis_server.url)
    who = caller("leaver", requests=1000, at_once=1)
    try:
        for turn in range(100):
            entering = asyncio.create_task(quotas.enter(who, 1, {}))
            for _ in range(turn % 12):
                await asyncio.sleep(0)
            entering.cancel()
            try:
                grant = await entering
            except asyncio.CancelledError:
                continue
            assert grant is not None
            await grant.settle(None)
        assert await quotas.enter(who, 1, {})
    finally:
        await quotas.aclose()
