"""Decisions, reports, features and the loss budget as JSON values."""

from __future__ import annotations

from typing import Any

from classifier import PromptFeatures
from router.policy.decide import fallbacks
from router.policy.decision import Decision, TierEstimate
from router.policy.explain import verdict
from router.policy.losses import ExpectedLoss
from router.policy.table import PolicyStore
from tiers.spec import TierName


def render_estimates(decision: Decision) -> list[dict[str, Any]]:
    comparison = decision.comparison
    return [
        _render_estimate(estimate, verdict(comparison, estimate))
        for estimate in comparison.estimates
    ]


def _render_estimate(estimate: TierEstimate, verdict_text: str) -> dict[str, Any]:
    loss = render_loss(estimate.quality.loss)
    return {
        "tier": estimate.tier,
        "state": estimate.state.value,
        "predicted_ttft_ms": estimate.predicted_ttft_ms,
        "predicted_tpot_ms": estimate.predicted_tpot_ms,
        "expected_loss": loss["mean"],
        "expected_loss_interval": [loss["low"], loss["high"]],
        "loss_answers": loss["answers"],
        "loss_source": loss["source"],
        "cost": estimate.rounded_cost,
        "cached_prompt_tokens": estimate.cached_tokens,
        "verdict": verdict_text,
    }


def render_loss(loss: ExpectedLoss) -> dict[str, Any]:
    return {
        "mean": round(loss.mean, 5),
        "low": round(loss.low, 5),
        "high": round(loss.stated_high, 5),
        "answers": loss.answers,
        "source": loss.source.value,
    }


def render_decision(decision: Decision) -> dict[str, Any]:
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
        "fallbacks": list(fallbacks(decision)),
        "degraded": list(decision.degraded),
        "retry_after_s": decision.retry_after_s,
        "tiers": render_estimates(decision),
    }


def render_features(features: PromptFeatures) -> dict[str, Any]:
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


def render_budget(policy: PolicyStore) -> dict[str, Any]:
    tally = policy.tally
    loss_budget = policy.table.loss_budget
    rule = {"like": loss_budget} if isinstance(loss_budget, TierName) else loss_budget
    mean = None
    budget = None
    saved = None
    if tally.answers:
        mean = round(tally.lost / tally.answers, 5)
        budget = round(tally.allowed / tally.answers, 5)
    if tally.highest:
        saved = round(1 - tally.spent / tally.highest, 4)
    return {
        "rule": rule,
        "answers": tally.answers,
        "mean": mean,
        "budget": budget,
        "saved": saved,
    }
