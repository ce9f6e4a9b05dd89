"""What the router knows about a prompt: one result, the one function that makes it, and estimates of tokens."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from msgspec import Struct

from classifier.kinds import JUDGED, Complexity, PromptClass
from classifier.model import Prediction, shipped_model

CHARS_PER_TOKEN = 3.0  # English prose has 4 to 5, code fewer: the estimate errs on the long side
PIECE_CHARS = 50_000  # of a text that is counted at once
LONG_TOKENS = 1500
_EVEN = 0.5
# Probability from which work is more than trivial: so 85 % of trivial prose is found, and 10 % of other prose called it.
BEYOND_TRIVIAL = 0.6
# Probability from which a prompt is small talk: so 96 % of what is called small talk is, in batches that were left out, and
# half of it is found there. A false one costs right answers, a missed one only engine time.
SMALL_TALK = 0.9
SMALL_TALK_TOKENS = 40  # of a text at most: in a longer one a question may hide between courtesies
SMALL_TALK_CONTEXT_TOKENS = 500  # of what the model reads before the text, at most: system prompt and earlier turns
SMALL_TALK_FILE = Path(__file__).with_name("small_talk.txt")
DOUBT = 0.18  # distance of the probability of code from even, below which a second look may change the answer
_WIDE = re.compile("[\u2e80-\U0010ffff]")  # from here on scripts without spaces, about a token a character
_WORDS = re.compile(r"\w+")
_WHITE_OR_NOT = b"".join(b" " if chr(byte).isspace() else b"x" for byte in range(256))


class PromptFeatures(Struct, frozen=True):
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
        confidence: Probability that ``prompt_class`` is right, 0..1; of ``unknown``, that nothing can be said.
        signals: Names of certain marks of code, the length by which a prompt is long, ``second look``; for people.
        complexity: How much work is asked for; None where it has not been judged.
        doubtful: Whether it may have code and may not, so that a second look is worth its time.
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
    doubtful: bool = False

    @property
    def has_code(self) -> bool:
        """Tell whether the prompt holds or asks for code."""
        return self.contains_code or self.asks_for_code


class TokenCounter(ABC):
    """Counts the tokens of a text. Safe to share between threads."""

    __slots__ = ()

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Tell whether counts are the model's own rather than estimates."""

    @abstractmethod
    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without any that a chat template adds."""


class EstimatingCounter(TokenCounter):
    """Estimates from the length alone, where no tokenizer file is at hand. Errs on the long side."""

    __slots__ = ()
    exact = False

    def count(self, text: str) -> int:
        """Return an estimate: a token for three characters, or for one character of a script without spaces."""
        if text.isascii():
            return -int(-len(text) // CHARS_PER_TOKEN)
        wide = len(_WIDE.findall(text))
        return wide - int(-(len(text) - wide) // CHARS_PER_TOKEN)


def extract(
    text: str, counter: TokenCounter, context_tokens: int = 0, second: Sequence[float] = (), tokens: int | None = None
) -> PromptFeatures:
    """Read a prompt. Pure; the time grows with the length of the text at most.

    Args:
        text: The prompt, any string.
        counter: Counts tokens as the model does.
        context_tokens: Of all that the model reads, where the text is only its last part.
        second: What ``SecondLook.read`` has found; empty: there was no second look.
        tokens: Of the text; None: they are counted here.

    Raises:
        WeightsError: At the first call, if the weights that come with the package cannot be read.
    """
    # Of a long text's own tokens nothing is decided where those of all that the model reads are known.
    if tokens is None:
        known = bool(context_tokens) and len(text) > PIECE_CHARS
        tokens = min(int(len(text) // CHARS_PER_TOKEN), context_tokens) if known else counter.count(text)
    length = max(tokens, context_tokens)
    found = shipped_model().predict(text, second)
    has_code, signals = found.has_code >= _EVEN, (*found.marks, "second look") if second else found.marks
    if has_code:
        prompt_class, confidence = PromptClass.CODE, found.has_code
    elif length > LONG_TOKENS:
        prompt_class, confidence = PromptClass.LONG_CONTEXT, 1 - found.has_code
        signals += (f"{length} tokens",)
    elif is_small_talk(text, found, tokens, context_tokens):
        prompt_class, confidence = PromptClass.SMALL_TALK, max(found.small_talk, SMALL_TALK)
    else:
        likeliest = max(found.classes)
        prompt_class, confidence = JUDGED[found.classes.index(likeliest)], likeliest * (1 - found.has_code)
    complexity = complexity_of(found, prompt_class)
    words = f" {text}".encode().translate(_WHITE_OR_NOT).count(b" x") if text.isascii() else len(text.split())
    return PromptFeatures(
        chars=len(text),
        words=words,
        tokens=tokens,
        tokens_exact=counter.exact,
        # Where only the sum of both is likely, the likelier one is named.
        contains_code=has_code and found.contains_code >= min(_EVEN, found.asks_for_code),
        asks_for_code=has_code and found.asks_for_code >= min(_EVEN, found.contains_code),
        language=found.language if has_code else None,
        prompt_class=prompt_class,
        confidence=confidence,
        signals=signals,
        complexity=complexity,
        doubtful=not second and abs(found.has_code - _EVEN) < DOUBT,
    )


def is_small_talk(text: str, found: Prediction, tokens: int, context_tokens: int) -> bool:
    """Tell whether no answer to a prompt without code can be right or wrong.

    Args:
        text: The prompt.
        found: What the model finds in the text.
        tokens: Of the text.
        context_tokens: Of all that the language model reads; 0: the text alone.
    """
    if tokens > SMALL_TALK_TOKENS or context_tokens - tokens > SMALL_TALK_CONTEXT_TOKENS:
        return False
    return words_of(text) in known_small_talk() or found.small_talk >= SMALL_TALK


@cache
def known_small_talk() -> frozenset[str]:
    """Return the words of the texts that are known to be small talk, read once."""
    lines = SMALL_TALK_FILE.read_text("utf-8").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))


def words_of(text: str) -> str:
    """Return a text's words in lower case, with spaces between and without marks."""
    return " ".join(_WORDS.findall(text.casefold()))


def complexity_of(found: Prediction, prompt_class: PromptClass) -> Complexity:
    """Return how much work is asked for. Small talk asks for none."""
    if prompt_class is PromptClass.SMALL_TALK:
        return Complexity.TRIVIAL
    if found.complex >= _EVEN:
        return Complexity.COMPLEX
    return Complexity.MODERATE if found.beyond_trivial >= BEYOND_TRIVIAL else Complexity.TRIVIAL
