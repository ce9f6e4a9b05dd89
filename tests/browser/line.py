"""A line between a browser and the router that can be cut."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Line:
    """A relay of connections from a port of its own to the router."""

    def __init__(self, url: str) -> None:
        self._target = int(url.rsplit(":", 1)[1])
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def mend(self) -> None:
        """Take connections, at the same port as before."""
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Break all connections, and take none."""
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        target_reader, target_writer = await asyncio.open_connection(
            "127.0.0.1", self._target
        )
        pair = {writer, target_writer}
        self._open |= pair
        try:
            await asyncio.gather(
                self._copy(reader, target_writer), self._copy(target_reader, writer)
            )
        finally:
            for end in pair:
                end.transport.abort()
            self._open -= pair

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
