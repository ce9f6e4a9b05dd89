"""Decisions and records of requests, made by hand."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from classifier import PromptClass, PromptFeatures
from router.policy.decision import (
    Basis,
    Decision,
    ExpectedQuality,
    ExpectedTiming,
    PolicyParameters,
    RoutingQuery,
    TierComparison,
    TierEstimate,
)
from router.policy.losses import NO_LOSS
from router.telemetry.record import Outcome, RequestRecord, Served, Times, Tokens
from tiers.choice import Candidate, CorrectedTimes
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName


def decision(
    tier: TierName | None = TierName.FAST, kind: PromptClass = PromptClass.CHAT
) -> Decision:
    """Return a decision; every tier is predicted to take 100 ms to the first token, and 20 ms for each further one."""
    query = RoutingQuery(
        PromptFeatures(
            2,
            1,
            tokens=1,
            tokens_exact=True,
            contains_code=False,
            asks_for_code=False,
            language=None,
            prompt_class=kind,
            confidence=0.9,
            signals=(),
        ),
        20,
        100,
    )
    estimates = tuple(
        TierEstimate(
            tier=name,
            precision="bf16",
            state=ReplicaStatus.READY,
            candidate=Candidate(
                is_free=True,
                replica=None,
                times=CorrectedTimes(100.0, 20.0, ttft_spread=0.0, tpot_spread=0.0),
                cached_tokens=None,
            ),
            batch_size=1,
            timing=ExpectedTiming(is_slow=False, bound_ratio=0.0, finish_ms=None),
            quality=ExpectedQuality(
                NO_LOSS,
                worst_loss=0.0,
                allowed_loss=0.0,
                is_lossy=False,
                unfitness=None,
            ),
            cost=2.5,
            obstacle=None,
            obstacle_text="",
            meets_bounds=True,
        )
        for name in STANDARD_TIERS
    )
    basis = Basis.REFUSED if tier is None else Basis.NEGLIGIBLE
    comparison = TierComparison(
        query,
        PolicyParameters(),
        confidence_z=0.0,
        scarcity=0.0,
        estimates=estimates,
        chosen=None,
        basis=basis,
    )
    made = Decision(
        tier, "the cheapest", query=query, comparison=comparison, basis=basis
    )
    return (
        made
        if tier is None
        else replace(made, comparison=replace(comparison, chosen=made.estimate(tier)))
    )


def record(**fields: Any) -> RequestRecord:
    """Return the record of a request that the fast tier served without trouble, with other values for some fields.

    The fields may also be those of the record's groups: ``served``, ``tokens`` and ``times``.
    """
    values: dict[str, Any] = {
        "at": 1e9,
        "request_id": "r",
        "trace_id": "t",
        "route": "/generate",
        "key_id": "",
        "priority": "standard",
        "team": "",
        "decision": decision(),
        "outcome": Outcome.OK,
        "error": None,
        "served": Served(TierName.FAST, "fast-0", "awq"),
        "tokens": Tokens(20, 7),
        "times": Times(30.0, 5.0, ttft_ms=235.0, tpot_ms=25.0, duration_ms=400.0),
    }
    for group in ("served", "tokens", "times"):
        own = {
            name: fields.pop(name)
            for name in values[group].__struct_fields__
            if name in fields
        }
        values[group] = replace(values[group], **own)
    return RequestRecord(**{**values, **fields})
