"""Quotas: exact under concurrency, in one process and over several that share a real Redis."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from router.auth.api_keys import Caller, Quota
from router.auth.quota import (
    WINDOW_S,
    LocalLedger,
    OverQuotaError,
    QuotaGrant,
    Quotas,
    Refund,
    _names,
)
from tests.conftest import RedisServer
from tests.redis_processes import redis_cluster, relay_to
from tests.waiting import until

pytestmark = pytest.mark.anyio


def caller(
    key_id: str,
    requests: int | None = None,
    tokens: int | None = None,
    at_once: int | None = None,
) -> Caller:
    return Caller(key_id, key_id, quota=Quota(requests, tokens, at_once))


async def enters(quotas: Quotas, who: Caller, tokens: int = 1) -> QuotaGrant | None:
    try:
        return await quotas.enter(who, tokens, {})
    except OverQuotaError:
        return None


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 1_000_000.25

    def __call__(self) -> float:
        return self.now


async def test_no_minute_ever_holds_more() -> None:
    """Whatever the arrivals, no 60 seconds, wherever they start, hold more requests or tokens than the quota."""
    source = random.Random(11)
    clock = Clock()
    who = caller("k", requests=20, tokens=300)
    quotas = Quotas(now=clock)
    served: list[tuple[float, int]] = []
    for _ in range(4000):
        clock.now += source.expovariate(2.0)
        tokens = source.randint(1, 40)
        if await enters(quotas, who, tokens):
            served.append((clock.now, tokens))
    assert len(served) > 100
    for start, _ in served:
        in_window = [tokens for at, tokens in served if start <= at < start + WINDOW_S]
        assert len(in_window) <= 20
        assert sum(in_window) <= 300


async def test_room_is_there_when_promised() -> None:
    """After Retry-After's seconds the same request is let in, and not a second earlier than needed."""
    clock = Clock()
    who = caller("k", requests=2, tokens=100)
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
        with pytest.raises(OverQuotaError) as over:
            await quotas.enter(who, 60 if resource == "tokens" else 1, {})
        assert over.value.resource == resource
        assert over.value.retry_after_s is not None
        clock.now += over.value.retry_after_s - 0.3
        assert await enters(quotas, who, 60 if resource == "tokens" else 1) is None
        clock.now += 0.31
        assert await enters(quotas, who, 60 if resource == "tokens" else 1)


async def test_what_is_not_used_comes_back() -> None:
    """A settled grant keeps what was used; one that was not served keeps nothing; settling twice counts once."""
    clock = Clock()
    who = caller("k", requests=3, tokens=100, at_once=1)
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
    assert headers["x-ratelimit-remaining-requests"] == "1"
    assert headers["x-ratelimit-remaining-tokens"] == "69"


async def test_routers_share_redis(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20,000 requests through three routers' ledgers on one Redis exactly each key's quota is let in."""
    # On a busy machine Redis may answer late, and a router would then count alone.
    for room in ("redis_link", "auth.quota"):
        monkeypatch.setattr(f"router.{room}.REDIS_TIMEOUT_S", 60)
    source = random.Random(13)
    callers = [
        caller(
            f"s{number}",
            requests=source.randint(1, 180),
            tokens=source.randint(100, 1800),
            at_once=10_000,
        )
        for number in range(40)
    ]
    routers = [Quotas(redis_server.url) for _ in range(3)]
    let_in: Counter[str] = Counter()
    arrivals = source.choices(callers, k=20_000)
    waiting = iter(arrivals)
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
    wanted = Counter(who.key_id for who in arrivals)
    for who in callers:
        quota = min(
            who.quota.requests_per_minute or 0, (who.quota.tokens_per_minute or 0) // 10
        )
        if seconds < WINDOW_S:
            assert let_in[who.key_id] == min(quota, wanted[who.key_id]), who
        assert let_in[who.key_id] <= quota * (1 + int(seconds // WINDOW_S))
    assert sum(let_in.values()) < 20_000


async def test_redis_counts_as_the_local_ledger_does(redis_server: RedisServer) -> None:
    """The same requests are let in and refused, with the same headers, whichever ledger counts."""
    local = Quotas()
    shared = Quotas(redis_server.url)
    source = random.Random(17)
    who = caller("same", requests=12, tokens=200, at_once=6)
    grants: list[tuple[QuotaGrant, QuotaGrant]] = []
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
                except OverQuotaError as error:
                    result = error.resource
                counts = {
                    name: value
                    for name, value in headers.items()
                    if "reset" not in name
                }
                seen.append((result, counts))
            (first, local_counts), (second, shared_counts) = seen
            assert local_counts == shared_counts
            if isinstance(first, QuotaGrant) and isinstance(second, QuotaGrant):
                grants.append((first, second))
            else:
                assert first == second
    finally:
        await shared.aclose()


@asynccontextmanager
async def sharing(redis_server: RedisServer) -> AsyncIterator[tuple[Quotas, Any]]:
    quotas = Quotas(redis_server.url)
    operator = Redis.from_url(redis_server.url, decode_responses=True)
    try:
        yield quotas, operator
    finally:
        await quotas.aclose()
        await operator.aclose()


async def held(operator: Any, who: Caller) -> tuple[int, int, int]:
    """Return the places, requests and tokens that Redis counts for a caller."""
    counts, places = _names(who.key_id)
    amounts = Counter[str]()
    for field, amount in (await operator.hgetall(counts)).items():
        # A field is a second and "r" for requests or "t" for tokens.
        amounts[field[-1]] += int(amount)
    return await operator.zcard(places), amounts["r"], amounts["t"]


async def test_a_router_without_redis_counts_alone(redis_server: RedisServer) -> None:
    """When Redis goes away requests are still let in and still counted; when it is back it counts again."""
    who = caller("away", requests=3)
    async with sharing(redis_server) as (quotas, _):
        assert await enters(quotas, who)
        redis_server.pause()
        assert [await enters(quotas, who) is not None for _ in range(4)] == [
            True,
            True,
            True,
            False,
        ]
        redis_server.resume()
        await until(lambda: not quotas._lost)
        # Redis counted the one before its pause, and none that came during it.
        assert [await enters(quotas, who) is not None for _ in range(3)] == [
            True,
            True,
            False,
        ]


BREAK = {
    "readonly": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
}


@pytest.mark.parametrize("how", BREAK)
async def test_an_error_reply_is_an_outage_and_no_more(
    redis_server: RedisServer, how: str
) -> None:
    """When Redis answers with an error, requests are let in; once it is well again, what was taken before is given back."""
    who = caller(how, requests=50, tokens=1000, at_once=10)
    async with sharing(redis_server) as (quotas, operator):
        before = await quotas.enter(who, 100, {})
        wrong, right = BREAK[how]
        await operator.execute_command(*wrong)
        try:
            meanwhile = [await quotas.enter(who, 10, {}) for _ in range(3)]
            for grant in (before, *meanwhile):
                assert grant is not None
                await grant.settle(None)
        finally:
            await operator.execute_command(*right)
        await until(lambda: not quotas._lost and not quotas._refunds)
        assert await held(operator, who) == (0, 0, 0)
        assert await quotas.enter(who, 10, {})
        assert await held(operator, who) == (1, 1, 10)


async def test_what_redis_did_not_answer_never_counts(
    redis_server: RedisServer,
) -> None:
    """Requests that a hung Redis is asked to let in leave nothing behind when it gets to them: nobody waits for them."""
    who = caller("ghosts", requests=100, at_once=4)
    async with sharing(redis_server) as (quotas, operator):
        healthy = [await quotas.enter(who, 1, {}) for _ in range(2)]
        redis_server.pause()
        hung = await asyncio.gather(*(quotas.enter(who, 1, {}) for _ in range(4)))
        redis_server.resume()
        # Redis gets to the operator's command after theirs.
        assert (await held(operator, who))[:2] == (2, 2)
        for grant in (*healthy, *hung):
            assert grant is not None
            await grant.settle(1)
        await until(lambda: not quotas._lost)
        assert [await enters(quotas, who) is not None for _ in range(5)] == [
            True
        ] * 4 + [False]


async def test_what_redis_did_in_time_but_could_not_say_is_given_back(
    redis_server: RedisServer,
) -> None:
    """A place that Redis gave, and whose answer came too late, is free again once Redis answers."""
    who = caller("unheard", requests=100, tokens=1000, at_once=1)
    async with sharing(redis_server) as (quotas, operator):
        entering = asyncio.create_task(quotas.enter(who, 50, {}))
        async with asyncio.timeout(10):
            while await held(operator, who) == (0, 0, 0):
                await asyncio.sleep(0)
        await entering
        assert quotas._shared is not None
        (place,) = await operator.zrange(_names(who.key_id)[1], 0, -1)
        await quotas._shared.give_back(
            Refund(who.key_id, None, requests=1, tokens=50, place=place)
        )
        assert await held(operator, who) == (0, 0, 0)


async def test_nobody_waits_for_a_redis_that_hangs(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests arrive while Redis hangs, and however long, one task tries it: no request asks it."""
    monkeypatch.setattr("router.auth.quota.REDIS_RETRY_S", 0.05)
    who = caller("crowd", requests=1000)
    async with sharing(redis_server) as (quotas, operator):
        assert await enters(quotas, who)
        await operator.config_resetstat()
        redis_server.pause()
        assert await enters(quotas, who)
        for _ in range(3):
            await asyncio.sleep(0.2)
            await asyncio.gather(*(enters(quotas, who) for _ in range(50)))
        redis_server.resume()
        await until(lambda: not quotas._lost)
        calls = (await operator.info("commandstats"))["cmdstat_evalsha"]
        # The first call fails where no other test has loaded the script. The keeper and the
        # request that noticed the outage call it, not each of 150 requests.
        assert calls["calls"] - calls["failed_calls"] < 20


async def test_what_was_taken_before_an_outage_is_given_back_after_it(
    redis_server: RedisServer,
) -> None:
    """Requests that end while Redis hangs do not wait for it, and their places and tokens are there once it is back."""
    who = caller("spanning", tokens=1000, at_once=3)
    async with sharing(redis_server) as (quotas, operator):
        grants = [await quotas.enter(who, 100, {}) for _ in range(3)]
        redis_server.pause()
        for grant in grants:
            assert grant is not None
            await grant.settle(20)
        redis_server.resume()
        await until(lambda: not quotas._refunds)
        assert await held(operator, who) == (0, 3, 60)


async def test_giving_back_twice_counts_once(redis_server: RedisServer) -> None:
    """A router that does not know whether Redis took something back repeats it, and it counts once."""
    who = caller("twice", tokens=1000)
    async with sharing(redis_server) as (quotas, operator):
        grant = await quotas.enter(who, 100, {})
        assert grant is not None
        assert quotas._shared is not None
        for _ in range(2):
            await quotas._shared.give_back(
                grant._demand._replace(requests=0, tokens=30)
            )
        assert await held(operator, who) == (0, 1, 70)


async def test_a_redis_whose_clock_was_set_ahead_is_asked_again(
    redis_server: RedisServer,
) -> None:
    """If Redis refuses an acquisition as too late because its clock was moved, the router repeats it, and it counts once."""
    who = caller("ahead", requests=10)
    async with sharing(redis_server) as (quotas, operator):
        assert quotas._shared is not None
        quotas._shared.link.learn_time(time.time() - 600, _names(who.key_id)[0])
        assert await enters(quotas, who)
        assert not quotas._lost
        assert (await held(operator, who))[:2] == (1, 1)


async def test_a_clock_that_is_set_back_keeps_nobody_out(
    redis_server: RedisServer,
) -> None:
    """What was counted by a clock that was an hour ahead is used up for a minute, not for an hour and a minute."""
    who = caller("back", requests=3, at_once=3)
    now = time.time()
    clock = Clock()
    ledger = LocalLedger(clock)
    for place in range(3):
        ledger.acquire("k", who.quota, 1, place=str(place))
        ledger.give_back(
            Refund("k", int(clock.now), requests=0, tokens=0, place=str(place))
        )
    clock.now -= 3600
    usage = ledger.acquire("k", who.quota, 1, place="x")
    assert usage.denied == "requests"
    assert usage.wait_s <= WINDOW_S + 1
    async with sharing(redis_server) as (quotas, operator):
        counts, places = _names(who.key_id)
        await operator.hset(
            counts, mapping={f"{int(now) + 3600}r": 2, f"{int(now) + 3600}t": 2}
        )
        await operator.zadd(places, {"dead": now + 3600})
        assert await enters(quotas, who)
        with pytest.raises(OverQuotaError) as over:
            await quotas.enter(who, 1, {})
        assert over.value.resource == "requests"
        assert (over.value.retry_after_s or 0) <= WINDOW_S + 1
        assert await operator.zscore(places, "dead") < now + 600


async def test_places_of_a_dead_router_come_back(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that dies keeps no place for long; one that lives keeps those of its long requests."""
    monkeypatch.setattr("router.auth.quota.LEASE_S", 3)
    monkeypatch.setattr("router.auth.quota.RENEW_S", 0.3)
    who = caller("dead", at_once=1)
    dead = Quotas(redis_server.url)
    alive = Quotas(redis_server.url)
    try:
        assert await enters(dead, who)
        await asyncio.sleep(4)
        assert await enters(alive, who) is None  # still renewed
        assert dead._keeper is not None
        dead._keeper.cancel()
        async with asyncio.timeout(10):
            while not await enters(alive, who):
                await asyncio.sleep(0.1)
    finally:
        await alive.aclose()
        assert dead._shared is not None
        await dead._shared.aclose()


@pytest.mark.parametrize("shared", [False, True])
async def test_what_is_used_beyond_counts_when_it_is_used(
    redis_server: RedisServer,
    shared: bool,  # noqa: FBT001
) -> None:
    """An answer that used more than was taken in advance uses up the present minute."""
    quotas = Quotas(redis_server.url if shared else "")
    who = caller(f"beyond-{shared}", tokens=100)
    try:
        grant = await quotas.enter(who, 10, {})
        assert grant is not None
        await grant.settle(95)
        with pytest.raises(OverQuotaError):
            await quotas.enter(who, 10, {})
        assert await quotas.enter(who, 5, {})
    finally:
        await quotas.aclose()


async def test_a_client_that_is_cancelled_twice_leaves_no_place(
    redis_server: RedisServer,
) -> None:
    """Whenever a client is cancelled, and again while its place is given back, place and counts are free for the next."""
    who = caller("twice cancelled", requests=1000, at_once=1)
    async with sharing(redis_server) as (quotas, operator):
        for turn in range(100):
            entering = asyncio.create_task(quotas.enter(who, 1, {}))
            for pause in (turn % 12, turn % 7, turn % 5):
                for _ in range(pause):
                    await asyncio.sleep(0)
                entering.cancel()
            try:
                grant = await entering
            except asyncio.CancelledError:
                grant = None
            if grant is not None:
                await grant.settle(None)
            await until(lambda: not quotas._work.tasks)
            assert await held(operator, who) == (0, 0, 0)


async def test_quotas_follow_a_failover(
    own_redis: RedisServer, redis_server: RedisServer
) -> None:
    """After a failover another Redis serves behind the address, while the old one stays up and refuses writes."""
    who = caller("followed", requests=100, at_once=3)
    async with relay_to(own_redis) as relay, sharing(own_redis) as (_, old_operator):
        quotas = Quotas(relay.url)
        try:
            open_requests = [await quotas.enter(who, 1, {}) for _ in range(2)]
            await old_operator.execute_command(
                "REPLICAOF", "127.0.0.1", str(redis_server.port)
            )
            relay.target = redis_server
            await until(lambda: redis_server.port in relay.opened)
            await until(lambda: not quotas._lost)
            async with Redis.from_url(
                redis_server.url, decode_responses=True
            ) as operator:
                await until(
                    lambda: _holds(operator, who, 2),
                    "the places of open requests to be held there",
                )
                assert await quotas.enter(who, 1, {})
                with pytest.raises(OverQuotaError):
                    await quotas.enter(who, 1, {})
                for grant in open_requests:
                    assert grant is not None
                    await grant.settle(1)
                assert (await held(operator, who))[0] == 1
        finally:
            await quotas.aclose()


async def _holds(operator: Any, who: Caller, places: int) -> bool:
    return (await held(operator, who))[0] == places


async def test_places_of_open_requests_are_held_again_in_a_redis_that_was_emptied(
    own_redis: RedisServer,
) -> None:
    """A request that has ended meanwhile takes no place again, and the loss is noticed although no request comes."""
    who = caller("emptied", at_once=2)
    async with sharing(own_redis) as (quotas, operator):
        stays, ends = [await quotas.enter(who, 1, {}) for _ in range(2)]
        assert stays is not None
        assert ends is not None
        await until(lambda: quotas._name)
        await operator.flushall()
        await ends.settle(1)
        await until(
            lambda: _holds(operator, who, 1),
            "the place of the open request to be held again",
        )
        await until(lambda: not quotas._lost)
        assert await enters(quotas, who)
        assert await enters(quotas, who) is None
        await stays.settle(1)
        assert await enters(quotas, who)


async def test_a_cluster_counts_quotas(tmp_path: Path) -> None:
    """The keys of callers are on all its nodes; routers may name different ones."""
    callers = [caller(f"spread {number}", requests=2) for number in range(20)]
    with redis_cluster(tmp_path) as nodes:
        routers = [Quotas(node.url) for node in nodes[:2]]
        try:
            for who in callers:
                assert await enters(routers[0], who) is not None
                assert await enters(routers[1], who) is not None
                assert await enters(routers[0], who) is None
            assert not any(router._lost for router in routers)
        finally:
            for router in routers:
                await router.aclose()
