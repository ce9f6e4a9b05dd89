"""More than three tiers, and fewer: through both APIs, the decision, keys, metrics, the state of the fleet and settings."""

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
INT8, NVFP4 = TierName("int8"), TierName("nvfp4")
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


async def told(stack: Stack, path: str) -> Any:
    return (await stack.client.get(f"{stack.url}{path}")).json()


async def test_an_added_tier_serves_both_apis(tmp_path: Path) -> None:
    """By hint, model name and header; headers, events and /route name it; precisions put it into its place."""
    async with router_stack(tmp_path, five()) as stack:
        streamed = await stack.generate(tier="int8")
        assert (streamed.status_code, streamed.headers["x-qarr-tier"], streamed.headers["x-qarr-reason"]) == (
            200, "int8", "hint int8",
        )  # fmt: skip
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
        decision = (
            await stack.client.post(
                f"{stack.url}/route", json={"prompt": "hi", "tier": "int8"}
            )
        ).json()
        assert [report["tier"] for report in decision["tiers"]] == [
            "fast",
            "nvfp4",
            "balanced",
            "int8",
            "precise",
        ]
        models = (await told(stack, "/v1/models"))["data"]
        assert {m["id"]: m["max_model_len"] for m in models}.items() >= {
            ("int8", 3000),
            ("nvfp4", 4096),
        }
        assert len(stack.engines[INT8].requests) == 2


async def test_it_is_told_everywhere(tmp_path: Path) -> None:
    """/tiers, health, metrics of replicas and of requests, with a series for every pair of tiers from the start."""
    async with router_stack(tmp_path, five()) as stack:
        await stack.generate(tier="int8")
        tiers = (await told(stack, "/tiers"))["tiers"]
        assert [t["tier"] for t in tiers] == [
            "fast",
            "nvfp4",
            "balanced",
            "int8",
            "precise",
        ]
        assert all(t["replicas"][0]["state"] == "ready" for t in tiers)
        (record,) = (await told(stack, "/requests"))["requests"]
        assert (record["served_by"], record["replica"]) == ("int8", "int8-0")
        metrics = (await stack.client.get(f"{stack.url}/metrics")).text
        for series in (
            'qarr_tier_ready_replicas{tier="int8"} 1.0',
            'qarr_continuations_total{from_tier="int8",to_tier="nvfp4"} 0.0',
            'qarr_continuations_total{from_tier="precise",to_tier="int8"} 0.0',
        ):
            assert series in metrics
        stack.fleet.replicas[
            [r.spec.name for r in stack.fleet.replicas].index(INT8)
        ].mark(ReplicaStatus.FAILED)
        health = await told(stack, "/health")
        assert (health["status"], "tier int8 is failed" in health["reasons"]) == (
            "degraded",
            True,
        )


async def test_a_tier_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    """With those that are, in bodies, headers and model names."""
    async with router_stack(tmp_path, five()) as stack:
        (error,) = (await stack.generate(tier="int9")).json()["errors"]
        assert (error["field"], error["problem"]) == ("tier", "there is no tier 'int9'")
        assert error["allowed"] == "auto, fast, balanced, int8, nvfp4 or precise"
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        url = f"{stack.url}/v1/chat/completions"
        by_header = await stack.client.post(
            url, json=chat, headers={"x-qarr-tier": "int9"}
        )
        assert (by_header.status_code, "int8" in by_header.text) == (400, True)
        by_model = await stack.client.post(url, json={**chat, "model": "int9"})
        assert (by_model.status_code, "int8" in by_model.text) == (404, True)


async def test_a_failing_tier_falls_back_to_the_next_precision(tmp_path: Path) -> None:
    """An added tier takes its place in the order: from fast to nvfp4, which stands between it and balanced."""
    async with router_stack(tmp_path, five()) as stack:
        stack.engines[FAST].status = 500
        answer = await stack.generate(tier="fast")
        assert (answer.status_code, answer.headers["x-qarr-tier"]) == (200, "nvfp4")


async def test_keys_are_kept_to_their_tiers(tmp_path: Path) -> None:
    """A key of an added tier, and one of all tiers, which includes those that are added later."""
    keys = tmp_path / "keys.json"
    (one, _), (every, _) = (
        add_key(keys, "one", tiers=("int8",), over="refuse"),
        add_key(keys, "all"),
    )
    async with router_stack(tmp_path, five(auth={"keys_file": str(keys)})) as stack:

        async def ask(key: str, tier: str) -> Any:
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": "hi", "tier": tier, "max_tokens": 4}
            return await stack.client.post(
                f"{stack.url}/generate", json=body, headers=headers
            )

        assert (await ask(one, "auto")).headers["x-qarr-tier"] == "int8"
        refused = await ask(one, "fast")
        assert (refused.status_code, "int8" in refused.text) == (403, True)
        assert (await ask(every, "nvfp4")).headers["x-qarr-tier"] == "nvfp4"


async def test_two_tiers_are_enough(tmp_path: Path) -> None:
    """What is left out is absent: no request waits for it, no reason blames it, and its hint is not taken."""
    async with router_stack(
        tmp_path, {"tiers": {"balanced": {"replicas": 0}}}
    ) as stack:
        answer = await stack.generate(tier="balanced")
        assert (
            answer.status_code,
            answer.headers["x-qarr-tier"] in {"fast", "precise"},
        ) == (200, True)
        assert "hint balanced not taken" in answer.headers["x-qarr-reason"]
        assert [t["state"] for t in (await told(stack, "/tiers"))["tiers"]] == [
            "ready",
            "absent",
            "ready",
        ]
        assert (await told(stack, "/health"))["status"] == "healthy"


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
    """By the key and with what is allowed: a typo in a tier's name must not make a new tier."""
    with pytest.raises(SettingsError, match=says.replace(".", r"\.")):
        load_settings(None, settings)


def test_variables_set_an_added_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists in them are JSON, as for the others; a variable that names no setting is refused."""
    monkeypatch.setenv("QARR_TIERS__INT8__URLS", '["http://10.0.0.1:8000"]')
    monkeypatch.setenv("QARR_TIERS__INT8__MAX_NUM_SEQS", "7")
    tier = load_settings().tiers.of(INT8)
    assert (tier.urls, tier.max_num_seqs, tier.replicas_here) == (
        ("http://10.0.0.1:8000",),
        7,
        0,
    )
    monkeypatch.setenv("QARR_TIERS__INT8__MAX_NUM_SEQ", "7")
    with pytest.raises(
        SettingsError, match=r"there is no setting tiers\.int8\.max_num_seq"
    ):
        load_settings()
