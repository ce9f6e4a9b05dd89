"""The bound on each wait for more of an answer: what it ends, and what it leaves alone."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from router.upstream.transport import Connection
from tests.unit.upstream.connections import answer_on, connection_with_request

pytestmark = pytest.mark.anyio
SHORT_S = 0.02
LONG_S = 60.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"


def answering(limit_s: float) -> Connection:
    connection, _ = connection_with_request()
    connection.data_received(HEAD)
    answer_on(connection).limit_reads(limit_s)
    return connection


async def read(connection: Connection) -> bytes:
    return await anext(answer_on(connection))


async def test_a_wait_that_takes_too_long_ends() -> None:
    connection = answering(SHORT_S)
    with pytest.raises(httpx.ReadTimeout, match=r"0\.02 s"):
        await read(connection)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    assert not connection.rest()


async def test_time_between_waits_does_not_count() -> None:
    connection = answering(SHORT_S)
    asyncio.get_running_loop().call_soon(connection.data_received, b"a")
    await read(connection)
    # the timer fires in it, and is set anew by the next wait
    await asyncio.sleep(3 * SHORT_S)
    asyncio.get_running_loop().call_soon(connection.data_received, b"a")
    assert await read(connection) == b"a"
    with pytest.raises(httpx.ReadTimeout):
        await read(connection)


async def test_a_cancellation_stays_one() -> None:
    connection = answering(LONG_S)
    task = asyncio.create_task(read(connection))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    connection.rest()


async def test_a_cancellation_that_comes_with_the_end_of_the_wait_stays_one() -> None:
    connection = answering(0.0)
    task = asyncio.create_task(read(connection))
    await asyncio.sleep(0)
    task.cancel()
    answer_on(connection).check_wait(0.0)
    with pytest.raises(asyncio.CancelledError):
        await task
    connection.rest()


async def test_an_answer_that_has_ended_holds_no_timer() -> None:
    connection = answering(LONG_S)
    asyncio.get_running_loop().call_soon(connection.data_received, b"a")
    await read(connection)
    timer = answer_on(connection).timer
    assert timer is not None
    connection.rest()
    assert timer.cancelled()
