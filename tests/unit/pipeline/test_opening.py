"""Opening answers: on the slot that was taken, and by hedging on a second tier too if the first is late."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from router.pipeline.admission import Admitted
from router.pipeline.opening import Direct, Hedging
from router.policy.decision import Sla
from router.upstream.errors import NoEngineAnswered
from tests.fakes.engine import Behaviour
from tests.unit.upstream_stack import HI, until, upstream_stack
from tiers.spec import STANDARD_TIERS
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from tests.unit.upstream_stack import UpstreamStack

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS
AT_ONCE, NEVER = SpeedModel(0.01, 0, 0.01), SpeedModel(1e6, 0, 1)  # when a first token is late, by these predictions


def admitted(stack: UpstreamStack, speed: SpeedModel | None = AT_ONCE, **query: Any) -> Admitted:
    """Return a slot on ``fast``, with a bound on TTFT that every tier meets."""
    for replica in stack.fleet.replicas:
        if speed is not None:
            replica.measured(speed)
    decision = stack.decision(FAST, **{"sla": Sla(ttft_ms=1e9), **query})
    lease = stack.fleet.lease(FAST, prompt_tokens=20, max_tokens=100)
    assert lease is not None
    return Admitted(decision, lease)


def hedging(stack: UpstreamStack) -> Hedging:
    return Hedging(stack.upstream, stack.telemetry)


def stalled() -> Behaviour:
    return Behaviour(stall_after=0)


async def test_an_answer_is_opened_on_the_slot_that_was_taken() -> None:
    async with upstream_stack() as stack:
        slot = admitted(stack)
        answer = await Direct(stack.upstream).open(slot, HI, 1.0)
        assert (answer.tier, answer.sent_at, stack.replica(FAST).slots) == (FAST, 1.0, 1)
        await answer.aclose()
        assert stack.held() == 0


async def test_a_slot_that_fails_is_left_for_another_tier() -> None:
    async with upstream_stack(fast=Behaviour(status=500)) as stack:
        answer = await Direct(stack.upstream).open(admitted(stack), HI, 1.0)
        assert (answer.tier, stack.replica(FAST).slots) == (BALANCED, 0)
        await answer.aclose()


async def test_a_late_first_token_is_asked_for_on_a_second_tier() -> None:
    """The answer says so, the first tier is told to stop, and a retry is spent on it."""
    async with upstream_stack({"retry_reserve": 1, "retry_share": 0}, fast=stalled()) as stack:
        answer = await hedging(stack).open(admitted(stack), HI, 1.0)
        assert (answer.tier, answer.sent_at) == (BALANCED, 1.0)
        assert answer.hedge == "fast was late with its first token, so balanced was asked too"
        assert (stack.asked(), stack.upstream.take_retry()) == ([1, 1, 0], False)
        assert stack.replica(FAST).in_flight == 0
        await answer.aclose()
        assert stack.held() == 0
        await until(lambda: not stack.engines[FAST].running)


async def test_a_first_token_in_time_is_asked_for_once() -> None:
    async with upstream_stack() as stack:
        answer = await hedging(stack).open(admitted(stack, NEVER), HI, 1.0)
        assert (answer.tier, answer.hedge, stack.asked()) == (FAST, None, [1, 0, 0])
        await answer.aclose()
        assert stack.held() == 0


@pytest.mark.parametrize(
    ("speed", "query"),
    [(None, {}), (AT_ONCE, {"sla": Sla()}), (AT_ONCE, {"sla": Sla(tpot_ms=1e9)}), (AT_ONCE, {"require": True})],
    ids=["no prediction", "no bound", "another bound", "no other tier may serve it"],
)
async def test_a_first_token_that_is_not_known_to_be_late_is_asked_for_once(
    speed: SpeedModel | None, query: dict[str, Any]
) -> None:
    async with upstream_stack(fast=Behaviour(first_delay_s=0.05)) as stack:
        answer = await hedging(stack).open(admitted(stack, speed, **query), HI, 1.0)
        assert (answer.tier, answer.hedge, stack.asked()) == (FAST, None, [1, 0, 0])
        await answer.aclose()


async def test_without_retries_left_nothing_is_asked_for_twice() -> None:
    async with upstream_stack({"retry_reserve": 0}, fast=Behaviour(first_delay_s=0.05)) as stack:
        answer = await hedging(stack).open(admitted(stack), HI, 1.0)
        assert (answer.tier, answer.hedge, stack.asked()) == (FAST, None, [1, 0, 0])
        await answer.aclose()


async def test_a_second_tier_that_fails_changes_nothing() -> None:
    """The first one's answer is still waited for, and no third tier is asked by the second attempt."""
    broken = Behaviour(status=500)
    async with upstream_stack(fast=Behaviour(first_delay_s=0.1), balanced=broken) as stack:
        answer = await hedging(stack).open(admitted(stack), HI, 1.0)
        assert (answer.tier, answer.hedge, stack.asked()) == (FAST, None, [1, 1, 0])
        await answer.aclose()
        assert stack.held() == 0


async def test_when_both_fail_the_first_ones_error_is_told() -> None:
    """It has all causes of its own attempts; the two share what was asked, so that none is asked twice."""
    late = {"first_delay_s": 0.05, "break_after": 0}
    async with upstream_stack(
        fast=Behaviour(**late), balanced=Behaviour(status=500), precise=Behaviour(status=500)
    ) as stack:
        with pytest.raises(NoEngineAnswered, match="fast-0: "):
            await hedging(stack).open(admitted(stack), HI, 1.0)
        assert (stack.asked(), stack.held()) == ([1, 1, 1], 0)


async def test_a_cancelled_request_ends_both_attempts() -> None:
    async with upstream_stack(fast=stalled(), balanced=stalled()) as stack:
        opening = asyncio.create_task(hedging(stack).open(admitted(stack), HI, 1.0))
        await until(lambda: stack.asked() == [1, 1, 0])
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert stack.held() == 0
        await until(lambda: not any(engine.running for engine in stack.engines.values()))


async def test_the_second_tier_is_one_that_meets_the_bounds() -> None:
    """The next one is left out if it is not expected to be in time either."""
    async with upstream_stack(fast=stalled()) as stack:
        slot = admitted(stack, sla=Sla(ttft_ms=1000))
        verdicts = tuple(replace(verdict, meets=verdict.tier is not BALANCED) for verdict in slot.decision.verdicts)
        slot = replace(slot, decision=replace(slot.decision, verdicts=verdicts))
        answer = await hedging(stack).open(slot, HI, 1.0)
        assert (answer.tier, stack.asked()) == (PRECISE, [1, 0, 1])
        await answer.aclose()
