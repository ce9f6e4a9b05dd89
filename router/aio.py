"""Waiting for, finishing and ending asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Signal:
    """As ``asyncio.Event``, without the deque of 760 bytes that each of those holds: there are thousands."""

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[asyncio.Future[None]] | None = None

    def set(self) -> None:
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


class Finishing:
    """Work that is finished even if whoever waits for it is cancelled."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()  # those that go on

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._start(work))

    async def acquire(self, taking: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]]) -> T:
        """Return what ``taking`` returns; if the caller is cancelled meanwhile, it is undone."""
        task = self._start(taking)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await self.finish(_undone(task, undo))
            raise

    async def aclose(self) -> None:
        while self.tasks:
            await asyncio.wait(self.tasks)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


async def _undone(task: asyncio.Task[T], undo: Callable[[T], Coroutine[Any, Any, None]]) -> None:
    await asyncio.wait({task})
    if task.exception() is None:
        await undo(task.result())


async def end_tasks(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended, once a second: a library may swallow a cancellation."""
    while not all(task.done() for task in tasks):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=1)
