"""Profiles as values and files: percentiles, names, and what is said of one that cannot be used."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from router.policy.profiles import (
    MIN_SPREAD,
    LatencyProfile,
    ProfileError,
    QualityProfile,
    first_fault,
    latency_name,
    load_latency,
    load_profile,
    percentile,
    profile_name,
)
from tests.unit.policy.made_profiles import IDENTITIES, counted, fit, latency, quality
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FAST, BALANCED, PRECISE = STANDARD_TIERS


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, 0.0),
        ([7.0], 0.0, 7.0),
        ([7.0], 1.0, 7.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0], 0.25, 1.25),
        ([0.0, 10.0, 20.0], 0.95, 19.0),
        ([0.0, 10.0, 20.0], 1.0, 20.0),
    ],
)
def test_percentiles_are_interpolated(
    values: list[float], share: float, expected: float
) -> None:
    """In any order of the values, up to both ends, and of none."""
    assert percentile(values, share) == pytest.approx(expected)


def test_tasks_that_neither_gets_right_do_not_count() -> None:
    """Only those that tell both apart, or that both get right."""
    profile = quality(counted(FAST, 8, 2), counted(BALANCED, 1))
    assert [one.flips for one in profile.of(FAST)] == [(40, 8, 2)]
    assert profile.of(PRECISE) == ()


def test_a_perfect_fit_still_scatters() -> None:
    """The spread has a floor; the other numbers are taken as they are."""
    model = fit(FAST, 25, spread=0.0).model
    assert model.ttft_spread == MIN_SPREAD
    assert model.tpot_spread == MIN_SPREAD
    assert fit(FAST, 25, spread=0.3).model.tpot_spread == 0.3
    assert model.step_ms(1) == 29
    assert model.step_knee == 5
    assert model.contention == 7
    assert model.profiled is True


def test_tiers_that_were_not_measured_again_keep_their_earlier_speeds() -> None:
    """New fits and samples replace those of their own tiers only."""
    merged = latency({FAST: 10}).with_others(latency({FAST: 99, PRECISE: 30}))
    assert {f.tier: f.step_base_ms for f in merged.fits} == {FAST: 10, PRECISE: 30}
    assert [(s.tier, s.ttft_ms) for s in merged.samples] == [(FAST, 10), (PRECISE, 30)]


def test_files_are_named_by_what_was_measured() -> None:
    """Another checkpoint or machine is another file, as is one that is not known; the order of tiers is none."""
    reordered = dict(reversed(IDENTITIES.items()))
    assert profile_name(reordered) == profile_name(IDENTITIES)
    assert latency_name(reordered, "big") == latency_name(IDENTITIES, "big")
    others = [IDENTITIES, {**IDENTITIES, FAST: "other"}, {**IDENTITIES, FAST: None}]
    names = [profile_name(o) for o in others] + [
        latency_name(o, m) for o in others for m in ("big", "small")
    ]
    assert len(set(names)) == len(names)


def test_profiles_are_the_same_after_a_file(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    measured = quality(counted(FAST, 8))
    path.write_text(measured.model_dump_json())
    assert load_profile(path) == measured
    speeds = latency({FAST: 10})
    path.write_text(speeds.model_dump_json())
    assert load_latency(path) == speeds


def test_a_profile_of_an_earlier_release_counts_tokens_and_is_measured_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "profile"
    path.write_text(json.dumps({"version": 2, "answer_tokens": 32, "losses": []}))
    with pytest.raises(
        ProfileError,
        match=r"no quality profile of this release: version.*run 'qarr profile quality' again",
    ):
        load_profile(path)


@pytest.mark.parametrize(
    ("load", "kind"), [(load_profile, "quality"), (load_latency, "latency")]
)
def test_what_cannot_be_loaded_says_what_to_do(
    load: Callable[[Path], object], kind: str, tmp_path: Path
) -> None:
    """A missing file, the other kind's file, and half a file, each by its name and kind."""
    path = tmp_path / "profile"
    with pytest.raises(
        ProfileError, match=f"the {kind} profile {path} cannot be read: No such file"
    ):
        load(path)
    other = latency({}) if kind == "quality" else quality()
    for content in (other.model_dump_json(), other.model_dump_json()[:40]):
        path.write_text(content)
        with pytest.raises(
            ProfileError,
            match=f"{path} is no {kind} profile .*; run 'qarr profile {kind}' again",
        ):
            load(path)


def test_a_profile_of_what_is_served_is_returned(tmp_path: Path) -> None:
    """Also where a tier's checkpoint is not known on either side; one that is known here must have been known there."""
    unknown: dict[TierName, str | None] = {**IDENTITIES, FAST: None}
    measured = quality(identities=unknown)
    assert measured.check(unknown, tmp_path) is measured
    speeds = latency({}, unknown)
    assert speeds.check(unknown, "big", tmp_path) is speeds
    with pytest.raises(
        ProfileError,
        match=r"quality profile .* another checkpoint of fast: unknown, here is digest of fast;",
    ):
        measured.check(IDENTITIES, tmp_path)
    with pytest.raises(
        ProfileError,
        match=r"latency profile .* another checkpoint of fast: unknown, here is digest of fast;",
    ):
        speeds.check(IDENTITIES, "big", tmp_path)


def test_a_profile_may_cover_more_tiers_than_are_served(tmp_path: Path) -> None:
    """A fleet without a tier can use what was measured with it."""
    quality().check({FAST: IDENTITIES[FAST]}, tmp_path)


@pytest.mark.parametrize("profile", [QualityProfile, LatencyProfile])
def test_the_first_fault_is_named(
    profile: type[QualityProfile | LatencyProfile],
) -> None:
    """By where it is and what is wrong; the value itself, which may be long, is left out."""
    with pytest.raises(ValidationError) as caught:
        profile.model_validate({"version": "secret"})
    assert (
        first_fault(caught.value)
        == f"version: Input should be {'3' if profile is QualityProfile else '1'}"
    )
