"""The clients that people use, unmodified, against the router: SDKs, LangChain, vLLM's own load generator."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.conftest import Up

ROOT = Path(__file__).resolve().parents[2]
NODE = Path(__file__).resolve().parents[1] / "clients/node"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,  # else vLLM leaves the arguments to the model
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}


SCHEMA: Any = {**TOOL["function"]["parameters"], "additionalProperties": False}
GREEDY = {"temperature": 0}  # in extra_body: the SDK of Anthropic's API has no argument for it


class Place(BaseModel):
    """An answer with structure."""

    city: str = Field(max_length=12)


@pytest.fixture
def client(up: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_the_sdk_answers_and_tells_who_served(client: openai.OpenAI) -> None:
    """A plain chat, and the headers through the SDK's own way to them."""
    raw = client.chat.completions.with_raw_response.create(
        model="auto", messages=QUESTION, max_tokens=16, temperature=0
    )
    assert "Paris" in (raw.parse().choices[0].message.content or "")
    assert raw.headers["x-qarr-tier"] == "fast"
    assert "precise" in [model.id for model in client.models.list()]
    assert client.models.retrieve("auto").owned_by == "qarr"


def test_the_sdk_streams(client: openai.OpenAI) -> None:
    """Pieces, usage and the report, as the SDK's own objects."""
    with client.chat.completions.create(
        model="fast",
        messages=QUESTION,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"qarr": {"report": True}, "ignore_eos": True},
    ) as stream:
        *pieces, counted, report = list(stream)
    assert "Paris" in "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert counted.usage is not None
    assert counted.usage.completion_tokens == 16
    assert len(pieces) > 3
    assert report.model_extra is not None
    assert report.model_extra["qarr"]["tier"] == "fast"


def test_the_sdk_parses_structure_and_tools(client: openai.OpenAI) -> None:
    """A pydantic answer and a tool call, through the SDK's own parsing."""
    parsed = client.chat.completions.parse(
        model="fast", messages=QUESTION, max_tokens=60, temperature=0, response_format=Place
    )
    assert isinstance(parsed.choices[0].message.parsed, Place)
    called = client.chat.completions.create(
        model="precise",
        messages=[{"role": "user", "content": "Weather in Paris?"}],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=60,
        temperature=0,
    )
    calls = called.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    assert calls[0].function.name == "weather"
    json.loads(calls[0].function.arguments)  # what is in it is the small model's affair


def test_the_sdks_errors(client: openai.OpenAI) -> None:
    """Refusals come as the SDK's own classes, the engine's as well as ours."""
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4o", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="at least one message"):
        client.chat.completions.create(model="auto", messages=[])
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "word " * 9000}])
    assert long.value.code == "context_length_exceeded"


def test_the_async_sdk_in_parallel(up: Up) -> None:
    """Streams at the same time, each whole and in order."""

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="unused") as client:

            async def one(number: int) -> str:
                stream = await client.chat.completions.create(
                    model="fast",
                    messages=[{"role": "user", "content": f"What is {number} plus one?"}],
                    max_tokens=8,
                    temperature=0,
                    stream=True,
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(n) for n in range(8)))

    assert all(asyncio.run(run()))


@pytest.fixture
def claude(up: Up) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=up.url, api_key="unused", max_retries=0) as made:
        yield made


def test_anthropics_sdk(claude: anthropic.Anthropic) -> None:
    """A message, who served it, its tokens counted beforehand, and a stream with the SDK's own accumulation."""
    asked: Any = {"model": "fast", "system": "Be brief.", "messages": QUESTION}
    raw = claude.messages.with_raw_response.create(**asked, max_tokens=16, extra_body=GREEDY)
    answer = raw.parse()
    assert (raw.headers["x-qarr-tier"], answer.stop_reason) == ("fast", "end_turn")
    assert answer.content[0].type == "text"
    assert "Paris" in answer.content[0].text
    assert claude.messages.count_tokens(**asked).input_tokens == answer.usage.input_tokens
    with claude.messages.stream(**asked, max_tokens=16, extra_body=GREEDY) as stream:
        whole = stream.get_final_message()
    assert whole.content[0].type == "text"
    assert whole.content[0].text == answer.content[0].text
    assert (whole.usage.output_tokens, whole.stop_reason) == (answer.usage.output_tokens, "end_turn")
    report = {**GREEDY, "qarr": {"report": True}}
    *_, last = claude.messages.create(**asked, max_tokens=16, stream=True, extra_body=report)
    assert last.to_dict()["qarr"]["tier"] == "fast"


def test_anthropics_async_sdk_in_parallel(up: Up) -> None:
    """Streams at the same time, each whole and in order."""

    async def run() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=up.url, api_key="unused", max_retries=0) as client:

            async def one(number: int) -> str:
                messages: Any = [{"role": "user", "content": f"What is {number} plus one?"}]
                async with client.messages.stream(
                    model="fast", messages=messages, max_tokens=8, extra_body=GREEDY
                ) as stream:
                    said = "".join([text async for text in stream.text_stream])
                    assert said == await stream.get_final_text()
                return said

            return await asyncio.gather(*(one(n) for n in range(4)))

    assert all(asyncio.run(run()))


@pytest.mark.parametrize("streamed", [True, False])
def test_an_agent_with_anthropics_sdk(claude: anthropic.Anthropic, streamed: bool) -> None:  # noqa: FBT001
    """The model calls a tool, gets what it returned, calls it again, and answers; each turn sends the whole conversation."""
    tool: Any = {"name": "weather", "description": "The weather of a city", "input_schema": SCHEMA, "strict": True}
    talk: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "none"}):
        asked: Any = {"model": "precise", "messages": talk, "tools": [tool], "tool_choice": choice, "max_tokens": 100}
        if streamed:
            with claude.messages.stream(**asked, extra_body=GREEDY) as stream:
                answer = stream.get_final_message()
        else:
            answer = claude.messages.create(**asked, extra_body=GREEDY)
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert bool(calls) is (choice["type"] != "none")
        assert (answer.stop_reason == "tool_use") is bool(calls)
        assert all(isinstance(call.input["city"], str) for call in calls)
        talk.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"} for call in calls]
        talk.append({"role": "user", "content": results})


def test_anthropics_sdks_errors(claude: anthropic.Anthropic) -> None:
    """Refusals come as the SDK's own classes, the engine's as well as ours."""
    asked: Any = {"max_tokens": 8, "messages": QUESTION}
    with pytest.raises(anthropic.NotFoundError, match="no model 'claude-x'"):
        claude.messages.create(model="claude-x", **asked)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be positive"):
        claude.messages.create(model="auto", **{**asked, "max_tokens": 0})
    with pytest.raises(anthropic.BadRequestError, match="exceed its context"):
        claude.messages.create(model="auto", **{**asked, "messages": [{"role": "user", "content": "word " * 9000}]})
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.count_tokens(model="auto", messages=[{"role": "nobody", "content": "x"}])  # type: ignore[typeddict-item]
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


def test_the_sdks_responses(client: openai.OpenAI) -> None:
    """A response, the same streamed, and a tool's call with its result in the next request's input."""
    asked: Any = {"model": "precise", "input": QUESTION, "max_output_tokens": 16, "temperature": 0}
    raw = client.responses.with_raw_response.create(**asked)
    answer = raw.parse()
    assert (raw.headers["x-qarr-tier"], answer.status) == ("precise", "completed")
    assert "Paris" in answer.output_text
    with client.responses.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text == answer.output_text
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    talk: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    more: Any = {**asked, "max_output_tokens": 100, "tools": [tool]}
    called = client.responses.create(**{**more, "input": talk}, tool_choice="required")
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert isinstance(json.loads(call.arguments)["city"], str)
    talk += [
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"},
    ]
    assert client.responses.create(**{**more, "input": talk}, tool_choice="none").output_text
    with pytest.raises(openai.BadRequestError, match="are stored here"):
        client.responses.create(**asked, previous_response_id=answer.id)
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.responses.retrieve(answer.id)


def test_langchain(up: Up) -> None:
    """LangChain's chat model: invoke, stream with usage, structured output, its own errors."""
    model = ChatOpenAI(
        model="auto",
        base_url=f"{up.url}/v1",
        api_key="unused",
        temperature=0,
        max_completion_tokens=60,
        stream_usage=True,
    )
    answer = model.invoke("What is the capital of France?")
    assert "Paris" in str(answer.content)
    pieces = list(model.stream("What is the capital of France?"))
    assert "Paris" in "".join(piece.text for piece in pieces)
    assert any(piece.usage_metadata for piece in pieces)
    place = model.with_structured_output(Place, method="json_schema").invoke("What is the capital of France?")
    assert isinstance(place, Place)
    talk: list[Any] = [("user", "Weather in Paris?")]
    for choice in ("any", "none"):  # an agent's loop; left to itself, the small model calls tools with nonsense
        answer = model.bind_tools([TOOL], tool_choice=choice).invoke(talk)
        assert bool(answer.tool_calls) is (choice == "any")
        talk += [answer, *(ToolMessage("sunny", tool_call_id=call["id"]) for call in answer.tool_calls)]


def test_agents_finish_their_loops(up: Up) -> None:
    """openai-agents: a tool, then an answer with what it returned. pydantic-ai: a tool that takes the answer."""
    agents.set_tracing_disabled(disabled=True)
    asked: list[str] = []

    @agents.function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather of a city."""
        asked.append(city)
        return "sunny, 21 degrees"

    async def loops() -> str:
        async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="unused") as client:
            options = agents.ModelSettings(tool_choice="required", temperature=0, max_tokens=60)
            model = agents.OpenAIChatCompletionsModel("precise", client)
            agent = agents.Agent("a", model=model, tools=[weather], model_settings=options)
            assert (await agents.Runner.run(agent, "What is the weather in Paris?", max_turns=3)).final_output
            other = OpenAIChatModel("precise", provider=OpenAIProvider(openai_client=client))
            answer = pydantic_ai.ToolOutput(Place, strict=True)
            typed = pydantic_ai.Agent(other, output_type=answer, model_settings={"temperature": 0, "max_tokens": 90})
            return (await typed.run("What is the capital of France?")).output.city

    assert asyncio.run(loops())
    assert asked


def test_open_webuis_first_message(up: Up) -> None:
    """As Open WebUI 0.12.4 sent it, but for the descriptions of its tools: the answer streams."""
    body = json.loads((Path(__file__).resolve().parents[1] / "clients/open_webui.json").read_text("utf-8"))
    with httpx.stream("POST", f"{up.url}/v1/chat/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        assert any('"content":"' in line for line in islice(answer.iter_lines(), 20))


@pytest.mark.parametrize("stream", [True, False])
def test_tools_that_are_only_offered(up: Up, stream: bool) -> None:  # noqa: FBT001
    """As chat front-ends and agents send them with their first message: engines started here have a parser for them."""
    for path, body, tool in (
        ("chat/completions", {"messages": QUESTION, "max_tokens": 9}, TOOL),
        ("messages", {"messages": QUESTION, "max_tokens": 9}, {"name": "weather", "input_schema": SCHEMA}),
        (
            "responses",
            {"input": "hi", "max_output_tokens": 9},
            {"type": "function", "name": "weather", "parameters": SCHEMA},
        ),
    ):
        for tier in ("fast", "balanced", "precise"):
            asked = {"model": tier, "stream": stream, "tools": [tool], **body}
            answer = httpx.post(f"{up.url}/v1/{path}", json=asked, timeout=120)
            assert answer.status_code == 200, answer.text


def test_the_jdks_client(up: Up) -> None:
    """Java's HttpClient with its defaults: whole and streamed answers, and a body in gzip."""
    client = Path(__file__).resolve().parents[1] / "clients/java/Client.java"
    done = subprocess.run(
        [_program("java"), str(client), up.url], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    whole, *events, packed = filter(None, done.stdout.splitlines())
    assert whole.startswith("200 {")
    assert (events[0].startswith("200 data: {"), events[-1]) == (True, "data: [DONE]")
    assert json.loads(packed)["choices"] == json.loads(whole[4:])["choices"]


def test_the_node_sdk(up: Up, tmp_path: Path) -> None:
    """OpenAI's JavaScript SDK: chat, streams, an early end, structure, headers, errors, models."""
    done = subprocess.run(
        [_program("node"), "--test", "--test-reporter=tap", str(_node_project() / "openai.test.mjs")],
        env={**os.environ, "QARR_URL": up.url},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# pass 7" in done.stdout


def test_vllms_own_load_generator(up: Up) -> None:
    """``vllm bench serve`` through the router: every request is answered, streamed, with token counts."""
    command = _blocks("bash")[_index("bash", "benchmarks.serve")].replace("http://localhost:8080", up.url)
    folder = up.tiers()["precise"]["checkpoint"]
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "MODEL_FOLDER": folder, "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"Successful requests:\s+8\b", done.stdout), done.stdout[-2000:]
    assert re.search(r"Total generated tokens:\s+64\b", done.stdout), done.stdout[-2000:]


def test_the_documents_python(up: Up) -> None:
    """The Python in docs/openai.md runs as it stands, one example after the other."""
    code = [block.replace("http://localhost:8080", up.url) for block in _blocks("python")]
    each = "import json, sys\nfor code in json.load(sys.stdin): exec(code, {'__name__': '__main__'}); print('\\f')"
    done = subprocess.run(
        [sys.executable, "-c", each], input=json.dumps(code), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    *shown, _ = done.stdout.split("\f")
    assert len(shown) == len(code) > 6
    for found in shown:
        assert re.search(r"Paris|auto \[\('int4', 2048, 'ready'\)", found), done.stdout


def test_the_documents_javascript(up: Up) -> None:
    code = _blocks("js")[0].replace("http://localhost:8080", up.url)
    script = _node_project() / "document.mjs"
    script.write_text(code)
    done = subprocess.run([_program("node"), str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_the_documents_commands(up: Up, tmp_path: Path) -> None:
    """The curl commands in the documents and the first commands of docs/security.md, on keys, run as they stand."""
    blocks = [*_blocks("bash"), *_blocks("bash", "docs/api.md")]
    curls = [block for block in blocks if "curl" in block and "capital of France" in block]
    assert len(curls) == 3
    for curl in curls:
        assert "Paris" in _shell(curl.replace("localhost:8080", up.url.removeprefix("http://")), {})
    keys = _shell(_blocks("bash", "docs/security.md")[0], {"QARR_AUTH__KEYS_FILE": str(tmp_path / "keys.json")})
    assert "revoked key" in keys


def _node_project() -> Path:
    """Return a folder that has the SDK installed, in the cache; made where it is missing."""
    import hashlib

    lock = (NODE / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("QARR_CACHE_DIR") or Path.home() / ".cache/qarr")
    made = cache / "envs" / f"node-clients-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not (made / ".complete").exists():
        made.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(NODE / name, made)
        subprocess.run([_program("npm"), "ci", "--no-fund", "--no-audit"], cwd=made, check=True, timeout=300)
        (made / ".complete").touch()
    shutil.copy(NODE / "openai.test.mjs", made)
    return made


def _program(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name} is not installed: scripts/setup services, or apt-get install nodejs npm"
    return found


def _blocks(language: str, document: str = "docs/openai.md") -> list[str]:
    text = (ROOT / document).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _index(language: str, marker: str) -> int:
    return next(number for number, block in enumerate(_blocks(language)) if marker in block)


def _shell(command: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-ec", command],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
