"""Profiles with given losses and speeds, for tests of what is done with them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from classifier import PromptClass
from router.policy.profiles import (
    Fit,
    FitError,
    Interval,
    LatencyProfile,
    Loss,
    QualityProfile,
    Sample,
)
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Mapping

Identities = dict[TierName, str | None]
AT = datetime(2026, 1, 2, tzinfo=UTC)
IDENTITIES: Identities = {tier: f"digest of {tier}" for tier in STANDARD_TIERS}


def loss(tier: TierName, mean: float, kind: PromptClass = PromptClass.CHAT, prompts: int = 40) -> Loss:
    """Return a loss whose interval is a tenth of its mean to either side."""
    share = Interval(mean=mean, low=mean * 0.9, high=mean * 1.1)
    return Loss(
        prompt_class=kind, tier=tier, prompts=prompts, tokens=100, top1_disagreement=share, kl_mean=share, kl_p95=share,
        perplexity_ratio=share, first_divergence=1.0, never_diverged=0.0,
    )  # fmt: skip


def quality(
    *losses: Loss,
    identities: Identities = IDENTITIES,
) -> QualityProfile:
    """Return a quality profile."""
    return QualityProfile(
        created=AT, model="m", checkpoints=identities, answer_tokens=8, top_k=10, prompts="p", losses=losses,
    )  # fmt: skip


def fit(tier: TierName, step_ms: float, spread: float = 0.2) -> Fit:
    """Return a fit with a given time for each token."""
    none = FitError(median=0, p95=0)
    return Fit(
        tier=tier, ttft_base_ms=1, prefill_ms_per_token=2, ttft_steps=3, step_base_ms=step_ms, step_ms_per_sequence=4,
        step_knee=5, step_ms_beyond_knee=6, contention=7, ttft_spread=spread, tpot_spread=spread, ttft_error=none,
        tpot_error=none, samples=9,
    )  # fmt: skip


def latency(
    speeds: Mapping[TierName, float], identities: Identities = IDENTITIES, machine: str = "big"
) -> LatencyProfile:
    """Return a latency profile with one sample a tier."""
    samples = tuple(
        Sample(
            tier=tier, prompt_tokens=1, sequences=0, waiting_tokens=0, batch=1, neighbours=0, ttft_ms=ms, tpot_ms=ms
        )
        for tier, ms in speeds.items()
    )  # fmt: skip
    fits = tuple(fit(tier, ms) for tier, ms in speeds.items())
    return LatencyProfile(created=AT, model="m", machine=machine, checkpoints=identities, fits=fits, samples=samples)
