"""A fleet under the router's policy: by hand, and against the router's own decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classifier import PromptClass
from router.policy.decide import decide
from router.policy.decision import PolicyParameters
from tests.unit.policy.fleets import fleet as snapshot
from tests.unit.policy.fleets import losing, query
from tests.unit.tiers.sizing.builders import (
    BALANCED,
    FAST,
    LOSS_BY_CLASS,
    PRECISE,
    ROUTER_POLICY,
    SHORT_PROMPTS,
    SteadyPace,
    engine_plan,
    load_of_classes,
    paced_engine,
    paced_engines,
)
from tiers.sizing.fleet import DailyLoad, EngineType, PlannedFleet
from tiers.sizing.operation import (
    _Chain,
    _make_station,
    cheapest_in_operation,
    in_operation,
)
from tiers.spec import STANDARD_TIERS, TierName
from tiers.speed import ReplicaLoad

# the plan's mixes have no small talk
WORK = [kind for kind in PromptClass if kind is not PromptClass.SMALL_TALK]


def test_one_engine_by_hand() -> None:
    """Prompts of 2 ms, 100 steps of 20 ms at any batch: ten a second are 20 sequences, each with 0.2 ms a token of others."""
    plan = engine_plan(PRECISE, requests_per_s=90, batch=200, pace=SteadyPace())
    planned = PlannedFleet(
        counts=((EngineType("H100", plan, price=1.0), 1),),
        price=1,
        lost_share=0.0,
        share_by_flow={("", PRECISE): 1.0},
    )
    load = DailyLoad({"": 10.0}, {PRECISE: {"": 0.0}})
    fleet = in_operation(planned, load, SHORT_PROMPTS, policy=ROUTER_POLICY)
    assert fleet.tpot_ms == pytest.approx(20 + 20 * 2 / 100, rel=0.1)
    assert fleet.ttft_ms == pytest.approx(30 + 2 / (1 - 0.02), rel=0.1)


@given(
    st.tuples(*[st.integers(0, 16)] * 3),
    st.sampled_from(WORK),
    st.sampled_from([0.0, 0.01, 0.05]),
)
def test_the_plan_chooses_as_the_router_does(
    sequences: tuple[int, ...], kind: PromptClass, budget: float
) -> None:
    sequences_of_tier = dict(zip(STANDARD_TIERS, sequences, strict=True))
    planned_tier = tier_in_simulation(sequences_of_tier, kind, budget)
    fleet_now = snapshot(
        None,
        {engine.tier: engine.plan.pace for engine in paced_engines()},
        loads={tier: ReplicaLoad(count) for tier, count in sequences_of_tier.items()},
        limit=16,
    )
    parameters = PolicyParameters(
        losing(dict(LOSS_BY_CLASS[FAST]), dict(LOSS_BY_CLASS[BALANCED])),
        objective="best",
        loss_budget=budget,
    )
    assert planned_tier is decide(query(kind), fleet_now, parameters).tier


def tier_in_simulation(
    sequences_of_tier: dict[TierName, int], kind: PromptClass, budget: float
) -> TierName | None:
    """Return the tier to which the simulation sends a request while its tiers have so many; None: the request waits."""
    stations = [_make_station(engine, 1, SHORT_PROMPTS) for engine in paced_engines()]
    for station in stations:
        station.sequences = sequences_of_tier[station.engine.tier]
    load = load_of_classes({kind: 1.0})
    chain = _Chain(budget, load, stations, policy=ROUTER_POLICY)
    chain.arrive(kind)
    for station in stations:
        if station.sequences > sequences_of_tier[station.engine.tier]:
            return station.engine.tier
    return None


def test_a_budget_that_the_policy_would_exceed_buys_a_dearer_fleet() -> None:
    """The optimum loses little; the router, which meets bursts, more: then one precision within the budget is planned."""
    engines = [paced_engine(FAST, 10), paced_engine(PRECISE, 20)]
    prices = {}
    for budget in (0.0, 0.002, 1.0):
        load = load_of_classes(
            {PromptClass.CHAT: 6.0, PromptClass.CODE: 6.0}, budget=budget
        )
        best = cheapest_in_operation(
            engines, load, {"H100": None}, demand=SHORT_PROMPTS, policy=ROUTER_POLICY
        )
        assert best is not None
        assert best.lost_share <= budget
        prices[budget] = best.price
    assert prices[0.0] >= prices[0.002] >= prices[1.0]
