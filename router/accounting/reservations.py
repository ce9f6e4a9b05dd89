"""Reserves the most that each request may cost from budgets, and settles with what it used.

While the ledger cannot be reached, or has lost what other routers have not told it again yet, this process counts alone, on
top of what it last knew to be used; a budget of which it knows nothing allows no request, unless the settings say otherwise.
What requests cost meanwhile is settled once the ledger answers again. A settlement that may have arrived is repeated: only
the first counts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from router.accounting.budgets import (
    BudgetUnknownError,
    Hold,
    NoPriceError,
    OverBudgetError,
    Reserved,
    Used,
    periods,
)
from router.accounting.ledgers import BudgetLedger, MemoryLedger
from router.accounting.redis_ledger import RedisLedger
from router.accounting.settings import BudgetSettings
from router.aio import Finishing, end_tasks
from router.auth.api_keys import Account
from router.redis_link import UNAVAILABLE, RedisState, outage
from router.telemetry.record import FREE, Cost
from tiers.background import Faults

log = logging.getLogger(f"qarr.{__name__}")
RENEW_S = 60.0
RETRY_S = 1.0  # Time between two attempts after a failure.
# The use of this many accounts' periods is remembered for an outage.
MAX_KNOWN = 40_000
LOST = (*UNAVAILABLE, sqlite3.Error)


@dataclass(slots=True, eq=False)
class Reservation:
    """What an admitted request has reserved. Settle it exactly once, however the request ends."""

    _reservations: Reservations
    hold: Hold
    _settled: bool = False

    async def settle(self, used: Cost) -> Cost:
        """End the reservation; return what was charged: what was used, at most what was reserved."""
        cost = used.at_most(self.hold.reserved)
        if not self._settled:
            self._settled = True
            await self._reservations.settle(self.hold, cost)
        return cost


class Reservations:
    """Admits requests as budgets allow; days and months are read from ``now``, in seconds since 1970."""

    def __init__(
        self,
        ledger: BudgetLedger,
        settings: BudgetSettings,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.ledger = ledger
        self.settings = settings
        self._now = now
        # Counts while the ledger does not answer; it is None otherwise.
        self._alone: MemoryLedger | None = None
        # The ledger answers again and gets what it is owed; until that is done, nothing is reserved from it.
        self._is_paying_ledger = False
        self._known: Used = {}
        self._open: dict[str, Hold] = {}
        self._owed: dict[str, tuple[Hold, Cost]] = {}
        self._renewed_at = -math.inf
        self._work = Finishing()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def redis(self) -> RedisState | None:
        """Return whether Redis counts budgets; None: something else does."""
        return self.ledger.link.state if isinstance(self.ledger, RedisLedger) else None

    @property
    def restored(self) -> int:
        """Return how many accounts' periods the ledger had lost and got back."""
        return self.ledger.restored if isinstance(self.ledger, RedisLedger) else 0

    @property
    def notes(self) -> list[str]:
        """Return what an operator should know of the ledger; of Redis its own state tells it."""
        if self._alone is None or self.redis is not None:
            return []
        return [f"{self.ledger.place}, which counts budgets, cannot be used"]

    async def enter(
        self, accounts: tuple[Account, ...], highest_cost: Cost, times: int = 1
    ) -> Reservation:
        """Reserve what a request may cost at most, in all accounts or in none; budgets count ``times`` times.

        Raises:
            OverBudgetError: A budget does not allow it now.
            NoPriceError: There is a budget of money, and no price.
            BudgetUnknownError: The ledger cannot be reached, and nothing is known of a budget.
        """
        if self.settings.replica_hour is None and any(map(_has_money_limit, accounts)):
            raise NoPriceError(
                "this key has a budget of money, but no price is set (budgets.replica_hour)"
            )
        now = self._now()
        hold = Hold(
            secrets.token_hex(12),
            accounts,
            periods=periods(now),
            reserved=highest_cost,
            times=times,
        )
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        reserved = await self._work.acquire(
            self._reserve(hold), partial(self._undo, hold)
        )
        if reserved.denied is not None:
            raise OverBudgetError(
                hold, reserved, at=now, currency=self.settings.currency
            )
        return Reservation(self, hold)

    async def settle(self, hold: Hold, cost: Cost) -> None:
        """Settle a hold, even if the caller is cancelled."""
        self._open.pop(hold.id, None)
        self._owed[hold.id] = hold, cost
        await self._work.finish(self._settle(hold, cost))

    async def aclose(self) -> None:
        await self._work.aclose()
        if self._keeper is not None:
            await end_tasks([self._keeper])
        try:
            await self._pay()
        except LOST as error:
            log.error(  # noqa: TRY400
                "charges of %d requests are lost: %s", len(self._owed), outage(error)
            )
        await self.ledger.aclose()

    async def _reserve(self, hold: Hold) -> Reserved:
        reserved = await self._reserve_in_ledger(hold)
        if reserved is None:
            reserved = await self._reserve_alone(hold)
        if reserved.denied is None:
            self._open[hold.id] = hold
        return reserved

    async def _reserve_in_ledger(self, hold: Hold) -> Reserved | None:
        """Reserve in the ledger; None while it does not answer."""
        if self._alone is not None:
            return None
        try:
            async with asyncio.timeout(self.ledger.timeout_s):
                reserved = await self.ledger.reserve(hold)
        except LOST as error:
            self._lose(error)
            return None
        self._remember(reserved.used)
        return reserved

    async def _reserve_alone(self, hold: Hold) -> Reserved:
        """Reserve in this process, on top of what the ledger last had; ``BudgetUnknownError`` if that is not known."""
        assert self._alone is not None
        if (
            self.settings.while_unknown != "serve"
            and not _limited_places(hold) <= self._known.keys()
        ):
            raise BudgetUnknownError(self.ledger.place)
        return await self._alone.reserve(hold)

    async def _undo(self, hold: Hold, reserved: Reserved) -> None:
        if reserved.denied is None:
            await self.settle(hold, FREE)

    async def _settle(self, hold: Hold, cost: Cost) -> None:
        if self._alone is not None:
            await self._alone.settle(hold, cost)
            if not self._is_paying_ledger:  # The ledger gets it once it answers.
                return
        try:
            async with asyncio.timeout(self.ledger.timeout_s):
                await self.ledger.settle(hold, cost)
        except LOST as error:
            self._lose(error)
        else:
            self._owed.pop(hold.id, None)

    def _remember(self, used: Used) -> None:
        self._known |= used
        if len(self._known) > MAX_KNOWN:
            for place in list(self._known)[: MAX_KNOWN // 2]:
                del self._known[place]

    def _lose(self, error: BaseException) -> None:
        """Count alone until the ledger answers again."""
        self._is_paying_ledger = False
        if self.redis is not None:
            self.redis.fail(error)
        if self._alone is None:
            self._alone = MemoryLedger(self._known)
            log.warning(
                "the ledger of budgets cannot be reached (%s): this router counts alone",
                outage(error),
            )

    async def _keep(self) -> None:
        """Renew reservations, and try the ledger while it does not answer; until cancelled."""
        faults = Faults(repeats=False)
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                await self._maintain()
            except LOST as error:
                self._lose(error)
            except Exception as error:  # noqa: BLE001  whatever it is, reservations must still be renewed
                faults.log(
                    error, "reservations of budgets could not be renewed; trying again"
                )

    async def _maintain(self) -> None:
        """Renew reservations in the ledger; once it is complete again, pay what it is owed and count in it."""
        is_complete = await self.ledger.is_complete(periods(self._now()))
        if not is_complete and self._alone is None:
            self._alone = MemoryLedger(self._known)
            place = self.ledger.place
            log.warning(
                "%s has lost what budgets have used: this router counts alone until each has told it",
                place,
            )
        is_alone = self._alone is not None
        if is_alone or time.monotonic() - self._renewed_at >= RENEW_S:
            # While this router counts alone it settles nothing there, so every reservation that is restored is still open.
            await self.ledger.renew(list(self._open.values()), restore=is_alone)
            self._renewed_at = time.monotonic()
        if is_alone and is_complete:
            self._is_paying_ledger = True
            await self._pay()
            self._alone = None
            self._is_paying_ledger = False
            if self.redis is not None:
                self.redis.recover()
            log.info("the ledger of budgets answers again")
        await self.ledger.tidy()

    async def _pay(self) -> None:
        """Settle what could not be settled; a request that ends meanwhile is settled by its own task."""
        for hold, cost in list(self._owed.values()):
            if hold.id in self._owed:
                await self.ledger.settle(hold, cost)
                self._owed.pop(hold.id, None)


def _has_money_limit(account: Account) -> bool:
    return any(limit.unit == "money_u" for limit in account.limits)


def _limited_places(hold: Hold) -> set[tuple[str, str]]:
    """Return the accounts and periods whose use must be known before a hold can be granted."""
    places = set()
    for account in hold.accounts:
        for limit in account.limits:
            period: str = getattr(hold.periods, limit.span)
            places.add((account.id, period))
    return places
