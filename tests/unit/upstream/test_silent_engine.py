"""Engines that compute and say nothing, as vLLM's parsers of tool calls and of hidden reasoning do: they do not hang."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic_core import to_json

from router.upstream.engine_request import (
    EngineRequest,
    may_ask_token_ids,
    may_be_silent,
)
from router.upstream.engine_stream import EngineStream
from router.upstream.errors import EngineStalledError, NoEngineAnsweredError
from router.upstream.json_object import JsonObject
from router.upstream.message_splicer import MessageSplicer
from router.upstream.named_events import MESSAGE_FORMAT, RESPONSE_FORMAT
from router.upstream.response_splicer import ResponseSplicer
from tests.fakes.engine import ANSWER, Behaviour
from tests.unit.upstream_stack import UpstreamStack, text_of, upstream_stack
from tiers.snapshot import Gauges
from tiers.spec import STANDARD_TIERS, ReplicaStatus

pytestmark = pytest.mark.anyio
FAST = STANDARD_TIERS[0]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "write", "parameters": {"type": "object"}},
    }
]
# the longest silence, and less than half of what the engines below are silent for
SHORT_S = 0.4
HELD = {"delay_s": 0.2}
FORMATS = {"/v1/messages": MESSAGE_FORMAT, "/v1/responses": RESPONSE_FORMAT}
TIMES = {"token_timeout_s": SHORT_S, "first_token_timeout_s": SHORT_S}


def asked(path: str, *, ids: bool = False, **body: Any) -> EngineRequest:
    document = JsonObject.parse(
        to_json(
            {"messages": [], "input": "x", "max_tokens": 100, "stream": True, **body}
        )
    )
    answers = {"answers": FORMATS[path]} if path in FORMATS else {}
    return EngineRequest(
        document=document,
        path=path,
        request_id="s1",
        counts=not answers,
        asks_token_ids=ids,
        may_be_silent=may_be_silent(document),
        **answers,
    )


async def answered(stack: UpstreamStack, request: EngineRequest) -> str:
    """Return the text of an answer that no other engine may give or continue."""
    answer = await stack.upstream.open(stack.decision(FAST), request, elsewhere=False)
    assert isinstance(answer, EngineStream)
    try:
        return await text_of(answer)
    finally:
        await answer.aclose()


@pytest.mark.parametrize("held_from", [0, 2])
async def test_token_ids_show_that_a_silent_engine_computes(held_from: int) -> None:
    """Before the first text and after it; the speed is learned from the tokens, not from when text came."""
    async with upstream_stack(
        TIMES, fast=Behaviour(held_from=held_from, **HELD)
    ) as stack:
        assert await answered(
            stack, asked("/v1/chat/completions", ids=True, tools=TOOLS)
        ) == "".join(ANSWER)
        assert stack.held() == 0


@pytest.mark.parametrize("path", FORMATS)
@pytest.mark.parametrize("held_from", [0, 2])
async def test_comments_with_token_ids_show_it_as_well(
    path: str, held_from: int
) -> None:
    """For messages and responses, where the engine has the router's plugin."""
    behaviour = Behaviour(held_from=held_from, resumes=True, **HELD)
    splicer = {"/v1/messages": MessageSplicer, "/v1/responses": ResponseSplicer}[path]
    async with upstream_stack(TIMES, fast=behaviour) as stack:
        stack.replica(FAST).update(resumes=True)
        request = replace(asked(path, tools=TOOLS), splicer=splicer)
        assert await answered(stack, request) == "".join(ANSWER)
        assert stack.held() == 0


async def test_an_engine_that_tells_tokens_and_stops_has_stalled() -> None:
    """Its own count may rise with other answers: the ids are the better witness."""
    async with upstream_stack(TIMES, fast=Behaviour(stall_after=3)) as stack:
        stack.replica(FAST).work.generated_at = monotonic() + 3600
        with pytest.raises(EngineStalledError):
            await answered(stack, asked("/v1/chat/completions", ids=True, tools=TOOLS))


@pytest.mark.parametrize("path", ["/v1/chat/completions", *FORMATS])
@pytest.mark.parametrize("held_from", [0, 2])
async def test_a_rising_count_of_tokens_shows_it_as_well(
    path: str, held_from: int
) -> None:
    """Where no ids are told: other endpoints, older engines, reasoning that is hidden."""
    behaviour = Behaviour(held_from=held_from, tells_ids=False, **HELD)
    async with upstream_stack(TIMES, fast=behaviour) as stack:
        stack.replica(FAST).work.generated_at = monotonic() + 3600
        assert await answered(stack, asked(path)) == "".join(ANSWER)


@pytest.mark.parametrize("path", ["/v1/chat/completions", *FORMATS])
@pytest.mark.parametrize("stall_after", [0, 2])
async def test_a_count_that_stands_still_shows_a_hang(
    path: str, stall_after: int
) -> None:
    """Whatever was asked for."""
    async with upstream_stack(
        TIMES, fast=Behaviour(stall_after=stall_after, tells_ids=False)
    ) as stack:
        stack.replica(FAST).work.generated_at = monotonic()
        with pytest.raises((EngineStalledError, NoEngineAnsweredError)):
            await answered(stack, asked(path, tools=TOOLS))


@pytest.mark.parametrize(
    ("body", "running"),
    [({"tools": TOOLS}, 0), ({"include_reasoning": False}, 0), ({}, 1)],
)
async def test_an_engine_that_counts_nothing_is_waited_for(
    body: dict[str, Any], running: int
) -> None:
    """If the answer may be held back, or the engine says that it computes something."""
    async with upstream_stack(
        TIMES, fast=Behaviour(held_from=2, tells_ids=False, **HELD)
    ) as stack:
        replica = stack.replica(FAST)
        replica.note_gauges(Gauges(running=running, waiting=0, kv_cache_usage=0.0))
        assert await answered(stack, asked("/v1/chat/completions", **body)) == "".join(
            ANSWER
        )


async def test_a_plain_answer_of_an_engine_that_counts_nothing_is_not() -> None:
    async with upstream_stack(
        TIMES, fast=Behaviour(stall_after=2, tells_ids=False)
    ) as stack:
        with pytest.raises(EngineStalledError):
            await answered(stack, asked("/v1/chat/completions"))


async def test_no_silence_is_longer_than_a_whole_answer_may_take() -> None:
    times = {**TIMES, "answer_timeout_s": 2 * SHORT_S}
    async with upstream_stack(
        times, fast=Behaviour(stall_after=2, tells_ids=False)
    ) as stack:
        stack.replica(FAST).work.generated_at = monotonic() + 3600
        with pytest.raises(EngineStalledError):
            await answered(stack, asked("/v1/messages", tools=TOOLS))


async def test_an_engine_that_is_taken_out_is_not_waited_for() -> None:
    """The watchdog has found that it hangs, say."""
    async with upstream_stack(
        TIMES, fast=Behaviour(stall_after=2, tells_ids=False)
    ) as stack:
        answer = await stack.upstream.open(
            stack.decision(FAST), asked("/v1/messages", tools=TOOLS), elsewhere=False
        )
        assert isinstance(answer, EngineStream)
        stack.replica(FAST).mark(ReplicaStatus.QUARANTINED, "hung")
        with pytest.raises(EngineStalledError):
            await text_of(answer)
        await answer.aclose()


async def test_a_wait_that_was_cancelled_leaves_nothing() -> None:
    async with upstream_stack(
        TIMES, fast=Behaviour(stall_after=2, tells_ids=False)
    ) as stack:
        task = asyncio.create_task(answered(stack, asked("/v1/messages", tools=TOOLS)))
        await asyncio.sleep(2 * SHORT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stack.held() == 0


def test_ids_are_asked_for_where_they_can_be_taken_out_again() -> None:
    def asks(**body: Any) -> bool:
        return may_ask_token_ids(JsonObject.parse(to_json(body)))

    assert asks(messages=[], tools=TOOLS, logprobs=False)
    assert not asks(messages=[], logprobs=True)
    assert not asks(messages=[], return_token_ids=True)
