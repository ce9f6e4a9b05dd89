"""The middleware around a small application: who gets past it, a router that drains, and its deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from router.api.asgi import body_message, context_of, start_message
from router.auth.access import KeyStore
from router.auth.api_keys import add_key
from router.lifecycle import ServerPhase, ServerState
from router.middleware.request import RequestMiddleware
from router.server.responder import OUT
from router.telemetry.tracing import Telemetry
from tests.unit.sent_responder import SentResponder
from tests.waiting import within

pytestmark = pytest.mark.anyio


@dataclass(slots=True)
class Doorway:
    """The middleware around an application that answers with its caller, and what came out of it."""

    keys: KeyStore
    local_names: Collection[str] | None = None
    state: ServerState = field(default_factory=ServerState)
    answers: list[tuple[str, str, int]] = field(default_factory=list)
    # The application hangs after "start" or after "nothing"; with "" it does not hang.
    stop_after: str = ""
    media_type: str = "text/plain"
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def app(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Answer with the caller's name, or hang on the way."""
        if self.stop_after != "nothing":
            await send(start_message({}, self.media_type, {}))
        self.begun.set()
        if self.stop_after:
            await asyncio.get_running_loop().create_future()
        await send(body_message(context_of(scope).caller.name.encode(), more=False))

    async def ask(
        self, method: str = "POST", path: str = "/generate", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of an answer; an underscore in a header's name stands for a hyphen."""
        out = SentResponder()

        async def receive() -> Message:
            raise AssertionError("the body is not to be read")

        pairs = [
            (name.replace("_", "-").encode(), value.encode())
            for name, value in headers.items()
        ]
        scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": pairs,
            "query_string": b"",
            OUT: out,
        }
        middleware = RequestMiddleware(
            self.app,
            self.keys,
            telemetry=Telemetry(None),
            server_state=self.state,
            answered=lambda *answer: self.answers.append(answer),
            direct={},
            local_names=self.local_names,
        )
        await middleware(scope, receive, out.send)
        assert not self.state.active_requests
        head, *bodies = out.sent
        named = {name.decode(): value.decode() for name, value in head["headers"]}
        return head["status"], named, b"".join(message["body"] for message in bodies)

    async def problem(self, *args: str, **headers: str) -> str:
        _, _, body = await self.ask(*args, **headers)
        kind: str = json.loads(body)["type"]
        return kind.removeprefix("urn:qarr:problem:")


@pytest.fixture
def open_door(tmp_path: Path) -> Doorway:
    return Doorway(KeyStore(tmp_path / "none.json"))


async def test_without_keys_everybody_is_anonymous(open_door: Doorway) -> None:
    assert await open_door.ask() == (200, {"content-type": "text/plain"}, b"anonymous")
    # The small application has no routes.
    assert open_door.answers == [("unknown", "POST", 200)]


async def test_a_key_names_its_caller(tmp_path: Path) -> None:
    """The scheme's case and spaces around the key do not matter; another scheme, or no key, is a 401 that says how."""
    path = tmp_path / "keys.json"
    key, _ = add_key(path, "ci")
    door = Doorway(KeyStore(path))
    for value in (f"Bearer {key}", f"bearer  {key} ", f"BEARER {key}"):
        assert (await door.ask(authorization=value))[2] == b"ci"
    for value in (
        "",
        "Bearer",
        "Bearer  ",
        f"Basic {key}",
        key,
        "Bearer qarr-unknown",
        f"Bearer {key}x",
    ):
        status, headers, _ = await door.ask(authorization=value)
        assert status == 401, value
        assert headers["www-authenticate"] == "Bearer", value
        assert headers["connection"] == "close", value
    assert {status for _, _, status in door.answers} == {200, 401}


@pytest.mark.parametrize("path", ["/health", "/healthz", "/readyz", "/"])
async def test_some_paths_need_no_key(tmp_path: Path, path: str) -> None:
    """Load balancers have no key, and the page asks for one. In metrics these paths are routes of their own."""
    keys = tmp_path / "keys.json"
    add_key(keys, "ci")
    door = Doorway(KeyStore(keys))
    assert (await door.ask("GET", path))[2] == b"anonymous"
    assert door.answers == [(path, "GET", 200)]


async def test_a_draining_router_takes_no_new_work(open_door: Doorway) -> None:
    """Reading and the rest of a stream go on; connections end with their answers."""
    open_door.state.state = ServerPhase.DRAINING
    status, headers, _ = await open_door.ask()
    assert status == 503
    assert headers["connection"] == "close"
    assert headers["retry-after"] == "1"
    assert await open_door.problem("POST", "/route", last_event_id="a.1") == "draining"
    assert (await open_door.ask(last_event_id="a.1"))[0] == 200
    status, headers, _ = await open_door.ask("GET", "/tiers")
    assert status == 200
    assert headers["connection"] == "close"


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_an_answer_that_has_not_begun_by_the_deadline_is_a_503(
    open_door: Doorway, path: str
) -> None:
    open_door.stop_after = "nothing"
    answering = asyncio.create_task(open_door.ask("POST", path))
    await within(open_door.begun.wait(), "the request to begin")
    open_door.state.end_all()
    status, _, body = await answering
    assert status == 503
    assert b"ask again" in body
    assert open_door.answers == [("unknown", "POST", 503)]


@pytest.mark.parametrize(
    ("path", "media_type", "ends_with"),
    [
        ("/generate", "text/event-stream", b"event: error\ndata: {"),
        ("/v1/completions", "text/event-stream; charset=utf-8", b'data: {"error":'),
        ("/generate", "application/json", b""),
    ],
)
async def test_a_stream_ends_with_an_error_at_the_deadline(
    open_door: Doorway, path: str, media_type: str, ends_with: bytes
) -> None:
    """An answer that is one object is only cut off: nothing appended would make it valid."""
    open_door.stop_after = "start"
    open_door.media_type = media_type
    answering = asyncio.create_task(open_door.ask("POST", path))
    await within(open_door.begun.wait(), "the request to begin")
    open_door.state.end_all()
    status, _, body = await answering
    assert status == 200
    assert body[: len(ends_with)] == ends_with
    assert body.endswith(b"\n\n") is bool(ends_with)


async def test_a_client_that_leaves_is_counted_as_499(open_door: Doorway) -> None:
    open_door.stop_after = "nothing"
    answering = asyncio.create_task(open_door.ask())
    await within(open_door.begun.wait(), "the request to begin")
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert open_door.answers == [("unknown", "POST", 499)]
    assert not open_door.state.active_requests
