"""More than three tiers, and fewer: in both APIs, decisions, keys, metrics, the fleet's state and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.auth.api_keys import add_key
from router.section import SettingsError
from router.settings import load_settings
from tests.unit.router_stack import Stack, events, router_stack
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS
INT8 = TierName("int8")
NVFP4 = TierName("nvfp4")
ADDED = {
    "int8": {
        "urls": ["http://127.0.0.1:1"],
        "precision": "int8",
        "max_model_len": 3000,
    },
    "nvfp4": {"urls": ["http://127.0.0.1:2"], "precision": "nvfp4"},
}


def five(**settings: Any) -> dict[str, Any]:
    return {"tiers": ADDED, **settings}


async def get_json(stack: Stack, path: str) -> Any:
    return (await stack.client.get(f"{stack.url}{path}")).json()


async def test_an_added_tier_serves_both_apis(tmp_path: Path) -> None:
    """Hint, model name and header choose the tier; headers, events and /route name it; its precision orders it."""
    async with router_stack(tmp_path, five()) as stack:
        streamed = await stack.generate(tier="int8")
        assert streamed.status_code == 200
        assert streamed.headers["x-qarr-tier"] == "int8"
        assert streamed.headers["x-qarr-reason"] == "hint int8"
        assert events(streamed.text)[-1][1]["tier"] == "int8"
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        by_model = await stack.client.post(
            f"{stack.url}/v1/chat/completions", json={**chat, "model": "nvfp4"}
        )
        assert by_model.headers["x-qarr-tier"] == "nvfp4"
        by_header = await stack.client.post(
            f"{stack.url}/v1/chat/completions",
            json=chat,
            headers={"x-qarr-tier": "int8"},
        )
        assert by_header.headers["x-qarr-tier"] == "int8"
        route = await stack.client.post(
            f"{stack.url}/route", json={"prompt": "hi", "tier": "int8"}
        )
        assert [report["tier"] for report in route.json()["tiers"]] == [
            "fast",
            "nvfp4",
            "balanced",
            "int8",
            "precise",
        ]
        models = (await get_json(stack, "/v1/models"))["data"]
        lengths = {model["id"]: model["max_model_len"] for model in models}
        assert lengths["int8"] == 3000
        assert lengths["nvfp4"] == 4096
        assert len(stack.engines[INT8].requests) == 2


async def test_it_is_told_everywhere(tmp_path: Path) -> None:
    """/tiers, /requests, /health and metrics name the added tier, with a series for every pair from the start."""
    async with router_stack(tmp_path, five()) as stack:
        await stack.generate(tier="int8")
        tiers = (await get_json(stack, "/tiers"))["tiers"]
        assert [tier["tier"] for tier in tiers] == [
            "fast",
            "nvfp4",
            "balanced",
            "int8",
            "precise",
        ]
        assert all(tier["replicas"][0]["state"] == "ready" for tier in tiers)
        (record,) = (await get_json(stack, "/requests"))["requests"]
        assert record["served_by"] == "int8"
        assert record["replica"] == "int8-0"
        metrics = (await stack.client.get(f"{stack.url}/metrics")).text
        for series in (
            'qarr_tier_ready_replicas{tier="int8"} 1.0',
            'qarr_continuations_total{from_tier="int8",to_tier="nvfp4"} 0.0',
            'qarr_continuations_total{from_tier="precise",to_tier="int8"} 0.0',
        ):
            assert series in metrics
        (replica,) = [
            replica for replica in stack.fleet.replicas if replica.spec.name == INT8
        ]
        replica.mark(ReplicaStatus.FAILED)
        health = await get_json(stack, "/health")
        assert health["status"] == "degraded"
        assert "tier int8 is failed" in health["reasons"]


async def test_a_tier_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    """The refusal names the tiers that exist, whether a body, a header or a model name asked for another."""
    async with router_stack(tmp_path, five()) as stack:
        (error,) = (await stack.generate(tier="int9")).json()["errors"]
        assert error["field"] == "tier"
        assert error["problem"] == "there is no tier 'int9'"
        assert error["allowed"] == "auto, fast, balanced, int8, nvfp4 or precise"
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        url = f"{stack.url}/v1/chat/completions"
        by_header = await stack.client.post(
            url, json=chat, headers={"x-qarr-tier": "int9"}
        )
        assert by_header.status_code == 400
        assert "int8" in by_header.text
        by_model = await stack.client.post(url, json={**chat, "model": "int9"})
        assert by_model.status_code == 404
        assert "int8" in by_model.text


async def test_a_failing_tier_falls_back_to_the_next_precision(tmp_path: Path) -> None:
    """An added tier takes its place in the order: from fast to nvfp4, which stands between it and balanced."""
    async with router_stack(tmp_path, five()) as stack:
        stack.engines[FAST].status = 500
        answer = await stack.generate(tier="fast")
        assert answer.status_code == 200
        assert answer.headers["x-qarr-tier"] == "nvfp4"


async def test_keys_are_kept_to_their_tiers(tmp_path: Path) -> None:
    """A key of an added tier, and one of all tiers, which includes those that are added later."""
    keys = tmp_path / "keys.json"
    int8_key, _ = add_key(keys, "one", tiers=("int8",), over="refuse")
    key_of_all, _ = add_key(keys, "all")
    async with router_stack(tmp_path, five(auth={"keys_file": str(keys)})) as stack:

        async def ask(key: str, tier: str) -> Any:
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": "hi", "tier": tier, "max_tokens": 4}
            return await stack.client.post(
                f"{stack.url}/generate", json=body, headers=headers
            )

        assert (await ask(int8_key, "auto")).headers["x-qarr-tier"] == "int8"
        refused = await ask(int8_key, "fast")
        assert refused.status_code == 403
        assert "int8" in refused.text
        assert (await ask(key_of_all, "nvfp4")).headers["x-qarr-tier"] == "nvfp4"


async def test_two_tiers_are_enough(tmp_path: Path) -> None:
    """A tier without replicas is absent: requests do not wait for it, and a hint to it is not followed."""
    async with router_stack(
        tmp_path, {"tiers": {"balanced": {"replicas": 0}}}
    ) as stack:
        answer = await stack.generate(tier="balanced")
        assert answer.status_code == 200
        assert answer.headers["x-qarr-tier"] in {"fast", "precise"}
        assert "hint balanced not taken" in answer.headers["x-qarr-reason"]
        tiers = (await get_json(stack, "/tiers"))["tiers"]
        assert [tier["state"] for tier in tiers] == ["ready", "absent", "ready"]
        assert (await get_json(stack, "/health"))["status"] == "healthy"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"tiers": {"blanced": {"max_num_seqs": 4}}},
            "tiers.blanced: no checkpoint is made for a tier of this name",
        ),
        ({"tiers": {"auto": {"urls": ["http://a"]}}}, "neither auto nor qarr"),
        (
            {"tiers": {"copy": {"urls": ["http://a"]}}},
            "tiers.copy: give the tier another name",
        ),
        (
            {"tiers": {"int8": {"urls": ["http://a"], "max_len": 4}}},
            "tiers.int8.max_len: there is no such setting",
        ),
        (
            {
                "tiers": {
                    "int8": {"urls": ["http://a"]},
                    "fast": {"urls": ["http://a/"]},
                }
            },
            "both name http://a",
        ),
        (
            {"policy": {"prices": {"int8": 2}}},
            "policy.prices.int8: there is no tier int8; there are fast, balanced, precise",
        ),
        (
            {"openai": {"aliases": {"gpt": "int8"}}},
            "openai.aliases.gpt: there is no tier int8",
        ),
        (
            {"policy": {"loss_budget": {"like": "int8"}}},
            "policy.loss_budget.like: there is no tier int8",
        ),
    ],
)
def test_settings_that_name_a_wrong_tier_are_refused(
    settings: dict[str, Any], says: str
) -> None:
    """The error names the setting and what is allowed: a typo in a tier's name must not make a new tier."""
    with pytest.raises(SettingsError, match=says.replace(".", r"\.")):
        load_settings(None, settings)


def test_variables_set_an_added_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists in variables are JSON; a variable that names no setting is refused."""
    monkeypatch.setenv("QARR_TIERS__INT8__URLS", '["http://10.0.0.1:8000"]')
    monkeypatch.setenv("QARR_TIERS__INT8__MAX_NUM_SEQS", "7")
    tier = load_settings().tiers.of(INT8)
    assert tier.urls == ("http://10.0.0.1:8000",)
    assert tier.max_num_seqs == 7
    assert tier.replicas_here == 0
    monkeypatch.setenv("QARR_TIERS__INT8__MAX_NUM_SEQ", "7")
    with pytest.raises(
        SettingsError, match=r"there is no setting tiers\.int8\.max_num_seq"
    ):
        load_settings()
