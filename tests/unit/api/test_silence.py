"""Streams whose first token is long in coming: proxies on the way must not take them for dead."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import ANSWER
from tests.unit.own_engines import until
from tests.unit.router_stack import router_stack

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "hi"},
    "/generate?resumable": {"prompt": "hi", "resumable": True},
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 64},
    "/v1/responses": {"input": "hi"},
}
SETTINGS = {"server": {"silence_s": 0.1}}
WAITING = ": waiting\n\n"


@pytest.mark.parametrize("path", BODIES)
async def test_the_head_and_comments_come_before_a_late_token(tmp_path: Path, path: str) -> None:
    """What follows is what would have come anyway; a whole answer waits, and keeps its headers."""
    async with router_stack(tmp_path, SETTINGS) as stack:
        for behaviour in stack.engines.values():
            behaviour.delay_s = 0.25
        body = {**BODIES[path], "stream": True}
        async with stack.client.stream("POST", stack.url + path, json=body) as answer:
            assert (answer.status_code, "x-qarr-tier" in answer.headers) == (200, False)
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert answer.headers["x-request-id"]
            text = (await answer.aread()).decode()
        assert text.startswith(WAITING * 2)
        events = text.replace(WAITING, "")
        assert all(piece in events for piece in map(json.dumps, ANSWER) if path == "/v1/completions")
        assert ": waiting" not in events
        for behaviour in stack.engines.values():
            behaviour.delay_s = 0
        soon = await stack.client.post(stack.url + path, json=body)
        assert (soon.headers["x-qarr-tier"], ": waiting" in soon.text) == ("fast", False)
        assert events.count("\n\n") == soon.text.count("\n\n")
        if "resumable" not in path:
            whole = await stack.client.post(stack.url + path, json={**body, "stream": False})
            assert whole.headers["x-qarr-tier"] == "fast"
        assert stack.leases() == 0


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_after_the_head_is_an_event(tmp_path: Path, path: str) -> None:
    settings = SETTINGS | {"upstream": {"first_token_timeout_s": 0.3, "attempts": 1}}
    async with router_stack(tmp_path, settings) as stack:
        for behaviour in stack.engines.values():
            behaviour.hung = {path, "/v1/chat/completions"}
        answer = await stack.client.post(stack.url + path, json={**BODIES[path], "stream": True})
        *_, last, end = answer.text.split("\n\n")
        assert (answer.status_code, answer.text.startswith(WAITING), end) == (200, True, "")
        told = json.loads(last.partition("data: ")[2])
        assert "no first token within 0.3 s" in json.dumps(told)
        assert last.startswith("event: error") is (path not in {"/v1/chat/completions", "/v1/completions"})
        await until(lambda: stack.leases() == 0)


async def test_a_client_that_leaves_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    async with router_stack(tmp_path, SETTINGS) as stack:
        for behaviour in stack.engines.values():
            behaviour.delay_s = 60
        async with stack.client.stream("POST", f"{stack.url}/generate", json={"prompt": "hi"}) as answer:
            async for part in answer.aiter_text():
                assert part == WAITING
                break
        await until(lambda: stack.leases() == 0)
        assert not [task for task in asyncio.all_tasks() if "keep_alive" in repr(task.get_coro())]
