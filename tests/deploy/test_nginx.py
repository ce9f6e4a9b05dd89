"""Real nginx, as configured in deploy/nginx, in front of two routers that are processes of their own."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import httpx
import pytest

from router.settings import load_settings
from tests.deploy.nginx_config import configure, router_lines
from tests.deploy.services import program, running
from tests.fakes.engine import ANSWER, Behaviour
from tests.ports import reserved_ports
from tests.unit.router_stack import events
from tests.unit.server.router_processes import Routers, running_routers
from tests.waiting import until, within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]
QUESTION = "Which router answers this caller?"


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


@asynccontextmanager
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with AsyncExitStack() as stack:
        behind = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            routers = running_routers(tmp_path / name)
            behind.append(await stack.enter_async_context(routers))
        await asyncio.gather(*(routers.start() for routers in behind))
        (port,) = reserved_ports()
        folder = tmp_path / "nginx"
        configure(folder, port, router_lines([routers.port for routers in behind]))
        argv = [program("nginx"), "-p", str(folder), "-e", "stderr"]
        argv += ["-c", str(folder / "nginx.conf")]
        nginx = await stack.enter_async_context(
            running(argv, f"http://127.0.0.1:{port}/healthz", folder)
        )
        # A reload may close an idle connection just as it is used.
        limits = httpx.Limits(max_keepalive_connections=0)
        client = await stack.enter_async_context(
            httpx.AsyncClient(timeout=60, trust_env=False, limits=limits)
        )
        yield Front(
            f"http://127.0.0.1:{port}",
            folder,
            nginx=nginx,
            first=behind[0],
            second=behind[1],
            client=client,
        )


def slow(front: Front) -> list[Behaviour]:
    """Let both routers' engines answer slowly; return their behaviours."""
    behaviours = [*front.first.behaviours.values(), *front.second.behaviours.values()]
    for behaviour in behaviours:
        behaviour.delay_s = 0.3
    return behaviours


async def test_streams_headers_and_what_is_let_through(tmp_path: Path) -> None:
    """Events come one by one, lost streams are resumed, bounds hold, and operators' endpoints cannot be reached."""
    async with front(tmp_path) as proxy:
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        headers = {
            "traceparent": f"00-{trace}-00f067aa0ba902b7-01",
            "x-request-id": "mine-1",
        }
        request = {"json": {"prompt": "hi", "tier": "fast"}, "headers": headers}
        for routers in (proxy.first, proxy.second):
            routers.behaviours["fast"].stall_after = 3
        async with proxy.client.stream(
            "POST", f"{proxy.url}/generate", **request
        ) as answer:
            assert answer.headers["x-qarr-trace-id"] == trace
            assert answer.headers["x-request-id"] == "mine-1"
            text = ""
            # The engine stalls here, so these events were not held back until the answer was complete.
            async for part in answer.aiter_text():
                text += part
                pieces = [data["text"] for _, data in events(text)]
                if "".join(pieces) == "".join(ANSWER[:3]):
                    break
            assert text.endswith("\n\n")
        for routers in (proxy.first, proxy.second):
            routers.behaviours["fast"].stall_after = None
        assert events((await proxy.ask(tier="fast")).text)[-1][0] == "done"
        await lost_streams(proxy)
        await let_through(proxy)
        await bounds(proxy)
        line = next(entry for entry in proxy.log() if entry["path"] == "/generate")
        assert line["request_id"] == "mine-1"
        assert line["trace_id"] == trace
        assert line["status"] == "200"


async def lost_streams(proxy: Front) -> None:
    """Check that a client that resumes a stream reaches the router that keeps it, whichever nginx asks first."""
    answered = await proxy.ask(resumable=True)
    last = f"{answered.headers['x-qarr-stream-id']}.0"
    again = [
        await proxy.client.post(
            f"{proxy.url}/generate",
            json={"prompt": "hi"},
            headers={"last-event-id": last},
        )
        for _ in range(4)
    ]
    assert {answer.status_code for answer in again} <= {200, 410}
    assert again[0].text == answered.text
    unknown = {"last-event-id": "AAAAAAAAAAAAAAAA.1"}
    lost = await proxy.client.post(
        f"{proxy.url}/generate", json={"prompt": "hi"}, headers=unknown
    )
    assert lost.status_code == 404
    assert lost.json()["type"] == "urn:qarr:problem:stream-not-found"


async def let_through(proxy: Front) -> None:
    """Check which paths reach a router, and from which pages."""
    hidden = ["/metrics", "/tiers", "/", "/live", "/requests", "/traces", "/policy"]
    hidden += ["/admin/operations", "/v1/../metrics", "//metrics", "/metrics/"]
    hidden += ["/v1/%2e%2e/metrics"]
    drain = "/admin/replicas/fast-0/drain"
    refused_requests = [("GET", path) for path in hidden]
    drains = (drain, f"/v1/..{drain}", f"/generate/..{drain}")
    refused_requests += [("POST", path) for path in drains]
    for method, path in refused_requests:
        refused = await raw(proxy.url, method, path)
        assert b" 404 " in refused.partition(b"\r\n")[0], (method, path, refused)
        assert b"urn:qarr:problem:not-found" in refused, (method, path)
    for path in ("/v1/models", "/openapi.json", "/healthz", "/readyz"):
        assert (await proxy.client.get(proxy.url + path)).status_code == 200, path
    chat = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
    for path, body in (("/v1/chat/completions", chat), ("/route", {"prompt": "hi"})):
        answer = await proxy.client.post(proxy.url + path, json=body)
        assert answer.status_code == 200, path
    # A page that is served here may post, one that is served elsewhere may not.
    for origin, status in ((proxy.url, 200), ("https://evil.example", 403)):
        sent = await proxy.client.post(
            f"{proxy.url}/route", json={"prompt": "hi"}, headers={"origin": origin}
        )
        assert sent.status_code == status, origin


async def raw(url: str, method: str, path: str) -> bytes:
    """Send a request whose path no client library has normalized, and return the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    headers = "Host: x\r\nContent-Length: 0\r\nConnection: close\r\n"
    writer.write(f"{method} {path} HTTP/1.1\r\n{headers}\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def bounds(proxy: Front) -> None:
    """Check that nginx lets through what a router takes, and no more."""
    server = load_settings().server
    assert server.max_body_bytes == 32 << 20
    data = ";base64," + "x" * (server.max_body_bytes - 100)
    body = json.dumps({"prompt": "hi", "tier": data})
    refused = await proxy.client.post(f"{proxy.url}/route", content=body)
    # The router has read the body.
    assert refused.json()["type"] == "urn:qarr:problem:invalid-request"
    too_large = await proxy.client.post(f"{proxy.url}/route", content=body + " " * 200)
    assert too_large.status_code == 413
    for status, headers in [
        (200, {f"x-{number}": "y" * 5000 for number in range(5)}),
        (200, {"x": "y" * 30_000}),
        (431, {f"x-{number}": "y" * 5000 for number in range(8)}),
    ]:
        answer = await proxy.client.get(f"{proxy.url}/healthz", headers=headers)
        assert answer.status_code == status
    # The last answer is the router's own.
    assert answer.json()["type"].startswith("urn:qarr:problem:")


async def test_a_router_that_leaves_fails_no_request(tmp_path: Path) -> None:
    """A router that is marked down and then ended, while requests and streams go on, cuts off no answer."""
    async with front(tmp_path) as proxy:
        slow(proxy)
        answers: list[httpx.Response] = []
        going = True

        async def ask_on() -> None:
            while going:
                answers.append(await proxy.ask())

        askers = [asyncio.create_task(ask_on()) for _ in range(6)]
        await until(
            lambda: any(
                behaviour.running for behaviour in proxy.first.behaviours.values()
            )
        )
        both = router_lines([proxy.first.port, proxy.second.port])
        proxy.reload(both.replace("10s;", "10s down;", 1))
        before = len(answers)
        await until(lambda: len(answers) > before + 6)
        leaving = proxy.first.started[0]
        leaving.send_signal(signal.SIGTERM)
        await asyncio.wait_for(leaving.wait(), 30)
        before = len(answers)
        await until(lambda: len(answers) > before + 6)
        going = False
        await asyncio.gather(*askers)
        for answer in answers:
            assert answer.status_code == 200
            assert events(answer.text)[-1][0] == "done"
        # A router that is listed but gone, as after a crash, cannot be reached, and nginx asks the other.
        proxy.reload(both)
        for _ in range(4):
            assert (await proxy.ask()).status_code == 200
        proxy.second.started[0].kill()
        await within(proxy.second.started[0].wait(), "the process to end")
        nobody = await proxy.ask()
        assert nobody.status_code == 503
        assert nobody.json()["type"] == "urn:qarr:problem:no-router"
        assert nobody.headers["retry-after"] == "2"


def sent_to(behaviours: Iterable[Behaviour]) -> int:
    """Return how many requests with ``QUESTION`` engines got: routers send others by themselves."""
    count = 0
    for behaviour in behaviours:
        count += sum(QUESTION in str(body) for body in behaviour.requests)
    return count


async def test_a_post_that_was_sent_is_not_sent_again(tmp_path: Path) -> None:
    """When a router dies with a request, its caller gets a 503, and no other router generates it again."""
    async with front(tmp_path) as proxy:
        behaviours = slow(proxy)
        for behaviour in behaviours:
            behaviour.delay_s = 5
        asking = asyncio.create_task(proxy.ask(prompt=QUESTION, stream=False))
        await until(lambda: sent_to(behaviours))
        is_first = sent_to(proxy.first.behaviours.values()) > 0
        routers = proxy.first if is_first else proxy.second
        routers.started[0].kill()
        assert (await asking).status_code == 503
        assert sent_to(behaviours) == 1


async def routers_of(
    proxy: Front, keys: list[str], header: str = "x-session-id"
) -> dict[str, str]:
    """Send a request for each key, in a header or as the prompt's beginning, and return the routers that took them."""
    seen = {}
    for key in keys:
        # nginx writes a line after it has answered, so lines of earlier requests may come late.
        request_id = uuid4().hex
        headers = {"x-request-id": request_id}
        prompt = "hi"
        if header:
            headers[header] = key
        else:
            prompt = f"{key} " * 100 + request_id
        answer = await proxy.client.post(
            f"{proxy.url}/route", json={"prompt": prompt}, headers=headers
        )
        assert answer.status_code == 200
        line = await until(
            partial(proxy.line_of, request_id), "nginx's line about the request"
        )
        # Routers that could not be reached stand before the one that answered.
        seen[key] = line["router"].rpartition(", ")[2]
    return seen


async def test_a_session_stays_on_its_router(tmp_path: Path) -> None:
    """Requests of a session, or with the same beginning, go to one router; when it dies, only its sessions move."""
    async with front(tmp_path) as proxy:
        sessions = [f"session-{number}" for number in range(24)]
        before = await routers_of(proxy, sessions)
        assert len(set(before.values())) == 2
        assert await routers_of(proxy, sessions) == before
        text = (proxy.folder / "qarr.conf").read_text("utf-8")
        option = '""      qarr;'
        assert text.count(option) == 1
        (proxy.folder / "qarr.conf").write_text(
            text.replace(option, '""      qarr_by_prefix;')
        )
        # The routers' ports decide where keys fall: of eight, all fall to one router once in a hundred runs.
        by_prefix = [f"beginning-{number}" for number in range(24)]
        proxy.nginx.send_signal(signal.SIGHUP)

        async def goes_by_prefix() -> bool:
            first = await routers_of(proxy, by_prefix, "")
            # In the same order, routers that take turns would look the same.
            backwards = await routers_of(proxy, by_prefix[::-1], "")
            return backwards == first and len(set(first.values())) == 2

        # The reload takes a while.
        await until(goes_by_prefix)
        dead = f"127.0.0.1:{proxy.first.port}"
        proxy.first.started[0].kill()
        await within(proxy.first.started[0].wait(), "the process to end")
        after = await routers_of(proxy, sessions)
        assert set(after.values()) == {f"127.0.0.1:{proxy.second.port}"}
        moved = {name for name in sessions if after[name] != before[name]}
        assert moved == {name for name in sessions if before[name] == dead}
