"""Bad input over a real socket: a 4xx problem that names the field, never a 5xx, and nothing is leaked."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.unit.router_stack import router_stack

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
SECRET = "hunter2-secret"
CASES = [
    (b'{"prompt": ""}', 400, "prompt"),
    (json.dumps({"prompt": "a" * 16001}).encode(), 400, "prompt"),
    (json.dumps({"prompt": "a " * 5001}).encode(), 400, "prompt"),
    (json.dumps({"prompt": "hi", "system_prompt": "a" * 16001}).encode(), 400, "system_prompt"),
    (b'{"prompt": 7}', 400, "prompt"),
    (b'{"prompt": null}', 400, "prompt"),
    (b'{"prompt": ["hi"]}', 400, "prompt"),
    (b"{}", 400, "prompt"),
    (b"[]", 400, "body"),
    (b"null", 400, "body"),
    (b'"hi"', 400, "body"),
    (b"", 400, "body"),
    (b'{"prompt": "hunter2-secret"', 400, "body"),
    (b'{"prompt": "hi", "temprature": 1}', 400, "temprature"),
    (b'{"prompt": "hi", "temperature": NaN}', 400, "temperature"),
    (b'{"prompt": "hi", "temperature": Infinity}', 400, "temperature"),
    (b'{"prompt": "hi", "temperature": -0.1}', 400, "temperature"),
    (b'{"prompt": "hi", "temperature": 2.1}', 400, "temperature"),
    (b'{"prompt": "hi", "temperature": "1"}', 400, "temperature"),
    (b'{"prompt": "hi", "max_tokens": 0}', 400, "max_tokens"),
    (b'{"prompt": "hi", "max_tokens": 4097}', 400, "max_tokens"),
    (b'{"prompt": "hi", "max_tokens": 1.5}', 400, "max_tokens"),
    (b'{"prompt": "hi", "max_tokens": true}', 400, "max_tokens"),
    (b'{"prompt": "hi", "max_tokens": 1e400}', 400, "max_tokens"),
    (b'{"prompt": "hi", "stream": "yes"}', 400, "stream"),
    (b'{"prompt": "hi", "tier": "cheap"}', 400, "tier"),
    (b'{"prompt": "hi", "tier_policy": "must"}', 400, "tier_policy"),
    (b'{"prompt": "hi", "priority": 1}', 400, "priority"),
    (b'{"prompt": "hi", "sla": {"ttft_ms": 0}}', 400, "sla.ttft_ms"),
    (b'{"prompt": "hi", "sla": {"tpot_ms": NaN}}', 400, "sla.tpot_ms"),
    (b'{"prompt": "hi", "sla": {"max_quality_loss": 2}}', 400, "sla.max_quality_loss"),
    (b'{"prompt": "hi", "sla": {"cost": 1}}', 400, "sla.cost"),
    (b'{"prompt": "\xff\xfe"}', 400, "body"),
    (b'{"prompt": "\\ud800"}', 400, "body"),
    (b'{"prompt": "hi"} trailing', 400, "body"),
    (b"[" * 100_000, 400, "body"),
    (b"{" + b'"a":' * 5000, 400, "body"),
    (
        json.dumps({"prompt": "x " * 4999, "max_tokens": 4096, "tier": "fast", "tier_policy": "require"}).encode(),
        422,
        "prompt",
    ),
]


async def test_each_bad_body_is_a_4xx_that_names_the_field(tmp_path: Path) -> None:
    """Every case is a problem+json with field, problem and what is allowed; the router then still serves."""
    async with router_stack(tmp_path) as stack:
        for body, status, field in CASES:
            for path in ("/generate", "/route"):
                if status == 422 and path == "/route":
                    continue  # a decision that refuses is an answer of /route
                answer = await stack.client.post(f"{stack.url}{path}", content=body)
                shown = body[:60]
                assert answer.status_code == status, (path, shown, answer.text)
                assert answer.headers["content-type"] == "application/problem+json", shown
                problem = answer.json()
                assert (problem["status"], bool(problem["title"])) == (status, True)
                assert field in {e["field"] for e in problem["errors"]}, (shown, problem)
                assert all(e["problem"] and e["allowed"] for e in problem["errors"]), (shown, problem)
                assert answer.headers["x-request-id"] == problem["request_id"]
                assert SECRET not in answer.text
                assert "Traceback" not in answer.text
        assert (await stack.generate()).status_code == 200
        assert stack.leases() == 0


async def test_every_wrong_field_is_listed(tmp_path: Path) -> None:
    """Two mistakes are two entries: nobody should have to mend them one by one."""
    async with router_stack(tmp_path) as stack:
        answer = await stack.client.post(f"{stack.url}/generate", json={"prompt": "", "tier": "x", "wat": 1})
        assert {e["field"] for e in answer.json()["errors"]} == {"prompt", "tier", "wat"}


async def test_limits_are_inclusive(tmp_path: Path) -> None:
    """16,000 characters and 5,000 words are allowed."""
    async with router_stack(tmp_path) as stack:
        for prompt in ("a" * 16_000, "a " * 5_000):
            answer = await stack.client.post(f"{stack.url}/route", json={"prompt": prompt, "max_tokens": 1})
            assert answer.status_code == 200


async def test_announced_huge_body_is_refused_unread(tmp_path: Path) -> None:
    """A body over the limit is answered 413 before any of it is sent."""
    async with router_stack(tmp_path) as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rsplit(":", 1)[1]))
        writer.write(b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n")
        await writer.drain()
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
        assert b" 413 " in head
        assert b"connection: close" in head
        writer.close()


async def test_unannounced_huge_body_is_refused(tmp_path: Path) -> None:
    """A chunked body is cut off at the limit."""
    async with router_stack(tmp_path, {"server": {"max_body_bytes": 2048}}) as stack:

        async def chunks() -> object:
            for _ in range(3):
                yield b"x" * 1000

        answer = await stack.client.post(f"{stack.url}/generate", content=chunks())
        assert answer.status_code == 413
        assert answer.json()["errors"][0]["allowed"] == "at most 2048 bytes"


async def test_unknown_paths_and_methods_are_problems(tmp_path: Path) -> None:
    """Elsewhere there is a 404 that lists what there is, and a wrong method names the right one."""
    async with router_stack(tmp_path) as stack:
        lost = await stack.client.get(f"{stack.url}/nowhere")
        assert (lost.status_code, lost.json()["type"]) == (404, "urn:qarr:problem:not-found")
        assert "POST /generate" in lost.json()["detail"]
        wrong = await stack.client.get(f"{stack.url}/generate")
        assert wrong.status_code == 405
