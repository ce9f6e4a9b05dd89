"""Warm up an engine before it gets requests, and check that it answers readable text.

A healthy engine is not warm: its first request can take seconds of just-in-time work. Nor is it necessarily correct: a
wrong kernel or a broken graph answers HTTP 200 with nonsense. What reads well may still be wrong: ``canary``.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.errors import ProbeError, RefusedError, WarmupFailedError
from tiers.probe import CHAT, COMPLETIONS
from tiers.spec import TemplateTokens
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from tiers.probe import EngineProbe

_SENTENCE = "The lighthouse keeper wrote the weather into a ledger every evening before the lamp was lit. "
_SHORT = "Water boils at"
_LONG_TOKENS = 256
_SHORT_ANSWER = 6
REPEATED_WORDS = 5
# ``measure_speed`` has an engine generate so many.
MEASURED_TOKENS = _SHORT_ANSWER + 1
# Digits, white space, scripts and accents, which tokenizers of one family split differently.
_TOKENIZER_TEXT = (
    "In 1984 x_1 += 3.50;\t\u00e9tude \u4f60\u597d \U0001f600\n\n  indented 12345"
)
_WORD = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """The question that an engine must answer with readable text before it is ready.

    Attributes:
        question: Sent through the chat template.
        timeout_s: Limit of each generation, in seconds.
    """

    question: str = "What is the capital of France?"
    timeout_s: float = 180.0


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What the warm-up found out about the engine.

    Attributes:
        answer: To the plan's question.
        template: What its chat template adds to prompts.
        tokens_digest: See ``tokens_digest``.
        takes_priority: Whether the engine has priority scheduling; without it, it refuses requests with a priority.
        takes_thinking: Whether it takes a bound on tokens of reasoning; an engine whose model shows none refuses it.
        fingerprint: The engine's name for its build, from its answers; None: it has none.
    """

    answer: str
    template: TemplateTokens
    tokens_digest: str
    takes_priority: bool
    takes_thinking: bool
    fingerprint: str | None


async def warm_up(probe: EngineProbe, model: str, plan: WarmupPlan) -> WarmupReport:
    """Run a short, a long and a chat-templated generation, and read what the engine says of itself.

    Raises:
        ProbeError: The engine did not answer.
    """
    chat = {
        "model": model,
        "messages": [{"role": "user", "content": plan.question}],
        "max_tokens": 16,
    }
    takes_priority = await _short(probe, model, plan)
    await probe.generate(COMPLETIONS, _long(model), plan.timeout_s)
    answer = await probe.generate(CHAT, chat, plan.timeout_s)
    return WarmupReport(
        answer=answer.text,
        template=await _template_tokens(probe, model, plan.question),
        tokens_digest=await tokens_digest(probe, model),
        takes_priority=takes_priority,
        takes_thinking=await probe.takes_thinking(model, plan.timeout_s),
        fingerprint=answer.fingerprint,
    )


async def tokens_digest(probe: EngineProbe, model: str) -> str:
    """Return a SHA-256 of the ids of a fixed, varied chat: equal for engines with the same tokenizer and chat template.

    Raises:
        ProbeError: The engine did not answer.
    """
    ids = await probe.chat_tokens(model, [{"role": "user", "content": _TOKENIZER_TEXT}])
    return hashlib.sha256(repr(ids).encode()).hexdigest()


def check_answer(text: str, question: str) -> None:
    """Check that an answer is readable text. Whether it is the right one is for the canary to say: words hang on rounding.

    Raises:
        WarmupFailedError: It is not.
    """
    words = _WORD.findall(text)
    is_repetition = len(words) > REPEATED_WORDS and len(set(words)) <= 2  # noqa: PLR2004  at most two different words
    if not words or "\ufffd" in text or is_repetition:
        raise WarmupFailedError(
            f"asked {question!r}, the engine answered {text!r}, which is not readable text: a wrong checkpoint or a broken "
            f"kernel. 'qarr doctor' checks the machine; the engine's log says what it was started with"
        )


async def _short(probe: EngineProbe, model: str, plan: WarmupPlan) -> bool:
    """Run a short generation with a priority, or without if that is refused; tell whether it was accepted."""
    body = {"model": model, "prompt": _SHORT, "max_tokens": 2}
    try:
        await probe.generate(COMPLETIONS, {**body, "priority": 1}, plan.timeout_s)
    except RefusedError:
        await probe.generate(COMPLETIONS, body, plan.timeout_s)
        return False
    return True


async def measure_speed(probe: EngineProbe, model: str, plan: WarmupPlan) -> SpeedModel:
    """Measure an idle engine: TTFT of a short and of a long prompt, and TPOT.

    Raises:
        ProbeError: The engine did not answer.
    """
    body = {
        "model": model,
        "prompt": _SHORT,
        "max_tokens": _SHORT_ANSWER,
        "ignore_eos": True,
    }
    short = await probe.generate(COMPLETIONS, body, plan.timeout_s)
    long = await probe.generate(COMPLETIONS, _long(model), plan.timeout_s)
    span = max(long.prompt_tokens - short.prompt_tokens, 1)
    slope = max((long.ttft_ms - short.ttft_ms) / span, 0.0)
    base = max(short.ttft_ms - slope * short.prompt_tokens, 0.0)
    return SpeedModel(base, slope, step_base_ms=short.tpot_ms or short.ttft_ms)


def _long(model: str) -> dict[str, str | int]:
    """Return a request with a long prompt and a random start, so that the prefix cache does not shorten it."""
    prompt = f"{secrets.token_hex(4)} {_SENTENCE * (_LONG_TOKENS // 16)}"
    return {"model": model, "prompt": prompt, "max_tokens": 1}


async def _template_tokens(probe: EngineProbe, model: str, text: str) -> TemplateTokens:
    plain = len(await probe.text_tokens(model, text))

    async def added(*roles: str) -> int:
        chat = [{"role": role, "content": text} for role in roles]
        return len(await probe.chat_tokens(model, chat)) - plain * len(roles)

    alone = await added("user")
    further_pair = max(await added("user", "assistant", "user") - alone, 0)
    try:
        with_system = await added("system", "user")
    except ProbeError:  # some templates take no system message
        with_system = alone + further_pair
    return TemplateTokens(alone, with_system, further_pair)
