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
from tiers.sizing.tier_format import TierFormat
from tiers.spec import TierName
from tiers.speed import SpeedModel

PromptKind = tuple[PromptClass, Complexity]
PLANNED = "planned"
AS_SET = "as set"
DOES_NOT_CARRY = "does not carry it"
# What the speed of engines is called where it is computed from the figures of their GPUs.
ROOFLINE = "roofline"


def alone_name(tier: str) -> str:
    """Return the name of the fleet that has one tier only."""
    return f"{tier} alone"


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """What is planned: a model, where its engines run, and how fast and how lossy they are.

    Attributes:
        name: Of the model.
        gpus: How many there are of each kind; None: as many as needed. Empty: engines run on this machine's processor.
        formats: Of each tier that is planned.
        reference: What losses count against: the model as it is published.
        speed: Where speeds are from, for people; None: they are not known.
        paces: Measured speeds.
        weights: Bytes of each finished checkpoint as an engine holds it.
        answers: Measured losses; empty: published losses count.
        notes: What of the input does not enter the plan, or enters it in a way that must be said.
    """

    name: str
    model: Architecture
    gpus: Mapping[GpuKind, int | None]
    formats: Mapping[TierName, TierFormat]
    reference: TierFormat
    speed: str | None
    paces: Mapping[TierName, SpeedModel]
    weights: Mapping[TierName, int]
    answers: Mapping[TierName, Sequence[AnswerCount]]
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class FleetAsSet:
    """What the engines that the settings name do.

    Attributes:
        fleet: None: they do not carry the load.
        obstacle: Why there is no fleet, for people.
    """

    fleet: PlannedFleet | None
    obstacle: str = DOES_NOT_CARRY


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What was found.

    Attributes:
        engines: The engines that fit.
        gpus: With the numbers that are planned for.
        notes: What must be said beside the figures.
        ignored: Settings that do not enter.
        load: What the fleets are planned for; None: speeds are unknown, or nothing keeps the loss budget.
        share: The planned-for share of the largest load; None: the load was given.
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
    as_set: FleetAsSet | None = None
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All that is shown: the plan, and what was planned for."""

    target: PlanTarget
    demand: ServingDemand
    plan: FleetPlan
