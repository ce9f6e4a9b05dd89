"""Expected losses: published ones, and what measured answers make of them."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING

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
from router.policy.published import (
    CLASSES,
    LARGEST_MEAN,
    published_estimate,
    published_loss,
)
from tests.unit.policy.made_profiles import counted
from tiers.formats import FORMATS
from tiers.spec import STANDARD_TIERS

if TYPE_CHECKING:
    from router.policy.losses import Kind

FAST, BALANCED, PRECISE = STANDARD_TIERS
TRIVIAL, MODERATE, COMPLEX = Complexity
MATH = PromptClass.MATH, COMPLEX
CHAT = PromptClass.CHAT, TRIVIAL
LARGE = 8e9
SMALL = 135e6
NONE_MEASURED = Flips(0, 0, 0)
RESULTS = Path(__file__).parents[3] / "router/policy/published_results.csv"


FORMATS_BY_LOSS = (
    ("bf16",),
    ("fp8-block", "fp8", "mxfp8", "gptq-int8", "int8-w8a8"),
    ("fp6",),
    ("awq-int4", "gptq-int4", "nvfp4", "mxfp4", "unknown"),
    ("mxfp4-w4a4", "gptq-int3"),
)


@pytest.mark.parametrize(
    ("precision", "kind", "parameters", "published"),
    [
        # Qwen3 8B: GSM8K in AWQ, BFCL and HumanEval+ in NVFP4, MMLU in FP8 by blocks; Qwen3.6 35B-A3B: MMLU-Pro in NVFP4
        ("awq-int4", (PromptClass.MATH, MODERATE), 8.2e9, 0.033),
        ("nvfp4", (PromptClass.TOOLS, MODERATE), 8.2e9, 0.034),
        ("nvfp4", (PromptClass.CODE, MODERATE), 8.2e9, 0.111),
        ("fp8-block", (PromptClass.CHAT, MODERATE), 8.2e9, 0.003),
        ("nvfp4", (PromptClass.CHAT, COMPLEX), 35e9, 0.007),
    ],
)
def test_published_figures_lie_in_the_interval(
    precision: str, kind: Kind, parameters: float, published: float
) -> None:
    """Of models and tasks one by one; nine in ten do."""
    estimate = published_estimate(precision, kind, parameters)
    assert estimate.low < published < estimate.high
    assert estimate.low < estimate.mean < estimate.high


@pytest.mark.parametrize("parameters", [SMALL, 1e9, LARGE, 70e9, 700e9])
@pytest.mark.parametrize("kind", [CHAT, MATH, (PromptClass.TOOLS, MODERATE)])
def test_fewer_bits_never_lose_less(kind: Kind, parameters: float) -> None:
    highest_before = -1.0
    for formats in FORMATS_BY_LOSS:
        means = [published_loss(name, kind, parameters) for name in formats]
        assert min(means) >= min(highest_before, LARGEST_MEAN)
        highest_before = max(means)
    assert published_loss("bf16", kind, parameters) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_loss(name: str) -> None:
    """Between nothing and that of the format that loses most."""
    mean = published_loss(name, MATH, LARGE)
    assert (mean == 0) is (FORMATS[name].weight_bits >= 16)
    assert mean <= published_loss("mxfp4-w4a4", MATH, LARGE)


def test_int8_loses_about_as_much_as_fp8() -> None:
    """And not four times as much, as was assumed before results were collected."""
    of_fp8 = published_loss("fp8", CHAT, LARGE)
    for precision in ("int8-w8a8", "gptq-int8"):
        assert 0.5 < published_loss(precision, CHAT, LARGE) / of_fp8 < 2


def test_the_lowest_format_decides() -> None:
    """Of a checkpoint with several; of replicas that differ, the one that loses most."""
    of_four_bits = published_loss("nvfp4", MATH, LARGE)
    assert published_loss("fp8+nvfp4", MATH, LARGE) == of_four_bits
    assert published_loss("fp8, nvfp4", MATH, LARGE) == of_four_bits
    for stated, number_format in (
        ("fp8 (stated)", "fp8"),
        ("awq-int4 on L4 (stated)", "awq-int4"),
        ("nvfp4 on B200+kv-fp8", "nvfp4+kv-fp8"),
    ):
        of_format = published_estimate(number_format, MATH, LARGE)
        assert published_estimate(stated, MATH, LARGE) == of_format


def test_a_kv_cache_of_fewer_bits_adds_its_own_loss() -> None:
    of_cache = published_loss("bf16+kv-fp8", MATH, LARGE)
    assert 0 < of_cache < published_loss("fp8", MATH, LARGE)
    together = published_loss("nvfp4+kv-fp8", MATH, LARGE)
    assert together == pytest.approx(published_loss("nvfp4", MATH, LARGE) + of_cache)
    assert published_loss("bf16+kv-nvfp4", MATH, LARGE) > of_cache


def test_the_reason_says_what_is_published() -> None:
    """The number of results for this format, class and size; where there are none, that it is an estimate."""
    estimate = published_estimate("nvfp4", MATH, LARGE)
    assert estimate.results > 5
    assert estimate.said == f"published for 8B, NVFP4: {estimate.results} results"
    loss = losses("nvfp4", (), LARGE)[PromptClass.MATH][COMPLEX]
    assert loss.source is LossSource.PUBLISHED
    assert loss.basis == estimate.said
    of_small = losses("nvfp4", (), SMALL)[PromptClass.MATH][COMPLEX]
    assert of_small.source is LossSource.ESTIMATED
    assert of_small.basis == "estimated from what is published for other models"


def test_every_result_has_its_source() -> None:
    """Each row names where it was read, and has either both scores or the loss itself."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 150
    for row in rows:
        assert row["source"]
        assert row["checked"] == "yes"
        assert row["format"] in FORMATS
        scores = (bool(row["baseline"]), bool(row["score"]), bool(row["lost_percent"]))
        assert scores in {(True, True, False), (False, False, True)}


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
    assert by_size == sorted(by_size)
    assert 1.3 < by_size[2] / by_size[1] < by_size[3] / by_size[1] < 4
    assert published_loss("mxfp4-w4a4", MATH, SMALL) == LARGEST_MEAN


def test_a_model_of_unknown_size_counts_as_a_large_one() -> None:
    """But nobody says that losses of its size are published."""
    assert published_loss("awq-int4", MATH, None) == published_loss(
        "awq-int4", MATH, 7e9
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
    kind = PromptClass.CHAT, MODERATE
    of_large = updated(published_loss("awq-int4", kind, LARGE), flips).mean
    of_small = updated(published_loss("awq-int4", kind, SMALL), flips).mean
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
