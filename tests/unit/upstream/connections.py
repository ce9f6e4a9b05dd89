"""Connections to an engine, with what it sends."""

from __future__ import annotations

import asyncio
from typing import Any

from router.upstream.transport import (
    Body,
    Connection,
)


class Wire(asyncio.Transport):
    """The socket's side of a connection, without a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


def connection_with_request(
    release: Any = lambda _: None, *, head_only: bool = False
) -> tuple[Connection, Wire]:
    wire = Wire()
    connection = Connection(("http", "engine", 80), lambda _: None, release)
    connection.connection_made(wire)
    connection.send((b"GET / HTTP/1.1\r\n\r\n",), head_only=head_only)
    return connection, wire


def answer_on(connection: Connection) -> Body:
    assert connection.answer is not None
    return connection.answer
