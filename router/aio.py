"""Finishing and ending asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Finishing:
    """Work that is finished even if whoever waits for it is cancelled."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()  # those that go on

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._start(work))

    async def acquire(
        self,
        taking: Coroutine[Any, Any, T],
        undo: Callable[[T], Coroutine[Any, Any, None]],
    ) -> T:
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


async def _undone(
    task: asyncio.Task[T], undo: Callable[[T], Coroutine[Any, Any, None]]
) -> None:
    await asyncio.wait({task})
    if task.exception() is None:
        await undo(task.result())


async def end_tasks(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended, once a second: a library may swallow a cancellation."""
    while not all(task.done() for task in tasks):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=1)
