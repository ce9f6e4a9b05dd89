"""Watch what slows down the GPUs and CPUs of engines that were started here."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from tiers.spec import ReplicaStatus
from tiers.throttling import read_cpu, read_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tiers.lifecycle.engine import Engine
    from tiers.lifecycle.status_changes import StatusChanges

POLL_S = 10.0


async def watch_processors(
    engines: Callable[[], Sequence[Engine]], changes: StatusChanges
) -> None:
    """Say of engines here when their GPU or CPU is slowed down from outside, until cancelled."""
    cpu_before = await asyncio.to_thread(read_cpu)
    read_at = time.monotonic()
    while True:
        await asyncio.sleep(POLL_S)
        cpu = await asyncio.to_thread(read_cpu)
        slow_gpus = await asyncio.to_thread(read_gpus)
        now = time.monotonic()
        slow_cpu = cpu.slower_than(cpu_before, now - read_at)
        cpu_before = cpu
        read_at = now
        for engine in engines():
            if engine.launch is None:
                continue
            engine.note_throttled(
                _slowdown_of(engine.launch.placement.gpus, slow_gpus, slow_cpu), now
            )
            # A symptom is told until it goes; its watcher then tells this again.
            if (
                engine.replica.state.status is ReplicaStatus.READY
                and engine.symptom is None
            ):
                changes.mark(engine, ReplicaStatus.READY, engine.remark)


def _slowdown_of(
    gpus: Sequence[int], slow_gpus: Mapping[int, str], slow_cpu: str | None
) -> str | None:
    """Return what slows an engine down, for people: the first of its GPUs that is slow, or the CPU if it has none."""
    if not gpus:
        return slow_cpu
    return next((slow_gpus[gpu] for gpu in gpus if gpu in slow_gpus), None)
