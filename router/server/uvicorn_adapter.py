"""The inner names of uvicorn that the server uses: each of them is declared here, with the reason why it is needed.

uvicorn does not promise to keep any of them. ``tests/unit/server/test_uvicorn_adapter.py`` names them one by one, so that
an upgrade of uvicorn that changes one fails there. No other module of the router imports from inside uvicorn.

``pyproject.toml`` says which versions may be installed. What is declared here needs 0.53 or later: earlier versions do not
clear ``keep_alive`` when a client asks to close the connection, and those before 0.45 have no ``_start_asgi_task``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import httptools
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.config import STARTUP_FAILURE
from uvicorn.lifespan.off import LifespanOff
from uvicorn.lifespan.on import LifespanOn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState as UvicornState

__all__ = [
    "STARTUP_FAILURE",
    "STATUS_LINE",
    "ASGI3Application",
    "RequestCycle",
    "RequestResponseCycle",
    "UvicornConnection",
    "UvicornServer",
    "encode_head",
]


class WriteFlow(Protocol):
    """Whether a client takes more of its answer (uvicorn's ``FlowControl``)."""

    # A stream tells its engine with each event whether to go on, so that a client that does not read holds it back.
    write_paused: bool

    async def drain(self) -> None:
        """Wait until the client takes more; an answer that is not a stream of events waits here."""


class RequestCycle(Protocol):
    """A request and how far its answer is (uvicorn's ``RequestResponseCycle``)."""

    # The layers above find their ``Responder`` in the scope, which also has the method and the version of HTTP.
    scope: Any
    # Bytes of the answer are written to it. The connection replaces it, to decide itself how it closes.
    transport: Any
    # They begin each answer: the date, which uvicorn renews once a second.
    default_headers: list[tuple[bytes, bytes]]
    # ``receive`` of the application waits for it: it is set when the client leaves and when the answer is complete.
    message_event: asyncio.Event
    # uvicorn's connection goes on to the next request when this is called.
    on_response: Callable[[], None]
    # ``receive`` and uvicorn's own error handling say nothing more to a client that is gone.
    disconnected: bool
    # It says whether the connection stays open after the answer, as the client asked for.
    keep_alive: bool
    # ``receive`` sends an interim answer while it is set: not once the answer has begun.
    waiting_for_100_continue: bool
    # uvicorn's error handling sends its own error unless the answer has begun.
    response_started: bool
    # uvicorn's connection starts the next request at once if the answer before is complete.
    response_complete: bool

    @property
    def flow(self) -> WriteFlow:
        """Return whether the client takes more: the answer waits until it does."""

    async def send(self, message: Any) -> None:
        """Take a message of the application: a ``Responder`` puts its own method in this place."""


class UvicornConnection(HttpToolsProtocol):
    """A connection as uvicorn keeps it, with every attribute of uvicorn's that the subclass uses.

    The subclass overrides these methods, besides those of ``asyncio.Protocol``, which are public:

    - ``on_headers_complete`` and ``on_message_complete``, which the parser calls: a request is checked in the first one
      before uvicorn starts it, and the second one marks the end of its body.
    - ``_start_asgi_task``, with which each request begins, pipelined ones included: it gets its ``Responder`` there.
    - ``on_response_complete``, after which uvicorn reads the next request: a connection that ends must not.
    - ``send_400_response``, by which uvicorn refuses what it cannot parse: here errors have one form, and the client gets
      time to read them.
    - ``timeout_keep_alive_handler``, by which uvicorn ends an idle connection: bytes that are still unread get a deadline.
    """

    # The timers for what a client must send and must read run on it.
    loop: asyncio.AbstractEventLoop
    # Refusals are written to it, and connections are ended with it.
    transport: asyncio.Transport
    # ``resume_reading`` reads on from a refused client. ``pause_writing`` and ``resume_writing`` hold an answer back while
    # it is not certain whether its client has left.
    flow: FlowControl
    # It is fed here, because uvicorn's own ``data_received`` knows no bounds.
    parser: httptools.HttpRequestParser
    # The size of the path is bounded, and a host in it replaces the header.
    url: bytes
    # The size and the number of headers are bounded.
    headers: list[tuple[bytes, bytes]]
    # The request that was read last, whose body may still be coming; None before the first one and after the end.
    cycle: RequestResponseCycle
    # Requests that wait for the answer before theirs are bounded, and dropped when the connection ends.
    pipeline: deque[tuple[RequestResponseCycle, ASGI3Application]]
    # All open connections of the server, to know which ones are too many. uvicorn's type also has other protocols.
    connections: Any
    # It counts requests and has the headers that begin every answer.
    server_state: UvicornState

    def _stop_keep_alive_timer(self) -> None:
        """Keep uvicorn from ending the connection as an idle one."""
        self._unset_keepalive_if_required()

    def _replace_parser(self) -> None:
        """Begin with a new parser, as lenient as uvicorn's own."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _is_answering(self) -> bool:
        """Tell whether the request that was read last has not got its whole answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _count_request(self) -> None:
        """Count a request whose answer is complete, where uvicorn does not."""
        self.server_state.total_requests += 1

    def _default_headers(self) -> list[tuple[bytes, bytes]]:
        return self.server_state.default_headers


class UvicornServer(uvicorn.Server):
    """uvicorn's server, with every attribute of uvicorn's that the subclass uses.

    The subclass overrides these methods:

    - ``startup``, which would accept one connection at each turn of the event loop.
    - ``shutdown``, which leaves the application as it is after a second signal.
    - ``capture_signals``, which would raise a signal again before the engines are stopped.
    """

    # ``http`` is the class of connections, whose bounds may change; ``timeout_keep_alive`` may change as well.
    config: uvicorn.Config
    # New connections get it; those that are open keep a router that hands over from ending at once.
    server_state: UvicornState
    # It starts and ends the application, and has the state that requests see.
    lifespan: LifespanOn | LifespanOff
    # ``shutdown`` closes these: there are none, since a ``Listener`` accepts connections.
    servers: list[asyncio.base_events.Server]
    # The main loop runs, and ``shutdown`` is called at its end, only if this is set.
    started: bool
    # It ends the main loop.
    should_exit: bool
    # It ends ``shutdown`` without waiting for connections.
    force_exit: bool

    def _new_connection(self) -> asyncio.Protocol:
        config = self.config
        connection: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return connection


def encode_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode the head of an answer that is sent without a request's cycle."""
    lines = [name + b": " + value for name, value in headers]
    return STATUS_LINE[status] + b"\r\n".join(lines) + b"\r\n\r\n"
