"""Streams that are silent for long: proxies on the way must not take them for dead, nor the router their engines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import ANSWER, Behaviour
from tests.unit.router_stack import router_stack
from tests.waiting import until
from tiers.spec import STANDARD_TIERS

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
WAITING = ": waiting\n"
TOOLS: dict[str, Any] = {
    "/v1/chat/completions": [
        {
            "type": "function",
            "function": {"name": "write", "parameters": {"type": "object"}},
        }
    ],
    "/v1/messages": [{"name": "write", "input_schema": {"type": "object"}}],
    "/v1/responses": [
        {"type": "function", "name": "write", "parameters": {"type": "object"}}
    ],
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_head_and_comments_come_before_a_late_token(
    tmp_path: Path, path: str
) -> None:
    """What follows is what would have come anyway; a whole answer waits, and keeps its headers."""
    async with router_stack(tmp_path, SETTINGS) as stack:
        for behaviour in stack.engines.values():
            behaviour.delay_s = 0.25
        body = {**BODIES[path], "stream": True}
        async with stack.client.stream("POST", stack.url + path, json=body) as answer:
            assert answer.status_code == 200
            assert ("x-qarr-tier" in answer.headers) is False
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert answer.headers["x-request-id"]
            text = (await answer.aread()).decode()
        assert text.startswith(WAITING * 2)
        events = text.replace(WAITING, "")
        assert all(
            piece in events
            for piece in map(json.dumps, ANSWER)
            if path == "/v1/completions"
        )
        assert ": waiting" not in events
        for behaviour in stack.engines.values():
            behaviour.delay_s = 0
        soon = await stack.client.post(stack.url + path, json=body)
        assert soon.headers["x-qarr-tier"] == "fast"
        assert (": waiting" in soon.text) is False
        assert events.count("\n\n") == soon.text.count("\n\n")
        if "resumable" not in path:
            whole = await stack.client.post(
                stack.url + path, json={**body, "stream": False}
            )
            assert whole.headers["x-qarr-tier"] == "fast"
        assert stack.leases() == 0


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_after_the_head_is_an_event(tmp_path: Path, path: str) -> None:
    settings = SETTINGS | {"upstream": {"first_token_timeout_s": 0.3, "attempts": 1}}
    async with router_stack(tmp_path, settings) as stack:
        for behaviour in stack.engines.values():
            behaviour.hung = {path, "/v1/chat/completions"}
        answer = await stack.client.post(
            stack.url + path, json={**BODIES[path], "stream": True}
        )
        *_, last, end = answer.text.split("\n\n")
        assert answer.status_code == 200
        assert answer.text.startswith(WAITING) is True
        assert end == ""
        told = json.loads(last.partition("data: ")[2])
        assert "no first token within 0.3 s" in json.dumps(told)
        last = last.replace(WAITING, "")
        assert last.startswith("event: error") is (
            path not in {"/v1/chat/completions", "/v1/completions"}
        )
        await until(lambda: stack.leases() == 0)


async def test_a_client_that_leaves_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    async with router_stack(tmp_path, SETTINGS) as stack:
        for behaviour in stack.engines.values():
            behaviour.delay_s = 60
        async with stack.client.stream(
            "POST", f"{stack.url}/generate", json={"prompt": "hi"}
        ) as answer:
            async for part in answer.aiter_text():
                assert part == WAITING
                break
        await until(lambda: stack.leases() == 0)
        assert not [
            task
            for task in asyncio.all_tasks()
            if "keep_alive" in repr(task.get_coro())
        ]


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("path", ["/generate", *TOOLS])
async def test_a_tool_call_that_is_held_back_is_waited_for(
    tmp_path: Path,
    path: str,
    counts: bool,  # noqa: FBT001
) -> None:
    """The caller gets what it would have got anyway, comments meanwhile, and no trace of token ids; no engine failed."""
    settings = SETTINGS | {
        "upstream": {"token_timeout_s": 2.5, "first_token_timeout_s": 2.5}
    }
    # an engine that has been seen to count would be taken to hang once it no longer does
    behaviours = {str(tier): Behaviour(counts=counts) for tier in STANDARD_TIERS}
    async with router_stack(tmp_path, settings, **behaviours) as stack:
        for behaviour in stack.engines.values():
            behaviour.held_from = 2
            behaviour.delay_s = 0.8
        more = {"tools": TOOLS[path]} if path in TOOLS else {}
        answer = await stack.client.post(
            stack.url + path, json={**BODIES[path], **more, "stream": True}
        )
        assert "error" not in answer.text
        assert WAITING in answer.text.partition("capital")[2], "comments between events"
        assert '_ids":[' not in answer.text
        assert "{}" not in answer.text.replace(
            '"delta":{},"logprobs":null,"finish_reason":"', ""
        ), "no empty event"
        assert "Paris" in answer.text
        assert [replica.state.failed for replica in stack.fleet.replicas] == [0, 0, 0]
        assert sum(len(behaviour.requests) for behaviour in stack.engines.values()) == 1


async def test_an_engines_count_of_tokens_is_noted_when_it_rises(
    tmp_path: Path,
) -> None:
    async with router_stack(tmp_path) as stack:
        answer = await stack.generate()
        (replica,) = [
            r
            for r in stack.fleet.replicas
            if r.spec.name == answer.headers["x-qarr-tier"]
        ]
        await until(lambda: replica.work.generated_at is not None)
        before = replica.work.generated_at or 0.0
        await stack.generate()
        await until(lambda: (replica.work.generated_at or 0.0) > before)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
)
async def test_an_engines_comments_have_one_line_end(tmp_path: Path, path: str) -> None:
    """A client that takes every empty line for the end of an event finds data in each."""
    async with router_stack(tmp_path) as stack:
        for behaviour in stack.engines.values():
            behaviour.pings = True
        answer = await stack.client.post(
            stack.url + path, json={**BODIES[path], "stream": True}
        )
        blocks = answer.text.removesuffix("\n\n").split("\n\n")
        assert all("data: " in block for block in blocks)
