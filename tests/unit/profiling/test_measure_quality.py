"""Measuring loss through a router: prompts, the journal, and what is asked only once."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from classifier import PromptClass
from router.policy.profiles import ProfileError
from router.profiling.client import RouterClient, connect
from router.profiling.measure_quality import Plan, measure, read_prompts
from router.profiling.profile_files import PROMPTS
from tests.unit.router_stack import Stack, router_stack
from tiers.spec import STANDARD_TIERS, ReplicaState, TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from router.policy.profiles import QualityProfile

FAST, BALANCED, PRECISE = STANDARD_TIERS
TEXTS = ("What is the capital of France?", "Write a SQL query for the ten best customers")


def prompts_file(folder: Path, *rows: Any) -> Path:
    """Write prompts; strings are lines as they are."""
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), "utf-8")
    return path


def test_prompts_are_classified_where_they_have_no_class(tmp_path: Path) -> None:
    """Empty lines are skipped, and a prompt that is there twice counts once."""
    path = prompts_file(tmp_path, {"text": TEXTS[1]}, "", {"text": "hi", "class": "math"}, "  ", {"text": TEXTS[1]})
    found = read_prompts(path, None)
    assert [(prompt.text, prompt.prompt_class) for prompt in found] == [
        (TEXTS[1], PromptClass.CODE),
        ("hi", PromptClass.MATH),
    ]
    assert len({prompt.digest for prompt in found}) == 2


def test_as_many_of_each_class_as_are_wanted(tmp_path: Path) -> None:
    rows = [{"text": f"{kind} {n}", "class": kind} for n in range(3) for kind in ("chat", "code")]
    found = read_prompts(prompts_file(tmp_path, *rows), 2)
    assert [prompt.text for prompt in found] == ["chat 0", "code 0", "chat 1", "code 1"]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '"hi"', "null", "{}", '{"text": null}', '{"text": 5}', '{"text": 5, "class": "chat"}',
     '{"text": "hi", "class": "poetry"}'],
)  # fmt: skip
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = prompts_file(tmp_path, {"text": "hi"}, line)
    with pytest.raises(ProfileError, match=r'prompts\.jsonl line 2: expected \{"text".*one of chat, code'):
        read_prompts(path, None)


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="has no prompts"):
        read_prompts(prompts_file(tmp_path, "", ""), None)
    with pytest.raises(ProfileError, match="cannot be read"):
        read_prompts(tmp_path / "none", None)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileError, match="cannot be read"):
        read_prompts(tmp_path / "binary", None)


def test_the_built_in_prompts_are_of_every_class_but_unknown() -> None:
    prompts = read_prompts(PROMPTS, None)
    assert {prompt.prompt_class for prompt in prompts} == set(PromptClass) - {PromptClass.UNKNOWN}
    assert len(prompts) == 64


@asynccontextmanager
async def connected(tmp_path: Path) -> AsyncIterator[tuple[Stack, RouterClient]]:
    """Run a router, with a client that measures."""
    async with router_stack(tmp_path) as stack, connect(stack.url, "") as client:
        yield stack, client


async def measured(
    client: RouterClient, tmp_path: Path, answer_tokens: int = 8, adapter: str | None = None
) -> QualityProfile:
    """Measure two prompts."""
    prompts = read_prompts(prompts_file(tmp_path, *({"text": text} for text in TEXTS)), None)
    plan = Plan(prompts, answer_tokens, None, tmp_path / "journal.jsonl", adapter)
    return await measure(client, plan, lambda *_: None)


def asked(stack: Stack) -> dict[TierName, int]:
    """Return the requests that each engine has had, and forget them."""
    found = {tier: len(engine.requests) for tier, engine in stack.engines.items()}
    for engine in stack.engines.values():
        engine.requests.clear()
    return found


@pytest.mark.anyio
async def test_an_adapter_is_measured_on_the_tiers_that_offer_it(tmp_path: Path) -> None:
    """It answers everywhere, on the reference too; what the model itself lost is no part of it."""
    async with connected(tmp_path) as (stack, client):
        await measured(client, tmp_path)
        asked(stack)
        with pytest.raises(ProfileError, match="tier precise does not offer the adapter support"):
            await measured(client, tmp_path, adapter="support")
        for tiers, wrong in ((["precise"], "no tier but precise offers"), (["fast"], None)):
            body = {"name": "support", "path": "/x", "tiers": tiers}
            (await stack.client.post(f"{stack.url}/admin/adapters", json=body)).raise_for_status()
            if wrong:
                with pytest.raises(ProfileError, match=wrong):
                    await measured(client, tmp_path, adapter="support")
        profile = await measured(client, tmp_path, adapter="support")
        models = [request["model"] for engine in stack.engines.values() for request in engine.requests]
        assert (profile.adapter, set(models)) == ("support", {"support"})
        assert {loss.tier for loss in profile.losses} == {FAST, PRECISE}
        assert asked(stack)[BALANCED] == 0


@pytest.mark.anyio
async def test_each_prompt_is_answered_once_a_tier_and_equal_answers_are_scored_once(tmp_path: Path) -> None:
    """Fakes answer alike: two prompts are two answers a tier, and two scores on the reference."""
    async with connected(tmp_path) as (stack, client):
        profile = await measured(client, tmp_path)
        assert asked(stack) == {FAST: 2, BALANCED: 2, PRECISE: 2 + 2}
        assert {loss.tier for loss in profile.losses} == set(STANDARD_TIERS)
        assert all(loss.top1_disagreement.mean == 0 for loss in profile.losses)
        assert stack.leases() == 0


@pytest.mark.anyio
async def test_the_journal_saves_what_was_judged(tmp_path: Path) -> None:
    """Of an interrupted measurement the rest is asked; a line that was cut off counts as the rest."""
    async with connected(tmp_path) as (stack, client):
        first = await measured(client, tmp_path)
        asked(stack)
        again = await measured(client, tmp_path)
        assert (again.losses, again.prompts) == (first.losses, first.prompts)
        assert sum(asked(stack).values()) == 0
        journal = tmp_path / "journal.jsonl"
        whole = journal.read_text().splitlines()
        kept = [row for row in map(json.loads, whole) if row["score"]["tier"] != "fast"]
        kept[0]["score"]["certainty"] = -1.0  # as an earlier release wrote it
        journal.write_text("\n".join(map(json.dumps, kept)) + "\n" + whole[0][:30] + "\n")
        assert (await measured(client, tmp_path)).losses == first.losses
        assert asked(stack) == {FAST: 2, BALANCED: 0, PRECISE: 4}  # its own answers are compared with, and it scores
        await measured(client, tmp_path, answer_tokens=4)  # another setting: nothing of the journal counts
        assert asked(stack) == {FAST: 2, BALANCED: 2, PRECISE: 4}


@pytest.mark.anyio
async def test_disagreement_is_measured(tmp_path: Path) -> None:
    """The reference ranks every token of every answer second, its own included."""
    async with connected(tmp_path) as (stack, client):
        stack.engines[PRECISE].rank = 2
        assert {loss.top1_disagreement.mean for loss in (await measured(client, tmp_path)).losses} == {1.0}


@pytest.mark.anyio
async def test_without_the_reference_nothing_is_measured(tmp_path: Path) -> None:
    async with connected(tmp_path) as (stack, client):
        for replica in stack.fleet.replicas:
            if replica.spec.name is PRECISE:
                replica.mark(ReplicaState.DRAINING)
        with pytest.raises(ProfileError, match="tier precise is not ready, and the others are measured against it"):
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
    """Neither of prompts nor of answers."""
    async with connected(tmp_path) as (_, client):
        profile = await measured(client, tmp_path)
        words = [word for text in TEXTS for word in text.split() if len(word) > 4]
        assert not any(word in profile.model_dump_json() for word in words)
