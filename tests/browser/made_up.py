"""Made-up profiles for a router in front of fake engines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.profiles import (
    AnswerCount,
    Fit,
    FitError,
    LatencyProfile,
    QualityProfile,
    latency_name,
    profile_name,
)
from tests.unit.router_stack import Stack
from tests.waiting import until
from tiers.spec import STANDARD_TIERS, TierName

FAST, BALANCED, PRECISE = STANDARD_TIERS
# Seconds before the first token, and for each token: in proportion as on a GPU, but slow enough to be seen.
SPEEDS = {FAST: (0.25, 0.021), BALANCED: (0.4, 0.03), PRECISE: (0.7, 0.046)}
# Of 40 moderate tasks of a class that BF16 or the tier gets right, fast and balanced get so many worse.
WORSE = {
    PromptClass.CHAT: (1, 0),
    PromptClass.WRITING: (1, 0),
    PromptClass.EXTRACTION: (1, 0),
    PromptClass.MULTILINGUAL: (3, 1),
    PromptClass.LONG_CONTEXT: (3, 0),
    PromptClass.CODE: (4, 0),
    PromptClass.MATH: (6, 1),
}
TEXT = (
    "Paris is the capital of France, and has been for most of its history. It lies on the Seine, in the north of the "
    "country, and about two million people live within its limits; many more live around it. "
)
ANSWER = tuple(re.findall(r"\S+ ", TEXT * 12))


def answer_count(kind: PromptClass, tier: TierName, worse: int) -> AnswerCount:
    return AnswerCount(
        prompt_class=kind,
        complexity=Complexity.MODERATE,
        tier=tier,
        asked=50,
        right=40,
        answered=50,
        worse=worse,
        better=0,
        both=40 - worse,
    )


def quality(identities: dict[TierName, str | None]) -> QualityProfile:
    counts = []
    for kind, (fast_worse, balanced_worse) in WORSE.items():
        counts.append(answer_count(kind, FAST, fast_worse))
        counts.append(answer_count(kind, BALANCED, balanced_worse))
    return QualityProfile(
        created=datetime.now(UTC),
        model="fake",
        checkpoints=identities,
        tasks="made up",
        counts=tuple(counts),
    )


def speed(
    identities: dict[TierName, str | None],
    machine: str,
    speeds: Mapping[TierName, tuple[float, float]],
) -> LatencyProfile:
    error = FitError(median=0.05, p95=0.2)
    fits = tuple(
        Fit(
            tier=tier,
            ttft_base_ms=1000 * (first_s + token_s),
            prefill_ms_per_token=0.05,
            ttft_steps=0.5,
            step_base_ms=1000 * token_s,
            step_ms_per_sequence=0.1,
            step_knee=0,
            step_ms_beyond_knee=0,
            contention=0,
            ttft_spread=0.3,
            tpot_spread=0.1,
            ttft_error=error,
            tpot_error=error,
            samples=100,
        )
        for tier, (first_s, token_s) in speeds.items()
    )
    return LatencyProfile(
        created=datetime.now(UTC),
        model="fake",
        machine=machine,
        checkpoints=identities,
        fits=fits,
        samples=(),
    )


async def measured(
    stack: Stack,
    folder: Path,
    speeds: Mapping[TierName, tuple[float, float]] = MappingProxyType(SPEEDS),
) -> None:
    """Write profiles into a router's folder, and wait until it has read them."""
    identities = {spec.name: spec.identity for spec in stack.fleet.specs}
    (folder / profile_name(identities)).write_text(
        quality(identities).model_dump_json()
    )
    machine = stack.fleet.machine
    (folder / latency_name(identities, machine)).write_text(
        speed(identities, machine, speeds).model_dump_json()
    )

    async def answers() -> int:
        losses = (await stack.client.get(f"{stack.url}/policy")).json()["losses"]
        measured_answers: int = losses[FAST]["chat"]["moderate"]["answers"]
        return measured_answers

    await until(answers, "the router to read the quality profile")
