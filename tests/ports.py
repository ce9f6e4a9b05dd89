"""Ports for processes that must know theirs before they start, kept so that nobody else gets them."""

from __future__ import annotations

import socket
from collections import deque

KEPT = 500  # Beyond so many ports the oldest are given back: their tests are over.
# These sockets are bound and do not listen: Linux gives such a port to nobody who asks for any (bind(0), connect).
# SO_REUSEADDR is set once a socket is bound: a server that names the port and sets it too can then bind there. Set before,
# it would let a second holder in, such as another process of the tests.
_held: deque[socket.socket] = deque()


def reserved_ports(count: int = 1) -> list[int]:
    """Reserve so many free ports."""
    return [_hold(0) for _ in range(count)]


def reserved_range(count: int) -> int:
    """Reserve so many successive ports, and return the first."""
    for first in range(20101, 30000, 10):
        try:
            for port in range(first, first + count):
                _hold(port)
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def _hold(port: int) -> int:
    held = socket.socket()
    try:
        held.bind(("127.0.0.1", port))
    except OSError:
        held.close()
        raise
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held.append(held)
    if len(_held) > KEPT:
        _held.popleft().close()
    return int(held.getsockname()[1])
