"""The HTTP server: uvicorn, and how it leaves: by a signal, or because another router has taken over."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from router.lifecycle import ServerPhase, ServerState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp

    from router.settings import ServerSettings

POLL_S = 0.05
IDLE_S = 5  # in which, after a hand-over, connections without a request may still bring one
CUT_S = 2  # in which those who are still there when time is up get the error that ends their answers


class Server(uvicorn.Server):
    """uvicorn, without its signal handling: it would raise the signal again before engines are stopped."""

    def __init__(
        self, app: ASGIApp, server_state: ServerState, settings: ServerSettings, protocol: type[asyncio.Protocol]
    ) -> None:
        """Prepare to serve.

        Args:
            app: What is served.
            server_state: Kept by the application: what it does with requests that come.
            settings: How long open answers may take, and connections without requests are kept.
            protocol: Of each connection.
        """
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            proxy_headers=False,
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_s,
            timeout_graceful_shutdown=CUT_S,
        )
        super().__init__(config)
        self._server_state, self._drain_s = server_state, settings.drain_s
        self._leaving: asyncio.Task[None] | None = None

    def end_on_signals(self) -> None:
        """Drain on the first SIGINT, SIGTERM or SIGHUP, stop at once on the second."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled)

    async def accepting(self, serving: asyncio.Task[None]) -> None:
        """Wait until connections are accepted, or serving has ended."""
        while not self.started and not serving.done():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S / 10)

    def hand_over(self) -> None:
        """Take no more connections, since another router does; answer those that there are, and leave."""
        self._server_state.state = ServerPhase.HANDED_OVER
        for server in self.servers:
            server.close()  # uvloop accepts a connection and makes it one of the server's in one step: none lies between
        self._leaving = asyncio.create_task(self._leave(idle_too=True), name="leave")

    def _signalled(self) -> None:
        if not self.started or not self._server_state.open:
            self._server_state.end_all()
            self.force_exit = self.should_exit = True
            return
        self._server_state.state = ServerPhase.DRAINING
        self._leaving = asyncio.create_task(self._leave(idle_too=False), name="leave")

    async def _leave(self, *, idle_too: bool) -> None:
        """Wait until every answer is complete, or time is up; then end the server.

        Args:
            idle_too: Wait for connections without a request as well: their next request may be on its way.
        """
        now = time.monotonic()
        deadline, idle_until = now + self._drain_s, now + IDLE_S
        await asyncio.sleep(POLL_S)
        while time.monotonic() < deadline and (  # noqa: ASYNC110
            self._server_state.active_requests
            or (idle_too and self.server_state.connections and time.monotonic() < idle_until)
        ):
            await asyncio.sleep(POLL_S)
        self._server_state.end_all()
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to ``end_on_signals``."""
        yield
