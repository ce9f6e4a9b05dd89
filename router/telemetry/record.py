"""The record of a request that has ended: metrics, logs and pages are made from it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from router.policy.decision_log import OutcomeRecord
from router.policy.render import render_estimates

if TYPE_CHECKING:
    from router.policy.decision import Decision, Priority
    from router.policy.decision_log import DecisionLog
    from router.telemetry.journey import Journey
    from tiers.spec import TierName


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    REFUSED = "refused"
    ERROR = "error"
    CLIENT_GONE = "client_gone"


class KeptFor(StrEnum):
    """Why a request's record and trace are kept: among the last ones, or besides, since it went badly."""

    RECENT = "recent"
    ERROR = "error"
    SLA_MISS = "sla_miss"


class TierUsage(NamedTuple):
    """Tokens of a request that one tier computed.

    Attributes:
        cached: Of the prompt's, those in its prefix cache.
    """

    tier: TierName
    prompt: int
    cached: int
    output: int


class Cost(NamedTuple):
    """Millionths of an engine-second of the highest tier, and of the currency: sums of integers are exact in any order."""

    engine_us: int = 0
    money_u: int = 0

    def plus(self, other: Cost) -> Cost:
        return Cost(self.engine_us + other.engine_us, self.money_u + other.money_u)

    def at_most(self, other: Cost) -> Cost:
        return Cost(min(self.engine_us, other.engine_us), min(self.money_u, other.money_u))


FREE = Cost()


class RequestRecord(NamedTuple):
    """One inference request, from its arrival to its end. Times in milliseconds; None: not measured.

    Attributes:
        at: When it arrived, in seconds since 1970.
        route: The endpoint's path.
        key_id: Of the caller's key; empty without keys.
        decision: The one that admitted or refused it.
        error: Code of a refusal, or the kind of error.
        served_by: The tier that began its answer.
        precision: Of that tier.
        checkpoint: First digits of the digest of that tier's weights.
        queue_ms: Wait for a slot.
        overhead_ms: From its arrival until it was sent to an engine, without the queue.
        ttft_ms: From its arrival to its first token, queue included.
        tpot_ms: Mean time between tokens.
        duration_ms: From its arrival to its last byte.
        sla_met: Whether its own bounds on times were met; None: it had none, or its caller left before.
        continued_on: Tiers that continued its answer after failures, in order.
        cached_prompt_tokens: Of its prompt, found in the engine's prefix cache, as the engine reports it.
        predicted_cached_tokens: The same, as expected when the request was sent.
        team: Of the caller's key; empty: none.
        usage: What tiers computed of it; only of callers with a key.
        cost: Charged to its caller's budgets; None: it has none.
        overflow: Name of the server outside of the fleet that answered; None: none did.
        overflow_failure: Why that server did not answer: ``full``, ``paused`` or ``unsupported``, so that it was not asked;
            ``failed`` or ``cancelled``; None: it did, or there was no need.
        journey: What it went through, for its trace; None: not known.
        why_not: Why it failed or was refused after the decision, for operators; empty: it was not, or nothing tells.
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
    continued_on: tuple[TierName, ...]
    cached_prompt_tokens: int | None = None
    predicted_cached_tokens: int | None = None
    team: str = ""
    usage: tuple[TierUsage, ...] = ()
    cost: Cost | None = None
    overflow: str | None = None
    overflow_failure: str | None = None
    journey: Journey | None = None
    why_not: str = ""

    @property
    def kept_for(self) -> KeptFor:
        if self.outcome is Outcome.ERROR or self.outcome is Outcome.REFUSED:
            return KeptFor.ERROR
        return KeptFor.SLA_MISS if self.sla_met is False else KeptFor.RECENT

    @property
    def undisturbed(self) -> bool:
        """Tell whether the chosen tier served it alone, so that predictions can be compared with measurements."""
        as_decided = self.served_by is not None and self.served_by is self.decision.tier
        return as_decided and not (self.attempts_failed or self.continued_on)


def render_record(record: RequestRecord) -> dict[str, Any]:
    """Return a record as JSON values, with the report on every tier."""
    return {**render_summary(record), "tiers": render_estimates(record.decision)}


def render_summary(record: RequestRecord) -> dict[str, Any]:
    """Return a record as JSON values, without the reports on tiers. Predictions do not include the queue."""
    decision = record.decision
    features, sla, chosen = decision.query.features, decision.query.sla, decision.chosen
    return {  # of plain values: encoding an enumeration's takes four times as long
        "at": int(record.at * 1000 + 0.5) / 1000,  # round() takes four times as long
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "route": record.route,
        "key": record.key_id,
        "priority": record.priority,
        "class": features.prompt_class._value_,
        "confidence": int(features.confidence * 1000 + 0.5) / 1000,
        "tier": decision.tier,
        "served_by": record.served_by,
        "overflow": record.overflow,
        "overflow_failure": record.overflow_failure,
        "replica": record.replica,
        "precision": record.precision,
        "checkpoint": record.checkpoint,
        "reason": record.why_not or decision.reason,
        "basis": decision.basis._value_,
        "degraded": list(decision.degraded),
        "truncated": decision.query.truncated or None,
        "outcome": record.outcome._value_,
        "error": record.error,
        "prompt_tokens": record.prompt_tokens,
        "cached_prompt_tokens": record.cached_prompt_tokens,
        "predicted_cached_tokens": record.predicted_cached_tokens,
        "output_tokens": record.output_tokens,
        "queue_ms": record.queue_ms and int(record.queue_ms * 100 + 0.5) / 100,
        "overhead_ms": record.overhead_ms and int(record.overhead_ms * 100 + 0.5) / 100,
        "ttft_ms": record.ttft_ms and int(record.ttft_ms * 100 + 0.5) / 100,
        "tpot_ms": record.tpot_ms and int(record.tpot_ms * 100 + 0.5) / 100,
        "duration_ms": record.duration_ms and int(record.duration_ms * 100 + 0.5) / 100,
        "predicted_ttft_ms": chosen.predicted_ttft_ms if chosen else None,
        "predicted_tpot_ms": chosen.predicted_tpot_ms if chosen else None,
        "sla": {"ttft_ms": sla.ttft_ms, "tpot_ms": sla.tpot_ms, "max_quality_loss": sla.max_quality_loss},
        "sla_met": record.sla_met,
        "attempts_failed": record.attempts_failed,
        "continued_on": list(record.continued_on),
        "cost": _rounded(chosen.cost, 4) if chosen else None,
    }


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def log_outcome(decisions: DecisionLog, record: RequestRecord) -> None:
    """Write to the decision log how a request ended, if an engine began to answer it."""
    if record.served_by is None:
        return
    gone = "CancelledError" if record.outcome is Outcome.CLIENT_GONE else None
    decisions.ended(
        OutcomeRecord(
            request_id=record.request_id,
            tier=record.served_by,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            ttft_ms=_rounded(record.ttft_ms),
            tpot_ms=_rounded(record.tpot_ms, 3),
            error=record.error or gone,
        )
    )
