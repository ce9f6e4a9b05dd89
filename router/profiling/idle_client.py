"""Measures the router's own engines from within, only while nobody else is served.

Its requests go to the engines directly, under leases but without keys, quotas, queue and records: no figures count them.
When a request arrives, all of them are cancelled before it is decided, and sent again once the router is idle.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx

from router.policy.decision import PRIORITIES
from router.policy.profiles import ProfileError
from router.profiling.client import Client, FleetState, MeasuredTier
from tiers.fleet import Fleet, Lease
from tiers.spec import ReplicaStatus, TierName

LONGEST_IDLE_S = 60.0
STARTING = {ReplicaStatus.STARTING, ReplicaStatus.WARMING}


class IdleClient(Client):
    """A client of the fleet's engines that works once the router was idle for ``idle_s``.

    ``requests`` returns the number of requests so far, and of those that are open.
    """

    # a step that waits for a slot is not alone any more
    patience_s, slot_patience_s = math.inf, 0.0

    def __init__(
        self,
        fleet: Fleet,
        model: str,
        idle_s: float,
        requests: Callable[[], tuple[int, int]],
    ) -> None:
        super().__init__()
        self._fleet, self._model, self._idle_s, self._requests = (
            fleet,
            model,
            idle_s,
            requests,
        )
        self._leases: dict[Lease, asyncio.Timeout] = {}
        self._busy_at, self._seen, self._preemptions = time.monotonic(), requests(), 0
        # longer after a cancellation: if pauses are short, little is started in vain
        self._wait_s = idle_s

    @property
    def asking(self) -> bool:
        return bool(self._leases)

    def preempt(self) -> None:
        """Cancel its requests: another one has arrived. Their slots are free when this returns."""
        self._fleet.preempt, self._busy_at = None, time.monotonic()
        self._preemptions += 1
        self._wait_s = max(min(2 * self._wait_s, LONGEST_IDLE_S), self._idle_s)
        for lease, running in self._leases.items():
            lease.release()
            running.reschedule(0)
        self._leases.clear()

    async def fleet(self) -> FleetState:
        fleet = self._fleet
        ready = [
            r.spec.name for r in fleet.replicas if r.state.status is ReplicaStatus.READY
        ]
        return FleetState(
            self._model,
            fleet.machine,
            {spec.name: spec.identity for spec in fleet.specs},
            {
                spec.name: MeasuredTier(
                    spec.identity,
                    ready.count(spec.name),
                    spec.max_num_seqs,
                    spec.max_model_len,
                    spec.adapters,
                )
                for spec in fleet.specs
                if fleet.is_ready(spec.name)
            },
        )

    async def ask(self, *args: Any, **named: Any) -> Any:
        while True:
            with suppress(TimeoutError):
                answer = await super().ask(*args, **named)
                self._wait_s = self._idle_s
                return answer

    async def undisturbed(
        self, step: Callable[[], Coroutine[Any, Any, None]], waiting: Callable[[], None]
    ) -> bool:
        await self.until_quiet(waiting)
        before = self._preemptions, self._requests()
        try:
            await step()
        except (TimeoutError, ProfileError, ExceptionGroup):
            if self._preemptions == before[0]:
                raise
        else:
            self._wait_s = self._idle_s
        return (self._preemptions, self._requests()) == before and not self._others()

    @asynccontextmanager
    async def _send(
        self,
        tier: TierName,
        path: str,
        body: Mapping[str, Any],
        adapter: str | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Send a request whatever the replica's limit: nobody is served. Without tokens it does not affect predictions.

        ``TimeoutError``: it was cancelled for somebody else's request.
        """
        lease = self._fleet.lease(tier, prompt_tokens=0, max_tokens=0, over_limit=True)
        if lease is None:
            yield httpx.Response(
                httpx.codes.SERVICE_UNAVAILABLE, text="no slot is free"
            )
            return
        replica = lease.replica
        priority = {"priority": PRIORITIES["batch"]} if replica.takes_priority else {}
        headers = (
            {"authorization": f"Bearer {replica.api_key}"} if replica.api_key else {}
        )
        body = {**body, "temperature": 0, "model": adapter or replica.model, **priority}
        try:
            async with asyncio.timeout(None) as running:
                self._leases[lease], self._fleet.preempt = running, self.preempt
                async with self._http.stream(
                    "POST", f"{replica.url}{path}", json=body, headers=headers
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
            self._leases.pop(lease, None)
            if not self._leases:
                self._fleet.preempt = None

    async def _is_quiet(self) -> bool:
        now = time.monotonic()
        if self._others() or self._requests() != self._seen:
            self._seen, self._busy_at = self._requests(), now
            return False
        return now >= self._busy_at + self._wait_s

    def _others(self) -> bool:
        """Tell whether there is other work: requests, engines that start."""
        replicas = self._fleet.replicas
        return (
            self._requests()[1] > 0
            or sum(r.state.in_flight for r in replicas) > len(self._leases)
            or any(r.state.status in STARTING for r in replicas)
        )
