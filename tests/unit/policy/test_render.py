"""Decisions as JSON values: what `/route`, problems and the page show."""

from __future__ import annotations

import dataclasses
import json

from msgspec.structs import replace

from classifier import PromptClass
from router.policy.decide import decide
from router.policy.render import render_decision, render_estimates, render_features
from tests.unit.policy.fleets import MEASURED, PROFILED, TABLE, fleet, query
from tiers.spec import PRECISIONS, STANDARD_TIERS, ReplicaStatus

FAST, BALANCED, PRECISE = STANDARD_TIERS


def test_a_decision_is_json_with_every_tier() -> None:
    """Names are plain strings, tiers rise in precision, and nothing needs an encoder of its own."""
    snapshot = fleet(speeds=MEASURED)
    served = [
        replace(
            tier,
            spec=dataclasses.replace(tier.spec, precision=PRECISIONS[tier.spec.name]),
        )
        for tier in snapshot.tiers
    ]
    decision = decide(
        query(PromptClass.CODE), replace(snapshot, tiers=tuple(served)), PROFILED
    )
    rendered = json.loads(json.dumps(render_decision(decision)))
    assert rendered["tier"] == "precise"
    assert rendered["precision"] == "bf16"
    assert rendered["class"] == "code"
    assert rendered["prompt_tokens"] == 20
    assert rendered["max_tokens"] == 100
    assert [report["tier"] for report in rendered["tiers"]] == [
        "fast",
        "balanced",
        "precise",
    ]
    assert rendered["tiers"][2]["verdict"] == "chosen"
    assert rendered["fallbacks"] == ["balanced", "fast"]
    assert rendered["reason"] == decision.reason
    assert rendered["retry_after_s"] is None


def test_a_refusal_has_no_tier_and_says_when() -> None:
    """A fleet that starts is worth another try, after the time that starting takes."""
    rendered = render_decision(
        decide(
            query(), fleet(dict.fromkeys(STANDARD_TIERS, ReplicaStatus.WARMING)), TABLE
        )
    )
    assert rendered["tier"] is None
    assert rendered["precision"] is None
    assert rendered["fallbacks"] == []
    assert rendered["retry_after_s"] == 10
    assert {report["state"] for report in rendered["tiers"]} == {"warming"}


def test_losses_have_their_interval_and_what_they_rest_on() -> None:
    """0 answers: they are published; the reference loses nothing."""
    measured = decide(query(PromptClass.CODE), fleet(speeds=MEASURED), PROFILED)
    shown, _, reference = render_estimates(measured)
    assert shown["expected_loss"] == 0.2
    assert shown["expected_loss_interval"] == [0.16, 0.25]
    assert shown["loss_answers"] == 40
    assert reference["expected_loss"] == 0
    unknown = render_estimates(decide(query(), fleet(), TABLE))[0]
    assert [unknown[name] for name in ("predicted_ttft_ms", "cost")] == [None, None]


def test_confidence_is_rounded_and_signals_are_a_list() -> None:
    asked = query(confidence=0.123456)
    asked = replace(
        asked, features=replace(asked.features, signals=("a", "b"), language="de")
    )
    rendered = render_decision(decide(asked, fleet(), TABLE))
    assert rendered["confidence"] == rendered["features"]["confidence"] == 0.123
    assert rendered["features"] == render_features(asked.features)
    assert rendered["features"]["signals"] == ["a", "b"]
    assert rendered["features"]["language"] == "de"
