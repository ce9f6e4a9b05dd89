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
from pathlib import Path
from typing import Any, Literal

from router.policy.profiles import REFERENCE, ProfileError, QualityProfile
from router.policy.table import PolicyStore
from router.profiling.idle_client import IdleClient
from router.profiling.measure_latency import LatencyPlan, measure_latency
from router.profiling.measure_quality import Plan, measure
from router.profiling.profile_files import JOURNAL, keep_latency, keep_quality, only_one
from router.profiling.tasks import SUITE, TASKS, read_tasks
from router.settings import Settings
from tiers.fleet import Fleet
from tiers.spec import ReplicaStatus, TierName, in_order

log = logging.getLogger(f"qarr.{__name__}")
# that share the time for measuring speed: there are more, but most are shorter
STEPS = 40
PROMPT_S = 1.0
# tasks: a request cancels them, and what an engine has begun delays the request
PARALLEL = 8
LOOK_S = 1.0
ELSEWHERE = "some engines were not started by this router: 'qarr profile' measures them"
FIRST_PAUSE_S = 5.0  # after an error; doubled after each further one
LONGEST_PAUSE_S = 300.0
SETTLED = set(ReplicaStatus) - {
    ReplicaStatus.PREPARING,
    ReplicaStatus.STARTING,
    ReplicaStatus.WARMING,
    ReplicaStatus.STOPPED,
}
What = Literal["latency", "quality"]
# tiers, and the identities of all
Attempt = tuple[What, frozenset[TierName], tuple[str | None, ...]]


class AutoProfile:
    """Measures what no profile has, and reports its progress. One event loop owns it.

    ``requests`` returns the number of requests so far, and of those that are open.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        policy: PolicyStore,
        model: str,
        requests: Callable[[], tuple[int, int]],
    ) -> None:
        self._fleet, self._policy = fleet, policy
        self._folder, self._latency_s = (
            settings.policy.profiles,
            settings.profile.latency_s,
        )
        # of the engines, while they are idle
        self.client = IdleClient(fleet, model, settings.profile.idle_s, requests)
        self._tried: set[Attempt] = set()
        why = ""
        if not settings.profile.auto:
            why = "profile.auto is false"
        elif any(spec.urls or spec.named_by for spec in fleet.specs):
            why = ELSEWHERE
        self._on, self._since = not why, time.time()
        self._what: What | None = None  # is measured now
        # steps (speed) or tasks (loss), of which fewer may do
        self._done = self._total = 0
        self._state, self._detail = (
            ("off", why) if why else ("waiting", "tiers are starting")
        )

    def render(self, *, inside: bool) -> dict[str, Any]:
        """Return the progress and the measured tiers as JSON values; ``inside``: details may quote paths."""
        state, detail = self._state, self._detail
        if self._what is not None:
            running = self.client.asking or 0 < self._total == self._done
            state, detail = (
                ("running", "") if running else ("waiting", "requests go first")
            )
        return {
            "state": state,
            "what": self._what,
            "done": self._done,
            "total": self._total,
            "since": round(self._since, 3),
            "detail": detail if inside else "",
            "measured": {
                "latency": in_order(self._fleet.speeds),
                "quality": in_order(self._policy.measured),
            },
            "pointless": self._policy.pointless,
        }

    async def run(self) -> None:
        if not self._on:
            return
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._look()
                pause_s = FIRST_PAUSE_S
                await asyncio.sleep(LOOK_S)
            except ProfileError as error:
                log.warning("measuring waits: %s", error)
                self._show("waiting", str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def aclose(self) -> None:
        await self.client.aclose()

    async def _look(self) -> None:
        states = {tier.status for tier in self._fleet.snapshot().tiers}
        # added while the router runs
        if any(replica.source is not None for replica in self._fleet.replicas):
            self._show("waiting", ELSEWHERE)
        elif ReplicaStatus.READY not in states or not states <= SETTLED:
            self._show("waiting", "tiers are starting")
        elif not self._missing("latency") and not self._missing("quality"):
            self._show("done", "")
        else:
            with only_one(self._folder):
                self._policy.reload()  # profiles made by hand since then
                if missing := self._missing("latency"):
                    await self._latency(missing)
                if missing := self._missing("quality"):
                    await self._quality(missing)

    def _missing(self, what: What) -> tuple[TierName, ...]:
        """Return the ready tiers that are to be measured: not measured, and not tried before in vain."""
        ready = [
            spec.name for spec in self._fleet.specs if self._fleet.is_ready(spec.name)
        ]
        known: Collection[TierName] = (
            self._fleet.speeds if what == "latency" else self._policy.measured
        )
        missing = tuple(tier for tier in ready if tier not in known)
        if what == "quality" and REFERENCE not in ready:
            return ()
        return () if self._attempt(what, missing) in self._tried else missing

    def _attempt(self, what: What, tiers: tuple[TierName, ...]) -> Attempt:
        return (
            what,
            frozenset(tiers),
            tuple(spec.identity for spec in self._fleet.specs),
        )

    async def _latency(self, tiers: tuple[TierName, ...]) -> None:
        plan = LatencyPlan(
            self._latency_s / STEPS, tiers, self._latency_s, PROMPT_S, math.inf
        )
        async with self._fleet.measuring:
            self._show("waiting", "", "latency")
            profile = await measure_latency(self.client, plan, self._step)
        self._keep("latency", tiers, keep_latency(self._folder, profile))

    async def _quality(self, tiers: tuple[TierName, ...]) -> None:
        tasks = await asyncio.to_thread(read_tasks, TASKS)
        journal = self._folder / JOURNAL
        plan = Plan(
            tasks, SUITE, journal, PARALLEL, worth=self._policy.worth, keep=self._learn
        )
        self._show("waiting", "", "quality")
        profile = await measure(self.client, plan, self._step)
        self._keep("quality", tiers, keep_quality(self._folder, profile))

    def _learn(self, profile: QualityProfile) -> None:
        keep_quality(self._folder, profile)
        self._policy.reload()

    def _keep(self, what: What, tiers: tuple[TierName, ...], path: Path) -> None:
        self._tried.add(self._attempt(what, tiers))
        log.info("measured %s in %.0f s: %s", what, time.time() - self._since, path)
        self._policy.reload()
        self._what = None

    def _step(self, _step: str, done: int, total: int) -> None:
        self._done, self._total = done, total

    def _show(self, state: str, detail: str, what: What | None = None) -> None:
        if what is not None:
            log.info("measuring %s while it is quiet (profile.auto)", what)
        if (self._state, self._what, self._detail) != (state, what, detail):
            self._state, self._what, self._detail, self._since = (
                state,
                what,
                detail,
                time.time(),
            )
            self._done = self._total = 0
