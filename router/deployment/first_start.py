"""The first start with a model: checkpoints are made while the router serves, and each engine starts as soon as it can.

The machine is divided once, when the BF16 checkpoint is made: the sizes of the others follow from it. On a GPU the engines
start when all checkpoints are made: vLLM takes its share of the free memory, which the quantizer needs as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from router.deployment.drafts import check_draft, with_drafts
from router.deployment.layout import (
    HOST,
    Deployment,
    LateCounter,
    check_tiers_alike,
    checkpoint_folders,
    engine_args,
    make_counter,
    make_launches,
    plan_of,
    prepare_options,
    with_checkpoint,
    with_prompt_identities,
    without,
)
from tiers.checkpoints.checkpoint import Checkpoint
from tiers.checkpoints.prepare import DEFAULT_MODEL, DEFAULT_WEIGHTS, prepare
from tiers.errors import CheckpointError, TierError
from tiers.lifecycle.process import check_port_free
from tiers.lifecycle.supervisor import Supervisor
from tiers.plan import MemoryPlan, read_machine, weight_bytes
from tiers.preparing import about
from tiers.spec import EngineLaunch, TierName, TierSpec

log = logging.getLogger(f"qarr.{__name__}")
# The quantizer's niceness beside engines, which take precedence: it gets all of idle cores.
NICENESS = 15
REPORTS = 4  # lines for a step whose parts are counted
HOW_TO_MEND = "remove the cause, run 'qarr model prepare', and start 'qarr up' again"


class _AllMade(Exception):  # noqa: N818  no error
    """Every wanted checkpoint is made."""


class Steps:
    """Turns progress into a few lines: one when a step begins, and ``REPORTS`` while its parts are done."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last_report = ("", 0)

    def __call__(self, message: str, done: int, total: int, suffix: str = "") -> None:
        """Report how many parts of a step are done; the suffix ends the line."""
        quarter = done * REPORTS // total if total else 0
        report = (message, quarter)
        if report == self._last_report:
            return
        self._last_report = report
        counted = f" ({done} of {total})" if total else ""
        self._say(f"{message}{counted}{suffix}")


@dataclass(frozen=True, slots=True)
class _Startable:
    """What can be started since a checkpoint was made.

    Attributes:
        launches: The engines.
        new_plan: How the machine is shared, if that has just been decided.
    """

    launches: list[EngineLaunch]
    new_plan: MemoryPlan | None


class FirstStart:
    """Makes missing checkpoints in a thread, and starts each engine in the event loop as soon as it can.

    While the thread lays out what a new checkpoint lets start, it alone uses the tiers and the plan. Then it waits until the
    event loop has started that.

    Args:
        deployment: What is to run.
        supervisor: Of its engines.
        on_plan: Called once, with the plan and the tiers.
        say: Gets a line for each step.
    """

    def __init__(
        self,
        deployment: Deployment,
        supervisor: Supervisor,
        on_plan: Callable[[MemoryPlan, tuple[TierSpec, ...]], None],
        say: Callable[[str], None],
    ) -> None:
        self._deployment = deployment
        self._supervisor = supervisor
        self._options = prepare_options(deployment.settings)
        self._on_plan = on_plan
        self._say = say
        self._steps = Steps(say)
        self._specs = {spec.name: spec for spec in deployment.specs if spec.replicas}
        self._missing = set(deployment.missing)
        self._plan: MemoryPlan | None = None
        self._checkpoint_began_at = time.monotonic()
        self._launched: set[TierName] = set()
        self._is_over = False

    async def run(self) -> None:
        """Make what is missing; return when all is made, or when a checkpoint fails while engines run or start.

        Raises:
            TierError: No engine could be started.
        """
        self._check_ports()
        self._supervisor.fleet.preparations.expect(
            self._missing,
            DEFAULT_WEIGHTS if self._options.model == DEFAULT_MODEL else None,
        )
        self._checkpoint_began_at = time.monotonic()
        making = asyncio.create_task(self._make_checkpoints(), name="making")
        try:
            await asyncio.shield(making)
        except _AllMade:
            return
        except Exception as error:  # noqa: BLE001  tiers that serve continue, whatever fails
            self._fail(error)
        finally:
            self._is_over = True
            self._options.quantizer.stop()
            await asyncio.gather(making, return_exceptions=True)

    def _check_ports(self) -> None:
        """Check that the ports of all engines are free."""
        base_port = self._deployment.settings.engine.base_port
        engines = sum(spec.replicas for spec in self._specs.values())
        for number in range(engines):
            check_port_free(HOST, base_port + number)

    async def _make_checkpoints(self) -> None:
        """Make checkpoints in a thread, whose callbacks run in the event loop.

        Raises:
            _AllMade: All are made.
        """
        loop = asyncio.get_running_loop()

        def on_progress(message: str, done: int, total: int) -> None:
            loop.call_soon_threadsafe(self._note_progress, message, done, total)

        def on_made(checkpoint: Checkpoint) -> None:
            startable = self._find_startable(checkpoint)
            starting = asyncio.run_coroutine_threadsafe(
                self._start(checkpoint, startable), loop
            )
            starting.result()
            if not self._missing:
                raise _AllMade

        await asyncio.to_thread(
            prepare, self._options, on_progress, on_made, wanted=set(self._missing)
        )

    # In the thread.

    def _find_startable(self, made: Checkpoint) -> _Startable:
        """Return what can start now that a checkpoint is made."""
        self._take_checkpoint(made)
        settings = self._deployment.settings
        specs = tuple(self._specs.values())
        check_tiers_alike(settings, checkpoint_folders(specs))
        self._replace_specs(with_prompt_identities(specs, settings))
        for spec in self._specs.values():
            check_draft(spec)
        if self._plan is not None:
            return _Startable(self._launches_left(self._plan), new_plan=None)
        plan = self._make_plan(made)
        if plan is None:
            return _Startable([], new_plan=None)
        self._plan = plan
        return _Startable(self._launches_left(plan), new_plan=plan)

    def _take_checkpoint(self, made: Checkpoint) -> None:
        """Give a new checkpoint to its tier, and to tiers that use it as a draft."""
        if made.tier not in self._missing:
            return
        settings = self._deployment.settings
        self._missing.remove(made.tier)
        self._specs[made.tier] = with_checkpoint(
            self._specs[made.tier], made, engine_args(settings, made.tier)
        )
        self._replace_specs(with_drafts(tuple(self._specs.values()), settings))

    def _make_plan(self, made: Checkpoint) -> MemoryPlan | None:
        """Share the machine; None: on a GPU nothing starts before all checkpoints are made."""
        counter = self._deployment.counter
        if isinstance(counter, LateCounter):
            counter.replace(make_counter(made.path))
        machine = read_machine()
        if machine.gpus and self._missing:
            return None
        specs = tuple(self._specs.values())
        plan = plan_of(self._deployment.settings, machine, specs, base=made.path)
        self._replace_specs(without(plan.left_out, specs))
        self._missing -= set(plan.left_out)
        return plan

    def _replace_specs(self, specs: Iterable[TierSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}

    def _launches_left(self, plan: MemoryPlan) -> list[EngineLaunch]:
        """Return the engines that could run by now, and have not been started."""
        launches = make_launches(
            tuple(self._specs.values()),
            plan,
            self._deployment.settings,
            model=self._deployment.model,
        )
        return [launch for launch in launches if launch.tier.name not in self._launched]

    # In the event loop.

    async def _start(self, made: Checkpoint, startable: _Startable) -> None:
        """Note that a checkpoint is made, and start the engines that waited for it."""
        if self._is_over:
            return
        self._note_made(made)
        fleet = self._supervisor.fleet
        plan = startable.new_plan
        if plan is not None:
            fleet.preparations.leave_out(plan.left_out)
            for tier in plan.left_out:
                fleet.configure(self._specs[tier])
            self._on_plan(plan, tuple(self._specs.values()))
        self._launch(startable.launches)
        if startable.launches:
            self._options.quantizer.niceness = NICENESS

    def _note_made(self, made: Checkpoint) -> None:
        """Note a finished checkpoint, and say how long it took."""
        preparations = self._supervisor.fleet.preparations
        now = time.monotonic()
        if made.tier in preparations.to_make:
            took_s = now - self._checkpoint_began_at
            self._say(f"{made.tier}: its checkpoint is made, in {took_s:.0f} s")
        self._checkpoint_began_at = now
        preparations.made(made.tier)
        if made.tier is TierName.PRECISE:
            preparations.sized(weight_bytes(made.path))

    def _launch(self, launches: list[EngineLaunch]) -> None:
        for launch in launches:
            self._supervisor.fleet.configure(self._specs[launch.tier.name])
        self._supervisor.launch(launches)
        self._launched.update(launch.tier.name for launch in launches)

    def _note_progress(self, message: str, done: int, total: int) -> None:
        """Take in how far the present checkpoint is, and say so."""
        preparations = self._supervisor.fleet.preparations
        tier = next(iter(preparations.to_make), None)
        if tier is None or self._is_over:
            return
        preparations.step(message, done, total)
        preparing = preparations.of(tier)
        time_left = ""
        if preparing is not None and preparing.remaining_s is not None:
            time_left = f"; ready in {about(preparing.remaining_s)}"
        self._steps(f"{tier}: {message}", done, total, suffix=time_left)

    def _fail(self, error: Exception) -> None:
        """Note that no more checkpoints can be made; engines that were started continue.

        Raises:
            TierError: There are none; it is the error, or says what it is.
        """
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

    def _start_without_drafts(self) -> None:
        """Start engines that have all but their draft's checkpoint, which is not coming."""
        waiting_specs = [
            replace(spec, draft=None)
            for spec in self._specs.values()
            if spec.checkpoint is not None and spec.name not in self._launched
        ]
        if self._plan is None or not waiting_specs:
            return
        for spec in waiting_specs:
            self._specs[spec.name] = spec
            self._supervisor.fleet.configure(spec)
            self._say(
                f"{spec.name:12} starts without its draft, whose checkpoint could not be made"
            )
        self._supervisor.launch(self._launches_left(self._plan))
        self._launched.update(spec.name for spec in waiting_specs)
