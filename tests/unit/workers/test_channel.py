"""Messages between two processes: answers, errors, and an end that nobody waits behind."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from router.workers.channel import Channel, ChannelClosed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def channels(**handlers: Any) -> AsyncIterator[tuple[Channel, Channel]]:
    """Connect two channels; the second one has the handlers."""
    one, two = (sock for sock in socket.socketpair())
    ends = Channel(one, {}), Channel(two, handlers)
    tasks = [asyncio.create_task(end.run()) for end in ends]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        while not all(end._writer for end in ends):
            await asyncio.sleep(0.001)
        try:
            yield ends
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_asked_is_answered_and_told_is_heard_in_order() -> None:
    """Answers go to those who asked, whatever their order; what is told arrives in the order in which it was sent."""
    heard: list[int] = []

    async def late(value: int) -> int:
        await asyncio.sleep(0.01 * (5 - value))
        return value * 2

    async with channels(late=late, note=heard.append, now=lambda: "x" * 3_000_000) as (one, _):
        for number in range(20):
            one.tell("note", number)
        assert await asyncio.gather(*(one.ask("late", value) for value in range(5))) == [0, 2, 4, 6, 8]
        assert len(await one.ask("now")) == 3_000_000
        assert heard == list(range(20))


async def test_an_error_there_is_raised_here() -> None:
    """Also an answer that cannot be sent, and a name that nobody handles."""

    def fails() -> None:
        raise ValueError("no")

    async with channels(fails=fails, odd=lambda: lambda: None) as (one, _):
        with pytest.raises(ValueError, match="no"):
            await one.ask("fails")
        with pytest.raises(RuntimeError, match="ickle"):
            await one.ask("odd")
        with pytest.raises(KeyError):
            await one.ask("nothing")
        one.tell("fails")


async def test_the_end_of_the_other_process_ends_every_wait() -> None:
    """Who has asked, and who asks afterwards, is told; telling does nothing."""
    begun = asyncio.Event()

    async def never() -> None:
        begun.set()
        await asyncio.Event().wait()

    async with channels(never=never) as (one, two):
        asked = asyncio.create_task(one.ask("never"))
        await begun.wait()
        assert two._writer is not None
        two._writer.close()
        with pytest.raises(ChannelClosed):
            await asked
        await one.closed.wait()
        with pytest.raises(ChannelClosed):
            await one.ask("never")
        one.tell("never")
