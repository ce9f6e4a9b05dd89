"""Change the status of replicas: in the fleet's record, in the log, and for those who observe it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tiers.background import Faults
from tiers.errors import EngineError, TierError
from tiers.spec import ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiers.fleet import Fleet
    from tiers.lifecycle.engine import Engine, Symptom
    from tiers.replica import Replica

log = logging.getLogger(f"qarr.{__name__}")
TROUBLE = {ReplicaStatus.FAILED, ReplicaStatus.UNREACHABLE, ReplicaStatus.QUARANTINED}


class StatusChanges:
    """Marks replicas, and tells observers.

    Args:
        fleet: The fleet.
        on_change: Called when a replica's status, its reason or its adapters change.
    """

    def __init__(self, fleet: Fleet, on_change: Callable[[Replica], None]) -> None:
        self.fleet = fleet
        self.on_change = on_change
        self._faults = Faults()

    def mark(
        self,
        engine: Engine,
        status: ReplicaStatus,
        detail: str | None = None,
        *,
        symptom: Symptom | None = None,
    ) -> None:
        """Change the status of an engine's replica.

        Args:
            engine: The engine.
            status: Its new status.
            detail: The reason, for people; None: nothing is to be said.
            symptom: What ``detail`` is about, if it is to be taken back once the symptom has gone.
        """
        replica = engine.replica
        if replica.state.status is status and replica.state.detail == detail:
            return
        engine.symptom = symptom
        replica.mark(status, detail)
        if status in {ReplicaStatus.READY, ReplicaStatus.FAILED}:
            self.fleet.preparations.settled(replica.spec.name)
        self._log(replica, status, detail)
        self.tell(replica, has_more_capacity=status is ReplicaStatus.READY)

    def tell(self, replica: Replica, *, has_more_capacity: bool = False) -> None:
        """Tell observers that a replica has changed; one that has more capacity may serve waiting requests."""
        try:
            self.on_change(replica)
            if has_more_capacity:
                self.fleet.on_capacity()
        except Exception as error:  # noqa: BLE001  a fault of an observer must not end the engine
            self._faults.log(
                error, f"observers were not told of a change of {replica.id}"
            )

    def explain(self, replica: Replica, error: Exception) -> TierError:
        """Return what ended an engine, or kept it from being ready, in words for people."""
        if isinstance(error, TierError):
            return error
        self._faults.log(error, f"{replica.id}: unexpected error")
        return EngineError(
            f"{type(error).__name__}: {error}; the router's log has the traceback"
        )

    def _log(self, replica: Replica, status: ReplicaStatus, detail: str | None) -> None:
        is_restart = status is ReplicaStatus.STARTING and detail is not None
        is_ready_with_remark = status is ReplicaStatus.READY and detail is not None
        level = logging.INFO
        if is_restart or is_ready_with_remark or status in TROUBLE:
            level = logging.WARNING
        reason = f": {detail}" if detail else ""
        log.log(level, "%s is %s%s", replica.id, status.value, reason)
