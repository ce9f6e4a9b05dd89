"""Count tokens exactly as the engines do, without any download.

A byte-level BPE tokenizer is rebuilt for ``tiktoken`` from the model's own ``tokenizer.json``. Whatever cannot be rebuilt
(SentencePiece, WordPiece, unknown stages), and every text that the rebuilt one does not cover, is left to ``tokenizers``.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from tokenizers import Tokenizer

from classifier.bpe import rebuild
from classifier.errors import TokenizerError
from classifier.features import CHARS_PER_TOKEN, PIECE_CHARS, TokenCounter

if TYPE_CHECKING:
    from pathlib import Path

MAX_CHARS = 400_000  # The tokens of a longer text are estimated.
_PROBES = (
    "The capital of France is Paris.\n\n  It's 1984, or 3.50 x_1 == 12345?",
    "def f(x):\n\treturn x ** 2  # \u00e9tude \u4f60\u597d\u4e16\u754c \U0001f600\U0001f680",
    "  \n \t\n   don't   STOP\r\n\r\n;;;  \u0416\u0443\u043a 100% \u0661\u0662\u0663 \u00bd",
    "WE'LL they'Ve 'tis I'm\u00a0\u3000x\u200b  7  8.9\t\t10",
    "<|im_start|>user\n<|endoftext|>x</s>",
)


class ModelTokenCounter(TokenCounter):
    """Counts with a model's own tokenizer.

    Lone surrogates, which cannot be encoded as UTF-8, count as U+FFFD.
    """

    __slots__ = ("_fast", "_reference")
    exact = True

    def __init__(self, definition: str) -> None:
        """Build from the text of a ``tokenizer.json``.

        Raises:
            TokenizerError: It is not a tokenizer definition.
        """
        try:
            self._reference: Tokenizer = Tokenizer.from_str(definition)
        except Exception as error:  # The library raises bare exceptions.
            raise TokenizerError(f"not a tokenizer definition: {error}") from error
        self._reference.no_truncation()
        self._reference.no_padding()
        fast = rebuild(json.loads(definition))
        if fast and any(
            fast.encode(text) not in (None, self._encode_slowly(text))
            for text in _PROBES
        ):
            fast = None
        self._fast = fast

    @staticmethod
    def from_file(path: Path) -> ModelTokenCounter:
        """Return the counter of a model, from its ``tokenizer.json``.

        Raises:
            TokenizerError: The file is missing or is not a tokenizer definition.
        """
        try:
            definition = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(
                f"cannot read the tokenizer {path}: {error}"
            ) from error
        return ModelTokenCounter(definition)

    @property
    def backend(self) -> Literal["tiktoken", "tokenizers"]:
        """Return the library that encodes ordinary text."""
        return "tiktoken" if self._fast else "tokenizers"

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without any that a chat template adds. Special tokens in the text are matched."""
        ids: list[int] | None = None
        if self._fast:
            with suppress(UnicodeEncodeError):
                ids = self._fast.encode(text)
        if ids is None:
            ids = self._encode_slowly(text)
        return ids

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without any that a chat template adds.

        A long text is counted in pieces, each of which may count one token more: a library that reads it at once would
        keep other threads waiting, or overflow its stack. One that fits no context is estimated.
        """
        pieces = pieces_of(text)
        if not pieces:
            return int(len(text) // CHARS_PER_TOKEN)
        return sum([len(self.encode(piece)) for piece in pieces])

    def _encode_slowly(self, text: str) -> list[int]:
        without_surrogates = text.encode("utf-16", "surrogatepass").decode(
            "utf-16", "replace"
        )
        ids: list[int] = self._reference.encode(
            without_surrogates, add_special_tokens=False
        ).ids
        return ids


def pieces_of(text: str) -> list[str]:
    """Return the pieces in which a text is counted; none: it is so long that its tokens are estimated."""
    if len(text) <= PIECE_CHARS:
        return [text]
    if len(text) > MAX_CHARS:
        return []
    return [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
