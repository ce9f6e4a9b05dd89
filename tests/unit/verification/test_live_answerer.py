"""Having an engine answer tasks: what is sent, what is read, and what happens when the engine fails."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from router.profiling.answering import AnswerLimits, ThinkingMode
from router.verification.live_answerer import LiveAnswerer
from tests.fakes.engine import Behaviour, FakeEngine, serving
from tests.unit.verification.made_tasks import made_task
from tiers.errors import ProbeError, RefusedError
from tiers.probe import CHAT
from tiers.verification.engine import Engine

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connected(behaviour: Behaviour) -> AsyncIterator[Engine]:
    async with (
        serving(FakeEngine(behaviour).app) as url,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        yield await Engine.connect(client, url, "")


def message_of(**message: Any) -> str:
    choice = {"message": {"role": "assistant", **message}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": 9}})


async def test_an_engine_answers_greedily_by_its_name() -> None:
    behaviour = Behaviour()
    async with connected(behaviour) as engine:
        answer = await LiveAnswerer(engine).answer(made_task(1))
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    request = behaviour.requests[-1]
    assert request["model"] == "fake"
    assert request["temperature"] == 0
    assert request["max_tokens"] == 8
    assert request["messages"] == made_task(1).messages


async def test_thoughts_and_calls_are_read() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = message_of(content=None, reasoning="Hm.", tool_calls=[call])
    limits = AnswerLimits(think_tokens=100, mode=ThinkingMode.ON)
    behaviour = Behaviour(instead={CHAT: body})
    async with connected(behaviour) as engine:
        answer = await LiveAnswerer(engine, limits).answer(made_task(1))
    assert answer.reasoning == "Hm."
    assert answer.tool_calls[0].name == "f"


async def test_a_failed_request_is_sent_again() -> None:
    """The engine fails at first and answers from then on."""
    behaviour = Behaviour(status=503)

    class Recovering(LiveAnswerer):
        async def _ask(self, task: Any) -> Any:
            try:
                return await super()._ask(task)
            finally:
                behaviour.status = 200

    async with connected(behaviour) as engine:
        answerer = Recovering(engine, retry_pauses_s=(0.0,))
        answer = await answerer.answer(made_task(1))
    assert answer.text == "The capital of France is Paris."
    assert len(behaviour.requests) == 2


async def test_a_refusal_is_not_sent_again() -> None:
    behaviour = Behaviour(status=400)
    async with connected(behaviour) as engine:
        with pytest.raises(RefusedError):
            await LiveAnswerer(engine).answer(made_task(1))
    assert len(behaviour.requests) == 1


async def test_an_engine_that_fails_again_and_again_is_an_error() -> None:
    behaviour = Behaviour(status=500)
    async with connected(behaviour) as engine:
        with pytest.raises(ProbeError, match="HTTP 500"):
            await LiveAnswerer(engine, retry_pauses_s=(0.0, 0.0)).answer(made_task(1))
    assert len(behaviour.requests) == 3


async def test_an_answer_that_takes_too_long_is_not_asked_for_again() -> None:
    sent: list[str] = []

    async def note_request(request: httpx.Request) -> None:
        sent.append(request.url.path)

    async with connected(Behaviour(hung={CHAT})) as engine:
        engine.probe.client.event_hooks["request"].append(note_request)
        with pytest.raises(ProbeError, match=r"no complete answer within 0\.1 s"):
            await LiveAnswerer(engine, timeout_s=0.1).answer(made_task(1))
    assert sent == [CHAT]


@pytest.mark.parametrize(
    "body",
    [
        '{"choices": []}',
        '{"choices": [{"message": null}]}',
        message_of(content=["text"]),
        message_of(content="x", tool_calls="none"),
    ],
)
async def test_an_answer_of_another_form_is_an_error(body: str) -> None:
    async with connected(Behaviour(instead={CHAT: body})) as engine:
        with pytest.raises(ProbeError):
            await LiveAnswerer(engine, retry_pauses_s=()).answer(made_task(1))
