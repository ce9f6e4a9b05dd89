"""Count tokens exactly as the engines do, without any download.

A byte-level BPE tokenizer is rebuilt for ``tiktoken`` from the model's own ``tokenizer.json``. Whatever cannot be rebuilt
(SentencePiece, WordPiece, unknown stages), and every text that the rebuilt one does not cover, is left to ``tokenizers``.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

from tokenizers import Tokenizer

from classifier.bpe import rebuild
from classifier.errors import TokenizerError

if TYPE_CHECKING:
    from pathlib import Path

CHARS_PER_TOKEN = 3.0  # English prose has 4 to 5, code fewer: the estimate errs on the long side
# From here on scripts without spaces, about a token a character.
PIECE_CHARS = 50_000  # of a text that is counted at once
MAX_CHARS = 400_000  # of a text that is counted
_WIDE = re.compile("[\u2e80-\U0010ffff]")
_PROBES = (
    "The capital of France is Paris.\n\n  It's 1984, or 3.50 x_1 == 12345?",
    "def f(x):\n\treturn x ** 2  # \u00e9tude \u4f60\u597d\u4e16\u754c \U0001f600\U0001f680",
    "  \n \t\n   don't   STOP\r\n\r\n;;;  \u0416\u0443\u043a 100% \u0661\u0662\u0663 \u00bd",
    "WE'LL they'Ve 'tis I'm\u00a0\u3000x\u200b  7  8.9\t\t10",
    "<|im_start|>user\n<|endoftext|>x</s>",
)


class TokenCounter(ABC):
    """Counts the tokens of a text. Safe to share between threads."""

    @staticmethod
    def from_file(path: Path) -> ModelTokenCounter:
        """Return the counter of a model, from its ``tokenizer.json``.

        Raises:
            TokenizerError: The file is missing or is not a tokenizer definition.
        """
        try:
            definition = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"cannot read the tokenizer {path}: {error}") from error
        return ModelTokenCounter(definition)

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

    @property
    def exact(self) -> bool:
        """Tell that counts are estimates."""
        return False

    def count(self, text: str) -> int:
        """Return an estimate: a token for three characters, or for one character of a script without spaces."""
        if text.isascii():
            return -int(-len(text) // CHARS_PER_TOKEN)
        wide = len(_WIDE.findall(text))
        return wide - int(-(len(text) - wide) // CHARS_PER_TOKEN)


class ModelTokenCounter(TokenCounter):
    """Counts with a model's own tokenizer.

    Lone surrogates, which cannot be encoded as UTF-8, count as U+FFFD.
    """

    __slots__ = ("_fast", "_reference")

    def __init__(self, definition: str) -> None:
        """Build from the text of a ``tokenizer.json``.

        Raises:
            TokenizerError: It is not a tokenizer definition.
        """
        try:
            self._reference: Tokenizer = Tokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"not a tokenizer definition: {error}") from error
        self._reference.no_truncation()
        self._reference.no_padding()
        fast = rebuild(json.loads(definition))
        if fast and any(fast.covers(text) and fast.encode(text) != self._encode_slowly(text) for text in _PROBES):
            fast = None
        self._fast = fast

    @property
    def backend(self) -> Literal["tiktoken", "tokenizers"]:
        """Return the library that encodes ordinary text."""
        return "tiktoken" if self._fast else "tokenizers"

    @property
    def exact(self) -> bool:
        """Tell that counts are the model's own."""
        return True

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without any that a chat template adds. Special tokens in the text are matched."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if self._fast and self._fast.covers(text):
            return self._fast.encode(text)
        return self._encode_slowly(text)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without any that a chat template adds.

        A long text is counted in pieces, each of which may count one token more: a library that reads it at once would
        keep other threads waiting, or overflow its stack. One that fits no context is estimated.
        """
        if len(text) <= PIECE_CHARS:
            return len(self.encode(text))
        if len(text) > MAX_CHARS:
            return int(len(text) // CHARS_PER_TOKEN)
        return sum(len(self.encode(text[at : at + PIECE_CHARS])) for at in range(0, len(text), PIECE_CHARS))

    def _encode_slowly(self, text: str) -> list[int]:
        ids: list[int] = self._reference.encode(text, add_special_tokens=False).ids
        return ids
