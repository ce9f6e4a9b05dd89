"""What a continuation costs the budget of retries, and why none could begin."""

from __future__ import annotations

from array import array

import pytest

from router.pipeline.failover import (
    Continuation,
    Failover,
    StopStringJoiner,
    _Plan,
)
from router.upstream.errors import EngineBrokeError, NoEngineAnsweredError
from router.upstream.progress import AnswerProgress, ContinuationTerms
from tests.fakes.engine import Behaviour
from tests.unit.upstream_stack import HI, UpstreamStack, upstream_stack
from tiers.spec import STANDARD_TIERS

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS


def continuation(stack: UpstreamStack) -> Continuation:
    """Return the continuation of an answer of the fast tier that broke after three tokens."""
    failover = Failover(
        fleet=stack.fleet,
        policy=stack.policy,
        upstream=stack.upstream,
        telemetry=stack.telemetry,
        attempts=1,
        default_max_tokens=16,
    )
    return Continuation(
        failover=failover,
        decision=stack.decision(FAST),
        request=HI,
        terms=ContinuationTerms(100, {}, 0),
        progress=AnswerProgress(
            prompt_ids=array("I", [1, 2]), output_ids=array("I", [3, 4, 5])
        ),
    )


async def next_part(
    stack: UpstreamStack, exclusions: list[set[str]], broken: EngineBrokeError
) -> None:
    """Begin the next part of an answer whose tokens are plain text."""
    continued = continuation(stack)
    joiner = StopStringJoiner("", "", (), include=False)
    plan = _Plan(
        remainder=continued._remainder(max_tokens=100, number=1),
        joiner=joiner,
        request_for=lambda _max_tokens: HI,
    )
    await continued._next_part(plan, FAST, exclusions, broken)


async def test_a_continuation_earns_no_retries() -> None:
    """It was counted when its request began: otherwise engines that break their answers would get more retries for it."""
    options = {"retry_share": 0.5, "retry_reserve": 1}
    async with upstream_stack(options, fast=Behaviour(status=500)) as stack:
        retried = await stack.upstream.open(stack.decision(FAST), HI)
        await retried.aclose()
        for _ in range(4):
            continued = await stack.upstream.open(
                stack.decision(PRECISE), HI, is_continuation=True, elsewhere=False
            )
            await continued.aclose()
        with pytest.raises(NoEngineAnsweredError, match="no retry"):
            await stack.upstream.open(stack.decision(FAST), HI)


async def test_a_lack_of_slots_does_not_hide_why_attempts_failed_before() -> None:
    """The engines that fail are left out in the last round, which finds no slot; their failure is the cause all the same."""
    failing = {name: Behaviour(status=500) for name in STANDARD_TIERS}
    async with upstream_stack(**failing) as stack:
        broken = EngineBrokeError("the connection was closed")
        all_ids = {replica.id for replica in stack.fleet.replicas}
        with pytest.raises(EngineBrokeError) as raised:
            await next_part(stack, [{"fast-0"}, all_ids], broken)
        assert raised.value is broken
        assert isinstance(raised.value.__cause__, NoEngineAnsweredError)
        assert "HTTP 500" in str(raised.value.__cause__)
