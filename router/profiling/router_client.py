"""Measures the tiers of a running router through its API, with the lowest priority."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from router.policy.profiles import ProfileError
from router.profiling.measuring_client import (
    LONGEST_CHECK_S,
    FleetState,
    MeasuredTier,
    MeasuringClient,
    Step,
    measured_identity,
)
from tiers.spec import EngineBuild, TierName


class NoRouterError(ProfileError):
    """What answers at the router's address is no router."""


class RouterClient(MeasuringClient):
    """A client of a running router, with the lowest priority."""

    _own_in_flight = 0  # its requests that are open
    _own_served = 0  # its requests that were answered
    _quiet_until = 0.0  # by the monotonic clock: until then no check is needed

    async def fleet(self) -> FleetState:
        response = await self._ask_for_tiers()
        try:
            answer = response.json()
            tiers = answer["tiers"]
        except (ValueError, KeyError, TypeError):
            raise NoRouterError(
                f"{self._url}/tiers answered HTTP {response.status_code}: is this a router?"
            ) from None
        if answer.get("scope") == "own" and _has_unknown_identity(tiers):
            raise ProfileError(
                "what its engines serve is known by their addresses alone, which the router shows to operators: give a key "
                "made with --admin in the variable QARR_KEY"
            )
        return _fleet_of(answer, tiers)

    async def _ask_for_tiers(self) -> httpx.Response:
        try:
            response = await self._http.get("/tiers")
        except httpx.HTTPError as error:
            raise ProfileError(
                f"no router answers at {self._url} ({type(error).__name__}): 'make up' starts one"
            ) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise ProfileError(
                "the router needs a key: give one in the variable QARR_KEY"
            )
        return response

    async def undisturbed(self, step: Step, report_waiting: Callable[[], None]) -> bool:
        self._quiet_until = 0.0
        await self._wait_until_quiet(report_waiting)
        fleet_before = await self.fleet()
        own_before = self._own_served
        await step()
        fleet_after = await self.fleet()
        own_answers = self._own_served - own_before
        answers = fleet_after.served - fleet_before.served
        # A lease is released a moment after the last byte, so its own answers may still be in flight.
        return answers <= own_answers and fleet_after.in_flight <= own_answers

    @asynccontextmanager
    async def _send(
        self,
        tier: TierName,
        path: str,
        body: Mapping[str, Any],
        adapter: str | None = None,
    ) -> AsyncIterator[httpx.Response]:
        routed_body = {
            "model": adapter or tier,
            "temperature": 0,
            "qarr": {"tier": tier, "tier_policy": "require", "priority": "batch"},
            **body,
        }
        self._own_in_flight += 1
        try:
            async with self._http.stream("POST", path, json=routed_body) as response:
                if response.status_code == httpx.codes.OK:
                    self._own_served += 1
                yield response
        except httpx.HTTPError as error:
            raise ProfileError(
                f"{self._url} does not answer any more ({type(error).__name__})"
            ) from error
        finally:
            self._own_in_flight -= 1

    async def _is_quiet(self) -> bool:
        if time.monotonic() >= self._quiet_until:
            fleet = await self.fleet()
            if fleet.in_flight > self._own_in_flight:
                return False
            self._quiet_until = time.monotonic() + LONGEST_CHECK_S
        return True


def _has_unknown_identity(tiers: list[dict[str, Any]]) -> bool:
    return any(tier["identity"] is None for tier in tiers)


def _fleet_of(answer: dict[str, Any], tiers: list[dict[str, Any]]) -> FleetState:
    """Read the state of the fleet from the answer of ``GET /tiers``."""
    in_flight = 0
    served = 0
    checkpoints: dict[TierName, str | None] = {}
    builds: dict[TierName, tuple[EngineBuild, ...]] = {}
    ready_tiers: dict[TierName, MeasuredTier] = {}
    for tier in tiers:
        name = TierName(tier["tier"])
        checkpoints[name] = tier["identity"]
        builds[name] = _builds_of(tier)
        if tier["state"] == "ready":
            ready_tiers[name] = _measured_tier(tier)
        for replica in tier["replicas"]:
            in_flight += replica["in_flight"]
            served += replica["served"]
    profiling = answer.get("profiling") or {}
    return FleetState(
        model=answer["model"],
        machine=answer["machine"],
        checkpoints=checkpoints,
        builds=builds,
        tiers=ready_tiers,
        in_flight=in_flight,
        served=served,
        measuring=profiling.get("what"),
    )


def _measured_tier(tier: dict[str, Any]) -> MeasuredTier:
    states = [replica["state"] for replica in tier["replicas"]]
    return MeasuredTier(
        identity=measured_identity(tier["identity"], _builds_of(tier)),
        replicas=states.count("ready"),
        max_num_seqs=tier["max_num_seqs"],
        max_model_len=tier["max_model_len"],
        adapters=tier["adapters"],
    )


def _builds_of(tier: dict[str, Any]) -> tuple[EngineBuild, ...]:
    """Read what the engines of a tier compute with; those that were not asked yet are left out."""
    builds = []
    for replica in tier["replicas"]:
        engine = replica.get("engine")
        if engine is not None:
            builds.append(
                EngineBuild(
                    version=engine["version"], kv_cache_dtype=engine["kv_cache_dtype"]
                )
            )
    return tuple(dict.fromkeys(builds))
