"""Memory that is free goes back to the operating system; what stays is not looked at again and again."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from router.api.bodies import STANDARD_RULES, parsed
from router.api.generate import GenerateBody, allowed_values
from router.section import PROJECT
from tests.fakes.engine import Behaviour
from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until

# One block in ten stays, all over the heap, so that the heap's end cannot move down.
SCRIPT = """
import psutil
from router.server.memory import malloc_trim
process = psutil.Process()
before = process.memory_info().rss
blocks = [bytes(6000) for _ in range(10_000)]
full = process.memory_info().rss
blocks[:] = [block for number, block in enumerate(blocks) if number % 10 == 0]
malloc_trim()(0)
print(full - before, process.memory_info().rss - before)
"""


def run(script: str) -> list[int]:
    """Return the numbers that a script prints, in a process of its own, which has no memory to spare from before."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return [int(number) for number in done.stdout.split()]


def test_what_is_asked_and_answered_does_not_stay_in_the_parser() -> None:
    body = b'{"prompt": "a short one", "system_prompt": "be brief"}'
    one, other = (
        parsed(GenerateBody, body, allowed_values, STANDARD_RULES) for _ in range(2)
    )
    assert one.prompt == other.prompt
    assert one.prompt is not other.prompt, "the parser kept the prompt"
    assert one.system_prompt is not other.system_prompt


async def ask(stack: Stack, way: str) -> None:
    """Use the router in one way, and wait until it has nothing of it any more, no task either."""
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
        assert (
            await stack.client.post(f"{stack.url}/v1/chat/completions", json=body)
        ).status_code == 200
    elif way == "refused":
        assert (
            await stack.generate(tier="fast", tier_policy="require", max_tokens=4000)
        ).status_code >= 400
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
    """What only the collector frees piles up until it comes: memory goes up and down, and in the end up."""
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
                f"{type(each).__module__}.{type(each).__qualname__}"
                for each in gc.garbage
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
