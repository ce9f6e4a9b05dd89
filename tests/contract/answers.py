"""Asks a running router for one answer of each kind, and reduces each to its form: status, headers, fields, events.

Numbers, texts and ids are reduced to their types, so neither time nor chance is in a form.
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


# Whether a time is predicted or a gauge was read yet is chance, so these are not told from null.
NUMBERS = re.compile(
    r"_(ms|rate|usage|running|waiting|tokens|token|sequence|acceptance|trend|s)$|^(cost|expected_loss)$"
)
MAYBE = "null, or not known yet"


class Asked(NamedTuple):
    """A request: its method, the path as the document has it, what fills it in, and its body."""

    method: str
    path: str
    body: Any = None
    params: dict[str, str] = {}  # noqa: RUF012  never changed
    headers: dict[str, str] = {}  # noqa: RUF012
    raw: bytes | None = None


GENERATED: dict[str, Asked] = {
    "generate": Asked("POST", "/generate", {**HI, "stream": False}),
    "generate, stream": Asked("POST", "/generate", {**HI, "stream": True}),
    "generate, resumable": Asked(
        "POST", "/generate", {**HI, "stream": True, "resumable": True}
    ),
    "generate, with bounds": Asked(
        "POST",
        "/generate",
        {**HI, "stream": False, "tier": "fast", "sla": {"ttft_ms": 1}},
    ),
    "route": Asked("POST", "/route", HI),
    "chat": Asked("POST", "/v1/chat/completions", CHAT),
    "chat, stream": Asked("POST", "/v1/chat/completions", {**CHAT, **STREAM}),
    "completion": Asked("POST", "/v1/completions", COMPLETION),
    "completion, stream": Asked("POST", "/v1/completions", {**COMPLETION, **STREAM}),
    "message": Asked("POST", "/v1/messages", MESSAGE),
    "message, stream": Asked("POST", "/v1/messages", {**MESSAGE, "stream": True}),
    "message, tokens": Asked(
        "POST",
        "/v1/messages/count_tokens",
        {k: MESSAGE[k] for k in ("model", "messages")},
    ),
    "response": Asked("POST", "/v1/responses", RESPONSE),
    "response, stream": Asked("POST", "/v1/responses", {**RESPONSE, "stream": True}),
    "tokenize": Asked("POST", "/tokenize", {"model": "auto", "prompt": "hi"}),
    "detokenize": Asked("POST", "/detokenize", {"model": "auto", "tokens": [1]}),
    "embeddings, without an engine": Asked(
        "POST", "/v1/embeddings", {"model": "m", "input": "hi"}
    ),
}
READ: dict[str, Asked] = {
    "models": Asked("GET", "/v1/models"),
    "model": Asked("GET", "/v1/models/{id}", params={"id": "fast"}),
    "model, unknown": Asked("GET", "/v1/models/{id}", params={"id": "none"}),
    "model's endpoints": Asked(
        "GET", "/v1/models/{id}/endpoints", params={"id": "fast"}
    ),
    "stored response": Asked("GET", "/v1/responses/{id}", params={"id": "resp_1"}),
    "tiers": Asked("GET", "/tiers"),
    "requests": Asked("GET", "/requests"),
    "requests, bad limit": Asked("GET", "/requests", params={"?": "limit=0"}),
    "traces": Asked("GET", "/traces"),
    "trace, unknown": Asked("GET", "/traces/{trace_id}", params={"trace_id": "0" * 32}),
    "policy": Asked("GET", "/policy"),
    "alive": Asked("GET", "/healthz"),
    "ready": Asked("GET", "/readyz"),
    "health": Asked("GET", "/health"),
    "replica, unknown": Asked(
        "POST", "/admin/replicas/{id}/drain", params={"id": "none"}
    ),
    "replica, drained": Asked(
        "POST", "/admin/replicas/{id}/drain", params={"id": "balanced-0"}
    ),
    "replica, resumed": Asked(
        "POST", "/admin/replicas/{id}/resume", params={"id": "balanced-0"}
    ),
    "reload": Asked("POST", "/admin/reload"),
}
REFUSED: dict[str, Asked] = {
    "generate, a wrong field": Asked("POST", "/generate", {"prompt": ""}),
    "generate, no JSON": Asked("POST", "/generate", raw=b"{"),
    "generate, too long": Asked(
        "POST",
        "/generate",
        {**HI, "max_tokens": 4000, "tier": "fast", "tier_policy": "require"},
    ),
    "generate, bounds that nobody keeps": Asked(
        "POST", "/generate", {**HI, "tier_policy": "require", "sla": {"ttft_ms": 0.001}}
    ),
    "generate, too large": Asked(
        "POST", "/generate", raw=b'{"prompt": "' + b"x" * 1_100_000 + b'"}'
    ),
    "generate, unknown event": Asked(
        "POST", "/generate", HI, headers={"last-event-id": "none.1"}
    ),
    "chat, unknown model": Asked(
        "POST", "/v1/chat/completions", {**CHAT, "model": "none"}
    ),
    "chat, a wrong field": Asked(
        "POST", "/v1/chat/completions", {**CHAT, "max_tokens": -1}
    ),
    "chat, a wrong header": Asked(
        "POST", "/v1/chat/completions", CHAT, headers={"x-qarr-tier-policy": "must"}
    ),
    "message, a wrong field": Asked(
        "POST", "/v1/messages", {**MESSAGE, "max_tokens": 0}
    ),
    "response, a wrong field": Asked("POST", "/v1/responses", {"model": "auto"}),
    "no such endpoint": Asked("GET", "/none"),
    "a method that is not allowed": Asked("GET", "/generate"),
    "a foreign host": Asked("GET", "/tiers", headers={"host": "evil.example"}),
}
BROKEN: dict[str, Asked] = {
    "generate, an engine that fails": Asked(
        "POST", "/generate", {**HI, "stream": False}
    ),
    "generate, a stream that breaks": Asked(
        "POST", "/generate", {**HI, "stream": True}
    ),
    "chat, an engine that fails": Asked("POST", "/v1/chat/completions", CHAT),
    "chat, a named tier that fails": Asked(
        "POST", "/v1/chat/completions", {**CHAT, "model": "fast"}
    ),
    "chat, a stream that breaks": Asked(
        "POST", "/v1/chat/completions", {**CHAT, "stream": True}
    ),
    "message, a stream that breaks": Asked(
        "POST", "/v1/messages", {**MESSAGE, "stream": True}
    ),
}
KEYED: dict[str, Asked] = {
    "without a key": Asked(
        "POST", "/generate", {**HI, "stream": False}, headers={"authorization": ""}
    ),
    "without a key, OpenAI": Asked(
        "POST", "/v1/chat/completions", CHAT, headers={"authorization": ""}
    ),
    "without a key, Anthropic": Asked(
        "POST", "/v1/messages", MESSAGE, headers={"authorization": ""}
    ),
    "with a quota": Asked("POST", "/generate", {**HI, "stream": False}),
    "over the quota": Asked("POST", "/generate", {**HI, "stream": False}),
    "over the quota, OpenAI": Asked("POST", "/v1/chat/completions", CHAT),
    "over the quota, Anthropic": Asked("POST", "/v1/messages", MESSAGE),
    "not for this key": Asked("POST", "/admin/reload"),
}


USAGE = Asked("GET", "/usage")


class Form(NamedTuple):
    """An answer's form, and what it is the answer to."""

    asked: Asked
    form: dict[str, Any]


# a slow machine measures speeds meanwhile, and then predicts
@patch("tiers.lifecycle.idle_speed.QUIET_S", math.inf)
async def forms(folder: Path) -> dict[str, Form]:
    found: dict[str, Form] = {}
    async with router_stack(folder / "whole") as stack:
        for name, asked in {**GENERATED, **READ, **REFUSED}.items():
            found[name] = Form(asked, await form_of(stack.client, stack.url, asked))
        trace = (await stack.client.get(f"{stack.url}/traces")).json()["traces"][0][
            "trace_id"
        ]
        asked = Asked("GET", "/traces/{trace_id}", params={"trace_id": trace})
        found["trace"] = Form(asked, await form_of(stack.client, stack.url, asked))
    # each alone: failures open circuit breakers
    for number, (name, asked) in enumerate(BROKEN.items()):
        async with router_stack(folder / f"broken-{number}") as stack:
            for behaviour in stack.engines.values():
                behaviour.break_after = 2
            found[name] = Form(asked, await form_of(stack.client, stack.url, asked))
    key, _ = add_key(folder / "keys.json", "somebody", requests_per_minute=1)
    async with router_stack(
        folder / "keyed", {"auth": {"keys_file": str(folder / "keys.json")}}
    ) as stack:
        for name, asked in KEYED.items():
            given = {"authorization": f"Bearer {key}", **asked.headers}
            headers = {header: value for header, value in given.items() if value}
            found[name] = Form(
                asked,
                await form_of(stack.client, stack.url, asked._replace(headers=headers)),
            )
    found["usage"] = Form(USAGE, await usage_form(folder / "used"))
    return found


async def usage_form(folder: Path) -> dict[str, Any]:
    """Return the form of usage once there is some: only requests with a key are counted, and written once a second."""
    key, _ = add_key(folder / "keys.json", "somebody")
    headers = {"authorization": f"Bearer {key}"}
    overrides = {
        "auth": {"keys_file": str(folder / "keys.json")},
        "budgets": {"file": str(folder / "usage.sqlite")},
    }
    async with router_stack(folder, overrides) as stack:
        client, generated = stack.client, GENERATED["generate"]
        answer = await client.post(
            stack.url + generated.path, json=generated.body, headers=headers
        )
        assert answer.status_code == 200, answer.text

        async def usage() -> Any:
            return (await client.get(stack.url + USAGE.path, headers=headers)).json()[
                "usage"
            ]

        await until(
            usage, "GET /usage to list the usage of a key that has sent a request"
        )
        return await form_of(client, stack.url, USAGE._replace(headers=headers))


async def form_of(client: httpx.AsyncClient, url: str, asked: Asked) -> dict[str, Any]:
    """Ask, and return the answer's form."""
    path = asked.path
    for name, value in asked.params.items():
        path = f"{path}?{value}" if name == "?" else path.replace(f"{{{name}}}", value)
    sent: dict[str, Any] = {"content": asked.raw} if asked.raw is not None else {}
    if asked.body is not None:
        sent = {"json": asked.body}
    answer = await client.request(
        asked.method, url + path, headers=asked.headers, **sent
    )
    shown = sorted(name for name in answer.headers if name.startswith(SHOWN))
    form: dict[str, Any] = {"status": answer.status_code, "headers": shown}
    form["media"] = kind = answer.headers.get("content-type", "").partition(";")[0]
    if kind == "text/event-stream":
        form["events"] = list(
            dict.fromkeys(
                event_form(event) for event in answer.text.strip().split("\n\n")
            )
        )
    elif kind.endswith("json"):
        form["body"] = shape(answer.json())
        form |= {"type": answer.json()["type"]} if "problem" in kind else {}
        error = answer.json().get("error") if isinstance(answer.json(), dict) else None
        form |= (
            {
                "error": {
                    name: error.get(name) for name in ("type", "code") if name in error
                }
            }
            if error
            else {}
        )
    return form


def event_form(event: str) -> str:
    """Return the form of one event: its name, whether it has an id, and its data's form or, if it is no JSON, the data."""
    lines = dict(line.partition(": ")[::2] for line in event.split("\n"))
    data = lines.get("data", "")
    told = shape(json.loads(data)) if data.startswith(("{", "[{")) else data
    return json.dumps([lines.get("event", "message"), "id" in lines, told])


def shape(value: Any) -> Any:
    """Return a JSON value with each part reduced to its type; a list to the forms of its members."""
    if isinstance(value, dict):
        return {
            name: MAYBE
            if value[name] is None or (NUMBERS.search(name) and is_number(value[name]))
            else shape(value[name])
            for name in sorted(value)
        }
    if isinstance(value, list):
        return [
            json.loads(one)
            for one in sorted({json.dumps(shape(each)) for each in value})
        ]
    names = {
        bool: "boolean",
        int: "number",
        float: "number",
        str: "string",
        type(None): "null",
    }
    return names[type(value)]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
