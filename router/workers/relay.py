"""Requests that another process answers: that of operators by the first one, a resumed stream by the worker that has it.

The connection stays with the worker that accepted it. The request goes to the other process with its body; each message of
the answer comes back, and the next one when it was taken, so a slow client slows the answer as ever.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from router.api.asgi import CLIENT
from router.api.paths import ErrorForm
from router.api.problems import Draining, describe
from router.pipeline.request import RequestContext
from router.workers.channel import ChannelClosed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, MutableMapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from router.lifecycle import ServerState
    from router.workers.channel import Channel

# Whole paths, and beginnings of paths, that the first process answers: it knows all workers.
FIRST_ANSWERS = {"/metrics", "/tiers", "/live", "/requests", "/traces", "/policy", "/mirror"}
FIRST_ANSWERS_BELOW = ("/traces/", "/admin/")
RESUMED = b"last-event-id"
MOST_DIGITS = 4  # of a row
_SENT = (
    "type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers", "client",
    "server",
)  # fmt: skip
_numbers = itertools.count()


def stream_name(row: int, pid: int) -> str:
    """Return how the ids of a worker's resumable streams begin."""
    return f"{row}.{pid}."


class Elsewhere:
    """An ASGI application in a worker: passes on what others answer, and everything else to its own application.

    Args:
        app: The worker's own.
        server_state: Of the worker; what is passed on counts as active.
        first: To the first process.
        streams: How the ids of the worker's own resumable streams begin.
        max_body_bytes: Of a request that is passed on.
    """

    def __init__(
        self, app: ASGIApp, server_state: ServerState, first: Channel, streams: str, max_body_bytes: int
    ) -> None:
        self._app, self._server_state, self._first = app, server_state, first
        self._streams, self.max_body_bytes = streams.encode(), max_body_bytes
        self._sends: dict[int, Send] = {}
        self._to_first = partial(self._pass_on, 0)
        self._paths: dict[str, ASGIApp] = {**dict.fromkeys(FIRST_ANSWERS, self._to_first), "/generate": self._generate}

    async def message(self, number: int, message: Message) -> None:
        """Take a message of an answer from another process."""
        send = self._sends.get(number)
        if send is not None:
            await send(message)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        """Answer a request."""
        if scope["type"] == "http":
            path = scope["path"]
            app = self._paths.get(path)
            if app is not None:
                return app(scope, receive, send)
            if path.startswith(FIRST_ANSWERS_BELOW):
                return self._to_first(scope, receive, send)
        return self._app(scope, receive, send)

    def _generate(self, scope: Scope, receive: Receive, send: Send) -> Any:
        """Answer, or pass on a request for the rest of a stream that another worker has."""
        for name, value in scope["headers"]:
            if name == RESUMED and not value.startswith(self._streams):
                digits = value.partition(b".")[0][:MOST_DIGITS]
                if digits.isdigit() and (row := int(digits)):
                    return self._pass_on(row, scope, receive, send)
        return self._app(scope, receive, send)

    async def _pass_on(self, row: int, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(receive, self.max_body_bytes)
        if body is None:
            return
        number, known, begun = next(_numbers), True, False
        task, client = asyncio.current_task(), scope.get(CLIENT)
        assert task is not None

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        self._sends[number] = sent
        self._server_state.active_requests.add(task)
        asked = {key: scope[key] for key in _SENT if key in scope}
        asking = asyncio.ensure_future(self._first.ask("serve", row, number, asked, body))
        if client is not None:
            client.cancel_on_disconnect(asking)
        try:
            known = await asking
        except ChannelClosed:
            known = begun or self._first.closed.is_set()
            if known and not begun:
                await _ended(scope, receive, send)
        except asyncio.CancelledError:
            if not self._server_state.deadline_passed and (client is None or not client.disconnected):
                raise
        finally:
            del self._sends[number]
            self._server_state.active_requests.discard(task)
            asking.cancel()
            self._first.tell("gone", number)
            if client is not None:
                client.cancel_on_disconnect(None)
        if not known:
            await self._app(scope, _again(body), send)


class RemoteClient:
    """A client that is connected to another process; see ``Client``.

    Args:
        other: To that process.
        number: Of the request there.
        body: Of the request.
    """

    write = None  # a part is sent when the one before was taken

    def __init__(self, other: Channel, number: int, body: bytes) -> None:
        self._other, self._number = other, number
        self._left = asyncio.Event()
        self.receive = _again(body, self._left)
        self._complete = False
        self._task: asyncio.Task[Any] | None = None

    @property
    def disconnected(self) -> bool:
        """See ``Client``."""
        return self._left.is_set()

    def cancel_on_disconnect(self, task: asyncio.Task[Any] | None) -> None:
        """See ``Client``."""
        self._task = task

    def leave(self) -> None:
        """Note that the client has left, or has the whole answer."""
        if not self._complete:
            self._left.set()
            if self._task is not None:
                self._task.cancel()

    async def send(self, message: Message) -> None:
        """See ``Client``."""
        if not self.disconnected:
            self._complete = message["type"] == "http.response.body" and not message.get("more_body")
            await self._other.ask("message", self._number, dict(message))


class Served:
    """Requests of other processes that this one answers.

    Args:
        app: Answers them.
        other: To the process that asks.
        prepare: Called with each path before it is answered.
    """

    def __init__(self, app: ASGIApp, other: Channel, prepare: Callable[[str], Awaitable[None]] | None = None) -> None:
        self._app, self._other, self._prepare = app, other, prepare
        self._clients: dict[int, RemoteClient] = {}

    async def serve(self, number: int, scope: Scope, body: bytes) -> bool:
        """Answer a request; return that it was passed to the application."""
        client = self._clients[number] = RemoteClient(self._other, number, body)
        try:
            if self._prepare is not None:
                await self._prepare(scope["path"])
            there = {**scope, "asgi": {"version": "3.0", "spec_version": "2.3"}, CLIENT: client}
            await self._app(there, client.receive, client.send)
        finally:
            del self._clients[number]
        return True

    def gone(self, number: int) -> None:
        """Note that a client has gone."""
        if number in self._clients:
            self._clients[number].leave()


class Switch:
    """In the first process: answers workers' requests, or passes them on to the worker that has a stream.

    Args:
        app: The first process' own.
        workers: Those that serve, by row.
        prepare: Called with a path before the first process answers it.
    """

    def __init__(self, app: ASGIApp, workers: Mapping[int, Channel], prepare: Callable[[str], Awaitable[None]]) -> None:
        self._app, self._workers, self._prepare = app, workers, prepare
        self._served: dict[Channel, Served] = {}
        self._passed: dict[int, tuple[Channel, int, Channel]] = {}

    def enter(self, channel: Channel) -> dict[str, Callable[..., Any]]:
        """Return what a worker may ask and tell."""
        self._served[channel] = Served(self._app, channel, self._prepare)
        return {"serve": partial(self._serve, channel), "gone": partial(self._gone, channel), "message": self._message}

    def leave(self, channel: Channel) -> None:
        """Forget a worker that has ended."""
        del self._served[channel]

    async def _serve(self, asker: Channel, to: int, number: int, scope: Scope, body: bytes) -> bool:
        if not to:
            return await self._served[asker].serve(number, scope, body)
        other = self._workers.get(to)
        if other is None or other is asker:  # a stream of a worker that has ended
            return False
        passed = next(_numbers)
        self._passed[passed] = asker, number, other
        try:
            return bool(await other.ask("serve", passed, scope, body))
        finally:
            del self._passed[passed]
            other.tell("gone", passed)

    async def _message(self, passed: int, message: Message) -> None:
        if passed in self._passed:
            asker, number, _ = self._passed[passed]
            await asker.ask("message", number, message)

    def _gone(self, asker: Channel, number: int) -> None:
        self._served[asker].gone(number)
        for passed, (channel, asked, other) in self._passed.items():
            if channel is asker and asked == number:
                other.tell("gone", passed)


async def _ended(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer that the first process has ended."""
    context = RequestContext(secrets.token_hex(16), secrets.token_hex(16))
    problem = describe(Draining("the process that answers this has ended: ask again"))
    await problem.response(context, ErrorForm.PROBLEM)(scope, receive, send)


async def _body(receive: Receive, max_bytes: int) -> bytes | None:
    """Return a request's body, as far as it may go; None: the client has gone."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if not message.get("more_body") or size > max_bytes:
            return b"".join(parts)


def _again(body: bytes, left: asyncio.Event | None = None) -> Receive:
    """Return a ``receive`` that gives a body that was read already, and tells when the client has left."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        message = next(messages, None)
        if message is None:
            await (left or asyncio.Event()).wait()
        return message or {"type": "http.disconnect"}

    return receive
