"""Have an engine score the fixed texts, and the tokens that it generates itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.checkpoints.reference import FixedText, ScoredText, fixed_texts, gap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.probe import EngineProbe

GENERATED_TOKENS = 16  # Each text is continued by so many.


@dataclass(frozen=True, slots=True)
class EngineScores:
    """What an engine computes for the fixed texts.

    Attributes:
        texts: The texts, scored by the kernels of prefill.
        decode_gap: Between the log-probabilities that decode gave the engine's own greedy tokens and those that prefill
            gives them afterwards, in nats a token. Prefill and decode have kernels of their own.
        token_ms: Time of a decode step, in milliseconds.
    """

    texts: tuple[ScoredText, ...]
    decode_gap: float
    token_ms: float


async def score_engine(
    probe: EngineProbe, model: str, timeout_s: float
) -> EngineScores:
    """Score the fixed texts and greedy continuations, one at a time: other requests in a batch change the rounding.

    Args:
        probe: The engine.
        model: Its name for requests.
        timeout_s: Limit of each request, in seconds.

    Raises:
        NoScoresError: The engine's answers have no log-probabilities.
        ProbeError: The engine did not answer.
    """
    scored = []
    for fixed in fixed_texts():
        token_ids = await _token_ids(probe, model, fixed)
        logprobs = await probe.prompt_logprobs(model, token_ids, timeout_s)
        scored.append(
            ScoredText(name=fixed.name, token_ids=tuple(token_ids), logprobs=logprobs)
        )
    decoded = []
    prefilled = []
    decode_s = 0.0
    for fixed, text in zip(fixed_texts(), scored, strict=True):
        prompt = (
            text.token_ids
            if fixed.messages
            else text.token_ids[: len(text.token_ids) // 2]
        )
        began = time.monotonic()
        token_ids, logprobs = await probe.continuation(
            model, prompt, GENERATED_TOKENS, timeout_s
        )
        decode_s += time.monotonic() - began
        decoded.append(
            ScoredText(
                name=fixed.name, token_ids=(prompt[-1], *token_ids), logprobs=logprobs
            )
        )
        again = await probe.prompt_logprobs(model, (*prompt, *token_ids), timeout_s)
        prefilled.append(
            decoded[-1].model_copy(update={"logprobs": again[-len(token_ids) :]})
        )
    tokens = sum(len(text.logprobs) for text in decoded)
    return EngineScores(
        texts=tuple(scored),
        decode_gap=gap(prefilled, decoded),
        token_ms=decode_s * 1000 / max(tokens, 1),
    )


async def _token_ids(probe: EngineProbe, model: str, fixed: FixedText) -> Sequence[int]:
    if fixed.messages:
        return await probe.chat_tokens(model, fixed.messages)
    return await probe.text_tokens(model, fixed.text, special=True)
