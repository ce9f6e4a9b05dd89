"""Relays bytes between clients and one server, and reads none of them: the floor of any proxy on uvloop.

usage: python benchmarks/byte_relay.py PORT SERVER-PORT
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

HOST = "127.0.0.1"


class End(asyncio.Protocol):
    """One end of a relay: what comes here goes out at the other end."""

    def __init__(
        self, server_port: int = 0, other: asyncio.Transport | None = None
    ) -> None:
        self._server_port, self._other, self._early = server_port, other, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect a client to the server."""
        if self._other is None:
            self._opening = asyncio.ensure_future(
                self._open(cast("asyncio.Transport", transport))
            )

    async def _open(self, client: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        self._other, _ = await loop.create_connection(
            lambda: End(other=client), HOST, self._server_port
        )
        self._other.write(self._early)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on."""
        if self._other is None:
            self._early += data
        else:
            self._other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the protocol's signature
        """Close the other end as well."""
        if self._other is not None:
            self._other.close()


async def main(port: int, server_port: int) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(
        lambda: End(server_port), HOST, port
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(*map(int, sys.argv[1:3])))
