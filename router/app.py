"""The application: every route, every error, every service, wired in one place."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route as Endpoint

from router.aio import end_tasks
from router.api.admin import Admin
from router.api.asgi import BodyTooLarge, ClientGone, context_of
from router.api.bodies import InvalidBody, render_fleet, render_preparing
from router.api.generate import Generate, Route
from router.api.openai import CHAT, COMPLETIONS, EMBEDDINGS, Completions, Embeddings, Models, Tokens, speaks_openai
from router.api.openapi import document
from router.api.paths import PAGE
from router.api.problems import NoEmbeddings, NotAdmin, UnknownModel, describe
from router.api.resumable import KeptStreams, StreamGone, UnknownStream
from router.auth.api_keys import BeyondKey
from router.auth.network import is_loopback
from router.auth.quota import OverQuota, Quotas
from router.lifecycle import Doors
from router.monitoring.live import Live, LiveEndpoints
from router.monitoring.metrics import Metrics
from router.monitoring.page import Page
from router.pipeline.admission import Admission
from router.pipeline.cascade import Escalation
from router.pipeline.failover import Continuation
from router.pipeline.hedging import Hedging
from router.pipeline.pipeline import Services
from router.pipeline.registry import Journal
from router.pipeline.shared_load import SharedState
from router.policy.decision import Refused
from router.policy.decision_log import DecisionLog
from router.policy.table import LivePolicy
from router.profiling.auto_profile import AutoProfile
from router.profiling.prompt_samples import PromptSamples
from router.profiling.shadow_evaluation import LiveCheck
from router.server.gate import Gate
from router.server.memory import keep_handing_back
from router.telemetry.logs import log_request
from router.telemetry.trace_store import UnknownTrace
from router.upstream.client import Upstream
from router.upstream.errors import UpstreamError
from router.upstream.http import make_transport
from tiers.background import lasting
from tiers.errors import NotPossible, UnknownReplica
from tiers.spec import ReplicaState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from classifier import TokenCounter
    from router.auth.api_keys import KeyStore
    from router.settings import Settings
    from router.telemetry.tracing import Telemetry
    from tiers.fleet import Fleet
    from tiers.lifecycle.operations import Operations

# Handlers are looked up by exception type, Exception last: whatever is not listed is a 500 without details.
HANDLED = (
    InvalidBody,
    BodyTooLarge,
    UnknownModel,
    NoEmbeddings,
    BeyondKey,
    NotAdmin,
    UnknownReplica,
    NotPossible,
    OverQuota,
    Refused,
    UnknownStream,
    StreamGone,
    UnknownTrace,
    ClientGone,
    UpstreamError,
    HTTPException,
    Exception,
)


def create_app(
    settings: Settings,
    fleet: Fleet,
    counter: TokenCounter,
    telemetry: Telemetry,
    model: str,
    *,
    keys: KeyStore,
    doors: Doors | None = None,
    operations: Operations | None = None,
) -> ASGIApp:
    """Wire the router.

    Args:
        settings: All settings.
        fleet: Kept by a supervisor; read and leased from here.
        counter: Counts tokens with the tiers' own tokenizer.
        telemetry: Where spans go.
        model: The served model's name, for people.
        keys: Of those who may use it.
        doors: Tell whether it takes requests; None: always.
        operations: What operators may do; None: nothing.
    """
    doors = doors or Doors()
    wired = _wire(settings, fleet, counter, telemetry, model, doors=doors)
    services, running = wired.services, version("qarr")
    live, metrics = Live(services, wired.profiling, doors, keys, running), Metrics(services, wired.evaluation, running)
    admin = Admin(operations, keys).routes() if operations is not None else []
    status, streams = Status(services, wired.profiling, doors), KeptStreams(settings.server)
    handlers = dict.fromkeys(HANDLED, status.problem)
    pages = [*LiveEndpoints(services, wired.evaluation, live).routes(), Endpoint("/metrics", metrics.answer)]
    page = Endpoint(PAGE, Page(settings.server, keys).answer)
    routes = [page, *_routes(services, status, streams), *pages, *admin]
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=_lifespan(wired, streams, live))
    app.router.redirect_slashes = False  # it would send callers to wherever their Host header says
    local_names = settings.server.allowed_hosts if is_loopback(settings.server.host) else None
    return telemetry.instrument(Gate(app, keys, telemetry, doors, answered=metrics.answered, local_names=local_names))


@dataclass(frozen=True, slots=True)
class _Wired:
    """What the handlers work with, and what observes them."""

    services: Services
    evaluation: LiveCheck
    profiling: AutoProfile
    samples: PromptSamples


def _wire(
    settings: Settings, fleet: Fleet, counter: TokenCounter, telemetry: Telemetry, model: str, *, doors: Doors
) -> _Wired:
    """Wire what the handlers work with."""
    journal = Journal(fleet, doors, settings.telemetry.recent_requests)
    journal.observers.extend((telemetry.record_outcome, log_request))
    policy = LivePolicy(settings.policy, fleet)
    upstream = Upstream(fleet, make_transport(2 * _places(fleet)), settings.upstream, telemetry, policy)
    decisions = DecisionLog(settings.telemetry.decision_log, settings.telemetry.decision_log_mb << 20)
    quotas = Quotas(settings.state.redis_url.get_secret_value())
    profiling = AutoProfile(settings, fleet, policy, model, lambda: bool(journal.open))
    evaluation = LiveCheck(settings.policy.live_check_share, fleet, upstream, policy, telemetry)
    admission = Admission(fleet, policy, settings.admission, telemetry)
    shared = SharedState(settings.state.redis_url.get_secret_value(), fleet, admission.waiting_for)
    samples = PromptSamples(settings.telemetry.sampled_prompts, settings.telemetry.prompt_share)
    services = Services(
        fleet=fleet,
        upstream=upstream,
        quotas=quotas,
        admission=admission,
        shared=shared,
        counter=counter,
        policy=policy,
        journal=journal,
        decisions=decisions,
        escalation=Escalation(policy, upstream, telemetry),
        continuation=Continuation(
            fleet, policy, upstream, telemetry, settings.upstream.attempts, settings.limits.default_max_tokens
        ),
        hedging=Hedging(upstream, telemetry, settings.upstream.hedge),
        answer_observer=evaluation,
        background=profiling,
        prompt_observer=samples,
        limits=settings.limits,
        openai=settings.openai,
        engine_key=settings.engine.api_key,
        max_body_bytes=settings.server.max_body_bytes,
        telemetry=telemetry,
        model=model,
        trace_url=settings.telemetry.trace_url,
    )
    return _Wired(services, evaluation, profiling, samples)


def _places(fleet: Fleet) -> int:
    """Return the requests at once that replicas are to have. An engine started here may for a while have one beside it."""
    return sum(spec.max_in_flight * (len(spec.urls) or 2) for spec in fleet.specs)


def _lifespan(
    wired: _Wired, streams: KeptStreams, live: Live
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    """Return what runs while the router serves, and what is closed after it."""
    services = wired.services

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        work = {
            "taking up profiles": services.policy.watch,
            "the check of live answers": wired.evaluation.run,
            "measuring itself": wired.profiling.run,
            "the queue": services.admission.run,
            "what routers share": services.shared.run,
            "the live picture": live.run,
            "handing memory back": keep_handing_back,
        }
        tasks = [asyncio.create_task(lasting(each, name), name=name) for name, each in work.items()]
        yield
        await streams.aclose()
        await end_tasks(tasks)
        await wired.profiling.aclose()
        await services.shared.aclose()
        await services.quotas.aclose()
        await services.upstream.aclose()
        await asyncio.to_thread(services.decisions.close)
        await asyncio.to_thread(wired.samples.close)

    return lifespan


def _routes(services: Services, status: Status, streams: KeptStreams) -> list[Endpoint]:
    """Return every route."""
    models = Models(services, int(time.time()))
    return [
        Endpoint("/generate", Generate(services, streams), methods=["POST"]),
        Endpoint("/route", Route(services), methods=["POST"]),
        Endpoint(CHAT, Completions(services, CHAT), methods=["POST"]),
        Endpoint(COMPLETIONS, Completions(services, COMPLETIONS), methods=["POST"]),
        Endpoint(EMBEDDINGS, Embeddings(services), methods=["POST"]),
        Endpoint("/v1/models", models, methods=["GET"]),
        Endpoint("/v1/models/{id:path}", models, methods=["GET"]),
        Endpoint("/tokenize", Tokens(services, "/tokenize"), methods=["POST"]),
        Endpoint("/detokenize", Tokens(services, "/detokenize"), methods=["POST"]),
        Endpoint("/tiers", status.tiers),
        Endpoint("/readyz", status.readyz),
        Endpoint("/healthz", status.healthz),
        Endpoint("/openapi.json", status.openapi),
    ]


class Status:
    """The endpoints that tell how things stand, and the rendering of errors."""

    def __init__(self, services: Services, profiling: AutoProfile, doors: Doors) -> None:
        self._services, self._profiling, self._doors = services, profiling, doors

    async def healthz(self, _request: Request) -> Response:
        """Answer that the router is alive."""
        return _json({"status": "alive"})

    async def readyz(self, _request: Request) -> Response:
        """Answer 200 once a tier is ready, 503 before and when the router leaves; the body names every tier's state.

        It also says what tiers that have not served yet still need.
        """
        tiers = self._services.fleet.snapshot().tiers
        ready = self._doors.open and any(tier.state is ReplicaState.READY for tier in tiers)
        body = {
            "ready": ready,
            "tiers": {tier.spec.name: tier.state.value for tier in tiers},
            "preparing": [
                {"tier": tier.spec.name, **render_preparing(tier.preparing)}
                for tier in tiers
                if tier.preparing is not None and tier.preparing.failed is None
            ],
        }
        return _json(body, 200 if ready else 503)

    async def tiers(self, request: Request) -> Response:
        """Answer with the whole fleet as it is now; where its engines are, to operators only."""
        services, inside = self._services, context_of(request.scope).caller.sees_all
        fleet = render_fleet(services.fleet.snapshot(), services.model, services.fleet.machine, inside=inside)
        return _json({**fleet, "profiling": self._profiling.render(inside=inside)})

    async def openapi(self, _request: Request) -> Response:
        """Answer with the document of everything that is served."""
        return _json(document(version("qarr"), self._services.limits))

    async def problem(self, request: Request, error: Exception) -> Response:
        """Answer an error as a problem object."""
        if isinstance(error, ClientGone):
            return Response(status_code=499)
        openai = speaks_openai(request.scope["path"])
        return describe(error).response(context_of(request.scope), openai=openai)


def _json(body: object, status: int = 200) -> Response:
    return Response(to_json(body), status, media_type="application/json")
