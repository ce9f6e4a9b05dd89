"""A router on a real socket in front of fake engines, wired as in production."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from opentelemetry.sdk.trace import TracerProvider
from starlette.types import ASGIApp

from classifier import EstimatingCounter
from router.api.problems import refusal
from router.app import App
from router.auth.access import KeyStore
from router.deployment.options import fleet_options
from router.deployment.settings import TierSettings
from router.pipeline.pipeline import Pipeline
from router.reload import Reloads
from router.section import PROJECT
from router.server.http_protocol import protocol_for
from router.settings import Settings
from router.telemetry.tracing import Telemetry, make_telemetry
from tests.fakes.engine import Behaviour, FakeEngine, serving, serving_all
from tests.fakes.model_engine import ModelEngine, ThinkingModel
from tests.turned import turned
from tests.waiting import until
from tiers.fleet import Fleet
from tiers.lifecycle.options import SupervisorOptions
from tiers.lifecycle.supervisor import Supervisor
from tiers.spec import ReplicaStatus, TierName, TierSpec

# Also on a busy machine a sound engine sends its next token within this time.
SOUND_S = 2.0


@dataclass(slots=True)
class Stack:
    """A running router, its application, and its engines' behaviours."""

    url: str
    client: httpx.AsyncClient
    fleet: Fleet
    engines: dict[TierName, Behaviour]
    app: ASGIApp
    pipeline: Pipeline

    async def generate(self, **body: Any) -> httpx.Response:
        return await self.client.post(
            f"{self.url}/generate", json={"prompt": "hi", **body}
        )

    def leases(self) -> int:
        return sum(
            replica.state.in_flight
            + replica.state.prompt_tokens
            + replica.output_tokens
            for replica in self.fleet.replicas
        )


@asynccontextmanager
async def router_stack(
    tmp_path: Path,
    overrides: dict[str, Any] | None = None,
    tracing: TracerProvider | Telemetry | None = None,
    *,
    twin: Behaviour | None = None,
    model: str = "fake",
    models: Mapping[TierName, ThinkingModel] | None = None,
    wrap: Callable[[ASGIApp], ASGIApp] | None = None,
    engine: Callable[[Behaviour], FakeEngine] = FakeEngine,
    **behaviours: Behaviour,
) -> AsyncIterator[Stack]:
    """Run a router in front of one fake engine a tier, which the real supervisor has made ready and warm.

    A tier whose ``replicas`` are set to 0 has no engine; a tier that the settings add has one, whatever its ``urls``. With
    ``twin``, the tier ``fast`` has a second replica, which behaves like it. With ``models``, engines answer as these do.
    ``wrap`` puts an application in front of each engine's.
    ``engine`` makes another kind of fake.
    """
    async with AsyncExitStack() as cleanup:
        cleanup.enter_context(no_faults_in_the_router())
        # Fake engines answer at once, so it is chance which of them is measured to be faster.
        settings = turned({"policy": {"max_slowdown": 1e9}, **(overrides or {})})
        tiers = settings.tiers
        served_here = [name for name in tiers.names if tiers.of(name).replicas != 0]
        engines = {name: behaviours.get(name, Behaviour()) for name in served_here}
        for name, behaviour in engines.items():
            behaviour.root = behaviour.root or f"made/{name}"
        twins = [] if twin is None else [twin]
        for behaviour in twins:
            behaviour.root = behaviour.root or f"made/{TierName.FAST}"
        fakes = (*engines.values(), *twins)
        apps = [engine(behaviour).app for behaviour in fakes]
        if models is not None:
            apps = [
                ModelEngine(models[name], behaviour).app
                for name, behaviour in engines.items()
            ]
        if wrap is not None:
            apps = [wrap(app) for app in apps]
        served = await cleanup.enter_async_context(serving_all(*apps))
        urls = {name: (url,) for name, url in zip(engines, served, strict=False)}
        urls[TierName.FAST] = (*urls.get(TierName.FAST, ()), *served[len(engines) :])
        specs = tuple(
            _spec(name, tiers.of(name), urls.get(name, ())) for name in tiers.names
        )
        fleet = Fleet(specs, options=fleet_options(settings))
        supervisor = Supervisor(fleet, SupervisorOptions(log_dir=tmp_path))
        supervisor.start([], specs)
        cleanup.push_async_callback(supervisor.stop)
        await until(
            lambda: all(
                replica.state.status is ReplicaStatus.READY
                for replica in fleet.replicas
            ),
            poll_s=0.01,
        )
        for behaviour in fakes:
            behaviour.requests.clear()
            behaviour.headers.clear()
        keys = KeyStore(settings.auth.keys_file)
        router = App(
            settings,
            fleet,
            counter=EstimatingCounter(),
            telemetry=telemetry_of(tracing, settings),
            model=model,
            keys=keys,
            operations=supervisor.operations,
            reloads=Reloads(settings, lambda: settings),
        )
        app = router.asgi
        http = protocol_for(settings.server, refusal)
        keep_alive_s = settings.server.keep_alive_s
        url = await cleanup.enter_async_context(
            serving(app, http=http, timeout_keep_alive=keep_alive_s)
        )
        client = await cleanup.enter_async_context(
            httpx.AsyncClient(timeout=20, trust_env=False)
        )
        yield Stack(
            url, client, fleet=fleet, engines=engines, app=app, pipeline=router.pipeline
        )


def _spec(name: TierName, tier: TierSettings, urls: tuple[str, ...]) -> TierSpec:
    return TierSpec(
        name,
        tier.max_model_len,
        max_num_seqs=tier.max_num_seqs,
        max_in_flight=tier.max_in_flight,
        replicas=0,
        urls=urls,
        stated_precision=tier.precision or None,
    )


def telemetry_of(
    tracing: TracerProvider | Telemetry | None, settings: Settings
) -> Telemetry:
    """Return the router's telemetry: a test's own, or what production makes of the settings."""
    if tracing is None:
        return make_telemetry("0", settings.telemetry)
    return tracing if isinstance(tracing, Telemetry) else Telemetry(tracing)


@contextmanager
def no_faults_in_the_router() -> Iterator[None]:
    """Fail when the server reports an exception that came out of the router: callers would not see it."""
    faults: list[str] = []

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not record.exc_info:
                return
            trace = "".join(traceback.format_exception(*record.exc_info))
            if f"{PROJECT}/router/" in trace:
                faults.append(trace)

    watch = Watch()
    logging.getLogger("uvicorn.error").addHandler(watch)
    try:
        yield
    finally:
        logging.getLogger("uvicorn.error").removeHandler(watch)
    assert not faults, faults[0]


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and data of a stream's events."""
    parsed = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        parsed.append((fields.get("event", "message"), json.loads(fields["data"])))
    return parsed
