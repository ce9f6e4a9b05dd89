"""Made-up profiles for a router in front of fake engines, and its taking them up."""

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
# Seconds before the first token, and for each token. In proportion as measured on a GPU; slower, to be seen.
SPEEDS = {FAST: (0.25, 0.021), BALANCED: (0.4, 0.03), PRECISE: (0.7, 0.046)}
# Of 40 moderate tasks that BF16 or the tier gets right, by class: those that fast and balanced get worse.
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


def quality(identities: dict[TierName, str | None]) -> QualityProfile:
    counts = tuple(
        AnswerCount(
            prompt_class=kind, complexity=Complexity.MODERATE, tier=tier, asked=50, right=40, answered=50, worse=worse,
            better=0, both=40 - worse,
        )
        for kind, each in WORSE.items() for tier, worse in zip((FAST, BALANCED), each, strict=True)
    )  # fmt: skip
    return QualityProfile(
        created=datetime.now(UTC),
        model="fake",
        checkpoints=identities,
        tasks="made up",
        counts=counts,
    )


def speed(
    identities: dict[TierName, str | None],
    machine: str,
    speeds: Mapping[TierName, tuple[float, float]],
) -> LatencyProfile:
    error = FitError(median=0.05, p95=0.2)
    fits = tuple(
        Fit(
            tier=tier, ttft_base_ms=1000 * (first_s + token_s), prefill_ms_per_token=0.05, ttft_steps=0.5,
            step_base_ms=1000 * token_s, step_ms_per_sequence=0.1, step_knee=0, step_ms_beyond_knee=0, contention=0,
            ttft_spread=0.3, tpot_spread=0.1, ttft_error=error, tpot_error=error, samples=100,
        )
        for tier, (first_s, token_s) in speeds.items()
    )  # fmt: skip
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
