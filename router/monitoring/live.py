"""The live stream for the page and ``qarr top``, and the endpoints for recent requests, traces and the policy.

A snapshot of the fleet is made once a second for all readers, and none while there are no readers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

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
from router.api.paths import MOST_LISTED
from router.auth.access import KeyStore
from router.auth.api_keys import Caller
from router.lifecycle import ServerState
from router.pipeline.pipeline import Pipeline
from router.pipeline.registry import WINDOW_S, ActiveRequest
from router.policy.profiles import percentile
from router.policy.render import render_budget, render_loss
from router.profiling.auto_profile import AutoProfile
from router.profiling.shadow_evaluation import ShadowEvaluation
from router.telemetry.record import Outcome, RequestRecord, Times, render_record
from router.telemetry.request_trace import (
    UnknownTraceError,
    render_listed,
    render_trace,
)
from router.telemetry.settings import TelemetrySettings

TICK_S = 1.0
KEEP_ALIVE_S = 15.0
FIRST_RECORDS = 50
MOST_SHOWN = 200
MOST_BEHIND = 500  # events that wait for a slow reader; beyond, it misses the oldest
NO_STORE = {"cache-control": "no-store"}
STREAM_HEADERS = {**NO_STORE, "x-accel-buffering": "no"}
# What the snapshot calls the registry's totals.
TOTALS = {
    name: name
    for name in ("requests", "ok", "refused", "client_gone", "retries", "continuations")
}
TOTALS["errors"] = Outcome.ERROR.value


class Reader:
    """A client of the live stream, with the events that wait for it."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self._events: deque[bytes] = deque(maxlen=MOST_BEHIND)
        self._news = asyncio.Event()
        self._over = False

    def end(self) -> None:
        self._over = True
        self._news.set()

    def put(self, event: bytes) -> None:
        self._events.append(event)
        self._news.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events that wait, joined; a comment if none comes for ``KEEP_ALIVE_S``."""
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await self._news.wait()
            except TimeoutError:
                yield b": nothing new\n"
                continue
            self._news.clear()
            batch = b"".join(self._events)
            self._events.clear()
            if batch:
                yield batch
            if self._over:
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
        evaluation: ShadowEvaluation,
        *,
        server_state: ServerState,
        keys: KeyStore,
        settings: TelemetrySettings,
        about: Mapping[str, str],
    ) -> None:
        self._pipeline, self._profiling, self._evaluation = (
            pipeline,
            profiling,
            evaluation,
        )
        self._server_state, self._keys, self._settings, self._about = (
            server_state,
            keys,
            settings,
            about,
        )
        self._generated: dict[str, int] = {}
        self._rates: dict[str, float] = {}
        self._readers: set[Reader] = set()
        self._wanted = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        context = context_of(scope)
        cancel_on_disconnect(scope)
        with self.watching(context.caller) as reader:
            await send(
                start_message(
                    context.response_headers,
                    "text/event-stream; charset=utf-8",
                    STREAM_HEADERS,
                )
            )
            async for events in reader.events():
                await send(body_message(events, more=True))
            await send(body_message(b"", more=False))

    @contextmanager
    def watching(self, caller: Caller) -> Iterator[Reader]:
        reader = Reader(caller)
        self._pipeline.registry.tell()
        seen = [
            record
            for record in self._pipeline.registry.recent
            if caller.sees(record.key_id)
        ]
        for record in seen[-FIRST_RECORDS:]:
            reader.put(_event(b"request", render_record(record)))
        reader.put(_event(b"fleet", self.fleet(caller)))
        if not self._readers:
            self._pipeline.registry.observers.append(self._show)
        self._readers.add(reader)
        self._wanted.set()
        try:
            yield reader
        finally:
            self._readers.discard(reader)
            if not self._readers:
                self._pipeline.registry.observers.remove(self._show)
                self._wanted.clear()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._count(math.inf)
            since = time.monotonic()
            while self._readers:
                await asyncio.sleep(TICK_S)
                now = time.monotonic()
                self._count(now - since)
                since = now
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
        pipeline, now = self._pipeline, time.monotonic()
        pipeline.registry.tell()
        ended = [each for each in pipeline.registry.window if each[0] >= now - WINDOW_S]
        fleet, inside = pipeline.fleet, caller.sees_all
        rendered = render_fleet(
            fleet.snapshot(),
            self._about["model"],
            fleet.machine,
            fleet.sources,
            inside=inside,
        )
        for tier in rendered["tiers"]:
            for replica in tier["replicas"]:
                replica["tokens_per_s"] = round(self._rates.get(replica["id"], 0.0), 1)
            tier["tokens_per_s"] = round(
                sum(r["tokens_per_s"] for r in tier["replicas"]), 1
            )
            tier.update(
                _summary([each[2:] for each in ended if each[1] is tier["tier"]])
            )
        served, totals = pipeline.registry.open, pipeline.registry.totals
        shown = [
            render_open(r, now) for r in served if caller.sees(r.context.caller.key_id)
        ][:MOST_SHOWN]
        return {
            "at": round(time.time(), 3),
            "version": self._about["version"],
            "window_s": WINDOW_S,
            "notice": self._about["notice"] or None,
            "trace_url": self._about["trace_url"] or None,
            **rendered,
            "profiling": self._profiling.render(inside=caller.sees_all),
            "loss_budget": render_budget(pipeline.policy),
            "waiting": pipeline.admission.waiting,
            "in_flight": shown,
            "in_flight_total": len(served),
            "totals": {name: totals[total] for name, total in TOTALS.items()},
        }

    def _show(self, record: RequestRecord) -> None:
        event = _event(b"request", render_record(record))
        for reader in self._readers:
            if reader.caller.sees(record.key_id):
                reader.put(event)

    def _count(self, elapsed_s: float) -> None:
        before, self._generated = (
            self._generated,
            {r.id: r.work.generated for r in self._pipeline.fleet.replicas},
        )
        self._rates = {
            id_: (n - before.get(id_, n)) / elapsed_s
            for id_, n in self._generated.items()
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
        limit, caller, name = (
            _limit(request),
            context_of(request.scope).caller,
            request.url.path.rpartition("/")[2],
        )
        render = render_record if name == "requests" else render_listed
        seen = (
            record
            for record in reversed(self._pipeline.registry.kept())
            if caller.sees(record.key_id)
        )
        shown = [render(record) for record in islice(seen, limit)]
        return _json({"scope": "all" if caller.sees_all else "own", name: shown})

    async def _trace(self, request: Request) -> Response:
        caller, trace_id = (
            context_of(request.scope).caller,
            request.path_params["trace_id"],
        )
        kept = (
            record
            for record in self._pipeline.registry.kept()
            if record.trace_id == trace_id
        )
        seen = [record for record in kept if caller.sees(record.key_id)]
        if not seen:
            raise UnknownTraceError(
                f"a router keeps the traces of its own last requests ({self._settings.recent_requests}), and of as many "
                "that failed or missed their SLA: ask the router that served the request, or look in the trace viewer"
            )
        rendered = render_trace(seen, inside=caller.sees_all)
        return _json(
            {
                **rendered,
                "trace_url": self._settings.trace_address(rendered["trace_id"]),
            }
        )

    async def _policy(self, _request: Request) -> Response:
        self._pipeline.registry.tell()
        table = self._pipeline.policy.table
        return _json(
            {
                "max_loss": {
                    kind.value: bound for kind, bound in table.max_loss.items()
                },
                "loss_budget": render_budget(self._pipeline.policy),
                "negligible_loss": table.negligible_loss,
                "losses": {
                    tier: {
                        kind.value: {
                            complexity.value: render_loss(loss)
                            for complexity, loss in each.items()
                        }
                        for kind, each in of_tier.items()
                    }
                    for tier, of_tier in table.losses.items()
                },
                "pointless": self._pipeline.policy.pointless,
                "live": [
                    {"class": kind.value, "tier": tier, **drift.render()}
                    for (kind, tier), drift in self._evaluation.drifts.items()
                ],
                "sla_confidence": table.sla_confidence,
            }
        )


def _summary(ended: list[tuple[Outcome, Times, bool | None]]) -> dict[str, Any]:
    kept = [met for _, _, met in ended if met is not None]
    return {
        "requests": len(ended),
        "errors": sum(outcome is Outcome.ERROR for outcome, _, _ in ended),
        "ttft_ms": _percentiles(
            [times.ttft_ms for _, times, _ in ended if times.ttft_ms is not None]
        ),
        "tpot_ms": _percentiles(
            [times.tpot_ms for _, times, _ in ended if times.tpot_ms is not None]
        ),
        "sla": {"asked": len(kept), "met": sum(kept)},
    }


def _percentiles(values: list[float]) -> dict[str, float] | None:
    return (
        {
            "p50": round(percentile(values, 0.5), 2),
            "p95": round(percentile(values, 0.95), 2),
        }
        if values
        else None
    )


def render_open(request: ActiveRequest, now: float) -> dict[str, Any]:
    answer, decision, part = request.answer, request.decision, request.now_on
    tier, replica = (
        part.tier if part is not None else decision.tier,
        part.replica_id if part is not None else None,
    )
    overflow = request.diverted.name if request.diverted is not None else None
    if overflow is not None:
        tier = replica = None
    elif part is None and request.grant is not None:
        replica = request.grant.lease.replica.id
    return {
        "request_id": request.context.request_id,
        "trace_id": request.context.trace_id,
        "class": decision.query.features.prompt_class.value,
        "tier": tier,
        "overflow": overflow,
        "replica": replica,
        "state": request.state,
        "age_ms": round((now - request.context.arrived_at) * 1000, 1),
        "prompt_tokens": decision.query.tokens_to_read,
        "output_tokens": answer.output_tokens if answer is not None else 0,
    }


def _event(name: bytes, value: Any) -> bytes:
    return b"event: " + name + b"\ndata: " + to_json(value) + b"\n\n"


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", "100")
    # int() refuses thousands of digits with an error of its own.
    limit = (
        int(text)
        if text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_LISTED))
        else 0
    )
    if not 1 <= limit <= MOST_LISTED:
        raise HTTPException(400, f"limit: a number from 1 to {MOST_LISTED} is allowed")
    return limit


def _json(body: object) -> Response:
    return json_response(body, headers=NO_STORE)
