"""What engines are compared with: log-probabilities of fixed texts."""

from __future__ import annotations

import pytest

from tiers.checkpoints.reference import (
    ReferenceScores,
    ScoredText,
    allowed_gap,
    allowed_loss_gap,
    fixed_texts,
    gap,
    texts_digest,
)


def scored(
    name: str, token_ids: tuple[int, ...], logprobs: tuple[float, ...]
) -> ScoredText:
    return ScoredText(name=name, token_ids=token_ids, logprobs=logprobs)


def test_the_texts_are_of_four_kinds() -> None:
    """Prose, code, digits, and a chat that goes through the chat template."""
    assert [(text.name, bool(text.messages)) for text in fixed_texts()] == [
        ("prose", False),
        ("code", False),
        ("digits", False),
        ("chat", True),
    ]


def test_the_gap_is_the_mean_absolute_difference_of_all_tokens() -> None:
    """Longer texts weigh more; what gains and what loses does not cancel out."""
    reference = [scored("a", (1, 2, 3), (-1.0, -1.0)), scored("b", (1, 2), (-1.0,))]
    measured = [scored("a", (1, 2, 3), (-1.3, -0.7)), scored("b", (1, 2), (-1.6,))]
    assert gap(reference, measured) == pytest.approx((0.3 + 0.3 + 0.6) / 3)


def test_of_a_dated_chat_the_common_ending_counts() -> None:
    """Without its first token, whose context is the date."""
    reference = [scored("chat", (1, 50, 2, 3, 4), (-9.0, -9.0, -1.0, -2.0))]
    measured = [scored("chat", (1, 51, 52, 2, 3, 4), (-5.0, -5.0, -5.0, -1.5, -2.5))]
    assert gap(reference, measured) == pytest.approx(0.5)


def test_without_a_common_token_there_is_no_gap() -> None:
    with pytest.raises(ValueError, match="no token of the fixed texts is the same"):
        gap([scored("a", (1, 2), (-1.0,))], [scored("a", (3, 4), (-1.0,))])


def test_a_text_has_a_score_for_each_token_but_the_first() -> None:
    with pytest.raises(
        ValueError, match="a log-probability for each token but the first"
    ):
        scored("a", (1, 2, 3), (-1.0,))


@pytest.mark.parametrize(
    ("precision", "allowed", "loss"),
    [
        ("bf16", 0.10, 0.40),
        ("awq-int4", 0.15, 1.00),
        ("gptq-int4 (stated)", 0.15, 1.00),
        ("fp8", 0.25, 0.40),
        ("int8", 0.25, 0.40),
        ("nvfp4", 0.25, 1.00),
        ("unknown", 0.25, 1.00),
    ],
)
def test_the_allowed_gap_is_by_precision(
    precision: str, allowed: float, loss: float
) -> None:
    """Rounded activations differ more between kernels; fewer bits differ more from the base."""
    assert allowed_gap(precision) == allowed
    assert allowed_loss_gap(precision) == loss


def test_scores_of_other_texts_are_not_current() -> None:
    texts = (scored("a", (1, 2), (-1.0,)),)
    assert ReferenceScores(texts_digest=texts_digest(), texts=texts).is_current
    assert not ReferenceScores(texts_digest="old", texts=texts).is_current
