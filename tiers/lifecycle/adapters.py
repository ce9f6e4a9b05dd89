"""Load LoRA adapters into running engines, and unload them.

What was loaded here is loaded again after a restart of its engine, until it is unloaded or the router ends; adapters of the
settings are part of an engine's command line.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tiers.errors import NotPossibleError, TierError
from tiers.spec import ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Collection

    from tiers.lifecycle.engine import Engine
    from tiers.probe import EngineProbe
    from tiers.spec import Adapter, TierName

log = logging.getLogger(f"qarr.{__name__}")
ALIVE = {ReplicaStatus.READY, ReplicaStatus.DRAINING}


@dataclass(frozen=True, slots=True)
class AdapterResult:
    """What became of an adapter at one replica."""

    replica: str
    done: bool
    detail: str


class AdapterControl(Protocol):
    """What is needed of the supervisor."""

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Return all engines."""

    def probe(self, engine: Engine) -> EngineProbe:
        """Return what asks an engine about itself."""

    async def list_adapters(self, engine: Engine) -> None:
        """Read an engine's list of adapters, and note it."""


class AdapterLoader:
    """Loads and unloads adapters; one at a time, so that no two calls cross."""

    def __init__(self, control: AdapterControl) -> None:
        self._control = control
        self._lock = asyncio.Lock()

    async def load(
        self, adapter: Adapter, tiers: Collection[TierName]
    ) -> list[AdapterResult]:
        """Load an adapter into all engines of several tiers.

        Raises:
            NotPossibleError: No engine took it.
        """
        async with self._lock:
            asked = [
                engine
                for engine in self._control.engines
                if engine.replica.spec.name in tiers
            ]
            return _any_done(
                await asyncio.gather(*(self._load(engine, adapter) for engine in asked))
            )

    async def unload(self, name: str) -> list[AdapterResult]:
        """Unload an adapter from all engines that have it.

        Raises:
            NotPossibleError: No engine has it, or none could unload it.
        """
        async with self._lock:
            having = [
                e
                for e in self._control.engines
                if name in e.replica.spec.adapters or name in e.adapters
            ]
            return _any_done(
                await asyncio.gather(*(self._unload(engine, name) for engine in having))
            )

    async def restore(self, engine: Engine, offered: Collection[str]) -> bool:
        """Load what an engine that was started again has lost; return whether it had lost anything.

        Raises:
            ProbeError: It does not answer, or refuses.
        """
        lost = [
            adapter for name, adapter in engine.adapters.items() if name not in offered
        ]
        for adapter in lost:
            await self._control.probe(engine).load_adapter(adapter)
            log.info(
                "%s has loaded the adapter %s again", engine.replica.id, adapter.name
            )
        return bool(lost)

    async def _load(self, engine: Engine, adapter: Adapter) -> AdapterResult:
        replica = engine.replica
        launch = engine.launch
        if launch is not None and not launch.adapters.at_run_time:
            why = "was started without lora.at_run_time: set it, or name the adapter in lora.adapters, and restart"
            return AdapterResult(replica.id, done=False, detail=why)
        if adapter.name == replica.model or adapter.name in replica.spec.adapters:
            why = f"already has a model {adapter.name}: unload it first, or choose another name"
            return AdapterResult(replica.id, done=False, detail=why)
        if replica.state.status not in ALIVE:
            return AdapterResult(
                replica.id, done=False, detail=f"is {replica.state.status.value}"
            )
        try:
            await self._control.probe(engine).load_adapter(adapter)
            engine.adapters[adapter.name] = adapter
            await self._control.list_adapters(engine)
        except TierError as error:
            return AdapterResult(replica.id, done=False, detail=str(error))
        log.info("%s has loaded the adapter %s", replica.id, adapter.name)
        return AdapterResult(replica.id, done=True, detail="loaded")

    async def _unload(self, engine: Engine, name: str) -> AdapterResult:
        replica = engine.replica
        known = engine.adapters.pop(name, None)
        if replica.state.status not in ALIVE:
            return AdapterResult(
                replica.id,
                done=known is not None,
                detail=f"is {replica.state.status.value}, forgotten",
            )
        try:
            await self._control.probe(engine).unload_adapter(name)
            await self._control.list_adapters(engine)
        except TierError as error:
            return AdapterResult(replica.id, done=False, detail=str(error))
        log.info("%s has unloaded the adapter %s", replica.id, name)
        return AdapterResult(replica.id, done=True, detail="unloaded")


def _any_done(results: list[AdapterResult]) -> list[AdapterResult]:
    """Return the results, unless nothing was done at all.

    Raises:
        NotPossibleError: Nothing was done; says why at each replica.
    """
    if any(result.done for result in results):
        return results
    raise NotPossibleError(
        "; ".join(f"{r.replica}: {r.detail}" for r in results)
        or "no replica offers this adapter"
    )
