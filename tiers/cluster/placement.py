"""Keep the wanted replicas running on a Ray cluster: one actor for each, placed again whenever it is lost.

It runs in the Ray environment, under the router's supervision. Routers follow the engines' file; what this process finds is
in the status file. Actors belong to this process: if it ends, Ray ends them, and their guards end the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

import tiers
from tiers.cluster.actor import EngineActor
from tiers.cluster.connect import UNUSABLE, ClusterError, connect, nodes
from tiers.cluster.job import (
    KEY_VARIABLE,
    PlacedReplica,
    PlacementJob,
    PlacementState,
    WantedReplica,
    engines_by_tier,
    write_json,
    write_status,
)
from tiers.cluster.resources import why_not_placed

if TYPE_CHECKING:
    from collections.abc import Coroutine

# So often it is told why a replica is not placed. Ray starts a process for it as soon as it has a place.
PLACING_REPORT_S = 10.0
BEAT_S = 1.0
SILENT_S = 3.0  # an actor that takes longer to answer gets no requests
STOP_MARGIN_S = 5.0  # over the engine's own grace, for its actor to answer
FIRST_PAUSE_S = 1.0  # before an engine that ended is started again; doubled each time
LONGEST_PAUSE_S = 60.0
SOUND_S = 60.0  # an engine that ran so long begins with the first pause again
CAUSE_CHARS = 200
# The states of replicas whose engines run on a node.
STARTED = {PlacementState.STARTING, PlacementState.READY, PlacementState.SILENT}
LIFECYCLE = Path(__file__).parents[1] / "lifecycle"


class EngineEndedError(Exception):
    """An engine did not start, or ended."""


async def answer(reference: Any, timeout_s: float | None = None) -> Any:
    """Return what an actor's method returns.

    Raises:
        TimeoutError: It takes too long.
        EngineEndedError: It raised an error.
        RayActorError: The actor is gone, or cannot be reached.
    """
    future = asyncio.wrap_future(reference.future())
    future.add_done_callback(_retrieve)
    await asyncio.wait({future}, timeout=timeout_s)
    if not future.done():
        raise TimeoutError
    try:
        return future.result()
    except RayTaskError as error:
        raise EngineEndedError(str(error.cause)) from None


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody waits for any more."""
    if not future.cancelled():
        future.exception()


class RayPlacement:
    """The wanted replicas, and what is known of each."""

    def __init__(self, job: PlacementJob, api_key: str) -> None:
        self._job = job
        self._api_key = api_key
        self._programs = tuple(
            (LIFECYCLE / name).read_text("utf-8")
            for name in ("guard.py", "engine_main.py")
        )
        self._known = {
            wanted.id: PlacedReplica(wanted.id, wanted.tier) for wanted in job.replicas
        }
        # Nodes need not have this project.
        ray.cloudpickle.register_pickle_by_value(tiers)
        self._actor_class = ray.remote(EngineActor)

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the replicas running until ``stop`` is set; then end them."""
        self._write()
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._keep(wanted)) for wanted in self._job.replicas
        ]
        stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait(
                {stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        # No replica's task returns: one that has ended raises what is wrong in this program.
        for task in done - {stopping}:
            task.result()

    async def _keep(self, wanted: WantedReplica) -> None:
        """Place a replica, and place it again whenever it ends, until cancelled."""
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while True:
            began_at = loop.time()
            actor = self._actor(wanted)
            try:
                await self._live(wanted, actor)
            except EngineEndedError as error:
                if loop.time() - began_at > SOUND_S:
                    pause_s = FIRST_PAUSE_S
                self._show(wanted, PlacementState.FAILED, detail=str(error))
                ray.kill(actor)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except RayError as error:
                self._show_lost(wanted, error)
                with contextlib.suppress(RayError):
                    ray.kill(actor)
            except asyncio.CancelledError:
                is_started = self._known[wanted.id].state in STARTED
                await self._end(actor, is_started=is_started)
                raise

    def _actor(self, wanted: WantedReplica) -> Any:
        resources = dict(wanted.resources)
        options = self._actor_class.options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            max_restarts=0,
            # So a lost node takes as few replicas as possible with it.
            scheduling_strategy="SPREAD",
        )
        return options.remote(
            replica=wanted,
            job=self._job,
            programs=self._programs,
            api_key=self._api_key,
        )

    async def _live(self, wanted: WantedReplica, actor: Any) -> None:
        """Start an engine and watch it.

        Raises:
            EngineEndedError: It did not start, or ended.
            RayError: Its actor is gone.
        """
        node = await self._until_placed(wanted, actor)
        self._show(wanted, PlacementState.STARTING, node=node)
        url = await answer(actor.start.remote())
        watching = asyncio.create_task(self._watch(wanted, actor, node=node, url=url))
        try:
            while True:
                # While the actor cannot be reached, the beats tell so.
                with contextlib.suppress(ActorUnavailableError):
                    raise EngineEndedError(await answer(actor.ended.remote()))
                await asyncio.sleep(BEAT_S)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _until_placed(self, wanted: WantedReplica, actor: Any) -> str:
        """Wait until Ray has found a node for a replica; return the node."""
        placing = asyncio.ensure_future(answer(actor.node.remote()))
        try:
            while True:
                await asyncio.wait({placing}, timeout=PLACING_REPORT_S)
                if placing.done():
                    return str(placing.result())
                alive_nodes = await asyncio.to_thread(nodes)
                reason = why_not_placed(wanted.resources, alive_nodes)
                self._show(wanted, PlacementState.PLACING, detail=reason)
        finally:
            placing.cancel()

    async def _watch(
        self, wanted: WantedReplica, actor: Any, *, node: str, url: str
    ) -> None:
        """Give a replica requests while its actor answers; Ray tells of the end of a node only after some seconds."""
        while True:
            try:
                await answer(actor.beat.remote(), SILENT_S)
                self._show(wanted, PlacementState.READY, node=node, url=url)
            except (TimeoutError, RayActorError):
                self._show(
                    wanted,
                    PlacementState.SILENT,
                    node=node,
                    url=url,
                    detail=f"node {node} does not answer",
                )
            await asyncio.sleep(BEAT_S)

    async def _end(self, actor: Any, *, is_started: bool) -> None:
        """Stop an actor's engine if it is started, then end the actor."""
        if is_started:
            with contextlib.suppress(TimeoutError, EngineEndedError, RayError):
                await answer(
                    actor.stop.remote(), self._job.stop_grace_s + STOP_MARGIN_S
                )
        with contextlib.suppress(RayError):
            ray.kill(actor)

    def _show(
        self,
        wanted: WantedReplica,
        state: PlacementState,
        *,
        node: str = "",
        url: str = "",
        detail: str = "",
    ) -> None:
        """Note what is known of a replica, and write it if it has changed; without a node, the last one stays."""
        before = self._known[wanted.id]
        now = replace(
            before, state=state, node=node or before.node, url=url, detail=detail
        )
        if now != before:
            self._known[wanted.id] = now
            self._write()

    def _show_lost(self, wanted: WantedReplica, error: RayError) -> None:
        node = self._known[wanted.id].node
        where = f"on node {node} " if node else ""
        self._show(
            wanted,
            PlacementState.LOST,
            detail=f"its actor {where}is gone: {_cause(error)}",
        )

    def _write(self) -> None:
        """Write the states, and the file that routers follow."""
        replicas = list(self._known.values())
        urls = engines_by_tier(self._job.tiers, replicas)
        write_json(Path(self._job.engines_file), urls)
        write_status(Path(self._job.status_file), replicas)


def _cause(error: RayError) -> str:
    """Return why an actor ended: the line of Ray's that tells it."""
    lines = str(error).splitlines()
    telling_line = lines[0]
    for line in lines:
        if "because" in line:
            telling_line = line.strip()
            break
    return telling_line[:CAUSE_CHARS]


async def _run(placement: RayPlacement) -> None:
    """Keep the replicas running until a signal ends this process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await placement.run(stop)


def main(job_file: Path) -> int:
    """Do what a job says until SIGTERM; return the exit status."""
    api_key = os.environ.pop(KEY_VARIABLE)
    job = PlacementJob.read(job_file)
    try:
        connect(job.address)
    except ClusterError as error:
        sys.stderr.write(f"error: {error}\n")
        return UNUSABLE
    try:
        run: Coroutine[Any, Any, None] = _run(RayPlacement(job, api_key))
        asyncio.run(run)
    finally:
        write_json(Path(job.engines_file), engines_by_tier(job.tiers, ()))
        ray.shutdown()
    return 0
