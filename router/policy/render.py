"""Decisions, reports, features and the loss budget as JSON values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiers.spec import TierName

if TYPE_CHECKING:
    from classifier import PromptFeatures
    from router.policy.decision import Decision, TierReport
    from router.policy.table import PolicyStore


def render_verdict(verdict: TierReport) -> dict[str, Any]:
    """Return the report on one tier."""
    loss = verdict.expected_loss
    return {
        "tier": verdict.tier,
        "state": verdict.state.value,
        "predicted_ttft_ms": verdict.predicted_ttft_ms,
        "predicted_tpot_ms": verdict.predicted_tpot_ms,
        "expected_loss": round(loss.mean, 5) if loss else None,
        "expected_loss_interval": [round(loss.low, 5), round(loss.high, 5)] if loss else None,
        "cost": verdict.cost,
        "cached_prompt_tokens": verdict.cached_prompt_tokens,
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
        "truncated": query.truncated or None,
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
        "complexity": features.complexity,
        "tokens": features.tokens,
        "tokens_exact": features.tokens_exact,
        "words": features.words,
        "chars": features.chars,
        "signals": list(features.signals),
    }


def render_budget(policy: PolicyStore, half_life_s: float) -> dict[str, Any]:
    """Return the loss budget as it is now.

    Args:
        policy: Holds it.
        half_life_s: Of the running mean.
    """
    state, rule = policy.budget.current(), policy.table.loss_budget
    return {
        "rule": {"like": rule} if isinstance(rule, TierName) else rule,
        "price": None if state.price is None else float(f"{state.price:.4g}"),
        "mean": None if state.mean is None else round(state.mean, 5),
        "budget": None if state.budget is None else round(state.budget, 5),
        "half_life_s": half_life_s,
    }
