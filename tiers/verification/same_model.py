"""Compare what two engines tell of their models, and say in words what each difference does to answers."""

from __future__ import annotations

import json
import math
import re
from statistics import mean, variance
from typing import TYPE_CHECKING

from pydantic_core import from_json

from tiers.verification.findings import Difference, SameModelFinding
from tiers.verification.model_facts import WRITING_PLANS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tiers.verification.model_facts import (
        DrawnTexts,
        ModelFacts,
        ParsedCall,
        RenderedChat,
        TextTokens,
    )

# Sampling defaults differ if random continuations do by so many standard errors and by so many nats a token. Weights of
# fewer bits move the mean by less than these nats.
STANDARD_ERRORS = 4.0
SAMPLING_NATS = 0.3
MARKS = "marks"  # the text of special tokens
SHOWN_TOKENS = 6
SHOWN_CHARS = 60
# Some templates write today's date, which differs where a reference was saved on another day.
_MONTHS = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"  # also in full
_DATE = re.compile(
    rf"\d{{4}}-\d{{2}}-\d{{2}}|\d{{1,2}} {_MONTHS} \d{{4}}|{_MONTHS} \d{{1,2}}, \d{{4}}"
)


def compare_facts(
    reference: ModelFacts, candidate: ModelFacts, took_s: float
) -> SameModelFinding:
    """Say what differs between two engines before anything is judged by its likelihood.

    Args:
        reference: What the reference tells, now or when it was saved.
        candidate: What the candidate tells.
        took_s: How long the stage took, in seconds.
    """
    differences = [
        *_compare_tokens(reference, candidate),
        *_compare_chats(reference, candidate),
        *_compare_context(reference, candidate),
        *_compare_ends(reference, candidate),
        *_compare_sampling(reference, candidate),
        *_compare_calls(reference, candidate),
        *_compare_thinking(reference, candidate),
        *_compare_releases(reference, candidate),
    ]
    faults_first = sorted(differences, key=lambda difference: not difference.is_fault)
    not_checked = (*reference.not_told, *candidate.not_told)
    return SameModelFinding(
        differences=tuple(faults_first), not_checked=not_checked, took_s=took_s
    )


def _compare_tokens(
    reference: ModelFacts, candidate: ModelFacts
) -> Iterator[Difference]:
    """Yield a difference of tokenizers, and one of special tokens; the first text that differs stands for all."""
    differing = [
        (ours, theirs)
        for ours, theirs in zip(reference.texts, candidate.texts, strict=True)
        if ours.token_ids != theirs.token_ids
    ]
    plain = [pair for pair in differing if pair[0].name != MARKS]
    if plain:
        yield _token_difference(
            "tokenizer",
            *plain[0],
            explanation=(
                "The same text becomes other tokens, so the candidate reads other prompts and is another model or has the "
                "wrong tokenizer.json. Serve the reference's tokenizer files with the candidate's weights."
            ),
        )
    elif differing:
        yield _token_difference(
            "special tokens",
            *differing[0],
            explanation=(
                "A mark such as the end of a turn is one token here and several there, so chats and ends of answers are "
                "misread. Compare added_tokens in tokenizer.json and special_tokens_map.json."
            ),
        )


def _token_difference(
    subject: str, reference: TextTokens, candidate: TextTokens, *, explanation: str
) -> Difference:
    place = _first_difference(reference.token_ids, candidate.token_ids)
    return Difference(
        subject=subject,
        reference=_show_tokens(reference, place),
        candidate=_show_tokens(candidate, place),
        is_fault=True,
        explanation=explanation,
    )


def _show_tokens(text: TextTokens, place: int) -> str:
    shown = " ".join(map(str, text.token_ids[place : place + SHOWN_TOKENS]))
    return f"{len(text.token_ids)} tokens of the text {text.name!r}, from number {place + 1} on: {shown}"


def _compare_chats(
    reference: ModelFacts, candidate: ModelFacts
) -> Iterator[Difference]:
    """Yield the chats that are rendered otherwise, as one difference: one template writes all of them."""
    if bool(reference.chats) != bool(candidate.chats):
        yield Difference(
            subject="chat template",
            reference="has one" if reference.chats else "has none",
            candidate="has one" if candidate.chats else "has none",
            is_fault=True,
            explanation=(
                "One of the two refuses chats. Give its engine the chat template: --chat-template FILE, or a "
                "chat_template.jinja in the checkpoint."
            ),
        )
        return
    rendered = zip(reference.chats, candidate.chats, strict=True)
    differing = [(ours, theirs) for ours, theirs in rendered if _differ(ours, theirs)]
    if not differing:
        return
    ours, theirs = differing[0]
    names = ", ".join(chat.name for chat, _ in differing)
    yield Difference(
        subject="chat template",
        reference=_show_chat(ours, beside=theirs),
        candidate=_show_chat(theirs, beside=ours),
        is_fault=True,
        explanation=(
            f"Chats with {names} become another prompt, so the candidate answers something that was not asked so. Serve "
            "both with one template: --chat-template FILE, or the same chat_template.jinja in both checkpoints."
        ),
    )


def _differ(reference: RenderedChat, candidate: RenderedChat) -> bool:
    """Tell whether two renderings differ in more than a date.

    Where both engines tell the text, it decides: a difference of tokenizers shows in the fixed texts already.
    """
    if reference.text and candidate.text:
        return _undated(reference.text) != _undated(candidate.text)
    return reference.token_ids != candidate.token_ids


def _undated(text: str) -> str:
    return _DATE.sub("DATE", text)


def _show_chat(chat: RenderedChat, *, beside: RenderedChat) -> str:
    """Return the part of a rendering where it begins to differ from another."""
    if not chat.token_ids:
        return f"refuses {chat.name}"
    text = _undated(chat.text)
    place = _first_difference(text, _undated(beside.text))
    start = max(place - SHOWN_CHARS // 3, 0)
    shown = text[start : start + SHOWN_CHARS]
    return f"{chat.name}: {json.dumps(shown, ensure_ascii=False)}"


def _compare_context(
    reference: ModelFacts, candidate: ModelFacts
) -> Iterator[Difference]:
    ours = reference.identity.max_model_len
    theirs = candidate.identity.max_model_len
    if ours == theirs:
        return
    if theirs < ours:
        explanation = (
            f"Prompts and answers of more than {theirs:,} tokens together are refused or cut. Raise the candidate's "
            "--max-model-len if its KV cache has room, or tell its callers."
        )
    else:
        explanation = (
            "The candidate takes longer prompts. A longer context may come with another scaling of positions "
            "(rope_scaling in config.json), which changes short prompts too."
        )
    yield Difference(
        subject="context",
        reference=f"{ours:,} tokens",
        candidate=f"{theirs:,} tokens",
        is_fault=False,
        explanation=explanation,
    )


def _compare_ends(reference: ModelFacts, candidate: ModelFacts) -> Iterator[Difference]:
    """Yield a difference of tokens that end an answer; of other tokenizers it would say nothing."""
    if reference.texts != candidate.texts or reference.chats != candidate.chats:
        return
    if reference.ends == candidate.ends:
        return
    yield Difference(
        subject="end of answers",
        reference=_show_ends(reference),
        candidate=_show_ends(candidate),
        is_fault=True,
        explanation=(
            "An answer that the one ends goes on with the other, up to its limit of tokens. Compare eos_token_id in "
            "generation_config.json and config.json."
        ),
    )


def _show_ends(facts: ModelFacts) -> str:
    if not facts.ends:
        return "no token of the template's end of a turn"
    return "token " + ", ".join(map(str, facts.ends))


def _compare_sampling(
    reference: ModelFacts, candidate: ModelFacts
) -> Iterator[Difference]:
    """Yield a difference of what both draw without being told a temperature."""
    if not (_are_enough(reference.drawn) and _are_enough(candidate.drawn)):
        return
    ours = _Effects(reference.drawn)
    theirs = _Effects(candidate.drawn)
    shift = theirs.nats - ours.nats
    error = math.sqrt(ours.variance + theirs.variance)
    if abs(shift) < max(SAMPLING_NATS, STANDARD_ERRORS * error):
        return
    direction = "less" if shift < 0 else "more"
    yield Difference(
        subject="sampling defaults",
        reference=_show_effect(ours),
        candidate=_show_effect(theirs),
        is_fault=True,
        explanation=(
            f"Where a request names no temperature, the candidate chooses {direction} likely tokens. Compare temperature, "
            "top_p, top_k and min_p in generation_config.json, and the engines' --generation-config and "
            "--override-generation-config."
        ),
    )


def _are_enough(drawn: Sequence[DrawnTexts]) -> bool:
    """Tell whether each opening has so many continuations that their variance is known."""
    counts = [min(len(texts.logprobs), len(texts.neutral_logprobs)) for texts in drawn]
    return bool(counts) and min(counts) > 1


class _Effect:
    """What an engine's sampling defaults do after one opening: the change of the mean log-probability, and its variance."""

    def __init__(self, drawn: DrawnTexts) -> None:
        self.nats = mean(drawn.logprobs) - mean(drawn.neutral_logprobs)
        # Of engines without defaults both are the same texts, and this is too large.
        self.variance = _variance_of_mean(drawn.logprobs)
        self.variance += _variance_of_mean(drawn.neutral_logprobs)


class _Effects:
    """What an engine's sampling defaults do after all openings."""

    def __init__(self, drawn: Sequence[DrawnTexts]) -> None:
        effects = [_Effect(texts) for texts in drawn]
        self.nats = mean(effect.nats for effect in effects)
        self.variance = sum(effect.variance for effect in effects) / len(effects) ** 2


def _variance_of_mean(logprobs: Sequence[float]) -> float:
    return variance(logprobs) / len(logprobs)


def _show_effect(effects: _Effects) -> str:
    if not round(effects.nats, 1):
        return "as likely tokens as at temperature 1 without cuts"
    direction = "more" if effects.nats > 0 else "less"
    return f"tokens {abs(effects.nats):.1f} nats {direction} likely than at temperature 1 without cuts"


def _compare_calls(
    reference: ModelFacts, candidate: ModelFacts
) -> Iterator[Difference]:
    """Yield a difference of tool parsers, if one of the two reads the call rightly and both had one to read."""
    if not (reference.is_call_written and candidate.is_call_written):
        return
    if reference.call == candidate.call:
        return
    if not (_is_right(reference.call) or _is_right(candidate.call)):
        return
    yield Difference(
        subject="tool calls",
        reference=_show_call(reference.call),
        candidate=_show_call(candidate.call),
        is_fault=not _is_right(candidate.call),
        explanation=(
            "Both were made to write one call word for word, and their parsers read it differently: agents get wrong "
            "arguments or none. Compare --tool-call-parser, --enable-auto-tool-choice and the release of vLLM."
        ),
    )


def _is_right(call: ParsedCall | None) -> bool:
    """Tell whether a parser has read one of the calls that engines are made to write as it was meant."""
    if call is None:
        return False
    return any(
        call.name == plan.tool_name and _arguments(call) == plan.arguments
        for plan in WRITING_PLANS.values()
    )


def _arguments(call: ParsedCall) -> object:
    try:
        return from_json(call.arguments)
    except ValueError:
        return None


def _show_call(call: ParsedCall | None) -> str:
    if call is None:
        return "takes no tools"
    if not call.name:
        return "finds no call"
    return f"{call.name}({call.arguments})"


def _compare_thinking(
    reference: ModelFacts, candidate: ModelFacts
) -> Iterator[Difference]:
    if reference.thinks == candidate.thinks:
        return
    yield Difference(
        subject="reasoning",
        reference=_show_thinking(reference),
        candidate=_show_thinking(candidate),
        is_fault=True,
        explanation=(
            "One of the two has a parser of reasoning and the other has none: callers get thoughts as a part of the "
            "answer, or lose them. Compare --reasoning-parser."
        ),
    )


def _show_thinking(facts: ModelFacts) -> str:
    return "told apart from answers" if facts.thinks else "not told apart"


def _compare_releases(
    reference: ModelFacts, candidate: ModelFacts
) -> Iterator[Difference]:
    """Yield what may differ between sound engines, but explains what later stages find."""
    ours = reference.identity
    theirs = candidate.identity
    if ours.version and theirs.version and ours.version != theirs.version:
        yield Difference(
            subject="release of vLLM",
            reference=ours.version,
            candidate=theirs.version,
            is_fault=False,
            explanation="Kernels and defaults change between releases. The later stages tell whether answers do.",
        )
    are_told = bool(ours.kv_cache_dtype and theirs.kv_cache_dtype)
    if are_told and ours.kv_cache_dtype != theirs.kv_cache_dtype:
        yield Difference(
            subject="type of the KV cache",
            reference=str(ours.kv_cache_dtype),
            candidate=str(theirs.kv_cache_dtype),
            is_fault=False,
            explanation="A KV cache of fewer bits loses more with longer contexts. The later stages tell how much.",
        )


def _first_difference(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the first place where two sequences differ: the end of the shorter one if there is none before."""
    pairs: Iterable[tuple[object, object]] = zip(left, right, strict=False)
    for place, (ours, theirs) in enumerate(pairs):
        if ours != theirs:
            return place
    return min(len(left), len(right))
