"""The test of paired answers: its arithmetic by hand, its error rates by exact calculation, and what holds for all counts."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.verification.sequential import (
    BETS,
    Claim,
    PairCounts,
    PairOutcome,
    SequentialTest,
    log_capital,
)
from tiers.verification.findings import Verdict

COUNTS = st.builds(
    PairCounts,
    both_right=st.integers(0, 400),
    worse=st.integers(0, 60),
    better=st.integers(0, 60),
    both_wrong=st.integers(0, 400),
)


def after_answers(
    *,
    both_right: int = 0,
    worse: int = 0,
    better: int = 0,
    both_wrong: int = 0,
    tolerated: float = 0.02,
    confidence: float = 0.95,
) -> SequentialTest:
    counts = PairCounts(
        both_right=both_right, worse=worse, better=better, both_wrong=both_wrong
    )
    return SequentialTest(tolerated=tolerated, confidence=confidence, counts=counts)


def test_capital_by_hand() -> None:
    """Two worse answers and one better one, against "at most 0.25": each bet multiplies on its own, then they are averaged."""
    capitals = []
    for bet in BETS:
        gain = bet / 1.25
        capitals.append((1 + gain * 0.75) ** 2 * (1 - gain * 0.25) * (1 - bet))
    capital = log_capital(Claim.AT_MOST, 0.25, worse=2, both_right=1, better=1)
    assert math.exp(capital) == pytest.approx(sum(capitals) / len(capitals))


@pytest.mark.parametrize("claim", list(Claim))
@pytest.mark.parametrize("loss", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("better_share", [0.0, 0.1, 0.3])
def test_a_true_claim_wins_nothing_on_average(
    claim: Claim, loss: float, better_share: float
) -> None:
    """After one task and after five, the mean capital is 1 where the true loss is the one that is claimed."""
    worse_share = loss + better_share
    right_share = 1 - worse_share - better_share
    for tasks in (1, 5):
        mean = 0.0
        for worse in range(tasks + 1):
            for better in range(tasks + 1 - worse):
                right = tasks - worse - better
                ways = math.comb(tasks, worse) * math.comb(tasks - worse, better)
                share = worse_share**worse * better_share**better * right_share**right
                capital = log_capital(
                    claim, loss, worse=worse, both_right=right, better=better
                )
                mean += ways * share * math.exp(capital)
        assert mean == pytest.approx(1)


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [(0.0, Verdict.WORSE), (0.1, Verdict.WORSE), (0.1001, Verdict.SAME)],
)
def test_wrong_verdicts_are_as_rare_as_promised(loss: float, wrong: Verdict) -> None:
    """Looking after each of 80 tasks, exactly: the probability of ever reading the wrong verdict is below 2.5 %."""
    better_share = 0.03
    worse_share = loss + better_share
    outcomes = (
        (PairOutcome.WORSE, worse_share),
        (PairOutcome.BETTER, better_share),
        (PairOutcome.BOTH_RIGHT, 1 - worse_share - better_share),
    )
    undecided = {PairCounts(): 1.0}
    wrong_probability = 0.0
    for _ in range(80):
        after: defaultdict[PairCounts, float] = defaultdict(float)
        for counts, probability in undecided.items():
            for outcome, share in outcomes:
                after[counts.after(outcome)] += probability * share
        undecided = {}
        for counts, probability in after.items():
            verdict = SequentialTest(0.1, 0.95, counts).verdict
            # Histories as rare as this are not followed: they count as wrong.
            if verdict is wrong or probability < 1e-8:
                wrong_probability += probability
            elif verdict is Verdict.CANNOT_TELL:
                undecided[counts] = probability
    assert wrong_probability < 0.025


@given(COUNTS)
def test_the_interval_holds_what_was_observed(counts: PairCounts) -> None:
    interval = SequentialTest(0.02, 0.95, counts).interval
    assert -1 <= interval.low <= interval.high <= 1
    if counts.decisive:
        observed = (counts.worse - counts.better) / counts.decisive
        assert interval.low <= observed <= interval.high


@given(COUNTS, st.sampled_from([0.0, 0.02, 0.1]))
def test_verdict_and_interval_agree(counts: PairCounts, tolerated: float) -> None:
    """A verdict is given exactly where the tolerated loss lies outside the interval."""
    test = SequentialTest(tolerated, 0.95, counts)
    interval = test.interval
    match test.verdict:
        case Verdict.WORSE:
            assert interval.low >= tolerated - 1e-9
        case Verdict.SAME:
            assert interval.high <= tolerated + 1e-9
        case Verdict.CANNOT_TELL:
            assert interval.low <= tolerated <= interval.high


@given(COUNTS)
def test_tasks_that_both_get_wrong_tell_nothing(counts: PairCounts) -> None:
    test = SequentialTest(0.02, 0.95, counts)
    with_wrong = test.after(PairOutcome.BOTH_WRONG)
    assert with_wrong.interval == test.interval
    assert with_wrong.verdict is test.verdict


def test_nothing_is_known_without_tasks() -> None:
    test = after_answers()
    assert test.interval.low == pytest.approx(-1)
    assert test.interval.high == pytest.approx(1)
    assert test.verdict is Verdict.CANNOT_TELL
    assert test.tasks_needed is None


def test_a_few_right_answers_are_no_proof() -> None:
    """Ten tasks without any difference leave losses up to 41 of 100 open."""
    test = after_answers(both_right=10)
    assert test.verdict is Verdict.CANNOT_TELL
    assert test.interval.high > 0.3


def test_clear_cases_are_decided() -> None:
    assert after_answers(both_right=300).verdict is Verdict.SAME
    assert after_answers(both_right=60, worse=20).verdict is Verdict.WORSE
    assert after_answers(both_right=300, better=40).verdict is Verdict.SAME


@pytest.mark.parametrize("both_wrong", [0, 100, 300])
def test_tasks_needed_suffice_if_they_turn_out_as_before(both_wrong: int) -> None:
    """So many more tasks in the same proportions, and one would know; with a tenth less one would not."""
    test = after_answers(both_right=100, both_wrong=both_wrong)
    needed = test.tasks_needed
    assert needed is not None
    right_share = 100 / (100 + both_wrong)
    enough = 100 + math.ceil(needed * right_share)
    assert after_answers(both_right=enough).verdict is Verdict.SAME
    too_few = 100 + int(needed * right_share * 0.9)
    assert after_answers(both_right=too_few).verdict is Verdict.CANNOT_TELL


def test_no_number_of_tasks_is_named_where_none_would_do() -> None:
    assert after_answers(both_right=980, worse=20).tasks_needed is None
    assert after_answers(both_wrong=50).tasks_needed is None
    assert after_answers(both_right=400).tasks_needed is None


def test_classes_are_corrected_for_their_number() -> None:
    """The same counts decide alone, and not as one of eight classes; the interval is wider."""
    counts = PairCounts(both_right=60, worse=11)
    alone = SequentialTest(0.02, 0.95, counts)
    of_eight = SequentialTest(0.02, 0.95).for_class(8, counts)
    assert of_eight.confidence == pytest.approx(1 - 0.05 / 8)
    assert of_eight.interval.low < alone.interval.low
    assert of_eight.interval.high > alone.interval.high
    assert alone.verdict is Verdict.WORSE
    assert of_eight.verdict is Verdict.CANNOT_TELL


def test_counts_take_each_outcome() -> None:
    counts = PairCounts()
    for outcome in PairOutcome:
        counts = counts.after(outcome)
    assert counts == PairCounts(
        both_right=1, worse=1, better=1, both_wrong=1, not_measured=1
    )
    assert counts.tasks == 5
    assert counts.decisive == 3


@pytest.mark.parametrize("tolerated", [-0.01, 1.0, 2.0])
def test_a_tolerated_loss_is_a_share(tolerated: float) -> None:
    with pytest.raises(ValueError, match=r"tolerated is .*0\.02 for 2 of 100"):
        after_answers(tolerated=tolerated)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_a_confidence_is_a_share(confidence: float) -> None:
    with pytest.raises(ValueError, match=r"confidence is .*such as 0\.95"):
        after_answers(confidence=confidence)
