"""Shadow evaluation: compares the cheap tiers' answers to live prompts with the highest precision's, while engines are idle.

A sample of the prompts that a cheap tier served is kept in memory. While nobody is served, that tier and the reference
answer one again, greedily. Numbers, choices, JSON and code are compared; nobody knows which of two answers is right, so the
share that differs is an upper bound of the loss. The regret of all tokens is reported (``router.profiling.scoring``).
Both show drift, of the traffic or of an engine, against the profile; decisions do not depend on them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from classifier import PromptClass
from router.policy.decision import Decision
from router.policy.profiles import REFERENCE, ProfileError
from router.profiling.answer_text import same_answer
from router.profiling.idle_client import IdleClient
from router.profiling.scoring import (
    CHAT,
    COMPLETIONS,
    Scores,
    answer_body,
    score,
    text_of,
)
from router.telemetry.tracing import Telemetry
from tiers.fleet import Fleet
from tiers.spec import TierName

log = logging.getLogger(f"qarr.{__name__}")
ANSWER_TOKENS = 64
KEPT_PROMPTS = 100
WINDOW = 50  # answers of the rolling figures
LOOK_S = 0.5  # for samples


class Sample(NamedTuple):
    """A prompt to answer again, and the tier for it."""

    kind: PromptClass
    messages: Sequence[Any]
    tier: TierName


@dataclass(slots=True)
class Drift:
    # of each, whether it is the reference's (None: it could not be compared), and its scores
    answers: deque[tuple[bool | None, Scores]] = field(
        default_factory=lambda: deque(maxlen=WINDOW)
    )
    # number of answers ever checked; ``compared``: of these, those that could be compared
    checked: int = 0
    compared: int = 0

    def add(self, scores: Scores, *, same: bool | None) -> None:
        self.answers.append((same, scores))
        self.checked += 1
        self.compared += same is not None

    @property
    def differing(self) -> float | None:
        compared = [same for same, _ in self.answers if same is not None]
        return compared.count(False) / len(compared) if compared else None

    @property
    def regret(self) -> float:
        return sum(one.regret for _, one in self.answers) / max(
            sum(one.tokens for _, one in self.answers), 1
        )

    def render(self) -> dict[str, Any]:
        figures = {"differing": self.differing, "regret": round(self.regret, 5)}
        return {"checked": self.checked, "compared": self.compared, **figures}


class ShadowEvaluation:
    """Keeps a ``share`` of answered prompts, by chance, and compares answers to them while the engines are idle."""

    def __init__(
        self, share: float, fleet: Fleet, client: IdleClient, telemetry: Telemetry
    ) -> None:
        self.share, self._fleet, self._client, self._telemetry = (
            share,
            fleet,
            client,
            telemetry,
        )
        self._samples: deque[Sample] = deque(maxlen=KEPT_PROMPTS)
        self.drifts: dict[tuple[PromptClass, TierName], Drift] = {}

    def offer(
        self, decision: Decision, tier: TierName, messages: Sequence[Any] | None
    ) -> None:
        """Keep a served prompt, by chance: only in memory, only until it is checked or newer ones replace it."""
        if messages is None or decision.query.adapter is not None or tier is REFERENCE:
            return  # an adapter's loss is not the model's
        if decision.query.features.prompt_class is PromptClass.SMALL_TALK:
            return  # no answer to it is right or wrong, so two that differ say nothing
        if random.random() < self.share:  # noqa: S311  no secret
            self._samples.append(
                Sample(decision.query.features.prompt_class, messages, tier)
            )

    async def run(self) -> None:
        while True:
            await self._client.until_quiet()
            if self._samples:
                await self._check(self._samples.popleft())
            else:
                await asyncio.sleep(LOOK_S)

    async def _check(self, sample: Sample) -> None:
        kind, _, tier = sample
        if not (self._fleet.is_ready(tier) and self._fleet.is_ready(REFERENCE)):
            return
        with self._telemetry.live_check(kind, tier) as span:
            try:
                same, scores = await self._compare(sample)
            except (
                ProfileError,
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
            ) as error:
                log.warning(
                    "live check on %s: %s", tier, type(error).__name__
                )  # an engine's words may quote the prompt
                return
            self.drifts.setdefault((kind, tier), Drift()).add(scores, same=same)
            self._telemetry.record_live_check(
                span, scores.regret / max(scores.tokens, 1), same=same
            )

    async def _compare(self, sample: Sample) -> tuple[bool | None, Scores]:
        """Return whether both answers are the same, None if they cannot be compared; and the tier's scores."""
        own = await self._ask(
            CHAT, sample.tier, answer_body(sample.messages, ANSWER_TOKENS, scored=True)
        )
        theirs = await self._ask(
            CHAT, REFERENCE, answer_body(sample.messages, ANSWER_TOKENS, scored=False)
        )
        scores = await score(own, partial(self._ask, COMPLETIONS, REFERENCE))
        numbers = sample.kind is PromptClass.MATH
        same = await asyncio.to_thread(
            same_answer, text_of(own), text_of(theirs), numbers=numbers
        )
        return same, scores

    async def _ask(self, path: str, tier: TierName, body: Mapping[str, Any]) -> Any:
        await self._client.until_quiet()
        async with self._fleet.measuring:  # not for as long as others are served
            return await self._client.ask(path, tier, body)
