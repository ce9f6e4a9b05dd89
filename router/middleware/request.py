"""Gives each request its ids, and checks its key, host and origin before anything else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.asgi import (
    CONTEXT,
    HELD,
    ForeignHostError,
    ForeignPageError,
    body_message,
    context_of,
)
from router.api.paths import PAGE, error_form
from router.api.problems import DrainingError, describe, is_known, response_to
from router.auth.access import KeyStore
from router.auth.api_keys import (
    ANONYMOUS,
    Caller,
    UnauthorizedError,
    UnknownSignerError,
)
from router.lifecycle import ServerPhase, ServerState
from router.pipeline.request import RequestContext
from router.server.large_bodies import HeldBody, LargeBodies
from router.server.responder import OUT, Responder
from router.telemetry.logs import CLIENT_ERROR, begin_request, log_failure
from router.telemetry.tracing import ANSWERED, Telemetry

log = logging.getLogger(f"qarr.{__name__}")
# Paths for load balancers, which have no keys, and for browsers, whose users enter a key on the page.
OPEN_PATHS = {"/health", "/healthz", "/readyz", PAGE}
# they change nothing, and pages of other origins cannot read their answers
SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class RequestMiddleware:
    """The outermost middleware.

    Args:
        answered: Called with each answer's route, method and status.
        direct: Applications that answer POST requests, by path, without passing the router's middleware and routing.
        local_names: Names besides localhost under which a router on loopback serves; None: it does not listen on
            loopback, and serves under any name.
        origins: Whose pages may send requests without a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyStore,
        telemetry: Telemetry,
        server_state: ServerState,
        *,
        answered: Callable[[str, str, int], None],
        direct: Mapping[str, ASGIApp],
        local_names: Collection[str] | None = None,
        origins: Collection[str] = (),
    ) -> None:
        self._origins = origins
        self.bodies = LargeBodies()
        self._keys = keys
        self._telemetry = telemetry
        self._server_state = server_state
        self._answered = answered
        self.use(app, direct, local_names)

    def use(
        self,
        app: ASGIApp,
        direct: Mapping[str, ASGIApp],
        local_names: Collection[str] | None,
    ) -> None:
        """Pass further requests to another application; those that are being answered stay with theirs."""
        self._app = app
        self._direct = direct
        self._local_names: frozenset[str] | None = None
        if local_names is not None:
            self._local_names = frozenset(
                {"localhost", *(name.lower() for name in local_names)}
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with its body unread."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        out: Responder = scope[OUT]
        out.outer = send
        out.server_state = self._server_state
        out.task = task
        self._server_state.active_requests.add(task)
        held_body = HeldBody(self.bodies)
        scope[HELD] = held_body
        try:
            app = await self._admit(scope)
            try:
                await app(scope, receive, out.respond)
            except Exception as error:  # as Starlette's middleware does it
                await _send_error(error, scope, receive, out=out)
                if not is_known(error):
                    raise
        except asyncio.CancelledError:
            if not out.cycle.disconnected and not self._server_state.deadline_passed:
                raise
            task.uncancel()
            if out.cycle.disconnected:
                log.debug(
                    "request %s: the client went away", context_of(scope).request_id
                )
            else:
                await _end_with_error(scope, receive, out)
        finally:
            self._server_state.active_requests.discard(task)
            held_body.release()
            if not out.begun or out.early:
                out.stop_waiting()
            out.close()
            self._report(scope, out.status)

    def _report(self, scope: Scope, status: int) -> None:
        """Note how a request was answered, for the log, the metrics and the span."""
        context: RequestContext = scope[CONTEXT]
        if status >= CLIENT_ERROR and not context.is_recorded:
            log_failure(scope, status)
        # answered without Starlette's routing
        is_direct = "endpoint" in scope and "path_params" not in scope
        route = context.route if is_direct else _route(scope)
        self._answered(route, scope["method"], status)
        scope[ANSWERED] = route, status, context.caller.key_id

    async def _admit(self, scope: Scope) -> ASGIApp:
        """Return what answers a request: its endpoint, the router's application, or a refusal."""
        # the first of those that share a name
        headers = dict(reversed(scope["headers"]))
        context = RequestContext(
            *self._telemetry.request_ids(headers),
            route=scope["path"],
            request_headers=headers,
        )
        begin_request(context.request_id, context.trace_id)
        scope[CONTEXT] = context
        try:
            try:
                context.caller = self._caller(scope["method"], context)
            except UnknownSignerError:
                await self._keys.renew()
                context.caller = self._caller(scope["method"], context)
        except (
            UnauthorizedError,
            DrainingError,
            ForeignHostError,
            ForeignPageError,
        ) as error:
            response = response_to(error, scope)
            response.headers["connection"] = "close"  # its body stays unread
            return response
        if scope["method"] != "POST":
            return self._app
        endpoint = self._direct.get(scope["path"])
        if endpoint is None:
            return self._app
        scope["endpoint"] = endpoint
        return endpoint

    def _caller(self, method: str, context: RequestContext) -> Caller:
        """Return who sends a request.

        Raises:
            DrainingError: The router takes no new requests.
            UnauthorizedError: The request has no valid key, though one is needed.
            ForeignHostError, ForeignPageError: A web page may have sent it, and no key shows who is behind it.
        """
        path = context.route
        resumes_stream = (
            path == "/generate" and b"last-event-id" in context.request_headers
        )
        # A stream that was interrupted can go on here only: no other router has the rest of it.
        if (
            self._server_state.state is ServerPhase.DRAINING
            and method == "POST"
            and not resumes_stream
        ):
            raise DrainingError
        is_open = path in OPEN_PATHS
        if self._keys.required and not is_open:
            return self._keys.find(_sent_key(context))
        if not is_open:
            self._check_host(context)
        is_from_browser = (
            b"origin" in context.request_headers
            or b"sec-fetch-site" in context.request_headers
        )
        if is_from_browser and method not in SAFE_METHODS:
            _check_origin(context, self._origins)
        return ANONYMOUS

    def _check_host(self, context: RequestContext) -> None:
        """Refuse a request by a name that is not known to be this router's.

        The owner of a name in the DNS can point it at this machine, and so let a web page read a local router's answers.
        Names without a dot are no exception: they come from a network's search domain, or from its owner.
        """
        local_names = self._local_names
        if local_names is not None and not is_address_or_local(
            context.request_headers.get(b"host", b""), local_names
        ):
            raise ForeignHostError(
                "without keys a router on this machine serves requests to an address or to localhost only, since any "
                "web page could reach it by a name of its own: add this name to server.allowed_hosts, or make keys "
                "('qarr keys add')"
            )


def _sent_key(context: RequestContext) -> str:
    """Return the key that a request carries: as most clients send it, as Anthropic's do (x-api-key) or Azure's (api-key)."""
    scheme, _, bearer_token = (context.header(b"authorization") or "").partition(" ")
    if scheme.lower() != "bearer":
        bearer_token = ""
    sent_keys = (bearer_token, context.header(b"x-api-key"), context.header(b"api-key"))
    different_keys = {key.strip() for key in sent_keys if key and key.strip()}
    if len(different_keys) == 1:
        return different_keys.pop()
    if different_keys:
        raise UnauthorizedError("the request carries several keys: send one")
    raise UnauthorizedError("send a key as 'Authorization: Bearer KEY' or x-api-key")


@lru_cache(1024)
def is_address_or_local(header: bytes, names: frozenset[str]) -> bool:
    """Tell whether a Host header names an address, localhost, one of some names, or nothing."""
    host_name = header.decode("latin-1").lower()
    before_colon, _, port = host_name.rpartition(":")
    if port.isdecimal():
        host_name = before_colon
    if not host_name or host_name in names or host_name.endswith(".localhost"):
        return True
    try:
        ip_address(host_name.strip("[]"))
    except ValueError:
        return False
    return True


async def _send_error(
    error: Exception, scope: Scope, receive: Receive, out: Responder
) -> None:
    """Send an error, in the stream if that has begun early; raise the error if the answer has begun otherwise."""
    if out.early and not out.complete:
        out.stop_waiting()
        problem = describe(error).event(
            error_form(scope["path"]), context_of(scope).ids
        )
        await out.respond(body_message(problem + b"\n\n", more=False))
    elif out.begun:
        raise error
    else:
        await response_to(error, scope)(scope, receive, out.respond)


async def _end_with_error(scope: Scope, receive: Receive, out: Responder) -> None:
    """End an answer that is not complete when the router has to end."""
    answer_form = error_form(scope["path"])
    context = context_of(scope)
    out.stop_waiting()
    problem = describe(
        DrainingError("this router has ended before the answer was complete: ask again")
    )
    if not out.begun:
        await problem.response(context, answer_form)(scope, receive, out.respond)
    elif out.streams and not out.complete:
        await out.respond(
            body_message(problem.event(answer_form, context.ids) + b"\n\n", more=False)
        )


def _check_origin(context: RequestContext, allowed: Collection[str]) -> None:
    """Refuse a request that a web page of another origin makes a browser send, if no key shows who sends it.

    Browsers say in ``Sec-Fetch-Site`` how the page's origin is related to the router's. Old browsers do not, and no browser
    does towards a plain http address of another machine; but all of them send ``Origin`` with every POST. Other programs
    send neither.
    """
    fetch_site = context.header(b"sec-fetch-site")
    page_origin = context.header(b"origin")
    if fetch_site in {"same-origin", "none"} or page_origin in allowed:
        return
    if (
        fetch_site is None
        and page_origin is not None
        and _is_origin_of(page_origin, context.header(b"host") or "")
    ):
        return
    raise ForeignPageError(
        "without keys this router takes requests from programs and from its own page, and a browser says (Sec-Fetch-Site, "
        "Origin) that a page of another origin sent this one: name that origin in server.cors_origins, or make "
        "keys ('qarr keys add')"
    )


def _is_origin_of(origin: str, host: str) -> bool:
    """Tell whether an ``Origin`` and a ``Host`` header name the same server; both may leave the scheme's own port out."""
    scheme, _, authority = origin.lower().partition("://")
    default_port = DEFAULT_PORTS.get(scheme, "")
    return bool(authority) and authority.removesuffix(
        default_port
    ) == host.lower().removesuffix(default_port)


def _route(scope: Scope) -> str:
    """Return the endpoint's path with placeholders, so that metrics have few routes; ``unknown`` without an endpoint."""
    if "endpoint" not in scope:
        return scope["path"] if scope["path"] in OPEN_PATHS else "unknown"
    route = ""
    remaining_path = str(scope["path"])
    for name, value in scope.get("path_params", {}).items():
        # the last of the path's parts with the value
        before, segment, after = remaining_path.rpartition(f"/{value}")
        if segment and after[:1] in {"", "/"}:
            route = f"{before}/{{{name}}}"
            remaining_path = after
    return route + remaining_path
