"""Start the engines, make them ready, watch them, stop them.

Each replica has one task that takes it through its life: starting, warming, ready, and whatever comes after. The tasks
only change the fleet's records; what is routed where is decided elsewhere, from snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx

from tiers.command import engine_argv, engine_environment
from tiers.errors import EngineDied, TierError, TokenizerMismatch
from tiers.fleet import Fleet, Replica
from tiers.probe import EngineProbe
from tiers.process import EngineProcess, check_port_free
from tiers.spec import EngineLaunch, ReplicaState, TierSpec
from tiers.warmup import WarmupPlan, measure_speed, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

log = logging.getLogger("qarr.tiers")
POLL_S = 0.5
SPEED_SAMPLES = 4  # measurements of an idle replica's speed
SPEED_PAUSE_S = 5.0  # after the first of them; twice as long after each further one
MISSED_PROBES = 3  # health checks in a row that must fail before a living process counts as unreachable


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """How engines are watched and stopped.

    Attributes:
        log_dir: Where engines write their logs, one file a replica.
        start_timeout_s: From process start to ``/health``.
        stop_grace_s: From SIGTERM to kill.
        external_api_key: Key for engines given by URL.
        warmup: What an engine must answer before it is ready.
    """

    log_dir: Path
    start_timeout_s: float = 600.0
    stop_grace_s: float = 10.0
    external_api_key: str = ""
    warmup: WarmupPlan = field(default_factory=WarmupPlan)


class Supervisor:
    """Owns the fleet's engines from start to stop. Use ``start``, then ``stop`` in a ``finally``."""

    def __init__(
        self,
        fleet: Fleet,
        options: SupervisorOptions,
        on_change: Callable[[Replica], None] = lambda _replica: None,
    ) -> None:
        self._fleet, self._options, self._on_change = fleet, options, on_change
        self._client = httpx.AsyncClient(timeout=10.0, trust_env=False)
        self._processes: dict[str, EngineProcess] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._tokens_digests: dict[str, str] = {}
        self._stopping = False

    def start(self, launches: Sequence[EngineLaunch], external: Sequence[TierSpec] = ()) -> None:
        """Begin to start engines here, and to watch those given by URL. Returns at once.

        Raises:
            PortInUse: An engine's port is taken; nothing was started.
        """
        for launch in launches:
            check_port_free(launch.host, launch.port)
        for launch in launches:
            replica = Replica(
                id=f"{launch.tier.name}-{self._count(launch.tier)}",
                spec=launch.tier,
                url=launch.url,
                api_key=launch.api_key,
                model=launch.served_model,
            )
            self._watch(self._fleet.add(replica), self._run_here(replica, launch))
        self._tasks.append(asyncio.create_task(self._measure_when_idle(), name="measure speeds"))
        for spec in external:
            for url in spec.urls:
                replica = Replica(
                    id=f"{spec.name}-{self._count(spec)}",
                    spec=spec,
                    url=url.rstrip("/"),
                    api_key=self._options.external_api_key,
                    model="",
                )
                self._watch(self._fleet.add(replica), self._run_elsewhere(replica))

    async def stop(self) -> None:
        """Stop watching and end every engine that was started here."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(p.stop(self._options.stop_grace_s) for p in self._processes.values()))
        for replica in self._fleet.replicas:
            replica.mark(ReplicaState.STOPPED)
        await self._client.aclose()

    def log_path(self, replica: Replica) -> Path:
        """Return where a replica's engine writes its log."""
        return self._options.log_dir / f"{replica.id}.log"

    def _count(self, spec: TierSpec) -> int:
        return sum(r.spec.name is spec.name for r in self._fleet.replicas)

    def _watch(self, replica: Replica, life: object) -> None:
        async def guarded() -> None:
            try:
                await life  # type: ignore[misc]
            except TierError as error:
                self._mark(replica, ReplicaState.FAILED, str(error))

        self._tasks.append(asyncio.create_task(guarded(), name=f"watch {replica.id}"))

    def _mark(self, replica: Replica, state: ReplicaState, detail: str | None = None) -> None:
        if replica.state is state and replica.detail == detail:
            return
        replica.mark(state, detail)
        level = logging.WARNING if state in {ReplicaState.FAILED, ReplicaState.UNREACHABLE} else logging.INFO
        log.log(level, "%s is %s%s", replica.id, state.value, f": {detail}" if detail else "")
        self._on_change(replica)

    async def _run_here(self, replica: Replica, launch: EngineLaunch) -> None:
        """Take an engine of our own from start to exit."""
        self._mark(replica, ReplicaState.STARTING)
        if launch.placement.gpu is not None:
            await self._until_earlier_settled(replica)
        env = engine_environment(launch, os.environ)
        process = await EngineProcess.start(engine_argv(launch), env, self.log_path(replica), launch.placement.cores)
        self._processes[replica.id] = process
        replica.pid = process.pid
        life = asyncio.create_task(self._serve(replica))
        death = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({life, death}, return_when=asyncio.FIRST_COMPLETED)
            if life.done() and life.exception() is not None:
                self._mark(replica, ReplicaState.FAILED, str(life.exception()))
                await process.stop(self._options.stop_grace_s)
                return
            replica.pid = None
            raise process.died()
        finally:
            for task in (life, death):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, TierError):
                    await task

    async def _serve(self, replica: Replica) -> None:
        """Warm the engine whenever it is (again) alive, and keep its gauges fresh, until cancelled."""
        probe = self._probe(replica)
        await self._until_alive(replica, probe, self._options.start_timeout_s)
        while True:
            await self._warm(replica, probe)
            await self._poll(replica, probe)
            await self._until_alive(replica, probe, float("inf"))

    async def _until_earlier_settled(self, replica: Replica) -> None:
        """Wait for the engines before this one: vLLM measures a GPU's free memory while it starts."""
        earlier = self._fleet.replicas[: self._fleet.replicas.index(replica)]
        while any(r.state in {ReplicaState.STARTING, ReplicaState.WARMING} for r in earlier):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    async def _until_alive(self, replica: Replica, probe: EngineProbe, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not await probe.alive():
            if time.monotonic() > deadline:
                raise EngineDied(f"not healthy within {limit_s:g} s; see {self.log_path(replica)}")
            await asyncio.sleep(POLL_S)

    async def _run_elsewhere(self, replica: Replica) -> None:
        """Watch an engine that somebody else runs: warm it whenever it (re)appears."""
        probe = self._probe(replica)
        while True:
            if await probe.alive():
                try:
                    await self._warm(replica, probe)
                    await self._poll(replica, probe)
                except TierError as error:
                    self._mark(replica, ReplicaState.FAILED, str(error))
                    await asyncio.sleep(10 * POLL_S)
            else:
                self._mark(replica, ReplicaState.UNREACHABLE, f"{replica.url}/health does not answer")
            await asyncio.sleep(POLL_S)

    async def _warm(self, replica: Replica, probe: EngineProbe) -> None:
        self._mark(replica, ReplicaState.WARMING)
        replica.model, length = await probe.model()
        if length < replica.spec.max_model_len:
            raise EngineDied(
                f"{replica.url} has a context of {length} tokens, tier {replica.spec.name} promises "
                f"{replica.spec.max_model_len}: set tiers.{replica.spec.name}.max_model_len"
            )
        report = await warm_up(probe, replica.model, self._options.warmup)
        self._check_tokens(replica, report.tokens_digest)
        replica.takes_priority = report.takes_priority
        replica.fingerprint = report.fingerprint
        self._fleet.note_template(report.template)
        self._mark(replica, ReplicaState.READY)

    def _check_tokens(self, replica: Replica, digest: str) -> None:
        for other, known in self._tokens_digests.items():
            if other != replica.id and known != digest:
                raise TokenizerMismatch(
                    f"{replica.id} reads prompts as other tokens than {other} (token digests {digest[:16]} and "
                    f"{known[:16]}): every tier must serve the same model with the same tokenizer and chat template"
                )
        self._tokens_digests[replica.id] = digest

    async def _poll(self, replica: Replica, probe: EngineProbe) -> None:
        """Read the gauges until the engine stops answering."""
        missed = 0
        while missed < MISSED_PROBES:
            await asyncio.sleep(POLL_S)
            try:
                replica.note_gauges(await probe.gauges())
                missed = 0
            except TierError:
                missed += 1
        self._mark(replica, ReplicaState.UNREACHABLE, f"{replica.url} answers no probes")

    async def _measure_when_idle(self) -> None:
        """Measure each ready replica's speed, when no engine is starting or serving: they may share a machine.

        The fastest of a few measurements some time apart counts: whatever else the machine does can only slow them down.
        """
        taken: dict[str, tuple[int, float]] = {}  # by replica: measurements, and when the next one is due
        while True:
            await asyncio.sleep(POLL_S)
            ready = [r for r in self._fleet.replicas if r.state is ReplicaState.READY]
            for replica in ready:
                if replica.speed is None:
                    taken.pop(replica.id, None)
                    if (profiled := self._fleet.speeds.get(replica.spec.name)) is not None:
                        replica.measured(profiled)
            for replica in ready:
                count, due = taken.get(replica.id, (0, 0.0))
                known = replica.speed is not None and (replica.speed.profiled or count == SPEED_SAMPLES)
                if known or time.monotonic() < due or not self._quiet():
                    continue
                if await self._measure(replica):
                    taken[replica.id] = count + 1, time.monotonic() + SPEED_PAUSE_S * 2**count

    async def _measure(self, replica: Replica) -> bool:
        """Measure one idle replica; tell whether nothing came in between, without which the figure is not its own."""
        before = self._requests()
        try:
            speed = await measure_speed(self._probe(replica), replica.model, self._options.warmup)
        except TierError:
            return False
        if replica.state is not ReplicaState.READY or self._requests() != before:
            return False
        replica.measured(speed if replica.speed is None else replica.speed.fastest(speed))
        return True

    def _quiet(self) -> bool:
        busy = {ReplicaState.STARTING, ReplicaState.WARMING}
        return not any(r.in_flight or r.state in busy for r in self._fleet.replicas)

    def _requests(self) -> int:
        return sum(r.served + r.failed + r.in_flight for r in self._fleet.replicas)

    def _probe(self, replica: Replica) -> EngineProbe:
        return EngineProbe(self._client, replica.url, replica.api_key)
