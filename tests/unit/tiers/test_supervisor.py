"""Starting engines: command line, guard, supervisor. Child processes are real, the engine in them is the fake."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.fakes.engine import Behaviour, FakeEngine, serving
from tests.unit.own_engines import own_engines
from tiers.errors import EngineDied, PortInUse, WarmupFailed
from tiers.fleet import Fleet, Replica
from tiers.lifecycle.command import engine_argv, engine_environment
from tiers.lifecycle.process import GUARD, EngineProcess, check_port_free
from tiers.lifecycle.supervisor import Supervisor, SupervisorOptions
from tiers.lifecycle.warmup import WarmupPlan, check_answer
from tiers.spec import EngineLaunch, OtlpTarget, Placement, ReplicaState, TierName, TierSpec
from tiers.speed import SpeedModel

pytestmark = pytest.mark.anyio
SPEC = TierSpec(TierName.FAST, 2048, 16, 32, checkpoint=Path("/models/x"))
SLEEPER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"


def launch(**changes: object) -> EngineLaunch:
    values: dict[str, object] = {
        "tier": SPEC, "placement": Placement(), "python": Path("/engine/python"), "served_model": "m", "host": "127.0.0.1",
        "port": 9101, "api_key": "secret",
    }  # fmt: skip
    return EngineLaunch(**{**values, **changes})  # type: ignore[arg-type]


def test_cpu_engine_is_eager_and_unbound() -> None:
    """A CPU engine runs eagerly, with its own threads; its key is not on the command line."""
    argv, env = (
        engine_argv(launch(placement=Placement(threads=3, kv_cache_gib=2))),
        engine_environment(launch(placement=Placement(threads=3, kv_cache_gib=2)), {"PATH": "/bin"}),
    )
    assert "--enforce-eager" in argv
    assert argv[argv.index("--max-model-len") + 1] == "2048"
    assert "secret" not in " ".join(argv)
    assert env["VLLM_API_KEY"] == "secret"
    assert (env["OMP_NUM_THREADS"], env["VLLM_CPU_KVCACHE_SPACE"], env["VLLM_CPU_OMP_THREADS_BIND"]) == (
        "3",
        "2",
        "nobind",
    )


def test_gpu_engine_gets_its_share() -> None:
    """A GPU engine gets its device and its share of memory, and compiles."""
    placed = launch(placement=Placement(gpu=1, gpu_memory_fraction=0.31234))
    assert "--enforce-eager" not in engine_argv(placed)
    assert engine_argv(placed)[-2:] == ["--gpu-memory-utilization", "0.312"]
    assert engine_environment(placed, {})["CUDA_VISIBLE_DEVICES"] == "1"


def test_parents_environment_is_cleaned() -> None:
    """What the parent set for itself does not reach an engine; the engine's own trace exporter does."""
    parent = {
        "OTEL_SERVICE_NAME": "qarr",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x",
        "PYTHONPATH": "/x",
        "HOME": "/root",
    }
    env = engine_environment(launch(otlp=OtlpTarget("http://c:4318/v1/traces", "http/protobuf")), parent)
    assert (env["OTEL_SERVICE_NAME"], env["HOME"]) == ("vllm-fast", "/root")
    assert not {"OTEL_EXPORTER_OTLP_ENDPOINT", "PYTHONPATH"} & set(env)
    assert env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"


def test_the_routers_secrets_do_not_reach_an_engine() -> None:
    """No variable of QARR's own, no token of the hub; keys of the traces' destination only for spans sent there."""
    parent = {
        "QARR_STATE__REDIS_URL": "redis://:secret@r",
        "QARR_KEY": "secret",
        "QARR_ENGINE__API_KEY": "secret",
        "HF_TOKEN": "secret",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
        "LD_LIBRARY_PATH": "/cuda",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    env = engine_environment(launch(api_key="own"), parent)
    assert "secret" not in "".join(env.values())
    assert (env["LD_LIBRARY_PATH"], env["VLLM_LOGGING_LEVEL"]) == ("/cuda", "DEBUG")
    traced = engine_environment(launch(api_key="own", otlp=OtlpTarget("http://c:4317", "grpc")), parent)
    assert [name for name, value in traced.items() if "secret" in value] == ["OTEL_EXPORTER_OTLP_HEADERS"]


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


async def test_logs_of_engines_are_private(tmp_path: Path) -> None:
    """The log, the one before, and the folder that is made for them: for their owner only."""
    path = tmp_path / "logs/e.log"
    for _ in range(2):
        process = await EngineProcess.start([sys.executable, "-c", "print('loading')"], os.environ, path)
        await process.wait()
        await process.stop(0)
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()} == {0o600}
    assert sorted(p.name for p in path.parent.iterdir()) == ["e.log", "e.log.1"]
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_taken_port_is_named() -> None:
    """A port that something listens on is an error that says how to find out what."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortInUse, match=r"is in use.*ss -ltnp"):
            check_port_free("127.0.0.1", taken.getsockname()[1])


async def test_engine_that_dies_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    """The error has the exit status and the end of the log."""
    process = await EngineProcess.start(
        [sys.executable, "-c", "print('loading'); print('CUDA out of memory'); raise SystemExit(7)"],
        os.environ,
        tmp_path / "e.log",
    )
    assert await process.wait() == 7
    error = process.died()
    assert isinstance(error, EngineDied)
    assert "status 7" in str(error)
    assert "CUDA out of memory" in str(error)
    await process.stop(0)


async def test_stop_ends_the_engine_and_all_below_it(tmp_path: Path) -> None:
    """SIGTERM first; whatever is left below, killed."""
    process = await EngineProcess.start([sys.executable, "-c", SLEEPER], os.environ, tmp_path / "e.log")
    family = await _family(process.pid, 2)
    await process.stop(2)
    await _gone(family)


async def test_killed_supervisor_takes_its_engines_along(tmp_path: Path) -> None:
    """When the process that holds the guard's pipe is killed with -9, the engine and its children die."""
    starter = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, {str(GUARD)!r}, {str(tmp_path / 'e.log')!r}, sys.executable, '-c', {SLEEPER!r}],"
        " stdin=subprocess.PIPE, start_new_session=True)\n"
        "print(p.pid, flush=True); time.sleep(600)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    with supervisor.stdout:
        guard = int(supervisor.stdout.readline())
        family = await _family(guard, 3)
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait()
        await _gone(family)


async def test_killed_engine_takes_its_children_along(tmp_path: Path) -> None:
    """kill -9 of the engine itself leaves none of its own processes."""
    process = await EngineProcess.start([sys.executable, "-c", SLEEPER], os.environ, tmp_path / "e.log")
    family = await _family(process.pid, 2)
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    await _gone(family)
    await process.stop(0)


async def test_missing_interpreter_is_an_engine_error(tmp_path: Path) -> None:
    """An engine that cannot even be started says so."""
    with pytest.raises(EngineDied, match="could not be started"):
        await EngineProcess.start(["/no/such/python"], os.environ, tmp_path / "e.log")


@pytest.mark.parametrize(
    "text", ["", "   ", "\ufffd\ufffd Paris", "the the the the the the the the", "12345 !!", "It is Rome."]
)
def test_nonsense_fails_the_warm_up(text: str) -> None:
    """Empty, broken, repeated or wrong text is not an answer."""
    with pytest.raises(WarmupFailed, match="engine answered"):
        check_answer(text, WarmupPlan())


def test_sane_answers_pass_the_warm_up() -> None:
    """The expected word in any case passes; with no expectation any sane text does."""
    check_answer("The capital of France is PARIS.", WarmupPlan())
    check_answer("Rome, perhaps.", WarmupPlan(expected=""))


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


async def _family(pid: int, size: int) -> list[psutil.Process]:
    """Wait until a process and those below it are ``size`` in number; return them."""
    async with asyncio.timeout(10):
        while True:
            root = psutil.Process(pid)
            family = [root, *root.children(recursive=True)]
            if len(family) >= size:
                return family
            await asyncio.sleep(0.05)


async def _gone(family: list[psutil.Process]) -> None:
    await _until(lambda: not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])


async def _until(condition) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.02)
