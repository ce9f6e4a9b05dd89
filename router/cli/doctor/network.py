"""Checks of ports and of what runs."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import psutil

from router.cli.client import KEY_NEEDED, authorization, own_url, trusted
from router.cli.doctor.findings import Check, Finding, local_engines, ok, problem, warning
from tiers.errors import PortInUse
from tiers.lifecycle.process import check_port_free
from tiers.preparing import Preparing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.cli.doctor.findings import CheckContext

GROUP, RUNNING = "network", "running"
TIMEOUT_S = 3.0
DETAIL_CHARS = 200
GUARD = "tiers/lifecycle/guard.py"
TRANSIENT = {"starting", "warming", "draining"}


def router_port(context: CheckContext) -> Iterator[Finding]:
    """Check that the router's port is free, or that a router has it."""
    host, port = context.settings.server.host, context.settings.server.port
    if not port:
        yield ok("any free one")
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            yield ok(f"{port} on {host} is free")
    except OSError as error:
        answer = _get(replace(context, url="", key=""), "/healthz")
        if answer is not None and answer.is_success and answer.text == '{"status":"alive"}':
            yield ok(f"{port} on {host}: a router listens ({holder(port)})")
        else:
            found = f"{port} on {host}: {error.strerror}, held by {holder(port)}"
            yield problem(found, "end what holds it, or set server.port (--port)")


def engine_ports(context: CheckContext) -> Iterator[Finding]:
    """Check the ports of engines that are started here."""
    count, base = local_engines(context), context.settings.engine.base_port
    if not count:
        return
    taken = {}
    for port in range(base, base + count):
        try:
            check_port_free("127.0.0.1", port)
        except PortInUse:
            taken[port] = holder(port)
    running = _running_ports(context) if taken else set()
    others = {port for port in taken if port not in running and _of_a_router(port)}
    foreign = ", ".join(f"{port} by {by}" for port, by in taken.items() if port not in running | others)
    shown = f"{base} to {base + count - 1}" if count > 1 else str(base)
    if foreign:
        yield problem(f"held: {foreign}", "end what holds them, or set engine.base_port")
    elif others:
        found = f"{', '.join(map(str, sorted(others)))}: engines of another router of this machine have them"
        yield warning(found, "name that router with --url; for a second one beside it set engine.base_port")
    else:
        yield ok(f"{shown}: the running router's engines have them" if taken else f"{shown} are free")


def holder(port: int) -> str:
    """Return which process listens on a port, as far as this user may know."""
    with contextlib.suppress(psutil.Error, OSError):
        if process := _listener(port):
            script = next((Path(part).name for part in process.cmdline()[1:2] if part.endswith(".py")), "")
            return f"{process.name()} {script}".rstrip() + f", pid {process.pid}"
    return "a process that this user may not see" if os.geteuid() else "a process outside of this container"


def _listener(port: int) -> psutil.Process | None:
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            return psutil.Process(connection.pid) if connection.pid is not None else None
    return None


def _of_a_router(port: int) -> bool:
    """Tell whether an engine that a router has started listens on a port: its guard stands above it."""
    with contextlib.suppress(psutil.Error, OSError):
        if process := _listener(port):
            return any(part.endswith(GUARD) for each in process.parents() for part in each.cmdline())
    return False


def running_router(context: CheckContext) -> Iterator[Finding]:
    """Check a running router's health, its replicas and its measurements."""
    alive, url = _get(context, "/healthz"), context.url or own_url(context.settings)
    if alive is None:
        yield ok(f"none answers at {url} ('make up' starts one)")
        return
    if alive.status_code != httpx.codes.OK:
        found = f"{url} is no router: HTTP {alive.status_code}"
        yield problem(found, "give the router's address with --url")
        return
    ready = _get(context, "/readyz")
    if ready is None or ready.status_code != httpx.codes.OK:
        then = "'qarr tiers' shows why; 'qarr logs --level warning' has what happened"
        yield problem(f"{url} is alive, but not ready", then)
    else:
        yield ok(f"{url} is ready")
    fleet = _get(context, "/tiers")
    if fleet is None or fleet.status_code == httpx.codes.UNAUTHORIZED:
        yield warning("not checked", KEY_NEEDED, "tiers")
        return
    yield from judge_fleet(fleet.json())
    profiling = fleet.json()["profiling"]
    yield judge_profiling(profiling)
    for tier, why in profiling["pointless"].items():
        found, _, then = why.partition(": ")
        yield warning(found, then, f"tier {tier}")


def judge_fleet(fleet: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each replica of a fleet as ``GET /tiers`` gives it, and for each tier without one."""
    for tier in fleet["tiers"]:
        name = f"tier {tier['tier']}"
        if not tier["replicas"]:
            yield _without_engine(tier, name)
        for replica in tier["replicas"]:
            state, detail = replica["state"], _first_line(replica["detail"])
            found, logs = f"{replica['id']} is {state}{detail}", f"'qarr logs {replica['id']}"
            if state == "ready" and replica["breaker"] != "closed":
                found = f"{found}, but gets few requests or none after failures"
                yield warning(found, f"{logs} --level warning' has its last lines", name)
            elif state == "ready":
                yield ok(f"{found}, {replica['served']} served, {replica['failed']} failed", name)
            elif state in TRANSIENT:
                yield warning(found, "wait, or 'qarr tiers resume' it, if it was drained", name)
            elif state == "quarantined":
                yield problem(
                    found, f"mend it where it runs; 'qarr tiers resume {replica['id']}' checks it again", name
                )
            else:
                then = f"{logs}', correct the cause, then 'qarr tiers restart {replica['id']}'"
                yield problem(found, then, name)


def judge_profiling(profiling: dict[str, Any]) -> Finding:
    """Return what a router has measured of its tiers, as ``GET /tiers`` gives it."""
    check, state, measured = "measuring", profiling["state"], profiling["measured"]
    known = ", ".join(f"{name} of {' '.join(tiers)}" for name, tiers in measured.items() if tiers)
    found = f"measured: {known or 'nothing yet'}"
    detail = f" ({profiling['detail']})" if profiling["detail"] else ""
    if profiling["what"] is not None:
        far = f", {profiling['done']} of {profiling['total']}" if profiling["total"] else ""
        return ok(f"{profiling['what']}{far}, {state}{detail}; {found}", check)
    if all(measured.values()):
        return ok(found, check)
    if state == "off":
        by_hand = " and ".join(f"'qarr profile {name}'" for name, tiers in measured.items() if not tiers)
        return warning(f"off{detail}; {found}", f"run {by_hand}", check)
    return ok(f"{state}{detail}; {found}", check)


def _without_engine(tier: dict[str, Any], check: str) -> Finding:
    if tier.get("state") == "waiting":
        return warning("none of its engines is known yet", "name them: discovery.file, or the tier's DNS name", check)
    if not tier.get("preparing"):
        return ok("has no engine: left out", check)
    if tier["state"] == "preparing":
        return warning(f"is being prepared: {Preparing(**tier['preparing']).text}", "wait", check)
    return problem(f"has no checkpoint{_first_line(tier['detail'])}", "'qarr model prepare' makes it", check)


def _first_line(detail: str | None) -> str:
    """Return the first line of a detail, after a colon; empty without a detail."""
    text = (detail or "").partition("\n")[0][:DETAIL_CHARS]
    return f": {text}" if text else ""


def _get(context: CheckContext, path: str) -> httpx.Response | None:
    url, headers = (context.url or own_url(context.settings)) + path, authorization(context.key)
    verify = trusted(context.settings, context.url)
    try:
        return httpx.get(url, headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=verify)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


def _running_ports(context: CheckContext) -> set[int]:
    fleet = _get(context, "/tiers")
    if fleet is None:
        return set()
    with contextlib.suppress(ValueError, KeyError, TypeError):  # not a router's answer
        replicas = (replica for tier in fleet.json()["tiers"] for replica in tier["replicas"])
        return {urlsplit(replica["url"] or "").port or 0 for replica in replicas}
    return set()


CHECKS: tuple[Check, ...] = (
    (GROUP, "router port", router_port),
    (GROUP, "engine ports", engine_ports),
    (RUNNING, "router", running_router),
)
