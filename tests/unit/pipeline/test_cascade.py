"""The confidence check and the continuous check, in front of engines that can be told how sure they are."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from classifier import PromptClass
from router.policy.profiles import MIN_LIVE, Certainty, Interval, Loss, QualityProfile, profile_name
from tests.fakes.engine import Behaviour
from tests.unit.router_stack import Stack, events, router_stack
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS
WORDS = tuple(
    f"{word} "
    for word in [
        "Paris",
        "has",
        "a",
        "river",
        "and",
        "many",
        "old",
        "stone",
        "bridges",
        "where",
        "people",
        "walk",
        "at",
        "night",
        "in",
        "summer",
        "rain",
        "snow",
    ]
)


def profile(identities: dict[TierName, str | None], loss: float = 0.01) -> QualityProfile:
    """Return a profile in which the cheap tiers lose next to nothing, and a fifth of their answers are unsure."""
    one = Interval(mean=loss, low=loss, high=loss)
    losses = tuple(
        Loss(
            prompt_class=kind, tier=tier, prompts=9, tokens=99, top1_disagreement=one, kl_mean=one, kl_p95=one,
            perplexity_ratio=one, first_divergence=1, never_diverged=0,
        )
        for kind in PromptClass for tier in STANDARD_TIERS
    )  # fmt: skip
    certainties = tuple(
        Certainty(tier=tier, logprob=-2.0 if n < 5 else -0.5, disagreement=0.1)
        for tier in (FAST, BALANCED)
        for n in range(25)
    )
    return QualityProfile(
        created=datetime.now(UTC), model="m", checkpoints=identities, answer_tokens=8, top_k=10, prompts="x",
        losses=losses, certainties=certainties,
    )  # fmt: skip


@asynccontextmanager
async def profiled_stack(
    tmp_path: Path,
    policy: dict[str, Any],
    tracing: TracerProvider | None = None,
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
    async with router_stack(tmp_path, overrides, tracing, **behaviours) as stack:
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


async def test_an_unsure_answer_is_begun_again_higher_up(tmp_path: Path) -> None:
    """A tier that is unsure of its first tokens is replaced before the first byte; the headers and the trace say so."""
    exporter = InMemorySpanExporter()
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(exporter))
    unsure = Behaviour(answer=WORDS, certainty=-1.9)
    async with profiled_stack(tmp_path, {"check_share": 0.2}, tracing, fast=unsure, balanced=Behaviour()) as stack:
        answer = await stack.generate(prompt="Hello, how are you today?")
        assert answer.headers["x-qarr-tier"] in {"balanced", "precise"}  # whichever was measured to be cheaper
        assert "escalated from fast, which was unsure" in answer.headers["x-qarr-reason"]
        assert "-1.90" in answer.headers["x-qarr-reason"]
        found = events(answer.text)
        assert "".join(data["text"] for name, data in found if name == "message") == "The capital of France is Paris."
        assert found[-1][1]["tier"] == answer.headers["x-qarr-tier"]
        assert stack.leases() == 0
    span = next(s for s in exporter.get_finished_spans() if s.name == "POST /generate")
    event = next(e for e in span.events if e.name == "qarr.escalation")
    assert dict(event.attributes or {})["qarr.escalated_to"] == answer.headers["x-qarr-tier"]


async def test_a_sure_answer_is_whole_and_unchanged(tmp_path: Path) -> None:
    """What was held comes first, nothing is lost or repeated, and a stock client sees no log-probabilities."""
    sure = Behaviour(answer=WORDS, certainty=-0.2)
    async with profiled_stack(tmp_path, {"check_share": 0.2}, fast=sure) as stack:
        answer = await stack.generate(prompt="Hello, how are you today?", max_tokens=20)
        assert answer.headers["x-qarr-tier"] == "fast"
        found = events(answer.text)
        assert "".join(data["text"] for name, data in found if name == "message") == "".join(WORDS)
        assert found[-1][1]["usage"]["completion_tokens"] == len(WORDS)
        body = {"model": "auto", "messages": [{"role": "user", "content": "Hello, how are you today?"}], "stream": True,
                "max_tokens": 20}  # fmt: skip
        relayed = await stack.client.post(f"{stack.url}/v1/chat/completions", json=body)
        assert stack.engines[FAST].requests[-1]["logprobs"] is True
        chunks = [json.loads(line[6:]) for line in relayed.text.splitlines() if line.startswith("data: {")]
        assert not any(choice.get("logprobs") for chunk in chunks for choice in chunk["choices"])
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        assert text == "".join(WORDS)
        asked = await stack.client.post(f"{stack.url}/v1/chat/completions", json={**body, "logprobs": True})
        assert '"logprobs":{' in asked.text  # a caller's own are left alone
        assert stack.leases() == 0


async def test_no_time_no_check(tmp_path: Path) -> None:
    """Held tokens go out when the time for them is over, though the tier is slow to show whether it is sure."""
    slow = Behaviour(answer=WORDS, certainty=-1.9, delay_s=0.6)
    async with profiled_stack(tmp_path, {"check_share": 0.2, "check_wait_s": 0.5}, fast=slow) as stack:
        answer = await stack.generate(prompt="Hello, how are you today?", max_tokens=6)
        assert answer.headers["x-qarr-tier"] == "fast"
        text = "".join(data["text"] for name, data in events(answer.text) if name == "message")
        assert text == "".join(WORDS[:6])
        assert 450 < events(answer.text)[-1][1]["ttft_ms"] < 5000  # what the caller saw


async def test_escalation_that_fails_keeps_the_first_answer(tmp_path: Path) -> None:
    """No higher tier answers: the unsure answer is better than none."""
    unsure = Behaviour(answer=WORDS, certainty=-1.9)
    broken = {"balanced": Behaviour(status=500), "precise": Behaviour(status=500)}
    async with profiled_stack(tmp_path, {"check_share": 0.2}, fast=unsure) as stack:
        for name, behaviour in broken.items():
            stack.engines[TierName(name)].status = behaviour.status
        answer = await stack.generate(prompt="Hello, how are you today?", max_tokens=20)
        assert answer.headers["x-qarr-tier"] == "fast"
        text = "".join(data["text"] for name, data in events(answer.text) if name == "message")
        assert text == "".join(WORDS)
        assert stack.leases() == 0


@pytest.mark.parametrize("fault", ["break_after", "error_after"])
async def test_a_tier_that_breaks_while_it_is_held_is_replaced(tmp_path: Path, fault: str) -> None:
    """Nothing has gone out, so another tier answers in full, on both endpoints."""
    async with profiled_stack(tmp_path, {"check_share": 0.2}, fast=Behaviour(answer=WORDS, certainty=-0.1)) as stack:
        setattr(stack.engines[FAST], fault, 3)
        answer = await stack.generate(prompt="Hello, how are you today?")
        assert answer.headers["x-qarr-tier"] != "fast"
        assert events(answer.text)[-1][0] == "done"
        body = {"model": "auto", "messages": [{"role": "user", "content": "Hello, how are you?"}], "stream": True}
        relayed = await stack.client.post(f"{stack.url}/v1/chat/completions", json=body)
        assert relayed.status_code == 200
        assert relayed.text.endswith("data: [DONE]\n\n")
        assert stack.leases() == 0


async def test_a_client_that_leaves_while_it_is_held_frees_the_engine(tmp_path: Path) -> None:
    """The lease and the engine's request end with the client."""
    async with profiled_stack(
        tmp_path, {"check_share": 0.2, "check_wait_s": 30}, fast=Behaviour(answer=WORDS)
    ) as stack:
        stack.engines[FAST].delay_s = 0.5
        with pytest.raises(httpx.ReadTimeout):
            await stack.client.post(f"{stack.url}/generate", json={"prompt": "Hello, how are you?"}, timeout=1.2)
        for _ in range(100):
            if stack.leases() == 0 and stack.engines[FAST].running == 0:
                break
            await asyncio.sleep(0.05)
        assert (stack.leases(), stack.engines[FAST].running) == (0, 0)


async def test_hints_and_requirements_are_not_checked(tmp_path: Path) -> None:
    """Who asked for a tier gets it; and without the switch nothing is asked of engines that callers did not ask."""
    unsure = Behaviour(answer=WORDS, certainty=-1.9)
    async with profiled_stack(tmp_path, {"check_share": 0.2}, fast=unsure) as stack:
        assert (await stack.generate(prompt="Hello!", tier="fast")).headers["x-qarr-tier"] == "fast"
        assert "logprobs" not in stack.engines[FAST].requests[-1]


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
