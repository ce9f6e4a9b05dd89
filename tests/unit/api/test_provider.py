"""OpenRouter's ``provider`` object on every endpoint: what it allows serves, what cannot be honoured is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.unit.router_stack import Stack, events, router_stack
from tiers.spec import TierName

pytestmark = pytest.mark.anyio
PRECISIONS = {
    "tiers": {
        name: {"precision": p}
        for name, p in (("fast", "awq-int4"), ("balanced", "fp8"), ("precise", "bf16"))
    }
}
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "hi", "stream": False},
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/v1/responses": {"input": "hi"},
}


async def ask(stack: Stack, path: str, provider: Any, **more: Any) -> Any:
    return await stack.client.post(
        stack.url + path, json={**BODIES[path], **more, "provider": provider}
    )


async def test_precisions_are_an_allow_list(tmp_path: Path) -> None:
    """Headers tell the precision, the engine never sees the object, and what no tier has is a 400 that names the field."""
    async with router_stack(tmp_path, PRECISIONS) as stack:
        for number, path in enumerate(BODIES, 1):
            answer = await ask(stack, path, {"quantizations": ["fp8", "fp16"]})
            assert (answer.status_code, answer.headers["x-qarr-tier"]) == (
                200,
                "balanced",
            ), path
            assert answer.headers["x-qarr-precision"] == "fp8"
            assert "allows fp16, fp8 only" in answer.headers["x-qarr-reason"]
            asked = stack.engines[TierName.BALANCED].requests
            assert (len(asked), "provider" in asked[-1]) == (number, False), path
            refused = await ask(stack, path, {"quantizations": ["int8"]})
            assert refused.status_code == 400, path
            for part in (
                "provider.quantizations",
                "int8",
                "fast has int4",
                "balanced has fp8",
                "precise has bf16",
            ):
                assert part in refused.text, path


REFUSED: list[tuple[Any, str]] = [
    ({"quantizations": ["fp7"]}, "provider.quantizations.0"),
    ({"quantizations": []}, "provider.quantizations"),
    ({"max_price": {"prompt": 1}}, "provider.max_price"),
    ({"zdr": True}, "provider.zdr"),
    ({"require_parameters": True}, "provider.require_parameters"),
    ({"data_collection": "deny"}, "provider.data_collection"),
    ({"order": ["fast", "balanced"]}, "provider.order"),
    ({"only": ["anthropic"]}, "provider.only"),
    ({"only": ["fast"], "ignore": ["fast"]}, "provider.ignore"),
    ({"sort": {"by": "price"}}, "provider.sort"),
    ({"speed": 1}, "provider.speed"),
    (["fp8"], "provider"),
]


async def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path) -> None:
    """With what is allowed, alike on OpenAI's endpoints and our own."""
    async with router_stack(tmp_path, PRECISIONS) as stack:
        for provider, field in REFUSED:
            ours, theirs = [
                await ask(stack, path, provider)
                for path in ("/generate", "/v1/chat/completions")
            ]
            assert (ours.status_code, theirs.status_code) == (400, 400), provider
            assert [e["field"] for e in ours.json()["errors"]] == [field]
            assert ours.json()["errors"][0]["allowed"], provider
            assert theirs.json()["error"]["param"] == field


async def test_preferences_map_onto_the_policy(tmp_path: Path) -> None:
    """OpenRouter's defaults change nothing; order is a hint, only and ignore bind, no fallbacks is ``require``."""
    async with router_stack(tmp_path, PRECISIONS) as stack:
        path = "/v1/chat/completions"
        for provider, tier in (
            (
                {
                    "require_parameters": False,
                    "data_collection": "allow",
                    "allow_fallbacks": True,
                },
                "fast",
            ),
            ({"order": ["precise"]}, "precise"),
            ({"only": ["balanced", "precise"]}, "balanced"),
            ({"ignore": ["fast"]}, "balanced"),
            ({"sort": "price"}, "fast"),
            (None, "fast"),
        ):
            assert (await ask(stack, path, provider)).headers["x-qarr-tier"] == tier, (
                provider
            )
        stack.engines[TierName.BALANCED].status = 500
        strict = await ask(
            stack, path, {"order": ["balanced"], "allow_fallbacks": False}
        )
        assert strict.status_code == 503
        assert (await ask(stack, path, {"order": ["balanced"]})).headers[
            "x-qarr-tier"
        ] == "precise"
        both = await ask(stack, path, {"order": ["balanced"]}, model="fast")
        assert both.status_code == 400
        assert both.json()["error"]["param"] == "provider.order"
        wrong = await ask(stack, path, {"quantizations": ["fp8"]}, model="fast")
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "provider.quantizations"


async def test_a_failed_engine_is_not_replaced_by_an_excluded_precision(
    tmp_path: Path,
) -> None:
    """Before the first byte the request ends with 503, in the middle of a stream with an error; others are not asked."""
    async with router_stack(tmp_path, PRECISIONS) as stack:
        stack.engines[TierName.BALANCED].status = 500
        failed = await ask(stack, "/v1/chat/completions", {"quantizations": ["fp8"]})
        assert failed.status_code == 503
        stack.engines[TierName.BALANCED].status = 200
        stack.engines[TierName.BALANCED].break_after = 2
        broken = await ask(stack, "/generate", {"quantizations": ["fp8"]}, stream=True)
        assert events(broken.text)[-1][0] == "error"
        continued = await ask(
            stack, "/generate", {"quantizations": ["fp8", "bf16"]}, stream=True
        )
        assert events(continued.text)[-1][1]["continued_on"] == ["precise"]
        assert not stack.engines[TierName.FAST].requests
        assert stack.leases() == 0


async def test_a_replica_of_another_precision_is_not_leased(tmp_path: Path) -> None:
    """Its own precision counts when a slot is taken, whatever its tier shows: the tier's may be found out in between."""
    patience = {"admission": {"max_wait_s": {"standard": 0.05}}}
    async with router_stack(tmp_path, {**PRECISIONS, **patience}) as stack:
        fast = next(r for r in stack.fleet.replicas if r.spec.name is TierName.FAST)
        asked = "/v1/chat/completions", {"quantizations": ["int4"]}
        assert (await ask(stack, *asked)).headers["x-qarr-tier"] == "fast"
        fast.spec = replace(fast.spec, precision="bf16")
        before = len(stack.engines[TierName.FAST].requests)
        assert (await ask(stack, *asked)).status_code == 503
        assert len(stack.engines[TierName.FAST].requests) == before
        stack.fleet.note_precision(fast, "bf16")
        assert (await ask(stack, *asked)).status_code == 400
        assert stack.leases() == 0


async def test_the_openai_client_asks_for_precisions(tmp_path: Path) -> None:
    """With ``extra_body``, as its users do elsewhere; a refusal is the client's own exception."""
    async with router_stack(tmp_path, PRECISIONS) as stack:
        client = openai.AsyncOpenAI(
            base_url=f"{stack.url}/v1", api_key="unused", max_retries=0
        )
        asked: dict[str, Any] = {"model": "auto", "messages": HI}
        raw = await client.chat.completions.with_raw_response.create(
            **asked,
            extra_body={"provider": {"quantizations": ["bf16"], "sort": "latency"}},
        )
        assert raw.headers["x-qarr-precision"] == "bf16"
        assert raw.headers["x-qarr-tier"] == "precise"
        with pytest.raises(openai.BadRequestError, match=r"provider\.quantizations"):
            await client.chat.completions.create(
                **asked, extra_body={"provider": {"quantizations": ["fp4"]}}
            )
        await client.close()
