"""Routers in front of the same engines know of one another over a real Redis, and get along without it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from router.context import end_tasks
from router.shared_state import EVERY_S, SharedState
from tiers.breaker import BreakerState
from tiers.fleet import FOREIGN_POLLS, NO_OTHERS, Fleet, Gauges, Others, Replica
from tiers.spec import ReplicaState, TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.conftest import RedisServer

pytestmark = pytest.mark.anyio
FAST = TierName.FAST


@asynccontextmanager
async def routers(url: str, count: int = 2) -> AsyncIterator[list[Fleet]]:
    """Run the shared state of routers that have the same two engines."""
    spec = TierSpec(FAST, 2048, 16, 4)
    fleets = [Fleet((spec,)) for _ in range(count)]
    for fleet in fleets:
        for number in range(2):
            fleet.add(Replica(f"fast-{number}", spec, f"http://e{number}", "", "m", state=ReplicaState.READY))
    shared = [SharedState(url, fleet) for fleet in fleets]
    tasks = [asyncio.create_task(each.run()) for each in shared]
    try:
        yield fleets
    finally:
        await end_tasks(tasks)
        for each in shared:
            await each.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.05)


async def test_what_one_router_has_the_others_count(redis_server: RedisServer) -> None:
    """Requests, tokens and places: together they stay within the limit, and a release is seen as well."""
    async with routers(redis_server.url) as (one, other):
        leases = [one.lease(FAST, prompt_tokens=10, max_tokens=5, exclude={"fast-1"}) for _ in range(3)]
        await until(lambda: other.replicas[0].others == Others(3, 30, 15, 45))
        assert other.replicas[0].sequences == 3
        assert other.replicas[0].limit == 1
        taken = other.lease(FAST, prompt_tokens=1, max_tokens=1)
        assert taken is not None
        assert taken.replica.id == "fast-1"  # the emptier one
        assert other.lease(FAST, prompt_tokens=1, max_tokens=1, exclude={"fast-1"}) is not None
        assert other.lease(FAST, prompt_tokens=1, max_tokens=1, exclude={"fast-1"}) is None
        for lease in leases:
            assert lease is not None
            lease.release()
        await until(lambda: other.replicas[0].others == Others())


async def test_known_requests_are_not_taken_for_strangers(redis_server: RedisServer) -> None:
    """What the engine's gauges tell of is counted once, though another router sent it."""
    async with routers(redis_server.url) as (one, other):
        assert one.lease(FAST, prompt_tokens=10, max_tokens=5, exclude={"fast-1"}) is not None
        await until(lambda: other.replicas[0].others.requests == 1)
        for _ in range(FOREIGN_POLLS):
            other.replicas[0].note_gauges(Gauges(1, 0, 0.1))
        assert other.replicas[0].sequences == 1


async def test_a_replica_that_one_router_spares_the_others_spare(redis_server: RedisServer) -> None:
    """And when its pause is over, each tries it by itself."""
    async with routers(redis_server.url) as (one, other):
        for _ in range(3):
            lease = one.lease(FAST, prompt_tokens=1, max_tokens=1, exclude={"fast-1"})
            assert lease is not None
            with lease:
                lease.failed("EngineFailed")
        now = asyncio.get_running_loop().time
        await until(lambda: other.replicas[0].breaker.state(now()) is not BreakerState.CLOSED)
        await until(lambda: other.replicas[0].breaker.admits(now()))
        lease = other.lease(FAST, prompt_tokens=1, max_tokens=1, exclude={"fast-1"})
        assert lease is not None
        with lease:
            lease.first_token()
        assert other.replicas[0].breaker.state(now()) is BreakerState.CLOSED


async def test_routers_do_not_prolong_a_pause_for_one_another(redis_server: RedisServer) -> None:
    """They tell one another of it again and again, out of step; it ends for all of them when it would have for one."""
    async with routers(redis_server.url, 1) as (one,):
        await asyncio.sleep(EVERY_S / 3)
        async with routers(redis_server.url, 1) as (two,):
            await asyncio.sleep(EVERY_S / 3)
            async with routers(redis_server.url, 1) as (three,):
                everyone, now = (one, two, three), asyncio.get_running_loop().time
                for _ in range(3):
                    lease = one.lease(FAST, prompt_tokens=1, max_tokens=1, exclude={"fast-1"})
                    assert lease is not None
                    with lease:
                        lease.failed("EngineFailed")
                spared = [fleet.replicas[0].breaker for fleet in everyone]
                await until(lambda: all(breaker.state(now()) is not BreakerState.CLOSED for breaker in spared))
                await until(lambda: all(breaker.admits(now()) for breaker in spared))
                assert all(not breaker.wait_s(now()) for breaker in spared)


async def test_without_redis_each_goes_by_its_own_view(redis_server: RedisServer) -> None:
    """When Redis stops answering the others are forgotten; when it is back, they count again."""
    async with routers(redis_server.url) as (one, other):
        assert one.lease(FAST, prompt_tokens=10, max_tokens=5, exclude={"fast-1"}) is not None
        await until(lambda: other.replicas[0].others.requests == 1)
        redis_server.pause()
        try:
            await until(lambda: other.replicas[0].others == NO_OTHERS)
            assert other.lease(FAST, prompt_tokens=1, max_tokens=1) is not None
        finally:
            redis_server.resume()
        await until(lambda: other.replicas[0].others.requests == 1)


async def test_a_router_that_leaves_is_forgotten(redis_server: RedisServer) -> None:
    """Its entry goes with it."""
    async with routers(redis_server.url) as (one, _):
        async with routers(redis_server.url, 1) as (third,):
            assert third.lease(FAST, prompt_tokens=10, max_tokens=5) is not None
            await until(lambda: sum(r.others.requests for r in one.replicas) == 1)
        await until(lambda: sum(r.others.requests for r in one.replicas) == 0)
