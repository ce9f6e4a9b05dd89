"""Fake engines that a real supervisor starts, each in a process of its own."""

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
        """Return the replica of a name, or None."""
        for replica in self.fleet.replicas:
            if replica.id == name:
                return replica
        return None

    def next_starts(self, **fields: Any) -> None:
        """Set the behaviour that engines are started with from now on."""
        self.behaviour.write_text(json.dumps(fields))

    async def behave(self, replica: Replica, **fields: Any) -> None:
        """Change the behaviour of an engine that runs."""
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(f"{replica.url}/fake", json=fields)

    def details(self, state: ReplicaStatus) -> list[str]:
        """Return the details that replicas had in a state, in order."""
        return [detail for _, status, detail in self.seen if status is state and detail]


@asynccontextmanager
async def own_engines(
    tmp_path: Path,
    monkeypatch: Any,
    *tiers: TierName,
    ready: bool = True,
    behaviour: Any = None,
    gib: float = 1,
    precision: str = "unknown",
    **options: Any,
) -> AsyncIterator[Own]:
    """Start one engine a tier, each with ``gib`` of KV cache, and wait until all are ready, or all have failed."""
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
        TierSpec(
            name,
            2048,
            max_num_seqs=16,
            max_in_flight=32,
            checkpoint=tmp_path / name,
            digest=f"digest of {name}",
            precision=precision,
        )
        for name in names
    )
    for spec in specs:
        assert spec.checkpoint is not None
        spec.checkpoint.mkdir(exist_ok=True)
    # Engines that replace others need ports too.
    first = reserved_range(len(specs) + 4)
    ports = range(first, first + len(specs))
    launches = [
        EngineLaunch(
            spec,
            placement=EnginePlacement(kv_cache_gib=gib),
            python=python,
            served_model="fake",
            host="127.0.0.1",
            port=port,
            api_key="key",
        )
        for spec, port in zip(specs, ports, strict=True)
    ]
    fleet = Fleet(specs)
    supervisor = Supervisor(
        fleet, SupervisorOptions(tmp_path / "logs", stop_grace_s=2, **options)
    )
    own = Own(fleet, supervisor, file)

    def note(replica: Replica) -> None:
        state = replica.state
        own.seen.append((replica.id, state.status, state.detail))

    own.supervisor.changes.on_change = note
    own.supervisor.start(launches)
    try:
        settled = ReplicaStatus.READY if ready else ReplicaStatus.FAILED
        await until(
            lambda: {replica.state.status for replica in fleet.replicas} <= {settled}
        )
        yield own
    finally:
        await own.supervisor.stop()
