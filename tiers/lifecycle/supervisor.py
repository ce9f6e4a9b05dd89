"""Start the engines, warm them up, watch them, restart them, stop them.

Each replica has one task for its whole life: starting, warming, ready, and what follows. The tasks only change the
fleet's records; routing decides elsewhere, from snapshots. An engine that was started here and was ready once is
restarted when it exits, hangs or stops answering. One that was never ready, or that the canary refuses, is not.

An engine that runs elsewhere, and is refused by the canary, hangs or is too slow, is quarantined: it gets no traffic until
an operator resumes it, or it was away, so that it was probably started again. Either way it is warmed up and compared anew.

A task ends only by cancellation. A failure becomes the replica's detail, and the task goes on: it restarts its own
engine, or tries one that runs elsewhere again after a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import httpx

from tiers.background import Faults, lasting
from tiers.checkpoints.precision import root_precision, told_precision
from tiers.errors import (
    CanaryRefusedError,
    EngineDiedError,
    EngineError,
    EngineHungError,
    EngineSlowError,
    NoScoresError,
    PortInUseError,
    ProbeError,
    TierError,
    TokenizerMismatchError,
    UnknownReplicaError,
)
from tiers.lifecycle.command import engine_argv, engine_environment
from tiers.lifecycle.discovery import Discovery, DiscoveryOptions
from tiers.lifecycle.engine import Engine, brief
from tiers.lifecycle.idle_speed import IdleSpeed
from tiers.lifecycle.less_memory import ATTEMPTS, with_less
from tiers.lifecycle.likelihood import score_engine
from tiers.lifecycle.operations import OperationOptions, Operations
from tiers.lifecycle.process import LOG_LINES, EngineProcess, check_port_free, selected_kernels
from tiers.lifecycle.warmup import WarmupPlan, check_answer, warm_up
from tiers.lifecycle.watchdog import WatchdogOptions, hangs, off_by
from tiers.live_speed import LiveSpeed
from tiers.plan import kv_per_token
from tiers.preparing import ENGINE_START_S
from tiers.probe import EngineProbe
from tiers.replica import Replica
from tiers.spec import UNKNOWN, EngineLaunch, ReplicaStatus, TierName, TierSpec
from tiers.throttling import read_cpu, read_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tiers.fleet import Fleet
    from tiers.lifecycle.canary import Canary
    from tiers.lifecycle.likelihood import EngineScores
    from tiers.probe import Counters

log = logging.getLogger(f"qarr.{__name__}")
POLL_S = 0.5
MISSED = "it does not answer health checks"
MISSED_PROBES = 3  # consecutive health checks that must fail before a running process counts as unreachable
EXIT_NOTICE_S = 2.0  # a process closes its connections before it exits: wait this long for the exit as the reason
ELSEWHERE_PAUSE_S = 5.0  # before an unusable engine that runs elsewhere is tried again
LAST_PORT = 65535
PROCESSORS_S = 10.0  # between two looks at what slows processors down
LISTED_S = 5.0  # between two looks at what an engine lists: others may load adapters, or replace it by another
SLOW_WARM_UP_S = 30.0  # Two cores that also make a checkpoint warm an engine in 15 s.
MUCH_SLOWER = 5.0  # A token takes so many times tier precise's. Engines that warm side by side differ by up to three.
MIN_TOKEN_MS = 0.01
WORN_S = 60.0  # the finding that an engine is too slow expires after this


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """How engines are watched and stopped.

    Attributes:
        log_dir: Folder of the engines' logs: one file per replica, and one of the previous start.
        start_timeout_s: From process start to ``/health``.
        stop_grace_s: From SIGTERM to SIGKILL.
        external_api_key: Key for engines given by URL.
        warmup: What an engine must answer before it is ready.
        watchdog: When an engine is restarted.
        operations: How engines are drained and recycled.
        canary: Compares what engines compute with their references; None: no comparison.
        discovery: Where engines that come and go are named.
    """

    log_dir: Path
    start_timeout_s: float = 600.0
    stop_grace_s: float = 10.0
    external_api_key: str = ""
    warmup: WarmupPlan = field(default_factory=WarmupPlan)
    watchdog: WatchdogOptions = field(default_factory=WatchdogOptions)
    operations: OperationOptions = field(default_factory=OperationOptions)
    canary: Canary | None = None
    discovery: DiscoveryOptions = field(default_factory=DiscoveryOptions)


class Supervisor:
    """Owns the fleet's engines from ``start`` to ``stop``, which belongs in a ``finally``.

    Args:
        fleet: The fleet.
        options: How its engines are watched and stopped.
        on_change: Called when a replica changes its state.
        transport: For probes; None: httpx's own, which takes much more time where there are many engines.

    Attributes:
        operations: What operators may do to replicas.
    """

    def __init__(
        self,
        fleet: Fleet,
        options: SupervisorOptions,
        on_change: Callable[[Replica], None] = lambda _replica: None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.fleet, self._options, self._on_change = fleet, options, on_change
        self._client = httpx.AsyncClient(timeout=10.0, trust_env=False, transport=transport)
        self._engines: dict[str, Engine] = {}
        self._made: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []
        self._tokens_digests: dict[str, str] = {}
        self._precise_scores: EngineScores | None = None
        self._faults = Faults()
        self._idle_speed = IdleSpeed(fleet, options.warmup, self._probe)
        self.operations = Operations(self, options.operations)

    def start(self, launches: Sequence[EngineLaunch], external: Sequence[TierSpec] = ()) -> None:
        """Begin to start engines here, and to watch those that run elsewhere. Return at once.

        Args:
            launches: Engines to start here.
            external: Every tier, as its engines elsewhere have it, with their URLs in the settings.

        Raises:
            PortInUseError: An engine's port is taken; nothing was started.
        """
        self.launch(launches)
        works = [(self._idle_speed.run, "measuring speeds"), (self.operations.run, "recycling")]
        works += [(self._watch_processors, "watching processors"), (self.operations.roster.run, "adding engines")]
        works.append((LiveSpeed(self.fleet).run, "learning speeds"))
        self.operations.roster.begin(external)
        works += Discovery(self.fleet, self.operations.roster, self._options.discovery).works()
        self._tasks += [asyncio.create_task(lasting(work, name), name=name) for work, name in works]

    def launch(self, launches: Sequence[EngineLaunch]) -> None:
        """Begin to start engines here. Return at once.

        Raises:
            PortInUseError: An engine's port is taken; nothing was started.
        """
        for launch in launches:
            check_port_free(launch.host, launch.port)
        for launch in launches:
            # On a GPU it waits for the others there, and the first start compiles kernels: 143 s on an H200.
            takes_s = None if launch.placement.gpus else ENGINE_START_S
            self.fleet.preparations.starting(launch.tier.name, takes_s)
            self._add(launch.tier, launch.url, launch)

    async def stop(self) -> None:
        """Stop watching, and stop every engine that was started here."""
        await self.operations.stop()
        tasks = [*self._tasks, *(e.task for e in self._engines.values() if e.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        processes = [e.process for e in self._engines.values() if e.process is not None]
        stopping = (process.stop(self._options.stop_grace_s) for process in processes)
        for error in await asyncio.gather(*stopping, return_exceptions=True):
            if error is not None:
                log.error("an engine could not be stopped", exc_info=error)
        for replica in self.fleet.replicas:
            replica.mark(ReplicaStatus.STOPPED)
        await self._client.aclose()

    def log_path(self, replica: Replica) -> Path:
        """Return the path of the log of a replica's engine."""
        return self._options.log_dir / f"{replica.id}.log"

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
            raise UnknownReplicaError(f"there is no replica {replica_id[:100]!r}: {', '.join(self._engines)}")
        return self._engines[replica_id]

    def hold(self, engine: Engine, why: str) -> None:
        """Send an engine no new requests; open ones go on."""
        engine.held = why
        if engine.replica.state.status is ReplicaStatus.READY:
            self._mark(engine.replica, ReplicaStatus.DRAINING, why)

    def resume(self, engine: Engine) -> None:
        """Send an engine requests again, as soon as it is ready."""
        engine.held = None
        if engine.replica.state.status is ReplicaStatus.DRAINING:
            self._mark(engine.replica, ReplicaStatus.READY, engine.remark)
        elif engine.replica.state.status is ReplicaStatus.QUARANTINED:
            self._mark(engine.replica, ReplicaStatus.WARMING, "checked again, as an operator asked")
            engine.again.set()

    def start_beside(self, engine: Engine) -> Engine:
        """Start another engine with the same configuration, but with a port and an id of its own.

        Raises:
            PortInUseError: No port is free.
        """
        assert engine.launch is not None
        launch = replace(engine.launch, port=self._free_port(engine.launch), api_key=secrets.token_urlsafe(24))
        new = self._add(launch.tier, launch.url, launch, note=f"takes the place of {engine.replica.id}")
        new.adapters = dict(engine.adapters)
        return new

    async def retire(self, engine: Engine) -> None:
        """Stop an engine for good, and remove its replica."""
        if engine.task is not None:
            engine.task.cancel()
            await asyncio.gather(engine.task, return_exceptions=True)
        if engine.process is not None:
            await engine.process.stop(self._options.stop_grace_s)
        self._mark(engine.replica, ReplicaStatus.STOPPED)
        self.fleet.remove(engine.replica)
        self._engines.pop(engine.replica.id, None)
        self._tokens_digests.pop(engine.replica.id, None)
        if engine.launch is None and self._options.canary is not None:
            self._options.canary.forget_engine(engine.replica.spec.name, engine.replica.url)

    def add_elsewhere(self, spec: TierSpec, url: str, source: str) -> Engine:
        """Begin to watch an engine that runs elsewhere.

        Raises:
            NotPossibleError: The fleet has no space for it.
        """
        engine = self._add(spec, url, None)
        engine.replica.source = source
        return engine

    def _free_port(self, launch: EngineLaunch) -> int:
        taken = {e.launch.port for e in self._engines.values() if e.launch is not None}
        for port in range(min(taken), LAST_PORT):
            if port not in taken:
                with contextlib.suppress(PortInUseError):
                    check_port_free(launch.host, port)
                    return port
        raise PortInUseError(f"no port from {min(taken)} on is free on {launch.host}")

    def _add(self, spec: TierSpec, url: str, launch: EngineLaunch | None, note: str | None = None) -> Engine:
        number = self._made[spec.name]
        replica = Replica(
            id=f"{spec.name}-{number}",
            spec=spec,
            url=url,
            api_key=launch.api_key if launch else self._options.external_api_key,
            model=launch.served_model if launch else "",
        )
        engine = Engine(self.fleet.add(replica), launch, self._options.watchdog, note=note)
        self._made[spec.name] += 1
        self._engines[replica.id] = engine
        life = partial(self._run_here, engine, launch) if launch else partial(self._run_elsewhere, engine)
        name = f"watching {replica.id}"
        engine.task = asyncio.create_task(lasting(life, name), name=name)
        return engine

    def _mark(self, replica: Replica, status: ReplicaStatus, detail: str | None = None) -> None:
        if replica.state.status is status and replica.state.detail == detail:
            return
        replica.mark(status, detail)
        if status in {ReplicaStatus.READY, ReplicaStatus.FAILED}:
            self.fleet.preparations.settled(replica.spec.name)
        restarts = status is ReplicaStatus.STARTING and detail is not None
        noted = status is ReplicaStatus.READY and detail is not None
        wrong = (
            restarts or noted or status in {ReplicaStatus.FAILED, ReplicaStatus.UNREACHABLE, ReplicaStatus.QUARANTINED}
        )
        level = logging.WARNING if wrong else logging.INFO
        log.log(level, "%s is %s%s", replica.id, status.value, f": {detail}" if detail else "")
        self._tell(replica, capacity=status is ReplicaStatus.READY)

    def _tell(self, replica: Replica, *, capacity: bool = False) -> None:
        """Tell observers of a change; ``capacity``: there is more of it."""
        try:
            self._on_change(replica)
            if capacity:
                self.fleet.on_capacity()
        except Exception as error:  # noqa: BLE001  a fault of an observer must not end the engine
            self._faults.log(error, f"observers were not told of a change of {replica.id}")

    async def _run_here(self, engine: Engine, launch: EngineLaunch) -> None:
        """Run an engine of our own, and restart it after each end unless it was never ready."""
        while True:
            self._mark(engine.replica, ReplicaStatus.STARTING, engine.note)
            try:
                await self._live(engine, launch)
                engine.ended()
                engine.note = "as asked for"
            except Exception as error:  # noqa: BLE001  the watcher goes on after any error
                smaller = self._smaller(engine, launch)
                if smaller is not None:
                    engine.ended()
                    launch = smaller
                else:
                    engine.note = await self._after(engine, self._explained(engine, error), engine.ended())

    def _smaller(self, engine: Engine, launch: EngineLaunch) -> EngineLaunch | None:
        """Return what to start in the place of an engine that did not fit into memory; None: that was not the cause."""
        if engine.was_ready or engine.process is None or engine.lessened >= ATTEMPTS:
            return None
        smaller = with_less(launch, engine.process.last_log_lines(LOG_LINES), partial(kv_per_token, launch.tier))
        if smaller is None:
            return None
        replica, engine.launch, engine.lessened = engine.replica, smaller.launch, engine.lessened + 1
        if smaller.launch.tier.max_model_len < replica.spec.max_model_len:
            self.fleet.shorten(replica, smaller.launch.tier.max_model_len)
        engine.less = f"started with less: {smaller.why}" if engine.less is None else f"{engine.less}; {smaller.why}"
        engine.note = engine.less
        log.warning("%s is %s", replica.id, engine.less)
        return smaller.launch

    def _explained(self, engine: Engine, error: Exception) -> TierError:
        """Return what ended an engine or kept it from being ready, in words for people."""
        if isinstance(error, TierError):
            return error
        self._faults.log(error, f"{engine.replica.id}: unexpected error")
        return EngineError(f"{type(error).__name__}: {error}; the router's log has the traceback")

    async def _after(self, engine: Engine, error: TierError, ready_s: float) -> str:
        """Wait until an engine that has ended is to be restarted; return the reason for the restart."""
        replica, watchdog, restarts, detail = engine.replica, self._options.watchdog, engine.restarts, str(error)
        if engine.less is not None and not engine.was_ready:
            detail = (
                f"{engine.less}, but it still does not fit: free memory, lower tiers.{replica.spec.name}.max_model_len or "
                f"engine.cpu_kv_cache_gib, or run the tier elsewhere. The last end: {error}"
            )
        delay_s = None
        if engine.was_ready and not isinstance(error, CanaryRefusedError):
            delay_s = restarts.exited(time.monotonic(), ready_s)
            detail = (
                f"not started again after {watchdog.max_restarts} restarts within {watchdog.restart_window_s:g} s: mend "
                f"the cause, then 'qarr tiers restart {replica.id}'. The last end: {error}"
            )
        if delay_s is None:
            self._mark(replica, ReplicaStatus.FAILED, detail)
            await engine.again.wait()
            restarts.forget()
            return "as asked for"
        note = f"restart {restarts.count} after: {brief(error)}"
        self.fleet.restarts[replica.spec.name] += 1
        self._mark(replica, ReplicaStatus.STARTING, f"{note}; in {delay_s:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.again.wait(), delay_s)
        return note

    async def _live(self, engine: Engine, launch: EngineLaunch) -> None:
        """Run an engine's process until a restart is asked for.

        Raises:
            TierError: It exited, did not become ready, or was stopped because it hung or stopped answering.
        """
        replica, path = engine.replica, self.log_path(engine.replica)
        engine.begun()
        if engine.process is not None:  # left over after an unexpected error
            await engine.process.stop(self._options.stop_grace_s)
        if launch.placement.gpus:
            await self._until_earlier_settled(replica, launch)
        check_port_free(launch.host, launch.port)
        env = engine_environment(launch, os.environ)
        process = await EngineProcess.start(engine_argv(launch), env, path, launch.placement.cores)
        engine.process = process
        replica.update(pid=process.pid)
        life = asyncio.create_task(self._serve(engine))
        death = asyncio.create_task(process.wait())
        asked = asyncio.create_task(engine.again.wait())
        try:
            await asyncio.wait({life, death, asked}, return_when=asyncio.FIRST_COMPLETED)
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
            tasks = (life, death, asked)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, engine: Engine) -> None:
        """Warm the engine whenever it becomes alive, and watch it, until cancelled.

        Raises:
            TierError: It is not usable, hangs, or stops answering.
        """
        replica = engine.replica
        probe, silent = self._probe(replica), self._options.watchdog.unreachable_s
        await self._until_alive(replica, probe, self._options.start_timeout_s, "not healthy within")
        while True:
            await self._warm(engine, probe)
            await self._poll(engine, probe)
            await self._until_alive(replica, probe, silent, "no answer to health checks for")

    async def _until_earlier_settled(self, replica: Replica, launch: EngineLaunch) -> None:
        """Wait until earlier engines on the same GPUs have started: vLLM measures free memory while it starts."""
        gpus = set(launch.placement.gpus)
        earlier = [
            e.replica
            for e in takewhile(lambda e: e.replica is not replica, self._engines.values())
            if e.launch is not None and not gpus.isdisjoint(e.launch.placement.gpus)
        ]
        while any(r.state.status in {ReplicaStatus.STARTING, ReplicaStatus.WARMING} for r in earlier):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    async def _until_alive(self, replica: Replica, probe: EngineProbe, limit_s: float, missing: str) -> None:
        deadline = time.monotonic() + limit_s
        while not await probe.alive():
            if time.monotonic() > deadline:
                raise EngineDiedError(f"{missing} {limit_s:g} s; see {self.log_path(replica)}")
            await asyncio.sleep(POLL_S)

    async def _watch_processors(self) -> None:
        """Tell of engines here whose GPU or CPU is slowed down from outside, until cancelled."""
        cpu, at = await asyncio.to_thread(read_cpu), time.monotonic()
        while True:
            await asyncio.sleep(PROCESSORS_S)
            (now, gpus), then = await asyncio.to_thread(lambda: (read_cpu(), read_gpus())), time.monotonic()
            held_back = now.slower_than(cpu, then - at)
            cpu, at = now, then
            for engine in self._engines.values():
                if engine.launch is None:
                    continue
                places = engine.launch.placement.gpus
                found = next((gpus[gpu] for gpu in places if gpu in gpus), None) if places else held_back
                engine.note_throttled(found, then)
                if engine.replica.state.status is ReplicaStatus.READY:
                    self._mark(engine.replica, ReplicaStatus.READY, engine.remark)

    async def _run_elsewhere(self, engine: Engine) -> None:
        """Watch an engine that runs elsewhere: warm it whenever it becomes alive, and quarantine it if it is not sound."""
        replica, probe = engine.replica, self._probe(engine.replica)
        while True:
            try:
                if (why := await probe.ailment()) is None:
                    await self._warm(engine, probe)
                    await self._poll(engine, probe)
                else:
                    self._mark(replica, ReplicaStatus.UNREACHABLE, why)
            except (CanaryRefusedError, EngineHungError, EngineSlowError) as error:
                await self._quarantine(engine, probe, str(error))
            except Exception as error:  # noqa: BLE001  the watcher goes on after any error
                self._mark(replica, ReplicaStatus.FAILED, str(self._explained(engine, error)))
                await asyncio.sleep(ELSEWHERE_PAUSE_S)
            await asyncio.sleep(POLL_S)

    async def _quarantine(self, engine: Engine, probe: EngineProbe, why: str) -> None:
        """Keep traffic from an engine until an operator resumes it, or until it has been away."""
        replica, missed = engine.replica, 0
        then = f"'qarr tiers resume {replica.id}' checks it again, and so does a restart where it runs"
        self._mark(replica, ReplicaStatus.QUARANTINED, f"{why}. {then}")
        while missed < MISSED_PROBES and not engine.again.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.again.wait(), POLL_S)
            missed = 0 if await probe.alive() else missed + 1
        engine.begun()

    async def _warm(self, engine: Engine, probe: EngineProbe) -> None:
        replica = engine.replica
        self._mark(replica, ReplicaStatus.WARMING, engine.note)
        await probe.readings()  # an engine without gauges must not be ready until the first poll
        model = await probe.model()
        replica.model, engine.served = model.name, model[:3]
        if await self.operations.adapters.restore(engine, model.adapters):
            model = await probe.model()
        self._note_adapters(replica, model.adapters)
        if engine.launch is None:
            await self._note_precision(replica, model.root)
        if model.max_model_len < replica.spec.max_model_len:
            raise EngineDiedError(
                f"{replica.url} has a context of {model.max_model_len} tokens, tier {replica.spec.name} promises "
                f"{replica.spec.max_model_len}: set tiers.{replica.spec.name}.max_model_len"
            )
        slow_warm_up = asyncio.create_task(self._announce_slow_warm_up(engine))
        try:
            report = await warm_up(probe, replica.model, self._options.warmup)
            self._check_tokens(replica, report.tokens_digest)
            if self._options.canary is not None:
                await self._compare(engine, probe, self._options.canary)
        finally:
            slow_warm_up.cancel()
        check_answer(report.answer, self._options.warmup.question)
        if replica.spec.name == TierName.PRECISE:
            self._precise_scores = engine.scores or self._precise_scores
        replica.takes_priority = report.takes_priority
        replica.takes_thinking = report.takes_thinking
        replica.fingerprint = report.fingerprint
        self.fleet.note_template(report.template)
        engine.was_ready, engine.ready_at, engine.note = True, time.monotonic(), None
        replica.progressed(engine.ready_at)
        self._mark(
            replica, ReplicaStatus.DRAINING if engine.held else ReplicaStatus.READY, engine.held or engine.remark
        )

    async def _announce_slow_warm_up(self, engine: Engine) -> None:
        """Say why an engine is still warming, if that takes long."""
        await asyncio.sleep(SLOW_WARM_UP_S)
        self._mark(
            engine.replica,
            ReplicaStatus.WARMING,
            f"its warm-up takes longer than {SLOW_WARM_UP_S:g} s{self._kernels_of(engine)}",
        )

    async def _compare(self, engine: Engine, probe: EngineProbe, canary: Canary) -> None:
        """Compare an engine's scores with its reference, and its speed with the profile while nothing else computes."""
        replica = engine.replica
        if canary.tolerance:
            engine.scores = await self._score(replica, probe)
            engine.compared_with = None
            engine.slow = None
        if engine.scores is not None:
            self._compare_with_highest(engine, canary)
            await canary.check_scores(engine.scores, replica.spec, replica.url)
        profiled = self.fleet.speeds.get(replica.spec.name)
        if profiled is not None and canary.max_slowdown and self._idle_speed.quiet(but=replica):
            speed = await self._idle_speed.measure(replica)
            if speed is not None and self._idle_speed.quiet(but=replica):
                canary.check_speed(speed, profiled, replica.spec)

    async def _score(self, replica: Replica, probe: EngineProbe) -> EngineScores | None:
        """Return an engine's scores; None: it runs elsewhere, and gives no log-probabilities.

        Raises:
            ProbeError: It does not answer, or it was started here and gives none.
        """
        try:
            return await score_engine(probe, replica.model, self._options.warmup.timeout_s)
        except NoScoresError as error:
            if not replica.spec.urls:
                raise
            log.warning("%s serves without a check of what it computes: %s", replica.id, error)
            return None

    def _compare_with_highest(self, engine: Engine, canary: Canary) -> None:
        """Compare an engine with the one of tier precise that was ready last, once with each.

        Raises:
            CanaryRefusedError: It serves another model, or computes wrongly.
        """
        replica = engine.replica
        if replica.spec.name == TierName.PRECISE or engine.scores is None:
            return
        highest = self._precise_scores
        if highest is None or highest is engine.compared_with:
            return
        engine.compared_with = highest
        canary.check_loss(engine.scores, highest, replica.spec, replica.url)
        slowdown = engine.scores.token_ms / max(highest.token_ms, MIN_TOKEN_MS)
        if slowdown >= MUCH_SLOWER:
            engine.slow = (
                f"{slowdown:.0f} times slower a token than tier precise ({engine.scores.token_ms:.0f} instead of "
                f"{highest.token_ms:.0f} ms){self._kernels_of(engine)}"
            )
            if replica.state.status is ReplicaStatus.READY:
                self._mark(replica, ReplicaStatus.READY, engine.remark)

    def _kernels_of(self, engine: Engine) -> str:
        """Return which kernels an engine that was started here has chosen, as its log says, for a sentence's end."""
        if engine.process is None:
            return ""
        kernels = selected_kernels(self.log_path(engine.replica))
        return f": its layers are computed by {', '.join(kernels)}" if kernels else ""

    def _note_adapters(self, replica: Replica, adapters: Sequence[str]) -> None:
        if self.fleet.note_adapters(replica, adapters):
            log.info("%s offers %s", replica.id, f"adapters {', '.join(adapters)}" if adapters else "no adapters")
            self._tell(replica)

    async def _note_precision(self, replica: Replica, root: str | None) -> None:
        """Find out what an engine that runs elsewhere serves; warn if another replica of its tier serves something else."""
        tier, stated, before = replica.spec.name, replica.spec.stated_precision, replica.spec.precision
        read = await asyncio.to_thread(root_precision, replica.url, root)
        precision = told_precision(read, stated)
        shown, differ = self.fleet.spec(tier).precision, self.fleet.note_precision(replica, precision)
        now = self.fleet.spec(tier).precision
        if differ and now != shown:
            log.warning("the replicas of tier %s differ in precision: %s", tier, now)
        if precision == before:
            return
        log.info("%s serves %s: %s", replica.id, precision, root)
        if stated is not None and read not in {stated, UNKNOWN}:
            log.warning(
                "%s: tiers.%s.precision is %s, but the checkpoint %s is %s", replica.id, tier, stated, root, read
            )

    def _check_tokens(self, replica: Replica, digest: str) -> None:
        for other, known in self._tokens_digests.items():
            if other != replica.id and known != digest:
                raise TokenizerMismatchError(
                    f"{replica.id} reads prompts as other tokens than {other} (token digests {digest[:16]} and "
                    f"{known[:16]}): every tier must serve the same model with the same tokenizer and chat template"
                )
        self._tokens_digests[replica.id] = digest

    async def _poll(self, engine: Engine, probe: EngineProbe) -> None:
        """Read the engine's gauges until it stops answering; raise as ``_judge`` does."""
        missed, known, why, listed_at = 0, None, "", time.monotonic()
        while missed < MISSED_PROBES:
            await asyncio.sleep(POLL_S)
            try:
                gauges, counters = await probe.readings()
                if time.monotonic() - listed_at > LISTED_S:
                    model = await probe.model()
                    if model[:3] != engine.served:
                        log.info("%s serves another model now: it is checked again", engine.replica.id)
                        return
                    self._note_adapters(engine.replica, model.adapters)
                    listed_at = time.monotonic()
                if (ill := await probe.ailment()) is not None:
                    raise ProbeError(ill)
            except TierError as error:
                missed, why = missed + 1, str(error)
                if engine.replica.state.status is ReplicaStatus.READY:
                    self._mark(engine.replica, ReplicaStatus.READY, f"{MISSED}: {why}")
                continue
            if missed and (engine.replica.state.detail or "").startswith(MISSED):
                self._mark(engine.replica, engine.replica.state.status, None)
            missed = 0
            engine.replica.note_gauges(gauges)
            if self._options.canary is not None:
                self._compare_with_highest(engine, self._options.canary)
            if counters.output_tokens > (0.0 if known is None else known.output_tokens):
                engine.replica.work.generated_at = time.monotonic()
            await self._judge(engine, probe, counters, moved=known is not None and counters != known)
            known = counters
        self._mark(engine.replica, ReplicaStatus.UNREACHABLE, why)

    async def _judge(self, engine: Engine, probe: EngineProbe, counters: Counters, *, moved: bool) -> None:
        """Find out whether an engine has become too slow.

        Raises:
            EngineHungError: It hangs.
            EngineSlowError: It is too slow, runs elsewhere, and another replica of its tier is ready.
        """
        replica, now, limit_s = engine.replica, time.monotonic(), self._options.watchdog.hang_s
        if moved:
            replica.progressed(now)
        if replica.silence_s(now) > limit_s:
            if await hangs(probe, replica):
                raise EngineHungError(f"hung: {replica.state.in_flight} requests, no token for {limit_s:g} s")
            replica.progressed(time.monotonic())
        silent = f"requests are open, and no token has come for {limit_s / 4:g} s"
        if replica.state.status is ReplicaStatus.READY and replica.state.detail in {None, silent}:
            self._mark(replica, ReplicaStatus.READY, silent if replica.silence_s(now) > limit_s / 4 else None)
        sequences, gauges = replica.state.load.sequences, replica.state.gauges
        if engine.launch is None and gauges is not None:  # others may use it, and are soon gone again
            sequences = max(sequences, gauges.running + gauges.waiting)
        worn = engine.wear.note(now, off_by(replica, now), counters, sequences=sequences)
        others = [] if worn is None else self._ready_beside(replica)
        # If others are slow as well, the machine is the cause, and a new engine would be no faster.
        machine_is_slow = any(2 * off_by(r, now) > self._options.watchdog.slow_factor > 0 for r in others)
        if worn is not None and not machine_is_slow:
            if engine.launch is None:
                self._spare(engine, worn, others, now)
            else:
                engine.recycle = worn
            engine.wear.found_at = now
        elif now - engine.wear.found_at > WORN_S:
            engine.recycle = None

    def _ready_beside(self, replica: Replica) -> list[Replica]:
        return [r for r in self.fleet.replicas if r is not replica and r.state.status is ReplicaStatus.READY]

    def _spare(self, engine: Engine, worn: str, others: Sequence[Replica], now: float) -> None:
        """Raise ``EngineSlowError`` if another replica of its tier can do a slow engine's work: slow is better than none."""
        replica = engine.replica
        if any(r.spec.name is replica.spec.name for r in others):
            raise EngineSlowError(f"too slow: {worn}")
        if now - engine.wear.found_at > WORN_S:
            log.warning("%s serves on, as the last ready one of its tier, though it is too slow: %s", replica.id, worn)

    def probe(self, engine: Engine) -> EngineProbe:
        """Return what asks an engine about itself."""
        return self._probe(engine.replica)

    async def list_adapters(self, engine: Engine) -> None:
        """Read an engine's list of adapters, and note it."""
        self._note_adapters(engine.replica, (await self.probe(engine).model()).adapters)

    def _probe(self, replica: Replica) -> EngineProbe:
        return EngineProbe(self._client, replica.url, replica.api_key)
