"""Whether the router takes requests, and how many it has: what it needs to leave without cutting anybody off."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders

if TYPE_CHECKING:
    from starlette.types import Message, Send


class Door(Enum):
    """What happens to a request that comes now."""

    OPEN = "open"
    DRAINING = "draining"  # new work is refused, what is open may finish
    HANDED_OVER = (
        "handed over"  # another router listens; those who are still connected here are served, then sent there
    )


@dataclass(slots=True)
class Doors:
    """The state of one router's doors.

    Attributes:
        inside: Requests that are being answered.
    """

    state: Door = Door.OPEN
    inside: int = 0

    @property
    def open(self) -> bool:
        """Tell whether the router stays."""
        return self.state is Door.OPEN

    def parting(self, send: Send) -> Send:
        """Return a ``send`` that tells clients, once the router is leaving, to connect anew for their next request."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and not self.open:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        return sending
