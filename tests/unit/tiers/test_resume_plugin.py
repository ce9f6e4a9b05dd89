"""The resume protocol as the engine plugin speaks it over HTTP; what it changes inside vLLM is tested on real engines."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from tests.fakes.engine import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from starlette.requests import Request

PLUGIN = Path(__file__).resolve().parents[3] / "tiers/engine_plugin/qarr_vllm_resume.py"
CHAT = "/v1/chat/completions"
VOCABULARY = 100


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    """Return the plugin as the engine loads it; outside of its functions it needs no vLLM."""
    spec = importlib.util.spec_from_file_location("qarr_vllm_resume_here", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # dataclasses look their module up
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


@dataclass
class Server:
    """An application inside the plugin's middleware, which computes given steps.

    Attributes:
        steps: The tokens of each step, and the event that they lead to.
        bodies: The bodies that it was asked with.
        known: The known outputs that it took.
    """

    plugin: ModuleType
    steps: Sequence[tuple[list[int], str | None]] = ()
    bodies: list[Any] = field(default_factory=list)
    known: list[Any] = field(default_factory=list)

    @property
    def app(self) -> Any:
        app = Starlette(
            routes=[
                Route("/v1/models", self._list),
                Route(CHAT, self._chat, methods=["POST"]),
            ]
        )
        model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
        app.state.vllm_config = SimpleNamespace(model_config=model_config)
        app.add_middleware(self.plugin.ResumeMiddleware)
        return app

    async def _list(self, _request: Request) -> JSONResponse:
        return JSONResponse({})

    async def _chat(self, request: Request) -> StreamingResponse:
        body = await request.body()
        assert request.headers["content-length"] == str(len(body))
        self.bodies.append(json.loads(body))
        outputs = self._compute()
        exchange = self.plugin.EXCHANGE.get()
        if exchange is not None:
            outputs = exchange.follow(outputs)
        return StreamingResponse(
            self._events(outputs), media_type="text/event-stream; charset=utf-8"
        )

    async def _compute(self) -> AsyncIterator[Any]:
        exchange = self.plugin.EXCHANGE.get()
        if exchange is not None:
            self.known.append(exchange.take_known())
        for token_ids, event in self.steps:
            output = SimpleNamespace(token_ids=token_ids)
            yield SimpleNamespace(outputs=[output], event=event)

    async def _events(self, outputs: AsyncIterator[Any]) -> AsyncIterator[str]:
        async for output in outputs:
            if output.event is not None:
                yield f"data: {output.event}\n\n"


def ask(server: Server, headers: dict[str, str], body: Any) -> httpx.Response:
    """Post a body to the server's chats."""

    async def run() -> httpx.Response:
        async with (
            serving(server.app) as url,
            httpx.AsyncClient(trust_env=False) as http,
        ):
            return await http.post(url + CHAT, headers=headers, json=body)

    return asyncio.run(run())


def test_each_answer_announces_the_capability(plugin: ModuleType) -> None:
    """Errors do as well."""

    async def run() -> list[httpx.Response]:
        async with (
            serving(Server(plugin).app) as url,
            httpx.AsyncClient(trust_env=False) as http,
        ):
            return [await http.get(url + path) for path in ("/v1/models", "/none")]

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200, 404]
    assert [answer.headers["x-qarr-resume"] for answer in answers] == ["1", "1"]


STEPS = [([5], "a"), ([6, 7], None), ([8], "b"), ([9], None)]


def test_tokens_come_before_their_events(plugin: ModuleType) -> None:
    """Tokens that lead to no event are told at once; none are told unasked."""
    told = ask(Server(plugin, STEPS), {"x-qarr-tokens": "1"}, {"stream": True})
    assert told.text == (
        ": qarr-tokens 5\n\ndata: a\n\n: qarr-tokens 6,7\n\n"
        ": qarr-tokens 8\n\ndata: b\n\n: qarr-tokens 9\n\n"
    )
    plain = ask(Server(plugin, STEPS), {}, {"stream": True})
    assert plain.text == "data: a\n\ndata: b\n\n"


def test_the_engine_gets_the_callers_body(plugin: ModuleType) -> None:
    """The member is taken out of it, and the known tokens are not told again."""
    known = {"token_ids": [5, 6], "finish_reason": "stop"}
    body = {"stream": True, "messages": [{"content": "ü"}]}
    server = Server(plugin, [([5, 6], "ab"), ([7], "c")])
    headers = {"x-qarr-resume": "1", "x-qarr-tokens": "1"}
    answer = ask(server, headers, {**body, "qarr_resume": known})
    assert answer.text == "data: ab\n\n: qarr-tokens 7\n\ndata: c\n\n"
    assert server.bodies == [body]
    assert server.known == [plugin.KnownOutput([5, 6], "stop")]


REFUSED = {
    "no member": ({"stream": True}, "qarr_resume is missing"),
    "no object": ([], "the body must be a JSON object"),
    "an id that is none": (
        {"stream": True, "qarr_resume": {"token_ids": [VOCABULARY]}},
        "qarr_resume.token_ids[0] is 100: the ids of this model's tokens are integers from 0 to 99",
    ),
    "several choices": (
        {"stream": True, "n": 3, "qarr_resume": {"token_ids": [5]}},
        "n is 3: answers with one choice are resumed",
    ),
    "several prompts": (
        {"stream": True, "prompt": ["a", "b"], "qarr_resume": {"token_ids": [5]}},
        "prompt has several prompts: an answer to one prompt is resumed",
    ),
    "no ids of a finished answer": (
        {"stream": True, "qarr_resume": {"token_ids": [], "finish_reason": "stop"}},
        "qarr_resume.token_ids is empty: an answer with a finish_reason has tokens",
    ),
    "log-probabilities": (
        {
            "stream": True,
            "include": ["message.output_text.logprobs"],
            "qarr_resume": {"token_ids": [5]},
        },
        "include names message.output_text.logprobs, which cannot be resumed: leave it out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_field(plugin: ModuleType, name: str) -> None:
    """It says what is wrong with it and what is allowed, and nothing is computed."""
    body, text = REFUSED[name]
    server = Server(plugin)
    answer = ask(server, {"x-qarr-resume": "1"}, body)
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]
    assert server.bodies == []


def test_a_zero_of_top_logprobs_asks_for_none(plugin: ModuleType) -> None:
    """Clients send it without wanting log-probabilities."""
    body = {"stream": True, "top_logprobs": 0, "qarr_resume": {"token_ids": [5]}}
    assert (
        ask(Server(plugin), {"x-qarr-resume": "1"}, body).status_code == httpx.codes.OK
    )


def test_another_vllm_is_not_changed(plugin: ModuleType) -> None:
    """The plugin knows the versions that it was tested with, and what of vLLM is not there."""
    assert plugin.is_tested("0.32.1")
    assert not plugin.is_tested("0.33.0")
    changes = plugin.find_changes()
    assert len(changes) == len(plugin.CHANGED)
    assert all("is not there" in change for change in changes)
