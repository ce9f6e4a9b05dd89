"""Fleets, queries and policies to decide with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import structs

from classifier import PromptClass, PromptFeatures
from classifier.kinds import Complexity
from router.policy.decision import (
    Decision,
    PolicyParameters,
    RoutingQuery,
)
from router.policy.explain import verdict
from router.policy.losses import ExpectedLoss
from tiers.snapshot import FleetSnapshot, ReplicaState, TierSnapshot, Trends
from tiers.spec import (
    STANDARD_TIERS,
    ReplicaStatus,
    TemplateTokens,
    TierName,
    TierSpec,
)
from tiers.speed import ReplicaLoad, SpeedModel, Trend

FAST, BALANCED, PRECISE = STANDARD_TIERS


PLAIN = {PromptClass.CHAT, PromptClass.WRITING}


def lost(mean: float) -> ExpectedLoss:
    return ExpectedLoss(
        mean, mean * 0.8, high=mean * 1.25, answers=40, measured_high=mean * 1.25
    )


def losing(*each: dict[PromptClass, float]) -> dict[TierName, Any]:
    """Return losses by rising tier, the same for all complexities; of other classes, as the worst of those given."""
    return {
        tier: {
            kind: dict.fromkeys(Complexity, lost(given.get(kind, max(given.values()))))
            for kind in PromptClass
        }
        for tier, given in zip((FAST, BALANCED), each, strict=True)
    }


# Plain text goes to fast, all else that is known to balanced.
TABLE = PolicyParameters(
    losing(
        {kind: 0.001 if kind in PLAIN else 0.05 for kind in PromptClass},
        {kind: 0.007 if kind is PromptClass.UNKNOWN else 0.002 for kind in PromptClass},
    )
)


LENGTHS = {FAST: 2048, BALANCED: 4096, PRECISE: 8192}


def features(
    kind: PromptClass = PromptClass.CHAT, confidence: float = 0.9
) -> PromptFeatures:
    return PromptFeatures(
        2,
        1,
        tokens=1,
        tokens_exact=True,
        contains_code=False,
        asks_for_code=False,
        language=None,
        prompt_class=kind,
        confidence=confidence,
        signals=(),
    )


def query(
    kind: PromptClass = PromptClass.CHAT, confidence: float = 0.9, **changes: Any
) -> RoutingQuery:
    return structs.replace(
        RoutingQuery(features(kind, confidence), prompt_tokens=20, max_tokens=100),
        **changes,
    )


def fleet(
    states: dict[TierName, Any] | None = None,
    speeds: dict[TierName, SpeedModel] | None = None,
    busy: int = 0,
    loads: dict[TierName, ReplicaLoad] | None = None,
    limit: int = 32,
) -> FleetSnapshot:
    tiers = []
    for name in STANDARD_TIERS:
        state = (states or {}).get(name, ReplicaStatus.READY)
        speed = (speeds or {}).get(name)
        load = (loads or {}).get(name, ReplicaLoad(busy))
        trend = Trend(0.0, speed.ttft_spread**2 if speed else 0.0, 0.0)
        replica = ReplicaState(
            f"{name}-0", "u", status=state, in_flight=load.sequences, slots=load.sequences, prompt_tokens=load.prompt_tokens,
            load=load, speed=speed, trends=Trends(trend, trend), limit=limit,
        )  # fmt: skip
        tiers.append(
            TierSnapshot(
                TierSpec(name, LENGTHS[name], max_num_seqs=16, max_in_flight=32),
                (replica,),
                (load.prompt_tokens + load.output_tokens,),
            )
        )
    return FleetSnapshot(tuple(tiers), TemplateTokens())


def said(decision: Decision) -> list[str]:
    """Return the verdicts on all tiers, by rising precision."""
    return [
        verdict(decision.comparison, each) for each in decision.comparison.estimates
    ]


# What was measured: AWQ cheap and lossy, FP8 with a high price for each step, BF16 in between.
MEASURED = {
    FAST: SpeedModel(
        20,
        1,
        step_base_ms=20,
        step_ms_per_sequence=5,
        ttft_steps=1,
        contention=0,
        ttft_spread=0.1,
        tpot_spread=0.1,
        profiled=True,
    ),
    BALANCED: SpeedModel(
        20,
        1,
        step_base_ms=400,
        step_ms_per_sequence=1,
        ttft_steps=1,
        contention=0,
        ttft_spread=0.1,
        tpot_spread=0.1,
        profiled=True,
    ),
    PRECISE: SpeedModel(
        20,
        4,
        step_base_ms=60,
        step_ms_per_sequence=2,
        ttft_steps=1,
        contention=0,
        ttft_spread=0.1,
        tpot_spread=0.1,
        profiled=True,
    ),
}


CHAT = PromptClass.CHAT


CODE = PromptClass.CODE


PROFILED = PolicyParameters(losing({CHAT: 0.08, CODE: 0.2}, {CHAT: 0.02, CODE: 0.03}))


SCARCE = replace(PROFILED, objective="cheapest", loss_budget=0.1)


def warmed(there: FleetSnapshot, cached: dict[TierName, int]) -> FleetSnapshot:
    tiers = [
        structs.replace(tier, cached=(cached.get(tier.spec.name, 0),))
        for tier in there.tiers
    ]
    return structs.replace(there, tiers=tuple(tiers))
