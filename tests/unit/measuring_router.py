"""A router that takes fake engines for its own, and therefore measures them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from starlette.types import ASGIApp

from classifier import EstimatingCounter
from router.api.problems import refusal
from router.app import App
from router.auth.access import KeyStore
from router.profiling import auto_profile
from router.profiling.profile_files import JOURNAL
from router.server.http_protocol import protocol_for
from router.telemetry.tracing import make_telemetry
from tests.fakes.engine import Behaviour, FakeEngine, serving, serving_all
from tests.fakes.model_engine import ModelEngine, ThinkingModel
from tests.turned import turned
from tests.unit.router_stack import no_faults_in_the_router
from tests.waiting import until
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierSpec


def task(kind: str, number: int) -> dict[str, Any]:
    """Return a task of a class, as a line of the suite has it."""
    return {
        "id": f"{kind}-{number}",
        "class": kind,
        "complexity": "moderate",
        "prompt": f"{kind} {number}",
        "max_tokens": 8,
        "check": {"type": "contains", "all": ["Paris"]},
    }


TASKS = [
    *(task("chat", number) for number in range(8)),
    *(task("code", number) for number in range(8)),
]
QUICK = {"auto": True, "idle_s": 0.1, "latency_s": 4.0}


@dataclass(slots=True)
class Measuring:
    """A router whose engines count as started by itself."""

    url: str
    client: httpx.AsyncClient
    fleet: Fleet
    engines: list[Behaviour]
    folder: Path

    async def profiling(self) -> dict[str, Any]:
        """Return what /tiers says of the measurement."""
        answer = await self.client.get(f"{self.url}/tiers")
        profiling: dict[str, Any] = answer.json()["profiling"]
        return profiling

    async def comes_to(self, **wanted: Any) -> dict[str, Any]:
        """Wait until /tiers says these things of the measurement, and return all that it says."""
        seen: dict[str, Any] = {}

        async def has_come() -> bool:
            seen.clear()
            seen.update(await self.profiling())
            return seen | wanted == seen

        try:
            await until(has_come, f"the measurement to come to {wanted}")
        except AssertionError as error:
            raise AssertionError(f"{error}, with {seen}") from None
        return seen

    @property
    def journal(self) -> list[Any]:
        """Return the tasks and tiers of the answers that are in the journal."""
        path = self.folder / JOURNAL
        lines = path.read_text().splitlines() if path.exists() else []
        answers = [json.loads(line)["answer"] for line in lines]
        return [(answer["task"], answer["tier"]) for answer in answers]

    @property
    def computing(self) -> int:
        return sum(engine.running for engine in self.engines)


@asynccontextmanager
async def measuring_router(
    folder: Path,
    engines: list[Behaviour],
    *,
    ready: bool = True,
    profile: dict[str, Any] | None = None,
    model: ThinkingModel | None = None,
) -> AsyncIterator[Measuring]:
    """Run a router in front of engines that it takes for its own; with a ``model`` they answer as that does."""
    async with AsyncExitStack() as cleanup:
        cleanup.enter_context(no_faults_in_the_router())
        (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, TASKS)))
        cleanup.enter_context(
            patch.object(auto_profile, "TASKS", folder / "tasks.jsonl")
        )
        cleanup.enter_context(patch.object(auto_profile, "FILLS_CONTEXT", new=False))
        urls = await cleanup.enter_async_context(
            serving_all(*(_app(engine, model) for engine in engines))
        )
        settings = turned(
            {
                "policy": {"profiles": str(folder), "max_slowdown": 1e9},
                "profile": {**QUICK, **(profile or {})},
            }
        )
        specs = tuple(
            TierSpec(
                name,
                8192,
                max_num_seqs=8,
                max_in_flight=16,
                digest=f"digest of {name}",
            )
            for name in STANDARD_TIERS
        )
        fleet = Fleet(specs, machine="m")
        for spec, url in zip(fleet.specs, urls, strict=True):
            state = ReplicaStatus.READY if ready else ReplicaStatus.STARTING
            replica = Replica(f"{spec.name}-0", spec, url=url, api_key="", model="fake")
            fleet.add(replica).mark(state)
        telemetry = make_telemetry("0", settings.telemetry)
        app = App(
            settings,
            fleet,
            counter=EstimatingCounter(),
            telemetry=telemetry,
            model="fake",
            keys=KeyStore(settings.auth.keys_file),
        ).asgi
        url = await cleanup.enter_async_context(
            serving(app, http=protocol_for(settings.server, refusal))
        )
        client = await cleanup.enter_async_context(
            httpx.AsyncClient(timeout=20, trust_env=False)
        )
        yield Measuring(url, client, fleet=fleet, engines=engines, folder=folder)


def _app(engine: Behaviour, model: ThinkingModel | None) -> ASGIApp:
    return FakeEngine(engine).app if model is None else ModelEngine(model, engine).app


def engines(delay_s: float = 0.003) -> list[Behaviour]:
    """Return engines of which each is slower than the one before: a tier that is not faster is not measured."""
    return [Behaviour(delay_s=delay_s * factor) for factor in (1, 1.5, 2)]
