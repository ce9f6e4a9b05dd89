"""Requests that another process answers: bodies, streams, slow and leaving clients, and an end in the middle."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from router.api.asgi import CLIENT, body_message, cancel_on_disconnect, start_message
from router.lifecycle import ServerState
from router.workers.relay import Elsewhere, Switch
from tests.unit.workers.test_channel import channels

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope, Send

    from router.workers.channel import Channel

pytestmark = pytest.mark.anyio


def request(path: str, method: str = "GET", headers: tuple[tuple[bytes, bytes], ...] = ()) -> Scope:
    """Return a request's scope, with something in it that stays in its process."""
    return {
        "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": path, "raw_path": path.encode(),
        "query_string": b"limit=2", "root_path": "", "headers": [(b"host", b"h"), *headers], "client": ("1.2.3.4", 5),
        "server": ("127.0.0.1", 8080), "state": {"unsendable": lambda: None},
    }  # fmt: skip


class Client:
    """A client's connection: what it sends, and what it has got."""

    def __init__(self, *body: bytes) -> None:
        self._parts = [
            {"type": "http.request", "body": part, "more_body": number < len(body) - 1}
            for number, part in enumerate(body)
        ] or [{"type": "http.request", "body": b"", "more_body": False}]
        self.gone = asyncio.Event()
        self._task: asyncio.Future[Any] | None = None
        self.got: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self) -> Message:
        """Give the next part of the body, then wait until the client has gone."""
        if self._parts:
            return self._parts.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def disconnected(self) -> bool:
        """Tell whether it has left."""
        return self.gone.is_set()

    def cancel_on_disconnect(self, task: asyncio.Future[Any] | None) -> None:
        """Cancel a task when it leaves."""
        self._task = task

    def leave(self) -> None:
        """Close the connection, as our server notes it."""
        self.gone.set()
        if self._task is not None:
            self._task.cancel()

    async def send(self, message: Message) -> None:
        """Take a message, if the client reads."""
        await self.reads.wait()
        self.got.append(message)

    @property
    def text(self) -> bytes:
        """Return the body so far."""
        return b"".join(m.get("body", b"") for m in self.got)


class Processes:
    """A worker and the first process, in one."""

    def __init__(self, worker: Channel, first: Channel) -> None:
        self.made = 0
        self.ended = asyncio.Event()
        self.prepared: list[str] = []
        others: dict[int, Channel] = {}
        app = Starlette(
            routes=[
                Route("/metrics", self._whole),
                Route("/admin/{what:path}", self._echo, methods=["POST"]),
            ]
        )
        own = Starlette(routes=[Route("/generate", lambda _r: PlainTextResponse("own"), methods=["POST"])])

        async def prepare(path: str) -> None:
            self.prepared.append(path)

        async def first_app(scope: Scope, receive: Receive, send: Send) -> None:
            await (self._endless if scope["path"] == "/live" else app)(scope, receive, send)

        self.state = ServerState()
        self.app = Elsewhere(own, self.state, worker, "1.10.", 1000)
        worker._handlers["message"] = self.app.message
        first._handlers.update(Switch(first_app, others, prepare).enter(first))

    async def _whole(self, asked: Request) -> Response:
        client = asked.client
        assert client is not None
        return PlainTextResponse(f"{client.host} {asked.query_params['limit']}")

    async def _echo(self, asked: Request) -> Response:
        return PlainTextResponse(await asked.body(), 202)

    async def _endless(self, scope: Scope, _receive: Receive, send: Send) -> None:
        cancel_on_disconnect(scope)
        try:
            await send(start_message({}, "text/event-stream", {}))
            while True:
                self.made += 1
                await send(body_message(b"x", more=True))
        finally:
            self.ended.set()

    async def ask(self, client: Client, *args: Any) -> None:
        """Send a request to the worker."""
        await self.app({**request(*args), CLIENT: client}, client.receive, client.send)


async def test_the_first_process_answers_what_only_it_knows() -> None:
    """With the client's address, the query, the body in parts, and the status."""
    async with channels() as (one, two):
        processes = Processes(one, two)
        client = Client()
        await processes.ask(client, "/metrics")
        assert client.text == b"1.2.3.4 2"
        assert processes.prepared == ["/metrics"]
        client = Client(b"one ", b"two")
        await processes.ask(client, "/admin/x", "POST")
        assert (client.got[0]["status"], client.text) == (202, b"one two")
        client = Client(b"{}")
        await processes.ask(client, "/generate", "POST", ((b"last-event-id", b"1.10.abc.3"),))
        assert client.text == b"own"


async def test_a_stream_of_a_worker_that_has_ended_is_unknown_here() -> None:
    """The worker's own application answers, with the body that was read."""
    async with channels() as (one, two):
        client = Client(b"{}")
        await Processes(one, two).ask(client, "/generate", "POST", ((b"last-event-id", b"2.11.abc.3"),))
        assert client.text == b"own"


async def test_a_slow_client_slows_the_answer_and_one_that_leaves_ends_it() -> None:
    """The other process makes no more than what was taken, and stops when the client has gone."""
    async with channels() as (one, two):
        processes, client = Processes(one, two), Client()
        asking = asyncio.create_task(processes.ask(client, "/live"))
        async with asyncio.timeout(10):
            while len(client.got) < 5:
                await asyncio.sleep(0.001)
            client.reads.clear()
            await asyncio.sleep(0.05)
            made = processes.made
            await asyncio.sleep(0.05)
            assert processes.made == made
            assert made - len(client.got) <= 3
            assert processes.state.active_requests == {asking}
            client.leave()
            client.reads.set()
            await asking
            await processes.ended.wait()
            assert not processes.state.active_requests


async def test_an_end_of_the_other_process_ends_the_answer() -> None:
    """Before its beginning with 503; afterwards without its last part, so that the server breaks the connection off."""
    async with channels() as (one, two):
        processes, client = Processes(one, two), Client()
        asking = asyncio.create_task(processes.ask(client, "/live"))
        async with asyncio.timeout(10):
            while len(client.got) < 3:
                await asyncio.sleep(0.001)
            assert two._writer is not None
            two._writer.close()
            await asking
        assert all(m.get("more_body", True) for m in client.got)
        client = Client()
        await processes.ask(client, "/metrics")
        assert client.got[0]["status"] == 503
