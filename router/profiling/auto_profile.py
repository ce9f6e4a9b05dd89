"""A router that measures itself: the speed of its tiers, then their loss, while nobody else is served.

It begins once every tier has settled, with what no profile tells yet, and uses what ``qarr profile`` uses: the same
measuring, the same journal, the same files. So interrupted work goes on where it stopped, and either takes up what the
other has measured. It measures only where all engines were started by this router: others' may serve more than it knows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from router.policy.profiles import REFERENCE, ProfileError
from router.profiling.idle_client import IdleClient
from router.profiling.measure_latency import LatencyPlan, measure_latency
from router.profiling.measure_quality import Plan, measure, read_prompts
from router.profiling.profile_files import ANSWER_TOKENS, JOURNAL, PROMPTS, keep_latency, keep_quality, only_one
from tiers.spec import ReplicaState, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from router.policy.table import PolicyStore
    from router.settings import Settings
    from tiers.fleet import Fleet
    from tiers.spec import TierSpec

log = logging.getLogger(f"qarr.{__name__}")
STEPS = 40  # of the speed's time: there are more, but most are shorter
PARALLEL = 8  # prompts: what is broken off for a request is lost, and what an engine has begun delays it
LOOK_S = 1.0
FIRST_PAUSE_S = 5.0  # after an error, twice as long after each further one
LONGEST_PAUSE_S = 300.0
SETTLED = {ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.FAILED, ReplicaState.UNREACHABLE}
What = Literal["latency", "quality"]


class State(StrEnum):
    """Whether the router measures itself."""

    OFF = "off"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is.

    Attributes:
        what: That is measured now; None: nothing.
        done: Steps of the speed, answers of the loss.
        total: Of the same.
        since: When it was begun, or came into its state, in seconds since 1970.
        detail: Why it waits, or why it is off.
    """

    state: State
    what: What | None
    done: int
    total: int
    since: float
    detail: str


class AutoProfile:
    """Measures what no profile tells, and tells how far that is. One event loop owns it.

    Args:
        settings: All settings.
        fleet: Whose tiers.
        policy: Takes profiles up.
        model: The served model's name, for people.
        served: Tells whether requests are open.
    """

    def __init__(
        self, settings: Settings, fleet: Fleet, policy: PolicyStore, model: str, served: Callable[[], bool]
    ) -> None:
        self._fleet, self._policy = fleet, policy
        self._folder, self._latency_s = settings.policy.profiles, settings.profile.latency_s
        self._client = IdleClient(fleet, model, settings.profile.idle_s, served)
        self._tried: set[tuple[What, frozenset[TierName], tuple[str | None, ...]]] = set()
        why = ""
        if not settings.profile.auto:
            why = "profile.auto is false"
        elif any(spec.urls for spec in fleet.specs):
            why = "some engines were not started by this router: 'qarr profile' measures them"
        self._on = not why
        state = State.WAITING if self._on else State.OFF
        self._now = Progress(state, None, 0, 0, time.time(), why or "tiers are starting")

    def give_way(self) -> None:
        """Free the engines at once: a request has come."""
        self._client.give_way()

    @property
    def progress(self) -> Progress:
        """Return how far it is."""
        now = self._now
        if now.what is None:
            return now
        if self._client.asking or (now.total and now.done == now.total):
            return replace(now, state=State.RUNNING, detail="")
        return replace(now, state=State.WAITING, detail=now.detail or "requests go first")

    def render(self, *, inside: bool) -> dict[str, Any]:
        """Return how far it is, and what is measured, as JSON values.

        Args:
            inside: With details that may quote places.
        """
        now, speeds, losses = self.progress, self._fleet.speeds, self._policy.measured
        return {
            "state": now.state.value,
            "what": now.what,
            "done": now.done,
            "total": now.total,
            "since": round(now.since, 3),
            "detail": now.detail if inside else "",
            "measured": {
                "latency": [tier for tier in TierName if tier in speeds],
                "quality": [tier for tier in TierName if tier in losses],
            },
        }

    async def run(self) -> None:
        """Measure what is missing, until cancelled."""
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
                self._tell(State.WAITING, str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def aclose(self) -> None:
        """Close the connections to the engines, once ``run`` was cancelled."""
        await self._client.aclose()

    async def _look(self) -> None:
        """Measure what is missing now.

        Raises:
            ProfileError: It cannot be measured or kept, or somebody else does.
        """
        if not self._settled():
            self._client.give_way()
            self._tell(State.WAITING, "tiers are starting")
            return
        if not self._missing("latency") and not self._missing("quality"):
            self._tell(State.DONE, "")
            return
        with only_one(self._folder):
            self._policy.take_up()  # what was measured by hand meanwhile
            if missing := self._missing("latency"):
                await self._latency(missing)
            if self._missing("quality"):
                await self._quality()

    def _settled(self) -> bool:
        """Tell whether a tier is ready, and every other one ready too, or not about to be."""
        states = {tier.state for tier in self._fleet.snapshot().tiers}
        return ReplicaState.READY in states and states <= SETTLED

    def _missing(self, what: What) -> tuple[TierName, ...]:
        """Return the ready tiers of which something is not measured; none where it was measured just now."""
        ready = [spec.name for spec in self._specs if self._fleet.is_ready(spec.name)]
        known: Collection[TierName] = self._fleet.speeds if what == "latency" else self._policy.measured
        missing = tuple(tier for tier in ready if tier not in known)
        if what == "quality" and REFERENCE not in ready:
            return ()
        return () if self._attempt(what, missing) in self._tried else missing

    def _attempt(self, what: What, tiers: tuple[TierName, ...]) -> Any:
        return what, frozenset(tiers), tuple(spec.identity for spec in self._specs)

    @property
    def _specs(self) -> tuple[TierSpec, ...]:
        return self._fleet.specs

    async def _latency(self, tiers: tuple[TierName, ...]) -> None:
        plan = LatencyPlan(self._latency_s / STEPS, tiers, self._latency_s, attempts=math.inf)
        async with self._fleet.measuring:
            self._begin("latency")
            profile = await measure_latency(self._client, plan, self._step)
        self._keep("latency", tiers, lambda: keep_latency(self._folder, profile))

    async def _quality(self) -> None:
        plan = Plan(read_prompts(PROMPTS, None), ANSWER_TOKENS, PARALLEL, self._folder / JOURNAL)
        tiers = self._missing("quality")
        self._begin("quality")
        profile = await measure(self._client, plan, self._step)
        self._keep("quality", tiers, lambda: keep_quality(self._folder, profile))

    def _keep(self, what: What, tiers: tuple[TierName, ...], write: Callable[[], object]) -> None:
        path = write()
        self._tried.add(self._attempt(what, tiers))
        log.info("measured %s in %.0f s: %s", what, time.time() - self._now.since, path)
        self._policy.take_up()
        self._now = replace(self._now, what=None)

    def _begin(self, what: What) -> None:
        log.info("measuring %s while it is quiet (profile.auto)", what)
        self._now = Progress(State.WAITING, what, 0, 0, time.time(), "")

    def _step(self, _step: str, done: int, total: int) -> None:
        self._now = replace(self._now, done=done, total=total)

    def _tell(self, state: State, detail: str) -> None:
        """Note that nothing is measured now, and why."""
        now = self._now
        if (now.state, now.what, now.detail) != (state, None, detail):
            self._now = Progress(state, None, 0, 0, time.time(), detail)
