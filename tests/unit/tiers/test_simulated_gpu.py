"""The prefix cache of a simulated engine: what it saves, and that blocks are neither lost nor given out twice."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.simulated.engine import SimulatedEngine
from tiers.simulated.gpu import BLOCK, HARDWARE, Job, Scheduler
from tiers.spec import TierName

pytestmark = pytest.mark.anyio
PRECISE = HARDWARE[TierName.PRECISE]


def job(*names: int, tokens: int = 1) -> Job:
    """Return a job whose prompt has a block for each name, and half a block more."""
    hashes = tuple(hash(names[: end + 1]) for end in range(len(names)))
    return Job(len(names) * BLOCK + BLOCK // 2, tokens, hashes=hashes)


def scheduler(blocks: int) -> Scheduler:
    return Scheduler(PRECISE, max_num_seqs=4, kv_tokens=blocks * BLOCK)


def computed(made: Scheduler, *jobs: Job) -> int:
    """Compute jobs to their ends, and return the prompt tokens that were computed."""
    made.waiting.extend(jobs)
    tokens = 0
    while step := made.next_step():
        tokens += sum(part for _, part in step.parts)
        made.finish(step)
    return tokens


def test_a_prompt_is_computed_from_where_it_differs() -> None:
    """Of the same prompt only what fills no block; of a longer one what is new; of a block of another text nothing is cached."""
    made = scheduler(100)
    assert computed(made, job(1, 2, 3)) == 3 * BLOCK + BLOCK // 2
    again, longer, other = job(1, 2, 3), job(1, 2, 3, 4), job(9, 2, 3)
    assert computed(made, again) == BLOCK // 2
    assert computed(made, longer) == BLOCK + BLOCK // 2
    assert computed(made, other) == 3 * BLOCK + BLOCK // 2
    assert [each.cached for each in (again, longer, other)] == [3 * BLOCK, 3 * BLOCK, 0]
    assert made.cache_hits == 6 * BLOCK
    assert made.cache_queries == 13 * BLOCK + 4 * (BLOCK // 2)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    made = scheduler(100)
    whole = Job(2 * BLOCK, 1, hashes=(1, 2))
    computed(made, whole)
    again = Job(2 * BLOCK, 1, hashes=(1, 2))
    assert computed(made, again) == BLOCK
    assert again.cached == BLOCK


def test_the_least_recently_used_prompt_is_evicted_from_its_end() -> None:
    made = scheduler(8)
    computed(made, job(1, 2, 3))
    computed(made, job(5, 6))
    computed(made, job(7, 8, 9))
    first = job(1, 2, 3)
    computed(made, first)
    assert first.cached == 2 * BLOCK


def test_without_hashes_nothing_is_shared() -> None:
    made = scheduler(100)
    for _ in range(2):
        assert computed(made, Job(40, 2)) == 41
    assert made.cache_hits == 0


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(1, 40)),
        max_size=12,
    ),
    st.integers(8, 20),
    st.integers(0, 1 << 16),
)
def test_no_block_is_lost_or_given_out_twice(
    jobs: list[tuple[list[int], int]], blocks: int, seed: int
) -> None:
    """Whatever is asked for, preempted or given up: in the end all blocks are free, and every answer is whole."""
    chance = random.Random(seed)
    made = scheduler(blocks)
    asked = [job(*names, tokens=tokens) for names, tokens in jobs]
    left = list(asked)
    while True:
        if left and chance.random() < 0.5:
            made.waiting.append(left.pop())
        step = made.next_step()
        if step is None and not left:
            break
        if step is not None:
            assert 0 <= made.free <= made.blocks
            made.finish(step)
            if chance.random() < 0.1:
                chance.choice(asked).gone = True
    assert made.free == made.blocks
    assert all(each.gone or each.produced == each.tokens for each in asked)


@pytest.mark.parametrize("has_cache", [True, False])
async def test_an_engine_tells_what_it_had_cached(*, has_cache: bool) -> None:
    """In its answers and in its metrics, as vLLM does; tools and calls are part of the prompt."""
    engine = SimulatedEngine(
        PRECISE, max_model_len=131_072, chars_a_token=3, prefix_cache=has_cache
    )
    messages = [
        {"role": "user", "content": "Fix the tides. " * 40},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]},
        {"role": "tool", "content": "4 degrees"},
    ]
    transport = httpx.ASGITransport(engine.app)
    cached = []
    async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        card = (await client.get("/v1/models")).json()["data"][0]
        assert card["max_model_len"] == 131_072
        for tools in ([{"name": "f"}], [{"name": "f"}], [{"name": "g"}]):
            body = {"messages": messages, "tools": tools, "max_tokens": 1}
            answer = await client.post("/v1/chat/completions", json=body)
            usage = answer.json()["usage"]
            details = usage.get("prompt_tokens_details", {})
            cached.append(details.get("cached_tokens"))
            assert usage["prompt_tokens"] > 200
        page = (await client.get("/metrics")).text
    assert cached == (
        [0, usage["prompt_tokens"] // BLOCK * BLOCK, 0] if has_cache else [None] * 3
    )
    is_counted = (
        f"{float(cached[1] or 0)}\n" in page.partition("prefix_cache_hits_total")[2]
    )
    assert is_counted
    await asyncio.sleep(0)
