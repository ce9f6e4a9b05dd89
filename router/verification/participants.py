"""Who takes part in a verification: engines that run, and a reference that was saved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from router.profiling.answering import (
    PLAIN_ANSWER,
    AnswerLimits,
    answer_body,
    fitting_think_tokens,
    limits_for,
    most_prompt_tokens,
    read_answer,
)
from router.profiling.model_answer import ModelAnswer
from router.verification.saved import FORM, SavedReference, prompts_digest
from tiers.errors import BusyError, ProbeError, RefusedError
from tiers.probe import CHAT
from tiers.together import run_both
from tiers.verification.likelihood import (
    LikelihoodRecord,
    TextScores,
    WrittenText,
    score_texts,
    write_texts,
)
from tiers.verification.model_facts import ModelFacts, observe_facts
from tiers.verification.thinking import (
    NO_THINKING,
    ThinkingMode,
    observe_thinking,
)

if TYPE_CHECKING:
    from router.profiling.tasks import Task
    from tiers.verification.engine import ComparedEngine
    from tiers.verification.findings import EngineIdentity

Report = Callable[[], None]
# The whole answer to a task, thoughts included.
ANSWER_S = 900.0
SMALL_REQUEST_S = 120.0
# Pauses before a request is sent again that found no room. They begin short and double.
SHORTEST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
# A request that finds no room for so long is given up.
PATIENCE_S = 600.0


class ThinkingWish(NamedTuple):
    """Whether and how long models are to think.

    Attributes:
        mode: Whether requests ask for thoughts.
        think_tokens: Tokens for thoughts; None: by the context.
    """

    mode: ThinkingMode = ThinkingMode.DEFAULT
    think_tokens: int | None = None


class Reference(Protocol):
    """What a candidate is compared with."""

    @property
    def identity(self) -> EngineIdentity:
        """Return what it says of itself."""

    @property
    def limits(self) -> AnswerLimits:
        """Return how tasks are asked."""

    async def tell_facts(self) -> ModelFacts:
        """Return what it tells of its model."""

    async def write(self, context: int, report: Report) -> LikelihoodRecord:
        """Return its greedy texts that fit a context, with its own scores.

        Raises:
            NoScoresError: It tells no probabilities.
        """

    async def score(
        self, texts: Sequence[WrittenText], report: Report
    ) -> tuple[TextScores, ...] | None:
        """Return how likely it finds another engine's texts; None: it does not run."""

    async def answer(self, task: Task) -> ModelAnswer | None:
        """Return its answer to a task; None: there is no saved answer to it.

        Raises:
            RefusedError: It does not take the task.
            ProbeError: It fails.
        """


class LiveEngine:
    """An engine that runs. It remembers what it said, so that it can be saved.

    Attributes:
        engine: The engine.
        is_quick: Whether it writes only the few texts that a start can wait for.
        thinking: How the model thinks, once ``find_limits`` has found that out.
        settled_limits: How tasks are asked, once ``settle_limits`` or ``record`` has found that out.
    """

    def __init__(self, engine: ComparedEngine, *, is_quick: bool = False) -> None:
        self.engine = engine
        self.is_quick = is_quick
        self.settled_limits: AnswerLimits | None = None
        self.thinking = NO_THINKING
        self._facts: ModelFacts | None = None
        self._record: LikelihoodRecord | None = None
        self._answers: dict[str, ModelAnswer | None] = {}

    @property
    def identity(self) -> EngineIdentity:
        return self.engine.identity

    @property
    def limits(self) -> AnswerLimits:
        return self.settled_limits or PLAIN_ANSWER

    async def tell_facts(self) -> ModelFacts:
        """Return what the engine tells of its model; it is asked once.

        Raises:
            ProbeError: It stops answering.
        """
        if self._facts is None:
            self._facts = await observe_facts(self.engine)
        return self._facts

    async def find_limits(self, wish: ThinkingWish, context: int) -> AnswerLimits:
        """Find out how the model thinks, and return how tasks should be asked accordingly.

        Args:
            wish: What the user wants.
            context: The context in tokens, the shorter one of the engines that are compared.
        """
        self.thinking = await observe_thinking(self._ask)
        return limits_for(self.thinking, wish.mode, context, wish.think_tokens)

    async def _ask(
        self, path: str, body: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Return the answer to a small request; None: the engine refuses it."""
        try:
            return await self._send(path, body, SMALL_REQUEST_S)
        except RefusedError:
            return None

    async def write(self, context: int, report: Report) -> LikelihoodRecord:
        """Have the engine write its texts and score them itself; ``report`` is called after each of both."""
        if self._record is None:
            texts = await write_texts(
                self.engine,
                context=context,
                quick=self.is_quick,
                report=_without_numbers(report),
            )
            own_scores = await self.score(texts, report)
            self._record = LikelihoodRecord(texts=texts, own_scores=own_scores)
        return self._record

    async def score(
        self, texts: Sequence[WrittenText], report: Report
    ) -> tuple[TextScores, ...]:
        return await score_texts(self.engine, texts, _without_numbers(report))

    async def answer(self, task: Task) -> ModelAnswer | None:
        """Return the engine's answer to a task, and remember it.

        Raises:
            RefusedError: The engine does not take the task.
            BusyError: It had no room for ten minutes.
            ProbeError: It fails.
        """
        try:
            answer = await self._answer(task)
        except RefusedError:
            self._answers[task.digest] = None
            raise
        self._answers[task.digest] = answer
        return answer

    def has_answered(self, task: Task) -> bool:
        """Tell whether a task has been answered or refused."""
        return task.digest in self._answers

    async def _answer(self, task: Task) -> ModelAnswer:
        think_tokens = fitting_think_tokens(
            task, self.limits, self.identity.max_model_len, most_prompt_tokens(task)
        )
        limits = replace(self.limits, think_tokens=think_tokens)
        response = await self._send(CHAT, answer_body(task, limits), ANSWER_S)
        try:
            return read_answer(response, limits)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ProbeError(
                f"{self.identity.name} does not answer a chat as vLLM does: {type(error).__name__} {error}"
            ) from error

    async def _send(
        self, path: str, body: Mapping[str, Any], timeout_s: float
    ) -> Mapping[str, Any]:
        """Send a request, and send it again while there is no room for it."""
        deadline = time.monotonic() + PATIENCE_S
        pause_s = SHORTEST_PAUSE_S
        request = {"model": self.engine.model, **body}
        while True:
            try:
                return await self.engine.probe.ask(path, request, timeout_s)
            except BusyError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def as_saved(self, tasks: str) -> SavedReference:
        """Return what the engine has told so far, to be saved.

        Args:
            tasks: What the tasks were, for people.
        """
        assert self._facts is not None
        return SavedReference(
            form=FORM,
            created=datetime.now(UTC),
            identity=self.identity,
            facts=self._facts,
            prompts=prompts_digest(),
            is_quick=self.is_quick,
            likelihood=self._record,
            tasks=tasks,
            limits=self.limits,
            answers=dict(self._answers),
        )


def _without_numbers(report: Report) -> Callable[[int, int], None]:
    """Return what tells that one more text is done, without how many there are."""

    def report_one(_done: int, _total: int) -> None:
        report()

    return report_one


async def settle_limits(
    reference: Reference, candidate: LiveEngine, wish: ThinkingWish, context: int
) -> AnswerLimits:
    """Find out how both models think, have both asked alike, and return the reference's limits.

    A saved reference has been asked already: then the candidate is asked as it was.

    Args:
        reference: What is compared with.
        candidate: Who is verified.
        wish: What the user wants.
        context: The tokens that both take.
    """
    if not isinstance(reference, LiveEngine):
        saved = reference.limits
        wish = ThinkingWish(saved.mode, saved.think_tokens)
        candidate.settled_limits = await candidate.find_limits(wish, context)
        return saved
    found_for_reference, found_for_candidate = await run_both(
        reference.find_limits(wish, context), candidate.find_limits(wish, context)
    )
    think_tokens = max(
        found_for_reference.think_tokens, found_for_candidate.think_tokens
    )
    reference.settled_limits = replace(found_for_reference, think_tokens=think_tokens)
    candidate.settled_limits = replace(found_for_candidate, think_tokens=think_tokens)
    return reference.limits
