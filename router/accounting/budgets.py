"""Budgets as values: periods, what a request reserves, and why it may not. Amounts are millionths (``MICRO``)."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from router.auth.api_keys import Account, Limit, Span, shown
from router.telemetry.record import Cost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Periods(NamedTuple):
    """The names of a day and of its month in UTC, as in 2026-11-24 and 2026-11."""

    day: str
    month: str


def periods(at: float) -> Periods:
    """Return those of a time in seconds since 1970."""
    day = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
    return Periods(day, day[:7])


def renews_at(span: Span, at: float) -> datetime:
    """Return when the day or month of a time ends."""
    day = datetime.fromtimestamp(at, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return day + timedelta(days=1) if span == "day" else (day.replace(day=1) + timedelta(days=32)).replace(day=1)


class Hold(NamedTuple):
    """What an open request has reserved.

    Attributes:
        accounts: Ids of those that it counts against.
        periods: In which it began, and counts.
    """

    id: str
    accounts: tuple[str, ...]
    periods: Periods
    reserved: Cost

    @property
    def places(self) -> list[tuple[str, str]]:
        """Where it counts: accounts and their periods."""
        return [(account, period) for account in self.accounts for period in self.periods]


class Bound(NamedTuple):
    """A limit of one of a hold's accounts."""

    account: Account
    limit: Limit
    amount: int  # millionths; the limit's, or a multiple of it


Used = dict[tuple[str, str], Cost]  # by account id and period: spent and reserved


class Taken(NamedTuple):
    """The answer to a request for a hold.

    Attributes:
        used: Before the request, of its accounts and periods.
        denied: Position of the bound that it would break; None: it holds what it asked for.
    """

    used: Used
    denied: int | None


def bounds(accounts: Sequence[Account], times: int = 1) -> list[Bound]:
    """Return the bounds of accounts, each limit so many times."""
    return [Bound(account, limit, limit.amount * times) for account in accounts for limit in account.limits]


def first_broken(limits: Iterable[Bound], used: Mapping[tuple[str, str], Cost], hold: Hold) -> int | None:
    """Return the position of the first bound that a hold would break; None: none."""
    for position, (account, limit, amount) in enumerate(limits):
        there = used[account.id, getattr(hold.periods, limit.span)]
        if getattr(there, limit.unit) + getattr(hold.reserved, limit.unit) > amount:
            return position
    return None


class OverBudget(Exception):
    """A budget is used up.

    Attributes:
        account: Whose it is.
        limit: Which of its budgets.
        used: Millionths used and reserved.
        renews: When it begins anew.
        retry_after_s: Seconds until then; None: the request alone is larger than the budget.
    """

    def __init__(self, bound: Bound, used: int, asked: int, at: float, currency: str) -> None:
        self.account, self.limit, self.used = bound.account, bound.limit, used
        self.text = bound.limit.text(currency)
        self.renews = renews_at(bound.limit.span, at)
        self.retry_after_s = None if asked > bound.amount else math.ceil(self.renews.timestamp() - at)
        why = (
            f"is smaller than this request alone, which may need {shown(asked)}: ask for fewer max_tokens"
            if self.retry_after_s is None
            else f"is used up: {shown(used)} are used or reserved, and this request may need {shown(asked)}; "
            f"it renews at {self.renews:%Y-%m-%dT%H:%M:%SZ}"
        )
        super().__init__(f"the budget of {bound.account.title}, {self.text}, {why}")


class BudgetUnknown(Exception):
    """What a budget has used is not known, because the ledger cannot be read."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{place}, which says what budgets have used, cannot be read now: ask again, or tell the operator"
        )


class NoPrice(Exception):
    """A budget of money cannot be kept, because nothing has a price."""
