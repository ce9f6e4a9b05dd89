"""Keeps the loss budget's state: in this process, over restarts, and alike in all processes and routers that share it.

Each process goes on by itself and exchanges about once a second: what it has added since goes to the shared state, and what
others have added comes back. The price's logarithm is a sum of steps, so they may be taken in any order. The shared state is
a file beside the profiles, which the workers of a router share as well, or a key in Redis.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pydantic import TypeAdapter, ValidationError

from router.policy.budget import BudgetState
from router.redis_link import UNAVAILABLE, outage
from tiers.private_files import make_private_folder, open_private

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from router.policy.budget import Answer

log = logging.getLogger(f"qarr.{__name__}")
EXCHANGE_S = 1.0
KEPT_S = 7 * 24 * 3600  # in Redis, after the last exchange
_STATE = TypeAdapter(BudgetState)


class SharedState(Protocol):
    """Where the state is shared."""

    async def update(self, change: Callable[[BudgetState], BudgetState]) -> BudgetState:
        """Replace the state by what ``change`` makes of it, as nobody else does at the same time; return the new one.

        Raises:
            OSError: It cannot be reached.
        """


class Expectation(NamedTuple):
    """What is expected of a request that was let in, since ``at``, in seconds since 1970."""

    answer: Answer
    at: float


class LossBudget:
    """The budget's state as this process sees it.

    Args:
        half_life_s: Of the running mean.
        now: The clock, in seconds since 1970.
    """

    def __init__(self, half_life_s: float, now: Callable[[], float] = time.time) -> None:
        self._half_life_s, self._now = half_life_s, now
        self.state = BudgetState(at=now())
        self._known = self.state  # after the last exchange
        self._outage = ""
        self.tokens = self.lost = self.allowed = 0.0  # since the start, for counters

    @property
    def price(self) -> float | None:
        """Return the price of loss in engine-seconds a differing token; None: not known yet."""
        return self.state.price

    def expect(self, answer: Answer) -> Expectation:
        """Count what is expected of an answer, and move the price."""
        now = self._now()
        self.state = self.state.after(answer, now, self._half_life_s)
        return Expectation(answer, now)

    def add(self, answer: Answer, expected: Expectation | None = None) -> None:
        """Count what has become of an answer, in the place of what was expected of it if anything was."""
        if expected is None:
            self.state = self.state.after(answer, self._now(), self._half_life_s)
        else:
            self.state = self.state.corrected(*expected, answer, self._now(), self._half_life_s)
        self.tokens += answer.tokens
        self.lost += answer.tokens * answer.loss
        self.allowed += answer.tokens * answer.allowed

    def current(self) -> BudgetState:
        """Return the state now."""
        return self.state.faded(self._now(), self._half_life_s)

    async def exchange(self, shared: SharedState) -> None:
        """Give what this process has added, and take what others have.

        Raises:
            OSError: The shared state cannot be reached.
        """
        given = self.state
        change = partial(given.joined, self._known, self._half_life_s)
        found = await shared.update(change)
        later = self.state  # answers may have ended meanwhile
        self.state = later.joined(given, self._half_life_s, found)
        self._known = found

    async def keep(self, shared: Callable[[], SharedState]) -> None:
        """Exchange until cancelled, and once more then."""
        try:
            while True:
                await self._try(shared)
                await asyncio.sleep(EXCHANGE_S)
        finally:
            await asyncio.shield(self._try(shared))

    async def _try(self, shared: Callable[[], SharedState]) -> None:
        try:
            await self.exchange(shared())
        except (OSError, *UNAVAILABLE) as error:
            if outage(error) != self._outage:
                self._outage = outage(error)
                log.warning("the loss budget's state is neither shared nor kept: %s", self._outage)
        else:
            self._outage = ""


class FileState:
    """A file, which outlives the router and which all processes of a machine may share."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def update(self, change: Callable[[BudgetState], BudgetState]) -> BudgetState:
        """See ``SharedState``."""
        return await asyncio.to_thread(self._update, change)

    def _update(self, change: Callable[[BudgetState], BudgetState]) -> BudgetState:
        make_private_folder(self._path.parent)
        with os.fdopen(open_private(str(self._path), os.O_RDWR | os.O_CREAT), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before = _parsed(file.read())
            after = change(before)
            if after is not before:
                file.seek(0)
                file.truncate()
                file.write(_STATE.dump_json(after))
            return after


class RedisState:
    """A key in the Redis that routers share."""

    def __init__(self, redis: Any, key: str) -> None:
        self._redis, self._key = redis, key

    async def update(self, change: Callable[[BudgetState], BudgetState]) -> BudgetState:
        """See ``SharedState``."""

        async def step(pipe: Any) -> BudgetState:
            before = _parsed(await pipe.get(self._key) or "")
            after = change(before)
            pipe.multi()
            pipe.set(self._key, _STATE.dump_json(after), ex=KEPT_S)
            return after

        found: BudgetState = await self._redis.transaction(step, self._key, value_from_callable=True)
        return found


def _parsed(text: str | bytes) -> BudgetState:
    """Return a stored state; one that cannot be read counts as none."""
    if text:
        try:
            return _STATE.validate_json(text)
        except ValidationError:
            log.warning("the loss budget's stored state cannot be read, and begins anew")
    return BudgetState()
