"""A worker: one of several processes that answer on the router's port.

usage, by the first process only: python -m router.deployment.worker DESCRIPTOR
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import random
import signal
import socket
import struct
import sys
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import uvloop

from router.aio import end_tasks
from router.app import Links, wire_router
from router.auth.tokens import open_access
from router.deployment.counters import LateCounter, make_counter
from router.deployment.options import fleet_options
from router.lifecycle import ServerState
from router.monitoring.live import LiveEndpoints
from router.server.http_protocol import protocol_for
from router.server.memory import set_aside
from router.server.tls import make_tls
from router.telemetry.logs import Logging
from router.telemetry.tracing import make_telemetry
from router.workers.acceptor import WorkerServer
from router.workers.channel import Channel
from router.workers.fleet import SharedFleet
from router.workers.gathered import part_of
from router.workers.queue import SharedLines
from router.workers.quotas import SharedLedger
from router.workers.relay import Elsewhere, Served, stream_name
from router.workers.state import follow
from router.workers.table import Table
from tiers.background import lasting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from router.app import Router
    from router.policy.decision import Decision
    from router.settings import Settings
    from router.workers.setup import Setup
    from router.workers.state import News
    from tiers.spec import TierName

log = logging.getLogger(f"qarr.{__name__}")
FLUSH_S = 0.1
_LENGTH = struct.Struct("<Q")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the first process tells a worker what to do


def main() -> None:
    """Serve until the first process says otherwise, or has ended."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = _receive(control)
    logging_ = Logging(setup.settings.telemetry)
    listening = socket.socket(fileno=setup.listening)
    logging_.also_to_file(setup.settings.engine.log_dir, listening.getsockname()[1])
    uvloop.run(Worker(setup, control, listening).run())
    if not logging_.stop():
        os._exit(0)  # Python would wait for a reader of standard error


def _receive(control: socket.socket) -> Setup:
    """Return what this worker is to be."""
    (size,) = _LENGTH.unpack(_exactly(control, _LENGTH.size))
    setup: Setup = pickle.loads(_exactly(control, size))  # noqa: S301  from the process that started this one
    return setup


def _exactly(control: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = control.recv(size - len(data))
        if not more:
            sys.exit(1)  # the first process has ended
        data += more
    return data


class Worker:
    """One worker.

    Args:
        setup: What it is.
        control: To the first process.
        listening: The socket that it accepts on.
    """

    def __init__(self, setup: Setup, control: socket.socket, listening: socket.socket) -> None:
        self._setup, self._listening, settings = setup, listening, setup.settings
        self._checked_share = settings.policy.live_check_share
        self._prepared: Callable[[], None] = lambda: None
        self.table = Table(setup.table, setup.shape, setup.row, list(setup.bells))
        self.fleet = SharedFleet((), setup.machine, fleet_options(settings), self.table)
        follow(setup.news, self.fleet)
        self._counter = LateCounter(make_counter(setup.tokenizer))
        self._telemetry = make_telemetry(version("qarr"), settings.telemetry)
        self._handlers: dict[str, Any] = {}
        self.first = Channel(control, self._handlers)
        self._told: dict[str, int] = {}  # answers that the first process has, by replica
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Serve."""
        server = self._wire()
        self.table.beat()
        self._tasks = [asyncio.create_task(lasting(work, name), name=name) for name, work in self._work(server)]
        channel = asyncio.create_task(self.first.run(), name="the first process")
        asyncio.get_running_loop().add_reader(self.table.bells[self.table.row], self._rung)
        serving = asyncio.create_task(server.serve(sockets=[self._listening]))
        try:
            await server.accepting(serving)
            self.first.tell("ready")
            set_aside()
            closed = asyncio.create_task(self.first.closed.wait())
            await asyncio.wait({serving, closed}, return_when=asyncio.FIRST_COMPLETED)
            if closed.done() and not serving.done():
                log.error("the first process has ended: this worker answers its open requests, and ends")
                server.hand_over()
            closed.cancel()
            await serving
        finally:
            asyncio.get_running_loop().remove_reader(self.table.bells[self.table.row])
            await end_tasks([*self._tasks, channel])
            self._telemetry.shutdown()

    def _wire(self) -> WorkerServer:
        setup, settings = self._setup, self._setup.settings
        tls = make_tls(settings.tls)
        state, keys, streams = ServerState(), open_access(settings), stream_name(setup.row, os.getpid())
        links = Links(
            serves=True,
            lines=partial(SharedLines, self.table),
            ledger=SharedLedger(setup.ledger, setup.shape.workers, setup.row),
            stream_name=streams,
            on_request=self._give_way,
            observer=self,
        )
        router = wire_router(
            settings,
            self.fleet,
            self._counter,
            self._telemetry,
            setup.model,
            keys=keys,
            server_state=state,
            links=links,
            tls=tls,
        )
        app = Elsewhere(router.app, state, self.first, streams, settings.server.max_body_bytes)
        server = WorkerServer(app, state, settings.server, protocol_for(settings.server), tls)
        server.table = self.table
        served = Served(router.app, self.first)
        traces = LiveEndpoints(router.pipeline, router.evaluation, router.live, settings.telemetry)
        self._handlers.update(
            news=partial(self._follow, router),
            prepare=partial(self._prepare, router, server, app),
            take=self._take,
            adopt=partial(self._adopt, router, server, app),
            drain=server.drain,
            hand_over=server.hand_over,
            end=server.end,
            part=lambda seen, at, live, metrics: part_of(router, seen, at, live=live, metrics=metrics),
            traces=traces.listed,
            trace=traces.found,
            serve=served.serve,
            gone=served.gone,
            message=app.message,
        )
        return server

    def _prepare(self, router: Router, server: WorkerServer, app: Elsewhere, settings: Settings) -> None:
        """Prepare for new settings, which ``take`` then takes; see ``Reloads.add``."""
        take = router.prepare(settings)

        def all_take() -> None:
            take()
            server.take(settings.server)
            app.max_body_bytes = settings.server.max_body_bytes
            self.fleet.take(fleet_options(settings))
            self._checked_share = settings.policy.live_check_share

        self._prepared = all_take

    def _take(self) -> None:
        self._prepared()

    def _adopt(self, router: Router, server: WorkerServer, app: Elsewhere, settings: Settings) -> None:
        """Take settings that all others have taken while this worker started."""
        self._prepare(router, server, app, settings)
        self._prepared()

    def _work(self, server: WorkerServer) -> list[tuple[str, Any]]:
        async def flush() -> None:
            while True:
                await asyncio.sleep(FLUSH_S)
                self.fleet.flush()
                self.fleet.sync()
                server.show()
                self._tell_answers()

        return [("telling other workers", flush)]

    def offer(self, decision: Decision, tier: TierName, messages: Sequence[Any] | None) -> None:
        """Pass a sample of answered prompts to the first process, which evaluates them."""
        if messages is not None and random.random() < self._checked_share:  # noqa: S311  no secret
            self.first.tell("answered", decision, tier, messages)

    def _give_way(self) -> None:
        if self.table.measuring:
            self.table.ring(0)

    def _rung(self) -> None:
        os.eventfd_read(self.table.bells[self.table.row])
        self.fleet.bell()

    async def _follow(self, router: Router, news: News) -> None:
        follow(news, self.fleet, router.pipeline.policy)
        if news.fleet is not None and not self._counter.exact:
            folder = next((spec.checkpoint for spec in self.fleet.specs if spec.checkpoint is not None), None)
            if folder is not None:
                self._counter.replace(await asyncio.to_thread(make_counter, folder))

    def _tell_answers(self) -> None:
        """Tell the first process the answers from which it learns the replicas' speed."""
        self._told = {replica.id: self._told.get(replica.id, 0) for replica in self.fleet.replicas}
        for replica in self.fleet.replicas:
            told = self._told[replica.id]
            fresh = min(replica.noted - told, len(replica.seen))
            if fresh > 0:
                self.first.tell("seen", replica.id, list(replica.seen)[-fresh:])
            self._told[replica.id] = replica.noted


if __name__ == "__main__":
    main()
