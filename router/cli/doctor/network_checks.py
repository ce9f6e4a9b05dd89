"""The checks of ports: the router's, and those of its engines."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from router.cli.doctor.findings import CheckContext, Finding, ok, problem, warning
from tiers.errors import PortInUseError
from tiers.lifecycle.process import check_port_free

# The script that stands above each engine that a router has started.
GUARD = "tiers/lifecycle/guard.py"
ROUTER_IS_ALIVE = '{"status":"alive"}'


def check_router_port(context: CheckContext) -> Iterator[Finding]:
    """Check that the router's port is free, or that a router has it."""
    host = context.settings.server.host
    port = context.settings.server.port
    free_text = f"{port} on {host} is free" if port else "any free one"
    address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=address_family):
            yield ok(free_text)
    except OSError as error:
        if _is_own_router(context):
            yield ok(f"{port} on {host}: a router listens ({describe_holder(port)})")
        else:
            yield problem(
                f"{port} on {host}: {error.strerror}, held by {describe_holder(port)}",
                "end what holds it, or set server.port (--port)",
            )


def _is_own_router(context: CheckContext) -> bool:
    """Tell whether a router answers at the address of the settings. It is asked without a key: anything may listen there."""
    answer = replace(context, url="", key="").ask_router("/healthz")
    return answer is not None and answer.is_success and answer.text == ROUTER_IS_ALIVE


def check_engine_ports(context: CheckContext) -> Iterator[Finding]:
    """Check that the ports of engines are free, or that the running router's engines have them."""
    ports = _engine_ports(context)
    taken_ports = [port for port in ports if not _is_free(port)]
    running_ports = _running_ports(context) if taken_ports else set()
    unexpected_ports = [port for port in taken_ports if port not in running_ports]
    other_routers_ports: list[int] = []
    foreign_holders: list[str] = []
    for port in unexpected_ports:
        if _is_of_a_router(port):
            other_routers_ports.append(port)
        else:
            foreign_holders.append(f"{port} by {describe_holder(port)}")
    if foreign_holders:
        yield problem(
            f"held: {', '.join(foreign_holders)}",
            "end what holds them, or set engine.base_port",
        )
    elif other_routers_ports:
        port_list = ", ".join(map(str, other_routers_ports))
        yield warning(
            f"{port_list}: engines of another router of this machine have them",
            "name that router with --url; for a second one beside it set engine.base_port",
        )
    elif taken_ports:
        yield ok(f"{ports[0]} to {ports[-1]}: the running router's engines have them")
    elif ports:
        yield ok(f"{ports[0]} to {ports[-1]} are free")


def _engine_ports(context: CheckContext) -> range:
    tiers = context.settings.tiers
    first_port = context.settings.engine.base_port
    engine_count = sum(tiers.of(name).replicas_here for name in tiers.names)
    return range(first_port, first_port + engine_count)


def _is_free(port: int) -> bool:
    try:
        check_port_free("127.0.0.1", port)
    except PortInUseError:
        return False
    return True


def _running_ports(context: CheckContext) -> set[int]:
    """Return the ports of the running router's engines.

    They may be processes of another user, about whom this user can see nothing else.
    """
    try:
        answer = context.ask_router("/tiers")
        if answer is None:
            return set()
        return set(_ports_in(answer.json()))
    except (ValueError, KeyError, TypeError):
        # What answers is no router.
        return set()


def _ports_in(fleet: dict[str, Any]) -> Iterator[int]:
    for tier in fleet["tiers"]:
        for replica in tier["replicas"]:
            yield urlsplit(replica["url"] or "").port or 0


def describe_holder(port: int) -> str:
    """Return for people which process listens on a port."""
    with contextlib.suppress(psutil.Error, OSError):
        process = _listener(port)
        if process is not None:
            name = f"{process.name()} {_script_of(process)}".rstrip()
            return f"{name}, pid {process.pid}"
    if os.geteuid():
        return "a process that this user may not see"
    return "a process outside of this container"


def _script_of(process: psutil.Process) -> str:
    """Return the Python script that a process runs; empty: it runs none."""
    for argument in process.cmdline()[1:2]:
        if argument.endswith(".py"):
            return Path(argument).name
    return ""


def _listener(port: int) -> psutil.Process | None:
    """Return the process that listens on a port; None: this user may not see it, or there is none."""
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or not connection.laddr:
            continue
        if connection.laddr.port == port:
            if connection.pid is None:
                return None
            return psutil.Process(connection.pid)
    return None


def _is_of_a_router(port: int) -> bool:
    """Tell whether an engine that a router has started listens on a port: its guard stands above it."""
    with contextlib.suppress(psutil.Error, OSError):
        process = _listener(port)
        if process is not None:
            return any(_is_guard(parent) for parent in process.parents())
    return False


def _is_guard(process: psutil.Process) -> bool:
    return any(argument.endswith(GUARD) for argument in process.cmdline())
