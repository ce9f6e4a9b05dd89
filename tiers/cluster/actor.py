"""The Ray actor that holds one engine. It is sent to its node as it is: nothing of QARR needs to be installed there.

The node's interpreter (that of ``ray start``) has vLLM. The engine's guard kills it when the actor is gone, however that
ended: Ray kills actors without asking.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tiers.lifecycle.command import inherited
from tiers.lifecycle.process import end_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiers.cluster.job import PlacementJob, WantedReplica

POLL_S = 0.2
HEALTH_S = 2.0  # between two health checks
HEALTH_TIMEOUT_S = 5.0
LAST_PORT = 65535
# Before the guard's program: Ray kills the children of an actor that it ends, and a guard that is killed kills nobody.
DETACHED = """import os
if os.fork(): os._exit(0)
print(os.getpid(), flush=True)
exec(compile({program!r}, "guard.py", "exec"))
"""


def hold_port(host: str, first: int) -> socket.socket:
    """Return a socket that keeps the first free port for whoever binds it by number, with SO_REUSEADDR as vLLM does.

    Raises:
        RuntimeError: No port is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, LAST_PORT + 1):
        held = socket.socket(family)
        try:
            # The option is not set yet: two actors never hold the same port.
            held.bind((host, port))
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held
    raise RuntimeError(f"no port from {first} on is free on {host}")


def is_healthy(host: str, port: int) -> bool:
    """Ask an engine whether it is alive. No proxy is asked."""
    connection = http.client.HTTPConnection(host, port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def node_environment(
    node: Mapping[str, str], own: Mapping[str, str], *, traced: bool
) -> dict[str, str]:
    """Return an engine's environment on a node: the node's without Ray's variables and QARR's, and the engine's own."""
    environment = {
        name: value
        for name, value in inherited(node, traced=traced).items()
        if not name.startswith("RAY_") and name != "PYTHONBREAKPOINT"
    }
    return environment | dict(own)


class EngineActor:
    """One engine on the node of this actor.

    Args:
        replica: What to start.
        job: What all engines have in common.
        programs: Source of the guard and of the engine's main program.
        api_key: The engine's key.
    """

    def __init__(
        self,
        replica: WantedReplica,
        job: PlacementJob,
        programs: tuple[str, str],
        api_key: str,
    ) -> None:
        import ray  # noqa: PLC0415  where the actor runs

        self._replica = replica
        self._job = job
        self._guard_program, self._engine_program = programs
        self._api_key = api_key
        self._host = str(ray.util.get_node_ip_address())
        self._cluster = str(ray.get_runtime_context().gcs_address)
        self._log = Path(job.log_dir) / f"{replica.id}.log"
        self._port = 0
        # This process has the guard's pipes; the guard itself is no child of the actor.
        self._guard: subprocess.Popen[bytes] | None = None
        # It tells when the guard, and so all below it, has ended; None: it had ended before it could be watched.
        self._guard_fd: int | None = None
        self._engine_pid = 0

    async def node(self) -> str:
        """Return the address of the actor's node."""
        return self._host

    async def beat(self) -> None:
        """Answer."""

    async def start(self) -> str:
        """Start the engine; return its URL when it is alive.

        Raises:
            RuntimeError: It could not be started, exited, or is not alive in time.
        """
        if not await asyncio.to_thread(Path(self._replica.checkpoint).is_dir):
            raise RuntimeError(
                f"the checkpoint folder {self._replica.checkpoint} is not on node {self._host}: copy it there, or share "
                f"it, under the same path"
            )
        with hold_port(self._host, self._job.base_port) as held:
            self._port = int(held.getsockname()[1])
            self._start()
            await self._until_alive()
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def _start(self) -> None:
        """Start the engine below a guard of its own.

        Raises:
            RuntimeError: It could not be started.
        """
        self._make_log()
        self._guard = subprocess.Popen(
            self._argv(),
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        guard_pid = self._next_line()
        engine_pid = self._next_line()
        # The process that was started has ended: it has left the guard behind.
        self._guard.wait()
        if not engine_pid.isdigit():
            raise RuntimeError(
                f"the engine could not be started on node {self._host}: {engine_pid}"
            )
        self._engine_pid = int(engine_pid)
        # It may have ended already.
        with contextlib.suppress(ProcessLookupError):
            self._guard_fd = os.pidfd_open(int(guard_pid))

    def _next_line(self) -> str:
        """Return the next line that the guard writes: its process id, then the engine's or why there is none."""
        assert self._guard is not None
        assert self._guard.stdout is not None
        return self._guard.stdout.readline().decode(errors="replace").strip()

    def _environment(self) -> dict[str, str]:
        """Return the engine's environment."""
        own = {**self._replica.env, "VLLM_API_KEY": self._api_key}
        environment = node_environment(os.environ, own, traced=self._job.traced)
        if not self._replica.across_nodes:
            return environment
        # vLLM's own Ray executor joins the cluster.
        for name, value in os.environ.items():
            if name.startswith("RAY_AUTH_"):
                environment[name] = value
        environment["RAY_ADDRESS"] = self._cluster
        environment["VLLM_HOST_IP"] = self._host
        # It is empty, as this actor has no GPUs of its own.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        return environment

    def _make_log(self) -> None:
        """Begin a new log, which only its owner may read; the last one is kept."""
        self._log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._log.exists():
            self._log.replace(self._log.with_suffix(".log.1"))
        self._log.touch(mode=0o600)

    def _argv(self) -> list[str]:
        """Return the arguments of the guard, which end with those of the engine."""
        guard = DETACHED.format(program=self._guard_program)
        address = ["--host", self._host, "--port", str(self._port)]
        engine = [sys.executable, "-c", self._engine_program, *address]
        return [
            sys.executable,
            "-I",
            "-S",
            "-c",
            guard,
            str(self._log),
            *engine,
            *self._replica.args,
        ]

    def _is_over(self, timeout_s: float = 0.0) -> bool:
        """Wait until the engine and all below it have ended; return whether they have."""
        if self._guard_fd is None:
            return True
        readable, _, _ = select.select([self._guard_fd], [], [], timeout_s)
        return bool(readable)

    async def _until_alive(self) -> None:
        deadline = time.monotonic() + self._job.start_timeout_s
        while not await asyncio.to_thread(is_healthy, self._host, self._port):
            if self._is_over():
                raise RuntimeError(self._end_in_words())
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"not healthy within {self._job.start_timeout_s:g} s; see {self._log} on node {self._host}"
                )
            await asyncio.sleep(POLL_S)

    async def ended(self) -> str:
        """Wait until the engine has ended, or has answered no health check for too long; return why, for people."""
        asked_at = time.monotonic()
        healthy_at = asked_at
        while not self._is_over():
            await asyncio.sleep(POLL_S)
            if time.monotonic() - asked_at < HEALTH_S:
                continue
            is_alive = await asyncio.to_thread(is_healthy, self._host, self._port)
            asked_at = time.monotonic()
            if is_alive:
                healthy_at = asked_at
            if asked_at - healthy_at > self._job.unreachable_s:
                await self.stop()
                return f"no answer to health checks for {self._job.unreachable_s:g} s; see {self._log} on node {self._host}"
        return self._end_in_words()

    def _end_in_words(self) -> str:
        return f"the engine exited{end_of(self._log, f' on node {self._host}')}"

    async def stop(self) -> None:
        """Send SIGTERM, wait for the grace time, then kill what is left."""
        guard = self._guard
        if guard is None or self._is_over():
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._engine_pid, signal.SIGTERM)
        await asyncio.to_thread(self._is_over, self._job.stop_grace_s)
        assert guard.stdin is not None
        # Then the guard kills what is left.
        guard.stdin.close()
        while not await asyncio.to_thread(self._is_over, POLL_S):
            pass
