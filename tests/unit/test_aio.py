"""Ending asyncio tasks."""

from __future__ import annotations

import asyncio

import pytest

from router.aio import end_tasks

pytestmark = pytest.mark.anyio


async def test_ending_tasks_ends_them_all() -> None:
    """Tasks that have ended already and tasks that have not begun are ended too."""
    done = asyncio.create_task(asyncio.sleep(0))
    begun = asyncio.create_task(asyncio.sleep(3600))
    failed = asyncio.create_task(fail())
    await asyncio.wait({done, failed})
    new = asyncio.create_task(asyncio.sleep(3600))
    await end_tasks([done, begun, failed, new])
    assert done.cancelled() is False
    assert begun.cancelled() is True
    assert new.cancelled() is True
    assert isinstance(failed.exception(), ValueError)
    await end_tasks([])


async def fail() -> None:
    raise ValueError


async def test_a_task_that_cleans_up_is_waited_for() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await end_tasks([task])
    assert cleaned == [True]


async def test_a_cancellation_that_was_swallowed_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some libraries take a cancellation for their own timeout."""
    cancelled = []
    wait = asyncio.wait
    monkeypatch.setattr(
        "asyncio.wait", lambda tasks, timeout: wait(tasks, timeout=timeout / 1000)
    )

    async def stubborn() -> None:
        for _ in range(3):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(True)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_tasks([task])
    assert len(cancelled) == 3
    assert task.done()
