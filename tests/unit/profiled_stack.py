"""A router that has taken up a quality profile, in front of engines that can be told what to say."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from classifier.kinds import Complexity
from router.policy.losses import CLASSES
from router.policy.profiles import QualityProfile, profile_name
from tests.unit.policy.made_profiles import counted, quality
from tests.unit.router_stack import Stack, router_stack
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.fakes.engine import Behaviour


def profile(identities: dict[TierName, str | None]) -> QualityProfile:
    """Return a profile in which the cheap tiers lose nothing."""
    kinds = [(kind, complexity) for kind in CLASSES for complexity in Complexity]
    return quality(
        *(counted(tier, 0, 0, *kind, of=1000) for tier in STANDARD_TIERS[:2] for kind in kinds), identities=identities
    )


@asynccontextmanager
async def profiled_stack(
    tmp_path: Path,
    policy: dict[str, Any],
    tiers: dict[str, Any] | None = None,
    *,
    more: dict[str, Any] | None = None,
    key: str = "",
    **behaviours: Behaviour,
) -> AsyncIterator[Stack]:
    """Run the router; ``tiers`` and ``more`` are settings, ``key`` is the client's."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    overrides = {"tiers": tiers or {}, "policy": {"profiles": str(folder), "max_slowdown": 1e9, **policy}}
    async with router_stack(tmp_path, overrides | (more or {}), **behaviours) as stack:
        if key:
            stack.client.headers["authorization"] = f"Bearer {key}"
        identities = {spec.name: spec.identity for spec in stack.fleet.specs}
        (folder / profile_name(identities)).write_text(profile(identities).model_dump_json())
        while True:
            decision = (await stack.client.post(f"{stack.url}/route", json={"prompt": "hi"})).json()
            if decision["tiers"][0]["loss_answers"]:
                break
            await asyncio.sleep(0.1)
        for behaviour in stack.engines.values():
            behaviour.requests.clear()
        yield stack
