"""The gate: every request gets its ids here, and where keys are needed shows a valid one before anything else happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from router.context import RequestContext, keep
from router.doors import Door
from router.keys import ANONYMOUS, Caller, KeyStore, Unauthorized
from router.openai import speaks_openai
from router.problems import Draining, describe

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from router.doors import Doors
    from router.telemetry import Telemetry

OPEN_PATHS = {"/healthz", "/readyz"}  # for load balancers, which have no keys


class Gate:
    """An ASGI application around the router's."""

    def __init__(self, app: ASGIApp, keys: KeyStore, telemetry: Telemetry, doors: Doors) -> None:
        self._app, self._keys, self._telemetry, self._doors = app, keys, telemetry, doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer 401, or 503 while the router drains, with its body unread."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._doors.inside += 1
        try:
            await self._enter(scope, receive, self._doors.parting(send))
        finally:
            self._doors.inside -= 1

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        ids = self._telemetry.request_ids(headers)
        try:
            caller = self._caller(scope, headers)
        except (Unauthorized, Draining) as error:
            response = describe(error).response(RequestContext(*ids), openai=speaks_openai(scope["path"]))
            response.headers["connection"] = "close"  # its body is not going to be read
            await response(scope, receive, send)
            return
        keep(scope, RequestContext(*ids, caller))
        self._telemetry.record_caller(caller.key_id)
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope, headers: Headers) -> Caller:
        if self._doors.state is Door.DRAINING and scope["method"] == "POST":
            raise Draining
        if not self._keys.required or scope["path"] in OPEN_PATHS:
            return ANONYMOUS
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("send a key as 'Authorization: Bearer KEY'")
        return self._keys.find(key.strip())
