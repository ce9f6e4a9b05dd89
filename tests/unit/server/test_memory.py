"""A request leaves nothing behind, neither in the parser nor for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from pathlib import Path

import pytest

from router.api.bodies import STANDARD_RULES, parsed
from router.api.generate import GenerateBody, allowed_values
from tests.fakes.engine import Behaviour
from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until


def test_what_is_asked_and_answered_does_not_stay_in_the_parser() -> None:
    body = b'{"prompt": "a short one", "system_prompt": "be brief"}'
    first = parsed(GenerateBody, body, allowed_values, rules=STANDARD_RULES)
    second = parsed(GenerateBody, body, allowed_values, rules=STANDARD_RULES)
    assert first.prompt == second.prompt
    assert first.prompt is not second.prompt, "the parser kept the prompt"
    assert first.system_prompt is not second.system_prompt


async def ask(stack: Stack, way: str) -> None:
    """Use the router in one way, and wait until no lease and no task of it is left."""
    before = asyncio.all_tasks()
    if way == "left":
        async with stack.client.stream(
            "POST", f"{stack.url}/generate", json={"prompt": "hi"}
        ) as answer:
            assert answer.status_code == 200
    elif way == "openai":
        body = {
            "model": "auto",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
        }
        answer = await stack.client.post(f"{stack.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200
    elif way == "refused":
        answer = await stack.generate(
            tier="fast", tier_policy="require", max_tokens=4000
        )
        assert answer.status_code >= 400
    else:
        answer = await stack.generate(
            tier="fast", stream=way != "whole", resumable=way == "resumable"
        )
        assert answer.status_code == 200
    await until(
        lambda: not (stack.leases() or asyncio.all_tasks() - before), poll_s=0.01
    )


@pytest.mark.anyio
@pytest.mark.parametrize(
    "way",
    [
        "whole",
        "streamed",
        "resumable",
        "openai",
        "left",
        "refused",
        "broken",
        "reported",
    ],
)
async def test_a_request_leaves_nothing_for_the_collector(
    tmp_path: Path, way: str
) -> None:
    """What only the collector frees piles up until it runs, and fragments memory."""
    faults = {"broken": {"break_after": 2}, "reported": {"error_after": 2}}.get(way, {})
    answer = ("Paris", " lies", " on", " the", " Seine")
    engines = {
        name: Behaviour(answer=answer, delay_s=0.01)
        for name in ("fast", "balanced", "precise")
    }
    async with router_stack(tmp_path, **engines) as stack:
        for name, value in faults.items():
            setattr(engines["fast"], name, value)
        await ask(stack, way)
        gc.collect()
        # What exists by now is kept alive: other tests in this process may leave something that becomes garbage later.
        existing = gc.get_objects()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                await ask(stack, way)
            gc.collect()
            left = Counter(
                f"{type(garbage).__module__}.{type(garbage).__qualname__}"
                for garbage in gc.garbage
            )
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            del existing
    assert not {
        name: count
        for name, count in left.items()
        if name.startswith(("router.", "tiers."))
    }
