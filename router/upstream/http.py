"""Read the bodies of engines' responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


def parts_of(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Return the parts of a response's body as they come; who reads them closes them."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    return cast("AsyncGenerator[bytes, None]", aiter(response.stream))


async def body_of(response: httpx.Response, limit: int | None = None) -> bytes:
    """Read a response's body, up to about ``limit`` bytes."""
    found: list[bytes] = []
    size, parts = 0, parts_of(response)
    try:
        async for part in parts:
            found.append(part)
            size += len(part)
            if limit is not None and size > limit:
                break
    finally:
        await parts.aclose()
    return b"".join(found)
