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
        self._fleet = pipeline.fleet
        self._policy = pipeline.policy
        self._reservations = pipeline.charging.reservations
        self._tell = pipeline.registry.tell
        self._profiling = profiling
        self._database = database
        self._server_state = server_state
        self._keys = keys
        self._about = about
        self._redis = redis

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
        tiers = self._fleet.snapshot().tiers
        health = self._health()
        is_ready = health["status"] != "unhealthy" and self._keys.ready
        preparing = [
            {"tier": tier.spec.name, **render_preparing(tier.preparing)}
            for tier in tiers
            if tier.preparing is not None and tier.preparing.failed is None
        ]
        body = {
            "ready": is_ready,
            "tiers": {tier.spec.name: tier.status.value for tier in tiers},
            "reasons": health["reasons"],
            "preparing": preparing,
        }
        status_code = 200 if is_ready else 503
        return json_response(body, status_code)

    async def health(self, _request: Request) -> Response:
        health = self._health()
        status_code = 503 if health["status"] == "unhealthy" else 200
        return json_response(health, status_code)

    def _health(self) -> dict[str, Any]:
        # These endpoints answer without a key even where requests need one. Then anybody may read them, so they leave out
        # addresses.
        inside = not self._keys.required
        health = health_of(
            self._fleet.snapshot(),
            self._notes(inside=inside),
            serves=self._server_state.open,
            inside=inside,
        )
        keys = {"required": self._keys.required, "version": self._keys.version}
        return {**health, "keys": keys}

    def _notes(self, *, inside: bool) -> list[str]:
        """Return what is wrong beside the engines; ``inside``: with what shows addresses."""
        notes: list[str] = []
        if inside:
            notes += self._fleet.notes.values()
        notes += self._keys.notes
        for state in self._redis:
            notes += state.notes
        notes += self._reservations.notes
        fault = self._database.fault
        if fault:
            notes.append(
                f"usage is not written: {self._database.path} cannot be used ({fault})"
            )
        return notes

    async def tiers(self, request: Request) -> Response:
        fleet = self._fleet
        inside = context_of(request.scope).caller.sees_all
        rendered = render_fleet(
            fleet.snapshot(),
            model=self._about["model"],
            machine=fleet.machine,
            sources=fleet.sources,
            inside=inside,
        )
        self._tell()
        rendered["profiling"] = self._profiling.render(inside=inside)
        rendered["loss_budget"] = render_budget(self._policy)
        return json_response(rendered)

    async def openapi(self, _request: Request) -> Response:
        content = await asyncio.to_thread(document, self._about["version"])
        return Response(content, media_type="application/json")
