"""Clients that people use, unmodified, against the router: SDKs, LangChain, vLLM's own load generator."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from ast import literal_eval
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import agents
import anthropic
import httpx
import openai
import pydantic_ai
import pytest
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.engine.conftest import CAPITAL
from tests.engine.examples import blocks, check_output, messages_in, served_by, text_in
from tests.engine.node_project import node_project, program
from tests.engine.scoring import forbid_tool_calls, forbid_whitespace
from tests.ports import reserved_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.conftest import Up

ROOT = Path(__file__).resolve().parents[2]
OPENAI = "docs/openai.md"
QUESTION: list[Any] = [{"role": "user", "content": CAPITAL}]
TOOL: Any = {
    "type": "function",
    "function": {
        # SDKs write no "strict" here.
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}


SCHEMA: Any = {**TOOL["function"]["parameters"], "additionalProperties": False}
# The length of the answer does not depend on chance.
CITIES: Any = {**SCHEMA, "properties": {"city": {"enum": ["Paris", "Rome"]}}}
# Anthropic's SDK has no argument for it, so it goes into extra_body.
GREEDY = {"temperature": 0}


class Place(BaseModel):
    """An answer with structure."""

    city: str = Field(max_length=12)


@pytest.fixture
def client(up: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{up.url}/v1", api_key="unused", max_retries=0
    ) as made:
        yield made


@pytest.fixture
def no_whitespace(up: Up) -> dict[str, float]:
    return forbid_whitespace(up.tiers()["precise"]["checkpoint"])


def test_the_sdk_answers_and_tells_who_served(up: Up, client: openai.OpenAI) -> None:
    """A plain chat, and the headers through the SDK's own way to them."""
    raw = client.chat.completions.with_raw_response.create(
        model="auto", messages=QUESTION, max_tokens=16, temperature=0
    )
    up.scorer(raw.headers["x-qarr-tier"]).check_answer(
        QUESTION, raw.parse().choices[0].message.content or ""
    )
    assert "precise" in [model.id for model in client.models.list()]
    assert client.models.retrieve("auto").owned_by == "qarr"


def test_the_sdk_streams(up: Up, client: openai.OpenAI) -> None:
    """Pieces, usage and the report, as the SDK's own objects; the pieces are the engine's tokens."""
    with client.chat.completions.create(
        model="fast",
        messages=QUESTION,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={
            "qarr": {"report": True},
            "ignore_eos": True,
            "return_token_ids": True,
        },
    ) as stream:
        *pieces, counted, report = list(stream)
    choices: list[Any] = [piece.choices[0] for piece in pieces]
    tokens: list[int] = []
    for choice in choices:
        tokens += getattr(choice, "token_ids", None) or ()
    fast = up.scorer("fast")
    fast.check_tokens(fast.prompt_ids(QUESTION), tokens)
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == fast.text_of(tokens)
    assert len(tokens) == 16
    assert counted.usage is not None
    assert counted.usage.completion_tokens == 16
    assert len(pieces) > 3
    assert report.model_extra is not None
    assert report.model_extra["qarr"]["tier"] == "fast"


def test_the_sdk_parses_structure_and_tools(
    client: openai.OpenAI, no_whitespace: dict[str, float]
) -> None:
    """A pydantic answer and a tool call, through the SDK's own parsing."""
    parsed = client.chat.completions.parse(
        model="fast",
        messages=QUESTION,
        max_tokens=60,
        temperature=0,
        response_format=Place,
        logit_bias=no_whitespace,  # type: ignore[arg-type]
    )
    assert isinstance(parsed.choices[0].message.parsed, Place)
    called = client.chat.completions.create(
        model="precise",
        messages=[{"role": "user", "content": "Weather in Paris?"}],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=60,
        temperature=0,
        logit_bias=no_whitespace,  # type: ignore[arg-type]
    )
    calls = called.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    assert calls[0].function.name == "weather"
    # The arguments are JSON; their values are the small model's affair.
    json.loads(calls[0].function.arguments)


def test_the_sdks_errors(client: openai.OpenAI) -> None:
    """Refusals come as the SDK's own classes, the engine's as well as ours."""
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4o", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="at least one message"):
        client.chat.completions.create(model="auto", messages=[])
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": "word " * 9000}]
        )
    assert long.value.code == "context_length_exceeded"


def test_the_async_sdk_in_parallel(up: Up) -> None:
    """Streams at the same time, each whole and in order."""

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{up.url}/v1", api_key="unused"
        ) as client:

            async def answer_to(number: int) -> str:
                stream = await client.chat.completions.create(
                    model="fast",
                    messages=[
                        {"role": "user", "content": f"What is {number} plus one?"}
                    ],
                    max_tokens=8,
                    temperature=0,
                    stream=True,
                )
                return "".join(
                    [chunk.choices[0].delta.content or "" async for chunk in stream]
                )

            return await asyncio.gather(*(answer_to(number) for number in range(8)))

    assert all(asyncio.run(run()))


@pytest.fixture
def claude(up: Up) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=up.url, api_key="unused", max_retries=0) as made:
        yield made


def test_anthropics_sdk(up: Up, claude: anthropic.Anthropic) -> None:
    """A message, who served it, its tokens counted beforehand, and a stream with the SDK's own accumulation."""
    request: Any = {"model": "fast", "system": "Be brief.", "messages": QUESTION}
    raw = claude.messages.with_raw_response.create(
        **request, max_tokens=16, extra_body=GREEDY
    )
    answer = raw.parse()
    assert raw.headers["x-qarr-tier"] == "fast"
    if answer.stop_reason != "end_turn":
        assert answer.stop_reason == "max_tokens"
        assert answer.usage.output_tokens == 16
    assert answer.content[0].type == "text"
    system = {"role": "system", "content": request["system"]}
    up.scorer("fast").check_answer([system, *QUESTION], answer.content[0].text)
    counted = claude.messages.count_tokens(**request)
    assert counted.input_tokens == answer.usage.input_tokens
    with claude.messages.stream(**request, max_tokens=16, extra_body=GREEDY) as stream:
        final = stream.get_final_message()
    assert final.content[0].type == "text"
    assert final.content[0].text == answer.content[0].text
    assert final.usage.output_tokens == answer.usage.output_tokens
    assert final.stop_reason == answer.stop_reason
    report = {**GREEDY, "qarr": {"report": True}}
    *_, last = claude.messages.create(
        **request, max_tokens=16, stream=True, extra_body=report
    )
    assert last.to_dict()["qarr"]["tier"] == "fast"


def test_anthropics_async_sdk_in_parallel(up: Up) -> None:
    """Streams at the same time, each whole and in order."""

    async def run() -> list[str]:
        async with anthropic.AsyncAnthropic(
            base_url=up.url, api_key="unused", max_retries=0
        ) as client:

            async def answer_to(number: int) -> str:
                messages: Any = [
                    {"role": "user", "content": f"What is {number} plus one?"}
                ]
                async with client.messages.stream(
                    model="fast", messages=messages, max_tokens=8, extra_body=GREEDY
                ) as stream:
                    text = "".join([piece async for piece in stream.text_stream])
                    assert text == await stream.get_final_text()
                return text

            return await asyncio.gather(*(answer_to(number) for number in range(4)))

    assert all(asyncio.run(run()))


@pytest.mark.parametrize("streamed", [True, False])
def test_an_agent_with_anthropics_sdk(
    claude: anthropic.Anthropic,
    streamed: bool,  # noqa: FBT001
) -> None:
    """The model calls a tool, gets what it returned, calls it again, and answers; each turn sends the whole conversation."""
    tool: Any = {
        "name": "weather",
        "description": "The weather of a city",
        "input_schema": CITIES,
    }
    talk: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    for choice in (
        {"type": "any"},
        {"type": "tool", "name": "weather"},
        {"type": "none"},
    ):
        request: Any = {
            "model": "precise",
            "messages": talk,
            "tools": [tool],
            "tool_choice": choice,
            "max_tokens": 100,
        }
        if streamed:
            with claude.messages.stream(**request, extra_body=GREEDY) as stream:
                answer = stream.get_final_message()
        else:
            answer = claude.messages.create(**request, extra_body=GREEDY)
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert bool(calls) is (choice["type"] != "none")
        assert (answer.stop_reason == "tool_use") is bool(calls)
        assert all(call.input["city"] in {"Paris", "Rome"} for call in calls)
        talk.append(
            {
                "role": "assistant",
                "content": [
                    block.model_dump(exclude_none=True) for block in answer.content
                ],
            }
        )
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": "sunny, 21 degrees",
            }
            for call in calls
        ]
        talk.append({"role": "user", "content": results})


def test_anthropics_sdks_errors(claude: anthropic.Anthropic) -> None:
    """Refusals come as the SDK's own classes, the engine's as well as ours."""
    request: Any = {"max_tokens": 8, "messages": QUESTION}
    with pytest.raises(anthropic.NotFoundError, match="no model 'claude-x'"):
        claude.messages.create(model="claude-x", **request)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be positive"):
        claude.messages.create(model="auto", **{**request, "max_tokens": 0})
    with pytest.raises(anthropic.BadRequestError, match="exceed its context"):
        claude.messages.create(
            model="auto",
            **{**request, "messages": [{"role": "user", "content": "word " * 9000}]},
        )
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.count_tokens(
            model="auto", messages=[{"role": "nobody", "content": "x"}]
        )  # type: ignore[typeddict-item]
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


def test_the_sdks_responses(
    up: Up, client: openai.OpenAI, no_whitespace: dict[str, float]
) -> None:
    """A response, the same streamed, and a tool's call with its result in the next request's input."""
    request: Any = {
        "model": "precise",
        "input": QUESTION,
        "max_output_tokens": 16,
        "temperature": 0,
    }
    raw = client.responses.with_raw_response.create(**request)
    answer = raw.parse()
    assert raw.headers["x-qarr-tier"] == "precise"
    # The answer may end by itself, or at 16 tokens.
    assert answer.status in {"completed", "incomplete"}
    up.scorer("precise").check_answer(QUESTION, answer.output_text)
    with client.responses.stream(**request) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text == answer.output_text
    assert {
        "response.created",
        "response.output_text.delta",
        "response.completed",
    } <= kinds
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
    talk: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    more: Any = {**request, "max_output_tokens": 100, "tools": [tool]}
    bias = {"logit_bias": no_whitespace}
    called = client.responses.create(
        **{**more, "input": talk}, tool_choice="required", extra_body=bias
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert isinstance(json.loads(call.arguments)["city"], str)
    talk += [
        {
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
        },
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": "sunny, 21 degrees",
        },
    ]
    assert client.responses.create(
        **{**more, "input": talk}, tool_choice="none"
    ).output_text
    with pytest.raises(openai.BadRequestError, match="are stored here"):
        client.responses.create(**request, previous_response_id=answer.id)
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.responses.retrieve(answer.id)


def test_langchain(up: Up, no_whitespace: dict[str, float]) -> None:
    """LangChain's chat model: invoke, stream with usage, structured output, an agent's loop."""
    request: dict[str, Any] = {
        "model": "auto",
        "base_url": f"{up.url}/v1",
        "api_key": "unused",
        "temperature": 0,
        "max_completion_tokens": 60,
    }
    model = ChatOpenAI(**request, stream_usage=True)
    answer = model.invoke(CAPITAL)
    up.scorer(served_by(up)).check_answer(CAPITAL, str(answer.content))
    pieces = list(model.stream(CAPITAL))
    up.scorer(served_by(up)).check_answer(
        CAPITAL, "".join(piece.text for piece in pieces)
    )
    assert any(piece.usage_metadata for piece in pieces)
    model = ChatOpenAI(**request, logit_bias=no_whitespace)  # type: ignore[arg-type]
    place = model.with_structured_output(Place, method="json_schema").invoke(CAPITAL)
    assert isinstance(place, Place)
    talk: list[Any] = [("user", "Weather in Paris?")]
    # Left to itself, the small model calls tools with nonsense.
    for choice in ("any", "none"):
        answer = model.bind_tools([TOOL], tool_choice=choice).invoke(talk)
        assert bool(answer.tool_calls) is (choice == "any")
        assert not answer.invalid_tool_calls
        talk += [
            answer,
            *(
                ToolMessage("sunny", tool_call_id=call["id"])
                for call in answer.tool_calls
            ),
        ]


def test_agents_finish_their_loops(up: Up, no_whitespace: dict[str, float]) -> None:
    """An agent of openai-agents calls a tool and answers with its result; one of pydantic-ai answers by a tool.

    The first call is forced. By chance the model might go on with a second call until its tokens are used up, so it is
    prevented, within an answer and in the next.
    """
    agents.set_tracing_disabled(disabled=True)
    cities: list[str] = []
    no_second_call = forbid_tool_calls(up.tiers()["precise"]["checkpoint"])

    @agents.function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather of a city."""
        cities.append(city)
        return "sunny, 21 degrees"

    async def loops() -> str:
        async with openai.AsyncOpenAI(
            base_url=f"{up.url}/v1", api_key="unused"
        ) as client:
            bias = {"logit_bias": {**no_whitespace, **no_second_call}}
            options = agents.ModelSettings(
                tool_choice="required", temperature=0, max_tokens=60, extra_args=bias
            )
            model = agents.OpenAIChatCompletionsModel("precise", client)
            agent = agents.Agent(
                "a", model=model, tools=[weather], model_settings=options
            )
            result = await agents.Runner.run(
                agent, "What is the weather in Paris?", max_turns=3
            )
            assert result.final_output
            typed_model = OpenAIChatModel(
                "precise", provider=OpenAIProvider(openai_client=client)
            )
            forced: Any = {
                "temperature": 0,
                "max_tokens": 90,
                "logit_bias": {**no_whitespace, **no_second_call},
            }
            typed = pydantic_ai.Agent(
                typed_model, output_type=Place, model_settings=forced
            )
            return (await typed.run(CAPITAL)).output.city

    assert asyncio.run(loops())
    assert cities


def test_open_webuis_first_message(up: Up) -> None:
    """The message is as Open WebUI 0.12.4 sent it, but for its tools' descriptions; the answer streams text or a call."""
    file = Path(__file__).resolve().parents[1] / "clients/open_webui.json"
    body = json.loads(file.read_text("utf-8"))
    with httpx.stream(
        "POST", f"{up.url}/v1/chat/completions", json=body, timeout=120
    ) as answer:
        assert answer.status_code == 200, answer.read()
        assert any(
            re.search('"content":"|"tool_calls":', line)
            for line in islice(answer.iter_lines(), 20)
        )


@pytest.mark.parametrize("stream", [True, False])
def test_tools_that_are_only_offered(up: Up, stream: bool) -> None:  # noqa: FBT001
    """Front-ends and agents offer tools with their first message, and engines started here have a parser for them."""
    for path, body, tool in (
        ("chat/completions", {"messages": QUESTION, "max_tokens": 9}, TOOL),
        (
            "messages",
            {"messages": QUESTION, "max_tokens": 9},
            {"name": "weather", "input_schema": SCHEMA},
        ),
        (
            "responses",
            {"input": "hi", "max_output_tokens": 9},
            {"type": "function", "name": "weather", "parameters": SCHEMA},
        ),
    ):
        for tier in ("fast", "balanced", "precise"):
            request = {"model": tier, "stream": stream, "tools": [tool], **body}
            answer = httpx.post(f"{up.url}/v1/{path}", json=request, timeout=120)
            assert answer.status_code == 200, answer.text


def test_the_jdks_client(up: Up) -> None:
    """Java's HttpClient with its defaults: whole and streamed answers, and a body in gzip."""
    client = Path(__file__).resolve().parents[1] / "clients/java/Client.java"
    process = subprocess.run(
        [program("java"), str(client), up.url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    final, *events, packed = filter(None, process.stdout.splitlines())
    assert final.startswith("200 {")
    assert events[0].startswith("200 data: {")
    assert events[-1] == "data: [DONE]"
    assert json.loads(packed)["choices"] == json.loads(final[4:])["choices"]


def test_the_node_sdk(up: Up, tmp_path: Path, no_whitespace: dict[str, float]) -> None:
    """OpenAI's JavaScript SDK: chat, streams, an early end, structure, headers, errors, models."""
    assert "# pass 7" in _node_tests(
        "openai.test.mjs", up, tmp_path, no_whitespace=no_whitespace
    )


def test_vercels_ai_sdk(
    up: Up, tmp_path: Path, no_whitespace: dict[str, float]
) -> None:
    """A tool that is required, whole and streamed: the SDK parses its arguments, and finds them valid."""
    assert "# pass 2" in _node_tests(
        "ai_sdk.test.mjs", up, tmp_path, no_whitespace=no_whitespace
    )


def test_a_tool_call_that_vllm_holds_back(up: Up, engine_keys: dict[str, str]) -> None:
    """While vLLM's parser holds a call back, vLLM sends token ids if asked. The router asks, and passes none on."""
    engine = up.replica("fast")["url"]
    key = engine_keys["fast"]
    request: Any = {
        "messages": [{"role": "user", "content": "Weather in Paris?"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 30,
        "temperature": 0,
        "stream": True,
    }
    silent = re.compile(r'"delta":\{\},"logprobs":null,"finish_reason":null')
    with httpx.Client(
        headers={"authorization": f"Bearer {key}"}, timeout=120, trust_env=False
    ) as client:
        model = client.get(f"{engine}/v1/models").json()["data"][0]["id"]
        own = {**request, "model": model, "return_token_ids": True}
        direct = client.post(f"{engine}/v1/chat/completions", json=own).text
        routed = client.post(
            f"{up.url}/v1/chat/completions", json={**request, "model": "fast"}
        ).text
    assert silent.search(direct)
    assert "tool_calls" in routed
    assert not silent.search(routed)
    assert '_ids":[' not in routed


@pytest.mark.parametrize("stream", [True, False])
def test_thinking_of_a_model_that_does_not_think(
    claude: anthropic.Anthropic,
    stream: bool,  # noqa: FBT001
) -> None:
    """Anthropic's clients ask every model to think: they get an answer without it, and a header that says so."""
    request: Any = {
        "model": "fast",
        "messages": QUESTION,
        "max_tokens": 1032,
        "stream": stream,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    raw = claude.messages.with_raw_response.create(**request, extra_body=GREEDY)
    assert raw.headers["x-qarr-ignored"] == "thinking"
    if stream:
        assert any(event.type == "message_stop" for event in raw.parse())
    else:
        assert raw.parse().content[0].type == "text"


def test_vllms_own_load_generator(up: Up) -> None:
    """``vllm bench serve`` through the router: every request is answered, streamed, with token counts.

    No answer to random tokens ends before its eighth token.
    """
    documented = next(
        block for block in blocks("bash", OPENAI) if "benchmarks.serve" in block
    )
    command = f"{documented.rstrip()} --ignore-eos".replace(
        "http://localhost:8080", up.url
    )
    folder = up.tiers()["precise"]["checkpoint"]
    process = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "MODEL_FOLDER": folder, "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert re.search(r"Successful requests:\s+8\b", process.stdout), process.stdout[
        -2000:
    ]
    generated = re.search(r"Total generated tokens:\s+64\b", process.stdout)
    assert generated, process.stdout[-2000:]


def test_the_documents_python(up: Up) -> None:
    """The Python in docs/openai.md runs as it stands, one example after the other, and prints likely answers."""
    code = [
        block.replace("http://localhost:8080", up.url)
        for block in blocks("python", OPENAI)
    ]
    run_each = "import json, sys\nfor code in json.load(sys.stdin): exec(code, {'__name__': '__main__'}); print('\\f')"
    process = subprocess.run(
        [sys.executable, "-c", run_each],
        input=json.dumps(code),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    *shown, _ = process.stdout.split("\f")
    assert len(shown) == len(code) > 6
    examples = list(zip(code, shown, strict=True))
    ((_, listed),) = [example for example in examples if "models.list" in example[0]]
    assert "auto [('int4', 2048, 'ready')" in listed
    asking = [example for example in examples if "models.list" not in example[0]]
    for number, (example, output) in enumerate(reversed(asking)):
        if "input_schema" in example:
            assert literal_eval(output.strip())["city"] in {"Paris", "Rome"}
        else:
            check_output(up, example, output, number=number)


def test_the_documents_javascript(up: Up) -> None:
    code = blocks("js", OPENAI)[0].replace("http://localhost:8080", up.url)
    script = node_project() / "document.mjs"
    script.write_text(code)
    process = subprocess.run(
        [program("node"), str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    check_output(up, code, process.stdout)


def test_the_documents_commands(up: Up, tmp_path: Path) -> None:
    """The curl commands in the documents and the first commands of docs/security.md, on keys, run as they stand.

    A command that asks for an answer as one object gets what the engine that served it finds likeliest.
    """
    documented = [*blocks("bash", OPENAI), *blocks("bash", "docs/api.md")]
    curls = [
        block for block in documented if "curl -s" in block and '"messages"' in block
    ]
    assert len(curls) == 3
    for curl in curls:
        address = up.url.removeprefix("http://")
        answer = json.loads(_shell(curl.replace("localhost:8080", address), {}))
        up.scorer(served_by(up)).check_answer(messages_in(curl), text_in(answer))
    (port,) = reserved_ports()
    keys = _shell(
        blocks("bash", "docs/security.md")[0],
        {
            "QARR_AUTH__KEYS_FILE": str(tmp_path / "keys.json"),
            # where a router of this machine serves without keys, at its socket or port, the first key is made after a question
            "XDG_RUNTIME_DIR": str(tmp_path),
            "QARR_SERVER__PORT": str(port),
        },
    )
    assert "revoked key" in keys


def _node_tests(
    script: str, up: Up, folder: Path, no_whitespace: dict[str, float]
) -> str:
    """Run a file of Node's tests, and return what it reports; they have all passed."""
    process = subprocess.run(
        [
            program("node"),
            "--test",
            "--test-reporter=tap",
            str(node_project() / script),
        ],
        env={**os.environ, "QARR_URL": up.url, "LOGIT_BIAS": json.dumps(no_whitespace)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def _shell(command: str, env: dict[str, str]) -> str:
    process = subprocess.run(
        ["bash", "-ec", command],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
