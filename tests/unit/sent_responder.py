"""A client that an application answers without a server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from router.server.responder import Responder


class SentResponder(Responder):
    """Keeps the messages that are sent to the client."""

    def __init__(self) -> None:
        cycle: Any = SimpleNamespace(
            disconnected=False, message_event=asyncio.Event(), scope={}
        )
        super().__init__(cycle)
        self.sent: list[Any] = []

    async def send(self, message: Any) -> None:
        self.sent.append(message)
