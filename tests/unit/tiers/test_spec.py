"""Values that describe tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiers.spec import SHOWN_DIGITS, UNKNOWN, EngineLaunch, Placement, TierName, TierSpec

FAST, BALANCED, PRECISE = TierName


def test_tiers_are_ranked_by_precision() -> None:
    assert [tier.rank for tier in (FAST, BALANCED, PRECISE)] == [0, 1, 2]


@pytest.mark.parametrize("tier", TierName)
def test_a_tiers_name_tells_nothing_of_its_precision(tier: TierName) -> None:
    assert TierSpec(tier, 1, 1, 1).precision == UNKNOWN


@pytest.mark.parametrize(
    ("fields", "identity"),
    [
        ({"digest": "abc", "urls": ("http://a",), "checkpoint": Path("/m")}, "abc"),
        ({"urls": ("http://a", "http://b"), "checkpoint": Path("/m")}, "http://a http://b /m"),
        ({"checkpoint": Path("/m")}, "/m"),
        ({}, None),
    ],
    ids=["digest", "addresses", "folder", "unknown"],
)
def test_weights_are_identified_by_digest_else_by_location(fields: dict, identity: str | None) -> None:
    """What is compared with recorded answers must not change when only the location of known weights does."""
    assert TierSpec(FAST, 1, 1, 1, **fields).identity == identity


def test_a_digest_is_shown_by_its_first_digits() -> None:
    assert TierSpec(FAST, 1, 1, 1, digest="0123456789abcdef" * 4).checkpoint_id == "0123456789abcdef"
    assert len("0123456789abcdef") == SHOWN_DIGITS
    assert TierSpec(FAST, 1, 1, 1).checkpoint_id is None


def test_a_launch_has_the_address_of_its_engine() -> None:
    launch = EngineLaunch(TierSpec(FAST, 1, 1, 1), Placement(), Path("p"), "m", "127.0.0.1", 9101, "key")
    assert launch.url == "http://127.0.0.1:9101"
