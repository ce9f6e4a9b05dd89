"""The first start with a model: checkpoints are made while the router serves, and each engine starts as soon as it can.

The machine is divided once, when the BF16 checkpoint is made: the sizes of the others follow from it. On a GPU the engines
start when all checkpoints are made: vLLM takes its share of the free memory, which the quantizer needs as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from router.deployment.layout import (
    HOST,
    Deployment,
    LateCounter,
    check_draft,
    engine_args,
    make_counter,
    make_launches,
    plan_of,
    prepare_options,
    with_checkpoint,
    with_drafts,
    without,
)
from tiers.checkpoints.checkpoint import Checkpoint, check_alike
from tiers.checkpoints.prepare import DEFAULT_MODEL, DEFAULT_WEIGHTS, prepare
from tiers.errors import CheckpointError, TierError
from tiers.lifecycle.process import check_port_free
from tiers.lifecycle.supervisor import Supervisor
from tiers.plan import MemoryPlan, read_machine, weight_bytes
from tiers.preparing import about
from tiers.spec import EngineLaunch, TierName, TierSpec

log = logging.getLogger(f"qarr.{__name__}")
# of the quantizer beside engines, which take precedence; it gets all of idle cores
NICENESS = 15
REPORTS = 4  # lines for a step whose parts are counted
HOW_TO_MEND = "remove the cause, run 'qarr model prepare', and start 'qarr up' again"


class _Enough(Exception):  # noqa: N818  no error
    """Every wanted checkpoint is made."""


class Steps:
    """Turns progress into a few lines: one when a step begins, and ``REPORTS`` while its parts are done."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._last = say, ("", 0)

    def __call__(self, message: str, done: int, total: int, left: str = "") -> None:
        """Report how many parts of a step are done; ``left`` is appended to the line."""
        now = (message, done * REPORTS // total if total else 0)
        if now != self._last:
            self._last = now
            self._say(f"{message}{f' ({done} of {total})' if total else ''}{left}")


class FirstStart:
    """Makes missing checkpoints in a thread, and starts each engine in the event loop as soon as it can.

    ``on_plan`` is called once, with the plan and the tiers; ``say`` gets a line for each step.
    """

    def __init__(
        self,
        deployment: Deployment,
        supervisor: Supervisor,
        on_plan: Callable[[MemoryPlan, tuple[TierSpec, ...]], None],
        say: Callable[[str], None],
    ) -> None:
        self._deployment, self._supervisor = deployment, supervisor
        self._options = prepare_options(deployment.settings)
        self._on_plan, self._say, self._steps = on_plan, say, Steps(say)
        self._specs = {spec.name: spec for spec in deployment.specs if spec.replicas}
        self._missing = set(deployment.missing)
        self._plan: MemoryPlan | None = None
        self._began = time.monotonic()
        self._launched: set[TierName] = set()
        self._over = False

    async def run(self) -> None:
        """Make what is missing; return when all is made, or when a checkpoint fails while engines run or start.

        ``TierError``: no engine could be started.
        """
        fleet, settings = self._supervisor.fleet, self._deployment.settings
        for number in range(sum(spec.replicas for spec in self._specs.values())):
            check_port_free(HOST, settings.engine.base_port + number)
        fleet.preparations.expect(
            self._missing,
            DEFAULT_WEIGHTS if self._options.model == DEFAULT_MODEL else None,
        )
        self._began = time.monotonic()
        loop = asyncio.get_running_loop()

        def progress(message: str, done: int, total: int) -> None:
            loop.call_soon_threadsafe(self._step, message, done, total)

        def on_made(checkpoint: Checkpoint) -> None:
            launches, plan = self._launches(checkpoint)
            asyncio.run_coroutine_threadsafe(
                self._start(checkpoint, launches, plan), loop
            ).result()
            if not self._missing:
                raise _Enough

        making = asyncio.create_task(
            asyncio.to_thread(prepare, self._options, progress, on_made), name="making"
        )
        try:
            await asyncio.shield(making)
        except _Enough:
            return
        except Exception as error:  # noqa: BLE001  tiers that serve continue, whatever fails
            self._failed(error)
        finally:
            self._over = True
            self._options.quantizer.stop()
            await asyncio.gather(making, return_exceptions=True)

    def _launches(
        self, made: Checkpoint
    ) -> tuple[list[EngineLaunch], MemoryPlan | None]:
        """Return the engines that can start now that a checkpoint is made, and the plan if it is new. In the thread."""
        settings, model = self._deployment.settings, self._deployment.model
        if made.tier in self._missing:
            self._missing.remove(made.tier)
            spec = self._specs[made.tier]
            self._specs[made.tier] = with_checkpoint(
                spec, made, engine_args(settings, made.tier)
            )
            self._specs = {
                spec.name: spec
                for spec in with_drafts(tuple(self._specs.values()), settings)
            }
        check_alike(
            {
                name: spec.checkpoint
                for name, spec in self._specs.items()
                if spec.checkpoint is not None
            }
        )
        for spec in self._specs.values():
            check_draft(spec)
        known = self._plan
        if known is None:
            if isinstance(self._deployment.counter, LateCounter):
                self._deployment.counter.replace(make_counter(made.path))
            machine = read_machine()
            if machine.gpus and self._missing:
                return [], None
            specs = tuple(self._specs.values())
            self._plan = plan_of(settings, machine, specs, made.path)
            self._specs = {
                spec.name: spec for spec in without(self._plan.left_out, specs)
            }
            self._missing -= set(self._plan.left_out)
        assert self._plan is not None
        launches = make_launches(
            tuple(self._specs.values()), self._plan, settings, model
        )
        return [
            launch for launch in launches if launch.tier.name not in self._launched
        ], (self._plan if known is None else None)

    async def _start(
        self, made: Checkpoint, launches: list[EngineLaunch], plan: MemoryPlan | None
    ) -> None:
        if self._over:
            return
        fleet, now = self._supervisor.fleet, time.monotonic()
        if made.tier in fleet.preparations.to_make:
            self._say(
                f"{made.tier}: its checkpoint is made, in {now - self._began:.0f} s"
            )
        self._began = now
        fleet.preparations.made(made.tier)
        if made.tier is TierName.PRECISE:
            fleet.preparations.sized(weight_bytes(made.path))
        if plan is not None:
            fleet.preparations.leave_out(plan.left_out)
            for tier in plan.left_out:
                fleet.configure(self._specs[tier])
            self._on_plan(plan, tuple(self._specs.values()))
        for launch in launches:
            fleet.configure(self._specs[launch.tier.name])
        self._supervisor.launch(launches)
        self._launched.update(launch.tier.name for launch in launches)
        if launches:
            self._options.quantizer.niceness = NICENESS

    def _step(self, message: str, done: int, total: int) -> None:
        preparations = self._supervisor.fleet.preparations
        tier = next(iter(preparations.to_make), None)
        if tier is None or self._over:
            return
        preparations.step(message, done, total)
        now = preparations.of(tier)
        left = (
            f"; ready in {about(now.remaining_s)}"
            if now and now.remaining_s is not None
            else ""
        )
        self._steps(f"{tier}: {message}", done, total, left)

    def _start_without_drafts(self) -> None:
        """Start engines that have all but their draft's checkpoint, which is not coming."""
        waiting = [
            replace(spec, draft=None)
            for spec in self._specs.values()
            if spec.checkpoint is not None and spec.name not in self._launched
        ]
        if self._plan is None or not waiting:
            return
        self._specs.update({spec.name: spec for spec in waiting})
        every = make_launches(
            tuple(self._specs.values()),
            self._plan,
            self._deployment.settings,
            self._deployment.model,
        )
        for spec in waiting:
            self._supervisor.fleet.configure(spec)
            self._say(
                f"{spec.name:12} starts without its draft, whose checkpoint could not be made"
            )
        self._supervisor.launch(
            [launch for launch in every if launch.tier.name not in self._launched]
        )
        self._launched.update(spec.name for spec in waiting)

    def _failed(self, error: Exception) -> None:
        """Note that no more checkpoints can be made; engines that were started continue."""
        if not isinstance(error, TierError):
            log.error("making checkpoints failed", exc_info=error)
            error = CheckpointError(f"{type(error).__name__}: {error}")
        self._start_without_drafts()
        if not self._launched:
            raise error
        for tier in self._supervisor.fleet.preparations.fail(f"{error}; {HOW_TO_MEND}"):
            log.error("the checkpoint of %s could not be made: %s", tier, error)
            self._say(
                f"{tier:12} failed: its checkpoint could not be made: {error}; {HOW_TO_MEND}"
            )
