"""Live answers that are compared while it is quiet, and sampled prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.router_stack import router_stack
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_live_answers_that_differ_are_told(tmp_path: Path) -> None:
    """In metrics and on the page; decisions go on as before."""
    async with router_stack(
        tmp_path, {"policy": {"live_check_share": 1.0}, "profile": {"idle_s": 0.1}}
    ) as stack:
        stack.engines["precise"].answer = ("Berlin",)

        async def live() -> list[dict[str, object]]:
            found: list[dict[str, object]] = (
                await stack.client.get(f"{stack.url}/policy")
            ).json()["live"]
            return found

        before = (await stack.generate(prompt="What is tea?")).headers
        seen = await until(live, "a live check")
        assert seen == [
            {
                "class": "chat",
                "tier": "fast",
                "checked": 1,
                "compared": 1,
                "differing": 1.0,
                "regret": 0.0,
            }
        ]
        metrics = (await stack.client.get(f"{stack.url}/metrics")).text
        assert 'qarr_live_differing_ratio{class="chat",tier="fast"} 1.0' in metrics
        after = (await stack.generate(prompt="What is tea?")).headers
        assert after["x-qarr-tier"] == before["x-qarr-tier"] == "fast"


async def test_prompts_are_sampled_only_when_asked(tmp_path: Path) -> None:
    """The file is the owner's alone; without the setting nothing is kept."""
    path = tmp_path / "kept" / "prompts.jsonl"
    options = {"telemetry": {"sampled_prompts": str(path), "prompt_share": 1.0}}
    async with router_stack(tmp_path, options) as stack:
        await stack.generate(prompt="What is tea?")
        await stack.client.post(f"{stack.url}/route", json={"prompt": "not served"})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"class": "chat", "text": "What is tea?"}
    ]
    assert path.stat().st_mode & 0o777 == 0o600
