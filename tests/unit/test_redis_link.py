"""The link to Redis: its clock seen from here, its outages, and that nothing waits for long."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from router.redis_link import UNAVAILABLE, RedisClock, connect, outage
from tests.conftest import RedisServer
from tests.ports import reserved_ports

pytestmark = pytest.mark.anyio
URL = "redis://127.0.0.1:{}/0"


async def test_a_redis_that_is_not_there_is_an_outage() -> None:
    (port,) = reserved_ports()
    with pytest.raises(UNAVAILABLE) as error:
        async with connect(URL.format(port), 1) as redis:
            await redis.ping()
    assert str(port) in outage(error.value)


async def test_a_redis_that_does_not_answer_is_an_outage_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry would ask for the same twice, which a take of a slot must not."""
    monkeypatch.setattr("router.redis_link.REDIS_TIMEOUT_S", 0.1)
    asked = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            asked.append(data)
        writer.close()

    server = await asyncio.start_server(silent, sock=socket.create_server(("127.0.0.1", 0)))
    async with server:
        with pytest.raises(UNAVAILABLE):
            async with connect(URL.format(server.sockets[0].getsockname()[1]), 1) as redis:
                await redis.ping()
    assert len(asked) == 1


async def test_the_clock_is_asked_for_once(redis_server: RedisServer) -> None:
    """Later moments are told from the monotonic clock, and never ahead of Redis."""
    clock, now = RedisClock(), time.monotonic()
    async with connect(redis_server.url, 1) as redis:
        shown = await clock.when(redis, now)
    assert await clock.when(None, now + 100) == shown + 100, "nobody was asked"


async def test_the_clock_is_never_ahead_of_redis(redis_server: RedisServer) -> None:
    clock = RedisClock()
    async with connect(redis_server.url, 1) as redis:
        await clock.when(redis, 0.0)
        seen = await clock.when(redis, time.monotonic())
        seconds, microseconds = await redis.time()
    assert seen <= seconds + microseconds / 1e6


async def test_what_redis_told_meanwhile_counts() -> None:
    """Its clock may be set: the last time that it told is taken, without asking."""
    clock = RedisClock()
    clock.learn(5000.0)
    clock.learn(1000.0)
    assert 1000.0 <= await clock.when(None, time.monotonic()) < 2000.0
