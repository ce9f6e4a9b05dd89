"""Budgets as values: periods, what a request reserves, and why it may not. Amounts are millionths (``MICRO``)."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from router.auth.api_keys import Account, Limit, Span, shown
from router.telemetry.record import Cost

LEASE_S = 180.0  # after which the reservation of a dead router is free again


class Periods(NamedTuple):
    """The names of a day and of its month in UTC, as in 2026-11-24 and 2026-11."""

    day: str
    month: str


def periods(at: float) -> Periods:
    day = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
    return Periods(day, day[:7])


def renews_at(span: Span, at: float) -> datetime:
    day = datetime.fromtimestamp(at, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return day + timedelta(days=1) if span == "day" else (day.replace(day=1) + timedelta(days=32)).replace(day=1)


Used = dict[tuple[str, str], Cost]  # by account id and period: spent and reserved


class Hold(NamedTuple):
    """What an open request reserves."""

    id: str
    accounts: tuple[Account, ...]  # those that it counts against
    periods: Periods  # in which it began, and counts
    reserved: Cost
    times: int = 1  # so many times their limits bound it

    @property
    def places(self) -> list[tuple[str, str]]:
        return [(account.id, period) for account in self.accounts for period in self.periods]

    def broken(self, used: Used) -> tuple[Account, Limit] | None:
        for account in self.accounts:
            for limit in account.limits:
                there = used[account.id, getattr(self.periods, limit.span)]
                if getattr(there, limit.unit) + getattr(self.reserved, limit.unit) > limit.amount * self.times:
                    return account, limit
        return None


class Reserved(NamedTuple):
    used: Used  # before the request, of its accounts and periods
    denied: tuple[Account, Limit] | None  # the limit that it would break; None: it holds what it asked for


class OverBudgetError(Exception):
    """A budget has less left than a request may need.

    Attributes:
        used: Millionths of it, with what is reserved.
        left: Millionths that a request may still reserve.
        retry_after_s: None: the request alone is larger than the budget.
    """

    def __init__(self, hold: Hold, taken: Reserved, at: float, currency: str) -> None:
        assert taken.denied is not None
        self.account, self.limit = taken.denied
        span, unit, amount = self.limit
        self.used: int = getattr(taken.used[self.account.id, getattr(hold.periods, span)], unit)
        self.left = max(amount * hold.times - self.used, 0)
        asked: int = getattr(hold.reserved, unit)
        self.text, self.renews = self.limit.text(currency), renews_at(span, at)
        self.retry_after_s = None if asked > amount * hold.times else math.ceil(self.renews.timestamp() - at)
        budget = f"the budget of {self.account.title}, {self.text}"
        if hold.times > 1:
            budget += f", and {hold.times} times that on the cheapest tier"
        if self.retry_after_s is None:
            why = f"is smaller than this request alone, which may need {shown(asked)}: ask for fewer max_tokens"
        else:
            left = f"has {shown(self.left)} left" if self.left else "is used up"
            renews = f"it renews at {self.renews:%Y-%m-%dT%H:%M:%SZ}"
            why = f"{left}, and this request may need {shown(asked)}; {renews}"
        super().__init__(f"{budget}, {why}")


class BudgetUnknownError(Exception):
    """What a budget has used is not known, because the ledger cannot be read."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{place}, which says what budgets have used, cannot be read now: ask again, or tell the operator"
        )


class NoPriceError(Exception):
    """A budget of money cannot be kept, because nothing has a price."""
