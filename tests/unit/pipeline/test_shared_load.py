"""Routers in front of the same engines know of one another over a real Redis, and get along without it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from router.aio import end_tasks
from router.pipeline.shared_load import REPORT_INTERVAL_S, ROUTERS, SharedLoad
from router.redis_link import UNAVAILABLE
from tests.conftest import RedisServer
from tests.waiting import until
from tiers.breaker import Breaker, BreakerOptions, BreakerState
from tiers.fleet import Fleet
from tiers.replica import FOREIGN_POLLS, NO_PEERS, PeerLoad, Replica, SlotShare
from tiers.snapshot import Gauges
from tiers.spec import ReplicaStatus, TierName, TierSpec

pytestmark = pytest.mark.anyio
FAST = TierName.FAST
LIMIT = 4


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let routers tell more often, and what they tell be old sooner."""
    monkeypatch.setattr("router.pipeline.shared_load.REPORT_INTERVAL_S", 0.2)
    monkeypatch.setattr("router.pipeline.shared_load.REPORT_LIFETIME_S", 2)


def make_fleet(replicas: int = 2, limit: int = LIMIT) -> Fleet:
    spec = TierSpec(FAST, 2048, max_num_seqs=16, max_in_flight=limit)
    fleet = Fleet((spec,))
    for number in range(replicas):
        fleet.add(
            Replica(
                f"fast-{number}",
                spec,
                f"http://e{number}",
                "",
                "m",
                status=ReplicaStatus.READY,
            )
        )
    return fleet


@asynccontextmanager
async def routers(
    url: str, count: int = 2, waiting: Callable[[], int] = lambda: 0
) -> AsyncIterator[list[Fleet]]:
    """Run the shared state of routers that have the same two engines, until they know of one another."""
    fleets = [make_fleet() for _ in range(count)]
    shared = [SharedLoad(url, fleet, lambda _tier: waiting()) for fleet in fleets]
    tasks = [asyncio.create_task(each.run()) for each in shared]
    try:
        await until(
            lambda: all(
                r.others.share and r.others.share.slots
                for fleet in fleets
                for r in fleet.replicas
            )
        )
        yield fleets
        assert not any(task.done() for task in tasks)
    finally:
        await end_tasks(tasks)
        for each in shared:
            await each.aclose()


@asynccontextmanager
async def admin(url: str) -> AsyncIterator[Any]:
    client = Redis.from_url(url, decode_responses=True)
    try:
        yield client
    finally:
        await client.aclose()


async def test_what_one_router_has_the_others_count(redis_server: RedisServer) -> None:
    """Requests, tokens and places: together they stay within the limit, and a release is seen as well."""
    async with routers(redis_server.url) as (one, other):
        leases = [
            one.lease(FAST, prompt_tokens=10, max_tokens=5, exclude={"fast-1"})
            for _ in range(3)
        ]
        assert leases.pop() is None  # two routers have two places each
        await until(
            lambda: (
                other.replicas[0].others.counted
                == PeerLoad(2, 20, output_tokens=10, kv_tokens=30)
            )
        )
        assert other.replicas[0].state.load.sequences == 2
        assert other.replicas[0].state.limit == 2
        for lease in leases:
            assert lease is not None
            lease.release()
        await until(lambda: other.replicas[0].others.counted == PeerLoad())


async def test_known_requests_are_not_taken_for_strangers(
    redis_server: RedisServer,
) -> None:
    """What the engine's gauges tell of is counted once, though another router sent it."""
    async with routers(redis_server.url) as (one, other):
        assert (
            one.lease(FAST, prompt_tokens=10, max_tokens=5, exclude={"fast-1"})
            is not None
        )
        await until(lambda: other.replicas[0].others.counted.slots == 1)
        for _ in range(FOREIGN_POLLS):
            other.replicas[0].note_gauges(Gauges(1, 0, 0.1))
        assert other.replicas[0].state.load.sequences == 1


async def test_a_replica_that_one_router_spares_the_others_spare(
    redis_server: RedisServer,
) -> None:
    """And when its pause is over, each tries it by itself."""
    async with routers(redis_server.url) as (one, other):
        for _ in range(3):
            lease = one.lease(FAST, prompt_tokens=1, max_tokens=1, exclude={"fast-1"})
            assert lease is not None
            with lease:
                lease.failed("EngineFailed")
        now = asyncio.get_running_loop().time
        await until(
            lambda: other.replicas[0].breaker.state(now()) is not BreakerState.CLOSED
        )
        await until(lambda: other.replicas[0].breaker.admits(now()))
        lease = other.lease(FAST, prompt_tokens=1, max_tokens=1, exclude={"fast-1"})
        assert lease is not None
        with lease:
            lease.first_token()
        assert other.replicas[0].breaker.state(now()) is BreakerState.CLOSED


async def test_routers_do_not_prolong_a_pause_for_one_another(
    redis_server: RedisServer,
) -> None:
    """They tell one another of it again and again, out of step; it ends for all of them when it would have for one."""
    async with routers(redis_server.url, 1) as (one,):
        await asyncio.sleep(REPORT_INTERVAL_S / 3)
        async with routers(redis_server.url, 1) as (two,):
            now = asyncio.get_running_loop().time
            for _ in range(3):
                lease = one.lease(
                    FAST, prompt_tokens=1, max_tokens=1, exclude={"fast-1"}
                )
                assert lease is not None
                with lease:
                    lease.failed("EngineFailed")
            spared = [fleet.replicas[0].breaker for fleet in (one, two)]
            await until(
                lambda: all(
                    breaker.state(now()) is not BreakerState.CLOSED
                    for breaker in spared
                )
            )
            await until(lambda: all(breaker.admits(now()) for breaker in spared))
            assert all(not breaker.wait_s(now()) for breaker in spared)


async def test_a_peer_with_another_clock_spares_no_longer(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router whose clock is ten minutes ahead tells of a pause of a second, and that is what the others take."""
    one = make_fleet()
    other = make_fleet()
    shared = [SharedLoad(redis_server.url, fleet) for fleet in (one, other)]
    for _ in range(3):
        one.replicas[0].breaker.failed(time.monotonic(), probe=False)
    right = time.time
    try:
        monkeypatch.setattr(time, "time", lambda: right() + 600)
        await shared[0].exchange()
        monkeypatch.setattr(time, "time", right)
        await shared[1].exchange()
        own, told = (
            fleet.replicas[0].breaker.wait_s(time.monotonic()) for fleet in (one, other)
        )
        assert 0 < told <= own + 0.5  # they are told one after the other
    finally:
        for each in shared:
            await each.aclose()


def test_a_peer_imposes_no_longer_pause_than_the_settings_have() -> None:
    """Whatever another router tells, and its pause is not told on as this router's own."""
    breaker = Breaker(BreakerOptions(longest_pause_s=30))
    breaker.adopt(100.0, 600.0)
    assert breaker.wait_s(100.0) == 30
    assert breaker.own_wait_s(100.0) == 0
    assert not breaker.admits(129.0)
    assert breaker.admits(130.0)


async def test_without_redis_each_goes_by_its_own_view(
    redis_server: RedisServer,
) -> None:
    """When Redis stops answering the others are forgotten; when it is back, they count again."""
    async with routers(redis_server.url) as (one, other):
        assert (
            one.lease(FAST, prompt_tokens=10, max_tokens=5, exclude={"fast-1"})
            is not None
        )
        await until(lambda: other.replicas[0].others.counted.slots == 1)
        redis_server.pause()
        try:
            await until(lambda: other.replicas[0].others.counted == NO_PEERS)
            await until(lambda: other.replicas[0].state.limit == LIMIT // 2)
            assert other.lease(FAST, prompt_tokens=1, max_tokens=1) is not None
        finally:
            redis_server.resume()
        await until(lambda: other.replicas[0].others.counted.slots == 1)


BREAK = {
    "readonly": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    "garbage": (("HSET", ROUTERS, "someone", "}"), ("DEL", ROUTERS)),
    "another type": (
        (
            "EVAL",
            f"redis.call('DEL', '{ROUTERS}') redis.call('SET', '{ROUTERS}', 1)",
            "0",
        ),
        ("DEL", ROUTERS),
    ),
}


@pytest.mark.parametrize("how", BREAK)
async def test_an_error_reply_is_an_outage_and_no_more(
    redis_server: RedisServer, how: str
) -> None:
    """Whatever Redis says instead of serving, the others are forgotten, and count again once it serves."""
    async with (
        admin(redis_server.url) as operator,
        routers(redis_server.url) as (one, other),
    ):
        lease = one.lease(FAST, prompt_tokens=10, max_tokens=5, exclude={"fast-1"})
        assert lease is not None
        await until(lambda: other.replicas[0].others.counted.slots == 1)
        wrong, right = BREAK[how]
        await operator.execute_command(*wrong)
        try:
            await until(lambda: other.replicas[0].others.counted == NO_PEERS)
            await until(lambda: other.replicas[0].state.limit == LIMIT // 2)
        finally:
            await operator.execute_command(*right)
        await until(lambda: other.replicas[0].others.counted.slots == 1)
        lease.release()
        await until(lambda: other.replicas[0].others.counted == PeerLoad())


async def test_a_redis_that_was_emptied_knows_nobody_and_gives_nothing_away(
    redis_server: RedisServer,
) -> None:
    """The first router that tells a Redis without memory gets no more than it had, until the others had time to tell."""
    async with (
        admin(redis_server.url) as operator,
        routers(redis_server.url) as (one, other),
    ):
        await operator.flushall()
        await operator.script_flush()
        seen = set()
        for _ in range(100):
            seen.update(r.state.limit for fleet in (one, other) for r in fleet.replicas)
            await asyncio.sleep(0.02)
        assert max(seen) <= LIMIT // 2
        assert len(await operator.hgetall(ROUTERS)) == 1 + 2


async def test_a_router_without_need_keeps_its_part_of_an_emptied_redis(
    redis_server: RedisServer,
) -> None:
    """What nobody else could take yet is not given up either: it would be missed when requests come a moment later."""
    fleets = [make_fleet(1) for _ in range(2)]
    waiting = [9, 9]
    shared = [
        SharedLoad(redis_server.url, f, lambda _t, n=n: waiting[n])
        for n, f in enumerate(fleets)
    ]
    async with admin(redis_server.url) as operator:
        try:
            async with asyncio.timeout(20):
                while any(
                    fleet.replicas[0].state.limit != LIMIT // 2 for fleet in fleets
                ):
                    for each in shared:
                        await each.exchange()
                    await asyncio.sleep(0.05)
            await operator.flushall()
            waiting[0] = 0
            for each in (*shared, *shared):
                await each.exchange()
            assert [fleet.replicas[0].state.limit for fleet in fleets] == [
                LIMIT // 2
            ] * 2
        finally:
            for each in shared:
                await each.aclose()


async def test_what_nobody_foresaw_does_not_end_the_loop(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception of any kind is logged once, and the router shares again when it is over."""
    fleet = make_fleet()
    broken = True

    def waiting(_tier: TierName) -> int:
        if broken:
            raise ZeroDivisionError
        return 0

    shared = SharedLoad(redis_server.url, fleet, waiting)
    task = asyncio.create_task(shared.run())
    try:
        await until(lambda: fleet.replicas[0].others.share is None)
        await asyncio.sleep(3 * REPORT_INTERVAL_S)
        broken = False
        await until(
            lambda: (
                fleet.replicas[0].others.share is not None
                and fleet.replicas[0].state.limit == LIMIT
            )
        )
        assert [r.exc_info[0] for r in caplog.records if r.exc_info] == [
            ZeroDivisionError
        ]
    finally:
        await end_tasks([task])
        await shared.aclose()


def test_what_others_told_expires_where_it_is_read() -> None:
    """What is known of others, and the share that goes with it, end by themselves, whatever becomes of those who told."""
    replica = make_fleet(1).replicas[0]
    now = time.monotonic()
    replica.note_peers(PeerLoad(3), now + 100)
    replica.note_share(SlotShare(2, now + 100))
    assert replica.others.counted.slots == 3
    assert replica.state.limit == 2
    replica.note_peers(PeerLoad(3), now)
    replica.note_share(SlotShare(2, now))
    assert replica.others.counted == NO_PEERS
    assert replica.state.limit == 1


async def test_what_redis_ran_too_late_changes_nothing(
    redis_server: RedisServer,
) -> None:
    """What a router told a Redis that hung is not true any more when Redis gets to it, and is left alone."""
    fleet = make_fleet(1)
    shared = SharedLoad(redis_server.url, fleet)
    async with admin(redis_server.url) as operator:
        try:
            lease = fleet.lease(FAST, prompt_tokens=1, max_tokens=1)
            assert lease is not None
            await shared.exchange()
            before = (await operator.hgetall(ROUTERS))[shared._id]
            lease.release()
            redis_server.pause()
            try:
                with pytest.raises(UNAVAILABLE):
                    await shared.exchange()
            finally:
                redis_server.resume()
            assert (await operator.hgetall(ROUTERS))[shared._id] == before
        finally:
            await shared.aclose()


async def test_a_router_that_leaves_is_forgotten(redis_server: RedisServer) -> None:
    """Its entry goes with it, and its share to those that stay."""
    async with routers(redis_server.url) as (one, _):
        async with routers(redis_server.url, 1) as (third,):
            assert third.lease(FAST, prompt_tokens=10, max_tokens=5) is not None
            await until(lambda: sum(r.others.counted.slots for r in one.replicas) == 1)
        await until(lambda: sum(r.others.counted.slots for r in one.replicas) == 0)


async def test_the_share_of_a_router_that_died_comes_back(
    redis_server: RedisServer,
) -> None:
    """A router alone has the whole limit, with another one half of it, and once that has died the whole again."""
    async with routers(redis_server.url, 1) as (one,):
        await until(lambda: one.replicas[0].state.limit == LIMIT)
        dead = SharedLoad(redis_server.url, make_fleet())
        task = asyncio.create_task(dead.run())
        await until(lambda: one.replicas[0].state.limit == LIMIT // 2)
        await end_tasks([task])
        await until(lambda: one.replicas[0].state.limit == LIMIT)
        await dead.aclose()


async def test_no_router_starves_another(redis_server: RedisServer) -> None:
    """However many requests wait at one router, another one that needs its part of the limit gets it within moments."""
    greedy = make_fleet(1)
    modest = make_fleet(1)
    waiting = [12, 0]
    shared = [
        SharedLoad(redis_server.url, f, lambda _t, n=n: waiting[n])
        for n, f in enumerate((greedy, modest))
    ]
    work = [asyncio.create_task(each.run()) for each in shared]
    work.append(asyncio.create_task(take_what_there_is(greedy)))
    try:
        await until(lambda: greedy.replicas[0].state.in_flight == LIMIT)
        waiting[1] = 4
        await until(
            lambda: (
                greedy.replicas[0].state.limit == modest.replicas[0].state.limit == 2
            )
        )
        work.append(asyncio.create_task(take_what_there_is(modest)))
        await until(
            lambda: (
                greedy.replicas[0].state.in_flight
                == modest.replicas[0].state.in_flight
                == 2
            )
        )
    finally:
        await end_tasks(work)
        for each in shared:
            await each.aclose()


async def take_what_there_is(fleet: Fleet) -> None:
    """Keep as many requests in flight as there are places, each for a moment."""
    async with asyncio.TaskGroup() as requests:

        async def serve(lease: Any) -> None:
            with lease:
                await asyncio.sleep(0.05)

        while True:
            while (
                lease := fleet.lease(FAST, prompt_tokens=1, max_tokens=1)
            ) is not None:
                requests.create_task(serve(lease))
            await asyncio.sleep(0.01)


async def test_the_odd_place_goes_round(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a limit does not divide evenly, each router in turn has the place that is left."""
    monkeypatch.setattr("router.pipeline.shared_load.ROTATION_INTERVAL_S", 1)
    async with routers(redis_server.url, 3, waiting=lambda: 9) as fleets:
        for fleet in fleets:
            await until(lambda fleet=fleet: fleet.replicas[0].state.limit == 2)  # type: ignore[misc]


@pytest.mark.parametrize("count", [2, 4])
async def test_together_they_keep_to_the_limit(
    redis_server: RedisServer, count: int
) -> None:
    """Whatever load comes and goes, and whenever Redis forgets all, never is there more than the limit and one a router."""
    dice = random.Random(count)
    limit = 10
    fleets = [make_fleet(1, limit) for _ in range(count)]
    waiting = [0] * count
    leases = [list[Any]() for _ in range(count)]
    shared = [
        SharedLoad(redis_server.url, f, lambda _t, n=n: waiting[n])
        for n, f in enumerate(fleets)
    ]
    most = 0
    emptied = False
    began = time.monotonic()
    async with admin(redis_server.url) as operator:
        try:
            while time.monotonic() < began + 8:
                n = dice.randrange(count)
                waiting[n] = dice.choice((0, 0, 1, 5, 30))
                for _ in range(dice.randrange(12)):
                    if leases[n] and dice.random() < 0.5:
                        leases[n].pop().release()
                    elif (
                        lease := fleets[n].lease(FAST, prompt_tokens=1, max_tokens=1)
                    ) is not None:
                        leases[n].append(lease)
                await shared[dice.randrange(count)].exchange()
                if not emptied and time.monotonic() > began + 4:
                    emptied = await operator.flushall()
                most = max(
                    most, sum(fleet.replicas[0].state.in_flight for fleet in fleets)
                )
                assert most <= limit + count
            assert most >= limit
        finally:
            for each in shared:
                await each.aclose()
