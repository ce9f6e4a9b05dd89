"""A router that ends, or is taken over by another one: nobody is cut off. Real processes, a steady stream of requests."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from router.api.problems import refusal
from router.lifecycle import ServerState
from router.server.handover import HELLO, MOST_PEERS, TAKEN, control_path
from router.server.http_protocol import protocol_for
from router.server.server import Server
from router.server.settings import ServerSettings
from tests.fakes.engine import ANSWER, Behaviour, FakeEngine, serving_all
from tests.ports import reserved_ports
from tests.unit.router_stack import events
from tests.waiting import until, within

pytestmark = pytest.mark.anyio
QARR = Path(sys.executable).with_name("qarr")
NAMES = ("fast", "balanced", "precise")


@dataclass(slots=True)
class Routers:
    """Routers in processes of their own, on one port, in front of the same fake engines."""

    port: int
    runtime: Path
    behaviours: dict[str, Behaviour]
    arguments: list[str]
    environment: dict[str, str]
    started: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, *more: str, **settings: str) -> asyncio.subprocess.Process:
        process = await self.begin(*more, **settings)
        await self.is_up(process)
        return process

    async def begin(self, *more: str, **settings: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            str(QARR), "serve", *self.arguments, *more, env={**self.environment, **settings}, stderr=asyncio.subprocess.PIPE
        )  # fmt: skip
        self.started.append(process)
        return process

    async def is_up(self, process: asyncio.subprocess.Process) -> str:
        """Wait until a router says that it is up; return what it has said."""
        assert process.stderr is not None
        seen = b""
        async with asyncio.timeout(90):
            while b"all tiers ready" not in seen:
                line = await process.stderr.readline()
                assert line, seen.decode()
                seen += line
        return seen.decode()


@asynccontextmanager
async def routers(tmp_path: Path) -> AsyncIterator[Routers]:
    """Serve three fake engines, and stop whatever routers are started in front of them."""
    behaviours = {name: Behaviour() for name in NAMES}
    (port,) = reserved_ports()
    async with serving_all(*(FakeEngine(b).app for b in behaviours.values())) as urls:
        named = [
            part
            for name, url in zip(NAMES, urls, strict=True)
            for part in (f"--{name}", url)
        ]
        environment = {
            **os.environ,
            "QARR_SERVER__RUNTIME_DIR": str(tmp_path / "run"),
            "QARR_POLICY__MAX_SLOWDOWN": "1e9",
            "QARR_ENGINE__LOG_DIR": str(tmp_path / "logs"),
            # a line a request would fill a pipe that is read no further
            "QARR_TELEMETRY__LOG_LEVEL": "warning",
        }
        found = Routers(
            port,
            tmp_path / "run",
            behaviours,
            [*named, "--port", str(port)],
            environment,
        )
        try:
            yield found
        finally:
            for process in found.started:
                if process.returncode is None:
                    process.kill()
                await within(process.communicate(), "the process to end")


def a_stream(url: str, **body: Any) -> asyncio.Task[httpx.Response]:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            return await client.post(f"{url}/generate", json={"prompt": "hi", **body})

    return asyncio.create_task(ask())


async def test_a_router_that_cannot_be_taken_over_serves(tmp_path: Path) -> None:
    """Where its control socket cannot be made it says so, with the setting to change, and does its work."""
    (tmp_path / "file").write_text("")
    async with routers(tmp_path) as found:
        process = await found.begin(QARR_SERVER__RUNTIME_DIR=str(tmp_path / "file"))
        said = await found.is_up(process)
        assert "cannot be taken over" in said
        assert "server.runtime_dir" in said
        assert (await a_stream(found.url)).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, written = await within(process.communicate(), "the process to end")
        assert process.returncode == 0
        assert "Traceback" not in said + written.decode()


async def test_a_signal_drains(tmp_path: Path) -> None:
    """After SIGTERM the open stream ends well; meanwhile /readyz is 503 and new requests are told to go elsewhere."""
    async with routers(tmp_path) as found, httpx.AsyncClient(trust_env=False) as client:
        process = await found.start()
        assert (await client.get(f"{found.url}/readyz")).status_code == 200
        found.behaviours["fast"].delay_s = 0.3
        stream = a_stream(found.url, tier="fast")
        await until(lambda: found.behaviours["fast"].running)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while (ready := await client.get(f"{found.url}/readyz")).status_code != 503:
                pass
        assert (ready.json()["ready"], ready.json()["reasons"]) == (
            False,
            ["the router is shutting down"],
        )
        assert ready.headers["connection"] == "close"
        refused = await client.post(f"{found.url}/generate", json={"prompt": "hi"})
        assert (refused.status_code, refused.json()["type"]) == (
            503,
            "urn:qarr:problem:draining",
        )
        assert refused.headers["retry-after"] == "1"
        answer = await stream
        assert events(answer.text)[-1][0] == "done"
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_a_stream_is_resumed_from_a_router_that_drains(tmp_path: Path) -> None:
    """Nobody else has the rest of it; but an id of no stream is no way in."""
    async with (
        routers(tmp_path) as found,
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
    ):
        process = await found.start()
        found.behaviours["fast"].delay_s = 0.3
        body = {"prompt": "hi", "tier": "fast", "resumable": True}
        async with client.stream("POST", f"{found.url}/generate", json=body) as lost:
            lines = lost.aiter_lines()
            last = next_id = ""
            while not next_id.startswith("data:"):
                next_id = await anext(lines)
                last = (
                    next_id.removeprefix("id: ") if next_id.startswith("id: ") else last
                )
        other = a_stream(found.url, tier="fast")  # keeps the router
        await until(lambda: found.behaviours["fast"].running == 2)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while (await client.get(f"{found.url}/readyz")).status_code != 503:
                pass
        wrong = await client.post(
            f"{found.url}/generate", json=body, headers={"last-event-id": "x.1"}
        )
        assert wrong.status_code == 404
        rest = await client.post(
            f"{found.url}/generate", json=body, headers={"last-event-id": last}
        )
        assert rest.status_code == 200
        assert events(rest.text)[-1][0] == "done"
        assert (await other).status_code == 200
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_draining_is_bounded(tmp_path: Path) -> None:
    """A stream that does not end keeps the router for server.drain_s and no longer; its last event says so."""
    async with routers(tmp_path) as found:
        process = await found.start(QARR_SERVER__DRAIN_S="0.5")
        found.behaviours["fast"].stall_after = 2
        stream = a_stream(found.url, tier="fast")
        await until(lambda: found.behaviours["fast"].running)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
        name, problem = events((await stream).text)[-1]
        assert (name, problem["type"]) == ("error", "urn:qarr:problem:draining")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_second_signal_ends_at_once(
    number: signal.Signals, tmp_path: Path
) -> None:
    """With a long time to drain, and a stream that does not end; the router ends itself, without a trace."""
    async with routers(tmp_path) as found:
        process = await found.start(QARR_SERVER__DRAIN_S="600")
        found.behaviours["fast"].stall_after = 2
        stream = a_stream(found.url, tier="fast")
        await until(lambda: found.behaviours["fast"].running)
        process.send_signal(number)
        async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as client:
            while (await client.get(f"{found.url}/readyz")).status_code != 503:
                pass
        process.send_signal(number)
        _, written = await asyncio.wait_for(process.communicate(), 30)
        await asyncio.gather(stream, return_exceptions=True)
        assert (process.returncode, "Traceback" in written.decode()) == (0, False), (
            written.decode()
        )


async def test_signals_before_it_listens_end_it_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the application has begun it ends itself: nothing is broken off."""
    steps = []

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        steps.append("begun")
        yield
        steps.append("ended")

    settings = ServerSettings()
    server = Server(
        Starlette(lifespan=lifespan),
        ServerState(),
        settings,
        protocol_for(settings, refusal),
    )
    server._signalled()
    server._signalled()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        await server.serve(sockets=[sock])
    assert (
        steps,
        [entry for entry in caplog.records if entry.levelno >= logging.WARNING],
    ) == (["begun", "ended"], [])


@pytest.mark.timeout(400)
async def test_a_takeover_refuses_and_cuts_nobody(tmp_path: Path) -> None:
    """Under a steady stream of requests, on kept and on new connections, another router takes over, twice."""
    async with routers(tmp_path) as found:
        for behaviour in found.behaviours.values():
            behaviour.delay_s = 0.01
        found.behaviours["precise"].answer = ANSWER * 200
        old = await found.start(QARR_SERVER__DRAIN_S="60")
        faults: list[str] = []
        count, stop = 0, False

        async def ask(*, keep: bool) -> None:
            nonlocal count
            limits = httpx.Limits(max_keepalive_connections=1 if keep else 0)
            async with httpx.AsyncClient(
                timeout=30, trust_env=False, limits=limits
            ) as client:
                while not stop:
                    try:
                        answer = await client.post(
                            f"{found.url}/generate", json={"prompt": "hi"}
                        )
                    except httpx.HTTPError as error:
                        faults.append(f"{type(error).__name__} {error}")
                        continue
                    count += 1
                    if (
                        answer.status_code != 200
                        or events(answer.text)[-1][0] != "done"
                    ):
                        faults.append(answer.text)

        asking = [asyncio.create_task(ask(keep=bool(n % 2))) for n in range(12)]
        await until(lambda: count > 20)
        long = a_stream(found.url, tier="precise", max_tokens=len(ANSWER) * 200)
        await until(lambda: found.behaviours["precise"].running)
        new = await found.start("--takeover")
        assert await asyncio.wait_for(old.wait(), 90) == 0
        assert events((await long).text)[-1][0] == "done"
        newest = await found.start("--takeover")
        assert await asyncio.wait_for(new.wait(), 60) == 0
        served = count
        await until(lambda: count > served + 20)
        stop = True
        await asyncio.gather(*asking)
        assert faults == []
        newest.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(newest.wait(), 30) == 0
        assert not control_path(found.runtime, found.port).exists()


async def test_a_takeover_that_fails_changes_nothing(tmp_path: Path) -> None:
    """While the new router waits for its engines the old one serves; when the new one ends, it serves on."""
    async with routers(tmp_path) as found, httpx.AsyncClient(trust_env=False) as client:
        old = await found.start()
        beyond = {
            f"QARR_TIERS__{name.upper()}__MAX_MODEL_LEN": "9000" for name in NAMES
        }  # no engine keeps this promise
        new = await found.begin("--takeover", **beyond)
        assert new.stderr is not None
        async with asyncio.timeout(60):
            while b"context of 8192 tokens" not in await new.stderr.readline():
                pass
        assert (
            await client.post(f"{found.url}/generate", json={"prompt": "hi"})
        ).status_code == 200
        new.kill()
        await within(new.wait(), "the process to end")
        assert (
            await client.post(f"{found.url}/generate", json={"prompt": "hi"})
        ).status_code == 200
        assert old.returncode is None
        await found.start("--takeover")
        assert await asyncio.wait_for(old.wait(), 60) == 0


async def test_the_control_socket_is_private(tmp_path: Path) -> None:
    """Only the router's user may open it; whoever says something else gets nothing, and the router serves on."""
    async with routers(tmp_path) as found, httpx.AsyncClient(trust_env=False) as client:
        await found.start()
        path = control_path(found.runtime, found.port)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        for said in (b"nonsense\n", HELLO):
            with socket.socket(socket.AF_UNIX) as other:
                other.settimeout(5)
                other.connect(str(path))
                other.sendall(said)
                line, fds, _, _ = await asyncio.to_thread(
                    socket.recv_fds, other, 100, 1
                )
                assert bool(fds) is (said == HELLO), line
                for fd in fds:
                    os.close(fd)
        assert (
            await client.post(f"{found.url}/generate", json={"prompt": "hi"})
        ).status_code == 200


async def test_a_router_that_says_nothing_keeps_no_other_from_taking_over(
    tmp_path: Path,
) -> None:
    """Neither those that only connect nor one that has the socket and hangs; the latter is told that it is too late."""
    async with routers(tmp_path) as found:
        old = await found.start()
        path = str(control_path(found.runtime, found.port))
        with ExitStack() as held:
            silent = [
                held.enter_context(socket.socket(socket.AF_UNIX))
                for _ in range(MOST_PEERS - 2)
            ]
            for peer in silent:
                peer.connect(path)
            hung = held.enter_context(socket.socket(socket.AF_UNIX))
            hung.settimeout(30)
            hung.connect(path)
            hung.sendall(HELLO)
            _, fds, _, _ = await asyncio.to_thread(socket.recv_fds, hung, 100, 1)
            for fd in fds:
                os.close(fd)
            new = await found.start("--takeover")
            assert await asyncio.to_thread(hung.recv, 100) == TAKEN
            assert await asyncio.wait_for(old.wait(), 60) == 0
        assert (await a_stream(found.url)).status_code == 200
        assert new.returncode is None


async def test_of_two_that_take_over_the_first_one_ready_does(tmp_path: Path) -> None:
    """The other one leaves by itself, and the router that serves can still be taken over."""
    async with routers(tmp_path) as found:
        old = await found.start()
        for behaviour in found.behaviours.values():
            behaviour.instead["/v1/models"] = "[]"  # the new one waits for its engines
        late = await found.begin("--takeover")
        assert late.stderr is not None
        async with asyncio.timeout(60):
            while b"failed" not in await late.stderr.readline():
                pass
        late.send_signal(signal.SIGSTOP)
        for behaviour in found.behaviours.values():
            behaviour.instead.clear()
        new = await found.start("--takeover")
        assert await asyncio.wait_for(old.wait(), 60) == 0
        late.send_signal(signal.SIGCONT)
        _, said = await asyncio.wait_for(late.communicate(), 60)
        assert b"another router has taken over" in said
        assert late.returncode == 0
        assert (await a_stream(found.url)).status_code == 200
        await found.start("--takeover")
        assert await asyncio.wait_for(new.wait(), 60) == 0


async def test_nothing_to_take_over(tmp_path: Path) -> None:
    """It names the socket where nobody is, and what to do."""
    async with routers(tmp_path) as found:
        process = await found.begin("--takeover")
        _, shown = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 2
        assert (
            f"there is no router to take over from at {control_path(found.runtime, found.port)}"
            in shown.decode()
        )
        assert "without --takeover" in shown.decode()
