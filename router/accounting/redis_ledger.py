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
DAY_KEPT_S = 3 * 86_400  # after the last settlement: a request that began before midnight may end after it
MONTH_KEPT_S = 40 * 86_400
MARK_KEPT_S = 86_400  # of a router that died
YOUNG_S = 2.0  # in which every router notices that the ledger is another one, and says what it saw
REDIS_CONNECTIONS = 8
Place = tuple[str, str]  # an account's id and a period
_TOO_LATE = -1
_LIMITS: tuple[tuple[Span, Unit], ...] = (
    ("day", "engine_us"),
    ("day", "money_u"),
    ("month", "engine_us"),
    ("month", "money_u"),
)


class Seen(NamedTuple):
    """What a router last saw spent, and the name of the hash that had it; empty: none was there."""

    ledger: str = ""
    spent: Cost = FREE


NOTHING_SEEN = Seen()


class RedisLedger:
    """Counts in Redis, for several routers. Every change is one script, which Redis runs atomically."""

    timeout_s = REDIS_TIMEOUT_S
    place = "Redis (state.redis_url)"

    def __init__(self, url: str, database: Database | None = None) -> None:
        self.link = RedisLink(url, RedisUse.BUDGETS, REDIS_CONNECTIONS)
        self.restored = 0  # accounts' periods that Redis had lost
        self._copy = LedgerCopy(database)
        self._marks = SettledMarks()
        self._name = ""  # of the whole ledger, and since when it is known; empty: Redis was not asked yet
        self._is_young = False
        self._has_told_file = False  # whether what the file had was restored
        self._reserve, self._settle = (
            Script.read(__file__, "budget_spent.lua", f"budget_{name}.lua") for name in ("reserve", "settle")
        )
        self._renew = Script.read(__file__, "budget_renew.lua")

    async def reserve(self, hold: Hold) -> Reserved:
        if not self._name:
            self._name, _ = await self.link.name_of(_key("ledger"))
        due, names = time.monotonic() + REDIS_TIMEOUT_S, _names(hold)
        seen = await self._copy.seen(hold.places)
        for _ in range(2):  # if Redis' clock was set ahead, the second attempt knows
            until = await self.link.time_at(due, names[0])
            shown, denied, *told = await self.link.run(self._reserve, names, [until, *_reserve_args(hold, seen)])
            self.link.learn_time(float(shown), names[0])
            if denied != _TOO_LATE:
                break
        else:
            raise TimeoutError
        return Reserved(self._read_used(hold, told), _broken_limit(hold, denied) if denied else None)

    async def settle(self, hold: Hold, cost: Cost) -> None:
        seen = await self._copy.seen(hold.places)
        names = [*_names(hold), *map(_mark, self._marks.pop_due())]
        args = [hold.id, *cost, MARK_KEPT_S, _random_name(), DAY_KEPT_S, MONTH_KEPT_S, len(hold.accounts)]
        told = await self.link.run(self._settle, names, [*args, *_shown(seen)])
        self._marks.add(hold.id)
        for n, place in enumerate(hold.places):
            self._note(place, told[3 * n : 3 * n + 3])

    async def renew(self, holds: Iterable[Hold], *, restore: bool = False) -> None:
        """Let reservations be held for another lease; ``restore``: hold those too that Redis has lost."""
        args: dict[str, list[str]] = defaultdict(list)
        for hold in holds:
            for account in hold.accounts:
                args[account.id] += [hold.id, " ".join(map(str, (*hold.reserved, *hold.periods)))]
        for account_id, held in args.items():
            names, mode = [_key("held", account_id), _key("ends", account_id)], "restore" if restore else ""
            await self.link.run(self._renew, names, [LEASE_S, mode, *held])

    async def used(self, accounts: Iterable[str], periods: Periods) -> Used:
        used = Used()
        for account in accounts:
            used |= (await self.reserve(Hold("", (Account(account, "", ()),), periods, FREE))).used
        return used

    async def is_complete(self, periods: Periods) -> bool:
        """Restore what Redis has lost; return whether other routers have had time to do so too."""
        self._copy.forget_before(periods.month)
        name, age_s = await self.link.name_of(_key("ledger"))
        is_another = bool(self._name) and name != self._name
        if is_another or (self._copy.began_with_any and not self._has_told_file):
            self._is_young = True
            await self.used(await self._copy.accounts(periods), periods)
            self._has_told_file = True
        self._name = name
        if age_s > YOUNG_S:
            self._is_young = False
        return not self._is_young

    async def tidy(self) -> None:
        """Take away marks that nobody needs, and write the copy."""
        if due := self._marks.pop_due():
            await self.link.execute("DEL", *map(_mark, due))
        await self._copy.write()

    async def aclose(self) -> None:
        await self._copy.write()
        try:
            if marks := self._marks.pop_all():
                await self.link.execute("DEL", *map(_mark, marks))
        except UNAVAILABLE:
            log.info("Redis does not answer: marks of %d settled requests expire by themselves", len(marks))
        await self.link.aclose()

    def _read_used(self, hold: Hold, told: list[str]) -> Used:
        """Read an answer of ``budget_reserve.lua``: for each account four amounts used, and twice what was spent."""
        used = Used()
        for number, account in enumerate(hold.accounts):
            amounts, spent = told[10 * number : 10 * number + 4], told[10 * number + 4 : 10 * number + 10]
            for span, period in enumerate(hold.periods):
                used[account.id, period] = Cost(int(amounts[2 * span]), int(amounts[2 * span + 1]))
                self._note((account.id, period), spent[3 * span : 3 * span + 3])
        return used

    def _note(self, place: Place, told: list[str]) -> None:
        ledger, engine_us, money_u = told
        if ledger and self._copy.note(place, Seen(ledger, Cost(int(engine_us), int(money_u)))):
            if not self.restored:
                log.warning("Redis has lost what budgets have used; it is restored from what this router knows")
            self.restored += 1


class LedgerCopy:
    """What a router last saw spent, kept in its file too."""

    def __init__(self, database: Database | None) -> None:
        self._database = database
        self._seen: dict[Place, Seen] = {}
        self._unwritten: set[Place] = set()
        self._month = ""  # nothing earlier is remembered
        self.began_with_any = False  # whether the file had anything when it was read
        self._is_read = database is None
        self._reading = asyncio.Lock()
        self._faults = Faults(repeats=False)

    async def seen(self, places: Iterable[Place]) -> list[Seen]:
        await self._read()
        return [self._seen.get(place, NOTHING_SEEN) for place in places]

    async def accounts(self, periods: Periods) -> list[str]:
        """Return the accounts of which anything was seen in these periods."""
        await self._read()
        return sorted({account for account, period in self._seen if period in periods})

    def forget_before(self, month: str) -> None:
        if month != self._month:
            self._month = month
            self._seen = {place: seen for place, seen in self._seen.items() if place[1] >= month}

    def note(self, place: Place, seen: Seen) -> bool:
        """Remember what Redis has now; return whether it had lost what was seen before."""
        before = self._seen.get(place, NOTHING_SEEN)
        if before == seen or (before.ledger == seen.ledger and sum(before.spent) > sum(seen.spent)):  # an older answer
            return False
        self._seen[place] = seen
        self._unwritten.add(place)
        return bool(before.ledger) and before.ledger != seen.ledger

    async def write(self) -> None:
        """Write what is new to the file; if that fails, it is tried again."""
        if self._database is None or not self._unwritten:
            return
        places, self._unwritten = self._unwritten, set()
        rows = [(*place, self._seen[place].ledger, *self._seen[place].spent) for place in places if place in self._seen]
        try:
            await self._database.change(lambda sql: _write_copy(sql, rows))
        except (OSError, sqlite3.Error) as error:
            self._unwritten |= places
            self._faults.log(error, "the copy of what budgets have used could not be written; trying again")

    async def _read(self) -> None:
        if self._is_read or self._database is None:
            return
        async with self._reading:
            if self._is_read:
                return
            try:
                rows = await self._database.change(_read_copy)
            except (OSError, sqlite3.Error) as error:
                self._faults.log(error, "the copy of what budgets have used could not be read")
                rows = []
            for account, period, ledger, engine_us, money_u in rows:
                self._seen.setdefault((account, period), Seen(ledger, Cost(engine_us, money_u)))
            self.began_with_any = bool(rows)
            self._is_read = True


def _read_copy(sql: sqlite3.Connection) -> list[tuple[str, str, str, int, int]]:
    oldest = time.strftime("%Y-%m", time.gmtime(time.time() - MONTH_KEPT_S))
    sql.execute("DELETE FROM ledger_copy WHERE period < ?", (oldest,))
    return sql.execute("SELECT account, period, ledger, engine_us, money_u FROM ledger_copy").fetchall()


def _write_copy(sql: sqlite3.Connection, rows: list[tuple[str, str, str, int, int]]) -> None:
    """Write rows. Of routers that share the file the one that saw most counts: what is spent only grows."""
    sql.executemany(
        "INSERT INTO ledger_copy VALUES (?, ?, ?, ?, ?) ON CONFLICT (account, period) DO UPDATE SET "
        "ledger = excluded.ledger, engine_us = excluded.engine_us, money_u = excluded.money_u "
        "WHERE excluded.engine_us + excluded.money_u >= engine_us + money_u",
        rows,
    )


def _broken_limit(hold: Hold, number: int) -> tuple[Account, Limit]:
    """Return the limit that ``budget_reserve.lua`` has counted to, over all accounts from 1."""
    account, kind = hold.accounts[(number - 1) // 4], _LIMITS[(number - 1) % 4]
    return account, next(limit for limit in account.limits if limit[:2] == kind)


def _reserve_args(hold: Hold, seen: list[Seen]) -> list[object]:
    """Return what ``budget_reserve.lua`` takes after the deadline."""
    args: list[object] = [hold.id, *hold.reserved, *hold.periods, LEASE_S, _random_name(), DAY_KEPT_S, MONTH_KEPT_S]
    for n, account in enumerate(hold.accounts):
        limits = {limit[:2]: limit.amount * hold.times for limit in account.limits}
        args += [limits.get(limit, -1) for limit in _LIMITS]
        args += _shown(seen[2 * n : 2 * n + 2])
    return args


def _shown(seen: Iterable[Seen]) -> list[object]:
    return [value for each in seen for value in (each.ledger, *each.spent)]


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
