"""What the router knows about a prompt: one result, and the one function that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from classifier.kinds import JUDGED, Complexity, PromptClass
from classifier.tokens import CHARS_PER_TOKEN, PIECE_CHARS

if TYPE_CHECKING:
    from classifier.model import Model, Prediction
    from classifier.tokens import TokenCounter

LONG_TOKENS = 1500
MIN_PROBABILITY = 0.4  # of the likeliest class, below which no class is named
_EVEN = 0.5
_WHITE_OR_NOT = b"".join(b" " if chr(byte).isspace() else b"x" for byte in range(256))


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """A prompt's features.

    Attributes:
        chars: Length in code points.
        words: Parts between white space.
        tokens: Of the prompt alone, without chat template.
        tokens_exact: Whether ``tokens`` is the model's own count rather than an estimate.
        contains_code: The prompt holds source text, a command, a query, a diff, a stack trace or the like.
        asks_for_code: A good answer is mainly code.
        language: Programming language held or asked for, lower case; None where there is none, it is left open or rare.
        prompt_class: The kind of work.
        confidence: Probability that ``prompt_class`` is right, 0..1; of ``unknown``, that the likeliest class would have
            been wrong.
        signals: Names of certain marks of code, or the length by which a prompt is long, for people.
        complexity: How much work is asked for; None where it has not been judged.
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
    complexity: Complexity | None = None

    @property
    def has_code(self) -> bool:
        """Tell whether the prompt holds or asks for code."""
        return self.contains_code or self.asks_for_code


def extract(text: str, counter: TokenCounter, context_tokens: int = 0) -> PromptFeatures:
    """Read a prompt. Pure; the time grows with the length of the text at most.

    Args:
        text: The prompt, any string.
        counter: Counts tokens as the model does.
        context_tokens: Of all that the model reads, where the text is only its last part.

    Raises:
        WeightsError: At the first call, if the weights that come with the package cannot be read.
    """
    # Of a long text's own tokens nothing is decided where those of all that the model reads are known.
    known = bool(context_tokens) and len(text) > PIECE_CHARS
    tokens = min(int(len(text) // CHARS_PER_TOKEN), context_tokens) if known else counter.count(text)
    found = _model().predict(text)
    has_code = found.has_code >= _EVEN
    length = max(tokens, context_tokens)
    prompt_class, confidence = _judge(found, length)
    long = (f"{length} tokens",) if prompt_class is PromptClass.LONG_CONTEXT else ()
    return PromptFeatures(
        chars=len(text),
        words=_count_words(text),
        tokens=tokens,
        tokens_exact=counter.exact,
        # Where only the sum of both is likely, the likelier one is named.
        contains_code=has_code and found.contains_code >= min(_EVEN, found.asks_for_code),
        asks_for_code=has_code and found.asks_for_code >= min(_EVEN, found.contains_code),
        language=found.language if has_code else None,
        prompt_class=prompt_class,
        confidence=confidence,
        signals=found.marks + long,
        complexity=found.complexity,
    )


def explain(text: str, most: int = 5) -> dict[str, list[tuple[str, float]]]:
    """Return what weighed most in a prompt, for people: see ``classifier.explanation``."""
    from classifier.explanation import explain as told  # noqa: PLC0415

    return told(text, most)


def _count_words(text: str) -> int:
    if text.isascii():
        return f" {text}".encode().translate(_WHITE_OR_NOT).count(b" x")
    return len(text.split())


@cache
def _model() -> Model:
    """Return the shipped model. NumPy is imported here, not where features are only passed on."""
    from classifier.model import shipped_model  # noqa: PLC0415

    return shipped_model()


def _judge(found: Prediction, tokens: int) -> tuple[PromptClass, float]:
    """Return the class of a prompt and the confidence in it."""
    if found.has_code >= _EVEN:
        return PromptClass.CODE, found.has_code
    if tokens > LONG_TOKENS:
        return PromptClass.LONG_CONTEXT, 1 - found.has_code
    share = max(found.classes)
    likeliest = JUDGED[found.classes.index(share)]
    share *= 1 - found.has_code
    if likeliest is PromptClass.UNKNOWN:
        return likeliest, share
    return (likeliest, share) if share >= MIN_PROBABILITY else (PromptClass.UNKNOWN, 1 - share)
