"""Whether the router takes requests."""

from __future__ import annotations

import asyncio

import pytest

from router.lifecycle import ServerState

pytestmark = pytest.mark.anyio


async def test_when_the_time_is_over_every_request_ends() -> None:
    """Each request can tell that the router ended it, not its client."""
    state = ServerState()
    seen = list[bool]()

    async def answer() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append(state.deadline_passed)

    state.active_requests |= {asyncio.create_task(answer()) for _ in range(3)}
    await asyncio.sleep(0)
    assert not state.deadline_passed
    state.end_all()
    await asyncio.gather(*state.active_requests)
    assert seen == [True] * 3
