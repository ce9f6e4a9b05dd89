"""Model names: what is listed, what they stand for, and how bodies that name none or a wrong one are read."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from router.api.bodies import InvalidBodyError
from router.api.models import ModelChoice, model_names, read_document, resolve
from router.api.problems import UnknownModelError, describe
from router.api.settings import OpenAISettings
from router.upstream.json_object import JsonObject
from tests.unit.router_stack import router_stack
from tests.waiting import until
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import STANDARD_TIERS, Draft, ReplicaStatus, TierName, TierSpec

FLEET = Fleet(
    tuple(
        TierSpec(
            name,
            100,
            max_num_seqs=1,
            max_in_flight=1,
            adapters=("support",) if name is TierName.FAST else (),
        )
        for name in STANDARD_TIERS
    )
)
SETTINGS = OpenAISettings(
    aliases={"gpt-4o": "precise", "gpt-4o-mini": "fast", "any": "auto", "o-*": "fast"}
)

FLEET.add(Replica("fast-0", FLEET.specs[0], "u", "", "served"))


def asked(**body: Any) -> JsonObject:
    return JsonObject.parse(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("auto", "auto"),
        ("qarr", "auto"),
        ("fast", "fast"),
        ("precise", "precise"),
        ("gpt-4o", "precise"),
        ("any", "auto"),
        ("o-3-mini", "fast"),
    ],
)
def test_names_stand_for_tiers(name: str, choice: str) -> None:
    assert resolve(asked(model=name), SETTINGS, FLEET) == ModelChoice(choice)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body", [{}, {"model": None}, {"model": ""}, {"model": "served"}]
)
def test_without_a_name_it_is_auto(body: dict[str, Any]) -> None:
    """As vLLM takes it; the engines' own name, which stands in answers, is no tier's either."""
    assert resolve(asked(**body), SETTINGS, FLEET) == ModelChoice("auto")


def test_an_adapters_name_stands_for_it_on_any_tier() -> None:
    assert resolve(asked(model="support"), SETTINGS, FLEET) == ModelChoice(
        "auto", "support"
    )
    assert resolve(
        asked(model="support"), OpenAISettings(aliases={"support": "fast"}), FLEET
    ) == ModelChoice("fast")


@pytest.mark.parametrize(
    "name", ["FAST", "fast ", "gpt-5", 7, True, ["fast"], {"fast": 1}]
)
def test_other_names_are_unknown(name: Any) -> None:
    with pytest.raises(UnknownModelError) as error:
        resolve(asked(model=name), SETTINGS, FLEET)
    problem = describe(error.value)
    assert problem.status == 404
    assert problem.openai_body()["error"]["code"] == "model_not_found"
    assert all(
        known in problem.detail for known in (*model_names(SETTINGS, FLEET), "support")
    )


def test_a_long_name_is_not_repeated_in_full() -> None:
    with pytest.raises(UnknownModelError) as error:
        resolve(asked(model="x" * 100_000), SETTINGS, FLEET)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b'"hi"', b"{", b"\xff", b"[" * 10_000]
)
def test_a_body_that_is_no_object_is_invalid(body: bytes) -> None:
    with pytest.raises(InvalidBodyError) as error:
        read_document(body)
    (problem,) = error.value.problems
    assert problem.field == "body"
    assert problem.allowed == "a JSON object in UTF-8"


@pytest.mark.anyio
async def test_each_name_has_a_card(tmp_path: Path) -> None:
    """Of a tier its own context, of auto the longest; an alias names its parent; a name may have slashes."""
    aliases = {"org/model": "balanced", "any": "auto"}
    async with router_stack(tmp_path, {"openai": {"aliases": aliases}}) as stack:
        listed = (await stack.client.get(f"{stack.url}/v1/models")).json()
        cards = {card["id"]: card for card in listed["data"]}
        assert list(cards) == ["auto", "qarr", *STANDARD_TIERS, *aliases]
        lengths = {spec.name: spec.max_model_len for spec in stack.fleet.specs}
        assert {
            name: cards[name]["max_model_len"] for name in STANDARD_TIERS
        } == lengths
        assert {cards[name]["max_model_len"] for name in ("auto", "qarr", "any")} == {
            max(lengths.values())
        }
        assert cards["org/model"]["parent"] == "balanced"
        assert cards["fast"]["parent"] is None
        assert cards["qarr"]["parent"] == "auto"
        assert cards["org/model"]["max_model_len"] == lengths[TierName.BALANCED]
        for name, card in cards.items():
            one = await stack.client.get(f"{stack.url}/v1/models/{name}")
            assert one.json() == card
            assert one.headers["x-request-id"]
        lost = await stack.client.get(f"{stack.url}/v1/models/org")
        assert lost.status_code == 404
        assert lost.json()["error"]["code"] == "model_not_found"


@pytest.mark.anyio
async def test_each_name_says_what_is_behind_it(tmp_path: Path) -> None:
    """Tiers with precision, context and adapters; of an alias with slashes too, and where engines are is told nowhere."""
    aliases = {"org/model": "balanced"}
    async with router_stack(tmp_path, {"openai": {"aliases": aliases}}) as stack:
        card = (await stack.client.get(f"{stack.url}/v1/models/org/model")).json()
        assert card["tiers"] == ["balanced"]
        assert card["context_length"] == card["max_model_len"]
        assert card["served_by"] == [
            {
                "tier": "balanced", "precision": "fp8", "quantization": "fp8", "context_length": card["max_model_len"],
                "adapters": [], "state": "ready",
            }
        ]  # fmt: skip
        answer = await stack.client.get(f"{stack.url}/v1/models/org/model/endpoints")
        (endpoint,) = answer.json()["data"]["endpoints"]
        assert answer.json()["data"]["id"] == "org/model"
        assert endpoint["tag"] == "balanced"
        assert endpoint["quantization"] == "fp8"
        assert endpoint["status"] == 0
        assert endpoint["replicas_ready"] == 1
        assert endpoint["in_flight"] == 0
        assert endpoint["queue"] == 0
        assert "127.0.0.1" not in answer.text
        every = (
            await stack.client.get(f"{stack.url}/v1/models/auto/endpoints")
        ).json()["data"]["endpoints"]
        assert [e["quantization"] for e in every] == ["int4", "fp8", "bf16"]
        lost = await stack.client.get(f"{stack.url}/v1/models/org/endpoints")
        assert lost.status_code == 404
        assert lost.json()["error"]["code"] == "model_not_found"


@pytest.mark.anyio
async def test_endpoints_tell_their_load(tmp_path: Path) -> None:
    """Requests on engines and in the queue; a tier that does not serve says so; a draft takes some parameters away."""
    settings = {
        "tiers": {"fast": {"max_in_flight": 1}},
        "admission": {"max_waiting": 8},
    }
    async with router_stack(tmp_path, settings) as stack:
        stack.engines[TierName.FAST].delay_s = 3600
        body = {
            "prompt": "hi",
            "tier": "fast",
            "tier_policy": "require",
            "stream": False,
        }
        asked = [asyncio.create_task(stack.generate(**body)) for _ in range(2)]
        url = f"{stack.url}/v1/models/fast/endpoints"

        async def one_runs_and_one_waits() -> bool:
            (fast,) = (await stack.client.get(url)).json()["data"]["endpoints"]
            return bool(fast["in_flight"] == 1 and fast["queue"] == 1)

        await until(one_runs_and_one_waits)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for replica in stack.fleet.replicas:
            if replica.spec.name is TierName.PRECISE:
                replica.mark(ReplicaStatus.STOPPED)
        (precise,) = (await stack.client.get(url.replace("fast", "precise"))).json()[
            "data"
        ]["endpoints"]
        assert precise["status"] == -10
        assert precise["state"] == "stopped"
        assert precise["replicas_ready"] == 0
        stack.fleet.specs = tuple(
            replace(s, draft=Draft("ngram", 4)) for s in stack.fleet.specs
        )
        (drafting,) = (await stack.client.get(url)).json()["data"]["endpoints"]
        assert "seed" in drafting["supported_parameters"]
        assert "min_p" not in drafting["supported_parameters"]


@pytest.mark.anyio
async def test_the_openai_client_lists_models(tmp_path: Path) -> None:
    """What is there besides OpenAI's fields is in the client's objects too."""
    async with (
        router_stack(tmp_path) as stack,
        openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused") as client,
    ):
        listed = {model.id: model async for model in await client.models.list()}
        assert set(listed) == {"auto", "qarr", *STANDARD_TIERS}
        assert (await client.models.retrieve("fast")).model_dump()["tiers"] == ["fast"]
