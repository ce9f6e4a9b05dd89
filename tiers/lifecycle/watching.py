"""Watch an engine that serves: read its gauges, and find out whether it is silent, hangs or has become slow."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from tiers.errors import EngineHungError, EngineSlowError, ProbeError, TierError
from tiers.lifecycle.engine import Symptom
from tiers.lifecycle.readiness import served_of
from tiers.lifecycle.watchdog import hangs, off_by
from tiers.spec import ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.lifecycle.engine import Engine
    from tiers.lifecycle.readiness import Readiness
    from tiers.lifecycle.status_changes import StatusChanges
    from tiers.lifecycle.watchdog import WatchdogOptions
    from tiers.probe import Counters, EngineProbe
    from tiers.replica import Replica
    from tiers.snapshot import Gauges

log = logging.getLogger(f"qarr.{__name__}")
POLL_S = 0.5
# consecutive health checks that must fail before a running process counts as unreachable
MISSED_PROBES = 3
# Others may load adapters into an engine, or replace it by one with another model.
MODEL_CHECK_S = 5.0
# An engine that was found to be too slow may have recovered after this.
FINDING_EXPIRES_S = 60.0


class Watcher:
    """Watches engines that serve.

    Args:
        options: When an engine counts as hung or too slow.
        changes: Marks replicas.
        readiness: Compares an engine with one of tier precise that became ready later.
    """

    def __init__(
        self, options: WatchdogOptions, changes: StatusChanges, readiness: Readiness
    ) -> None:
        self._options = options
        self._changes = changes
        self._readiness = readiness

    async def watch(self, engine: Engine, probe: EngineProbe) -> None:
        """Watch an engine until it stops answering, or serves another model.

        Raises:
            CanaryRefusedError: It computes otherwise than the engine of tier precise.
            EngineHungError: It hangs.
            EngineSlowError: It is too slow, runs elsewhere, and another replica of its tier is ready.
        """
        comparison = _ComparisonBeside(engine, self._readiness)
        try:
            await self._watch(engine, probe, comparison)
        finally:
            await comparison.stop()

    async def _watch(
        self, engine: Engine, probe: EngineProbe, comparison: _ComparisonBeside
    ) -> None:
        missed = 0
        why_missed = ""
        counters_before: Counters | None = None
        model_checked_at = time.monotonic()
        while missed < MISSED_PROBES:
            await asyncio.sleep(POLL_S)
            try:
                gauges, counters = await probe.readings()
                if time.monotonic() - model_checked_at > MODEL_CHECK_S:
                    if await self._has_other_model(engine, probe):
                        return
                    model_checked_at = time.monotonic()
                ailment = await probe.ailment()
                if ailment is not None:
                    raise ProbeError(ailment)
            except TierError as error:
                missed += 1
                why_missed = str(error)
                self._note_missed(engine, why_missed)
                continue
            if missed:
                self._note_answers_again(engine)
            missed = 0
            comparison.go_on()
            await self._examine(engine, probe, gauges, counters, counters_before)
            counters_before = counters
        self._changes.mark(engine, ReplicaStatus.UNREACHABLE, why_missed)

    async def _has_other_model(self, engine: Engine, probe: EngineProbe) -> bool:
        """Tell whether an engine serves another model than when it was warmed up; note its adapters if it does not."""
        model = await probe.model()
        if served_of(model) != engine.served:
            log.info(
                "%s serves another model now: it is checked again", engine.replica.id
            )
            return True
        self._readiness.note_adapters(engine.replica, model.adapters)
        return False

    def _note_missed(self, engine: Engine, why: str) -> None:
        if engine.replica.state.status is ReplicaStatus.READY:
            detail = f"it does not answer health checks: {why}"
            self._changes.mark(
                engine,
                ReplicaStatus.READY,
                detail,
                symptom=Symptom.MISSED_HEALTH_CHECKS,
            )

    def _note_answers_again(self, engine: Engine) -> None:
        if engine.symptom is Symptom.MISSED_HEALTH_CHECKS:
            self._changes.mark(engine, engine.replica.state.status, engine.remark)

    async def _examine(
        self,
        engine: Engine,
        probe: EngineProbe,
        gauges: Gauges,
        counters: Counters,
        counters_before: Counters | None,
    ) -> None:
        """Draw conclusions from an engine's readings and those before; raise as ``watch`` does."""
        replica = engine.replica
        replica.note_gauges(gauges)
        tokens_before = (
            0.0 if counters_before is None else counters_before.output_tokens
        )
        if counters.output_tokens > tokens_before:
            replica.work.generated_at = time.monotonic()
        has_moved = counters_before is not None and counters != counters_before
        now = time.monotonic()
        if has_moved:
            replica.progressed(now)
        await self._check_silence(engine, probe, now)
        self._check_speed(engine, counters, now)

    async def _check_silence(
        self, engine: Engine, probe: EngineProbe, now: float
    ) -> None:
        """Ask an engine that has been silent for too long whether it hangs, and say so early.

        Raises:
            EngineHungError: It hangs.
        """
        replica = engine.replica
        limit_s = self._options.hang_s
        if replica.silence_s(now) > limit_s:
            if await hangs(probe, replica):
                raise EngineHungError(
                    f"hung: {replica.state.in_flight} requests, no token for {limit_s:g} s"
                )
            replica.progressed(time.monotonic())
        if replica.state.status is not ReplicaStatus.READY:
            return
        is_silent = replica.silence_s(now) > limit_s / 4
        if is_silent and replica.state.detail is None:
            detail = f"requests are open, and no token has come for {limit_s / 4:g} s"
            self._changes.mark(
                engine, ReplicaStatus.READY, detail, symptom=Symptom.SILENT
            )
        elif not is_silent and engine.symptom is Symptom.SILENT:
            self._changes.mark(engine, ReplicaStatus.READY, engine.remark)

    def _check_speed(self, engine: Engine, counters: Counters, now: float) -> None:
        """Find out whether an engine has become too slow: one that was started here is to be recycled.

        Raises:
            EngineSlowError: It runs elsewhere, and another replica of its tier is ready.
        """
        replica = engine.replica
        wear = engine.wear.note(
            now, off_by(replica, now), counters, sequences=_sequences_of(engine)
        )
        if wear is not None:
            others = self._ready_beside(replica)
            if not self._is_machine_slow(others, now):
                if engine.launch is None:
                    self._spare_if_others_serve(engine, wear, others, now)
                else:
                    engine.recycle = wear
                engine.wear.found_at = now
                return
        if now - engine.wear.found_at > FINDING_EXPIRES_S:
            engine.recycle = None

    def _is_machine_slow(self, others: Sequence[Replica], now: float) -> bool:
        """Tell whether other engines are slow as well: a new engine would be no faster."""
        return any(
            2 * off_by(replica, now) > self._options.slow_factor > 0
            for replica in others
        )

    def _ready_beside(self, replica: Replica) -> list[Replica]:
        fleet = self._changes.fleet
        return [
            candidate
            for candidate in fleet.replicas
            if candidate is not replica
            and candidate.state.status is ReplicaStatus.READY
        ]

    def _spare_if_others_serve(
        self, engine: Engine, wear: str, others: Sequence[Replica], now: float
    ) -> None:
        """Raise ``EngineSlowError`` if another replica of its tier can do a slow engine's work: slow is better than none."""
        replica = engine.replica
        if any(candidate.spec.name is replica.spec.name for candidate in others):
            raise EngineSlowError(f"too slow: {wear}")
        if now - engine.wear.found_at > FINDING_EXPIRES_S:
            log.warning(
                "%s serves on, as the last ready one of its tier, though it is too slow: %s",
                replica.id,
                wear,
            )


class _ComparisonBeside:
    """Compares an engine with others while it is watched: a comparison takes many seconds, and the engine may hang in it.

    Args:
        engine: The engine that is watched.
        readiness: Compares it.
    """

    def __init__(self, engine: Engine, readiness: Readiness) -> None:
        self._engine = engine
        self._readiness = readiness
        self._task: asyncio.Task[None] | None = None

    def go_on(self) -> None:
        """Begin the next comparison once the last one has ended.

        Raises:
            CanaryRefusedError: The last one has found that the engine serves another model, or computes wrongly.
        """
        if self._task is not None:
            if not self._task.done():
                return
            self._task.result()
        self._task = asyncio.create_task(
            self._readiness.compare_with_others(self._engine),
            name=f"comparing {self._engine.replica.id}",
        )

    async def stop(self) -> None:
        """Break the comparison off, if one is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


def _sequences_of(engine: Engine) -> int:
    """Return the sequences that an engine computes. Elsewhere others may use it, and are soon gone again."""
    state = engine.replica.state
    sequences = state.load.sequences
    if engine.launch is None and state.gauges is not None:
        sequences = max(sequences, state.gauges.running + state.gauges.waiting)
    return sequences
