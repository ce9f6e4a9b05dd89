"""The ledger of budgets in Redis, for several routers, with a copy of what it had in each router's file.

A Redis may come back empty, as an older copy, or without what it evicted. Each router remembers what it last saw spent, over
its own restarts too, and shows it with each command, and the scripts restore what is missing (``budget_spent.lua``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from router.accounting.budgets import LEASE_S, Hold, Periods, Reserved, Used
from router.accounting.database import Database
from router.accounting.settled_marks import SettledMarks
from router.auth.api_keys import Account, Limit, Span, Unit
from router.redis_link import REDIS_TIMEOUT_S, UNAVAILABLE, RedisLink, RedisUse, Script
from router.telemetry.record import FREE, Cost
from tiers.background import Faults

log = logging.getLogger(f"qarr.{__name__}")
# Counted from the last settlement: a request that began before midnight may end after it.
DAY_KEPT_S = 3 * 86_400
MONTH_KEPT_S = 40 * 86_400
MARK_KEPT_S = 86_400  # The marks of a router that died are kept for this time.
# Within this time every router notices that the ledger is another one, and shows it what it saw.
YOUNG_S = 2.0
REDIS_CONNECTIONS = 8
Place = tuple[str, str]  # An account's id and a period.
# An account's id, a period, and the fields of ``SeenSpending``.
CopyRow = tuple[str, str, str, int, int]
_TOO_LATE = -1  # The reservation's script answers with it after the deadline.
# What ``budget_reserve.lua`` answers for each account.
_USED_VALUES = 4  # Two amounts for the day and two for the month.
_SPENT_VALUES = 3  # The fields of ``SeenSpending``, for a day or a month.
_ACCOUNT_VALUES = _USED_VALUES + 2 * _SPENT_VALUES
_LIMITS: tuple[tuple[Span, Unit], ...] = (
    ("day", "engine_us"),
    ("day", "money_u"),
    ("month", "engine_us"),
    ("month", "money_u"),
)


class SeenSpending(NamedTuple):
    """What a router last saw spent, and the name of the hash that had it, which is empty if there was none."""

    ledger: str = ""
    spent: Cost = FREE


NOTHING_SEEN = SeenSpending()


class RedisLedger:
    """Counts in Redis, for several routers. Every change is one script, which Redis runs atomically."""

    timeout_s = REDIS_TIMEOUT_S
    place = "Redis (state.redis_url)"

    def __init__(self, url: str, database: Database | None = None) -> None:
        self.link = RedisLink(url, RedisUse.BUDGETS, REDIS_CONNECTIONS)
        self.restored = 0  # How many accounts' periods Redis had lost.
        self._copy = LedgerCopy(database)
        self._marks = SettledMarks()
        # The name of the ledger, which changes when Redis loses it; empty until Redis is asked.
        self._name = ""
        self._is_young = False
        self._has_restored_file = False
        self._reserve = Script.read(__file__, "budget_spent.lua", "budget_reserve.lua")
        self._settle = Script.read(__file__, "budget_spent.lua", "budget_settle.lua")
        self._renew = Script.read(__file__, "budget_renew.lua")

    async def reserve(self, hold: Hold) -> Reserved:
        if not self._name:
            self._name, _ = await self.link.name_of(_key("ledger"))
        gives_up_at = time.monotonic() + REDIS_TIMEOUT_S
        names = _names(hold)
        seen = await self._copy.seen(hold.places)
        # If Redis' clock was set ahead, the second attempt knows its time.
        for _ in range(2):
            deadline = await self.link.time_at(gives_up_at, names[0])
            answer = await self.link.run(
                self._reserve, names, [deadline, *_reserve_args(hold, seen)]
            )
            redis_time, denied, *values = answer
            self.link.learn_time(float(redis_time), names[0])
            if denied != _TOO_LATE:
                used = self._read_used(hold, values)
                return Reserved(used, _broken_limit(hold, denied))
        raise TimeoutError

    async def settle(self, hold: Hold, cost: Cost) -> None:
        seen = await self._copy.seen(hold.places)
        names = [*_names(hold), *map(_mark, self._marks.pop_due())]
        values = await self.link.run(
            self._settle, names, _settle_args(hold, cost, seen)
        )
        self._marks.add(hold.id)
        for place, spent in zip(
            hold.places, _groups(values, _SPENT_VALUES), strict=True
        ):
            self._note(place, spent)

    async def renew(self, holds: Iterable[Hold], *, restore: bool = False) -> None:
        """Let reservations be held for another lease; ``restore``: hold those too that Redis has lost."""
        holds_by_account: dict[str, list[str]] = defaultdict(list)
        for hold in holds:
            amounts_and_periods = " ".join(map(str, (*hold.reserved, *hold.periods)))
            for account in hold.accounts:
                holds_by_account[account.id] += [hold.id, amounts_and_periods]
        lease_mode = "restore" if restore else ""
        for account_id, account_holds in holds_by_account.items():
            names = [_key("held", account_id), _key("ends", account_id)]
            await self.link.run(
                self._renew, names, [LEASE_S, lease_mode, *account_holds]
            )

    async def used(self, accounts: Iterable[str], periods: Periods) -> Used:
        used = Used()
        for account_id in accounts:
            account = Account(account_id, title="", limits=())
            empty_hold = Hold("", (account,), periods=periods, reserved=FREE)
            reserved = await self.reserve(empty_hold)
            used |= reserved.used
        return used

    async def is_complete(self, periods: Periods) -> bool:
        """Restore what Redis has lost; return whether all other routers have had time to restore what they saw."""
        self._copy.forget_before(periods.month)
        name, age_s = await self.link.name_of(_key("ledger"))
        is_another = bool(self._name) and name != self._name
        if is_another or (self._copy.began_with_any and not self._has_restored_file):
            self._is_young = True
            # Each command shows Redis what this router saw, and so restores it.
            await self.used(await self._copy.accounts(periods), periods)
            self._has_restored_file = True
        self._name = name
        if age_s > YOUNG_S:
            self._is_young = False
        return not self._is_young

    async def tidy(self) -> None:
        """Take away marks that nobody needs, and write the copy."""
        if due_settlements := self._marks.pop_due():
            await self.link.execute("DEL", *map(_mark, due_settlements))
        await self._copy.write()

    async def aclose(self) -> None:
        await self._copy.write()
        try:
            if settlements := self._marks.pop_all():
                await self.link.execute("DEL", *map(_mark, settlements))
        except UNAVAILABLE:
            log.info(
                "Redis does not answer: marks of %d settled requests expire by themselves",
                len(settlements),
            )
        await self.link.aclose()

    def _read_used(self, hold: Hold, values: list[str]) -> Used:
        """Read an answer of ``budget_reserve.lua``: for each account four amounts used, and twice what was spent."""
        used = Used()
        for account, account_values in zip(
            hold.accounts, _groups(values, _ACCOUNT_VALUES), strict=True
        ):
            amounts = _groups(account_values[:_USED_VALUES], 2)
            spent = _groups(account_values[_USED_VALUES:], _SPENT_VALUES)
            for period, period_amounts, period_spent in zip(
                hold.periods, amounts, spent, strict=True
            ):
                engine_us, money_u = period_amounts
                used[account.id, period] = Cost(int(engine_us), int(money_u))
                self._note((account.id, period), period_spent)
        return used

    def _note(self, place: Place, values: list[str]) -> None:
        """Remember what Redis has of a place; count it, and say so once, if Redis had lost it."""
        ledger, engine_us, money_u = values
        if not ledger:
            return
        had_lost_it = self._copy.note(
            place, SeenSpending(ledger, Cost(int(engine_us), int(money_u)))
        )
        if had_lost_it:
            if not self.restored:
                log.warning(
                    "Redis has lost what budgets have used; it is restored from what this router knows"
                )
            self.restored += 1


class LedgerCopy:
    """What a router last saw spent, kept in its file too."""

    def __init__(self, database: Database | None) -> None:
        self._database = database
        self._seen: dict[Place, SeenSpending] = {}
        self._unwritten: set[Place] = set()
        self._month = ""  # Nothing earlier than this month is remembered.
        self.began_with_any = False  # Whether the file had anything when it was read.
        self._is_read = database is None
        self._reading = asyncio.Lock()
        self._faults = Faults(repeats=False)

    async def seen(self, places: Iterable[Place]) -> list[SeenSpending]:
        await self._read()
        return [self._seen.get(place, NOTHING_SEEN) for place in places]

    async def accounts(self, periods: Periods) -> list[str]:
        """Return the accounts of which anything was seen in these periods."""
        await self._read()
        return sorted({account for account, period in self._seen if period in periods})

    def forget_before(self, month: str) -> None:
        if month != self._month:
            self._month = month
            self._seen = {
                (account, period): seen
                for (account, period), seen in self._seen.items()
                if period >= month
            }

    def note(self, place: Place, seen: SeenSpending) -> bool:
        """Remember what Redis has now; return whether it had lost what was seen before."""
        seen_before = self._seen.get(place, NOTHING_SEEN)
        is_older_answer = seen_before.ledger == seen.ledger and sum(
            seen_before.spent
        ) > sum(seen.spent)
        if seen_before == seen or is_older_answer:
            return False
        self._seen[place] = seen
        self._unwritten.add(place)
        return bool(seen_before.ledger) and seen_before.ledger != seen.ledger

    async def write(self) -> None:
        """Write what is new to the file; if that fails, it is tried again."""
        if self._database is None or not self._unwritten:
            return
        places = self._unwritten
        self._unwritten = set()
        rows = [self._row(place) for place in places if place in self._seen]
        try:
            await self._database.change(lambda sql: _write_copy(sql, rows))
        except (OSError, sqlite3.Error) as error:
            self._unwritten |= places
            self._faults.log(
                error,
                "the copy of what budgets have used could not be written; trying again",
            )

    def _row(self, place: Place) -> CopyRow:
        account_id, period = place
        ledger, (engine_us, money_u) = self._seen[place]
        return account_id, period, ledger, engine_us, money_u

    async def _read(self) -> None:
        if self._is_read or self._database is None:
            return
        async with self._reading:
            if self._is_read:
                return
            try:
                rows = await self._database.change(_read_copy)
            except (OSError, sqlite3.Error) as error:
                self._faults.log(
                    error, "the copy of what budgets have used could not be read"
                )
                rows = []
            for account, period, ledger, engine_us, money_u in rows:
                self._seen.setdefault(
                    (account, period), SeenSpending(ledger, Cost(engine_us, money_u))
                )
            self.began_with_any = bool(rows)
            self._is_read = True


def _read_copy(connection: sqlite3.Connection) -> list[CopyRow]:
    oldest_month = time.strftime("%Y-%m", time.gmtime(time.time() - MONTH_KEPT_S))
    connection.execute("DELETE FROM ledger_copy WHERE period < ?", (oldest_month,))
    return connection.execute(
        "SELECT account, period, ledger, engine_us, money_u FROM ledger_copy"
    ).fetchall()


def _write_copy(connection: sqlite3.Connection, rows: list[CopyRow]) -> None:
    """Write rows. If routers share the file, the largest amounts stay: what is spent only grows."""
    connection.executemany(
        "INSERT INTO ledger_copy VALUES (?, ?, ?, ?, ?) ON CONFLICT (account, period) DO UPDATE SET "
        "ledger = excluded.ledger, engine_us = excluded.engine_us, money_u = excluded.money_u "
        "WHERE excluded.engine_us + excluded.money_u >= engine_us + money_u",
        rows,
    )


def _broken_limit(hold: Hold, number: int) -> tuple[Account, Limit] | None:
    """Return the limit that ``budget_reserve.lua`` names by its number, counted from 1 over all accounts; None for 0."""
    if not number:
        return None
    account_position, limit_position = divmod(number - 1, len(_LIMITS))
    account = hold.accounts[account_position]
    span_and_unit = _LIMITS[limit_position]
    return account, next(
        limit for limit in account.limits if limit[:2] == span_and_unit
    )


def _groups(values: list[str], size: int) -> list[list[str]]:
    """Split an answer's values into groups of a size."""
    return [values[start : start + size] for start in range(0, len(values), size)]


def _reserve_args(hold: Hold, seen: list[SeenSpending]) -> list[object]:
    """Return what ``budget_reserve.lua`` takes after the deadline; ``seen`` has two entries for each account."""
    args: list[object] = [
        hold.id,
        *hold.reserved,
        *hold.periods,
        LEASE_S,
        _random_name(),
        DAY_KEPT_S,
        MONTH_KEPT_S,
    ]
    for position, account in enumerate(hold.accounts):
        args += _limit_args(account, hold.times)
        day_and_month = seen[2 * position : 2 * position + 2]
        args += _seen_args(day_and_month)
    return args


def _limit_args(account: Account, times: int) -> list[int]:
    """Return the amounts of an account's limits in the order of ``_LIMITS``; -1 for those that it does not have."""
    amounts = {limit[:2]: limit.amount * times for limit in account.limits}
    return [amounts.get(span_and_unit, -1) for span_and_unit in _LIMITS]


def _settle_args(hold: Hold, cost: Cost, seen: Iterable[SeenSpending]) -> list[object]:
    """Return what ``budget_settle.lua`` takes."""
    args: list[object] = [
        hold.id,
        *cost,
        MARK_KEPT_S,
        _random_name(),
        DAY_KEPT_S,
        MONTH_KEPT_S,
        len(hold.accounts),
    ]
    args += _seen_args(seen)
    return args


def _seen_args(seen: Iterable[SeenSpending]) -> list[object]:
    """Return what shows a script what this router last saw spent in some places."""
    args: list[object] = []
    for seen_place in seen:
        args += [seen_place.ledger, *seen_place.spent]
    return args


def _random_name() -> str:
    return secrets.token_hex(6)


def _key(*parts: str) -> str:
    """Return the name of a key in Redis; the braces keep all on one node of a cluster."""
    return ":".join(("qarr", "{budgets}", *parts))


def _mark(settlement: str) -> str:
    return _key("settled", settlement)


def _names(hold: Hold) -> list[str]:
    names = [_mark(hold.id)]
    for account in hold.accounts:
        names += [_key("spent", account.id, period) for period in hold.periods]
        names += [_key("held", account.id), _key("ends", account.id)]
    return names
