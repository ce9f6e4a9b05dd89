"""Token counts in full at every API: what the caller gets, and what records, traces, metrics and usage of keys say.

The events are those of vLLM 0.32 (``entrypoints/openai/chat_completion``, ``entrypoints/anthropic``, ``entrypoints/openai/
responses``), for a prompt of 10 tokens, 6 of them cached, and an answer of 5 tokens, 2 of them reasoning.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.engine import Behaviour
from tests.fakes.named_events import event
from tests.unit.accounting.budgeted_routers import PLENTY, ended, shop
from tests.unit.monitoring.scrapes import samples_of
from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until
from tiers.spec import TierName

pytestmark = pytest.mark.anyio
FAST = TierName.FAST
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 9},
    MESSAGES: {"messages": HI, "max_tokens": 9},
    RESPONSES: {"input": "hi", "max_output_tokens": 16},
}
COUNTS = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
CHAT_USAGE: dict[str, Any] = {
    **COUNTS,
    "prompt_tokens_details": {"cached_tokens": 6, "created_cache_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
MESSAGE_USAGE = {
    "input_tokens": 0,
    "output_tokens": 5,
    "cache_read_input_tokens": 6,
    "cache_creation_input_tokens": 4,
}
RESPONSE_USAGE: dict[str, Any] = {
    "input_tokens": 10,
    "output_tokens": 5,
    "total_tokens": 15,
    "input_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 4},
    "output_tokens_details": {"reasoning_tokens": 2, "tool_output_tokens": 1},
}


def chunk(delta: dict[str, Any], **members: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": None, **members}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def chat_stream(usage: dict[str, Any], *, ids: bool = True) -> bytes:
    """Return a chat with a thought of two tokens, and the tag after it."""

    def told(*token_ids: int) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if ids else {}

    final = json.dumps({"choices": [], "usage": usage}).encode()
    return (
        chunk({"role": "assistant", "content": ""})
        + chunk({"reasoning": "Hm,"}, **told(1))
        + chunk({"reasoning": " well"}, **told(2))
        + chunk({}, **told(3))
        + chunk({"content": "Hi"}, **told(4))
        + chunk({"content": "!"}, **told(5), finish_reason="stop")
        + b"data: %b\n\ndata: [DONE]\n\n" % final
    )


def message_stream(usage: dict[str, Any]) -> bytes:
    message = {"id": "x", "usage": {"input_tokens": 10, "output_tokens": 0}}
    delta = {"stop_reason": "end_turn", "stop_sequence": None}
    return b"".join(
        event(data)
        for data in (
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "content_block": {"type": "thinking"}},
            {"type": "content_block_delta", "delta": {"thinking": "Hm, well"}},
            {"type": "content_block_delta", "delta": {"signature": "s"}},
            {"type": "content_block_stop"},
            {"type": "content_block_start", "content_block": {"type": "text"}},
            {"type": "content_block_delta", "delta": {"text": "Hi!"}},
            {"type": "content_block_stop"},
            {"type": "message_delta", "delta": delta, "usage": usage},
            {"type": "message_stop"},
        )
    )


def response(usage: dict[str, Any]) -> dict[str, Any]:
    items = [{"type": "reasoning"}, {"type": "message"}]
    return {"id": "x", "status": "completed", "output": items, "usage": usage}


def response_stream(usage: dict[str, Any]) -> bytes:
    return b"".join(
        event(data)
        for data in (
            {"type": "response.created", "response": {"id": "x"}},
            {"type": "response.reasoning_text.delta", "delta": "Hm, well"},
            {"type": "response.reasoning_text.done", "text": "Hm, well"},
            {"type": "response.output_text.delta", "delta": "Hi!"},
            {"type": "response.completed", "response": response(usage)},
        )
    )


STREAMS = {
    CHAT: chat_stream(CHAT_USAGE),
    MESSAGES: message_stream(MESSAGE_USAGE),
    RESPONSES: response_stream(RESPONSE_USAGE),
}
WHOLES: dict[str, dict[str, Any]] = {
    CHAT: {
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"content": "Hi!", "reasoning": "Hm, well"},
            }
        ],
        "usage": CHAT_USAGE,
    },
    MESSAGES: {
        "content": [{"type": "thinking"}, {"type": "text", "text": "Hi!"}],
        "stop_reason": "end_turn",
        "usage": MESSAGE_USAGE,
    },
    RESPONSES: response(RESPONSE_USAGE),
}
UNCACHED = {
    CHAT: {**CHAT_USAGE, "prompt_tokens_details": {"cached_tokens": 0}},
    MESSAGES: {"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 0},
    RESPONSES: {**RESPONSE_USAGE, "input_tokens_details": {"cached_tokens": 0}},
}
# Anthropic's API has no count of reasoning, and only OpenAI's Responses one of tools.
DETAILS = {
    CHAT: {"reasoning_tokens": 2, "tool_tokens": None},
    MESSAGES: {"reasoning_tokens": None, "tool_tokens": None},
    RESPONSES: {"reasoning_tokens": 2, "tool_tokens": 1},
}


async def ask(stack: Stack, path: str, **body: Any) -> httpx.Response:
    asked = {"model": "fast", **BODIES[path], **body}
    answer = await stack.client.post(stack.url + path, json=asked)
    assert answer.status_code == 200, answer.text
    return answer


async def record_of(stack: Stack, answer: httpx.Response) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        listed = (await stack.client.get(f"{stack.url}/requests")).json()
        for record in listed["requests"]:
            if record["request_id"] == answer.headers["x-request-id"]:
                found: dict[str, Any] = record
                return found
        return None

    record: dict[str, Any] = await until(look, "the record")
    return record


async def attempt_of(stack: Stack, answer: httpx.Response) -> dict[str, Any]:
    """Return the span of the request to the engine."""
    trace_id = answer.headers["x-qarr-trace-id"]
    trace = (await stack.client.get(f"{stack.url}/traces/{trace_id}")).json()
    attempt: dict[str, Any] = trace["spans"][-1]
    assert attempt["kind"] == "client"
    return attempt


async def total(stack: Stack, name: str) -> float:
    page = (await stack.client.get(f"{stack.url}/metrics")).text
    return sum(sample.value for sample in samples_of(page) if sample.name == name)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
async def test_details_are_passed_on_and_recorded(
    tmp_path: Path, path: str, *, stream: bool
) -> None:
    """The caller gets the engine's own words; record, trace and metrics have one set of names for all APIs."""
    told = STREAMS[path] if stream else json.dumps(WHOLES[path]).encode()
    async with router_stack(tmp_path) as stack:
        stack.engines[FAST].nonsense = told
        options = {"include_usage": True}
        more = {"stream_options": options} if stream and path == CHAT else {}
        answer = await ask(stack, path, stream=stream, **more)
        for name in ("cached_tokens", "cache_read_input_tokens", "reasoning_tokens"):
            assert answer.text.count(f'"{name}"') == told.count(f'"{name}"'.encode())
        record = await record_of(stack, answer)
        assert record["prompt_tokens"] == 10
        assert record["cached_prompt_tokens"] == 6
        assert record["cache_written_tokens"] == 4
        assert record["output_tokens"] == 5
        for name, tokens in DETAILS[path].items():
            assert record[name] == tokens, name
        attributes = (await attempt_of(stack, answer))["attributes"]
        assert attributes["gen_ai.usage.input_tokens"] == 10
        assert attributes["gen_ai.usage.cache_read.input_tokens"] == 6
        assert attributes["qarr.cache_written_tokens"] == 4
        reasoning_name = "gen_ai.usage.reasoning.output_tokens"
        assert attributes.get(reasoning_name) == DETAILS[path]["reasoning_tokens"]
        assert attributes.get("qarr.tool_tokens") == DETAILS[path]["tool_tokens"]
        counted = DETAILS[path]["reasoning_tokens"] or 0
        assert await total(stack, "qarr_reasoning_tokens_total") == counted
        gen_ai = "gen_ai_client_inference_usage_reasoning_output_tokens_total"
        assert await total(stack, gen_ai) == counted


@pytest.mark.parametrize(
    ("usage", "ids", "tokens"),
    [
        ({**COUNTS, "completion_tokens_details": {"reasoning_tokens": 0}}, True, 2),
        (COUNTS, True, 2),
        (COUNTS, False, None),
        ({**COUNTS, "completion_tokens_details": {"reasoning_tokens": 3}}, False, 3),
    ],
)
async def test_reasoning_is_counted_if_the_engine_does_not(
    tmp_path: Path, usage: dict[str, Any], *, ids: bool, tokens: int | None
) -> None:
    """By the tokens of its events; without their ids nobody knows, and no number is shown."""
    async with router_stack(tmp_path) as stack:
        stack.engines[FAST].nonsense = chat_stream(usage, ids=ids)
        record = await record_of(stack, await ask(stack, CHAT, stream=True))
        assert record["reasoning_tokens"] == tokens
        assert record["cached_prompt_tokens"] is None
        whole = await stack.generate(tier="fast", stream=False)
        counts = {} if tokens is None else {"reasoning_tokens": tokens}
        assert whole.json()["usage"] == {**COUNTS, **counts}
        streamed = await stack.generate(tier="fast")
        done = json.loads(streamed.text.rpartition("data: ")[2])
        assert done["usage"] == {**COUNTS, **counts}


async def test_generate_tells_what_was_cached(tmp_path: Path) -> None:
    async with router_stack(tmp_path) as stack:
        stack.engines[FAST].nonsense = STREAMS[CHAT]
        whole = (await stack.generate(tier="fast", stream=False)).json()
        known = {"cached_tokens": 6, "reasoning_tokens": 2}
        assert whole["usage"] == {**COUNTS, **known}
        assert whole["text"] == "Hi!"


async def test_the_answer_begins_after_the_thought(tmp_path: Path) -> None:
    """The time to its own first token stands beside that to the first of all, in record, trace, log and metrics."""
    fast = Behaviour(reasoning=3, delay_s=0.05)
    async with router_stack(tmp_path, fast=fast) as stack:
        answer = await ask(stack, CHAT, stream=True)
        record = await record_of(stack, answer)
        assert record["ttft_ms"] < record["ttfa_ms"] < record["duration_ms"]
        assert record["reasoning_tokens"] == 3
        attempt = await attempt_of(stack, answer)
        assert [each["name"] for each in attempt["events"]] == [
            "qarr.first_token",
            "qarr.first_answer_token",
        ]
        for name in ("time_to_first_token", "time_to_first_answer_token"):
            assert await total(stack, f"qarr_{name}_seconds_count") == 1
        ttfa_s = await total(stack, "qarr_time_to_first_answer_token_seconds_sum")
        assert ttfa_s * 1000 == pytest.approx(record["ttfa_ms"], abs=0.01)


async def test_an_answer_without_a_thought_begins_with_its_first_token(
    tmp_path: Path,
) -> None:
    """A whole answer has neither time, and one that is all thought has no answer."""
    async with router_stack(tmp_path) as stack:
        plain = await ask(stack, CHAT, stream=True)
        record = await record_of(stack, plain)
        assert record["ttfa_ms"] == record["ttft_ms"] is not None
        attempt = await attempt_of(stack, plain)
        assert [each["name"] for each in attempt["events"]] == ["qarr.first_token"]
        record = await record_of(stack, await ask(stack, CHAT))
        assert record["ttfa_ms"] is record["ttft_ms"] is None
        stack.engines[FAST].reasoning = 99
        record = await record_of(stack, await ask(stack, CHAT, stream=True))
        assert record["ttfa_ms"] is None
        assert record["ttft_ms"] is not None
        assert record["reasoning_tokens"] == 7


@pytest.mark.parametrize("path", BODIES)
async def test_cached_tokens_are_not_charged(tmp_path: Path, path: str) -> None:
    """At every API: an agent's turn costs what its engine computed, its thought included."""
    rights = {"ann": {"engine_seconds_per_day": PLENTY}}
    async with shop(tmp_path, rights) as market:
        (stack,) = market.stacks
        costs = []
        for usage in (WHOLES[path]["usage"], UNCACHED[path]):
            told = json.dumps({**WHOLES[path], "usage": usage})
            stack.engines[FAST].nonsense = told.encode()
            headers = {"authorization": f"Bearer {market.names['ann']}"}
            asked = {"model": "fast", **BODIES[path]}
            answer = await stack.client.post(
                stack.url + path, json=asked, headers=headers
            )
            assert answer.status_code == 200, answer.text
            await ended(market.stacks)
            costs.append(stack.pipeline.registry.kept()[-1].cost)
        cached, uncached = costs
        assert cached is not None
        assert uncached is not None
        assert cached.engine_us < uncached.engine_us
