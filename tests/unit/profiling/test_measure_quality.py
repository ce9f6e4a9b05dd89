"""Counting answers through a router: the journal, what is asked next, and what is not asked at all."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from classifier import PromptClass
from router.policy.profiles import ProfileError, QualityProfile
from router.profiling.measure_quality import QualityPlan, measure_quality
from router.profiling.router_client import RouterClient
from router.profiling.scaled_context import scaled_tasks
from router.profiling.tasks import Task
from tests.unit.router_stack import Stack, router_stack
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName
from tiers.verification.thinking import QUESTION

if TYPE_CHECKING:
    from router.policy.losses import Kind

FAST, BALANCED, PRECISE = STANDARD_TIERS
PARIS = {"type": "contains", "all": ["Paris"]}  # what fakes answer
NO_MATCH = {"type": "contains", "all": ["Berlin"]}


def task(name: str, check: dict[str, Any] = PARIS, **more: Any) -> Task:
    fields = {
        "class": "chat",
        "complexity": "trivial",
        "prompt": f"What is {name}?",
        "max_tokens": 8,
    }
    return Task.model_validate({"id": name, "check": check, **fields, **more})


TASKS = (task("one"), task("two", **{"class": "code", "complexity": "complex"}))


@asynccontextmanager
async def connected(tmp_path: Path) -> AsyncIterator[tuple[Stack, RouterClient]]:
    async with router_stack(tmp_path) as stack, RouterClient(stack.url, "") as client:
        yield stack, client


async def measured(
    client: RouterClient, tmp_path: Path, tasks: tuple[Task, ...] = TASKS, **plan: Any
) -> QualityProfile:
    quality_plan = QualityPlan(
        tasks=tasks, name="two tasks", journal=tmp_path / "journal.jsonl", **plan
    )
    return await measure_quality(client, quality_plan, lambda *_: None)


def flips(
    profile: QualityProfile,
) -> dict[tuple[TierName, PromptClass], tuple[int, int, int]]:
    return {
        (count.tier, count.prompt_class): tuple(count.flips) for count in profile.counts
    }


def tasks_asked(tier: TierName, profile: QualityProfile) -> int:
    return sum(count.asked for count in profile.counts if count.tier is tier)


def is_about_thinking(request: dict[str, Any]) -> bool:
    """Tell whether a request is the question by which is found out whether the model thinks."""
    return any(
        message["content"] == QUESTION for message in request.get("messages", ())
    )


def asked(stack: Stack) -> dict[TierName, int]:
    """Return the number of requests to each tier since the last call, without the question about thinking."""
    request_counts = {
        tier: sum(not is_about_thinking(request) for request in engine.requests)
        for tier, engine in stack.engines.items()
    }
    for engine in stack.engines.values():
        engine.requests.clear()
    return request_counts


@pytest.mark.anyio
async def test_an_adapter_is_measured_on_the_tiers_that_offer_it(
    tmp_path: Path,
) -> None:
    """It answers everywhere, on the reference too; what the model itself lost is no part of it."""
    async with connected(tmp_path) as (stack, client):
        await measured(client, tmp_path)
        asked(stack)
        with pytest.raises(
            ProfileError, match="tier precise does not offer the adapter support"
        ):
            await measured(client, tmp_path, adapter="support")
        for tiers, wrong in (
            (["precise"], "no tier but precise offers"),
            (["fast"], None),
        ):
            body = {"name": "support", "path": "/x", "tiers": tiers}
            (
                await stack.client.post(f"{stack.url}/admin/adapters", json=body)
            ).raise_for_status()
            if wrong:
                with pytest.raises(ProfileError, match=wrong):
                    await measured(client, tmp_path, adapter="support")
        profile = await measured(client, tmp_path, adapter="support")
        models = [
            request["model"]
            for engine in stack.engines.values()
            for request in engine.requests
        ]
        assert profile.adapter == "support"
        assert set(models) == {"support"}
        assert {count.tier for count in profile.counts} == {FAST}
        assert asked(stack)[BALANCED] == 0


@pytest.mark.anyio
async def test_each_task_is_answered_once_a_tier_and_some_answers_are_scored(
    tmp_path: Path,
) -> None:
    async with connected(tmp_path) as (stack, client):
        profile = await measured(client, tmp_path)
        assert asked(stack) == {FAST: 2, BALANCED: 2, PRECISE: 2 + 4}
        kinds = PromptClass.CHAT, PromptClass.CODE
        assert flips(profile) == {
            (tier, kind): (1, 0, 0) for tier in (FAST, BALANCED) for kind in kinds
        }
        assert {
            count.diagnosis.disagreement for count in profile.counts if count.diagnosis
        } == {0}
        assert profile.whole is True
        assert profile.tasks == "two tasks"
        (tmp_path / "journal.jsonl").unlink()
        asked(stack)
        await measured(client, tmp_path, scored=0)
        assert asked(stack) == {FAST: 2, BALANCED: 2, PRECISE: 2}
        assert stack.leases() == 0


@pytest.mark.anyio
async def test_the_journal_saves_what_was_judged(tmp_path: Path) -> None:
    """Of an interrupted measurement the rest is asked; a line that was cut off, or is of other weights, counts as the rest.

    What is asked then is kept on lines of its own.
    """
    async with connected(tmp_path) as (stack, client):
        first = await measured(client, tmp_path)
        asked(stack)
        again = await measured(client, tmp_path)
        assert again.counts == first.counts
        assert sum(asked(stack).values()) == 0
        journal = tmp_path / "journal.jsonl"
        lines = journal.read_text().splitlines()
        kept = [
            row for row in map(json.loads, lines) if row["answer"]["tier"] != "fast"
        ]
        next(row for row in kept if row["answer"]["tier"] == "balanced")["setting"] = (
            "other weights"
        )
        journal.write_text("\n".join(map(json.dumps, kept)) + "\n" + lines[0][:30])
        assert (await measured(client, tmp_path)).counts == first.counts
        assert asked(stack) == {FAST: 2, BALANCED: 1, PRECISE: 3}  # scores
        assert (await measured(client, tmp_path)).counts == first.counts
        assert sum(asked(stack).values()) == 0


@pytest.mark.anyio
async def test_worse_and_better_answers_are_counted(tmp_path: Path) -> None:
    async with connected(tmp_path) as (stack, client):
        stack.engines[FAST].answer = ("Berlin",)
        profile = await measured(client, tmp_path, (*TASKS, task("three", NO_MATCH)))
        assert flips(profile) == {
            (FAST, PromptClass.CHAT): (2, 1, 1), (FAST, PromptClass.CODE): (1, 1, 0),
            (BALANCED, PromptClass.CHAT): (1, 0, 0), (BALANCED, PromptClass.CODE): (1, 0, 0),
        }  # fmt: skip


@pytest.mark.anyio
async def test_what_reference_and_lowest_tier_get_wrong_is_asked_of_no_other(
    tmp_path: Path,
) -> None:
    async with connected(tmp_path) as (stack, client):
        profile = await measured(client, tmp_path, (task("one", NO_MATCH),), scored=0)
        assert asked(stack) == {FAST: 1, BALANCED: 0, PRECISE: 1}
        assert flips(profile) == {
            (tier, PromptClass.CHAT): (0, 0, 0) for tier in (FAST, BALANCED)
        }
        await measured(client, tmp_path, (task("one", NO_MATCH),), scored=0)
        assert sum(asked(stack).values()) == 0


def prompts_at(stack: Stack, tier: TierName) -> set[str]:
    """Return the prompts of all chats that a tier's engine got."""
    return {
        body["messages"][0]["content"]
        for body in stack.engines[tier].requests
        if "messages" in body
    }


@pytest.mark.anyio
async def test_tasks_as_long_as_the_context_are_asked_where_they_fit(
    tmp_path: Path,
) -> None:
    """The shortest context of the tiers counts, and an answer has to fit it beside its prompt."""
    async with connected(tmp_path) as (stack, client):
        context = min(spec.max_model_len for spec in stack.fleet.specs)
        too_long = task("long", prompt="word " * context, max_tokens=8)
        tasks = (*TASKS, too_long)
        profile = await measured(client, tmp_path, tasks, scored=0, fills_context=True)
        prompts = prompts_at(stack, PRECISE) & prompts_at(stack, FAST)
        assert too_long.prompt not in prompts
        asked_scaled = [
            task for task in scaled_tasks(context) if task.prompt in prompts
        ]
        refused_scaled = [
            task for task in scaled_tasks(context) if task.prompt not in prompts
        ]
        assert asked_scaled
        # the router counts the tokens, so a prompt near the context may be refused
        longest_asked = max(len(task.prompt) for task in asked_scaled)
        assert all(len(task.prompt) >= longest_asked for task in refused_scaled)
        # of a task that one tier refuses, the reference's answer counts if it came before the refusal
        answered_at_most = [
            task
            for task in scaled_tasks(context)
            if task.prompt in prompts_at(stack, PRECISE)
        ]
        scaled_count = tasks_asked(FAST, profile) - len(TASKS)
        assert len(asked_scaled) <= scaled_count <= len(answered_at_most)


@pytest.mark.anyio
async def test_what_decisions_depend_on_is_asked_first_and_the_rest_not_at_all(
    tmp_path: Path,
) -> None:
    """By the worth that the policy gives a kind on any tier; what is known is told on the way."""
    tasks = tuple(
        task(f"{kind} {n}", **{"class": kind})
        for kind in ("chat", "math", "code")
        for n in range(30)
    )
    kept_profiles: list[QualityProfile] = []
    worth_on_fast = {
        PromptClass.CHAT: 1.0,
        PromptClass.MATH: 2.0,
        PromptClass.CODE: 0.0,
    }

    def worth(tier: TierName, kind: Kind) -> float:
        return worth_on_fast[kind[0]] if tier is FAST else 0.0

    async with connected(tmp_path) as (stack, client):
        profile = await measured(
            client,
            tmp_path,
            tasks,
            scored=0,
            parallel=1,
            keep=kept_profiles.append,
            worth=worth,
        )
        prompts = [
            request["messages"][0]["content"]
            for request in stack.engines[FAST].requests
        ]
    assert {*prompts} == {asked_task.prompt for asked_task in tasks[:60]}
    assert sum("math" in prompt for prompt in prompts[:18]) == 12, (
        "twice as often, as it is worth twice as much"
    )
    assert not any(profile_so_far.whole for profile_so_far in kept_profiles)
    assert [tasks_asked(FAST, profile_so_far) for profile_so_far in kept_profiles] == [
        20,
        40,
        60,
    ]
    assert profile.whole


@pytest.mark.anyio
async def test_code_is_run_only_if_that_is_asked_for(tmp_path: Path) -> None:
    """Else tasks that need it are left out, as are those that are too long for a tier."""
    ran = task("two", {"type": "runs", "test": "assert f(2) == 4"})
    runs_seen: list[tuple[str, str]] = []

    async def runs(answer: str, test: str) -> bool:
        runs_seen.append((answer, test))
        return False

    async with connected(tmp_path) as (stack, client):
        profile = await measured(
            client, tmp_path, (ran, task("long " * 5000)), scored=0
        )
        assert profile.counts == ()
        assert sum(asked(stack).values()) == 0
        await measured(client, tmp_path, (ran,), scored=0, run_code=runs)
        assert (
            runs_seen == [("The capital of France is Paris.", "assert f(2) == 4")] * 2
        )


@pytest.mark.anyio
async def test_disagreement_is_measured(tmp_path: Path) -> None:
    """The reference ranks every token of every answer second."""
    async with connected(tmp_path) as (stack, client):
        stack.engines[PRECISE].rank = 2
        counts = (await measured(client, tmp_path)).counts
        assert {
            count.diagnosis.disagreement for count in counts if count.diagnosis
        } == {1.0}


@pytest.mark.anyio
async def test_without_the_reference_nothing_is_measured(tmp_path: Path) -> None:
    async with connected(tmp_path) as (stack, client):
        for replica in stack.fleet.replicas:
            if replica.spec.name is PRECISE:
                replica.mark(ReplicaStatus.DRAINING)
        with pytest.raises(
            ProfileError,
            match="tier precise is not ready, and the others are measured against it",
        ):
            await measured(client, tmp_path)
        assert sum(asked(stack).values()) == 0


@pytest.mark.anyio
async def test_a_tier_that_refuses_ends_the_measurement(tmp_path: Path) -> None:
    """One error, of the tier that refused; what was judged before is in the journal."""
    async with connected(tmp_path) as (stack, client):
        stack.engines[BALANCED].status = 400
        with pytest.raises(ProfileError, match="balanced answered HTTP 400"):
            await measured(client, tmp_path)
        assert stack.leases() == 0


@pytest.mark.anyio
async def test_the_profile_holds_no_text(tmp_path: Path) -> None:
    async with connected(tmp_path) as (_, client):
        profile = await measured(client, tmp_path)
        assert not any(
            text in profile.model_dump_json() for text in ("What is", "Paris")
        )
