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

    from tiers.cluster.job import Job, WantedReplica

POLL_S = 0.2
HEALTH_S = 2.0  # between two health checks
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
    for port in range(first, LAST_PORT + 1):
        held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            # without SO_REUSEADDR: two actors never hold the same port
            held.bind((host, port))
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held
    raise RuntimeError(f"no port from {first} on is free on {host}")


def is_healthy(host: str, port: int) -> bool:
    """Ask an engine whether it is alive. No proxy is asked."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200  # noqa: PLR2004
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def node_environment(
    node: Mapping[str, str], own: Mapping[str, str], *, traced: bool
) -> dict[str, str]:
    """Return an engine's environment on a node: the node's without Ray's variables and QARR's, and the engine's own."""
    kept = inherited(node, traced=traced).items()
    kept_here = {
        name: value
        for name, value in kept
        if not name.startswith("RAY_") and name != "PYTHONBREAKPOINT"
    }
    return kept_here | dict(own)


class EngineActor:
    """One engine on the node of this actor.

    Args:
        replica: What to start.
        job: What all engines have in common.
        programs: Source of the guard and of the engine's main program.
        api_key: The engine's key.
    """

    def __init__(
        self, replica: WantedReplica, job: Job, programs: tuple[str, str], api_key: str
    ) -> None:
        import ray  # noqa: PLC0415  where the actor runs

        self._replica, self._job, self._programs, self._key = (
            replica,
            job,
            programs,
            api_key,
        )
        self._host, self._cluster = (
            str(ray.util.get_node_ip_address()),
            str(ray.get_runtime_context().gcs_address),
        )
        self._log = Path(job.log_dir) / f"{replica.id}.log"
        # its pipes; the guard itself is no child of the actor
        self._guard: subprocess.Popen[bytes] | None = None
        self._guard_fd = -1
        self._engine = self._port = 0

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
        guard, engine_main = self._programs
        own = {**self._replica.env, "VLLM_API_KEY": self._key}
        env = node_environment(os.environ, own, traced=self._job.traced)
        if self._replica.across_nodes:
            env |= {
                name: value
                for name, value in os.environ.items()
                if name.startswith("RAY_AUTH_")
            }
            env |= {"RAY_ADDRESS": self._cluster, "VLLM_HOST_IP": self._host}
            # empty, as this actor has none of its own
            env.pop("CUDA_VISIBLE_DEVICES", None)
        self._log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._log.exists():
            self._log.replace(self._log.with_suffix(".log.1"))
        self._log.touch(mode=0o600)
        engine = [
            sys.executable,
            "-c",
            engine_main,
            "--host",
            self._host,
            "--port",
            str(self._port),
            *self._replica.args,
        ]
        self._guard = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                DETACHED.format(program=guard),
                str(self._log),
                *engine,
            ],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._guard.stdout is not None
        pid, said = (
            self._guard.stdout.readline().decode(errors="replace").strip()
            for _ in range(2)
        )
        self._guard.wait()
        if not said.isdigit():
            raise RuntimeError(
                f"the engine could not be started on node {self._host}: {said}"
            )
        self._engine = int(said)
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._guard_fd = os.pidfd_open(int(pid))

    def _over(self, timeout_s: float = 0.0) -> bool:
        """Wait until the engine and all below it have ended; return whether they have."""
        return self._guard_fd < 0 or bool(
            select.select([self._guard_fd], [], [], timeout_s)[0]
        )

    async def _until_alive(self) -> None:
        deadline = time.monotonic() + self._job.start_timeout_s
        while not await asyncio.to_thread(is_healthy, self._host, self._port):
            if self._over():
                raise RuntimeError(self._why())
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"not healthy within {self._job.start_timeout_s:g} s; see {self._log} on node {self._host}"
                )
            await asyncio.sleep(POLL_S)

    async def ended(self) -> str:
        """Wait until the engine has ended, or has answered no health check for too long; return why, for people."""
        heard = asked = time.monotonic()
        while not self._over():
            await asyncio.sleep(POLL_S)
            if time.monotonic() - asked < HEALTH_S:
                continue
            healthy, asked = (
                await asyncio.to_thread(is_healthy, self._host, self._port),
                time.monotonic(),
            )
            heard = asked if healthy else heard
            if asked - heard > self._job.unreachable_s:
                await self.stop()
                return f"no answer to health checks for {self._job.unreachable_s:g} s; see {self._log} on node {self._host}"
        return self._why()

    def _why(self) -> str:
        return f"the engine exited{end_of(self._log, f' on node {self._host}')}"

    async def stop(self) -> None:
        """Send SIGTERM, wait for the grace time, then kill what is left."""
        guard = self._guard
        if guard is None or self._over():
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._engine, signal.SIGTERM)
        await asyncio.to_thread(self._over, self._job.stop_grace_s)
        assert guard.stdin is not None
        guard.stdin.close()  # the guard kills what is left
        while not await asyncio.to_thread(self._over, POLL_S):
            pass
