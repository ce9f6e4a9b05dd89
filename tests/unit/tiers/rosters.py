"""Rosters that are watched."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tiers.fleet import Fleet
from tiers.lifecycle.discovery import DiscoveryOptions
from tiers.lifecycle.options import SupervisorOptions
from tiers.lifecycle.supervisor import Supervisor
from tiers.spec import ReplicaStatus, TierName, TierSpec

FAST = TierName.FAST
PRECISE = TierName.PRECISE
READY = ReplicaStatus.READY


@asynccontextmanager
async def watched(
    tmp_path: Path,
    settings: tuple[str, ...] = (),
    discovery: DiscoveryOptions | None = None,
    **options: Any,
) -> AsyncIterator[Supervisor]:
    """Watch two tiers, whose engines all run elsewhere; the settings name some of the fast one's."""
    specs = (
        TierSpec(
            FAST,
            max_model_len=2048,
            max_num_seqs=16,
            max_in_flight=32,
            urls=settings,
            replicas=0,
        ),
        TierSpec(
            PRECISE, max_model_len=8192, max_num_seqs=16, max_in_flight=32, replicas=0
        ),
    )
    fleet = Fleet(specs)
    supervisor = Supervisor(
        fleet,
        SupervisorOptions(
            tmp_path, discovery=discovery or DiscoveryOptions(), **options
        ),
    )
    supervisor.start([], specs)
    try:
        yield supervisor
    finally:
        await supervisor.stop()


def ids(supervisor: Supervisor, state: ReplicaStatus | None = READY) -> list[str]:
    return [
        replica.id
        for replica in supervisor.fleet.replicas
        if state in {None, replica.state.status}
    ]
