"""What comes of asking two engines one task, and sentences about what could not be measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from router.profiling.model_answer import ModelAnswer
from router.profiling.tasks import Task
from router.verification.sequential import PairOutcome
from router.verification.task_texts import shortened
from tiers.verification.findings import Role

MESSAGE_CHARS = 400


class Obstacle(StrEnum):
    """Why there is no answer that can be judged."""

    NOT_SAVED = "not saved"
    CUT_WHILE_THINKING = "cut while thinking"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of asking one engine one task: an answer that was judged, or an obstacle.

    Attributes:
        answer: The answer; None: there is none.
        is_right: Whether it passes the task's check.
        obstacle: Why it is not judged; None: it is.
        message: What the engine says about the obstacle.
    """

    answer: ModelAnswer | None = None
    is_right: bool = False
    obstacle: Obstacle | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class RepliesToTask:
    """What both engines say to one task."""

    task: Task
    reference: Reply
    candidate: Reply

    @property
    def by_role(self) -> dict[Role, Reply]:
        """Return the replies by the engine that gave them."""
        return {"reference": self.reference, "candidate": self.candidate}

    @property
    def outcome(self) -> PairOutcome:
        """Return what the task tells."""
        if self.reference.obstacle is not None or self.candidate.obstacle is not None:
            return PairOutcome.NOT_MEASURED
        if self.reference.is_right:
            is_kept = self.candidate.is_right
            return PairOutcome.BOTH_RIGHT if is_kept else PairOutcome.WORSE
        if self.candidate.is_right:
            return PairOutcome.BETTER
        return PairOutcome.BOTH_WRONG


@dataclass(frozen=True, slots=True)
class _Hindrance:
    """Something that kept an engine's answers from being judged."""

    role: Role
    obstacle: Obstacle


def unmeasured_sentences(
    replies: Sequence[RepliesToTask], think_tokens: int
) -> tuple[str, ...]:
    """Say which tasks were not measured, why, and what to do about it.

    Args:
        replies: What both engines said to each task that counts.
        think_tokens: Tokens for thoughts that the answers were asked with.
    """
    replies_by_hindrance: defaultdict[_Hindrance, list[Reply]] = defaultdict(list)
    for replies_to_task in replies:
        for role, reply in replies_to_task.by_role.items():
            if reply.obstacle is not None:
                hindrance = _Hindrance(role, reply.obstacle)
                replies_by_hindrance[hindrance].append(reply)
    sentences = [
        _sentence(hindrance, hindered, think_tokens)
        for hindrance, hindered in replies_by_hindrance.items()
    ]
    return (*sentences, *_unmeasured_classes(replies))


def _sentence(
    hindrance: _Hindrance, replies: Sequence[Reply], think_tokens: int
) -> str:
    count = len(replies)
    role = hindrance.role
    answers = f"{count:,} answer of" if count == 1 else f"{count:,} answers of"
    tasks = f"{count:,} task" if count == 1 else f"{count:,} tasks"
    message = shortened(replies[-1].message, MESSAGE_CHARS)
    match hindrance.obstacle:
        case Obstacle.NOT_SAVED:
            return (
                f"The saved {role} has no answer to {tasks}: not measured. Save it again: "
                "qarr verify --reference URL --save FILE."
            )
        case Obstacle.CUT_WHILE_THINKING:
            return (
                f"Not measured: {answers} the {role} cut while the model was thinking. Raise --think-tokens; now it is "
                f"{think_tokens:,}."
            )
        case Obstacle.REFUSED:
            return f"Not measured: {tasks} that the {role} refused. The last refusal: {message}"
        case Obstacle.FAILED:
            return f"Not measured: {tasks} at which the {role} failed. The last failure: {message}"


def _unmeasured_classes(replies: Sequence[RepliesToTask]) -> list[str]:
    """Return a sentence for each class none of whose tasks was measured."""
    classes = {each.task.prompt_class for each in replies}
    measured = {
        each.task.prompt_class
        for each in replies
        if each.outcome is not PairOutcome.NOT_MEASURED
    }
    return [
        f"No task of the class {prompt_class} could be measured."
        for prompt_class in sorted(classes - measured)
    ]
