"""Loss by prompt: what is fitted, when it is used, and how a prompt's loss differs from its class's."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, hypot, log
from statistics import fmean
from typing import TYPE_CHECKING

import pytest

from classifier import PromptClass, PromptFeatures
from router.policy.decision import ClassLine, ExpectedLoss, PolicyParameters, PromptLoss
from router.policy.loss_regression import MIN_PROMPTS, Regression, in_use, regressions
from router.policy.profiles import MIN_LIVE, Observation
from router.settings import CLASS_FLOOR
from tests.unit.policy.made_profiles import loss, observed, quality
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.policy.profiles import QualityProfile

FAST, BALANCED, PRECISE = STANDARD_TIERS
CHAT, CODE = PromptClass.CHAT, PromptClass.CODE
TOKENS = 32


def by_length(chars: int) -> float:
    """Return a loss that grows from 0.05 at 20 characters to 0.45 at 5,000."""
    return 0.05 + 0.4 * log(chars / 20) / log(250)


def profile(rate: Callable[[PromptClass, int], float], *, prompts: int = 60, seed: int = 1) -> QualityProfile:
    """Return a profile of the fast tier: chats and code of 20 to 5,000 characters that lose this share."""
    source = random.Random(seed)
    seen: list[Observation] = []
    for kind in (CHAT, CODE):
        for _ in range(prompts):
            chars = int(20 * exp(source.uniform(0, log(250))))
            lost = sum(source.random() < rate(kind, chars) for _ in range(TOKENS))
            sure = round(source.uniform(0.5, 1), 4)
            seen.append(observed(FAST, kind, chars, lost, TOKENS, confidence=sure, contains_code=kind is CODE))
    losses = [loss(FAST, share([s for s in seen if s.prompt_class is kind]), kind) for kind in (CHAT, CODE)]
    return quality(*losses, observations=tuple(seen))


def share(seen: list[Observation]) -> float:
    """Return the share of all tokens that differ."""
    return sum(s.disagreed for s in seen) / sum(s.tokens for s in seen)


def prompt(chars: int, kind: PromptClass = CHAT, confidence: float = 0.9) -> PromptFeatures:
    """Return the features of a prompt with words of five letters."""
    return PromptFeatures(chars, max(chars // 6, 1), 1, False, kind is CODE, False, None, kind, confidence, ())


def parameters(profile: QualityProfile, found: dict[TierName, Regression]) -> PolicyParameters:
    """Return the parameters of a profile, with whatever was fitted."""
    means = {
        one.prompt_class: ExpectedLoss(
            one.top1_disagreement.mean, one.top1_disagreement.low, one.top1_disagreement.high
        )
        for one in profile.losses
    }
    models = {tier: one.model for tier, one in found.items()}
    return PolicyParameters(CLASS_FLOOR, {}, losses={FAST: means}, prompt_losses=models)


def test_what_depends_on_the_length_is_found_and_used() -> None:
    """Prompts between the shortest and the longest get their own loss, within the interval; ranks agree far better."""
    made = profile(lambda _, chars: by_length(chars))
    found = regressions(made)
    assert found.keys() == in_use(found).keys() == {FAST}
    seen = found[FAST]
    assert seen.prompts == 120
    assert seen.rank_correlation > 0.7
    assert seen.class_rank_correlation < 0.3
    assert seen.error < 0.8 * seen.class_error
    table = parameters(made, found)
    for chars in (30, 300, 3000):
        expected = table.loss(FAST, prompt(chars))
        assert expected is not None
        assert expected.mean == pytest.approx(by_length(chars), abs=0.05)
        assert expected.low < by_length(chars) < expected.high


def test_what_depends_on_the_class_only_is_hardly_ever_used() -> None:
    """Of 100 profiles whose prompts do not differ within a class, at most 2 are taken for others."""
    used = 0
    for seed in range(100):
        made = profile(lambda kind, _: 0.1 if kind is CHAT else 0.3, prompts=30, seed=seed)
        used += len(in_use(regressions(made)))
    assert used <= 2


def test_the_error_of_the_class_mean_is_of_prompts_that_it_does_not_count() -> None:
    """Against leaving out every tenth of the prompts by hand, in the order of class and length."""
    made = profile(lambda _, chars: by_length(chars), prompts=25)
    rows = sorted(made.observations, key=lambda s: (s.prompt_class, s.chars, s.confidence))
    squares = []
    for number, held in enumerate(rows):
        others = [s for n, s in enumerate(rows) if n % 10 != number % 10 and s.prompt_class is held.prompt_class]
        squares.append((share(others) - held.disagreed / TOKENS) ** 2)
    assert regressions(made)[FAST].class_error == pytest.approx(fmean(squares) ** 0.5)


def test_slopes_by_hand() -> None:
    """One feature that varies, answers of equal length: sum(x y) / (sum(x x) + ten times the variance of x)."""
    chars, lost = range(20, 2020, 40), [n % 7 for n in range(50)]
    seen = tuple(observed(FAST, CHAT, c, d, TOKENS, words=c) for c, d in zip(chars, lost, strict=True))
    model = regressions(quality(loss(FAST, share(list(seen))), observations=seen))[FAST].model
    x, y = [log(c) for c in chars], [d / TOKENS for d in lost]
    away = [(a - fmean(x), b - fmean(y)) for a, b in zip(x, y, strict=True)]
    squares = sum(a * a for a, _ in away)
    slope = sum(a * b for a, b in away) / (squares + 10 * squares / 50)
    rest = sum((b - slope * a) ** 2 for a, b in away)
    variance = rest / (50 - 1 - 5) / (squares + 10 * squares / 50)
    line = model.classes[CHAT]
    assert line.slopes == pytest.approx((slope, 0, 0, 0, 0))
    assert line.offset == pytest.approx(-slope * fmean(x))
    assert line.seen == pytest.approx((log(20), log(1980), 0, 0, 0.9, 0.9))
    furthest = max(a * a for a, _ in away)
    assert line.error == pytest.approx(1.96 * (variance * furthest) ** 0.5, rel=0.01)  # of ridge, not quite the same


def test_the_same_prompt_again_is_no_further_evidence() -> None:
    """Equal features count as one prompt: no answer is predicted from another to the same prompt."""
    made = profile(lambda *_: 0.2)
    again = made.model_copy(update={"observations": made.observations * 3})
    assert regressions(again)[FAST] == regressions(made)[FAST]


def test_too_little_is_not_fitted() -> None:
    """Few prompts, classes without an interval, answers without tokens, and the reference."""
    made = profile(lambda _, chars: by_length(chars), prompts=MIN_PROMPTS // 2)
    assert regressions(made)
    fewer = made.model_copy(update={"observations": made.observations[1:]})
    empty = observed(FAST, CHAT, 77, 0, 0)
    reference = observed(PRECISE, CHAT, 77, 1, 9)
    more = fewer.model_copy(update={"observations": (*fewer.observations, empty, reference)})
    assert regressions(fewer) == regressions(more) == regressions(quality()) == {}
    unsure = made.model_copy(update={"losses": (loss(FAST, 0.2), loss(FAST, 0.2, CODE, prompts=4))})
    assert regressions(unsure) == {}


def test_what_varies_nowhere_and_what_varies_in_one_class_only() -> None:
    """A yes or no that a class was seen with in one form only does not move its prompts."""
    lines = regressions(profile(lambda _, chars: by_length(chars)))[FAST].model.classes
    assert all(line.slopes[3:] == (0, 0) for line in lines.values())
    source = random.Random(4)
    seen = tuple(
        observed(FAST, kind, 20 + n, source.randrange(9), TOKENS, contains_code=kind is CHAT or n % 2 == 0)
        for kind in (CHAT, CODE)
        for n in range(40)
    )
    lines = regressions(quality(loss(FAST, 0.2), loss(FAST, 0.2, CODE), observations=seen))[FAST].model.classes
    assert lines[CHAT].slopes[3] == 0
    assert lines[CODE].slopes[3] != 0


def test_live_answers_are_fitted_too_and_move_the_centre_when_there_are_enough() -> None:
    """A class's mean is that of its live answers then, so a prompt as they are on average gets that mean."""
    made = profile(lambda _, chars: by_length(chars))
    live = [observed(FAST, CHAT, 4000 + n, 14, TOKENS) for n in range(MIN_LIVE)]
    means = {}
    for count in (MIN_LIVE - 1, MIN_LIVE):
        found = regressions(made, live[:count])
        assert found[FAST].prompts == 120 + count
        line, zero = found[FAST].model.classes[CHAT], ExpectedLoss(0.5, 0.5, 0.5)
        centre = found[FAST].model.expected(prompt(4003), zero)
        means[count] = (centre.mean, line.seen)
    assert means[MIN_LIVE - 1][0] > 0.6  # long prompts lose more than those of the profile
    assert means[MIN_LIVE][0] == pytest.approx(0.5, abs=0.02)
    assert means[MIN_LIVE - 1][1][:2] == pytest.approx(means[MIN_LIVE][1][:2], abs=0.1)


LINE = ClassLine(
    offset=-0.3, error=0.03, slopes=(0.1, 0.0, -0.2, 0.05, 0.02), seen=(log(10), log(1000), 0, 3, 0.6, 0.9)
)
MEAN = ExpectedLoss(0.2, 0.16, 0.24)


def test_an_expectation_by_hand() -> None:
    """The class's mean and every feature's part; each half of the interval is wider by the error of the difference."""
    model = PromptLoss({CHAT: LINE})
    expected = model.expected(prompt(100, confidence=0.8), MEAN)
    assert expected.mean == pytest.approx(0.2 - 0.3 + 0.1 * log(100) - 0.2 * 0.8)
    assert (expected.mean - expected.low, expected.high - expected.mean) == pytest.approx((hypot(0.04, 0.03),) * 2)
    code = model.expected(replace(prompt(100, confidence=0.8), contains_code=True, asks_for_code=True), MEAN)
    assert code.mean == pytest.approx(expected.mean + 0.07)
    assert model.expected(prompt(100, CODE), MEAN) is MEAN


@pytest.mark.parametrize(("far", "furthest"), [(prompt(1, confidence=0.8), 10), (prompt(99999, confidence=0.8), 1000)])
def test_nothing_counts_as_further_out_than_was_seen(far: PromptFeatures, furthest: int) -> None:
    """However short, long, certain or empty a prompt is."""
    model = PromptLoss({CHAT: LINE})
    assert model.expected(far, MEAN) == model.expected(prompt(furthest, confidence=0.8), MEAN)
    assert model.expected(replace(far, confidence=1.0), MEAN) == model.expected(replace(far, confidence=0.9), MEAN)
    assert model.expected(prompt(0), MEAN) == model.expected(prompt(1), MEAN)


def test_no_share_is_below_none_or_above_all() -> None:
    """Neither the expectation nor its interval."""
    low, high = (PromptLoss({CHAT: replace(LINE, offset=by)}).expected(prompt(100), MEAN) for by in (-5.0, 5.0))
    assert (low.mean, low.low) == (0, 0)
    assert low.high == pytest.approx(0.05)
    assert (high.mean, high.high) == (1, 1)
    assert high.low == pytest.approx(0.95)


def test_decisions_use_it_for_certain_classes_only() -> None:
    """A class that is uncertain or was not measured still counts as the worst one."""
    table = PolicyParameters(
        CLASS_FLOOR, {}, losses={FAST: {CHAT: MEAN}}, prompt_losses={FAST: PromptLoss({CHAT: LINE})}
    )
    assert table.loss(FAST, prompt(100)) == PromptLoss({CHAT: LINE}).expected(prompt(100), MEAN)
    assert table.loss(FAST, prompt(100, confidence=0.5)) == MEAN
    assert table.loss(FAST, prompt(100, CODE)) == MEAN
    assert table.loss(BALANCED, prompt(100)) is None


def test_ranks_of_equal_values_are_shared() -> None:
    """Without any difference there is no correlation; the sentence has both figures."""
    seen = tuple(observed(FAST, CHAT, 20 + n, 4, TOKENS) for n in range(MIN_PROMPTS))
    found = regressions(quality(loss(FAST, 0.125), observations=seen))[FAST]
    assert (found.rank_correlation, found.gain, found.used) == (0.0, 0.0, False)
    assert str(found).startswith("not used: error on 40 held-out prompts 0.0000, of the class's mean 0.0000 (gain 0.0 ")
