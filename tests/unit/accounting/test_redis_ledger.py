"""What budgets have used outlives a Redis that comes back empty, as an old copy, or without what it evicted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from router.accounting.budgets import BudgetUnknownError
from router.accounting.database import Database
from router.accounting.ledgers import SqliteLedger
from router.accounting.redis_ledger import RedisLedger, _key
from router.accounting.reservations import Reservations
from router.accounting.settings import BudgetSettings
from router.auth.api_keys import Caller
from router.telemetry.record import Cost
from tests.conftest import RedisServer
from tests.redis_processes import redis_cluster, relay_to
from tests.unit.accounting.accounts import (
    DAY,
    Clock,
    account,
    caller,
    enters,
    hold,
)
from tests.waiting import until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def a_router(
    redis_url: str, folder: Path | None = None
) -> AsyncIterator[Reservations]:
    """Run one router's reservations, with its file if there is a folder."""
    database = None if folder is None else Database(folder / "usage.sqlite")
    reservations = Reservations(
        RedisLedger(redis_url, database), BudgetSettings(), Clock()
    )
    try:
        yield reservations
    finally:
        await reservations.aclose()
        if database is not None:
            await database.aclose()


@asynccontextmanager
async def operator_of(redis: RedisServer) -> AsyncIterator[Any]:
    async with Redis.from_url(redis.url, decode_responses=True) as operator:
        yield operator


async def use(reservations: Reservations, who: Caller, engine: int) -> None:
    reservation = await enters(reservations, who, engine)
    assert reservation is not None
    await reservation.settle(Cost(engine, 0))


async def used(reservations: Reservations, who: Caller) -> int:
    own = who.accounts[0].id
    return (await reservations.ledger.used([own], DAY))[own, DAY.day].engine_us


async def forget_all(redis: RedisServer) -> None:
    async with operator_of(redis) as operator:
        await operator.flushall()


async def test_a_budget_that_was_used_up_stays_used_up_when_redis_restarts_empty(
    own_redis: RedisServer,
) -> None:
    who = caller(engine_seconds_per_day=10e-6)
    async with a_router(own_redis.url) as router:
        await use(router, who, 10)
        assert await enters(router, who, 1) is None
        own_redis.restart_empty()
        assert await enters(router, who, 1) is None
        await until(lambda: router.restored == 2, "a day and a month to be restored")
        await until(lambda: router._alone is None)
        assert await enters(router, who, 1) is None
        assert await used(router, who) == 10


async def test_a_used_up_budget_stays_used_up_when_redis_evicts_it(
    own_redis: RedisServer,
) -> None:
    """Redis may evict what one account has spent while it keeps everything else."""
    who = caller(engine_seconds_per_day=10e-6, engine_seconds_per_month=20e-6)
    async with a_router(own_redis.url) as router, operator_of(own_redis) as operator:
        await use(router, who, 10)
        for period in DAY:
            await operator.delete(_key("spent", who.accounts[0].id, period))
            assert await enters(router, who, 1) is None
            assert await used(router, who) == 10


async def test_an_older_copy_of_redis_is_caught_up(own_redis: RedisServer) -> None:
    """After a failover to a replica that lacks the last writes, what a router has seen still counts."""
    who = caller(engine_seconds_per_day=100e-6)
    async with a_router(own_redis.url) as router, operator_of(own_redis) as operator:
        await use(router, who, 10)
        name = _key("spent", who.accounts[0].id, DAY.day)
        before = await operator.hgetall(name)
        await use(router, who, 5)
        await operator.delete(name)
        await operator.hset(name, mapping=before)
        await use(router, who, 3)
        assert await used(router, who) == 18


async def test_a_router_that_restarts_with_redis_knows_from_its_file(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    """When the machine restarts, both begin anew, and only the file is left."""
    who = caller(engine_seconds_per_day=10e-6)
    async with a_router(own_redis.url, tmp_path) as router:
        await use(router, who, 10)
    own_redis.restart_empty()
    async with a_router(own_redis.url, tmp_path) as router:
        assert await enters(router, who, 1) is None
        assert await used(router, who) == 10


async def test_what_was_restored_is_not_restored_again(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    """The file learns that the ledger is another one, although nothing more was spent."""
    who = caller(engine_seconds_per_day=10e-6)
    async with a_router(own_redis.url, tmp_path) as router:
        await use(router, who, 10)
    own_redis.restart_empty()
    for restored in (2, 0):
        async with a_router(own_redis.url, tmp_path) as router:
            assert await used(router, who) == 10
            assert router.restored == restored


async def test_a_router_that_is_killed_has_written_what_it_saw(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    """A router writes what it saw every second, so an end without order loses nothing."""
    who = caller(engine_seconds_per_day=10e-6)
    database = Database(tmp_path / "usage.sqlite")
    async with a_router(own_redis.url, tmp_path) as router:
        await use(router, who, 10)

        async def is_written() -> bool:
            rows = await database.change(
                lambda sql: sql.execute("SELECT engine_us FROM ledger_copy").fetchall()
            )
            return rows == [(10,), (10,)]

        await until(is_written)
    await database.aclose()


async def test_each_router_restores_what_it_alone_has_seen(
    own_redis: RedisServer,
) -> None:
    """After the loss, an account counts in full as soon as the router that served it last has been heard."""
    first_key = caller(engine_seconds_per_day=10e-6)
    second_key = caller(engine_seconds_per_day=10e-6)
    async with a_router(own_redis.url) as first, a_router(own_redis.url) as second:
        await use(first, first_key, 10)
        await use(second, second_key, 10)
        await until(lambda: _knows_the_ledger(first) and _knows_the_ledger(second))
        await forget_all(own_redis)
        await until(
            lambda: first.restored >= 2 and second.restored >= 2,
            "both to notice the loss by themselves",
        )
        await until(lambda: first._alone is None and second._alone is None)
        assert await enters(first, second_key, 1) is None
        assert await enters(second, first_key, 1) is None


def _knows_the_ledger(router: Reservations) -> bool:
    assert isinstance(router.ledger, RedisLedger)
    return bool(router.ledger._name)


async def test_after_an_outage_that_lost_the_ledger_nothing_unknown_is_served_at_once(
    own_redis: RedisServer,
) -> None:
    """Until every router has had time to say what it saw, a budget that this router never saw is not known."""
    known = caller(engine_seconds_per_day=10e-6)
    unknown = caller(engine_seconds_per_day=10e-6)
    async with a_router(own_redis.url) as router:
        await use(router, known, 4)
        await until(lambda: _knows_the_ledger(router))
        own_redis.stop()
        await until(lambda: router.redis is not None and not router.redis.serves)
        own_redis.start()
        assert isinstance(router.ledger, RedisLedger)
        name = router.ledger._name
        ledger = router.ledger
        await until(lambda: ledger._name != name)
        with pytest.raises(BudgetUnknownError):
            await enters(router, unknown, 1)
        await until(lambda: router.redis is not None and router.redis.serves)
        await use(router, unknown, 10)
        await use(router, known, 6)
        assert await enters(router, known, 1) is None


async def test_reservations_of_open_requests_are_held_again(
    own_redis: RedisServer,
) -> None:
    """A Redis that lost them would let others spend what open requests may still use."""
    who = caller(engine_seconds_per_day=10e-6)
    async with a_router(own_redis.url) as router:
        open_request = await enters(router, who, 8)
        assert open_request is not None
        await until(lambda: _knows_the_ledger(router))
        own_redis.restart_empty()

        async def is_held() -> bool:
            async with operator_of(own_redis) as operator:
                return bool(await operator.hlen(_key("held", who.accounts[0].id)))

        # Nothing was spent, so only the ledger's name tells that it is another one.
        await until(is_held)
        await until(lambda: router._alone is None)
        assert await enters(router, who, 3) is None
        await open_request.settle(Cost(2, 0))
        assert await used(router, who) == 2
        async with operator_of(own_redis) as operator:
            assert not await operator.hlen(_key("held", who.accounts[0].id))


async def test_a_reservation_that_ends_while_it_is_renewed_does_not_come_back(
    own_redis: RedisServer,
) -> None:
    who = caller(engine_seconds_per_day=10e-6)
    async with a_router(own_redis.url) as router:
        reservation = await enters(router, who, 8)
        assert reservation is not None
        await reservation.settle(Cost(1, 0))
        await router.ledger.renew([reservation.hold])
        assert await used(router, who) == 1


# A step is the router that serves a request, and its cost; at a cost of 0 Redis loses everything.
Step = tuple[int, int]
STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=25)


@settings(max_examples=40)
@given(steps=STEPS)
def test_nothing_is_lost_and_nothing_counts_twice(
    steps: list[Step], redis_server: RedisServer
) -> None:
    """Three routers spend, and Redis loses everything at any moment; then each router looks once, in any order."""
    own = account("own", engine_seconds_per_day=1)

    async def spend() -> None:
        ledgers = [RedisLedger(redis_server.url) for _ in range(3)]
        spent = 0
        async with operator_of(redis_server) as operator:
            for number, cost in steps:
                if cost:
                    reserved = hold(own, engine=cost)
                    await ledgers[number].reserve(reserved)
                    await ledgers[number].settle(reserved, Cost(cost, 2 * cost))
                    spent += cost
                else:
                    for period in DAY:
                        await operator.delete(_key("spent", own.id, period))
                    for turn in range(3):
                        await ledgers[(number + turn) % 3].used([own.id], DAY)
                    looks = [await ledger.used([own.id], DAY) for ledger in ledgers]
                    assert [look[own.id, DAY.month] for look in looks] == [
                        Cost(spent, 2 * spent)
                    ] * 3
        for ledger in ledgers:
            await ledger.aclose()

    asyncio.run(spend())


async def test_settled_requests_leave_nothing(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A settlement's mark goes once nobody can repeat the settlement, also while no request comes."""
    monkeypatch.setattr("router.accounting.settled_marks.MARK_S", 0.0)
    who = caller(engine_seconds_per_day=1)
    async with a_router(own_redis.url) as router, operator_of(own_redis) as operator:
        for _ in range(200):
            await use(router, who, 1)

        async def is_small() -> bool:
            return not router._owed and int(await operator.dbsize()) <= 4

        await until(
            is_small, "the ledger's name, a day and a month to be all that Redis has"
        )
        assert await used(router, who) == 200


async def test_marks_stay_while_a_settlement_may_be_repeated(
    own_redis: RedisServer,
) -> None:
    who = caller(engine_seconds_per_day=1)
    async with a_router(own_redis.url) as router, operator_of(own_redis) as operator:
        for _ in range(3):
            await use(router, who, 1)
        assert not await _no_marks(operator)
    async with operator_of(own_redis) as operator:
        assert await _no_marks(operator), "a router that ends leaves none"


async def _no_marks(operator: Any) -> bool:
    return not [name async for name in operator.scan_iter(_key("settled", "*"))]


async def test_a_file_keeps_no_marks_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.accounting.settled_marks.MARK_S", 0.0)
    database = Database(tmp_path / "usage.sqlite")
    own = account("own", engine_seconds_per_day=1)
    ledger = SqliteLedger(database, Clock())
    for _ in range(50):
        reserved = hold(own)
        await ledger.reserve(reserved)
        await ledger.settle(reserved, Cost(1, 0))
    rows = await database.change(
        lambda sql: sql.execute("SELECT count(*) FROM settled").fetchone()
    )
    assert rows == (1,)
    await database.aclose()


async def test_budgets_follow_a_failover(
    own_redis: RedisServer, redis_server: RedisServer
) -> None:
    """After a failover an empty Redis serves behind the address, while the old one stays up and refuses writes."""
    who = caller(engine_seconds_per_day=10e-6)
    async with relay_to(own_redis) as relay, a_router(relay.url) as router:
        await use(router, who, 6)
        async with operator_of(own_redis) as operator:
            await operator.execute_command(
                "REPLICAOF", "127.0.0.1", str(redis_server.port)
            )
        relay.target = redis_server
        await until(lambda: redis_server.port in relay.opened)
        await until(lambda: router._alone is None)
        assert await enters(router, who, 5) is None
        await use(router, who, 4)
        async with operator_of(redis_server) as operator:
            assert await operator.exists(_key("spent", who.accounts[0].id, DAY.day))


async def test_a_cluster_counts_budgets(tmp_path: Path) -> None:
    who = caller(engine_seconds_per_day=10e-6)
    with redis_cluster(tmp_path) as nodes:
        async with a_router(nodes[0].url) as first, a_router(nodes[1].url) as second:
            await use(first, who, 6)
            assert await enters(second, who, 5) is None
            await use(second, who, 4)
            await until(lambda: _knows_the_ledger(first) and _knows_the_ledger(second))
            assert await used(first, who) == 10
            assert await used(second, who) == 10
