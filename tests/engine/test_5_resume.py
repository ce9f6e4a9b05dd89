"""A real engine goes on with answers that broke off after any token: text, thoughts, calls, schemas; at all its endpoints.

It computes in float32, so that a token is the same whether it was decoded or computed as part of a prompt.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from router.deployment.layout import prepare_options
from router.settings import load_settings
from tests.engine.chart_processes import PYTHON, until_ok
from tests.engine.resuming import (
    CHAT,
    CHUNK_TOKENS,
    COMPLETION,
    MESSAGES,
    MODEL,
    RESPONSES,
    RESUME,
    TELL_TOKENS,
    TOKENS_COMMENT,
    Case,
    Stream,
    started_thinker,
)
from tests.engine.thinking_checkpoint import make_thinking
from tests.ports import reserved_ports
from tiers.checkpoints.prepare import finished

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "London"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": CITY}
CALL_TEXT = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
MULTIBYTE_TEXT = "naïve café: 你好世界 🗼🍕"
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
BRIEF_THOUGHT = {"thinking_token_budget": 5}


def choice(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}}


CHAT_TOOL = {"tools": [{"type": "function", "function": FUNCTION}]}
MESSAGES_TOOL = {"tools": [{"name": "weather", "input_schema": CITY}]}
RESPONSES_TOOL = {"tools": [{"type": "function", **FUNCTION}]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
CASES = {
    "text": Case(CHAT, {**NO_THOUGHT, "max_tokens": 24}, ("text",)),
    "characters of several bytes": Case(
        CHAT, {**NO_THOUGHT, **choice(MULTIBYTE_TEXT)}, ("text",)
    ),
    "a thought": Case(CHAT, {"max_tokens": 24}, ("thought",)),
    "a thought and a text": Case(
        CHAT, {**BRIEF_THOUGHT, **choice(MULTIBYTE_TEXT)}, ("thought", "text")
    ),
    "a thought and a call": Case(
        CHAT, {**BRIEF_THOUGHT, **CHAT_TOOL, **choice(CALL_TEXT)}, ("thought", "call")
    ),
    "a forced call": Case(
        CHAT, {**NO_THOUGHT, **CHAT_TOOL, "tool_choice": "required"}, ("call",)
    ),
    "a schema": Case(CHAT, {**BRIEF_THOUGHT, "response_format": SCHEMA}, ("text",)),
    "a least length": Case(
        CHAT, {**NO_THOUGHT, "max_tokens": 16, "min_tokens": 12}, ("text",)
    ),
    "a completion": Case(COMPLETION, {}, ("text",)),
    "a message": Case(MESSAGES, {"max_tokens": 24}, ("thought",)),
    "a message with a call": Case(
        MESSAGES,
        {
            **MESSAGES_TOOL,
            **NO_THOUGHT,
            "tool_choice": {"type": "tool", "name": "weather"},
        },
        ("call",),
    ),
    "a response": Case(RESPONSES, {"max_output_tokens": 24}, ("thought",)),
    "a response with a call": Case(
        RESPONSES,
        {**RESPONSES_TOOL, **NO_THOUGHT, "tool_choice": "required"},
        ("call",),
    ),
}


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that all tests of this file ask."""

    http: httpx.AsyncClient

    async def stream(
        self, case: Case, headers: Mapping[str, str], **more: Any
    ) -> Stream:
        answer = await self.http.post(
            case.path, json={**case.body, **more}, headers=dict(headers)
        )
        assert answer.status_code == 200, answer.text
        return Stream.of(answer.text)

    async def resume(
        self,
        case: Case,
        token_ids: Sequence[int],
        finish_reason: str | None = None,
        **more: Any,
    ) -> Stream:
        known = {"token_ids": list(token_ids), "finish_reason": finish_reason}
        return await self.stream(case, RESUME, qarr_resume=known, **more)

    async def computed_tokens(self) -> float:
        """Return how many tokens the engine has computed, of prompts and outputs."""
        metrics = (await self.http.get("/metrics")).text
        counts = re.findall(
            r"^vllm:(?:prompt|generation)_tokens_total\{.*\} (\S+)$",
            metrics,
            re.MULTILINE,
        )
        assert len(counts) == 2
        return sum(map(float, counts))


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start an engine for this file's tests."""
    (port,) = reserved_ports()
    folder = tmp_path_factory.mktemp("resume")
    checkpoint = folder / "checkpoint"
    make_thinking(finished(prepare_options(load_settings()))[-1].path, checkpoint)
    url = f"http://127.0.0.1:{port}"
    log = folder / "engine.out"
    with started_thinker(checkpoint, port, log) as engine:
        until_ok(f"{url}/health", engine, log)
        yield url


def asked(url: str, script: Any) -> Any:
    """Run a script of requests to the engine."""

    async def run() -> Any:
        async with httpx.AsyncClient(
            base_url=url, trust_env=False, timeout=300
        ) as http:
            return await script(Engine(http))

    return asyncio.run(run())


def test_the_plugin_knows_this_vllm() -> None:
    """What the plugin changes inside vLLM is as it expects; otherwise answers that break off are lost on engines.

    After an update of vLLM, read the functions that this names, and whoever calls them, before ``TESTED_VERSIONS`` is
    extended.
    """
    code = (
        "import json, vllm, qarr_vllm_resume as plugin\n"
        "print(json.dumps([plugin.is_tested(vllm.__version__), plugin.find_changes()]))"
    )
    shown = subprocess.run(
        [str(PYTHON), "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    ).stdout.splitlines()
    assert json.loads(shown[-1]) == [True, []]


@pytest.mark.parametrize("name", CASES)
def test_an_answer_goes_on_after_each_token(engine_url: str, name: str) -> None:
    """Wherever it broke off, the resumed answer is the unbroken one, and its first piece holds all that is known."""
    case = CASES[name]

    async def script(engine: Engine) -> None:
        unbroken = await engine.stream(case, TELL_TOKENS)
        ids = unbroken.token_ids
        parts = unbroken.parts()
        assert "error" not in parts
        for part in case.parts:
            assert any(part in found for found in summary(parts)), parts
        cuts = sorted({1, 2, *range(3, len(ids), 6), len(ids) - 1})
        resumed = await asyncio.gather(
            *(engine.resume(case, ids[:cut]) for cut in cuts)
        )
        for cut, stream in zip(cuts, resumed, strict=True):
            assert stream.parts() == parts, cut
            assert ids[:cut] + stream.token_ids == ids, cut

    asked(engine_url, script)


def summary(parts: Mapping[str, str]) -> set[str]:
    """Name the kinds of output that an answer has, in one word for all endpoints."""
    kinds = set()
    for name, text in parts.items():
        if not text:
            continue
        if name == "text" or "output_text.delta" in name or name.endswith(": text"):
            kinds.add("text")
        if "thought" in name or "reasoning" in name or "thinking" in name:
            kinds.add("thought")
        if "call" in name or "partial_json" in name:
            kinds.add("call")
    return kinds


def test_comments_tell_each_token_before_its_event(engine_url: str) -> None:
    """They tell the tokens that the events of a chat name, each before that event; without the header there are none."""
    case = Case(CHAT, {**NO_THOUGHT, "max_tokens": 12, "return_token_ids": True}, ())

    async def script(engine: Engine) -> None:
        stream = await engine.stream(case, TELL_TOKENS)
        told = shown = 0
        for item in stream.order:
            if isinstance(item, int):
                told += item
                continue
            for read_choice in item["choices"]:
                shown += len(read_choice.get("token_ids") or ())
            assert shown <= told
        assert shown == told == 12
        named = [
            token_id
            for event in stream.events
            for read_choice in event["choices"]
            for token_id in read_choice.get("token_ids") or ()
        ]
        assert stream.token_ids == named
        plain = await engine.http.post(case.path, json=case.body)
        assert TOKENS_COMMENT.strip() not in plain.text
        assert plain.headers["x-qarr-resume"] == "1"
        assert Stream.of(plain.text).parts() == stream.parts()

    asked(engine_url, script)


@pytest.mark.parametrize("name", ["text", "a thought and a call", "a response"])
def test_a_finished_answer_is_not_computed_again(engine_url: str, name: str) -> None:
    """An engine tells an answer by its tokens that ended it, and its last events come at once."""
    case = CASES[name]

    async def script(engine: Engine) -> None:
        unbroken = await engine.stream(case, TELL_TOKENS)
        before = await engine.computed_tokens()
        resumed = await engine.resume(case, unbroken.token_ids)
        assert resumed.parts() == unbroken.parts()
        assert resumed.token_ids == []
        assert await engine.computed_tokens() == before

    asked(engine_url, script)


def test_a_finish_reason_ends_the_answer(engine_url: str) -> None:
    """An answer that ended for a reason that its tokens do not show ends so again."""
    case = CASES["text"]

    async def script(engine: Engine) -> None:
        unbroken = await engine.stream(case, TELL_TOKENS)
        for reason in ("stop", "length"):
            resumed = await engine.resume(case, unbroken.token_ids[:5], reason)
            assert resumed.parts()["end"] == f"{reason}, None"
            assert json.loads(resumed.parts()["usage"])["completion_tokens"] == 5

    asked(engine_url, script)


def test_stop_strings_count_across_the_seam(engine_url: str) -> None:
    """A stop string may lie before the seam, across it and behind it, and ends the answer as without a break."""
    case = CASES["a completion"]

    async def script(engine: Engine) -> None:
        plain = await engine.stream(case, TELL_TOKENS)
        text = plain.parts()["text"]
        stop = text[len(text) // 2 - 3 : len(text) // 2 + 4]
        unbroken = await engine.stream(case, TELL_TOKENS, stop=[stop])
        assert unbroken.parts()["end"] == f"stop, {stop}"
        ids = unbroken.token_ids
        assert ids == plain.token_ids[: len(ids)]
        for cut in range(1, len(ids) + 1):
            resumed = await engine.resume(case, ids[:cut], stop=[stop])
            assert resumed.parts() == unbroken.parts()
            assert ids[:cut] + resumed.token_ids == ids
        # An engine that computed beyond the stop string had told these tokens already.
        beyond = await engine.resume(case, plain.token_ids, stop=[stop])
        assert beyond.parts() == unbroken.parts()

    asked(engine_url, script)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "several choices": ({"n": 2}, "n is 2"),
    "not a stream": ({"stream": False}, "stream must be true"),
    "log-probabilities": ({"logprobs": True}, "logprobs cannot be resumed"),
    "of the prompt": ({"prompt_logprobs": 1}, "prompt_logprobs cannot be resumed"),
    "echo": ({"echo": True}, "echo cannot be resumed"),
    "no object": ({"qarr_resume": [1]}, "qarr_resume must be an object"),
    "no ids": ({"qarr_resume": {}}, "qarr_resume.token_ids must be a list"),
    "no token's id": (
        {"qarr_resume": {"token_ids": [5, 10**6]}},
        "qarr_resume.token_ids[1] is 1000000: the ids of this model's tokens are integers from 0 to 49151",
    ),
    "no id": (
        {"qarr_resume": {"token_ids": [True]}},
        "qarr_resume.token_ids[0] is true",
    ),
    "another reason": (
        {"qarr_resume": {"token_ids": [5], "finish_reason": "tool_calls"}},
        'qarr_resume.finish_reason is "tool_calls": null, "stop" and "length" are allowed',
    ),
    "another member": (
        {"qarr_resume": {"token_ids": [5], "text": "x"}},
        "qarr_resume.text is not known",
    ),
    "too many ids": (
        {"max_tokens": 2, "qarr_resume": {"token_ids": [5, 5, 5]}},
        "qarr_resume.token_ids has 3 ids, but max_tokens is 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_resumed_is_refused(engine_url: str, name: str) -> None:
    """The engine answers 400 and names the field, what is wrong with it and what is allowed."""
    fields, text = REFUSED[name]

    async def script(engine: Engine) -> None:
        known = {"qarr_resume": {"token_ids": [5], "finish_reason": None}}
        body = {**CASES["text"].body, **known, **fields}
        answer = await engine.http.post(CHAT, json=body, headers=RESUME)
        assert answer.status_code == 400
        assert text in answer.json()["error"]["message"]
        assert answer.headers["x-qarr-resume"] == "1"

    asked(engine_url, script)


def test_ids_of_another_answer_fail_alone(engine_url: str) -> None:
    """Tokens that an answer's grammar does not allow end this answer with an error; the engine serves on."""
    case = CASES["a forced call"]

    async def script(engine: Engine) -> None:
        resumed = await engine.resume(case, [5, 6, 7])
        assert "error" in resumed.parts()
        assert "call 0: name" in (await engine.stream(case, {})).parts()

    asked(engine_url, script)


def test_a_caller_cannot_set_the_note(engine_url: str) -> None:
    """The plugin's own note among a request's parameters is refused from outside."""

    async def script(engine: Engine) -> None:
        body = {**CASES["text"].body, "vllm_xargs": {"qarr_resume": 3}}
        answer = await engine.http.post(CHAT, json=body)
        assert "qarr_resume is not allowed" in answer.text

    asked(engine_url, script)


def test_a_seed_beside_a_long_prompt_ends_no_engine(engine_url: str) -> None:
    """The prompt is computed in several chunks, and the seed still makes the answer the same each time."""

    async def script(engine: Engine) -> None:
        body = {"model": MODEL, "seed": 5, "temperature": 1, "max_tokens": 8}
        body["prompt"] = "word " * (2 * CHUNK_TOKENS)
        answers = [await engine.http.post(COMPLETION, json=body) for _ in range(2)]
        first, second = (answer.json()["choices"][0]["text"] for answer in answers)
        assert first == second

    asked(engine_url, script)
