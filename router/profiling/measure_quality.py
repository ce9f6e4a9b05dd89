"""Measures how many of a running fleet's answers get worse on each tier, with tasks whose answers can be checked.

Every answer is written to a journal as soon as it is judged, so that interrupted work resumes where it stopped. What is
asked next is what decisions depend on most; of a task that neither the reference nor the lowest precision gets right, no
other tier is asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from router.line_file import begin_line
from router.policy.profiles import REFERENCE, ProfileError, QualityProfile
from router.profiling.checks import RunsCheck
from router.profiling.client import first_of
from router.profiling.scoring import (
    CHAT,
    COMPLETIONS,
    Judged,
    answer_body,
    count,
    score,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from router.policy.losses import Kind
    from router.profiling.client import Client, FleetState
    from router.profiling.tasks import Task
    from tiers.spec import TierName

FORM = "answers 1"  # of the journal: lines of another form do not count
DIAGNOSED = 4  # answers of each kind and tier that are scored as well
KEEP_EVERY = 20  # tasks, after which what is known so far is written
# of long prompts: those that may be too long for a tier are left out
CHARS_PER_TOKEN = 4.0


@dataclass(frozen=True, slots=True)
class Plan:
    tasks: tuple[Task, ...]  # in the order in which they are asked, within a kind
    name: str  # of the tasks, for people
    journal: Path  # file of judged answers, in JSON lines
    # tasks at a time; None: as many as the tiers' engines compute at once
    parallel: int | None = None
    diagnosed: int = DIAGNOSED  # answers of each kind and tier that are scored as well
    # the LoRA adapter that answers on every tier, the reference too; None: the model itself
    adapter: str | None = None
    # what one more answer of a kind tells about a tier; nothing is asked where it is 0. None: ask everything
    worth: Callable[[TierName, Kind], float] | None = None
    # takes what is known so far, now and then
    keep: Callable[[QualityProfile], None] | None = None
    # runs the code of an answer with a test; None: tasks that need it are left out
    runs: Callable[[str, str], Awaitable[bool]] | None = None


async def measure(
    client: Client, plan: Plan, progress: Callable[[str, int, int], None]
) -> QualityProfile:
    """Measure every ready tier, and return the profile.

    ``progress`` is called with the last step, the number of tasks done, and their total. ``ProfileError``: the router does
    not answer, the reference is not ready, or a tier refuses.
    """
    fleet = await client.fleet()
    if REFERENCE not in fleet.tiers:
        raise ProfileError(
            f"tier {REFERENCE} is not ready, and the others are measured against it"
        )
    if plan.adapter is not None:
        fleet = _having(fleet, plan.adapter)
    run = _Run(client, plan, fleet, progress)
    await run.all()
    return run.profile(whole=True)


def _having(fleet: FleetState, adapter: str) -> FleetState:
    having = {
        name: tier for name, tier in fleet.tiers.items() if adapter in tier.adapters
    }
    if REFERENCE not in having:
        raise ProfileError(
            f"tier {REFERENCE} does not offer the adapter {adapter}, and the others are measured against it"
        )
    if len(having) == 1:
        raise ProfileError(
            f"no tier but {REFERENCE} offers the adapter {adapter}: there is nothing to compare"
        )
    return replace(fleet, tiers=having)


class _Run:
    def __init__(
        self,
        client: Client,
        plan: Plan,
        fleet: FleetState,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._client, self._plan, self._fleet, self._progress = (
            client,
            plan,
            fleet,
            progress,
        )
        self._lower = [tier for tier in fleet.tiers if tier is not REFERENCE]
        self._settings = {tier: _setting(plan, fleet, tier) for tier in fleet.tiers}
        slots = {
            name: tier.max_num_seqs * tier.replicas
            for name, tier in fleet.tiers.items()
        }
        self._slots = {tier: asyncio.Semaphore(n) for tier, n in slots.items()}
        self._parallel = plan.parallel or min(slots.values())
        longest = CHARS_PER_TOKEN * min(
            tier.max_model_len for tier in fleet.tiers.values()
        )
        tasks = (
            plan.tasks
            if plan.runs is not None
            else [t for t in plan.tasks if not isinstance(t.check, RunsCheck)]
        )
        self._tasks = {
            task.digest: task for task in tasks if len(task.prompt) < longest
        }
        self._answers: dict[tuple[str, TierName], Judged] = {}
        self._scored: Counter[tuple[TierName, Kind]] = Counter()
        self._read_journal()
        self._left: dict[Kind, deque[Task]] = defaultdict(deque)
        for task in self._tasks.values():
            if not self._is_done(task):
                self._left[task.kind].append(task)
        self._lately: Counter[Kind] = Counter()  # asked since the last ``keep``
        self._done = self._kept = len(self._tasks) - sum(map(len, self._left.values()))

    def profile(self, *, whole: bool) -> QualityProfile:
        plan, fleet = self._plan, self._fleet
        return QualityProfile(
            created=datetime.now(UTC),
            model=fleet.model,
            checkpoints=dict(fleet.checkpoints),
            tasks=plan.name,
            whole=whole,
            counts=count(self._answers.values(), self._lower),
            adapter=plan.adapter,
        )

    async def all(self) -> None:
        total = self._done + sum(map(len, self._left.values()))
        self._progress(
            "begun" if self._done < total else "nothing left to ask", self._done, total
        )
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._parallel):
                    group.create_task(self._work())
        except* ProfileError as several:
            raise first_of(several) from None

    async def _work(self) -> None:
        while (task := self._next()) is not None:
            await self._task(task)
            self._done += 1
            self._tell(f"{task.prompt_class} {task.complexity}")
            if self._plan.keep is not None and self._done >= self._kept + KEEP_EVERY:
                self._kept = self._done
                self._lately.clear()
                self._plan.keep(self.profile(whole=False))

    def _next(self) -> Task | None:
        """Return the task to ask next: of the kind that decisions depend on most; None: no more tell anything."""
        worth = self._plan.worth
        most, kind = 0.0, None
        for one, tasks in self._left.items():
            value = 0.0
            if tasks:
                value = (
                    max(worth(tier, one) for tier in self._lower)
                    if worth is not None
                    else float(len(tasks))
                )
                value /= 1 + self._lately[one]  # what these will tell is not known yet
            if value > most:
                most, kind = value, one
        if kind is None:
            return None
        self._lately[kind] += 1
        return self._left[kind].popleft()

    def _is_done(self, task: Task) -> bool:
        found = {
            tier: self._answers.get((task.digest, tier))
            for tier in (REFERENCE, *self._lower)
        }
        hopeless = all(
            (one := found[tier]) is not None and not one.right
            for tier in (REFERENCE, *self._lower[:1])
        )
        return hopeless or None not in found.values()

    async def _task(self, task: Task) -> None:
        """Have the reference and the lowest precision answer, and the other tiers if one of both is right."""
        async with asyncio.TaskGroup() as group:
            for tier in (REFERENCE, *self._lower[:1]):
                group.create_task(self._judge(task, tier))
        if not self._is_done(task):
            async with asyncio.TaskGroup() as group:
                for tier in self._lower[1:]:
                    group.create_task(self._judge(task, tier))

    async def _judge(self, task: Task, tier: TierName) -> None:
        if (task.digest, tier) in self._answers:
            return
        diagnosed = (
            tier is not REFERENCE
            and self._scored[tier, task.kind] < self._plan.diagnosed
        )
        self._scored[tier, task.kind] += diagnosed
        body = answer_body(task.messages, task.max_tokens, scored=diagnosed)
        answer = await self._ask(CHAT, tier, body)
        self._keep(
            Judged(
                task=task.digest,
                prompt_class=task.prompt_class,
                complexity=task.complexity,
                tier=tier,
                right=await self._is_right(task, text_of(answer)),
                scores=await score(answer, partial(self._ask, COMPLETIONS, REFERENCE))
                if diagnosed
                else None,
            )
        )

    async def _is_right(self, task: Task, text: str) -> bool:
        check, runs = task.check, self._plan.runs
        if isinstance(check, RunsCheck) and runs is not None:
            return await runs(text, check.test)
        return await asyncio.to_thread(check.passes, text)

    async def _ask(
        self, path: str, tier: TierName, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        async with self._slots[tier]:
            found: dict[str, Any] = await self._client.ask(
                path,
                tier,
                body,
                lambda: self._tell("waiting for others' requests"),
                self._plan.adapter,
            )
        return found

    def _tell(self, step: str) -> None:
        self._progress(step, self._done, len(self._tasks))

    def _keep(self, answer: Judged) -> None:
        self._answers[answer.task, answer.tier] = answer
        with self._plan.journal.open("a") as journal:
            begin_line(journal)
            line = {
                "setting": self._settings[answer.tier],
                "answer": answer.model_dump(mode="json"),
            }
            journal.write(json.dumps(line) + "\n")

    def _read_journal(self) -> None:
        """Take earlier answers of the same tiers to these tasks; a line that was cut off is skipped."""
        if not self._plan.journal.exists():
            return
        for line in self._plan.journal.read_text("utf-8").splitlines():
            try:
                row = json.loads(line)
                answer = Judged.model_validate(row["answer"])
                known = (
                    answer.task in self._tasks
                    and self._settings.get(answer.tier) == row["setting"]
                )
            except (
                ValueError,
                KeyError,
                TypeError,
            ):  # pydantic's ValidationError is a ValueError
                continue
            if known:
                self._answers[answer.task, answer.tier] = answer
                kind = answer.prompt_class, answer.complexity
                self._scored[answer.tier, kind] += answer.scores is not None


def _setting(plan: Plan, fleet: FleetState, tier: TierName) -> str:
    """Return a digest of everything that a tier's answer depends on, except the task."""
    parts = [FORM, fleet.model, fleet.tiers[tier].identity, plan.adapter]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
