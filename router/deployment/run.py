"""Run the router, with or without engines of its own, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version

from router.api.problems import refusal
from router.app import App
from router.auth.access import KeyStore
from router.deployment.first_start import FirstStart
from router.deployment.layout import Deployment, elsewhere, speed_machine
from router.deployment.on_ray import OnRay
from router.deployment.options import fleet_options, supervisor_options
from router.deployment.reloading import Asked, Parts
from router.line_file import PrivateFile
from router.section import SettingsError
from router.server.handover import (
    HandoverClient,
    TakenError,
    TakeoverError,
    control_path,
    handing_over,
)
from router.server.http_protocol import protocol_for
from router.server.memory import set_aside
from router.server.server import Server
from router.settings import Settings
from router.telemetry.tracing import make_telemetry
from router.upstream.transport import EngineTransport
from tiers.errors import TrustError
from tiers.fleet import Fleet
from tiers.lifecycle.supervisor import Supervisor
from tiers.plan import MemoryPlan
from tiers.replica import Replica
from tiers.spec import ReplicaStatus, TierSpec
from tiers.trust import client_context

log = logging.getLogger(f"qarr.{__name__}")
POLL_S = 0.1
SETTLED = {
    ReplicaStatus.READY,
    ReplicaStatus.FAILED,
    ReplicaStatus.UNREACHABLE,
    ReplicaStatus.QUARANTINED,
}


class StartError(Exception):
    """An engine that was to be started here did not become ready."""


def check_files(settings: Settings) -> None:
    """Raise ``SettingsError`` for paths that would otherwise fail only at the first request."""
    telemetry, profiles = settings.telemetry, settings.policy.profiles
    written = {"telemetry.decision_log": telemetry.decision_log}
    if telemetry.prompt_share:
        written["telemetry.sampled_prompts"] = telemetry.sampled_prompts
    for key, path in written.items():
        if path is None or path.is_fifo():  # opening one waits for a reader
            continue
        try:
            PrivateFile(path, 0, 0, key).close()
        except OSError as error:
            raise SettingsError(
                f"{key}: {path} cannot be written ({error.strerror})"
            ) from error
    if settings.tls.ca is not None:
        try:
            client_context(settings.tls.ca)
        except TrustError as error:
            raise SettingsError(str(error)) from error
    if profiles.exists() and not profiles.is_dir():
        raise SettingsError(f"policy.profiles: {profiles} is not a folder")


@dataclass(frozen=True, slots=True)
class StartObserver:
    """Callbacks for the progress of a start."""

    changed: Callable[[Replica], None]  # called when a replica changes state
    up: Callable[[Fleet], None]  # called once, when no tier is starting any more
    # called once, when one tier is ready while others are starting
    serving: Callable[[Fleet], None]
    # called once with the plan and the tiers, if checkpoints are made first
    planned: Callable[[MemoryPlan, tuple[TierSpec, ...]], None]
    # called with a line for each step of making checkpoints
    step: Callable[[str], None]


async def run(
    deployment: Deployment,
    sock: socket.socket,
    observer: StartObserver,
    *,
    keys: KeyStore,
    asked: Asked,
    predecessor: HandoverClient | None = None,
) -> None:
    """Start the engines and the router; return when a signal or a successor router has ended both.

    The predecessor, which is taken over, serves until one of the engines is ready here.

    Raises:
        StartError: An engine that was started here failed before it was ever ready.
        TierError: An engine could not be started.
    """
    settings = deployment.settings
    telemetry = make_telemetry(version("qarr"), settings.telemetry)
    fleet = Fleet(
        deployment.specs,
        machine=speed_machine(settings),
        options=fleet_options(settings),
    )
    transport = EngineTransport(ca=settings.tls.ca)
    supervisor = Supervisor(
        fleet, supervisor_options(settings), observer.changed, transport
    )
    reloads = asked.reloads(sock)
    app = App(
        settings, fleet, deployment.counter, telemetry, deployment.model,
        keys=keys, operations=supervisor.operations, reloads=reloads, transport=transport,
    )  # fmt: skip
    server = Server(
        app.asgi,
        app.state,
        settings.server,
        protocol_for(settings.server, refusal),
        app.tls,
    )
    roster = supervisor.operations.roster
    reloads.add(
        Parts(
            deployment, asked.settings, app, server, fleet=fleet, roster=roster
        ).prepare
    )
    server.end_on_signals(reloads.request)
    starting: asyncio.Task[None] | None = None
    on_ray = OnRay(deployment.ray, fleet, observer.step)
    try:
        supervisor.start(
            deployment.launches, [elsewhere(spec) for spec in deployment.specs]
        )
        starting = asyncio.create_task(
            _started(deployment, supervisor, observer, on_ray)
        )
        if predecessor is not None and not await _one_ready(fleet, server):
            return
        await _serve(
            server,
            sock,
            deployment,
            starting,
            lambda: observer.up(fleet),
            predecessor=predecessor,
        )
    finally:
        if starting is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        await asyncio.gather(supervisor.stop(), on_ray.stop())
        telemetry.shutdown()


async def _serve(
    server: Server,
    sock: socket.socket,
    deployment: Deployment,
    starting: asyncio.Task[None],
    on_up: Callable[[], None],
    *,
    predecessor: HandoverClient | None,
) -> None:
    """Serve until the router leaves; a router without engines of its own can be taken over."""
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        async with AsyncExitStack() as stack:
            await server.accepting(serving)
            set_aside()
            successor = predecessor is None or await _taken_over(predecessor, server)
            if successor and not deployment.local and deployment.ray is None:
                path = control_path(
                    deployment.settings.server.runtime_dir, sock.getsockname()[1]
                )
                try:
                    await stack.enter_async_context(
                        handing_over(path, sock, version("qarr"), server.hand_over)
                    )
                except OSError as error:
                    advice = "set server.runtime_dir to a writable folder"
                    log.warning(
                        "this router cannot be taken over: no %s (%s); %s",
                        path,
                        error.strerror,
                        advice,
                    )
            await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                on_up()
            starting.cancel()
            await serving
    finally:  # after an error the server still runs
        server.should_exit = True
        await serving


async def _taken_over(predecessor: HandoverClient, server: Server) -> bool:
    """Report that this router serves; return whether it continues: of several successors only the first one does."""
    try:
        await asyncio.to_thread(predecessor.ready)
    except TakenError as error:
        log.warning("%s", error)
        server.hand_over()
        return False
    except (
        TakeoverError
    ) as error:  # this router serves; the predecessor may have ended meanwhile
        log.warning("%s", error)
    return True


async def _one_ready(fleet: Fleet, server: Server) -> bool:
    """Wait until no replica is starting and one is ready; return False if a signal comes first."""
    while not server.should_exit:
        if _any_ready(fleet) and all(
            replica.state.status in SETTLED for replica in fleet.replicas
        ):
            return True
        await asyncio.sleep(POLL_S)
    return False


async def _started(
    deployment: Deployment,
    supervisor: Supervisor,
    observer: StartObserver,
    on_ray: OnRay,
) -> None:
    fleet, making = supervisor.fleet, None
    on_ray.start()
    if deployment.missing:
        first = FirstStart(deployment, supervisor, observer.planned, observer.step)
        making = asyncio.create_task(first.run(), name="first start")
    try:
        reported = False
        while not (await _settled(deployment, fleet, making) and on_ray.settled):
            on_ray.check()
            if not reported and _any_ready(fleet) and fleet.preparations.coming:
                observer.serving(fleet)
                reported = True
            await asyncio.sleep(POLL_S)
    finally:
        if making is not None:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)


async def _settled(
    deployment: Deployment, fleet: Fleet, making: asyncio.Task[None] | None
) -> bool:
    if making is not None and making.done():
        await making
    failed = [
        r
        for r in fleet.replicas
        if r.state.status is ReplicaStatus.FAILED and r.spec.name in deployment.local
    ]
    if failed and (making is None or not _any_ready(fleet)):
        raise StartError(f"{failed[0].id} did not start: {failed[0].state.detail}")
    all_there = all(
        r.state.status is ReplicaStatus.READY or r in failed for r in fleet.replicas
    )
    all_there = all_there and (_any_ready(fleet) or bool(failed))
    return (
        all_there
        and not fleet.preparations.coming
        and (making is None or making.done())
    )


def _any_ready(fleet: Fleet) -> bool:
    return any(
        replica.state.status is ReplicaStatus.READY for replica in fleet.replicas
    )
