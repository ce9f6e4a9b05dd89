"""The live stream for the page and ``qarr top``, and the endpoints for recent requests, traces and the policy.

A snapshot of the fleet is made once a second for all readers, and none while there are no readers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeAlias

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from router.api.asgi import (
    body_message,
    cancel_on_disconnect,
    context_of,
    start_message,
)
from router.api.bodies import json_response, render_fleet
from router.api.paths import MAX_LISTED
from router.auth.access import KeyStore
from router.auth.api_keys import Caller
from router.lifecycle import ServerState
from router.pipeline.pipeline import Pipeline
from router.pipeline.registry import WINDOW_S, ActiveRequest
from router.policy.decision import PolicyParameters
from router.policy.not_measured import render_unmeasured
from router.policy.profiles import percentile
from router.policy.render import render_budget, render_loss
from router.profiling.auto_profile import AutoProfile
from router.telemetry.record import Outcome, RequestRecord, Times, render_record
from router.telemetry.request_trace import (
    UnknownTraceError,
    render_listed,
    render_trace,
)
from router.telemetry.settings import TelemetrySettings
from tiers.spec import TierName

TICK_S = 1.0
KEEP_ALIVE_S = 15.0
FIRST_RECORDS = 50
MAX_SHOWN = 200
# Most events that wait for a slow reader; it misses the oldest of more.
MAX_BEHIND = 500
NO_STORE = {"cache-control": "no-store"}
STREAM_HEADERS = {**NO_STORE, "x-accel-buffering": "no"}
# The names of the registry's totals, by their names in the snapshot.
TOTALS = {
    "requests": "requests",
    "ok": Outcome.OK.value,
    "refused": Outcome.REFUSED.value,
    "client_gone": Outcome.CLIENT_GONE.value,
    "retries": "retries",
    "continuations": "continuations",
    "errors": Outcome.ERROR.value,
}
# How a request ended, its times, and whether it met its bounds; None: it had none.
Ending: TypeAlias = "tuple[Outcome, Times, bool | None]"


class Reader:
    """A client of the live stream, with the events that wait for it."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self._events: deque[bytes] = deque(maxlen=MAX_BEHIND)
        self._has_news = asyncio.Event()
        self._is_over = False

    def end(self) -> None:
        self._is_over = True
        self._has_news.set()

    def put(self, event: bytes) -> None:
        self._events.append(event)
        self._has_news.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events that wait, joined; a comment if none comes for ``KEEP_ALIVE_S``."""
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await self._has_news.wait()
            except TimeoutError:
                yield b": nothing new\n"
                continue
            self._has_news.clear()
            batch = b"".join(self._events)
            self._events.clear()
            if batch:
                yield batch
            if self._is_over:
                return


class Live:
    """The snapshots and their readers, and the page's endpoints: ``GET /live`` is itself. One event loop owns it.

    A key sees its own requests, and figures of all. The streams have no end of their own: they are ended when the router
    shuts down, and when their key is no longer in force.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        profiling: AutoProfile,
        *,
        server_state: ServerState,
        keys: KeyStore,
        settings: TelemetrySettings,
        about: Mapping[str, str],
    ) -> None:
        self._pipeline = pipeline
        self._profiling = profiling
        self._server_state = server_state
        self._keys = keys
        self._settings = settings
        self._about = about
        # Tokens that each replica has generated, and how many a second; by the replica's id.
        self._generated_tokens: dict[str, int] = {}
        self._tokens_per_s: dict[str, float] = {}
        self._readers: set[Reader] = set()
        self._has_readers = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        context = context_of(scope)
        cancel_on_disconnect(scope)
        with self.watching(context.caller) as reader:
            start = start_message(
                context.response_headers,
                "text/event-stream; charset=utf-8",
                STREAM_HEADERS,
            )
            await send(start)
            async for events in reader.events():
                await send(body_message(events, more=True))
            await send(body_message(b"", more=False))

    @contextmanager
    def watching(self, caller: Caller) -> Iterator[Reader]:
        """Give a reader the last requests and the fleet, then whatever happens, until the block ends."""
        registry = self._pipeline.registry
        reader = Reader(caller)
        registry.tell()
        visible_records = [
            record for record in registry.recent if caller.sees(record.key_id)
        ]
        for record in visible_records[-FIRST_RECORDS:]:
            reader.put(_event(b"request", render_record(record)))
        reader.put(_event(b"fleet", self.fleet(caller)))
        if not self._readers:
            registry.observers.append(self._show)
        self._readers.add(reader)
        self._has_readers.set()
        try:
            yield reader
        finally:
            self._readers.discard(reader)
            if not self._readers:
                registry.observers.remove(self._show)
                self._has_readers.clear()

    async def run(self) -> None:
        while True:
            await self._has_readers.wait()
            self._measure_speed(math.inf)
            measured_at = time.monotonic()
            while self._readers:
                await asyncio.sleep(TICK_S)
                now = time.monotonic()
                self._measure_speed(now - measured_at)
                measured_at = now
                self._broadcast()

    def _broadcast(self) -> None:
        """Send each reader the snapshot that it may see; end the streams of those that may no longer read."""
        events: dict[Caller, bytes] = {}
        for reader in self._readers:
            caller = reader.caller
            if not self._keys.holds(caller):
                reader.end()
                continue
            if caller not in events:
                events[caller] = _event(b"fleet", self.fleet(caller))
            reader.put(events[caller])
            if not self._server_state.open:
                reader.end()

    def fleet(self, caller: Caller) -> dict[str, Any]:
        """Return the snapshot as JSON values: the fleet, and the open requests that the caller may see."""
        pipeline = self._pipeline
        registry = pipeline.registry
        now = time.monotonic()
        registry.tell()
        rendered_fleet = self._render_fleet(caller, now)
        open_requests = registry.open
        visible_requests = (
            request
            for request in open_requests
            if caller.sees(request.context.caller.key_id)
        )
        totals = {name: registry.totals[total] for name, total in TOTALS.items()}
        in_flight = [
            render_open(request, now) for request in islice(visible_requests, MAX_SHOWN)
        ]
        return {
            "at": round(time.time(), 3),
            "version": self._about["version"],
            "window_s": WINDOW_S,
            "notice": self._about["notice"] or None,
            "trace_url": self._about["trace_url"] or None,
            **rendered_fleet,
            "profiling": self._profiling.render(inside=caller.sees_all),
            "loss_budget": render_budget(pipeline.policy),
            "waiting": pipeline.admission.waiting,
            "in_flight": in_flight,
            "in_flight_total": len(open_requests),
            "totals": totals,
        }

    def _render_fleet(self, caller: Caller, now: float) -> dict[str, Any]:
        """Return the fleet with each replica's speed, and what became of each tier's last requests."""
        fleet = self._pipeline.fleet
        endings = _endings_by_tier(self._pipeline.registry.window, now - WINDOW_S)
        rendered_fleet = render_fleet(
            fleet.snapshot(),
            model=self._about["model"],
            machine=fleet.machine,
            sources=fleet.sources,
            inside=caller.sees_all,
        )
        for tier in rendered_fleet["tiers"]:
            replicas = tier["replicas"]
            for replica in replicas:
                tokens_per_s = self._tokens_per_s.get(replica["id"], 0.0)
                replica["tokens_per_s"] = round(tokens_per_s, 1)
            tier["tokens_per_s"] = round(
                sum(replica["tokens_per_s"] for replica in replicas), 1
            )
            tier.update(_summary(endings.get(tier["tier"], ())))
        return rendered_fleet

    def _show(self, record: RequestRecord) -> None:
        event = _event(b"request", render_record(record))
        for reader in self._readers:
            if reader.caller.sees(record.key_id):
                reader.put(event)

    def _measure_speed(self, elapsed_s: float) -> None:
        """Compute each replica's tokens a second from what it has generated since the last measurement."""
        tokens_before = self._generated_tokens
        self._generated_tokens = {
            replica.id: replica.work.generated
            for replica in self._pipeline.fleet.replicas
        }
        self._tokens_per_s = {
            replica_id: (tokens - tokens_before.get(replica_id, tokens)) / elapsed_s
            for replica_id, tokens in self._generated_tokens.items()
        }

    def routes(self) -> list[Route]:
        return [
            Route("/live", self, methods=["GET"]),
            Route("/requests", self._listed, methods=["GET"]),
            Route("/traces", self._listed, methods=["GET"]),
            Route("/traces/{trace_id}", self._trace, methods=["GET"]),
            Route("/policy", self._policy, methods=["GET"]),
        ]

    async def _listed(self, request: Request) -> Response:
        """Answer with the last requests, or with the traces of the same requests."""
        limit = _limit(request)
        caller = context_of(request.scope).caller
        list_name = request.url.path.rpartition("/")[2]
        render = render_record if list_name == "requests" else render_listed
        visible_records = (
            record
            for record in reversed(self._pipeline.registry.kept())
            if caller.sees(record.key_id)
        )
        rendered = [render(record) for record in islice(visible_records, limit)]
        scope = "all" if caller.sees_all else "own"
        return _json({"scope": scope, list_name: rendered})

    async def _trace(self, request: Request) -> Response:
        caller = context_of(request.scope).caller
        trace_id = request.path_params["trace_id"]
        visible_records = [
            record
            for record in self._pipeline.registry.kept()
            if record.trace_id == trace_id and caller.sees(record.key_id)
        ]
        if not visible_records:
            raise UnknownTraceError(
                f"a router keeps the traces of its own last requests ({self._settings.recent_requests}), and of as many "
                "that failed or missed their SLA: ask the router that served the request, or look in the trace viewer"
            )
        rendered = render_trace(visible_records, inside=caller.sees_all)
        rendered["trace_url"] = self._settings.trace_address(rendered["trace_id"])
        return _json(rendered)

    async def _policy(self, _request: Request) -> Response:
        self._pipeline.registry.tell()
        policy = self._pipeline.policy
        table = policy.table
        max_loss = {
            prompt_class.value: bound for prompt_class, bound in table.max_loss.items()
        }
        return _json(
            {
                "max_loss": max_loss,
                "loss_budget": render_budget(policy),
                "negligible_loss": table.negligible_loss,
                "losses": _render_losses(table),
                "pointless": policy.pointless,
                "not_measured": render_unmeasured(policy.not_measured),
                "worse": policy.worse,
                "sla_confidence": table.sla_confidence,
            }
        )


def _render_losses(table: PolicyParameters) -> dict[str, Any]:
    """Return the expected losses by tier, class and complexity, as JSON values."""
    rendered: dict[str, Any] = {}
    for tier, losses_by_class in table.losses.items():
        rendered_by_class = {}
        for prompt_class, losses_by_complexity in losses_by_class.items():
            rendered_by_class[prompt_class.value] = {
                complexity.value: render_loss(loss)
                for complexity, loss in losses_by_complexity.items()
            }
        rendered[tier] = rendered_by_class
    return rendered


def _endings_by_tier(
    window: Iterable[tuple[float, TierName | None, Outcome, Times, bool | None]],
    since: float,
) -> Mapping[TierName | None, list[Ending]]:
    """Group the requests that have ended since a monotonic time by their tiers."""
    endings: defaultdict[TierName | None, list[Ending]] = defaultdict(list)
    for ended_at, tier, outcome, times, sla_met in window:
        if ended_at >= since:
            endings[tier].append((outcome, times, sla_met))
    return endings


def _summary(endings: Sequence[Ending]) -> dict[str, Any]:
    errors = 0
    ttfts_ms = []
    ttfas_ms = []
    tpots_ms = []
    sla_results = []
    for outcome, times, sla_met in endings:
        errors += outcome is Outcome.ERROR
        if times.ttft_ms is not None:
            ttfts_ms.append(times.ttft_ms)
        if times.ttfa_ms is not None:
            ttfas_ms.append(times.ttfa_ms)
        if times.tpot_ms is not None:
            tpots_ms.append(times.tpot_ms)
        if sla_met is not None:
            sla_results.append(sla_met)
    return {
        "requests": len(endings),
        "errors": errors,
        "ttft_ms": _percentiles(ttfts_ms),
        "ttfa_ms": _percentiles(ttfas_ms),
        "tpot_ms": _percentiles(tpots_ms),
        "sla": {"asked": len(sla_results), "met": sum(sla_results)},
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "p50": round(percentile(values, 0.5), 2),
        "p95": round(percentile(values, 0.95), 2),
    }


def render_open(request: ActiveRequest, now: float) -> dict[str, Any]:
    context = request.context
    decision = request.decision
    overflow = None if request.diverted is None else request.diverted.name
    tier, replica_id = _place_of(request)
    output_tokens = 0
    if request.answer is not None:
        output_tokens = request.answer.output_tokens
    part = request.now_on
    return {
        "request_id": context.request_id,
        "trace_id": context.trace_id,
        "class": decision.query.features.prompt_class.value,
        "tier": tier,
        "overflow": overflow,
        "replica": replica_id,
        "state": request.state,
        "is_thinking": part is not None and part.is_thinking,
        "age_ms": round((now - context.arrived_at) * 1000, 1),
        "prompt_tokens": decision.query.tokens_to_read,
        "output_tokens": output_tokens,
    }


def _place_of(request: ActiveRequest) -> tuple[TierName | None, str | None]:
    """Return the tier and the replica's id that an open request is on; None: there is none, or none yet."""
    if request.diverted is not None:
        return None, None
    part = request.now_on
    if part is not None:
        return part.tier, part.replica_id
    if request.grant is not None:
        return request.decision.tier, request.grant.lease.replica.id
    return request.decision.tier, None


def _event(name: bytes, value: Any) -> bytes:
    return b"event: " + name + b"\ndata: " + to_json(value) + b"\n\n"


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", "100")
    limit = 0
    # int() refuses thousands of digits with an error of its own.
    is_short = len(text) <= len(str(MAX_LISTED))
    if is_short and text.isascii() and text.isdecimal():
        limit = int(text)
    if not 1 <= limit <= MAX_LISTED:
        raise HTTPException(400, f"limit: a number from 1 to {MAX_LISTED} is allowed")
    return limit


def _json(body: object) -> Response:
    return json_response(body, headers=NO_STORE)
