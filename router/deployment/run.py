"""Run the router, with or without engines of its own, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from router.api.problems import refusal
from router.app import App
from router.auth.access import KeyStore
from router.deployment.first_start import FirstStart
from router.deployment.layout import Deployment, elsewhere, speed_machine
from router.deployment.on_ray import OnRay
from router.deployment.options import fleet_options, supervisor_options
from router.deployment.reloading import RunningParts, SettingsLoader
from router.line_file import PrivateFile
from router.reload import Reloads
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
    """Check paths that would otherwise fail only at the first request.

    Raises:
        SettingsError: One cannot be used.
    """
    _check_writable("telemetry.decision_log", settings.telemetry.decision_log)
    if settings.tls.ca is not None:
        try:
            client_context(settings.tls.ca)
        except TrustError as error:
            raise SettingsError(str(error)) from error
    profiles = settings.policy.profiles
    if profiles.exists() and not profiles.is_dir():
        raise SettingsError(f"policy.profiles: {profiles} is not a folder")


def _check_writable(key: str, path: Path | None) -> None:
    """Check that a setting's file can be written, by opening it."""
    # Opening a pipe waits for a reader.
    if path is None or path.is_fifo():
        return
    try:
        PrivateFile(path, max_bytes=0, kept=0, what=key).close()
    except OSError as error:
        raise SettingsError(
            f"{key}: {path} cannot be written ({error.strerror})"
        ) from error


@dataclass(frozen=True, slots=True)
class StartObserver:
    """Callbacks for the progress of a start.

    Attributes:
        changed: Called when a replica changes state.
        up: Called once, when no tier is starting any more.
        serving: Called once, when one tier is ready while others are starting.
        planned: Called once with the plan and the tiers, if checkpoints are made first.
        step: Called with a line for each step of making checkpoints.
    """

    changed: Callable[[Replica], None]
    up: Callable[[Fleet], None]
    serving: Callable[[Fleet], None]
    planned: Callable[[MemoryPlan, tuple[TierSpec, ...]], None]
    step: Callable[[str], None]


async def run(
    deployment: Deployment,
    sock: socket.socket,
    observer: StartObserver,
    *,
    keys: KeyStore,
    loader: SettingsLoader,
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
        fleet, supervisor_options(settings), observer.changed, transport=transport
    )
    reloads = loader.reloads(sock)
    app = App(
        settings,
        fleet,
        deployment.counter,
        telemetry=telemetry,
        model=deployment.model,
        keys=keys,
        operations=supervisor.operations,
        reloads=reloads,
        transport=transport,
    )
    server = _make_server(deployment, app, supervisor, reloads=reloads, loader=loader)
    starting: asyncio.Task[None] | None = None
    on_ray = OnRay(deployment.ray, fleet, observer.step)
    try:
        supervisor.start(
            deployment.launches, [elsewhere(spec) for spec in deployment.specs]
        )
        starting = asyncio.create_task(
            _until_started(deployment, supervisor, observer, on_ray=on_ray)
        )
        if predecessor is None or await _until_one_ready(fleet, server):
            await _serve(
                server,
                sock,
                deployment,
                starting=starting,
                on_up=lambda: observer.up(fleet),
                predecessor=predecessor,
            )
    finally:
        if starting is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        await asyncio.gather(supervisor.stop(), on_ray.stop())
        telemetry.shutdown()


def _make_server(
    deployment: Deployment,
    app: App,
    supervisor: Supervisor,
    *,
    reloads: Reloads,
    loader: SettingsLoader,
) -> Server:
    """Return the server of an app; both, and the fleet, take reloaded settings."""
    settings = deployment.settings
    server = Server(
        app.asgi,
        app.state,
        settings.server,
        protocol=protocol_for(settings.server, refusal),
        tls=app.tls,
    )
    parts = RunningParts(
        deployment,
        loader.settings,
        app,
        server=server,
        fleet=supervisor.fleet,
        roster=supervisor.operations.roster,
    )
    reloads.add(parts.prepare)
    server.end_on_signals(reloads.request)
    return server


async def _serve(
    server: Server,
    sock: socket.socket,
    deployment: Deployment,
    *,
    starting: asyncio.Task[None],
    on_up: Callable[[], None],
    predecessor: HandoverClient | None,
) -> None:
    """Serve until the router leaves; a router without engines of its own can be taken over."""
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    has_own_engines = bool(deployment.local) or deployment.ray is not None
    try:
        async with AsyncExitStack() as stack:
            await server.accepting(serving)
            set_aside()
            is_staying = predecessor is None or await _take_over(predecessor, server)
            if is_staying and not has_own_engines:
                await _offer_handover(stack, server, sock, deployment.settings)
            await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                on_up()
            starting.cancel()
            await serving
    finally:
        # After an error the server still runs.
        server.should_exit = True
        await serving


async def _offer_handover(
    stack: AsyncExitStack, server: Server, sock: socket.socket, settings: Settings
) -> None:
    """Let another router take this one over until the stack is closed; a log line says if it cannot."""
    port = sock.getsockname()[1]
    path = control_path(settings.server.runtime_dir, port)
    offer = handing_over(path, sock, version("qarr"), server.hand_over)
    try:
        await stack.enter_async_context(offer)
    except OSError as error:
        log.warning(
            "this router cannot be taken over: no %s (%s); %s",
            path,
            error.strerror,
            "set server.runtime_dir to a writable folder",
        )


async def _take_over(predecessor: HandoverClient, server: Server) -> bool:
    """Report that this router serves; return whether it continues: of several successors only the first one does."""
    try:
        await asyncio.to_thread(predecessor.ready)
    except TakenError as error:
        log.warning("%s", error)
        server.hand_over()
        return False
    except TakeoverError as error:
        # This router serves; the predecessor may have ended meanwhile.
        log.warning("%s", error)
    return True


async def _until_one_ready(fleet: Fleet, server: Server) -> bool:
    """Wait until no replica is starting and one is ready; return False if a signal comes first."""
    while not server.should_exit:
        is_settled = all(replica.state.status in SETTLED for replica in fleet.replicas)
        if is_settled and _any_ready(fleet):
            return True
        await asyncio.sleep(POLL_S)
    return False


async def _until_started(
    deployment: Deployment,
    supervisor: Supervisor,
    observer: StartObserver,
    *,
    on_ray: OnRay,
) -> None:
    """Make missing checkpoints, and wait until no tier is starting any more.

    Raises:
        StartError: An engine that was started here failed before it was ever ready.
        TierError: No engine could be started.
    """
    fleet = supervisor.fleet
    making: asyncio.Task[None] | None = None
    on_ray.start()
    if deployment.missing:
        first_start = FirstStart(
            deployment, supervisor, on_plan=observer.planned, say=observer.step
        )
        making = asyncio.create_task(first_start.run(), name="first start")
    try:
        is_reported = False
        while not (await _is_settled(deployment, fleet, making) and on_ray.settled):
            on_ray.check()
            if not is_reported and _any_ready(fleet) and fleet.preparations.coming:
                observer.serving(fleet)
                is_reported = True
            await asyncio.sleep(POLL_S)
    finally:
        if making is not None:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)


async def _is_settled(
    deployment: Deployment, fleet: Fleet, making: asyncio.Task[None] | None
) -> bool:
    """Tell whether every replica is ready or has failed, and no checkpoint is being made.

    Raises:
        StartError: An engine that was started here failed, and no other one serves while checkpoints are made.
        TierError: No engine could be started.
    """
    if making is not None and making.done():
        await making
    failed = [
        replica
        for replica in fleet.replicas
        if replica.state.status is ReplicaStatus.FAILED
        and replica.spec.name in deployment.local
    ]
    if failed and (making is None or not _any_ready(fleet)):
        raise StartError(f"{failed[0].id} did not start: {failed[0].state.detail}")
    if making is not None and not making.done():
        return False
    if fleet.preparations.coming or not (failed or _any_ready(fleet)):
        return False
    return all(
        replica.state.status is ReplicaStatus.READY or replica in failed
        for replica in fleet.replicas
    )


def _any_ready(fleet: Fleet) -> bool:
    return any(
        replica.state.status is ReplicaStatus.READY for replica in fleet.replicas
    )
