"""What autoscalers read of /metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unit.monitoring.scrapes import scrape
from tests.unit.router_stack import router_stack
from tests.waiting import until
from tiers.spec import TierName
from tiers.speed import SpeedModel


@pytest.mark.anyio
async def test_autoscalers_see_queue_and_first_token_by_tier(tmp_path: Path) -> None:
    """A waiting request counts for each tier that could serve it; a busier tier's predicted first token is later."""
    one_slot = {"max_in_flight": 1}
    tiers = {"fast": one_slot, "balanced": {"max_model_len": 16}, "precise": one_slot}
    async with router_stack(tmp_path, {"tiers": tiers}) as stack:
        for replica in stack.fleet.replicas:
            speed = SpeedModel(1.0, 2.0, 10.0)
            is_measured = replica.spec.name is not TierName.BALANCED
            replica.update(speed=speed if is_measured else None)
        before = await scrape(stack)
        assert before["qarr_tier_waiting_requests", "fast"] == 0
        assert before["qarr_tier_waiting_requests", "precise"] == 0
        # 512 tokens at 2 ms
        assert before["qarr_predicted_ttft_seconds", "fast"] == pytest.approx(
            1.0, rel=0.2
        )
        assert ("qarr_predicted_ttft_seconds", "balanced") not in before
        leases = [
            stack.fleet.lease(tier, prompt_tokens=1000, max_tokens=10)
            for tier in (TierName.FAST, TierName.PRECISE)
        ]
        waiting = asyncio.create_task(stack.generate(stream=False))

        async def metrics_with_one_waiting() -> dict[tuple[str, ...], float] | None:
            page = await scrape(stack)
            if page["qarr_tier_waiting_requests", "fast"] != 1:
                return None
            return page

        during = await until(metrics_with_one_waiting)
        assert during["qarr_tier_waiting_requests", "precise"] == 1
        assert during["qarr_tier_waiting_requests", "balanced"] == 0
        assert (
            during["qarr_predicted_ttft_seconds", "fast"]
            > before["qarr_predicted_ttft_seconds", "fast"]
        )
        for lease in leases:
            assert lease is not None
            lease.release()
        assert (await waiting).status_code == 200
