"""Coroutines that run at the same time: their results in order, or the first error itself."""

from __future__ import annotations

import asyncio

import pytest

from tiers.errors import ProbeError
from tiers.together import run_all, run_both

pytestmark = pytest.mark.anyio


async def test_results_come_in_order_whatever_ends_first() -> None:
    second_is_done = asyncio.Event()

    async def first() -> str:
        async with asyncio.timeout(20):
            await second_is_done.wait()
        return "first"

    async def second() -> str:
        second_is_done.set()
        return "second"

    assert await run_all([first(), second()]) == ("first", "second")
    assert await run_both(first(), second()) == ("first", "second")
    assert await run_all([]) == ()


async def test_the_first_error_ends_the_others_and_is_no_group() -> None:
    """Also where it was raised two levels below."""
    is_cancelled = asyncio.Event()

    async def wait_for_ever() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    async def fail() -> None:
        raise ProbeError("the engine went away")

    with pytest.raises(ProbeError, match="the engine went away"):
        await run_both(wait_for_ever(), run_all([fail(), fail()]))
    assert is_cancelled.is_set()
