"""Own the fleet's engines: start them, warm them up, watch them, restart them, stop them.

Each replica has one task for its whole life: starting, warming, ready, and what follows (``own_engine``,
``elsewhere_engine``). The tasks only change the fleet's records; routing decides elsewhere, from snapshots.

A task ends only by cancellation. A failure becomes the replica's detail, and the task goes on: it restarts its own
engine, or tries one that runs elsewhere again after a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from tiers.background import lasting
from tiers.engine_client import EngineClient
from tiers.errors import PortInUseError, UnknownReplicaError
from tiers.lifecycle.discovery import Discovery
from tiers.lifecycle.elsewhere_engine import ElsewhereEngine
from tiers.lifecycle.engine import Engine
from tiers.lifecycle.gate import Gate, GateMode
from tiers.lifecycle.idle_speed import IdleSpeed
from tiers.lifecycle.operations import Operations
from tiers.lifecycle.own_engine import OwnEngine
from tiers.lifecycle.process import check_port_free
from tiers.lifecycle.processors import watch_processors
from tiers.lifecycle.readiness import Readiness
from tiers.lifecycle.status_changes import StatusChanges
from tiers.lifecycle.watching import Watcher
from tiers.live_speed import LiveSpeed
from tiers.preparing import ENGINE_START_S
from tiers.probe import EngineProbe
from tiers.replica import Replica
from tiers.spec import ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from pathlib import Path
    from typing import Any

    import httpx

    from tiers.fleet import Fleet
    from tiers.lifecycle.options import SupervisorOptions
    from tiers.spec import EngineLaunch, TierSpec

    Work = Callable[[], Coroutine[Any, Any, None]]

log = logging.getLogger(f"qarr.{__name__}")
LAST_PORT = 65535
PROBE_TIMEOUT_S = 10.0


class Supervisor:
    """Owns the fleet's engines from ``start`` to ``stop``, which belongs in a ``finally``.

    Args:
        fleet: The fleet.
        options: How its engines are watched and stopped.
        on_change: Called when a replica changes its state.
        transport: For probes; None: httpx's own, which takes much more time where there are many engines.

    Attributes:
        changes: Marks replicas, and tells observers.
        operations: What operators may do to replicas.
    """

    def __init__(
        self,
        fleet: Fleet,
        options: SupervisorOptions,
        on_change: Callable[[Replica], None] = lambda _replica: None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.fleet = fleet
        self._options = options
        self._client = EngineClient(PROBE_TIMEOUT_S, transport)
        self._engines: dict[str, Engine] = {}
        # by tier, so that no id is used twice
        self._replicas_made: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []
        self.changes = StatusChanges(fleet, on_change)
        self._idle_speed = IdleSpeed(fleet, options.warmup, self._probe)
        self.operations = Operations(self, options.operations)
        self._readiness = Readiness(
            options,
            self.changes,
            self._idle_speed,
            self.operations.adapters,
            self._make_gate(options),
        )
        self._watcher = Watcher(options.watchdog, self.changes, self._readiness)

    def _make_gate(self, options: SupervisorOptions) -> Gate | None:
        canary = options.canary
        if canary is None or not canary.tolerance or options.gate is GateMode.OFF:
            return None
        return Gate(
            options.gate,
            canary,
            fleet=self.fleet,
            engines=lambda: self.engines,
            probe_of=self._probe,
            log_path=options.log_path,
        )

    def start(
        self, launches: Sequence[EngineLaunch], external: Sequence[TierSpec] = ()
    ) -> None:
        """Begin to start engines here, and to watch those that run elsewhere. Return at once.

        Args:
            launches: Engines to start here.
            external: Every tier, as its engines elsewhere have it, with their URLs in the settings.

        Raises:
            PortInUseError: An engine's port is taken; nothing was started.
        """
        self.launch(launches)
        roster = self.operations.roster
        roster.begin(external)
        works: list[tuple[Work, str]] = [
            (self._idle_speed.run, "measuring speeds"),
            (self.operations.run, "recycling"),
            (self._watch_processors, "watching processors"),
            (roster.run, "adding engines"),
            (LiveSpeed(self.fleet).run, "learning speeds"),
            *Discovery(self.fleet, roster, self._options.discovery).works(),
        ]
        for work, name in works:
            self._tasks.append(asyncio.create_task(lasting(work, name), name=name))

    def launch(self, launches: Sequence[EngineLaunch]) -> None:
        """Begin to start engines here. Return at once.

        Raises:
            PortInUseError: An engine's port is taken; nothing was started.
        """
        for launch in launches:
            check_port_free(launch.host, launch.port)
        for launch in launches:
            # On a GPU it waits for the others there, and the first start compiles kernels: 143 s on an H200.
            expected_start_s = None if launch.placement.gpus else ENGINE_START_S
            self.fleet.preparations.starting(launch.tier.name, expected_start_s)
            self._add_own(launch)

    async def stop(self) -> None:
        """Stop watching, and stop every engine that was started here."""
        await self.operations.stop()
        tasks = [
            *self._tasks,
            *(
                engine.task
                for engine in self._engines.values()
                if engine.task is not None
            ),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        processes = [
            engine.process
            for engine in self._engines.values()
            if engine.process is not None
        ]
        stopping = (process.stop(self._options.stop_grace_s) for process in processes)
        for error in await asyncio.gather(*stopping, return_exceptions=True):
            if error is not None:
                log.error("an engine could not be stopped", exc_info=error)
        for replica in self.fleet.replicas:
            replica.mark(ReplicaStatus.STOPPED)
        await self._client.aclose()

    def log_path(self, replica: Replica) -> Path:
        """Return the path of the log of a replica's engine."""
        return self._options.log_path(replica.id)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Return all engines."""
        return tuple(self._engines.values())

    def engine(self, replica_id: str) -> Engine:
        """Return one replica's engine.

        Raises:
            UnknownReplicaError: No replica has this id.
        """
        if replica_id not in self._engines:
            raise UnknownReplicaError(
                f"there is no replica {replica_id[:100]!r}: {', '.join(self._engines)}"
            )
        return self._engines[replica_id]

    def hold(self, engine: Engine, why: str) -> None:
        """Send an engine no new requests; open ones go on."""
        engine.held = why
        if engine.replica.state.status is ReplicaStatus.READY:
            self.changes.mark(engine, ReplicaStatus.DRAINING, why)

    def resume(self, engine: Engine) -> None:
        """Send an engine requests again, as soon as it is ready."""
        engine.held = None
        status = engine.replica.state.status
        if status is ReplicaStatus.DRAINING:
            self.changes.mark(engine, ReplicaStatus.READY, engine.remark)
        elif status is ReplicaStatus.QUARANTINED:
            self.changes.mark(
                engine, ReplicaStatus.WARMING, "checked again, as an operator asked"
            )
            engine.again.set()

    def start_beside(self, engine: Engine) -> Engine:
        """Start another engine with the same configuration, but with a port and an id of its own.

        Raises:
            PortInUseError: No port is free.
        """
        assert engine.launch is not None
        launch = replace(
            engine.launch,
            port=self._free_port(engine.launch),
            api_key=secrets.token_urlsafe(24),
        )
        successor = self._add_own(
            launch, note=f"takes the place of {engine.replica.id}"
        )
        successor.adapters = dict(engine.adapters)
        return successor

    async def retire(self, engine: Engine) -> None:
        """Stop an engine for good, and remove its replica."""
        replica = engine.replica
        if engine.task is not None:
            engine.task.cancel()
            await asyncio.gather(engine.task, return_exceptions=True)
        if engine.process is not None:
            await engine.process.stop(self._options.stop_grace_s)
        self.changes.mark(engine, ReplicaStatus.STOPPED)
        self.fleet.remove(replica)
        self._engines.pop(replica.id, None)
        self._readiness.forget(replica.id)
        if engine.launch is None and self._options.canary is not None:
            self._options.canary.forget_engine(replica.spec.name, replica.url)

    def add_elsewhere(self, spec: TierSpec, url: str, source: str) -> Engine:
        """Begin to watch an engine that runs elsewhere.

        Raises:
            NotPossibleError: The fleet has no space for it.
        """
        replica = Replica(
            id=self._next_id(spec),
            spec=spec,
            url=url,
            api_key=self._options.external_api_key,
            model="",
            source=source,
        )
        engine = self._enter(replica, None)
        elsewhere = ElsewhereEngine(
            engine,
            self.probe(engine),
            changes=self.changes,
            readiness=self._readiness,
            watcher=self._watcher,
        )
        self._run(engine, elsewhere.run)
        return engine

    def _add_own(self, launch: EngineLaunch, note: str | None = None) -> Engine:
        """Begin to start an engine here; ``note`` says why, for people."""
        spec = launch.tier
        replica = Replica(
            id=self._next_id(spec),
            spec=spec,
            url=launch.url,
            api_key=launch.api_key,
            model=launch.served_model,
        )
        engine = self._enter(replica, launch, note)
        own = OwnEngine(
            engine,
            launch,
            self.probe(engine),
            options=self._options,
            changes=self.changes,
            readiness=self._readiness,
            watcher=self._watcher,
            engines_before=self._engines_before,
        )
        self._run(engine, own.run)
        return engine

    def _next_id(self, spec: TierSpec) -> str:
        return f"{spec.name}-{self._replicas_made[spec.name]}"

    def _enter(
        self, replica: Replica, launch: EngineLaunch | None, note: str | None = None
    ) -> Engine:
        """Add a replica to the fleet; its number counts once the fleet has taken it."""
        engine = Engine(
            self.fleet.add(replica), launch, self._options.watchdog, note=note
        )
        self._replicas_made[replica.spec.name] += 1
        self._engines[replica.id] = engine
        return engine

    def _run(self, engine: Engine, life: Work) -> None:
        name = f"watching {engine.replica.id}"
        engine.task = asyncio.create_task(lasting(life, name), name=name)

    def _engines_before(self, engine: Engine) -> Iterator[Engine]:
        return takewhile(lambda earlier: earlier is not engine, self._engines.values())

    def _free_port(self, launch: EngineLaunch) -> int:
        used_ports = {
            engine.launch.port
            for engine in self._engines.values()
            if engine.launch is not None
        }
        for port in range(min(used_ports), LAST_PORT):
            if port not in used_ports:
                with contextlib.suppress(PortInUseError):
                    check_port_free(launch.host, port)
                    return port
        raise PortInUseError(
            f"no port from {min(used_ports)} on is free on {launch.host}"
        )

    async def _watch_processors(self) -> None:
        await watch_processors(lambda: self.engines, self.changes)

    def probe(self, engine: Engine) -> EngineProbe:
        """Return what asks an engine about itself."""
        return self._probe(engine.replica)

    async def list_adapters(self, engine: Engine) -> None:
        """Read an engine's list of adapters, and note it."""
        model = await self.probe(engine).model()
        self._readiness.note_adapters(engine.replica, model.adapters)

    def _probe(self, replica: Replica) -> EngineProbe:
        return EngineProbe(self._client, replica.url, replica.api_key)
