"""Values that describe tiers."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from tiers.spec import (
    SHOWN_DIGITS,
    STANDARD_TIERS,
    UNKNOWN,
    EngineLaunch,
    EnginePlacement,
    TierName,
    TierSpec,
    in_order,
)

FAST, BALANCED, PRECISE = STANDARD_TIERS


def test_equal_names_are_one_object() -> None:
    """Also copies, those that pickle makes for another process, and those that pydantic reads."""
    name = TierName("int8")
    read = TypeAdapter(dict[TierName, int]).validate_json('{"int8": 1, "fast": 2}')
    sent = pickle.loads(pickle.dumps(name))  # noqa: S301  our own bytes
    assert name is TierName("int8") is copy.deepcopy(name) is sent is next(iter(read))
    assert list(read) == [name, FAST]
    assert name == "int8"


@pytest.mark.parametrize(
    "name", ["", "auto", "qarr", "Fast", "8bit", "a.b", "a b", "x" * 33, "fast\n"]
)
def test_what_no_tier_can_be_called_is_refused(name: str) -> None:
    """``auto`` and ``qarr`` are models that stand for any tier; a name must be a part of metrics and variables."""
    with pytest.raises(ValueError, match="1 to 32 lower-case letters"):
        TierName(name)


def test_tiers_are_listed_with_the_highest_last() -> None:
    """Each once; those that the settings add by name, whatever order they come in."""
    nvfp4 = TierName("nvfp4")
    int8 = TierName("int8")
    assert in_order([PRECISE, nvfp4, FAST, int8, FAST]) == [FAST, int8, nvfp4, PRECISE]


@pytest.mark.parametrize("tier", STANDARD_TIERS)
def test_a_tiers_name_tells_nothing_of_its_precision(tier: TierName) -> None:
    assert TierSpec(tier, 1, max_num_seqs=1, max_in_flight=1).precision == UNKNOWN


@pytest.mark.parametrize(
    ("fields", "identity"),
    [
        ({"digest": "abc", "urls": ("http://a",), "checkpoint": Path("/m")}, "abc"),
        (
            {"urls": ("http://a", "http://b"), "checkpoint": Path("/m")},
            "http://a http://b /m",
        ),
        ({"checkpoint": Path("/m")}, "/m"),
        ({}, None),
    ],
    ids=["digest", "addresses", "folder", "unknown"],
)
def test_weights_are_identified_by_digest_else_by_location(
    fields: dict, identity: str | None
) -> None:
    """What is compared with recorded answers must not change when only the location of known weights does."""
    assert (
        TierSpec(FAST, 1, max_num_seqs=1, max_in_flight=1, **fields).identity
        == identity
    )


def test_a_digest_is_shown_by_its_first_digits() -> None:
    assert (
        TierSpec(
            FAST, 1, max_num_seqs=1, max_in_flight=1, digest="0123456789abcdef" * 4
        ).checkpoint_id
        == "0123456789abcdef"
    )
    assert len("0123456789abcdef") == SHOWN_DIGITS
    assert TierSpec(FAST, 1, max_num_seqs=1, max_in_flight=1).checkpoint_id is None


def test_a_launch_has_the_address_of_its_engine() -> None:
    launch = EngineLaunch(
        TierSpec(FAST, 1, max_num_seqs=1, max_in_flight=1),
        EnginePlacement(),
        python=Path("p"),
        served_model="m",
        host="127.0.0.1",
        port=9101,
        api_key="key",
    )
    assert launch.url == "http://127.0.0.1:9101"
