"""What ``qarr plan`` finds: the values that its output, for people and for programs, is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from classifier import Complexity, PromptClass
from router.cli.plan_settings import IgnoredSetting
from router.policy.profiles import AnswerCount
from tiers.sizing.architecture import Architecture
from tiers.sizing.capacity import ServingDemand
from tiers.sizing.fleet import DailyLoad, EngineType, PlannedFleet
from tiers.sizing.hardware import GpuKind
from tiers.sizing.largest import LargestLoad
from tiers.spec import TierName
from tiers.speed import SpeedModel

Kind = tuple[PromptClass, Complexity]
PLANNED = "planned"
AS_SET = "as set"
DOES_NOT_CARRY = "does not carry it"


def alone_name(tier: TierName) -> str:
    """Return what the fleet of one precision is called."""
    return f"{tier} alone"


@dataclass(frozen=True, slots=True)
class Target:
    """What is planned: a model, where its engines run, and how fast and how lossy they are."""

    name: str
    model: Architecture
    gpus: Mapping[GpuKind, int | None]  # empty: this machine's processor
    speed: str | None  # where speeds are from, for people; None: they are not known
    paces: Mapping[TierName, SpeedModel]  # measured
    # of finished checkpoints as engines hold them, in bytes
    weights: Mapping[TierName, int]
    # measured; empty: losses are published ones
    answers: Mapping[TierName, Sequence[AnswerCount]]
    # what of the input does not enter the plan, or enters it in a way that must be said
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class AsSet:
    """What the engines that the settings name do.

    Attributes:
        fleet: None: they do not carry the load.
        obstacle: Why there is no fleet, for people.
    """

    fleet: PlannedFleet | None
    obstacle: str = DOES_NOT_CARRY


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found.

    Attributes:
        engines: The engines that fit.
        gpus: With the numbers that are planned for.
        notes: What must be said beside the figures.
        ignored: Settings that do not enter.
        load: What the fleets are planned for; None: speeds are unknown, or nothing keeps the loss budget.
        share: Of the largest load, that the fleets are planned for; None: the load was given.
        largest: The largest load of each fleet; empty: the load was given.
        currency: None: GPUs or machines are counted.
        prices: Where they are from, for people; None: none are known.
        best: The cheapest fleet; None: there is none.
        alone: The cheapest fleet of each precision alone.
        as_set: None: the settings name no engines for these GPUs.
        verdict: The plan in a sentence.
    """

    engines: Sequence[EngineType]
    gpus: Mapping[GpuKind, int | None]
    notes: Sequence[str]
    ignored: Sequence[IgnoredSetting]
    load: DailyLoad | None = None
    share: float | None = None
    largest: Mapping[str, LargestLoad | None] = field(default_factory=dict)
    currency: str | None = None
    prices: str | None = None
    best: PlannedFleet | None = None
    alone: Mapping[TierName, PlannedFleet | None] = field(default_factory=dict)
    as_set: AsSet | None = None
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All that is shown: the plan, and what it is of."""

    target: Target
    demand: ServingDemand
    plan: Plan
