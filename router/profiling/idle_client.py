"""Who asks this router's own engines for measurements, from within: only while nobody else is served.

It sends to the engines directly, under leases, beneath keys, quotas, queue and records: nobody's figures count its
requests. When a request comes, all of its own are broken off in the same breath, before that request is decided on, and
asked again once it is quiet.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from router.policy.decision import PRIORITIES
from router.policy.profiles import ProfileError
from router.profiling.client import ANSWER_TIMEOUT_S, BUSY_WAIT_S, MAX_WAIT_S, FleetState, Timed, read_timed, timed_body
from tiers.spec import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from tiers.fleet import Fleet, Lease, Replica
    from tiers.spec import TierName

LOOK_S = 0.1
LONGEST_IDLE_S = 60.0
_STARTING = {ReplicaState.STARTING, ReplicaState.WARMING}
_TRY_LATER = {httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE}
T = TypeVar("T")


class _GaveWay(Exception):
    """What was asked was broken off for somebody else's request."""


class IdleClient:
    """Asks the fleet's engines while it is quiet. One event loop owns it. Close it.

    Args:
        fleet: Whose engines.
        model: The served model's name, for people.
        idle_s: How long it must have been quiet.
        served: Tells whether requests of others are open.
    """

    def __init__(self, fleet: Fleet, model: str, idle_s: float, served: Callable[[], bool]) -> None:
        self._fleet, self._model, self._idle_s, self._served = fleet, model, idle_s, served
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S, trust_env=False, limits=limits)
        self._leases: set[Lease] = set()
        self._work: set[asyncio.Task[Any]] = set()
        self._looking = asyncio.Lock()
        self._busy_at = time.monotonic()
        self._wait_s = idle_s  # longer after what was broken off: where pauses are short, little is begun in vain

    @property
    def asking(self) -> bool:
        """Tell whether an engine computes something for it now."""
        return bool(self._leases)

    async def aclose(self) -> None:
        """Close the connections to the engines."""
        await self._client.aclose()

    def give_way(self) -> None:
        """Break off all that was asked: a request has come. Its places are free when this returns."""
        self._busy_at = time.monotonic()
        if self._leases:
            self._wait_s = max(min(2 * self._wait_s, LONGEST_IDLE_S), self._idle_s)
        for lease in self._leases:
            lease.release()
        self._leases.clear()
        for task in self._work:
            task.cancel()

    async def fleet(self) -> FleetState:
        """Return how the fleet is now."""
        fleet = self._fleet
        ready = {spec.name: spec for spec in fleet.specs if fleet.is_ready(spec.name)}
        return FleetState(
            model=self._model,
            machine=fleet.machine,
            identities={name: spec.identity for name, spec in ready.items()},
            checkpoints={spec.name: spec.identity for spec in fleet.specs},
            replicas={
                name: sum(r.spec.name is name and r.state is ReplicaState.READY for r in fleet.replicas)
                for name in ready
            },
            max_num_seqs={name: spec.max_num_seqs for name, spec in ready.items()},
            max_model_len={name: spec.max_model_len for name, spec in ready.items()},
            in_flight=sum(r.in_flight for r in fleet.replicas),
            served=sum(r.served for r in fleet.replicas),
        )

    async def ask(self, path: str, tier: TierName, body: Mapping[str, Any], waiting: Callable[[], None]) -> Any:
        """Ask one tier for a whole greedy answer; ask again where somebody came.

        Raises:
            ProfileError: It refuses, or has no place for too long.
        """
        deadline = time.monotonic() + MAX_WAIT_S
        while True:
            await self._until_quiet(waiting)
            try:
                answer = await self._unless_disturbed(self._answer(path, tier, {**body, "temperature": 0}))
            except _GaveWay:
                deadline = time.monotonic() + MAX_WAIT_S
                continue
            if answer is not None:
                return answer
            if time.monotonic() > deadline:
                raise ProfileError(f"{tier} has had no place for {MAX_WAIT_S:g} s")
            await asyncio.sleep(BUSY_WAIT_S)

    async def time(self, tier: TierName, prompt: list[int], tokens: int, begun: Callable[[], None]) -> Timed:
        """Time one answer of exactly so many tokens to a prompt of token ids; within ``undisturbed``.

        Raises:
            ProfileError: It was refused.
        """
        lease = self._lease(tier)
        if lease is None:
            raise ProfileError(f"{tier} has no place")
        try:
            started = time.monotonic()
            request = self._request(lease.replica, "/v1/completions", {**timed_body(prompt, tokens), "temperature": 0})
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise _refused(tier, response)

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
        """Take a step of a measurement once nobody else is served; tell False where somebody came."""
        await self._until_quiet(waiting)
        try:
            await self._unless_disturbed(step())
        except _GaveWay:
            return False
        return not self._others()

    async def _answer(self, path: str, tier: TierName, body: Mapping[str, Any]) -> Any:
        """Return a whole answer; None where there is no place for it now.

        Raises:
            ProfileError: It is refused.
        """
        lease = self._lease(tier)
        if lease is None:
            return None
        try:
            response = await self._client.send(self._request(lease.replica, path, body))
            if response.status_code == httpx.codes.OK:
                lease.first_token()
        except httpx.HTTPError as error:
            raise ProfileError(f"{tier} does not answer ({type(error).__name__})") from error
        finally:
            self._give_back(lease)
        if response.status_code in _TRY_LATER:
            return None
        if response.status_code != httpx.codes.OK:
            raise _refused(tier, response)
        return response.json()

    def _request(self, replica: Replica, path: str, body: Mapping[str, Any]) -> httpx.Request:
        priority = {"priority": PRIORITIES["batch"]} if replica.takes_priority else {}
        headers = {"authorization": f"Bearer {replica.api_key}"} if replica.api_key else {}
        return self._client.build_request(
            "POST", f"{replica.url}{path}", json={**body, "model": replica.model, **priority}, headers=headers
        )

    def _lease(self, tier: TierName) -> Lease | None:
        """Take a place, whatever the limit: nobody is served. It leaves no trace in what is predicted: it has no tokens."""
        lease = self._fleet.lease(tier, prompt_tokens=0, max_tokens=0, over_limit=True)
        if lease is not None:
            self._leases.add(lease)
        return lease

    def _give_back(self, lease: Lease) -> None:
        lease.release()
        self._leases.discard(lease)

    async def _unless_disturbed(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work that ``give_way`` breaks off.

        Raises:
            _GaveWay: It was.
        """
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
        """Wait until nobody else is served, and has not been for a while."""
        async with self._looking:
            while True:
                now = time.monotonic()
                if self._others():
                    self._busy_at = now
                if now >= self._busy_at + self._wait_s:
                    return
                waiting()
                await asyncio.sleep(LOOK_S)

    def _others(self) -> bool:
        """Tell whether the engines have something else to do: requests, checks of live answers, engines that start."""
        replicas = self._fleet.replicas
        return (
            self._served()
            or sum(r.in_flight for r in replicas) > len(self._leases)
            or any(r.state in _STARTING for r in replicas)
        )


def _refused(tier: TierName, response: httpx.Response) -> ProfileError:
    return ProfileError(f"{tier} answered HTTP {response.status_code}: {response.text[:300]}")
