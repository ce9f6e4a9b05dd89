"""The live stream: its readers, its snapshot, and the lists beside it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.api.paths import MOST_LISTED
from router.auth.api_keys import ANONYMOUS
from router.monitoring.live import MOST_BEHIND, Reader
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
    for number in range(MOST_BEHIND + 2):
        reader.put(f"{number} ".encode())
    waiting = (await anext(reader.events())).split()
    assert (len(waiting), waiting[0], waiting[-1]) == (
        MOST_BEHIND,
        b"2",
        str(MOST_BEHIND + 1).encode(),
    )


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
        found: dict[str, Any] = await anext(
            value async for name, value in events if name == "fleet"
        )
        return found


async def test_a_new_reader_sees_the_last_requests_then_the_fleet(
    tmp_path: Path,
) -> None:
    async with router_stack(tmp_path) as stack:
        first = await snapshot(stack)
        assert first["totals"]["requests"] == 0
        assert [(tier["ttft_ms"], tier["requests"]) for tier in first["tiers"]] == [
            (None, 0)
        ] * len(STANDARD_TIERS)
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
            a.headers["x-request-id"] for a in asked
        ]
        fleet = seen[3][1]
        assert fleet["totals"] == {
            "requests": 3, "ok": 2, "refused": 1, "errors": 0, "client_gone": 0, "retries": 0, "continuations": 0,
        }  # fmt: skip
        fast = fleet["tiers"][0]
        assert (fast["requests"], fast["errors"], fast["sla"]) == (
            2,
            0,
            {"asked": 2, "met": 2},
        )
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
                    == f"limit: a number from 1 to {MOST_LISTED} is allowed"
                )
            for text in ("1", str(MOST_LISTED)):
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
            assert (answer.status_code, answer.json()["type"]) == (
                404,
                "urn:qarr:problem:trace-not-found",
            )
        assert (await stack.client.get(f"{stack.url}/traces")).json() == {
            "scope": "all",
            "traces": [],
        }


async def test_the_policy_is_shown_as_it_is_now(tmp_path: Path) -> None:
    async with router_stack(
        tmp_path, {"policy": {"max_loss": {"code": 0.25}, "sla_confidence": 0.8}}
    ) as stack:
        policy = (await stack.client.get(f"{stack.url}/policy")).json()
        assert (policy["max_loss"]["code"], policy["sla_confidence"]) == (0.25, 0.8)
        assert policy["max_loss"].keys() == {"code"}
        assert policy["pointless"] == {}
        assert policy["negligible_loss"] == 0.005
        assert policy["losses"].keys() == {"fast", "balanced"}
        code = policy["losses"]["fast"]["code"]
        assert [(each, loss["mean"], loss["answers"]) for each, loss in code.items()] == [
            ("trivial", 0.01, 0), ("moderate", 0.04, 0), ("complex", 0.08, 0),
        ]  # fmt: skip


@pytest.mark.parametrize("rule", [0.2, {"like": "fast"}])
async def test_the_loss_budget_is_the_same_everywhere(
    tmp_path: Path, rule: Any
) -> None:
    """Nothing but its rule is known before the first answer; afterwards what is expected and allowed, in all three places."""
    async with router_stack(
        tmp_path, {"policy": {"loss_budget": rule, "max_slowdown": 1e9}}
    ) as stack:
        none = {"rule": rule, "answers": 0, "mean": None, "budget": None, "saved": None}
        assert (await snapshot(stack))["loss_budget"] == none
        await stack.generate(prompt="What is the capital of France?")
        places = [
            (await stack.client.get(stack.url + path)).json()
            for path in ("/tiers", "/policy")
        ]
        found = [place["loss_budget"] for place in (*places, await snapshot(stack))]
        assert (
            found
            == [
                none
                | {"answers": 1, "mean": 0.001, "budget": 0.2 if rule == 0.2 else 0.11}
            ]
            * 3
        )
