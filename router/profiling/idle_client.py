"""Measures the router's own engines from within, only while nobody else is served.

Its requests go to the engines directly, under leases but without keys, quotas, queue and records: no figures count them.
When a request arrives, all of them are cancelled before it is decided, and sent again once the router is idle.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from router.policy.decision import PRIORITIES
from router.policy.profiles import ProfileError
from router.profiling.client import (
    BUSY_WAIT_S,
    MAX_WAIT_S,
    TRY_LATER,
    FleetState,
    Timed,
    make_client,
    read_timed,
    refused,
    timed_body,
)
from tiers.spec import ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from tiers.fleet import Fleet, Lease
    from tiers.replica import Replica
    from tiers.spec import TierName

LOOK_S = 0.1
LONGEST_IDLE_S = 60.0
_STARTING = {ReplicaStatus.STARTING, ReplicaStatus.WARMING}
T = TypeVar("T")


class _GaveWay(Exception):
    """Its requests were cancelled for somebody else's."""


class IdleClient:
    """A ``Client`` of the fleet's engines that works while the router is idle. One event loop owns it. Close it.

    Args:
        fleet: The engines to measure.
        model: The served model's display name.
        idle_s: For which the router must have been idle.
        served: Tells whether others' requests are open.
    """

    def __init__(self, fleet: Fleet, model: str, idle_s: float, served: Callable[[], bool]) -> None:
        self._fleet, self._model, self._idle_s, self._served = fleet, model, idle_s, served
        self._client = make_client()
        self._leases: set[Lease] = set()
        self._work: set[asyncio.Task[Any]] = set()
        self._looking = asyncio.Lock()
        self._busy_at = time.monotonic()
        self._wait_s = idle_s  # longer after a cancellation: if pauses are short, little is started in vain

    @property
    def asking(self) -> bool:
        """Tell whether an engine computes one of its requests."""
        return bool(self._leases)

    async def aclose(self) -> None:
        await self._client.aclose()

    def give_way(self) -> None:
        """Cancel its requests: another one has arrived. Their slots are free when this returns."""
        self._busy_at = time.monotonic()
        if self._leases:
            self._wait_s = max(min(2 * self._wait_s, LONGEST_IDLE_S), self._idle_s)
        for lease in self._leases:
            lease.release()
        self._leases.clear()
        for task in self._work:
            task.cancel()

    async def fleet(self) -> FleetState:
        fleet = self._fleet
        ready = {spec.name: spec for spec in fleet.specs if fleet.is_ready(spec.name)}
        return FleetState(
            model=self._model,
            machine=fleet.machine,
            identities={name: spec.identity for name, spec in ready.items()},
            checkpoints={spec.name: spec.identity for spec in fleet.specs},
            replicas={
                name: sum(r.spec.name is name and r.state.status is ReplicaStatus.READY for r in fleet.replicas)
                for name in ready
            },
            max_num_seqs={name: spec.max_num_seqs for name, spec in ready.items()},
            max_model_len={name: spec.max_model_len for name, spec in ready.items()},
            in_flight=sum(r.state.in_flight for r in fleet.replicas),
            served=sum(r.state.served for r in fleet.replicas),
            adapters={name: spec.adapters for name, spec in ready.items()},
        )

    async def ask(
        self,
        path: str,
        tier: TierName,
        body: Mapping[str, Any],
        waiting: Callable[[], None],
        adapter: str | None = None,
    ) -> Any:
        """See ``Client``; sends cancelled requests again."""
        deadline = time.monotonic() + MAX_WAIT_S
        while True:
            await self._until_quiet(waiting)
            try:
                answer = await self._unless_disturbed(self._answer(path, tier, {**body, "temperature": 0}, adapter))
            except _GaveWay:
                deadline = time.monotonic() + MAX_WAIT_S
                continue
            if answer is not None:
                return answer
            if time.monotonic() > deadline:
                raise ProfileError(f"{tier} has had no free slot for {MAX_WAIT_S:g} s")
            await asyncio.sleep(BUSY_WAIT_S)

    async def time(self, tier: TierName, prompt: list[int], tokens: int, begun: Callable[[], None]) -> Timed:
        lease = self._lease(tier)
        if lease is None:
            raise ProfileError(f"{tier} has no free slot")
        try:
            started = time.monotonic()
            request = self._request(lease.replica, "/v1/completions", {**timed_body(prompt, tokens), "temperature": 0})
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise refused(tier, response)

                def first() -> None:
                    lease.first_token()
                    begun()

                return await read_timed(response, tier, started, prompt_tokens=len(prompt), tokens=tokens, begun=first)
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise ProfileError(f"{tier} does not answer ({type(error).__name__})") from error
        finally:
            self._give_back(lease)

    async def undisturbed(self, step: Callable[[], Coroutine[Any, Any, None]], waiting: Callable[[], None]) -> bool:
        """See ``Client``."""
        await self._until_quiet(waiting)
        try:
            await self._unless_disturbed(step())
        except _GaveWay:
            return False
        return not self._others()

    async def _answer(self, path: str, tier: TierName, body: Mapping[str, Any], adapter: str | None) -> Any:
        """Return a whole answer; None if there is no free slot now."""
        lease = self._lease(tier)
        if lease is None:
            return None
        try:
            response = await self._client.send(self._request(lease.replica, path, body, adapter))
            if response.status_code == httpx.codes.OK:
                lease.first_token()
        except httpx.HTTPError as error:
            raise ProfileError(f"{tier} does not answer ({type(error).__name__})") from error
        finally:
            self._give_back(lease)
        if response.status_code in TRY_LATER:
            return None
        if response.status_code != httpx.codes.OK:
            raise refused(tier, response)
        return response.json()

    def _request(
        self, replica: Replica, path: str, body: Mapping[str, Any], adapter: str | None = None
    ) -> httpx.Request:
        priority = {"priority": PRIORITIES["batch"]} if replica.takes_priority else {}
        headers = {"authorization": f"Bearer {replica.api_key}"} if replica.api_key else {}
        return self._client.build_request(
            "POST",
            f"{replica.url}{path}",
            json={**body, "model": adapter or replica.model, **priority},
            headers=headers,
        )

    def _lease(self, tier: TierName) -> Lease | None:
        """Take a slot, whatever the limit: nobody is served. Without tokens it does not affect predictions."""
        lease = self._fleet.lease(tier, prompt_tokens=0, max_tokens=0, over_limit=True)
        if lease is not None:
            self._leases.add(lease)
        return lease

    def _give_back(self, lease: Lease) -> None:
        lease.release()
        self._leases.discard(lease)

    async def _unless_disturbed(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that ``give_way`` may cancel."""
        task = asyncio.create_task(work)
        self._work.add(task)
        try:
            found = await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise _GaveWay from None
        finally:
            self._work.discard(task)
        self._wait_s = self._idle_s
        return found

    async def _until_quiet(self, waiting: Callable[[], None]) -> None:
        """Wait until nobody else has been served for a while."""
        async with self._looking:
            while True:
                now = time.monotonic()
                if self._others():
                    self._busy_at = now
                elif now >= self._busy_at + self._wait_s:
                    return
                waiting()
                await asyncio.sleep(LOOK_S)

    def _others(self) -> bool:
        """Tell whether there is other work: requests, checks of live answers, engines that start."""
        replicas = self._fleet.replicas
        return (
            self._served()
            or sum(r.state.in_flight for r in replicas) > len(self._leases)
            or any(r.state.status in _STARTING for r in replicas)
        )
