"""What the cells of the matrix ask, and what the model writes to it: by endpoint and kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GENERATE = "/generate"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
ENDPOINTS = (GENERATE, COMPLETIONS, CHAT, MESSAGES, RESPONSES)

PLAIN = "plain"
THINKING = "thinking"
TOOL_CHOSEN = "tool call chosen by the model"
TOOL_REQUIRED = "tool required"
AGENT = "thinking, text and tool calls"
SCHEMA = "JSON schema"
LOGPROBS = "logprobs"
CHOICES = "n > 1"
STOP = "stop strings"
ADAPTER = "adapter"
DRAFTS = "drafts"
KINDS = (
    PLAIN,
    THINKING,
    TOOL_CHOSEN,
    TOOL_REQUIRED,
    AGENT,
    SCHEMA,
    LOGPROBS,
    CHOICES,
    STOP,
    ADAPTER,
    DRAFTS,
)

MODEL = "fake"
# As long as the name of the model, whose place it takes in recorded streams: a break is at the same byte.
ADAPTER_NAME = "tone"
QUESTION = "What is in a.py?"
MAX_TOKENS = 200
STOP_STRING = "END"

END_OF_THOUGHT = "</think>"
_TEXT = "Été: 🗼 is in a.py."
_THOUGHT = "They ask for a file.\n"
_CALLS = (
    '\n<tool_call>\n{"name": "read", "arguments": {"path": "é"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)
_REQUIRED_CALLS = (
    '<tool_call>{"name": "read", "arguments": {"path": "é"}}</tool_call>'
    '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
)
# What the model writes, without the token that ends its turn.
WRITTEN = {
    PLAIN: _TEXT,
    THINKING: f"{_THOUGHT}{END_OF_THOUGHT}\n\n{_TEXT}",
    TOOL_CHOSEN: f"I look.{_CALLS}",
    TOOL_REQUIRED: _REQUIRED_CALLS,
    AGENT: f"{_THOUGHT}{END_OF_THOUGHT}\n\nI look.{_CALLS}",
    SCHEMA: '{"city": "Orléans", "stars": 5}',
    LOGPROBS: "It is a.py.",
    CHOICES: "It is a.py.",
    STOP: f"It is 🗼 in E. {STOP_STRING} of it.",
    ADAPTER: _TEXT,
    DRAFTS: _TEXT,
}
# The kinds in which the engine parses what the model thinks.
THINKING_KINDS = (THINKING, AGENT)
# The kinds in which the engine parses tool calls.
TOOL_KINDS = (TOOL_CHOSEN, TOOL_REQUIRED, AGENT)
# The kinds whose answers are text alone, which /v1/completions continues.
TEXT_KINDS = (PLAIN, STOP, ADAPTER, DRAFTS)
_NOT_APPLICABLE = {
    GENERATE: {
        TOOL_CHOSEN: "no tools there",
        TOOL_REQUIRED: "no tools there",
        AGENT: "no tools there",
        SCHEMA: "no schema there",
        LOGPROBS: "no log-probabilities there",
        CHOICES: "one answer a request",
    },
    COMPLETIONS: {
        THINKING: "a thought is text there",
        TOOL_CHOSEN: "no tools there",
        TOOL_REQUIRED: "no tools there",
        AGENT: "no tools there",
    },
    MESSAGES: {
        LOGPROBS: "the API has none",
        CHOICES: "the API has one answer a request",
    },
    RESPONSES: {
        CHOICES: "the API has one answer a request",
        STOP: "the API has none",
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "stars": {"type": "integer"}},
    "required": ["city", "stars"],
    "additionalProperties": False,
}
_TOOLS = {
    "read": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    },
    "stop": {"type": "object", "properties": {}},
}


@dataclass(frozen=True, slots=True)
class CellRequest:
    """One endpoint and kind: what a client sends to the router.

    Attributes:
        endpoint: The router's path.
    """

    endpoint: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.endpoint} {self.kind}"

    @property
    def engine_path(self) -> str:
        """Return the path at which the engine that begins is asked."""
        return CHAT if self.endpoint == GENERATE else self.endpoint

    @property
    def body(self) -> dict[str, Any]:
        """Return the client's body."""
        return {**_BODIES[self.endpoint](self.kind), "stream": True}


def not_applicable(endpoint: str, kind: str) -> str | None:
    """Return why a kind does not exist at an endpoint; None: it does."""
    return _NOT_APPLICABLE.get(endpoint, {}).get(kind)


def requests() -> list[CellRequest]:
    """Return all requests of the matrix."""
    return [
        CellRequest(endpoint, kind)
        for endpoint in ENDPOINTS
        for kind in KINDS
        if not_applicable(endpoint, kind) is None
    ]


def _model(kind: str) -> str:
    return ADAPTER_NAME if kind == ADAPTER else MODEL


def _generate(kind: str) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": QUESTION, "max_tokens": MAX_TOKENS}
    if kind == STOP:
        body["stop"] = [STOP_STRING]
    if kind == ADAPTER:
        body["adapter"] = ADAPTER_NAME
    return body


def _completions(kind: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": _model(kind), "prompt": QUESTION}
    if kind == LOGPROBS:
        body["logprobs"] = 1
    return {**body, **_openai_members(kind)}


def _chat(kind: str) -> dict[str, Any]:
    message = {"role": "user", "content": QUESTION}
    body: dict[str, Any] = {"model": _model(kind), "messages": [message]}
    if kind == LOGPROBS:
        body["logprobs"] = True
    if kind in TOOL_KINDS:
        body["tools"] = [
            {"type": "function", "function": {"name": name, "parameters": parameters}}
            for name, parameters in _TOOLS.items()
        ]
        body["tool_choice"] = "required" if kind == TOOL_REQUIRED else "auto"
    return {**body, **_openai_members(kind)}


def _openai_members(kind: str) -> dict[str, Any]:
    """Return what completions and chats share."""
    members: dict[str, Any] = {
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    if kind == STOP:
        members["stop"] = [STOP_STRING]
    if kind == CHOICES:
        members |= {"n": 2, "temperature": 1}  # vLLM refuses several greedy answers
    if kind == SCHEMA:
        json_schema = {"name": "place", "schema": _SCHEMA}
        members["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    return members


def _messages(kind: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": _model(kind),
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    if kind in TOOL_KINDS:
        body["tools"] = [
            {"name": name, "input_schema": parameters}
            for name, parameters in _TOOLS.items()
        ]
        body["tool_choice"] = {"type": "any" if kind == TOOL_REQUIRED else "auto"}
    if kind == STOP:
        body["stop_sequences"] = [STOP_STRING]
    if kind == SCHEMA:
        body["output_config"] = {"format": {"type": "json_schema", "schema": _SCHEMA}}
    return body


def _responses(kind: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": _model(kind),
        "input": QUESTION,
        "max_output_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    if kind in TOOL_KINDS:
        body["tools"] = [
            {"type": "function", "name": name, "parameters": parameters}
            for name, parameters in _TOOLS.items()
        ]
        body["tool_choice"] = "required" if kind == TOOL_REQUIRED else "auto"
    if kind == SCHEMA:
        format_ = {"type": "json_schema", "name": "place", "schema": _SCHEMA}
        body["text"] = {"format": format_}
    if kind == LOGPROBS:
        body["include"] = ["message.output_text.logprobs"]
        body["top_logprobs"] = 1
    return body


_BODIES = {
    GENERATE: _generate,
    COMPLETIONS: _completions,
    CHAT: _chat,
    MESSAGES: _messages,
    RESPONSES: _responses,
}
