"""What is said of losses that could not be measured, because answers were cut while the model was thinking."""

from __future__ import annotations

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.not_measured import (
    FEWEST_PROPOSED,
    cut_sentence,
    remedy,
    render_unmeasured,
    unmeasured_kinds,
)
from tests.unit.policy.made_profiles import counted, cut_counted, quality
from tiers.spec import TierName

FAST = TierName.FAST
BALANCED = TierName.BALANCED
LONG = PromptClass.LONG_CONTEXT


def test_only_kinds_without_any_measured_answer_are_named() -> None:
    partly_cut = counted(FAST, 1).model_copy(update={"cut": 7})
    profile = quality(
        partly_cut,
        cut_counted(FAST, 10, LONG, Complexity.MODERATE),
        cut_counted(FAST, 12, LONG, Complexity.COMPLEX),
        cut_counted(FAST, 2, PromptClass.MATH, Complexity.COMPLEX),
        counted(BALANCED, 0),
        think_tokens=4096,
    )
    unmeasured = unmeasured_kinds(profile)
    assert unmeasured.keys() == {FAST}
    assert unmeasured[FAST].cut == 24
    assert unmeasured[FAST].text == (
        "not measured: cut while thinking: long context (moderate, complex), math (complex), 24 tasks, with up to 4,096 "
        "tokens for thoughts; published losses count"
    )
    assert "--think-tokens 8192" in unmeasured[FAST].remedy


def test_nothing_is_said_where_nothing_was_cut() -> None:
    assert unmeasured_kinds(quality(counted(FAST, 1))) == {}
    assert cut_sentence([counted(FAST, 1)], 100) is None


def test_it_is_told_as_json() -> None:
    profile = quality(cut_counted(FAST, 1), think_tokens=0)
    told = render_unmeasured(unmeasured_kinds(profile))[FAST]
    assert told["kinds"] == [{"class": "chat", "complexity": "moderate"}]
    assert told["cut"] == 1
    assert told["think_tokens"] == 0
    assert "chat (moderate), 1 task, with no tokens for thoughts" in told["text"]
    assert "profile.think_tokens" in told["remedy"]


def test_the_report_counts_what_was_cut_on_each_tier() -> None:
    partly_cut = counted(FAST, 1, of=40).model_copy(update={"cut": 7})
    sentence = cut_sentence([partly_cut, cut_counted(BALANCED, 3)], 200)
    assert sentence is not None
    assert "7 of 57 (fast), 3 of 3 (balanced)" in sentence
    assert "neither as right nor as wrong" in sentence


def test_a_higher_limit_is_proposed() -> None:
    assert f"--think-tokens {FEWEST_PROPOSED}" in remedy(0)
    assert "--think-tokens 10000" in remedy(5000)
