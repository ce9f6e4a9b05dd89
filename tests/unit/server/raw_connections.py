"""Requests as bytes over real sockets to a router in this process, and their answers as bytes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil

from tests.unit.router_stack import Stack


def request(path: str, body: dict[str, Any] | bytes, *headers: str) -> bytes:
    """Return the bytes of a POST request."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        f"content-length: {len(raw)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


def port_of(stack: Stack) -> int:
    """Return the port that a router listens on."""
    return int(stack.url.rsplit(":", 1)[1])


@asynccontextmanager
async def connected(
    stack: Stack, *, small: bool = False
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a router; with a small receive buffer an unread answer soon holds the router back."""
    sock = socket.socket()
    if small:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port_of(stack)))
    reader, writer = await asyncio.open_connection(
        sock=sock, limit=4096 if small else 1 << 16
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Read to the end of the connection, and return status, headers and body."""
    async with asyncio.timeout(10):
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


def open_at(port: int) -> int:
    """Return how many connections this process has accepted at a port."""
    connections = psutil.Process().net_connections(kind="tcp")
    return sum(
        connection.status != psutil.CONN_LISTEN and connection.laddr.port == port
        for connection in connections
    )
