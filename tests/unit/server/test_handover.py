"""A router that ends, or is taken over by another one: nobody is cut off. Real processes, a steady stream of requests."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from router.api.problems import refusal
from router.lifecycle import ServerState
from router.server.handover import HELLO, MAX_PEERS, TAKEN, control_path
from router.server.http_protocol import protocol_for
from router.server.server import Server
from router.server.settings import ServerSettings
from tests.fakes.engine import ANSWER
from tests.unit.router_stack import events
from tests.unit.server.router_processes import NAMES, running_routers
from tests.waiting import until, within

pytestmark = pytest.mark.anyio


def a_stream(url: str, **body: Any) -> asyncio.Task[httpx.Response]:
    """Send a request, and return the task that has its answer."""

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            return await client.post(f"{url}/generate", json={"prompt": "hi", **body})

    return asyncio.create_task(ask())


async def test_a_router_that_cannot_be_taken_over_serves(tmp_path: Path) -> None:
    """Where its control socket cannot be made, a router names the setting to change, and serves."""
    (tmp_path / "file").write_text("")
    async with running_routers(tmp_path) as routers:
        process = await routers.begin(QARR_SERVER__RUNTIME_DIR=str(tmp_path / "file"))
        output = await routers.is_up(process)
        assert "cannot be taken over" in output
        assert "server.runtime_dir" in output
        assert (await a_stream(routers.url)).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, written = await within(process.communicate(), "the process to end")
        assert process.returncode == 0
        assert "Traceback" not in output + written.decode()


async def test_a_signal_drains(tmp_path: Path) -> None:
    """After SIGTERM the open stream ends well; meanwhile /readyz is 503 and new requests are told to go elsewhere."""
    async with (
        running_routers(tmp_path) as routers,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        process = await routers.start()
        assert (await client.get(f"{routers.url}/readyz")).status_code == 200
        routers.behaviours["fast"].delay_s = 0.3
        stream = a_stream(routers.url, tier="fast")
        await until(lambda: routers.behaviours["fast"].callers)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while (
                ready := await client.get(f"{routers.url}/readyz")
            ).status_code != 503:
                pass
        assert ready.json()["ready"] is False
        # an engine may be late beside it, which is a further reason
        assert ready.json()["reasons"][0] == "the router is shutting down"
        assert ready.headers["connection"] == "close"
        refused = await client.post(f"{routers.url}/generate", json={"prompt": "hi"})
        assert refused.status_code == 503
        assert refused.json()["type"] == "urn:qarr:problem:draining"
        assert refused.headers["retry-after"] == "1"
        answer = await stream
        assert events(answer.text)[-1][0] == "done"
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_a_stream_is_resumed_from_a_router_that_drains(tmp_path: Path) -> None:
    """No other router has the rest of the stream, so it may be resumed; an id that is no stream's is refused."""
    async with (
        running_routers(tmp_path) as routers,
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
    ):
        process = await routers.start()
        engine = routers.behaviours["fast"]
        # Both streams last until the rest is asked for; then the engine hurries.
        engine.answer = ANSWER * 100
        engine.delay_s = 0.1
        body = {
            "prompt": "hi",
            "tier": "fast",
            "resumable": True,
            "max_tokens": len(engine.answer),
        }
        async with client.stream("POST", f"{routers.url}/generate", json=body) as lost:
            lines = lost.aiter_lines()
            last_id = ""
            line = ""
            while not line.startswith("data:"):
                line = await anext(lines)
                if line.startswith("id: "):
                    last_id = line.removeprefix("id: ")
        # A second stream keeps the router from ending; the first one goes on, though its client has left.
        second = a_stream(routers.url, tier="fast", max_tokens=len(engine.answer))
        await until(lambda: engine.callers == 2)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while (await client.get(f"{routers.url}/readyz")).status_code != 503:
                pass
        wrong = await client.post(
            f"{routers.url}/generate", json=body, headers={"last-event-id": "x.1"}
        )
        assert wrong.status_code == 404
        async with client.stream(
            "POST",
            f"{routers.url}/generate",
            json=body,
            headers={"last-event-id": last_id},
        ) as resumed:
            assert resumed.status_code == 200
            engine.delay_s = 0
            rest = (await resumed.aread()).decode()
        assert events(rest)[-1][0] == "done"
        assert (await second).status_code == 200
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_draining_is_bounded(tmp_path: Path) -> None:
    """A stream that does not end keeps the router for server.drain_s and no longer; its last event says so."""
    async with running_routers(tmp_path) as routers:
        process = await routers.start(QARR_SERVER__DRAIN_S="0.5")
        routers.behaviours["fast"].stall_after = 2
        stream = a_stream(routers.url, tier="fast")
        await until(lambda: routers.behaviours["fast"].callers)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
        name, problem = events((await stream).text)[-1]
        assert name == "error"
        assert problem["type"] == "urn:qarr:problem:draining"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_second_signal_ends_at_once(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Although it may drain for long and a stream does not end, the router ends in order, without a traceback."""
    async with running_routers(tmp_path) as routers:
        process = await routers.start(QARR_SERVER__DRAIN_S="600")
        routers.behaviours["fast"].stall_after = 2
        stream = a_stream(routers.url, tier="fast")
        await until(lambda: routers.behaviours["fast"].callers)
        process.send_signal(number)
        async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as client:
            while (await client.get(f"{routers.url}/readyz")).status_code != 503:
                pass
        process.send_signal(number)
        _, written = await asyncio.wait_for(process.communicate(), 30)
        await asyncio.gather(stream, return_exceptions=True)
        assert process.returncode == 0, written.decode()
        assert "Traceback" not in written.decode(), written.decode()


async def test_signals_before_it_listens_end_it_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The application ends what it has begun: nothing is broken off."""
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
        settings=settings,
        protocol=protocol_for(settings, refusal),
    )
    server._signalled()
    server._signalled()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        await server.serve(sockets=[sock])
    assert steps == ["begun", "ended"]
    assert [entry for entry in caplog.records if entry.levelno >= logging.WARNING] == []


@pytest.mark.timeout(400)
async def test_a_takeover_refuses_and_cuts_nobody(tmp_path: Path) -> None:
    """Under a steady stream of requests, on kept and on new connections, another router takes over, twice."""
    async with running_routers(tmp_path) as routers:
        for behaviour in routers.behaviours.values():
            behaviour.delay_s = 0.01
        routers.behaviours["precise"].answer = ANSWER * 200
        old = await routers.start(QARR_SERVER__DRAIN_S="60")
        faults: list[str] = []
        count = 0
        stop = False

        async def ask(*, keep: bool) -> None:
            nonlocal count
            limits = httpx.Limits(max_keepalive_connections=1 if keep else 0)
            async with httpx.AsyncClient(
                timeout=30, trust_env=False, limits=limits
            ) as client:
                while not stop:
                    try:
                        answer = await client.post(
                            f"{routers.url}/generate", json={"prompt": "hi"}
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

        asking = [
            asyncio.create_task(ask(keep=bool(number % 2))) for number in range(12)
        ]
        await until(lambda: count > 20)
        long = a_stream(routers.url, tier="precise", max_tokens=len(ANSWER) * 200)
        await until(lambda: routers.behaviours["precise"].running)
        new = await routers.start("--takeover")
        assert await asyncio.wait_for(old.wait(), 90) == 0
        assert events((await long).text)[-1][0] == "done"
        newest = await routers.start("--takeover")
        assert await asyncio.wait_for(new.wait(), 60) == 0
        served = count
        await until(lambda: count > served + 20)
        stop = True
        await asyncio.gather(*asking)
        assert faults == []
        newest.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(newest.wait(), 30) == 0
        assert not control_path(routers.runtime, routers.port).exists()


async def test_a_takeover_that_fails_changes_nothing(tmp_path: Path) -> None:
    """While the new router waits for its engines the old one serves; when the new one ends, it serves on."""
    async with (
        running_routers(tmp_path) as routers,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        old = await routers.start()
        # No engine has so long a context.
        too_long = {
            f"QARR_TIERS__{name.upper()}__MAX_MODEL_LEN": "9000" for name in NAMES
        }
        new = await routers.begin("--takeover", **too_long)
        assert new.stderr is not None
        async with asyncio.timeout(60):
            while b"context of 8192 tokens" not in await new.stderr.readline():
                pass
        answer = await client.post(f"{routers.url}/generate", json={"prompt": "hi"})
        assert answer.status_code == 200
        new.kill()
        await within(new.wait(), "the process to end")
        answer = await client.post(f"{routers.url}/generate", json={"prompt": "hi"})
        assert answer.status_code == 200
        assert old.returncode is None
        await routers.start("--takeover")
        assert await asyncio.wait_for(old.wait(), 60) == 0


async def received_files(peer: socket.socket) -> tuple[bytes, list[int]]:
    """Return a router's message on its control socket, and the files that came with it."""
    line, files, _, _ = await asyncio.to_thread(lambda: socket.recv_fds(peer, 100, 1))
    return line, files


async def test_the_control_socket_is_private(tmp_path: Path) -> None:
    """Only the router's user may open it; a peer that sends another greeting gets nothing, and the router serves on."""
    async with (
        running_routers(tmp_path) as routers,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        await routers.start()
        path = control_path(routers.runtime, routers.port)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        for greeting in (b"nonsense\n", HELLO):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(5)
                peer.connect(str(path))
                peer.sendall(greeting)
                line, fds = await received_files(peer)
                assert bool(fds) is (greeting == HELLO), line
                for fd in fds:
                    os.close(fd)
        answer = await client.post(f"{routers.url}/generate", json={"prompt": "hi"})
        assert answer.status_code == 200


async def test_a_router_that_says_nothing_keeps_no_other_from_taking_over(
    tmp_path: Path,
) -> None:
    """Peers that only connect do not block a takeover, nor does one that has the socket and hangs: it is told that it is too late."""
    async with running_routers(tmp_path) as routers:
        old = await routers.start()
        path = str(control_path(routers.runtime, routers.port))
        with ExitStack() as held:
            silent = [
                held.enter_context(socket.socket(socket.AF_UNIX))
                for _ in range(MAX_PEERS - 2)
            ]
            for peer in silent:
                peer.connect(path)
            hung = held.enter_context(socket.socket(socket.AF_UNIX))
            hung.settimeout(30)
            hung.connect(path)
            hung.sendall(HELLO)
            _, fds = await received_files(hung)
            for fd in fds:
                os.close(fd)
            new = await routers.start("--takeover")
            assert await asyncio.to_thread(hung.recv, 100) == TAKEN
            assert await asyncio.wait_for(old.wait(), 60) == 0
        assert (await a_stream(routers.url)).status_code == 200
        assert new.returncode is None


async def test_of_two_that_take_over_the_first_one_ready_does(tmp_path: Path) -> None:
    """The slower one ends by itself, and the router that serves can still be taken over."""
    async with running_routers(tmp_path) as routers:
        old = await routers.start()
        for behaviour in routers.behaviours.values():
            # The next router waits for its engines.
            behaviour.instead["/v1/models"] = "[]"
        late = await routers.begin("--takeover")
        assert late.stderr is not None
        async with asyncio.timeout(60):
            while b"failed" not in await late.stderr.readline():
                pass
        late.send_signal(signal.SIGSTOP)
        for behaviour in routers.behaviours.values():
            behaviour.instead.clear()
        new = await routers.start("--takeover")
        assert await asyncio.wait_for(old.wait(), 60) == 0
        late.send_signal(signal.SIGCONT)
        _, output = await asyncio.wait_for(late.communicate(), 60)
        assert b"another router has taken over" in output
        assert late.returncode == 0
        assert (await a_stream(routers.url)).status_code == 200
        await routers.start("--takeover")
        assert await asyncio.wait_for(new.wait(), 60) == 0


async def test_nothing_to_take_over(tmp_path: Path) -> None:
    """The error names the socket where no router listens, and what to do."""
    async with running_routers(tmp_path) as routers:
        process = await routers.begin("--takeover")
        _, shown = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 2
        path = control_path(routers.runtime, routers.port)
        assert f"there is no router to take over from at {path}" in shown.decode()
        assert "without --takeover" in shown.decode()
