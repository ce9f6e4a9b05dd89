"""Measures the router's own engines from within, only while nobody else is served.

Its requests go to the engines directly, under leases but without keys, quotas, queue and records: no figures count them.
When a request arrives, all of them are cancelled before it is decided, and sent again once the router is idle.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import httpx

from router.policy.decision import PRIORITIES
from router.policy.profiles import ProfileError
from router.profiling.measuring_client import (
    FleetState,
    MeasuredTier,
    MeasuringClient,
    Step,
    ignore_waiting,
    measured_identity,
)
from tiers.fleet import Fleet, Lease
from tiers.replica import Replica
from tiers.spec import EngineBuild, ReplicaStatus, TierName, TierSpec

LONGEST_IDLE_S = 60.0
STARTING = {ReplicaStatus.STARTING, ReplicaStatus.WARMING}


class RequestCounts(NamedTuple):
    """Requests of callers since the router started."""

    total: int
    open: int


class IdleClient(MeasuringClient):
    """A client of the fleet's engines that works once the router was idle for ``idle_s``.

    While ``is_urgent`` says so it works at once, beside the requests of callers: tiers wait for what it measures.
    """

    patience_s = math.inf
    slot_patience_s = 0.0  # a step that waits for a slot is not alone any more

    def __init__(
        self,
        fleet: Fleet,
        model: str,
        idle_s: float,
        request_counts: Callable[[], RequestCounts],
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._fleet = fleet
        self._model = model
        self._idle_s = idle_s
        self._request_counts = request_counts
        self._is_urgent = is_urgent
        self._timeouts: dict[Lease, asyncio.Timeout] = {}
        self._last_busy_at = time.monotonic()
        self._last_counts = request_counts()
        self._preemptions = 0
        # It doubles with each cancellation, so that little is started in vain where pauses are short.
        self._quiet_s = idle_s

    @property
    def is_asking(self) -> bool:
        return bool(self._timeouts)

    def preempt(self) -> None:
        """Cancel its requests: another one has arrived. Their slots are free when this returns."""
        self._fleet.preempt = None
        self._last_busy_at = time.monotonic()
        self._preemptions += 1
        self._quiet_s = max(min(2 * self._quiet_s, LONGEST_IDLE_S), self._idle_s)
        for lease, timeout in self._timeouts.items():
            lease.release()
            timeout.reschedule(0)
        self._timeouts.clear()

    async def fleet(self) -> FleetState:
        checkpoints: dict[TierName, str | None] = {}
        builds: dict[TierName, tuple[EngineBuild, ...]] = {}
        ready_tiers: dict[TierName, MeasuredTier] = {}
        for spec in self._fleet.specs:
            checkpoints[spec.name] = spec.identity
            builds[spec.name] = self._fleet.builds(spec.name)
            if self._fleet.is_ready(spec.name):
                ready_tiers[spec.name] = self._measured_tier(spec)
        return FleetState(
            model=self._model,
            machine=self._fleet.machine,
            checkpoints=checkpoints,
            builds=builds,
            tiers=ready_tiers,
        )

    def _measured_tier(self, spec: TierSpec) -> MeasuredTier:
        ready_tiers = [
            replica.spec.name
            for replica in self._fleet.replicas
            if replica.state.status is ReplicaStatus.READY
        ]
        return MeasuredTier(
            identity=measured_identity(spec.identity, self._fleet.builds(spec.name)),
            replicas=ready_tiers.count(spec.name),
            max_num_seqs=spec.max_num_seqs,
            max_model_len=spec.max_model_len,
            adapters=spec.adapters,
        )

    async def ask(
        self,
        path: str,
        tier: TierName,
        body: Mapping[str, Any],
        report_waiting: Callable[[], None] = ignore_waiting,
        adapter: str | None = None,
    ) -> Any:
        """Ask as every measuring client does, again whenever the request is cancelled for somebody else's."""
        while True:
            with suppress(TimeoutError):
                answer = await super().ask(
                    path, tier, body, report_waiting=report_waiting, adapter=adapter
                )
                self._quiet_s = self._idle_s
                return answer

    async def undisturbed(self, step: Step, report_waiting: Callable[[], None]) -> bool:
        await self._wait_until_quiet(report_waiting)
        preemptions_before = self._preemptions
        counts_before = self._request_counts()
        try:
            await step()
        except (TimeoutError, ProfileError, ExceptionGroup):
            if self._preemptions == preemptions_before:
                raise
        else:
            self._quiet_s = self._idle_s
        return (
            self._preemptions == preemptions_before
            and self._request_counts() == counts_before
            and not self._has_other_work()
        )

    @asynccontextmanager
    async def _send(
        self,
        tier: TierName,
        path: str,
        body: Mapping[str, Any],
        adapter: str | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Send a request, beyond the replica's limit if need be: nobody else is served.

        Its lease has no tokens, so that predictions do not count it.

        ``TimeoutError``: it was cancelled for somebody else's request.
        """
        lease = self._fleet.lease(tier, prompt_tokens=0, max_tokens=0, over_limit=True)
        if lease is None:
            yield httpx.Response(
                httpx.codes.SERVICE_UNAVAILABLE, text="none of its replicas is ready"
            )
            return
        replica = lease.replica
        try:
            async with asyncio.timeout(None) as timeout:
                self._timeouts[lease] = timeout
                if not self._is_urgent():
                    self._fleet.preempt = self.preempt
                async with self._http.stream(
                    "POST",
                    f"{replica.url}{path}",
                    json=_engine_body(replica, body, adapter),
                    headers=_engine_headers(replica),
                ) as response:
                    if response.status_code == httpx.codes.OK:
                        lease.first_token()
                    yield response
        except httpx.HTTPError as error:
            raise ProfileError(
                f"{tier} does not answer ({type(error).__name__})"
            ) from error
        finally:
            lease.release()
            self._timeouts.pop(lease, None)
            if not self._timeouts:
                self._fleet.preempt = None

    async def _is_quiet(self) -> bool:
        if self._is_urgent():
            return True
        now = time.monotonic()
        if self._has_other_work() or self._request_counts() != self._last_counts:
            self._last_counts = self._request_counts()
            self._last_busy_at = now
            return False
        return now >= self._last_busy_at + self._quiet_s

    def _has_other_work(self) -> bool:
        """Tell whether there is other work: requests of callers, leases of others, engines that start."""
        if self._request_counts().open > 0:
            return True
        states = [replica.state for replica in self._fleet.replicas]
        if sum(state.in_flight for state in states) > len(self._timeouts):
            return True
        return any(state.status in STARTING for state in states)


def _engine_body(
    replica: Replica, body: Mapping[str, Any], adapter: str | None
) -> dict[str, Any]:
    engine_body = {**body, "temperature": 0, "model": adapter or replica.model}
    if replica.takes_priority:
        engine_body["priority"] = PRIORITIES["batch"]
    return engine_body


def _engine_headers(replica: Replica) -> dict[str, str]:
    if not replica.api_key:
        return {}
    return {"authorization": f"Bearer {replica.api_key}"}
