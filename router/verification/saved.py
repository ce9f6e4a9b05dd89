"""A reference that was saved: what ``qarr verify`` needs of an engine, so that it need not run again.

The file is JSON. It holds what the engine told of its model, the texts that it wrote with the probabilities of their tokens,
and its answers to the tasks. It holds no keys and no credentials.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_core import from_json

from router.profiling.answering import AnswerLimits, ThinkingMode
from router.profiling.model_answer import ModelAnswer
from tiers.errors import NoScoresError, RefusedError
from tiers.verification.findings import EngineIdentity, FrozenFinding
from tiers.verification.likelihood import (
    PROMPTS_FILE,
    LikelihoodRecord,
    WrittenText,
    prompts,
)
from tiers.verification.model_facts import ModelFacts

if TYPE_CHECKING:
    from router.profiling.tasks import Task

FORM = "qarr reference 1"
SAVE_AGAIN = "save it again: qarr verify --reference URL --save FILE"
DIGEST_LENGTH = 16


class SavedReferenceError(Exception):
    """A file is no reference that can be used here."""


class SavedReference(FrozenFinding):
    """What is kept of a reference.

    Attributes:
        form: Version of this file's form.
        created: When it was saved.
        identity: The engine.
        facts: What it told of its model.
        prompts: Digest of the prompts whose answers ``likelihood`` holds.
        is_quick: Whether it holds only those of the quick form.
        likelihood: What it wrote, and how likely it found that; None: it tells no probabilities.
        tasks: What the tasks were, for people.
        limits: How the tasks were asked.
        answers: The answer to each task by the task's digest; None: the engine refused the task.
    """

    form: str
    created: datetime
    identity: EngineIdentity
    facts: ModelFacts
    prompts: str
    is_quick: bool = False
    likelihood: LikelihoodRecord | None
    tasks: str
    limits: AnswerLimits
    answers: Mapping[str, ModelAnswer | None]

    async def tell_facts(self) -> ModelFacts:
        """Return what the engine told of its model when it was saved."""
        return self.facts

    async def write(self, context: int, report: Callable[[], None]) -> LikelihoodRecord:
        """Return all saved texts, with the engine's own scores; a candidate leaves out those that do not fit it.

        Args:
            context: Of both engines, in tokens; it makes no difference here.
            report: Called for each text that was written, and each that was scored.

        Raises:
            NoScoresError: The engine told no probabilities when it was saved.
        """
        del context
        record = self.likelihood
        if record is None:
            raise NoScoresError(
                "the saved reference has no probabilities: its engine told none"
            )
        for _ in (*record.texts, *record.own_scores):
            report()
        return record

    async def score(
        self, texts: Sequence[WrittenText], report: Callable[[], None]
    ) -> None:
        """Return nothing: a saved reference scores no other engine's texts."""

    async def answer(self, task: Task) -> ModelAnswer | None:
        """Return the answer that was saved; None: there is none.

        Raises:
            RefusedError: The engine did not take the task when it was asked.
        """
        answer = self.answers.get(task.digest)
        if answer is None and task.digest in self.answers:
            raise RefusedError("the reference refused this task when it was saved")
        return answer

    def in_form(self, *, is_quick: bool) -> SavedReference:
        """Return the reference for a verification of one form: the quick one needs a few of its texts.

        Raises:
            SavedReferenceError: It has only the texts of the quick form, and all are needed.
        """
        if is_quick == self.is_quick or self.likelihood is None:
            return self
        if self.is_quick:
            raise SavedReferenceError(
                f"the reference was saved with --quick: give --quick, or {SAVE_AGAIN}"
            )
        names = {prompt.name for prompt in prompts(quick=True)}
        record = LikelihoodRecord(
            texts=tuple(text for text in self.likelihood.texts if text.name in names),
            own_scores=tuple(
                scores for scores in self.likelihood.own_scores if scores.name in names
            ),
        )
        return self.model_copy(update={"likelihood": record, "is_quick": True})

    def check_thinking(self, mode: ThinkingMode, think_tokens: int | None) -> None:
        """Check that the candidate is not asked otherwise than the reference was.

        Args:
            mode: Whether the candidate's model is asked to think; ``DEFAULT``: as the reference's was.
            think_tokens: Tokens for its thoughts; None: as many as the reference's had.

        Raises:
            SavedReferenceError: The reference was asked otherwise.
        """
        limits = self.limits
        if mode not in (ThinkingMode.DEFAULT, limits.mode):
            raise SavedReferenceError(
                f"the reference was saved with --thinking {limits.mode.value}: leave --thinking {mode.value} out, or "
                f"{SAVE_AGAIN} --thinking {mode.value}"
            )
        if think_tokens not in (None, limits.think_tokens):
            raise SavedReferenceError(
                f"the reference was saved with {limits.think_tokens} tokens for thoughts: leave --think-tokens out, or "
                f"{SAVE_AGAIN} --think-tokens {think_tokens}"
            )

    def knows(self, tasks: Sequence[Task]) -> tuple[Task, ...]:
        """Return those of some tasks that have an answer here.

        Raises:
            SavedReferenceError: None has.
        """
        known = tuple(task for task in tasks if task.digest in self.answers)
        if tasks and not known:
            raise SavedReferenceError(
                f"the saved reference has answers to none of these {len(tasks)} tasks: it was saved with {self.tasks}. Give "
                f"the same --tasks, or {SAVE_AGAIN}"
            )
        return known


def prompts_digest() -> str:
    """Return a digest of the prompts that likelihoods are compared on in this release."""
    return hashlib.sha256(PROMPTS_FILE.read_bytes()).hexdigest()[:DIGEST_LENGTH]


def read_reference(path: Path) -> SavedReference:
    """Read a saved reference.

    Raises:
        SavedReferenceError: The file cannot be read, is of another form, or was saved with other prompts.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SavedReferenceError(
            f"the saved reference {path} cannot be read: {error.strerror or error}"
        ) from error
    try:
        document = from_json(content)
    except ValueError as error:
        raise SavedReferenceError(
            f"{path} is no saved reference: it is not JSON ({error})"
        ) from error
    _check_form(path, document)
    try:
        saved = SavedReference.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, fault["loc"]))
        raise SavedReferenceError(
            f"{path} is no usable saved reference: {field}: {fault['msg']}; {SAVE_AGAIN}"
        ) from error
    if saved.prompts != prompts_digest():
        raise SavedReferenceError(
            f"{path} was saved by a release of QARR with other prompts, so its texts cannot be compared: {SAVE_AGAIN}"
        )
    return saved


def _check_form(path: Path, document: Any) -> None:
    """Raise ``SavedReferenceError`` unless a document says that it has the form that is read here."""
    form = document.get("form") if isinstance(document, dict) else None
    if form == FORM:
        return
    if not isinstance(form, str) or not form.startswith("qarr reference"):
        raise SavedReferenceError(
            f"{path} is no saved reference: it has no field 'form' of {FORM!r}. 'qarr verify --reference URL --save FILE' "
            "makes one"
        )
    raise SavedReferenceError(
        f"{path} has the form {form!r}, and this release of QARR reads {FORM!r}: {SAVE_AGAIN}"
    )


def write_reference(path: Path, saved: SavedReference) -> None:
    """Write a saved reference; a file of that name is replaced as a whole.

    Raises:
        SavedReferenceError: It cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(saved.model_dump_json(), "utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise SavedReferenceError(
            f"{path} cannot be written: {error.strerror or error}. Give --save a path in a folder that you may write to"
        ) from error
