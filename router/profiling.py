"""Measure a running fleet's quality, through its router.

Every answer is written to a journal as soon as it is judged, so that interrupted work goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from classifier import EstimatingCounter, PromptClass, extract
from router.quality import REFERENCE, TOP_K, QualityProfile, Score, certainties, judge, summarise
from router.router_client import FleetState, ProfileError, RouterClient, connect
from router.scoring import GreedyAnswer, greedy_body, read_greedy, read_scored, scoring_body

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tiers.spec import TierName


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to measure with; ``digest`` names it in journals."""

    text: str
    prompt_class: PromptClass
    digest: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        url: The router's.
        key: For the router; empty where it needs none.
        answer_tokens: Longest answer.
        parallel: Prompts at a time.
        journal: File of judged answers, in JSON lines.
    """

    url: str
    key: str
    prompts: tuple[Prompt, ...]
    answer_tokens: int
    parallel: int
    journal: Path


def read_prompts(path: Path, per_class: int | None) -> tuple[Prompt, ...]:
    """Read prompts: JSON lines with ``text``, and perhaps ``class``; without, they are classified.

    Raises:
        ProfileError: A line is not one, or there are none.
    """
    found: list[Prompt] = []
    taken: dict[PromptClass, int] = {}
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"the prompts {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["text"]
            named = row.get("class")
            prompt_class = PromptClass(named) if named else extract(text, EstimatingCounter()).prompt_class
        except (ValueError, KeyError, TypeError, AttributeError):
            classes = ", ".join(PromptClass)
            raise ProfileError(f'{path} line {number}: expected {{"text": ..., "class": one of {classes}}}') from None
        taken[prompt_class] = taken.get(prompt_class, 0) + 1
        if per_class is None or taken[prompt_class] <= per_class:
            found.append(Prompt(text, prompt_class, _digest(text)))
    if not found:
        raise ProfileError(f"{path} has no prompts")
    return tuple(dict.fromkeys(found))


async def measure(plan: Plan, progress: Callable[[str, int, int], None]) -> QualityProfile:
    """Measure every tier that is ready, and return the profile.

    Args:
        plan: What to measure.
        progress: Called with what was done, how much of it, and of how much.

    Raises:
        ProfileError: The router does not answer, the reference is not ready, or a tier refuses.
    """
    async with connect(plan.url, plan.key) as client:
        fleet = await client.fleet()
        if REFERENCE not in fleet.identities:
            raise ProfileError(f"tier {REFERENCE} is not ready, and it is what the others are measured against")
        run = _Run(client, plan, tuple(fleet.identities), _setting(plan, fleet), progress)
        scores = await run.all()
    return QualityProfile(
        created=datetime.now(UTC),
        model=fleet.model,
        checkpoints=dict(fleet.checkpoints),
        answer_tokens=plan.answer_tokens,
        top_k=TOP_K,
        prompts=_digest("".join(sorted(p.digest for p in plan.prompts))),
        losses=summarise(scores),
        certainties=certainties(scores),
    )


class _Run:
    """One measurement."""

    def __init__(
        self,
        client: RouterClient,
        plan: Plan,
        tiers: Sequence[TierName],
        setting: str,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._client, self._plan, self._tiers, self._progress = client, plan, tiers, progress
        self._setting = setting  # what a journal's line must have been measured under
        self._places = asyncio.Semaphore(plan.parallel)
        self._total = len(plan.prompts) * len(tiers)
        self._scores = self._read_journal()

    async def all(self) -> list[Score]:
        """Judge what the journal does not have yet."""
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in self._plan.prompts:
                    missing = [t for t in self._tiers if (prompt.digest, t) not in self._scores]
                    if missing:
                        group.create_task(self._prompt(prompt, missing))
        except* ProfileError as several:
            raise several.exceptions[0] from None
        wanted = {prompt.digest for prompt in self._plan.prompts}
        return [score for (digest, _), score in self._scores.items() if digest in wanted]

    async def _prompt(self, prompt: Prompt, missing: Sequence[TierName]) -> None:
        async with self._places:
            reference = await self._generate(prompt, REFERENCE)
            for tier in missing:
                answer = reference if tier is REFERENCE else await self._generate(prompt, tier)
                places = await self._score(answer)
                score = judge(
                    prompt.digest,
                    prompt.prompt_class,
                    tier,
                    answer=answer.ids,
                    own=answer.own,
                    reference=places,
                    reference_answer=reference.ids,
                )
                self._keep(score)
                self._progress(f"{prompt.prompt_class} on {tier}", len(self._scores), self._total)

    async def _generate(self, prompt: Prompt, tier: TierName) -> GreedyAnswer:
        """Return a tier's greedy answer, with its likeliest tokens at each place."""
        body = greedy_body([{"role": "user", "content": prompt.text}], self._plan.answer_tokens)
        return read_greedy(await self._ask("/v1/chat/completions", tier, body))

    async def _score(self, answer: GreedyAnswer) -> list[dict[int, tuple[float, int]]]:
        """Return what the reference makes of an answer, place by place, from one prefill."""
        if not answer.ids:
            return []
        return read_scored(await self._ask("/v1/completions", REFERENCE, scoring_body(answer)), answer)

    async def _ask(self, path: str, tier: TierName, body: Mapping[str, Any]) -> dict[str, Any]:
        def waiting() -> None:
            self._progress("waiting for others' requests", len(self._scores), self._total)

        found: dict[str, Any] = await self._client.ask(path, tier, body, waiting)
        return found

    def _keep(self, score: Score) -> None:
        self._scores[score.prompt, score.tier] = score
        with self._plan.journal.open("a") as journal:
            journal.write(json.dumps({"setting": self._setting, "score": score.model_dump(mode="json")}) + "\n")

    def _read_journal(self) -> dict[tuple[str, TierName], Score]:
        """Return what was judged before under the same setting; a last line that was cut off is left out."""
        if not self._plan.journal.exists():
            return {}
        found: dict[tuple[str, TierName], Score] = {}
        for line in self._plan.journal.read_text("utf-8").splitlines():
            try:
                row = json.loads(line)
                if row["setting"] == self._setting:
                    score = Score.model_validate(row["score"])
                    found[score.prompt, score.tier] = score
            except (ValueError, KeyError, ValidationError):
                continue
        return found


def _setting(plan: Plan, fleet: FleetState) -> str:
    """Return a digest of everything but the prompts that a score depends on."""
    parts = [fleet.model, plan.answer_tokens, TOP_K, {t.value: d for t, d in fleet.identities.items()}]
    return _digest(json.dumps(parts, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
