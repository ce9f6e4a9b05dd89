"""How a verification tells what it is doing."""

from __future__ import annotations

from typing import Protocol

from router.verification.wording import Stage, StageFinding


class ProgressListener(Protocol):
    """Is told how a verification gets on."""

    def begin(self, stage: Stage) -> None:
        """Take note that a stage begins."""

    def advance(
        self,
        done: int,
        total: int | None,
        detail: str,
        remaining_s: float | None = None,
    ) -> None:
        """Take note of how much of the stage is done.

        Args:
            done: Steps that are done.
            total: All steps; None: nobody knows how many there are.
            detail: What is done, for people.
            remaining_s: About how long the rest takes, in seconds; None: as long for each step as the steps so far.
        """

    def finish(self, stage: Stage, finding: StageFinding | None) -> None:
        """Take note that a stage is over, and of what it has found; None: nothing is found by this stage."""


class StepCounter:
    """Counts the steps of a stage.

    Args:
        listener: Is told of each step.
        total: Number of all steps.
        noun: What is done, in the plural.
    """

    def __init__(self, listener: ProgressListener, total: int, noun: str) -> None:
        self._listener = listener
        self._total = total
        self._noun = noun
        self._done = 0

    def count_one(self) -> None:
        """Take note that one more step is done."""
        self._done += 1
        detail = f"{self._done} of {self._total} {self._noun}"
        self._listener.advance(self._done, self._total, detail)
