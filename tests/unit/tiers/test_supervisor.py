"""Starting engines: command line, guard, supervisor. Child processes are real, the engine in them is the fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.fakes.engine import Behaviour, FakeEngine, serving_all
from tests.unit.own_engines import own_engines
from tests.waiting import until
from tiers.checkpoints.schemes import GpuHardware
from tiers.fleet import Fleet
from tiers.lifecycle import own_engine
from tiers.lifecycle.options import SupervisorOptions
from tiers.lifecycle.supervisor import Supervisor
from tiers.replica import Replica
from tiers.spec import ReplicaStatus, TierName, TierSpec
from tiers.speed import SpeedModel

pytestmark = pytest.mark.anyio


async def test_an_engine_that_runs_has_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the engine's process nor its guard: their environments are read from the system."""
    monkeypatch.setenv("QARR_STATE__REDIS_URL", "redis://:secret@127.0.0.1:1")
    async with own_engines(tmp_path, monkeypatch) as own:
        assert own.first.state.pid is not None
        engine = psutil.Process(own.first.state.pid)
        guard = engine.parent()
        assert guard is not None
        assert "FAKE_BEHAVIOUR" in engine.environ()
        for process in (engine, guard):
            assert not [name for name in process.environ() if name.startswith("QARR_")]


NO_MEMORY = "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes"


async def test_an_engine_that_does_not_fit_is_started_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a smaller KV cache, then with a shorter context, which its tier promises from then on; and so after a restart."""
    # so that half a GiB holds one request
    monkeypatch.setattr(own_engine, "kv_per_token", lambda _: (1 << 30) // 5000)
    async with own_engines(
        tmp_path, monkeypatch, behaviour={"start_errors": [NO_MEMORY] * 2}
    ) as own:
        replica = own.first
        assert replica.state.detail == (
            "started with less: KV cache 0.5 instead of 1 GiB: it ran out of memory; "
            "context 1024 instead of 2048 tokens: it ran out of memory"
        )
        assert (
            own.details(ReplicaStatus.STARTING)[0]
            == "started with less: KV cache 0.5 instead of 1 GiB: it ran out of memory"
        )
        assert replica.spec.max_model_len == 1024
        assert own.fleet.spec(TierName.FAST).max_model_len == 1024
        assert replica.state.pid is not None
        before = psutil.Process(replica.state.pid)
        argv = before.cmdline()
        assert argv[argv.index("--kv-cache-memory-bytes") + 1] == str(1 << 29)
        assert argv[argv.index("--max-model-len") + 1] == "1024"
        assert "VLLM_CPU_KVCACHE_SPACE" not in before.environ()
        before.kill()
        await until(
            lambda: (
                replica.state.status is ReplicaStatus.READY
                and replica.state.pid not in {None, before.pid}
            )
        )
        assert psutil.Process(replica.state.pid).cmdline() == argv
        assert (replica.state.detail or "").startswith("started with less")


async def test_an_engine_that_never_fits_says_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a person can do; other errors are not taken for it."""
    monkeypatch.setattr(own_engine, "kv_per_token", lambda _: 1)
    async with own_engines(
        tmp_path, monkeypatch, ready=False, behaviour={"start_errors": [NO_MEMORY] * 99}
    ) as own:
        detail = own.first.state.detail or ""
        assert "KV cache 0.25 instead of 0.5 GiB" in detail
        assert "context 512 instead of 1024 tokens" in detail
        assert (
            "but it still does not fit: free memory, lower tiers.fast.max_model_len or engine.cpu_kv_cache_gib"
            in detail
        )
    other = tmp_path / "other"
    other.mkdir()
    async with own_engines(
        other,
        monkeypatch,
        ready=False,
        behaviour={"start_errors": ["ImportError: no vllm"]},
    ) as own:
        assert (own.first.state.detail or "").startswith("exited with status 1")
        assert not own.details(ReplicaStatus.STARTING)


async def test_an_engine_of_a_format_that_the_hardware_lacks_says_so_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence with what it can compute, before vLLM's own words; other formats are not blamed."""
    monkeypatch.setattr(own_engine, "read_hardware", lambda: GpuHardware((7, 5)))
    for precision, is_lacking in (("mxfp4", True), ("int8-w8a8", False)):
        folder = tmp_path / precision
        folder.mkdir()
        async with own_engines(
            folder,
            monkeypatch,
            ready=False,
            precision=precision,
            behaviour={"start_errors": ["ValueError: no kernel"]},
        ) as own:
            detail = own.first.state.detail or ""
            said = (
                "this GPU (compute capability 7.5) cannot compute mxfp4, the format of fast's checkpoint; vLLM serves there "
                "int8-w8a8, fp16 natively"
            )
            assert detail.startswith(said) == is_lacking
            assert "exited with status 1: ValueError: no kernel" in detail


async def test_engine_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Of two running engines that read a prompt as different tokens the second gets no traffic; both digests are named."""
    found = await settled(tmp_path, Behaviour(), Behaviour(vocabulary=1000))
    assert found.keys() == {ReplicaStatus.READY, ReplicaStatus.FAILED}
    assert "other tokens" in found[ReplicaStatus.FAILED]


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (Behaviour(answer=("!",) * 16), "not readable text"),
        (Behaviour(max_model_len=1024), "context of 1024 tokens"),
    ],
    ids=["nonsense", "too short a context"],
)
async def test_an_engine_that_does_not_keep_its_tiers_promise_is_refused(
    tmp_path: Path, behaviour: Behaviour, said: str
) -> None:
    found = await settled(tmp_path, behaviour)
    assert said in found[ReplicaStatus.FAILED]


async def test_engine_elsewhere_comes_and_goes(tmp_path: Path) -> None:
    """An engine given by URL is unreachable while away and warmed again when it is back."""
    behaviour = Behaviour(alive=False)
    seen = list[ReplicaStatus]()
    async with watching(
        tmp_path, behaviour, on_change=lambda r: seen.append(r.state.status)
    ) as fleet:
        await until(lambda: ReplicaStatus.UNREACHABLE in seen)
        behaviour.alive = True
        await until(
            lambda: (
                fleet.replicas[0].state.status is ReplicaStatus.READY
                and fleet.replicas[0].state.speed is not None
            )
        )
    assert seen == [
        ReplicaStatus.UNREACHABLE,
        ReplicaStatus.WARMING,
        ReplicaStatus.READY,
    ]
    assert fleet.template.alone == 6


async def test_a_speed_measured_on_a_busy_machine_is_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else the machine does can only slow a measurement down: the fastest of a few counts."""
    monkeypatch.setattr("tiers.lifecycle.idle_speed.PAUSE_S", 0.2)
    behaviour = Behaviour(delay_s=0.1)
    async with watching(tmp_path, behaviour) as fleet:
        replica = fleet.replicas[0]
        await until(lambda: replica.state.speed is not None)
        disturbed = replica.state.speed.step_base_ms
        behaviour.delay_s = 0.0
        await until(
            lambda: (
                replica.state.speed is not None
                and replica.state.speed.step_base_ms < disturbed / 2
            )
        )


async def test_a_profile_that_comes_during_a_measurement_counts(tmp_path: Path) -> None:
    """What is measured idle does not take the place of what was profiled under load meanwhile."""
    behaviour = Behaviour()
    async with watching(tmp_path, behaviour) as fleet:
        replica = fleet.replicas[0]
        await until(lambda: replica.state.status is ReplicaStatus.READY)
        asked = behaviour.measurements
        behaviour.delay_s = 0.1
        # a measurement is under way
        await until(lambda: behaviour.measurements > asked)
        fleet.speeds = {TierName.FAST: SpeedModel(10.0, 0.1, 5.0, profiled=True)}
        replica.update(speed=None)
        await until(lambda: behaviour.measurements > asked + 1)  # its second half
        await until(lambda: replica.state.speed is not None)
        await until(
            lambda: replica.state.speed is not None and replica.state.speed.profiled
        )


@asynccontextmanager
async def watching(
    tmp_path: Path,
    *behaviours: Behaviour,
    on_change: Callable[[Replica], None] = lambda _replica: None,
) -> AsyncIterator[Fleet]:
    async with serving_all(
        *(FakeEngine(behaviour).app for behaviour in behaviours)
    ) as urls:
        fleet = Fleet(
            (
                TierSpec(
                    TierName.FAST,
                    max_model_len=2048,
                    max_num_seqs=16,
                    max_in_flight=32,
                    urls=tuple(urls),
                ),
            )
        )
        supervisor = Supervisor(fleet, SupervisorOptions(tmp_path), on_change)
        supervisor.start([], fleet.specs)
        try:
            yield fleet
        finally:
            await supervisor.stop()


async def settled(tmp_path: Path, *behaviours: Behaviour) -> dict[ReplicaStatus, str]:
    """Watch engines until each is ready or failed; return what is told of a replica in either state."""
    async with watching(tmp_path, *behaviours) as fleet:
        await until(
            lambda: all(
                r.state.status in {ReplicaStatus.READY, ReplicaStatus.FAILED}
                for r in fleet.replicas
            )
        )
        return {
            replica.state.status: replica.state.detail or ""
            for replica in fleet.replicas
        }
