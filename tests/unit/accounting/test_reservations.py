"""Reserving and settling: days and months that roll over, ledgers that go away, clients that leave, routers that die."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from calendar import timegm
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from router.accounting.budgets import (
    LEASE_S,
    BudgetUnknownError,
    Hold,
    NoPriceError,
    OverBudgetError,
    Reserved,
    periods,
    renews_at,
)
from router.accounting.database import Database
from router.accounting.ledgers import BudgetLedger, MemoryLedger, SqliteLedger
from router.accounting.redis_ledger import RedisLedger
from router.accounting.reservations import Reservations
from router.accounting.settings import BudgetSettings
from router.telemetry.record import Cost
from tests.conftest import RedisServer
from tests.unit.accounting.accounts import DAY, Clock, caller, enters
from tests.waiting import until, within

pytestmark = pytest.mark.anyio
NOON = timegm((2026, 11, 30, 12, 0, 0))


@asynccontextmanager
async def reserving(
    ledger: BudgetLedger,
    clock: Clock | None = None,
    *,
    priced: bool = True,
    serve_unknown: bool = False,
) -> AsyncIterator[Reservations]:
    overrides = {
        "replica_hour": 1 if priced else None,
        "while_unknown": "serve" if serve_unknown else "refuse",
    }
    reservations = Reservations(
        ledger, BudgetSettings.model_validate(overrides), clock or Clock()
    )
    try:
        yield reservations
    finally:
        await reservations.aclose()


async def test_months_and_days_roll_over() -> None:
    """A day's budget begins anew at midnight UTC, a month's with the month; a request counts in the day it began in."""
    clock = Clock(NOON)
    who = caller(engine_seconds_per_day=10e-6, engine_seconds_per_month=15e-6)
    async with reserving(MemoryLedger(), clock) as reservations:
        first = await enters(reservations, who, 10)
        assert first is not None
        with pytest.raises(
            OverBudgetError, match=r"0\.00001 engine-seconds a day"
        ) as over:
            await reservations.enter(who.accounts, Cost(1, 0))
        assert over.value.retry_after_s == 12 * 3600
        assert str(over.value.renews) == "2026-12-01 00:00:00+00:00"
        clock.now += 12 * 3600 + 1
        second = await enters(reservations, who, 10)
        assert second is not None
        await first.settle(Cost(8, 0))
        assert await enters(reservations, who, 1) is None
        clock.now += 86_400
        third = await enters(reservations, who, 5)
        assert third is not None
        with pytest.raises(OverBudgetError, match="a month") as over:
            await reservations.enter(who.accounts, Cost(1, 0))
        assert str(over.value.renews) == "2027-01-01 00:00:00+00:00"
        account = who.accounts[0].id
        today = await reservations.ledger.used([account], periods(NOON))
        assert [cost.engine_us for cost in today.values()] == [8, 8]
        tomorrow = await reservations.ledger.used([account], periods(NOON + 86_400))
        assert [cost.engine_us for cost in tomorrow.values()] == [10, 15]


@pytest.mark.parametrize(
    ("date", "day", "month"),
    [
        ((2026, 12, 31), "2027-01-01", "2027-01-01"),
        ((2028, 2, 28), "2028-02-29", "2028-03-01"),
    ],
)
def test_when_budgets_renew(date: tuple[int, int, int], day: str, month: str) -> None:
    """Budgets renew at the end of UTC days and months, also at the end of a year and of a leap year's February."""
    at = timegm((*date, 23, 59, 59))
    assert f"{renews_at('day', at):%Y-%m-%d}" == day
    assert f"{renews_at('month', at):%Y-%m-%d}" == month
    assert periods(at).day == f"{date[0]}-{date[1]:02}-{date[2]:02}"
    assert periods(at).month == f"{date[0]}-{date[1]:02}"


async def test_a_charge_is_at_most_what_was_reserved() -> None:
    who = caller(engine_seconds_per_day=10e-6)
    async with reserving(MemoryLedger()) as reservations:
        grant = await enters(reservations, who, 10)
        assert grant is not None
        assert await grant.settle(Cost(25, 3)) == Cost(10, 0)


async def test_money_without_a_price_is_refused() -> None:
    async with reserving(MemoryLedger(), priced=False) as reservations:
        with pytest.raises(NoPriceError, match=r"budgets\.replica_hour"):
            await reservations.enter(caller(money_per_day=1).accounts, Cost(1, 0))


class SlowLedger(MemoryLedger):
    """A ledger that answers once a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def reserve(self, hold: Hold) -> Reserved:
        self.is_asked.set()
        await within(self.may_answer.wait(), "the test to let the ledger answer")
        return await super().reserve(hold)


async def test_a_client_that_leaves_leaves_no_reservation() -> None:
    """Cancelled while the ledger is asked, a request gives back what it then gets."""
    who = caller(engine_seconds_per_day=10e-6)
    ledger = SlowLedger()
    async with reserving(ledger) as reservations:
        asking = asyncio.create_task(reservations.enter(who.accounts, Cost(10, 0)))
        await within(ledger.is_asked.wait(), "the ledger to be asked")
        asking.cancel()
        ledger.may_answer.set()
        await asyncio.gather(asking, return_exceptions=True)
        grant = await enters(reservations, who, 10)
        assert grant is not None


async def test_while_redis_is_away_one_router_counts_alone(
    own_redis: RedisServer,
) -> None:
    """It goes on from what it last knew, keeps to the budget, and pays what it owes when Redis is back."""
    who = caller(engine_seconds_per_day=10e-6)
    async with reserving(RedisLedger(own_redis.url)) as reservations:
        before = await enters(reservations, who, 4)
        open_request = await enters(reservations, who, 2)
        assert before is not None
        assert open_request is not None
        await before.settle(Cost(3, 0))
        # The router knows of 5 that are spent or reserved.
        assert await enters(reservations, who, 8) is None
        own_redis.pause()
        alone = await enters(reservations, who, 4)
        assert alone is not None
        assert await enters(reservations, who, 2) is None
        await alone.settle(Cost(2, 0))
        await open_request.settle(Cost(1, 0))
        own_redis.resume()
        await until(lambda: not reservations._owed and reservations._alone is None)
        own = who.accounts[0].id
        assert (await reservations.ledger.used([own], DAY))[own, DAY.day] == Cost(6, 0)


async def test_a_file_that_cannot_be_written_stops_no_request(tmp_path: Path) -> None:
    """If the settings allow it, the router counts alone, and writes the charges once the file can be written."""
    folder = tmp_path / "usage"
    folder.write_text("in the way")
    database = Database(folder / "usage.sqlite")
    who = caller(engine_seconds_per_day=10e-6)
    clock = Clock()
    async with reserving(SqliteLedger(database, clock), clock) as reservations:
        with pytest.raises(BudgetUnknownError, match=r"usage\.sqlite"):
            await enters(reservations, who, 1)
        assert reservations.notes
        assert "File exists" in database.fault
    async with reserving(
        SqliteLedger(database, clock), clock, serve_unknown=True
    ) as reservations:
        grant = await enters(reservations, who, 8)
        assert grant is not None
        assert await enters(reservations, who, 8) is None
        await grant.settle(Cost(6, 0))
        folder.unlink()
    own = who.accounts[0].id
    used = await SqliteLedger(database, clock).used([own], DAY)
    assert used[own, DAY.day] == Cost(6, 0)
    assert database.fault == ""
    assert reservations.notes == [
        f"the file {database.path}, which counts budgets, cannot be used"
    ]
    await database.aclose()


async def test_a_damaged_file_gives_no_budget_anew(tmp_path: Path) -> None:
    """Known accounts still count, others are refused; once a sound file is back in its place, it is used again."""
    path = tmp_path / "usage.sqlite"
    who = caller(engine_seconds_per_day=10e-6)
    database = Database(path)
    async with reserving(SqliteLedger(database), Clock()) as reservations:
        grant = await enters(reservations, who, 6)
        assert grant is not None
        await grant.settle(Cost(6, 0))
        assert await enters(reservations, who, 6) is None
        database.close()
        sound = path.read_bytes()
        path.write_bytes(b"garbage" * 1000)
        assert await enters(reservations, who, 6) is None
        with pytest.raises(BudgetUnknownError):
            await enters(reservations, caller(engine_seconds_per_day=10e-6), 1)
        path.write_bytes(sound)
        await until(lambda: not reservations.notes)
        new_caller = caller(engine_seconds_per_day=10e-6)
        assert await enters(reservations, new_caller, 1) is not None
    await database.aclose()


_DIES = """
import asyncio, sys
from pathlib import Path
from router.accounting.ledgers import SqliteLedger
from router.accounting.redis_ledger import RedisLedger
from router.accounting.database import Database
from router.accounting.budgets import Hold, Periods
from router.auth.api_keys import Account, Budget
from router.accounting.settings import BudgetSettings
from router.telemetry.record import Cost

async def main():
    where, name = sys.argv[1:]
    ledger = RedisLedger(where) if where.startswith("redis") else SqliteLedger(Database(Path(where)))
    own = Account(name, name, Budget(engine_seconds_per_day=1).limits())
    for n in range(100):
        hold = Hold(f"{name}-{n}", (own,), Periods("2026-11-24", "2026-11"), Cost(10_000, 0))
        assert (await ledger.reserve(hold)).denied is None
        if n % 2:
            await ledger.settle(hold, Cost(1, 0))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_a_killed_router_leaves_no_reservation_for_ever(
    kind: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """What it had settled stays charged; what it had reserved is free after the lease."""
    name = f"key:{secrets.token_hex(4)}"
    where = redis_server.url if kind == "redis" else str(tmp_path / "usage.sqlite")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _DIES, where, name),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert process.stdout is not None
    line = await within(process.stdout.readline(), "a line of the process")
    assert line == b"ready\n"
    process.send_signal(signal.SIGKILL)
    await within(process.wait(), "the process to end")
    if kind == "redis":
        ledger: RedisLedger | SqliteLedger = RedisLedger(where)
        assert (await ledger.used([name], DAY))[name, DAY.day] == Cost(500_050, 0)
        redis = Redis.from_url(where)
        ends = await redis.zrange(
            f"qarr:{{budgets}}:ends:{name}", 0, -1, withscores=True
        )
        assert len(ends) == 50
        assert all(end <= time.time() + LEASE_S for _, end in ends)
        await redis.aclose()
    else:
        database = Database(tmp_path / "usage.sqlite")
        clock = Clock(0)
        ledger = SqliteLedger(database, clock)
        clock.now = time.time()
        assert (await ledger.used([name], DAY))[name, DAY.day] == Cost(500_050, 0)
        clock.now += LEASE_S
        assert (await ledger.used([name], DAY))[name, DAY.day] == Cost(50, 0)
        await database.aclose()
    await ledger.aclose()


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_a_look_counts_nothing_twice(
    kind: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """While requests are reserved and settled, no look sees more than the budget."""
    in_redis = RedisLedger(redis_server.url)
    in_file = SqliteLedger(Database(tmp_path / "usage.sqlite"))
    ledger = in_redis if kind == "redis" else in_file
    who = caller(engine_seconds_per_day=300e-6)
    highest_us = 0
    account = who.accounts[0].id
    today = periods(Clock().now)

    async def used_us() -> int:
        return (await ledger.used([account], today))[account, today.day].engine_us

    async with reserving(ledger, Clock()) as reservations:

        async def client() -> None:
            while (grant := await enters(reservations, who, 10)) is not None:
                await grant.settle(Cost(1, 0))

        clients = asyncio.gather(*(client() for _ in range(5)))
        while not clients.done():
            highest_us = max(highest_us, await used_us())
        await clients
        assert 290 < await used_us() <= 300
    assert 0 < highest_us <= 300
