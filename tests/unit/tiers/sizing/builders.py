"""Engines with known rates or paces, loads of two kinds of prompt, and the router's policy."""

from __future__ import annotations

from dataclasses import dataclass

from classifier import PromptClass
from router.policy.decide import scarcity_at
from router.policy.decision import latest_unnoticed_ms
from tiers.sizing.capacity import MAX_BUSY_SHARE, EnginePlan, Pace, ServingDemand
from tiers.sizing.fleet import DailyLoad, EngineType
from tiers.sizing.operation import Policy
from tiers.spec import STANDARD_TIERS, TierName
from tiers.speed import SpeedModel

FAST, BALANCED, PRECISE = STANDARD_TIERS
SHORT_PROMPTS = ServingDemand(prompt_tokens=20, output_tokens=100, context=120)
NEGLIGIBLE_LOSS = 0.005
EASY_AND_HARD_LOSS = {
    FAST: {"easy": 0.0, "hard": 0.1},
    BALANCED: {"easy": 0.0, "hard": 0.01},
    PRECISE: {"easy": 0.0, "hard": 0.0},
}
FAST_LOSS = {kind: 0.004 * number for number, kind in enumerate(PromptClass)}
LOSS_BY_CLASS = {
    FAST: FAST_LOSS,
    BALANCED: {kind: loss * 0.3 for kind, loss in FAST_LOSS.items()},
    PRECISE: dict.fromkeys(FAST_LOSS, 0.0),
}


@dataclass(frozen=True)
class SteadyPace:
    """Takes 0.1 ms for each prompt token, and 20 ms for each step."""

    prefill_ms_per_token: float = 0.1

    def step_ms(self, sequences: int) -> float:
        return 20.0

    def prompt_ms(self, tokens: int, _sequences: int, /) -> float:
        return self.prefill_ms_per_token * tokens


def engine_plan(
    tier: TierName,
    *,
    requests_per_s: float,
    batch: int = 1,
    gpus: int = 1,
    pace: Pace | None = None,
) -> EnginePlan:
    """Return a plan in which only rate, batch, GPUs and pace matter."""
    return EnginePlan(
        tier=tier,
        precision="p",
        weights_bytes=1,
        kv_bytes_per_token=1,
        kv_bytes_per_sequence=1,
        gpus_per_replica=gpus,
        max_sequences=batch,
        batch=batch,
        ttft_ms=1.0,
        tpot_ms=1.0,
        requests_per_s=requests_per_s,
        tokens_per_s=requests_per_s * 100,
        pace=pace,
    )


def rated_engine(
    tier: TierName, rate: float, *, price: float = 1, gpu: str = "H100", gpus: int = 1
) -> EngineType:
    """Return an engine that serves ``rate`` requests a second, as busy as planned."""
    plan = engine_plan(tier, requests_per_s=rate / MAX_BUSY_SHARE, gpus=gpus)
    return EngineType(gpu, plan, price=price)


def paced_engine(
    tier: TierName, step_ms: float, *, batch: int = 16, gpu: str = "H100"
) -> EngineType:
    """Return an engine of which a step takes ``step_ms``, and half a millisecond more for each sequence."""
    pace = SpeedModel(
        ttft_base_ms=1.0,
        prefill_ms_per_token=0.1,
        step_base_ms=step_ms,
        step_ms_per_sequence=0.5,
        profiled=True,
    )
    answers_ms = 100 * (pace.step_ms(batch) + batch * 0.02)
    rate = 1000 * batch / answers_ms
    plan = engine_plan(tier, requests_per_s=rate, batch=batch, pace=pace)
    return EngineType(gpu, plan, price=1.0)


def paced_engines(gpu: str = "H100") -> list[EngineType]:
    """Return an engine of each tier; lower precisions are faster."""
    return [
        paced_engine(FAST, 10, gpu=gpu),
        paced_engine(BALANCED, 14, gpu=gpu),
        paced_engine(PRECISE, 20, gpu=gpu),
    ]


def rated_engines() -> list[EngineType]:
    """Return an engine of each tier, on one GPU at one price; lower precisions are faster."""
    return [
        rated_engine(FAST, 20),
        rated_engine(BALANCED, 12),
        rated_engine(PRECISE, 10),
    ]


def load_of(
    easy: float, hard: float, budget: float = 1.0, course: tuple[float, ...] = (1.0,)
) -> DailyLoad:
    """Return so many easy and hard requests a second."""
    return DailyLoad(
        per_s_by_kind={"easy": easy, "hard": hard},
        loss=EASY_AND_HARD_LOSS,
        course=course,
        budget=budget,
    )


def load_of_classes(
    per_s_by_class: dict[PromptClass, float],
    budget: float = 1.0,
    course: tuple[float, ...] = (1.0,),
) -> DailyLoad:
    """Return so many requests a second of each class."""
    return DailyLoad(
        per_s_by_kind=per_s_by_class,
        loss=LOSS_BY_CLASS,
        course=course,
        budget=budget,
    )


def _allowed_loss(budget: float, taken_share: float) -> float:
    surplus = max(budget - NEGLIGIBLE_LOSS, 0.0)
    return NEGLIGIBLE_LOSS + scarcity_at("best", taken_share) * surplus


ROUTER_POLICY = Policy(_allowed_loss, latest_unnoticed_ms)
