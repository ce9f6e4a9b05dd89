"""Conversations: on which tier the next turn is served, and what is said when one leaves the tier that holds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from pydantic import TypeAdapter

from classifier import PromptClass
from router.policy.decide import decide
from router.policy.decision import (
    Basis,
    Decision,
    PolicyParameters,
    RoutingQuery,
    Sla,
)
from router.policy.decision_log import LoggedFleet, LoggedQuery
from tests.unit.policy.fleets import (
    BALANCED,
    FAST,
    PRECISE,
    fleet,
    losing,
    query,
    warmed,
)
from tiers.snapshot import FleetSnapshot
from tiers.spec import ReplicaStatus, TierName
from tiers.speed import ReplicaLoad, SpeedModel

TOOLS = PromptClass.TOOLS
# Of balanced, more than is negligible and less than the budget; of fast, more than that.
TABLE = PolicyParameters(losing({TOOLS: 0.2}, {TOOLS: 0.02}), loss_budget=0.03)
HELD = 40_000
PROMPT = 41_000
STEP_MS = {FAST: 5.0, BALANCED: 10.0, PRECISE: 20.0}
SPEEDS = {
    tier: SpeedModel(
        20, 0.1, step_base_ms=step_ms, ttft_spread=0.1, tpot_spread=0.1, profiled=True
    )
    for tier, step_ms in STEP_MS.items()
}


def turn(
    *, in_tool_loop: bool = True, max_tokens: int = 400, **more: Any
) -> RoutingQuery:
    """Return the turn of a long conversation, of which all but 1,000 tokens were computed before."""
    return query(
        TOOLS,
        prompt_tokens=PROMPT,
        max_tokens=max_tokens,
        conversation_tokens=30_000,
        in_tool_loop=in_tool_loop,
        **more,
    )


def holding(
    held: dict[TierName, int],
    contexts: dict[TierName, int] | None = None,
    **more: Any,
) -> FleetSnapshot:
    """Return a fleet whose tiers hold so many tokens of the prompt, with long contexts."""
    there = warmed(fleet(**{"speeds": SPEEDS, **more}), held)
    tiers = []
    for tier in there.tiers:
        length = (contexts or {}).get(tier.spec.name, 131_072)
        tiers.append(
            structs.replace(tier, spec=replace(tier.spec, max_model_len=length))
        )
    return structs.replace(there, tiers=tuple(tiers))


def waiting(tokens: int) -> ReplicaLoad:
    """Return the load of a replica that is nearly full, with prompts of so many tokens to compute first."""
    return ReplicaLoad(15, prompt_tokens=tokens)


def test_a_tool_loop_stays_on_its_precision_while_engines_idle() -> None:
    """Though a higher one would be taken for the same prompt alone, as engine time is worth nothing."""
    alone = decide(turn(), holding({}), TABLE)
    assert alone.tier is PRECISE
    decision = decide(turn(), holding({BALANCED: HELD}), TABLE)
    assert decision.tier is BALANCED
    assert decision.basis is Basis.CONVERSATION
    assert "balanced holds 40000 tokens of the conversation" in decision.reason
    assert "leaves" not in decision.reason.replace("leaves it only if", "")


@pytest.mark.parametrize(("max_tokens", "tier"), [(20, BALANCED), (400, PRECISE)])
def test_the_users_next_words_move_a_conversation_up_if_little_is_wasted(
    max_tokens: int, tier: TierName
) -> None:
    """Computing it again would take most of the time of a short answer, and a third of that of a long one."""
    decision = decide(
        turn(in_tool_loop=False, max_tokens=max_tokens),
        holding({BALANCED: HELD}),
        TABLE,
    )
    assert decision.tier is tier
    is_left = (
        "the conversation leaves balanced, which holds 40000 tokens" in decision.reason
    )
    assert is_left is (tier is PRECISE)
    if is_left:
        assert "too many for the time that it saves" in decision.reason


@pytest.mark.parametrize("in_tool_loop", [True, False])
@pytest.mark.parametrize(("tokens", "tier"), [(30_000, PRECISE), (60_000, BALANCED)])
def test_a_conversation_leaves_a_busy_tier_if_that_saves_more_than_it_costs(
    tokens: int, tier: TierName, *, in_tool_loop: bool
) -> None:
    """Computing it again takes 4 s of the other engine: 3 s sooner is not worth that, 6 s sooner is."""
    there = holding({PRECISE: HELD}, loads={PRECISE: waiting(tokens)})
    decision = decide(turn(in_tool_loop=in_tool_loop), there, TABLE)
    assert decision.tier is tier
    balanced, precise = decision.estimate(BALANCED), decision.estimate(PRECISE)
    assert balanced.finishes_in_ms < precise.finishes_in_ms
    assert balanced.recompute_ms(precise) == pytest.approx(4000)
    if tier is BALANCED:
        assert (
            "the conversation leaves precise, which holds 40000 tokens of it: balanced finishes 6 s sooner, although it"
            " computes 4 s of it again"
        ) in decision.reason
    else:
        assert decision.basis is Basis.CONVERSATION


OBSTACLES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "draining": (
        {"states": {BALANCED: ReplicaStatus.DRAINING}},
        {},
        "balanced is draining",
    ),
    "outgrown": (
        {"contexts": {BALANCED: PROMPT}},
        {},
        "41000 prompt + 400 output tokens exceed its context of 41000",
    ),
    "key": ({}, {"allowed": frozenset({PRECISE})}, "is not allowed for this key"),
    "budget": (
        {},
        {"allowed": frozenset({PRECISE}), "over_budget": True},
        "is not allowed for this key over its budget",
    ),
    "full": ({"loads": {BALANCED: ReplicaLoad(32)}}, {}, "all of its 32 slots taken"),
    "late": (
        {"loads": {BALANCED: waiting(60_000)}},
        {"sla": Sla(ttft_ms=5000)},
        "balanced cannot meet TTFT 5000 ms",
    ),
    "lossy": ({}, {"sla": Sla(max_quality_loss=0.005)}, "0.5 of 100 allowed"),
    "excluded": (
        {},
        {"only": frozenset({PRECISE})},
        "is not among the tiers that the request allows",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("there", "asked", "why"), OBSTACLES.values(), ids=OBSTACLES)
def test_a_tool_loop_leaves_a_tier_that_cannot_serve_it_and_says_why(
    there: dict[str, Any], asked: dict[str, Any], why: str
) -> None:
    decision = decide(turn(**asked), holding({BALANCED: HELD}, **there), TABLE)
    assert decision.tier is PRECISE
    _, _, leaving = decision.reason.partition(
        "the conversation leaves balanced, which holds 40000 tokens of it: "
    )
    assert why in leaving


def test_a_tool_loop_leaves_a_tier_beyond_the_loss_budget() -> None:
    """It was served there when nothing better was left."""
    decision = decide(turn(), holding({FAST: HELD}), TABLE)
    assert decision.tier is PRECISE
    assert "the conversation leaves fast" in decision.reason
    assert "while policy.loss_budget allows" in decision.reason


def test_a_drained_tier_that_holds_nothing_any_more_is_forgotten() -> None:
    """The next turn is decided as any prompt's, and nothing is said of a conversation."""
    there = holding({}, states={BALANCED: ReplicaStatus.STOPPED})
    decision = decide(turn(), there, TABLE)
    assert decision.tier is PRECISE
    assert "conversation" not in decision.reason


@pytest.mark.parametrize("shared", [0, 8000, 29_999])
def test_a_shared_system_prompt_is_no_conversation(shared: int) -> None:
    """Neither at its first turn nor when what a tier holds ends before this conversation's own words."""
    first = structs.replace(turn(), conversation_tokens=0, in_tool_loop=False)
    assert decide(first, holding({BALANCED: HELD}), TABLE).tier is PRECISE
    decision = decide(turn(), holding({BALANCED: shared}), TABLE)
    assert decision.tier is PRECISE
    assert "conversation" not in decision.reason


def test_of_two_tiers_that_hold_a_conversation_the_last_one_counts() -> None:
    """It holds more; where both hold as much nothing is lost, and the prompt decides."""
    last = decide(turn(), holding({BALANCED: HELD, PRECISE: HELD - 4000}), TABLE)
    assert last.tier is BALANCED
    both = decide(turn(), holding({BALANCED: HELD, PRECISE: HELD}), TABLE)
    assert both.tier is PRECISE
    assert "conversation" not in both.reason


def test_a_caller_who_names_a_tier_gets_it() -> None:
    """Nothing is explained of what the caller has chosen."""
    decision = decide(turn(hint=PRECISE), holding({BALANCED: HELD}), TABLE)
    assert decision.tier is PRECISE
    assert decision.basis is Basis.HINT
    assert "conversation" not in decision.reason
    sorted_by = decide(turn(sort="throughput"), holding({PRECISE: HELD}), TABLE)
    assert sorted_by.tier is BALANCED
    assert "conversation" not in sorted_by.reason


def test_without_a_known_speed_a_tool_loop_stays_and_a_new_question_does_not() -> None:
    """Nothing tells what leaving would cost, or save."""
    there = holding({BALANCED: HELD}, speeds={})
    assert decide(turn(), there, TABLE).tier is BALANCED
    assert decide(turn(in_tool_loop=False), there, TABLE).tier is PRECISE
    # The lowest precision that is allowed would be taken.
    scarce = replace(TABLE, objective="cheapest")
    held_higher = holding({PRECISE: HELD}, speeds={})
    assert decide(turn(), holding({}, speeds={}), scarce).tier is BALANCED
    assert decide(turn(), held_higher, scarce).tier is PRECISE


@pytest.mark.parametrize(("price", "tier"), [(1.0, PRECISE), (60.0, BALANCED)])
def test_the_cheapest_fleet_moves_a_tool_loop_for_engine_time(
    price: float, tier: TierName
) -> None:
    """Once what it saves, at the tiers' prices, is more than computing the conversation again costs."""
    table = replace(TABLE, objective="cheapest", prices={PRECISE: price})
    decision = decide(turn(), holding({PRECISE: HELD}), table)
    assert decision.tier is tier
    if tier is BALANCED:
        assert "balanced takes less engine time" in decision.reason


def test_engine_time_alone_moves_no_tool_loop_of_the_best_fleet() -> None:
    """Where finishes cannot be told apart, a new question goes to the cheaper tier, if that pays; a loop stays."""
    alike = {**SPEEDS, PRECISE: SPEEDS[BALANCED]}
    table = replace(TABLE, prices={PRECISE: 1000.0}, negligible_loss=0.025)
    there = holding({PRECISE: 2000}, speeds=alike)
    short = {"prompt_tokens": 2500, "conversation_tokens": 1500}
    loop = structs.replace(turn(), **short)
    assert decide(loop, there, table).tier is PRECISE
    question = structs.replace(turn(in_tool_loop=False), **short)
    decision: Decision = decide(question, there, table)
    assert decision.tier is BALANCED
    assert "balanced takes less engine time" in decision.reason


@pytest.mark.parametrize("in_tool_loop", [True, False])
@pytest.mark.parametrize("held", [BALANCED, PRECISE])
def test_a_logged_decision_on_a_conversation_is_made_again(
    held: TierName, *, in_tool_loop: bool
) -> None:
    """The log has all that it was made from."""
    there = structs.replace(
        holding({held: HELD}, loads={PRECISE: waiting(60_000)}), answer_tokens=250.0
    )
    asked = turn(in_tool_loop=in_tool_loop)
    fleets: TypeAdapter[FleetSnapshot] = TypeAdapter(LoggedFleet)
    queries: TypeAdapter[RoutingQuery] = TypeAdapter(LoggedQuery)
    read_fleet = fleets.validate_json(fleets.dump_json(there))
    read_query = queries.validate_json(queries.dump_json(asked))
    made = decide(asked, there, TABLE)
    again = decide(read_query, read_fleet, TABLE)
    assert again.tier is made.tier
    assert again.reason == made.reason
    assert again.basis is made.basis
