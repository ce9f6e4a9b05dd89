"""Measure the speed of ready replicas that have no profile, while nothing else computes."""

from __future__ import annotations

import asyncio
import time
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
QUIET_S = 1.5  # without requests before a measurement: after a request another one is likely
PAUSE_S = 5.0  # after the first measurement; doubles after each further one


class IdleSpeed:
    """Measures the replicas of one fleet, one after another."""

    def __init__(self, fleet: Fleet, plan: WarmupPlan, probe: Callable[[Replica], EngineProbe]) -> None:
        self._fleet, self._plan, self._probe = fleet, plan, probe

    async def run(self) -> None:
        """Measure each ready replica while no engine starts or serves: they may share a machine. Until cancelled.

        The fastest of a few measurements counts: whatever else the machine does can only slow them down.
        """
        taken: dict[str, tuple[int, float]] = {}  # by replica: number of measurements, and when the next one is due
        busy_at = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            if not self.quiet():
                busy_at = time.monotonic()
            ready = [r for r in self._fleet.replicas if r.state.status is ReplicaStatus.READY]
            taken = {r.id: taken[r.id] for r in self._fleet.replicas if r.id in taken}
            for replica in ready:
                if replica.state.speed is None:
                    taken.pop(replica.id, None)
                profiled = self._fleet.speeds.get(replica.spec.name)
                if profiled is not None and replica.learns:
                    replica.measured(profiled)
            for replica in ready:
                count, due = taken.get(replica.id, (0, 0.0))
                now, lock = time.monotonic(), self._fleet.measuring
                if count == SAMPLES or self._profiled(replica) or now < max(due, busy_at + QUIET_S):
                    continue
                if lock.locked() or not self.quiet():
                    continue
                async with lock:
                    speed = await self.measure(replica)
                # A profile may have been loaded meanwhile.
                if speed is not None and replica.state.status is ReplicaStatus.READY and not self._profiled(replica):
                    replica.measured(speed if replica.state.speed is None else replica.state.speed.fastest(speed))
                    taken[replica.id] = count + 1, time.monotonic() + PAUSE_S * 2**count

    async def measure(self, replica: Replica) -> SpeedModel | None:
        """Measure one idle replica; None if it failed, or if a request on any replica may have disturbed it.

        An engine given by URL is only measured while nobody else uses it, as far as its own gauges and counters tell.
        """
        before, probe = self._requests(), self._probe(replica)
        try:
            generated = await self._generated(replica, probe)
            speed = await measure_speed(probe, replica.model, self._plan)
            if await self._generated(replica, probe) > generated + MEASURED_TOKENS:
                return None
        except TierError:
            return None
        return speed if self._requests() == before else None

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
        busy = {ReplicaStatus.STARTING, ReplicaStatus.WARMING}
        return not any(r.state.in_flight or r.state.status in busy for r in self._fleet.replicas if r is not but)

    def _profiled(self, replica: Replica) -> bool:
        return replica.spec.name in self._fleet.speeds

    def _requests(self) -> int:
        return sum(r.state.served + r.state.failed + r.state.in_flight for r in self._fleet.replicas)
