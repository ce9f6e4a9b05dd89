"""The fleets of ``qarr plan``: the cheapest for a load, each precision alone, the settings' own, and their largest loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.cli.plan_as_set import fleet_as_set, largest_as_set
from router.cli.plan_engines import available_by_name, engines_with_speed
from router.cli.plan_inputs import PlanInputs
from router.cli.plan_load import load_of
from router.cli.plan_notes import note_on_shared_gpus
from router.cli.plan_result import AS_SET, PLANNED, FleetAsSet, FleetPlan, alone_name
from router.policy.decide import scarcity_at
from router.policy.decision import latest_unnoticed_ms
from router.settings import Settings
from tiers.sizing.fleet import DailyLoad, EngineType, PlannedFleet, alone
from tiers.sizing.largest import (
    LargestLoad,
    largest_alone,
    largest_planned,
    shown_load,
)
from tiers.sizing.operation import Policy, cheapest_in_operation, in_operation
from tiers.sizing.verdict import missing_for, verdict_on
from tiers.spec import TierName

# Percent of the largest load for which fleets are planned if no load is given.
SHARE_PERCENT = 80.0


def router_policy(settings: Settings) -> Policy:
    """Return how the router of these settings chooses a tier."""
    objective = settings.policy.objective
    negligible_loss = settings.policy.negligible_loss

    def allowed_loss(loss_budget: float, taken_share: float) -> float:
        spendable = max(loss_budget - negligible_loss, 0.0)
        return negligible_loss + scarcity_at(objective, taken_share) * spendable

    if objective == "best":
        return Policy(allowed_loss, latest_unnoticed_ms)
    return Policy(allowed_loss, None)


@dataclass(frozen=True, slots=True)
class FleetSearch:
    """Adds fleets to a plan that has engines so far.

    Attributes:
        policy: The router's, by which fleets are used.
        set_engines: The engines as the settings have them; None: the settings name none for these GPUs.
    """

    inputs: PlanInputs
    policy: Policy
    set_engines: Sequence[EngineType] | None

    def for_share(self, fleet_plan: FleetPlan, load: DailyLoad) -> FleetPlan:
        """Add the largest load of each fleet, and the fleets for a share of the planned fleet's largest load.

        Args:
            fleet_plan: With a number of each kind of GPU.
            load: Requests as they are asked for; how many there are does not count.
        """
        planned = self._largest_planned(fleet_plan, load)
        fleet_plan = replace(
            fleet_plan, largest=self._largest_loads(fleet_plan, load, planned)
        )
        if planned is None:
            verdict = missing_for(
                engines_with_speed(fleet_plan.engines),
                load,
                available_by_name(fleet_plan.gpus),
                sufficient=None,
            )
            return replace(fleet_plan, as_set=self._as_set(load), verdict=verdict)
        options = self.inputs.options
        share_percent = options.share_percent
        if share_percent is None:
            share_percent = SHARE_PERCENT
        share = share_percent / 100
        rate = shown_load(share * planned.requests_per_s)
        planned_load = load_of(options, self.inputs.target, rate)
        return self.for_load(replace(fleet_plan, share=share), planned_load)

    def for_load(self, fleet_plan: FleetPlan, load: DailyLoad) -> FleetPlan:
        """Add the fleets for a load."""
        available = available_by_name(fleet_plan.gpus)
        alone_fleets: dict[TierName, PlannedFleet | None] = {}
        for tier, alone_fleet in alone(fleet_plan.engines, load, available).items():
            alone_fleets[tier] = None
            if alone_fleet is not None:
                alone_fleets[tier] = self._in_operation(alone_fleet, load)
        best_fleet = cheapest_in_operation(
            fleet_plan.engines,
            load,
            available,
            demand=self.inputs.demand,
            policy=self.policy,
        )
        if best_fleet is None:
            verdict = self._why_no_fleet(fleet_plan, load)
        else:
            verdict = verdict_on(
                best_fleet,
                alone_fleets,
                load,
                currency=fleet_plan.currency,
                formats=self.inputs.target.formats,
            )
        fleet_as_is = self._as_set(load)
        if fleet_as_is is not None and fleet_as_is.fleet is not None:
            fleet_in_operation = self._as_set_in_operation(fleet_as_is.fleet, load)
            fleet_as_is = replace(fleet_as_is, fleet=fleet_in_operation)
        return replace(
            fleet_plan,
            load=load,
            best=best_fleet,
            alone=alone_fleets,
            as_set=fleet_as_is,
            notes=[*fleet_plan.notes, *note_on_shared_gpus(fleet_as_is, available)],
            verdict=verdict,
        )

    def _in_operation(self, fleet: PlannedFleet, load: DailyLoad) -> PlannedFleet:
        return in_operation(fleet, load, self.inputs.demand, policy=self.policy)

    def _as_set(self, load: DailyLoad) -> FleetAsSet | None:
        if self.set_engines is None:
            return None
        return fleet_as_set(self.inputs.settings, self.set_engines, load)

    def _as_set_in_operation(
        self, fleet: PlannedFleet, load: DailyLoad
    ) -> PlannedFleet:
        """Return what the router makes of the engines as set; a loss budget that is a number is the settings' own."""
        budget = self.inputs.settings.policy.loss_budget
        if isinstance(budget, float):
            fleet = replace(fleet, loss_budget=budget)
        return self._in_operation(fleet, load)

    def _largest_planned(
        self, fleet_plan: FleetPlan, load: DailyLoad
    ) -> LargestLoad | None:
        """Return the largest load of any mix of precisions on the GPUs whose number is known."""
        return largest_planned(
            fleet_plan.engines,
            load,
            _counted_by_name(fleet_plan),
            demand=self.inputs.demand,
            policy=self.policy,
        )

    def _largest_loads(
        self, fleet_plan: FleetPlan, load: DailyLoad, planned: LargestLoad | None
    ) -> dict[str, LargestLoad | None]:
        """Return the largest load of each fleet by its name."""
        available = _counted_by_name(fleet_plan)
        largest: dict[str, LargestLoad | None] = {PLANNED: planned}
        largest_by_tier = largest_alone(fleet_plan.engines, load, available)
        for tier in self.inputs.target.formats:
            largest[alone_name(tier)] = largest_by_tier[tier]
        if self.set_engines is not None:
            largest[AS_SET] = largest_as_set(
                self.inputs.settings, self.set_engines, load
            )
        return largest

    def _why_no_fleet(self, fleet_plan: FleetPlan, load: DailyLoad) -> str:
        """Return, for people, why no fleet carries a load, and what would."""
        available = available_by_name(fleet_plan.gpus)
        on_any_number_of_gpus = cheapest_in_operation(
            fleet_plan.engines,
            load,
            dict.fromkeys(available),
            demand=self.inputs.demand,
            policy=self.policy,
        )
        why = missing_for(
            engines_with_speed(fleet_plan.engines),
            load,
            available,
            sufficient=on_any_number_of_gpus,
        )
        if on_any_number_of_gpus is None or None in available.values():
            return why
        largest = self._largest_planned(fleet_plan, load)
        if largest is None:
            return why
        peak = shown_load(largest.requests_per_s * load.peak_per_s / load.mean_per_s)
        return f"{why} These GPUs carry at most {peak:g} a second at the peak within the loss budget."


def _counted_by_name(fleet_plan: FleetPlan) -> dict[str, int]:
    """Return how many GPUs there are of each kind whose number is known."""
    return {
        gpu.name: count for gpu, count in fleet_plan.gpus.items() if count is not None
    }
