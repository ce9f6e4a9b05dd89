"""The operators' endpoints: add, remove, drain, resume, restart and recycle replicas, follow operations, reload settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.asgi import context_of, read_body
from router.api.bodies import (
    REMOVE_ALLOWED,
    AdapterBody,
    RemoveBody,
    Rules,
    adapter_allowed,
    json_response,
    parse_replica,
    parsed,
)
from router.api.problems import NotAdminError
from router.auth.access import KeyStore
from router.auth.network import is_loopback
from router.reload import Reloads
from tiers.lifecycle.adapters import AdapterResult
from tiers.lifecycle.operations import KINDS, Kind, Operation, Operations
from tiers.spec import Adapter

ALL_REPLICAS = "/admin/replicas"
REPLICAS = ALL_REPLICAS + "/{id}"
OPERATIONS = "/admin/operations"
ADAPTERS = "/admin/adapters"
RELOAD = "/admin/reload"
MAX_BODY_BYTES = 1 << 16
# Proxies and browsers set these: whoever is behind them is not this machine's operator.
FOREIGN_HEADERS = ("origin", "forwarded", "x-forwarded-for", "x-real-ip", "via")


class Admin:
    def __init__(self, operations: Operations, keys: KeyStore, rules: Rules) -> None:
        self._operations = operations
        self._keys = keys
        self._rules = rules

    def routes(self) -> list[Route]:
        operate_routes = [
            Route(f"{REPLICAS}/{kind}", self._operate(kind), methods=["POST"])
            for kind in KINDS
        ]
        return [
            Route(ALL_REPLICAS, self._add, methods=["POST"]),
            *operate_routes,
            Route(OPERATIONS, self._list_operations, methods=["GET"]),
            Route(OPERATIONS + "/{id}", self._show_operation, methods=["GET"]),
            Route(ADAPTERS, self._load, methods=["POST"]),
            Route(ADAPTERS + "/{name:path}", self._unload, methods=["DELETE"]),
        ]

    def _operate(self, kind: Kind) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint that begins one kind of operation on a replica."""

        async def operate(request: Request) -> Response:
            check_admin(request, self._keys)
            now = False
            if kind == "remove":
                body = await _read(request) or b"{}"
                now = parsed(RemoveBody, body, lambda _: REMOVE_ALLOWED).now
            operation = self._operations.begin(kind, request.path_params["id"], now=now)
            return json_response(_render_operation(operation), 202)

        return operate

    async def _add(self, request: Request) -> Response:
        check_admin(request, self._keys)
        roster = self._operations.roster
        tier, url = parse_replica(await _read(request), roster.tiers)
        replica = roster.add(tier, url)
        body = {
            "id": replica.id,
            "tier": replica.spec.name,
            "url": replica.url,
            "source": replica.source,
            "state": replica.state.status.value,
        }
        return json_response(body, 201)

    async def _list_operations(self, request: Request) -> Response:
        check_admin(request, self._keys)
        operations = [
            _render_operation(operation) for operation in self._operations.records
        ]
        return json_response(
            {"operations": operations, "restartable": self._operations.restartable}
        )

    async def _show_operation(self, request: Request) -> Response:
        check_admin(request, self._keys)
        operation = self._operations.record(request.path_params["id"])
        return json_response(_render_operation(operation))

    async def _load(self, request: Request) -> Response:
        check_admin(request, self._keys)
        body = parsed(
            AdapterBody, await _read(request), adapter_allowed, rules=self._rules
        )
        adapter = Adapter(body.name, body.path)
        tiers = frozenset(body.tiers or self._rules.tiers)
        results = await self._operations.adapters.load(adapter, tiers)
        return json_response(_render_adapter(body.name, results))

    async def _unload(self, request: Request) -> Response:
        check_admin(request, self._keys)
        adapter_name = request.path_params["name"]
        results = await self._operations.adapters.unload(adapter_name)
        return json_response(_render_adapter(adapter_name, results))


def reload_route(reloads: Reloads, keys: KeyStore) -> Route:
    """Return the route that reads the settings again."""

    async def reload(request: Request) -> Response:
        check_admin(request, keys)
        changes = await reloads.reload()
        changed_settings = [
            {"setting": change.key, "before": change.before, "after": change.after}
            for change in changes
        ]
        return json_response({"changed": changed_settings})

    return Route(RELOAD, reload, methods=["POST"])


def check_admin(request: Request, keys: KeyStore) -> None:
    """Accept admin keys; without keys, clients on this machine that are neither a proxy nor a web page.

    ``NotAdminError``: the request comes from anybody else.
    """
    if keys.required:
        if not context_of(request.scope).caller.admin:
            raise NotAdminError(
                "this key may not operate on replicas: 'qarr keys add NAME --admin' makes one that may"
            )
        return
    foreign_header = next(
        (
            header_name
            for header_name in FOREIGN_HEADERS
            if header_name in request.headers
        ),
        None,
    )
    if foreign_header is not None:
        origin = f"this request came with the header {foreign_header}"
    elif request.client is None or not is_loopback(request.client.host):
        origin = "this one came from elsewhere"
    else:
        return
    raise NotAdminError(
        f"without keys, replicas are operated on from this machine only, and {origin}: make a key with 'qarr keys add "
        f"NAME --admin'"
    )


async def _read(request: Request) -> bytes:
    return await read_body(request.scope, request.receive, MAX_BODY_BYTES)


def _render_adapter(adapter_name: str, results: list[AdapterResult]) -> dict[str, Any]:
    return {"adapter": adapter_name, "replicas": [asdict(result) for result in results]}


def _render_operation(operation: Operation) -> dict[str, Any]:
    return {
        "id": operation.id,
        "operation": operation.kind,
        "replica": operation.replica,
        "state": operation.state,
        "detail": operation.detail,
        "successor": operation.successor,
        "began": operation.began,
        "ended": operation.ended,
    }
