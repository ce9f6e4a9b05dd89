"""Engines that a real supervisor starts, each a process of its own with the fake in it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.fakes import engine as fake
from tests.ports import reserved_range
from tests.waiting import until
from tiers.fleet import Fleet
from tiers.lifecycle.options import SupervisorOptions
from tiers.lifecycle.supervisor import Supervisor
from tiers.replica import Replica
from tiers.spec import EngineLaunch, EnginePlacement, ReplicaStatus, TierName, TierSpec


@dataclass(slots=True)
class Own:
    """A supervisor with engines in processes of their own.

    Attributes:
        seen: Every state and detail that each replica went through.
    """

    fleet: Fleet
    supervisor: Supervisor
    behaviour: Path
    seen: list[tuple[str, ReplicaStatus, str | None]] = field(default_factory=list)

    @property
    def first(self) -> Replica:
        return self.fleet.replicas[0]

    def replica(self, name: str) -> Replica | None:
        return next((r for r in self.fleet.replicas if r.id == name), None)

    def next_starts(self, **fields: Any) -> None:
        """Set the behaviour that engines are started with from now on."""
        self.behaviour.write_text(json.dumps(fields))

    async def behave(self, replica: Replica, **fields: Any) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(f"{replica.url}/fake", json=fields)

    def details(self, state: ReplicaStatus) -> list[str]:
        return [detail for _, was, detail in self.seen if was is state and detail]


@asynccontextmanager
async def own_engines(
    tmp_path: Path,
    monkeypatch: Any,
    *tiers: TierName,
    ready: bool = True,
    behaviour: Any = None,
    gib: float = 1,
    **options: Any,
) -> AsyncIterator[Own]:
    """Start one engine for each tier, wait until all are ready, or have failed; ``gib``: KV cache of each, which is there."""
    memory = psutil.virtual_memory()
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: memory._replace(available=32 << 30)
    )
    python = tmp_path / "python"
    serve = f'exec {shlex.quote(sys.executable)} {shlex.quote(fake.__file__)} "$@"'
    python.write_text(
        f"#!/bin/sh\necho 'INFO Selected FakeLinearKernel for FakeLayers'\n{serve}\n"
    )
    python.chmod(0o755)
    file = tmp_path / "behaviour.json"
    file.write_text(json.dumps(behaviour or {}))
    monkeypatch.setenv("FAKE_BEHAVIOUR", str(file))
    names = tiers or (TierName.FAST,)
    specs = tuple(
        TierSpec(n, 2048, 16, 32, checkpoint=tmp_path / n, digest=f"digest of {n}")
        for n in names
    )
    for spec in specs:
        assert spec.checkpoint is not None
        spec.checkpoint.mkdir(exist_ok=True)
    # also for those that take the place of others
    first = reserved_range(len(specs) + 4)
    ports = range(first, first + len(specs))
    launches = [
        EngineLaunch(
            spec,
            EnginePlacement(kv_cache_gib=gib),
            python,
            "fake",
            "127.0.0.1",
            port,
            "key",
        )
        for spec, port in zip(specs, ports, strict=True)
    ]
    fleet = Fleet(specs)
    own = Own(
        fleet,
        Supervisor(
            fleet, SupervisorOptions(tmp_path / "logs", stop_grace_s=2, **options)
        ),
        file,
    )
    own.supervisor.changes.on_change = lambda r: own.seen.append(
        (r.id, r.state.status, r.state.detail)
    )
    own.supervisor.start(launches)
    try:
        settled = {ReplicaStatus.READY} if ready else {ReplicaStatus.FAILED}
        await until(lambda: all(r.state.status in settled for r in fleet.replicas))
        yield own
    finally:
        await own.supervisor.stop()
