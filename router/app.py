"""The application: routes, error handlers and services, wired in one place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from classifier import TokenCounter, load_second_look
from router.accounting.charging import Charging
from router.accounting.database import Database
from router.accounting.ledgers import ledger_of
from router.accounting.reservations import Reservations
from router.accounting.usage import UsageLog
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
from router.monitoring.usage import Labels, UsageEndpoint
from router.pipeline.admission import Admission
from router.pipeline.failover import Failover
from router.pipeline.overflow import Overflow
from router.pipeline.pipeline import Pipeline
from router.pipeline.registry import RequestRegistry
from router.pipeline.shared_load import SharedLoad
from router.policy.decision_log import DecisionLog
from router.policy.table import PolicyStore
from router.profiling.auto_profile import AutoProfile
from router.profiling.prompt_samples import PromptSamples
from router.profiling.shadow_evaluation import ShadowEvaluation
from router.reload import ReloadError, Reloads
from router.server.memory import keep_handing_back
from router.server.tls import Tls, TlsError, load_pair
from router.settings import Settings
from router.telemetry.logs import Logging
from router.telemetry.record import log_outcome
from router.telemetry.tracing import Telemetry
from router.upstream.client import Upstream
from router.upstream.overflow import OverflowClient
from router.upstream.transport import EngineTransport
from tiers.background import lasting
from tiers.fleet import Fleet
from tiers.lifecycle.operations import Operations

DECISION_LOG_BYTES = 100 << 20  # of that file, until it is rotated
LEAST_REQUESTS = 64  # that engines may have at once, however few they are


class App:
    """The router: its parts, wired once; new settings replace those that settings make.

    Without ``operations`` and ``reloads`` operators can do none of them. Without ``tls`` plain HTTP is served.
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
        self.state, self._keys, self._operations, self._reloads = ServerState(), keys, operations, reloads
        self.tls = Tls(settings.tls) if settings.tls.certificate is not None else None
        self._about = {
            "version": version("qarr"),
            "model": model,
            "notice": settings.server.notice,
            "trace_url": settings.telemetry.trace_url,
        }
        self._database = Database(settings.budgets.file)
        self._streams = ResumableStreams(settings.server)
        policy = PolicyStore(settings.policy, fleet, model)
        self._transport = EngineTransport(ca=settings.tls.ca) if transport is None else transport
        self._upstream = Upstream(fleet, self._transport.alike(LEAST_REQUESTS), settings.upstream, telemetry, policy)
        self._upstream.fit()
        fleet.on_members = self._upstream.fit
        self.pipeline = self._wire(settings, fleet, counter, telemetry, policy)
        registry = self.pipeline.registry
        self._profiling = AutoProfile(
            settings, fleet, policy, model, lambda: (registry.totals["requests"], len(registry.open))
        )
        share = settings.policy.live_check_share
        self._evaluation = ShadowEvaluation(share, fleet, self._profiling.client, telemetry)
        self._shared = SharedLoad(
            settings.state.redis_url.get_secret_value(), fleet, self.pipeline.admission.waiting_for
        )
        self._usage = UsageLog(self._database, self.pipeline.charging)
        registry.observers.append(self._usage.offer)
        self._live = Live(
            self.pipeline, self._profiling, self._evaluation,
            server_state=self.state, keys=keys, settings=settings.telemetry, about=self._about,
        )  # fmt: skip
        self._observe()
        app, direct, local_names = self._served(settings)
        self._entry = RequestMiddleware(
            app, keys, telemetry, self.state,
            answered=self._metrics.answered, direct=direct, local_names=local_names, origins=settings.server.cors_origins,
        )  # fmt: skip
        origins = settings.server.cors_origins
        outer: ASGIApp = self._entry if not origins else CORSMiddleware(
            self._entry, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
        )  # fmt: skip
        self.asgi = telemetry.instrument(outer)

    def _wire(
        self, settings: Settings, fleet: Fleet, counter: TokenCounter, telemetry: Telemetry, policy: PolicyStore
    ) -> Pipeline:
        kept, samples = settings.telemetry, None
        registry = RequestRegistry(self.state, kept.recent_requests)
        registry.at_once += [telemetry.record_outcome] if telemetry.exports else []
        registry.observers.append(lambda record: policy.served(record.decision, record.served.tier))
        decisions = DecisionLog(kept.decision_log, DECISION_LOG_BYTES) if kept.decision_log is not None else None
        if decisions is not None:
            registry.observers.append(partial(log_outcome, decisions))
        if kept.sampled_prompts is not None and kept.prompt_share:
            samples = PromptSamples(kept.sampled_prompts, kept.prompt_share)
        self._samples = samples
        reservations = Reservations(ledger_of(settings, self._database), settings.budgets)
        attempts, max_tokens = settings.upstream.attempts, settings.limits.default_max_tokens
        overflow = OverflowClient(settings.overflow, settings.upstream, telemetry, self._transport.alike())
        return Pipeline(
            fleet=fleet,
            counter=counter,
            second_look=load_second_look(),
            policy=policy,
            quotas=Quotas(settings.state.redis_url.get_secret_value()),
            charging=Charging(reservations, fleet, policy, settings.policy.prices),
            admission=Admission(fleet, policy, settings.admission),
            failover=Failover(fleet, policy, self._upstream, telemetry, attempts, max_tokens),
            overflow=Overflow(overflow, decisions, telemetry),
            registry=registry,
            decisions=decisions,
            telemetry=telemetry,
            prompt_observer=None if samples is None else samples.offer,
            answer_observer=None,
        )

    def _observe(self) -> None:
        pipeline, tls = self.pipeline, self.tls
        self._metrics = Metrics(pipeline, self._evaluation, self._upstream.retries, self._about)
        reservations = pipeline.charging.reservations
        states = [part.redis for part in (pipeline.quotas, reservations, self._shared)]
        redis = [state for state in states if state is not None]
        if redis:
            self._metrics.show_redis(redis, lambda: reservations.restored)
        if tls is not None:
            self._metrics.show_expiry(lambda: tls.expires)
        labels = Labels(self._keys)
        self._key_metrics = self._metrics.count_keys(self._usage, pipeline.charging, labels)
        self._otlp = otlp_metrics(self._about["version"], self._metrics.collect)
        status = Status(
            pipeline,
            profiling=self._profiling, database=self._database, server_state=self.state, keys=self._keys, about=self._about,
            redis=redis,
        )  # fmt: skip
        self._routes = [
            *self._live.routes(),
            Route("/metrics", self._metrics.answer),
            *UsageEndpoint(self._database, pipeline.charging, self._keys).routes(),
            *status.routes(),
            *([reload_route(self._reloads, self._keys)] if self._reloads is not None else []),
        ]

    def _served(self, settings: Settings) -> tuple[ASGIApp, dict[str, ASGIApp], tuple[str, ...] | None]:
        """Return the application, what requests reach without it, and local names, as ``RequestMiddleware`` takes them."""
        attempts, max_tokens = settings.upstream.attempts, settings.limits.default_max_tokens
        failover = replace(self.pipeline.failover, attempts=attempts, default_max_tokens=max_tokens)
        observer = self._evaluation.offer if settings.policy.live_check_share else None
        pipeline, rules = replace(self.pipeline, failover=failover, answer_observer=observer), Rules.of(settings)
        service = Service(pipeline, settings, rules, self._streams)
        answering = (GENERATE, *COMPLETION_ENDPOINTS, *NAMED_EVENT_ENDPOINTS)
        direct: dict[str, ASGIApp] = {each.path: Answering(each, service) for each in answering}
        waiting, model = pipeline.admission.waiting_for, self._about["model"]
        models = Models(pipeline.fleet, settings.openai, model, int(time.time()), waiting)
        small = Passthrough(self._upstream, pipeline.quotas, pipeline.fleet, settings)
        admin = Admin(self._operations, self._keys, rules).routes() if self._operations is not None else []
        routes = [
            Route(PAGE, Page(settings.server, self._keys).answer),
            *(Route(path, served, methods=["POST"]) for path, served in direct.items()),
            Route("/route", partial(decision_alone, service), methods=["POST"]),
            Route(EMBEDDINGS, small.embeddings, methods=["POST"]),
            Route("/v1/models", models.answer),
            Route("/v1/models/{id:path}/endpoints", models.endpoints),
            Route("/v1/models/{id:path}", models.answer),
            Route(f"{RESPONSES}/{{id}}", stored_response, methods=["GET", "DELETE"]),
            Route(f"{RESPONSES}/{{id}}/cancel", stored_response, methods=["POST"]),
            *(Route(path, small.tokens, methods=["POST"]) for path in ("/tokenize", "/detokenize", COUNT_TOKENS)),
            *self._routes,
            *admin,
        ]
        handlers = dict.fromkeys((*PROBLEMS, ClientGoneError, Exception), _problem)  # by type; Exception: all others
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        app.router.redirect_slashes = False  # a redirect would go to the host of the caller's Host header
        return app, direct, settings.server.allowed_hosts if is_loopback(settings.server.host) else None

    def prepare(self, settings: Settings) -> Callable[[], None]:
        """Check new settings; return what makes the router take them, without disturbing open requests.

        ``ReloadError``: a running router cannot take them.
        """
        tls = self.tls
        if (tls is None) != (settings.tls.certificate is None):
            raise ReloadError("tls.certificate: a running router cannot switch between HTTP and HTTPS; restart it")
        try:
            keys = open_access(settings)
            pair = load_pair(settings.tls) if tls is not None else None
        except (KeysError, TlsError) as error:
            raise ReloadError(str(error)) from None
        served, pipeline = self._served(settings), self.pipeline

        def use() -> None:
            self._keys.use(keys)
            if tls is not None and pair is not None:
                tls.use(settings.tls, pair)
            self._entry.use(*served)
            self._streams.bounds = settings.server
            pipeline.policy.use(settings.policy)
            pipeline.charging.use(settings)
            pipeline.admission.use(settings.admission)
            self._upstream.use(settings.upstream)
            pipeline.overflow.client.use(settings.overflow, settings.upstream)
            self._evaluation.share = settings.policy.live_check_share
            pipeline.telemetry.record_prompts = settings.telemetry.record_prompts
            if Logging.current is not None:
                Logging.current.set_level(settings.telemetry)

        return use

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        pipeline = self.pipeline
        work = {
            "loading profiles": pipeline.policy.watch,
            "the queue": pipeline.admission.run,
            "sharing load": self._shared.run,
            "the live stream": self._live.run,
            "returning memory": keep_handing_back,
            "shadow evaluation": self._evaluation.run,
            "measuring": self._profiling.run,
            "looking at budgets": self._key_metrics.run,
            "writing usage": self._usage.run,
            "the issuer's keys": self._keys.run,
        }
        if self._otlp is not None:
            work["sending metrics"] = self._otlp.run
        if self.tls is not None:
            work["watching the certificate"] = self.tls.watch
        tasks = [asyncio.create_task(lasting(each, name), name=name) for name, each in work.items()]
        yield
        await self._streams.aclose()
        pipeline.registry.tell()
        await end_tasks(tasks)
        for part in (
            self._profiling, self._shared, pipeline.quotas, pipeline.charging.reservations, self._upstream,
            pipeline.overflow.client,
        ):  # fmt: skip
            await part.aclose()
        pipeline.registry.tell()  # also of requests that were cut off late
        if self._otlp is not None:
            await self._otlp.aclose()
        await self._usage.aclose()
        await self._database.aclose()
        for writer in (pipeline.decisions, self._samples):
            if writer is not None:
                await asyncio.to_thread(writer.close)


async def _problem(request: Request, error: Exception) -> Response:
    return response_to(error, request.scope)
