"""Waiting for and ending asyncio tasks."""

from __future__ import annotations

import asyncio

import pytest

from router.aio import Signal, end_tasks

pytestmark = pytest.mark.anyio


async def waiting(signal: Signal, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(signal.wait()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_a_signal_lets_everyone_go_on_who_waits() -> None:
    signal = Signal()
    tasks = await waiting(signal, 3)
    assert not any(task.done() for task in tasks)
    signal.set()
    await asyncio.gather(*tasks)


async def test_a_signal_that_is_set_keeps_nobody() -> None:
    """Not even for one turn of the event loop, and again and again until it is cleared."""
    signal = Signal()
    signal.set()
    signal.set()
    for _ in range(2):
        with pytest.raises(StopIteration):
            signal.wait().send(None)
    signal.clear()
    (task,) = await waiting(signal, 1)
    assert not task.done()
    signal.set()
    await task


async def test_a_signal_that_is_cleared_at_once_still_wakes_those_who_waited() -> None:
    """News may be set and cleared before any of them has run."""
    signal = Signal()
    tasks = await waiting(signal, 2)
    signal.set()
    signal.clear()
    await asyncio.gather(*tasks)
    (late,) = await waiting(signal, 1)
    assert not late.done()
    late.cancel()


async def test_who_no_longer_waits_is_not_woken() -> None:
    """A cancelled waiter leaves nothing behind, and takes the signal from nobody."""
    signal = Signal()
    first, second = await waiting(signal, 2)
    first.cancel()
    await asyncio.wait({first})
    assert first.cancelled()
    signal.set()
    await second
    assert signal._waiters is None


async def test_a_waiter_cancelled_just_as_it_is_woken_breaks_nothing() -> None:
    signal = Signal()
    first, second = await waiting(signal, 2)
    first.cancel()
    signal.set()
    signal.set()
    await asyncio.wait({first, second})
    assert (first.cancelled(), second.exception()) == (True, None)


async def test_ending_tasks_ends_them_all() -> None:
    """Those that have ended already as well as those that have not begun."""
    done, begun, failed = (asyncio.create_task(each) for each in (asyncio.sleep(0), asyncio.sleep(3600), fail()))
    await asyncio.wait({done, failed})
    new = asyncio.create_task(asyncio.sleep(3600))
    await end_tasks([done, begun, failed, new])
    assert (done.cancelled(), begun.cancelled(), new.cancelled()) == (False, True, True)
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


async def test_a_cancellation_that_was_swallowed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries take a cancellation for their own timeout."""
    cancelled, wait = [], asyncio.wait
    monkeypatch.setattr("asyncio.wait", lambda tasks, timeout: wait(tasks, timeout=timeout / 1000))

    async def stubborn() -> None:
        while len(cancelled) < 3:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(True)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_tasks([task])
    assert (len(cancelled), task.done()) == (3, True)
