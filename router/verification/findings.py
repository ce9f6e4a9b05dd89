"""What ``qarr verify`` finds in all of its stages."""

from __future__ import annotations

from datetime import datetime

from classifier import PromptClass
from tiers.verification.findings import (
    EngineIdentity,
    FrozenFinding,
    LikelihoodFinding,
    SameModelFinding,
    Verdict,
)


class AnswerComparison(FrozenFinding):
    """How many answers got worse: of one class of prompts, or of all.

    The loss is (worse - better) / (both_right + worse + better): of the tasks that at least one engine gets right, the net
    share that the candidate loses.

    Attributes:
        prompt_class: The class; None: all classes together.
        both_right: Tasks that both engines get right.
        worse: Tasks that the reference alone gets right.
        better: Tasks that the candidate alone gets right.
        both_wrong: Tasks that neither gets right: they tell nothing.
        not_measured: Tasks that an engine did not finish, such as answers cut while the model was thinking.
        low: Lower end of the loss's interval at the confidence that was asked for, -1..1.
        high: Upper end of the interval.
        verdict: Whether the loss is known to be at most the tolerated one, or above it.
        tasks_needed: About how many more tasks a verdict would take; None: there is one, or no number would do.
    """

    prompt_class: PromptClass | None
    both_right: int
    worse: int
    better: int
    both_wrong: int
    not_measured: int
    low: float
    high: float
    verdict: Verdict
    tasks_needed: int | None = None

    @property
    def decisive(self) -> int:
        """Return the number of tasks that tell something."""
        return self.both_right + self.worse + self.better

    @property
    def loss(self) -> float | None:
        """Return the net share of answers lost; None: no task tells anything."""
        if not self.decisive:
            return None
        return (self.worse - self.better) / self.decisive


class WorseAnswer(FrozenFinding):
    """A task that the reference gets right and the candidate does not.

    Attributes:
        task: The task's id.
        prompt: Its prompt, as a person reads it.
        wanted: What a right answer is, in words.
        reference: The reference's answer.
        candidate: The candidate's answer.
    """

    task: str
    prompt_class: PromptClass
    prompt: str
    wanted: str
    reference: str
    candidate: str


class AnswersFinding(FrozenFinding):
    """How many answers get worse.

    Attributes:
        tolerated: The loss that is accepted, as a share 0..1.
        confidence: Of verdicts and intervals, 0..1.
        overall: All classes together.
        by_class: Each class that was asked. Their verdicts and intervals are corrected for the number of classes: all of
            them together hold with this confidence.
        worse_answers: The tasks that got worse, with both answers.
        not_measured: Sentences about what could not be measured, and what to raise.
        unasked: Number of tasks that were left out by a limit of time or of their number.
        took_s: Time of the stage, in seconds.
    """

    tolerated: float
    confidence: float
    overall: AnswerComparison
    by_class: tuple[AnswerComparison, ...]
    worse_answers: tuple[WorseAnswer, ...]
    not_measured: tuple[str, ...]
    unasked: int = 0
    took_s: float

    @property
    def verdict(self) -> Verdict:
        return self.overall.verdict


class SpeedComparison(FrozenFinding):
    """How fast both engines are at one load.

    Attributes:
        streams: Requests at once.
        reference_ttft_ms: Median time to the first token.
        candidate_ttft_ms: The same of the candidate.
        reference_tpot_ms: Median time of each further token.
        candidate_tpot_ms: The same of the candidate.
    """

    streams: int
    reference_ttft_ms: float
    candidate_ttft_ms: float
    reference_tpot_ms: float
    candidate_tpot_ms: float


class SpeedFinding(FrozenFinding):
    """How fast both engines are at several loads.

    Attributes:
        loads: From few streams to many.
        took_s: Time of the stage, in seconds.
        not_measured: Sentences about what could not be measured.
    """

    loads: tuple[SpeedComparison, ...]
    took_s: float
    not_measured: tuple[str, ...] = ()


class Verification(FrozenFinding):
    """All that was found. Stages that were not reached are None: a fault in an early stage makes later ones pointless."""

    created: datetime
    reference: EngineIdentity
    candidate: EngineIdentity
    same_model: SameModelFinding
    likelihood: LikelihoodFinding | None = None
    answers: AnswersFinding | None = None
    speed: SpeedFinding | None = None
    took_s: float

    @property
    def verdict(self) -> Verdict:
        """Return "worse" if any stage says so, else what the answers say."""
        stages = (self.same_model, self.likelihood, self.answers)
        verdicts = [stage.verdict for stage in stages if stage is not None]
        if Verdict.WORSE in verdicts:
            return Verdict.WORSE
        if self.answers is None:
            return Verdict.CANNOT_TELL
        return self.answers.verdict
