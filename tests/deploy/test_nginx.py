"""Real nginx, as configured in deploy/nginx, in front of two routers that are processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import httpx
import pytest

from router.settings import load_settings
from tests.deploy.services import DEPLOY, program, running
from tests.fakes.engine import ANSWER, Behaviour
from tests.ports import reserved_ports
from tests.unit.router_stack import events
from tests.unit.server.test_handover import Routers, routers
from tests.waiting import until, within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]


@dataclass(slots=True)
class Front:
    """nginx and the routers behind it."""

    url: str
    folder: Path
    nginx: asyncio.subprocess.Process
    first: Routers
    second: Routers
    client: httpx.AsyncClient

    async def ask(self, **body: Any) -> httpx.Response:
        return await self.client.post(
            f"{self.url}/generate", json={"prompt": "hi", **body}
        )

    def reload(self, routers: str) -> None:
        (self.folder / "qarr-routers.inc").write_text(routers)
        self.nginx.send_signal(signal.SIGHUP)

    def log(self) -> list[dict[str, str]]:
        return [
            json.loads(line)
            for line in (self.folder / "access.log").read_text("utf-8").splitlines()
        ]

    def line_of(self, request_id: str) -> dict[str, str] | None:
        """Return the log's line about a request, or None if nginx has not written it yet."""
        for line in self.log():
            if line["request_id"] == request_id:
                return line
        return None


def router_lines(ports: list[int]) -> str:
    text = (DEPLOY / "nginx/qarr-routers.inc").read_text("utf-8")
    assert re.findall(r"^server 127\.0\.0\.1:(\d+)", text, re.MULTILINE) == [
        "8080",
        "8081",
    ]
    return text.replace(":8080", f":{ports[0]}").replace(":8081", f":{ports[1]}")


def configure(folder: Path, port: int, routers: str) -> None:
    """Write a configuration around deploy/nginx, which is taken as it is but for the port and the place of its log."""
    folder.mkdir()
    text = (DEPLOY / "nginx/qarr.conf").read_text("utf-8")
    for old, new in (
        ("listen 8000;", f"listen 127.0.0.1:{port};"),
        ("/var/log/nginx/qarr.log", str(folder / "access.log")),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "qarr.conf").write_text(text)
    (folder / "qarr-routers.inc").write_text(routers)
    # its folders here are not for others
    user = "user root;" if os.getuid() == 0 else ""
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"{user} daemon off; worker_processes 1; pid {folder}/pid; error_log stderr;\n"
        f"events {{}}\nhttp {{ {places} include qarr.conf; }}\n"
    )


@asynccontextmanager
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with AsyncExitStack() as stack:
        found = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            found.append(await stack.enter_async_context(routers(tmp_path / name)))
        await asyncio.gather(*(each.start() for each in found))
        (port,) = reserved_ports()
        folder = tmp_path / "nginx"
        configure(folder, port, router_lines([each.port for each in found]))
        argv = [
            program("nginx"),
            "-p",
            str(folder),
            "-c",
            str(folder / "nginx.conf"),
            "-e",
            "stderr",
        ]
        nginx = await stack.enter_async_context(
            running(argv, f"http://127.0.0.1:{port}/healthz", folder)
        )
        # a reload closes idle connections as they are used
        limits = httpx.Limits(max_keepalive_connections=0)
        client = await stack.enter_async_context(
            httpx.AsyncClient(timeout=60, trust_env=False, limits=limits)
        )
        yield Front(
            f"http://127.0.0.1:{port}", folder, nginx, found[0], found[1], client
        )


def slow(front: Front) -> list[Behaviour]:
    """Let both routers' engines answer slowly; return their behaviours."""
    behaviours = [*front.first.behaviours.values(), *front.second.behaviours.values()]
    for behaviour in behaviours:
        behaviour.delay_s = 0.3
    return behaviours


async def test_streams_headers_and_what_is_let_through(tmp_path: Path) -> None:
    """Events come one by one, lost streams are found again, bounds hold, and operators' endpoints are not there."""
    async with front(tmp_path) as found:
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        headers = {
            "traceparent": f"00-{trace}-00f067aa0ba902b7-01",
            "x-request-id": "mine-1",
        }
        asked = {"json": {"prompt": "hi", "tier": "fast"}, "headers": headers}
        for each in (found.first, found.second):
            each.behaviours["fast"].stall_after = 3
        async with found.client.stream(
            "POST", f"{found.url}/generate", **asked
        ) as answer:
            assert answer.headers["x-qarr-trace-id"] == trace
            assert answer.headers["x-request-id"] == "mine-1"
            text = ""
            # The engine says no more than this, so what is here was not held back until the answer was whole.
            async for part in answer.aiter_text():
                text += part
                if "".join(data["text"] for _, data in events(text)) == "".join(
                    ANSWER[:3]
                ):
                    break
            assert text.endswith("\n\n")
        for each in (found.first, found.second):
            each.behaviours["fast"].stall_after = None
        assert events((await found.ask(tier="fast")).text)[-1][0] == "done"
        await lost_streams(found)
        await let_through(found)
        await bounds(found)
        line = next(entry for entry in found.log() if entry["path"] == "/generate")
        assert (line["request_id"], line["trace_id"], line["status"]) == (
            "mine-1",
            trace,
            "200",
        )


async def lost_streams(found: Front) -> None:
    """Check that who resumes a stream reaches the router that keeps it, whichever nginx asks first."""
    whole = await found.ask(resumable=True)
    last = f"{whole.headers['x-qarr-stream-id']}.0"
    again = [
        await found.client.post(
            f"{found.url}/generate",
            json={"prompt": "hi"},
            headers={"last-event-id": last},
        )
        for _ in range(4)
    ]
    assert {answer.status_code for answer in again} <= {200, 410}
    assert again[0].text == whole.text
    unknown = {"last-event-id": "AAAAAAAAAAAAAAAA.1"}
    lost = await found.client.post(
        f"{found.url}/generate", json={"prompt": "hi"}, headers=unknown
    )
    assert (lost.status_code, lost.json()["type"]) == (
        404,
        "urn:qarr:problem:stream-not-found",
    )


async def let_through(found: Front) -> None:
    replica = "/admin/replicas/fast-0/drain"
    for method, path in [
        *(("GET", path) for path in ("/metrics", "/tiers", "/", "/live", "/requests", "/traces", "/policy")),
        *(("GET", path) for path in ("/admin/operations", "/v1/../metrics", "//metrics", "/metrics/", "/v1/%2e%2e/metrics")),
        ("POST", replica), ("POST", "/v1/.." + replica), ("POST", "/generate/.." + replica),
    ]:  # fmt: skip
        refused = await raw(found.url, method, path)
        assert b" 404 " in refused.partition(b"\r\n")[0], (method, path, refused)
        assert b"urn:qarr:problem:not-found" in refused, (method, path)
    for path in ("/v1/models", "/openapi.json", "/healthz", "/readyz"):
        assert (await found.client.get(found.url + path)).status_code == 200, path
    chat = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
    assert (
        await found.client.post(f"{found.url}/v1/chat/completions", json=chat)
    ).status_code == 200
    assert (
        await found.client.post(f"{found.url}/route", json={"prompt": "hi"})
    ).status_code == 200
    for origin, status in (
        (found.url, 200),
        ("https://evil.example", 403),
    ):  # of a page that is served here, or elsewhere
        sent = await found.client.post(
            f"{found.url}/route", json={"prompt": "hi"}, headers={"origin": origin}
        )
        assert sent.status_code == status, origin


async def raw(url: str, method: str, path: str) -> bytes:
    """Send a request whose path no client library has tidied up; return the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    writer.write(
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    )
    answer = await reader.read()
    writer.close()
    return answer


async def bounds(found: Front) -> None:
    """Check that nginx lets through what a router takes, and no more."""
    server = load_settings().server
    assert server.max_body_bytes == 1 << 20
    body = json.dumps({"prompt": "hi", "tier": "x" * (server.max_body_bytes - 100)})
    refused = await found.client.post(f"{found.url}/route", content=body)
    # the router has read it
    assert refused.json()["type"] == "urn:qarr:problem:invalid-request"
    assert (
        await found.client.post(f"{found.url}/route", content=body + " " * 200)
    ).status_code == 413
    for status, headers in [
        (200, {f"x-{n}": "y" * 5000 for n in range(5)}),
        (200, {"x": "y" * 30_000}),
        (431, {f"x-{n}": "y" * 5000 for n in range(8)}),
    ]:
        answer = await found.client.get(f"{found.url}/healthz", headers=headers)
        assert answer.status_code == status
    # the router's own word
    assert answer.json()["type"].startswith("urn:qarr:problem:")


async def test_a_router_that_leaves_fails_no_request(tmp_path: Path) -> None:
    """Marked down and ended while requests and streams go on, then killed outright: every answer is complete."""
    async with front(tmp_path) as found:
        slow(found)
        done: list[httpx.Response] = []
        going = True

        async def ask_on() -> None:
            while going:
                done.append(await found.ask())

        askers = [asyncio.create_task(ask_on()) for _ in range(6)]
        await until(lambda: any(b.running for b in found.first.behaviours.values()))
        found.reload(
            router_lines([found.first.port, found.second.port]).replace(
                "10s;", "10s down;", 1
            )
        )
        before = len(done)
        await until(lambda: len(done) > before + 6)
        leaving = found.first.started[0]
        leaving.send_signal(signal.SIGTERM)
        await asyncio.wait_for(leaving.wait(), 30)
        before = len(done)
        await until(lambda: len(done) > before + 6)
        going = False
        await asyncio.gather(*askers)
        assert {answer.status_code for answer in done} == {200}
        assert all(events(answer.text)[-1][0] == "done" for answer in done)
        # Listed again although it is gone, as after a crash: it cannot be reached, and the other one is asked.
        found.reload(router_lines([found.first.port, found.second.port]))
        answers = [await found.ask() for _ in range(4)]
        assert {answer.status_code for answer in answers} == {200}
        found.second.started[0].kill()
        await within(found.second.started[0].wait(), "the process to end")
        nobody = await found.ask()
        assert (nobody.status_code, nobody.json()["type"]) == (
            503,
            "urn:qarr:problem:no-router",
        )
        assert nobody.headers["retry-after"] == "2"


def sent_to(behaviours: Iterable[Behaviour]) -> int:
    return sum(
        body.get("max_tokens", 0) > 100 for b in behaviours for body in b.requests
    )


async def test_a_post_that_was_sent_is_not_sent_again(tmp_path: Path) -> None:
    """A router that dies with a request in its hands: the caller is told, no other router generates it once more."""
    async with front(tmp_path) as found:
        behaviours = slow(found)
        for behaviour in behaviours:
            behaviour.delay_s = 5
        asked = asyncio.create_task(found.ask(stream=False))
        await until(lambda: sent_to(behaviours))  # not what routers ask for themselves
        (
            found.first if sent_to(found.first.behaviours.values()) else found.second
        ).started[0].kill()
        assert (await asked).status_code == 503
        assert sent_to(behaviours) == 1


async def routers_of(
    found: Front, keys: list[str], header: str = "x-session-id"
) -> dict[str, str]:
    """Send a request for each key, as a session or as the beginning of the prompt; return the routers that took them."""
    seen = {}
    for key in keys:
        # nginx writes a line after it has answered, so lines of earlier requests may be late
        request_id = uuid4().hex
        headers = {"x-request-id": request_id}
        prompt = "hi"
        if header:
            headers[header] = key
        else:
            prompt = f"{key} " * 100 + request_id
        answer = await found.client.post(
            f"{found.url}/route", json={"prompt": prompt}, headers=headers
        )
        assert answer.status_code == 200
        line = await until(
            partial(found.line_of, request_id), "nginx's line about the request"
        )
        # those that could not be reached stand before
        seen[key] = line["router"].rpartition(", ")[2]
    return seen


async def test_a_session_stays_on_its_router(tmp_path: Path) -> None:
    """The same session, or the same beginning, goes to the same router; a dead one's sessions move, the others stay."""
    async with front(tmp_path) as found:
        sessions = [f"session-{number}" for number in range(24)]
        before = await routers_of(found, sessions)
        assert len(set(before.values())) == 2
        assert await routers_of(found, sessions) == before
        text = (found.folder / "qarr.conf").read_text("utf-8")
        option = '""      qarr;'
        assert text.count(option) == 1
        (found.folder / "qarr.conf").write_text(
            text.replace(option, '""      qarr_by_prefix;')
        )
        # The routers' ports decide where keys fall: of eight, all fall to one router once in a hundred runs.
        by_prefix = [f"beginning-{number}" for number in range(24)]
        found.nginx.send_signal(signal.SIGHUP)

        async def kept() -> bool:
            first = await routers_of(found, by_prefix, "")
            return (
                await routers_of(found, by_prefix[::-1], "") == first
                and len(set(first.values())) == 2
            )

        # the reload takes a while; backwards, as in turn would look the same
        await until(kept)
        dead = f"127.0.0.1:{found.first.port}"
        found.first.started[0].kill()
        await within(found.first.started[0].wait(), "the process to end")
        after = await routers_of(found, sessions)
        assert set(after.values()) == {f"127.0.0.1:{found.second.port}"}
        assert {name for name in sessions if after[name] != before[name]} == {
            n for n in sessions if before[n] == dead
        }
