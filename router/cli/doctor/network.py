"""Checks of ports, of what the router depends on, and of what runs."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import psutil
from redis import Redis
from redis.exceptions import RedisError

from router.cli.client import KEY_NEEDED
from router.cli.doctor.findings import Check, Finding, local_tiers, ok, problem, warning
from router.telemetry.tracing import TelemetryError, exporter_address
from tiers.errors import PortInUse, ProbeError
from tiers.lifecycle.process import check_port_free
from tiers.lifecycle.warmup import tokens_digest
from tiers.preparing import Preparing
from tiers.probe import EngineProbe
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from router.cli.doctor.findings import Question

GROUP, RUNNING = "network", "running"
TIMEOUT_S = 3.0
SKEW_S = 3.0  # Date headers have whole seconds
GOOD = {"ready"}
PASSING = {"starting", "warming", "draining"}


def router_port(question: Question) -> Iterator[Finding]:
    """Check that the router's port can be listened on, or that a router does."""
    host, port = question.settings.server.host, question.settings.server.port
    if not port:
        yield ok(GROUP, "router port", "any free one")
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            yield ok(GROUP, "router port", f"{port} on {host} is free")
    except OSError as error:
        if _is_router(question):
            yield ok(GROUP, "router port", f"{port} on {host}: a router listens ({holder(port)})")
        else:
            yield problem(
                GROUP,
                "router port",
                f"{port} on {host}: {error.strerror}, held by {holder(port)}",
                "end what holds it, or set server.port (--port)",
            )


def engine_ports(question: Question) -> Iterator[Finding]:
    """Check the ports of engines that are started here."""
    count, base = len(local_tiers(question)), question.settings.engine.base_port
    if not count:
        return
    taken = {}
    for port in range(base, base + count):
        try:
            check_port_free("127.0.0.1", port)
        except PortInUse:
            taken[port] = holder(port)
    running = _running_ports(question)
    strange = {port: by for port, by in taken.items() if port not in running}
    shown = f"{base} to {base + count - 1}" if count > 1 else str(base)
    if strange:
        held = ", ".join(f"{port} by {by}" for port, by in strange.items())
        yield problem(GROUP, "engine ports", f"held: {held}", "end what holds them, or set engine.base_port")
    elif taken:
        yield ok(GROUP, "engine ports", f"{shown}: the running router's engines have them")
    else:
        yield ok(GROUP, "engine ports", f"{shown} are free")


def holder(port: int) -> str:
    """Return who listens on a port, as far as this user may know."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                if connection.pid is None:
                    break
                process = psutil.Process(connection.pid)
                script = next((Path(part).name for part in process.cmdline()[1:2] if part.endswith(".py")), "")
                return f"{process.name()} {script}".rstrip() + f", pid {connection.pid}"
    return "a process that this user may not see" if os.geteuid() else "a process outside of this container"


def redis(question: Question) -> Iterator[Finding]:
    """Check that Redis answers, and that its clock is ours."""
    url = question.settings.state.redis_url.get_secret_value()
    if not url:
        yield ok(GROUP, "Redis", "not used: this router counts quotas by itself")
        return
    where = _address(url)
    then = "start it, or correct state.redis_url; meanwhile each router counts quotas alone"
    try:
        with contextlib.closing(
            Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        ) as client:
            before = time.time()
            seconds, microseconds = client.time()
            took_s = time.time() - before
    except (RedisError, OSError, ValueError) as error:
        yield problem(GROUP, "Redis", f"{where} does not answer ({type(error).__name__})", then)
        return
    skew_s = seconds + microseconds / 1e6 - before - took_s / 2
    if abs(skew_s) > 1:
        yield warning(
            GROUP, "Redis", f"{where} answers, its clock is {skew_s:+.1f} s off ours", "synchronise both clocks (NTP)"
        )
    else:
        yield ok(GROUP, "Redis", f"{where} answers in {took_s * 1000:.1f} ms")


def otlp(_question: Question) -> Iterator[Finding]:
    """Check that the traces' destination can be reached."""
    try:
        address = exporter_address()
    except TelemetryError as error:
        yield problem(GROUP, "OTLP", str(error), "correct the variable; the router does not start with it")
        return
    if address is None:
        yield ok(GROUP, "OTLP", "not set: traces are kept in memory only (OTEL_EXPORTER_OTLP_ENDPOINT)")
        return
    host, port = address
    try:
        with socket.create_connection((host, port), TIMEOUT_S):
            yield ok(GROUP, "OTLP", f"{host}:{port} can be reached")
    except OSError as error:
        yield problem(
            GROUP,
            "OTLP",
            f"{host}:{port} cannot be reached ({error.strerror or error})",
            "start the collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT",
        )


def running_router(question: Question) -> Iterator[Finding]:
    """Check a running router's health, and its replicas'."""
    alive = _get(question, "/healthz")
    if alive is None:
        yield ok(RUNNING, "router", f"none answers at {question.url} ('make up' starts one)")
        return
    if alive.status_code != httpx.codes.OK:
        yield problem(
            RUNNING,
            "router",
            f"{question.url} is no router: HTTP {alive.status_code}",
            "give the router's address with --url",
        )
        return
    ready = _get(question, "/readyz")
    if ready is None or ready.status_code != httpx.codes.OK:
        yield problem(
            RUNNING,
            "router",
            f"{question.url} is alive, but not ready",
            "'qarr tiers' shows why; 'qarr logs --level warning' has what happened",
        )
    else:
        yield ok(RUNNING, "router", f"{question.url} is ready")
    fleet = _get(question, "/tiers")
    if fleet is None or fleet.status_code == httpx.codes.UNAUTHORIZED:
        yield warning(RUNNING, "tiers", "not looked at", KEY_NEEDED)
        return
    yield from judge_fleet(fleet.json())
    yield judge_profiling(fleet.json()["profiling"])


def judge_fleet(fleet: dict[str, Any]) -> Iterator[Finding]:
    """Say how a running router's replicas are.

    Args:
        fleet: As ``GET /tiers`` gives it.
    """
    for tier in fleet["tiers"]:
        if not tier["replicas"]:
            yield _without_engine(tier)
        for replica in tier["replicas"]:
            state, detail = replica["state"], (replica["detail"] or "").partition("\n")[0][:200]
            found = f"{replica['id']} is {state}{f': {detail}' if detail else ''}"
            name = f"tier {tier['tier']}"
            if state in GOOD and replica["breaker"] != "closed":
                yield warning(
                    RUNNING,
                    name,
                    f"{found}, but is spared after failures",
                    f"'qarr logs {replica['id']} --level warning' has its last lines",
                )
            elif state in GOOD:
                yield ok(RUNNING, name, f"{found}, {replica['served']} served, {replica['failed']} failed")
            elif state in PASSING:
                yield warning(RUNNING, name, found, "wait, or 'qarr tiers resume' it, if it was drained")
            else:
                yield problem(
                    RUNNING,
                    name,
                    found,
                    f"'qarr logs {replica['id']}', mend the cause, then 'qarr tiers restart {replica['id']}'",
                )


def judge_profiling(profiling: dict[str, Any]) -> Finding:
    """Return what is found of a router's measurements of itself.

    Args:
        profiling: As ``GET /tiers`` gives it.
    """
    state, what, total = profiling["state"], profiling["what"], profiling["total"]
    measured = profiling["measured"]
    known = ", ".join(f"{name} of {' '.join(tiers)}" for name, tiers in measured.items() if tiers)
    found = f"measured: {known or 'nothing yet'}"
    detail = f" ({profiling['detail']})" if profiling["detail"] else ""
    if what is not None:
        far = f", {profiling['done']} of {total}" if total else ""
        return ok(RUNNING, "measuring", f"{what}{far}, {state}{detail}; {found}")
    if all(measured.values()):
        return ok(RUNNING, "measuring", found)
    if state == "off":
        by_hand = " and ".join(f"'qarr profile {name}'" for name, tiers in measured.items() if not tiers)
        return warning(RUNNING, "measuring", f"off{detail}; {found}", f"run {by_hand}")
    return ok(RUNNING, "measuring", f"{state}{detail}; {found}")


def _without_engine(tier: dict[str, Any]) -> Finding:
    name = f"tier {tier['tier']}"
    if not tier.get("preparing"):
        return ok(RUNNING, name, "has no engine: left out")
    if tier["state"] == "preparing":
        return warning(RUNNING, name, f"is being prepared: {Preparing(**tier['preparing']).text}", "wait")
    said = tier["detail"].partition("\n")[0][:200]
    return problem(RUNNING, name, f"has no checkpoint{f': {said}' if said else ''}", "'qarr model prepare' makes it")


def engines(question: Question) -> Iterator[Finding]:
    """Check engines by URL: whether they answer, and read text as the same tokens."""
    urls = [(name, url.rstrip("/")) for name in TierName for url in getattr(question.settings.tiers, name.value).urls]
    if urls:
        yield from asyncio.run(_examined(question, urls))


async def _examined(question: Question, urls: list[tuple[TierName, str]]) -> list[Finding]:
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        probes = [EngineProbe(client, url, question.settings.engine.api_key) for _, url in urls]
        both = await asyncio.gather(
            *(_engine(question, name, probe) for (name, _), probe in zip(urls, probes, strict=True))
        )
    digests = {digest for _, digest in both if digest}
    found = [finding for finding, _ in both]
    if len(digests) > 1:
        found.append(
            problem(
                RUNNING,
                "tokenizers",
                "the engines read one text as different tokens",
                "all tiers must be made from one base model: 'qarr model prepare'",
            )
        )
    elif len(digests) == 1 and len(both) > 1:
        found.append(ok(RUNNING, "tokenizers", "the engines read text as the same tokens"))
    return found


async def _engine(question: Question, name: TierName, probe: EngineProbe) -> tuple[Finding, str]:
    """Return what is found of one engine, and a digest of how it reads a text."""
    check, then = f"engine {name}", f"start it, or correct tiers.{name}.urls"
    try:
        health = await probe.client.get(f"{probe.url}/health")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return problem(RUNNING, check, f"{_address(probe.url)} does not answer ({type(error).__name__})", then), ""
    if health.status_code != httpx.codes.OK:
        return problem(RUNNING, check, f"{_address(probe.url)} is not healthy: HTTP {health.status_code}", then), ""
    try:
        model, context = await probe.model()
        digest = await tokens_digest(probe, model)
    except ProbeError as error:
        return problem(
            RUNNING,
            check,
            f"{_address(probe.url)} does not answer as vLLM does ({type(error).__name__})",
            "is it vLLM, and engine.api_key its key?",
        ), ""
    wanted, skew_s = getattr(question.settings.tiers, name.value).max_model_len, _skew_s(health)
    found = f"{_address(probe.url)} serves {model}, context {context}"
    if context < wanted:
        return problem(
            RUNNING,
            check,
            f"{found}, less than tiers.{name}.max_model_len = {wanted}",
            f"set tiers.{name}.max_model_len to {context}",
        ), digest
    if skew_s is not None and abs(skew_s) > SKEW_S:
        return warning(
            RUNNING, check, f"{found}; its clock is {skew_s:+.0f} s off ours", "synchronise both clocks (NTP)"
        ), digest
    return ok(RUNNING, check, found), digest


def _skew_s(response: httpx.Response) -> float | None:
    with contextlib.suppress(TypeError, ValueError):
        return email.utils.parsedate_to_datetime(response.headers.get("date", "")).timestamp() - time.time()
    return None


def _get(question: Question, path: str) -> httpx.Response | None:
    headers = {"authorization": f"Bearer {question.key}"} if question.key else {}
    try:
        return httpx.get(question.url + path, headers=headers, timeout=TIMEOUT_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


def _is_router(question: Question) -> bool:
    """Tell whether what listens on the router's port is one."""
    host, port = question.settings.server.host, question.settings.server.port
    shown = "127.0.0.1" if host in {"0.0.0.0", "::"} else f"[{host}]" if ":" in host else host
    try:
        answer = httpx.get(f"http://{shown}:{port}/healthz", timeout=TIMEOUT_S, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK and answer.text == '{"status":"alive"}'


def _running_ports(question: Question) -> set[int]:
    """Return the ports of the running router's engines."""
    fleet = _get(question, "/tiers")
    if fleet is None or fleet.status_code != httpx.codes.OK:
        return set()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        replicas: Iterable[dict[str, Any]] = (r for tier in fleet.json()["tiers"] for r in tier["replicas"])
        return {urlsplit(replica["url"] or "").port or 0 for replica in replicas}
    return set()


def _address(url: str) -> str:
    """Return a URL's host and port: not its user, password or path."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.hostname:
            return f"{parts.hostname}{f':{parts.port}' if parts.port else ''}"
    return "the address (it names no host)"


CHECKS: tuple[Check, ...] = (
    (GROUP, "router port", router_port),
    (GROUP, "engine ports", engine_ports),
    (GROUP, "Redis", redis),
    (GROUP, "OTLP", otlp),
    (RUNNING, "router", running_router),
    (RUNNING, "engines", engines),
)
