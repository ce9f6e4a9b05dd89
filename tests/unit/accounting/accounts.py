"""Accounts, callers and reservations for tests of ledgers, and a clock that tests move."""

from __future__ import annotations

import secrets

from router.accounting.budgets import Hold, OverBudgetError, Periods
from router.accounting.reservations import Reservation, Reservations
from router.auth.api_keys import Account, Budget, Caller
from router.telemetry.record import Cost

DAY = Periods("2026-11-24", "2026-11")


class Clock:
    """A clock that tests move."""

    def __init__(self, now: float = 1_795_521_600.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def account(name: str, **budget: float) -> Account:
    """Return an account whose id no other test has."""
    return Account(
        f"key:{name}-{secrets.token_hex(4)}", name, Budget(**budget).limits()
    )


def hold(
    *accounts: Account, engine: int = 1, money: int = 0, at: Periods = DAY
) -> Hold:
    """Return a reservation of millionths of engine-seconds and of money."""
    return Hold(
        secrets.token_hex(8), accounts, periods=at, reserved=Cost(engine, money)
    )


def caller(**budget: float) -> Caller:
    """Return a caller with an account of its own."""
    name = secrets.token_hex(4)
    own = Account(f"key:{name}", "this key", Budget(**budget).limits())
    return Caller(name, name, accounts=(own,))


async def enters(
    reservations: Reservations, who: Caller, engine: int
) -> Reservation | None:
    """Reserve for a caller's request, or return None if the budget has too little left."""
    try:
        return await reservations.enter(who.accounts, Cost(engine, 0))
    except OverBudgetError:
        return None
