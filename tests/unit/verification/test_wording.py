"""Sentences about a verification: what is known, with numbers, and what to do next."""

from __future__ import annotations

import pytest

from router.verification.wording import (
    about,
    duration_words,
    interval_words,
    likelihood_sentence,
    next_step,
    same_model_sentence,
    speed_sentence,
    verdict_sentence,
)
from tests.unit.verification.made_findings import (
    answers,
    comparison,
    difference,
    gap,
    likelihood,
    same_model,
    speed,
    verification,
)
from tiers.verification.findings import Verdict


def test_worse_answers_are_said_with_their_loss_and_interval() -> None:
    said = verdict_sentence(verification())
    assert said == "worse: 6.1 of 100 answers lost (3.2 to 9.8), 214 tasks"


def test_a_worse_candidate_that_is_slower_too_is_said_to_be_both() -> None:
    said = verdict_sentence(verification(speed=speed(candidate_tpot_ms=13.0)))
    assert said.startswith("worse: 6.1 of 100 answers lost")
    assert "further ones 30 % later" in said


def test_a_faster_candidate_is_no_part_of_the_verdict() -> None:
    said = verdict_sentence(verification(speed=speed(candidate_tpot_ms=5.0)))
    assert said.endswith("214 tasks")


def test_the_same_is_said_with_the_most_that_may_be_lost() -> None:
    same = comparison(low=-0.01, high=0.018, verdict=Verdict.SAME)
    said = verdict_sentence(verification(answers=answers(same)))
    assert said == "same: at most 1.8 of 100 answers lost (2 tolerated), 214 tasks"


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.011, 0.051, "between 1.1 gained and 5.1 lost of 100 answers"),
        (0.003, 0.051, "between 0.3 and 5.1 of 100 answers lost"),
        (-0.051, -0.003, "between 0.3 and 5.1 of 100 answers gained"),
    ],
)
def test_what_cannot_be_told_has_a_range_and_the_tasks_it_would_take(
    low: float, high: float, said: str
) -> None:
    open_question = comparison(
        low=low, high=high, verdict=Verdict.CANNOT_TELL, tasks_needed=1269
    )
    sentence = verdict_sentence(verification(answers=answers(open_question)))
    assert sentence == (
        f"cannot tell: {said} (2 tolerated), 214 tasks; would need about 1,300 more"
    )


def test_a_difference_that_is_a_fault_is_the_verdict_and_its_remedy_the_next_step() -> (
    None
):
    found = verification(
        same_model=same_model(difference(), difference("context", is_fault=False)),
        likelihood=None,
        answers=None,
    )
    assert verdict_sentence(found) == (
        "worse: not the same model: chat template differs"
    )
    assert next_step(found) == "Serve both with the same chat template."


def test_a_fault_of_likelihood_is_said_before_the_answers() -> None:
    late = "From token 257 on the candidate's texts go wrong: 3.10 nats a token"
    found = verification(likelihood=likelihood(faults=(f"{late}.",)))
    assert verdict_sentence(found) == f"worse: {late}"
    assert "--enforce-eager" in next_step(found)


def test_without_answers_nothing_is_called_the_same() -> None:
    found = verification(answers=None)
    assert found.verdict is Verdict.CANNOT_TELL
    assert "no answers were compared" in verdict_sentence(found)


def test_tasks_that_are_too_hard_are_named_as_such() -> None:
    hard = comparison(
        both_right=3,
        worse=0,
        better=0,
        both_wrong=97,
        low=-0.8,
        high=0.8,
        verdict=Verdict.CANNOT_TELL,
    )
    step = next_step(verification(answers=answers(hard)))
    assert "neither engine solved 97 tasks" in step
    assert "--tasks FILE" in step


def test_tasks_that_tell_nothing_have_no_interval() -> None:
    nothing = comparison(
        both_right=0,
        worse=0,
        better=0,
        both_wrong=30,
        low=-1.0,
        high=1.0,
        verdict=Verdict.CANNOT_TELL,
    )
    said = verdict_sentence(verification(answers=answers(nothing)))
    assert said == (
        "cannot tell: no task tells anything: neither engine solved any of 30 tasks"
    )


@pytest.mark.parametrize(
    ("subjects", "said"),
    [
        ((), "nothing differs"),
        (("tokenizer",), "tokenizer differs"),
        (("tool calls",), "tool calls differ"),
        (("tokenizer", "context"), "tokenizer and context differ"),
        (("a", "b", "c"), "a, b and c differ"),
    ],
)
def test_faults_are_enumerated(subjects: tuple[str, ...], said: str) -> None:
    assert same_model_sentence(same_model(*map(difference, subjects))) == said


def test_a_harmless_difference_is_called_harmless() -> None:
    found = same_model(difference("release of vLLM", is_fault=False))
    assert same_model_sentence(found) == "release of vLLM differs, which is no fault"


def test_likelihood_is_said_of_the_reference_s_words_weighted_by_tokens() -> None:
    found = likelihood(
        gap(tokens=300, gap=0.1, changed=0.1),
        gap(part="chat", tokens=100, gap=0.5, changed=0.3),
        gap(writer="candidate", gap=9.0, changed=1.0),
    )
    said = likelihood_sentence(found)
    assert said == (
        "the candidate finds the reference's words 0.20 nats a token less likely; 15.0 of 100 first choices differ"
    )


def test_likelihood_of_nothing_is_said() -> None:
    assert likelihood_sentence(likelihood(by_kind=())) == "nothing could be scored"


def test_speed_is_said_of_the_highest_load() -> None:
    said = speed_sentence(speed(candidate_ttft_ms=150.0, candidate_tpot_ms=5.0))
    assert said == (
        "the candidate's first token comes 50 % later, further ones 50 % sooner (16 streams)"
    )


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.032, 0.098, "3.2 to 9.8"),
        (-0.011, 0.018, "1.1 gained to 1.8 lost"),
        (-0.03, -0.012, "3.0 to 1.2 gained"),
    ],
)
def test_an_end_below_zero_is_a_gain(low: float, high: float, said: str) -> None:
    assert interval_words(low, high) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (48.4, "48 s"),
        (200.2, "3 min 20 s"),
        (7502.0, "2 h 5 min"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert duration_words(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"), [(7, 7), (42, 42), (126, 130), (1269, 1300), (98_761, 99_000)]
)
def test_estimates_are_rounded(count: int, said: int) -> None:
    assert about(count) == said


def test_tasks_that_a_limit_left_out_come_before_other_tasks() -> None:
    undecided = comparison(verdict=Verdict.CANNOT_TELL, tasks_needed=500)
    limited = next_step(verification(answers=answers(undecided, unasked=650)))
    assert (
        limited
        == "No fault was found. Not asked: 650 tasks; raise --minutes or --max-tasks."
    )
    assert "--tasks FILE" in next_step(verification(answers=answers(undecided)))


def test_easier_tasks_and_those_left_out_are_both_named() -> None:
    undecided = comparison(verdict=Verdict.CANNOT_TELL, both_right=0, worse=0, better=0)
    step = next_step(verification(answers=answers(undecided, unasked=1)))
    assert step.startswith("Give easier tasks")
    assert step.endswith("Not asked: 1 task; raise --minutes or --max-tasks.")
