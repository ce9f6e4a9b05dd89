"""What operators may do to replicas: drain, resume, restart, recycle, remove. Also recycling on schedule, and of slow ones.

``begin`` returns at once. The operation runs in a task, and its record shows the progress. Recycling starts a new engine
beside the old one; only when the new one is ready is the old one drained and stopped, so capacity never falls. Without
memory for a second engine, the engine is restarted in place, if others can serve meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from tiers.errors import NotPossibleError, TierError, UnknownReplicaError
from tiers.lifecycle.adapters import AdapterControl, AdapterLoader
from tiers.lifecycle.roster import Roster, RosterControl
from tiers.plan import lacking_for_one_more, read_machine
from tiers.spec import ReplicaStatus

if TYPE_CHECKING:
    from tiers.lifecycle.engine import Engine
    from tiers.replica import Replica
    from tiers.spec import TierName

log = logging.getLogger(f"qarr.{__name__}")
POLL_S = 0.2
MAX_RECORDS = 100
# Engines that started this close together would otherwise all be recycled at the same time.
TOGETHER_S = 5.0
# A recycling that was not possible is tried again after this, or later.
MIN_RETRY_S = 60.0
# A slow tier is not recycled again so soon: the cause may be another one.
WEAR_REST_S = 3600.0

Kind = Literal["drain", "resume", "restart", "recycle", "remove"]
KINDS: tuple[Kind, ...] = ("drain", "resume", "restart", "recycle", "remove")
BREAKS_OFF: set[tuple[Kind, Kind]] = {
    ("resume", "drain"),
    ("remove", "drain"),
    ("remove", "remove"),
}


@dataclass(frozen=True, slots=True)
class OperationOptions:
    """How engines are drained and recycled.

    Attributes:
        drain_s: Time for open requests to finish; afterwards a restart or a recycling aborts them, and a removal leaves
            them to the engine.
        recycle_every_s: Interval at which each engine is recycled; 0: never.
    """

    drain_s: float = 120.0
    recycle_every_s: float = 0.0


@dataclass(slots=True, eq=False)
class Operation:
    """One operation, running or ended.

    Attributes:
        replica: Id of the replica.
        detail: The current step, or the result.
        now: Whether a removal waits for no open request.
        successor: Id of the replica that replaced it.
        task: Runs the operation.
    """

    id: str
    kind: Kind
    replica: str
    state: Literal["running", "done", "failed"] = "running"
    detail: str = "begun"
    now: bool = False
    successor: str | None = None
    began: float = field(default_factory=time.time)
    ended: float | None = None
    task: asyncio.Task[None] | None = None

    def end(self, state: Literal["done", "failed"], detail: str) -> None:
        """Record the result."""
        self.state = state
        self.detail = detail
        self.ended = time.time()


class EngineControl(AdapterControl, RosterControl, Protocol):
    """What operations need of the supervisor."""

    def engine(self, replica_id: str) -> Engine:
        """Return one replica's engine, or raise ``UnknownReplicaError``."""

    def hold(self, engine: Engine, why: str) -> None:
        """Send an engine no new requests."""

    def resume(self, engine: Engine) -> None:
        """Send an engine requests again."""

    def start_beside(self, engine: Engine) -> Engine:
        """Start another engine with the same configuration."""

    async def retire(self, engine: Engine) -> None:
        """Stop an engine for good."""


class Operations:
    """Begins operations, keeps their records, and recycles on a schedule and slow engines.

    Attributes:
        adapters: Loads and unloads LoRA adapters.
        roster: Knows which engines that run elsewhere belong to the fleet.
    """

    def __init__(self, control: EngineControl, options: OperationOptions) -> None:
        self.adapters = AdapterLoader(control)
        self.roster = Roster(control, self)
        self._control = control
        self._options = options
        self._records: deque[Operation] = deque(maxlen=MAX_RECORDS)
        self._running: dict[str, Operation] = {}  # by replica
        self._made = 0
        self._recycled_slow_at: dict[TierName, float] = {}
        # by replica: when it is recycled on schedule
        self._due_at: dict[str, float] = {}

    @property
    def records(self) -> tuple[Operation, ...]:
        """Return the last operations, the latest last."""
        return tuple(self._records)

    @property
    def restartable(self) -> list[str]:
        """Return the ids of the replicas that were started here; others are restarted where they run."""
        return [
            engine.replica.id
            for engine in self._control.engines
            if engine.launch is not None
        ]

    def record(self, operation_id: str) -> Operation:
        """Return one operation.

        Raises:
            UnknownReplicaError: There is no record of it.
        """
        for operation in self._records:
            if operation.id == operation_id:
                return operation
        raise UnknownReplicaError(
            f"there is no operation {operation_id[:100]!r}: the last {MAX_RECORDS} are remembered"
        )

    def begin(self, kind: Kind, replica_id: str, *, now: bool = False) -> Operation:
        """Begin an operation, which runs in a task of its own.

        Args:
            kind: What to do.
            replica_id: To which replica.
            now: Whether a removal waits for no open request.

        Raises:
            UnknownReplicaError: There is no such replica.
            NotPossibleError: The engine runs elsewhere, is in another operation, or nothing else could serve meanwhile.
        """
        engine = self._control.engine(replica_id)
        running = self._running.get(replica_id)
        if running is not None and (
            (kind, running.kind) not in BREAKS_OFF or engine.leaving
        ):
            raise NotPossibleError(
                f"{replica_id} is busy: {running.kind} ({running.detail}); wait for its end"
            )
        if kind == "remove":
            self.roster.release(engine)
        if running is not None:
            _break_off(running)
        if engine.launch is None and kind in {"restart", "recycle"}:
            raise NotPossibleError(
                f"{replica_id} was not started here: {kind} it where it runs; 'drain' keeps requests from it"
            )
        return self._started(kind, engine, now=now)

    def _started(self, kind: Kind, engine: Engine, *, now: bool = False) -> Operation:
        self._made += 1
        operation = Operation(str(self._made), kind, engine.replica.id, now=now)
        self._records.append(operation)
        self._running[operation.replica] = operation
        operation.task = asyncio.create_task(
            self._run(operation, engine), name=f"{kind} {operation.replica}"
        )
        return operation

    def withdraw(self, engine: Engine) -> None:
        """Begin to drain and remove an engine that nothing names any more, unless that is being done."""
        running = self._running.get(engine.replica.id)
        if running is None or (
            running.kind != "remove" and ("remove", running.kind) in BREAKS_OFF
        ):
            if running is not None:
                _break_off(running)
            self._started("remove", engine)

    def keep(self, engine: Engine) -> None:
        """Break off the removal of an engine that is named again, if it only drains."""
        running = self._running.get(engine.replica.id)
        if running is not None and running.kind == "remove" and not engine.leaving:
            _break_off(running)
            del self._running[engine.replica.id]
            self._control.resume(engine)

    async def run(self) -> None:
        """Recycle engines that are slow or due, one at a time and spread out, until cancelled."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            own_engines = [
                engine for engine in self._control.engines if engine.launch is not None
            ]
            for number, engine in enumerate(own_engines):
                if (
                    not self._running
                    and engine.replica.state.status is ReplicaStatus.READY
                ):
                    self._recycle_in_time(
                        engine, began, (number + 1) / len(own_engines)
                    )

    def _recycle_in_time(self, engine: Engine, began: float, share: float) -> None:
        """Begin to recycle a ready engine that is slow or due.

        Args:
            engine: The engine.
            began: When the first engines were started.
            share: Of the interval, after which this one of the first engines is due, so that they are spread out.
        """
        replica_id = engine.replica.id
        interval_s = self._options.recycle_every_s
        now = time.monotonic()
        started_with_others = engine.started_at - began < TOGETHER_S
        first_due_at = engine.started_at + interval_s
        if started_with_others:
            first_due_at = began + interval_s * share
        due_at = self._due_at.setdefault(replica_id, first_due_at)
        why = self._why_too_slow(engine, now)
        if why is None and interval_s and now >= due_at:
            why = f"every {interval_s:g} s"
        if why is None:
            return
        try:
            self.begin("recycle", replica_id)
        except NotPossibleError as error:
            log.warning("%s is not recycled (%s): %s", replica_id, why, error)
            self._due_at[replica_id] = now + max(interval_s / 10, MIN_RETRY_S)
            return
        log.warning("%s is recycled: %s", replica_id, why)
        # If it is recycled in place, it keeps its id.
        self._due_at[replica_id] = now + interval_s

    async def stop(self) -> None:
        """Cancel all operations."""
        tasks = [
            operation.task
            for operation in self._running.values()
            if operation.task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _why_too_slow(self, engine: Engine, now: float) -> str | None:
        """Return why an engine is too slow, unless its tier was recycled for that reason recently."""
        tier = engine.replica.spec.name
        recycled_at = self._recycled_slow_at.get(tier, -WEAR_REST_S)
        if engine.recycle is None or now - recycled_at < WEAR_REST_S:
            return None
        self._recycled_slow_at[tier] = now
        return engine.recycle

    async def _run(self, operation: Operation, engine: Engine) -> None:
        work = {
            "drain": self._drain,
            "resume": self._resume,
            "restart": self._restart,
            "recycle": self._recycle,
            "remove": self._remove,
        }
        try:
            await work[operation.kind](operation, engine)
            operation.end("done", operation.detail)
        except TierError as error:
            operation.end("failed", str(error))
            log.warning("%s of %s failed: %s", operation.kind, operation.replica, error)
        except asyncio.CancelledError:
            operation.end("failed", "broken off")
            raise
        except Exception as error:
            operation.end(
                "failed",
                f"{type(error).__name__}: {error}; the router's log has the traceback",
            )
            log.exception("%s of %s failed", operation.kind, operation.replica)
        finally:
            if self._running.get(operation.replica) is operation:
                del self._running[operation.replica]

    async def _drain(self, operation: Operation, engine: Engine) -> None:
        """Send no more requests, and wait for the open ones. None is aborted."""
        self._control.hold(
            engine,
            f"drained by an operator; 'qarr tiers resume {engine.replica.id}' gives it requests again",
        )
        open_requests = await self._drained(operation, engine.replica)
        operation.detail = "drained"
        if open_requests:
            operation.detail = (
                f"{_open_requests(open_requests)} left; it gets no new ones"
            )

    async def _remove(self, operation: Operation, engine: Engine) -> None:
        """Send no more requests, wait for the open ones, and forget the engine, which runs elsewhere."""
        self._control.hold(engine, "drains, to be removed")
        if operation.now:
            open_requests = engine.replica.state.in_flight
        else:
            open_requests = await self._drained(operation, engine.replica)
        engine.leaving = True
        operation.detail = "is forgotten"
        await self._control.retire(engine)
        operation.detail = "removed"
        if open_requests:
            operation.detail = (
                f"removed; the engine has {_open_requests(open_requests)} to finish"
            )
        log.info("%s is removed: %s", engine.replica.id, engine.replica.url)

    async def _resume(self, operation: Operation, engine: Engine) -> None:
        """Send requests again; an engine that is quarantined is warmed up and compared first."""
        is_quarantined = engine.replica.state.status is ReplicaStatus.QUARANTINED
        self._control.resume(engine)
        if is_quarantined:
            operation.detail = "is checked again"
            await _settled(engine)
        operation.detail = f"is {engine.replica.state.status.value}"

    async def _restart(self, operation: Operation, engine: Engine) -> None:
        """Drain, stop and start an engine, and wait until it is ready."""
        held_before = engine.held
        self._control.hold(engine, "drains for a restart")
        broken_off = await self._drained(operation, engine.replica)
        engine.held = held_before
        operation.detail = f"starting{_requests_broken_off(broken_off)}"
        started_before = engine.started_at
        engine.again.set()
        while engine.started_at == started_before:
            _check_watched(engine)
            await asyncio.sleep(POLL_S)
        await _settled(engine)
        operation.detail = f"is {engine.replica.state.status.value}"

    async def _recycle(self, operation: Operation, engine: Engine) -> None:
        """Replace an engine by a new one: beside it if there is memory for both, otherwise in place."""
        assert engine.launch is not None
        machine = await asyncio.to_thread(read_machine)
        lacking = lacking_for_one_more(
            machine, engine.launch.tier, engine.launch.placement
        )
        if lacking:
            self._check_floor(engine)
            log.info("%s is recycled in place: %s", engine.replica.id, lacking)
            await self._restart(operation, engine)
            operation.detail = f"{operation.detail}; in place: {lacking}"
            return
        successor = self._control.start_beside(engine)
        successor_id = successor.replica.id
        operation.successor = successor_id
        operation.detail = f"{successor_id} starts beside it"
        try:
            await _settled(successor)
        except BaseException:
            await self._control.retire(successor)
            raise
        if engine.held:
            self._control.hold(
                successor, engine.held.replace(engine.replica.id, successor_id)
            )
        self._control.hold(engine, f"drains, {successor_id} has taken its place")
        broken_off = await self._drained(operation, engine.replica)
        await self._control.retire(engine)
        operation.detail = f"{successor_id} serves{_requests_broken_off(broken_off)}"

    async def _drained(self, operation: Operation, replica: Replica) -> int:
        """Wait up to ``drain_s`` for open requests to finish; return the number that are left.

        The router's own measurements are not waited for: they give way, as to a caller's request.
        """
        preempt = self._control.fleet.preempt
        if preempt is not None:
            preempt()
        deadline = time.monotonic() + self._options.drain_s
        while replica.state.in_flight and time.monotonic() < deadline:
            operation.detail = f"waits for {_open_requests(replica.state.in_flight)}"
            await asyncio.sleep(POLL_S)
        return replica.state.in_flight

    def _check_floor(self, engine: Engine) -> None:
        """Raise ``NotPossibleError`` unless another replica is ready while an engine is away."""
        others = (
            replica
            for replica in self._control.fleet.replicas
            if replica is not engine.replica
        )
        if not any(replica.state.status is ReplicaStatus.READY for replica in others):
            raise NotPossibleError(
                f"no other replica is ready, and there is no memory for a second engine beside {engine.replica.id}: "
                f"nothing would serve meanwhile; 'restart' does it anyway"
            )


def _open_requests(count: int) -> str:
    return "1 open request" if count == 1 else f"{count} open requests"


def _requests_broken_off(count: int) -> str:
    return f"; {_open_requests(count)} broken off" if count else ""


def _break_off(running: Operation) -> None:
    if running.task is not None:
        running.task.cancel()
    running.end("failed", "broken off")


async def _settled(engine: Engine) -> None:
    """Wait until a starting engine is ready; raise ``NotPossibleError`` if it fails or is no longer watched."""
    replica = engine.replica
    while replica.state.status in {ReplicaStatus.STARTING, ReplicaStatus.WARMING}:
        _check_watched(engine)
        await asyncio.sleep(POLL_S)
    if replica.state.status not in {ReplicaStatus.READY, ReplicaStatus.DRAINING}:
        raise NotPossibleError(
            f"{replica.id} did not become ready: {replica.state.detail}"
        )


def _check_watched(engine: Engine) -> None:
    """Raise ``NotPossibleError`` if the task that watches an engine has ended, as when the engine is retired."""
    if engine.task is None or engine.task.done():
        raise NotPossibleError(
            f"{engine.replica.id} is not watched any more: it was stopped"
        )
