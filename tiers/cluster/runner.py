"""Run the placement beside the router: start it, tell what it finds, start it again if it ends, stop it."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tiers.cluster.job import (
    KEY_VARIABLE,
    PlacedReplica,
    PlacementJob,
    PlacementState,
    engines_by_tier,
    read_status,
    write_json,
)
from tiers.errors import EngineError
from tiers.lifecycle.command import inherited
from tiers.lifecycle.process import EngineProcess
from tiers.private_files import make_private_folder

if TYPE_CHECKING:
    from collections.abc import Callable

PLACEMENT_MAIN = Path(__file__).with_name("placement_main.py")
POLL_S = 0.5
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
STOP_MARGIN_S = 15.0  # over an engine's own grace: its actor's, and Ray's farewell
LOG_NAME = "ray.log"
LOG_LINES = 100  # searched for the error that ended the placement
ERROR = "error: "


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How the placement is run.

    Attributes:
        python: Interpreter that has Ray.
        folder: For the job and the status; removed at the end.
        job: What to place.
        api_key: Of its engines.
    """

    python: Path
    folder: Path
    job: PlacementJob
    api_key: str


class RayEngines:
    """The engines on a Ray cluster, from ``run`` to its cancellation.

    Args:
        options: What is placed, and how.
        say: Gets a line for each change.
    """

    def __init__(self, options: RayOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._known: dict[str, PlacedReplica] = {}
        self._were_all_ready = False

    @property
    def settled(self) -> bool:
        """Tell whether every replica was ready once."""
        return self._were_all_ready

    async def run(self) -> None:
        """Keep the placement running until cancelled; then end it, and with it all engines.

        Raises:
            EngineError: Before all replicas were ready, one failed or the cluster could not be used.
        """
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                try:
                    reason = await self._place()
                except (EngineError, OSError) as error:
                    reason = str(error)
                if not self._were_all_ready:
                    raise EngineError(reason)
                self._say(
                    f"{'ray':16} the placement ended, and starts again in {pause_s:g} s: {reason}"
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            shutil.rmtree(self._options.folder, ignore_errors=True)

    async def _place(self) -> str:
        """Run the placement until it ends; return why it did.

        Raises:
            EngineError: A replica failed before all were ready.
        """
        options = self._options
        job = options.job
        self._known = {}
        job_file = self._write_job()
        env = inherited(os.environ, traced=False) | {KEY_VARIABLE: options.api_key}
        argv = [str(options.python), str(PLACEMENT_MAIN), str(job_file)]
        try:
            process = await EngineProcess.start(argv, env, Path(job.log_dir) / LOG_NAME)
            await self._watch(process)
            return _reason(process)
        finally:
            # A placement that was ended while it started may have named engines already.
            write_json(Path(job.engines_file), engines_by_tier(job.tiers, ()))

    async def _watch(self, process: EngineProcess) -> None:
        """Tell what a running placement finds until it ends; then, or if this is cancelled, end it and its engines.

        Raises:
            EngineError: A replica failed before all were ready.
        """
        ended = asyncio.create_task(process.wait())
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=POLL_S)
                self._tell_changes()
        finally:
            await process.stop(self._options.job.stop_grace_s + STOP_MARGIN_S)
            await ended

    def _write_job(self) -> Path:
        """Write what the placement is to do, with no engine named yet; return the file."""
        job = self._options.job
        folder = self._options.folder
        make_private_folder(folder)
        Path(job.status_file).unlink(missing_ok=True)
        write_json(Path(job.engines_file), engines_by_tier(job.tiers, ()))
        job_file = folder / "job.json"
        job.write(job_file)
        return job_file

    def _tell_changes(self) -> None:
        """Tell what has changed.

        Raises:
            EngineError: A replica failed before all were ready.
        """
        replicas = read_status(Path(self._options.job.status_file))
        for replica in replicas:
            if replica != self._known.get(replica.id):
                self._say(replica.line)
            self._known[replica.id] = replica
            if replica.state is PlacementState.FAILED and not self._were_all_ready:
                raise EngineError(f"{replica.id} did not start: {replica.detail}")
        if replicas and all(
            replica.state is PlacementState.READY for replica in replicas
        ):
            self._were_all_ready = True


def _reason(process: EngineProcess) -> str:
    """Return why the placement ended: its own last error, else the end of its log."""
    lines = process.last_log_lines(LOG_LINES).splitlines()
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    if not errors:
        return str(process.died())
    return errors[-1]
