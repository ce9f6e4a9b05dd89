"""Budgets as values: periods, what a request reserves, and why it may not. Amounts are millionths (``MICRO``)."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import NamedTuple

from router.auth.api_keys import Account, Limit, Span, shown
from router.telemetry.record import Cost

LEASE_S = 180.0  # The reservations of a dead router are free again after this time.


class Periods(NamedTuple):
    """The names of a day and of its month in UTC, as in 2026-11-24 and 2026-11."""

    day: str
    month: str


def periods(at: float) -> Periods:
    day = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
    return Periods(day, day[:7])


def renews_at(span: Span, at: float) -> datetime:
    day = datetime.fromtimestamp(at, UTC).replace(
        hour=0, minute=0, second=0, microsecond=0
    )
    if span == "day":
        return day + timedelta(days=1)
    some_day_of_next_month = day.replace(day=1) + timedelta(days=32)
    return some_day_of_next_month.replace(day=1)


# What is spent and reserved, by account id and period.
Used = dict[tuple[str, str], Cost]


class Hold(NamedTuple):
    """What an open request reserves.

    Attributes:
        accounts: The accounts that it counts against.
        periods: The day and month in which it began, and counts.
        times: It is bounded by this many times the accounts' limits.
    """

    id: str
    accounts: tuple[Account, ...]
    periods: Periods
    reserved: Cost
    times: int = 1

    @property
    def places(self) -> list[tuple[str, str]]:
        account_ids = [account.id for account in self.accounts]
        return list(product(account_ids, self.periods))

    def broken(self, used: Used) -> tuple[Account, Limit] | None:
        """Return the first limit that the hold would break on top of what is used; None: it breaks none."""
        for account in self.accounts:
            for limit in account.limits:
                used_cost = used[account.id, getattr(self.periods, limit.span)]
                used_amount = getattr(used_cost, limit.unit)
                reserved_amount = getattr(self.reserved, limit.unit)
                if used_amount + reserved_amount > limit.amount * self.times:
                    return account, limit
        return None


class Reserved(NamedTuple):
    """An answer of a ledger.

    Attributes:
        used: What was used of the request's accounts and periods before it.
        denied: The limit that the request would break; None if the reservation is made.
    """

    used: Used
    denied: tuple[Account, Limit] | None


class OverBudgetError(Exception):
    """A budget has less left than a request may need.

    Attributes:
        used: Millionths of it, with what is reserved.
        left: Millionths that a request may still reserve.
        retry_after_s: Seconds until the budget renews; None if the request alone is larger than the budget.
    """

    def __init__(
        self, hold: Hold, reserved: Reserved, at: float, currency: str
    ) -> None:
        assert reserved.denied is not None
        self.account, self.limit = reserved.denied
        unit = self.limit.unit
        period = getattr(hold.periods, self.limit.span)
        bound = self.limit.amount * hold.times
        needed: int = getattr(hold.reserved, unit)
        self.used: int = getattr(reserved.used[self.account.id, period], unit)
        self.left = max(bound - self.used, 0)
        self.text = self.limit.text(currency)
        self.renews = renews_at(self.limit.span, at)
        self.retry_after_s: int | None = None
        if needed <= bound:
            self.retry_after_s = math.ceil(self.renews.timestamp() - at)
        super().__init__(f"{self._budget(hold.times)}, {self._obstacle(needed)}")

    def _budget(self, times: int) -> str:
        budget = f"the budget of {self.account.title}, {self.text}"
        if times > 1:
            budget += f", and {times} times that on the cheapest tier"
        return budget

    def _obstacle(self, needed: int) -> str:
        if self.retry_after_s is None:
            return f"is smaller than this request alone, which may need {shown(needed)}: ask for fewer max_tokens"
        state = "is used up"
        if self.left:
            state = f"has {shown(self.left)} left"
        renewal = f"it renews at {self.renews:%Y-%m-%dT%H:%M:%SZ}"
        return f"{state}, and this request may need {shown(needed)}; {renewal}"


class BudgetUnknownError(Exception):
    """What a budget has used is not known, because the ledger cannot be read."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{place}, which says what budgets have used, cannot be read now: ask again, or tell the operator"
        )


class NoPriceError(Exception):
    """A budget of money cannot be kept, because nothing has a price."""
