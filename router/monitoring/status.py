"""The endpoints on the router's health and tiers, and its contract."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.accounting.database import Database
from router.api.asgi import context_of
from router.api.bodies import health_of, json_response, render_fleet, render_preparing
from router.api.openapi import document
from router.auth.access import KeyStore
from router.lifecycle import ServerState
from router.pipeline.pipeline import Pipeline
from router.policy.render import render_budget
from router.profiling.auto_profile import AutoProfile
from router.redis_link import RedisState


class Status:
    def __init__(
        self,
        pipeline: Pipeline,
        *,
        profiling: AutoProfile,
        database: Database,
        server_state: ServerState,
        keys: KeyStore,
        about: Mapping[str, str],
        redis: Sequence[RedisState],
    ) -> None:
        self._fleet, self._policy, self._reservations = (
            pipeline.fleet,
            pipeline.policy,
            pipeline.charging.reservations,
        )
        self._redis = redis
        self._tell = pipeline.registry.tell
        self._profiling, self._database, self._keys, self._about = (
            profiling,
            database,
            keys,
            about,
        )
        self._server_state = server_state

    def routes(self) -> list[Route]:
        return [
            Route("/tiers", self.tiers),
            Route("/readyz", self.readyz),
            Route("/healthz", self.healthz),
            Route("/health", self.health),
            Route("/openapi.json", self.openapi),
        ]

    async def healthz(self, _request: Request) -> Response:
        return json_response({"status": "alive"})

    async def readyz(self, _request: Request) -> Response:
        """Answer 200 while a tier is ready, else 503, also when the router shuts down; with what tiers still need."""
        tiers, health = self._fleet.snapshot().tiers, self._health()
        ready = health["status"] != "unhealthy" and self._keys.ready
        body = {
            "ready": ready,
            "tiers": {tier.spec.name: tier.status.value for tier in tiers},
            "reasons": health["reasons"],
            "preparing": [
                {"tier": tier.spec.name, **render_preparing(tier.preparing)}
                for tier in tiers
                if tier.preparing is not None and tier.preparing.failed is None
            ],
        }
        return json_response(body, 200 if ready else 503)

    async def health(self, _request: Request) -> Response:
        health = self._health()
        return json_response(health, 503 if health["status"] == "unhealthy" else 200)

    def _health(self) -> dict[str, Any]:
        fault = self._database.fault
        file = (
            [f"usage is not written: {self._database.path} cannot be used ({fault})"]
            if fault
            else []
        )
        # where requests need keys, these need none: they tell no addresses
        inside = not self._keys.required
        named = self._fleet.notes.values() if inside else ()
        of_redis = [note for state in self._redis for note in state.notes]
        notes = [*named, *self._keys.notes, *of_redis, *self._reservations.notes, *file]
        health = health_of(
            self._fleet.snapshot(), notes, serves=self._server_state.open, inside=inside
        )
        return {
            **health,
            "keys": {"required": self._keys.required, "version": self._keys.version},
        }

    async def tiers(self, request: Request) -> Response:
        inside = context_of(request.scope).caller.sees_all
        fleet, model = self._fleet, self._about["model"]
        shown = render_fleet(
            fleet.snapshot(), model, fleet.machine, fleet.sources, inside=inside
        )
        self._tell()
        profiling, budget = (
            self._profiling.render(inside=inside),
            render_budget(self._policy),
        )
        return json_response({**shown, "profiling": profiling, "loss_budget": budget})

    async def openapi(self, _request: Request) -> Response:
        content = await asyncio.to_thread(document, self._about["version"])
        return Response(content, media_type="application/json")
