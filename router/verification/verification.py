"""Run the stages of a verification in their order, and tell each finding as soon as it is known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from router.profiling.answering import ThinkingMode
from router.verification.answers import AnswersProgress, compare_answers
from router.verification.findings import AnswersFinding, SpeedFinding, Verification
from router.verification.participants import (
    LiveEngine,
    Reference,
    ThinkingWish,
    settle_limits,
)
from router.verification.progress import ProgressListener, StepCounter
from router.verification.speed import SpeedProgress, compare_speed
from router.verification.wording import Stage, count_words
from tiers.errors import NoScoresError, ProbeError
from tiers.together import run_both
from tiers.verification.findings import (
    EngineIdentity,
    LikelihoodFinding,
    SameModelFinding,
    Verdict,
)
from tiers.verification.likelihood import compare_likelihood, prompts
from tiers.verification.same_model import compare_facts

if TYPE_CHECKING:
    from router.profiling.answering import ThinkingMode
    from router.profiling.tasks import Task
from router.verification.answers import AnswersOptions

SAME_ENGINE_NOTE = (
    "Both options name the same engine, so this shows only how much its own answers vary. Unless you want that, correct one "
    "of them."
)
QUICK_NOTE = "Likelihood: --quick compares a few short answers, so nothing is known of what goes wrong late in long ones."


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationPlan:
    """What is verified.

    Attributes:
        tasks: The tasks whose answers are compared; none: answers are not compared.
        answers: How they are compared.
        thinking: Whether and how long models are asked to think.
        unsaved_tasks: Tasks that are left out because the saved reference has no answers to them.
        goes_on_after_fault: Run all stages, even after one that makes the later ones pointless.
        measures_speed: Compare speeds as well.
        is_quick: Both compare likelihood by few texts.
    """

    tasks: tuple[Task, ...]
    answers: AnswersOptions
    thinking: ThinkingWish
    unsaved_tasks: int = 0
    goes_on_after_fault: bool = False
    measures_speed: bool = False
    is_quick: bool = False


@dataclass(frozen=True, slots=True)
class Verifier:
    """Compares a candidate with a reference.

    Attributes:
        reference: What it is compared with.
        candidate: The engine that is verified.
        plan: What is verified.
        listener: Is told of progress and findings.
    """

    reference: Reference
    candidate: LiveEngine
    plan: VerificationPlan
    listener: ProgressListener

    async def run(self) -> Verification:
        """Run the stages, up to the first fault unless the plan wants all.

        Raises:
            ProbeError: An engine stops answering.
        """
        started_at = time.monotonic()
        created = datetime.now(UTC)
        same_model = await self._compare_models()
        likelihood: LikelihoodFinding | None = None
        answers: AnswersFinding | None = None
        speed: SpeedFinding | None = None
        if self._goes_on_after(same_model.verdict):
            likelihood = await self._compare_likelihood()
            if self._goes_on_after(likelihood.verdict):
                answers = await self._compare_answers()
                speed = await self._compare_speed()
        return Verification(
            created=created,
            reference=self.reference.identity,
            candidate=self.candidate.identity,
            same_model=same_model,
            likelihood=likelihood,
            answers=answers,
            speed=speed,
            took_s=time.monotonic() - started_at,
        )

    def _goes_on_after(self, verdict: Verdict) -> bool:
        return verdict is not Verdict.WORSE or self.plan.goes_on_after_fault

    @property
    def _context(self) -> int:
        """Return the tokens that both engines take."""
        return min(
            self.reference.identity.max_model_len,
            self.candidate.identity.max_model_len,
        )

    async def _compare_models(self) -> SameModelFinding:
        self.listener.begin(Stage.SAME_MODEL)
        started_at = time.monotonic()
        reference_facts, candidate_facts = await run_both(
            self.reference.tell_facts(), self.candidate.tell_facts()
        )
        finding = compare_facts(
            reference_facts, candidate_facts, time.monotonic() - started_at
        )
        untold = [
            *_untold(self.reference.identity),
            *_untold(self.candidate.identity),
        ]
        if is_same_engine(self.reference, self.candidate):
            untold.insert(0, SAME_ENGINE_NOTE)
        finding = finding.model_copy(
            update={"not_checked": (*finding.not_checked, *untold)}
        )
        self.listener.finish(Stage.SAME_MODEL, finding)
        return finding

    async def _compare_likelihood(self) -> LikelihoodFinding:
        self.listener.begin(Stage.LIKELIHOOD)
        started_at = time.monotonic()
        try:
            finding = await self._score_each_other(started_at)
        except NoScoresError as error:
            finding = LikelihoodFinding(
                by_kind=(),
                by_position=(),
                own=(),
                faults=(),
                not_measured=(f"Likelihood: {error}.",),
                took_s=time.monotonic() - started_at,
            )
        if self.plan.is_quick:
            notes = (*finding.not_measured, QUICK_NOTE)
            finding = finding.model_copy(update={"not_measured": notes})
        self.listener.finish(Stage.LIKELIHOOD, finding)
        return finding

    async def _score_each_other(self, started_at: float) -> LikelihoodFinding:
        """Have both engines write texts, and each score its own and the other's."""
        # each engine writes each text, scores it, and scores the other's
        progress = StepCounter(
            self.listener,
            6 * len(prompts(quick=self.plan.is_quick)),
            "texts written or scored",
        )
        context = self._context
        written_by_reference, written_by_candidate = await run_both(
            self.reference.write(context, progress.count_one),
            self.candidate.write(context, progress.count_one),
        )
        scores_by_reference, scores_by_candidate = await run_both(
            self.reference.score(written_by_candidate.texts, progress.count_one),
            self.candidate.score(written_by_reference.texts, progress.count_one),
        )
        return compare_likelihood(
            written_by_reference,
            written_by_candidate,
            scores_by_candidate=scores_by_candidate,
            scores_by_reference=scores_by_reference,
            took_s=time.monotonic() - started_at,
        )

    async def _compare_answers(self) -> AnswersFinding | None:
        """Compare answers to the tasks; None: the plan has no tasks."""
        tasks = self.plan.tasks
        if not tasks:
            return None
        self.listener.begin(Stage.ANSWERS)
        limits = await settle_limits(
            self.reference, self.candidate, self.plan.thinking, self._context
        )
        options = replace(self.plan.answers, think_tokens=limits.think_tokens)
        finding = await compare_answers(
            self.reference, self.candidate, tasks, options, self._report_answers
        )
        notes = (
            *finding.not_measured,
            *self._unsaved(),
            *self._other_mode(limits.mode),
        )
        finding = finding.model_copy(update={"not_measured": notes})
        self.listener.finish(Stage.ANSWERS, finding)
        return finding

    def _unsaved(self) -> Iterator[str]:
        """Yield that the saved reference does not have an answer to each task."""
        if self.plan.unsaved_tasks:
            unsaved = count_words(self.plan.unsaved_tasks, "task")
            yield f"Left out: {unsaved} to which the saved reference has no answer."

    def _other_mode(self, mode: ThinkingMode) -> Iterator[str]:
        """Yield that the model can answer in another mode, which was not measured."""
        thinking = self.candidate.thinking
        if not thinking.can_switch:
            return
        if thinking.thinks(mode):
            yield "The model can also answer without thinking: --thinking off measures that."
        else:
            yield "The model can also think before it answers: --thinking on measures that."

    def _report_answers(self, progress: AnswersProgress) -> None:
        counts = progress.test.counts
        detail = f"{count_words(progress.tasks_done, 'task')}: {counts.worse} worse, {counts.better} better"
        total = progress.tasks_done + progress.tasks_expected
        self.listener.advance(progress.tasks_done, total, detail, progress.remaining_s)

    async def _compare_speed(self) -> SpeedFinding | None:
        """Compare speeds; None: the plan does not want that, or the reference does not run."""
        reference = self.reference
        if not self.plan.measures_speed or not isinstance(reference, LiveEngine):
            return None
        self.listener.begin(Stage.SPEED)
        started_at = time.monotonic()
        try:
            finding = await compare_speed(
                reference.engine,
                self.candidate.engine,
                report_progress=self._report_speed,
            )
        except ProbeError as error:
            # what the other stages have found counts all the same
            finding = SpeedFinding(
                loads=(),
                took_s=time.monotonic() - started_at,
                not_measured=(f"Speed: {error}",),
            )
        self.listener.finish(Stage.SPEED, finding)
        return finding

    def _report_speed(self, progress: SpeedProgress) -> None:
        detail = count_words(progress.streams, "stream")
        self.listener.advance(progress.turns_done, progress.turns_total, detail)


def is_same_engine(reference: Reference, candidate: LiveEngine) -> bool:
    """Tell whether an engine is compared with itself. A saved reference may have been served at the same address before."""
    if not isinstance(reference, LiveEngine):
        return False
    return (reference.identity.name, reference.identity.model) == (
        candidate.identity.name,
        candidate.identity.model,
    )


def _untold(identity: EngineIdentity) -> Iterator[str]:
    """Yield what an engine does not say of itself: other servers than vLLM and this router do not pass it on."""
    missing = []
    if identity.version is None:
        missing.append("its release of vLLM")
    if identity.kv_cache_dtype is None:
        missing.append("the type of its KV cache")
    if missing:
        yield f"{identity.name} does not tell {' and '.join(missing)}."
