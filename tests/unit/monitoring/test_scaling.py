"""What autoscalers read of /metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unit.monitoring.test_metrics import scrape
from tests.unit.router_stack import router_stack
from tests.waiting import until
from tiers.spec import TierName
from tiers.speed import SpeedModel


@pytest.mark.anyio
async def test_autoscalers_see_queue_and_first_token_by_tier(tmp_path: Path) -> None:
    """A waiting request counts for each tier that could serve it; a busier tier's predicted first token is later."""
    one, none = {"max_in_flight": 1}, {"max_model_len": 16}
    async with router_stack(
        tmp_path, {"tiers": {"fast": one, "balanced": none, "precise": one}}
    ) as stack:
        for replica in stack.fleet.replicas:
            replica.update(
                speed=SpeedModel(1.0, 2.0, 10.0)
                if replica.spec.name is not TierName.BALANCED
                else None
            )
        before = await scrape(stack)
        assert (
            before["qarr_tier_waiting_requests", "fast"]
            == before["qarr_tier_waiting_requests", "precise"]
            == 0
        )
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

        async def metrics_with_one_waiting() -> dict[tuple[str, str], float] | None:
            page = await scrape(stack)
            return page if page["qarr_tier_waiting_requests", "fast"] == 1 else None

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
