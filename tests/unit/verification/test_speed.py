"""Comparing the speed of two engines: which is faster, what is sent, and what cannot be measured."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx
import pytest

from router.verification.speed import SpeedPlan, SpeedProgress, compare_speed
from tests.fakes.engine import Behaviour, FakeEngine, serving_all
from tiers.errors import ProbeError
from tiers.verification.engine import ComparedEngine

pytestmark = pytest.mark.anyio
SHORT_PLAN = SpeedPlan(loads=(1, 3), rounds=2, output_tokens=7)


@dataclass
class Pair:
    reference: ComparedEngine
    candidate: ComparedEngine


@asynccontextmanager
async def connected(reference: Behaviour, candidate: Behaviour) -> AsyncIterator[Pair]:
    async with (
        serving_all(FakeEngine(reference).app, FakeEngine(candidate).app) as urls,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        yield Pair(
            reference=await ComparedEngine.connect(client, urls[0], ""),
            candidate=await ComparedEngine.connect(client, urls[1], ""),
        )


async def test_a_slow_candidate_is_seen() -> None:
    """It pauses 50 ms before each token, and 100 ms more before the first one: that is the least that can be measured."""
    slow = Behaviour(delay_s=0.05, first_delay_s=0.1)
    async with connected(Behaviour(delay_s=0.001), slow) as pair:
        finding = await compare_speed(pair.reference, pair.candidate, SHORT_PLAN)
    assert [load.streams for load in finding.loads] == [1, 3]
    assert all(load.candidate_ttft_ms >= 140 for load in finding.loads)
    assert all(load.candidate_tpot_ms >= 40 for load in finding.loads)


async def test_a_slow_reference_is_seen() -> None:
    slow = Behaviour(delay_s=0.05, first_delay_s=0.1)
    async with connected(slow, Behaviour(delay_s=0.001)) as pair:
        finding = await compare_speed(pair.reference, pair.candidate, SHORT_PLAN)
    assert all(load.reference_ttft_ms >= 140 for load in finding.loads)
    assert all(load.reference_tpot_ms >= 40 for load in finding.loads)


async def test_both_engines_get_the_same_prompts_and_none_twice() -> None:
    reference = Behaviour(delay_s=0.001)
    candidate = Behaviour(delay_s=0.001)
    async with connected(reference, candidate) as pair:
        await compare_speed(pair.reference, pair.candidate, SHORT_PLAN)
    prompts = [tuple(request["prompt"]) for request in reference.requests]
    others = [tuple(request["prompt"]) for request in candidate.requests]
    assert len(prompts) == (1 + 2) * (1 + 3)
    assert len(set(prompts)) == len(prompts)
    assert set(others) == set(prompts)
    assert {request["max_tokens"] for request in reference.requests} == {7}
    assert all(request["ignore_eos"] for request in reference.requests)


async def test_progress_counts_the_turns() -> None:
    seen: list[SpeedProgress] = []
    behaviour = Behaviour(delay_s=0.001)
    async with connected(behaviour, Behaviour(delay_s=0.001)) as pair:
        await compare_speed(pair.reference, pair.candidate, SHORT_PLAN, seen.append)
    assert [progress.turns_done for progress in seen] == list(range(12))
    assert {progress.turns_total for progress in seen} == {12}
    assert seen[0].remaining_s is None
    assert seen[-1].remaining_s is not None


async def test_no_load_is_begun_that_would_take_too_long() -> None:
    plan = replace(SHORT_PLAN, budget_s=0.001)
    async with connected(Behaviour(delay_s=0.001), Behaviour(delay_s=0.001)) as pair:
        finding = await compare_speed(pair.reference, pair.candidate, plan)
    assert [load.streams for load in finding.loads] == [1]
    assert finding.not_measured == (
        "Speed with 3 streams: measuring it would take too long at the speed seen with fewer.",
    )


async def test_an_engine_that_holds_its_answers_back_is_an_error() -> None:
    """All tokens come in one event, so that there is no pace."""
    async with connected(Behaviour(delay_s=0.001), Behaviour(group=7)) as pair:
        with pytest.raises(ProbeError, match="the candidate sends each answer all at"):
            await compare_speed(pair.reference, pair.candidate, SHORT_PLAN)


async def test_an_engine_that_refuses_is_an_error() -> None:
    async with connected(Behaviour(), Behaviour(status=500)) as pair:
        with pytest.raises(ProbeError, match="HTTP 500"):
            await compare_speed(pair.reference, pair.candidate, SHORT_PLAN)


async def test_a_context_without_room_is_named() -> None:
    async with connected(Behaviour(), Behaviour()) as pair:
        identity = pair.reference.identity.model_copy(update={"max_model_len": 12})
        reference = replace(pair.reference, identity=identity)
        with pytest.raises(ProbeError, match="a context of 12 tokens is too short"):
            await compare_speed(reference, pair.candidate, SHORT_PLAN)
