"""Measuring replicas while nothing else computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.fakes.engine import Behaviour, FakeEngine, serving
from tests.waiting import until
from tiers.fleet import Fleet
from tiers.lifecycle.idle_speed import SAMPLES, IdleSpeed
from tiers.lifecycle.warmup import WarmupPlan
from tiers.probe import EngineProbe
from tiers.replica import Replica
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierSpec
from tiers.speed import SpeedModel

pytestmark = pytest.mark.anyio
FAST, _, PRECISE = STANDARD_TIERS
PROFILE = SpeedModel(10.0, 0.1, 5.0, profiled=True)


@asynccontextmanager
async def measured(behaviour: Behaviour) -> AsyncIterator[tuple[Fleet, IdleSpeed]]:
    specs = (
        TierSpec(FAST, max_model_len=2048, max_num_seqs=16, max_in_flight=32),
        TierSpec(PRECISE, max_model_len=2048, max_num_seqs=16, max_in_flight=32),
    )
    fleet = Fleet(specs)
    async with (
        serving(FakeEngine(behaviour).app) as url,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        for spec in specs:
            fleet.add(
                Replica(
                    f"{spec.name}-0",
                    spec,
                    url=url,
                    api_key="",
                    model="fake",
                    status=ReplicaStatus.READY,
                )
            )
        yield (
            fleet,
            IdleSpeed(
                fleet,
                WarmupPlan(),
                lambda replica: EngineProbe(client, replica.url, ""),
            ),
        )


async def test_a_fleet_is_quiet_while_nothing_computes() -> None:
    """Requests, engines that start or warm, and a checkpoint that is made are noise; those that have ended are not."""
    async with measured(Behaviour()) as (fleet, idle):
        fast, precise = fleet.replicas
        assert idle.quiet()
        with fleet.lease(FAST, prompt_tokens=1, max_tokens=1) or pytest.fail(
            "no lease"
        ):
            assert not idle.quiet()
            assert idle.quiet(but=fast)
            assert not idle.quiet(but=precise)
        for state in ReplicaStatus:
            precise.mark(state)
            assert idle.quiet() is (
                state not in {ReplicaStatus.STARTING, ReplicaStatus.WARMING}
            )
        fleet.preparations.expect([PRECISE], None)
        assert not idle.quiet()


async def test_a_measurement_beside_a_request_does_not_count() -> None:
    """On whichever replica: they may share a machine. Nor does one of an engine that fails."""
    behaviour = Behaviour()
    async with measured(behaviour) as (fleet, idle):
        assert await idle.measure(fleet.replicas[0]) is not None
        behaviour.delay_s = 0.02
        before = behaviour.measurements
        measuring = asyncio.create_task(idle.measure(fleet.replicas[0]))
        await until(lambda: behaviour.measurements > before)
        lease = fleet.lease(PRECISE, prompt_tokens=1, max_tokens=1)
        assert lease is not None
        lease.finished(None, 1)
        lease.release()
        assert await measuring is None
        behaviour.status = 500
        assert await idle.measure(fleet.replicas[0]) is None


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "QUIET_S", "PAUSE_S"):
        monkeypatch.setattr(f"tiers.lifecycle.idle_speed.{name}", 0.005)


@pytest.mark.usefixtures("_quick")
async def test_each_replica_is_measured_a_few_times_unless_it_has_a_profile() -> None:
    """A profile is taken as it is; two speeds are never measured at once, nor while somebody else measures."""
    behaviour = Behaviour()
    async with measured(behaviour) as (fleet, idle):
        fleet.speeds = {PRECISE: PROFILE}
        async with fleet.measuring:
            running = asyncio.create_task(idle.run())
            await until(lambda: fleet.replicas[1].state.speed is PROFILE)
            assert fleet.replicas[0].state.speed is None
        # a short and a long prompt each
        await until(lambda: behaviour.measurements == 2 * SAMPLES)
        for _ in range(20):  # it looks again, and finds nothing left to measure
            await asyncio.sleep(0.005)
        assert behaviour.measurements == 2 * SAMPLES
        assert fleet.replicas[0].state.speed is not None
        assert fleet.replicas[0].state.speed.source == "idle"
        fleet.replicas[0].mark(ReplicaStatus.STARTING)
        fleet.replicas[0].mark(ReplicaStatus.READY)
        # a new process is measured anew
        await until(lambda: behaviour.measurements == 4 * SAMPLES)
        running.cancel()
        await asyncio.wait({running})
