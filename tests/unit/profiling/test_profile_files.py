"""The folder of profiles: one writer at a time, whole files, and measurements of other tiers kept."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from router.policy.profiles import (
    Fit,
    FitError,
    LatencyProfile,
    ProfileError,
    QualityProfile,
    load_latency,
    load_profile,
)
from router.profiling.profile_files import keep_latency, keep_quality, only_one
from tiers.spec import STANDARD_TIERS, TierName

FAST, BALANCED, PRECISE = STANDARD_TIERS
SERVED: dict[TierName, str | None] = {FAST: "a", BALANCED: "b", PRECISE: None}
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def latency(
    tiers: tuple[TierName, ...], step_ms: float, machine: str = "m"
) -> LatencyProfile:
    error = FitError(median=0, p95=0)
    fits = tuple(
        Fit(tier=tier, ttft_base_ms=1, prefill_ms_per_token=1, ttft_steps=0, step_base_ms=step_ms,
            step_ms_per_sequence=0, step_knee=0, step_ms_beyond_knee=0, contention=0, ttft_spread=0, tpot_spread=0,
            ttft_error=error, tpot_error=error, samples=0)
        for tier in tiers
    )  # fmt: skip
    return LatencyProfile(
        created=NOW,
        model="m",
        machine=machine,
        checkpoints=SERVED,
        fits=fits,
        samples=(),
    )


def test_one_measurement_writes_at_a_time(tmp_path: Path) -> None:
    """The second is told what to do; the lock goes with its holder, and the folder is made."""
    folder = tmp_path / "made" / "here"
    with (
        only_one(folder),
        pytest.raises(
            ProfileError, match=r"another measurement writes .* 'qarr doctor'"
        ),
        only_one(folder),
    ):
        pass
    with only_one(folder), only_one(tmp_path / "another"):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(
            ProfileError, match=r"policy\.profiles: .*file/folder cannot be written"
        ),
        only_one(tmp_path / "file" / "folder"),
    ):
        pass
    with pytest.raises(ProfileError, match="cannot be written"):
        keep_latency(tmp_path / "none", latency((FAST,), 1))


def test_tiers_that_are_left_out_keep_their_speed(tmp_path: Path) -> None:
    """A tier measured again replaces its own speed only; another machine has a profile of its own."""
    path = keep_latency(tmp_path, latency(tuple(STANDARD_TIERS), 10))
    assert keep_latency(tmp_path, latency((BALANCED,), 20)) == path
    step_times = {fit.tier: fit.step_base_ms for fit in load_latency(path).fits}
    assert step_times == {FAST: 10, BALANCED: 20, PRECISE: 10}
    assert keep_latency(tmp_path, latency((FAST,), 30, machine="other")) != path
    assert keep_latency(tmp_path, latency(tuple(STANDARD_TIERS), 40)) == path
    assert {fit.step_base_ms for fit in load_latency(path).fits} == {40}
    assert not list(tmp_path.glob("*.part"))


def test_a_quality_profile_is_the_same_after_its_file(tmp_path: Path) -> None:
    profile = QualityProfile(
        created=NOW, model="m", checkpoints=SERVED, tasks="made", counts=()
    )
    path = keep_quality(tmp_path, profile)
    assert load_profile(path) == profile
    assert keep_quality(tmp_path, profile.model_copy(update={"adapter": "a"})) != path
