"""Made-up profiles for a router in front of fake engines, and its taking them up."""

from __future__ import annotations

import asyncio
import re
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
    latency_name,
    profile_name,
)
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.router_stack import Stack

FAST, BALANCED, PRECISE = STANDARD_TIERS
# Seconds before the first token, and for each token. In proportion as measured on a GPU; slower, to be seen.
SPEEDS = {FAST: (0.25, 0.021), BALANCED: (0.4, 0.03), PRECISE: (0.7, 0.046)}
# Share of tokens that differ from BF16's first choice, by class: mean on fast and on balanced.
LOSSES = {
    PromptClass.CHAT: (0.081, 0.016),
    PromptClass.WRITING: (0.094, 0.018),
    PromptClass.EXTRACTION: (0.047, 0.012),
    PromptClass.MULTILINGUAL: (0.118, 0.024),
    PromptClass.LONG_CONTEXT: (0.072, 0.015),
    PromptClass.CODE: (0.141, 0.031),
    PromptClass.MATH: (0.168, 0.058),
}
TEXT = (
    "Paris is the capital of France, and has been for most of its history. It lies on the Seine, in the north of the "
    "country, and about two million people live within its limits; many more live around it. "
)
ANSWER = tuple(re.findall(r"\S+ ", TEXT * 12))


def interval(mean: float, width: float) -> Interval:
    """Return an interval around a mean."""
    return Interval(mean=mean, low=max(0.0, mean * (1 - width)), high=mean * (1 + width * 1.1))


def quality(identities: dict[TierName, str | None]) -> QualityProfile:
    """Return what these engines are to lose."""
    losses = tuple(
        Loss(
            prompt_class=kind, tier=tier, prompts=40, tokens=2400, top1_disagreement=interval(mean, 0.22),
            kl_mean=interval(mean, 0.2), kl_p95=interval(mean, 0.2), perplexity_ratio=interval(1, 0.1),
            first_divergence=30, never_diverged=0.1,
        )
        for kind, means in LOSSES.items() for tier, mean in zip((FAST, BALANCED), means, strict=True)
    )  # fmt: skip
    return QualityProfile(
        created=datetime.now(UTC), model="fake", checkpoints=identities, answer_tokens=64, top_k=10, prompts="made up",
        losses=losses,
    )  # fmt: skip


def speed(identities: dict[TierName, str | None], machine: str) -> LatencyProfile:
    """Return how fast these engines are to be."""
    error = FitError(median=0.05, p95=0.2)
    fits = tuple(
        Fit(
            tier=tier, ttft_base_ms=1000 * (first_s + token_s), prefill_ms_per_token=0.05, ttft_steps=0.5,
            step_base_ms=1000 * token_s, step_ms_per_sequence=0.1, step_knee=0, step_ms_beyond_knee=0, contention=0,
            ttft_spread=0.3, tpot_spread=0.1, ttft_error=error, tpot_error=error, samples=100,
        )
        for tier, (first_s, token_s) in SPEEDS.items()
    )  # fmt: skip
    return LatencyProfile(
        created=datetime.now(UTC), model="fake", machine=machine, checkpoints=identities, fits=fits, samples=()
    )


async def measured(stack: Stack, folder: Path) -> None:
    """Let the router take up made-up profiles."""
    identities = {spec.name: spec.identity for spec in stack.fleet.specs}
    (folder / profile_name(identities)).write_text(quality(identities).model_dump_json())
    machine = stack.fleet.machine
    (folder / latency_name(identities, machine)).write_text(speed(identities, machine).model_dump_json())
    while not (await stack.client.get(f"{stack.url}/policy")).json()["losses"]:
        await asyncio.sleep(0.1)
