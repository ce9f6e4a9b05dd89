"""Ledgers of budgets: what accounts have spent in each day and month, and what open requests have reserved.

A request reserves the most that it may cost, all or nothing, and settles with what it used. Each of these is one atomic
change. A settlement may be repeated: only the first counts. A reservation ends with its lease, which living routers renew.
"""

from __future__ import annotations

import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from router.accounting.budgets import Hold, Periods, Reserved, Used
from router.accounting.database import Database
from router.auth.api_keys import Account, Span, Unit
from router.redis_link import REDIS_TIMEOUT_S, connect, read_script
from router.settings import Settings
from router.telemetry.record import FREE, Cost

LEASE_S = 180.0  # after which the reservation of a dead router is free again
SETTLED_KEPT_S = 86_400  # for which a repeated settlement is known
SPENT_KEPT_S = 70 * 86_400  # of a period; the longest is a month
REDIS_CONNECTIONS = 8


class MemoryLedger:
    """Counts in this process, on top of what is known to be used elsewhere."""

    timeout_s = 2.0
    place = "memory"

    def __init__(self, known: Mapping[tuple[str, str], Cost] | None = None) -> None:
        self._spent: Used = defaultdict(Cost, known or {})
        self._holds: dict[str, Hold] = {}

    async def reserve(self, hold: Hold) -> Reserved:
        used = await self.used([account.id for account in hold.accounts], hold.periods)
        denied = hold.broken(used)
        if denied is None:
            self._holds[hold.id] = hold
        return Reserved(used, denied)

    async def settle(self, hold: Hold, cost: Cost) -> None:
        if self._holds.pop(hold.id, None) is not None:
            for place in hold.places:
                self._spent[place] = self._spent[place].plus(cost)

    async def renew(self, holds: Iterable[Hold]) -> None:
        """Extend the leases of reservations; here nothing has a lease."""

    async def used(self, accounts: Iterable[str], periods: Periods) -> Used:
        used = {(account, period): self._spent[account, period] for account in accounts for period in periods}
        for hold in self._holds.values():
            for place in used.keys() & hold.places:
                used[place] = used[place].plus(hold.reserved)
        return used

    async def aclose(self) -> None:
        """Close what is open."""


class SqliteLedger:
    """Counts in a file, for all processes of one machine, with one clock (seconds since 1970), and over restarts."""

    timeout_s = 30.0  # the machine's own disk is slow, if anything, not away

    def __init__(self, database: Database, now: Callable[[], float] = time.time) -> None:
        self._database, self._now = database, now
        self.place = f"the file {database.path}"

    async def reserve(self, hold: Hold) -> Reserved:
        ids = [account.id for account in hold.accounts]

        def work(sql: sqlite3.Connection) -> Reserved:
            now = self._now()
            used = _used(sql, ids, hold.periods, now)
            denied = hold.broken(used)
            if denied is None:
                rows = [(account, hold.id, *hold.periods, *hold.reserved, now + LEASE_S) for account in ids]
                sql.executemany("INSERT INTO held VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            return Reserved(used, denied)

        return await self._database.change(work)

    async def settle(self, hold: Hold, cost: Cost) -> None:
        def work(sql: sqlite3.Connection) -> None:
            if not sql.execute("INSERT OR IGNORE INTO settled VALUES (?, ?)", (hold.id, self._now())).rowcount:
                return
            sql.executemany("DELETE FROM held WHERE account = ? AND id = ?", [(a.id, hold.id) for a in hold.accounts])
            sql.executemany(
                "INSERT INTO spent VALUES (?, ?, ?, ?) ON CONFLICT (account, period) DO UPDATE SET "
                "engine_us = engine_us + excluded.engine_us, money_u = money_u + excluded.money_u",
                [(*place, *cost) for place in hold.places],
            )

        await self._database.change(work)

    async def renew(self, holds: Iterable[Hold]) -> None:
        rows = [(account.id, hold.id) for hold in holds for account in hold.accounts]

        def work(sql: sqlite3.Connection) -> None:
            now = self._now()
            change = "UPDATE held SET ends = ? WHERE account = ? AND id = ?"
            sql.executemany(change, [(now + LEASE_S, *row) for row in rows])
            sql.execute("DELETE FROM held WHERE ends < ?", (now,))
            sql.execute("DELETE FROM settled WHERE at < ?", (now - SETTLED_KEPT_S,))
            oldest = time.strftime("%Y-%m", time.gmtime(now - SPENT_KEPT_S))
            sql.execute("DELETE FROM spent WHERE period < ?", (oldest,))

        await self._database.change(work)

    async def used(self, accounts: Iterable[str], periods: Periods) -> Used:
        asked = list(accounts)
        return await self._database.change(lambda sql: _used(sql, asked, periods, self._now()))

    async def aclose(self) -> None:
        """See ``MemoryLedger``: the file is closed by who opened it."""


def _used(sql: sqlite3.Connection, accounts: Iterable[str], periods: Periods, now: float) -> Used:
    query = (
        "SELECT coalesce(sum(engine_us), 0), coalesce(sum(money_u), 0) FROM ("
        "SELECT engine_us, money_u FROM spent WHERE account = :account AND period = :period UNION ALL "
        "SELECT engine_us, money_u FROM held WHERE account = :account AND ends >= :now AND :period IN (day, month))"
    )
    places = [(account, period) for account in accounts for period in periods]
    return {
        place: Cost(*sql.execute(query, {"account": place[0], "period": place[1], "now": now}).fetchone())
        for place in places
    }


_ORDER: tuple[tuple[Span, Unit], ...] = (
    ("day", "engine_us"),
    ("day", "money_u"),
    ("month", "engine_us"),
    ("month", "money_u"),
)


class RedisLedger:
    """Counts in Redis, for several routers. Every change is one script, which Redis runs atomically."""

    timeout_s = REDIS_TIMEOUT_S
    place = "Redis (state.redis_url)"

    def __init__(self, url: str) -> None:
        self._redis = connect(url, REDIS_CONNECTIONS)
        self._take, self._settle, self._renew = (
            self._redis.register_script(read_script(__file__, f"budget_{name}.lua"))
            for name in ("reserve", "settle", "renew")
        )

    async def reserve(self, hold: Hold) -> Reserved:
        most = {(a.id, limit[0], limit[1]): limit.amount * hold.times for a in hold.accounts for limit in a.limits}
        limits = [most.get((account.id, span, unit), -1) for account in hold.accounts for span, unit in _ORDER]
        args = [hold.id, *hold.reserved, *hold.periods, LEASE_S, *limits]
        denied, *told = await self._take(keys=_names(hold), args=args)
        pairs = zip(map(int, told[::2]), map(int, told[1::2]), strict=True)
        used = {place: Cost(*pair) for place, pair in zip(hold.places, pairs, strict=True)}
        if not denied:
            return Reserved(used, None)
        account, which = hold.accounts[(denied - 1) // 4], _ORDER[(denied - 1) % 4]
        return Reserved(used, next((account, limit) for limit in account.limits if limit[:2] == which))

    async def settle(self, hold: Hold, cost: Cost) -> None:
        await self._settle(keys=_names(hold), args=[hold.id, *cost, SETTLED_KEPT_S, SPENT_KEPT_S])

    async def renew(self, holds: Iterable[Hold]) -> None:
        ids: dict[str, list[str]] = defaultdict(list)
        for hold in holds:
            for account in hold.accounts:
                ids[account.id].append(hold.id)
        for name, held in ids.items():
            await self._renew(keys=[_name("ends", name)], args=[LEASE_S, *held])

    async def used(self, accounts: Iterable[str], periods: Periods) -> Used:
        used = Used()
        for account in accounts:
            used |= (await self.reserve(Hold("", (Account(account, "", ()),), periods, FREE))).used
        return used

    async def aclose(self) -> None:
        await self._redis.aclose()


def _name(*parts: str) -> str:
    """Return the name of a key in Redis; the braces keep all on one node of a cluster."""
    return ":".join(("qarr", "{budgets}", *parts))


def _names(hold: Hold) -> list[str]:
    found = [_name("settled", hold.id)]
    for account in hold.accounts:
        found += [_name("spent", account.id, period) for period in hold.periods]
        found += [_name("held", account.id), _name("ends", account.id)]
    return found


BudgetLedger = MemoryLedger | SqliteLedger | RedisLedger


def ledger_of(settings: Settings, database: Database) -> BudgetLedger:
    """Return where budgets are counted: in Redis if routers share one, else in the file."""
    redis_url = settings.state.redis_url.get_secret_value()
    return RedisLedger(redis_url) if redis_url else SqliteLedger(database)
