"""Clients that close their sending side: those that wait get their answers; for those that have left, the engine is freed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import ANSWER, Behaviour
from tests.unit.router_stack import Stack, router_stack
from tests.unit.server.raw_connections import connected, request
from tests.waiting import until
from tiers.spec import TierName

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "hi", "tier": "fast"},
    "/v1/chat/completions": {"messages": HI, "model": "fast"},
    "/v1/completions": {"prompt": "hi", "model": "fast"},
    "/v1/messages": {"messages": HI, "max_tokens": 64, "model": "fast"},
    "/v1/responses": {"input": "hi", "model": "fast"},
}
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


def slow(stack: Stack, delay_s: float) -> Behaviour:
    """Let the fast tier's engine wait before each token."""
    engine = stack.engines[TierName.FAST]
    engine.delay_s = delay_s
    return engine


def outcomes(stack: Stack) -> list[str]:
    """Return how the recent requests have ended."""
    return [record.outcome for record in stack.pipeline.registry.recent]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_sends_nothing_more_gets_its_answer(
    tmp_path: Path, path: str, *, streamed: bool
) -> None:
    """It closes its side before the first token; the connection ends with the answer."""
    async with router_stack(tmp_path) as stack, connected(stack) as (reader, writer):
        slow(stack, 0.1)
        writer.write(request(path, {**BODIES[path], "stream": streamed}))
        writer.write_eof()
        async with asyncio.timeout(20):
            answer = await reader.read(-1)
        head, _, body = answer.removeprefix(INTERIM).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in head
        assert ANSWER[-2].encode() in body
        assert (b"0\r\n\r\n" in body) is streamed
        await until(lambda: stack.leases() == 0)
        await until(lambda: outcomes(stack) == ["ok"])


async def test_a_client_that_closes_its_side_later_gets_the_rest(
    tmp_path: Path,
) -> None:
    async with router_stack(tmp_path) as stack, connected(stack) as (reader, writer):
        slow(stack, 0.1)
        writer.write(
            request(
                "/v1/chat/completions",
                {**BODIES["/v1/chat/completions"], "stream": True},
            )
        )
        await reader.readuntil(b"data: ")
        writer.write_eof()
        async with asyncio.timeout(20):
            assert b"[DONE]" in await reader.read(-1)


@pytest.mark.parametrize(
    ("streamed", "begun"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_has_left_frees_the_engine(
    tmp_path: Path, path: str, *, streamed: bool, begun: bool
) -> None:
    """The client closes its socket, as programs do that end or give up, while the engine sends nothing."""
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.FAST]
        engine.stall_after = 1 if begun else 0
        async with connected(stack) as (reader, writer):
            writer.write(request(path, {**BODIES[path], "stream": streamed}))
            await until(lambda: engine.running > 0)
            if begun:
                await reader.readuntil(b"The")
                # Bytes that are not read would make the kernel send a reset at once.
                await reader.read(1 << 16)
            writer.close()
            await until(lambda: engine.running == 0 and stack.leases() == 0)
        await until(lambda: outcomes(stack) == ["client_gone"])


async def test_a_client_that_leaves_within_its_request_gets_nothing(
    tmp_path: Path,
) -> None:
    async with router_stack(tmp_path) as stack, connected(stack) as (reader, writer):
        writer.write(request("/generate", {"prompt": "hi"})[:-3])
        writer.write_eof()
        async with asyncio.timeout(20):
            assert await reader.read(-1) == b""


async def test_http_1_0_gets_no_interim_answer(tmp_path: Path) -> None:
    async with router_stack(tmp_path) as stack, connected(stack) as (reader, writer):
        slow(stack, 0.1)
        writer.write(
            request("/generate", {"prompt": "hi", "stream": False}).replace(
                b"HTTP/1.1", b"HTTP/1.0"
            )
        )
        writer.write_eof()
        async with asyncio.timeout(20):
            answer = await reader.read(-1)
        assert answer.startswith(b"HTTP/1.1 200")
        assert ANSWER[-2].encode() in answer
