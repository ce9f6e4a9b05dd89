"""The policy: a table of situations and what it must decide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from classifier import PromptClass, PromptFeatures
from router.policy import CHOSEN, PolicyTable, Query, Refusal, Sla, decide
from router.settings import CLASS_FLOOR
from tiers.fleet import FleetSnapshot, ReplicaSnapshot, Speed, TemplateTokens, TierSnapshot
from tiers.spec import ReplicaState, TierName, TierSpec

TABLE = PolicyTable(CLASS_FLOOR, min_confidence=0.6, max_slowdown=4.0)
FAST, BALANCED, PRECISE = TierName
LENGTHS = {FAST: 2048, BALANCED: 4096, PRECISE: 8192}


def features(kind: PromptClass = PromptClass.CHAT, confidence: float = 0.9) -> PromptFeatures:
    return PromptFeatures(2, 1, 1, True, False, False, None, kind, confidence, ())


def query(kind: PromptClass = PromptClass.CHAT, confidence: float = 0.9, **changes: Any) -> Query:
    return replace(Query(features(kind, confidence), prompt_tokens=20, max_tokens=100), **changes)


def fleet(
    states: dict[TierName, Any] | None = None, speeds: dict[TierName, Speed] | None = None, busy: int = 0
) -> FleetSnapshot:
    tiers = []
    for name in TierName:
        state = (states or {}).get(name, ReplicaState.READY)
        speed = (speeds or {}).get(name)
        replica = ReplicaSnapshot(f"{name}-0", "u", None, state, None, busy, 0, 0, 0, 0, None, speed, speed)
        tiers.append(TierSnapshot(TierSpec(name, LENGTHS[name], 16, 32), (replica,)))
    return FleetSnapshot(tuple(tiers), TemplateTokens())


@pytest.mark.parametrize(("kind", "tier"), CLASS_FLOOR.items())
def test_class_decides(kind: PromptClass, tier: TierName) -> None:
    """Each class goes to the lowest tier that its row allows."""
    assert decide(query(kind), fleet(), TABLE).tier is tier


@pytest.mark.parametrize(
    ("kind", "tier"), [(PromptClass.CHAT, BALANCED), (PromptClass.CODE, PRECISE), (PromptClass.UNKNOWN, PRECISE)]
)
def test_doubt_goes_up(kind: PromptClass, tier: TierName) -> None:
    """An unsure class asks for one tier more, and the reason says that it is unsure."""
    decision = decide(query(kind, 0.5), fleet(), TABLE)
    assert decision.tier is tier
    assert kind is PromptClass.UNKNOWN or "confidence of only 0.50" in decision.reason


@pytest.mark.parametrize(
    ("tokens", "tier"), [(1948, FAST), (1949, BALANCED), (3997, PRECISE), (8092, PRECISE), (8093, None)]
)
def test_context_must_fit(tokens: int, tier: TierName | None) -> None:
    """Prompt plus max_tokens within the context, to the token; over every context is refused as too long."""
    decision = decide(query(prompt_tokens=tokens), fleet(), TABLE)
    assert decision.tier is tier
    if tier is None:
        assert decision.refusal is Refusal.TOO_LONG


def test_hint_is_taken_over_the_class() -> None:
    """A hint beats the class in both directions."""
    assert decide(query(PromptClass.CODE, hint=FAST), fleet(), TABLE).tier is FAST
    assert decide(query(hint=PRECISE), fleet(), TABLE).tier is PRECISE


def test_hint_that_cannot_be_honoured_is_named() -> None:
    """A preferred tier that does not fit or is not ready gives way, and the reason says why."""
    long = decide(query(prompt_tokens=3000, hint=FAST), fleet(), TABLE)
    assert long.tier is BALANCED
    assert "hint fast not taken: 3000 prompt + 100 output tokens exceed its context of 2048" in long.reason
    dead = decide(query(hint=FAST), fleet({FAST: ReplicaState.FAILED}), TABLE)
    assert dead.tier is BALANCED
    assert "hint fast not taken: is failed" in dead.reason


def test_hint_that_is_not_ready_is_a_floor() -> None:
    """Who asks for balanced gets precise rather than fast when balanced is away, and fast only when nothing else is left."""
    away = {BALANCED: ReplicaState.FAILED}
    assert decide(query(hint=BALANCED), fleet(away), TABLE).tier is PRECISE
    left = decide(query(hint=BALANCED), fleet({**away, PRECISE: ReplicaState.FAILED}), TABLE)
    assert left.tier is FAST
    assert left.reason.startswith("degraded to fast: hint balanced wants balanced or higher")


def test_required_tier_or_refusal() -> None:
    """Required means that tier, with no fallback, or a refusal that says what passes and what does not."""
    taken = decide(query(hint=FAST, require=True), fleet(), TABLE)
    assert (taken.tier, taken.fallbacks) == (FAST, ())
    assert (
        decide(query(hint=FAST, require=True), fleet({FAST: ReplicaState.WARMING}), TABLE).refusal is Refusal.NOT_READY
    )
    assert decide(query(hint=FAST, require=True, prompt_tokens=3000), fleet(), TABLE).refusal is Refusal.TOO_LONG
    assert decide(query(hint=FAST, require=True), fleet(busy=32), TABLE).refusal is Refusal.AT_CAPACITY


def test_class_that_nothing_allows_is_degraded_and_says_so() -> None:
    """With only a lower tier left the request is served there, disclosed as degraded."""
    states = dict.fromkeys((BALANCED, PRECISE), ReplicaState.FAILED)
    decision = decide(query(PromptClass.CODE), fleet(states), TABLE)
    assert decision.tier is FAST
    assert decision.reason.startswith("degraded to fast: class code wants balanced or higher")


def test_sla_excludes_slow_tiers_and_unmeasured_loss() -> None:
    """Latency bounds are held against measured speed, the loss bound leaves only the reference precision."""
    speeds = {FAST: Speed(100, 1, 10), BALANCED: Speed(20, 0.1, 20), PRECISE: Speed(300, 1, 30)}
    assert decide(query(sla=Sla(ttft_ms=50)), fleet(speeds=speeds), TABLE).tier is BALANCED
    assert decide(query(sla=Sla(tpot_ms=15)), fleet(speeds=speeds), TABLE).tier is FAST
    loss = decide(query(sla=Sla(max_quality_loss=0.01)), fleet(speeds=speeds), TABLE)
    assert loss.tier is PRECISE
    assert "not measured yet" in loss.reason


def test_sla_that_nothing_meets_is_set_aside_or_refused() -> None:
    """Preferred bounds that no tier meets are set aside with a note; required ones are refused."""
    speeds = {name: Speed(100, 1, 10) for name in TierName}
    preferred = decide(query(sla=Sla(ttft_ms=1)), fleet(speeds=speeds), TABLE)
    assert preferred.tier is FAST
    assert "no tier is expected to meet the SLA" in preferred.reason
    required = decide(query(sla=Sla(ttft_ms=1), require=True), fleet(speeds=speeds), TABLE)
    assert required.refusal is Refusal.SLA_UNMET
    assert "TTFT of 120 ms expected, 1 asked" in required.reason


def test_slow_lower_precision_is_passed_over() -> None:
    """A tier over four times slower per token than a higher precision has nothing to offer; four times is still taken."""
    slow = {BALANCED: Speed(0, 0, 401), PRECISE: Speed(0, 0, 100)}
    decision = decide(query(PromptClass.CODE), fleet(speeds=slow), TABLE)
    assert decision.tier is PRECISE
    assert "balanced would do" in decision.reason
    even = {BALANCED: Speed(0, 0, 400), PRECISE: Speed(0, 0, 100)}
    assert decide(query(PromptClass.CODE), fleet(speeds=even), TABLE).tier is BALANCED


def test_fallbacks_go_up_first() -> None:
    """A retry goes to higher precisions first, then down from the top."""
    assert decide(query(hint=BALANCED), fleet(), TABLE).fallbacks == (PRECISE, FAST)
    assert decide(query(), fleet(), TABLE).fallbacks == (BALANCED, PRECISE)


def test_every_tier_has_a_verdict() -> None:
    """The decision says of each tier what is known and why it was taken or not; unknown is None."""
    decision = decide(query(), fleet({PRECISE: ReplicaState.STARTING}, {FAST: Speed(10, 1, 5)}), TABLE)
    assert [v.verdict == CHOSEN for v in decision.verdicts] == [True, False, False]
    assert decision.verdicts[0].predicted_ttft_ms == 30
    assert decision.verdicts[1].predicted_ttft_ms is None
    assert decision.verdicts[2].verdict == "is starting"
