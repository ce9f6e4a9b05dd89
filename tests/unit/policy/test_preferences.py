"""What a request says about precisions, tiers and what they are sorted by: what it excludes never serves."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from classifier import PromptClass
from router.policy.decide import decide, fallbacks, successors
from router.policy.decision import Basis, Refusal, Sla
from tests.unit.policy.fleets import BALANCED, FAST, PRECISE, TABLE, fleet, query, said
from tiers.formats import quantizations_of, shown_quantization
from tiers.spec import ReplicaStatus
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from tiers.snapshot import FleetSnapshot

SERVED = {FAST: "awq-int4", BALANCED: "fp8 (stated)", PRECISE: "bf16"}


def known(given: FleetSnapshot, **changed: str) -> FleetSnapshot:
    precisions = {**SERVED, **changed}
    tiers = [
        replace(t, spec=dataclasses.replace(t.spec, precision=precisions[t.spec.name]))
        for t in given.tiers
    ]
    return replace(given, tiers=tuple(tiers))


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("awq-int4", "int4"), ("gptq-int8", "int8"), ("nvfp4", "fp4"), ("mxfp8", "fp8"), ("bf16", "bf16"),
        ("fp16", "fp16"), ("fp8 (stated)", "fp8"), ("fp8 (stated; its checkpoint is bf16)", "fp8"), ("int3", "unknown"),
        ("unknown", "unknown"), ("fp8, bf16", "bf16 fp8"), ("fp80", "unknown"),
        ("fp8+nvfp4", "fp4"), ("bf16+mxfp4+kv-fp8", "fp4"), ("awq-int4+fp8 (stated)", "int4"), ("fp8-block", "fp8"),
        ("int8-w8a8", "int8"), ("fp8+of-tomorrow", "unknown"), ("fp8 (stated), awq-int4", "fp8 int4"), ("nf4", "fp4"),
    ],
)  # fmt: skip
def test_precisions_have_openrouters_names(precision: str, names: str) -> None:
    """Each has that of its lowest format; of replicas that differ all count, and none is shown for the tier."""
    assert sorted(quantizations_of(precision)) == names.split()
    assert shown_quantization(precision) == (names if " " not in names else "unknown")


def test_only_allowed_precisions_serve_and_take_over() -> None:
    """Neither the choice nor a fallback nor a successor has another one, and the verdicts and the reason say so."""
    asked = query(precisions=frozenset({"fp8", "bf16"}))
    decision = decide(asked, known(fleet()), TABLE)
    assert decision.tier == BALANCED
    assert fallbacks(decision) == (PRECISE,)
    assert said(decision)[0] == "serves awq-int4, and the request allows bf16, fp8 only"
    assert "the request allows bf16, fp8 only" in decision.reason
    assert successors(PRECISE, asked, known(fleet()), table=TABLE) == (BALANCED,)
    assert decide(
        query(PromptClass.CODE, precisions=frozenset({"int4"})), known(fleet()), TABLE
    ).degraded == ("quality",)


def test_who_allows_eight_bits_never_gets_four() -> None:
    """Experts in 4 bits beside attention in 8 are 4 bits, whatever the tier is called."""
    mixed = known(fleet(), balanced="fp8+nvfp4")
    asked = query(precisions=frozenset({"fp8"}))
    assert decide(asked, mixed, TABLE).refusal is Refusal.EXCLUDED
    allowed = query(precisions=frozenset({"fp4"}))
    assert decide(allowed, mixed, TABLE).tier is BALANCED


def test_a_tier_of_several_precisions_needs_all_of_them_allowed() -> None:
    mixed = known(fleet(), fast="awq-int4, fp8")
    assert (
        decide(query(precisions=frozenset({"int4"})), mixed, TABLE).refusal
        is Refusal.EXCLUDED
    )
    assert (
        decide(query(precisions=frozenset({"int4", "fp8"})), mixed, TABLE).tier is FAST
    )


def test_a_hint_beyond_the_allowed_is_not_taken() -> None:
    """A required one is refused, as excluded by the request itself; a key's refusal is told first."""
    asked = query(precisions=frozenset({"bf16"}), hint=FAST)
    assert decide(asked, known(fleet()), TABLE).tier is PRECISE
    assert (
        decide(replace(asked, require=True), known(fleet()), TABLE).refusal
        is Refusal.EXCLUDED
    )
    assert (
        decide(replace(asked, allowed=frozenset({FAST})), known(fleet()), TABLE).refusal
        is Refusal.NOT_ALLOWED
    )


def test_a_tier_whose_precision_is_not_known_yet_may_turn_out_to_fit() -> None:
    """While it starts the request is refused for now; once it is ready and cannot say, it is excluded."""
    asked = query(precisions=frozenset({"bf16"}))
    starting = known(fleet({PRECISE: ReplicaStatus.STARTING}), precise="unknown")
    assert decide(asked, starting, TABLE).refusal is Refusal.NOT_READY
    assert (
        decide(replace(asked, only=frozenset({FAST})), starting, TABLE).refusal
        is Refusal.EXCLUDED
    )
    assert (
        decide(asked, known(fleet(), precise="unknown"), TABLE).refusal
        is Refusal.EXCLUDED
    )


def test_only_named_tiers_serve() -> None:
    decision = decide(query(only=frozenset({FAST, PRECISE})), known(fleet()), TABLE)
    assert decision.tier == FAST
    assert fallbacks(decision) == (PRECISE,)
    assert said(decision)[1] == "is not among the tiers that the request allows"


SPEEDS = {
    FAST: SpeedModel(300.0, 0.1, step_base_ms=4.0, step_ms_per_sequence=1.0),
    BALANCED: SpeedModel(40.0, 0.1, step_base_ms=30.0, step_ms_per_sequence=1.0),
    PRECISE: SpeedModel(80.0, 0.1, step_base_ms=2.0, step_ms_per_sequence=1.0),
}


@pytest.mark.parametrize(
    ("sort", "tier"),
    [("latency", BALANCED), ("throughput", PRECISE), ("price", PRECISE)],
)
def test_sorted_by_what_the_request_says(sort: str, tier: object) -> None:
    """The least predicted TTFT, TPOT or engine time serves; the reason says which."""
    decision = decide(query(sort=sort), fleet(speeds=SPEEDS), TABLE)
    assert decision.tier == tier
    assert decision.basis == Basis.SORT
    assert f"sort {sort}: {tier} has the least" in decision.reason


def test_sorting_stays_within_the_bounds() -> None:
    """Quality comes first: of the tiers that a class may have, and within the request's SLA."""
    assert (
        decide(
            query(PromptClass.CODE, sort="latency"), fleet(speeds=SPEEDS), TABLE
        ).tier
        is not FAST
    )
    assert (
        decide(
            query(sort="latency", sla=Sla(tpot_ms=15)), fleet(speeds=SPEEDS), TABLE
        ).tier
        is PRECISE
    )
    assert (
        decide(query(sort="latency", hint=FAST), fleet(speeds=SPEEDS), TABLE).basis
        is Basis.HINT
    )
    unmeasured = decide(query(sort="throughput"), fleet(), TABLE)
    assert unmeasured.tier == FAST
    assert ("speed is not measured" in unmeasured.reason) is True
