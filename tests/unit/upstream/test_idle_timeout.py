"""A bound on each of many waits: what it interrupts, and what it leaves alone."""

from __future__ import annotations

import asyncio

import pytest

from router.upstream.idle_timeout import IdleTimeout

pytestmark = pytest.mark.anyio
SHORT_S, LONG_S = 0.02, 60.0


async def never() -> None:
    await asyncio.Event().wait()


async def wait(patience: IdleTimeout) -> None:
    with patience:
        await never()


async def test_a_wait_that_takes_too_long_is_interrupted() -> None:
    patience = IdleTimeout(SHORT_S)
    with pytest.raises(TimeoutError), patience:
        await never()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()  # nothing of the interruption is left


async def test_each_wait_has_the_whole_time() -> None:
    patience = IdleTimeout(1.5)
    for _ in range(6):  # together longer than one may be
        with patience:
            await asyncio.sleep(0.3)
    patience.close()


async def test_time_between_waits_does_not_count() -> None:
    patience = IdleTimeout(SHORT_S)
    with patience:
        pass
    await asyncio.sleep(3 * SHORT_S)  # the timer fires in it, and is set anew by the next wait
    with patience:
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError), patience:
        await never()


async def test_a_cancellation_by_others_stays_one() -> None:
    patience = IdleTimeout(LONG_S)
    task = asyncio.create_task(wait(patience))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    patience.close()


async def test_a_cancellation_by_others_that_comes_with_the_interruption_stays_one() -> None:
    patience = IdleTimeout(0.0)
    task = asyncio.create_task(wait(patience))
    await asyncio.sleep(0)
    task.cancel()
    patience._look()
    with pytest.raises(asyncio.CancelledError):
        await task
    patience.close()


async def test_a_closed_one_holds_no_timer() -> None:
    patience = IdleTimeout(LONG_S)
    with patience:
        timer = patience._timer
    assert timer is not None
    patience.close()
    assert timer.cancelled()


async def test_errors_pass() -> None:
    patience = IdleTimeout(LONG_S)
    with pytest.raises(ValueError, match="other"), patience:
        raise ValueError("other")
    patience.close()
