"""Whether the router takes requests, and which are active: needed to leave without breaking any answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum


class ServerPhase(Enum):
    OPEN = "open"
    DRAINING = "draining"  # new requests are refused, open ones may finish
    # another router listens; clients still connected here are served, then sent there
    HANDED_OVER = "handed over"


@dataclass(slots=True)
class ServerState:
    state: ServerPhase = ServerPhase.OPEN
    # the tasks that answer requests
    active_requests: set[asyncio.Task[None]] = field(default_factory=set)
    deadline_passed: bool = False  # whether the time to finish them is over

    @property
    def open(self) -> bool:
        return self.state is ServerPhase.OPEN

    def end_all(self) -> None:
        self.deadline_passed = True
        for task in self.active_requests:
            task.cancel()
