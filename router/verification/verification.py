"""Run the stages of a verification in their order, and tell each finding as soon as it is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from router.verification.answers import compare_answers
from router.verification.findings import AnswersFinding, SpeedFinding, Verification
from router.verification.speed import compare_speed
from router.verification.wording import Stage, StageFinding
from tiers.errors import NoScoresError
from tiers.verification.findings import (
    LikelihoodFinding,
    SameModelFinding,
    Verdict,
)
from tiers.verification.likelihood import compare_likelihood
from tiers.verification.model_facts import observe_facts
from tiers.verification.same_model import compare_facts

if TYPE_CHECKING:
    from router.profiling.tasks import Task
    from router.verification.answers import AnswersOptions
    from router.verification.participants import Participant, Reference

_Finding = TypeVar("_Finding", bound=StageFinding)


class Listener(Protocol):
    """Is told how a verification gets on."""

    def begin(self, stage: Stage) -> None:
        """Take note that a stage begins."""

    def advance(self, done: int, total: int | None, detail: str) -> None:
        """Take note of how much of the stage is done; ``total`` None: nobody knows how much there is."""

    def finish(self, stage: Stage, finding: StageFinding) -> None:
        """Take note of what a stage has found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationPlan:
    """What is verified.

    Attributes:
        tasks: The tasks whose answers are compared; none: answers are not compared.
        answers: How they are compared.
        goes_on_after_fault: Run all stages, even after one that makes the later ones pointless.
        measures_speed: Compare speeds as well.
    """

    tasks: tuple[Task, ...]
    answers: AnswersOptions
    goes_on_after_fault: bool = False
    measures_speed: bool = False
