"""Which transport below httpx's interface? The same streamed answer read through each, in one run.

usage: python benchmarks/transport.py [--requests 2000]

Prints CPU time a request of this process, which is the client, at 16 requests at once.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
from httpx_aiohttp import AiohttpTransport
from measure import ROOT, stub

sys.path.insert(0, str(ROOT))
from router.upstream.transport import EngineTransport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CONCURRENCY = 16
BODY = b'{"model": "stub", "messages": [{"role": "user", "content": "hi"}], "stream": true}'
HEADERS = {"content-type": "application/json"}
ROUTERS = "the router's transport"
LIMITS = httpx.Limits(max_connections=64, max_keepalive_connections=64)


async def through_transport(transport: httpx.AsyncBaseTransport, url: str) -> None:
    """Send one request straight to a transport, as the router does."""
    response = await transport.handle_async_request(
        httpx.Request("POST", url, headers=HEADERS, content=BODY)
    )
    async for _ in response.stream:  # type: ignore[union-attr]
        pass
    await response.aclose()


async def through_client(client: httpx.AsyncClient, url: str) -> None:
    """Send one request through httpx's client."""
    async with client.stream("POST", url, headers=HEADERS, content=BODY) as response:
        async for _ in response.aiter_raw():
            pass


async def measure(requests: int, once: Callable[[], Awaitable[None]]) -> float:
    """Return CPU microseconds a request."""

    async def worker() -> None:
        for _ in range(requests // CONCURRENCY):
            await once()

    await once()
    before = time.process_time()
    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return (
        (time.process_time() - before) / (requests // CONCURRENCY * CONCURRENCY) * 1e6
    )


async def run(url: str, requests: int) -> dict[str, float]:
    """Measure each way."""
    own = EngineTransport(max_requests=64)
    httpx_own = httpx.AsyncHTTPTransport(limits=LIMITS)
    aio: Any = AiohttpTransport(limits=LIMITS)
    async with httpx.AsyncClient(transport=AiohttpTransport(limits=LIMITS)) as client:
        figures = {
            "httpx's own transport": await measure(
                requests, lambda: through_transport(httpx_own, url)
            ),
            "httpx client over httpx-aiohttp": await measure(
                requests, lambda: through_client(client, url)
            ),
            "httpx-aiohttp transport": await measure(
                requests, lambda: through_transport(aio, url)
            ),
            ROUTERS: await measure(requests, lambda: through_transport(own, url)),
        }
    await own.aclose()
    await httpx_own.aclose()
    await aio.aclose()
    return figures


def main() -> None:
    """Print CPU time a request and the ratio to the router's choice."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    args = parser.parse_args()
    with stub() as (url, _):
        figures = asyncio.run(run(f"{url}/v1/chat/completions", args.requests))
    base = figures[ROUTERS]
    for name, cpu_us in figures.items():
        print(f"{name:42} {cpu_us:8.0f} us CPU a request   x{cpu_us / base:.1f}")


if __name__ == "__main__":
    main()
