"""Measure the speed of ready replicas that have no profile, while nothing else computes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.errors import NotPossibleError, TierError
from tiers.lifecycle.warmup import MEASURED_TOKENS, measure_speed
from tiers.spec import ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiers.fleet import Fleet
    from tiers.lifecycle.warmup import WarmupPlan
    from tiers.probe import EngineProbe
    from tiers.replica import Replica
    from tiers.speed import SpeedModel

POLL_S = 0.5
SAMPLES = 4  # measurements of each idle replica
# without requests before a measurement: after a request another one is likely
QUIET_S = 1.5
PAUSE_S = 5.0  # after the first measurement; doubles after each further one


class IdleSpeed:
    """Measures the replicas of one fleet, one after another."""

    def __init__(
        self, fleet: Fleet, plan: WarmupPlan, probe: Callable[[Replica], EngineProbe]
    ) -> None:
        self._fleet = fleet
        self._plan = plan
        self._probe = probe
        self._schedules: dict[str, _Schedule] = {}  # by replica

    async def run(self) -> None:
        """Measure each ready replica while no engine starts or serves: they may share a machine. Until cancelled.

        The fastest of a few measurements counts: whatever else the machine does can only slow them down.
        """
        busy_at = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            if not self.quiet():
                busy_at = time.monotonic()
            ready = [
                replica
                for replica in self._fleet.replicas
                if replica.state.status is ReplicaStatus.READY
            ]
            self._forget_removed_replicas()
            for replica in ready:
                self._take_profiled_speed(replica)
            for replica in ready:
                await self._measure_if_due(replica, busy_at)

    def _forget_removed_replicas(self) -> None:
        present = {replica.id for replica in self._fleet.replicas}
        for replica_id in self._schedules.keys() - present:
            del self._schedules[replica_id]

    def _take_profiled_speed(self, replica: Replica) -> None:
        """Give a replica the speed of its tier's profile; one that was started again is measured again."""
        if replica.state.speed is None:
            self._schedules.pop(replica.id, None)
        profiled = self._fleet.speeds.get(replica.spec.name)
        if profiled is not None and replica.learns:
            replica.measured(profiled)

    async def _measure_if_due(self, replica: Replica, busy_at: float) -> None:
        """Measure a replica without a profile once more, if the fleet has been quiet since ``busy_at`` for long enough."""
        schedule = self._schedules.get(replica.id, _Schedule())
        if schedule.samples == SAMPLES or self._profiled(replica):
            return
        if time.monotonic() < max(schedule.due_at, busy_at + QUIET_S):
            return
        lock = self._fleet.measuring
        if lock.locked() or not self.quiet():
            return
        async with lock:
            speed = await self.measure(replica)
        # A profile may have been loaded meanwhile.
        if (
            speed is None
            or replica.state.status is not ReplicaStatus.READY
            or self._profiled(replica)
        ):
            return
        if replica.state.speed is not None:
            speed = replica.state.speed.fastest(speed)
        replica.measured(speed)
        self._schedules[replica.id] = schedule.after_sample(time.monotonic())

    async def measure(self, replica: Replica) -> SpeedModel | None:
        """Measure one idle replica; None if it failed, or if a request on any replica may have disturbed it.

        An engine given by URL is only measured while nobody else uses it, as far as its own gauges and counters tell.
        """
        requests_before = self._requests()
        probe = self._probe(replica)
        try:
            generated = await self._generated(replica, probe)
            speed = await measure_speed(probe, replica.model, self._plan)
            if await self._generated(replica, probe) > generated + MEASURED_TOKENS:
                return None
        except TierError:
            return None
        return speed if self._requests() == requests_before else None

    async def _generated(self, replica: Replica, probe: EngineProbe) -> float:
        """Return the tokens that an engine given by URL has generated, for anybody; 0 for one of our own.

        Raises:
            TierError: It computes something, or did not answer.
        """
        if not replica.spec.urls:
            return 0.0
        gauges, counters = await probe.readings()
        if gauges.running + gauges.waiting:
            raise NotPossibleError(f"{replica.id} is used by others")
        return counters.output_tokens

    def quiet(self, but: Replica | None = None) -> bool:
        """Tell whether no replica (but the given one) starts or serves, and no checkpoint is being made."""
        if self._fleet.preparations.making:
            return False
        return not any(
            _is_busy(replica) for replica in self._fleet.replicas if replica is not but
        )

    def _profiled(self, replica: Replica) -> bool:
        return replica.spec.name in self._fleet.speeds

    def _requests(self) -> int:
        states = [replica.state for replica in self._fleet.replicas]
        return sum(state.served + state.failed + state.in_flight for state in states)


@dataclass(frozen=True, slots=True)
class _Schedule:
    """How often a replica was measured, and the monotonic time at which the next measurement is due."""

    samples: int = 0
    due_at: float = 0.0

    def after_sample(self, now: float) -> _Schedule:
        return _Schedule(
            samples=self.samples + 1, due_at=now + PAUSE_S * 2**self.samples
        )


def _is_busy(replica: Replica) -> bool:
    return replica.state.in_flight > 0 or replica.state.status in {
        ReplicaStatus.STARTING,
        ReplicaStatus.WARMING,
    }
