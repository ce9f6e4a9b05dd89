"""The speed model: its arithmetic, its fit to samples of known origin, and the profile's identity."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.profiles import (
    LatencyProfile,
    ProfileError,
    SpeedSample,
    latency_name,
    load_latency,
    profile_name,
)
from router.policy.table import PolicyStore
from router.profiling.latency import fit
from router.settings import load_settings
from tiers.fleet import Fleet
from tiers.least_squares import least_squares
from tiers.spec import STANDARD_TIERS, TierName, TierSpec
from tiers.speed import IDLE, ReplicaLoad, SpeedModel

FAST, BALANCED, PRECISE = STANDARD_TIERS
TRUE = SpeedModel(30, 2.0, 25, 6, ttft_steps=1.5)
SEQS = 16


def samples(noise: float, contention: float = 0.0, seed: int = 1) -> list[SpeedSample]:
    source = random.Random(seed)

    def seen(value: float) -> float:
        return value * (1 + source.uniform(-noise, noise))

    found = [
        SpeedSample(tier=FAST, prompt_tokens=tokens, sequences=0, waiting_tokens=0, batch=0, neighbours=0.0,
               ttft_ms=seen(TRUE.times(tokens, IDLE, SEQS, 1).ttft_ms), tpot_ms=None)
        for tokens in (16, 64, 256, 1024)
    ]  # fmt: skip
    for neighbours in (0.0, 0.5):
        slowed = 1 + contention * neighbours
        for batch in (1, 2, 4, 8, 16):
            for number in range(batch):
                load = ReplicaLoad(number, 24 * number)
                found.append(SpeedSample(tier=FAST, prompt_tokens=24, sequences=number, waiting_tokens=24 * number, batch=batch,
                                    neighbours=neighbours, ttft_ms=seen(TRUE.times(24, load, SEQS, 1).ttft_ms * slowed),
                                    tpot_ms=seen(TRUE.step_ms(batch) * slowed)))  # fmt: skip
    return found


def test_exact_samples_give_the_parameters_back() -> None:
    """Without noise the fit is the truth, with no error."""
    found = fit(FAST, samples(0, contention=0.7), SEQS)
    assert found.model.step_base_ms == pytest.approx(25, rel=1e-3)
    assert found.model.step_ms_per_sequence == pytest.approx(6, rel=1e-3)
    assert found.model.ttft_base_ms == pytest.approx(30, rel=1e-3)
    assert found.model.prefill_ms_per_token == pytest.approx(2, rel=1e-3)
    assert found.model.ttft_steps == pytest.approx(1.5, rel=1e-3)
    assert found.model.contention == pytest.approx(0.7, rel=1e-3)
    assert found.ttft_error.p95 == found.tpot_error.p95 == 0


def test_noise_is_stated() -> None:
    """With noise the parameters stay near, and the error says how large it is."""
    found = fit(FAST, samples(0.2), SEQS)
    assert found.model.step_base_ms == pytest.approx(25, rel=0.25)
    assert found.model.prefill_ms_per_token == pytest.approx(2, rel=0.25)
    assert 0.03 < found.tpot_error.median < 0.2
    assert found.tpot_error.median < found.tpot_error.p95 < 0.3
    assert 0.05 < found.tpot_spread < 0.2


def test_answers_that_come_in_one_piece_have_no_pace() -> None:
    """Where nobody read for a while, tokens seem to take no time at all: that says nothing of the engine."""
    sound = samples(0.1)
    bunched = [
        s.model_copy(update={"tpot_ms": pace, "ttft_ms": None})
        for s, pace in zip(sound[8:12], (0.0, 0.001, 0.02, 1.0), strict=True)
    ]
    found, alone = fit(FAST, [*sound, *bunched], SEQS), fit(FAST, sound, SEQS)
    assert found.tpot_spread == alone.tpot_spread
    assert found.tpot_error == alone.tpot_error
    assert found.step_base_ms == alone.step_base_ms


@given(
    st.lists(st.tuples(st.floats(1, 1e3), st.floats(0, 1e4)), min_size=3, max_size=30)
)
def test_coefficients_are_never_negative(points: list[tuple[float, float]]) -> None:
    """Whatever the samples, no time has a negative part."""
    found = least_squares([(1.0, x) for _, x in points], [y for y, _ in points])
    assert all(value >= 0 for value in found)


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(ProfileError, match="too few samples of fast"):
        fit(FAST, [s for s in samples(0) if s.batch < 2], SEQS)


def test_queue_for_a_place_counts() -> None:
    """Beyond the sequences that an engine runs, a request waits for others to end."""
    load = ReplicaLoad(SEQS + 3, 0, output_tokens=(SEQS + 3) * 100)
    waiting = (
        TRUE.times(10, load, SEQS, 0.5).ttft_ms
        - TRUE.times(10, ReplicaLoad(SEQS - 1, 0), SEQS, 0.5).ttft_ms
    )
    assert waiting == pytest.approx(
        4 * 2 * 50 * TRUE.step_ms(SEQS) / (SEQS + 1) + 1.5 * 6
    )


def test_engine_time_is_shared_by_the_batch() -> None:
    """A request's cost is its prefill and its share of the steps: larger batches share the fixed part."""
    assert TRUE.engine_ms(100, 10, 1) == 200 + 10 * 31
    assert TRUE.engine_ms(100, 10, 10) == 200 + 10 * 8.5


def test_a_profile_of_another_machine_or_checkpoint_is_refused(tmp_path: Path) -> None:
    """Speeds belong to weights on a machine; the error says what to run."""
    served: dict[TierName, str | None] = {FAST: "a", BALANCED: "b", PRECISE: "c"}
    profile = LatencyProfile(
        created=datetime.now(UTC), model="m", machine="big", checkpoints=served,
        fits=(fit(FAST, samples(0.1), SEQS),), samples=tuple(samples(0.1)),
    )  # fmt: skip
    path = tmp_path / latency_name(served, "big")
    path.write_text(profile.model_dump_json())
    load_latency(path).check(served, "big", path)
    with pytest.raises(
        ProfileError,
        match="measured on big, this is small; run 'qarr profile latency' again",
    ):
        profile.check(served, "small", path)
    with pytest.raises(ProfileError, match="another checkpoint of fast: a, here is z"):
        profile.check({**served, FAST: "z"}, "big", path)
    path.write_text('{"version": 9}')
    with pytest.raises(ProfileError, match="is no latency profile"):
        load_latency(path)
    assert latency_name(served, "big") != latency_name(served, "small")


def test_a_router_starts_without_profiles_that_it_cannot_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of another release, or half a file: said so with what to run, and counted as not measured."""
    served: dict[TierName, str | None] = {FAST: "a", BALANCED: "b", PRECISE: "c"}
    specs = tuple(
        TierSpec(tier, 2048, 16, 32, digest=digest) for tier, digest in served.items()
    )
    fleet = Fleet(specs, machine="big")
    identities = {spec.name: spec.identity for spec in specs}
    for name in (latency_name(identities, "big"), profile_name(identities)):
        (tmp_path / name).write_text('{"version": 9}')
    policy = PolicyStore(
        load_settings(None, {"policy": {"profiles": str(tmp_path)}}).policy,
        fleet,
        "made-8B",
    )
    assert policy.quality is None
    assert not fleet.speeds
    for kind in ("quality", "latency"):
        assert f"run 'qarr profile {kind}' again" in caplog.text
