"""The measurement of speed, on tiers whose speed is known: they compute in no time, and say what they would have taken."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from router.policy.profiles import ProfileError
from router.profiling.client import Client, FleetState, MeasuredTier, Timed
from router.profiling.measure_latency import (
    BATCHES,
    LENGTHS,
    LatencyPlan,
    measure_latency,
)
from tiers.spec import STANDARD_TIERS, TierName
from tiers.speed import ReplicaLoad, SpeedModel

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS
TRUE = SpeedModel(3, 0.2, 2, 0.5, ttft_steps=1.0)
SEQS = 8
FLEET = FleetState(
    "m", "machine", {FAST: "f", BALANCED: "b", PRECISE: "p"},
    {FAST: MeasuredTier("f", 1, SEQS, 512), BALANCED: MeasuredTier("b", 1, SEQS, 512)},
)  # fmt: skip


@dataclass
class SimulatedTiers(Client):
    """Engines that take the true model's times, without taking them.

    Attributes:
        disturbed: Steps that somebody disturbs, before one is left alone.
        all_at_once: Whether whole answers come at once.
    """

    state: FleetState = FLEET
    disturbed: float = 0
    all_at_once: bool = False
    steps: int = 0
    sequences: Counter[TierName] = field(default_factory=Counter)
    waiting: Counter[TierName] = field(default_factory=Counter)
    prompts: list[tuple[TierName, int]] = field(default_factory=list)

    async def fleet(self) -> FleetState:
        return self.state

    def _send(self, *_: object) -> Any:
        raise NotImplementedError

    async def _is_quiet(self) -> bool:
        return True

    async def time(
        self, tier: TierName, prompt: list[int], tokens: int, begun: Callable[[], None]
    ) -> Timed:
        self.prompts.append((tier, len(prompt)))
        load = ReplicaLoad(self.sequences[tier], self.waiting[tier])
        ttft_ms = TRUE.times(len(prompt), load, SEQS, 1.0).ttft_ms
        self.sequences[tier] += 1
        self.waiting[tier] += len(prompt)
        started = time.monotonic()
        await asyncio.sleep(0)
        begun()
        self.waiting[tier] -= len(prompt)
        batch = self.sequences[tier]
        await asyncio.sleep(0.001)
        self.sequences[tier] -= 1
        tpot_ms = TRUE.step_ms(batch) if tokens > 1 and not self.all_at_once else None
        return Timed(len(prompt), ttft_ms, tpot_ms, started, time.monotonic())

    async def undisturbed(
        self, step: Callable[[], Coroutine[Any, Any, None]], waiting: Callable[[], None]
    ) -> bool:
        self.steps += 1
        waiting()
        await step()
        self.disturbed -= 1
        return self.disturbed < 0


def nothing(_what: str, _done: int, _total: int) -> None:
    """Note no progress."""


async def test_known_speeds_are_found() -> None:
    """Each tier alone, at every length and batch that it can have, and all tiers together."""
    tiers = SimulatedTiers()
    profile = await measure_latency(tiers, LatencyPlan(0.1), nothing)
    assert [fit.tier for fit in profile.fits] == [FAST, BALANCED]
    assert (profile.model, profile.machine, profile.checkpoints) == (
        "m",
        "machine",
        dict(FLEET.checkpoints),
    )
    for fit in profile.fits:
        assert fit.step_base_ms == pytest.approx(2, rel=0.05)
        assert fit.step_ms_per_sequence == pytest.approx(0.5, rel=0.05)
        assert fit.prefill_ms_per_token == pytest.approx(0.2, rel=0.05)
        assert fit.contention == pytest.approx(0, abs=0.05)
    alone = [s for s in profile.samples if not s.neighbours]
    assert {s.batch for s in alone} - {0} == {
        batch for batch in BATCHES if batch <= SEQS
    }
    assert {s.prompt_tokens for s in alone} >= {
        length for length in LENGTHS if length < 512
    }
    # no prompt is longer than the context
    assert max(length for _, length in tiers.prompts) < 512
    assert {s.tier for s in profile.samples if s.neighbours == 1} == {FAST, BALANCED}
    assert not any(tiers.sequences.values())


async def test_one_tier_can_be_measured_by_itself() -> None:
    profile = await measure_latency(
        SimulatedTiers(), LatencyPlan(0.01, (BALANCED,)), nothing
    )
    assert [fit.tier for fit in profile.fits] == [BALANCED]
    assert not any(s.neighbours for s in profile.samples)


async def test_a_small_budget_leaves_long_prompts_and_large_batches_out() -> None:
    """But never the two lengths and the two batches that a fit needs."""
    profile = await measure_latency(
        SimulatedTiers(), LatencyPlan(0.01, (FAST,), budget_s=0.0), nothing
    )
    assert {s.batch for s in profile.samples} - {0} == {1, 2}
    assert max(s.prompt_tokens for s in profile.samples) < LENGTHS[2]


async def test_progress_ends_where_it_was_said_to_end() -> None:
    for budget_s in (math.inf, 0.0):
        seen: list[tuple[int, int]] = []
        plan = LatencyPlan(0.01, budget_s=budget_s)
        await measure_latency(
            SimulatedTiers(),
            plan,
            lambda _what, done, total, seen=seen: seen.append((done, total)),
        )
        assert seen == sorted(seen)
        assert len({total for _, total in seen}) == 1
        assert seen[0][0] == 0
        assert seen[-1][0] == seen[-1][1] - 1  # the last step was about to be taken


async def test_a_disturbed_step_is_taken_again() -> None:
    """So often; what was measured while it was disturbed is thrown away."""
    tiers = SimulatedTiers(disturbed=2)
    profile = await measure_latency(tiers, LatencyPlan(0.01, (FAST,)), nothing)
    alone = SimulatedTiers()
    undisturbed = await measure_latency(alone, LatencyPlan(0.01, (FAST,)), nothing)
    assert tiers.steps == alone.steps + 2
    assert len(profile.samples) == len(undisturbed.samples)
    with pytest.raises(
        ProfileError, match="others' requests disturbed 'fast: warming' 3 times"
    ):
        await measure_latency(
            SimulatedTiers(disturbed=math.inf), LatencyPlan(0.01), nothing
        )


@pytest.mark.parametrize(
    ("state", "tiers", "why"),
    [
        (replace(FLEET, tiers={}), (), "no tier is ready"),
        (FLEET, (PRECISE,), "tier precise is not ready"),
        (
            replace(FLEET, tiers={FAST: MeasuredTier("f", 2, SEQS, 512)}),
            (),
            "tier fast has 2 replicas",
        ),
    ],
)
async def test_what_cannot_be_measured(
    state: FleetState, tiers: tuple[TierName, ...], why: str
) -> None:
    client = SimulatedTiers(state)
    with pytest.raises(ProfileError, match=why):
        await measure_latency(client, LatencyPlan(0.01, tiers), nothing)
    assert not client.prompts


async def test_answers_without_a_pace_are_an_error() -> None:
    """A machine without time to spare sends each answer at once."""
    with pytest.raises(ProfileError, match="fast sent every answer all at once"):
        await measure_latency(
            SimulatedTiers(all_at_once=True), LatencyPlan(0.01), nothing
        )
