"""One record of each request that has ended: what metrics, logs and pages are made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from router.policy.decision_log import OutcomeRecord
from router.policy.render import render_verdict

if TYPE_CHECKING:
    from router.policy.decision import Decision, Priority
    from router.policy.decision_log import DecisionLog
    from tiers.spec import TierName


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    REFUSED = "refused"
    ERROR = "error"
    CLIENT_GONE = "client_gone"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One inference request, from its arrival to its end. Times in milliseconds; None where there were none.

    Attributes:
        at: When it had arrived, in seconds since 1970.
        route: The endpoint's path.
        key_id: Of the caller's key; empty without keys.
        decision: By which it was let in, or refused.
        served_by: The tier that began its answer.
        precision: Of that tier.
        checkpoint: Digest of what that tier serves, its first digits.
        error: Code of a refusal, or the kind of error.
        queue_ms: Its wait for a slot.
        overhead_ms: From its arrival until it was sent to an engine, but for the queue.
        ttft_ms: From its arrival to its first token, the queue included.
        tpot_ms: Mean time between tokens.
        duration_ms: From its arrival to its last byte.
        sla_met: Whether the bounds on times that it gave were kept; None: it gave none, or its caller went away before.
        continued_on: Tiers that went on with its answer after failures, in order.
    """

    at: float
    request_id: str
    trace_id: str
    route: str
    key_id: str
    priority: Priority
    decision: Decision
    outcome: Outcome
    error: str | None
    served_by: TierName | None
    replica: str | None
    precision: str | None
    checkpoint: str | None
    prompt_tokens: int
    output_tokens: int
    queue_ms: float
    overhead_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    duration_ms: float
    sla_met: bool | None
    attempts_failed: int
    escalated: bool
    hedged: bool
    continued_on: tuple[TierName, ...]

    @property
    def predicted_ttft_ms(self) -> float | None:
        """Return what was predicted when it was let in, the queue not included."""
        tier = self.decision.tier
        return self.decision.verdict(tier).predicted_ttft_ms if tier is not None else None

    @property
    def predicted_tpot_ms(self) -> float | None:
        """Return what was predicted when it was let in."""
        tier = self.decision.tier
        return self.decision.verdict(tier).predicted_tpot_ms if tier is not None else None

    @property
    def cost(self) -> float | None:
        """Return the engine-seconds, by price, that were predicted for it."""
        tier = self.decision.tier
        return self.decision.verdict(tier).cost if tier is not None else None

    @property
    def undisturbed(self) -> bool:
        """Tell whether the tier that was decided on served it by itself, so that predictions can be held against it."""
        as_decided = self.served_by is not None and self.served_by is self.decision.tier
        return as_decided and not (self.attempts_failed or self.continued_on or self.escalated or self.hedged)


def render_record(record: RequestRecord) -> dict[str, Any]:
    """Return a record as JSON values, with what was found of every tier."""
    return {**render_summary(record), "tiers": [render_verdict(verdict) for verdict in record.decision.verdicts]}


def render_summary(record: RequestRecord) -> dict[str, Any]:
    """Return a record as JSON values, without what was found of every tier."""
    decision = record.decision
    query, sla = decision.query, decision.query.sla
    return {
        "at": round(record.at, 3),
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "route": record.route,
        "key": record.key_id,
        "priority": record.priority,
        "class": query.features.prompt_class.value,
        "confidence": round(query.features.confidence, 3),
        "tier": decision.tier,
        "served_by": record.served_by,
        "replica": record.replica,
        "precision": record.precision,
        "checkpoint": record.checkpoint,
        "reason": decision.reason,
        "basis": decision.basis,
        "degraded": list(decision.degraded),
        "outcome": record.outcome,
        "error": record.error,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "queue_ms": _rounded(record.queue_ms),
        "overhead_ms": _rounded(record.overhead_ms),
        "ttft_ms": _rounded(record.ttft_ms),
        "tpot_ms": _rounded(record.tpot_ms),
        "duration_ms": _rounded(record.duration_ms),
        "predicted_ttft_ms": _rounded(record.predicted_ttft_ms),
        "predicted_tpot_ms": _rounded(record.predicted_tpot_ms),
        "sla": {"ttft_ms": sla.ttft_ms, "tpot_ms": sla.tpot_ms, "max_quality_loss": sla.max_quality_loss},
        "sla_met": record.sla_met,
        "attempts_failed": record.attempts_failed,
        "escalated": record.escalated,
        "hedged": record.hedged,
        "continued_on": list(record.continued_on),
        "cost": record.cost,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def log_outcome(decisions: DecisionLog, record: RequestRecord) -> None:
    """Write to the decision log how a request ended that an engine had begun to answer."""
    if record.served_by is None:
        return
    gone = "CancelledError" if record.outcome is Outcome.CLIENT_GONE else None
    decisions.ended(
        OutcomeRecord(
            request_id=record.request_id,
            tier=record.served_by,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            ttft_ms=round(record.ttft_ms, 2) if record.ttft_ms is not None else None,
            tpot_ms=round(record.tpot_ms, 3) if record.tpot_ms is not None else None,
            error=record.error or gone,
        )
    )
