"""The pieces of benchmarks/goodput.py and benchmarks/headline.py: arrivals, load, intervals, simulated engines, charts."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import tomllib
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

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
    from pathlib import Path

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


def test_answers_have_the_mean_length_of_their_class(benchmark: Any) -> None:
    """Lengths are log-normal about the class's mean, times the scale."""
    loop = benchmark("open_loop")
    source, tokens = random.Random(0), loop.by_class(2.0)
    mean = sum(tokens(source, "code") for _ in range(20_000)) / 20_000
    assert mean == pytest.approx(2 * loop.ANSWER_TOKENS["code"], rel=0.02)


def test_a_mix_changes_at_its_time(benchmark: Any) -> None:
    """Before the step half the prompts are chat, afterwards none."""
    loop = benchmark("open_loop")
    workload = loop.Workload(
        loop.read_prompts(), loop.uniform(8, 8), lambda at: {"code": 1.0} if at > 10 else {"chat": 1.0, "code": 1.0}
    )
    plan = loop.arrivals(workload, 50, 20, seed=0)
    before = [a.kind for a in plan if a.at_s <= 10]
    assert before.count("chat") / len(before) == pytest.approx(0.5, abs=0.1)
    assert {a.kind for a in plan if a.at_s > 10} == {"code"}


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


async def test_a_closed_loop_counts_what_is_completed(benchmark: Any) -> None:
    """Every worker asks again as soon as it is answered."""
    loop = benchmark("open_loop")
    workload = loop.Workload((("chat", "well"),), loop.uniform(2, 2))
    async with serving(stand_in()) as url:
        rate = await loop.closed_loop(url, workload, [{"model": "auto"}], 2, seconds=1.0, warm_s=0.2)
        none = await loop.closed_loop(
            url, loop.Workload((("chat", "refuse"),), workload.tokens), [{}], 2, seconds=0.5, warm_s=0.1
        )
    assert rate > 0
    assert none == 0


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


def test_an_interval_holds_the_truth_about_as_often_as_it_says(benchmark: Any) -> None:
    """Of 200 samples of 30 blocks, the interval holds the mean in about 95 of 100."""
    loop = benchmark("open_loop")
    source, held = random.Random(1), 0
    samples = loop.resampled(30, times=300)
    for _ in range(200):
        found = loop.interval(loop.Blocks(tuple(source.gauss(3, 1) for _ in range(30)), (1.0,) * 30), samples)
        held += found.low <= 3 <= found.high
    assert 0.88 <= held / 200 <= 0.99


def test_a_change_of_ttft_is_relative_and_paired(benchmark: Any) -> None:
    """A fleet that is half as slow in every block is 50 % faster, without doubt."""
    headline = benchmark("headline")
    slow = [answer(benchmark, at / 10, ttft_ms=100.0 + at) for at in range(200)]
    quick = [replace(a, ttft_ms=a.ttft_ms / 2) for a in slow]
    change = headline.ttft_change(quick, slow, 20, 0.5)
    assert (change.low, change.mean, change.high) == pytest.approx((-0.5, -0.5, -0.5))


def test_engine_time_is_what_the_policy_counts(benchmark: Any) -> None:
    """Prefill, and a share of the steps at the common batch; none for an answer that is not complete."""
    loop = benchmark("open_loop")
    fit = {
        "tier": "balanced", "ttft_base_ms": 1, "prefill_ms_per_token": 0.5, "ttft_steps": 1, "step_base_ms": 10,
        "step_ms_per_sequence": 1, "step_knee": 0, "step_ms_beyond_knee": 0, "contention": 0, "ttft_spread": 0.1,
        "tpot_spread": 0.1, "ttft_error": {"median": 0, "p95": 0}, "tpot_error": {"median": 0, "p95": 0}, "samples": 9,
    }  # fmt: skip
    from router.policy.profiles import LatencyProfile

    speeds = LatencyProfile.model_validate(
        {
            "created": "2026-01-01T00:00:00Z",
            "model": "m",
            "checkpoints": {},
            "machine": "m",
            "fits": [fit],
            "samples": [],
        }
    )
    answers = [answer(benchmark, 0), answer(benchmark, 0, error="cut")]
    done, cut = loop.with_engine_time(answers, speeds, batch=10)
    assert done.engine_s == pytest.approx((20 * 0.5 + 50 * 20 / 10) / 1000)
    assert cut.engine_s == 0
    assert loop.mean_open([answers], seconds=4) == pytest.approx(0.5)


def test_assumed_losses_have_the_published_mean(benchmark: Any) -> None:
    """The shape over classes only spreads the level."""
    fleets = benchmark("fleets")
    profile = fleets.assumed_losses({FAST: "http://a"})
    found = {loss.prompt_class.value: loss.top1_disagreement.mean for loss in profile.losses if loss.tier is FAST}
    assert set(found) == set(fleets.SHAPE)
    assert sum(found.values()) / len(found) == pytest.approx(0.081, rel=0.01)
    assert found["chat"] > found["math"]
    assert all(loss.top1_disagreement.mean == 0 for loss in profile.losses if loss.tier is PRECISE)


def test_the_mean_loss_is_a_share_of_tokens(benchmark: Any) -> None:
    """A long answer weighs more than a short one; what was not served counts nowhere."""
    loop = benchmark("open_loop")
    answers = [answer(benchmark, 0, tokens=300, loss=0.1), answer(benchmark, 0, tokens=100, loss=0.0)]
    assert loop.mean_loss_of([*answers, answer(benchmark, 0, error="cut", loss=None)]) == pytest.approx(0.075)
    assert loop.blocks_of([answers], 5, 5, loop.token_loss, lambda a: a.tokens).ratio() == pytest.approx(0.075)


def test_a_budget_can_be_met_up_to_a_load(benchmark: Any) -> None:
    """At that load the fullest use of the higher precisions loses as much as everything on balanced."""
    goodput, fleets = benchmark("goodput"), benchmark("fleets")
    capacity = {FAST: 18.0, BALANCED: 14.0, PRECISE: 9.0}
    load = goodput.feasible(capacity) * sum(capacity.values())
    fast = load - capacity[BALANCED] - capacity[PRECISE]
    assert fast > 0
    lost = fast * fleets.LEVELS[FAST] + capacity[BALANCED] * fleets.LEVELS[BALANCED]
    assert lost / load == pytest.approx(fleets.LEVELS[BALANCED])


def test_settings_come_back_from_their_text(benchmark: Any) -> None:
    """What is written as TOML reads as it was, tables within values included; the command line's settings are TOML too."""
    fleets = benchmark("fleets")
    sections = {"server": {"port": 1}, "policy": {"prices": {"fast": 0.5}, "give_up": "quality"}}
    assert tomllib.loads(fleets.toml(sections)) == sections
    given = fleets.given_settings(["policy.loss_budget = {like = 'balanced'}", "admission.max_waiting = 3"])
    assert given == {"policy": {"loss_budget": {"like": "balanced"}}, "admission": {"max_waiting": 3}}
    both = fleets.merged(sections, given)
    assert both["policy"] == {**sections["policy"], **given["policy"]}
    assert sections["policy"] == {"prices": {"fast": 0.5}, "give_up": "quality"}


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


def test_no_more_sequences_run_than_allowed(benchmark: Any) -> None:
    """Others wait, in order."""
    sim = benchmark("simulated_engine")
    scheduler = sim.Scheduler(sim.HARDWARE["fast"], max_num_seqs=2)
    jobs = [sim.Job(10, 1 + n) for n in range(3)]
    scheduler.waiting.extend(jobs)
    scheduler.finish(scheduler.next_step())
    assert scheduler.running == [jobs[1]]  # the first one is done
    scheduler.finish(scheduler.next_step())
    assert [job.produced for job in jobs] == [1, 2, 1]


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


def test_a_client_that_leaves_frees_its_blocks(benchmark: Any) -> None:
    """Whether it runs or waits."""
    sim = benchmark("simulated_engine")
    scheduler = sim.Scheduler(sim.HARDWARE["fast"], max_num_seqs=1)
    jobs = [sim.Job(100, 50), sim.Job(100, 50)]
    scheduler.waiting.extend(jobs)
    scheduler.finish(scheduler.next_step())
    for job in jobs:
        job.gone = True
    assert scheduler.next_step() is None
    assert scheduler.free == scheduler.blocks
    assert not scheduler.waiting


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


def test_answers_are_scaled_to_the_share_of_the_load(benchmark: Any) -> None:
    """Rate times mean length is the share of what three BF16 replicas produce if they are always full."""
    headline, sim, loop = benchmark("headline"), benchmark("simulated_engine"), benchmark("open_loop")
    prompts = loop.read_prompts()
    scale = headline.scale_for(0.4, 50, 32, prompts)
    tokens = headline.mean_tokens(loop.Workload(prompts, loop.by_class(scale, headline.MOST_TOKENS)))
    prompt = round(sum(len(text) // 4 + 6 for _, text in prompts) / len(prompts))
    most = 3 * sim.offline(sim.HARDWARE["precise"], prompt, round(tokens), 128, 32)
    assert 50 * tokens == pytest.approx(0.4 * most, rel=0.05)


# Charts.


def test_ticks_are_round_and_cover_the_range(benchmark: Any) -> None:
    """Steps are 1, 2 or 5 times a power of ten."""
    ticks = benchmark("plots").ticks
    assert ticks(0, 0.081) == pytest.approx([0, 0.02, 0.04, 0.06, 0.08, 0.1])
    assert ticks(3, 118) == pytest.approx([0, 50, 100, 150])
    assert len(ticks(5, 5)) >= 2


def test_a_chart_is_an_image_with_every_point(benchmark: Any, tmp_path: Path) -> None:
    """It is well-formed, and its names are escaped."""
    plots = benchmark("plots")
    front = plots.Series("a < b", tuple(plots.Point(x, 1 / x, 0.5 / x, 2 / x) for x in (1, 2, 4)), line=True)
    fixed = plots.Series("fixed", (plots.Point(3, 1, label="(b)"),))
    path = tmp_path / "chart.svg"
    plots.chart(path, "Title", "x", "y", [front, fixed])
    root = ET.fromstring(path.read_text("utf-8"))  # noqa: S314  our own file
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}circle")) == 4
    assert len(root.findall(f"{space}polyline")) == 1
    texts = [text.text for text in root.findall(f"{space}text")]
    assert {"Title", "a < b", "fixed", "(b)"} <= set(texts)
