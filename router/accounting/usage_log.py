"""What keys have used, by day, key, team and tier: counted after each request, written in batches, off its path.

A request's row is that of its tier; what other tiers computed of it is in its cost.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import sqlite3
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from functools import partial
from typing import Any, NamedTuple

from router.accounting.budgets import Used, periods, renews_at
from router.accounting.charging import Charging
from router.accounting.database import Database
from router.accounting.ledgers import BudgetLedger
from router.aio import Finishing
from router.auth.api_keys import MICRO, Account, Caller, Limit
from router.telemetry.record import RequestRecord, TierUsage
from tiers.background import Faults
from tiers.spec import OVERFLOW

log = logging.getLogger(f"qarr.{__name__}")
WRITE_S = 1.0
AT_ONCE = 100
KEEP_DAYS = 400


class Row(NamedTuple):
    """Whose usage: the UTC day, the key's id, its team, and the tier that served."""

    day: str
    key: str
    team: str
    tier: str


class Use(NamedTuple):
    """What was used.

    Attributes:
        engine_us: Charged; of keys without a budget, what would have been charged.
        highest_engine_us: What the same tokens would have cost at the highest precision.
        highest_money_u: The same in money.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    engine_us: int = 0
    money_u: int = 0
    highest_engine_us: int = 0
    highest_money_u: int = 0

    def plus(self, addend: Use) -> Use:
        return Use(*map(operator.add, self, addend))


class UsageLog:
    """Counts the requests of keys, and writes what they used; days are read from ``now``, in seconds since 1970."""

    def __init__(
        self,
        database: Database,
        charging: Charging,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._charging = charging
        self._now = now
        self._records: deque[RequestRecord] = deque()
        self._unwritten: dict[Row, Use] = defaultdict(Use)
        self._last_removal_day = ""  # The day on which old days were last removed.
        self._writing = Finishing()
        self.observers: list[Callable[[Row, Use], None]] = []

    def offer(self, record: RequestRecord) -> None:
        if record.key_id and (record.usage or record.served.overflow is not None):
            self._records.append(record)

    async def run(self) -> None:
        faults = Faults(repeats=False)
        while True:
            await asyncio.sleep(WRITE_S)
            try:
                await self.write()
            except (OSError, sqlite3.Error) as error:
                faults.log(error, "usage could not be written; trying again")

    async def aclose(self) -> None:
        """Write what has been counted since the last write. Call it when no request can end any more."""
        await self._writing.aclose()
        try:
            await self.write()
        except (OSError, sqlite3.Error) as error:
            log.error("the last usage could not be written: %s", error)  # noqa: TRY400  the text says enough

    async def write(self) -> None:
        """Write what has been counted, and once a day remove old days. ``OSError``, ``sqlite3.Error``: it is kept.

        A write that has begun is finished even if the caller is cancelled: if it fails, its counts must be kept.
        """
        fault = await self._writing.finish(self._write())
        if fault is not None:
            raise fault

    async def _write(self) -> OSError | sqlite3.Error | None:
        """Write what has been counted; return why it could not be written."""
        await self._count()
        if not self._unwritten:
            return None
        rows = self._unwritten
        self._unwritten = defaultdict(Use)
        now = self._now()
        today = periods(now).day
        oldest_kept_day = ""
        if self._last_removal_day != today:
            oldest_kept_day = periods(now - KEEP_DAYS * 86_400).day
        try:
            await self._database.change(partial(_add, rows, oldest_kept_day))
        except (OSError, sqlite3.Error) as error:
            for row, use in rows.items():
                self._unwritten[row] = self._unwritten[row].plus(use)
            return error
        self._last_removal_day = today
        return None

    async def _count(self) -> None:
        """Add up the records that have come, a few at a time: requests go on between them."""
        counted_records = 0
        while self._records:
            row, use = self._used(self._records.popleft())
            self._unwritten[row] = self._unwritten[row].plus(use)
            for observe in self.observers:
                observe(row, use)
            counted_records += 1
            if counted_records % AT_ONCE == 0:
                await asyncio.sleep(0)

    def _used(self, record: RequestRecord) -> tuple[Row, Use]:
        tokens = record.tokens
        cached_tokens = tokens.cached or 0
        row = Row(
            periods(record.at).day, key=record.key_id, team=record.team, tier=OVERFLOW
        )
        use = Use(
            1,
            prompt_tokens=tokens.prompt,
            cached_tokens=cached_tokens,
            output_tokens=tokens.output,
        )
        if not record.usage:
            return row, use
        pricing = self._charging.pricing
        cost = record.cost
        if cost is None:
            cost = pricing.cost(record.decision, record.usage)
        usage_at_highest = TierUsage(
            pricing.highest,
            prompt=tokens.prompt,
            cached=cached_tokens,
            output=tokens.output,
        )
        highest_cost = pricing.cost(record.decision, (usage_at_highest,))
        row = row._replace(tier=str(record.served.tier or record.usage[-1].tier))
        use = use._replace(
            engine_us=cost.engine_us,
            money_u=cost.money_u,
            highest_engine_us=highest_cost.engine_us,
            highest_money_u=highest_cost.money_u,
        )
        return row, use


def _add(
    rows: Mapping[Row, Use], oldest_kept_day: str, sql: sqlite3.Connection
) -> None:
    """Add what was used to the file; remove the days before the oldest one that is kept, unless it is empty."""
    changes = ", ".join(f"{name} = {name} + excluded.{name}" for name in Use._fields)
    column_count = len(Row._fields) + len(Use._fields)
    placeholders = ", ".join("?" * column_count)
    insert = f"INSERT INTO usage VALUES ({placeholders})"  # noqa: S608
    insert += f" ON CONFLICT (day, key, team, tier) DO UPDATE SET {changes}"
    sql.executemany(insert, [(*row, *use) for row, use in rows.items()])
    if oldest_kept_day:
        sql.execute("DELETE FROM usage WHERE day < ?", (oldest_kept_day,))


def read_usage(first: str, last: str, sql: sqlite3.Connection) -> list[tuple[Row, Use]]:
    query = (
        "SELECT * FROM usage WHERE day >= ? AND day <= ? ORDER BY day, key, team, tier"
    )
    rows = sql.execute(query, (first, last or "9999-12-31")).fetchall()
    return [(Row(*row[:4]), Use(*row[4:])) for row in rows]


def render_row(
    row: Row, use: Use, names: Mapping[str, str], *, priced: bool
) -> dict[str, Any]:
    """Return a row as JSON values, in units of the currency and of seconds; money only where there is a price."""
    money = None
    highest_money = None
    if priced:
        money = use.money_u / MICRO
        highest_money = use.highest_money_u / MICRO
    return {
        "day": row.day,
        "key": row.key,
        "name": names.get(row.key, ""),
        "team": row.team,
        "tier": row.tier,
        "requests": use.requests,
        "prompt_tokens": use.prompt_tokens,
        "cached_tokens": use.cached_tokens,
        "output_tokens": use.output_tokens,
        "engine_seconds": use.engine_us / MICRO,
        "highest_engine_seconds": use.highest_engine_us / MICRO,
        "money": money,
        "highest_money": highest_money,
    }


async def used_budgets(
    ledger: BudgetLedger, callers: Sequence[Caller], at: float
) -> list[dict[str, Any]]:
    """Return how far callers' budgets are used at a time (seconds since 1970), as JSON values; of each team once."""
    account_owners: dict[str, tuple[Account, Caller]] = {}
    for caller in callers:
        for account in caller.accounts:
            account_owners[account.id] = (account, caller)
    current_periods = periods(at)
    used = Used()
    if account_owners:
        used = await ledger.used(list(account_owners), current_periods)
    budgets = []
    for account, caller in account_owners.values():
        for limit in account.limits:
            period = getattr(current_periods, limit.span)
            used_cost = used[account.id, period]
            used_amount: int = getattr(used_cost, limit.unit)
            budgets.append(
                _render_budget(
                    account, caller, limit=limit, used_amount=used_amount, at=at
                )
            )
    return budgets


def _render_budget(
    account: Account, caller: Caller, limit: Limit, used_amount: int, at: float
) -> dict[str, Any]:
    key_id = None
    key_name = None
    if account.id.startswith("key:"):
        key_id = caller.key_id
        key_name = caller.name
    return {
        "key": key_id,
        "name": key_name,
        "team": caller.team or None,
        "budget": limit.name,
        "limit": limit.amount / MICRO,
        "used": used_amount / MICRO,
        "renews": f"{renews_at(limit.span, at):%Y-%m-%dT%H:%M:%SZ}",
    }


def summed(rows: Iterable[tuple[Row, Use]]) -> dict[tuple[str, str], Use]:
    sums: dict[tuple[str, str], Use] = defaultdict(Use)
    for row, use in rows:
        owner = (row.key, row.team)
        sums[owner] = sums[owner].plus(use)
    return sums


def day_of(text: str) -> str:
    """Return a day in the form in which it is kept; ``ValueError`` if the text is no day, or has another form."""
    if date.fromisoformat(text).isoformat() != text:
        raise ValueError(text)
    return text
