"""The HTTP server: uvicorn, and how it shuts down: by a signal, or after a handover to another router."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from router.lifecycle import ServerPhase, ServerState
from router.server.connection_limit import ConnectionLimit, allow_files
from router.server.listener import Listener
from router.server.settings import ServerSettings
from router.server.tls import Tls
from router.server.uvicorn_adapter import STARTUP_FAILURE, UvicornServer

log = logging.getLogger(f"qarr.{__name__}")
POLL_S = 0.05
IDLE_S = 5  # After a handover, idle connections may still send a request for this time.
SHUTDOWN_S = 5.0  # A client has this time to confirm the end of TLS.
# At the end, connections that were accepted and are not open yet have this time to open.
OPENING_S = 0.1
# After the deadline, the errors that end unfinished answers have this time to be sent.
FORCED_SHUTDOWN_S = 2


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


class Server(UvicornServer):
    """uvicorn without its signal handling, which would raise the signal again before engines are stopped."""

    def __init__(
        self,
        app: ASGIApp,
        server_state: ServerState,
        settings: ServerSettings,
        protocol: type[asyncio.Protocol],
        tls: Tls | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=protocol,
            interface="asgi3",
            ws="none",
            proxy_headers=False,
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_s,
            timeout_graceful_shutdown=FORCED_SHUTDOWN_S,
        )
        super().__init__(config)
        self._server_state = server_state
        self._drain_s = settings.drain_s
        self._leaving: asyncio.Task[None] | None = None
        self._listeners: list[Listener] = []
        self.tls_options: dict[str, Any] = {}
        if tls is not None:
            self.tls_options = {
                "ssl": tls.context,
                "ssl_handshake_timeout": settings.header_timeout_s,
                "ssl_shutdown_timeout": SHUTDOWN_S,
            }

    def make_protocol(self) -> asyncio.Protocol:
        return self._new_connection()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections of the given sockets, which listen already."""
        # uvicorn's own would accept one connection a turn of the event loop.
        self.servers = []
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        self._listeners = [
            Listener(sock, self.make_protocol, self.tls_options)
            for sock in sockets or ()
        ]
        for listener in self._listeners:
            listener.start()
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does, and end the application after a second signal too, so that it writes what it has."""
        for listener in self._listeners:
            listener.close()
            await listener.finish_opening(OPENING_S)
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def use(self, settings: ServerSettings) -> None:
        """Take new settings: open connections get the new bounds with their next step."""
        self._drain_s = settings.drain_s
        self.config.timeout_keep_alive = settings.keep_alive_s
        allow_files(settings.max_connections)
        protocol: Any = self.config.http
        protocol.bounds = settings
        protocol.limit = ConnectionLimit.of_this_process(settings.max_connections)

    def end_on_signals(self, on_reload: Callable[[], None]) -> None:
        """Drain on the first SIGINT or SIGTERM, stop at once on the second; reload on SIGHUP.

        The kernel sends SIGHUP too when the terminal goes away: that ends the router like SIGTERM.
        """
        loop = asyncio.get_running_loop()
        had_terminal = _has_terminal()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)

        def handle_hangup() -> None:
            if had_terminal and not _has_terminal():
                self._signalled()
            else:
                on_reload()

        loop.add_signal_handler(signal.SIGHUP, handle_hangup)

    async def accepting(self, serving: asyncio.Task[None]) -> None:
        while not self.started and not serving.done():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S / 10)

    def hand_over(self) -> None:
        """Accept no more connections: another router does. Answer the open ones, then shut down."""
        self._server_state.state = ServerPhase.HANDED_OVER
        for listener in self._listeners:
            listener.close()
        self._leaving = asyncio.create_task(self._leave(idle_too=True), name="leave")

    def _signalled(self) -> None:
        if not self.started or not self._server_state.open:
            self._server_state.end_all()
            self.force_exit = True
            self.should_exit = True
            return
        self._server_state.state = ServerPhase.DRAINING
        self._leaving = asyncio.create_task(self._leave(idle_too=False), name="leave")

    async def _leave(self, *, idle_too: bool) -> None:
        """Wait until every answer is complete, or until the deadline; then end the server.

        With ``idle_too`` idle connections are waited for as well, since their clients may be sending a request.
        """
        now = time.monotonic()
        deadline = now + self._drain_s
        idle_deadline = now + IDLE_S if idle_too else now
        why = "another router takes over" if idle_too else "shutting down"
        open_requests = len(self._server_state.active_requests)
        how_to_hasten = "" if idle_too else "; a second signal ends them at once"
        log.info(
            "%s: %d open requests have %g s to finish%s",
            why,
            open_requests,
            self._drain_s,
            how_to_hasten if open_requests else "",
        )
        await asyncio.sleep(POLL_S)
        while time.monotonic() < deadline and self._may_still_be_used(idle_deadline):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        self._server_state.end_all()
        self.should_exit = True

    def _may_still_be_used(self, idle_deadline: float) -> bool:
        """Tell whether a request is open, or, until a deadline, whether a connection is."""
        if self._server_state.active_requests:
            return True
        return time.monotonic() < idle_deadline and self._has_connections()

    def _has_connections(self) -> bool:
        """Tell whether a client may still send a request, its TLS handshake perhaps not done yet."""
        return bool(self.server_state.connections) or any(
            listener.opening for listener in self._listeners
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
