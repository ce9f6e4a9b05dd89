"""Watch an engine that runs elsewhere: warm it up whenever it becomes alive, and quarantine it if it is not sound.

An engine that the canary refuses, that hangs or is too slow gets no traffic until an operator resumes it, or until it
disappears and comes back, so that it was probably started again. Either way it is warmed up and compared anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from tiers.errors import CanaryRefusedError, EngineHungError, EngineSlowError
from tiers.lifecycle import watching
from tiers.spec import ReplicaStatus

if TYPE_CHECKING:
    from tiers.lifecycle.engine import Engine
    from tiers.lifecycle.readiness import Readiness
    from tiers.lifecycle.status_changes import StatusChanges
    from tiers.lifecycle.watching import Watcher
    from tiers.probe import EngineProbe

RETRY_PAUSE_S = 5.0  # before an unusable engine that runs elsewhere is tried again


class ElsewhereEngine:
    """One engine that runs elsewhere, from when it is named until it is removed.

    Args:
        engine: The supervisor's record of it.
        probe: Asks the engine about itself.
        changes: Marks replicas.
        readiness: Warms the engine up.
        watcher: Watches it while it serves.
    """

    def __init__(
        self,
        engine: Engine,
        probe: EngineProbe,
        *,
        changes: StatusChanges,
        readiness: Readiness,
        watcher: Watcher,
    ) -> None:
        self._engine = engine
        self._probe = probe
        self._changes = changes
        self._readiness = readiness
        self._watcher = watcher

    async def run(self) -> None:
        """Watch the engine until cancelled."""
        engine = self._engine
        while True:
            try:
                await self._serve_while_reachable()
            except (CanaryRefusedError, EngineHungError, EngineSlowError) as error:
                await self._quarantine(str(error))
            except Exception as error:  # noqa: BLE001  the watcher goes on after any error
                explained = self._changes.explain(engine.replica, error)
                self._changes.mark(engine, ReplicaStatus.FAILED, str(explained))
                await asyncio.sleep(RETRY_PAUSE_S)
            await asyncio.sleep(watching.POLL_S)

    async def _serve_while_reachable(self) -> None:
        ailment = await self._probe.ailment()
        if ailment is not None:
            self._changes.mark(self._engine, ReplicaStatus.UNREACHABLE, ailment)
            return
        await self._readiness.warm(self._engine, self._probe)
        await self._watcher.watch(self._engine, self._probe)

    async def _quarantine(self, why: str) -> None:
        """Keep traffic from the engine until an operator resumes it, or until it has been away."""
        engine = self._engine
        remedy = f"'qarr tiers resume {engine.replica.id}' checks it again, and so does a restart where it runs"
        self._changes.mark(engine, ReplicaStatus.QUARANTINED, f"{why}. {remedy}")
        missed = 0
        while missed < watching.MISSED_PROBES and not engine.again.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.again.wait(), watching.POLL_S)
            if await self._probe.alive():
                missed = 0
            else:
                missed += 1
        engine.begun()
