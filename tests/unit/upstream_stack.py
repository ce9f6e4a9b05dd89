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
from router.upstream.engine_request import EngineRequest
from router.upstream.engine_stream import EngineStream
from router.upstream.progress import ContinuationTerms
from router.upstream.sse import Chunk
from router.upstream.transport import EngineTransport
from router.upstream.upstream import Upstream
from tests import waiting
from tests.fakes.engine import Behaviour, FakeEngine
from tests.turned import turned
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import PRECISIONS, STANDARD_TIERS, ReplicaStatus, TierName, TierSpec

LIMIT = 4  # Each replica has so many slots.
QUERY = RoutingQuery(
    PromptFeatures(
        2,
        words=1,
        tokens=1,
        tokens_exact=True,
        contains_code=False,
        asks_for_code=False,
        language=None,
        prompt_class=PromptClass.CHAT,
        confidence=0.9,
        signals=(),
    ),
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
    continuation_terms=ContinuationTerms(100, {"temperature": 0.0}, 0),
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
        return next(
            replica for replica in self.fleet.replicas if replica.spec.name is tier
        )

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
            replica.state.in_flight
            + replica.state.slots
            + replica.state.prompt_tokens
            + replica.output_tokens
            for replica in self.fleet.replicas
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
            await cleanup.enter_async_context(_serving(FakeEngine(behaviour).app))
            for behaviour in engines.values()
        ]
        settings = turned({"upstream": overrides or {}})
        specs = tuple(
            TierSpec(
                name,
                4096,
                max_num_seqs=16,
                max_in_flight=LIMIT,
                urls=(url,),
                precision=PRECISIONS[name],
            )
            for name, url in zip(STANDARD_TIERS, urls, strict=True)
        )
        fleet = Fleet(specs)
        for spec in specs:
            replica = Replica(
                f"{spec.name}-0",
                spec,
                url=spec.urls[0],
                api_key="",
                model="fake",
                status=ReplicaStatus.READY,
            )
            fleet.add(replica)
        policy = PolicyStore(settings.policy, fleet, "made-8B")
        telemetry = telemetry or Telemetry(None)
        upstream = Upstream(
            fleet,
            EngineTransport(),
            options=settings.upstream,
            telemetry=telemetry,
            policy=policy,
        )
        cleanup.push_async_callback(upstream.aclose)
        yield UpstreamStack(
            upstream,
            fleet,
            policy=policy,
            settings=settings,
            telemetry=telemetry,
            engines=engines,
        )


@asynccontextmanager
async def _serving(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an application by uvicorn's protocol alone: its server takes tenths of a second to start and to stop."""
    config = uvicorn.Config(app, log_config=None, ws="none", lifespan="off")
    state = ServerState()
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
    """Return an answer's text; after a fault, the parts that came before it are in ``found``."""
    found = [] if found is None else found

    def take(chunks: Sequence[Chunk]) -> bool:
        found.extend(chunk.text for chunk in chunks)
        return False  # The relay then hands over each part by itself.

    await answer.relay(take, partial(asyncio.sleep, 0))
    return "".join(found)


async def until(happened: Callable[[], bool]) -> None:
    """Wait until something has happened, and look at almost every turn of the event loop."""
    await waiting.until(happened, poll_s=0.001)
