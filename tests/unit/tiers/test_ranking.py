"""The order of tiers: by bits until every tier's loss is measured, then by loss; the highest is always last."""

from __future__ import annotations

import pytest

from tiers.fleet import Fleet
from tiers.formats import rank_bits
from tiers.ranking import rising
from tiers.replica import Replica
from tiers.spec import STANDARD_TIERS, UNKNOWN, TierName, TierSpec

FAST, BALANCED, PRECISE = STANDARD_TIERS
INT8 = TierName("int8")
NVFP4 = TierName("nvfp4")


def spec(name: TierName, precision: str = UNKNOWN, replicas: int = 1) -> TierSpec:
    return TierSpec(
        name,
        100,
        max_num_seqs=1,
        max_in_flight=1,
        precision=precision,
        replicas=replicas,
    )


@pytest.mark.parametrize(
    ("precision", "bits"),
    [
        ("awq-int4", 4),
        ("gptq-int8", 8),
        ("nvfp4", 4),
        ("mxfp8", 8),
        ("bf16", 16),
        ("fp8+int4", 4),
        ("int8 (stated; its checkpoint is bf16)", 8),
        (UNKNOWN, None),
    ],
)
def test_the_bits_of_a_weight_are_read_from_the_precision(
    precision: str, bits: int | None
) -> None:
    """Of several formats, the fewest: a tier is as good as its worst layer."""
    assert rank_bits(precision) == bits


def test_tiers_are_ordered_by_bits() -> None:
    """An unknown precision stands just below the highest; of equal bits, those that are always there come first."""
    mine = TierName("mine")
    specs = [
        spec(PRECISE, "bf16"),
        spec(INT8, "int8"),
        spec(mine),
        spec(BALANCED, "fp8"),
        spec(NVFP4, "nvfp4"),
        spec(FAST),
    ]
    assert [s.name for s in rising(specs, {})] == [
        FAST,
        NVFP4,
        BALANCED,
        INT8,
        mine,
        PRECISE,
    ]


def test_measured_loss_goes_before_bits() -> None:
    """But only if all are measured: a loss and a number of bits cannot be compared. Tiers without engines do not count."""
    specs = [
        spec(FAST, replicas=0),
        spec(BALANCED, "fp8"),
        spec(INT8, "int8"),
        spec(PRECISE),
    ]
    some = {INT8: 0.05}
    every = {INT8: 0.05, BALANCED: 0.02}
    assert [s.name for s in rising(specs, some)] == [FAST, BALANCED, INT8, PRECISE]
    assert [s.name for s in rising(specs, every)] == [FAST, INT8, BALANCED, PRECISE]


def test_a_fleet_is_put_in_order_again_when_more_is_known() -> None:
    """A precision that an engine by URL tells, and losses that a profile has."""
    fleet = Fleet((spec(PRECISE), spec(FAST), spec(BALANCED), spec(INT8)))
    assert [s.name for s in fleet.specs] == [FAST, BALANCED, INT8, PRECISE]
    replica = fleet.add(Replica("int8-0", spec(INT8), "http://a", "", "m"))
    fleet.note_precision(replica, "int3")
    assert [s.name for s in fleet.specs] == [INT8, FAST, BALANCED, PRECISE]
    assert [fleet.rank(tier) for tier in (INT8, PRECISE)] == [0, 3]
    fleet.rank_by_loss({FAST: 0.3, INT8: 0.2, BALANCED: 0.1})
    assert [s.name for s in fleet.specs] == [FAST, INT8, BALANCED, PRECISE]
    assert [tier.spec.name for tier in fleet.snapshot().tiers] == [
        FAST,
        INT8,
        BALANCED,
        PRECISE,
    ]
