"""Starting engines: command line, guard, supervisor. Child processes are real, the engine in them is the fake."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.fakes.engine import Behaviour, FakeEngine, serving
from tests.unit.own_engines import own_engines, until
from tiers.fleet import Fleet
from tiers.lifecycle import supervisor
from tiers.lifecycle.supervisor import Supervisor, SupervisorOptions
from tiers.replica import Replica
from tiers.spec import ReplicaState, TierName, TierSpec
from tiers.speed import SpeedModel

pytestmark = pytest.mark.anyio
SPEC = TierSpec(TierName.FAST, 2048, 16, 32, checkpoint=Path("/models/x"))


async def test_an_engine_that_runs_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the engine's process nor its guard: their environments are read from the system."""
    monkeypatch.setenv("QARR_STATE__REDIS_URL", "redis://:secret@127.0.0.1:1")
    async with own_engines(tmp_path, monkeypatch) as own:
        assert own.first.pid is not None
        engine = psutil.Process(own.first.pid)
        guard = engine.parent()
        assert guard is not None
        assert "FAKE_BEHAVIOUR" in engine.environ()
        assert not [name for process in (engine, guard) for name in process.environ() if name.startswith("QARR_")]


NO_MEMORY = (
    "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes"
)


async def test_an_engine_that_does_not_fit_is_started_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a smaller KV cache, then with a shorter context, which its tier promises from then on; and so after a restart."""
    monkeypatch.setattr(supervisor, "kv_per_token", lambda _: (1 << 30) // 5000)  # so that half a GiB holds one request
    async with own_engines(tmp_path, monkeypatch, behaviour={"start_errors": [NO_MEMORY] * 2}) as own:
        replica = own.first
        assert replica.detail == (
            "started with less: KV cache 0.5 instead of 1 GiB: it ran out of memory; "
            "context 1024 instead of 2048 tokens: it ran out of memory"
        )
        assert (
            own.details(ReplicaState.STARTING)[0]
            == "started with less: KV cache 0.5 instead of 1 GiB: it ran out of memory"
        )
        assert (replica.spec.max_model_len, own.fleet.spec(TierName.FAST).max_model_len) == (1024, 1024)
        assert replica.pid is not None
        before = psutil.Process(replica.pid)
        argv = before.cmdline()
        assert argv[argv.index("--kv-cache-memory-bytes") + 1] == str(1 << 29)
        assert argv[argv.index("--max-model-len") + 1] == "1024"
        assert "VLLM_CPU_KVCACHE_SPACE" not in before.environ()
        before.kill()
        await until(lambda: replica.state is ReplicaState.READY and replica.pid not in {None, before.pid})
        assert psutil.Process(replica.pid).cmdline() == argv
        assert (replica.detail or "").startswith("started with less")


async def test_an_engine_that_never_fits_says_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a person can do; other errors are not taken for it."""
    monkeypatch.setattr(supervisor, "kv_per_token", lambda _: 1)
    async with own_engines(tmp_path, monkeypatch, ready=False, behaviour={"start_errors": [NO_MEMORY] * 99}) as own:
        detail = own.first.detail or ""
        assert "KV cache 0.25 instead of 0.5 GiB" in detail
        assert "context 512 instead of 1024 tokens" in detail
        assert "in vain: free memory, lower tiers.fast.max_model_len or engine.cpu_kv_cache_gib" in detail
    other = tmp_path / "other"
    other.mkdir()
    async with own_engines(
        other, monkeypatch, ready=False, behaviour={"start_errors": ["ImportError: no vllm"]}
    ) as own:
        assert (own.first.detail or "").startswith("exited with status 1")
        assert not own.details(ReplicaState.STARTING)


async def test_engine_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Of two running engines that read a prompt as different tokens the second gets no traffic; both digests are named."""
    fleet, states = await _watch(tmp_path, Behaviour(), Behaviour(vocabulary=1000))
    refused = next(r for r in fleet.replicas if r.state is ReplicaState.FAILED)
    assert "other tokens" in (refused.detail or "")
    assert sorted(states) == ["failed", "ready"]


async def test_engine_that_answers_nonsense_is_refused(tmp_path: Path) -> None:
    """HTTP 200 and healthy is not enough."""
    fleet, _ = await _watch(tmp_path, Behaviour(answer=("x",) * 16))
    assert fleet.replicas[0].state is ReplicaState.FAILED


async def test_engine_with_too_short_a_context_is_refused(tmp_path: Path) -> None:
    """An engine must keep what its tier promises."""
    fleet, _ = await _watch(tmp_path, Behaviour(max_model_len=1024))
    assert "context of 1024 tokens" in (fleet.replicas[0].detail or "")


async def test_engine_elsewhere_comes_and_goes(tmp_path: Path) -> None:
    """An engine given by URL is unreachable while away and warmed again when it is back."""
    behaviour = Behaviour(alive=False)
    async with serving(FakeEngine(behaviour).app) as url:
        fleet = Fleet((_external(url),))
        seen: list[ReplicaState] = []
        supervisor = Supervisor(fleet, SupervisorOptions(tmp_path), lambda r: seen.append(r.state))
        supervisor.start([], fleet.specs)
        try:
            await _until(lambda: ReplicaState.UNREACHABLE in seen)
            behaviour.alive = True
            await _until(lambda: fleet.replicas[0].state is ReplicaState.READY and fleet.replicas[0].speed is not None)
        finally:
            await supervisor.stop()
        assert seen == [ReplicaState.UNREACHABLE, ReplicaState.WARMING, ReplicaState.READY]
        assert fleet.template.alone == 6


async def test_an_engine_that_says_it_is_not_well_gets_no_traffic(tmp_path: Path) -> None:
    """Its metrics may be as good as ever: what counts is /health, as it did before it was ready."""
    behaviour = Behaviour()
    async with serving(FakeEngine(behaviour).app) as url:
        fleet = Fleet((_external(url),))
        supervisor = Supervisor(fleet, SupervisorOptions(tmp_path))
        supervisor.start([], fleet.specs)
        try:
            await _until(lambda: fleet.replicas[0].state is ReplicaState.READY)
            behaviour.alive = False
            await _until(lambda: fleet.replicas[0].state is ReplicaState.UNREACHABLE)
            behaviour.alive = True
            await _until(lambda: fleet.replicas[0].state is ReplicaState.READY)
        finally:
            await supervisor.stop()


async def test_a_speed_measured_on_a_busy_machine_is_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does can only slow a measurement down: the fastest of a few counts."""
    monkeypatch.setattr("tiers.lifecycle.idle_speed.PAUSE_S", 0.2)
    behaviour = Behaviour(delay_s=0.2)
    async with serving(FakeEngine(behaviour).app) as url:
        fleet = Fleet((_external(url),))
        supervisor = Supervisor(fleet, SupervisorOptions(tmp_path))
        supervisor.start([], fleet.specs)
        try:
            replica = fleet.replicas[0]
            await _until(lambda: replica.speed is not None)
            assert replica.speed is not None
            disturbed = replica.speed.step_base_ms
            assert disturbed >= 200
            behaviour.delay_s = 0.0
            await _until(lambda: replica.speed is not None and replica.speed.step_base_ms < disturbed / 2)
        finally:
            await supervisor.stop()


async def test_a_profile_that_comes_during_a_measurement_counts(tmp_path: Path) -> None:
    """What is measured idle does not take the place of what was profiled under load meanwhile."""
    behaviour = Behaviour()
    async with serving(FakeEngine(behaviour).app) as url:
        fleet = Fleet((_external(url),))
        supervisor = Supervisor(fleet, SupervisorOptions(tmp_path))
        supervisor.start([], fleet.specs)
        try:
            replica = fleet.replicas[0]
            await _until(lambda: replica.state is ReplicaState.READY)
            asked, behaviour.delay_s = behaviour.measurements, 0.2
            await _until(lambda: behaviour.measurements > asked)  # a measurement is under way
            fleet.speeds, replica.speed = {TierName.FAST: SpeedModel(10.0, 0.1, 5.0, profiled=True)}, None
            await _until(lambda: behaviour.measurements > asked + 1)  # its second half
            await _until(lambda: replica.speed is not None)
            await _until(lambda: replica.speed is not None and replica.speed.profiled)
        finally:
            await supervisor.stop()


def _external(*urls: str) -> TierSpec:
    return TierSpec(TierName.FAST, 2048, 16, 32, urls=urls)


async def _watch(tmp_path: Path, *behaviours: Behaviour) -> tuple[Fleet, list[str]]:
    """Watch engines until each is ready or failed."""
    async with contextlib_stack(*behaviours) as urls:
        fleet = Fleet((_external(*urls),))
        supervisor = Supervisor(fleet, SupervisorOptions(tmp_path))
        supervisor.start([], fleet.specs)
        try:
            settled = {ReplicaState.READY, ReplicaState.FAILED}
            await _until(lambda: all(r.state in settled for r in fleet.replicas))
            found = [Replica(r.id, r.spec, r.url, "", "", state=r.state, detail=r.detail) for r in fleet.replicas]
        finally:
            await supervisor.stop()
        return Fleet(fleet.specs, found), [r.state.value for r in found]


def contextlib_stack(*behaviours: Behaviour):
    from contextlib import AsyncExitStack, asynccontextmanager

    @asynccontextmanager
    async def stack():
        async with AsyncExitStack() as cleanup:
            yield [await cleanup.enter_async_context(serving(FakeEngine(b).app)) for b in behaviours]

    return stack()


async def _until(condition) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.02)
