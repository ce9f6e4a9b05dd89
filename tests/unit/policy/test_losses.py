"""Expected losses: published ones, and what measured answers make of them."""

from __future__ import annotations

import math

import pytest

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.losses import (
    NO_LOSS,
    ExpectedLoss,
    LossSource,
    losses,
    measured_loss,
    mixed,
    of_100,
    updated,
)
from router.policy.profiles import Flips
from router.policy.published import CLASSES, published_loss
from tests.unit.policy.made_profiles import counted
from tiers.spec import STANDARD_TIERS

FAST, BALANCED, PRECISE = STANDARD_TIERS
TRIVIAL, MODERATE, COMPLEX = Complexity
MATH = PromptClass.MATH, COMPLEX
CHAT = PromptClass.CHAT, TRIVIAL
LARGE = 8e9
SMALL = 135e6
NONE_MEASURED = Flips(0, 0, 0)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("awq-int4", 0.11), ("nvfp4", 0.11), ("unknown", 0.11), ("fp8 (stated)", 0.01), ("gptq-int8", 0.04),
     ("fp6", 0.02), ("bf16", 0), ("fp16", 0), ("fp8, awq-int4", 0.11)],
)  # fmt: skip
def test_losses_are_published_by_precision(precision: str, expected: float) -> None:
    assert published_loss(precision, MATH, LARGE) == pytest.approx(expected)


def test_what_is_published_rises_with_complexity_and_with_fewer_bits() -> None:
    """For every class of work; so a riskier prompt is riskier on every precision."""
    four = losses("awq-int4", (), LARGE)
    eight = losses("fp8", (), LARGE)
    for kind in set(CLASSES) - {PromptClass.SMALL_TALK}:
        means = [[of[kind][each].mean for each in Complexity] for of in (four, eight)]
        assert means == [sorted(one) for one in means]
        assert all(more > less for more, less in zip(*means, strict=True))


def test_smaller_models_are_expected_to_lose_more() -> None:
    """Several times as much at 1 to 3 billion parameters, and more the further they are from what is published."""
    by_size = [
        published_loss("awq-int4", CHAT, size) for size in (70e9, 8e9, 3e9, 1e9, SMALL)
    ]
    assert by_size[0] == by_size[1] == pytest.approx(0.001)
    assert by_size[1:] == sorted(by_size[1:])
    assert 2 < by_size[2] / by_size[1] < by_size[3] / by_size[1] < 25
    assert published_loss("awq-int4", MATH, SMALL) == 0.5


def test_a_model_of_unknown_size_counts_as_a_large_one() -> None:
    """But nobody says that losses of its size are published."""
    assert published_loss("awq-int4", MATH, None) == published_loss(
        "awq-int4", MATH, LARGE
    )
    loss = losses("awq-int4", (), None)[PromptClass.MATH][COMPLEX]
    assert loss.source is LossSource.ESTIMATED


def test_without_answers_the_loss_is_exponentially_distributed() -> None:
    """Nine in ten models lose between the ends of the interval."""
    loss = updated(0.02, NONE_MEASURED)
    assert loss.mean == 0.02
    assert loss.answers == 0
    assert loss.low == pytest.approx(0.02 * 0.0513, abs=1e-4)
    assert loss.high == pytest.approx(0.02 * 2.9957, abs=1e-4)
    assert updated(0.0, NONE_MEASURED) == NO_LOSS


def posterior_on_a_grid(prior: float, flips: Flips) -> tuple[float, float, float]:
    """Return mean, 5 % and 95 % quantile of the loss by adding up small steps: exponential prior times normal likelihood."""
    seen, variance = measured_loss(flips)
    step = 1e-5
    values = [step * (number + 0.5) for number in range(100_000)]
    logs = [-value / prior - (value - seen) ** 2 / (2 * variance) for value in values]
    highest = max(logs)
    weights = [math.exp(log - highest) for log in logs]
    total = sum(weights)
    mean = (
        sum(value * weight for value, weight in zip(values, weights, strict=True))
        / total
    )
    below = 0.0
    quantiles = []
    for value, weight in zip(values, weights, strict=True):
        below += weight / total
        if len(quantiles) < 2 and below >= (0.05, 0.95)[len(quantiles)]:
            quantiles.append(value)
    return mean, quantiles[0], quantiles[1]


@pytest.mark.parametrize(
    "flips",
    [
        Flips(12, 1, 3),
        Flips(40, 8, 1),
        Flips(400, 8, 0),
        Flips(12, 0, 0),
        Flips(27, 6, 7),
    ],
)
@pytest.mark.parametrize("prior", [0.002, 0.02, 0.2])
def test_answers_update_it_by_bayes_rule(prior: float, flips: Flips) -> None:
    """As an integral over all losses has it. None of these answers contradicts what is published."""
    loss = updated(prior, flips)
    mean, low, high = posterior_on_a_grid(prior, flips)
    assert loss.mean == pytest.approx(mean, rel=0.04)
    assert loss.high == pytest.approx(high, rel=0.04)
    assert loss.low == pytest.approx(low, rel=0.06, abs=1e-4)
    assert loss.answers == flips.answers


def test_answers_that_contradict_what_is_published_replace_it() -> None:
    """18 of 42 count, and 1 in 50 hardly."""
    assert 0.35 < updated(0.02, Flips(40, 20, 2)).mean < 0.43


def test_answers_that_are_better_by_chance_show_no_lossless_precision() -> None:
    """A lower precision is no better; few answers leave it possible that it is much worse."""
    loss = updated(0.15, Flips(12, 1, 3))
    assert loss.mean > 0.03
    assert loss.high > 0.1


def test_twelve_answers_show_no_one_in_a_thousand() -> None:
    """They are called measured only where they bear what is stated without anything published."""
    few = updated(0.001, Flips(12, 0, 0))
    assert few.source is LossSource.PUBLISHED
    assert "12 answers here do not tell" in few.basis
    assert few.stated_high == few.high
    small = updated(0.001, Flips(12, 0, 0), published_for_size=False)
    assert small.source is LossSource.ESTIMATED
    many = updated(0.02, Flips(2000, 30, 10))
    assert many.source is LossSource.MEASURED
    assert many.basis == "measured on 2000 answers"
    assert many.measured_high is not None
    # what is called measured is no less than what the answers allow
    assert many.stated_high >= many.measured_high


def test_answers_move_what_is_expected_of_a_small_model() -> None:
    """Less is known of it, so some answers weigh more than for a large one."""
    flips = Flips(40, 6, 1)
    of_large = updated(published_loss("awq-int4", CHAT, LARGE), flips).mean
    of_small = updated(published_loss("awq-int4", CHAT, SMALL), flips).mean
    assert abs(of_small - 5 / 42) < 0.06 < abs(of_large - 5 / 42)


def test_kinds_with_few_answers_follow_their_class() -> None:
    """Where easy and moderate tasks lose ten times as many as published, complex ones are expected to as well."""
    measured = [
        counted(FAST, 12, 0, PromptClass.MATH, each, of=30)
        for each in (TRIVIAL, MODERATE)
    ]
    expected = losses("awq-int4", measured, LARGE)
    assert expected[PromptClass.MATH][COMPLEX].mean > 0.3
    assert expected[PromptClass.CHAT] == losses("awq-int4", (), LARGE)[PromptClass.CHAT]


def test_a_harder_kind_loses_no_less_than_an_easier_one() -> None:
    """Chance in few answers does not send proofs to a tier that fails at sums."""
    measured = [
        counted(FAST, 10, 0, PromptClass.MATH, TRIVIAL, of=30),
        counted(FAST, 0, 0, *MATH, of=5),
    ]
    means = [
        loss.mean
        for loss in losses("awq-int4", measured, LARGE)[PromptClass.MATH].values()
    ]
    assert means == sorted(means)


def test_small_talk_loses_nothing() -> None:
    """Whatever the model's size: it cannot be right or wrong."""
    for complexity in Complexity:
        assert (
            losses("awq-int4", (), SMALL)[PromptClass.SMALL_TALK][complexity].mean == 0
        )


def test_what_a_prompt_may_be_is_weighed() -> None:
    """Unknown is the mean of classes that may be taken for one another; a mixture lies between."""
    table = losses("awq-int4", (), LARGE)
    told_by_marks = {
        PromptClass.CODE,
        PromptClass.LONG_CONTEXT,
        PromptClass.SMALL_TALK,
        PromptClass.TOOLS,
    }
    doubtful = [
        table[kind][TRIVIAL].mean for kind in CLASSES if kind not in told_by_marks
    ]
    assert table[PromptClass.UNKNOWN][TRIVIAL].mean == pytest.approx(sum(doubtful) / 5)
    assert mixed(
        ExpectedLoss(0.1, 0, 0.2), ExpectedLoss(0.3, 0.2, 0.4), 0.75
    ).mean == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("loss", "text"),
    [(0.0, "none of 100"), (0.00001, "under 0.01 of 100"), (0.0004, "0.04 of 100"), (0.001, "0.1 of 100"),
     (0.021, "2.1 of 100"), (0.0996, "10 of 100"), (0.11, "11 of 100"), (1.0, "100 of 100")],
)  # fmt: skip
def test_shares_are_said_in_answers(loss: float, text: str) -> None:
    assert of_100(loss) == text
