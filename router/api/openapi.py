"""The OpenAPI document of all endpoints, made from the models of requests and responses."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

from router.api.admin import ADAPTERS, ALL_REPLICAS, OPERATIONS, RELOAD, REPLICAS
from router.api.bodies import (
    AdapterBody,
    RemoveBody,
    ReplicaBody,
    Rules,
    adapter_allowed,
)
from router.api.generate import STREAM_ID
from router.api.generate_body import GenerateBody, allowed_values
from router.api.openai import HEADERS, OpenAIFields
from router.api.paths import CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, MOST_LISTED, RESPONSES, ErrorForm
from router.api.problems import MEDIA_TYPE

if TYPE_CHECKING:
    from tiers.lifecycle.operations import Kind

Schema = dict[str, Any]
JSON, EVENTS = "application/json", "text/event-stream"
_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_MODEL: Schema = {
    "type": ["string", "null"],
    "description": "auto, qarr, fast, balanced, precise, an adapter or an alias",
}
_EVENT: Schema = {
    "type": "object",
    "description": "One server-sent event",
    "required": ["data"],
    "properties": {"id": _TEXT, "event": _TEXT, "data": _TEXT},
}
_LIMIT: Schema = {
    "name": "limit",
    "in": "query",
    "schema": {"type": "integer", "minimum": 1, "maximum": MOST_LISTED, "default": 100},
}
_RESUME: Schema = {
    "name": "Last-Event-ID",
    "in": "header",
    "schema": _TEXT,
    "description": "Id of the last event that the caller has of a resumable stream: the answer is the rest of the stream, "
    "and the body is ignored",
}
RESUMABLE = "Of resumable streams only; with .0 appended, the Last-Event-ID from before the first event"
# Statuses besides 200, by kind of endpoint.
_ALWAYS = (400, 401, 408, 413, 421, 431, 500)
_GENERATING = (*_ALWAYS, 403, 422, 429, 502, 503, 504)
_PASSED = (*_GENERATING, 404, 501)
_READING = (401, 421, 500)
_MEANINGS = {
    400: "The request is not valid",
    401: "No key, or not one in force",
    403: "The key does not allow it, or a web page of another origin sent it",
    404: "There is no such model or stream, or nothing that serves this",
    408: "The request did not come in time",
    409: "It cannot be done to this replica, or not now",
    410: "The rest of the stream is no longer kept",
    413: "The body is too large",
    421: "The Host is a name that is not known to be this router's",
    422: "The request fits no tier, or the engine refuses it",
    429: "The key's quota is used up; see Retry-After",
    431: "Path and headers are too large",
    500: "A fault of the router",
    501: "The engine does not have a requested option",
    502: "The engine failed after its first token",
    503: "No tier that could serve this is ready or has a free slot; see Retry-After",
    504: "The engine did not finish in time",
}
_OPERATIONS: dict[Kind, str] = {
    "drain": "Give a replica no new requests",
    "resume": "Give a drained replica requests again",
    "restart": "Drain an engine that was started here, stop it and start it again",
    "recycle": "Replace an engine that was started here by a new one",
    "remove": "Drain an engine that runs elsewhere, and forget it",
}


def document(version: str, rules: Rules) -> Schema:
    """Return the document.

    Args:
        version: Of the router.
        rules: What bodies are checked against.
    """
    tokenize: Schema = {"model": _MODEL, "prompt": {}, "messages": {}}
    counted: Schema = {"model": _MODEL, "messages": {}, "system": {}, "tools": {}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "QARR",
            "version": version,
            "description": "One language model at three precisions; each prompt goes to the lowest that is good enough.",
        },
        "paths": {
            "/generate": {"post": _generate()},
            "/route": {"post": _route()},
            CHAT: {"post": _completion("Chat completion, routed", "messages")},
            COMPLETIONS: {"post": _completion("Completion, routed", "prompt")},
            MESSAGES: {
                "post": _of_anthropic(_completion("Anthropic's message, routed", "messages", ErrorForm.ANTHROPIC))
            },
            COUNT_TOKENS: {
                "post": _of_anthropic(_passed("Number of a message's tokens", counted, ErrorForm.ANTHROPIC))
            },
            **_responses(),
            EMBEDDINGS: {
                "post": _passed("Embeddings, from the engines configured for them", {"model": _TEXT, "input": {}})
            },
            "/v1/models": {"get": _get("Every known model name", _ref("ModelList"), form=ErrorForm.OPENAI)},
            "/v1/models/{id}": {"get": _get("One model name", _ref("Model"), 404, form=ErrorForm.OPENAI, of="id")},
            "/v1/models/{id}/endpoints": {
                "get": _get(
                    "The tiers behind a model name", _ref("ModelEndpoints"), 404, form=ErrorForm.OPENAI, of="id"
                )
            },
            "/tokenize": {"post": _passed("Tokens of a text or a chat", tokenize)},
            "/detokenize": {"post": _passed("Text of tokens", {"model": _MODEL, "tokens": {}})},
            **_admin(),
            "/tiers": {"get": _get("The fleet as it is now", _ref("Fleet"))},
            "/readyz": {"get": _ready()},
            "/health": {"get": _health()},
            "/healthz": {"get": _open("The router is alive", _content(_OBJECT))},
            **_observed(),
            "/openapi.json": {"get": _get("This document", _OBJECT)},
            "/metrics": {"get": _get("Metrics in Prometheus' text format", _TEXT, media_type="text/plain")},
        },
        "components": {
            "schemas": _schemas(rules),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "'qarr keys add' makes one"},
                "anthropic_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same"},
            },
        },
        "security": [{"key": []}, {}],
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(schema: Schema, media_type: str = JSON) -> Schema:
    return {media_type: {"schema": schema}}


def _errors(statuses: tuple[int, ...], form: ErrorForm = ErrorForm.PROBLEM) -> Schema:
    if form is ErrorForm.PROBLEM:
        content = _content(_ref("Problem"), MEDIA_TYPE)
    elif form is ErrorForm.ANTHROPIC:
        content = _content(_ref("AnthropicError"))
    else:  # vLLM's own refusals are passed on unchanged
        content = _content({"anyOf": [_ref("OpenAIError"), _OBJECT]})
    return {str(status): {"description": _MEANINGS[status], "content": content} for status in sorted(statuses)}


def _body(schema: Schema) -> Schema:
    return {"required": True, "content": _content(schema)}


def _generate() -> Schema:
    return {
        "summary": "Generate, streamed or as one object; or resume a stream",
        "parameters": [_RESUME],
        "requestBody": _body(_ref("GenerateBody")),
        "responses": {
            "200": {
                "description": "Text events and one done or error event; with stream false, one object",
                "headers": {**_answer_headers(), STREAM_ID: {"description": RESUMABLE, "schema": _TEXT}},
                "content": {**_content(_EVENT, EVENTS), **_content(_ref("Answer"))},
            },
            "204": {"description": "The caller has every event of the stream already"},
            **_errors((*_GENERATING, 404, 410)),
        },
    }


def _route() -> Schema:
    description = "The decision; tier is null if it is a refusal"
    return {
        "summary": "The decision, without generating",
        "requestBody": _body(_ref("GenerateBody")),
        "responses": {
            "200": {"description": description, "content": _content(_ref("Decision"))},
            **_errors((*_ALWAYS, 403, 429)),
        },
    }


def _completion(summary: str, field: str, form: ErrorForm = ErrorForm.OPENAI) -> Schema:
    fields: Schema = {
        "model": _MODEL,
        "stream": {"type": ["boolean", "null"]},
        "qarr": _ref("RoutingFields"),
        "provider": {"anyOf": [_ref("ProviderBody"), {"type": "null"}]},
        field: {"description": "As in vLLM"},
    }
    operation = _passed(summary, fields, form)
    operation["requestBody"]["content"][JSON]["schema"]["description"] = (
        "Whatever vLLM accepts; everything but model, qarr and provider is passed on unchanged"
    )
    operation["parameters"] = [
        {
            "name": name.decode(),
            "in": "header",
            "schema": _header_schema(path),
            "description": f"As qarr.{'.'.join(path)}",
        }
        for name, path in HEADERS.items()
    ]
    operation["responses"]["200"]["headers"] = _answer_headers()
    operation["responses"]["200"]["content"] |= _content(_EVENT, EVENTS)
    return operation


def _of_anthropic(operation: Schema) -> Schema:
    """Return an operation that takes a key in either header."""
    return {**operation, "security": [{"key": []}, {"anthropic_key": []}, {}]}


def _responses() -> dict[str, Schema]:
    """Return the operations of OpenAI's Responses API. Those on a response by its id never find one."""
    lost = {
        "summary": "There is none: responses are not stored",
        "parameters": [_parameter("id")],
        "responses": _errors((401, 403, 404, 421, 500, 503), ErrorForm.RESPONSES),
    }
    return {
        RESPONSES: {"post": _completion("OpenAI's response, routed", "input", ErrorForm.RESPONSES)},
        f"{RESPONSES}/{{id}}": {"get": lost, "delete": lost},
        f"{RESPONSES}/{{id}}/cancel": {"post": lost},
    }


def _passed(summary: str, properties: Schema, form: ErrorForm = ErrorForm.OPENAI) -> Schema:
    return {
        "summary": summary,
        "requestBody": _body({"type": "object", "properties": properties}),
        "responses": {
            "200": {"description": "The engine's own answer", "content": _content(_OBJECT)},
            **_errors(_PASSED, form),
        },
    }


def _get(
    summary: str,
    schema: Schema,
    *errors: int,
    form: ErrorForm = ErrorForm.PROBLEM,
    of: str = "",
    media_type: str = JSON,
) -> Schema:
    """Return an operation that reads.

    Args:
        summary: What it returns.
        schema: Of its answer.
        errors: Statuses besides those of every such operation.
        form: Of errors.
        of: The path's parameter; empty: none.
        media_type: Of its answer.
    """
    return {
        "summary": summary,
        **({"parameters": [_parameter(of)]} if of else {}),
        "responses": {
            "200": {"description": summary, "content": _content(schema, media_type)},
            **_errors((*_READING, *errors), form),
        },
    }


def _open(summary: str, content: Schema, **others: Schema) -> Schema:
    """Return an operation that needs no key."""
    answered = {"description": summary, "content": content}
    return {"summary": summary, "security": [], "responses": {"200": answered, **others}}


def _ready() -> Schema:
    content = _content(_ref("Readiness"))
    return _open(
        "At least one tier serves", content, **{"503": {"description": "No tier serves yet", "content": content}}
    )


def _health() -> Schema:
    content = _content(_ref("Health"))
    unhealthy = {"description": "No tier serves", "content": content}
    return _open("Requests are answered; what is wrong all the same", content, **{"503": unhealthy})


def _day(name: str) -> Schema:
    text = "A UTC day, included; by default no bound"
    return {"name": name, "in": "query", "description": text, "schema": {"type": "string", "format": "date"}}


def _observed() -> dict[str, Schema]:
    """Return the operations that show requests; each router shows its own."""
    requests = _get("The last finished requests, newest first", _ref("RequestList"), 400)
    traces = _get("The kept traces, newest first", _ref("TraceList"), 400)
    for listed in (requests, traces):
        listed["parameters"] = [_LIMIT]
    usage = _get("How far budgets are used, and what keys used on each day", _ref("UsageReport"), 400)
    usage["parameters"] = [_day("from"), _day("to")]
    unchanged = {"304": {"description": "The browser has it already"}}
    page = "The page to watch this router and to try prompts"
    live = "Records of requests, and the fleet once a second"
    return {
        "/": {"get": _open(page, _content(_TEXT, "text/html"), **unchanged, **_errors((404,)))},
        "/live": {"get": _get(live, _EVENT, media_type=EVENTS)},
        "/requests": {"get": requests},
        "/traces": {"get": traces},
        "/traces/{trace_id}": {"get": _get("One trace, with its spans", _ref("Trace"), 404, of="trace_id")},
        "/policy": {"get": _get("The parameters of decisions", _ref("Policy"))},
        "/usage": {"get": usage},
    }


def _admin() -> dict[str, Schema]:
    """Return the operators' operations; without keys they are answered on loopback only."""
    begun = {"description": "It has begun; the operation shows its progress", "content": _content(_ref("Operation"))}
    responses = {"202": begun, **_errors((401, 403, 404, 409, 413, 500, 503))}
    loaded = {"description": "At least one engine did it", "content": _content(_ref("AdapterResults"))}
    taken = {"description": "All of it is in force", "content": _content(_ref("ReloadAnswer"))}
    added = {"description": "It is watched from now on", "content": _content(_ref("AddedReplica"))}
    named, remove = [_parameter("id")], {"requestBody": {**_body(_ref("RemoveBody")), "required": False}}
    invalid = {"responses": {**responses, **_errors((400,))}}
    return {
        **{
            f"{REPLICAS}/{kind}": {"post": {"summary": meaning, "parameters": named, "responses": responses}}
            for kind, meaning in _OPERATIONS.items()
        },
        f"{REPLICAS}/remove": {"post": {"summary": _OPERATIONS["remove"], "parameters": named, **remove, **invalid}},
        ALL_REPLICAS: {
            "post": {
                "summary": "Add an engine that runs elsewhere; it gets requests once it is ready",
                "requestBody": _body(_ref("ReplicaBody")),
                "responses": {"201": added, **_errors((400, 401, 403, 409, 413, 500, 503))},
            }
        },
        OPERATIONS: {"get": _get("Operations, the latest last", _ref("OperationList"), 403, 404)},
        ADAPTERS: {
            "post": {
                "summary": "Load a LoRA adapter into running engines",
                "requestBody": _body(_ref("AdapterBody")),
                "responses": {"200": loaded, **_errors((400, 401, 403, 404, 409, 413, 500, 503))},
            }
        },
        ADAPTERS + "/{name}": {
            "delete": {
                "summary": "Unload a LoRA adapter from all engines that have it",
                "parameters": [_parameter("name")],
                "responses": {"200": loaded, **_errors((401, 403, 404, 409, 413, 500, 503))},
            }
        },
        RELOAD: {
            "post": {
                "summary": "Read the settings again, and take over what has changed: all of it, or nothing",
                "responses": {"200": taken, **_errors((401, 403, 409, 500, 503))},
            }
        },
        OPERATIONS + "/{id}": {"get": _get("One operation", _ref("Operation"), 403, 404, of="id")},
    }


def _parameter(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _answer_headers() -> Schema:
    meanings = {
        "x-qarr-tier": "The tier that serves it; absent if the overflow does",
        "x-qarr-overflow": "The server outside of the fleet that answers, since every tier was full; absent otherwise",
        "x-qarr-precision": "Of the engine that answers, by its checkpoint: fp8; or fp8 (stated), or unknown",
        "x-qarr-reason": "Why this tier",
        "x-qarr-degraded": "What is not expected to be met: quality, latency, or unmeasured (not known); absent if nothing",
        "x-qarr-truncated": "What was cut of the prompt, where the request asks for it; absent if nothing",
        "x-qarr-over-budget": "The budget that is used up, so that only the cheapest tier serves; absent if none is",
        "x-qarr-checkpoint": "Digest of the weights, if known",
        "x-qarr-trace-id": "The request's trace",
        "x-request-id": "The caller's, or a new one",
    }
    return {name: {"description": text, "schema": _TEXT} for name, text in meanings.items()}


def _schemas(rules: Rules) -> Schema:
    """Return the schemas of all bodies, with the bounds of one request and the tiers."""
    limits, body = rules.limits, deepcopy(_models()["GenerateBody"])
    options = deepcopy(_models()["RoutingFields"])
    for schema in (body, options):
        schema["properties"]["tier"]["enum"] = ["auto", *rules.tiers]
    for field, allowed in allowed_values(rules).items():
        if field in body["properties"]:
            body["properties"][field]["description"] = allowed
    for field in ("prompt", "system_prompt"):
        _unless_null(body["properties"][field])["maxLength"] = limits.max_prompt_chars
    _unless_null(body["properties"]["max_tokens"])["maximum"] = limits.max_tokens
    body["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
    adapter = deepcopy(_models()["AdapterBody"])
    for field, allowed in adapter_allowed(rules).items():
        adapter["properties"][field]["description"] = allowed
    return {**_models(), "GenerateBody": body, "RoutingFields": options, "AdapterBody": adapter}


@cache
def _models() -> Schema:
    """Return the schemas of all models by name. The first request for the document makes them."""
    from router.api.responses import MODELS  # noqa: PLC0415  takes 50 ms, and few ask

    bodies = (GenerateBody, AdapterBody, ReplicaBody, RemoveBody, OpenAIFields)
    checked = [(body, "validation") for body in bodies]
    models: Any = [*checked, *((model, "serialization") for model in MODELS)]
    _, made = models_json_schema(models, ref_template="#/components/schemas/{model}")
    found: Schema = made["$defs"]
    return {"RoutingFields" if name == OpenAIFields.__name__ else name: schema for name, schema in found.items()}


def _header_schema(path: tuple[str, ...]) -> Schema:
    """Return a header's schema: that of the body's field that it stands for."""
    field = _models()["SlaBody" if path[0] == "sla" else "RoutingFields"]["properties"][path[-1]]
    return {name: value for name, value in _unless_null(field).items() if name not in {"default", "title"}}


def _unless_null(schema: Schema) -> Schema:
    """Return a schema without its null alternative."""
    found: Schema = next((part for part in schema.get("anyOf", ()) if part["type"] != "null"), schema)
    return found
