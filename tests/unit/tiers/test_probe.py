"""What an engine may answer that is not as vLLM answers: each is an error that says what was wrong."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.responses import StreamingResponse

from tests.fakes.engine import Behaviour, FakeEngine, serving
from tiers.errors import ProbeError, RefusedError
from tiers.probe import CHAT, COMPLETIONS, EngineProbe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

pytestmark = pytest.mark.anyio
MODELS, TOKENIZE, METRICS = "/v1/models", "/tokenize", "/metrics"
DEEP = "[" * 100_000
GAUGES = "vllm:num_requests_running {}\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc {}\n"
ODD = [
    (MODELS, '{"object": "list", "data": []}', "data: Tuple should have at least 1 item"),
    (MODELS, '{"error": {"message": "loading"}}', "answers with an error: loading"),
    (MODELS, '{"data": [{"id": "m"}]}', "max_model_len: Field required"),
    (MODELS, '{"data": [{"id": "m", "max_model_len": NaN}]}', "max_model_len: Input should be a finite number"),
    (MODELS, '{"data": {"id": "m"}}', "data: Input should be a valid tuple"),
    (MODELS, "[]", "the answer: Input should be a valid dictionary"),
    (MODELS, "<html>", "does not answer JSON"),
    (MODELS, DEEP, "does not answer JSON"),
    (TOKENIZE, '{"error": "loading"}', "answers with an error: loading"),
    (TOKENIZE, '{"tokens": null}', "tokens: Input should be a valid tuple"),
    (TOKENIZE, '{"tokens": [1, "x"]}', "tokens.1: Input should be a valid integer"),
    (CHAT, 'data: {"choi\n\n', "does not answer JSON"),
    (CHAT, "data: []\n\ndata: [DONE]\n\n", "the answer: Input should be a valid dictionary"),
    (CHAT, 'data: {"choices": [{"delta": "x"}]}\n\ndata: [DONE]\n\n', "choices.0.delta: Input should be"),
    (CHAT, 'data: {"choices": null}\n\ndata: [DONE]\n\n', "choices: Input should be a valid tuple"),
    (CHAT, 'data: {"usage": {"completion_tokens": -1}}\n\ndata: [DONE]\n\n', "usage.prompt_tokens: Field required"),
    (CHAT, 'data: {"error": {"message": "engine died"}}\n\n', "answers with an error: engine died"),
    (CHAT, 'data: {"choices": []}\n\n', "the stream ends without [DONE]"),
    (CHAT, "", "the stream ends without [DONE]"),
    (COMPLETIONS, '{"choices": [{"index": 0, "text": "x"}]}', "It must return token ids"),
    (COMPLETIONS, '{"choices": []}', "answers 0 of 2 prompts"),
    (METRICS, "", "has no vLLM gauges"),
    (METRICS, GAUGES.format("NaN", 0), "vllm:num_requests_running is NaN"),
    (METRICS, GAUGES.format(0, "+Inf"), "vllm:kv_cache_usage_perc is +Inf"),
    (METRICS, GAUGES.format(-1, 0), "vllm:num_requests_running is -1"),
    (METRICS, GAUGES.format("many", 0), "vllm:num_requests_running is many"),
    (METRICS, GAUGES.format(0, 0) + "vllm:prompt_tokens_total NaN\n", "vllm:prompt_tokens_total is NaN"),
]
ASKED: dict[str, Callable[[EngineProbe], Awaitable[Any]]] = {
    MODELS: lambda probe: probe.model(),
    TOKENIZE: lambda probe: probe.text_tokens("m", "hello"),
    CHAT: lambda probe: probe.generate(CHAT, {"model": "m", "messages": []}, 10),
    COMPLETIONS: lambda probe: probe.greedy_tokens("m", ("a", "b"), 2, 10),
    METRICS: lambda probe: probe.readings(),
}


@pytest.mark.parametrize(("path", "content", "said"), ODD, ids=[f"{path} {said}" for path, _, said in ODD])
async def test_what_is_no_answer_of_vllms(path: str, content: str, said: str) -> None:
    """Every malformed answer of status 200 is a ProbeError with the address and what is wrong, on every path."""
    async with serving(FakeEngine(Behaviour(instead={path: content})).app) as url, httpx.AsyncClient() as client:
        with pytest.raises(ProbeError) as caught:
            await ASKED[path](EngineProbe(client, url, ""))
    assert str(caught.value).startswith(url + path)
    assert said in str(caught.value)


async def test_what_vllm_answers_is_read() -> None:
    """All the same calls on a sound engine."""
    async with serving(FakeEngine().app) as url, httpx.AsyncClient() as client:
        probe = EngineProbe(client, url, "")
        assert await probe.model() == ("fake", 8192)
        assert await probe.text_tokens("m", "a bb") == [1, 2]
        answer = await ASKED[CHAT](probe)
        assert (answer.text, answer.completion_tokens) == ("The capital of France is Paris.", 7)
        assert await ASKED[COMPLETIONS](probe) == ((0, 1), (0, 1))
        gauges, counters = await probe.readings()
        assert (gauges.running, gauges.kv_cache_usage, counters.output_tokens) == (0, 0.25, 7)


async def test_a_refusal_is_told_from_other_errors() -> None:
    """HTTP 400 means that the engine does not take such a request; its text is in the error."""
    behaviour = Behaviour(status=400, error="no such field")
    async with serving(FakeEngine(behaviour).app) as url, httpx.AsyncClient() as client:
        probe = EngineProbe(client, url, "")
        with pytest.raises(RefusedError, match=r"HTTP 400: .*no such field"):
            await ASKED[CHAT](probe)
        behaviour.status = 500
        with pytest.raises(ProbeError, match="HTTP 500") as caught:
            await ASKED[COMPLETIONS](probe)
        assert not isinstance(caught.value, RefusedError)


async def test_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that never ends, or that trickles for ever, does not hold its watcher up."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 10_000
            await asyncio.sleep(0)

    async def trickle() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.01)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] in {"http", "lifespan"}
        if scope["type"] == "http":
            parts = trickle() if scope["path"] in {MODELS, "/health"} else endless()
            await StreamingResponse(parts)(scope, receive, send)

    monkeypatch.setattr("tiers.probe.MOST_BYTES", 1_000_000)
    monkeypatch.setattr("tiers.probe.ANSWER_S", 0.5)
    async with serving(app) as url, httpx.AsyncClient() as client:
        probe = EngineProbe(client, url, "")
        assert not await probe.alive()
        with pytest.raises(ProbeError, match=r"no complete answer within 0\.5 s"):
            await probe.model()
        monkeypatch.setattr("tiers.probe.ANSWER_S", 30.0)
        for path in (METRICS, TOKENIZE, CHAT):
            with pytest.raises(ProbeError, match="answers more than 1000000 bytes"):
                await ASKED[path](probe)


async def test_an_address_that_is_none() -> None:
    """Nothing can be asked there, and that is said like every other fault."""
    async with httpx.AsyncClient() as client:
        for url in ("http://[", "nowhere", "http://127.0.0.1:1"):
            probe = EngineProbe(client, url, "")
            assert not await probe.alive()
            for ask in ASKED.values():
                with pytest.raises(ProbeError):
                    await ask(probe)
