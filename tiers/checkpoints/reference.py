"""What a sound engine computes: the log-probabilities of fixed texts, and how far engines may be from them.

Text is no measure of an engine. Kernels round differently, and one near-tie decides the words of a whole answer, while the
log-probabilities hardly move. So the texts in ``reference_texts.json`` (prose, code, digits and a chat) are scored once by
transformers in FP32 when a checkpoint is made. The scores are kept in its manifest, and engines are compared with them.

The measure is the *gap*: the mean, over all tokens, of the absolute difference of two log-probabilities, in nats.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, model_validator

from tiers.formats import formats_in, rank_bits
from tiers.kv_precision import weights_of

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXTS_FILE = Path(__file__).with_name("reference_texts.json")
# Sound engines stay below 0.6 times these limits. Broken ones exceed 1.6 times, except one scaled matrix and a wrong chat
# template, which other checks find: benchmarks/results/engine_check.txt.
SIXTEEN_BITS_GAP = 0.10
FOUR_BIT_WEIGHTS_GAP = 0.15  # With AMX, vLLM's kernel rounds activations to 8 bits.
ROUNDED_ACTIVATIONS_GAP = 0.25
# A quantized checkpoint may be so far from the one of highest precision.
EIGHT_BITS_LOSS_GAP = 0.40
FOUR_BITS_LOSS_GAP = 1.00
EIGHT_BITS = 8
SIXTEEN_BITS = 16


class FixedText(BaseModel):
    """A text to score: plain, or a chat that is rendered through the chat template.

    Attributes:
        name: For people.
        text: A plain text; empty for a chat.
        messages: The messages of a chat; empty for a plain text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()


class ScoredText(BaseModel):
    """A text's tokens with their log-probabilities.

    Attributes:
        name: Of the fixed text.
        token_ids: All its tokens, special ones included.
        logprobs: Of each token but the first, given those before it, in nats.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @model_validator(mode="after")
    def _one_score_a_token(self) -> ScoredText:
        if len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError("a log-probability for each token but the first is needed")
        return self


class ReferenceScores(BaseModel):
    """The scores of all fixed texts by one model.

    Attributes:
        texts_digest: SHA-256 of the file of texts: the scores of other texts cannot be compared.
        chat_is_dated: Whether the chat template writes today's date, so that the chat's tokens change from day to day.
        texts: One for each fixed text. A model without a chat template has no chat.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    texts_digest: str
    chat_is_dated: bool = False
    texts: tuple[ScoredText, ...]

    @property
    def is_current(self) -> bool:
        """Tell whether these are the scores of the present texts."""
        return self.texts_digest == texts_digest()


@cache
def fixed_texts() -> tuple[FixedText, ...]:
    """Return the texts that are scored."""
    return tuple(
        FixedText.model_validate(entry) for entry in json.loads(TEXTS_FILE.read_bytes())
    )


@cache
def texts_digest() -> str:
    """Return the SHA-256 of the file of texts."""
    return hashlib.sha256(TEXTS_FILE.read_bytes()).hexdigest()


def reference_from_event(event: dict[str, Any] | None) -> ReferenceScores | None:
    """Return the scores that ``quantize.py`` reports; None: it could not compute any."""
    if event is None:
        return None
    return ReferenceScores(texts_digest=texts_digest(), **event)


def gap(reference: Sequence[ScoredText], measured: Sequence[ScoredText]) -> float:
    """Return the mean absolute difference of log-probabilities, in nats, over the tokens that both have at the same place.

    A dated chat differs from its reference in the tokens of the date. Places are counted from the end, and only the common
    ending is compared.

    Raises:
        ValueError: They have no token in common.
    """
    differences: list[float] = []
    reference_texts = {text.name: text for text in reference}
    for text in measured:
        if text.name in reference_texts:
            differences += _differences(reference_texts[text.name], text)
    if not differences:
        raise ValueError("no token of the fixed texts is the same in both")
    return sum(differences) / len(differences)


def _differences(reference: ScoredText, measured: ScoredText) -> list[float]:
    """Return the absolute differences of the common ending's log-probabilities."""
    if reference.token_ids == measured.token_ids:
        places = len(measured.logprobs)
    else:
        # The first one follows what differs.
        places = _common_ending(reference.token_ids, measured.token_ids) - 1
    if places <= 0:
        return []
    pairs = zip(reference.logprobs[-places:], measured.logprobs[-places:], strict=True)
    return [abs(expected - actual) for expected, actual in pairs]


def _common_ending(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens at the end of both are the same."""
    count = 0
    while count < min(len(left), len(right)) and left[-1 - count] == right[-1 - count]:
        count += 1
    return count


def allowed_gap(precision: str) -> float:
    """Return the largest gap of a sound engine from its own checkpoint's reference, in nats.

    Where activations or the KV cache are rounded too, or the precision is unknown, a bit of rounding anywhere moves what
    follows, so that sound kernels differ more.

    Args:
        precision: As ``TierSpec.precision`` names it.
    """
    if weights_of(precision) != precision:
        return ROUNDED_ACTIVATIONS_GAP
    formats = formats_in(precision)
    if not formats or any(part.activation_bits < SIXTEEN_BITS for part in formats):
        return ROUNDED_ACTIVATIONS_GAP
    if not any(part.is_quantized for part in formats):
        return SIXTEEN_BITS_GAP
    if all(part.quantization == "int4" for part in formats if part.is_quantized):
        return FOUR_BIT_WEIGHTS_GAP
    return ROUNDED_ACTIVATIONS_GAP


def allowed_loss_gap(precision: str) -> float:
    """Return the largest gap of a sound quantized checkpoint from the highest precision, in nats.

    Args:
        precision: As ``TierSpec.precision`` names it; an unknown one may be as low as four bits.
    """
    bits = rank_bits(precision)
    if bits is None or bits < EIGHT_BITS:
        return FOUR_BITS_LOSS_GAP
    return EIGHT_BITS_LOSS_GAP
