"""The live stream: its readers, its snapshot, and the lists beside it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from classifier import PromptClass
from classifier.kinds import Complexity
from router.api.paths import MAX_LISTED
from router.auth.api_keys import ANONYMOUS
from router.monitoring.live import MAX_BEHIND, Reader
from router.policy.published import published_loss
from tests.unit.router_stack import Stack, router_stack
from tiers.spec import STANDARD_TIERS

pytestmark = pytest.mark.anyio


async def test_a_reader_gets_what_waits_in_one_piece() -> None:
    reader = Reader(ANONYMOUS)
    events = reader.events()
    reader.put(b"one ")
    reader.put(b"two ")
    assert await anext(events) == b"one two "
    reader.put(b"three")
    assert await anext(events) == b"three"


async def test_a_slow_reader_misses_the_oldest() -> None:
    """What waits for a reader that does not read is bounded."""
    reader = Reader(ANONYMOUS)
    for number in range(MAX_BEHIND + 2):
        reader.put(f"{number} ".encode())
    waiting = (await anext(reader.events())).split()
    assert len(waiting) == MAX_BEHIND
    assert waiting[0] == b"2"
    assert waiting[-1] == str(MAX_BEHIND + 1).encode()


async def test_a_reader_that_is_ended_reads_the_rest() -> None:
    reader = Reader(ANONYMOUS)
    reader.put(b"last")
    reader.end()
    assert [batch async for batch in reader.events()] == [b"last"]
    empty = Reader(ANONYMOUS)
    empty.end()
    assert [batch async for batch in empty.events()] == []


@asynccontextmanager
async def watching(stack: Stack) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    async with stack.client.stream("GET", f"{stack.url}/live") as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"

        async def events() -> AsyncIterator[tuple[str, Any]]:
            name = ""
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))

        yield events()


async def snapshot(stack: Stack) -> dict[str, Any]:
    async with watching(stack) as events:
        fleet: dict[str, Any] = await anext(
            value async for name, value in events if name == "fleet"
        )
        return fleet


async def test_a_new_reader_sees_the_last_requests_then_the_fleet(
    tmp_path: Path,
) -> None:
    async with router_stack(tmp_path) as stack:
        first = await snapshot(stack)
        assert first["totals"]["requests"] == 0
        assert len(first["tiers"]) == len(STANDARD_TIERS)
        for tier in first["tiers"]:
            assert tier["ttft_ms"] is None
            assert tier["requests"] == 0
        asked = [
            await stack.generate(tier="fast", sla={"ttft_ms": bound})
            for bound in (60_000, 60_000)
        ]
        await stack.generate(tier="fast", tier_policy="require", max_tokens=4000)
        async with watching(stack) as events:
            seen = [await anext(events) for _ in range(4)]
        names = [name for name, _ in seen]
        assert names == ["request", "request", "request", "fleet"]
        assert [value["request_id"] for _, value in seen[:2]] == [
            answer.headers["x-request-id"] for answer in asked
        ]
        fleet = seen[3][1]
        assert fleet["totals"] == {
            "requests": 3, "ok": 2, "refused": 1, "errors": 0, "client_gone": 0, "retries": 0, "continuations": 0,
        }  # fmt: skip
        fast = fleet["tiers"][0]
        assert fast["requests"] == 2
        assert fast["errors"] == 0
        assert fast["sla"] == {"asked": 2, "met": 2}
        assert 0 < fast["ttft_ms"]["p50"] <= fast["ttft_ms"]["p95"]


async def test_the_limit_of_a_list_is_checked(tmp_path: Path) -> None:
    """Everything but a number from 1 to 1000 in ASCII digits is a 400, however long it is."""
    async with router_stack(tmp_path) as stack:
        for _ in range(2):
            await stack.generate()
        for path in ("/requests", "/traces"):
            for text in (
                "0",
                "-1",
                "+1",
                "1001",
                "x",
                "",
                "1.0",
                "1e3",
                "\u0663",
                "9" * 5000,
            ):
                answer = await stack.client.get(
                    stack.url + path, params={"limit": text}
                )
                assert answer.status_code == 400, (path, text[:9])
                assert (
                    answer.json()["detail"]
                    == f"limit: a number from 1 to {MAX_LISTED} is allowed"
                )
            for text in ("1", str(MAX_LISTED)):
                answer = await stack.client.get(
                    stack.url + path, params={"limit": text}
                )
                assert answer.status_code == 200
        one = await stack.client.get(f"{stack.url}/requests?limit=1")
        both = await stack.client.get(f"{stack.url}/requests")
        assert [r["request_id"] for r in one.json()["requests"]] == [
            both.json()["requests"][0]["request_id"]
        ]
        assert one.headers["cache-control"] == "no-store"


async def test_a_trace_that_is_not_kept_is_404(tmp_path: Path) -> None:
    """Whatever the id is."""
    async with router_stack(tmp_path) as stack:
        for trace_id in ("0" * 32, "x", "%2e%2e"):
            answer = await stack.client.get(f"{stack.url}/traces/{trace_id}")
            assert answer.status_code == 404
            assert answer.json()["type"] == "urn:qarr:problem:trace-not-found"
        assert (await stack.client.get(f"{stack.url}/traces")).json() == {
            "scope": "all",
            "traces": [],
        }


async def test_the_policy_is_shown_as_it_is_now(tmp_path: Path) -> None:
    async with router_stack(
        tmp_path, {"policy": {"max_loss": {"code": 0.25}, "sla_confidence": 0.8}}
    ) as stack:
        policy = (await stack.client.get(f"{stack.url}/policy")).json()
        assert policy["max_loss"] == {"code": 0.25}
        assert policy["sla_confidence"] == 0.8
        assert policy["pointless"] == {}
        assert policy["negligible_loss"] == 0.005
        assert policy["losses"].keys() == {"fast", "balanced"}
        code = policy["losses"]["fast"]["code"]
        means = {complexity: loss["mean"] for complexity, loss in code.items()}
        assert means == {
            complexity: round(
                published_loss("awq-int4", (PromptClass.CODE, complexity), None), 5
            )
            for complexity in Complexity
        }
        assert list(means) == ["trivial", "moderate", "complex"]
        assert [loss["answers"] for loss in code.values()] == [0, 0, 0]


@pytest.mark.parametrize("rule", [0.2, {"like": "fast"}])
async def test_the_loss_budget_is_the_same_everywhere(
    tmp_path: Path, rule: Any
) -> None:
    """Nothing but its rule is known before the first answer; afterwards what is expected and allowed, in all three places."""
    async with router_stack(
        tmp_path, {"policy": {"loss_budget": rule, "max_slowdown": 1e9}}
    ) as stack:
        unknown = {"mean": None, "budget": None, "saved": None}
        before = {"rule": rule, "answers": 0, **unknown}
        assert (await snapshot(stack))["loss_budget"] == before
        await stack.generate(prompt="What is the capital of France?")
        tiers = (await stack.client.get(f"{stack.url}/tiers")).json()
        policy = (await stack.client.get(f"{stack.url}/policy")).json()
        served = (PromptClass.CHAT, Complexity.TRIVIAL)
        mean = round(published_loss("awq-int4", served, None), 5)
        worst = (PromptClass.MATH, Complexity.COMPLEX)
        budget = rule
        if rule != 0.2:
            budget = round(published_loss("awq-int4", worst, None), 5)
        expected = {**before, "answers": 1, "mean": mean, "budget": budget}
        for place in (tiers, policy, await snapshot(stack)):
            assert place["loss_budget"] == expected
