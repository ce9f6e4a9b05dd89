"""What a plan is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from router.cli.plan_result import PlanTarget
from router.settings import Settings
from tiers.sizing.capacity import ServingDemand
from tiers.sizing.hardware import PRICES, GpuKind


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of ``qarr plan``, whose help says what they mean."""

    model: str | None = None
    gpus: str | None = None
    load: str | None = None
    share_percent: float | None = None
    day: str = "1"
    mix: str = "chat"
    lost_of_100: float | None = None
    prompt_tokens: int = 800
    output_tokens: int = 250
    context: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    max_num_seqs: int | None = None
    formats: str | None = None
    kv_cache: str = "auto"
    prices: Path = PRICES
    profile: Path | None = None


# The options of the command line have these defaults too.
DEFAULTS = PlanOptions()


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What engines and fleets are found from.

    Attributes:
        price_by_gpu: Of an hour; empty: GPUs, or machines, are counted.
    """

    settings: Settings
    options: PlanOptions
    target: PlanTarget
    demand: ServingDemand
    price_by_gpu: Mapping[GpuKind, float]
