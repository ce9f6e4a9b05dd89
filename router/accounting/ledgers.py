"""Ledgers of budgets: what accounts have spent in each day and month, and what open requests have reserved.

A request reserves the most that it may cost, all or nothing, and settles with what it used. Each of these is one atomic
change. A settlement may be repeated: only the first counts. So that it is known, a settlement leaves a mark, which the next
one of the same router takes away once the first was answered. A reservation ends with its lease, which living routers renew.
"""

from __future__ import annotations

import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import product

from router.accounting.budgets import LEASE_S, Hold, Periods, Reserved, Used
from router.accounting.database import Database
from router.accounting.redis_ledger import RedisLedger
from router.accounting.settled_marks import SettledMarks
from router.settings import Settings
from router.telemetry.record import Cost

# The settlements of a router that died are known for this time.
SETTLED_KEPT_S = 86_400
# What was spent is kept longer than the longest period, a month.
SPENT_KEPT_S = 70 * 86_400


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

    async def renew(self, holds: Iterable[Hold], *, restore: bool = False) -> None:
        """Extend the leases of reservations; here nothing has a lease."""

    async def is_complete(self, _periods: Periods) -> bool:
        """Return whether the ledger has all that is known; here it always does."""
        return True

    async def tidy(self) -> None:
        """Do what is due each second; here nothing is."""

    async def used(self, accounts: Iterable[str], periods: Periods) -> Used:
        used = {place: self._spent[place] for place in product(accounts, periods)}
        for hold in self._holds.values():
            for place in used.keys() & hold.places:
                used[place] = used[place].plus(hold.reserved)
        return used

    async def aclose(self) -> None:
        """Close what is open."""


class SqliteLedger:
    """Counts in a file, for all processes of one machine, with one clock (seconds since 1970), and over restarts."""

    timeout_s = 30.0  # The machine's own disk may be slow, but it does not go away.

    def __init__(
        self, database: Database, now: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._now = now
        self._marks = SettledMarks()
        self.place = f"the file {database.path}"

    async def reserve(self, hold: Hold) -> Reserved:
        account_ids = [account.id for account in hold.accounts]

        def reserve_in(sql: sqlite3.Connection) -> Reserved:
            now = self._now()
            used = _used(sql, account_ids, periods=hold.periods, now=now)
            denied = hold.broken(used)
            if denied is None:
                columns = (hold.id, *hold.periods, *hold.reserved, now + LEASE_S)
                rows = [(account_id, *columns) for account_id in account_ids]
                sql.executemany("INSERT INTO held VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            return Reserved(used, denied)

        return await self._database.change(reserve_in)

    async def settle(self, hold: Hold, cost: Cost) -> None:
        due_settlements = [(settlement,) for settlement in self._marks.pop_due()]
        held_rows = [(account.id, hold.id) for account in hold.accounts]

        def settle_in(sql: sqlite3.Connection) -> None:
            sql.executemany("DELETE FROM settled WHERE id = ?", due_settlements)
            mark = sql.execute(
                "INSERT OR IGNORE INTO settled VALUES (?, ?)", (hold.id, self._now())
            )
            is_repeated = not mark.rowcount
            if is_repeated:
                return
            sql.executemany("DELETE FROM held WHERE account = ? AND id = ?", held_rows)
            sql.executemany(
                "INSERT INTO spent VALUES (?, ?, ?, ?) ON CONFLICT (account, period) DO UPDATE SET "
                "engine_us = engine_us + excluded.engine_us, money_u = money_u + excluded.money_u",
                [(*place, *cost) for place in hold.places],
            )

        await self._database.change(settle_in)
        self._marks.add(hold.id)

    async def renew(self, holds: Iterable[Hold], *, restore: bool = False) -> None:  # noqa: ARG002  nothing is lost
        rows: list[tuple[str, str]] = []
        for hold in holds:
            rows += [(account.id, hold.id) for account in hold.accounts]

        def renew_in(sql: sqlite3.Connection) -> None:
            now = self._now()
            extension = "UPDATE held SET ends = ? WHERE account = ? AND id = ?"
            sql.executemany(extension, [(now + LEASE_S, *row) for row in rows])
            sql.execute("DELETE FROM held WHERE ends < ?", (now,))
            sql.execute("DELETE FROM settled WHERE at < ?", (now - SETTLED_KEPT_S,))
            oldest_month = time.strftime("%Y-%m", time.gmtime(now - SPENT_KEPT_S))
            sql.execute("DELETE FROM spent WHERE period < ?", (oldest_month,))

        await self._database.change(renew_in)

    async def is_complete(self, _periods: Periods) -> bool:
        """Return that nothing is missing: the file itself is what is known."""
        return True

    async def tidy(self) -> None:
        """Do nothing: marks go with later settlements."""

    async def used(self, accounts: Iterable[str], periods: Periods) -> Used:
        account_ids = list(accounts)
        return await self._database.change(
            lambda sql: _used(sql, account_ids, periods=periods, now=self._now())
        )

    async def aclose(self) -> None:
        """Do nothing: whoever opened the file closes it."""


def _used(
    connection: sqlite3.Connection,
    accounts: Iterable[str],
    periods: Periods,
    now: float,
) -> Used:
    used_query = (
        "SELECT coalesce(sum(engine_us), 0), coalesce(sum(money_u), 0) FROM ("
        "SELECT engine_us, money_u FROM spent WHERE account = :account AND period = :period UNION ALL "
        "SELECT engine_us, money_u FROM held WHERE account = :account AND ends >= :now AND :period IN (day, month))"
    )
    used_amounts = Used()
    for account_id, period in product(accounts, periods):
        values = connection.execute(
            used_query, {"account": account_id, "period": period, "now": now}
        ).fetchone()
        used_amounts[account_id, period] = Cost(*values)
    return used_amounts


BudgetLedger = MemoryLedger | SqliteLedger | RedisLedger


def ledger_of(settings: Settings, database: Database) -> BudgetLedger:
    """Return where budgets are counted: in Redis if routers share one, else in the file."""
    redis_url = settings.state.redis_url.get_secret_value()
    if redis_url:
        return RedisLedger(redis_url, database)
    return SqliteLedger(database)
