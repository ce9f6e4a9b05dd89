"""Shadow evaluation: measures the cheap tiers' quality loss on live prompts while the engines are idle.

A sample of the prompts that a cheap tier served is kept in memory. When nothing is in flight, that tier answers one again,
greedily and briefly, and the reference scores the answer, as in ``qarr profile quality``, so that the figures compare. What
a class lost lately counts in the place of the profile's loss. A class that loses more than its own bound is promoted to the
next precision. Its prompts are still tried on the tier that it left; when they lose less again, the class returns.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from router.policy.decision import PRIORITIES, ExpectedLoss
from router.policy.profiles import MIN_LIVE, REFERENCE
from router.profiling.quality import judge
from router.profiling.scoring import greedy_body, read_greedy, read_scored, scoring_body
from router.upstream.engine_stream import BufferedAnswer
from router.upstream.errors import UpstreamError
from router.upstream.json_object import read_json
from router.upstream.sse import COMPLETION_FORMAT, AnswerFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from classifier import PromptClass
    from router.policy.decision import Decision
    from router.policy.table import PolicyStore
    from router.profiling.quality import Score
    from router.telemetry.tracing import Telemetry
    from router.upstream.client import Upstream
    from tiers.fleet import Fleet
    from tiers.replica import Replica
    from tiers.spec import TierName

log = logging.getLogger(f"qarr.{__name__}")
ANSWER_TOKENS = 24
KEPT_PROMPTS = 100
WINDOW = 50  # answers of the rolling loss
RECOVERED = 0.9  # share of the allowed loss at which a class returns to its tier
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
        """Return no parameters for traces."""
        return {}

    @property
    def chat(self) -> None:
        """Return None: the evaluation is not evaluated."""
        return

    def body(self, replica: Replica) -> bytes:
        """Return the request's body for one replica."""
        priority = {"priority": self.priority} if replica.takes_priority else {}
        return to_json({**self.content, "model": replica.model, **priority})


@dataclass(slots=True)
class RollingLoss:
    """The last answers of one class on one tier.

    Attributes:
        answers: Of each, the tokens that differ from the reference's first choice, and all tokens.
        checked: Number of answers ever scored.
    """

    answers: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    checked: int = 0

    def add(self, score: Score) -> None:
        """Add an answer."""
        self.answers.append((score.disagreed, score.tokens))
        self.checked += 1

    @property
    def share(self) -> float:
        """Return the rolling loss, 0..1."""
        return sum(d for d, _ in self.answers) / max(sum(n for _, n in self.answers), 1)

    @property
    def expected(self) -> ExpectedLoss:
        """Return the rolling loss with its 95 % interval: of a ratio of sums over answers (Cochran 1977, 6.13)."""
        share, count, tokens = self.share, len(self.answers), sum(n for _, n in self.answers)
        off = sum((d - share * n) ** 2 for d, n in self.answers)
        error = 1.96 * math.sqrt(off * count / max(count - 1, 1)) / max(tokens, 1)
        return ExpectedLoss(share, max(share - error, 0.0), min(share + error, 1.0))


class ShadowEvaluation:
    """Keeps samples, scores them while idle, and promotes and restores classes.

    Attributes:
        share: Of answered prompts that are kept, by chance.
    """

    def __init__(
        self, share: float, fleet: Fleet, upstream: Upstream, policy: PolicyStore, telemetry: Telemetry
    ) -> None:
        self.share, self._fleet, self._upstream = share, fleet, upstream
        self._policy, self._telemetry = policy, telemetry
        self._samples: deque[Sample] = deque(maxlen=KEPT_PROMPTS)
        self._promoted: dict[PromptClass, TierName] = {}
        self.losses: dict[tuple[PromptClass, TierName], RollingLoss] = {}

    @property
    def promoted(self) -> Mapping[PromptClass, TierName]:
        """Return the promoted classes, with their lowest tier."""
        return self._promoted

    def offer(self, decision: Decision, tier: TierName, messages: Sequence[Any] | None) -> None:
        """Keep a served prompt, by chance: only in memory, only until it is checked or newer ones replace it."""
        if not self.share or messages is None or decision.query.adapter is not None:
            return  # an adapter's loss is not the model's
        left = self._left(decision.query.features.prompt_class, tier)
        if left is not None and (tier is REFERENCE or random.random() < 0.5):  # noqa: PLR2004, S311  no secret
            tier = left  # has it recovered?
        if tier is not REFERENCE and random.random() < self.share:  # noqa: S311
            self._samples.append(Sample(decision, messages, tier))

    def _left(self, kind: PromptClass, served: TierName) -> TierName | None:
        """Return the tier that live answers keep a class from: promoted, or by the interval of the loss alone."""
        rising = [spec.name for spec in self._fleet.specs]
        if (promoted := self._promoted.get(kind)) is not None:
            return rising[rising.index(promoted) - 1]
        allowed = self._policy.table.max_loss.get(kind, 1.0)
        for tier in reversed(rising[: rising.index(served)]):
            rolling = self.losses.get((kind, tier))
            if rolling is not None and len(rolling.answers) >= MIN_LIVE and rolling.expected.high > allowed:
                return tier
        return None

    async def run(self) -> None:
        """Check samples while the engines are idle, until cancelled."""
        quiet = 0
        while True:
            quiet = 0 if any(r.in_flight for r in self._fleet.replicas) else quiet + 1
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
                score = await self._score(sample)
            except (UpstreamError, ValueError, LookupError, TypeError, AttributeError) as error:
                log.warning("live check on %s: %s", sample.tier, type(error).__name__)
                return
            rolling = self.losses.setdefault((kind, sample.tier), RollingLoss())
            rolling.add(score)
            self._telemetry.record_live_loss(span, score.disagreed / max(score.tokens, 1), rolling.share)
            if len(rolling.answers) >= MIN_LIVE:
                self._policy.observe(sample.tier, kind, rolling.expected)
                self._judge(kind, sample.tier, rolling)

    async def _score(self, sample: Sample) -> Score:
        query = sample.decision.query
        greedy = CheckRequest("/v1/chat/completions", greedy_body(sample.messages, ANSWER_TOKENS))
        answer = read_greedy(await self._ask(sample, sample.tier, greedy))
        scoring = CheckRequest("/v1/completions", scoring_body(answer), operation="text_completion")
        scored = read_scored(await self._ask(sample, REFERENCE, scoring), answer)
        return judge(
            "", query.features.prompt_class, sample.tier, answer=answer.ids, own=answer.own, reference=scored,
            reference_answer=answer.ids,
        )  # fmt: skip

    async def _ask(self, sample: Sample, tier: TierName, request: CheckRequest) -> Any:
        query = replace(sample.decision.query, max_tokens=ANSWER_TOKENS, sequences=1)
        there = replace(sample.decision, tier=tier, query=query)
        answer = await self._upstream.open(there, request, elsewhere=False)
        assert isinstance(answer, BufferedAnswer)
        answer.usage = {}  # its length must not affect the expected length of callers' answers
        await answer.aclose()
        return read_json(answer.content)

    def _judge(self, kind: PromptClass, tier: TierName, rolling: RollingLoss) -> None:
        """Promote a class that loses more than its bound; return a recovered one to its tier."""
        share, allowed = rolling.share, self._policy.table.max_loss.get(kind)
        rank = self._fleet.rank
        promoted, higher = self._promoted.get(kind), self._fleet.specs[rank(tier) + 1].name
        if allowed is None:
            return
        others = {k: t for k, t in self._promoted.items() if k is not kind}
        if share > allowed and (promoted is None or rank(promoted) < rank(higher)):
            self._promoted, event, now, how_long = (
                {**others, kind: higher},
                "qarr.promoted",
                higher,
                "until it recovers",
            )
        elif promoted is higher and share <= RECOVERED * allowed:
            self._promoted, event, now, how_long = others, "qarr.recovered", tier, "again"
        else:
            return
        log.warning(
            "class %s loses %.3f on %s in live answers, %.3f is allowed: it gets %s %s",
            kind.value, share, tier, allowed, now, how_long,
        )  # fmt: skip
        self._policy.promote(self._promoted)
        self._telemetry.record_promotion(event, kind, now, share)
