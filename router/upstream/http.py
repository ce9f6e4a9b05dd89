"""Read the bodies of engines' responses."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, aclosing
from typing import TYPE_CHECKING, cast

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator


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
