"""Measures a running fleet's quality.

Every answer is written to a journal as soon as it is judged, so that interrupted work resumes where it stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from classifier import EstimatingCounter, PromptClass, extract
from router.policy.profiles import REFERENCE, TOP_K, ProfileError, QualityProfile
from router.profiling.client import first_of
from router.profiling.quality import Score, judge, summarise
from router.profiling.scoring import GreedyAnswer, greedy_body, read_greedy, read_scored, scoring_body

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from router.profiling.client import Client, FleetState
    from tiers.spec import TierName

Scored = list[dict[int, tuple[float, int]]]  # by position and token id: the reference's log-probability and rank


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
        answer_tokens: Longest answer.
        parallel: Prompts at a time; None: as many as the tiers' engines compute at once.
        journal: File of judged answers, in JSON lines.
        adapter: The LoRA adapter that answers on every tier, the reference too; None: the model itself.
    """

    prompts: tuple[Prompt, ...]
    answer_tokens: int
    parallel: int | None
    journal: Path
    adapter: str | None = None


def read_prompts(path: Path, per_class: int | None) -> tuple[Prompt, ...]:
    """Read prompts: JSON lines with ``text`` and optionally ``class``; without a class the prompt is classified.

    Raises:
        ProfileError: A line is not a prompt, or there are no prompts.
    """
    found: list[Prompt] = []
    taken: Counter[PromptClass] = Counter()
    try:
        lines = path.read_text("utf-8").split("\n")  # splitlines() would also split at U+2028, which prompts may have
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
            prompt = Prompt(text, prompt_class, _digest(text))
        except (ValueError, KeyError, TypeError, AttributeError):
            classes = ", ".join(PromptClass)
            raise ProfileError(f'{path} line {number}: expected {{"text": ..., "class": one of {classes}}}') from None
        taken[prompt_class] += 1
        if per_class is None or taken[prompt_class] <= per_class:
            found.append(prompt)
    if not found:
        raise ProfileError(f"{path} has no prompts")
    return tuple(dict.fromkeys(found))


async def measure(client: Client, plan: Plan, progress: Callable[[str, int, int], None]) -> QualityProfile:
    """Measure every ready tier, and return the profile.

    Args:
        client: Sends requests to the tiers.
        plan: What to measure.
        progress: Called with the last step, the number of answers done, and their total.

    Raises:
        ProfileError: The router does not answer, the reference is not ready, or a tier refuses.
    """
    fleet = await client.fleet()
    if REFERENCE not in fleet.identities:
        raise ProfileError(f"tier {REFERENCE} is not ready, and the others are measured against it")
    if plan.adapter is not None:
        fleet = _having(fleet, plan.adapter)
    run = _Run(client, plan, fleet, progress)
    scores = await run.all()
    return QualityProfile(
        created=datetime.now(UTC),
        model=fleet.model,
        checkpoints=dict(fleet.checkpoints),
        answer_tokens=plan.answer_tokens,
        top_k=TOP_K,
        prompts=_digest("".join(sorted(p.digest for p in plan.prompts))),
        losses=await asyncio.to_thread(summarise, scores),  # seconds, of resampling
        adapter=plan.adapter,
    )


def _having(fleet: FleetState, adapter: str) -> FleetState:
    """Return the fleet without the tiers that do not offer an adapter.

    Raises:
        ProfileError: The reference does not, or it alone does.
    """
    having = {tier: identity for tier, identity in fleet.identities.items() if adapter in fleet.adapters.get(tier, ())}
    if REFERENCE not in having:
        raise ProfileError(
            f"tier {REFERENCE} does not offer the adapter {adapter}, and the others are measured against it"
        )
    if len(having) == 1:
        raise ProfileError(f"no tier but {REFERENCE} offers the adapter {adapter}: there is nothing to compare")
    return replace(fleet, identities=having)


class _Run:
    """One measurement."""

    def __init__(
        self, client: Client, plan: Plan, fleet: FleetState, progress: Callable[[str, int, int], None]
    ) -> None:
        self._client, self._plan, self._tiers, self._progress = client, plan, tuple(fleet.identities), progress
        self._setting = _setting(plan, fleet)  # journal lines of other settings do not count
        slots = {tier: fleet.max_num_seqs[tier] * fleet.replicas[tier] for tier in self._tiers}
        self._prompts = asyncio.Semaphore(plan.parallel or min(slots.values()))
        self._slots = {tier: asyncio.Semaphore(count) for tier, count in slots.items()}
        self._total = len(plan.prompts) * len(self._tiers)
        self._wanted = {prompt.digest for prompt in plan.prompts}
        self._scores = self._read_journal()

    @property
    def _done(self) -> int:
        return sum(digest in self._wanted and tier in self._tiers for digest, tier in self._scores)

    async def all(self) -> list[Score]:
        """Judge the answers that the journal lacks; return all scores."""
        # So that no long prompt runs alone at the end.
        longest_first = sorted(self._plan.prompts, key=lambda prompt: -len(prompt.text))
        self._progress("begun" if self._done < self._total else "nothing left to ask", self._done, self._total)
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in longest_first:
                    missing = [t for t in self._tiers if (prompt.digest, t) not in self._scores]
                    if missing:
                        group.create_task(self._prompt(prompt, missing))
        except* ProfileError as several:
            raise first_of(several) from None
        return [score for (digest, _), score in self._scores.items() if digest in self._wanted]

    async def _prompt(self, prompt: Prompt, missing: Sequence[TierName]) -> None:
        """Have every missing tier answer a prompt, at the same time, and judge the answers."""
        async with self._prompts, asyncio.TaskGroup() as group:
            reference = group.create_task(self._generate(prompt, REFERENCE))
            scored: dict[tuple[int, ...], asyncio.Task[Scored]] = {}  # equal answers are scored once

            async def judged(tier: TierName) -> None:
                answer = await reference if tier is REFERENCE else await self._generate(prompt, tier)
                if answer.ids not in scored:
                    scored[answer.ids] = group.create_task(self._score(answer))
                score = judge(
                    prompt.digest,
                    prompt.prompt_class,
                    tier,
                    answer=answer.ids,
                    own=answer.own,
                    reference=await scored[answer.ids],
                    reference_answer=(await reference).ids,
                )
                self._keep(score)
                self._progress(f"{prompt.prompt_class} on {tier}", self._done, self._total)

            for tier in missing:
                group.create_task(judged(tier))

    async def _generate(self, prompt: Prompt, tier: TierName) -> GreedyAnswer:
        """Return a tier's greedy answer, with its likeliest tokens at each position."""
        body = greedy_body([{"role": "user", "content": prompt.text}], self._plan.answer_tokens)
        return read_greedy(await self._ask("/v1/chat/completions", tier, body))

    async def _score(self, answer: GreedyAnswer) -> Scored:
        """Return the reference's scores of an answer, from one prefill."""
        if not answer.ids:
            return []
        return read_scored(await self._ask("/v1/completions", REFERENCE, scoring_body(answer)), answer)

    async def _ask(self, path: str, tier: TierName, body: Mapping[str, Any]) -> dict[str, Any]:
        def waiting() -> None:
            self._progress("waiting for others' requests", self._done, self._total)

        async with self._slots[tier]:
            found: dict[str, Any] = await self._client.ask(path, tier, body, waiting, self._plan.adapter)
        return found

    def _keep(self, score: Score) -> None:
        self._scores[score.prompt, score.tier] = score
        with self._plan.journal.open("a") as journal:
            journal.write(json.dumps({"setting": self._setting, "score": score.model_dump(mode="json")}) + "\n")

    def _read_journal(self) -> dict[tuple[str, TierName], Score]:
        """Return earlier scores of the same setting; a line that was cut off is skipped."""
        found: dict[tuple[str, TierName], Score] = {}
        if not self._plan.journal.exists():
            return found
        for line in self._plan.journal.read_text("utf-8").splitlines():
            try:
                row = json.loads(line)
                if row["setting"] == self._setting:
                    score = Score.model_validate(row["score"])
                    found[score.prompt, score.tier] = score
            except (ValueError, KeyError):  # pydantic's ValidationError is a ValueError
                continue
        return found


def _setting(plan: Plan, fleet: FleetState) -> str:
    """Return a digest of everything that a score depends on, except the prompt."""
    parts = [fleet.model, plan.answer_tokens, TOP_K, dict(fleet.identities)]
    if plan.adapter is not None:
        parts.append(plan.adapter)
    return _digest(json.dumps(parts, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
