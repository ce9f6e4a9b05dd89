"""What operators may do to replicas: drain, resume, restart, recycle; and recycling by schedule and by wear.

An operation is begun at once and then runs by itself; its record tells how far it is. Recycling starts a new engine beside
the old one, and only when the new one is ready the old one drains and goes: capacity never falls. Where the machine has no
memory for one more, the engine is drained, stopped and started in its place, provided that others can serve meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from tiers.errors import NotPossible, TierError, UnknownReplica
from tiers.plan import lacking_for_one_more, read_machine
from tiers.spec import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tiers.fleet import Fleet, Replica
    from tiers.lifecycle.engine import Engine

log = logging.getLogger(f"qarr.{__name__}")
POLL_S = 0.2
KEPT = 100  # operations that are remembered
TOGETHER_S = 5.0  # engines begun within it were started together
LATER_S = 60.0  # at least, until a recycling that was not possible is tried again
WEAR_REST_S = 3600.0  # a tier that is recycled for being slow is not again before this: it may have another cause

Kind = Literal["drain", "resume", "restart", "recycle"]
KINDS: tuple[Kind, ...] = ("drain", "resume", "restart", "recycle")


@dataclass(frozen=True, slots=True)
class OperationOptions:
    """How engines are drained and recycled.

    Attributes:
        drain_s: In which open requests may finish; then a restart or a recycling breaks them off.
        beside: Recycle by starting a new engine beside the old one, where memory allows it.
        recycle_every_s: Recycle each engine so often; 0: never.
    """

    drain_s: float = 120.0
    beside: bool = True
    recycle_every_s: float = 0.0


@dataclass(slots=True, eq=False)
class Operation:
    """One operation, under way or ended.

    Attributes:
        detail: The present step, or how it ended.
        replica: Of whom.
        successor: The replica that took its place.
    """

    id: str
    kind: Kind
    replica: str
    state: Literal["running", "done", "failed"] = "running"
    detail: str = ""
    successor: str | None = None
    began: float = field(default_factory=time.time)
    ended: float | None = None

    def end(self, state: Literal["done", "failed"], detail: str) -> None:
        """Note how it ended."""
        self.state, self.detail, self.ended = state, detail, time.time()


class Crew(Protocol):
    """What operations need of the supervisor."""

    fleet: Fleet

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Return all engines."""

    def engine(self, replica_id: str) -> Engine:
        """Return one replica's engine, or raise ``UnknownReplica``."""

    def hold(self, engine: Engine, why: str) -> None:
        """Give an engine no new requests."""

    def let_go(self, engine: Engine) -> None:
        """Give an engine requests again."""

    def start_beside(self, engine: Engine) -> Engine:
        """Start another engine as this one was started."""

    async def retire(self, engine: Engine) -> None:
        """Stop an engine for good."""


class Operations:
    """Begins operations, keeps their records, and recycles by schedule and by wear."""

    def __init__(self, crew: Crew, options: OperationOptions) -> None:
        self._crew, self._options = crew, options
        self._records: deque[Operation] = deque(maxlen=KEPT)
        self._running: dict[str, tuple[Operation, asyncio.Task[None]]] = {}
        self._made = 0
        self._worn: dict[str, float] = {}
        self._due: dict[str, float] = {}

    @property
    def records(self) -> tuple[Operation, ...]:
        """Return the operations remembered, the latest last."""
        return tuple(self._records)

    def record(self, operation_id: str) -> Operation:
        """Return one operation.

        Raises:
            UnknownReplica: It is not remembered.
        """
        for operation in self._records:
            if operation.id == operation_id:
                return operation
        raise UnknownReplica(f"there is no operation {operation_id[:100]!r}: the last {KEPT} are remembered")

    def begin(self, kind: Kind, replica_id: str) -> Operation:
        """Begin an operation; it goes on by itself.

        Raises:
            UnknownReplica: There is no such replica.
            NotPossible: It runs elsewhere, is being operated on, or nothing would be left to serve with.
        """
        engine = self._crew.engine(replica_id)
        known, task = self._running.get(replica_id, (None, None))
        if known is not None and task is not None:
            if not (kind == "resume" and known.kind == "drain"):
                raise NotPossible(f"{replica_id} is busy: {known.kind} ({known.detail}); wait for its end")
            task.cancel()
            known.end("failed", "broken off")
        if engine.launch is None and kind in {"restart", "recycle"}:
            raise NotPossible(
                f"{replica_id} was not started here: {kind} it where it runs; 'drain' keeps requests from it"
            )
        if kind == "recycle" and not self._options.beside:
            self._check_floor(engine)
        self._made += 1
        operation = Operation(str(self._made), kind, replica_id, detail="begun")
        self._records.append(operation)
        task = asyncio.create_task(self._run(operation, engine), name=f"{kind} {replica_id}")
        self._running[replica_id] = operation, task
        return operation

    async def run(self) -> None:
        """Recycle engines that are worn or due, one at a time and spread out, until cancelled."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            ours = [e for e in self._crew.engines if e.launch is not None]
            for number, engine in enumerate(ours):
                if not self._running and engine.replica.state is ReplicaState.READY:
                    self._recycle_in_time(engine, began, (number + 1) / len(ours))

    def _recycle_in_time(self, engine: Engine, began: float, share: float) -> None:
        """Begin to recycle an engine that is worn or due.

        Args:
            engine: A ready one.
            began: When the first engines were started.
            share: Of the interval, after which this one of them is due: so they are spread out.
        """
        every, now, name = self._options.recycle_every_s, time.monotonic(), engine.replica.id
        with_others = engine.started_at - began < TOGETHER_S
        due = self._due.setdefault(name, began + every * share if with_others else engine.started_at + every)
        why = self._worn_out(engine, now) or (f"every {every:g} s" if every and now >= due else None)
        if why is None:
            return
        try:
            self.begin("recycle", name)
        except NotPossible as error:
            log.warning("%s is not recycled (%s): %s", name, why, error)
            self._due[name] = now + max(every / 10, LATER_S)
            return
        log.warning("%s is recycled: %s", name, why)
        self._due[name] = now + every  # it may be recycled in place, and keep its name

    async def stop(self) -> None:
        """Leave every operation where it is."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _worn_out(self, engine: Engine, now: float) -> str | None:
        """Return why an engine is too slow, unless its tier was recycled for that a short while ago."""
        tier = engine.replica.spec.name.value
        if engine.recycle is None or now - self._worn.get(tier, -WEAR_REST_S) < WEAR_REST_S:
            return None
        self._worn[tier] = now
        return engine.recycle

    async def _run(self, operation: Operation, engine: Engine) -> None:
        work: dict[Kind, Callable[[Operation, Engine], Coroutine[None, None, None]]] = {
            "drain": self._drain,
            "resume": self._resume,
            "restart": self._restart,
            "recycle": self._recycle,
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
            operation.end("failed", f"{type(error).__name__}: {error}; the router's log has where it came from")
            log.exception("%s of %s failed", operation.kind, operation.replica)
        finally:
            if (known := self._running.get(operation.replica)) is not None and known[0] is operation:
                del self._running[operation.replica]

    async def _drain(self, operation: Operation, engine: Engine) -> None:
        """Give no more requests, and wait for those that there are. Nothing is broken off."""
        self._crew.hold(
            engine, f"drained by an operator; 'qarr tiers resume {engine.replica.id}' gives it requests again"
        )
        left = await self._drained(operation, engine.replica)
        operation.detail = f"{left} requests are still open; it gets no new ones" if left else "drained"

    async def _resume(self, operation: Operation, engine: Engine) -> None:
        self._crew.let_go(engine)
        operation.detail = f"is {engine.replica.state.value}"

    async def _restart(self, operation: Operation, engine: Engine) -> None:
        """Drain, stop, start; wait until the engine is ready."""
        replica = engine.replica
        held = engine.held
        self._crew.hold(engine, "drains for a restart")
        left = await self._drained(operation, replica)
        engine.held = held
        operation.detail = "starting" + (f"; {left} requests were broken off" if left else "")
        before = engine.started_at
        engine.again.set()
        while engine.started_at == before:
            _check_watched(engine)
            await asyncio.sleep(POLL_S)
        await _settled(engine)
        operation.detail = f"is {replica.state.value}"

    async def _recycle(self, operation: Operation, engine: Engine) -> None:
        """Replace an engine by a new one: beside it where there is memory for both, in its place otherwise."""
        assert engine.launch is not None
        lacking = "engine.recycle says so"
        if self._options.beside:
            machine = await asyncio.to_thread(read_machine)
            lacking = lacking_for_one_more(machine, engine.launch.tier, engine.launch.placement) or ""
        if lacking:
            self._check_floor(engine)
            log.info("%s is recycled in place: %s", engine.replica.id, lacking)
            await self._restart(operation, engine)
            operation.detail = f"{operation.detail}; in place: {lacking}"
            return
        new = self._crew.start_beside(engine)
        operation.successor = new.replica.id
        operation.detail = f"{new.replica.id} starts beside it"
        try:
            await _settled(new)
        except BaseException:
            await self._crew.retire(new)
            raise
        if engine.held:
            self._crew.hold(new, engine.held.replace(engine.replica.id, new.replica.id))
        self._crew.hold(engine, f"drains, {new.replica.id} has taken its place")
        left = await self._drained(operation, engine.replica)
        await self._crew.retire(engine)
        operation.detail = f"{new.replica.id} serves" + (f"; {left} requests were broken off" if left else "")

    async def _drained(self, operation: Operation, replica: Replica) -> int:
        """Wait for open requests to finish, as long as they may; return how many are left."""
        deadline = time.monotonic() + self._options.drain_s
        while replica.in_flight and time.monotonic() < deadline:
            operation.detail = f"waits for {replica.in_flight} open requests"
            await asyncio.sleep(POLL_S)
        return replica.in_flight

    def _check_floor(self, engine: Engine) -> None:
        """Check that something serves while an engine is away.

        Raises:
            NotPossible: Nothing does.
        """
        others = [r for r in self._crew.fleet.replicas if r is not engine.replica and r.state is ReplicaState.READY]
        if not others:
            raise NotPossible(
                f"no other replica is ready, and there is no memory for a second engine beside {engine.replica.id} "
                f"(or engine.recycle forbids it): nothing would serve meanwhile; 'restart' does it all the same"
            )


async def _settled(engine: Engine) -> None:
    """Wait until an engine that starts is ready.

    Raises:
        NotPossible: It has failed, or is not watched any more.
    """
    replica = engine.replica
    while replica.state in {ReplicaState.STARTING, ReplicaState.WARMING}:
        _check_watched(engine)
        await asyncio.sleep(POLL_S)
    if replica.state not in {ReplicaState.READY, ReplicaState.DRAINING}:
        raise NotPossible(f"{replica.id} did not become ready: {replica.detail}")


def _check_watched(engine: Engine) -> None:
    """Check that an engine's state can still change.

    Raises:
        NotPossible: The task that watches it has ended, as it does when the engine is retired.
    """
    if engine.task is None or engine.task.done():
        raise NotPossible(f"{engine.replica.id} is not watched any more: it was stopped")
