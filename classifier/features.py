"""What the router knows about a prompt: the classifier's one result and the one function that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from classifier.classes import PromptClass, classify
from classifier.code import find_code
from classifier.languages import programming_language

if TYPE_CHECKING:
    from classifier.tokens import TokenCounter


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """A prompt's features.

    Attributes:
        chars: Length in code points.
        words: Parts between white space.
        tokens: Of the prompt alone, without chat template.
        tokens_exact: Whether ``tokens`` was counted with the tier's tokenizer; otherwise it is an estimate.
        contains_code: The prompt holds source text, a command, a query, a diff, a stack trace or the like.
        asks_for_code: A good answer is mainly code.
        language: Programming language held or asked for, in lower case; None where there is none or it is open.
        prompt_class: The kind of work.
        confidence: In ``prompt_class``, 0..1.
        signals: Names of the evidence, for people.
    """

    chars: int
    words: int
    tokens: int
    tokens_exact: bool
    contains_code: bool
    asks_for_code: bool
    language: str | None
    prompt_class: PromptClass
    confidence: float
    signals: tuple[str, ...]


def extract(text: str, counter: TokenCounter) -> PromptFeatures:
    """Read a prompt. Pure; time grows with its length, and not with its content.

    Args:
        text: The prompt, any string.
        counter: Counts tokens as the tiers do.
    """
    tokens = counter.count(text)
    code = find_code(text)
    prompt_class, confidence, evidence = classify(text, tokens, code)
    language = None
    if code.contains or code.asks:
        language = programming_language(text, contains_code=code.contains)
    return PromptFeatures(
        chars=len(text),
        words=len(text.split()),
        tokens=tokens,
        tokens_exact=counter.exact,
        contains_code=code.contains,
        asks_for_code=code.asks,
        language=language,
        prompt_class=prompt_class,
        confidence=confidence,
        signals=(*(code.signals if prompt_class is PromptClass.CODE else ()), *evidence),
    )
