"""A fleet under the router's policy: by hand, and against the router's own decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classifier import PromptClass
from router.policy.decide import decide, scarcity_at
from router.policy.decision import PolicyParameters, latest_unnoticed_ms
from tests.unit.policy.test_decide import fleet as snapshot
from tests.unit.policy.test_decide import losing, query
from tests.unit.tiers.sizing.test_capacity import Steady
from tiers.sizing.capacity import EnginePlan, ServingDemand
from tiers.sizing.fleet import DailyLoad, EngineType, PlannedFleet
from tiers.sizing.operation import (
    Policy,
    _Chain,
    _make_station,
    cheapest_in_operation,
    in_operation,
)
from tiers.spec import STANDARD_TIERS, TierName
from tiers.speed import Load, SpeedModel

FAST, BALANCED, PRECISE = STANDARD_TIERS
DEMAND = ServingDemand(20, 100, 120)
LOSS = {kind: 0.004 * n for n, kind in enumerate(PromptClass)}
LOSSES = {
    tier: {kind: share * part for kind, share in LOSS.items()}
    for tier, part in zip(STANDARD_TIERS, (1, 0.3, 0))  # noqa: B905
}


def engine(
    tier: TierName, step_ms: float, batch: int = 16, price: float = 1.0
) -> EngineType:
    pace = SpeedModel(1.0, 0.1, step_ms, 0.5, profiled=True)
    rate = 1000 * batch / (100 * (pace.step_ms(batch) + batch * 0.02))
    return EngineType(
        "H100",
        EnginePlan(tier, "p", 1, 1, 1, 1, batch, batch, 1, 1, rate, rate * 100, pace),
        price,
    )


def allowed(budget: float, taken: float) -> float:
    return 0.005 + scarcity_at("best", taken) * max(budget - 0.005, 0.0)


POLICY = Policy(allowed, latest_unnoticed_ms)
# the plan's mixes have no small talk
WORK = [kind for kind in PromptClass if kind is not PromptClass.SMALL_TALK]


def test_one_engine_by_hand() -> None:
    """Prompts of 2 ms, 100 steps of 20 ms at any batch: ten a second are 20 sequences, each with 0.2 ms a token of others."""
    plan = EnginePlan(PRECISE, "p", 1, 1, 1, 1, 200, 200, 1, 1, 90, 9000, Steady())
    one = PlannedFleet(
        ((EngineType("H100", plan, 1.0), 1),), 1, 0.0, {("", PRECISE): 1.0}
    )
    found = in_operation(
        one, DailyLoad({"": 10.0}, {PRECISE: {"": 0.0}}), DEMAND, POLICY
    )
    assert found.tpot_ms == pytest.approx(20 + 20 * 2 / 100, rel=0.1)
    assert found.ttft_ms == pytest.approx(30 + 2 / (1 - 0.02), rel=0.1)


@given(
    st.tuples(*[st.integers(0, 16)] * 3),
    st.sampled_from(WORK),
    st.sampled_from([0.0, 0.01, 0.05]),
)
def test_the_plan_chooses_as_the_router_does(
    busy: tuple[int, ...], kind: PromptClass, budget: float
) -> None:
    engines = [
        engine(tier, step)
        for tier, step in zip(STANDARD_TIERS, (10, 14, 20), strict=True)
    ]
    stations = [_make_station(each, 1, DEMAND) for each in engines]
    for station, now in zip(stations, busy, strict=True):
        station.sequences = now
    chain = _Chain(budget, DailyLoad({kind: 1.0}, LOSSES), stations, policy=POLICY)
    chain.arrive(kind)
    now = snapshot(
        None,
        {e.tier: e.plan.pace for e in engines},
        loads=dict(zip(STANDARD_TIERS, map(Load, busy), strict=True)),
        limit=16,
    )
    table = PolicyParameters(
        losing(*(dict(LOSSES[tier]) for tier in (FAST, BALANCED))),
        objective="best",
        loss_budget=budget,
    )
    went = next(
        (s.engine.tier for s, n in zip(stations, busy, strict=True) if s.sequences > n),
        None,
    )
    assert went is decide(query(kind), now, table).tier


def test_a_budget_that_the_policy_would_exceed_buys_a_dearer_fleet() -> None:
    """The optimum loses little; the router, which meets bursts, more: then one precision within the budget is planned."""
    engines, load = (
        [engine(FAST, 10), engine(PRECISE, 20)],
        DailyLoad({PromptClass.CHAT: 6.0, PromptClass.CODE: 6.0}, LOSSES),
    )
    found = {}
    for budget in (0.0, 0.002, 1.0):
        best = cheapest_in_operation(
            engines,
            DailyLoad(load.per_s_by_kind, LOSSES, budget=budget),
            {"H100": None},
            DEMAND,
            POLICY,
        )
        assert best is not None
        assert best.lost_share <= budget
        found[budget] = best.price
    assert found[0.0] >= found[0.002] >= found[1.0]
