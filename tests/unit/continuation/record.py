"""Record the streams of the matrix from real engines, to tests/data/continuation/streams.json.gz.

usage: PYTHONPATH=. .venv/bin/python -m tests.unit.continuation.record CHECKPOINT

CHECKPOINT is the folder of SmolLM2-135M-Instruct that ``qarr model prepare`` made, in bf16. Its engines run in
``engine.python``, one after the other, with the plugin of tiers/engine_plugin. They say what a script holds, so that the
weights do not matter: a model of one layer with weights that are made up takes the place of the checkpoint's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.engine.chart_processes import PYTHON, running, until_ok
from tests.engine.thinking_checkpoint import END_OF_TURN, make_thinking
from tests.ports import reserved_ports
from tests.unit.continuation.recording import (
    AS_ASKED,
    CONTINUED,
    RECORDINGS,
    WITH_IDS,
    Recording,
    Recordings,
)
from tests.unit.continuation.requests import (
    CHAT,
    CHOICES,
    COMPLETIONS,
    DRAFTS,
    GENERATE,
    LOGPROBS,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    STOP,
    STOP_STRING,
    TEXT_KINDS,
    THINKING_KINDS,
    WRITTEN,
    CellRequest,
    requests,
)

ROOT = Path(__file__).resolve().parents[3]
# How many tokens come in one event where an engine drafts.
DRAFTED = 3
SAMPLER = "tests.unit.continuation.scripted_sampling:ScriptedSampling"
TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
AT_ONCE = 16
TRIES = 12
MARK = ": qarr-tokens "
# in one process less
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine.

    Attributes:
        end_of_turn: The special token that ends an answer of its model.
    """

    http: httpx.AsyncClient
    end_of_turn: str
    places: asyncio.Semaphore

    async def token_ids(self, **prompt: Any) -> tuple[list[int], list[str]]:
        """Return the ids and the texts of a prompt's tokens."""
        body = {**prompt, "return_token_strs": True}
        answer = (await self.http.post("/tokenize", json=body)).raise_for_status()
        content = answer.json()
        return content["tokens"], content["token_strs"]

    async def stream(
        self,
        path: str,
        body: dict[str, Any],
        script: list[int],
        *,
        known: int = 0,
        is_resumed: bool = False,
    ) -> str:
        """Return the stream of an answer whose first tokens are known."""
        body = {**body, "vllm_xargs": {"script": script, "known": known}}
        headers = {"x-qarr-tokens": "1"}
        if is_resumed:
            headers["x-qarr-resume"] = "1"
            body["qarr_resume"] = {"token_ids": script[:known], "finish_reason": None}
        async with self.places:
            answer = await self.http.post(path, json=body, headers=headers)
        if answer.status_code != httpx.codes.OK:
            raise SystemExit(f"{path}: {answer.text}\n{body}")
        return answer.text


@asynccontextmanager
async def _engine(
    checkpoint: Path, arguments: tuple[str, ...], end_of_turn: str
) -> AsyncIterator[Engine]:
    """Start an engine; stop it afterwards."""
    (port,) = reserved_ports()
    folder = Path(tempfile.mkdtemp(prefix="qarr-record-"))
    argv = [str(PYTHON), str(ROOT / "tiers/lifecycle/engine_main.py")]
    argv += ["--model", str(checkpoint), "--served-model-name", MODEL]
    argv += ["--load-format", "dummy", "--hf-overrides", json.dumps(TINY)]
    argv += ["--enforce-eager", "--port", str(port), "--max-model-len", "2048"]
    argv += ["--max-num-seqs", str(AT_ONCE), "--no-async-scheduling"]
    argv += ["--enable-prompt-tokens-details", "--no-enable-prefix-caching"]
    argv += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    argv += ["--tool-strict-level", "parameter", "--logits-processors", SAMPLER]
    argv += ["--distributed-executor-backend", EXECUTOR]
    argv += arguments
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tiers/engine_plugin'}:{os.environ.get('PYTHONPATH', '')}",
    }
    url = f"http://127.0.0.1:{port}"
    log = folder / "engine.out"
    sys.stdout.write(f"engine's log: {log}\n")
    with running(argv, {**os.environ, **own}, log) as process:
        until_ok(f"{url}/health", process, log)
        client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=120)
        async with client as http:
            yield Engine(http, end_of_turn, asyncio.Semaphore(AT_ONCE))


def _bytes_of(token: str) -> bytes:
    """Return the bytes of a token that byte-level BPE writes as printable characters, as GPT-2 does."""
    return bytes(_BYTE_OF[character] for character in token)


def _byte_of() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    characters |= {chr(256 + number): byte for number, byte in enumerate(others)}
    return characters


_BYTE_OF = _byte_of()


def engine_body(request: CellRequest) -> dict[str, Any]:
    """Return what the router sends to the engine that begins, as far as its stream depends on it."""
    body = request.body
    if request.endpoint == GENERATE:
        messages = [{"role": "user", "content": body["prompt"]}]
        body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if request.kind == STOP:
            body["stop"] = [STOP_STRING]
    return {**body, "model": MODEL}


async def record(request: CellRequest, engine: Engine, recordings: Recordings) -> None:
    """Record one request's streams."""
    script = await _script_of(request, engine, recordings)
    path = request.engine_path
    body = engine_body(request)
    answer = Recording(prompt_ids=await _prompt_ids(request, body, engine))
    ways = {AS_ASKED: body}
    if path in {CHAT, COMPLETIONS}:
        ways[WITH_IDS] = {**body, "return_token_ids": True}
    for way, way_body in ways.items():
        whole = await _whole(request, path, way_body, script=script, engine=engine)
        answer.streams[way] = {0: whole}
        answer.output_ids = script if request.kind == CHOICES else _told(whole)
    if request.kind not in {LOGPROBS, CHOICES}:
        for way, way_body in ways.items():
            await _record_resumes(way, path, way_body, engine=engine, answer=answer)
    if request.kind in TEXT_KINDS and path in {CHAT, COMPLETIONS}:
        await _record_continuations(request, engine, answer)
    recordings.answers[request.name] = answer
    sys.stdout.write(f"{request.name}: {len(answer.output_ids)} tokens\n")


async def _whole(
    request: CellRequest,
    path: str,
    body: dict[str, Any],
    *,
    script: list[int],
    engine: Engine,
) -> str:
    """Record a whole stream: that of several in which the fewest tokens come together, as they do on a busy machine."""
    whole = await engine.stream(path, body, script)
    if request.kind == CHOICES:
        return whole
    most_at_once = DRAFTED if request.kind == DRAFTS else 1
    for _ in range(TRIES):
        if _number_told_alone(whole) >= len(_told(whole)) / most_at_once:
            break
        other = await engine.stream(path, body, script)
        whole = max(whole, other, key=_number_told_alone)
    return whole


def _number_told_alone(stream: str) -> int:
    """Return how many of a stream's comments there are: each tells the tokens that came together."""
    return stream.count(MARK)


async def _script_of(
    request: CellRequest, engine: Engine, recordings: Recordings
) -> list[int]:
    """Return the tokens that the model is to write, and note their texts."""
    script, tokens = await engine.token_ids(
        prompt=WRITTEN[request.kind], add_special_tokens=False
    )
    recordings.vocabulary |= {
        token_id: _bytes_of(token)
        for token_id, token in zip(script, tokens, strict=True)
    }
    (end_id,), _ = await engine.token_ids(
        prompt=engine.end_of_turn, add_special_tokens=False
    )
    recordings.vocabulary[end_id] = engine.end_of_turn.encode()
    recordings.hidden = sorted({*recordings.hidden, end_id})
    return [*script, end_id]


async def _prompt_ids(
    request: CellRequest, body: dict[str, Any], engine: Engine
) -> list[int]:
    if request.engine_path == COMPLETIONS:
        token_ids, _ = await engine.token_ids(prompt=QUESTION)
        return token_ids
    messages = [{"role": "user", "content": QUESTION}]
    token_ids, _ = await engine.token_ids(messages=messages)
    return token_ids


def _told(stream: str) -> list[int]:
    """Return the token ids that a stream's comments tell."""
    lines = [line for line in stream.split("\n") if line.startswith(MARK)]
    told = ",".join(line.removeprefix(MARK) for line in lines)
    return [int(token_id) for token_id in told.split(",") if token_id]


async def _record_resumes(
    way: str, path: str, body: dict[str, Any], *, engine: Engine, answer: Recording
) -> None:
    """Record how the stream begins anew, for each number of tokens that are known."""
    numbers = range(1, len(answer.output_ids) + 1)
    streams = [
        engine.stream(path, body, answer.output_ids, known=known, is_resumed=True)
        for known in numbers
    ]
    answer.streams[way] |= zip(numbers, await asyncio.gather(*streams), strict=True)


async def _record_continuations(
    request: CellRequest, engine: Engine, answer: Recording
) -> None:
    """Record how /v1/completions goes on from token ids."""
    body: dict[str, Any] = {
        "model": MODEL,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if request.kind == STOP:
        body["stop"] = [STOP_STRING]
    numbers = range(len(answer.output_ids))
    streams = []
    for known in numbers:
        prompt = [*answer.prompt_ids, *answer.output_ids[:known]]
        limited = {**body, "prompt": prompt, "max_tokens": MAX_TOKENS - known}
        streams.append(
            engine.stream(COMPLETIONS, limited, answer.output_ids, known=known)
        )
    replies = await asyncio.gather(*streams)
    answer.streams[CONTINUED] = dict(zip(numbers, replies, strict=True))


@dataclass(frozen=True, slots=True)
class _Plan:
    """One engine, and the kinds that it is asked."""

    checkpoint: Path
    arguments: tuple[str, ...]
    end_of_turn: str
    takes: Callable[[str], bool]


async def main() -> None:
    plain = Path(sys.argv[1])
    thinking = Path(tempfile.mkdtemp(prefix="qarr-record-")) / "thinking"
    make_thinking(plain, thinking)
    recordings = Recordings(
        engine={"engine": "vLLM 0.32.0", "tokenizer": "SmolLM2-135M-Instruct"},
        vocabulary={},
        hidden=[],
        answers={},
    )
    others = {*THINKING_KINDS, DRAFTS}
    plans = (
        _Plan(plain, (), "<|im_end|>", lambda kind: kind not in others),
        _Plan(plain, ("--stream-interval", str(DRAFTED)), "<|im_end|>", DRAFTS.__eq__),
        _Plan(
            thinking,
            ("--reasoning-parser", "deepseek_r1"),
            END_OF_TURN,
            THINKING_KINDS.__contains__,
        ),
    )
    for plan in plans:
        async with _engine(plan.checkpoint, plan.arguments, plan.end_of_turn) as engine:
            for request in requests():
                if plan.takes(request.kind):
                    await record(request, engine, recordings)
    RECORDINGS.parent.mkdir(parents=True, exist_ok=True)
    recordings.save()


if __name__ == "__main__":
    asyncio.run(main())
