"""Expected losses: published ones, and what measured answers make of them."""

from __future__ import annotations

import pytest

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.losses import CLASSES, NO_LOSS, ExpectedLoss, losses, mixed, one_in, published, updated
from router.policy.profiles import Flips
from tests.unit.policy.made_profiles import counted
from tiers.spec import STANDARD_TIERS

FAST, BALANCED, PRECISE = STANDARD_TIERS
TRIVIAL, MODERATE, COMPLEX = Complexity
MATH = PromptClass.MATH, COMPLEX


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("awq-int4", 0.11), ("nvfp4", 0.11), ("unknown", 0.11), ("fp8 (stated)", 0.01), ("gptq-int8", 0.04),
     ("fp6", 0.02), ("bf16", 0), ("fp16", 0), ("fp8, awq-int4", 0.11)],
)  # fmt: skip
def test_losses_are_published_by_precision(precision: str, expected: float) -> None:
    assert published(precision, MATH) == pytest.approx(expected)


def test_what_is_published_rises_with_complexity_and_with_fewer_bits() -> None:
    """For every class; so a riskier prompt is riskier on every precision."""
    four, eight = losses("awq-int4", ()), losses("fp8", ())
    for kind in CLASSES:
        means = [[of[kind][each].mean for each in Complexity] for of in (four, eight)]
        assert means == [sorted(one) for one in means]
        assert all(more > less for more, less in zip(*means, strict=True))


def test_without_answers_the_published_loss_is_its_own_spread() -> None:
    """About 19 in 20 models lose less than three times as much."""
    assert updated(0.02, Flips(0, 0, 0)) == ExpectedLoss(pytest.approx(0.02), 0.0, pytest.approx(0.0592, abs=1e-4), 0)
    assert updated(0.0, Flips(0, 0, 0)) == NO_LOSS


@pytest.mark.parametrize(
    ("flips", "low", "high"),
    [
        (Flips(10, 1, 0), 0.02, 0.04),  # a flip in ten fits a loss of 1 in 50
        (Flips(400, 8, 0), 0.0199, 0.0201),
        (Flips(40, 20, 2), 0.37, 0.42),  # contradicted: 18 of 42 count, and 0.02 hardly
        (Flips(40, 0, 10), 0.0, 0.0),  # it answers better: nothing is lost
        (Flips(27, 6, 7), 0.018, 0.02),  # answers that flip to and fro tell little
    ],
)
def test_answers_update_it_and_replace_it_where_they_contradict_it(flips: Flips, low: float, high: float) -> None:
    loss = updated(0.02, flips)
    assert low <= loss.mean <= high
    assert loss.low <= loss.mean <= loss.high
    assert loss.answers == flips.answers


def test_kinds_with_few_answers_follow_their_class() -> None:
    """Where easy and moderate tasks lose ten times as many as published, complex ones are expected to as well."""
    measured = [counted(FAST, 12, 0, PromptClass.MATH, each, of=30) for each in (TRIVIAL, MODERATE)]
    of_math = losses("awq-int4", measured)[PromptClass.MATH]
    assert of_math[COMPLEX].mean > 0.3
    assert losses("awq-int4", measured)[PromptClass.CHAT] == losses("awq-int4", ())[PromptClass.CHAT]


def test_a_harder_kind_loses_no_less_than_an_easier_one() -> None:
    """Chance in few answers does not send proofs to a tier that fails at sums."""
    measured = [counted(FAST, 10, 0, PromptClass.MATH, TRIVIAL, of=30), counted(FAST, 0, 0, *MATH, of=5)]
    means = [loss.mean for loss in losses("awq-int4", measured)[PromptClass.MATH].values()]
    assert means == sorted(means)


def test_what_a_prompt_may_be_is_weighed() -> None:
    """Unknown is the mean of classes that may be taken for one another; a mixture lies between."""
    table = losses("awq-int4", ())
    doubtful = [table[kind][TRIVIAL].mean for kind in CLASSES if kind.value not in {"code", "long_context"}]
    assert table[PromptClass.UNKNOWN][TRIVIAL].mean == pytest.approx(sum(doubtful) / 5)
    assert mixed(ExpectedLoss(0.1, 0, 0.2), ExpectedLoss(0.3, 0.2, 0.4), 0.75).mean == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("loss", "text"),
    [(0.0004, "fewer than 1 in 1,000"), (0.001, "1 in 1,000"), (0.11, "1 in 9"), (0.5, "5 in 10"), (1.0, "10 in 10")],
)
def test_shares_are_said_in_answers(loss: float, text: str) -> None:
    assert one_in(loss) == text
