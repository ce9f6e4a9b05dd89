"""One engine process: start it behind its guard, watch it, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tiers.errors import EngineDied, PortInUse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GUARD = Path(__file__).with_name("guard.py")
LAST_LINES = 15


@dataclass(slots=True)
class EngineProcess:
    """A running engine. ``pid`` is the engine's own; its guard is ``_guard``."""

    pid: int
    log_path: Path
    _guard: asyncio.subprocess.Process

    @classmethod
    async def start(
        cls, argv: Sequence[str], env: Mapping[str, str], log_path: Path, cores: Sequence[int] = ()
    ) -> EngineProcess:
        """Start an engine with its output going to ``log_path`` (written over) and its CPU affinity to ``cores``."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_bytes(b"")  # noqa: ASYNC240
        pinned = ["taskset", "-c", ",".join(map(str, cores)), *argv] if cores else list(argv)
        guard = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(GUARD),
            str(log_path),
            *pinned,
            env=dict(env),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        assert guard.stdout is not None
        first_line = await guard.stdout.readline()
        if not first_line:
            assert guard.stdin is not None
            guard.stdin.close()
            await guard.wait()
            raise EngineDied(f"could not be started: {' '.join(argv[:3])} (is the engine's Python there?)")
        return cls(int(first_line), log_path, guard)

    @property
    def exit_status(self) -> int | None:
        """Return the exit status, or None while the engine runs."""
        return self._guard.returncode

    async def wait(self) -> int:
        """Wait for the engine and everything below it to be gone; return its exit status."""
        return await self._guard.wait()

    def last_log_lines(self, count: int = LAST_LINES) -> str:
        """Return the end of the engine's log: what a person needs to see when it died."""
        with contextlib.suppress(OSError), self.log_path.open(encoding="utf-8", errors="replace") as log:
            return "".join(deque(log, maxlen=count)).rstrip()
        return ""

    def died(self) -> EngineDied:
        """Describe the engine's death with its last log lines."""
        return EngineDied(
            f"exited with status {self.exit_status}. Last lines of {self.log_path}:\n{self.last_log_lines()}"
        )

    async def stop(self, grace_s: float) -> None:
        """Ask the engine to end (SIGTERM), wait up to ``grace_s`` seconds, then kill it and all below it."""
        if self.exit_status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._guard.wait(), grace_s)
        if self._guard.stdin is not None:
            self._guard.stdin.close()  # the guard kills what is left
        await self._guard.wait()


def check_port_free(host: str, port: int) -> None:
    """Check that an engine can listen on the port.

    Raises:
        PortInUse: Something listens there already.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUse(
                f"port {port} on {host} is in use ({error.strerror}): end what listens there (ss -ltnp 'sport = :{port}'), "
                f"or set engine.base_port"
            ) from error
