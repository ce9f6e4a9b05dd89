"""The router's own measurements: the speed of its tiers, then their loss, while nobody else is served.

They start once every tier has settled, and cover what no profile has yet. They share code, journal and files with
``qarr profile``, and run only if this router started all engines: others may serve requests that it does not know of.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from router.policy.not_measured import render_unmeasured
from router.policy.profiles import REFERENCE, ProfileError, QualityProfile
from router.policy.table import PolicyStore
from router.profiling.idle_client import IdleClient, RequestCounts
from router.profiling.measure_latency import LatencyPlan, measure_latency
from router.profiling.measure_quality import QualityPlan, measure_quality
from router.profiling.measuring_client import measured_identity
from router.profiling.profile_files import JOURNAL, keep_latency, keep_quality, only_one
from router.profiling.tasks import SUITE, TASKS, read_tasks
from router.settings import Settings
from tiers.fleet import Fleet
from tiers.spec import ReplicaStatus, TierName, in_order

log = logging.getLogger(f"qarr.{__name__}")
# The time for measuring speed, divided by this, is the time that one step may take. A measurement may have more than 40
# steps, because most take less than that time.
LATENCY_STEPS = 40
LONGEST_PROMPT_S = 1.0
# Few tasks at a time: a request cancels them, but what an engine has begun delays the request.
PARALLEL_TASKS = 8
FILLS_CONTEXT = True  # tasks as long as the context are asked as well
CHECK_S = 1.0  # between two checks whether something is to be measured
ELSEWHERE = "some engines were not started by this router: 'qarr profile' measures them"
# Pauses after an error: the first, and the longest. Each further error doubles them.
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
SETTLED = set(ReplicaStatus) - {
    ReplicaStatus.PREPARING,
    ReplicaStatus.STARTING,
    ReplicaStatus.WARMING,
    ReplicaStatus.STOPPED,
}
Measurement = Literal["latency", "quality"]
ProgressState = Literal["off", "waiting", "running", "done"]


class MeasurementAttempt(NamedTuple):
    """A measurement of some tiers, while all tiers served certain checkpoints."""

    measurement: Measurement
    tiers: frozenset[TierName]
    identities: tuple[str | None, ...]


@dataclass(slots=True)
class MeasurementProgress:
    """How far the measurements are.

    Attributes:
        state: Whether they are off, wait or are done. While one is under way, ``AutoProfile.render`` tells whether it runs.
        detail: Why, for people.
        measurement: What is measured now; None: nothing.
        since: Unix time in seconds from which this has been so.
        steps_done: Steps (speed) or tasks (loss) that are done.
        steps_total: Steps or tasks in all; fewer may do.
    """

    state: ProgressState
    detail: str
    measurement: Measurement | None
    since: float
    steps_done: int = 0
    steps_total: int = 0


class AutoProfile:
    """Measures what no profile has, and reports its progress. One event loop owns it."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        policy: PolicyStore,
        model: str,
        request_counts: Callable[[], RequestCounts],
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._folder = settings.policy.profiles
        self._latency_s = settings.profile.latency_s
        self._think_tokens = settings.profile.think_tokens
        self._client = IdleClient(
            fleet,
            model,
            idle_s=settings.profile.idle_s,
            request_counts=request_counts,
            is_urgent=lambda: self._is_urgent,
        )
        self._is_urgent = False
        self._attempts: set[MeasurementAttempt] = set()
        why_off = _why_off(settings, fleet)
        self._progress = MeasurementProgress(
            state="waiting",
            detail="tiers are starting",
            measurement=None,
            since=time.time(),
        )
        if why_off is not None:
            self._progress.state = "off"
            self._progress.detail = why_off

    def render(self, *, inside: bool) -> dict[str, Any]:
        """Return the progress and the measured tiers as JSON values; ``inside``: details may quote paths."""
        progress = self._progress
        state = progress.state
        detail = progress.detail
        if progress.measurement is not None:
            state = "running" if self._is_running() else "waiting"
            detail = "" if state == "running" else "requests go first"
        return {
            "state": state,
            "what": progress.measurement,
            "done": progress.steps_done,
            "total": progress.steps_total,
            "since": round(progress.since, 3),
            "detail": detail if inside else "",
            "measured": {
                "latency": in_order(self._fleet.speeds),
                "quality": in_order(self._policy.measured),
            },
            "pointless": self._policy.pointless,
            "not_measured": render_unmeasured(self._policy.not_measured),
            "verdicts": {
                tier: {
                    "verdict": verdict.verdict,
                    "sentence": verdict.sentence,
                    "held": verdict.is_held,
                }
                for tier, verdict in self._policy.verdicts.items()
            },
        }

    def _is_running(self) -> bool:
        """Tell whether a measurement under way is working, rather than waiting for requests."""
        progress = self._progress
        has_no_step_left = 0 < progress.steps_total == progress.steps_done
        return self._client.is_asking or has_no_step_left

    async def run(self) -> None:
        if self._progress.state == "off":
            return
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._measure_missing()
                pause_s = FIRST_PAUSE_S
                await asyncio.sleep(CHECK_S)
            except ProfileError as error:
                log.warning("measuring waits: %s", error)
                self._show("waiting", str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _measure_missing(self) -> None:
        """Measure what no profile has, once all tiers have settled; else show what is waited for."""
        states = {tier.status for tier in self._fleet.snapshot().tiers}
        # A replica with a source was added while the router runs.
        if any(replica.source is not None for replica in self._fleet.replicas):
            self._show("waiting", ELSEWHERE)
        elif ReplicaStatus.READY not in states or not states <= SETTLED:
            self._show("waiting", "tiers are starting")
        elif not self._missing("latency") and not self._missing("quality"):
            self._show("done", "")
        else:
            with only_one(self._folder):
                self._policy.reload()  # profiles may have been made by hand since then
                # Tiers may be held until their loss is known. Speed can only be measured while nobody is served.
                if self._policy.awaited and (unmeasured := self._missing("quality")):
                    await self._measure_urgently(unmeasured)
                if unmeasured := self._missing("latency"):
                    await self._measure_latency(unmeasured)
                if unmeasured := self._missing("quality"):
                    await self._measure_quality(unmeasured)

    def _missing(self, measurement: Measurement) -> tuple[TierName, ...]:
        """Return the ready tiers that are to be measured: not measured, and not tried before in vain."""
        ready = [
            spec.name for spec in self._fleet.specs if self._fleet.is_ready(spec.name)
        ]
        if measurement == "quality" and REFERENCE not in ready:
            return ()
        measured: Collection[TierName] = self._policy.measured
        if measurement == "latency":
            measured = self._fleet.speeds
        elif self._has_answers_to_ask_again():
            measured = ()
        unmeasured = tuple(tier for tier in ready if tier not in measured)
        if self._attempt(measurement, unmeasured) in self._attempts:
            return ()
        return unmeasured

    def _has_answers_to_ask_again(self) -> bool:
        """Tell whether answers were cut while thinking, at a lower limit than the present one."""
        profile = self._policy.quality
        if profile is None or self._think_tokens is None:
            return False
        has_cuts = any(count.cut for count in profile.counts)
        return has_cuts and profile.think_tokens < self._think_tokens

    def _attempt(
        self, measurement: Measurement, tiers: tuple[TierName, ...]
    ) -> MeasurementAttempt:
        identities = tuple(
            measured_identity(spec.identity, self._fleet.builds(spec.name))
            for spec in self._fleet.specs
        )
        return MeasurementAttempt(measurement, frozenset(tiers), identities=identities)

    async def _measure_latency(self, tiers: tuple[TierName, ...]) -> None:
        plan = LatencyPlan(
            step_s=self._latency_s / LATENCY_STEPS,
            tiers=tiers,
            budget_s=self._latency_s,
            prompt_s=LONGEST_PROMPT_S,
            attempts=math.inf,
        )
        async with self._fleet.measuring:
            self._begin("latency")
            profile = await measure_latency(self._client, plan, self._report_step)
        self._end("latency", tiers, keep_latency(self._folder, profile))

    async def _measure_urgently(self, tiers: tuple[TierName, ...]) -> None:
        """Measure losses beside the requests of callers."""
        self._is_urgent = True
        try:
            await self._measure_quality(tiers)
        finally:
            self._is_urgent = False

    async def _measure_quality(self, tiers: tuple[TierName, ...]) -> None:
        plan = QualityPlan(
            tasks=await asyncio.to_thread(read_tasks, TASKS),
            name=SUITE,
            journal=self._folder / JOURNAL,
            parallel=PARALLEL_TASKS,
            worth=self._policy.worth,
            keep=self._keep_so_far,
            think_tokens=self._think_tokens,
            fills_context=FILLS_CONTEXT,
        )
        self._begin("quality")
        profile = await measure_quality(self._client, plan, self._report_step)
        self._end("quality", tiers, keep_quality(self._folder, profile))

    def _keep_so_far(self, profile: QualityProfile) -> None:
        keep_quality(self._folder, profile)
        self._policy.reload()

    def _begin(self, measurement: Measurement) -> None:
        log.info("measuring %s while it is quiet (profile.auto)", measurement)
        self._show("waiting", "", measurement)

    def _end(
        self, measurement: Measurement, tiers: tuple[TierName, ...], path: Path
    ) -> None:
        self._attempts.add(self._attempt(measurement, tiers))
        took_s = time.time() - self._progress.since
        log.info("measured %s in %.0f s: %s", measurement, took_s, path)
        self._policy.reload()
        self._progress.measurement = None

    def _report_step(self, _step: str, done: int, total: int) -> None:
        self._progress.steps_done = done
        self._progress.steps_total = total

    def _show(
        self, state: ProgressState, detail: str, measurement: Measurement | None = None
    ) -> None:
        """Show what is done now; counts and time begin anew if it is something else than before."""
        progress = self._progress
        is_news = (
            state != progress.state
            or detail != progress.detail
            or measurement != progress.measurement
        )
        if is_news:
            self._progress = MeasurementProgress(
                state=state, detail=detail, measurement=measurement, since=time.time()
            )


def _why_off(settings: Settings, fleet: Fleet) -> str | None:
    """Return why the router does not measure itself; None: it does."""
    if not settings.profile.auto:
        return "profile.auto is false"
    if any(spec.urls or spec.named_by for spec in fleet.specs):
        return ELSEWHERE
    return None
