"""Real engines whose streams are resumed: how they are started, what they are asked, and what their streams say."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.deploy.services import ROOT
from tests.engine.chart_processes import PYTHON, running
from tiers.checkpoints.parsers import parser_args

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MODEL = "smollm2-135m-instruct"
CHUNK_TOKENS = 256  # Of a prompt, so many are computed in a step.
QUESTION = "Tell me about Paris."
TOKENS_COMMENT = ": qarr-tokens "
TELL_TOKENS = {"x-qarr-tokens": "1"}
RESUME = {"x-qarr-resume": "1", **TELL_TOKENS}
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


@contextmanager
def started_thinker(
    checkpoint: Path, port: int, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start vLLM with a model that thinks, computing in float32; kill it afterwards."""
    argv = [str(PYTHON), str(ROOT / "tiers/lifecycle/engine_main.py")]
    argv += ["--model", str(checkpoint), "--served-model-name", MODEL]
    argv += ["--enforce-eager", "--port", str(port), "--dtype", "float32"]
    argv += ["--max-model-len", "1024", "--max-num-seqs", "16"]
    argv += ["--max-num-batched-tokens", str(CHUNK_TOKENS)]
    argv += parser_args(checkpoint, ())
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with running(argv, {**os.environ, **own}, log) as engine:
        yield engine


@dataclass(frozen=True, slots=True)
class Case:
    """A request whose answer is resumed, and what its answer must have."""

    path: str
    fields: Mapping[str, Any]
    parts: tuple[str, ...] = ()

    @property
    def body(self) -> dict[str, Any]:
        """Return the request's body, with what all of an endpoint's requests have."""
        messages = [{"role": "user", "content": QUESTION}]
        common: dict[str, Any] = {"model": MODEL, "stream": True, "temperature": 0}
        match self.path:
            case "/v1/chat/completions":
                usage = {"include_usage": True}
                own = {"messages": messages, "max_tokens": 64, "stream_options": usage}
            case "/v1/completions":
                usage = {"include_usage": True}
                own = {"prompt": QUESTION, "max_tokens": 24, "stream_options": usage}
            case "/v1/messages":
                own = {"messages": messages, "max_tokens": 64}
            case _:
                own = {"input": QUESTION, "max_output_tokens": 64}
        return {**common, **own, **self.fields}


@dataclass(slots=True)
class Stream:
    """What an engine streamed.

    Attributes:
        token_ids: The ids that its comments told.
        events: The data of its events.
        order: What came one after the other: the number of ids in a comment, or an event.
    """

    token_ids: list[int] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    order: list[int | dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, body: str) -> Stream:
        stream = cls()
        for block in body.split("\n\n"):
            if block.startswith(TOKENS_COMMENT):
                ids = [
                    int(word) for word in block.removeprefix(TOKENS_COMMENT).split(",")
                ]
                stream.token_ids += ids
                stream.order.append(len(ids))
                continue
            for line in block.split("\n"):
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    stream.events.append(event)
                    stream.order.append(event)
        return stream

    def parts(self) -> dict[str, str]:
        """Return the answer's texts and how it ended: all but ids and times, and how it is cut into events."""
        parts: defaultdict[str, str] = defaultdict(str)
        for event in self.events:
            for name, text in read_event(event):
                parts[name] += text
        return dict(parts)


def read_event(event: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Read the named pieces of an answer from an event of any endpoint."""
    if "error" in event:
        yield "error", json.dumps(event)
    elif "choices" in event:
        yield from read_chunk(event)
    elif event["type"].startswith("response"):
        yield from read_response_event(event)
    else:
        yield from read_message_event(event)


def read_chunk(chunk: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for read_choice in chunk["choices"]:
        delta = read_choice.get("delta") or {"content": read_choice.get("text")}
        yield "text", delta.get("content") or ""
        yield "thought", delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            yield f"call {call['index']}: name", function.get("name") or ""
            yield f"call {call['index']}: arguments", function.get("arguments") or ""
        if read_choice.get("finish_reason"):
            yield "end", f"{read_choice['finish_reason']}, {read_choice['stop_reason']}"
    if chunk.get("usage"):
        usage = {
            name: count
            for name, count in chunk["usage"].items()
            if name != "prompt_tokens_details"
        }
        yield "usage", json.dumps(usage)


def read_message_event(event: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    match event["type"]:
        case "content_block_start":
            block = event["content_block"]
            yield f"block {event['index']}", f"{block['type']} {block.get('name')}"
        case "content_block_delta":
            for name, piece in event["delta"].items():
                if name not in {"type", "signature"}:
                    yield f"block {event['index']}: {name}", piece
        case "message_delta":
            yield "end", json.dumps(event["delta"])
            yield "usage", str(event["usage"]["output_tokens"])


def read_response_event(event: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kind = event["type"]
    if kind.endswith(".delta"):
        yield f"{kind} {event['output_index']}", event["delta"]
    elif kind.endswith(".done"):
        kept = {name: event[name] for name in ("text", "arguments") if name in event}
        yield kind, json.dumps(kept)
    elif kind in {"response.completed", "response.incomplete"}:
        usage = event["response"]["usage"]
        yield "usage", f"{usage['input_tokens']}, {usage['output_tokens']}"
        yield "end", json.dumps([kind, event["response"]["incomplete_details"]])
