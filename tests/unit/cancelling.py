"""Requests that are cut off at one of their awaits, and what a router still holds afterwards.

A request's tasks are stepped: each time one of them waits counts as an await of the request. At the chosen await the request
ends in one of three ways. So every run cuts the request off at the same moment, however short that moment is.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from starlette.types import ASGIApp, Message

from router.api.endpoint import Answering
from router.auth.api_keys import add_key
from router.server.responder import OUT
from router.upstream.transport import ConnectionState
from router.upstream.upstream import PASSED_AT_ONCE
from tests.fakes.engine import Behaviour, FakeEngine, serving
from tests.unit.router_stack import Stack, router_stack
from tests.unit.sent_responder import SentResponder
from tests.waiting import until, within
from tiers.breaker import BreakerOptions
from tiers.fleet import Lease
from tiers.spec import STANDARD_TIERS, TierName

# "leaves": the client disconnects while the request waits.
# "served": the client disconnects once what the request waits for is there, but before the request has it.
# "stops": the server cancels the request.
Way = Literal["leaves", "served", "stops"]
WAYS: tuple[Way, ...] = get_args(Way)
PATIENCE_S = 30.0
OCCUPIED_S = 0.03  # After so long a place frees for requests that queue.
FAST, BALANCED, PRECISE = STANDARD_TIERS


class Taken(SentResponder):
    """A client that takes each part of an answer a moment later, and can no longer leave after the last part."""

    async def send(self, message: Any) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.body" and not message.get(
            "more_body", False
        ):
            self.task = None

    def write(self, _events: Any) -> bool:
        return True


@dataclass(slots=True)
class Cut:
    """Ends a request at one of its awaits.

    Attributes:
        at: The number of the await at which the request ends, from 1.
        awaits: How many awaits there were so far.
        request: The request's own task.
        out: The client, as the server sees it.
        gone: Is set once the client has left.
    """

    at: int
    way: Way
    awaits: int = 0
    request: asyncio.Task[None] | None = None
    out: Taken = field(default_factory=Taken)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def fired(self) -> bool:
        return self.awaits >= self.at

    def note(self, awaited: Any) -> None:
        """Note that a task of the request waits, and end the request if it is to end here."""
        self.awaits += 1
        if self.awaits != self.at:
            return
        if self.way == "stops":
            assert self.request is not None
            self.request.cancel()
        elif self.way == "served" and isinstance(awaited, asyncio.Future):
            # This callback is called before the task's own, so the task does not run in between.
            awaited.add_done_callback(lambda _: self._leave())
        else:
            self._leave()

    def _leave(self) -> None:
        self.out.leave()
        self.gone.set()


_CUT: ContextVar[Cut | None] = ContextVar("cut", default=None)


class _Stepped(Coroutine[Any, Any, Any]):
    """A coroutine whose awaits are noted."""

    def __init__(self, work: Coroutine[Any, Any, Any], cut: Cut) -> None:
        self._work = work
        self._cut = cut
        self.__qualname__ = work.__qualname__

    def send(self, value: Any) -> Any:
        awaited = self._work.send(value)
        self._cut.note(awaited)
        return awaited

    def throw(self, *error: Any) -> Any:
        awaited = self._work.throw(*error)
        self._cut.note(awaited)
        return awaited

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()


def _stepping(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
) -> asyncio.Task[Any]:
    """Make a task; one that belongs to a request that is to be cut off is stepped."""
    cut = _CUT.get()
    # A generator that is closed has no name.
    name = getattr(work, "__qualname__", "")
    if cut is None or not name:
        return asyncio.Task(work, loop=loop, **options)
    task = asyncio.Task(_Stepped(work, cut), loop=loop, **options)
    if cut.request is None:
        cut.request = task
    return task


class OpenSpans(SpanProcessor):
    """Counts the spans that have begun and not ended."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.begun += 1

    def on_end(self, span: Any) -> None:
        self.ended += 1

    @property
    def open(self) -> int:
        return self.begun - self.ended


@dataclass(frozen=True, slots=True)
class Scenario:
    """A request, and the state of the fleet when it arrives.

    Attributes:
        engines: The unusual fields of the engines' behaviours, by tier.
        occupied: Whether every place is taken when the request arrives.
    """

    name: str
    path: str
    body: Mapping[str, Any]
    engines: Mapping[TierName, Mapping[str, Any]] = field(default_factory=dict)
    occupied: bool = False


CHAT = {
    "messages": [{"role": "user", "content": "Hello, how are you today?"}],
    "max_tokens": 7,
}
PROMPT = {"prompt": "Hello, how are you today?", "max_tokens": 7}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate, streamed": ("/generate", PROMPT),
    "generate, whole": ("/generate", {**PROMPT, "stream": False}),
    "generate, resumable": ("/generate", {**PROMPT, "resumable": True}),
    "chat, streamed": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "chat, whole": ("/v1/chat/completions", CHAT),
    "completion, whole": ("/v1/completions", {"prompt": "Hello", "max_tokens": 3}),
    "tokenize": ("/tokenize", {"prompt": "a b"}),
    "embeddings": ("/v1/embeddings", {"model": "e", "input": ["a", "b"]}),
}
STREAMS = ("generate, streamed", "generate, resumable", "chat, streamed")
TROUBLES: dict[str, dict[TierName, dict[str, Any]]] = {
    "fails first": {FAST: {"status": 500}},
    "breaks midway": {FAST: {"break_after": 3}},
    "breaks twice": {FAST: {"break_after": 2}, BALANCED: {"break_after": 5}},
    "late": {FAST: {"first_delay_s": 0.3}},
}


def scenarios() -> list[Scenario]:
    """Return every kind of request as usual, and with each trouble that it can have."""
    usual = [Scenario(name, path, body) for name, (path, body) in REQUESTS.items()]
    troubled = []
    for name in ("generate, streamed", "generate, resumable", "chat, whole"):
        path, body = REQUESTS[name]
        troubled.append(Scenario(f"{name}, queued", path, body, occupied=True))
    for name in STREAMS:
        path, body = REQUESTS[name]
        for trouble, engines in TROUBLES.items():
            troubled.append(
                Scenario(f"{name}, {trouble}", path, body=body, engines=engines)
            )
    return usual + troubled


@dataclass(slots=True)
class CutRouter:
    """A router whose requests are cut off.

    Attributes:
        stack: The router and its engines.
        engines: The behaviours of all engines, also of the one for embeddings.
        key: A key with quotas.
    """

    stack: Stack
    engines: dict[TierName | str, Behaviour]
    spans: OpenSpans
    key: str
    _generate: Answering
    _usual: Counter[str] = field(default_factory=Counter)

    async def cut_off(
        self, scenario: Scenario, way: Way, at: int
    ) -> tuple[bool, list[str]]:
        """Cut one request off, and wait until nothing is left of it.

        Returns:
            Whether the request had that many awaits, and everything that was wrong.
        """
        cut = Cut(at, way)
        self._prepare(scenario)
        occupied = self._occupy() if scenario.occupied else []
        asyncio.get_running_loop().call_later(OCCUPIED_S, _release, occupied)
        context = copy_context()
        context.run(_CUT.set, cut)
        request = context.run(asyncio.create_task, self.request(scenario, cut))
        done, _ = await asyncio.wait({request}, timeout=PATIENCE_S)
        wrong = []
        if not done:
            request.cancel()
            wrong.append("it has no end")
        elif not request.cancelled() and request.exception() is not None:
            wrong.append(f"it raised {request.exception()!r}")
        self.well()
        left = await self.left()
        wrong += [f"{count} {what}" for what, count in left.items()]
        return cut.fired, wrong

    async def request(self, scenario: Scenario, cut: Cut) -> None:
        """Send a request to the application, from a client that takes each part of the answer a moment later."""
        unread = [
            {
                "type": "http.request",
                "body": json.dumps(scenario.body).encode(),
                "more_body": False,
            }
        ]
        headers = {
            "host": "127.0.0.1",
            "content-type": "application/json",
            "authorization": f"Bearer {self.key}",
        }

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await within(cut.gone.wait(), "the cut request to end")
            return {"type": "http.disconnect"}

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": scenario.path,
            "raw_path": scenario.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (name.encode(), value.encode()) for name, value in headers.items()
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            OUT: cut.out,
        }
        await self.stack.app(scope, receive, cut.out.send)

    async def left(self, patience_s: float = PATIENCE_S) -> dict[str, int]:
        """Wait for a while until nothing is held, and return what still is."""
        deadline = time.monotonic() + patience_s
        while (held := self.held()) and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
        return held

    def held(self) -> dict[str, int]:
        """Return how much of each thing that requests hold is held now, without what is not."""
        pipeline = self._generate.service.pipeline
        replicas = self.stack.fleet.replicas
        quotas = pipeline.quotas
        upstream = pipeline.failover.upstream
        connections = [
            *upstream._transport._connections,
            *upstream._passing_transport._connections,
        ]
        tasks = _tasks() - self._usual
        amounts = {
            "leases": sum(replica.state.in_flight for replica in replicas),
            "tokens on replicas": sum(
                replica.state.prompt_tokens
                + replica.output_tokens
                + replica.state.kv.held
                for replica in replicas
            ),
            "probes": sum(
                replica.breaker._held_until is not None for replica in replicas
            ),
            "places of keys": pipeline.admission._held.total(),
            "waiting": pipeline.admission.waiting,
            "open requests": len(pipeline.registry.open),
            "quota slots": len(quotas._open),
            "slots in the ledger": sum(
                len(counts.places) for counts in quotas._local._counts_by_key.values()
            ),
            "connections": sum(
                connection.state is ConnectionState.ACTIVE for connection in connections
            ),
            "small requests": sum(
                PASSED_AT_ONCE - places._value for places in upstream._passing.values()
            ),
            "kept streams": len(self._generate.service.streams._streams),
            "spans": self.spans.open,
            "requests at engines": sum(
                engine.running + engine.held for engine in self.engines.values()
            ),
        }
        amounts |= {f"task {name}": count for name, count in tasks.items()}
        return {what: count for what, count in amounts.items() if count}

    async def begin(self) -> None:
        """Send one request of each kind, and note which tasks there are from then on."""
        for scenario in scenarios()[: len(REQUESTS)]:
            await self.request(scenario, Cut(0, "leaves"))
        self._usual = _tasks()
        while await self.left(1):
            self._usual = _tasks()

    def _prepare(self, scenario: Scenario) -> None:
        self.well()
        for tier, fields in scenario.engines.items():
            for name, value in fields.items():
                setattr(self.engines[tier], name, value)

    def well(self) -> None:
        """Let all engines be well again, and let the router know it."""
        usual = Behaviour()
        for engine in self.engines.values():
            for name in ("status", "break_after", "delay_s", "first_delay_s"):
                setattr(engine, name, getattr(usual, name))
        for replica in self.stack.fleet.replicas:
            if replica.breaker._held_until is None:
                replica.breaker.reset()

    def _occupy(self) -> list[Lease]:
        """Take every place of the fleet."""
        fleet = self.stack.fleet
        leases = []
        for tier in STANDARD_TIERS:
            while (
                lease := fleet.lease(tier, prompt_tokens=0, max_tokens=0)
            ) is not None:
                leases.append(lease)
        return leases


def _tasks() -> Counter[str]:
    return Counter(
        getattr(task.get_coro(), "__qualname__", "generator")
        for task in asyncio.all_tasks()
    )


def _release(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release()


@asynccontextmanager
async def cut_router(folder: Path, redis_url: str = "") -> AsyncIterator[CutRouter]:
    """Run a router with quotas and a queue, all tiers profiled and warm."""
    async with AsyncExitStack() as cleanup:
        spans = OpenSpans()
        tracing = TracerProvider()
        embeddings = Behaviour()
        tracing.add_span_processor(spans)
        url = await cleanup.enter_async_context(serving(FakeEngine(embeddings).app))
        keys = folder / "keys.json"
        key, _ = add_key(
            keys,
            "cut",
            concurrent_requests=1000,
            requests_per_minute=10**6,
            tokens_per_minute=10**9,
        )
        settings = {
            "auth": {"keys_file": str(keys)},
            "openai": {"embeddings_urls": [url]},
            "server": {"resume_s": 0.05},
            "state": {"redis_url": redis_url},
            "tiers": {tier: {"max_in_flight": 4} for tier in STANDARD_TIERS},
            "upstream": {"retry_reserve": 10**6, "breaker": BreakerOptions(10**6)},
        }
        stack = await cleanup.enter_async_context(
            router_stack(folder, settings, tracing)
        )
        generate = _endpoint(stack.app)
        await until(
            lambda: all(
                replica.state.speed is not None for replica in stack.fleet.replicas
            )
        )
        engines: dict[TierName | str, Behaviour] = {
            **stack.engines,
            "embeddings": embeddings,
        }
        router = CutRouter(stack, engines, spans=spans, key=key, _generate=generate)
        loop = asyncio.get_running_loop()
        await router.begin()
        loop.set_task_factory(_stepping)
        try:
            yield router
        finally:
            loop.set_task_factory(None)


def _endpoint(app: ASGIApp) -> Answering:
    """Return the endpoint of /generate: the application with routes is inside layers of middleware."""
    layers: list[Any] = [app]
    for layer in layers:
        if hasattr(layer, "routes"):
            (endpoint,) = [
                route.endpoint for route in layer.routes if route.path == "/generate"
            ]
            assert isinstance(endpoint, Answering)
            return endpoint
        # A layer is a function with the next layer in its closure, or an object that has it.
        inner = [
            cell.cell_contents for cell in getattr(layer, "__closure__", None) or ()
        ]
        inner.append(getattr(layer, "_app", None))
        layers += filter(callable, inner)
    raise LookupError("no application with routes")
