"""What every endpoint does with its connection: read a bounded body, and work only while somebody waits for the answer."""

from __future__ import annotations

import pytest
from starlette.types import Message, Receive, Scope

from router.api.asgi import (
    CONTEXT,
    HOLD,
    OUT,
    BodyTooLargeError,
    ClientGoneError,
    body_message,
    cancel_on_disconnect,
    context_of,
    read_body,
    start_message,
)
from router.pipeline.request import RequestContext
from tests.unit.sent_responder import SentResponder

pytestmark = pytest.mark.anyio
LIMIT = 10


def scope_with(**headers: str) -> Scope:
    raw = [
        (name.replace("_", "-").encode(), value.encode())
        for name, value in headers.items()
    ]
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "headers": raw,
    }
    scope[CONTEXT] = RequestContext("request", "trace", request_headers=dict(raw))
    return scope


def body_in(*parts: bytes | None) -> Receive:
    left = list(parts)

    async def receive() -> Message:
        part = left.pop(0)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    return receive


@pytest.mark.parametrize(
    "parts", [(b"",), (b"hello",), (b"a" * LIMIT,), (b"a" * 4, b"", b"b" * 6)]
)
async def test_a_body_is_read_up_to_its_limit(parts: tuple[bytes, ...]) -> None:
    scope = scope_with()
    before = context_of(scope).arrived_at
    assert await read_body(scope, body_in(*parts), LIMIT) == b"".join(parts)
    assert context_of(scope).arrived_at > before, "the request is here once its body is"


@pytest.mark.parametrize(
    "parts", [(b"a" * (LIMIT + 1),), (b"a" * LIMIT, b"b"), (b"a" * 99, b"never read")]
)
async def test_a_larger_body_is_not_read_on(parts: tuple[bytes, ...]) -> None:
    with pytest.raises(BodyTooLargeError, match="larger than 10 bytes"):
        await read_body(scope_with(), body_in(*parts), LIMIT)


async def test_a_body_that_is_announced_as_larger_is_not_read_at_all() -> None:
    with pytest.raises(BodyTooLargeError):
        await read_body(scope_with(content_length=str(LIMIT + 1)), body_in(), LIMIT)


@pytest.mark.parametrize("announced", [str(LIMIT), "-1", "many", "\u0663"])
async def test_other_announcements_do_not_count(announced: str) -> None:
    assert (
        await read_body(scope_with(content_length=announced), body_in(b"hi"), LIMIT)
        == b"hi"
    )


async def test_a_client_that_leaves_in_its_body_is_gone() -> None:
    with pytest.raises(ClientGoneError):
        await read_body(scope_with(), body_in(b"half", None), LIMIT)


async def test_work_is_for_a_client_that_is_there() -> None:
    scope = scope_with()
    scope[OUT] = out = SentResponder()
    cancel_on_disconnect(scope)
    assert out.cancels
    out.cycle.disconnected = True
    with pytest.raises(ClientGoneError):
        cancel_on_disconnect(scope)


async def test_messages_are_as_asgi_has_them() -> None:
    """A header's characters that HTTP cannot carry are replaced, not refused."""
    started = start_message({"x-a": "1", "x-b": "\u4e16"}, "text/plain", {"x-a": "2"})
    assert started["headers"] == [
        (b"content-type", b"text/plain"),
        (b"x-a", b"2"),
        (b"x-b", b"?"),
    ]
    assert not started[HOLD]
    assert start_message({}, "text/plain", {}, hold=True)[HOLD]
    assert body_message(b"a", more=True) == {
        "type": "http.response.body",
        "body": b"a",
        "more_body": True,
    }
