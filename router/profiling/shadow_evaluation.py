"""Shadow evaluation: compares the cheap tiers' answers to live prompts with the highest precision's, while engines are idle.

A sample of the prompts that a cheap tier served is kept in memory. When nothing is in flight, that tier and the reference
answer one again, greedily. Numbers, choices, JSON and code are compared; nobody knows which of two answers is right, so the
share that differs is an upper bound of the loss. The regret of all tokens is reported (``router.profiling.quality``).
Both show drift, of the traffic or of an engine, against the profile; decisions do not depend on them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from classifier import PromptClass
from router.policy.decision import PRIORITIES
from router.policy.profiles import REFERENCE
from router.profiling.answer_text import same_answer
from router.profiling.quality import score
from router.profiling.scoring import answer_body, read_greedy, read_scored, scoring_body, text_of
from router.upstream.engine_stream import BufferedAnswer
from router.upstream.errors import UpstreamError
from router.upstream.json_object import read_json
from router.upstream.sse import COMPLETION_FORMAT, AnswerFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.policy.decision import Decision
    from router.profiling.quality import Scores
    from router.telemetry.tracing import Telemetry
    from router.upstream.client import Upstream
    from tiers.fleet import Fleet
    from tiers.replica import Replica
    from tiers.spec import TierName

CHAT = "/v1/chat/completions"
log = logging.getLogger(f"qarr.{__name__}")
ANSWER_TOKENS = 64
KEPT_PROMPTS = 100
WINDOW = 50  # answers of the rolling figures
LOOK_S = 0.5
QUIET_LOOKS = 2  # in a row without requests in flight, before the first check


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt to answer again, and the tier for it."""

    decision: Decision
    messages: Sequence[Any]
    tier: TierName


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """A request of the evaluation to an engine, with the lowest priority."""

    path: str
    content: Mapping[str, Any]
    request_id: str = field(default_factory=lambda: f"check-{secrets.token_hex(8)}")
    operation: str = "chat"
    streamed: bool = False
    wants_usage: bool = False
    priority: int = PRIORITIES["batch"]
    resumption: None = None
    adapter: None = None
    answers: AnswerFormat = COMPLETION_FORMAT

    @property
    def parameters(self) -> Mapping[str, float]:
        return {}

    @property
    def chat(self) -> None:
        """Return None: the evaluation is not evaluated."""
        return

    def body(self, replica: Replica) -> bytes:
        priority = {"priority": self.priority} if replica.takes_priority else {}
        return to_json({**self.content, "model": replica.model, **priority})


@dataclass(slots=True)
class Drift:
    """The last answers of one class on one tier.

    Attributes:
        answers: Of each, whether it is the reference's (None: it could not be compared), and its scores.
        checked: Number of answers ever checked; ``compared``: of these, those that could be compared.
    """

    answers: deque[tuple[bool | None, Scores]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    checked: int = 0
    compared: int = 0

    def add(self, scores: Scores, *, same: bool | None) -> None:
        self.answers.append((same, scores))
        self.checked += 1
        self.compared += same is not None

    @property
    def differing(self) -> float | None:
        """Return the share of compared answers that differ; None: there are none."""
        compared = [same for same, _ in self.answers if same is not None]
        return compared.count(False) / len(compared) if compared else None

    @property
    def regret(self) -> float:
        return sum(one.regret for _, one in self.answers) / max(sum(one.tokens for _, one in self.answers), 1)

    def render(self) -> dict[str, Any]:
        figures = {"differing": self.differing, "regret": round(self.regret, 5)}
        return {"checked": self.checked, "compared": self.compared, **figures}


class ShadowEvaluation:
    """Keeps samples, and compares answers to them while the engines are idle.

    Attributes:
        share: Of answered prompts that are kept, by chance.
        drifts: By class and tier.
    """

    def __init__(self, share: float, fleet: Fleet, upstream: Upstream, telemetry: Telemetry) -> None:
        self.share, self._fleet, self._upstream, self._telemetry = share, fleet, upstream, telemetry
        self._samples: deque[Sample] = deque(maxlen=KEPT_PROMPTS)
        self.drifts: dict[tuple[PromptClass, TierName], Drift] = {}

    def offer(self, decision: Decision, tier: TierName, messages: Sequence[Any] | None) -> None:
        """Keep a served prompt, by chance: only in memory, only until it is checked or newer ones replace it."""
        if messages is None or decision.query.adapter is not None or tier is REFERENCE:
            return  # an adapter's loss is not the model's
        if random.random() < self.share:  # noqa: S311  no secret
            self._samples.append(Sample(decision, messages, tier))

    async def run(self) -> None:
        """Check samples while the engines are idle, until cancelled."""
        quiet = 0
        while True:
            quiet = 0 if any(r.state.in_flight for r in self._fleet.replicas) else quiet + 1
            if self._samples and quiet > QUIET_LOOKS:
                await self._check(self._samples.popleft())
            else:
                await asyncio.sleep(LOOK_S)

    async def _check(self, sample: Sample) -> None:
        kind = sample.decision.query.features.prompt_class
        if not (self._fleet.is_ready(sample.tier) and self._fleet.is_ready(REFERENCE)):
            return
        with self._telemetry.live_check(kind, sample.tier) as span:
            try:
                same, scores = await self._compare(sample)
            except (UpstreamError, ValueError, LookupError, TypeError, AttributeError) as error:
                log.warning("live check on %s: %s", sample.tier, type(error).__name__)
                return
            drift = self.drifts.setdefault((kind, sample.tier), Drift())
            drift.add(scores, same=same)
            self._telemetry.record_live_check(span, scores.regret / max(scores.tokens, 1), same=same)

    async def _compare(self, sample: Sample) -> tuple[bool | None, Scores]:
        """Return whether both answers are the same, None if they cannot be compared; and the tier's scores."""
        scored = CheckRequest(CHAT, answer_body(sample.messages, ANSWER_TOKENS, scored=True))
        plain = CheckRequest(CHAT, answer_body(sample.messages, ANSWER_TOKENS, scored=False))
        own, theirs = await self._ask(sample, sample.tier, scored), await self._ask(sample, REFERENCE, plain)
        answer = read_greedy(own)
        scoring = CheckRequest("/v1/completions", scoring_body(answer), operation="text_completion")
        reference = read_scored(await self._ask(sample, REFERENCE, scoring), answer)
        numbers = sample.decision.query.features.prompt_class is PromptClass.MATH
        same = await asyncio.to_thread(same_answer, text_of(own), text_of(theirs), numbers=numbers)
        return same, score(answer.ids, answer.own, reference)

    async def _ask(self, sample: Sample, tier: TierName, request: CheckRequest) -> Any:
        query = replace(sample.decision.query, max_tokens=ANSWER_TOKENS, sequences=1)
        there = replace(sample.decision, tier=tier, query=query)
        answer = await self._upstream.open(there, request, elsewhere=False)
        assert isinstance(answer, BufferedAnswer)
        answer.usage = {}  # its length must not affect the expected length of callers' answers
        await answer.aclose()
        return read_json(answer.content)
