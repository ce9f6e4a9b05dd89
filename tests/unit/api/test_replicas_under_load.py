"""Replicas that are added and removed over the admin API while requests are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.fakes.engine import Behaviour, FakeEngine, serving_all
from tests.unit.router_stack import Stack, events, router_stack
from tests.waiting import until
from tiers.spec import ReplicaStatus

pytestmark = pytest.mark.anyio
# some requests at once for each replica: one that is idle may stay so
MORE = 20
CLIENTS = 40
# of a token: engines bound the load, not this process, which has to bring replicas up meanwhile
DELAY_S = 0.05
PATIENT = {
    "admission": {
        "max_wait_s": dict.fromkeys(("interactive", "standard", "batch"), 1e6)
    }
}


class Load:
    """Clients that read streams without a pause.

    Attributes:
        served: Answers that came to their end.
        failed: What came instead of one.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.served = 0
        self.failed: list[str] = []

    async def ask(self, tier: str) -> None:
        while True:
            answer = await self._stack.generate(stream=True, tier=tier)
            if (
                answer.status_code == httpx.codes.OK
                and events(answer.text)[-1][0] == "done"
            ):
                self.served += 1
            else:
                self.failed.append(answer.text)


@asynccontextmanager
async def under_load(stack: Stack) -> AsyncIterator[Load]:
    load = Load(stack)
    tiers = [spec.name for spec in stack.fleet.specs]
    asking = [
        asyncio.create_task(load.ask(tiers[number % len(tiers)]))
        for number in range(CLIENTS)
    ]
    try:
        yield load
    finally:
        for task in asking:
            task.cancel()
        ended = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended


async def test_twenty_replicas_come_and_go_under_load_without_a_failed_request(
    tmp_path: Path,
) -> None:
    """Each of them serves, and afterwards nothing of it is left: no replica, no series, no lease."""
    async with (
        serving_all(
            *(FakeEngine(Behaviour(delay_s=DELAY_S)).app for _ in range(MORE))
        ) as urls,
        router_stack(tmp_path, PATIENT) as stack,
    ):
        fleet = stack.fleet
        tiers = [spec.name for spec in stack.fleet.specs]
        for behaviour in stack.engines.values():
            behaviour.delay_s = DELAY_S
        async with under_load(stack) as load:
            added = []
            for number, url in enumerate(urls):
                body = {"tier": tiers[number % len(tiers)], "url": url}
                answer = await stack.client.post(
                    f"{stack.url}/admin/replicas", json=body
                )
                assert answer.status_code == httpx.codes.CREATED
                added.append(answer.json()["id"])
            new = [replica for replica in fleet.replicas if replica.id in added]
            await until(
                lambda: all(
                    r.state.status is ReplicaStatus.READY and r.state.served
                    for r in new
                )
            )
            assert "fast-1" in (await stack.client.get(f"{stack.url}/metrics")).text
            for name in added:
                answer = await stack.client.post(
                    f"{stack.url}/admin/replicas/{name}/remove"
                )
                assert answer.status_code == httpx.codes.ACCEPTED
            await until(lambda: len(fleet.replicas) == len(tiers))
            served = load.served
            await until(lambda: load.served > served + CLIENTS)
        assert not load.failed
        await until(lambda: stack.leases() == 0)
        assert all(replica.state.in_flight == 0 for replica in new)
        metrics = (await stack.client.get(f"{stack.url}/metrics")).text
        assert not [name for name in added if f'"{name}"' in metrics]
