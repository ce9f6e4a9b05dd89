"""Which token counter the router uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from classifier import EstimatingCounter, TokenCounter, TokenizerError

if TYPE_CHECKING:
    from pathlib import Path


def named_counter(folder: Path) -> TokenCounter:
    """Return a counter with the tokenizer of a model folder that a person has named.

    Raises:
        TokenizerError: There is none.
    """
    if not (folder / "tokenizer.json").is_file():
        what = "has no tokenizer.json" if folder.is_dir() else "is no folder"
        raise TokenizerError(
            f"--tokenizer: {folder} {what}: name the model's folder, or leave the option out and tokens are estimated"
        )
    return make_counter(folder)


def make_counter(folder: Path | None) -> TokenCounter:
    """Return a counter with a model folder's tokenizer; without one, an estimating counter."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return EstimatingCounter()
    return TokenCounter.from_file(folder / "tokenizer.json")


class LateCounter(TokenCounter):
    """Estimates until the model's tokenizer is there, and then counts with it."""

    __slots__ = ("_counter",)

    def __init__(self) -> None:
        self._counter: TokenCounter = EstimatingCounter()

    def take(self, counter: TokenCounter) -> None:
        """Count with another one from now on."""
        self._counter = counter

    @property
    def exact(self) -> bool:
        """Tell whether counts are the model's own."""
        return self._counter.exact

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return self._counter.count(text)
