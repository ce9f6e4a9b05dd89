"""Answers of every kind from a running router, each reduced to its form: status, headers, fields, events.

Numbers, texts and ids are reduced to their types, so a form depends neither on time nor on chance.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import httpx

from router.auth.api_keys import add_key
from tests.agents.errand import CALL_PREFIX
from tests.agents.stack import errand_of
from tests.unit.router_stack import router_stack
from tests.waiting import until

HI = {"prompt": "hi", "max_tokens": 8}
CHAT = {
    "model": "auto",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 8,
}
COMPLETION = {"model": "auto", "prompt": "hi", "max_tokens": 8}
MESSAGE = {
    "model": "auto",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 8,
}
RESPONSE = {"model": "auto", "input": "hi", "max_output_tokens": 16}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SHOWN = (
    "x-qarr-",
    "x-request-id",
    "x-ratelimit-",
    "retry-after",
    "content-type",
    "www-authenticate",
    "allow",
)


# It is chance whether a time is predicted, or a gauge was read, by then: these numbers have the same form as null.
NUMBERS = re.compile(
    r"_(ms|rate|usage|running|waiting|tokens|token|sequence|acceptance|trend|s)$|^(cost|expected_loss)$"
)
MAYBE = "null, or not known yet"


class ContractRequest(NamedTuple):
    """A request: its method, its path as the document has it, the path's parameters, and its body."""

    method: str
    path: str
    body: Any = None
    params: dict[str, str] = {}  # noqa: RUF012  It is never changed.
    headers: dict[str, str] = {}  # noqa: RUF012
    raw: bytes | None = None


GENERATED: dict[str, ContractRequest] = {
    "generate": ContractRequest("POST", "/generate", {**HI, "stream": False}),
    "generate, stream": ContractRequest("POST", "/generate", {**HI, "stream": True}),
    "generate, resumable": ContractRequest(
        "POST", "/generate", {**HI, "stream": True, "resumable": True}
    ),
    "generate, with bounds": ContractRequest(
        "POST",
        "/generate",
        {**HI, "stream": False, "tier": "fast", "sla": {"ttft_ms": 1}},
    ),
    "route": ContractRequest("POST", "/route", HI),
    "chat": ContractRequest("POST", "/v1/chat/completions", CHAT),
    "chat, stream": ContractRequest("POST", "/v1/chat/completions", {**CHAT, **STREAM}),
    "completion": ContractRequest("POST", "/v1/completions", COMPLETION),
    "completion, stream": ContractRequest(
        "POST", "/v1/completions", {**COMPLETION, **STREAM}
    ),
    "message": ContractRequest("POST", "/v1/messages", MESSAGE),
    "message, stream": ContractRequest(
        "POST", "/v1/messages", {**MESSAGE, "stream": True}
    ),
    "message, tokens": ContractRequest(
        "POST",
        "/v1/messages/count_tokens",
        {"model": MESSAGE["model"], "messages": MESSAGE["messages"]},
    ),
    "response": ContractRequest("POST", "/v1/responses", RESPONSE),
    "response, stream": ContractRequest(
        "POST", "/v1/responses", {**RESPONSE, "stream": True}
    ),
    "tokenize": ContractRequest("POST", "/tokenize", {"model": "auto", "prompt": "hi"}),
    "detokenize": ContractRequest(
        "POST", "/detokenize", {"model": "auto", "tokens": [1]}
    ),
    "embeddings, without an engine": ContractRequest(
        "POST", "/v1/embeddings", {"model": "m", "input": "hi"}
    ),
}
READ: dict[str, ContractRequest] = {
    "models": ContractRequest("GET", "/v1/models"),
    "model": ContractRequest("GET", "/v1/models/{id}", params={"id": "fast"}),
    "model, unknown": ContractRequest("GET", "/v1/models/{id}", params={"id": "none"}),
    "model's endpoints": ContractRequest(
        "GET", "/v1/models/{id}/endpoints", params={"id": "fast"}
    ),
    "stored response": ContractRequest(
        "GET", "/v1/responses/{id}", params={"id": "resp_1"}
    ),
    "tiers": ContractRequest("GET", "/tiers"),
    "requests": ContractRequest("GET", "/requests"),
    "requests, bad limit": ContractRequest("GET", "/requests", params={"?": "limit=0"}),
    "traces": ContractRequest("GET", "/traces"),
    "trace, unknown": ContractRequest(
        "GET", "/traces/{trace_id}", params={"trace_id": "0" * 32}
    ),
    "policy": ContractRequest("GET", "/policy"),
    "alive": ContractRequest("GET", "/healthz"),
    "ready": ContractRequest("GET", "/readyz"),
    "health": ContractRequest("GET", "/health"),
    "replica, unknown": ContractRequest(
        "POST", "/admin/replicas/{id}/drain", params={"id": "none"}
    ),
    "replica, drained": ContractRequest(
        "POST", "/admin/replicas/{id}/drain", params={"id": "balanced-0"}
    ),
    "replica, resumed": ContractRequest(
        "POST", "/admin/replicas/{id}/resume", params={"id": "balanced-0"}
    ),
    "reload": ContractRequest("POST", "/admin/reload"),
}
REFUSED: dict[str, ContractRequest] = {
    "generate, a wrong field": ContractRequest("POST", "/generate", {"prompt": ""}),
    "generate, no JSON": ContractRequest("POST", "/generate", raw=b"{"),
    "generate, too long": ContractRequest(
        "POST",
        "/generate",
        {**HI, "max_tokens": 4000, "tier": "fast", "tier_policy": "require"},
    ),
    "generate, bounds that nobody keeps": ContractRequest(
        "POST", "/generate", {**HI, "tier_policy": "require", "sla": {"ttft_ms": 0.001}}
    ),
    "generate, too large": ContractRequest(
        "POST", "/generate", raw=b'{"prompt": "' + b"x" * 9_000_000 + b'"}'
    ),
    "generate, unknown event": ContractRequest(
        "POST", "/generate", HI, headers={"last-event-id": "none.1"}
    ),
    "chat, unknown model": ContractRequest(
        "POST", "/v1/chat/completions", {**CHAT, "model": "none"}
    ),
    "chat, a wrong field": ContractRequest(
        "POST", "/v1/chat/completions", {**CHAT, "max_tokens": -1}
    ),
    "chat, a wrong header": ContractRequest(
        "POST", "/v1/chat/completions", CHAT, headers={"x-qarr-tier-policy": "must"}
    ),
    "message, a wrong field": ContractRequest(
        "POST", "/v1/messages", {**MESSAGE, "max_tokens": 0}
    ),
    "response, a wrong field": ContractRequest(
        "POST", "/v1/responses", {"model": "auto"}
    ),
    "no such endpoint": ContractRequest("GET", "/none"),
    "a method that is not allowed": ContractRequest("GET", "/generate"),
    "a foreign host": ContractRequest(
        "GET", "/tiers", headers={"host": "evil.example"}
    ),
}
BROKEN: dict[str, ContractRequest] = {
    "generate, an engine that fails": ContractRequest(
        "POST", "/generate", {**HI, "stream": False}
    ),
    "generate, a stream that breaks": ContractRequest(
        "POST", "/generate", {**HI, "stream": True}
    ),
    "chat, an engine that fails": ContractRequest("POST", "/v1/chat/completions", CHAT),
    "chat, a named tier that fails": ContractRequest(
        "POST", "/v1/chat/completions", {**CHAT, "model": "fast"}
    ),
    "chat, a stream that breaks": ContractRequest(
        "POST", "/v1/chat/completions", {**CHAT, "stream": True}
    ),
    "message, a stream that breaks": ContractRequest(
        "POST", "/v1/messages", {**MESSAGE, "stream": True}
    ),
}
KEYED: dict[str, ContractRequest] = {
    "without a key": ContractRequest(
        "POST", "/generate", {**HI, "stream": False}, headers={"authorization": ""}
    ),
    "without a key, OpenAI": ContractRequest(
        "POST", "/v1/chat/completions", CHAT, headers={"authorization": ""}
    ),
    "without a key, Anthropic": ContractRequest(
        "POST", "/v1/messages", MESSAGE, headers={"authorization": ""}
    ),
    "with a quota": ContractRequest("POST", "/generate", {**HI, "stream": False}),
    "over the quota": ContractRequest("POST", "/generate", {**HI, "stream": False}),
    "over the quota, OpenAI": ContractRequest("POST", "/v1/chat/completions", CHAT),
    "over the quota, Anthropic": ContractRequest("POST", "/v1/messages", MESSAGE),
    "not for this key": ContractRequest("POST", "/admin/reload"),
}


CALL_ID = f"{CALL_PREFIX}0"
PARAMETERS = {"type": "object", "properties": {"file_path": {"type": "string"}}}
FUNCTION = {"name": "read_file", "parameters": PARAMETERS}
FUNCTION_CALL = {"name": "read_file", "arguments": '{"file_path": "a"}'}
# What coding agents send (docs/openai.md): engines get all of it, and answer with thoughts and calls of tools.
AGENTS: dict[str, ContractRequest] = {
    "chat, an agent's turn": ContractRequest(
        "POST",
        "/v1/chat/completions",
        {
            **CHAT,
            **STREAM,
            "messages": [
                {"role": "developer", "content": "Be brief."},
                *CHAT["messages"],
            ],
            "max_tokens": 99,
            "parallel_tool_calls": True,
            "reasoning_effort": "low",
            "store": False,
            "tool_choice": "auto",
            "tools": [{"type": "function", "function": FUNCTION}],
        },
        headers={"x-session-id": "s", "x-session-affinity": "s"},
    ),
    "chat, an agent's turn, whole": ContractRequest(
        "POST",
        "/v1/chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": FUNCTION}]},
    ),
    "message, an agent's turn": ContractRequest(
        "POST",
        "/v1/messages",
        {
            **MESSAGE,
            "max_tokens": 1_000,
            "metadata": {"user_id": "u"},
            "stream": True,
            "system": [
                {
                    "type": "text",
                    "text": "Be brief.",
                    "cache_control": {"type": "ephemeral"},
                }
            ],
            # it exceeds max_tokens, as interleaved thinking allows
            "thinking": {"type": "enabled", "budget_tokens": 2_000},
            "tool_choice": {"type": "auto"},
            "tools": [{"name": "read_file", "input_schema": PARAMETERS}],
        },
        params={"?": "beta=true"},
        headers={
            "anthropic-beta": "interleaved-thinking-2025-05-14",
            "anthropic-version": "2023-06-01",
        },
    ),
    "response, an agent's turn": ContractRequest(
        "POST",
        "/v1/responses",
        {
            "client_metadata": {"session_id": "s"},
            "include": ["reasoning.encrypted_content"],
            "input": [
                {
                    "type": "message",
                    "role": "developer",
                    "content": [{"type": "input_text", "text": "Be brief."}],
                },
                {"role": "user", "content": "hi"},
            ],
            "model": "auto",
            "parallel_tool_calls": True,
            "prompt_cache_key": "s",
            "reasoning": {"summary": "auto"},
            "store": False,
            "stream": True,
            "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
        },
    ),
    "response, with the result of a custom tool": ContractRequest(
        "POST",
        "/v1/responses",
        {
            **RESPONSE,
            "input": [
                {"role": "user", "content": "hi"},
                {
                    "type": "reasoning",
                    "id": "rs_0",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {
                    "type": "custom_tool_call",
                    "call_id": CALL_ID,
                    "name": "apply_patch",
                    "input": "*** Begin Patch",
                },
                {
                    "type": "custom_tool_call_output",
                    "call_id": CALL_ID,
                    "output": "done",
                },
            ],
            "tools": [{"type": "custom", "name": "apply_patch"}],
        },
    ),
}


USAGE = ContractRequest("GET", "/usage")


class Form(NamedTuple):
    """A request and the form of its answer."""

    request: ContractRequest
    form: dict[str, Any]


# A slow machine would find time to measure speeds, and would then predict.
@patch("tiers.lifecycle.idle_speed.QUIET_S", math.inf)
async def forms(folder: Path) -> dict[str, Form]:
    """Send every request, and return the forms of the answers by name."""
    answers: dict[str, Form] = {}
    async with router_stack(folder / "whole") as stack:
        for name, request in {**GENERATED, **READ, **REFUSED}.items():
            answers[name] = Form(
                request, await form_of(stack.client, stack.url, request)
            )
        traces = (await stack.client.get(f"{stack.url}/traces")).json()["traces"]
        trace = traces[0]["trace_id"]
        request = ContractRequest(
            "GET", "/traces/{trace_id}", params={"trace_id": trace}
        )
        answers["trace"] = Form(
            request, await form_of(stack.client, stack.url, request)
        )
    async with errand_of(folder, Path("/repository")) as errand:
        for name, request in AGENTS.items():
            form = await form_of(errand.stack.client, errand.stack.url, request)
            answers[name] = Form(request, form)
    # Each of these has a router of its own, because failures open circuit breakers.
    for number, (name, request) in enumerate(BROKEN.items()):
        async with router_stack(folder / f"broken-{number}") as stack:
            for behaviour in stack.engines.values():
                behaviour.break_after = 2
            answers[name] = Form(
                request, await form_of(stack.client, stack.url, request)
            )
    key, _ = add_key(folder / "keys.json", "somebody", requests_per_minute=1)
    async with router_stack(
        folder / "keyed", {"auth": {"keys_file": str(folder / "keys.json")}}
    ) as stack:
        for name, request in KEYED.items():
            headers = {"authorization": f"Bearer {key}", **request.headers}
            sent = {header: value for header, value in headers.items() if value}
            with_key = request._replace(headers=sent)
            form = await form_of(stack.client, stack.url, with_key)
            answers[name] = Form(request, form)
    answers["usage"] = Form(USAGE, await usage_form(folder / "used"))
    return answers


async def usage_form(folder: Path) -> dict[str, Any]:
    """Return the form of /usage once it lists a request: only those with a key are counted, and written once a second."""
    key, _ = add_key(folder / "keys.json", "somebody")
    headers = {"authorization": f"Bearer {key}"}
    overrides = {
        "auth": {"keys_file": str(folder / "keys.json")},
        "budgets": {"file": str(folder / "usage.sqlite")},
    }
    async with router_stack(folder, overrides) as stack:
        client = stack.client
        generated = GENERATED["generate"]
        answer = await client.post(
            stack.url + generated.path, json=generated.body, headers=headers
        )
        assert answer.status_code == 200, answer.text

        async def usage() -> Any:
            answer = await client.get(stack.url + USAGE.path, headers=headers)
            return answer.json()["usage"]

        await until(
            usage, "GET /usage to list the usage of a key that has sent a request"
        )
        return await form_of(client, stack.url, USAGE._replace(headers=headers))


async def form_of(
    client: httpx.AsyncClient, url: str, request: ContractRequest
) -> dict[str, Any]:
    """Send a request, and return the answer's form."""
    path = request.path
    for name, value in request.params.items():
        path = f"{path}?{value}" if name == "?" else path.replace(f"{{{name}}}", value)
    content: dict[str, Any] = {}
    if request.raw is not None:
        content = {"content": request.raw}
    if request.body is not None:
        content = {"json": request.body}
    answer = await client.request(
        request.method, url + path, headers=request.headers, **content
    )
    shown = sorted(name for name in answer.headers if name.startswith(SHOWN))
    form: dict[str, Any] = {"status": answer.status_code, "headers": shown}
    media = answer.headers.get("content-type", "").partition(";")[0]
    form["media"] = media
    if media == "text/event-stream":
        event_forms = map(event_form, answer.text.strip().split("\n\n"))
        form["events"] = list(dict.fromkeys(event_forms))
    elif media.endswith("json"):
        body = answer.json()
        form["body"] = shape(body)
        if "problem" in media:
            form["type"] = body["type"]
        error = body.get("error") if isinstance(body, dict) else None
        if error:
            form["error"] = {
                name: error[name] for name in ("type", "code") if name in error
            }
    return form


def event_form(event: str) -> str:
    """Return the form of one event: its name, whether it has an id, and its data, or the data's form if it is JSON."""
    lines = dict(line.partition(": ")[::2] for line in event.split("\n"))
    data: Any = lines.get("data", "")
    if data.startswith(("{", "[{")):
        data = shape(json.loads(data))
    return json.dumps([lines.get("event", "message"), "id" in lines, data])


def shape(value: Any) -> Any:
    """Return a JSON value with each part reduced to its type, and a list to the different forms of its members."""
    if isinstance(value, dict):
        return {name: member_shape(name, value[name]) for name in sorted(value)}
    if isinstance(value, list):
        shapes = {json.dumps(shape(member)) for member in value}
        return [json.loads(member) for member in sorted(shapes)]
    names = {
        bool: "boolean",
        int: "number",
        float: "number",
        str: "string",
        type(None): "null",
    }
    return names[type(value)]


def member_shape(name: str, value: Any) -> Any:
    """Return the form of an object's member, whose name may tell that it can be null."""
    if value is None or (NUMBERS.search(name) and is_number(value)):
        return MAYBE
    return shape(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
