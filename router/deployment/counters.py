"""The router's token counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from classifier import EstimatingCounter, TokenCounter, TokenizerError

if TYPE_CHECKING:
    from pathlib import Path


def named_counter(folder: Path) -> TokenCounter:
    """Return a counter with the tokenizer of a model folder that the user has named.

    Raises:
        TokenizerError: The folder has no tokenizer.
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
    """Counts with a counter that is replaced when the model's tokenizer is there."""

    __slots__ = ("_counter",)

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter

    def replace(self, counter: TokenCounter) -> None:
        """Count with another counter from now on."""
        self._counter = counter

    @property
    def exact(self) -> bool:
        """Return whether counts are the model's own."""
        return self._counter.exact

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return self._counter.count(text)
