"""Chats over sockets, in front of two replicas of one tier: where they go, and what is told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import Behaviour
from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until
from tiers.prefix_memory import PrefixMemory
from tiers.spec import ReplicaStatus, TierName

pytestmark = pytest.mark.anyio
SYSTEM = {"role": "system", "content": "You answer in one word. " * 40}


def turns(name: str, count: int) -> list[dict[str, str]]:
    messages = [
        SYSTEM,
        {"role": "user", "content": f"{name}: what is the capital of France? " * 20},
    ]
    for turn in range(count - 1):
        messages.append({"role": "assistant", "content": f"Paris {turn}"})
        messages.append({"role": "user", "content": f"{turn}: and of Spain? " * 20})
    return messages


async def ask(
    stack: Stack, messages: list[dict[str, str]], **more: Any
) -> dict[str, Any]:
    body = {"model": "fast", "messages": messages, "max_tokens": 4, **more}
    headers = body.pop("headers", {})
    answer = await stack.client.post(
        f"{stack.url}/v1/chat/completions", json=body, headers=headers
    )
    assert answer.status_code == 200
    listed = await stack.client.get(f"{stack.url}/requests")
    record: dict[str, Any] = listed.json()["requests"][0]
    return record


async def chat_route(stack: Stack, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "system_prompt": SYSTEM["content"], "tier": "fast"}
    answer = (await stack.client.post(f"{stack.url}/route", json=body)).json()
    return next(tier for tier in answer["tiers"] if tier["tier"] == "fast")


def weigh(stack: Stack, replica: str, tokens: int) -> None:
    """Give a replica of ``fast`` a load that the router believes in, by a request that never begins."""
    others = {r.id for r in stack.fleet.replicas} - {replica}
    assert (
        stack.fleet.lease(
            TierName.FAST, prompt_tokens=tokens, max_tokens=0, exclude=others
        )
        is not None
    )


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_chat_stays_on_its_replica(tmp_path: Path, *, streamed: bool) -> None:
    """Though the other one has less to do; a new chat goes there, and what is predicted grows with the chat."""
    async with router_stack(tmp_path, twin=Behaviour()) as stack:
        first = await ask(stack, turns("a", 1), stream=streamed)
        assert first["predicted_cached_tokens"] == 0
        weigh(stack, first["replica"], 150)
        cached = []
        for count in (2, 3, 4):
            record = await ask(stack, turns("a", count), stream=streamed)
            assert record["replica"] == first["replica"]
            cached.append(record["predicted_cached_tokens"])
        assert 150 < cached[0] < cached[1] < cached[2]
        other = await ask(
            stack,
            [{"role": "user", "content": "Something else entirely. " * 40}],
            stream=streamed,
        )
        assert other["replica"] != first["replica"]


async def test_without_affinity_the_least_loaded_gets_every_turn(
    tmp_path: Path,
) -> None:
    async with router_stack(
        tmp_path, {"admission": {"affinity": False}}, twin=Behaviour()
    ) as stack:
        first = await ask(stack, turns("a", 1))
        weigh(stack, first["replica"], 150)
        later = await ask(stack, turns("a", 2))
        assert later["replica"] != first["replica"]
        assert later["predicted_cached_tokens"] is None
        assert (await chat_route(stack, "What is the capital of France? " * 20))[
            "cached_prompt_tokens"
        ] is None
        assert not any(len(replica.prefixes) for replica in stack.fleet.replicas)


@pytest.mark.parametrize(
    "session",
    [
        {"headers": {"x-session-id": "one"}},
        {"prompt_cache_key": "one"},
        {"user": "one"},
    ],
    ids=["header", "prompt_cache_key", "user"],
)
async def test_a_session_finds_its_replica_after_a_restart(
    tmp_path: Path, session: dict[str, Any]
) -> None:
    """A router that remembers nothing sends it where one did that knew as little; by whichever name it has."""
    async with router_stack(tmp_path, twin=Behaviour()) as stack:
        home = (await ask(stack, turns("a", 1), **session))["replica"]
        for count in (2, 3):
            for replica in stack.fleet.replicas:
                replica.prefixes = PrefixMemory()
            other = next(
                r.id
                for r in stack.fleet.replicas
                if r.spec.name is TierName.FAST and r.id != home
            )
            weigh(stack, home, 50)
            assert (await ask(stack, turns("a", count), **session))["replica"] == home
            weigh(stack, other, 50)


async def test_a_route_tells_what_is_cached(tmp_path: Path) -> None:
    """By tier; null for a prompt without a whole block; asking for it leaves nothing behind."""
    async with router_stack(tmp_path, twin=Behaviour()) as stack:
        prompt = "What is the capital of France? " * 20
        assert [
            (await chat_route(stack, prompt))["cached_prompt_tokens"] for _ in range(2)
        ] == [0, 0]
        await stack.generate(
            prompt=prompt, system_prompt=SYSTEM["content"], tier="fast"
        )
        assert (await chat_route(stack, f"{prompt} And of Spain?"))[
            "cached_prompt_tokens"
        ] > 400
        short = (
            await stack.client.post(f"{stack.url}/route", json={"prompt": "hi"})
        ).json()
        assert {tier["cached_prompt_tokens"] for tier in short["tiers"]} == {None}


async def test_hits_are_counted_as_predicted_and_as_reported(tmp_path: Path) -> None:
    """In metrics and records; an engine that finds far less than predicted has evicted what is older."""
    fast = Behaviour(prompt_tokens=600, cached_tokens=0)
    async with router_stack(tmp_path, fast=fast) as stack:
        await ask(stack, turns("old", 1))
        for count, reported in ((1, 0), (2, 256), (3, 0)):
            fast.cached_tokens = reported
            record = await ask(stack, turns("a", count))
            assert record["cached_prompt_tokens"] == reported
        page = (await stack.client.get(f"{stack.url}/metrics")).text
        assert (
            'qarr_cached_prompt_tokens_total{source="reported",tier="fast"} 256.0'
            in page
        )
        lines = [
            line
            for line in page.splitlines()
            if 'qarr_cached_prompt_tokens_total{source="predicted"' in line
        ]
        (predicted,) = [
            float(line.split()[-1]) for line in lines if 'tier="fast"' in line
        ]
        assert predicted > 256
        assert (await ask(stack, turns("old", 2)))["predicted_cached_tokens"] < record[
            "predicted_cached_tokens"
        ]


async def test_the_engines_own_counters_are_told(tmp_path: Path) -> None:
    """In metrics, and as a rate among the tiers."""
    async with router_stack(
        tmp_path, fast=Behaviour(cache_queries=800, cache_hits=200)
    ) as stack:
        labels = '{replica="fast-0",tier="fast"}'

        async def page_with_the_queries() -> str | None:
            page = (await stack.client.get(f"{stack.url}/metrics")).text
            return (
                page
                if f"qarr_prefix_cache_queries_total{labels} 800.0" in page
                else None
            )

        page = await until(page_with_the_queries)  # the engine is read twice a second
        assert f"qarr_prefix_cache_hits_total{labels} 200.0" in page
        tiers = (await stack.client.get(f"{stack.url}/tiers")).json()["tiers"]
        assert {
            tier["tier"]: tier["replicas"][0]["prefix_cache_hit_rate"] for tier in tiers
        }["fast"] == 0.25


async def test_a_failed_engine_hands_a_chat_over(tmp_path: Path) -> None:
    """The other replica gets the turn and keeps the chat, as the first one holds nothing of it any more."""
    engines = fast, twin = Behaviour(), Behaviour()
    async with router_stack(tmp_path, fast=fast, twin=twin) as stack:
        first = await ask(stack, turns("a", 1))
        broken = engines[int(first["replica"][-1])]
        broken.status = 500
        for count in (2, 3):
            assert (await ask(stack, turns("a", count)))["replica"] != first["replica"]
            broken.status = 200


TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]


def agents_turn(task: str, count: int) -> dict[str, Any]:
    """Return an agent's body after some calls of a tool, each with its result."""
    messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": task * 40}]
    for number in range(count - 1):
        call = {"name": "read", "arguments": f'{{"path": "{number}"}}'}
        calls = [{"id": f"c{number}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        result = f"line {number} of the file\n" * 40
        messages.append(
            {"role": "tool", "tool_call_id": f"c{number}", "content": result}
        )
    return {"messages": messages, "tools": TOOLS, "max_tokens": 4}


async def agent_asks(
    stack: Stack, task: str, count: int, model: str = "auto"
) -> tuple[str, str]:
    """Send a turn of an agent that names no conversation; return the tier that served it, and the reason."""
    answer = await stack.client.post(
        f"{stack.url}/v1/chat/completions",
        json={**agents_turn(task, count), "model": model},
    )
    assert answer.status_code == 200
    return answer.headers["x-qarr-tier"], answer.headers["x-qarr-reason"]


async def test_a_tool_loop_keeps_its_precision_until_that_cannot_serve(
    tmp_path: Path,
) -> None:
    """Another agent with the same system prompt and tools is not drawn there; a tier that drains is left, with the reason."""
    async with router_stack(tmp_path) as stack:
        usual, _ = await agent_asks(stack, "Mend the clock. ", 1)
        assert usual == "precise"
        await agent_asks(stack, "Mend the clocks. ", 1, model="balanced")
        for count in (2, 3):
            tier, reason = await agent_asks(stack, "Mend the clocks. ", count)
            assert tier == "balanced"
            assert "tokens of the conversation" in reason
            tier, reason = await agent_asks(stack, "Mend the clock. ", count)
            assert tier == usual
            assert "leaves" not in reason
        for replica in stack.fleet.replicas:
            if replica.spec.name is TierName.BALANCED:
                replica.mark(ReplicaStatus.DRAINING)
        tier, reason = await agent_asks(stack, "Mend the clocks. ", 4)
        assert tier == usual
        assert "the conversation leaves balanced, which holds" in reason
        assert reason.endswith("balanced is draining")
        # It is held there now as well, by its last turn.
        tier, reason = await agent_asks(stack, "Mend the clocks. ", 5)
        assert tier == usual
        assert "leaves" not in reason
