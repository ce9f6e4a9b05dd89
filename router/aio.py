"""Waiting for and ending asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class Signal:
    """As ``asyncio.Event``, without the deque of 760 bytes that each of those holds: there are thousands."""

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[asyncio.Future[None]] | None = None

    def set(self) -> None:
        """Release all waiters, and those that come before the next ``clear``."""
        self._set = True
        for waiter in self._waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    def clear(self) -> None:
        self._set = False

    async def wait(self) -> None:
        if self._set:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters = [*(self._waiters or ()), waiter]
        try:
            await waiter
        finally:
            self._waiters = [other for other in self._waiters if other is not waiter] or None


async def end_tasks(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended, once a second: a library may swallow a cancellation."""
    while not all(task.done() for task in tasks):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=1)
