"""Profiles with given losses and speeds, for tests of what is done with them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.profiles import (
    AnswerCount,
    Fit,
    FitError,
    LatencyProfile,
    ModeCounts,
    QualityProfile,
    SpeedSample,
)
from tiers.spec import STANDARD_TIERS, TierName
from tiers.verification.thinking import ThinkingMode

if TYPE_CHECKING:
    from collections.abc import Mapping

Identities = dict[TierName, str | None]
AT = datetime(2026, 1, 2, tzinfo=UTC)
IDENTITIES: Identities = {tier: f"digest of {tier}" for tier in STANDARD_TIERS}


def counted(
    tier: TierName,
    worse: int,
    better: int = 0,
    kind: PromptClass = PromptClass.CHAT,
    complexity: Complexity = Complexity.MODERATE,
    *,
    of: int = 40,
) -> AnswerCount:
    """Return counts of answers that either the tier or the reference gets right, and some that neither does."""
    return AnswerCount(
        prompt_class=kind, complexity=complexity, tier=tier, asked=of + 10, right=of - better, answered=of + 10,
        worse=worse, better=better, both=of - worse - better,
    )  # fmt: skip


def cut_counted(
    tier: TierName,
    cut: int,
    kind: PromptClass = PromptClass.CHAT,
    complexity: Complexity = Complexity.MODERATE,
) -> AnswerCount:
    """Return counts of a kind of which every answer was cut while thinking."""
    return AnswerCount(
        prompt_class=kind, complexity=complexity, tier=tier, asked=0, right=0, answered=0, worse=0, better=0, both=0, cut=cut
    )  # fmt: skip


def quality(
    *counts: AnswerCount,
    identities: Identities = IDENTITIES,
    whole: bool = True,
    mode: ThinkingMode | None = None,
    think_tokens: int = 0,
    other_mode: ModeCounts | None = None,
) -> QualityProfile:
    return QualityProfile(
        created=AT,
        model="m",
        checkpoints=identities,
        tasks="made",
        counts=counts,
        whole=whole,
        mode=mode,
        think_tokens=think_tokens,
        other_mode=other_mode,
    )


def fit(tier: TierName, step_ms: float, spread: float = 0.2) -> Fit:
    none = FitError(median=0, p95=0)
    return Fit(
        tier=tier, ttft_base_ms=1, prefill_ms_per_token=2, ttft_steps=3, step_base_ms=step_ms, step_ms_per_sequence=4,
        step_knee=5, step_ms_beyond_knee=6, contention=7, ttft_spread=spread, tpot_spread=spread, ttft_error=none,
        tpot_error=none, samples=9,
    )  # fmt: skip


def latency(
    speeds: Mapping[TierName, float],
    identities: Identities = IDENTITIES,
    machine: str = "big",
) -> LatencyProfile:
    samples = tuple(
        SpeedSample(
            tier=tier, prompt_tokens=1, sequences=0, waiting_tokens=0, batch=1, neighbours=0, ttft_ms=ms, tpot_ms=ms
        )
        for tier, ms in speeds.items()
    )  # fmt: skip
    fits = tuple(fit(tier, ms) for tier, ms in speeds.items())
    return LatencyProfile(
        created=AT,
        model="m",
        machine=machine,
        checkpoints=identities,
        fits=fits,
        samples=samples,
    )
