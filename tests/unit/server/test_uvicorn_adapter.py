"""The private names of uvicorn that the server uses: an upgrade that changes one of them fails here first."""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path
from typing import Any

import httptools
import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

import router.server as package
from router.server import http_protocol, responder, server, uvicorn_adapter

pytestmark = pytest.mark.anyio
SERVER_FOLDER = Path(package.__file__).parent
CONNECTION_ATTRIBUTES = {
    "connections",
    "cycle",
    "flow",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "server_state",
    "transport",
    "url",
}
CONNECTION_METHODS = {
    "_start_asgi_task": ["cycle", "app"],
    "_unset_keepalive_if_required": [],
    "connection_lost": ["exc"],
    "connection_made": ["transport"],
    "data_received": ["data"],
    "eof_received": [],
    "on_headers_complete": [],
    "on_message_complete": [],
    "on_response_complete": [],
    "pause_writing": [],
    "resume_writing": [],
    "send_400_response": ["msg"],
    "timeout_keep_alive_handler": [],
}
CYCLE_ATTRIBUTES = {
    "default_headers",
    "disconnected",
    "flow",
    "keep_alive",
    "message_event",
    "on_response",
    "response_complete",
    "response_started",
    "scope",
    "send",
    "transport",
    "waiting_for_100_continue",
}
FLOW_ATTRIBUTES = {
    "drain",
    "pause_writing",
    "resume_reading",
    "resume_writing",
    "write_paused",
}
STATE_ATTRIBUTES = {"connections", "default_headers", "total_requests"}
SERVER_ATTRIBUTES = {
    "config",
    "force_exit",
    "lifespan",
    "servers",
    "server_state",
    "should_exit",
    "started",
}
SERVER_METHODS = {
    "capture_signals": [],
    "shutdown": ["sockets"],
    "startup": ["sockets"],
}
CONFIG_ATTRIBUTES = {"http", "http_protocol_class", "timeout_keep_alive"}
LIFESPAN_ATTRIBUTES = {"should_exit", "shutdown", "startup", "state"}


class Transport(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """uvicorn reads no further while a request waits."""


async def never_answers(_scope: Any, _receive: Any, _send: Any) -> None:
    await asyncio.Event().wait()


def uvicorn_connection() -> HttpToolsProtocol:
    config = uvicorn.Config(never_answers, log_config=None, lifespan="off")
    connection = HttpToolsProtocol(config, ServerState(), {})
    connection.connection_made(Transport())
    return connection


def receive_request(connection: HttpToolsProtocol, *headers: str) -> None:
    head = "\r\n".join(["GET / HTTP/1.1", "host: localhost", *headers])
    connection.data_received(f"{head}\r\n\r\n".encode())


async def cancel_tasks(connection: HttpToolsProtocol) -> None:
    for task in connection.tasks:
        task.cancel()
    await asyncio.gather(*connection.tasks, return_exceptions=True)


@pytest.mark.parametrize("name", sorted(CONNECTION_ATTRIBUTES))
async def test_a_connection_has_the_attribute(name: str) -> None:
    connection = uvicorn_connection()
    receive_request(connection)
    assert hasattr(connection, name)
    await cancel_tasks(connection)


@pytest.mark.parametrize(("name", "parameters"), sorted(CONNECTION_METHODS.items()))
def test_a_connection_has_the_method(name: str, parameters: list[str]) -> None:
    """An override has no effect if uvicorn lacks the method, and fails if its parameters are others."""
    signature = inspect.signature(getattr(HttpToolsProtocol, name))
    assert list(signature.parameters) == ["self", *parameters]


@pytest.mark.parametrize("name", sorted(CYCLE_ATTRIBUTES))
async def test_a_request_has_the_attribute(name: str) -> None:
    connection = uvicorn_connection()
    receive_request(connection)
    assert hasattr(connection.cycle, name)
    await cancel_tasks(connection)


@pytest.mark.parametrize("name", sorted(FLOW_ATTRIBUTES))
def test_flow_control_has_the_attribute(name: str) -> None:
    assert hasattr(FlowControl(Transport()), name)


@pytest.mark.parametrize("name", sorted(STATE_ATTRIBUTES))
def test_the_state_of_a_server_has_the_attribute(name: str) -> None:
    assert hasattr(ServerState(), name)


@pytest.mark.parametrize("name", sorted(SERVER_ATTRIBUTES - {"lifespan", "servers"}))
def test_a_server_has_the_attribute(name: str) -> None:
    assert hasattr(uvicorn.Server(uvicorn.Config(never_answers, log_config=None)), name)


@pytest.mark.parametrize("name", ["lifespan", "servers"])
def test_a_server_gets_the_attribute_while_it_runs(name: str) -> None:
    assert f"self.{name}" in inspect.getsource(uvicorn.Server)


@pytest.mark.parametrize(("name", "parameters"), sorted(SERVER_METHODS.items()))
def test_a_server_has_the_method(name: str, parameters: list[str]) -> None:
    signature = inspect.signature(getattr(uvicorn.Server, name))
    assert list(signature.parameters) == ["self", *parameters]


@pytest.mark.parametrize("name", sorted(CONFIG_ATTRIBUTES))
def test_a_configuration_has_the_attribute(name: str) -> None:
    config = uvicorn.Config(never_answers, log_config=None)
    config.load()
    assert hasattr(config, name)


@pytest.mark.parametrize("name", sorted(LIFESPAN_ATTRIBUTES))
@pytest.mark.parametrize("mode", ["on", "off"])
async def test_a_lifespan_has_the_attribute(name: str, mode: Any) -> None:
    config = uvicorn.Config(never_answers, log_config=None, lifespan=mode)
    config.load()
    assert hasattr(config.lifespan_class(config), name)


def test_every_status_has_its_line() -> None:
    assert STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"
    assert STATUS_LINE[499] == b"HTTP/1.1 499 \r\n"


async def test_the_parser_is_one_of_httptools_and_hands_over_one_request_at_a_time() -> (
    None
):
    """The first request is started by ``_start_asgi_task``, and the next one waits in the pipeline."""
    connection = uvicorn_connection()
    started: list[RequestResponseCycle] = []
    connection._start_asgi_task = lambda cycle, _app: started.append(cycle)  # type: ignore[method-assign]
    receive_request(connection)
    first = connection.cycle
    receive_request(connection)
    assert isinstance(connection.parser, httptools.HttpRequestParser)
    assert started == [first]
    assert connection.pipeline[0][0] is connection.cycle


async def test_a_request_keeps_its_connection_unless_its_client_asks_to_close_it() -> (
    None
):
    connection = uvicorn_connection()
    receive_request(connection)
    assert connection.cycle.keep_alive
    await cancel_tasks(connection)
    connection = uvicorn_connection()
    receive_request(connection, "connection: close")
    assert not connection.cycle.keep_alive
    await cancel_tasks(connection)


def attributes_used(code: Any, owner: str) -> set[str]:
    """Return the attributes that a module or class uses of anything by this name, as in ``self.cycle.keep_alive``."""
    names = set()
    for node in ast.walk(ast.parse(inspect.getsource(code))):
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node.value).split(".")[-1] == owner
        ):
            names.add(node.attr)
    return names


async def test_the_lists_above_are_complete() -> None:
    """The server uses nothing of uvicorn that the lists above lack."""
    connection = uvicorn_connection()
    receive_request(connection)
    of_connection = {name for name in dir(connection) if not name.startswith("__")}
    used = attributes_used(http_protocol, "self") | set(
        vars(http_protocol.LimitedHttpProtocol)
    )
    used |= attributes_used(uvicorn_adapter.UvicornConnection, "self")
    assert used & of_connection <= CONNECTION_ATTRIBUTES | CONNECTION_METHODS.keys()
    for module in (http_protocol, responder):
        assert attributes_used(module, "cycle") <= CYCLE_ATTRIBUTES
        assert attributes_used(module, "flow") <= FLOW_ATTRIBUTES
    for module in (http_protocol, uvicorn_adapter):
        assert attributes_used(module, "server_state") <= STATE_ATTRIBUTES
    of_server = {
        name
        for name in dir(uvicorn.Server(connection.config))
        if not name.startswith("__")
    }
    used = attributes_used(server, "self") | {
        name for name in vars(server.Server) if not name.startswith("__")
    }
    used |= attributes_used(uvicorn_adapter.UvicornServer, "self")
    assert used & of_server <= SERVER_ATTRIBUTES | SERVER_METHODS.keys()
    await cancel_tasks(connection)


def test_no_other_module_of_the_server_looks_inside_uvicorn() -> None:
    for path in SERVER_FOLDER.glob("*.py"):
        if path.name != "uvicorn_adapter.py":
            assert "from uvicorn" not in path.read_text("utf-8"), path
