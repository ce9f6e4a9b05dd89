"""Engine processes and their guard. Child processes are real."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import call_within, until, within
from tiers.errors import EngineDiedError, PortInUseError
from tiers.lifecycle.process import (
    GUARD,
    START_BYTES,
    EngineProcess,
    check_port_free,
    selected_kernels,
)

pytestmark = pytest.mark.anyio
SLEEPER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"


async def test_logs_of_engines_are_private(tmp_path: Path) -> None:
    """The log, the one before, and the folder that is made for them: for their owner only."""
    path = tmp_path / "logs/e.log"
    for _ in range(2):
        process = await EngineProcess.start(
            [sys.executable, "-c", "print('loading')"], os.environ, path
        )
        await within(process.wait(), "the process to end")
        await process.stop(0)
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()} == {0o600}
    assert sorted(p.name for p in path.parent.iterdir()) == ["e.log", "e.log.1"]
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_taken_port_is_named() -> None:
    """A port that something listens on is an error that says how to find out what."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortInUseError, match=r"is in use.*ss -ltnp"):
            check_port_free("127.0.0.1", taken.getsockname()[1])


async def test_engine_that_dies_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    """The error has the exit status, the end of the log and the cause before it, as vLLM prints them."""
    cause = "(EngineCore pid=1) ERROR 11-28 06:47:42 [core.py:1510] torch.OutOfMemoryError: CUDA out of memory"
    end = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    shown = ["-c", f"print({cause!r}); print({end!r}); raise SystemExit(7)"]
    process = await EngineProcess.start(
        [sys.executable, *shown], os.environ, tmp_path / "e.log"
    )
    assert await within(process.wait(), "the process to end") == 7
    error = process.died()
    assert isinstance(error, EngineDiedError)
    assert str(error).startswith(
        "exited with status 7: torch.OutOfMemoryError: CUDA out of memory. Last lines of"
    )
    assert str(error).endswith(end)
    await process.stop(0)


async def test_stop_ends_the_engine_and_all_below_it(tmp_path: Path) -> None:
    process = await EngineProcess.start(
        [sys.executable, "-c", SLEEPER], os.environ, tmp_path / "e.log"
    )
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
    supervisor = subprocess.Popen(
        [sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout is not None
    with supervisor.stdout:
        guard = int(call_within(supervisor.stdout.readline, "the guard's process id"))
        family = await _family(guard, 3)
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait(60)
        await _gone(family)


async def test_killed_engine_takes_its_children_along(tmp_path: Path) -> None:
    """kill -9 of the engine itself leaves none of its own processes."""
    process = await EngineProcess.start(
        [sys.executable, "-c", SLEEPER], os.environ, tmp_path / "e.log"
    )
    family = await _family(process.pid, 2)
    os.kill(process.pid, signal.SIGKILL)
    await within(process.wait(), "the process to end")
    await _gone(family)
    await process.stop(0)


async def test_missing_interpreter_is_an_engine_error(tmp_path: Path) -> None:
    """An engine that cannot even be started says so."""
    with pytest.raises(EngineDiedError, match="could not be started"):
        await EngineProcess.start(["/no/such/python"], os.environ, tmp_path / "e.log")


async def _family(pid: int, size: int) -> list[psutil.Process]:
    """Wait until a process and those below it are ``size`` in number; return them."""

    def look() -> list[psutil.Process] | None:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
        return processes if len(processes) >= size else None

    family: list[psutil.Process] = await until(
        look, f"{size} processes from {pid} down"
    )
    return family


async def _gone(family: list[psutil.Process]) -> None:
    await until(
        lambda: (
            not [
                p
                for p in family
                if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
            ]
        )
    )


async def test_an_engine_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """After the grace; asked to stop again, there is nothing left to do."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    log = tmp_path / "e.log"
    process = await EngineProcess.start(
        [sys.executable, "-c", stubborn], os.environ, log
    )
    await until(lambda: log.read_text() == "up\n")
    family = await _family(process.pid, 1)
    await process.stop(0.05)
    await _gone(family)
    assert process.exit_status == 128 + signal.SIGKILL
    await process.stop(0.05)


async def test_sigterm_ends_an_engine_that_does_not_handle_it(tmp_path: Path) -> None:
    """As one that is still importing: the guard ignores the signal, but its engine does not inherit that."""
    process = await EngineProcess.start(
        ["sleep", "600"], os.environ, tmp_path / "e.log"
    )
    await process.stop(30)
    assert process.exit_status == 128 + signal.SIGTERM


async def test_an_engine_that_ends_on_sigterm_has_its_own_status(
    tmp_path: Path,
) -> None:
    ends = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); print('up', flush=True); [time.sleep(0.1) for _ in range(6000)]"
    log = tmp_path / "e.log"
    process = await EngineProcess.start([sys.executable, "-c", ends], os.environ, log)
    await until(lambda: log.read_text() == "up\n")
    assert process.exit_status is None
    await process.stop(30)
    assert process.exit_status == 3


async def test_only_the_last_lines_of_a_log_are_told(tmp_path: Path) -> None:
    """Bytes that are no text do not matter; a log that is gone has no lines."""
    code = "import sys; sys.stdout.buffer.write(b''.join(b'%d\\xff\\n' % n for n in range(100)))"
    process = await EngineProcess.start(
        [sys.executable, "-c", code], os.environ, tmp_path / "e.log"
    )
    await within(process.wait(), "the process to end")
    assert process.last_log_lines(2) == "98\ufffd\n99\ufffd"
    (tmp_path / "e.log").unlink()
    assert process.last_log_lines() == ""
    await process.stop(0)


async def test_an_engine_runs_on_the_cores_it_is_given(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    code = "import os; print(os.sched_getaffinity(0))"
    process = await EngineProcess.start(
        [sys.executable, "-c", code], os.environ, tmp_path / "e.log", (core,)
    )
    await within(process.wait(), "the process to end")
    assert process.last_log_lines() == str({core})
    await process.stop(0)


async def test_a_log_that_cannot_be_made_is_an_engine_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineDiedError, match="could not be started"):
        await EngineProcess.start(
            [sys.executable, "-c", ""], os.environ, tmp_path / "file" / "e.log"
        )


def test_a_port_that_was_just_given_up_is_free() -> None:
    """Connections in TIME_WAIT do not keep an engine from being started again on its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            pass
    check_port_free("127.0.0.1", port)


@pytest.mark.parametrize(
    ("code", "status"),
    [("", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_guard_has_its_engines_status(
    tmp_path: Path, code: str, status: int
) -> None:
    """A signal is 128 and its number, as shells have it."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", str(GUARD), str(tmp_path / "log"), sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert guard.stdin is not None
    assert guard.stdout is not None
    with guard.stdin, guard.stdout:
        assert (
            call_within(guard.stdout.readline, "the engine's process id")
            .strip()
            .isdigit()
        )
        assert guard.wait(60) == status


def test_the_guard_tells_why_nothing_could_be_started(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(GUARD), str(tmp_path / "log"), "/no/such/engine"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    timeout=100)  # fmt: skip
    assert done.returncode == 126
    assert "No such file or directory: '/no/such/engine'" in done.stdout


async def test_the_kernels_that_vllm_chose_are_read_from_its_log(
    tmp_path: Path,
) -> None:
    """In either of its wordings, each once; without a log there are none."""
    log = tmp_path / "engine.log"
    assert selected_kernels(log) == ()
    log.write_text(
        "INFO [a.py:797] Selected FirstLinearKernel for CompressedTensorsW8A8Fp8\n"
        "INFO [a.py:923] Using SecondLinearKernel for mixed-precision linear\n"
        "INFO [b.py:138] Using SecondLinearKernel for CompressedTensorsWNA16\n"
    )
    assert selected_kernels(log) == ("FirstLinearKernel", "SecondLinearKernel")


def test_only_the_start_of_a_log_is_searched_for_kernels(tmp_path: Path) -> None:
    """A log grows for as long as its engine runs; the kernels are named while it loads."""
    log = tmp_path / "engine.log"
    late_choice = "Using LateLinearKernel for mixed-precision linear\n"
    log.write_text("x" * START_BYTES + late_choice)
    assert selected_kernels(log) == ()
    log.write_text(late_choice + "x" * START_BYTES)
    assert selected_kernels(log) == ("LateLinearKernel",)
