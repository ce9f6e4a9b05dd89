"""The first process' side of several workers: starts them, tells them what they need, and replaces those that end."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from router.aio import end_tasks
from router.reload import ReloadError
from router.server.server import CUT_S, IDLE_S, POLL_S, Server
from router.workers.channel import Channel, ChannelClosed
from router.workers.relay import Switch
from router.workers.setup import divided
from tiers.background import lasting

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from router.app import Router
    from router.lifecycle import ServerState
    from router.settings import ServerSettings, Settings
    from router.workers.fleet import SharedFleet
    from router.workers.gathered import Gathered
    from router.workers.quotas import SharedLedger
    from router.workers.setup import Setup
    from router.workers.state import Teller

log = logging.getLogger(f"qarr.{__name__}")
LOOK_S = 1.0  # between two looks for workers that stand still
TELL_S = 0.1  # between two looks for what workers have to be told
LIVE_S = 0.25  # between two looks for what has ended, while there are readers
KEEP_S = 2.0  # between two looks for figures, which would end with a worker
START_S = 20.0  # for which all workers are waited for
LONGEST_PAUSE_S = 30.0  # before a worker that ends at once is started again
PREPARE_S = 10.0  # for which a worker may prepare for new settings
STEADY_S = 60.0  # a worker that has run for this long is started again at once
MODULE = "router.deployment.worker"
_LENGTH = struct.Struct("<Q")


class Pool(Server):
    """The workers, as the server of the first process: it listens nowhere itself.

    Attributes:
        pids: Of the workers that run, by row.
    """

    def __init__(
        self, router: Router, server_state: ServerState, settings: ServerSettings, protocol: type[asyncio.Protocol]
    ) -> None:
        super().__init__(router.app, server_state, settings, protocol)
        self._router, self._kept_s, self._silence_s = router, settings.drain_s + CUT_S + 1, settings.worker_timeout_s
        self.pids: dict[int, int] = {}
        self._channels: dict[int, Channel] = {}
        self._serving: dict[int, Channel] = {}  # of workers that are ready
        self._switch = Switch(router.app, self._serving, self._prepare)
        self._lives: list[asyncio.Task[None]] = []
        self._work: list[asyncio.Task[None]] = []
        self._over = threading.Event()
        self._settings: Settings | None = None  # of workers, once they were reloaded
        self._left = ""  # how the workers were told to leave

    def share(
        self,
        fleet: SharedFleet,
        ledger: SharedLedger,
        teller: Teller,
        gathered: Gathered,
        *,
        setup: Callable[[int, int], Setup],
        on_settings: Callable[[Settings], None],
    ) -> None:
        """Take what the workers share, before serving.

        Args:
            fleet: Of this process.
            ledger: Counts quotas.
            teller: Knows what workers have to be told.
            gathered: Knows what workers have.
            setup: Returns what a worker is started with, by its row and the listening socket's descriptor.
            on_settings: Called with settings that are taken over: ``setup`` has them from then on.
        """
        self._on_settings = on_settings
        self._fleet, self._ledger, self._teller, self._gathered, self._setup = fleet, ledger, teller, gathered, setup

    def take(self, settings: ServerSettings) -> None:
        """See ``Server``."""
        super().take(settings)
        self._kept_s, self._silence_s = settings.drain_s + CUT_S + 1, settings.worker_timeout_s

    async def prepare(self, settings: Settings) -> Callable[[], Awaitable[None]]:
        """Have all workers prepare for new settings; see ``Reloads.add``.

        Raises:
            ReloadError: A worker cannot take them, or does not answer.
        """
        part = divided(settings, self._fleet.table.shape.workers)
        serving = dict(self._serving)
        for row, channel in serving.items():
            try:
                async with asyncio.timeout(PREPARE_S):
                    await channel.ask("prepare", part)
            except ChannelClosed:
                continue  # another worker is started with the settings that are in force then
            except TimeoutError:
                raise ReloadError(f"worker {row} does not answer: try again") from None

        async def commit() -> None:
            self.take(settings.server)
            self._on_settings(settings)
            self._settings = part
            taking = (channel.ask("take") for channel in serving.values())
            await asyncio.gather(*taking, return_exceptions=True)  # only of workers that have ended
            for row in self._serving.keys() - serving.keys():
                self._serving[row].tell("adopt", part)

        return commit

    def tell(self) -> None:
        """Tell all workers what has changed."""
        news = self._teller.news()
        if news is not None:
            for channel in self._channels.values():
                channel.tell("news", news)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the workers, and wait until all are ready; after a while one of them is enough."""
        assert sockets is not None
        sockets[0].setblocking(False)  # here too: a copy of a blocking one would make it blocking for all workers
        await self.lifespan.startup()
        self.servers = []
        asyncio.get_running_loop().add_reader(self._fleet.table.bells[0], self._rung)
        work = {"telling workers": self._keep_telling, "asking workers": self._keep_asking}
        self._work = [asyncio.create_task(lasting(each, name), name=name) for name, each in work.items()]
        # In a thread: this loop itself may wait for a lock that such a worker holds.
        threading.Thread(target=self._watch, name="watching workers", daemon=True).start()
        rows = range(1, self._fleet.table.shape.workers + 1)
        for row in rows:
            self._lives.append(asyncio.create_task(self._live(row, sockets[0]), name=f"worker {row}"))
        patient_until = time.monotonic() + START_S
        while len(self._serving) < (len(rows) if time.monotonic() < patient_until else 1) and not self.should_exit:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the workers; those that do not end by themselves are killed."""
        del sockets  # its owner closes it
        self._leaving_all("end")
        deadline = time.monotonic() + CUT_S + 1
        while self.pids and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        self._over.set()
        for pid in self.pids.values():
            _kill(pid)
        await end_tasks([*self._lives, *self._work])
        asyncio.get_running_loop().remove_reader(self._fleet.table.bells[0])
        await self.lifespan.shutdown()

    async def _leave(self, *, idle_too: bool) -> None:
        """See ``Server``: each worker waits for its own answers."""
        self._leaving_all("hand_over" if idle_too else "drain")
        deadline = time.monotonic() + self._kept_s + (IDLE_S if idle_too else 0)
        while self.pids and time.monotonic() < deadline and not self.force_exit:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        self._server_state.end_all()
        self.should_exit = True

    def _leaving_all(self, how: str) -> None:
        self._left = how
        for channel in self._channels.values():
            channel.tell(how)

    async def _live(self, row: int, listening: socket.socket) -> None:
        """Run one worker, and start it again whenever it ends, until the router leaves."""
        pause_s = 0.0
        while self._server_state.open and not self.should_exit:
            began = time.monotonic()
            try:
                status = await self._run(row, listening)
            except Exception:  # whatever it is, another worker is started
                log.exception("worker %d failed", row)
                status = None
            if not self._server_state.open or self.should_exit:
                return
            lasted_s = time.monotonic() - began
            pause_s = 0.0 if lasted_s > STEADY_S else min(max(2 * pause_s, 0.25), LONGEST_PAUSE_S)
            log.error(
                "worker %d ended with status %s after %.0f s: its open answers are lost; another starts in %g s",
                row, status, lasted_s, pause_s,
            )  # fmt: skip
            await asyncio.sleep(pause_s)

    async def _run(self, row: int, listening: socket.socket) -> int:
        """Start a worker, and return its exit status when it has ended; its row is clear again then."""
        ours, theirs = socket.socketpair()
        setup = self._setup(row, listening.fileno())
        with theirs:
            inherited = (theirs.fileno(), setup.listening, setup.table, setup.ledger, *setup.bells)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", MODULE, str(theirs.fileno()),
                stdin=subprocess.DEVNULL, pass_fds=inherited, start_new_session=True,
            )  # fmt: skip
        self.pids[row] = process.pid
        data = pickle.dumps(setup, pickle.HIGHEST_PROTOCOL)
        handlers: dict[str, Any] = {}
        channel = Channel(ours, handlers)
        handlers.update(
            ready=lambda: self._is_ready(row, channel, setup.settings),
            seen=self._seen,
            answered=self._router.evaluation.offer,
            **self._switch.enter(channel),
        )
        talking = asyncio.create_task(self._talk(ours, data, channel), name=f"talking with worker {row}")
        self._channels[row] = channel
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            del self._channels[row], self.pids[row]
            self._serving.pop(row, None)
            await end_tasks([talking])
            self._switch.leave(channel)
            self._gathered.leave(row)
            self._fleet.table.clear(row)
            self._ledger.clear(row)
            self._fleet.bell()

    async def _talk(self, ours: socket.socket, setup: bytes, channel: Channel) -> None:
        ours.setblocking(False)
        with suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(ours, _LENGTH.pack(len(setup)) + setup)
            await channel.run()

    def _is_ready(self, row: int, channel: Channel, settings: Settings) -> None:
        if self._settings is not None and settings != self._settings:  # reloaded while it started
            channel.tell("adopt", self._settings)
        self._serving[row] = channel
        self._gathered.enter(row, channel)
        channel.tell("news", self._teller.all())  # what has changed since it was started
        if self._left:
            channel.tell(self._left)

    def _seen(self, replica_id: str, answers: list[Any]) -> None:
        for replica in self._fleet.replicas:
            if replica.id == replica_id:
                for seen in answers:
                    replica.note_answer(seen)

    def _rung(self) -> None:
        os.eventfd_read(self._fleet.table.bells[0])
        self._router.profiling.give_way()

    def _watch(self) -> None:
        """Kill workers that stand still, one at a time: others may only wait for a lock that it holds.

        Looks are counted, not time: it passes for all workers while the machine is suspended.
        """
        look_s = min(LOOK_S, self._silence_s / 4)
        seen: dict[int, tuple[float, float]] = {}  # by pid: heartbeat, and for how long it has not moved
        while not self._over.wait(look_s):
            before, seen = seen, {}
            for row, pid in list(self.pids.items()):
                beat = self._fleet.table.heartbeat(row)
                known, silent_s = before.get(pid, (0.0, 0.0))
                if beat:  # it has started
                    seen[pid] = beat, silent_s + look_s if beat == known else 0.0
            hung = [(beat, pid) for pid, (beat, silent_s) in seen.items() if silent_s > self._silence_s]
            if hung:
                _, pid = min(hung)
                log.error("worker process %d has done nothing for %g s: it is killed", pid, seen.pop(pid)[1])
                _kill(pid)

    async def _keep_telling(self) -> None:
        while True:
            self._fleet.sync()
            self.tell()
            self._fleet.table.measuring = self._router.profiling.measuring
            await asyncio.sleep(TELL_S)

    async def _keep_asking(self) -> None:
        asked_at = 0.0
        while True:
            await asyncio.sleep(LIVE_S)
            metrics = time.monotonic() - asked_at > KEEP_S
            if metrics:
                asked_at = time.monotonic()
            if metrics or self._router.live.readers:
                await self._gathered.gather(live=bool(self._router.live.readers), metrics=metrics)

    async def _prepare(self, path: str) -> None:
        """Learn what the first process needs to answer a path."""
        await self._gathered.gather(live=path in {"/live", "/requests"}, metrics=path in {"/metrics", "/mirror"})
        self._fleet.sync()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
