"""LoRA adapters of running engines: found, loaded, unloaded, loaded again, and what a tier offers of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName, TierSpec

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS
ADAPTERS = "/admin/adapters"


async def test_a_tier_offers_what_all_its_ready_replicas_have() -> None:
    spec = TierSpec(FAST, max_model_len=100, max_num_seqs=1, max_in_flight=1)
    fleet = Fleet((spec,))
    one, two = (
        fleet.add(Replica(f"fast-{n}", spec, url=f"http://{n}", api_key="", model="m"))
        for n in range(2)
    )
    assert fleet.note_adapters(one, ("a", "b"))
    one.mark(ReplicaStatus.READY)
    assert fleet.spec(FAST).adapters == ("a", "b")
    fleet.note_adapters(two, ("b", "c"))
    two.mark(ReplicaStatus.READY)
    assert fleet.spec(FAST).adapters == ("b",)
    assert not fleet.note_adapters(two, ("b", "c"))
    one.mark(ReplicaStatus.UNREACHABLE)
    fleet.note_adapters(two, ("b", "c"))
    assert fleet.spec(FAST).adapters == ("b", "c")


async def test_adapters_are_loaded_and_requests_for_them_name_them(
    tmp_path: Path,
) -> None:
    """In the tiers that are asked for; the engine gets the adapter's name as its model, on both APIs."""
    async with router_stack(tmp_path) as stack:
        stack.engines[PRECISE].loads = False
        loaded = await load(stack, "support", "/x", tiers=[FAST, PRECISE])
        assert loaded["replicas"][0] == {
            "replica": "fast-0",
            "done": True,
            "detail": "loaded",
        }
        assert loaded["replicas"][1]["replica"] == "precise-0"
        assert loaded["replicas"][1]["done"] is False
        assert "404" in loaded["replicas"][1]["detail"]
        assert stack.engines[FAST].adapters == {"support": "/x"}
        again = await stack.client.post(
            stack.url + ADAPTERS,
            json={"name": "support", "path": "/y", "tiers": ["fast"]},
        )
        assert again.status_code == 409
        assert "already has a model support" in again.json()["detail"]

        chat = {"model": "support", "messages": [{"role": "user", "content": "hi"}]}
        for hint in ("fast", "precise"):
            answer = await stack.client.post(
                f"{stack.url}/v1/chat/completions",
                json=chat,
                headers={"x-qarr-tier": hint},
            )
            assert answer.headers["x-qarr-tier"] == "fast"
        assert (await stack.generate(adapter="support", stream=False)).headers[
            "x-qarr-tier"
        ] == "fast"
        assert {request["model"] for request in stack.engines[FAST].requests} == {
            "support"
        }

        card = (await stack.client.get(f"{stack.url}/v1/models/support")).json()
        assert card["parent"] == "auto"
        assert card["tiers"] == ["fast"]
        gone = await stack.client.delete(f"{stack.url}{ADAPTERS}/support")
        assert gone.json()["replicas"] == [
            {"replica": "fast-0", "done": True, "detail": "unloaded"}
        ]
        assert (
            await stack.client.post(f"{stack.url}/v1/chat/completions", json=chat)
        ).status_code == 404
        assert (await stack.generate(adapter="support")).json()["errors"][0][
            "field"
        ] == "adapter"
        assert (
            await stack.client.delete(f"{stack.url}{ADAPTERS}/support")
        ).status_code == 409


async def test_what_an_engine_lost_in_a_restart_is_loaded_again(tmp_path: Path) -> None:
    async with router_stack(tmp_path) as stack:
        await load(stack, "support", "/x", tiers=[FAST])
        engine = stack.engines[FAST]
        (replica,) = [r for r in stack.fleet.replicas if r.spec.name is FAST]
        engine.alive = False
        await until(
            lambda: replica.state.status is not ReplicaStatus.READY, poll_s=0.01
        )
        engine.adapters.clear()
        engine.alive = True
        await until(lambda: replica.state.status is ReplicaStatus.READY, poll_s=0.01)
        assert engine.adapters == {"support": "/x"}
        assert stack.fleet.spec(FAST).adapters == ("support",)


async def test_what_others_load_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.lifecycle.watching.MODEL_CHECK_S", 0.1)
    async with router_stack(tmp_path) as stack:
        stack.engines[BALANCED].adapters["theirs"] = "/z"
        await until(lambda: stack.fleet.spec(BALANCED).adapters == ("theirs",))
        refused = await stack.generate(
            adapter="theirs", tier="fast", tier_policy="require"
        )
        assert refused.status_code == 422
        assert refused.json()["type"] == "urn:qarr:problem:no-adapter"


WRONG_BODIES: list[tuple[dict[str, object], str, str]] = [
    ({"path": "/x"}, "name", "letters, digits"),
    ({"name": "fast", "path": "/x"}, "name", "no tier's name"),
    ({"name": "a b", "path": "/x"}, "name", "letters, digits"),
    ({"name": "a", "path": ""}, "path", "a folder"),
    (
        {"name": "a", "path": "/x", "tiers": ["best"]},
        "tiers",
        "fast, balanced, precise",
    ),
    ({"name": "a", "path": "/x", "tiers": []}, "tiers", "fast, balanced, precise"),
    ({"name": "a", "path": "/x", "rank": 3}, "rank", "name, path, tiers"),
]


async def test_a_wrong_body_names_its_field(tmp_path: Path) -> None:
    async with router_stack(tmp_path) as stack:
        for body, field, allowed in WRONG_BODIES:
            answer = await stack.client.post(stack.url + ADAPTERS, json=body)
            assert answer.status_code == 400, body
            (error,) = answer.json()["errors"]
            assert (error["field"], allowed in error["allowed"]) == (field, True), body


async def load(
    stack: Stack, name: str, path: str, tiers: list[TierName]
) -> dict[str, list[dict[str, object]]]:
    """Have the router load an adapter, and return what it says."""
    answer = await stack.client.post(
        stack.url + ADAPTERS, json={"name": name, "path": path, "tiers": tiers}
    )
    found: dict[str, list[dict[str, object]]] = answer.raise_for_status().json()
    return found
