"""What every endpoint does with its connection: read a bounded body, and work only while somebody waits for the answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from router.api.asgi import (
    BodyTooLarge,
    ClientGone,
    body_message,
    context_of,
    keep,
    no_body,
    read_body,
    start_message,
    track,
    tracker_of,
    untrack,
    while_connected,
)
from router.lifecycle import ResponseTracker, ServerState
from router.pipeline.request import RequestContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Message, Receive, Scope

pytestmark = pytest.mark.anyio
LIMIT = 10


def scope_with(**headers: str) -> Scope:
    """Return a request's scope as the gate leaves it."""
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope: Scope = {"type": "http", "method": "POST", "path": "/generate", "headers": raw}
    keep(scope, RequestContext("request", "trace"))

    async def taken(_message: Message) -> None:
        pass

    track(scope, ResponseTracker(taken, taken, ServerState()))
    return scope


def body_in(*parts: bytes | None) -> Receive:
    """Return what receives a body in parts; None: the client is gone."""
    left = list(parts)

    async def receive() -> Message:
        part = left.pop(0)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    return receive


@pytest.mark.parametrize("parts", [(b"",), (b"hello",), (b"a" * LIMIT,), (b"a" * 4, b"", b"b" * 6)])
async def test_a_body_is_read_up_to_its_limit(parts: tuple[bytes, ...]) -> None:
    scope = scope_with()
    before = context_of(scope)
    assert await read_body(scope, body_in(*parts), LIMIT) == b"".join(parts)
    assert context_of(scope).arrived > before.arrived, "the request is here once its body is"


@pytest.mark.parametrize("parts", [(b"a" * (LIMIT + 1),), (b"a" * LIMIT, b"b"), (b"a" * 99, b"never read")])
async def test_a_larger_body_is_not_read_on(parts: tuple[bytes, ...]) -> None:
    with pytest.raises(BodyTooLarge, match="larger than 10 bytes"):
        await read_body(scope_with(), body_in(*parts), LIMIT)


async def test_a_body_that_is_announced_as_larger_is_not_read_at_all() -> None:
    with pytest.raises(BodyTooLarge):
        await read_body(scope_with(content_length=str(LIMIT + 1)), body_in(), LIMIT)


@pytest.mark.parametrize("announced", [str(LIMIT), "-1", "many", "\u0663"])
async def test_other_announcements_do_not_count(announced: str) -> None:
    assert await read_body(scope_with(content_length=announced), body_in(b"hi"), LIMIT) == b"hi"


async def test_a_client_that_leaves_in_its_body_is_gone() -> None:
    with pytest.raises(ClientGone):
        await read_body(scope_with(), body_in(b"half", None), LIMIT)


class Client:
    """A client's connection, which can be closed."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def receive(self) -> Message:
        await self.closed.wait()
        return {"type": "http.disconnect"}


class Work:
    """Work that waits until it is told to end; ``ended`` says how it did."""

    def __init__(self, error: Exception | None = None, at_start: Callable[[], None] = lambda: None) -> None:
        self.may_end, self.begun, self.ended = asyncio.Event(), asyncio.Event(), ""
        self._error, self._at_start = error, at_start

    async def __call__(self) -> None:
        self.begun.set()
        self._at_start()
        try:
            await self.may_end.wait()
            if self._error is not None:
                raise self._error
            self.ended = "done"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise


async def serve(work: Work, client: Client, scope: Scope | None = None) -> asyncio.Task[Any]:
    """Begin to serve."""
    serving = asyncio.create_task(while_connected(scope or scope_with(), work(), client.receive))
    await work.begun.wait()
    return serving


async def test_work_is_done_while_the_client_waits() -> None:
    work, client = Work(), Client()
    serving = await serve(work, client)
    work.may_end.set()
    await serving
    assert work.ended == "done"


async def test_work_ends_when_the_client_leaves() -> None:
    work, client = Work(), Client()
    serving = await serve(work, client)
    client.closed.set()
    await serving
    assert work.ended == "cancelled"


async def test_what_is_left_after_the_last_byte_is_done() -> None:
    """Servers report the end of an answer as a disconnect as well."""
    scope, client = scope_with(), Client()

    def answered() -> None:
        tracker_of(scope).complete = True

    work = Work(at_start=answered)
    serving = await serve(work, client, scope)
    client.closed.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not serving.done()
    work.may_end.set()
    await serving
    assert work.ended == "done"


async def test_an_error_of_the_work_is_raised() -> None:
    work, client = Work(ValueError("own")), Client()
    serving = await serve(work, client)
    work.may_end.set()
    with pytest.raises(ValueError, match="own"):
        await serving


async def test_work_ends_with_who_serves_it() -> None:
    work, client = Work(), Client()
    serving = await serve(work, client)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert work.ended == "cancelled"


async def test_messages_are_as_asgi_has_them() -> None:
    """A header's characters that HTTP cannot carry are replaced, not refused."""
    started = start_message({"x-a": "1", "x-b": "\u4e16"}, "text/plain", {"x-a": "2"})
    assert started["headers"] == [(b"content-type", b"text/plain"), (b"x-a", b"2"), (b"x-b", b"?")]
    assert body_message(b"a", more=True) == {"type": "http.response.body", "body": b"a", "more_body": True}
    assert (await no_body())["more_body"] is False


async def test_a_request_that_has_ended_is_tracked_no_more() -> None:
    scope = scope_with()
    untrack(scope)
    untrack(scope)
    with pytest.raises(KeyError):
        tracker_of(scope)
