"""A tier named as ``model`` under ``/v1``: it answers or nothing does, unless the caller or the settings say otherwise."""

from __future__ import annotations

import asyncio
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.router_stack import router_stack
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from tests.unit.router_stack import Stack

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/v1/responses": {"input": "hi"},
}
PREFER, REQUIRE = ({"x-qarr-tier-policy": policy} for policy in ("prefer", "require"))


async def ask(
    stack: Stack, path: str, headers: dict[str, str] | None = None, **more: Any
) -> httpx.Response:
    body = {"model": "fast", **BODIES[path], **more}
    return await stack.client.post(stack.url + path, json=body, headers=headers)


async def forty_five(
    tmp_path: Path, headers: dict[str, str], *, stream: bool
) -> list[httpx.Response]:
    """Ask ``fast`` as often at once over all endpoints, with room for eight of them."""
    tiers = {name: {"max_in_flight": 4} for name in STANDARD_TIERS}
    admission = {"max_waiting": 4, "max_wait_s": {"standard": 0.3}}
    async with router_stack(
        tmp_path, {"tiers": tiers, "admission": admission}
    ) as stack:
        for engine in stack.engines.values():
            engine.delay_s = 0.03
        paths = islice(cycle(BODIES), 45)
        answers = await asyncio.gather(
            *(ask(stack, path, headers, stream=stream) for path in paths)
        )
        assert stack.leases() == 0
        return answers


@pytest.mark.parametrize("stream", [False, True])
async def test_under_load_the_named_tier_answers_or_nothing_does(
    tmp_path: Path,
    stream: bool,  # noqa: FBT001
) -> None:
    """Of 45 requests at once none is answered by another tier; who is refused is told when to come again."""
    answers = await forty_five(tmp_path, {}, stream=stream)
    refused = [a for a in answers if a.status_code != 200]
    assert {a.headers.get("x-qarr-tier") for a in answers if a.status_code == 200} == {
        "fast"
    }, {a.text for a in refused}
    assert {a.status_code for a in refused} == {503}
    assert all(
        int(a.headers["retry-after"]) >= 1 and a.json()["error"]["message"]
        for a in refused
    )


async def test_a_preferred_tier_gives_way_under_load(tmp_path: Path) -> None:
    answers = await forty_five(tmp_path, PREFER, stream=False)
    assert {a.headers["x-qarr-tier"] for a in answers if a.status_code == 200} > {
        "fast"
    }


# Settings, headers, body; whether another tier may answer, when ``fast`` is down.
SAID: list[tuple[str, dict[str, str], dict[str, Any], bool]] = [
    ("require", {}, {}, False),
    ("require", {"x-qarr-priority": "batch"}, {"qarr": {"report": True}}, False),
    ("require", {}, {"model": "quick"}, False),
    ("require", {}, {"model": "auto"}, True),
    ("require", {}, {"model": "qarr"}, True),
    ("require", {}, {"model": "auto", "qarr": {"tier": "fast"}}, True),
    ("require", {"x-qarr-tier": "fast"}, {"model": "auto"}, True),
    ("require", {}, {"qarr": {"tier": "auto"}}, True),
    ("require", PREFER, {}, True),
    ("require", {}, {"qarr": {"tier_policy": "prefer"}}, True),
    ("require", PREFER, {"qarr": {"tier_policy": "require"}}, False),
    ("require", REQUIRE, {"qarr": {"tier_policy": "prefer"}}, True),
    ("prefer", {}, {}, True),
    ("prefer", REQUIRE, {}, False),
    ("prefer", {}, {"qarr": {"tier_policy": "require"}}, False),
    ("prefer", REQUIRE, {"qarr": {"tier_policy": "prefer"}}, True),
]


@pytest.mark.parametrize("path", BODIES)
async def test_the_body_wins_over_the_header_and_the_header_over_the_settings(
    tmp_path: Path, path: str
) -> None:
    """On each endpoint; without either, the settings count, and for a tier named as the model alone."""
    for setting in ("require", "prefer"):
        options = {"openai": {"tier_policy": setting, "aliases": {"quick": "fast"}}}
        async with router_stack(tmp_path, options) as stack:
            stack.fleet.replicas[0].mark(ReplicaStatus.FAILED)
            for policy, headers, body, others in SAID:
                if policy == setting:
                    answer = await ask(stack, path, headers, **body)
                    assert answer.status_code == (200 if others else 503), (
                        headers,
                        body,
                        answer.text,
                    )
                    assert others or answer.headers["retry-after"]
            ours = await stack.generate(tier="fast")
            assert ours.status_code == 200
            assert ours.headers["x-qarr-tier"] == "balanced"


@pytest.mark.parametrize("path", BODIES)
async def test_a_policy_that_there_is_not_is_refused(tmp_path: Path, path: str) -> None:
    """With a 400 that names the header and what is allowed."""
    async with router_stack(tmp_path) as stack:
        answer = await ask(stack, path, {"x-qarr-tier-policy": "must"})
        assert answer.status_code == 400
        assert (
            "x-qarr-tier-policy: is 'must' (allowed: prefer or require)"
            in answer.json()["error"]["message"]
        )


async def test_a_stream_of_a_named_tier_does_not_go_on_elsewhere(
    tmp_path: Path,
) -> None:
    """A fault in its middle ends it with an error; a preferred tier's stream is completed by another."""
    async with router_stack(tmp_path) as stack:
        stack.engines[TierName.FAST].break_after = 3
        named, preferred = [
            (await ask(stack, "/v1/chat/completions", h, stream=True)).text
            for h in ({}, PREFER)
        ]
        assert ("stream_broken" in named) is True
        assert ("[DONE]" in named) is False
        assert ("stream_broken" in preferred) is False
        assert ("[DONE]" in preferred) is True
