"""Measures how many of a running fleet's answers get worse on each tier, with tasks whose answers can be checked.

Every answer is written to a journal as soon as it is judged, so that interrupted work resumes where it stopped. What is
asked next is what decisions depend on most; of a task that neither the reference nor the lowest precision gets right, no
other tier is asked.

Whether the model thinks is found out first. Thoughts get tokens of their own; an answer that is cut within them is not
measured, and is asked for again once the limit is higher. Where requests can switch thinking, both modes are measured apart.
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
from router.policy.profiles import (
    REFERENCE,
    ModeCounts,
    ProfileError,
    QualityProfile,
)
from router.profiling.answering import (
    AnswerLimits,
    answer_body,
    fitting_think_tokens,
    limits_for,
    most_prompt_tokens,
    read_answer,
)
from router.profiling.checks import RunsCheck
from router.profiling.measuring_client import TooLongForTierError, first_of
from router.profiling.scaled_context import scaled_tasks
from router.profiling.scoring import (
    CHAT,
    COMPLETIONS,
    JudgedAnswer,
    count_answers,
    score,
    scoring_fields,
)
from tiers.verification.thinking import (
    TOKENIZE,
    Thinking,
    ThinkingMode,
    observe_thinking,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from router.policy.losses import Kind
    from router.profiling.measuring_client import FleetState, MeasuringClient
    from router.profiling.model_answer import ModelAnswer
    from router.profiling.tasks import Task
    from tiers.spec import TierName

JOURNAL_FORM = "answers 1"  # lines of another form do not count
SCORED_ANSWERS = 4  # for each kind and tier
KEEP_EVERY = 20  # tasks, after which what is known so far is written
# Prompts that may be too long for a tier by this estimate are left out.
CHARS_PER_TOKEN = 4.0


@dataclass(frozen=True, slots=True)
class QualityPlan:
    """What is asked, and what becomes of the answers.

    Attributes:
        tasks: The tasks. Those of one kind are asked in the order of their digests, which mixes short and long ones.
        name: What the tasks are, for people.
        journal: File of judged answers, in JSON lines.
        parallel: Tasks at a time; None: as many as the tiers' engines compute at once.
        scored: Number of answers of each kind and tier that are scored as well.
        adapter: The LoRA adapter that answers on every tier, the reference too; None: the model itself.
        worth: What one more answer of a kind tells about a tier; nothing is asked where it is 0. None: ask everything.
        keep: Takes what is known so far, now and then.
        run_code: Runs the code of an answer with a test; None: tasks that need it are left out.
        think_tokens: Tokens for thoughts on top of each task's own limit; None: by the context, if the model thinks.
        has_both_modes: Where requests can switch thinking, the mode that they have to ask for is measured as well.
        fills_context: Whether tasks as long as the tiers' shortest context are asked as well.
    """

    tasks: tuple[Task, ...]
    name: str
    journal: Path
    parallel: int | None = None
    scored: int = SCORED_ANSWERS
    adapter: str | None = None
    worth: Callable[[TierName, Kind], float] | None = None
    keep: Callable[[QualityProfile], None] | None = None
    run_code: Callable[[str, str], Awaitable[bool]] | None = None
    think_tokens: int | None = None
    has_both_modes: bool = False
    fills_context: bool = False


@dataclass(frozen=True, slots=True)
class _AnsweringMode:
    """In which mode of thinking a measurement has tasks answered.

    Attributes:
        name: Whether the model thinks in it; None: it cannot.
        limits: How answers are asked for.
    """

    name: ThinkingMode | None
    limits: AnswerLimits


async def measure_quality(
    client: MeasuringClient,
    plan: QualityPlan,
    report_progress: Callable[[str, int, int], None],
) -> QualityProfile:
    """Measure every ready tier, and return the profile.

    Args:
        client: The client of the fleet.
        plan: What to ask.
        report_progress: Called with the last step, the number of tasks done, and their total.

    Raises:
        ProfileError: The router does not answer, the reference is not ready, or a tier refuses.
    """
    fleet = await client.fleet()
    if REFERENCE not in fleet.tiers:
        raise ProfileError(
            f"tier {REFERENCE} is not ready, and the others are measured against it"
        )
    if plan.adapter is not None:
        fleet = _with_adapter(fleet, plan.adapter)
    plan = await _without_refused_tools(client, plan, fleet, report_progress)
    thinking = await _find_out_thinking(client, plan, report_progress)
    context = _shortest_context(fleet)
    if plan.fills_context:
        plan = replace(plan, tasks=(*plan.tasks, *scaled_tasks(context)))
    mode = _answering_mode(thinking, ThinkingMode.DEFAULT, context, plan)
    measurement = _QualityMeasurement(client, plan, fleet, mode, report_progress)
    await measurement.ask_all()
    profile = measurement.profile(is_complete=True)
    if thinking.other_mode is None or not plan.has_both_modes:
        return profile
    # Decisions do not depend on the other mode, so no answer to it is worth more than another.
    other_plan = replace(plan, worth=None, keep=None)
    other_mode = _answering_mode(thinking, thinking.other_mode, context, plan)
    other = _QualityMeasurement(client, other_plan, fleet, other_mode, report_progress)
    await other.ask_all()
    other_counts = ModeCounts(
        mode=thinking.other_mode,
        think_tokens=other_mode.limits.think_tokens,
        counts=other.profile(is_complete=True).counts,
    )
    return profile.model_copy(update={"other_mode": other_counts})


async def _find_out_thinking(
    client: MeasuringClient,
    plan: QualityPlan,
    report_progress: Callable[[str, int, int], None],
) -> Thinking:
    """Find out how the model thinks, from the reference: all tiers serve one model."""
    report_progress("asking how the model thinks", 0, len(plan.tasks))

    async def ask(path: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return await client.ask_if_accepted(path, REFERENCE, body, adapter=plan.adapter)

    return await observe_thinking(ask)


def _answering_mode(
    thinking: Thinking, mode: ThinkingMode, context: int, plan: QualityPlan
) -> _AnsweringMode:
    can_think = thinking.can_switch or thinking.thinks_by_default
    name = thinking.default_mode if mode is ThinkingMode.DEFAULT else mode
    return _AnsweringMode(
        name=name if can_think else None,
        limits=limits_for(thinking, mode, context, plan.think_tokens),
    )


async def _without_refused_tools(
    client: MeasuringClient,
    plan: QualityPlan,
    fleet: FleetState,
    report_progress: Callable[[str, int, int], None],
) -> QualityPlan:
    """Return the plan without tasks that offer tools if a tier refuses those, and say so."""
    task = next((task for task in plan.tasks if task.tools), None)
    if task is None:
        return plan
    body = {**answer_body(task), "max_tokens": 1}
    for tier in fleet.tiers:
        answer = await client.ask_if_accepted(CHAT, tier, body, adapter=plan.adapter)
        if answer is None:
            tasks = tuple(task for task in plan.tasks if not task.tools)
            report_progress(
                f"tier {tier} refuses tools: tasks with tools are left out "
                "(vLLM takes them with --enable-auto-tool-choice and --tool-call-parser)",
                0,
                len(tasks),
            )
            return replace(plan, tasks=tasks)
    return plan


def _shortest_context(fleet: FleetState) -> int:
    return min(tier.max_model_len for tier in fleet.tiers.values())


def _with_adapter(fleet: FleetState, adapter: str) -> FleetState:
    """Return the fleet with those tiers alone that offer an adapter; ``ProfileError``: too few do."""
    tiers = {
        name: tier for name, tier in fleet.tiers.items() if adapter in tier.adapters
    }
    if REFERENCE not in tiers:
        raise ProfileError(
            f"tier {REFERENCE} does not offer the adapter {adapter}, and the others are measured against it"
        )
    if len(tiers) == 1:
        raise ProfileError(
            f"no tier but {REFERENCE} offers the adapter {adapter}: there is nothing to compare"
        )
    return replace(fleet, tiers=tiers)


class _QualityMeasurement:
    """One measurement of a fleet's quality."""

    def __init__(
        self,
        client: MeasuringClient,
        plan: QualityPlan,
        fleet: FleetState,
        mode: _AnsweringMode,
        report_progress: Callable[[str, int, int], None],
    ) -> None:
        self._client = client
        self._plan = plan
        self._fleet = fleet
        self._mode = mode
        self._context = _shortest_context(fleet)
        self._report_progress = report_progress
        self._lower_tiers = [tier for tier in fleet.tiers if tier is not REFERENCE]
        # No other tier is asked a task that none of these gets right.
        self._first_tiers = (REFERENCE, *self._lower_tiers[:1])
        self._settings = {
            tier: _setting(plan, fleet, tier, mode.name) for tier in fleet.tiers
        }
        slots = {
            name: tier.max_num_seqs * tier.replicas
            for name, tier in fleet.tiers.items()
        }
        self._slots = {tier: asyncio.Semaphore(count) for tier, count in slots.items()}
        self._parallel = plan.parallel or min(slots.values())
        self._tasks = {task.digest: task for task in _askable_tasks(plan, fleet)}
        self._answers: dict[tuple[str, TierName], JudgedAnswer] = {}
        self._scored: Counter[tuple[TierName, Kind]] = Counter()
        self._read_journal()
        self._tasks_left: dict[Kind, deque[Task]] = defaultdict(deque)
        for task in self._tasks.values():
            if not self._is_done(task):
                self._tasks_left[task.kind].append(task)
        # The tasks that were begun since the last ``keep``: the worth of a kind does not know of them yet.
        self._begun_since_keep: Counter[Kind] = Counter()
        self._tasks_done = len(self._tasks) - self._left_count()
        self._done_at_keep = self._tasks_done

    def _left_count(self) -> int:
        return sum(len(tasks) for tasks in self._tasks_left.values())

    def profile(self, *, is_complete: bool) -> QualityProfile:
        return QualityProfile(
            created=datetime.now(UTC),
            model=self._fleet.model,
            checkpoints=dict(self._fleet.checkpoints),
            tasks=self._plan.name,
            whole=is_complete,
            counts=count_answers(self._answers.values(), self._lower_tiers),
            adapter=self._plan.adapter,
            mode=self._mode.name,
            think_tokens=self._mode.limits.think_tokens,
        )

    async def ask_all(self) -> None:
        """Have all tasks answered that tell anything, several at a time."""
        has_tasks = self._left_count() > 0
        self._show("begun" if has_tasks else "nothing left to ask")
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._parallel):
                    group.create_task(self._ask_one_by_one())
        except* ProfileError as errors:
            raise first_of(errors) from None

    async def _ask_one_by_one(self) -> None:
        while (task := self._next_task()) is not None:
            await self._have_answered(task)
            self._tasks_done += 1
            self._show(f"{task.prompt_class} {task.complexity}")
            self._keep_now_and_then()

    def _keep_now_and_then(self) -> None:
        """Hand over what is known so far once so many tasks were done since the last time."""
        keep = self._plan.keep
        if keep is not None and self._tasks_done >= self._done_at_keep + KEEP_EVERY:
            self._done_at_keep = self._tasks_done
            self._begun_since_keep.clear()
            keep(self.profile(is_complete=False))

    def _next_task(self) -> Task | None:
        """Return the task to ask next: of the kind that decisions depend on most; None: no more tell anything."""
        highest_value = 0.0
        best_kind = None
        for kind, tasks in self._tasks_left.items():
            if tasks:
                value = self._value_of_asking(kind, len(tasks))
                if value > highest_value:
                    highest_value = value
                    best_kind = kind
        if best_kind is None:
            return None
        self._begun_since_keep[best_kind] += 1
        return self._tasks_left[best_kind].popleft()

    def _value_of_asking(self, kind: Kind, tasks_left: int) -> float:
        """Return what one more task of a kind would tell: less for each that was begun and has not told it yet."""
        worth = self._plan.worth
        value = float(tasks_left)
        if worth is not None:
            value = max(worth(tier, kind) for tier in self._lower_tiers)
        return value / (1 + self._begun_since_keep[kind])

    def _is_done(self, task: Task) -> bool:
        """Tell whether nothing more can be learned from a task.

        All tiers have answered it, the first tiers get it wrong, or the reference's answer is cut, so that it has no pairs.
        """
        reference_answer = self._answers.get((task.digest, REFERENCE))
        if reference_answer is not None and reference_answer.is_cut:
            return True
        is_answered = all(
            (task.digest, tier) in self._answers
            for tier in (REFERENCE, *self._lower_tiers)
        )
        return is_answered or self._is_hopeless(task)

    def _is_hopeless(self, task: Task) -> bool:
        for tier in self._first_tiers:
            answer = self._answers.get((task.digest, tier))
            if answer is None or answer.right:
                return False
        return True

    async def _have_answered(self, task: Task) -> None:
        """Have the reference and the lowest precision answer, and the other tiers if one of both is right."""
        limits = await self._limits_of(task)
        if limits is None:
            return
        try:
            await self._judge_all(task, limits)
        except* TooLongForTierError:
            self._show("left out: a task is longer than was estimated")

    async def _judge_all(self, task: Task, limits: AnswerLimits) -> None:
        """Have the first tiers answer, and the others unless that settles the task."""
        async with asyncio.TaskGroup() as group:
            for tier in self._first_tiers:
                group.create_task(self._judge(task, tier, limits))
        if not self._is_done(task):
            async with asyncio.TaskGroup() as group:
                for tier in self._lower_tiers[1:]:
                    group.create_task(self._judge(task, tier, limits))

    async def _limits_of(self, task: Task) -> AnswerLimits | None:
        """Return the limits for answers to a task, which fit the context; None: the task itself does not fit."""
        limits = self._mode.limits
        prompt_tokens = most_prompt_tokens(task)
        if prompt_tokens + task.max_tokens + limits.think_tokens <= self._context:
            return limits
        prompt_tokens = await self._count_prompt_tokens(task)
        if prompt_tokens + task.max_tokens > self._context:
            return None
        think_tokens = fitting_think_tokens(
            task, limits, self._context, prompt_tokens=prompt_tokens
        )
        return replace(limits, think_tokens=think_tokens)

    async def _count_prompt_tokens(self, task: Task) -> int:
        """Return the number of tokens of a task's prompt; an estimate where the engine does not count them."""
        body = answer_body(task, self._mode.limits)
        prompt_fields = ("messages", "tools", "chat_template_kwargs")
        prompt = {name: body[name] for name in prompt_fields if name in body}
        answer = await self._client.ask_if_accepted(
            TOKENIZE, REFERENCE, prompt, adapter=self._plan.adapter
        )
        if answer is None:
            return int(task.input_chars / CHARS_PER_TOKEN)
        return int(answer["count"])

    async def _judge(self, task: Task, tier: TierName, limits: AnswerLimits) -> None:
        """Have a tier answer a task, unless it has; judge the answer, and score it if few are scored."""
        if (task.digest, tier) in self._answers:
            return
        is_scored = (
            tier is not REFERENCE and self._scored[tier, task.kind] < self._plan.scored
        )
        body = answer_body(task, limits)
        if is_scored:
            self._scored[tier, task.kind] += 1
            body |= scoring_fields()
        response = await self._ask(CHAT, tier, body)
        answer = read_answer(response, limits)
        judged = JudgedAnswer(
            task=task.digest,
            prompt_class=task.prompt_class,
            complexity=task.complexity,
            tier=tier,
            right=False,
        )
        if answer.is_cut_while_thinking:
            # A higher limit asks again, so the limit that counts is the one before it was fitted to the context.
            cut_at = self._mode.limits.think_tokens
            self._add(judged.model_copy(update={"cut_at": cut_at}))
            self._scored[tier, task.kind] -= is_scored
            return
        scores = None
        if is_scored:
            scores = await score(response, partial(self._ask, COMPLETIONS, REFERENCE))
        is_right = await self._is_right(task, answer)
        self._add(judged.model_copy(update={"right": is_right, "scores": scores}))

    async def _is_right(self, task: Task, answer: ModelAnswer) -> bool:
        run_code = self._plan.run_code
        if isinstance(task.check, RunsCheck) and run_code is not None:
            return await run_code(answer.text, task.check.test)
        return await asyncio.to_thread(task.check.passes, answer)

    async def _ask(
        self, path: str, tier: TierName, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        async with self._slots[tier]:
            answer: dict[str, Any] = await self._client.ask(
                path,
                tier,
                body,
                report_waiting=lambda: self._show("waiting for others' requests"),
                adapter=self._plan.adapter,
            )
        return answer

    def _show(self, step: str) -> None:
        self._report_progress(step, self._tasks_done, len(self._tasks))

    def _add(self, answer: JudgedAnswer) -> None:
        """Take an answer, and write it to the journal."""
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
                answer = JudgedAnswer.model_validate(row["answer"])
                setting = row["setting"]
            # A ValidationError of pydantic is a ValueError.
            except (ValueError, KeyError, TypeError):
                continue
            is_ours = answer.task in self._tasks
            limit = self._mode.limits.think_tokens
            is_outdated = answer.cut_at is not None and answer.cut_at < limit
            if is_outdated:
                continue
            if is_ours and self._settings.get(answer.tier) == setting:
                self._answers[answer.task, answer.tier] = answer
                kind = answer.prompt_class, answer.complexity
                if answer.scores is not None:
                    self._scored[answer.tier, kind] += 1


def _askable_tasks(plan: QualityPlan, fleet: FleetState) -> list[Task]:
    """Return the tasks that fit every tier, as far as an estimate tells, and whose answers can be checked here."""
    longest_prompt_chars = CHARS_PER_TOKEN * _shortest_context(fleet)
    tasks: list[Task] = []
    for task in plan.tasks:
        can_be_checked = plan.run_code is not None or not isinstance(
            task.check, RunsCheck
        )
        if can_be_checked and task.input_chars < longest_prompt_chars:
            tasks.append(task)
    return sorted(tasks, key=lambda task: task.digest)


def _setting(
    plan: QualityPlan, fleet: FleetState, tier: TierName, mode: ThinkingMode | None
) -> str:
    """Return a digest of everything that a tier's answer depends on, except the task and the limit of its thoughts."""
    parts = [JOURNAL_FORM, fleet.model, fleet.tiers[tier].identity, plan.adapter]
    if mode is not None:
        parts.append(f"thinking {mode}")
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
