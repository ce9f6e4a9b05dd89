"""What the router knows about a prompt: one result, the one function that makes it, and estimates of tokens."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from classifier.kinds import JUDGED, Complexity, PromptClass, ToolUse
from classifier.model import Prediction, shipped_model

# English prose has 4 to 5, code fewer: the estimate errs on the long side.
CHARS_PER_TOKEN = 3.0
PIECE_CHARS = 50_000  # Longer texts are counted in pieces of this length.
LONG_TOKENS = 1500
_EVEN = 0.5
# Probability from which work is more than trivial: so 85 % of trivial prose is found, and 10 % of other prose called it.
BEYOND_TRIVIAL = 0.6
# Probability from which a prompt is small talk: so 96 % of what is called small talk is, in batches that were left out, and
# half of it is found there. A false one costs right answers, a missed one only engine time.
SMALL_TALK = 0.9
SMALL_TALK_TOKENS = 40  # In a longer text a question may hide between courtesies.
# A longer context (system prompt and earlier turns) may make a question of "yes" or "go on".
SMALL_TALK_CONTEXT_TOKENS = 500
SMALL_TALK_FILE = Path(__file__).with_name("small_talk.txt")
# If the probability of code is nearer to even than this, a second look may change the answer.
DOUBT = 0.18
# Scripts without spaces have about one token for each character.
_WIDE = re.compile("[\u2e80-\U0010ffff]")
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
        signals: Names of certain marks of code, the length by which a prompt is long, what it has to do with tools,
            ``second look``; for people.
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


class _LikelyClass(NamedTuple):
    """A prompt's class, and the probability that it is right, 0..1."""

    prompt_class: PromptClass
    confidence: float


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
    text: str,
    counter: TokenCounter,
    context_tokens: int = 0,
    second: Sequence[float] = (),
    tokens: int | None = None,
    tool_use: ToolUse | None = None,
) -> PromptFeatures:
    """Classify a prompt. Pure; the time grows with the length of the text at most.

    Args:
        text: The prompt, any string.
        counter: Counts tokens as the model does.
        context_tokens: Number of all tokens that the model reads, where the text is only the last part of them.
        second: What ``SecondLook.read`` returned; empty: there was no second look.
        tokens: Number of the text's tokens; None: they are counted here.
        tool_use: What the request that the prompt is in has to do with tools, which tells its class; None: nothing.

    Raises:
        WeightsError: At the first call, if the weights that come with the package cannot be read.
    """
    if tokens is None:
        tokens = _count_tokens(text, counter, context_tokens)
    prediction = shipped_model().predict(text, second)
    has_code = prediction.has_code >= _EVEN
    context_length = max(tokens, context_tokens)
    is_long = context_length > LONG_TOKENS
    prompt_class, confidence = _likely_class(
        text, prediction, tokens, context_tokens, tool_use
    )
    signals = prediction.marks
    if second:
        signals += ("second look",)
    if is_long and not has_code:
        signals += (f"{context_length} tokens",)
    if tool_use is not None:
        signals += (tool_use.value,)
    return PromptFeatures(
        chars=len(text),
        words=count_words(text),
        tokens=tokens,
        tokens_exact=counter.exact,
        # Code may be likely although neither kind of it is: then the likelier kind is named.
        contains_code=has_code
        and prediction.contains_code >= min(_EVEN, prediction.asks_for_code),
        asks_for_code=has_code
        and prediction.asks_for_code >= min(_EVEN, prediction.contains_code),
        language=prediction.language if has_code else None,
        prompt_class=prompt_class,
        confidence=confidence,
        signals=signals,
        complexity=complexity_of(prediction, prompt_class),
        doubtful=tool_use is None
        and not second
        and abs(prediction.has_code - _EVEN) < DOUBT,
    )


def _likely_class(
    text: str,
    prediction: Prediction,
    tokens: int,
    context_tokens: int,
    tool_use: ToolUse | None,
) -> _LikelyClass:
    """Return the class of a prompt; the arguments are those of ``extract``, and what the model finds in the text."""
    if tool_use is not None:
        return _LikelyClass(PromptClass.TOOLS, 1.0)
    if prediction.has_code >= _EVEN:
        return _LikelyClass(PromptClass.CODE, prediction.has_code)
    if max(tokens, context_tokens) > LONG_TOKENS:
        return _LikelyClass(PromptClass.LONG_CONTEXT, 1 - prediction.has_code)
    if is_small_talk(text, prediction, tokens, context_tokens):
        confidence = max(prediction.small_talk, SMALL_TALK)
        return _LikelyClass(PromptClass.SMALL_TALK, confidence)
    likeliest = max(prediction.classes)
    prompt_class = JUDGED[prediction.classes.index(likeliest)]
    return _LikelyClass(prompt_class, likeliest * (1 - prediction.has_code))


def _count_tokens(text: str, counter: TokenCounter, context_tokens: int) -> int:
    """Count a text's tokens; estimate those of a long text within a context whose length is known, which decides anyway."""
    if context_tokens and len(text) > PIECE_CHARS:
        return min(int(len(text) // CHARS_PER_TOKEN), context_tokens)
    return counter.count(text)


def count_words(text: str) -> int:
    """Return the number of parts between white space. In ASCII, counting bytes is four times as fast as splitting."""
    if text.isascii():
        return f" {text}".encode().translate(_WHITE_OR_NOT).count(b" x")
    return len(text.split())


def is_small_talk(
    text: str, prediction: Prediction, tokens: int, context_tokens: int
) -> bool:
    """Tell whether no answer to a prompt without code can be right or wrong.

    Args:
        text: The prompt.
        prediction: What the model finds in the text.
        tokens: Number of the text's tokens.
        context_tokens: Number of all tokens that the language model reads; 0: it reads the text alone.
    """
    if (
        tokens > SMALL_TALK_TOKENS
        or context_tokens - tokens > SMALL_TALK_CONTEXT_TOKENS
    ):
        return False
    return words_of(text) in known_small_talk() or prediction.small_talk >= SMALL_TALK


@cache
def known_small_talk() -> frozenset[str]:
    """Return the words of the texts that are known to be small talk, read once."""
    lines = SMALL_TALK_FILE.read_text("utf-8").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))


def words_of(text: str) -> str:
    """Return a text's words in lower case, with spaces between and without marks."""
    return " ".join(_WORDS.findall(text.casefold()))


def complexity_of(prediction: Prediction, prompt_class: PromptClass) -> Complexity:
    """Return how much work is asked for. Small talk asks for none."""
    if prompt_class is PromptClass.SMALL_TALK:
        return Complexity.TRIVIAL
    if prediction.complex >= _EVEN:
        return Complexity.COMPLEX
    if prediction.beyond_trivial >= BEYOND_TRIVIAL:
        return Complexity.MODERATE
    return Complexity.TRIVIAL
