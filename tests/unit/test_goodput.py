"""The pieces of benchmarks/goodput.py: arrivals, load, intervals, simulated engines."""

from __future__ import annotations

import asyncio
import importlib
import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from router.settings import PROJECT
from tests.fakes.engine import serving
from tiers.spec import STANDARD_TIERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    return importlib.import_module


def answer(benchmark: Any, at_s: float, **values: Any) -> Any:
    """Return a complete answer of ``balanced``, but for what is given."""
    one = benchmark("open_loop").Answer(
        index=0, kind="chat", at_s=at_s, ended_s=at_s + 1, tier=BALANCED, ttft_ms=100.0, tpot_ms=10.0,
        prompt_tokens=20, tokens=50, error=None, late_ms=0.0, loss=0.02,
    )  # fmt: skip
    return replace(one, **values)


# Load.


def test_arrivals_are_poisson_and_come_again_with_the_same_seed(benchmark: Any) -> None:
    """Gaps are exponential about the rate; another seed gives other arrivals."""
    loop = benchmark("open_loop")
    workload = loop.Workload(loop.read_prompts(), loop.by_class())
    first = loop.arrivals(workload, 50, 200, seed=3)
    assert first == loop.arrivals(workload, 50, 200, seed=3)
    assert first != loop.arrivals(workload, 50, 200, seed=4)
    assert abs(len(first) - 10_000) < 4 * 100  # four standard deviations
    gaps = [later.at_s - a.at_s for a, later in pairwise(first)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)


def stand_in() -> Starlette:
    """Return a router that is asked to refuse, to break off, to be late, or to answer."""

    async def chat(request: Request) -> Response:
        body = await request.json()
        does = body["messages"][0]["content"]
        if does == "refuse":
            return JSONResponse({"error": "full"}, 503)

        async def events() -> AsyncIterator[bytes]:
            yield b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
            if does == "late":
                await asyncio.sleep(30)
            if does == "cut":
                return
            tokens = body["max_tokens"] - (does == "short")
            usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
            yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), headers={"x-qarr-tier": "fast"}, media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


async def test_what_became_of_each_request_is_told(benchmark: Any) -> None:
    """Refused, cut, short and late requests are errors; a complete one has its times."""
    loop = benchmark("open_loop")
    plan = [
        loop.Arrival(0.01 * n, "chat", does, 5) for n, does in enumerate(("well", "refuse", "cut", "short", "late"))
    ]
    async with serving(stand_in()) as url:
        answers = await loop.send(url, plan, lambda _i, _a: {"model": "auto"}, "t", limit_s=3.0)
    assert [a.error for a in answers] == [None, "refused", "cut", "cut", "late"]
    assert [a.tier for a in answers] == [FAST, None, FAST, FAST, FAST]
    well = answers[0]
    assert well.tokens == 5
    assert well.prompt_tokens == 7
    assert well.ttft_ms > 0
    assert well.meets(1e9, 1e9)
    assert not well.meets(0.001, 1000)
    assert not any(a.meets(1e9, 1e9) for a in answers[1:])


# Figures.


def test_blocks_hold_the_sums_of_their_time(benchmark: Any) -> None:
    """Each round has blocks of its own; what has no value counts neither above nor below."""
    loop = benchmark("open_loop")
    rounds = [[answer(benchmark, 0.5), answer(benchmark, 9.5, loss=None)], [answer(benchmark, 9.9, loss=0.1)]]
    losses = loop.blocks_of(rounds, 5, 10, lambda a: a.loss, lambda _: 1.0)
    assert losses.top == (0.02, 0.0, 0.0, 0.1)
    assert losses.bottom == (1.0, 0.0, 0.0, 1.0)
    assert losses.ratio() == pytest.approx(0.06)
    assert loop.blocks_of(rounds, 5, 10, lambda _: 1.0).ratio() == pytest.approx(3 / 20)


def test_pairing_takes_what_rows_share_out_of_the_interval(benchmark: Any) -> None:
    """Two rows that vary together by block differ by a constant: the difference has no spread, each row has."""
    loop = benchmark("open_loop")
    varying = loop.Blocks((1.0, 9.0, 2.0, 8.0, 5.0), (1.0,) * 5)
    above = loop.Blocks(tuple(value + 1 for value in varying.top), varying.bottom)
    samples = loop.resampled(5)
    alone, difference = loop.interval(varying, samples), loop.interval(above, samples, varying)
    assert alone.mean == 5
    assert alone.low < 3.5
    assert alone.high > 6.5
    assert (difference.low, difference.mean, difference.high) == pytest.approx((1, 1, 1))


async def test_an_answer_loses_what_is_published_for_its_kind(benchmark: Any) -> None:
    """On the tier that gave it; one that was not given loses nothing that is known."""
    goodput, loop = benchmark("goodput"), benchmark("open_loop")
    asked = loop.Arrival(0.0, "math", "Prove that the square root of 2 is irrational.", 5)
    lost = [goodput.loss_of(answer(benchmark, 0, tier=tier), asked) for tier in STANDARD_TIERS]
    assert lost == [0.11, 0.01, 0.0]
    assert goodput.loss_of(answer(benchmark, 0, error="cut"), asked) is None


# Simulated engines.


def test_a_step_takes_the_time_that_a_hand_computes(benchmark: Any) -> None:
    """A decode step reads the weights and the KV cache; a large prompt is bound by computing."""
    bf16 = benchmark("simulated_engine").HARDWARE["precise"]
    weights = 2 * (8.03e9 - 2 * 128_256 * 4096) + 2 * 128_256 * 4096
    assert bf16.step_s(1, 1, 0) == pytest.approx(weights / 2.68e12 + 1e-3)
    assert bf16.step_s(1, 1, 0) == pytest.approx(6.6e-3, rel=0.01)
    assert bf16.step_s(64, 64, 64 * 500) == pytest.approx((weights + 64 * 500 * 131_072) / 2.68e12 + 1e-3)
    assert bf16.step_s(4096, 1, 0) == pytest.approx(2 * 6.979e9 * 4096 / 593.4e12 + 1e-3, rel=1e-3)


def test_precisions_differ_as_their_kernels_do(benchmark: Any) -> None:
    """4-bit weights decode fastest in small batches, read prompts no faster than BF16, and leave the most KV cache."""
    fast, balanced, precise = benchmark("simulated_engine").HARDWARE.values()
    decode = [hardware.step_s(1, 1, 500) for hardware in (fast, balanced, precise)]
    assert decode == sorted(decode)
    prompt = [hardware.step_s(4096, 1, 0) for hardware in (fast, balanced, precise)]
    assert prompt[1] < prompt[2] < prompt[0]
    assert fast.kv_tokens > balanced.kv_tokens > precise.kv_tokens
    assert precise.kv_tokens == (73.6e9 - 2.5 * 2**30 - 2 * 8.03e9) // (131_072 * 16) * 16


def test_a_long_prompt_is_computed_in_chunks_and_decoding_goes_on(benchmark: Any) -> None:
    """A step has a token of every running sequence, and of the prompt what is left of its 8,192 tokens."""
    sim = benchmark("simulated_engine")
    scheduler = sim.Scheduler(sim.HARDWARE["precise"])
    short, long = sim.Job(10, 5), sim.Job(10_000, 2)
    scheduler.waiting.append(short)
    step = scheduler.next_step()
    assert step.parts == ((short, 10),)
    scheduler.finish(step)
    assert short.produced == 1
    scheduler.waiting.append(long)
    step = scheduler.next_step()
    assert step.parts == ((short, 1), (long, 8191))
    scheduler.finish(step)
    assert long.produced == 0
    step = scheduler.next_step()
    assert step.parts == ((short, 1), (long, 1809))
    scheduler.finish(step)
    assert (short.produced, long.produced) == (3, 1)


def test_a_full_kv_cache_preempts_the_youngest_and_all_end(benchmark: Any) -> None:
    """It is computed again later, what it had produced included; no block is lost."""
    sim = benchmark("simulated_engine")
    scheduler = sim.Scheduler(sim.HARDWARE["fast"], kv_tokens=96)  # six blocks
    old, young = sim.Job(32, 40), sim.Job(32, 40)
    scheduler.waiting.extend((old, young))
    steps = 0
    while step := scheduler.next_step():
        scheduler.finish(step)
        steps += 1
        assert sum(job.blocks for job in (old, young)) + scheduler.free == 6
    assert (old.produced, young.produced) == (40, 40)
    assert old.preempted == 0
    assert young.preempted > 0
    assert steps < 80
    assert scheduler.free == 6


def test_offline_throughput_is_the_sum_of_its_steps(benchmark: Any) -> None:
    """One request takes its prompt's step and one for each further token."""
    sim = benchmark("simulated_engine")
    hardware = sim.HARDWARE["balanced"]
    steps = [hardware.step_s(100, 1, 0), *(hardware.step_s(1, 1, 100 + n) for n in range(4))]
    assert sim.offline(hardware, 100, 5, requests=1) == pytest.approx(5 / sum(steps))


async def test_the_engine_sends_tokens_in_events_and_counts_its_work(benchmark: Any) -> None:
    """The first token comes at once, then so many in an event; ids, usage and the GPU's time are told."""
    sim = benchmark("simulated_engine")
    hardware = sim.HARDWARE["fast"]
    engine = sim.SimulatedEngine(hardware, slower=1.0, stream_interval=4)
    body = {"messages": [{"role": "user", "content": "x" * 56}], "max_tokens": 10, "ignore_eos": True, "stream": True}
    async with serving(engine.app) as url, httpx.AsyncClient(trust_env=False, base_url=url, timeout=20) as client:
        text = (await client.post("/v1/chat/completions", json={**body, "return_token_ids": True})).text
        whole = (await client.post("/v1/chat/completions", json={**body, "stream": False})).json()
        work = (await client.get("/simulation")).json()
        page = (await client.get("/metrics")).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    sizes = [len(c["token_ids"]) for e in events for c in e["choices"] if c.get("token_ids")]
    assert sizes == [1, 3, 4, 2]
    assert events[-1]["usage"] == {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}
    assert whole["usage"]["completion_tokens"] == 10
    once = hardware.step_s(20, 1, 0) + sum(hardware.step_s(1, 1, 20 + n) for n in range(9))
    assert work["busy_s"] == pytest.approx(2 * once)
    assert (work["steps"], work["output_tokens"], work["prompt_tokens"]) == (20, 20, 2 * 29)
    assert f'kv_cache_size_tokens="{hardware.kv_tokens}"' in page
