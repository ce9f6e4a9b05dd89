"""The speed model: its formulas, its limits, and how it follows what is seen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import astuple

from tiers.speed import (
    HALF_LIFE_S,
    IDLE,
    MAX_PREFILL,
    MEMORY,
    STEADY,
    PredictedTimes,
    ReplicaLoad,
    SpeedModel,
    Trend,
    remaining_tokens,
)

MODEL = SpeedModel(
    ttft_base_ms=40,
    prefill_ms_per_token=0.5,
    step_base_ms=10,
    step_ms_per_sequence=2,
    ttft_steps=1.5,
)
KNEE = replace(MODEL, step_knee=4, step_ms_beyond_knee=3)
SEQS = 8


@pytest.mark.parametrize(
    ("sequences", "step"), [(0, 10), (1, 12), (4, 18), (5, 23), (8, 38)]
)
def test_a_step_grows_faster_beyond_the_knee(sequences: int, step: float) -> None:
    assert KNEE.step_ms(sequences) == step


def test_an_idle_replica_takes_its_base_times() -> None:
    """TTFT: base and own prompt. TPOT: a step of one sequence, or of as many as the request has."""
    assert MODEL.times(100, IDLE, SEQS, 1.0) == PredictedTimes(40 + 50, 12)
    assert MODEL.times(100, IDLE, SEQS, 1.0, sequences=3) == PredictedTimes(90, 16)


def test_a_new_prompt_waits_for_prompts_and_steps_before_it() -> None:
    """Waiting prompts are computed first, and steps of the running batch are in between."""
    times = MODEL.times(100, ReplicaLoad(sequences=3, prompt_tokens=200), SEQS, 1.0)
    assert times == PredictedTimes(
        40 + 0.5 * 300 + 1.5 * MODEL.step_ms(3), MODEL.step_ms(4)
    )


def test_beyond_the_largest_batch_a_request_waits_for_others_to_end() -> None:
    """With all sequences taken, it waits for the next end; its own steps are those of the full batch."""
    load = ReplicaLoad(sequences=SEQS, output_tokens=800)
    times = MODEL.times(0, load, SEQS, 0.5)
    left = 0.5 * 800 / SEQS
    assert times.ttft_ms == pytest.approx(
        40 + 1.5 * MODEL.step_ms(SEQS) + MODEL.step_ms(SEQS) * 2 * left / (SEQS + 1)
    )
    assert times.tpot_ms == MODEL.step_ms(SEQS)
    further = MODEL.times(
        0, structs.replace(load, sequences=SEQS + 3), SEQS, 0.5
    ).ttft_ms
    assert further > times.ttft_ms


def test_neighbours_slow_both_times_in_proportion() -> None:
    slowed = replace(MODEL, contention=0.5)
    alone, beside = (
        slowed.times(100, ReplicaLoad(neighbours=share), SEQS, 1.0)
        for share in (0.0, 1.0)
    )
    assert astuple(beside) == pytest.approx([1.5 * ms for ms in astuple(alone)])


def test_neighbours_count_for_as_long_as_they_compute() -> None:
    """Those that compute now until they are expected to end, and later as many as usually do."""
    load = ReplicaLoad(neighbours=0.5, neighbours_left_ms=100, neighbours_usually=0.2)
    assert [load.neighbours_within(ms) for ms in (50, 100, 200)] == pytest.approx(
        [0.6, 0.6, 0.25 + 0.75 * 0.2]
    )
    assert ReplicaLoad(neighbours=0.5).neighbours_within(1e9) == 0.5
    assert ReplicaLoad(neighbours_usually=0.2).neighbours_within(1) == 0.2


def test_a_long_answer_outlasts_its_neighbours() -> None:
    """They slow its prompt, and only the first part of its tokens."""
    slowed = replace(MODEL, contention=1.0)
    load = ReplicaLoad(neighbours=1.0, neighbours_left_ms=300)
    short, long = (
        slowed.times(100, load, SEQS, 1.0, output_tokens=n) for n in (1, 1000)
    )
    assert short.ttft_ms == long.ttft_ms == 2 * 90
    assert short.tpot_ms == 2 * 12
    assert long.tpot_ms == pytest.approx(12 * (1 + 300 / (180 + 1000 * 12)))


def test_what_a_replica_has_left() -> None:
    """Its prompts, then the steps of its answers, as long as they are expected to be."""
    load = ReplicaLoad(sequences=2, prompt_tokens=30, output_tokens=100)
    assert MODEL.left_ms(load, SEQS, 0.5) == 0.5 * 30 + 0.5 * 50 * MODEL.step_ms(2)
    assert MODEL.left_ms(IDLE, SEQS, 0.5) == 0


def test_prompts_that_keep_coming_slow_decoding_up_to_a_bound() -> None:
    """At 0.5 ms a token, one token a millisecond takes half of the time; more than 0.8 of it is not believed."""
    assert MODEL.times(
        0, ReplicaLoad(prefill_rate=1.0), SEQS, 1.0
    ).tpot_ms == pytest.approx(12 / 0.5)
    assert MODEL.times(
        0, ReplicaLoad(prefill_rate=1e9), SEQS, 1.0
    ).tpot_ms == pytest.approx(12 / (1 - MAX_PREFILL))


@given(
    st.integers(0, 5000),
    st.builds(
        ReplicaLoad,
        st.integers(0, 40),
        st.integers(0, 10_000),
        st.integers(0, 10_000),
        st.floats(0, 1),
        st.floats(0, 10),
    ),
)
def test_more_load_never_makes_an_answer_faster(
    prompt_tokens: int, load: ReplicaLoad
) -> None:
    """One more sequence, a longer prompt, a busier neighbour: no time falls, and all are finite."""
    model = replace(KNEE, contention=0.5)
    before = model.times(prompt_tokens, load, SEQS, 0.7)
    heavier = (
        model.times(prompt_tokens + 100, load, SEQS, 0.7),
        model.times(
            prompt_tokens,
            structs.replace(load, prompt_tokens=load.prompt_tokens + 100),
            SEQS,
            0.7,
        ),
        model.times(prompt_tokens, structs.replace(load, neighbours=1.0), SEQS, 0.7),
    )
    for after in heavier:
        assert after.ttft_ms >= before.ttft_ms > 0
        assert math.inf > after.tpot_ms >= before.tpot_ms > 0


def test_engine_time_is_shared_by_the_batch() -> None:
    """A request pays its own prefill, and of each step the part of one sequence."""
    assert MODEL.engine_ms(100, 10, batch=1) == 50 + 10 * 12
    assert MODEL.engine_ms(100, 10, batch=4) == 50 + 10 * 18 / 4


def test_relief_is_the_time_until_the_next_end() -> None:
    """Of n requests spread evenly over their way, the next one has 2 / (n + 1) of the mean rest left."""
    assert MODEL.relief_ms(IDLE, SEQS, 1.0) == 0.0
    load = ReplicaLoad(sequences=3, prompt_tokens=20, output_tokens=300)
    assert MODEL.relief_ms(load, SEQS, 1.0) == pytest.approx(
        0.5 * 20 + 100 * 2 / 4 * MODEL.step_ms(3)
    )
    assert remaining_tokens(load, 0.5) == 50
    assert remaining_tokens(ReplicaLoad(output_tokens=10), 1.0) == 10


def test_the_faster_of_two_measurements_counts_for_each_time() -> None:
    """Whatever else a machine does can only slow a measurement down."""
    other = SpeedModel(ttft_base_ms=50, prefill_ms_per_token=0.25, step_base_ms=9)
    assert MODEL.fastest(other) == replace(
        MODEL, prefill_ms_per_token=0.25, step_base_ms=9
    )


@pytest.mark.parametrize(
    ("fields", "source", "under_load"),
    [
        ({}, "idle", False),
        ({"learned": True}, "live", True),
        ({"profiled": True, "learned": True}, "profile", True),
    ],
)
def test_a_model_names_its_origin(
    fields: dict, source: str, *, under_load: bool
) -> None:
    model = replace(MODEL, **fields)
    assert model.source == source
    assert model.under_load == under_load


def test_a_trend_moves_by_a_fifth_of_what_was_seen() -> None:
    """Twice the predicted time: the mean moves by a fifth of log 2, and the variance takes the deviation in."""
    trend = Trend(0.0, 0.01, at=0.0).after(100, 200, 0.0, 0.1)
    assert trend.mean == pytest.approx((1 - MEMORY) * math.log(2))
    assert trend.variance == pytest.approx(
        MEMORY * (0.01 + (1 - MEMORY) * math.log(2) ** 2)
    )


def test_equal_answers_end_at_their_deviation() -> None:
    """Many answers of twice the predicted time: that is what is expected, and surely."""
    trend = STEADY
    for _ in range(100):
        trend = trend.after(100, 200, 0.0, 0.3)
    assert math.exp(trend.mean) == pytest.approx(2.0)
    assert trend.variance == pytest.approx(0.0, abs=1e-6)


def test_a_clock_that_goes_back_fades_nothing() -> None:
    """Two readings of the clock may be out of order; a trend never grows by that."""
    trend = Trend(1.0, 0.5, at=100.0)
    assert trend.faded(50.0, 0.1) == Trend(1.0, 0.5, 50.0)
    assert trend.faded(100.0 + HALF_LIFE_S, 0.1).mean == 0.5


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_no_time_breaks_a_trend(predicted_ms: float, seen_ms: float) -> None:
    """Times of zero, and absurd ones, keep it finite."""
    trend = STEADY.after(predicted_ms, seen_ms, 1.0, 0.3)
    assert math.isfinite(trend.mean)
    assert trend.variance >= 0
