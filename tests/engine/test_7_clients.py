"""The clients that people use, unmodified, against the router: SDKs, LangChain, vLLM's own load generator."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from router.settings import load_settings
from tests.ports import reserved_range

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
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}


class Place(BaseModel):
    """An answer with structure."""

    city: str = Field(max_length=12)


@pytest.fixture
def client(up: Up) -> Iterator[openai.OpenAI]:
    """Return OpenAI's SDK, pointed at the router."""
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


@pytest.mark.parametrize("number", range(3))
def test_the_documents_python(up: Up, number: int) -> None:
    """The Python in docs/openai.md runs as it stands."""
    code = _blocks("python")[number].replace("http://localhost:8080", up.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_the_documents_javascript(up: Up) -> None:
    """The JavaScript in docs/openai.md runs as it stands."""
    code = _blocks("js")[0].replace("http://localhost:8080", up.url)
    script = _node_project() / "document.mjs"
    script.write_text(code)
    done = subprocess.run([_program("node"), str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_the_documents_commands(up: Up, tmp_path: Path) -> None:
    """The curl command and the key commands in docs/openai.md run as they stand."""
    curl = _blocks("bash")[_index("bash", "curl")].replace("localhost:8080", up.url.removeprefix("http://"))
    assert "Paris" in _shell(curl, {})
    keys = _shell(_blocks("bash")[_index("bash", "keys add")], {"QARR_AUTH__KEYS_FILE": str(tmp_path / "keys.json")})
    assert "revoked key" in keys


def test_embeddings_come_from_the_engine_named_for_them(up: Up, tmp_path: Path) -> None:
    """A vLLM that serves embeddings, started by hand, answers through a router that is told of it."""
    port = reserved_range(2)
    settings = load_settings()
    log = (tmp_path / "engine.log").open("wb")
    engine = subprocess.Popen(
        [
            str(settings.engine.python), str(ROOT / "tiers/lifecycle/engine_main.py"), "--model", up.tiers()["precise"]["checkpoint"],
            "--served-model-name", "embedder", "--runner", "pooling", "--convert", "embed", "--enforce-eager",
            "--port", str(port), "--max-model-len", "512", "--max-num-seqs", "2",
        ],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        stdout=log,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    router = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("qarr")),
            "serve",
            "--precise",
            up.replica("precise")["url"],
            "--port",
            str(port + 1),
        ],
        env={**os.environ, "QARR_OPENAI__EMBEDDINGS_URLS": json.dumps([url])},
        stderr=subprocess.DEVNULL,
    )
    try:
        _until_answered(f"{url}/health", engine)
        _until_answered(f"http://127.0.0.1:{port + 1}/healthz", router)
        body = {"model": "embedder", "input": ["one", "two"]}
        direct = httpx.post(f"{url}/v1/embeddings", json=body, timeout=60, trust_env=False)
        routed = httpx.post(f"http://127.0.0.1:{port + 1}/v1/embeddings", json=body, timeout=60, trust_env=False)
        assert routed.status_code == direct.status_code == 200, direct.text
        vectors = [[item["embedding"] for item in answer.json()["data"]] for answer in (direct, routed)]
        assert len(vectors[1]) == 2
        assert vectors[1] == vectors[0]
    finally:
        log.close()
        for process in (engine, router):
            process.terminate()
            process.wait(30)


def _until_answered(url: str, process: subprocess.Popen[Any]) -> None:
    import time

    deadline = time.monotonic() + 300
    while True:
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            assert process.poll() is None, f"what was to answer at {url} ended"
        assert time.monotonic() < deadline
        time.sleep(0.2)


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


def _blocks(language: str) -> list[str]:
    """Return the code blocks of docs/openai.md in a language."""
    text = (ROOT / "docs/openai.md").read_text("utf-8")
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
