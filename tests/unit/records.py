"""Decisions and records of requests, made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from classifier import PromptClass, PromptFeatures
from router.policy.decision import Basis, Choice, Decision, Estimate, PolicyParameters, Query
from router.policy.losses import NO_LOSS
from router.telemetry.record import Outcome, RequestRecord
from tiers.choice import Expectation
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName


def decision(tier: TierName | None = TierName.FAST, kind: PromptClass = PromptClass.CHAT) -> Decision:
    """Return a decision; every tier is predicted to take 100 ms to the first token, and 20 ms for each further one."""
    query = Query(PromptFeatures(2, 1, 1, True, False, False, None, kind, 0.9, ()), 20, 100)
    estimates = tuple(
        Estimate(
            name, "bf16", ReplicaStatus.READY, None, 1, Expectation(100.0, 20.0, 0.0, 0.0), NO_LOSS, 0.0, 0.0, 2.5, 0.0,
            None, "", slow=False, lossy=False, unfit=False, cached=None, meets=True,
        )
        for name in STANDARD_TIERS
    )  # fmt: skip
    basis = Basis.REFUSED if tier is None else Basis.NEGLIGIBLE
    choice = Choice(query, PolicyParameters(), 0.0, 0.0, estimates, None, basis)
    made = Decision(tier, "the cheapest", query, choice, basis)
    return made if tier is None else replace(made, choice=choice._replace(chosen=made.estimate(tier)))


def record(**fields: Any) -> RequestRecord:
    """Return the record of a request that the fast tier served undisturbed, but for these fields."""
    values: dict[str, Any] = {
        "at": 1e9, "request_id": "r", "trace_id": "t", "route": "/generate", "key_id": "", "priority": "standard",
        "decision": decision(), "outcome": Outcome.OK, "error": None, "served_by": TierName.FAST, "replica": "fast-0",
        "precision": "awq", "checkpoint": None, "prompt_tokens": 20, "output_tokens": 7, "queue_ms": 30.0,
        "overhead_ms": 5.0, "ttft_ms": 235.0, "tpot_ms": 25.0, "duration_ms": 400.0, "sla_met": None,
        "attempts_failed": 0, "continued_on": (),
    }  # fmt: skip
    return RequestRecord(**{**values, **fields})
