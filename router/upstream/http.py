"""The HTTP transport to the engines."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, aclosing
from typing import TYPE_CHECKING, cast

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

READ_BUFFER_BYTES = 1 << 15  # of each answer: at twice that no more is read until the client has taken some


def make_transport(max_connections: int) -> httpx.AsyncBaseTransport:
    """Return a pooled transport to the engines; 0 connections: any number.

    httpx's interface over aiohttp's client: httpx's own transport costs several times the CPU time per request, and
    more with every open connection (``benchmarks/transport.py`` measures both in one run).
    """
    transport = AiohttpTransport(trust_env=False)

    def session() -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=30.0, ssl=transport.ssl_context)
        return aiohttp.ClientSession(
            connector=connector, read_bufsize=READ_BUFFER_BYTES, cookie_jar=aiohttp.DummyCookieJar()
        )

    transport.client = session  # made by the first request, in its event loop
    return transport


def chunks_of(response: httpx.Response) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
    """Return a context in which a response's body is read; reading ends with it, and is not left to the collector."""
    return aclosing(parts_of(response))


def parts_of(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Return the parts of a response's body as they come; who reads them closes them."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    return cast("AsyncGenerator[bytes, None]", aiter(response.stream))


async def body_of(response: httpx.Response, limit: int | None = None) -> bytes:
    """Read a response's body, up to about ``limit`` bytes."""
    parts: list[bytes] = []
    size = 0
    async with chunks_of(response) as chunks:
        async for chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if limit is not None and size > limit:
                break
    return b"".join(parts)
