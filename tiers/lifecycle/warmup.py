"""Warm up an engine, and check that it answers sane text, before it gets requests.

A healthy engine is not warm: its first request can take seconds of just-in-time work. Nor is it necessarily correct: a
wrong kernel or a broken graph answers HTTP 200 with nonsense.
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
MEASURED_TOKENS = _SHORT_ANSWER + 1  # that ``measure_speed`` has an engine generate
# Digits, white space, scripts and accents, which tokenizers of one family split differently.
_TOKENIZER_TEXT = "In 1984 x_1 += 3.50;\t\u00e9tude \u4f60\u597d \U0001f600\n\n  indented 12345"
_WORD = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """The question that an engine must answer before it is ready.

    Attributes:
        question: Sent through the chat template.
        expected: Must occur in the answer, in upper or lower case; empty: any sane text is accepted.
        timeout_s: Limit of each generation, in seconds.
    """

    question: str = "What is the capital of France?"
    expected: str = "Paris"
    timeout_s: float = 180.0


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What the warm-up found out about the engine.

    Attributes:
        template: What its chat template adds to prompts.
        tokens_digest: See ``tokens_digest``.
        takes_priority: Whether the engine has priority scheduling; without it, it refuses requests with a priority.
        fingerprint: The engine's name for its build, from its answers; None: it has none.
    """

    template: TemplateTokens
    tokens_digest: str
    takes_priority: bool
    fingerprint: str | None


async def warm_up(probe: EngineProbe, model: str, plan: WarmupPlan) -> WarmupReport:
    """Run a short, a long and a chat-templated generation, and check the chat's answer.

    Raises:
        WarmupFailedError: The answer is not sane text, or lacks the expected text.
        ProbeError: The engine did not answer.
    """
    chat = {"model": model, "messages": [{"role": "user", "content": plan.question}], "max_tokens": 16}
    takes_priority = await _short(probe, model, plan)
    await probe.generate(COMPLETIONS, _long(model), plan.timeout_s)
    answer = await probe.generate(CHAT, chat, plan.timeout_s)
    check_answer(answer.text, plan)
    digest = await tokens_digest(probe, model)
    template = await _template_tokens(probe, model, plan.question)
    return WarmupReport(template, digest, takes_priority, answer.fingerprint)


async def tokens_digest(probe: EngineProbe, model: str) -> str:
    """Return a SHA-256 of the ids of a fixed, varied chat: equal for engines with the same tokenizer and chat template.

    Raises:
        ProbeError: The engine did not answer.
    """
    ids = await probe.chat_tokens(model, [{"role": "user", "content": _TOKENIZER_TEXT}])
    return hashlib.sha256(repr(ids).encode()).hexdigest()


def check_answer(text: str, plan: WarmupPlan) -> None:
    """Check that an answer is readable text, and contains what the plan expects.

    Raises:
        WarmupFailedError: It is not, or does not.
    """
    words = _WORD.findall(text)
    broken = not words or "\ufffd" in text or (len(words) > 5 and len(set(words)) <= 2)  # noqa: PLR2004
    if broken or plan.expected.casefold() not in text.casefold():
        raise WarmupFailedError(
            f"asked {plan.question!r}, the engine answered {text!r}, expected {plan.expected or 'sane text'!r}: "
            f"a wrong checkpoint or a broken kernel; for a model that answers otherwise set engine.warmup_expected"
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
    body = {"model": model, "prompt": _SHORT, "max_tokens": _SHORT_ANSWER, "ignore_eos": True}
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
