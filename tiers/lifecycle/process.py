"""One engine process: start it under its guard, watch it, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tiers.errors import EngineDiedError, PortInUseError
from tiers.private_files import make_private_folder, open_private

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GUARD = Path(__file__).with_name("guard.py")
LAST_LINES = 15
SIGNALLED = 128  # above it a shell tells of a signal, as our guard does
LOG_LINES = 200  # searched for the cause when an engine has ended
# An engine chooses its kernels while it loads: so much of its log, from the start, is searched for them.
START_BYTES = 4 << 20
# The end of a traceback, also behind vLLM's prefix; not that of a process that only waited for the one that failed.
CAUSE = re.compile(
    r"^(?:\(\w+ pid=\d+\) ERROR \S+ \S+ \[\S+\] )?((?:\w+\.)*\w+(?:Error|Exception): (?!.*root cause).+)"
)
# vLLM's words for the kernel of a kind of layers.
SELECTED = re.compile(r"(?:Selected|Using) (\w+LinearKernel) for (\w+)")


@dataclass(slots=True)
class EngineProcess:
    """A running engine; ``pid`` is the engine's, not its guard's."""

    pid: int
    log_path: Path
    _guard: asyncio.subprocess.Process

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        cores: Sequence[int] = (),
    ) -> EngineProcess:
        """Start an engine on the given CPU cores, with its output in ``log_path``. The previous log is kept.

        Raises:
            EngineDiedError: It could not be started.
        """
        pinned = (
            ["taskset", "-c", ",".join(map(str, cores)), *argv] if cores else list(argv)
        )
        try:
            _new_log(log_path)
            guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(GUARD), str(log_path), *pinned),
                env=dict(env),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineDiedError(f"could not be started: {error}") from error
        assert guard.stdout is not None
        assert guard.stdin is not None
        try:
            first_line = await guard.stdout.readline()
        except BaseException:
            guard.stdin.close()  # The guard kills what it has started.
            await guard.wait()
            raise
        if not first_line.rstrip().isdigit():
            guard.stdin.close()
            await guard.wait()
            why = (
                first_line.decode(errors="replace").strip()
                or f"its guard exited with status {guard.returncode}"
            )
            raise EngineDiedError(f"could not be started: {' '.join(argv[:3])}: {why}")
        return cls(int(first_line), log_path, guard)

    @property
    def exit_status(self) -> int | None:
        """Return the exit status, or None while the engine runs."""
        return self._guard.returncode

    async def wait(self) -> int:
        """Wait until the engine and all its descendants have ended; return its exit status."""
        return await self._guard.wait()

    def last_log_lines(self, count: int = LAST_LINES) -> str:
        """Return the end of the engine's log; empty if it cannot be read."""
        return _last_lines(self.log_path, count)

    def died(self) -> EngineDiedError:
        """Return an error with the exit status, the cause where the log names one, and the log's last lines."""
        return EngineDiedError(
            f"exited with status {self.exit_status}{end_of(self.log_path, status=self.exit_status)}"
        )

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, wait up to ``grace_s`` seconds, then kill the engine and all its descendants."""
        if self.exit_status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._guard.wait(), grace_s)
        if self._guard.stdin is not None:
            self._guard.stdin.close()  # the guard kills what is left
        await self._guard.wait()


def end_of(log: Path, where: str = "", status: int | None = None) -> str:
    """Return how an engine's log ends, to follow the words for its end: the cause where it names one, and its last lines.

    An engine that a signal has ended (``status``) did not end by an error of its own.
    """
    lines = _last_lines(log, LOG_LINES).splitlines()
    causes = [match[1] for match in map(CAUSE.search, lines) if match is not None]
    was_ended_by_signal = status is not None and not 0 <= status <= SIGNALLED
    cause = f": {causes[-1]}" if causes and not was_ended_by_signal else ""
    last_lines = "\n".join(lines[-LAST_LINES:])
    return f"{cause}. Last lines of {log}{where}:\n{last_lines}"


def selected_kernels(log: Path) -> tuple[str, ...]:
    """Return the names of the kernels of linear layers that vLLM has chosen, each once; empty if its log names none."""
    try:
        with log.open("rb") as file:
            start = file.read(START_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(dict.fromkeys(kernel for kernel, _ in SELECTED.findall(start)))


def _last_lines(path: Path, count: int) -> str:
    with (
        contextlib.suppress(OSError),
        path.open(encoding="utf-8", errors="replace") as log,
    ):
        return "".join(deque(log, maxlen=count)).rstrip()
    return ""


def _new_log(path: Path) -> None:
    """Create an empty log, readable by its owner only, and keep the previous one."""
    make_private_folder(path.parent)
    if path.exists():
        path.replace(path.with_suffix(".log.1"))
    os.close(open_private(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC))


def check_port_free(host: str, port: int) -> None:
    """Check that an engine can listen on the port.

    Raises:
        PortInUseError: Something listens there already.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUseError(
                f"port {port} on {host} is in use ({error.strerror}): end what listens there (ss -ltnp 'sport = :{port}'), "
                f"or set engine.base_port"
            ) from error
