"""The names and values of span attributes, for spans that are exported and for the page alike.

Names are those of OpenTelemetry's semantic conventions where it has one, else ``qarr.*``. What is not known is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from classifier import PromptFeatures
    from router.policy.decision import Decision, TierReport
    from router.telemetry.journey import Hop
    from router.telemetry.record import RequestRecord

KEY_ID = "qarr.key.id"  # of the caller's key, which is no secret
INSIDE = {"server.address", "server.port"}  # where engines are: for operators


def features_attributes(features: PromptFeatures) -> dict[str, Any]:
    """Return the classifier's features."""
    found = {
        "qarr.class": features.prompt_class.value,
        "qarr.confidence": features.confidence,
        "qarr.contains_code": features.contains_code,
        "qarr.asks_for_code": features.asks_for_code,
        "qarr.prompt.tokens": features.tokens,
        "qarr.signals": list(features.signals),
        "qarr.language": features.language or None,
    }
    return _known(found)


def decision_attributes(decision: Decision) -> dict[str, Any]:
    """Return a decision."""
    query, chosen = decision.query, decision.chosen
    loss = chosen.expected_loss if chosen is not None else None
    decided = decision.tier is not None and decision.precision is not None
    return _known(
        {
            "qarr.reason": decision.reason,
            "qarr.basis": decision.basis.value,
            "qarr.degraded": list(decision.degraded),
            "qarr.class": query.features.prompt_class.value,
            "qarr.confidence": query.features.confidence,
            "qarr.prompt_tokens": query.prompt_tokens,
            "qarr.max_tokens": query.max_tokens,
            "qarr.fallbacks": list(decision.fallbacks),
            "qarr.tier": decision.tier if decided else None,
            "qarr.precision": decision.precision if decided else None,
            "qarr.refusal": decision.refusal.value if decision.refusal is not None else None,
            "qarr.hint": query.hint,
            "qarr.sla.ttft_ms": query.sla.ttft_ms,
            "qarr.sla.tpot_ms": query.sla.tpot_ms,
            "qarr.sla.max_quality_loss": query.sla.max_quality_loss,
            "qarr.truncated": query.truncated or None,
            "qarr.loss.expected": loss.mean if loss is not None else None,
            "qarr.cost": chosen.cost if chosen is not None else None,
        }
    )


def verdict_attributes(verdict: TierReport) -> dict[str, Any]:
    """Return the report on one tier."""
    loss = verdict.expected_loss
    found = {
        "verdict": verdict.verdict,
        "state": verdict.state.value,
        "predicted_ttft_ms": verdict.predicted_ttft_ms,
        "predicted_tpot_ms": verdict.predicted_tpot_ms,
        "expected_loss": loss.mean if loss is not None else None,
        "expected_loss_high": loss.high if loss is not None else None,
        "cost": verdict.cost,
        "cached_prompt_tokens": verdict.cached_prompt_tokens,
    }
    return {f"qarr.{verdict.tier}.{name}": value for name, value in _known(found).items()}


def outcome_attributes(record: RequestRecord) -> dict[str, Any]:
    """Return how a request ended."""
    return _known(
        {
            "qarr.outcome": record.outcome.value,
            "qarr.sla.met": record.sla_met,
            "error.type": record.error,
            "qarr.ttft_ms": record.ttft_ms,
            "qarr.tpot_ms": record.tpot_ms,
            "qarr.queue_ms": record.queue_ms,
            "qarr.overhead_ms": record.overhead_ms,
            "qarr.served.precision": record.precision,
            "qarr.served.checkpoint": record.checkpoint,
            "qarr.overflow": record.overflow,
            "qarr.overflow.failure": record.overflow_failure,
            "qarr.prompt_tokens": record.prompt_tokens,
            "qarr.cached_prompt_tokens": record.predicted_cached_tokens,
            "qarr.reported_cached_tokens": record.cached_prompt_tokens,
            "qarr.output_tokens": record.output_tokens,  # not gen_ai.usage: viewers would add them to the attempts'
        }
    )


def served_attributes(tier: str, replica_id: str, attempts_failed: int) -> dict[str, Any]:
    """Return who served a request."""
    return {"qarr.served.tier": tier, "qarr.served.replica": replica_id, "qarr.attempts.failed": attempts_failed}


def hop_attributes(hop: Hop) -> dict[str, Any]:
    """Return what is known of a request to an engine when it is sent."""
    where = urlsplit(hop.url)
    attributes = {
        "gen_ai.operation.name": hop.operation,
        "gen_ai.request.model": hop.model,
        "gen_ai.output.type": "text",
        "server.address": where.hostname or "",
        "server.port": where.port or (443 if where.scheme == "https" else 80),
    }
    if hop.tier is None:
        return {**attributes, "qarr.overflow": hop.overflow}
    return {
        **attributes,
        "gen_ai.provider.name": "vllm",
        "qarr.tier": hop.tier,
        "qarr.precision": hop.precision,
        "qarr.checkpoint": hop.checkpoint,
        "qarr.replica": hop.replica,
        "qarr.attempt": hop.number,
    }


def _known(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None}
