"""The HTTP client that asks the engines of a fleet about themselves."""

from __future__ import annotations

from typing import Any

import httpx


class EngineClient(httpx.AsyncClient):
    """Sends each request straight to a transport.

    It skips what httpx does around its transport: cookies, redirects, authentication, log lines. No engine needs them, every
    engine is asked four times a second, and they take twice the time of all else in a request.

    Args:
        timeout_s: For each step of a request.
        transport: None: httpx's own.
    """

    def __init__(
        self, timeout_s: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        if transport is None:
            transport = httpx.AsyncHTTPTransport(trust_env=False)
        super().__init__(timeout=timeout_s, trust_env=False, transport=transport)
        self._direct_transport = transport

    async def send(
        self, request: httpx.Request, *, stream: bool = False, **_unused: Any
    ) -> httpx.Response:
        """Send a request; with ``stream`` the answer's body is left to be read, and the answer to be closed.

        ``RuntimeError``: the client is closed.
        """
        if self.is_closed:
            raise RuntimeError("the client of engines is closed")
        response = await self._direct_transport.handle_async_request(request)
        if not stream:
            await response.aread()
        return response
