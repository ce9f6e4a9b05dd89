"""A real engine whose chat template opens a thought: found out, cut, bounded, switched off; and the fake beside it.

The small model did not learn to think. It goes on within its thought until the engine ends that, or a limit comes.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from router.deployment.layout import prepare_options
from router.profiling.answering import read_answer
from router.profiling.model_answer import ModelAnswer, ToolCall
from router.settings import load_settings
from tests.deploy.services import ROOT
from tests.engine.chart_processes import PYTHON, running, until_ok
from tests.engine.thinking_checkpoint import make_thinking
from tests.fakes.engine import serving
from tests.fakes.model_engine import ModelEngine, ThinkingModel
from tests.ports import reserved_ports
from tiers.checkpoints.parsers import STRICT, parser_args
from tiers.checkpoints.prepare import finished
from tiers.verification.thinking import (
    CHAT,
    Thinking,
    ThinkingMode,
    ThoughtForm,
    observe_thinking,
    switch_fields,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CAPITAL = {"role": "user", "content": "What is the capital of France?"}
ANSWER = "The capital of France is Paris."
CALL = ToolCall(name="weather", arguments='{"city": "Paris"}')
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
# A real engine must answer so behind its thought; the fake does.
SAYS_ANSWER = {"structured_outputs": {"choice": [ANSWER]}}
CALL_JSON = f'{{"name": "{CALL.name}", "arguments": {CALL.arguments}}}'
MAKES_CALL = {
    "structured_outputs": {"choice": [f"<tool_call>\n{CALL_JSON}\n</tool_call>"]}
}


@dataclass(frozen=True, slots=True)
class Client:
    """A client of one engine."""

    http: httpx.AsyncClient
    model: str

    async def __call__(
        self, path: str, body: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        answer = await self.http.post(path, json={"model": self.model, **body})
        if answer.status_code != httpx.codes.OK:
            return None
        parsed: Mapping[str, Any] = answer.json()
        return parsed

    async def chat(self, max_tokens: int = 24, **more: Any) -> dict[str, Any]:
        """Return what is read of an answer, and what the engine tells beside it."""
        body = {"messages": [CAPITAL], "max_tokens": max_tokens, "temperature": 0}
        response = await self(CHAT, {**body, **more})
        assert response is not None
        answer = read_answer(response)
        return {
            "thinks": bool(answer.reasoning),
            "text": answer.text,
            "calls": answer.tool_calls,
            "finish reason": answer.finish_reason,
            "is cut": answer.is_cut_while_thinking,
            "content": type(response["choices"][0]["message"]["content"]).__name__,
            "counts": "reasoning_tokens" in response["usage"]["completion_tokens_details"],
        }  # fmt: skip


async def script(url: str, model: str) -> dict[str, Any]:
    """Use all that is used of an engine whose model thinks, and return what came back."""
    off = switch_fields(ThinkingMode.OFF)
    on = switch_fields(ThinkingMode.ON)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as http:
        client = Client(http, model)
        return {
            "thinking": await observe_thinking(client),
            "by default": await client.chat(),
            "on": await client.chat(**on),
            "off": await client.chat(**off, **SAYS_ANSWER),
            "bounded": await client.chat(**SAYS_ANSWER, thinking_token_budget=5),
            "a call": await client.chat(
                80, tools=[TOOL], **MAKES_CALL, thinking_token_budget=5
            ),
        }


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start vLLM with the parsers that our own engines get for such a template; stop it afterwards."""
    (port,) = reserved_ports()
    folder = tmp_path_factory.mktemp("thinking")
    checkpoint = folder / "checkpoint"
    source = finished(prepare_options(load_settings()))[-1].path
    make_thinking(source, checkpoint)
    argv = [str(PYTHON), str(ROOT / "tiers/lifecycle/engine_main.py")]
    argv += ["--model", str(checkpoint), "--served-model-name", "thinker"]
    argv += ["--enforce-eager", "--port", str(port)]
    argv += ["--max-model-len", "1024", "--max-num-seqs", "4"]
    # Without strict tools, which would write a call by themselves.
    argv += parser_args(checkpoint, STRICT)
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    url = f"http://127.0.0.1:{port}"
    log = folder / "engine.out"
    with running(argv, {**os.environ, **own}, log) as engine:
        until_ok(f"{url}/health", engine, log)
        yield url


def test_fake_and_real_engine_think_alike(engine_url: str) -> None:
    """The template's switch, an opened thought, thoughts that are cut and bounded, and a call behind a thought."""
    fake_model = ThinkingModel(
        answer_to=lambda body: (
            ModelAnswer(text="", tool_calls=(CALL,))
            if "tools" in body
            else ModelAnswer(text=ANSWER)
        ),
        thought="It goes on and on. " * 100,
        has_switch=True,
        is_opened_by_prompt=True,
        reasoning_field="reasoning",
    )

    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        async with serving(ModelEngine(fake_model).app) as fake_url:
            return await script(fake_url, "fake"), await script(engine_url, "thinker")

    fake, real = asyncio.run(both())
    assert real["thinking"] == Thinking(
        can_switch=True,
        thinks_by_default=True,
        form=ThoughtForm.FIELD,
        opening_modes=(ThinkingMode.DEFAULT, ThinkingMode.ON),
    )
    assert real["by default"]["is cut"]
    assert real["bounded"]["text"] == ANSWER
    assert fake == real
