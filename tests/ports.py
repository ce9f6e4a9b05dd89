"""Ports for processes that must be told one before they start: kept for them, so that nobody else gets them."""

from __future__ import annotations

import socket
from collections import deque

KEPT = 500  # the first ones are given back then: their tests are over
# Bound and not listening: Linux gives such a port to nobody who asks for any (bind(0), connect). SO_REUSEADDR, set once it
# is bound, lets whoever names it bind there, with SO_REUSEADDR as servers do; set before, it would let a second holder in,
# such as another process of the tests. Nobody is listening until that server is.
_held: deque[socket.socket] = deque()


def reserved_ports(count: int = 1) -> list[int]:
    return [_hold(0) for _ in range(count)]


def reserved_range(count: int) -> int:
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
