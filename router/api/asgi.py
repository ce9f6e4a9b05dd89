"""What is known of a request apart from its body, and what every endpoint does with its connection."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from starlette.types import Message, Receive, Scope

    from router.lifecycle import ResponseTracker
    from router.pipeline.request import RequestContext

log = logging.getLogger(f"qarr.{__name__}")
_KEY, _TRACKER = "qarr.context", "qarr.tracker"


class ClientGone(Exception):
    """The client closed the connection."""


class BodyTooLarge(Exception):
    """A request body over the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes")
        self.limit = limit


class ForeignHost(Exception):
    """A request to a name that is not known to be this router's."""


class ForeignPage(Exception):
    """A request that a web page of another origin made its reader's browser send."""


class HeadTooLarge(Exception):
    """A request whose path and headers are too many or too long."""

    def __init__(self, max_bytes: int, max_headers: int) -> None:
        super().__init__(f"path and headers are more than {max_bytes} bytes, or more than {max_headers} headers")


class TooSlow(Exception):
    """A request that did not come in time."""

    def __init__(self, part: str, limit_s: float) -> None:
        super().__init__(f"the request's {part} was not complete after {limit_s:g} s: send it again, faster")


class TooManyConnections(Exception):
    """More connections than the router takes."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} connections are open already: try again later, or keep connections and use them again"
        )


class NotHttp(Exception):
    """Bytes that are no request."""


def keep(scope: Scope, context: RequestContext) -> None:
    """Keep a request's context where its handlers, and those of its errors, find it."""
    scope[_KEY] = context


def context_of(scope: Scope) -> RequestContext:
    """Return a request's context."""
    context: RequestContext = scope[_KEY]
    return context


def track(scope: Scope, tracker: ResponseTracker) -> None:
    """Keep what a request's answer goes through where its handler finds it."""
    scope[_TRACKER] = tracker


def tracker_of(scope: Scope) -> ResponseTracker:
    """Return what a request's answer goes through."""
    tracker: ResponseTracker = scope[_TRACKER]
    return tracker


def untrack(scope: Scope) -> None:
    """Forget it when the request ends: it leads back to the request."""
    scope.pop(_TRACKER, None)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Read a request's body, up to ``limit`` bytes. Its context then says when it was there.

    Raises:
        BodyTooLarge: It is announced or found to be larger; the rest is left unread.
        ClientGone: The client went away before it was complete.
    """
    announced = Headers(scope=scope).get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLarge(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge(limit)
        parts.append(part)
        if not message.get("more_body", False):
            keep(scope, replace(context_of(scope), arrived=time.monotonic()))
            return b"".join(parts)


async def while_connected(scope: Scope, work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Answer a request, unless its client disconnects before it has the whole answer: then cancel the work.

    What is left to do after the last byte is always done: servers report the end of an answer as a disconnect as well.

    Args:
        scope: The request's.
        work: Answers.
        receive: Tells of the disconnect.
    """
    tracker = tracker_of(scope)
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and tracker.complete:
            await asyncio.wait({working})
        if working.done():
            working.result()
        else:
            log.debug("request %s: the client went away", context_of(scope).request_id)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait({working, watching})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def start_message(headers: Mapping[str, str], media_type: str, more: Mapping[str, str]) -> Message:
    """Return the ASGI message that starts an answer of status 200."""
    pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in {**headers, **more}.items()]
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", media_type.encode("latin-1")), *pairs],
    }


def body_message(data: bytes, *, more: bool) -> Message:
    """Return the ASGI message that carries a part of a body."""
    return {"type": "http.response.body", "body": data, "more_body": more}


async def no_body() -> Any:
    """Stand for a body that is read already."""
    return {"type": "http.request", "body": b"", "more_body": False}
