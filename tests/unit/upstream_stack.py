"""Upstream over fake engines on real sockets, without the rest of a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from msgspec.structs import replace
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from classifier import PromptClass, PromptFeatures
from router.policy.decide import decide
from router.policy.decision import Decision, RoutingQuery
from router.policy.table import PolicyStore
from router.settings import Settings
from router.telemetry.tracing import Telemetry
from router.upstream.client import Upstream
from router.upstream.engine_request import EngineRequest
from router.upstream.engine_stream import EngineStream
from router.upstream.progress import Continuable
from router.upstream.sse import Chunk
from router.upstream.transport import EngineTransport
from tests import waiting
from tests.fakes.engine import Behaviour, FakeEngine
from tests.turned import turned
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import PRECISIONS, STANDARD_TIERS, ReplicaStatus, TierName, TierSpec

LIMIT = 4  # slots of each replica
QUERY = RoutingQuery(
    PromptFeatures(2, 1, 1, True, False, False, None, PromptClass.CHAT, 0.9, ()),
    20,
    100,
)
HI = EngineRequest(
    document={
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 100,
        "temperature": 0.0,
    },
    request_id="r1",
    priority=0,
    wants_usage=True,
    chat=[{"role": "user", "content": "hi"}],
    continuable=Continuable(100, {"temperature": 0.0}, 0),
)


@dataclass(slots=True)
class UpstreamStack:
    """Upstream, its fleet of one replica a tier, and their engines' behaviours."""

    upstream: Upstream
    fleet: Fleet
    policy: PolicyStore
    settings: Settings
    telemetry: Telemetry
    engines: dict[TierName, Behaviour]

    def replica(self, tier: TierName) -> Replica:
        return next(r for r in self.fleet.replicas if r.spec.name is tier)

    def decision(self, tier: TierName = TierName.FAST, **query: Any) -> Decision:
        decision = decide(
            replace(QUERY, hint=tier, **query), self.fleet.snapshot(), self.policy.table
        )
        assert decision.tier is tier
        return decision

    async def stream(
        self, tier: TierName = TierName.FAST, **request: Any
    ) -> EngineStream:
        answer = await self.upstream.open(
            self.decision(tier), replace(HI, **request), elsewhere=False
        )
        assert isinstance(answer, EngineStream)
        return answer

    def held(self) -> int:
        return sum(
            r.state.in_flight + r.state.slots + r.state.prompt_tokens + r.output_tokens
            for r in self.fleet.replicas
        )

    def asked(self) -> list[int]:
        return [len(engine.requests) for engine in self.engines.values()]


@asynccontextmanager
async def upstream_stack(
    overrides: dict[str, Any] | None = None,
    telemetry: Telemetry | None = None,
    **behaviours: Behaviour,
) -> AsyncIterator[UpstreamStack]:
    """Run an upstream in front of one fake engine a tier; ``overrides`` are settings of ``upstream``."""
    async with AsyncExitStack() as cleanup:
        engines = {name: behaviours.get(name, Behaviour()) for name in STANDARD_TIERS}
        urls = [
            await cleanup.enter_async_context(_serving(FakeEngine(b).app))
            for b in engines.values()
        ]
        settings = turned({"upstream": overrides or {}})
        specs = tuple(
            TierSpec(n, 4096, 16, LIMIT, urls=(url,), precision=PRECISIONS[n])
            for n, url in zip(STANDARD_TIERS, urls, strict=True)
        )
        fleet = Fleet(specs)
        for spec in specs:
            fleet.add(
                Replica(
                    f"{spec.name}-0",
                    spec,
                    spec.urls[0],
                    "",
                    "fake",
                    status=ReplicaStatus.READY,
                )
            )
        policy, telemetry = (
            PolicyStore(settings.policy, fleet, "made-8B"),
            telemetry or Telemetry(None),
        )
        upstream = Upstream(
            fleet, EngineTransport(), settings.upstream, telemetry, policy
        )
        cleanup.push_async_callback(upstream.aclose)
        yield UpstreamStack(upstream, fleet, policy, settings, telemetry, engines)


@asynccontextmanager
async def _serving(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an application by uvicorn's protocol alone: its server takes tenths of a second to start and to stop."""
    config, state = (
        uvicorn.Config(app, log_config=None, ws="none", lifespan="off"),
        ServerState(),
    )
    config.load()
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(
            config=config, server_state=state, app_state={}
        ),
        "127.0.0.1",
    )
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for connection in state.connections:
            connection.transport.abort()
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


async def text_of(answer: EngineStream, *, found: list[str] | None = None) -> str:
    """Return an answer's text; what came before a fault stays in ``found``."""
    found = [] if found is None else found

    def take(chunks: Sequence[Chunk]) -> bool:
        found.extend(chunk.text for chunk in chunks)
        return False  # so that each part is asked for

    await answer.relay(take, partial(asyncio.sleep, 0))
    return "".join(found)


async def until(happened: Callable[[], bool]) -> None:
    """Wait until something has happened, as soon as the event loop shows it."""
    await waiting.until(happened, poll_s=0.001)
