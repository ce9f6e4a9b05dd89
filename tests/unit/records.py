"""Decisions and records of requests, made by hand."""

from __future__ import annotations

from typing import Any

from classifier import PromptClass, PromptFeatures
from router.policy.decision import Basis, Decision, Query, TierReport
from router.telemetry.record import Outcome, RequestRecord
from tiers.spec import STANDARD_TIERS, Precision, ReplicaState, TierName


def decision(tier: TierName | None = TierName.FAST, kind: PromptClass = PromptClass.CHAT) -> Decision:
    """Return a decision; every tier is predicted to take 100 ms to the first token, and 20 ms for each further one."""
    query = Query(PromptFeatures(2, 1, 1, True, False, False, None, kind, 0.9, ()), 20, 100)
    reports = tuple(
        TierReport(name, ReplicaState.READY, 100.0, 20.0, None, 2.5, "chosen" if name is tier else "not the cheapest")
        for name in STANDARD_TIERS
    )
    precision = Precision.BF16 if tier is not None else None
    return Decision(tier, precision, "the cheapest", query, (), reports, Basis.NEGLIGIBLE if tier else Basis.REFUSED)


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
