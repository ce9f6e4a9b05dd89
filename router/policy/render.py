"""Decisions, reports and features as JSON values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from classifier import PromptFeatures
    from router.policy.decision import Decision, TierReport


def render_verdict(verdict: TierReport) -> dict[str, Any]:
    """Return the report on one tier."""
    loss = verdict.expected_loss
    return {
        "tier": verdict.tier,
        "state": verdict.state.value,
        "predicted_ttft_ms": verdict.predicted_ttft_ms,
        "predicted_tpot_ms": verdict.predicted_tpot_ms,
        "expected_loss": loss.mean if loss else None,
        "expected_loss_interval": [loss.low, loss.high] if loss else None,
        "cost": verdict.cost,
        "verdict": verdict.verdict,
    }


def render_decision(decision: Decision) -> dict[str, Any]:
    """Return a decision as ``POST /route`` answers it."""
    query = decision.query
    return {
        "tier": decision.tier,
        "precision": decision.precision,
        "reason": decision.reason,
        "confidence": round(query.features.confidence, 3),
        "class": query.features.prompt_class.value,
        "prompt_tokens": query.prompt_tokens,
        "max_tokens": query.max_tokens,
        "features": render_features(query.features),
        "fallbacks": list(decision.fallbacks),
        "degraded": list(decision.degraded),
        "retry_after_s": decision.retry_after_s,
        "tiers": [render_verdict(v) for v in decision.verdicts],
    }


def render_features(features: PromptFeatures) -> dict[str, Any]:
    """Return the classifier's findings."""
    return {
        "class": features.prompt_class.value,
        "confidence": round(features.confidence, 3),
        "contains_code": features.contains_code,
        "asks_for_code": features.asks_for_code,
        "language": features.language,
        "tokens": features.tokens,
        "tokens_exact": features.tokens_exact,
        "words": features.words,
        "chars": features.chars,
        "signals": list(features.signals),
    }
