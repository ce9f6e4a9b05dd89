"""An answer that is more than text goes on at an engine that resumes it: no call twice, none halved, and the caller is told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.profiling.model_answer import ModelAnswer, ToolCall
from tests.fakes.engine import Behaviour
from tests.fakes.model_engine import ThinkingModel
from tests.unit.router_stack import Stack, router_stack
from tiers.breaker import BreakerOptions
from tiers.spec import STANDARD_TIERS, TierName

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS
HINT = {"x-qarr-tier": "fast"}
# An engine that fails every other time gets requests all the same.
NEVER_SPARED = {"upstream": {"breaker": BreakerOptions(failure_share=1.0)}}
ANSWER = ModelAnswer(
    text="I look both up.",
    tool_calls=(
        ToolCall(name="weather", arguments='{"city": "Paris", "unit": "C"}'),
        ToolCall(name="route", arguments='{"to": {"city": "Paris"}, "by": "train"}'),
    ),
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {}}}
    for name in ("weather", "route")
]
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "tools": TOOLS,
    "stream_options": {"include_usage": True},
}


def agent() -> ThinkingModel:
    """Return a model that thinks, says something and calls two tools."""
    return ThinkingModel(
        answer_to=lambda _body: ANSWER,
        thought="The user wants to travel.",
        reasoning_field="reasoning",
    )


@asynccontextmanager
async def agents(
    tmp_path: Path,
    overrides: dict[str, Any] | None = None,
    **faults: dict[str, Any],
) -> AsyncIterator[Stack]:
    """Run a router over three engines that resume answers, and fail as told once they are ready."""
    behaviours = {name: Behaviour(resumes=True) for name in STANDARD_TIERS}
    models = {name: agent() for name in STANDARD_TIERS}
    async with router_stack(tmp_path, overrides, models=models, **behaviours) as stack:
        for name, fault in faults.items():
            for key, value in fault.items():
                setattr(behaviours[TierName(name)], key, value)
        yield stack


async def ask(stack: Stack, **more: Any) -> httpx.Response:
    url = f"{stack.url}/v1/chat/completions"
    return await stack.client.post(url, json={**CHAT, **more}, headers=HINT)


def chunks(text: str) -> list[dict[str, Any]]:
    return [
        json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")
    ]


def counts_in(text: str) -> list[int]:
    """Return the counts of output tokens that a stream tells: one."""
    usages = [chunk["usage"] for chunk in chunks(text) if chunk.get("usage")]
    return [usage["completion_tokens"] for usage in usages]


def answer_in(text: str) -> dict[str, Any]:
    """Put an answer together as a client does."""
    answer: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for chunk in chunks(text):
        for choice in chunk.get("choices", ()):
            delta = choice["delta"]
            answer["content"] += delta.get("content") or ""
            answer["reasoning"] += delta.get("reasoning") or ""
            for part in delta.get("tool_calls", ()):
                if part["index"] == len(answer["calls"]):
                    answer["calls"].append({"name": "", "arguments": "", "ids": []})
                call = answer["calls"][part["index"]]
                call["name"] += part["function"].get("name", "")
                call["arguments"] += part["function"].get("arguments", "")
                call["ids"] += [part["id"]] if "id" in part else []
            answer["finish_reason"] = choice["finish_reason"]
    return answer


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {name: value for name, value in call.items() if name != "ids"}
        for call in answer["calls"]
    ]
    return {**answer, "calls": calls}


async def whole_answer(stack: Stack) -> dict[str, Any]:
    """Return what comes of engines that do not fail, and check that it is what the model says."""
    answer = without_ids(answer_in((await ask(stack)).text))
    assert answer["content"] == ANSWER.text
    assert answer["calls"] == [
        {"name": call.name, "arguments": call.arguments} for call in ANSWER.tool_calls
    ]
    return answer


async def test_an_answer_goes_on_wherever_it_breaks(tmp_path: Path) -> None:
    """In the thought, the text, a call's name and its arguments: each output comes once, and the stream ends as one."""
    async with agents(tmp_path, NEVER_SPARED) as stack:
        expected = await whole_answer(stack)
        fast = stack.engines[FAST]
        (count,) = counts_in((await ask(stack)).text)
        continued = 0
        for events in range(2, 60):
            assert counts_in((await ask(stack)).text) == [count]
            fast.break_at = events
            fast.once = True
            answer = await ask(stack, qarr={"report": True})
            if fast.break_at is not None:  # the stream was shorter
                break
            text = answer.text
            assert without_ids(answer_in(text)) == expected
            assert all(len(call["ids"]) == 1 for call in answer_in(text)["calls"])
            assert text.endswith("data: [DONE]\n\n")
            assert len({chunk["id"] for chunk in chunks(text)} - {""}) == 1
            assert counts_in(text) == [count]
            if ": continued on" in text:
                continued += 1
                assert chunks(text)[-1]["qarr"]["continued_on"] == ["balanced"]
        assert continued > 15
        assert stack.leases() == 0


async def test_another_tier_resumes(tmp_path: Path) -> None:
    async with agents(tmp_path, fast={"break_at": 12}) as stack:
        text = (await ask(stack)).text
        assert ": continued on balanced\n" in text
        assert answer_in(text)["finish_reason"] == "tool_calls"
        (request,) = stack.engines[BALANCED].requests
        assert request["messages"] == CHAT["messages"]
        assert request["tools"] == TOOLS
        assert "return_token_ids" not in request
        assert len(request["qarr_resume"]["token_ids"]) == 11
        assert request["qarr_resume"]["finish_reason"] is None
        (headers,) = stack.engines[BALANCED].headers
        assert headers["x-qarr-resume"] == "1"
        assert headers["x-qarr-tokens"] == "1"


async def test_the_next_engine_may_fail_as_well(tmp_path: Path) -> None:
    async with agents(
        tmp_path, fast={"break_at": 6}, balanced={"break_at": 6}
    ) as stack:
        text = (await ask(stack)).text
        assert ": continued on balanced precise\n" in text
        assert without_ids(answer_in(text)) == without_ids(
            answer_in((await ask(stack)).text)
        )
        assert answer_in(text)["content"] == ANSWER.text


async def test_engines_that_resume_nothing_are_not_asked(tmp_path: Path) -> None:
    """Without the plugin, an engine would take the request for a new one, and the answer would be doubled."""
    async with agents(tmp_path, fast={"break_at": 3}) as stack:
        for replica in stack.fleet.replicas:
            replica.update(resumes=replica.spec.name is FAST)
        text = (await ask(stack)).text
        assert "stream_broken" in text
        assert "[DONE]" not in text
        assert len(stack.engines[FAST].requests) > 1
        assert stack.engines[BALANCED].requests == []
        assert stack.engines[PRECISE].requests == []


async def test_an_engine_that_tells_no_tokens_cannot_be_gone_on_from(
    tmp_path: Path,
) -> None:
    async with agents(tmp_path, fast={"break_at": 12}) as stack:
        for replica in stack.fleet.replicas:
            replica.update(resumes=replica.spec.name is not FAST)
        text = (await ask(stack)).text
        assert "[DONE]" not in text
        assert stack.engines[BALANCED].requests == []


async def test_hidden_reasoning_is_resumed_as_well(tmp_path: Path) -> None:
    """vLLM tells no ids in the events of such an answer; comments tell them."""
    async with agents(tmp_path, fast={"break_at": 12}) as stack:
        text = (await ask(stack, include_reasoning=False)).text
        first, *_ = stack.engines[FAST].headers
        assert first["x-qarr-tokens"] == "1"
        assert "return_token_ids" not in stack.engines[FAST].requests[0]
        assert answer_in(text)["content"] == ANSWER.text
        assert "qarr-tokens" not in text


async def test_a_plain_answer_is_asked_for_as_before(tmp_path: Path) -> None:
    """Its tokens come with its events: there is nothing to add."""
    behaviours = {name: Behaviour(resumes=True) for name in STANDARD_TIERS}
    async with router_stack(tmp_path, **behaviours) as stack:
        behaviours[FAST].break_after = 3
        body = {key: value for key, value in CHAT.items() if key != "tools"}
        url = f"{stack.url}/v1/chat/completions"
        text = (await stack.client.post(url, json=body, headers=HINT)).text
        assert answer_in(text)["content"] == "The capital of France is Paris."
        (headers,) = behaviours[FAST].headers
        assert "x-qarr-tokens" not in headers
        (request,) = behaviours[BALANCED].requests
        assert "qarr_resume" not in request


NAMED = {
    "/v1/messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 100,
        "stream": True,
    },
    "/v1/responses": {"input": "hi", "max_output_tokens": 100, "stream": True},
}


def named_events(text: str) -> list[dict[str, Any]]:
    """Return a stream's events without numbers, pieces of text together."""
    seen: list[dict[str, Any]] = []
    for line in text.splitlines():
        if not line.startswith("data: "):
            continue
        data = json.loads(line[6:])
        data.pop("qarr", None)
        data.pop("sequence_number", None)
        if not seen or seen[-1]["type"] != data["type"] or "delta" not in data:
            seen.append(data)
        elif isinstance(data["delta"], str):
            seen[-1]["delta"] += data["delta"]
        else:
            seen[-1]["delta"]["text"] += data["delta"]["text"]
    return seen


def numbers_in(text: str) -> list[int]:
    data = [json.loads(line[6:]) for line in text.splitlines() if line[:5] == "data:"]
    return [event["sequence_number"] for event in data if "sequence_number" in event]


@pytest.mark.parametrize("path", NAMED)
async def test_events_with_names_go_on_wherever_they_break(
    tmp_path: Path, path: str
) -> None:
    """As one stream: no event twice, none missing, and the numbers go on."""
    behaviours = {name: Behaviour(resumes=True) for name in STANDARD_TIERS}
    async with router_stack(tmp_path, NEVER_SPARED, **behaviours) as stack:
        fast = behaviours[FAST]

        async def asked() -> str:
            url = f"{stack.url}{path}"
            body = {**NAMED[path], "qarr": {"report": True}}
            return (await stack.client.post(url, json=body, headers=HINT)).text

        expected = named_events(await asked())
        continued = 0
        for events in range(1, 40):
            fast.break_at = events
            fast.once = True
            text = await asked()
            if fast.break_at is not None:  # the stream was shorter
                break
            assert named_events(text) == expected
            numbers = numbers_in(text)
            assert numbers == list(range(len(numbers)))
            assert "qarr-tokens" not in text
            if ": continued on balanced\n" in text:
                continued += 1
                assert '"continued_on":["balanced"]' in text
            assert named_events(await asked()) == expected
        assert continued > 5
        assert stack.leases() == 0


@pytest.mark.parametrize("resumes", [False, True])
async def test_only_the_last_event_of_a_message_is_written_by_the_router(
    tmp_path: Path,
    resumes: bool,  # noqa: FBT001
) -> None:
    """Once a message's stop reason was sent, nobody is asked for what is left, whether or not engines could resume it."""
    behaviours = {name: Behaviour(resumes=resumes) for name in STANDARD_TIERS}
    async with router_stack(tmp_path, **behaviours) as stack:
        path = "/v1/messages"
        url = f"{stack.url}{path}"
        whole = await stack.client.post(url, json=NAMED[path], headers=HINT)
        behaviours[FAST].break_at = len(whole.text.split("event: ")) - 2
        broken = await stack.client.post(url, json=NAMED[path], headers=HINT)
        assert broken.text == whole.text
        assert behaviours[BALANCED].requests == []


@pytest.mark.parametrize("path", NAMED)
async def test_events_with_names_end_with_an_error_where_nobody_resumes(
    tmp_path: Path, path: str
) -> None:
    async with router_stack(tmp_path) as stack:
        stack.engines[FAST].break_at = 6
        url = f"{stack.url}{path}"
        text = (await stack.client.post(url, json=NAMED[path], headers=HINT)).text
        assert "event: error\n" in text
        assert "x-qarr-tokens" not in stack.engines[FAST].headers[-1]


@pytest.mark.parametrize("wants_usage", [False, True])
async def test_an_answer_that_nobody_may_go_on_with_ends_if_only_its_end_was_lost(
    tmp_path: Path,
    wants_usage: bool,  # noqa: FBT001
) -> None:
    """Its text and its finish reason have come; counts that its caller has asked for are missed."""
    async with router_stack(tmp_path) as stack:
        stack.engines[FAST].break_at = 9  # before the token counts
        body = {
            **CHAT,
            "tools": None,
            "logprobs": True,
            "stream_options": {"include_usage": wants_usage},
        }
        url = f"{stack.url}/v1/chat/completions"
        text = (await stack.client.post(url, json=body, headers=HINT)).text
        assert answer_in(text)["finish_reason"] == "stop"
        assert ("data: [DONE]" in text) is not wants_usage
        assert ("stream_broken" in text) is wants_usage
        assert stack.leases() == 0
