"""Shadow evaluation: which prompts are kept, what they are asked again, and what is told of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from classifier import PromptClass
from router.policy.decision import PRIORITIES
from router.profiling import client
from router.profiling import shadow_evaluation as module
from router.profiling.idle_client import IdleClient
from router.profiling.scoring import Scores
from router.profiling.shadow_evaluation import (
    ANSWER_TOKENS,
    KEPT_PROMPTS,
    WINDOW,
    Drift,
    ShadowEvaluation,
)
from router.telemetry.tracing import Telemetry
from tests.fakes.engine import Behaviour, FakeEngine, serving_all
from tests.unit.records import decision
from tests.waiting import until
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName, TierSpec

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS
CHAT = PromptClass.CHAT
MESSAGES = [{"role": "user", "content": "hi"}]


@dataclass(slots=True)
class Evaluated:
    """An evaluation of every prompt, in front of one engine a tier."""

    evaluation: ShadowEvaluation
    fleet: Fleet
    engines: dict[TierName, Behaviour]

    def offer(self, count: int = 1, tier: TierName = FAST) -> None:
        for _ in range(count):
            self.evaluation.offer(decision(tier), tier, MESSAGES)

    def checked(self, tier: TierName = FAST) -> int:
        found = self.evaluation.drifts.get((CHAT, tier))
        return found.checked if found is not None else 0


@asynccontextmanager
async def evaluated(
    monkeypatch: pytest.MonkeyPatch, share: float = 1.0
) -> AsyncIterator[Evaluated]:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(client, "LOOK_S", 0.001)
    engines = {tier: Behaviour() for tier in STANDARD_TIERS}
    async with serving_all(
        *(FakeEngine(engine).app for engine in engines.values())
    ) as urls:
        fleet = Fleet(tuple(TierSpec(name, 2048, 8, 16) for name in STANDARD_TIERS))
        for spec, url in zip(fleet.specs, urls, strict=True):
            fleet.add(Replica(f"{spec.name}-0", spec, url, "", "fake")).mark(
                ReplicaStatus.READY
            )
        async with IdleClient(fleet, "model", 0.0, lambda: (0, 0)) as idle:
            found = Evaluated(
                ShadowEvaluation(share, fleet, idle, Telemetry(None)), fleet, engines
            )
            running = asyncio.create_task(found.evaluation.run())
            yield found
            assert not running.done()
            running.cancel()
            await asyncio.wait({running})
        assert all(replica.state.in_flight == 0 for replica in fleet.replicas)


def test_drift_is_of_the_last_answers_and_of_those_that_can_be_compared() -> None:
    drift = Drift()
    assert (drift.differing, drift.regret) == (None, 0)
    for same, tokens, regret in ((None, 10, 5.0), (True, 20, 0.0), (False, 10, 1.0)):
        drift.add(Scores(tokens=tokens, disagreed=0, kl=0, regret=regret), same=same)
    assert (drift.differing, drift.regret, drift.checked, drift.compared) == (
        0.5,
        0.15,
        3,
        2,
    )
    for _ in range(WINDOW):
        drift.add(Scores(tokens=1, disagreed=0, kl=0, regret=0), same=True)
    assert drift.render() == {
        "checked": WINDOW + 3,
        "compared": WINDOW + 2,
        "differing": 0.0,
        "regret": 0.0,
    }


async def test_a_prompt_is_answered_again_and_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedily and briefly by the tier that served it and by the reference, beneath everybody's priority, then scored."""
    async with evaluated(monkeypatch) as one:
        one.offer()
        await until(one.checked)
        (again,), (theirs, scoring) = (
            one.engines[FAST].requests,
            one.engines[PRECISE].requests,
        )
        for asked in (again, theirs):
            assert (asked["messages"], asked["temperature"], asked["max_tokens"]) == (
                MESSAGES,
                0,
                ANSWER_TOKENS,
            )
        assert scoring["prompt_logprobs"]
        assert {each["priority"] for each in (again, theirs, scoring)} == {
            PRIORITIES["batch"]
        }
        drift = one.evaluation.drifts[CHAT, FAST]
        assert (drift.differing, drift.compared) == (0.0, 1)
        one.engines[FAST].answer = ("Berlin",)
        one.offer()
        await until(lambda: one.checked() == 2)
        assert drift.differing == 0.5
        assert one.engines[BALANCED].requests == []
        # how long callers' answers are is not learned from it
        assert one.fleet.output_share == 1.0


async def test_what_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's own prompts, those that cannot be asked again, small talk, and all where nothing is to be sampled."""
    async with evaluated(monkeypatch) as one:
        one.offer(tier=PRECISE)
        one.evaluation.offer(decision(FAST), FAST, None)
        one.evaluation.offer(decision(FAST, PromptClass.SMALL_TALK), FAST, MESSAGES)
        one.offer()
        await until(one.checked)
        assert one.checked() == 1
        assert set(one.evaluation.drifts) == {(CHAT, FAST)}
    async with evaluated(monkeypatch, share=0.0) as off:
        off.offer(5)
        assert not off.evaluation._samples


async def test_it_waits_for_quiet_and_keeps_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While anything is in flight nothing is asked; what is kept is bounded."""
    async with evaluated(monkeypatch) as one:
        lease = one.fleet.lease(BALANCED, prompt_tokens=1, max_tokens=1)
        assert lease is not None
        one.offer(KEPT_PROMPTS + 5)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not one.engines[FAST].requests
        lease.release()
        await until(lambda: one.checked() >= KEPT_PROMPTS)
        assert one.checked() == KEPT_PROMPTS


async def test_an_engine_that_fails_costs_the_sample_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error, or an answer that is none; the next sample is scored."""
    async with evaluated(monkeypatch) as one:
        for number, fault in enumerate(
            ({"status": 400}, {"nonsense": b"[]"}, {"nonsense": b"{}"}), 1
        ):
            for name, value in fault.items():
                setattr(one.engines[FAST], name, value)
            one.offer()
            await until(
                lambda number=number: caplog.text.count("live check on fast") == number
            )
            one.engines[FAST].status, one.engines[FAST].nonsense = 200, b""
        one.offer()
        await until(one.checked)
        assert one.checked() == 1


async def test_without_the_reference_samples_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with evaluated(monkeypatch) as one:
        reference = one.fleet.replicas[-1]
        reference.mark(ReplicaStatus.DRAINING)
        one.offer()
        await until(lambda: not one.evaluation._samples)
        reference.mark(ReplicaStatus.READY)
        one.offer(2)
        await until(lambda: one.checked() == 2)
        assert len(one.engines[FAST].requests) == 2
