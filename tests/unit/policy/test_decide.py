"""The policy: a table of situations and what it must decide."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from classifier import PromptClass
from router.policy.decide import decide, fallbacks, successors
from router.policy.decision import (
    Basis,
    PolicyParameters,
    Refusal,
    Sla,
)
from router.policy.explain import CHOSEN
from tests.unit.policy.fleets import (
    BALANCED,
    CHAT,
    CODE,
    FAST,
    MEASURED,
    PRECISE,
    PROFILED,
    SCARCE,
    TABLE,
    fleet,
    losing,
    query,
    said,
    warmed,
)
from tiers.snapshot import Trends
from tiers.spec import (
    STANDARD_TIERS,
    Draft,
    ReplicaStatus,
    TierName,
)
from tiers.speed import STEADY, ReplicaLoad, SpeedModel, Trend


@pytest.mark.parametrize(
    ("kind", "confidence", "tier"),
    [
        (PromptClass.CHAT, 0.9, FAST),
        (PromptClass.CODE, 0.9, BALANCED),
        (PromptClass.UNKNOWN, 0.9, PRECISE),
        (PromptClass.CHAT, 0.55, BALANCED),  # may well be of another class
        (PromptClass.CODE, 0.3, PRECISE),
    ],
)
def test_the_lowest_tier_with_a_negligible_loss_serves(
    kind: PromptClass, confidence: float, tier: TierName
) -> None:
    """While no speed is known: on the prompt's class, and on what else it may be if the class is not sure."""
    assert decide(query(kind, confidence), fleet(), TABLE).tier is tier


@pytest.mark.parametrize(
    ("tokens", "tier"),
    [(1948, FAST), (1949, BALANCED), (3997, PRECISE), (8092, PRECISE), (8093, None)],
)
def test_context_must_fit(tokens: int, tier: TierName | None) -> None:
    """Prompt plus max_tokens within the context, to the token; over every context is refused as too long."""
    decision = decide(query(prompt_tokens=tokens), fleet(), TABLE)
    assert decision.tier is tier
    if tier is None:
        assert decision.refusal is Refusal.TOO_LONG


def test_what_a_draft_forbids_goes_to_tiers_without_one() -> None:
    """Neither first nor as a fallback to one that has a draft; only where all have one is it refused, by name."""
    given = fleet()
    drafting = structs.replace(
        given.tiers[0], spec=replace(given.tiers[0].spec, draft=Draft("ngram", 4))
    )
    some = structs.replace(given, tiers=(drafting, *given.tiers[1:]))
    assert decide(query(), some, TABLE).tier is FAST
    decision = decide(query(undraftable="min_p"), some, TABLE)
    assert decision.tier == BALANCED
    assert (FAST in fallbacks(decision)) is False
    assert (
        said(decision)[0] == "has a draft, and with a draft vLLM does not support min_p"
    )
    every = structs.replace(
        given,
        tiers=tuple(
            structs.replace(t, spec=replace(t.spec, draft=Draft("ngram", 4)))
            for t in given.tiers
        ),
    )
    refused = decide(query(undraftable="min_p and logit_bias"), every, TABLE)
    assert refused.tier is None
    assert refused.refusal == Refusal.UNSUPPORTED
    assert "min_p and logit_bias" in refused.reason
    absent = structs.replace(
        every.tiers[1],
        spec=replace(every.tiers[1].spec, replicas=0),
        replicas=(),
        outstanding_tokens=(),
    )
    refused = decide(
        query(undraftable="min_p"),
        structs.replace(every, tiers=(every.tiers[0], absent, every.tiers[2])),
        TABLE,
    )
    # a tier that is left out never becomes ready
    assert refused.refusal is Refusal.UNSUPPORTED


def test_an_adapter_keeps_a_request_to_the_tiers_that_have_it() -> None:
    """Neither another tier nor a fallback to one; a hint at another is not taken, a required one is refused."""
    given = fleet()
    having = structs.replace(
        given.tiers[1], spec=replace(given.tiers[1].spec, adapters=("support",))
    )
    some = structs.replace(given, tiers=(given.tiers[0], having, given.tiers[2]))
    decision = decide(query(adapter="support"), some, TABLE)
    assert decision.tier == BALANCED
    assert fallbacks(decision) == ()
    assert said(decision)[0] == "does not offer the adapter support"
    hinted = decide(query(adapter="support", hint=PRECISE), some, TABLE)
    assert hinted.tier is BALANCED
    assert hinted.reason.startswith(
        "hint precise not taken: does not offer the adapter support"
    )
    refused = decide(query(adapter="support", hint=PRECISE, require=True), some, TABLE)
    assert refused.tier is None
    assert refused.refusal == Refusal.NO_ADAPTER


def test_an_adapters_loss_is_not_the_models() -> None:
    """Measured, it decides by its own; not measured, what is published does, whatever the model itself loses."""
    offered = fleet()
    offered = structs.replace(
        offered,
        tiers=tuple(
            structs.replace(t, spec=replace(t.spec, adapters=("a", "b")))
            for t in offered.tiers
        ),
    )
    little, much = (
        losing({PromptClass.CODE: mean}, {PromptClass.CODE: mean})
        for mean in (0.001, 0.4)
    )
    table = replace(TABLE, losses=much, adapters={"a": little, "": TABLE.losses})
    asked = [
        decide(query(PromptClass.CODE, adapter=name), offered, table).tier
        for name in (None, "a", "b")
    ]
    assert asked == [PRECISE, FAST, BALANCED]


def test_hint_is_taken_over_the_class() -> None:
    assert decide(query(PromptClass.CODE, hint=FAST), fleet(), TABLE).tier is FAST
    assert decide(query(hint=PRECISE), fleet(), TABLE).tier is PRECISE


def test_hint_that_cannot_be_honoured_is_named() -> None:
    """A preferred tier that does not fit or is not ready gives way, and the reason says why."""
    long = decide(query(prompt_tokens=3000, hint=FAST), fleet(), TABLE)
    assert long.tier is BALANCED
    assert (
        "hint fast not taken: 3000 prompt + 100 output tokens exceed its context of 2048"
        in long.reason
    )
    dead = decide(query(hint=FAST), fleet({FAST: ReplicaStatus.FAILED}), TABLE)
    assert dead.tier is BALANCED
    # what was asked for comes first
    assert dead.reason.startswith("hint fast not taken: is failed; ")


def test_hint_that_is_not_ready_is_a_floor() -> None:
    """Who asks for balanced gets precise rather than fast when balanced is away, and fast only when nothing else is left."""
    away = {BALANCED: ReplicaStatus.FAILED}
    assert decide(query(hint=BALANCED), fleet(away), TABLE).tier is PRECISE
    left = decide(
        query(hint=BALANCED), fleet({**away, PRECISE: ReplicaStatus.FAILED}), TABLE
    )
    assert left.tier is FAST
    assert "degraded to fast: hint balanced wants balanced or higher" in left.reason


def test_required_tier_or_refusal() -> None:
    """Required means that tier, with no fallback, or a refusal that says what passes and what does not."""
    taken = decide(query(hint=FAST, require=True), fleet(), TABLE)
    assert taken.tier == FAST
    assert fallbacks(taken) == ()
    assert (
        decide(
            query(hint=FAST, require=True), fleet({FAST: ReplicaStatus.WARMING}), TABLE
        ).refusal
        is Refusal.NOT_READY
    )
    assert (
        decide(
            query(hint=FAST, require=True, prompt_tokens=3000), fleet(), TABLE
        ).refusal
        is Refusal.TOO_LONG
    )
    assert (
        decide(query(hint=FAST, require=True), fleet(busy=32), TABLE).refusal
        is Refusal.AT_CAPACITY
    )


def test_class_that_nothing_allows_is_degraded_and_says_so() -> None:
    """With only a lower tier left the request is served there, disclosed as degraded."""
    states = dict.fromkeys((BALANCED, PRECISE), ReplicaStatus.FAILED)
    decision = decide(query(PromptClass.CODE), fleet(states), TABLE)
    assert decision.tier is FAST
    assert decision.reason.startswith(
        "degraded to fast: code, moderate: fast is expected to get 5.0 of 100 answers wrong, while policy.loss_budget "
        "allows 0.5 of 100, and no better tier can serve now"
    )


def test_sla_excludes_slow_and_lossy_tiers() -> None:
    """Latency bounds are held against measured speed, the loss bound against the upper end of the loss."""
    speeds = {
        FAST: SpeedModel(100, 1, 10),
        BALANCED: SpeedModel(20, 0.1, 20),
        PRECISE: SpeedModel(300, 1, 30),
    }
    assert (
        decide(query(sla=Sla(ttft_ms=50)), fleet(speeds=speeds), TABLE).tier is BALANCED
    )
    assert decide(query(sla=Sla(tpot_ms=15)), fleet(speeds=speeds), TABLE).tier is FAST
    loss = decide(query(sla=Sla(max_quality_loss=0.001)), fleet(speeds=speeds), TABLE)
    assert loss.tier is PRECISE
    assert (
        said(loss)[0]
        == "may get up to 0.1 of 100 answers wrong (measured on 40 answers), 0.1 of 100 allowed"
    )


def test_sla_that_nothing_meets_is_set_aside_or_refused() -> None:
    """Preferred bounds that no tier meets are set aside with a note; required ones are refused."""
    speeds = {name: SpeedModel(100, 1, 10) for name in STANDARD_TIERS}
    preferred = decide(query(sla=Sla(ttft_ms=1)), fleet(speeds=speeds), TABLE)
    assert preferred.tier is FAST
    assert "no tier is expected to meet the SLA" in preferred.reason
    required = decide(
        query(sla=Sla(ttft_ms=1), require=True), fleet(speeds=speeds), TABLE
    )
    assert required.refusal is Refusal.SLA_UNMET
    assert "cannot meet TTFT 1 ms (120 ms expected)" in required.reason


def test_a_required_tier_that_is_too_slow_is_told_with_those_that_are_not() -> None:
    """What it cannot do, by how much, and which tiers could: not that no tier can."""
    speeds = {
        FAST: SpeedModel(100, 1, 10),
        BALANCED: SpeedModel(20, 0.1, 20),
        PRECISE: SpeedModel(20, 0.1, 20),
    }
    required = decide(
        query(sla=Sla(ttft_ms=50), hint=FAST, require=True), fleet(speeds=speeds), TABLE
    )
    assert required.refusal is Refusal.SLA_UNMET
    assert required.reason == (
        "fast cannot meet TTFT 50 ms (120 ms expected); balanced and precise can, and tier_policy 'prefer' lets another "
        "tier serve"
    )
    assert required.is_callers_mistake
    assert required.refusal_code == "sla_impossible"


@pytest.mark.parametrize(
    ("sla", "impossible"),
    [
        (Sla(ttft_ms=1), True),
        (Sla(tpot_ms=1), True),
        (Sla(ttft_ms=1000), False),
        (Sla(max_quality_loss=0.0), False),
    ],
)
def test_bounds_that_no_load_explains_are_told_from_those_that_are_missed_now(
    sla: Sla, *, impossible: bool
) -> None:
    """A fleet that is full misses what it meets when idle; what is asked of it must be possible at all."""
    speeds = {name: SpeedModel(100, 1, 10) for name in STANDARD_TIERS}
    loads = dict.fromkeys(
        STANDARD_TIERS, ReplicaLoad(8, prompt_tokens=3000, output_tokens=800)
    )
    decision = decide(query(sla=sla), fleet(speeds=speeds, loads=loads), TABLE)
    assert decision.are_times_impossible is impossible
    # nobody knows how fast it is
    assert not decide(query(sla=sla), fleet(), TABLE).are_times_impossible


def test_bounds_that_a_prefix_cache_meets_are_not_impossible() -> None:
    """A replica that holds most of a conversation meets, when idle, what none could that computes all of it."""
    speeds = dict.fromkeys(STANDARD_TIERS, SpeedModel(0, 1, 10))
    loads = dict.fromkeys(
        STANDARD_TIERS, ReplicaLoad(8, prompt_tokens=3000, output_tokens=800)
    )
    asked = query(prompt_tokens=2000, sla=Sla(ttft_ms=1000))
    there = fleet(speeds=speeds, loads=loads)
    assert decide(asked, there, TABLE).are_times_impossible
    holding = warmed(there, {PRECISE: 1900})
    assert not decide(asked, holding, TABLE).are_times_impossible


def test_slow_lower_precision_is_passed_over() -> None:
    """A tier over four times slower per token than a higher precision has nothing to offer; four times is still taken."""
    slow = {BALANCED: SpeedModel(0, 0, 401), PRECISE: SpeedModel(0, 0, 100)}
    decision = decide(query(PromptClass.CODE), fleet(speeds=slow), TABLE)
    assert decision.tier is PRECISE
    assert decision.reason.endswith(
        "precise loses nothing, and is much faster here than lower precisions"
    )
    even = {BALANCED: SpeedModel(0, 0, 400), PRECISE: SpeedModel(0, 0, 100)}
    assert decide(query(PromptClass.CODE), fleet(speeds=even), TABLE).tier is BALANCED


def test_fallbacks_go_up_first() -> None:
    """A retry goes to higher precisions first, then down from the top."""
    assert fallbacks(decide(query(hint=BALANCED), fleet(), TABLE)) == (PRECISE, FAST)
    assert fallbacks(decide(query(), fleet(), TABLE)) == (BALANCED, PRECISE)


def test_a_tier_that_a_higher_one_beats_in_speed_is_the_last_resort() -> None:
    """An answer that broke does not go on at a token a second where a better tier is faster."""
    slow = {
        FAST: SpeedModel(0, 0, 25),
        BALANCED: SpeedModel(0, 0, 900),
        PRECISE: SpeedModel(0, 0, 70),
    }
    assert fallbacks(decide(query(hint=FAST), fleet(speeds=slow), TABLE)) == (
        PRECISE,
        BALANCED,
    )
    assert fallbacks(decide(query(hint=PRECISE), fleet(speeds=slow), TABLE)) == (
        BALANCED,
        FAST,
    )
    some = {
        FAST: SpeedModel(0, 0, 25),
        BALANCED: SpeedModel(0, 0, 90),
        PRECISE: SpeedModel(0, 0, 70),
    }
    assert fallbacks(decide(query(hint=FAST), fleet(speeds=some), TABLE)) == (
        BALANCED,
        PRECISE,
    )


def test_who_takes_over_is_decided_as_things_stand() -> None:
    """Full tiers may, in the same order as fallbacks; what is not ready, not allowed or too small may not, nor others at all."""
    assert successors(FAST, query(), fleet(busy=32), table=TABLE) == (BALANCED, PRECISE)
    assert successors(BALANCED, query(hint=FAST), fleet(), table=TABLE) == (
        PRECISE,
        FAST,
    )
    assert successors(
        FAST, query(), fleet({BALANCED: ReplicaStatus.STARTING}), table=TABLE
    ) == (PRECISE,)
    assert successors(
        FAST, query(allowed=frozenset({FAST, BALANCED})), fleet(), table=TABLE
    ) == (BALANCED,)
    assert successors(FAST, query(prompt_tokens=5000), fleet(), table=TABLE) == (
        PRECISE,
    )
    assert successors(FAST, query(hint=FAST, require=True), fleet(), table=TABLE) == ()


def test_every_tier_has_a_verdict() -> None:
    """The decision says of each tier what is known and why it was taken or not; unknown is None."""
    decision = decide(
        query(),
        fleet({PRECISE: ReplicaStatus.STARTING}, {FAST: SpeedModel(10, 1, 5)}),
        TABLE,
    )
    assert [each == CHOSEN for each in said(decision)] == [True, False, False]
    assert decision.comparison.estimates[0].predicted_ttft_ms == 30
    assert decision.comparison.estimates[1].predicted_ttft_ms is None
    assert said(decision)[2] == "is starting"


def test_cheapest_within_the_budget() -> None:
    """Whatever the load: of the tiers whose loss the budget allows, that of least engine time."""
    chat = decide(query(), fleet(speeds=MEASURED), SCARCE)
    assert chat.tier == FAST
    assert chat.basis == Basis.BUDGET
    assert chat.reason.startswith(
        "chat, moderate: fast gets up to 10 of 100 answers wrong that precise gets right (measured on 40 answers), within "
        "the loss budget"
    )
    code = decide(query(PromptClass.CODE), fleet(speeds=MEASURED), SCARCE)
    # fast loses too much, and balanced would do at a higher cost
    assert code.tier is PRECISE
    assert said(code) == [
        "code, moderate: fast is expected to get 20 of 100 answers wrong, while policy.loss_budget allows 10 of 100",
        "would do, finished in 40 s instead of 6.2 s, with 40 s of engine time instead of 6.3",
        CHOSEN,
    ]


def test_at_idle_nothing_is_given_up() -> None:
    """The highest precision serves what others would get wrong, whatever the budget; the reason says how often."""
    for budget in (0.0, 0.5, BALANCED):
        decision = decide(
            query(PromptClass.CODE),
            fleet(speeds=MEASURED),
            replace(PROFILED, loss_budget=budget),
        )
        assert decision.tier == PRECISE
        assert decision.basis == Basis.MIN_LOSS
    assert decision.reason == (
        "code, moderate: fast may get up to 25 of 100 answers wrong that precise gets right (measured on 40 answers); "
        "balanced up to 3.8 of 100"
    )
    assert (
        said(decision)[1]
        == "may get up to 3.8 of 100 answers wrong, and engine time is not scarce enough for that"
    )


# Two tiers that lose nothing: balanced takes less engine time, precise is as quick while both idle.
LOSSLESS = PolicyParameters(losing({CHAT: 0.05}, {CHAT: 0.001}))
ALIKE = {
    FAST: MEASURED[FAST],
    BALANCED: SpeedModel(
        20,
        1,
        step_base_ms=40,
        step_ms_per_sequence=2,
        ttft_steps=1,
        contention=0,
        ttft_spread=0.1,
        tpot_spread=0.1,
        profiled=True,
    ),
    PRECISE: SpeedModel(
        20,
        1,
        step_base_ms=42,
        step_ms_per_sequence=3,
        ttft_steps=1,
        contention=0,
        ttft_spread=0.1,
        tpot_spread=0.1,
        profiled=True,
    ),
}


def test_of_lossless_tiers_the_one_that_finishes_soonest_serves() -> None:
    """A full tier is passed over for a free one, however little engine time it takes; the reason says the times."""
    idle = decide(query(), fleet(speeds=ALIKE), LOSSLESS)
    assert idle.tier == BALANCED
    assert idle.basis == Basis.NEGLIGIBLE
    assert (
        "balanced is as good as precise (up to 0.1 of 100 answers get worse, measured on 40 answers)"
        in idle.reason
    )
    assert idle.reason.endswith("should take 4.2 s of engine time (precise 4.5)")
    waiting = fleet(
        speeds=ALIKE,
        loads={BALANCED: ReplicaLoad(8, prompt_tokens=3000, output_tokens=800)},
    )
    busy = decide(query(), waiting, LOSSLESS)
    assert busy.tier is PRECISE
    assert said(busy)[1].startswith("would do, finished in ")
    cheapest = replace(LOSSLESS, objective="cheapest")
    assert decide(query(), waiting, cheapest).tier is BALANCED


def test_what_decides_between_lossless_tiers_is_named() -> None:
    """Times to the first token where these make the difference, else the times of the whole answer."""
    slower = {**ALIKE, PRECISE: replace(ALIKE[PRECISE], step_base_ms=80)}
    whole = decide(
        query(), fleet(speeds=slower), replace(LOSSLESS, prices={BALANCED: 9.0})
    )
    assert whole.tier is BALANCED
    assert whole.reason.endswith(
        "balanced is as good as precise (up to 0.1 of 100 answers get worse, measured on 40 answers), and should finish "
        "soonest: precise would take 8.3 s to the end of its answer, balanced 4.2 s"
    )
    queue = {PRECISE: ReplicaLoad(1, prompt_tokens=5000, output_tokens=1)}
    first = decide(
        query(),
        fleet(speeds=ALIKE, loads=queue),
        replace(LOSSLESS, prices={BALANCED: 9.0}),
    )
    assert first.tier is BALANCED
    assert (
        "should finish soonest: precise would take 5.1 s to its first token, balanced 0.04 s"
        in first.reason
    )


@pytest.mark.parametrize(("later_ms", "tier"), [(40, BALANCED), (60, PRECISE)])
def test_a_finish_that_nobody_tells_apart_does_not_count(
    later_ms: float, tier: TierName
) -> None:
    """Of short answers 50 ms more, of long ones a tenth."""
    speeds = {
        **ALIKE,
        BALANCED: SpeedModel(
            20 + later_ms,
            0,
            step_base_ms=1,
            step_ms_per_sequence=0,
            ttft_steps=1,
            contention=0,
            ttft_spread=0.1,
            tpot_spread=0.1,
            profiled=True,
        ),
        PRECISE: SpeedModel(
            20,
            5,
            step_base_ms=1,
            step_ms_per_sequence=0,
            ttft_steps=1,
            contention=0,
            ttft_spread=0.1,
            tpot_spread=0.1,
            profiled=True,
        ),
    }
    asked = query(prompt_tokens=0, max_tokens=10)
    cheap = replace(LOSSLESS, prices={BALANCED: 0.01})
    assert decide(asked, fleet(speeds=speeds), cheap).tier is tier


def test_small_talk_goes_to_the_lowest_precision() -> None:
    """On any fleet, measured or not, faster or slower, unless its caller would wait for the first token."""
    greeting = query(PromptClass.SMALL_TALK)
    table = replace(
        PROFILED,
        losses=losing(
            {CHAT: 0.08, PromptClass.SMALL_TALK: 0.0},
            {CHAT: 0.02, PromptClass.SMALL_TALK: 0.0},
        ),
    )
    slower = {**MEASURED, FAST: replace(MEASURED[FAST], step_base_ms=300)}
    for speeds in (None, MEASURED, slower):
        decision = decide(greeting, fleet(speeds=speeds), table)
        assert decision.tier == FAST
        assert decision.basis == Basis.SMALL_TALK
        assert decision.reason.endswith(
            "no precision loses anything, and fast is the lowest that can serve"
        )
    waiting = fleet(
        speeds=MEASURED,
        loads={FAST: ReplicaLoad(2, prompt_tokens=2000, output_tokens=100)},
    )
    late = decide(greeting, waiting, table)
    assert late.tier is BALANCED
    assert "no precision loses anything, and fast would take 2." in late.reason
    hinted = decide(
        query(PromptClass.SMALL_TALK, hint=PRECISE), fleet(speeds=MEASURED), table
    )
    assert hinted.tier is PRECISE


def test_as_the_highest_precision_fills_up_more_loss_is_allowed() -> None:
    """From negligible at half of its slots up to the budget at all of them; a lossless tier always may."""
    table = replace(
        PROFILED,
        loss_budget=0.1,
        losses=losing({PromptClass.CHAT: 0.05}, {PromptClass.CHAT: 0.004}),
    )
    quick = {
        **MEASURED,
        BALANCED: SpeedModel(
            20,
            1,
            step_base_ms=90,
            step_ms_per_sequence=5,
            ttft_steps=1,
            contention=0,
            ttft_spread=0.1,
            tpot_spread=0.1,
            profiled=True,
        ),
    }
    taken = [
        decide(
            query(), fleet(speeds=quick, loads={PRECISE: ReplicaLoad(n)}), table
        ).tier
        for n in (0, 8, 11, 12, 16)
    ]
    assert taken == [PRECISE, PRECISE, PRECISE, FAST, FAST]
    loads = {FAST: ReplicaLoad(16), BALANCED: ReplicaLoad(16)}
    # only lossless time is scarce
    assert decide(query(), fleet(speeds=quick, loads=loads), table).tier is not FAST


def test_riskier_prompts_are_never_on_a_lower_tier_than_safer_ones() -> None:
    for load in range(17):
        there = fleet(speeds=MEASURED, loads={PRECISE: ReplicaLoad(load)})
        chat, code = (
            STANDARD_TIERS.index(decide(query(kind), there, SCARCE).tier or FAST)
            for kind in (CHAT, CODE)
        )
        assert chat <= code


def test_by_comparison_a_tier_may_lose_what_it_loses_and_lower_ones_what_it_loses_on_average() -> (
    None
):
    """So balanced answers every prompt when engine time is scarce, and fast those on which it loses no more."""
    balanced = {kind: 0.03 if kind is CODE else 0.015 for kind in PromptClass}
    table = PolicyParameters(
        losing({CHAT: 0.01, CODE: 0.2}, balanced), objective="cheapest"
    )
    assert table.budget(BALANCED) == 0.03
    assert table.budget(FAST) == pytest.approx((7 * 0.015 + 0.03) / 8)
    speeds = {
        **MEASURED,
        BALANCED: SpeedModel(
            20,
            1,
            step_base_ms=40,
            step_ms_per_sequence=3,
            ttft_steps=1,
            contention=0,
            ttft_spread=0.1,
            tpot_spread=0.1,
            profiled=True,
        ),
    }
    assert [
        decide(query(kind), fleet(speeds=speeds), table).tier for kind in (CHAT, CODE)
    ] == [FAST, BALANCED]


def test_a_class_has_a_bound_of_its_own() -> None:
    """Against the upper end of the loss, however scarce engine time is."""
    assert (
        decide(
            query(), fleet(speeds=MEASURED), replace(SCARCE, max_loss={CHAT: 0.09})
        ).tier
        is PRECISE
    )
    assert (
        decide(
            query(), fleet(speeds=MEASURED), replace(SCARCE, max_loss={CHAT: 0.12})
        ).tier
        is FAST
    )


def test_cost_follows_the_load() -> None:
    """With its own growth a cheap tier loses its lead: at sixteen requests in flight the other one takes less time each."""
    speeds = {
        **MEASURED,
        PRECISE: SpeedModel(
            20,
            1,
            step_base_ms=60,
            step_ms_per_sequence=0,
            ttft_steps=1,
            contention=0,
            ttft_spread=0.1,
            tpot_spread=0.1,
            profiled=True,
        ),
    }
    assert decide(query(), fleet(speeds=speeds), SCARCE).tier is FAST
    assert decide(query(), fleet(speeds=speeds, busy=5), SCARCE).tier is PRECISE
    dear = replace(SCARCE, prices={PRECISE: 3.0})
    assert decide(query(), fleet(speeds=speeds, busy=5), dear).tier is FAST


def test_bounds_hold_with_the_confidence_asked_for() -> None:
    """The same bound is met with even odds and not with near certainty, for latency and loss alike."""
    speeds = {FAST: MEASURED[FAST]}
    bound = Sla(tpot_ms=26, confidence=0.5)
    one = fleet(dict.fromkeys((BALANCED, PRECISE), ReplicaStatus.FAILED), speeds)
    assert decide(query(sla=bound, require=True), one, PROFILED).tier is FAST
    sure = decide(
        query(sla=structs.replace(bound, confidence=0.99), require=True), one, PROFILED
    )
    assert sure.refusal is Refusal.SLA_UNMET
    loss = Sla(max_quality_loss=0.09)
    assert (
        decide(
            query(sla=structs.replace(loss, confidence=0.5)),
            fleet(speeds=MEASURED),
            SCARCE,
        ).tier
        is FAST
    )
    assert (
        decide(
            query(sla=structs.replace(loss, confidence=0.95)),
            fleet(speeds=MEASURED),
            SCARCE,
        ).tier
        is PRECISE
    )


def test_prediction_follows_the_load() -> None:
    """Waiting prompts, running batches, busy neighbours and taken places all add to the predicted times."""
    free = decide(query(), fleet(speeds=MEASURED), PROFILED).estimate(FAST)
    assert free.predicted_ttft_ms == 40
    assert free.predicted_tpot_ms == 25
    busy = {FAST: ReplicaLoad(sequences=3, prompt_tokens=200, output_tokens=300)}
    loaded = decide(query(), fleet(speeds=MEASURED, loads=busy), PROFILED).estimate(
        FAST
    )
    assert loaded.predicted_ttft_ms == 20 + 220 + 35
    assert loaded.predicted_tpot_ms == 40
    full = {FAST: ReplicaLoad(sequences=16, output_tokens=1600)}
    queued = decide(query(), fleet(speeds=MEASURED, loads=full), PROFILED).estimate(
        FAST
    )
    assert queued.predicted_ttft_ms == pytest.approx(
        20 + 20 + 100 + 100 * 2 * 100 / 17, abs=0.1
    )
    speeds = {FAST: replace(MEASURED[FAST], contention=2.0)}
    beside = {FAST: ReplicaLoad(neighbours=0.5)}
    assert (
        decide(query(), fleet(speeds=speeds, loads=beside), PROFILED)
        .estimate(FAST)
        .predicted_tpot_ms
        == 50
    )


@pytest.mark.parametrize(("give_up", "tier"), [("latency", PRECISE), ("quality", FAST)])
def test_what_is_given_up_first_is_a_setting(give_up: Any, tier: TierName) -> None:
    """A loss that only the slow tier keeps and a latency that only the lossy one keeps: the settings say which gives way."""
    asked = query(sla=Sla(tpot_ms=40, max_quality_loss=0.001))
    decision = decide(asked, fleet(speeds=MEASURED), replace(PROFILED, give_up=give_up))
    assert decision.tier is tier
    assert decision.degraded == (give_up,)
    assert f"{give_up} given up" in decision.reason


def test_refusal_says_when() -> None:
    """A required SLA that is out of reach for the load is refused with a time; one out of reach at all without."""
    load = {FAST: ReplicaLoad(sequences=8, output_tokens=800)}
    only = dict.fromkeys((BALANCED, PRECISE), ReplicaStatus.FAILED)
    asked = query(sla=Sla(tpot_ms=35), require=True)
    busy = decide(asked, fleet(only, MEASURED, loads=load), PROFILED)
    assert busy.refusal is Refusal.SLA_UNMET
    assert busy.retry_after_s is not None
    assert 1 < busy.retry_after_s < 10
    never = decide(
        query(hint=FAST, sla=Sla(tpot_ms=1), require=True),
        fleet(speeds=MEASURED),
        PROFILED,
    )
    assert never.retry_after_s is None
    full = fleet(
        only, MEASURED, loads={FAST: ReplicaLoad(sequences=32, output_tokens=3200)}
    )
    assert (
        decide(query(hint=FAST, require=True), full, PROFILED).retry_after_s is not None
    )


def test_a_hint_counts_where_the_sla_cannot_be_kept() -> None:
    """Where nothing meets the bounds, the hinted tier is as good as any that keeps what the settings keep."""
    decision = decide(
        query(PromptClass.CHAT, hint=BALANCED, sla=Sla(ttft_ms=1)),
        fleet(speeds=MEASURED),
        PROFILED,
    )
    assert decision.tier is BALANCED
    assert decision.degraded == ("latency",)


def test_preferences_do_not_make_a_refusal_last() -> None:
    """All slots taken: a request that would be served in any way is told when one is expected, not that it never will be."""
    full = {
        name: ReplicaLoad(sequences=32, output_tokens=320) for name in STANDARD_TIERS
    }
    decision = decide(
        query(sla=Sla(ttft_ms=1, max_quality_loss=0.0)),
        fleet(speeds=MEASURED, loads=full),
        PROFILED,
    )
    assert decision.refusal is Refusal.AT_CAPACITY
    assert decision.retry_after_s is not None


def test_several_answers_cost_and_take_as_much() -> None:
    """Engine time of each answer, prompts read once; TPOT of the batch that they make; room for all of them at once."""
    one = decide(query(), fleet(speeds=MEASURED), PROFILED).estimate(FAST)
    several = decide(query(sequences=4), fleet(speeds=MEASURED), PROFILED).estimate(
        FAST
    )
    prompts = decide(
        query(sequences=4, all_prompt_tokens=80), fleet(speeds=MEASURED), PROFILED
    ).estimate(FAST)
    assert one.cost is not None
    assert several.cost is not None
    assert prompts.cost is not None
    # a batch shares its steps
    assert one.cost < several.cost < prompts.cost < 4 * one.cost
    assert (several.predicted_tpot_ms or 0) > (one.predicted_tpot_ms or 0)
    nearly = {
        name: ReplicaLoad(sequences=30, output_tokens=300) for name in STANDARD_TIERS
    }
    assert decide(query(sequences=2), fleet(loads=nearly), TABLE).tier is not None
    refused = decide(query(sequences=3), fleet(loads=nearly), TABLE)
    assert refused.refusal is Refusal.AT_CAPACITY
    assert (
        "too few of its 32 slots free for 3 answers at the same time" in refused.reason
    )
    # alone on a replica
    assert decide(query(sequences=300), fleet(), TABLE).tier is not None


def test_a_chat_does_not_leave_a_warm_tier_for_nothing() -> None:
    """What another tier has to prefill first is part of its cost."""
    asked = query(prompt_tokens=1600)
    there = fleet(speeds=MEASURED)
    cold, warm = (
        decide(asked, warmed(there, {PRECISE: cached}), SCARCE) for cached in (0, 1590)
    )
    assert cold.tier == FAST
    assert warm.tier == FAST
    assert warm.estimate(PRECISE).predicted_ttft_ms == 20 + 4 * 10
    assert (warm.estimate(PRECISE).cost or 0) < (cold.estimate(PRECISE).cost or 0) - 5.9
    assert [each.cached_tokens for each in warm.comparison.estimates] == [0, 0, 1590]
    assert [
        each.cached_tokens
        for each in decide(asked, there, PROFILED).comparison.estimates
    ] == [None] * 3
    long = structs.replace(asked, max_tokens=8)
    asked = [
        decide(long, warmed(there, {PRECISE: cached}), SCARCE).tier
        for cached in (0, 1590)
    ]
    assert asked == [FAST, PRECISE]


def test_a_warm_tier_meets_a_bound_on_ttft_that_a_cold_one_breaks() -> None:
    """Refused without its cache, served with it; required, a busy warm tier is worth waiting for."""
    asked = query(prompt_tokens=1600, hint=PRECISE, require=True, sla=Sla(ttft_ms=1000))
    cold = decide(asked, warmed(fleet(speeds=MEASURED), {}), PROFILED)
    assert cold.refusal == Refusal.SLA_UNMET
    assert cold.retry_after_s is None
    warm = warmed(fleet(speeds=MEASURED), {PRECISE: 1500})
    assert decide(asked, warm, PROFILED).tier is PRECISE
    full = warmed(fleet(speeds=MEASURED, busy=32), {PRECISE: 1500})
    assert decide(asked, full, PROFILED).retry_after_s is not None


def test_hints_and_bounds_come_before_the_budget() -> None:
    """What a caller asks for is not weighed against cost."""
    hinted = decide(query(hint=PRECISE), fleet(speeds=MEASURED), SCARCE)
    assert hinted.tier == PRECISE
    assert hinted.basis == Basis.HINT
    assert (
        decide(
            query(sla=Sla(max_quality_loss=0.0)), fleet(speeds=MEASURED), SCARCE
        ).tier
        is PRECISE
    )


def test_cost_follows_the_trend() -> None:
    """A tier that lately took three times as long as its speed says costs three times as much."""
    slow = fleet(speeds=MEASURED)
    replica = structs.replace(
        slow.tiers[0].replicas[0],
        trends=Trends(STEADY, Trend(math.log(3.0), 0.01, 0.0)),
    )
    slow = structs.replace(
        slow,
        tiers=(structs.replace(slow.tiers[0], replicas=(replica,)), *slow.tiers[1:]),
    )
    usual = decide(query(), fleet(speeds=MEASURED), SCARCE)
    now = decide(query(), slow, SCARCE)
    assert usual.tier == FAST
    assert now.tier == PRECISE
    assert now.estimate(FAST).cost == pytest.approx(
        3 * (usual.estimate(FAST).cost or 0), rel=1e-3
    )


@pytest.mark.parametrize("sla", [Sla(ttft_ms=1000), Sla(tpot_ms=1000)])
def test_an_unknown_time_meets_no_bound(sla: Sla) -> None:
    """Nobody can say that it would be kept: required it is refused, else the answer says that it was not measured."""
    preferred = decide(query(sla=sla), fleet(), TABLE)
    assert preferred.tier == FAST
    assert preferred.degraded == ("unmeasured",)
    assert preferred.basis is Basis.DEGRADED_UNMEASURED
    assert "no tier is known to meet the SLA, fast taken" in preferred.reason
    refused = decide(query(sla=sla, require=True), fleet(), TABLE)
    assert refused.refusal is Refusal.SLA_UNMET
    assert "has no measured speed yet" in refused.reason
    assert refused.retry_after_s is not None
    known = decide(query(sla=sla), fleet(speeds={BALANCED: MEASURED[BALANCED]}), TABLE)
    assert known.tier == BALANCED
    assert known.degraded == ()


def test_a_tier_that_nothing_is_known_of_may_lose_everything() -> None:
    """It meets no bound on loss; the highest precision loses nothing."""
    away = fleet({PRECISE: ReplicaStatus.FAILED})
    unknown = PolicyParameters()
    assert (
        decide(
            query(sla=Sla(max_quality_loss=0.5), require=True), away, unknown
        ).refusal
        is Refusal.SLA_UNMET
    )
    assert decide(query(), fleet(), unknown).tier is PRECISE
    assert decide(query(), away, unknown).degraded == ("quality",)


def test_where_all_are_late_the_least_late_serves() -> None:
    """Not the cheapest, and not the highest precision: so requests beyond what the tiers can do spread over all of them."""
    speeds = {
        **MEASURED,
        BALANCED: SpeedModel(
            20,
            1,
            step_base_ms=40,
            step_ms_per_sequence=3,
            ttft_steps=1,
            contention=0,
            ttft_spread=0.1,
            tpot_spread=0.1,
            profiled=True,
        ),
    }
    sla = Sla(tpot_ms=10)
    assert (
        decide(
            query(sla=sla), fleet(speeds=speeds), replace(PROFILED, loss_budget=0.1)
        ).tier
        is FAST
    )
    busy = {FAST: ReplicaLoad(sequences=12, output_tokens=100)}
    assert (
        decide(
            query(sla=sla),
            fleet(speeds=speeds, loads=busy),
            replace(PROFILED, loss_budget=0.1),
        ).tier
        is BALANCED
    )
    bound = Sla(tpot_ms=10, max_quality_loss=0.0)  # within the loss that is allowed
    assert decide(query(sla=bound), fleet(speeds=speeds), PROFILED).tier is PRECISE


def test_a_better_tier_that_cannot_serve_is_named() -> None:
    """Else the reason would compare with a tier that was never asked. One that is left out on purpose is not named."""
    drained = {PRECISE: ReplicaStatus.DRAINING}
    decision = decide(query(PromptClass.MATH), fleet(drained, MEASURED), TABLE)
    assert decision.tier is BALANCED
    assert decision.reason.endswith("; precise is draining")
    ready = decide(query(PromptClass.MATH), fleet(speeds=MEASURED), TABLE)
    assert "precise is" not in ready.reason
