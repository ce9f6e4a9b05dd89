"""Ledgers of budgets: exact, atomic, and alike in memory, in a file and in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from router.accounting.budgets import LEASE_S, Hold
from router.accounting.database import Database
from router.accounting.ledgers import BudgetLedger, MemoryLedger, SqliteLedger
from router.accounting.redis_ledger import RedisLedger, _key
from router.auth.api_keys import Budget, Limit
from router.telemetry.record import Cost
from tests.conftest import RedisServer
from tests.unit.accounting.accounts import DAY, Clock, account, hold

pytestmark = pytest.mark.anyio
KINDS = ("memory", "sqlite", "redis")


@asynccontextmanager
async def ledger_of(
    kind: str, tmp_path: Path, redis: RedisServer, clock: Clock
) -> AsyncIterator[BudgetLedger]:
    database = Database(tmp_path / "usage.sqlite")
    made: dict[str, BudgetLedger] = {
        "memory": MemoryLedger(),
        "sqlite": SqliteLedger(database, clock),
    }
    ledger = RedisLedger(redis.url) if kind == "redis" else made[kind]
    yield ledger
    await ledger.aclose()
    await database.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_all_accounts_or_none(
    kind: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """A reservation beyond a team's budget reserves nothing on the key either; the answer names the budget and its use."""
    own = account("own", engine_seconds_per_day=10)
    team = account("team", money_per_month=0.000005)
    async with ledger_of(kind, tmp_path, redis_server, clock=Clock()) as ledger:
        first = hold(own, team, engine=7, money=4)
        second = hold(own, team, engine=7, money=2)
        assert (await ledger.reserve(first)).denied is None
        refused = await ledger.reserve(second)
        assert refused.denied == (team, team.limits[0])
        assert refused.used[team.id, DAY.month] == Cost(7, 4)
        await ledger.settle(first, Cost(5, 3))
        assert (await ledger.reserve(second)).denied is None
        await ledger.settle(second, Cost(6, 2))
        used = await ledger.used([own.id, team.id], DAY)
        assert set(used.values()) == {Cost(11, 5)}
        assert len(used) == 4


@pytest.mark.parametrize("kind", KINDS)
async def test_a_settlement_may_be_repeated(
    kind: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """Only the first counts, so a router that does not know whether it arrived may send it again."""
    own = account("own", engine_seconds_per_day=10)
    async with ledger_of(kind, tmp_path, redis_server, clock=Clock()) as ledger:
        reserved = hold(own, engine=8)
        await ledger.reserve(reserved)
        for _ in range(3):
            await ledger.settle(reserved, Cost(3, 0))
        assert (await ledger.used([own.id], DAY))[own.id, DAY.day] == Cost(3, 0)


async def test_reservations_of_dead_routers_end(tmp_path: Path) -> None:
    """A reservation that nobody renews ends with its lease; one that is renewed stays."""
    own = account("own", engine_seconds_per_day=10 / 1e6)
    clock = Clock()
    async with ledger_of("sqlite", tmp_path, None, clock=clock) as ledger:  # type: ignore[arg-type]
        dead = hold(own, engine=6)
        living = hold(own, engine=4)
        for reserved in (dead, living):
            assert (await ledger.reserve(reserved)).denied is None
        clock.now += LEASE_S - 1
        assert (await ledger.reserve(hold(own))).denied == (own, own.limits[0])
        await ledger.renew([living])
        clock.now += 2
        assert (await ledger.used([own.id], DAY))[own.id, DAY.day] == Cost(4, 0)
        assert (await ledger.reserve(hold(own, engine=6))).denied is None


async def test_reservations_of_dead_routers_end_in_redis(
    redis_server: RedisServer,
) -> None:
    """No test can move Redis's clock, so the end of the lease is set back instead."""
    own = account("own", engine_seconds_per_day=10 / 1e6)
    ledger = RedisLedger(redis_server.url)
    dead = hold(own, engine=10)
    await ledger.reserve(dead)
    assert (await ledger.reserve(hold(own))).denied == (own, own.limits[0])
    redis = Redis.from_url(redis_server.url)
    await redis.zadd(_key("ends", own.id), {dead.id: 1})
    assert (await ledger.used([own.id], DAY))[own.id, DAY.day] == Cost(0, 0)
    assert (await ledger.reserve(hold(own, engine=10))).denied is None
    assert await redis.hlen(_key("held", own.id)) == 1
    await redis.aclose()
    await ledger.aclose()


async def test_a_late_take_reserves_nothing(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """A reservation that its own settlement overtook on another connection is not held until its lease ends."""
    own = account("own", engine_seconds_per_day=10)
    async with ledger_of("redis", tmp_path, redis_server, clock=Clock()) as ledger:
        late = hold(own, engine=8)
        await ledger.settle(late, Cost(3, 0))
        await ledger.reserve(late)
        assert (await ledger.used([own.id], DAY))[own.id, DAY.day] == Cost(3, 0)


async def test_charges_outlive_the_process(tmp_path: Path) -> None:
    """A file that is opened again has what was spent, and only its owner may read it."""
    own = account("own", engine_seconds_per_day=10)
    for _ in range(2):
        async with ledger_of("sqlite", tmp_path, None, clock=Clock()) as ledger:  # type: ignore[arg-type]
            await ledger.settle(hold(own), Cost(3, 1))
    async with ledger_of("sqlite", tmp_path, None, clock=Clock()) as ledger:  # type: ignore[arg-type]
        assert (await ledger.used([own.id], DAY))[own.id, DAY.day] == Cost(6, 2)
    assert (tmp_path / "usage.sqlite").stat().st_mode & 0o777 == 0o600


# A step is an action (2 settles, others reserve), whose accounts, an amount, and which open reservation.
Step = tuple[int, int, int, int]
STEPS = st.lists(
    st.tuples(*(st.integers(0, highest) for highest in (2, 2, 40, 9))),
    max_size=40,
)


@settings(max_examples=60)
@given(steps=STEPS)
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_every_ledger_does_as_the_one_in_memory(
    kind: str,
    steps: list[Step],
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: RedisServer,
) -> None:
    """Whatever is reserved and settled, in any order, all ledgers answer alike, and no budget is ever exceeded."""
    budget = {"engine_seconds_per_day": 50 / 1e6, "money_per_month": 70 / 1e6}
    first = account("a0", **budget)
    second = account("a1", **budget)
    ids = [first.id, second.id]
    choices = [[first], [second], [first, second]]

    async def both() -> None:
        model = MemoryLedger()
        folder = tmp_path_factory.mktemp("ledger")
        async with ledger_of(kind, folder, redis_server, clock=Clock()) as ledger:
            open_holds: list[Hold] = []
            for action, whose, amount, which in steps:
                if action < 2:
                    wanted = hold(*choices[whose], engine=amount, money=2 * amount)
                    answer = await ledger.reserve(wanted)
                    model_answer = await model.reserve(wanted)
                    assert answer.denied == model_answer.denied
                    assert answer.used == model_answer.used
                    if answer.denied is None:
                        open_holds.append(wanted)
                elif open_holds:
                    ended = open_holds.pop(which % len(open_holds))
                    cost = ended.reserved.at_most(Cost(amount, amount))
                    await ledger.settle(ended, cost)
                    await model.settle(ended, cost)
                used = await ledger.used(ids, DAY)
                assert used == await model.used(ids, DAY)
                for spent in used.values():
                    assert spent.engine_us <= 50
                    assert spent.money_u <= 70

    asyncio.run(both())


def test_only_set_budgets_are_limits() -> None:
    """Amounts become millionths, and each has the name that the key file has for it."""
    limits = Budget(engine_seconds_per_day=1.5, money_per_month=0.1).limits()
    assert limits == (
        Limit("day", "engine_us", 1_500_000),
        Limit("month", "money_u", 100_000),
    )
    assert [limit.name for limit in limits] == [
        "engine_seconds_per_day",
        "money_per_month",
    ]
    assert [limit.text("EUR") for limit in limits] == [
        "1.5 engine-seconds a day",
        "0.1 EUR a month",
    ]
