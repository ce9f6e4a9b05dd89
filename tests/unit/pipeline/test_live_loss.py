"""Shadow evaluation, what the loss budget counts, and sampled prompts, in front of engines that can be told what to say."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from classifier import PromptClass
from router.policy.profiles import MIN_LIVE, Interval, Loss, QualityProfile, profile_name
from tests.unit.router_stack import Stack, router_stack
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.fakes.engine import Behaviour

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS


def profile(identities: dict[TierName, str | None], loss: float = 0.01) -> QualityProfile:
    """Return a profile in which the cheap tiers lose next to nothing."""
    one = Interval(mean=loss, low=loss, high=loss)
    losses = tuple(
        Loss(
            prompt_class=kind, tier=tier, prompts=9, tokens=99, top1_disagreement=one, kl_mean=one, kl_p95=one,
            perplexity_ratio=one, first_divergence=1, never_diverged=0,
        )
        for kind in PromptClass for tier in STANDARD_TIERS
    )  # fmt: skip
    return QualityProfile(
        created=datetime.now(UTC), model="m", checkpoints=identities, answer_tokens=8, top_k=10, prompts="x",
        losses=losses,
    )  # fmt: skip


@asynccontextmanager
async def profiled_stack(
    tmp_path: Path,
    policy: dict[str, Any],
    tiers: dict[str, Any] | None = None,
    *,
    more: dict[str, Any] | None = None,
    key: str = "",
    **behaviours: Behaviour,
) -> AsyncIterator[Stack]:
    """Run a router that has taken up a quality profile; ``tiers`` and ``more`` are settings, ``key`` is the client's."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    overrides = {
        "tiers": tiers or {},
        "policy": {"profiles": str(folder), "max_slowdown": 1e9, **policy},
        **(more or {}),
    }
    async with router_stack(tmp_path, overrides, **behaviours) as stack:
        if key:
            stack.client.headers["authorization"] = f"Bearer {key}"
        identities = {spec.name: spec.identity for spec in stack.fleet.specs}
        (folder / profile_name(identities)).write_text(profile(identities).model_dump_json())
        for _ in range(100):
            decision = (await stack.client.post(f"{stack.url}/route", json={"prompt": "hi"})).json()
            if decision["tiers"][0]["expected_loss"] is not None:
                break
            await asyncio.sleep(0.1)
        for behaviour in stack.engines.values():
            behaviour.requests.clear()
        yield stack


async def scored(stack: Stack) -> float:
    """Return how many live answers were scored."""
    metrics = (await stack.client.get(f"{stack.url}/metrics")).text
    found = re.findall(r"^qarr_live_checked_answers_total{[^}]*} ([0-9.]+)", metrics, re.MULTILINE)
    return sum(map(float, found))


async def test_a_class_that_loses_too_much_is_promoted_and_recovers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Live prompts are scored while it is quiet; over what is allowed the class moves up, and back when it is better."""
    caplog.set_level(logging.WARNING, "qarr.router")
    policy = {"live_check_share": 1.0, "max_loss": {"chat": 0.12}, "loss_budget": 1.0}
    async with profiled_stack(tmp_path, policy) as stack:
        stack.engines[PRECISE].rank = 2  # precise would have said something else, every time

        async def tier() -> str:
            return (await stack.generate(prompt="Hello, how are you today?")).headers["x-qarr-tier"]

        async def checked(count: float) -> None:
            # One is dropped if an engine does not answer its probe in time just then, so this waits for progress only.
            seen, since = await scored(stack), time.monotonic()
            while seen < count and time.monotonic() < since + 5:
                await asyncio.sleep(0.1)
                if (now := await scored(stack)) > seen:
                    seen, since = now, time.monotonic()

        async def until(wanted: str) -> None:
            # How many answers that takes is chance: half of a promoted class's are scored on the tier that it left.
            before = await scored(stack)
            while [await tier() for _ in range(2 * MIN_LIVE)][-1] != wanted:
                await checked(before + 2 * MIN_LIVE)
                before = await scored(stack)

        assert await tier() == "fast"
        await until("balanced")
        assert "class chat loses 1.000 on fast in live answers, 0.120 is allowed: it gets balanced" in caplog.text
        why = (await stack.client.post(f"{stack.url}/route", json={"prompt": "Hello, how are you today?"})).json()
        assert "loses too much in live answers" in why["tiers"][0]["verdict"]
        metrics = (await stack.client.get(f"{stack.url}/metrics")).text
        assert 'qarr_live_loss_ratio{class="chat",tier="fast"} 1.0' in metrics
        assert 'qarr_promoted_classes{class="chat",tier="balanced"} 1.0' in metrics
        stack.engines[PRECISE].rank = 1  # and now it agrees, every time
        await until("fast")
        assert "it gets fast again" in caplog.text
        assert "qarr_promoted_classes{" not in (await stack.client.get(f"{stack.url}/metrics")).text


@pytest.mark.parametrize("way", ["broken", "left"])
async def test_an_answer_that_never_came_does_not_count_against_the_budget(tmp_path: Path, way: str) -> None:
    """While it is open the budget counts what is expected of it; afterwards nothing of that is left."""
    async with profiled_stack(tmp_path, {}) as stack:

        async def mean() -> float | None:
            found: float | None = (await stack.client.get(f"{stack.url}/tiers")).json()["loss_budget"]["mean"]
            return found

        for engine in stack.engines.values():
            engine.delay_s, engine.status = (30.0, 200) if way == "left" else (0.0, 500)
        request = asyncio.create_task(stack.generate(prompt="Hello, how are you today?"))
        if way == "left":
            while await mean() is None:
                await asyncio.sleep(0.01)
            request.cancel()
        else:
            assert (await request).status_code >= 500
        await asyncio.wait([request])
        while stack.leases():
            await asyncio.sleep(0.01)
        assert await mean() is None


async def test_prompts_are_sampled_only_when_asked(tmp_path: Path) -> None:
    """The file is the owner's alone, and feeds the profile; without the setting nothing is kept."""
    path = tmp_path / "kept" / "prompts.jsonl"
    options = {"telemetry": {"sampled_prompts": str(path), "prompt_share": 1.0}}
    async with router_stack(tmp_path, options) as stack:
        await stack.generate(prompt="What is tea?")
        await stack.client.post(f"{stack.url}/route", json={"prompt": "not served"})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"class": "chat", "text": "What is tea?"}]
    assert path.stat().st_mode & 0o777 == 0o600
