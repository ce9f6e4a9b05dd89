"""Decisions and records of requests, made by hand."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from classifier import PromptClass, PromptFeatures
from router.policy.decision import (
    Basis,
    Choice,
    Decision,
    Estimate,
    PolicyParameters,
    Query,
)
from router.policy.losses import NO_LOSS
from router.telemetry.record import Outcome, RequestRecord, Served, Times, Tokens
from tiers.choice import Expectation
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName


def decision(
    tier: TierName | None = TierName.FAST, kind: PromptClass = PromptClass.CHAT
) -> Decision:
    """Return a decision; every tier is predicted to take 100 ms to the first token, and 20 ms for each further one."""
    query = Query(
        PromptFeatures(2, 1, 1, True, False, False, None, kind, 0.9, ()), 20, 100
    )
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
    return (
        made
        if tier is None
        else replace(made, choice=replace(choice, chosen=made.estimate(tier)))
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
            name: fields.pop(name) for name in values[group]._fields if name in fields
        }
        values[group] = values[group]._replace(**own)
    return RequestRecord(**{**values, **fields})
