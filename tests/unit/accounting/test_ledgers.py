"""Ledgers of budgets: exact, atomic, and alike in memory, in a file and in a real Redis."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from router.accounting.budgets import LEASE_S, Hold, Periods
from router.accounting.database import Database
from router.accounting.ledgers import BudgetLedger, MemoryLedger, SqliteLedger
from router.accounting.redis_ledger import RedisLedger, _key
from router.auth.api_keys import Account, Budget, Limit
from router.telemetry.record import Cost
from tests.conftest import RedisServer

pytestmark = pytest.mark.anyio
DAY = Periods("2026-11-24", "2026-11")
KINDS = ("memory", "sqlite", "redis")


class Clock:
    """A clock that tests move."""

    def __init__(self, now: float = 1_795_521_600.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def account(name: str, **budget: float) -> Account:
    return Account(
        f"key:{name}-{secrets.token_hex(4)}", name, Budget(**budget).limits()
    )


def hold(
    *accounts: Account, engine: int = 1, money: int = 0, at: Periods = DAY
) -> Hold:
    return Hold(secrets.token_hex(8), accounts, at, Cost(engine, money))


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
    """What breaks a bound of a team leaves nothing on the key either; the answer names the bound and what is used."""
    own, team = (
        account("own", engine_seconds_per_day=10),
        account("team", money_per_month=0.000005),
    )
    async with ledger_of(kind, tmp_path, redis_server, Clock()) as ledger:
        first, second = (
            hold(own, team, engine=7, money=4),
            hold(own, team, engine=7, money=2),
        )
        assert (await ledger.reserve(first)).denied is None
        taken = await ledger.reserve(second)
        assert taken.denied == (team, team.limits[0])
        assert taken.used[team.id, DAY.month] == Cost(7, 4)
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
    async with ledger_of(kind, tmp_path, redis_server, Clock()) as ledger:
        one = hold(own, engine=8)
        await ledger.reserve(one)
        for _ in range(3):
            await ledger.settle(one, Cost(3, 0))
        assert (await ledger.used([own.id], DAY))[own.id, DAY.day] == Cost(3, 0)


async def test_reservations_of_dead_routers_end(tmp_path: Path) -> None:
    """A reservation that nobody renews is free after its lease, one that is renewed is not, and its row goes."""
    own, clock = account("own", engine_seconds_per_day=10 / 1e6), Clock()
    async with ledger_of("sqlite", tmp_path, None, clock) as ledger:  # type: ignore[arg-type]
        dead, living = hold(own, engine=6), hold(own, engine=4)
        for each in (dead, living):
            assert (await ledger.reserve(each)).denied is None
        clock.now += LEASE_S - 1
        assert (await ledger.reserve(hold(own))).denied == (own, own.limits[0])
        await ledger.renew([living])
        clock.now += 2
        assert (await ledger.used([own.id], DAY))[own.id, DAY.day] == Cost(4, 0)
        assert (await ledger.reserve(hold(own, engine=6))).denied is None


async def test_reservations_of_dead_routers_end_in_redis(
    redis_server: RedisServer,
) -> None:
    """The same in Redis, whose clock no test moves: the lease's end is set back instead."""
    own, ledger = (
        account("own", engine_seconds_per_day=10 / 1e6),
        RedisLedger(redis_server.url),
    )
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
    """A request whose settlement overtook it on another connection does not hold a reservation for the rest of its lease."""
    own = account("own", engine_seconds_per_day=10)
    async with ledger_of("redis", tmp_path, redis_server, Clock()) as ledger:
        late = hold(own, engine=8)
        await ledger.settle(late, Cost(3, 0))
        await ledger.reserve(late)
        assert (await ledger.used([own.id], DAY))[own.id, DAY.day] == Cost(3, 0)


async def test_charges_outlive_the_process(tmp_path: Path) -> None:
    """A file that is opened again has what was spent, and who may read it is its owner alone."""
    own = account("own", engine_seconds_per_day=10)
    for _ in range(2):
        async with ledger_of("sqlite", tmp_path, None, Clock()) as ledger:  # type: ignore[arg-type]
            await ledger.settle(hold(own), Cost(3, 1))
    async with ledger_of("sqlite", tmp_path, None, Clock()) as ledger:  # type: ignore[arg-type]
        assert (await ledger.used([own.id], DAY))[own.id, DAY.day] == Cost(6, 2)
    assert (tmp_path / "usage.sqlite").stat().st_mode & 0o777 == 0o600


# what to do, for whom, how much, which of the open ones
Step = tuple[int, int, int, int]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 2), st.integers(0, 40), st.integers(0, 9)
    ),
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
    """Whatever is taken and settled in whatever order, all ledgers answer alike, and no bound is ever broken."""
    who = [
        account(f"a{n}", engine_seconds_per_day=50 / 1e6, money_per_month=70 / 1e6)
        for n in range(2)
    ]
    choices = [who[:1], who[1:], who]

    async def both() -> None:
        model = MemoryLedger()
        folder = tmp_path_factory.mktemp("ledger")
        async with ledger_of(kind, folder, redis_server, Clock()) as ledger:
            open_: list[Hold] = []
            for what, whose, amount, which in steps:
                accounts = choices[whose]
                if what < 2:
                    asked = hold(*accounts, engine=amount, money=2 * amount)
                    taken, told = [
                        await each.reserve(asked) for each in (ledger, model)
                    ]
                    assert (taken.denied, taken.used) == (told.denied, told.used)
                    open_ += [asked] * (taken.denied is None)
                elif open_:
                    ended = open_.pop(which % len(open_))
                    for each in (ledger, model):
                        await each.settle(
                            ended, ended.reserved.at_most(Cost(amount, amount))
                        )
                used = await ledger.used([a.id for a in who], DAY)
                assert used == await model.used([a.id for a in who], DAY)
                assert all(
                    there.engine_us <= 50 and there.money_u <= 70
                    for there in used.values()
                )

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
