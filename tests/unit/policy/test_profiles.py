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
from tiers.spec import STANDARD_TIERS, EngineBuild, TierName

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


AUTO = EngineBuild(version="0.32.0", kv_cache_dtype="auto")
NEWER = EngineBuild(version="0.33.0", kv_cache_dtype="auto")
KV_FP8 = EngineBuild(version="0.32.0", kv_cache_dtype="fp8")


def served(**builds: EngineBuild) -> dict[TierName, tuple[EngineBuild, ...]]:
    """Return what each tier's engine computes with; by default what everything was measured with."""
    return {tier: (builds.get(tier, AUTO),) for tier in STANDARD_TIERS}


MEASURED_WITH = {"builds": served()}
WHOLE = quality(counted(FAST, 8), counted(BALANCED, 1))


@pytest.mark.parametrize("changed", [NEWER, KV_FP8], ids=["version", "KV cache"])
def test_a_tier_whose_engine_has_changed_is_not_measured(changed: EngineBuild) -> None:
    """Its losses and its speed are gone, those of other tiers still hold, and there is something left to measure."""
    losses = WHOLE.model_copy(update=MEASURED_WITH)
    speeds = latency({FAST: 10, PRECISE: 30}).model_copy(update=MEASURED_WITH)
    now = served(fast=changed)
    left = losses.covering(now)
    assert left.of(FAST) == ()
    assert left.of(BALANCED) == losses.of(BALANCED)
    assert left.whole is False
    assert [fit.tier for fit in speeds.covering(now).fits] == [PRECISE]
    assert [sample.tier for sample in speeds.covering(now).samples] == [PRECISE]
    assert losses.covering(served()) == losses
    assert speeds.covering(served()) == speeds


def test_no_loss_holds_once_the_reference_has_changed() -> None:
    losses = WHOLE.model_copy(update=MEASURED_WITH)
    left = losses.covering(served(precise=NEWER))
    assert left.counts == ()
    assert left.whole is False


def test_profiles_that_do_not_name_engines_hold_for_unquantized_kv_caches() -> None:
    """Earlier releases wrote such profiles; engines that do not tell what they are keep theirs as well."""
    assert WHOLE.builds == {}
    assert WHOLE.covering(served()) == WHOLE
    assert WHOLE.covering(served(fast=EngineBuild())) == WHOLE
    assert WHOLE.covering(served(fast=KV_FP8)).of(FAST) == ()


def test_engines_that_were_not_asked_yet_contradict_nothing() -> None:
    losses = WHOLE.model_copy(update=MEASURED_WITH)
    assert losses.covering(dict.fromkeys(STANDARD_TIERS, ())) == losses


def test_earlier_speeds_of_another_engine_are_not_kept() -> None:
    """A tier that is measured alone does not bring back what other tiers had before their engines changed."""
    earlier = latency({FAST: 99, PRECISE: 30}).model_copy(update=MEASURED_WITH)
    newer = latency({FAST: 10}).model_copy(update={"builds": served(precise=NEWER)})
    assert [fit.tier for fit in newer.with_others(earlier).fits] == [FAST]
    same = latency({FAST: 10}).model_copy(update=MEASURED_WITH)
    assert [fit.tier for fit in same.with_others(earlier).fits] == [FAST, PRECISE]


def test_a_profile_keeps_what_its_engines_were_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    losses = WHOLE.model_copy(update=MEASURED_WITH)
    path.write_text(losses.model_dump_json())
    assert load_profile(path) == losses
