"""Have an engine score the fixed texts, and the tokens that it generates itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.checkpoints.reference import FixedText, ScoredText, fixed_texts, gap
from tiers.together import run_all

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
    """Score the fixed texts, one at a time, and greedy continuations: the first alone, the others in one batch.

    Other requests in a batch change the rounding, and a batch may have kernels of its own: both are computed. The time of a
    token is that of the first continuation.

    Args:
        probe: The engine.
        model: Its name for requests.
        timeout_s: Limit of each request, in seconds.

    Raises:
        NoScoresError: The engine's answers have no log-probabilities.
        ProbeError: The engine did not answer.
    """
    scored_texts = await _score_texts(probe, model, timeout_s)
    prompts = [
        _prompt_of(fixed_text, text)
        for fixed_text, text in zip(fixed_texts(), scored_texts, strict=True)
    ]
    first, *others = prompts
    alone = await _continue(probe, model, first, timeout_s)
    in_batch = [_continue(probe, model, prompt, timeout_s) for prompt in others]
    continuations = (alone, *await run_all(in_batch))
    decoded = [continuation.decoded for continuation in continuations]
    prefilled = [continuation.prefilled for continuation in continuations]
    return EngineScores(
        texts=tuple(scored_texts),
        decode_gap=gap(prefilled, decoded),
        token_ms=alone.decode_s * 1000 / max(len(alone.decoded.logprobs), 1),
    )


async def _score_texts(
    probe: EngineProbe, model: str, timeout_s: float
) -> list[ScoredText]:
    """Have an engine score each fixed text as a prompt."""
    scored_texts = []
    for fixed_text in fixed_texts():
        token_ids = await _token_ids(probe, model, fixed_text)
        logprobs = await probe.prompt_logprobs(model, token_ids, timeout_s)
        scored_texts.append(
            ScoredText(
                name=fixed_text.name, token_ids=tuple(token_ids), logprobs=logprobs
            )
        )
    return scored_texts


@dataclass(frozen=True, slots=True)
class _ScoredContinuation:
    """An engine's own greedy tokens after a prompt.

    Attributes:
        decoded: The tokens, scored while they were decoded.
        prefilled: The same tokens, scored as a part of a prompt.
        decode_s: How long they took to decode.
    """

    decoded: ScoredText
    prefilled: ScoredText
    decode_s: float


def _prompt_of(fixed_text: FixedText, text: ScoredText) -> ScoredText:
    """Return what is continued: a chat is answered, and a plain text goes on from its middle."""
    if fixed_text.messages:
        return text
    middle = len(text.token_ids) // 2
    beginning = {
        "token_ids": text.token_ids[:middle],
        "logprobs": text.logprobs[: middle - 1],
    }
    return text.model_copy(update=beginning)


async def _continue(
    probe: EngineProbe, model: str, prompt: ScoredText, timeout_s: float
) -> _ScoredContinuation:
    """Have an engine continue a prompt, and score what it generates a second time."""
    began_at = time.monotonic()
    token_ids, logprobs = await probe.continuation(
        model, prompt.token_ids, GENERATED_TOKENS, timeout_s=timeout_s
    )
    decode_s = time.monotonic() - began_at
    decoded = ScoredText(
        name=prompt.name,
        token_ids=(prompt.token_ids[-1], *token_ids),
        logprobs=logprobs,
    )
    all_ids = (*prompt.token_ids, *token_ids)
    all_logprobs = await probe.prompt_logprobs(model, all_ids, timeout_s)
    prefilled = decoded.model_copy(update={"logprobs": all_logprobs[-len(token_ids) :]})
    return _ScoredContinuation(decoded, prefilled, decode_s=decode_s)


async def _token_ids(probe: EngineProbe, model: str, fixed: FixedText) -> Sequence[int]:
    if fixed.messages:
        return await probe.chat_tokens(model, fixed.messages)
    return await probe.text_tokens(model, fixed.text, special=True)
