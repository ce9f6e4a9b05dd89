"""Bounds the memory that large request bodies take together, from their first bytes to the end of their answers.

A body is kept while its answer is made, since another engine may have to be sent it. One body may have tens of megabytes,
for images; as many of them as there may be connections would fill any memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.server.errors import TooManyBodiesError

# Smaller bodies are not counted: what they take together is bounded by the number of connections.
LARGE_BODY_BYTES = 1 << 16


@dataclass(slots=True)
class LargeBodies:
    """The large bodies that one process holds.

    Attributes:
        max_bytes: Most bytes of them together; the settings say it.
        held_bytes: Bytes of them at present.
    """

    max_bytes: float = math.inf
    held_bytes: int = 0


class HeldBody:
    """How much of that one request holds."""

    __slots__ = ("_bodies", "_held_bytes")

    def __init__(self, bodies: LargeBodies) -> None:
        self._bodies = bodies
        self._held_bytes = 0

    def grow_to(self, size: int) -> None:
        """Note that so many bytes of the body are held; ``TooManyBodiesError``: all bodies together have too many."""
        added_bytes = size - self._held_bytes
        if size <= LARGE_BODY_BYTES or added_bytes <= 0:
            return
        bodies = self._bodies
        # A body that no other one stands beside is bounded by itself.
        if bodies.held_bytes > self._held_bytes and (
            bodies.held_bytes + added_bytes > bodies.max_bytes
        ):
            raise TooManyBodiesError(int(bodies.max_bytes))
        bodies.held_bytes += added_bytes
        self._held_bytes = size

    def release(self) -> None:
        """Note that the request is over."""
        self._bodies.held_bytes -= self._held_bytes
        self._held_bytes = 0
