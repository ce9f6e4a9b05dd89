"""Run an engine that is started here: start its process, serve, and start it again after each end.

An engine that was ready once is restarted when it exits, hangs or stops answering, unless that happens too often. One that
did not fit into memory is started with less. Any other that was never ready, or that the canary refuses, waits until an
operator restarts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from tiers.errors import CanaryRefusedError, EngineDiedError, ProbeError, TierError
from tiers.lifecycle import watching
from tiers.lifecycle.command import engine_argv, engine_environment
from tiers.lifecycle.engine import brief
from tiers.lifecycle.less_memory import ATTEMPTS, with_less
from tiers.lifecycle.process import LOG_LINES, EngineProcess, check_port_free
from tiers.lifecycle.unserved_format import why_not_served
from tiers.plan import kv_per_token
from tiers.spec import ReplicaStatus
from tiers.this_hardware import read_hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tiers.fleet import Fleet
    from tiers.lifecycle.engine import Engine
    from tiers.lifecycle.options import SupervisorOptions
    from tiers.lifecycle.readiness import Readiness
    from tiers.lifecycle.status_changes import StatusChanges
    from tiers.lifecycle.watching import Watcher
    from tiers.probe import EngineProbe
    from tiers.replica import Replica
    from tiers.spec import EngineLaunch

log = logging.getLogger(f"qarr.{__name__}")
# A process closes its connections before it exits: wait this long for the exit as the reason.
EXIT_NOTICE_S = 2.0
SETTLING = {ReplicaStatus.STARTING, ReplicaStatus.WARMING}


class OwnEngine:
    """One engine that is started here, over all its restarts.

    Args:
        engine: The supervisor's record of it.
        launch: What it is started with.
        probe: Asks the engine about itself.
        options: How engines are watched and stopped.
        changes: Marks replicas.
        readiness: Warms the engine up.
        watcher: Watches it while it serves.
        engines_before: Returns the engines that were added before this one.
    """

    def __init__(
        self,
        engine: Engine,
        launch: EngineLaunch,
        probe: EngineProbe,
        *,
        options: SupervisorOptions,
        changes: StatusChanges,
        readiness: Readiness,
        watcher: Watcher,
        engines_before: Callable[[Engine], Iterable[Engine]],
    ) -> None:
        self._engine = engine
        self._launch = launch
        self._probe = probe
        self._options = options
        self._changes = changes
        self._readiness = readiness
        self._watcher = watcher
        self._engines_before = engines_before

    @property
    def _fleet(self) -> Fleet:
        return self._changes.fleet

    @property
    def _replica(self) -> Replica:
        return self._engine.replica

    async def run(self) -> None:
        """Run the engine, and start it again after each end, until cancelled."""
        engine = self._engine
        while True:
            self._changes.mark(engine, ReplicaStatus.STARTING, engine.note)
            try:
                await self._run_process()
                engine.ended()
                engine.note = "as asked for"
            except Exception as error:  # noqa: BLE001  the watcher goes on after any error
                smaller_launch = self._with_less_memory()
                if smaller_launch is not None:
                    engine.ended()
                    self._launch = smaller_launch
                    continue
                explained = self._changes.explain(self._replica, error)
                engine.note = await self._wait_for_restart(
                    explained, ready_s=engine.ended()
                )

    async def _run_process(self) -> None:
        """Run the engine's process until a restart is asked for.

        Raises:
            TierError: It exited, did not become ready, or was stopped because it hung or stopped answering.
        """
        engine = self._engine
        engine.begun()
        if engine.process is not None:  # It was left over after an unexpected error.
            await engine.process.stop(self._options.stop_grace_s)
        process = await self._start_process()
        engine.process = process
        self._replica.update(pid=process.pid)
        life = asyncio.create_task(self._serve())
        death = asyncio.create_task(process.wait())
        restart_request = asyncio.create_task(engine.again.wait())
        tasks = (life, death, restart_request)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = life.exception() if life.done() else None
            if isinstance(error, ProbeError):
                await asyncio.wait({death}, timeout=EXIT_NOTICE_S)
            if death.done():
                raise process.died()
            life.cancel()
            await process.stop(self._options.stop_grace_s)
            if error is not None:
                raise error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_process(self) -> EngineProcess:
        """Start the process, once its port is free and earlier engines on its GPUs have settled."""
        launch = self._launch
        if launch.placement.gpus:
            await self._wait_for_earlier_engines()
        check_port_free(launch.host, launch.port)
        environment = engine_environment(launch, os.environ)
        log_path = self._options.log_path(self._replica.id)
        return await EngineProcess.start(
            engine_argv(launch), environment, log_path, launch.placement.cores
        )

    async def _wait_for_earlier_engines(self) -> None:
        """Wait until earlier engines on the same GPUs have started: vLLM measures free memory while it starts."""
        gpus = set(self._launch.placement.gpus)
        earlier = [
            engine.replica
            for engine in self._engines_before(self._engine)
            if engine.launch is not None
            and not gpus.isdisjoint(engine.launch.placement.gpus)
        ]
        while any(replica.state.status in SETTLING for replica in earlier):  # noqa: ASYNC110
            await asyncio.sleep(watching.POLL_S)

    async def _serve(self) -> None:
        """Warm the engine up whenever it becomes alive, and watch it, until cancelled.

        Raises:
            TierError: It is not usable, hangs, or stops answering.
        """
        engine = self._engine
        unreachable_s = self._options.watchdog.unreachable_s
        await self._wait_until_alive(
            self._options.start_timeout_s, "not healthy within"
        )
        while True:
            await self._readiness.warm(engine, self._probe)
            await self._watcher.watch(engine, self._probe)
            await self._wait_until_alive(
                unreachable_s, "no answer to health checks for"
            )

    async def _wait_until_alive(self, limit_s: float, missing: str) -> None:
        deadline = time.monotonic() + limit_s
        while not await self._probe.alive():
            if time.monotonic() > deadline:
                log_path = self._options.log_path(self._replica.id)
                raise EngineDiedError(f"{missing} {limit_s:g} s; see {log_path}")
            await asyncio.sleep(watching.POLL_S)

    def _with_less_memory(self) -> EngineLaunch | None:
        """Return what to start in the place of an engine that did not fit into memory; None: that was not the cause."""
        engine = self._engine
        launch = self._launch
        if engine.was_ready or engine.process is None or engine.lessened >= ATTEMPTS:
            return None
        log_lines = engine.process.last_log_lines(LOG_LINES)
        smaller = with_less(launch, log_lines, partial(kv_per_token, launch.tier))
        if smaller is None:
            return None
        engine.launch = smaller.launch
        engine.lessened += 1
        max_model_len = smaller.launch.tier.max_model_len
        if max_model_len < self._replica.spec.max_model_len:
            self._fleet.shorten(self._replica, max_model_len)
        if engine.less is None:
            engine.less = f"started with less: {smaller.why}"
        else:
            engine.less = f"{engine.less}; {smaller.why}"
        engine.note = engine.less
        log.warning("%s is %s", self._replica.id, engine.less)
        return smaller.launch

    async def _wait_for_restart(self, error: TierError, *, ready_s: float) -> str:
        """Wait until the engine is to be started again; return the reason for the restart."""
        engine = self._engine
        delay_s = None
        if engine.was_ready and not isinstance(error, CanaryRefusedError):
            delay_s = engine.restarts.exited(time.monotonic(), ready_s)
            detail = self._too_many_restarts(error)
        elif engine.less is not None and not engine.was_ready:
            detail = self._does_not_fit(error)
        elif not engine.was_ready and isinstance(error, EngineDiedError):
            detail = await self._never_started(error)
        else:
            detail = str(error)
        if delay_s is None:
            self._changes.mark(engine, ReplicaStatus.FAILED, detail)
            await engine.again.wait()
            engine.restarts.forget()
            return "as asked for"
        note = f"restart {engine.restarts.count} after: {brief(error)}"
        self._fleet.restarts[self._replica.spec.name] += 1
        self._changes.mark(engine, ReplicaStatus.STARTING, f"{note}; in {delay_s:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.again.wait(), delay_s)
        return note

    async def _never_started(self, error: EngineDiedError) -> str:
        """Return why an engine ended before it was ever ready: first of all if this hardware lacks its number format."""
        tier = self._launch.tier
        hardware = await asyncio.to_thread(read_hardware)
        obstacle = why_not_served(tier.name, tier.precision, hardware)
        if obstacle is None:
            return str(error)
        return f"{obstacle}. It {error}"

    def _does_not_fit(self, error: TierError) -> str:
        return (
            f"{self._engine.less}, but it still does not fit: free memory, lower "
            f"tiers.{self._replica.spec.name}.max_model_len or engine.cpu_kv_cache_gib, or run the tier elsewhere. "
            f"The last end: {error}"
        )

    def _too_many_restarts(self, error: TierError) -> str:
        watchdog = self._options.watchdog
        return (
            f"not started again after {watchdog.max_restarts} restarts within {watchdog.restart_window_s:g} s: mend "
            f"the cause, then 'qarr tiers restart {self._replica.id}'. The last end: {error}"
        )
