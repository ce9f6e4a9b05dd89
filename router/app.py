"""The application: routes, error handlers and services, wired in one place."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from router.accounting.charging import Charging
from router.accounting.database import Database
from router.accounting.ledgers import ledger_of
from router.accounting.reservations import Reservations
from router.accounting.usage import UsageLog
from router.aio import end_tasks
from router.api.admin import Admin, reload_route
from router.api.asgi import ClientGone, context_of
from router.api.bodies import Rules, health_of, json_response, render_fleet, render_preparing
from router.api.endpoint import Answering, Service
from router.api.generate import GENERATE, DecisionAlone
from router.api.models import ModelEndpoints, Models
from router.api.named_events import NAMED_EVENT_ENDPOINTS, stored_response
from router.api.openai import COMPLETION_ENDPOINTS
from router.api.openapi import document
from router.api.passthrough import Embeddings, Passthrough, Tokens
from router.api.paths import COUNT_TOKENS, EMBEDDINGS, PAGE, RESPONSES
from router.api.problems import PROBLEMS, response_to
from router.api.resumable import ResumableStreams
from router.auth.access import KeyStore, open_access
from router.auth.api_keys import KeysError
from router.auth.network import is_loopback
from router.auth.quota import Quotas
from router.lifecycle import ServerState
from router.middleware.request import RequestMiddleware
from router.monitoring.live import Live, LiveEndpoints
from router.monitoring.metrics import Metrics
from router.monitoring.page import Page
from router.monitoring.usage import Labels, UsageEndpoint
from router.pipeline.admission import Admission
from router.pipeline.failover import Failover
from router.pipeline.overflow import Overflow
from router.pipeline.pipeline import Pipeline
from router.pipeline.registry import RequestRegistry
from router.pipeline.shared_load import SharedLoad
from router.policy.decision_log import DecisionLog
from router.policy.render import render_budget
from router.policy.table import PolicyStore
from router.profiling.auto_profile import AutoProfile
from router.profiling.prompt_samples import PromptSamples
from router.profiling.shadow_evaluation import ShadowEvaluation
from router.reload import ReloadError
from router.server.memory import keep_handing_back
from router.server.tls import TlsError, load_pair
from router.telemetry.logs import Logging
from router.telemetry.record import log_outcome
from router.upstream.client import Upstream
from router.upstream.overflow import OverflowClient
from router.upstream.transport import EngineTransport
from tiers.background import lasting
from tiers.spec import ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from classifier import TokenCounter
    from router.monitoring.usage import UsageMetrics
    from router.reload import Reloads
    from router.server.tls import Tls
    from router.settings import Settings
    from router.telemetry.tracing import Telemetry
    from tiers.fleet import Fleet
    from tiers.lifecycle.operations import Operations

DECISION_LOG_BYTES = 100 << 20  # of that file, until it is rotated
LEAST_REQUESTS = 64  # that engines may have at once, however few they are


@dataclass(frozen=True, slots=True)
class Router:
    """A wired router.

    Attributes:
        prepare: Checks new settings, and returns what makes the router take them; see ``Reloads.add``.
    """

    app: ASGIApp
    pipeline: Pipeline
    prepare: Callable[[Settings], Callable[[], None]]


def wire_router(
    settings: Settings,
    fleet: Fleet,
    counter: TokenCounter,
    telemetry: Telemetry,
    model: str,
    *,
    keys: KeyStore,
    server_state: ServerState | None = None,
    operations: Operations | None = None,
    reloads: Reloads | None = None,
    tls: Tls | None = None,
) -> Router:
    """Wire the router.

    Without ``server_state`` requests are always taken; without ``operations`` and ``reloads`` operators can do none of them;
    without ``tls`` plain HTTP is served.
    """
    server_state = server_state or ServerState()
    wired = _wire(settings, fleet, counter, telemetry, model, state=server_state)
    pipeline = wired.pipeline
    live = Live(pipeline, wired.profiling, server_state, keys, wired.about, loss_budget=wired.loss_budget)
    metrics = Metrics(pipeline, wired.evaluation, wired.upstream.retries, wired.about)
    if tls is not None:
        metrics.show_expiry(lambda: tls.expires)
    usage = metrics.count_keys(wired.usage, pipeline.charging, Labels(keys, settings.budgets.metrics_keys))
    streams = ResumableStreams(settings.server)
    routes = [
        *LiveEndpoints(pipeline, wired.evaluation, live, settings.telemetry).routes(),
        Route("/metrics", metrics.answer),
        *UsageEndpoint(wired.database, pipeline.charging, keys).routes(),
    ]
    if reloads is not None:
        routes.append(reload_route(reloads, keys))
    lifespan = _lifespan(wired, streams, live, usage, keys=keys, tls=tls)
    parts = _Parts(wired, server_state, keys, streams, operations, routes, lifespan, tls)
    app, direct, local_names = _served(parts, settings)
    origins, answered = settings.server.cors_origins, metrics.answered
    entry = RequestMiddleware(
        app, keys, telemetry, server_state, answered=answered, direct=direct, local_names=local_names, origins=origins
    )
    outer: ASGIApp = entry if not origins else CORSMiddleware(
        entry, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
    )  # fmt: skip
    return Router(telemetry.instrument(outer), pipeline, partial(_prepare, parts, entry))


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a router has for as long as it runs.

    Attributes:
        routes: Those that no setting changes.
        lifespan: What runs while the router serves.
        tls: None: plain HTTP is served.
    """

    wired: _Wired
    server_state: ServerState
    keys: KeyStore
    streams: ResumableStreams
    operations: Operations | None
    routes: list[Route]
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]]
    tls: Tls | None


def _served(parts: _Parts, settings: Settings) -> tuple[ASGIApp, dict[str, ASGIApp], tuple[str, ...] | None]:
    """Return the application, what requests reach without it, and local names, as ``RequestMiddleware`` takes them."""
    wired, streams = parts.wired, parts.streams
    pipeline, rules = _pipeline(wired, settings), Rules.of(settings)
    admin = Admin(parts.operations, parts.keys, rules).routes() if parts.operations is not None else []
    status = Status(wired, parts.server_state, parts.keys)
    handlers = dict.fromkeys((*PROBLEMS, ClientGone, Exception), _problem)  # by type; Exception: all others
    service = Service(pipeline, settings, rules, streams)
    answering = (GENERATE, *COMPLETION_ENDPOINTS, *NAMED_EVENT_ENDPOINTS)
    direct: dict[str, ASGIApp] = {each.path: Answering(each, service) for each in answering}
    routes = [
        Route(PAGE, Page(settings.server, parts.keys).answer),
        *(Route(path, served, methods=["POST"]) for path, served in direct.items()),
        *_routes(wired, service, status),
        *parts.routes,
        *admin,
    ]
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=parts.lifespan)
    app.router.redirect_slashes = False  # a redirect would go to the host of the caller's Host header
    local_names = settings.server.allowed_hosts if is_loopback(settings.server.host) else None
    return app, direct, local_names


def _prepare(parts: _Parts, entry: RequestMiddleware, settings: Settings) -> Callable[[], None]:
    """Check new settings; return what makes the router take them, without disturbing open requests."""
    wired, tls = parts.wired, parts.tls
    if (tls is None) != (settings.tls.certificate is None):
        raise ReloadError("tls.certificate: a running router cannot switch between HTTP and HTTPS; restart it")
    try:
        keys = open_access(settings)
        pair = load_pair(settings.tls) if tls is not None else None
    except (KeysError, TlsError) as error:
        raise ReloadError(str(error)) from None
    served = _served(parts, settings)

    def take() -> None:
        parts.keys.take(keys)
        if tls is not None and pair is not None:
            tls.take(settings.tls, pair)
        entry.take(*served)
        parts.streams.bounds = settings.server
        wired.pipeline.policy.use(settings.policy)
        wired.pipeline.charging.take(settings)
        wired.pipeline.admission.take(settings.admission)
        wired.upstream.take(settings.upstream)
        wired.pipeline.overflow.client.take(settings.overflow, settings.upstream)
        wired.evaluation.share = settings.policy.live_check_share
        wired.pipeline.telemetry.record_prompts = settings.telemetry.record_prompts
        if Logging.current is not None:
            Logging.current.set_level(settings.telemetry)

    return take


@dataclass(frozen=True, slots=True)
class _Wired:
    """The pipeline, what it works with, and what observes it.

    Attributes:
        about: Version, model and trace viewer, for the page and the metrics.
        loss_budget: Returns it as JSON values.
    """

    pipeline: Pipeline
    upstream: Upstream
    shared: SharedLoad
    evaluation: ShadowEvaluation
    profiling: AutoProfile
    samples: PromptSamples | None
    database: Database
    usage: UsageLog
    about: dict[str, str]
    loss_budget: Callable[[], dict[str, Any]]


def _wire(
    settings: Settings,
    fleet: Fleet,
    counter: TokenCounter,
    telemetry: Telemetry,
    model: str,
    *,
    state: ServerState,
) -> _Wired:
    kept = settings.telemetry
    registry = RequestRegistry(state, kept.recent_requests)
    if telemetry.exports:
        registry.observers.append(telemetry.record_outcome)
    decisions = DecisionLog(kept.decision_log, DECISION_LOG_BYTES) if kept.decision_log is not None else None
    if decisions is not None:
        registry.observers.append(partial(log_outcome, decisions))
    redis_url, database = settings.state.redis_url.get_secret_value(), Database(settings.budgets.file)
    policy = PolicyStore(settings.policy, fleet)
    reservations = Reservations(ledger_of(settings, database), settings.budgets)
    upstream = Upstream(fleet, EngineTransport(LEAST_REQUESTS), settings.upstream, telemetry, policy)
    upstream.fit()
    fleet.on_members = upstream.fit
    profiling = AutoProfile(settings, fleet, policy, model, lambda: (registry.totals["requests"], len(registry.open)))
    evaluation = ShadowEvaluation(settings.policy.live_check_share, fleet, profiling.client, telemetry)
    admission = Admission(fleet, policy, settings.admission)
    samples = None
    if kept.sampled_prompts is not None and kept.prompt_share:
        samples = PromptSamples(kept.sampled_prompts, kept.prompt_share)
    pipeline = Pipeline(
        fleet=fleet,
        counter=counter,
        policy=policy,
        quotas=Quotas(redis_url),
        charging=Charging(reservations, fleet, policy, settings.policy.prices),
        admission=admission,
        failover=Failover(
            fleet, policy, upstream, telemetry, settings.upstream.attempts, settings.limits.default_max_tokens
        ),
        overflow=Overflow(OverflowClient(settings.overflow, settings.upstream, telemetry), decisions, telemetry),
        registry=registry,
        decisions=decisions,
        telemetry=telemetry,
        prompt_observer=samples,
        answer_observer=None,
    )
    usage = UsageLog(database, pipeline.charging)
    registry.observers.append(usage.offer)
    shared = SharedLoad(redis_url, fleet, admission.waiting_for)
    about = {"version": version("qarr"), "model": model, "trace_url": kept.trace_url}
    loss_budget = partial(render_budget, policy)
    wired = _Wired(
        pipeline, upstream, shared, evaluation, profiling, samples, database, usage, about, loss_budget,
    )  # fmt: skip
    return replace(wired, pipeline=_pipeline(wired, settings))


def _pipeline(wired: _Wired, settings: Settings) -> Pipeline:
    base = wired.pipeline
    attempts, max_tokens = settings.upstream.attempts, settings.limits.default_max_tokens
    failover = replace(base.failover, attempts=attempts, default_max_tokens=max_tokens)
    observer = wired.evaluation if settings.policy.live_check_share else None
    return replace(base, failover=failover, answer_observer=observer)


def _lifespan(
    wired: _Wired,
    streams: ResumableStreams,
    live: Live,
    usage: UsageMetrics,
    *,
    keys: KeyStore,
    tls: Tls | None,
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    pipeline = wired.pipeline

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        work = {
            "loading profiles": pipeline.policy.watch,
            "the queue": pipeline.admission.run,
            "sharing load": wired.shared.run,
            "the live stream": live.run,
            "returning memory": keep_handing_back,
            "shadow evaluation": wired.evaluation.run,
            "measuring": wired.profiling.run,
            "looking at budgets": usage.run,
            "writing usage": wired.usage.run,
            "the issuer's keys": keys.run,
        }
        if tls is not None:
            work["watching the certificate"] = tls.watch
        tasks = [asyncio.create_task(lasting(each, name), name=name) for name, each in work.items()]
        yield
        await streams.aclose()
        await end_tasks(tasks)
        await wired.profiling.aclose()
        await wired.shared.aclose()
        await pipeline.quotas.aclose()
        await pipeline.charging.reservations.aclose()
        await wired.database.aclose()
        await wired.upstream.aclose()
        await pipeline.overflow.client.aclose()
        for writer in (pipeline.decisions, wired.samples):
            if writer is not None:
                await asyncio.to_thread(writer.close)

    return lifespan


def _routes(wired: _Wired, service: Service, status: Status) -> list[Route]:
    pipeline, settings = service.pipeline, service.settings
    models = Models(pipeline.fleet, settings.openai, wired.about["model"], int(time.time()))
    small = Passthrough(wired.upstream, pipeline.quotas, pipeline.fleet, settings)
    return [
        Route("/route", DecisionAlone(service), methods=["POST"]),
        Route(EMBEDDINGS, Embeddings(small), methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route(
            "/v1/models/{id:path}/endpoints", ModelEndpoints(models, pipeline.admission.waiting_for), methods=["GET"]
        ),
        Route("/v1/models/{id:path}", models, methods=["GET"]),
        Route(f"{RESPONSES}/{{id}}", stored_response, methods=["GET", "DELETE"]),
        Route(f"{RESPONSES}/{{id}}/cancel", stored_response, methods=["POST"]),
        *(Route(path, Tokens(small, path), methods=["POST"]) for path in ("/tokenize", "/detokenize", COUNT_TOKENS)),
        Route("/tiers", status.tiers),
        Route("/readyz", status.readyz),
        Route("/healthz", status.healthz),
        Route("/health", status.health),
        Route("/openapi.json", status.openapi),
    ]


class Status:
    """The endpoints on the router's state, and the rendering of errors."""

    def __init__(self, wired: _Wired, server_state: ServerState, keys: KeyStore) -> None:
        self._keys, self._reservations, self._database = keys, wired.pipeline.charging.reservations, wired.database
        self._fleet, self._profiling, self._about = wired.pipeline.fleet, wired.profiling, wired.about
        self._server_state, self._loss_budget = server_state, wired.loss_budget

    async def healthz(self, _request: Request) -> Response:
        return json_response({"status": "alive"})

    async def readyz(self, _request: Request) -> Response:
        """Answer 200 while a tier is ready, else 503, also when the router shuts down.

        The body has every tier's state, and what tiers that have not served yet still need.
        """
        tiers = self._fleet.snapshot().tiers
        serves = self._server_state.open and self._keys.ready
        ready = serves and any(tier.status is ReplicaStatus.READY for tier in tiers)
        body = {
            "ready": ready,
            "tiers": {tier.spec.name: tier.status.value for tier in tiers},
            "reasons": self._notes(),
            "preparing": [
                {"tier": tier.spec.name, **render_preparing(tier.preparing)}
                for tier in tiers
                if tier.preparing is not None and tier.preparing.failed is None
            ],
        }
        return json_response(body, 200 if ready else 503)

    async def health(self, _request: Request) -> Response:
        """Answer with the health of the whole, and what is wrong: 503 while no tier is ready or the router shuts down."""
        notes = [*self._fleet.notes.values(), *self._notes()]
        health = health_of(self._fleet.snapshot(), notes, serves=self._server_state.open)
        return json_response(health, 503 if health["status"] == "unhealthy" else 200)

    def _notes(self) -> list[str]:
        fault = self._database.fault
        file = [f"usage is not written: {self._database.path} cannot be used ({fault})"] if fault else []
        return [*self._keys.notes, *self._reservations.notes, *file]

    async def tiers(self, request: Request) -> Response:
        """Answer with the present fleet; only operators see the engines' addresses."""
        inside = context_of(request.scope).caller.sees_all
        fleet, model = self._fleet, self._about["model"]
        shown = render_fleet(fleet.snapshot(), model, fleet.machine, fleet.sources, inside=inside)
        profiling, budget = self._profiling.render(inside=inside), self._loss_budget()
        return json_response({**shown, "profiling": profiling, "loss_budget": budget})

    async def openapi(self, _request: Request) -> Response:
        content = await asyncio.to_thread(document, self._about["version"])
        return Response(content, media_type="application/json")


async def _problem(request: Request, error: Exception) -> Response:
    return response_to(error, request.scope)
