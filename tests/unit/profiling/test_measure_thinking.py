"""Counting answers of models that think: limits that fit, cut answers, both modes, and models that call tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.policy.profiles import AnswerCount, QualityProfile
from router.profiling.checks import CallsCheck
from router.profiling.measure_quality import QualityPlan, measure_quality
from router.profiling.model_answer import ModelAnswer, ToolCall
from router.profiling.router_client import RouterClient
from router.profiling.tasks import TASKS as SUITE_FOLDER
from router.profiling.tasks import Task, read_tasks
from tests.fakes.model_engine import KnownAnswers, ThinkingModel
from tests.unit.router_stack import Stack, router_stack
from tiers.spec import STANDARD_TIERS, TierName
from tiers.verification.thinking import QUESTION, SWITCH_NAMES, ThinkingMode

FAST, BALANCED, PRECISE = STANDARD_TIERS
SHORT_THOUGHT = "I think it is Paris."
LONG_THOUGHT = "I go on and on. " * 100
NUMBER_OF_TASKS = 40


def task(number: int, **fields: Any) -> Task:
    usual = {
        "id": f"task {number}",
        "class": "chat",
        "complexity": "trivial",
        "prompt": f"What is the capital of France, for the time {number}?",
        "max_tokens": 8,
        "check": {"type": "contains", "all": ["Paris"]},
    }
    return Task.model_validate({**usual, **fields})


TASKS = tuple(task(number) for number in range(NUMBER_OF_TASKS))


@asynccontextmanager
async def connected(
    tmp_path: Path, models: Mapping[TierName, ThinkingModel]
) -> AsyncIterator[tuple[Stack, RouterClient]]:
    async with (
        router_stack(tmp_path, models=models) as stack,
        RouterClient(stack.url, "") as client,
    ):
        yield stack, client


def alike(model: ThinkingModel) -> dict[TierName, ThinkingModel]:
    """Return one model for each tier, which a test may change apart."""
    return {tier: replace(model) for tier in STANDARD_TIERS}


async def measured(
    client: RouterClient, tmp_path: Path, tasks: tuple[Task, ...] = TASKS, **plan: Any
) -> QualityProfile:
    quality_plan = QualityPlan(
        tasks=tasks,
        name="tasks",
        journal=tmp_path / "journal.jsonl",
        scored=0,
        **plan,
    )
    return await measure_quality(client, quality_plan, lambda *_: None)


def count_of(profile: QualityProfile, tier: TierName) -> AnswerCount:
    return next(count for count in profile.counts if count.tier is tier)


def questions(stack: Stack, tier: TierName) -> list[dict[str, Any]]:
    """Return the requests for answers to tasks that a tier had since the last call."""
    requests = [
        request
        for request in stack.engines[tier].requests
        if "messages" in request and request["messages"][0]["content"] != QUESTION
    ]
    stack.engines[tier].requests.clear()
    return requests


WAYS = {
    "tags": ThinkingModel(thought=SHORT_THOUGHT),
    "a parser": ThinkingModel(thought=SHORT_THOUGHT, reasoning_field="reasoning"),
    "an older parser": ThinkingModel(
        thought=SHORT_THOUGHT, reasoning_field="reasoning_content"
    ),
    "opened by the prompt": ThinkingModel(
        thought=SHORT_THOUGHT, is_opened_by_prompt=True
    ),
    "opened, with a parser": ThinkingModel(
        thought=SHORT_THOUGHT, is_opened_by_prompt=True, reasoning_field="reasoning"
    ),
}


@pytest.mark.anyio
@pytest.mark.parametrize("way", WAYS)
async def test_answers_behind_thoughts_are_judged(tmp_path: Path, way: str) -> None:
    """Where thoughts stand makes no difference: one tier gets a known share wrong, and that comes out."""
    models = alike(WAYS[way])
    wrong = KnownAnswers(wrong_share=0.3)
    models[FAST].answer_to = wrong
    async with connected(tmp_path, models) as (_, client):
        profile = await measured(client, tmp_path)
    known_wrong = sum(wrong.is_wrong(each.prompt) for each in TASKS)
    assert 0 < known_wrong < NUMBER_OF_TASKS
    assert profile.mode is ThinkingMode.ON
    assert profile.think_tokens > 0
    assert count_of(profile, FAST).worse == known_wrong
    assert count_of(profile, FAST).answered == NUMBER_OF_TASKS
    assert count_of(profile, BALANCED).worse == 0
    assert count_of(profile, FAST).cut == 0


@pytest.mark.anyio
@pytest.mark.parametrize("way", WAYS)
async def test_a_thought_that_is_cut_is_not_measured(tmp_path: Path, way: str) -> None:
    """Neither right nor wrong; the other tiers are not asked, as there is nothing to compare with."""
    async with connected(tmp_path, alike(replace(WAYS[way], thought=LONG_THOUGHT))) as (
        stack,
        client,
    ):
        profile = await measured(client, tmp_path, think_tokens=50)
        for tier in (FAST, BALANCED):
            count = count_of(profile, tier)
            assert count.is_unmeasured
            assert count.cut == NUMBER_OF_TASKS
            assert count.asked == 0
        assert not questions(stack, BALANCED)
        limits = {request["max_tokens"] for request in questions(stack, PRECISE)}
        assert limits == {50 + 8}


@pytest.mark.anyio
async def test_a_higher_limit_asks_for_the_cut_answers_alone(tmp_path: Path) -> None:
    models = alike(ThinkingModel(thought=SHORT_THOUGHT))
    models[FAST].thought = LONG_THOUGHT
    async with connected(tmp_path, models) as (stack, client):
        first = await measured(client, tmp_path, think_tokens=50)
        assert count_of(first, FAST).cut == NUMBER_OF_TASKS
        assert count_of(first, BALANCED).both == NUMBER_OF_TASKS
        for tier in STANDARD_TIERS:
            questions(stack, tier)
        again = await measured(client, tmp_path, think_tokens=50)
        assert again.counts == first.counts
        assert not questions(stack, FAST)
        higher = await measured(client, tmp_path, think_tokens=600)
        assert count_of(higher, FAST).both == NUMBER_OF_TASKS
        assert count_of(higher, FAST).cut == 0
        assert len(questions(stack, FAST)) == NUMBER_OF_TASKS
        assert not questions(stack, BALANCED)
        assert not questions(stack, PRECISE)


@pytest.mark.anyio
async def test_both_modes_are_measured_apart(tmp_path: Path) -> None:
    """The lower precision is wrong with thoughts and right without; decisions go by what the model does by default."""

    def answer_without_thought_alone(body: Mapping[str, Any]) -> ModelAnswer:
        wishes = body.get("chat_template_kwargs") or {SWITCH_NAMES[0]: True}
        text = "I am lost." if wishes[SWITCH_NAMES[0]] else "It is Paris."
        return ModelAnswer(text=text)

    models = alike(ThinkingModel(thought=SHORT_THOUGHT, has_switch=True))
    models[FAST].answer_to = answer_without_thought_alone
    async with connected(tmp_path, models) as (stack, client):
        profile = await measured(client, tmp_path, has_both_modes=True)
        assert profile.mode is ThinkingMode.ON
        assert count_of(profile, FAST).worse == NUMBER_OF_TASKS
        assert profile.other_mode is not None
        assert profile.other_mode.mode is ThinkingMode.OFF
        assert profile.other_mode.think_tokens == 0
        other = {count.tier: count for count in profile.other_mode.counts}
        assert other[FAST].both == NUMBER_OF_TASKS
        asked = questions(stack, FAST)
        switched = [request for request in asked if "chat_template_kwargs" in request]
        assert len(asked) == 2 * NUMBER_OF_TASKS
        assert len(switched) == NUMBER_OF_TASKS
        await measured(client, tmp_path, has_both_modes=True)
        assert not questions(stack, FAST)
        assert (await measured(client, tmp_path)).other_mode is None


@pytest.mark.anyio
async def test_a_model_that_does_not_think_has_no_mode(tmp_path: Path) -> None:
    async with connected(tmp_path, alike(ThinkingModel(thought=""))) as (stack, client):
        profile = await measured(client, tmp_path, has_both_modes=True)
        assert profile.mode is None
        assert profile.think_tokens == 0
        assert profile.other_mode is None
        limits = {request["max_tokens"] for request in questions(stack, FAST)}
        assert limits == {8}


@pytest.mark.anyio
async def test_thoughts_fit_beside_a_long_prompt(tmp_path: Path) -> None:
    """The limit is lowered to what the context has room for, and a task without room for its answer is left out."""
    words = "word " * 1200
    long = task(1, prompt=f"{words} What is the capital of France?")
    longest = task(2, prompt=f"{words * 3} What is the capital of France?")
    model = ThinkingModel(thought=SHORT_THOUGHT)
    async with connected(tmp_path, alike(model)) as (stack, client):
        profile = await measured(
            client, tmp_path, (long, longest), think_tokens=100_000
        )
        (request,) = questions(stack, FAST)
        prompt_tokens = len(request["messages"][0]["content"].split())
        contexts = [replica.spec.max_model_len for replica in stack.fleet.replicas]
    assert count_of(profile, FAST).both == 1
    assert 8 < request["max_tokens"] < min(contexts) - prompt_tokens
    assert request["max_tokens"] > min(contexts) - 2 * prompt_tokens


def right_calls(task: Task) -> ModelAnswer:
    """Return the calls that a task's check expects, with the arguments that must be there."""
    assert isinstance(task.check, CallsCheck)
    calls: list[ToolCall] = []
    for call in task.check.calls:
        arguments = {
            name: argument.values[0]
            for name, argument in call.arguments.items()
            if not argument.is_optional
        }
        calls.append(ToolCall(name=call.name, arguments=json.dumps(arguments)))
    return ModelAnswer(text="", tool_calls=tuple(calls))


TOOL_TASKS = tuple(
    task
    for task in read_tasks(SUITE_FOLDER)
    if isinstance(task.check, CallsCheck) and task.check.calls
)
RIGHT_CALLS = {task.prompt: right_calls(task) for task in TOOL_TASKS}


@pytest.mark.anyio
@pytest.mark.parametrize("thought", ["", SHORT_THOUGHT])
async def test_a_known_rate_of_wrong_calls_comes_out(
    tmp_path: Path, thought: str
) -> None:
    """With thoughts before the calls and without: a call that lacks an argument, or is of another function, is wrong."""
    models = alike(ThinkingModel(thought=thought, reasoning_field="reasoning"))
    wrong_shares = {FAST: 0.25, BALANCED: 0.1, PRECISE: 0.0}
    answers = {
        tier: KnownAnswers(RIGHT_CALLS, wrong_share=share, seed=len(tier))
        for tier, share in wrong_shares.items()
    }
    for tier, model in models.items():
        model.answer_to = answers[tier]
    async with connected(tmp_path, models) as (_, client):
        profile = await measured(client, tmp_path, TOOL_TASKS)
    for tier in (FAST, BALANCED):
        counts = [count for count in profile.counts if count.tier is tier]
        known_wrong = sum(answers[tier].is_wrong(task.prompt) for task in TOOL_TASKS)
        assert sum(count.answered for count in counts) == len(TOOL_TASKS)
        assert sum(count.worse for count in counts) == known_wrong
        assert abs(known_wrong / len(TOOL_TASKS) - wrong_shares[tier]) < 0.1


@pytest.mark.anyio
async def test_tasks_with_tools_are_left_out_where_a_tier_refuses_tools(
    tmp_path: Path,
) -> None:
    """An engine without a parser of calls does; that is said."""
    models = alike(ThinkingModel(thought=""))
    models[BALANCED].has_tool_parser = False
    said: list[str] = []
    plan = QualityPlan(
        tasks=(*TASKS, *TOOL_TASKS),
        name="tasks",
        journal=tmp_path / "journal.jsonl",
        scored=0,
    )
    async with connected(tmp_path, models) as (stack, client):
        profile = await measure_quality(
            client, plan, lambda step, *_: said.append(step)
        )
        asked = questions(stack, FAST)
    assert sum("tools" in request for request in asked) == 1
    assert count_of(profile, FAST).both == NUMBER_OF_TASKS
    assert any("tier balanced refuses tools" in step for step in said)
