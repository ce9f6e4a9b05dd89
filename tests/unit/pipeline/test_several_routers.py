"""Whole routers in front of the same engines, over a Redis that fails in every way and comes back."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from classifier import EstimatingCounter
from router.app import wire_router
from router.auth.api_keys import KeyStore
from router.deployment.options import fleet_options
from router.settings import load_settings
from router.telemetry.tracing import make_telemetry
from tests.fakes.engine import Behaviour, FakeEngine, serving_all
from tests.unit.own_engines import until
from tiers.fleet import Fleet
from tiers.lifecycle.supervisor import Supervisor, SupervisorOptions
from tiers.replica import NO_PEERS
from tiers.spec import ReplicaState, TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.conftest import RedisServer

pytestmark = pytest.mark.anyio
ROUTERS, ENGINES, LIMIT, CLIENTS = 4, 2, 8, 3  # slots of each engine; clients of each router
ENOUGH = 5  # answers of each router, after which it is taken to serve


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let routers tell more often, and what they tell be old sooner."""
    monkeypatch.setattr("router.pipeline.shared_load.EVERY_S", 0.2)
    monkeypatch.setattr("router.pipeline.shared_load.LIFE_S", 2)


class Load:
    """Clients that ask routers without a pause.

    Attributes:
        fleets: Of the routers.
        served: Answers of each router.
        failed: What came instead of one.
    """

    def __init__(self, urls: list[str], fleets: list[Fleet]) -> None:
        self.urls, self.fleets = urls, fleets
        self.served = dict.fromkeys(urls, 0)
        self.failed: list[str] = []

    async def ask(self, client: httpx.AsyncClient, url: str) -> None:
        """Ask one router, until cancelled."""
        while True:
            answer = await client.post(f"{url}/generate", json={"prompt": "hi", "stream": False})
            if answer.status_code == httpx.codes.OK and answer.json()["finish_reason"] == "stop":
                self.served[url] += 1
            else:
                self.failed.append(answer.text)

    async def goes_on(self) -> None:
        """Wait until every router has served some more."""
        before = dict(self.served)
        await until(lambda: all(self.served[url] >= before[url] + ENOUGH for url in self.urls))

    async def until_shared(self, *, shared: bool) -> None:
        """Wait until every router knows of the others' load, or until none does any more."""
        known = [False] * len(self.fleets)

        def seen() -> bool:
            for number, fleet in enumerate(self.fleets):  # a moment's load may be none
                now = any(replica.others != NO_PEERS for replica in fleet.replicas)
                known[number] = known[number] or now if shared else now
            return all(known) if shared else not any(known)

        await until(seen)


@asynccontextmanager
async def routers_under_load(tmp_path: Path, redis_url: str) -> AsyncIterator[Load]:
    """Run routers in front of the same engines, and clients that ask them."""
    async with AsyncExitStack() as cleanup:
        fakes = [FakeEngine(Behaviour(delay_s=0.01)).app for _ in range(ENGINES)]
        engines = tuple(await cleanup.enter_async_context(serving_all(*fakes)))
        waits = dict.fromkeys(("interactive", "standard", "batch"), 1e6)  # however slow the machine is
        settings = load_settings(None, {"state": {"redis_url": redis_url}, "admission": {"max_wait_s": waits}})
        fleets, apps = [], []
        for number in range(ROUTERS):
            spec = TierSpec(TierName.FAST, 2048, 16, LIMIT, urls=engines)
            fleet = Fleet((spec,), options=fleet_options(settings))
            supervisor = Supervisor(fleet, SupervisorOptions(tmp_path / str(number), live_speed=False))
            supervisor.start([], [spec])
            cleanup.push_async_callback(supervisor.stop)
            keys, telemetry = KeyStore(settings.auth.keys_file), make_telemetry("0", settings.telemetry)
            apps.append(wire_router(settings, fleet, EstimatingCounter(), telemetry, "fake", keys=keys).app)
            fleets.append(fleet)
        await until(lambda: all(r.state is ReplicaState.READY for fleet in fleets for r in fleet.replicas))
        load = Load(await cleanup.enter_async_context(serving_all(*apps)), fleets)
        client = await cleanup.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))
        asking = [asyncio.create_task(load.ask(client, url)) for url in load.urls for _ in range(CLIENTS)]
        try:
            yield load
        finally:
            for task in asking:
                task.cancel()
            ended = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended


async def test_four_routers_serve_while_their_redis_ends_hangs_and_returns(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    """No request fails; without Redis nobody counts what others had, and afterwards everybody knows of all again."""
    async with routers_under_load(tmp_path, own_redis.url) as load:
        await load.until_shared(shared=True)
        await load.goes_on()
        for fail, mend in ((own_redis.stop, own_redis.start), (own_redis.pause, own_redis.resume)):
            fail()
            await load.until_shared(shared=False)
            assert all(r.limit <= LIMIT // ROUTERS for fleet in load.fleets for r in fleet.replicas)
            await load.goes_on()
            mend()
            await load.until_shared(shared=True)
            await load.goes_on()
        assert not load.failed
