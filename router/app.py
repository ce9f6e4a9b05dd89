"""The application: routes, error handlers and services, wired in one place."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from classifier import SecondLook, TokenCounter, load_second_look
from router.accounting.charging import Charging
from router.accounting.database import Database
from router.accounting.ledgers import ledger_of
from router.accounting.reservations import Reservations
from router.accounting.usage_log import UsageLog
from router.aio import end_tasks
from router.api.admin import Admin, reload_route
from router.api.asgi import ClientGoneError
from router.api.bodies import Rules
from router.api.endpoint import Answering, Service
from router.api.generate import GENERATE, decision_alone
from router.api.models import Models
from router.api.named_events import NAMED_EVENT_ENDPOINTS, stored_response
from router.api.openai import COMPLETION_ENDPOINTS
from router.api.passthrough import Passthrough
from router.api.paths import COUNT_TOKENS, EMBEDDINGS, PAGE, RESPONSES
from router.api.problems import PROBLEMS, response_to
from router.api.resumable import ResumableStreams
from router.auth.access import KeyStore, open_access
from router.auth.api_keys import KeysError
from router.auth.network import is_loopback
from router.auth.quota import Quotas
from router.lifecycle import ServerState
from router.middleware.request import RequestMiddleware
from router.monitoring.live import Live
from router.monitoring.metrics import Metrics
from router.monitoring.otlp import otlp_metrics
from router.monitoring.page import Page
from router.monitoring.status import Status
from router.monitoring.usage_metrics import Labels, UsageEndpoint
from router.pipeline.admission import Admission
from router.pipeline.failover import Failover
from router.pipeline.overflow import Overflow
from router.pipeline.pipeline import Pipeline
from router.pipeline.registry import RequestRegistry
from router.pipeline.shared_load import SharedLoad
from router.policy.decision_log import DecisionLog
from router.policy.table import PolicyStore
from router.profiling.auto_profile import AutoProfile
from router.profiling.idle_client import RequestCounts
from router.reload import ReloadError, Reloads
from router.server.memory import keep_handing_back
from router.server.tls import Tls, TlsError, load_pair
from router.settings import Settings
from router.telemetry.logs import Logging
from router.telemetry.record import log_outcome
from router.telemetry.tracing import Telemetry
from router.upstream.overflow import OverflowClient
from router.upstream.transport import EngineTransport
from router.upstream.upstream import Upstream
from tiers.background import lasting
from tiers.fleet import Fleet
from tiers.lifecycle.operations import Operations

log = logging.getLogger(f"qarr.{__name__}")

DECISION_LOG_BYTES = 100 << 20  # the decision log is rotated once its file is so large
MIN_REQUESTS = 64  # engines may have so many at once, however few engines there are


class EntryPoints(NamedTuple):
    """What requests reach under some settings, as ``RequestMiddleware.use`` takes it."""

    app: ASGIApp
    # inference endpoints, by path, which requests reach without the application
    direct: dict[str, ASGIApp]
    local_names: tuple[str, ...] | None


class App:
    """The router: its parts, wired once; new settings replace those that settings make.

    Without ``operations`` operators cannot operate engines, and without ``reloads`` they cannot reload settings.
    """

    def __init__(  # noqa: PLR0913  all that it wires
        self,
        settings: Settings,
        fleet: Fleet,
        counter: TokenCounter,
        telemetry: Telemetry,
        model: str,
        *,
        keys: KeyStore,
        operations: Operations | None = None,
        reloads: Reloads | None = None,
        transport: EngineTransport | None = None,
    ) -> None:
        self.state = ServerState()
        self._keys = keys
        self._operations = operations
        self._reloads = reloads
        self.tls = None
        if settings.tls.certificate is not None:
            self.tls = Tls(settings.tls)
        self._about = {
            "version": version("qarr"),
            "model": model,
            "notice": settings.server.notice,
            "trace_url": settings.telemetry.trace_url,
        }
        self._database = Database(settings.budgets.file)
        self._streams = ResumableStreams(settings.server)
        policy = PolicyStore(settings.policy, fleet, model, gate=settings.quality.gate)
        if transport is None:
            transport = EngineTransport(ca=settings.tls.ca)
        self._transport = transport
        self._upstream = Upstream(
            fleet,
            transport.alike(MIN_REQUESTS),
            options=settings.upstream,
            telemetry=telemetry,
            policy=policy,
        )
        self._upstream.fit()
        fleet.on_members = self._upstream.fit
        self.pipeline = self._wire(
            settings, fleet, counter, telemetry=telemetry, policy=policy
        )
        self._run_beside(settings)
        self._observe()
        entry_points = self._entry_points(settings)
        self._entry = RequestMiddleware(
            entry_points.app,
            keys,
            telemetry,
            server_state=self.state,
            answered=self._metrics.answered,
            direct=entry_points.direct,
            local_names=entry_points.local_names,
            origins=settings.server.cors_origins,
        )
        self._entry.bodies.max_bytes = settings.server.max_bodies_bytes
        self.asgi = telemetry.instrument(self._outermost(settings.server.cors_origins))

    def _wire(
        self,
        settings: Settings,
        fleet: Fleet,
        counter: TokenCounter,
        *,
        telemetry: Telemetry,
        policy: PolicyStore,
    ) -> Pipeline:
        """Make the path of every request."""
        telemetry_settings = settings.telemetry
        registry = RequestRegistry(self.state, telemetry_settings.recent_requests)
        if telemetry.exports:
            registry.at_once.append(telemetry.record_outcome)
        registry.observers.append(
            lambda record: policy.served(record.decision, record.served.tier)
        )
        decision_log = None
        if telemetry_settings.decision_log is not None:
            decision_log = DecisionLog(
                telemetry_settings.decision_log, DECISION_LOG_BYTES
            )
            registry.observers.append(partial(log_outcome, decision_log))
        reservations = Reservations(
            ledger_of(settings, self._database), settings.budgets
        )
        overflow_client = OverflowClient(
            settings.overflow,
            settings.upstream,
            telemetry=telemetry,
            transport=self._transport.alike(),
        )
        return Pipeline(
            fleet=fleet,
            counter=counter,
            second_look=_second_look(settings),
            policy=policy,
            quotas=Quotas(settings.state.redis_url.get_secret_value()),
            charging=Charging(
                reservations, fleet, policy=policy, prices=settings.policy.prices
            ),
            admission=Admission(fleet, policy, settings.admission),
            failover=Failover(
                fleet=fleet,
                policy=policy,
                upstream=self._upstream,
                telemetry=telemetry,
                attempts=settings.upstream.attempts,
                default_max_tokens=settings.limits.default_max_tokens,
            ),
            overflow=Overflow(overflow_client, decision_log, telemetry),
            registry=registry,
            decisions=decision_log,
            telemetry=telemetry,
        )

    def _run_beside(self, settings: Settings) -> None:
        """Make what runs beside requests: measurements, shared load, the usage log, the live stream."""
        pipeline = self.pipeline
        registry = pipeline.registry
        self._profiling = AutoProfile(
            settings,
            pipeline.fleet,
            policy=pipeline.policy,
            model=self._about["model"],
            request_counts=lambda: RequestCounts(
                total=registry.totals["requests"], open=len(registry.open)
            ),
        )
        redis_url = settings.state.redis_url.get_secret_value()
        self._shared = SharedLoad(
            redis_url, pipeline.fleet, pipeline.admission.waiting_for
        )
        self._usage = UsageLog(self._database, pipeline.charging)
        registry.observers.append(self._usage.offer)
        self._live = Live(
            pipeline,
            self._profiling,
            server_state=self.state,
            keys=self._keys,
            settings=settings.telemetry,
            about=self._about,
        )

    def _outermost(self, origins: Sequence[str]) -> ASGIApp:
        """Return the outermost middleware: with ``origins``, the one that lets their pages send requests."""
        if not origins:
            return self._entry
        return CORSMiddleware(
            self._entry,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )

    def _observe(self) -> None:
        """Make what shows the router's state: metrics, and the routes of pages and figures."""
        pipeline = self.pipeline
        self._metrics = Metrics(
            pipeline, retries=self._upstream.retries, about=self._about
        )
        reservations = pipeline.charging.reservations
        redis_uses = (pipeline.quotas, reservations, self._shared)
        redis_states = [use.redis for use in redis_uses if use.redis is not None]
        if redis_states:
            self._metrics.show_redis(redis_states, lambda: reservations.restored)
        tls = self.tls
        if tls is not None:
            self._metrics.show_expiry(lambda: tls.expires)
        key_labels = Labels(self._keys)
        self._key_metrics = self._metrics.count_keys(
            self._usage, pipeline.charging, key_labels
        )
        self._otlp = otlp_metrics(self._about["version"], self._metrics.collect)
        status = Status(
            pipeline,
            profiling=self._profiling,
            database=self._database,
            server_state=self.state,
            keys=self._keys,
            about=self._about,
            redis=redis_states,
        )
        self._routes = [
            *self._live.routes(),
            Route("/metrics", self._metrics.answer),
            *UsageEndpoint(self._database, pipeline.charging, self._keys).routes(),
            *status.routes(),
        ]
        if self._reloads is not None:
            self._routes.append(reload_route(self._reloads, self._keys))

    def _entry_points(self, settings: Settings) -> EntryPoints:
        """Make the application and the inference endpoints."""
        rules = Rules.of(settings)
        service = Service(
            self._pipeline_under(settings), settings, rules=rules, streams=self._streams
        )
        endpoints = (GENERATE, *COMPLETION_ENDPOINTS, *NAMED_EVENT_ENDPOINTS)
        direct_endpoints: dict[str, ASGIApp] = {
            endpoint.path: Answering(endpoint, service) for endpoint in endpoints
        }
        routes = [
            Route(PAGE, Page(settings.server, self._keys).answer),
            *(
                Route(path, direct_endpoint, methods=["POST"])
                for path, direct_endpoint in direct_endpoints.items()
            ),
            Route("/route", partial(decision_alone, service), methods=["POST"]),
            *self._engine_routes(settings),
            Route(f"{RESPONSES}/{{id}}", stored_response, methods=["GET", "DELETE"]),
            Route(f"{RESPONSES}/{{id}}/cancel", stored_response, methods=["POST"]),
            *self._routes,
        ]
        if self._operations is not None:
            routes += Admin(self._operations, self._keys, rules).routes()
        # Handlers by the type of error; ``Exception`` stands for all other errors.
        error_handlers = dict.fromkeys(
            (*PROBLEMS, ClientGoneError, Exception), _problem
        )
        app = Starlette(
            routes=routes,
            exception_handlers=error_handlers,
            lifespan=self._lifespan,
        )
        # a redirect would go to the host of the caller's Host header
        app.router.redirect_slashes = False
        local_names = None
        if is_loopback(settings.server.host):
            local_names = settings.server.allowed_hosts
        return EntryPoints(app, direct_endpoints, local_names)

    def _pipeline_under(self, settings: Settings) -> Pipeline:
        """Return the pipeline with new settings, for requests from now on; those before keep theirs."""
        failover = replace(
            self.pipeline.failover,
            attempts=settings.upstream.attempts,
            default_max_tokens=settings.limits.default_max_tokens,
        )
        return replace(self.pipeline, failover=failover)

    def _engine_routes(self, settings: Settings) -> list[Route]:
        """Return the routes of what engines answer without a decision, and of the models that they serve."""
        fleet = self.pipeline.fleet
        passthrough = Passthrough(
            self._upstream, self.pipeline.quotas, fleet=fleet, settings=settings
        )
        models = Models(
            fleet,
            settings.openai,
            model=self._about["model"],
            created=int(time.time()),
            waiting=self.pipeline.admission.waiting_for,
        )
        token_paths = ("/tokenize", "/detokenize", COUNT_TOKENS)
        return [
            Route(EMBEDDINGS, passthrough.embeddings, methods=["POST"]),
            Route("/v1/models", models.answer),
            Route("/v1/models/{id:path}/endpoints", models.endpoints),
            Route("/v1/models/{id:path}", models.answer),
            *(
                Route(path, passthrough.tokens, methods=["POST"])
                for path in token_paths
            ),
        ]

    def prepare(self, settings: Settings) -> Callable[[], None]:
        """Check new settings; return what makes the router take them, without disturbing open requests.

        ``ReloadError``: a running router cannot take them.
        """
        tls = self.tls
        uses_tls = tls is not None
        if uses_tls != (settings.tls.certificate is not None):
            raise ReloadError(
                "tls.certificate: a running router cannot switch between HTTP and HTTPS; restart it"
            )
        try:
            new_keys = open_access(settings)
            new_pair = load_pair(settings.tls) if tls is not None else None
        except (KeysError, TlsError) as error:
            raise ReloadError(str(error)) from None
        entry_points = self._entry_points(settings)
        pipeline = self.pipeline

        def use_settings() -> None:
            self._keys.use(new_keys)
            if tls is not None and new_pair is not None:
                tls.use(settings.tls, new_pair)
            self._entry.use(
                entry_points.app, entry_points.direct, entry_points.local_names
            )
            self._entry.bodies.max_bytes = settings.server.max_bodies_bytes
            self._streams.bounds = settings.server
            pipeline.policy.use(settings.policy)
            pipeline.charging.use(settings)
            pipeline.admission.use(settings.admission)
            self._upstream.use(settings.upstream)
            pipeline.overflow.client.use(settings.overflow, settings.upstream)
            pipeline.telemetry.record_prompts = settings.telemetry.record_prompts
            if Logging.current is not None:
                Logging.current.set_level(settings.telemetry)

        return use_settings

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        pipeline = self.pipeline
        background_work = {
            "loading profiles": pipeline.policy.watch,
            "the queue": pipeline.admission.run,
            "sharing load": self._shared.run,
            "the live stream": self._live.run,
            "returning memory": keep_handing_back,
            "measuring": self._profiling.run,
            "looking at budgets": self._key_metrics.run,
            "writing usage": self._usage.run,
            "the issuer's keys": self._keys.run,
        }
        if self._otlp is not None:
            background_work["sending metrics"] = self._otlp.run
        if self.tls is not None:
            background_work["watching the certificate"] = self.tls.watch
        tasks = [
            asyncio.create_task(lasting(run_work, work_name), name=work_name)
            for work_name, run_work in background_work.items()
        ]
        yield
        await self._streams.aclose()
        pipeline.registry.tell()
        await end_tasks(tasks)
        await self._close()

    async def _close(self) -> None:
        """Close all parts: first those that requests still use, then what their records go to."""
        pipeline = self.pipeline
        await self._profiling.aclose()
        await self._shared.aclose()
        await pipeline.quotas.aclose()
        await pipeline.charging.reservations.aclose()
        await self._upstream.aclose()
        await pipeline.overflow.client.aclose()
        pipeline.registry.tell()  # also of requests that were cut off late
        if self._otlp is not None:
            await self._otlp.aclose()
        await self._usage.aclose()
        await self._database.aclose()
        if pipeline.decisions is not None:
            await asyncio.to_thread(pipeline.decisions.close)


def _second_look(settings: Settings) -> SecondLook | None:
    """Load the classifier's second look, unless the settings or this installation do without it."""
    if not settings.policy.second_look:
        return None
    second_look = load_second_look()
    if second_look is None:
        log.warning(
            "the classifier's second look is off: onnxruntime is not installed "
            "(policy.second_look = false says that this is wanted)"
        )
    return second_look


async def _problem(request: Request, error: Exception) -> Response:
    return response_to(error, request.scope)
